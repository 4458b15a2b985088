"""All layouts of one operator as columns (one sharding rule per mesh axis), with their costs.

`operator_layouts_of` lists the layouts, `operator_costs` has what a layout costs by itself: computation
(`times_of`), collective calls inside the operator (`collective_times`) and bytes. `edge_costs` are
redistributions of an activation between the placements of two operators. docs/concepts/pareto-search.md,
section "Costs".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np

from shardwise.cost.layouts.context import CostColumns, CostContext
from shardwise.cost.layouts.redistribute import (
    Integers,
    Values,
    gradient_placements,
    group_sizes,
    local_elements,
    redistribute_s,
    redistribution_elements,
    value_placements,
)
from shardwise.cost.operators import (
    fused_attention_s,
    matmul_times,
    moved_s,
    saved_score_bytes,
    unfused_attention_s,
    written_of,
)
from shardwise.equations import compute
from shardwise.errors import InternalError
from shardwise.graph import (
    REPLICATE,
    CollectiveCall,
    KernelWork,
    OpNode,
    SavedTensors,
    ShardingRule,
    allows,
    local_sizes,
    rules_of,
    work_of,
)

# Layouts of an operator


@dataclass(frozen=True, slots=True, eq=False)
class OperatorLayouts:
    """The K layouts of an operator.

    `rules` has one rule per axis and layout, `sizes` the elements (K) of each dim on the rank with most.
    `inputs`, `parameters` and `output` are placements (K, axes).
    """

    op: OpNode
    rules: tuple[tuple[ShardingRule, ...], ...]
    sizes: Mapping[str, Values]
    inputs: tuple[Integers, ...]
    parameters: tuple[Integers, ...]
    output: Integers

    def __len__(self) -> int:
        return len(self.rules)

    def extent(self, dims: tuple[str, ...]) -> Values:
        """Elements (K) of a tensor with these dims on a rank."""
        return np.asarray(prod((self.sizes[dim] for dim in dims), start=np.ones(len(self.rules))))

    @property
    def share(self) -> Values:
        """The share (K) of all iterations that one rank computes."""
        return np.asarray(self.extent(tuple(self.op.dims)) / float(prod(self.op.dims.values())))


def every_rule(op: OpNode, ranks: tuple[int, ...]) -> tuple[tuple[ShardingRule, ...], ...]:
    """Every legal combination of one rule of `op` per axis; along an axis of one rank, only the plain
    rule.
    """
    rules = rules_of(op)
    plain = [rule for rule in rules if rule.split is None and rule.output == REPLICATE]
    among = [rules if size > 1 else plain[:1] for size in ranks]
    found = tuple(combined for combined in product(*among) if allows(op, combined, ranks))
    if not found:
        raise InternalError(f"operator {op.name} has no layout")
    return found


def operator_layouts_of(
    op: OpNode, ranks: tuple[int, ...], found: tuple[tuple[ShardingRule, ...], ...]
) -> OperatorLayouts:
    """The layouts of `op` with these rules per axis."""
    sizes = [local_sizes(op, combined, ranks) for combined in found]

    def placed(of: list[list[int]]) -> Integers:
        return np.array(of, dtype=np.int64)

    return OperatorLayouts(
        op=op,
        rules=found,
        sizes={dim: np.array([each[dim] for each in sizes], dtype=np.float64) for dim in op.dims},
        inputs=tuple(
            placed([[rule.inputs[slot] for rule in combined] for combined in found])
            for slot in range(len(op.inputs))
        ),
        parameters=tuple(
            placed([[rule.parameters[slot] for rule in combined] for combined in found])
            for slot in range(len(op.parameters))
        ),
        output=placed([[rule.output for rule in combined] for combined in found]),
    )


# Collective calls inside operators


@dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """Seconds (K) of collective calls inside an operator, forward and backward."""

    forward_s: Values
    backward_s: Values


def collective_times(context: CostContext, choices: OperatorLayouts) -> CollectiveTimes:
    """Collective calls of each layout; axes with the same rule form one group."""
    forward_s, backward_s = np.zeros(len(choices)), np.zeros(len(choices))
    rules_by_name = {rule.name: rule for rules in choices.rules for rule in rules if rule.collectives}
    for rule in rules_by_name.values():
        follows = np.array([[own.name == rule.name for own in rules] for rules in choices.rules])
        rows = np.flatnonzero(follows.any(axis=1))
        sizes = group_sizes(context.mesh, follows[rows])
        for call in rule.collectives:
            elements = call.copies * choices.extent(call.dims)[rows]
            nbytes = elements * (call.element_bytes or context.activation_bytes)
            once_s = _once_s(context, call, nbytes, sizes)
            forward_s[rows] += call.forward_calls * once_s
            backward_s[rows] += call.backward_calls * once_s
    return CollectiveTimes(forward_s, backward_s)


def _once_s(context: CostContext, call: CollectiveCall, nbytes: Values, sizes: tuple[Values, ...]) -> Values:
    if call.collective == "all_reduce":
        return np.asarray(context.fabric.all_reduce_s(nbytes, sizes))
    if call.collective == "all_gather":
        return np.asarray(context.fabric.all_gather_s(nbytes, sizes))
    if call.collective == "reduce_scatter":
        return np.asarray(context.fabric.reduce_scatter_s(nbytes, sizes))
    outermost = np.zeros(len(nbytes), dtype=np.int64)
    for tier, members in enumerate(sizes):
        outermost = np.where(members > 1, tier, outermost)
    return np.asarray(context.fabric.send_s(2.0 * nbytes, outermost))


# Computation

FUSED_KINDS = ("embedding", "cross_entropy")
"""Memory-bound kinds that software fuses completely; their passes are counted one by one."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Whether the left and the right operand of an operator's products need gradients."""

    left: bool
    right: bool

    @property
    def any(self) -> bool:
        return self.left or self.right


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds (K) forward and backward."""

    forward_s: Values
    backward_s: Values


def times_of(context: CostContext, choices: OperatorLayouts, needs: Needs) -> Times:
    """Seconds of computation of the operator, at least the host's dispatch time.

    The host launches one kernel per pass, and one more for the gradients of parameters.
    """
    op = choices.op
    zero = np.zeros(len(choices))
    works = work_of(op)
    if op.flop is not None or op.moved_bytes is not None:
        times = _given(context, choices, works, needs)
    else:
        parts = [_work_times(context, choices, work, needs) for work in works]
        times = Times(sum((t.forward_s for t in parts), zero), sum((t.backward_s for t in parts), zero))
    dispatch_s = context.profile.dispatch_s
    kernels = 1.0 + (1.0 if op.parameters else 0.0)
    backward_s = times.backward_s if needs.any else zero
    return Times(_paced(times.forward_s, dispatch_s), _paced(backward_s, kernels * dispatch_s))


def _paced(device_s: Values, host_s: float) -> Values:
    """Seconds of a pass: the device's, at least the host's where there is computation."""
    return np.where(device_s > 0.0, np.maximum(device_s, host_s), 0.0)


def _work_times(context: CostContext, choices: OperatorLayouts, work: KernelWork, needs: Needs) -> Times:
    if work.kind == "matmul":
        return _matmul(context, choices, work, needs)
    if work.kind == "attention":
        return _attention(context, choices, work)
    return _memory(context, choices, work)


def _steps(choices: OperatorLayouts, work: KernelWork) -> Values:
    return choices.extent(work.serial)


def _extent(choices: OperatorLayouts, work: KernelWork, dims: tuple[str, ...]) -> Values:
    """The product of the dims that are not serial."""
    return choices.extent(tuple(dim for dim in dims if dim not in work.serial))


def _matmul(context: CostContext, choices: OperatorLayouts, work: KernelWork, needs: Needs) -> Times:
    m, n, k = (_extent(choices, work, dims) for dims in (work.m, work.n, work.k))
    batch = _extent(choices, work, work.batch) if work.batch else None
    parts = _sum_parts(context, k, n, m) if work.splits_sums else 1.0
    written = written_of(context.profile, context.machine.recipe)
    times = matmul_times(context.machine, m, n, k, batch=batch, parts=parts, written=written)
    steps = _steps(choices, work)
    backward_s = float(needs.left) * times.input_s + float(needs.right) * times.weight_s
    return Times(steps * times.forward_s, steps * backward_s)


SPLIT_SUM = 1024.0
"""Fewest summands per part of a split sum (split-k kernels); smaller parts cost more than they save."""


def _sum_parts(context: CostContext, rows: Values, columns: Values, inner: Values) -> Any:
    curve = context.machine.efficiency.matmul
    return compute.sum_parts(
        rows, columns, inner, tile_m=curve.tile_m, tile_n=curve.tile_n, units=curve.units, least=SPLIT_SUM
    )


def _memory(context: CostContext, choices: OperatorLayouts, work: KernelWork) -> Times:
    passes = 1.0 if choices.op.kind in FUSED_KINDS else context.profile.pointwise_passes
    forward: Any = np.zeros(len(choices))
    backward: Any = np.zeros(len(choices))
    for moved in work.moved:
        element_bytes = moved.element_bytes or context.activation_bytes
        nbytes = _extent(choices, work, moved.dims) * element_bytes * passes
        forward = forward + moved.forward * nbytes
        backward = backward + moved.backward * nbytes
    steps = _steps(choices, work)
    forward_s, backward_s = (
        np.where(nbytes > 0.0, steps * moved_s(context.machine, nbytes), 0.0)
        for nbytes in (forward, backward)
    )
    return Times(forward_s, backward_s)


def _attention(context: CostContext, choices: OperatorLayouts, work: KernelWork) -> Times:
    if context.attention is None:
        return _unfused(context, choices, work)
    queries = choices.extent(work.batch) * choices.extent(work.m)
    keys, width, values = (choices.extent(dims) for dims in (work.n, work.k, work.v))
    window = keys if work.window is None else np.minimum(float(work.window), keys)
    met = compute.keys_per_query(keys, window, 0.5 if work.causal else 1.0)
    flop = compute.attention_work(queries, met, 1.0, width, values)
    op = choices.op
    elements = sum((choices.extent(operand.dims) for operand in op.inputs), choices.extent(op.output))
    nbytes = elements * context.activation_bytes
    return Times(*fused_attention_s(context.machine, context.attention, flop, nbytes, keys))


def scores_of(choices: OperatorLayouts, work: KernelWork) -> Values:
    """Scores (K) of unfused attention on a rank."""
    return choices.extent((*work.batch, *work.m, *work.n))


def _unfused(context: CostContext, choices: OperatorLayouts, work: KernelWork) -> Times:
    queries, batch = choices.extent(work.m), choices.extent(work.batch)
    keys, width, values = (choices.extent(dims) for dims in (work.n, work.k, work.v))
    return Times(
        *unfused_attention_s(context.machine, context.profile, batch * queries, queries, keys, width, values)
    )


def _given(
    context: CostContext, choices: OperatorLayouts, works: tuple[KernelWork, ...], needs: Needs
) -> Times:
    """Roofline of the flop and bytes that the graph's file gives, a share of them on each rank.

    The backward pass takes the forward time for each operand that needs a gradient.
    """
    op, machine = choices.op, context.machine
    is_product = any(work.kind == "matmul" for work in works)
    speed = machine.matmul_flop_per_s if is_product else machine.other_flop_per_s
    forward_s = machine.efficiency.launch_s + compute.roofline_s(
        choices.share * (op.flop or 0.0),
        choices.share * (op.moved_bytes or 0.0),
        speed * machine.efficiency.matmul.peak_fraction,
        context.stream_bytes_per_s,
    )
    return Times(forward_s, (float(needs.left) + float(needs.right)) * forward_s)


# Costs of an operator by itself


@dataclass(frozen=True, slots=True, eq=False)
class OperatorCosts:
    """Costs of an operator's layouts, (K) each.

    `times` and `collective_times` are seconds. `saved_bytes` are own tensors saved for the backward pass,
    `working_bytes` temporaries. `data_bytes` are the graph inputs that it reads, `saved_data_bytes` those
    that its backward pass reads. `overlap` is the share of its input redistributions that can overlap with
    its computation (forward, backward).
    """

    choices: OperatorLayouts
    needs: Needs
    saved: SavedTensors
    times: Times
    collective_times: CollectiveTimes
    saved_bytes: Values
    data_bytes: Values
    saved_data_bytes: Values
    working_bytes: Values
    overlap: tuple[float, float]

    def __len__(self) -> int:
        return len(self.choices)


def operator_costs(
    context: CostContext,
    choices: OperatorLayouts,
    needs: Needs,
    saved: SavedTensors,
    data_slots: tuple[int, ...],
) -> OperatorCosts:
    """Costs of an operator's layouts by themselves; `data_slots` are inputs that the graph is given."""
    op = choices.op
    works = work_of(op)
    moved = collective_times(context, choices)
    if not needs.any:
        moved = CollectiveTimes(moved.forward_s, np.zeros(len(choices)))
    profile = context.profile
    is_attention = any(work.kind == "attention" for work in works)
    forward_overlap = profile.context_overlap if is_attention else profile.tensor_overlap
    backward_overlap = forward_overlap + (0.0 if is_attention else profile.tensor_backward_overlap)
    return OperatorCosts(
        choices=choices,
        needs=needs,
        saved=saved,
        times=times_of(context, choices, needs),
        collective_times=moved,
        saved_bytes=_saved_bytes(context, choices, saved),
        data_bytes=_data_bytes(context, choices, data_slots),
        saved_data_bytes=_data_bytes(context, choices, [slot for slot in data_slots if slot in saved.inputs]),
        working_bytes=_working_bytes(context, choices, data_slots),
        overlap=(forward_overlap, backward_overlap),
    )


def tensor_bytes(context: CostContext, shape: tuple[int, ...], placements: Integers) -> Values:
    """Bytes of an activation with these placements, on the rank with most."""
    return local_elements(shape, context.ranks, value_placements(placements)) * context.activation_bytes


def _data_bytes(context: CostContext, choices: OperatorLayouts, slots: Sequence[int]) -> Values:
    """Bytes of these graph inputs, which have the placements that the operator reads."""
    shapes = [choices.op.shape(choices.op.inputs[slot].dims) for slot in slots]
    return sum(
        (
            tensor_bytes(context, shape, choices.inputs[slot])
            for slot, shape in zip(slots, shapes, strict=True)
        ),
        np.zeros(len(choices)),
    )


def _saved_bytes(context: CostContext, choices: OperatorLayouts, saved: SavedTensors) -> Values:
    """Bytes of saved statistics, masks and unfused scores. Attention of graphs has no dropout."""
    op = choices.op
    total: Any = np.zeros(len(choices))
    for dims, element_bytes in saved.own:
        total = total + choices.extent(dims) * (element_bytes or context.activation_bytes)
    if context.attention is None:
        for work in work_of(op):
            if work.kind == "attention":
                each = saved_score_bytes(context.machine, context.profile, has_dropout=False)
                total = total + each * scores_of(choices, work)
    return np.asarray(total)


def _working_bytes(context: CostContext, choices: OperatorLayouts, data_slots: tuple[int, ...]) -> Values:
    """Bytes of the operator's output and inputs; their gradients have as many."""
    op = choices.op
    total = tensor_bytes(context, op.shape(op.output), choices.output)
    for slot, operand in enumerate(op.inputs):
        if slot not in data_slots:
            total = total + tensor_bytes(context, op.shape(operand.dims), choices.inputs[slot])
    return total


# Redistribution between operators


@dataclass(frozen=True, slots=True)
class Edge:
    """Redistributions of a tensor from placements A to placements B; shape (A, B).

    `forward_s` and `backward_s` are seconds of the tensor and of its gradient, `is_same` whether both
    placements have the same values on each rank. `start_bytes` (A, 1) and `end_bytes` (1, B) are the tensor's
    bytes; `copies_bytes` are peak bytes during the redistribution of the tensor or of its gradient.
    """

    forward_s: Values
    backward_s: Values
    is_same: Values
    start_bytes: Values
    end_bytes: Values
    copies_bytes: Values


def edge_of(
    context: CostContext,
    shape: tuple[int, ...],
    start: Integers,
    end: Integers,
    *,
    needs_gradient: bool,
    value_bytes: float,
    gradient_bytes: float,
) -> Edge:
    """The edge from placements `start` (A, axes) to `end` (B, axes) of a tensor of `shape`.

    `value_bytes` and `gradient_bytes` are per element. Gradients cost nothing unless `needs_gradient`.
    """
    if len(start) == len(end) == 1:
        return _one_edge(
            context, shape, start, end, needs_gradient=needs_gradient,
            value_bytes=value_bytes, gradient_bytes=gradient_bytes,
        )  # fmt: skip
    values = context.redistributions(shape, value_bytes)
    gradients = context.redistributions(shape, gradient_bytes)
    a, b = (values.table.find(value_placements(each)) for each in (start, end))
    da, db = (gradients.table.find(gradient_placements(each)) for each in (start, end))
    forward_s = values.seconds[a[:, None], b[None, :]]
    is_same = a[:, None] == b[None, :]
    start_bytes, end_bytes = values.nbytes[a][:, None], values.nbytes[b][None, :]
    copies = values.copies_bytes[a[:, None], b[None, :]]
    backward_s = np.zeros_like(forward_s)
    if needs_gradient:
        backward_s = gradients.seconds[db[None, :], da[:, None]]
        copies = np.maximum(copies, gradients.copies_bytes[db[None, :], da[:, None]])
    return Edge(forward_s, backward_s, is_same, start_bytes, end_bytes, copies)


def _one_edge(
    context: CostContext,
    shape: tuple[int, ...],
    start: Integers,
    end: Integers,
    *,
    needs_gradient: bool,
    value_bytes: float,
    gradient_bytes: float,
) -> Edge:
    """The same for one pair of placements (1, axes), without a table of all pairs."""
    ways = [(value_placements(start), value_placements(end), value_bytes)]
    if needs_gradient:
        ways.append((gradient_placements(end), gradient_placements(start), gradient_bytes))
    seconds, copies = [np.zeros(1)] * 2, [np.zeros(1)] * 2
    for way, (there, then, element_bytes) in enumerate(ways):
        if (there != then).any():
            seconds[way] = redistribute_s(context.fabric, context.mesh, shape, element_bytes, there, then)
            copies[way] = redistribution_elements(shape, context.ranks, there, then) * element_bytes
    (a, b, _), *_ = ways
    sizes = [local_elements(shape, context.ranks, each)[:, None] * value_bytes for each in (a, b)]
    return Edge(
        forward_s=seconds[0][:, None],
        backward_s=seconds[1][:, None],
        is_same=(a == b).all(axis=-1)[:, None],
        start_bytes=sizes[0],
        end_bytes=sizes[1],
        copies_bytes=np.max(copies, axis=0)[:, None],
    )


def edge_costs(
    context: CostContext, edge: Edge, reader: OperatorCosts | None, *, is_repeated: bool
) -> CostColumns:
    """Costs of an edge forward and backward, and forward once more if `is_repeated` by recomputation.

    A part of it overlaps with the reader's computation, by the reader's `overlap`; each of its inputs has an
    equal part of that computation.
    """
    columns = CostColumns(peak_bytes=edge.copies_bytes)
    if reader is None or reader.overlap == (0.0, 0.0):
        columns.forward(edge.forward_s, "conversions")
        columns.blocked(edge.backward_s, "conversions")
        if is_repeated:
            columns.blocked(edge.forward_s, "recomputation")
        return columns
    inputs = float(len(reader.choices.op.inputs))
    forward_s, backward_s = reader.times.forward_s[None] / inputs, reader.times.backward_s[None] / inputs
    there = context.exposed_and_hidden_s(edge.forward_s, forward_s, reader.overlap[0])
    columns.forward(there[0], "conversions")
    back = context.exposed_and_hidden_s(edge.backward_s, backward_s, reader.overlap[1])
    columns.hidden_backward(back, "conversions")
    if is_repeated:
        columns.hidden_backward(there, "recomputation")
    return columns
