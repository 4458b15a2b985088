"""Costs of one layer on one rank for each grid of degrees: times, weights, activations, temporaries.

`grid_cost` is the entry. The cost of a block (`BlockCost`: a layer, the embedding or the head) is the sum
over its operators, plus the communication of its parallel axes. `PhaseTimes` has the seconds of one phase by
part; `Contention` marks collectives that share links with the gradient reduction; `Temporaries` are bytes of
the largest operation. docs/concepts/cost-model.md, sections 8 and 14.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from shardwise.cluster import Tier
from shardwise.cost.collectives import (
    CollectiveModel,
    HopTimes,
    ProcessGroups,
    Sizes,
    collective_model_of,
    contends,
    groups_of,
)
from shardwise.cost.operators import (
    element_bytes,
    elements_of,
    operator_times,
    rows_of,
    saved_score_bytes,
    width_of,
)
from shardwise.cost.problem import Problem
from shardwise.equations import comm, compute, memory
from shardwise.model import Experts, offloaded_tensors
from shardwise.operators import (
    Attention,
    GroupedMatmul,
    Lookup,
    Loss,
    Matmul,
    Operator,
    Pointwise,
    Saved,
    Scan,
    Weight,
    is_forward_only,
    is_trained,
    repeats_of,
)

# Seconds of a phase


@dataclass(frozen=True, slots=True)
class Contention:
    """Per kind of collective in the passes: 1 where it uses the network cards of the gradient reduction, else
    0.
    """

    tensor: Any = 1.0
    context: Any = 1.0
    expert: Any = 1.0

    @staticmethod
    def of(tiers: Sequence[Tier], groups: ProcessGroups) -> Contention:
        """Contention of grids with these groups on these tiers."""
        kinds = (groups.tensor, groups.context, groups.expert)
        return Contention(*(1.0 * contends(tiers, kind, groups.data) for kind in kinds))


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Seconds of one phase by part; communication counts as far as it is exposed."""

    matmul_s: Any = 0.0
    attention_s: Any = 0.0
    memory_bound_s: Any = 0.0
    tensor_s: Any = 0.0
    context_s: Any = 0.0
    expert_s: Any = 0.0
    host_s: Any = 0.0

    @property
    def compute_s(self) -> Any:
        """The part that can overlap with communication: computation, and waiting for the host."""
        return self.matmul_s + self.attention_s + self.memory_bound_s + self.host_s

    @property
    def total_s(self) -> Any:
        return self.compute_s + self.tensor_s + self.context_s + self.expert_s

    def contended_s(self, contention: Contention) -> Any:
        """Seconds in collectives of the kinds that contend."""
        return (
            contention.tensor * self.tensor_s
            + contention.context * self.context_s
            + contention.expert * self.expert_s
        )

    def __add__(self, other: PhaseTimes) -> PhaseTimes:
        return PhaseTimes(
            matmul_s=self.matmul_s + other.matmul_s,
            attention_s=self.attention_s + other.attention_s,
            memory_bound_s=self.memory_bound_s + other.memory_bound_s,
            tensor_s=self.tensor_s + other.tensor_s,
            context_s=self.context_s + other.context_s,
            expert_s=self.expert_s + other.expert_s,
            host_s=self.host_s + other.host_s,
        )

    def taken(self, rows: Any) -> PhaseTimes:
        """The columns at these rows."""
        return PhaseTimes(*(getattr(self, name)[rows] for name in COMPONENTS))

    def scaled(self, factor: Any) -> PhaseTimes:
        """Every part times `factor`."""
        return PhaseTimes(**{f.name: factor * getattr(self, f.name) for f in fields(PhaseTimes)})


COMPONENTS = tuple(f.name for f in fields(PhaseTimes))


# Temporaries

TENSOR_COPIES = 2.0
"""The largest operation has its tensor and the gradient of it."""

LOGITS_NUMBER_BYTES = 4.0
"""Bytes per fp32 logit."""


def loss_bytes(problem: Problem, logits_bytes: Any) -> Any:
    """Bytes of logits at the peak of the head, of `logits_bytes` in fp32 over all losses.

    The loss of the model is computed last and has its peak there; a loss of multi-token prediction before it
    has what its backward needs. Counted on the tensors of each implementation of LOSSES.
    """
    number = problem.recipe.activation_bytes
    cast_bytes = number if number < LOGITS_NUMBER_BYTES else 0.0
    peak_bytes, waiting_bytes = {
        "in_place": (4.0, 4.0),
        "megatron": (4.0 + cast_bytes, 4.0),
        "eager": (12.0, 4.0),
        "compiled": (2.0 * number, number),
        "fused": (number, number),
    }[problem.profile.loss]
    earlier = problem.model.head_layers
    each = logits_bytes / (LOGITS_NUMBER_BYTES * (1 + earlier))
    return each * (peak_bytes + earlier * waiting_bytes)


@dataclass(frozen=True, slots=True)
class Temporaries:
    """Temporary bytes of the largest operation of a layer and of the head.

    The `reduced_` fields also cover the reduction of the block's gradients: the larger of both.
    """

    layer: Any
    head: Any
    reduced_layer: Any
    reduced_head: Any

    def on_stages(self, has_head: Any, rows: Any = slice(None)) -> tuple[Any, Any]:
        """(Temporaries, the same with the reduction) of stages in these rows; `has_head` is 1 or 0."""
        return (
            np.maximum(self.layer[rows], has_head * self.head[rows]),
            np.maximum(self.reduced_layer[rows], has_head * self.reduced_head[rows]),
        )


def temporaries_of(
    problem: Problem,
    table: Any,
    *,
    largest_bytes: Any,
    logits_bytes: Any,
    layer_weights: Any,
    head_weights: Any,
) -> Temporaries:
    """Temporaries of each row of `table`; bytes and elements are those of a rank, weights the trained ones.

    A layer's weight gradients are unsharded, in the dtype of the weights, before they are accumulated. Where
    each block is reduced by itself, so are the head's, after the loss, and the reduction buffer has a copy
    of them.
    """
    recipe = problem.recipe
    at_layer, at_head = TENSOR_COPIES * largest_bytes, loss_bytes(problem, logits_bytes)
    if not problem.profile.reduces_by_block:
        own_bytes = layer_weights * recipe.weight_bytes
        return Temporaries(*(2 * (at_layer + own_bytes, at_head + own_bytes)))
    # The gradient of the head's output alone is left for the product.
    at_loss, at_head = at_head, logits_bytes * (recipe.activation_bytes / LOGITS_NUMBER_BYTES)
    weights_freed = has_single_backward(problem, table)
    of_blocks = []
    for work_bytes, weights in ((at_layer, layer_weights), (at_head, head_weights)):
        own_bytes = weights * recipe.weight_bytes
        reduced = memory.block_reduction_bytes(
            work_bytes, own_bytes, weights * recipe.reduced_bytes, weights_freed
        )
        of_blocks.append((work_bytes + own_bytes, reduced))
    (layer, reduced_layer), (head, reduced_head) = of_blocks
    return Temporaries(layer, np.maximum(head, at_loss), reduced_layer, np.maximum(reduced_head, at_loss))


def has_single_backward(problem: Problem, table: Any) -> Any:
    """1 where a step has one micro-batch and no pipeline, so one backward pass reduces gradients; else 0."""
    microbatches = problem.job.global_batch_size // (table.dp * table.micro_batch_size)
    return 1 * ((microbatches == 1) & (table.pp == 1))


# Costs of blocks and grids

GRID_FIELDS = (
    "tp", "cp", "cp_kind", "pp", "dp", "ep", "etp", "micro_batch_size", "sequence_parallel", "axis_order",
)  # fmt: skip
"""The fields on which the cost of a layer depends."""

WORK_FIELDS = ("tp", "cp", "ep", "etp", "micro_batch_size", "sequence_parallel")
"""The fields on which it depends without communication."""


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Costs of one kind of layer (or of embedding or head) per micro-batch and rank, as columns over grids.

    Seconds: the stage before waits for `backward_input`; `backward_weight` may come later. `selective` is
    what selective recomputation adds, `repeated_s` what full recomputation adds. `selective` has no waits for
    the host; `repeated_s` is at least the host's dispatch time.

    Weights are elements per rank, before sharding: `dense_weights` can be sharded over dp x cp,
    `expert_weights` over the replicas of an expert. `trained_dense` and `trained_expert` are those of them
    that are not frozen. `replicated_weights` are trained and whole on every tp rank.

    Activation bytes: saved without recomputation, under selective recomputation, and the input alone.
    `largest_bytes` is the largest single tensor, `waiting_bytes` what waits for the weight gradients after a
    backward pass of the inputs alone. `copied_bytes` are low-precision copies of weights. `offloaded_bytes`
    have left the device, and are not among the saved ones; `moved_bytes` are copied to the host and back.
    Tensors saved by the loss count in `logits_bytes` only, because its backward follows at once.
    """

    forward: PhaseTimes
    backward_input: PhaseTimes
    backward_weight: PhaseTimes
    selective: PhaseTimes
    repeated_s: Any
    dense_weights: Any
    expert_weights: Any
    trained_dense: Any
    trained_expert: Any
    replicated_weights: Any
    saved_bytes: Any
    selective_bytes: Any
    input_bytes: Any
    largest_bytes: Any
    waiting_bytes: Any
    copied_bytes: Any
    logits_bytes: Any
    offloaded_bytes: Any
    moved_bytes: Any

    def taken(self, rows: Any) -> BlockCost:
        """The columns at these rows."""
        values = [getattr(self, name) for name in _BLOCK_FIELDS]
        return BlockCost(
            *(value.taken(rows) if isinstance(value, PhaseTimes) else value[rows] for value in values)
        )


_BLOCK_FIELDS = tuple(f.name for f in fields(BlockCost))


@dataclass(frozen=True, slots=True)
class GridCost:
    """Everything that depends on the grid alone.

    `hops` send `hop_bytes` between neighbouring pipeline ranks. `tied_ends_s` synchronises a tied embedding
    on both ends of a pipeline. `replicated_s` synchronises the gradients of weights that are whole on every
    tp rank while each rank has a part of their sum.
    """

    kinds: tuple[BlockCost, ...]
    embedding: BlockCost
    head: BlockCost
    groups: ProcessGroups
    fabric: CollectiveModel
    hops: HopTimes
    hop_bytes: Any
    replicas: Any
    expert_replicas: Any
    tied_ends_s: Any
    replicated_s: Any
    temporaries: Temporaries

    @property
    def blocks(self) -> list[BlockCost]:
        """Every kind of layer, the embedding and the head."""
        return [*self.kinds, self.embedding, self.head]


def _block_works(problem: Problem, table: Any) -> tuple[BlockCost, ...]:
    """Costs of every kind of layer, the embedding and the head without communication, for each row of
    `table`.

    Rows that agree in WORK_FIELDS are estimated once.
    """
    rows, of_row = problem.distinct([getattr(table, name) for name in WORK_FIELDS])
    few = table.take(rows)
    model = problem.model
    blocks = [(kind.operators, kind.experts) for kind in model.kinds]
    blocks += [(model.embedding, None), (model.head, model.head_experts)]
    works = (_work_of(problem, few, operators, experts) for operators, experts in blocks)
    return tuple(work.taken(of_row) for work in works)


def grid_cost(problem: Problem, table: Any) -> GridCost:
    """Costs of every kind of layer and of a pipeline hop, for each row of `table`.

    `table` has the columns of GRID_FIELDS.
    """
    model = problem.model
    groups = groups_of(problem, table)
    fabric = collective_model_of(problem)
    whole_bytes = _hidden_bytes(problem, table, "tokens")
    hop_bytes = whole_bytes / table.tp
    is_split_for_hop = (table.tp > 1) & (table.sequence_parallel == 0)
    joined_s = np.where(is_split_for_hop, fabric.all_gather_s(whole_bytes, groups.tensor), 0.0)
    moved_s = [
        fabric.send_s(hop_bytes, np.full(hop_bytes.shape, tier), senders) + joined_s
        for tier, senders in enumerate(groups.stages.senders)
    ]
    sent_s = np.where(table.pp > 1, moved_s, 0.0)
    # The embedding joins its outputs in the forward pass, the head the gradients of its input in the backward
    # pass.
    *of_kinds, of_embedding, of_head = _block_works(problem, table)
    sync_s = tensor_sync_s(problem, table, groups, fabric)
    syncs_s = [2 * (kind.tensor_syncs * sync_s,) for kind in model.kinds]
    kinds = tuple(
        block_cost(problem, table, groups, fabric, kind.operators, kind.experts, joined, work)
        for kind, joined, work in zip(model.kinds, syncs_s, of_kinds, strict=True)
    )
    embedding = block_cost(problem, table, groups, fabric, model.embedding, None, (sync_s, 0.0), of_embedding)
    head_syncs_s = (model.head_tensor_syncs * sync_s, (model.head_tensor_syncs + 1) * sync_s)
    head = block_cost(problem, table, groups, fabric, model.head, model.head_experts, head_syncs_s, of_head)
    most = {name: _most(kinds, name) for name in ("largest_bytes", "trained_dense")}
    temporaries = temporaries_of(
        problem,
        table,
        largest_bytes=most["largest_bytes"],
        logits_bytes=head.logits_bytes,
        layer_weights=most["trained_dense"],
        head_weights=head.trained_dense,
    )
    return GridCost(
        kinds=kinds,
        embedding=embedding,
        head=head,
        temporaries=temporaries,
        groups=groups,
        fabric=fabric,
        hops=HopTimes(groups.stages, sent_s),
        hop_bytes=hop_bytes,
        replicas=table.dp * table.cp,
        expert_replicas=table.tp * table.cp * table.dp // (table.etp * table.ep),
        tied_ends_s=_tied_ends_s(problem, fabric, groups, embedding),
        replicated_s=_replicated_s(problem, table, fabric, groups, kinds),
    )


def _most(blocks: Sequence[BlockCost], name: str) -> Any:
    """The largest of a field over blocks."""
    return np.maximum.reduce([getattr(block, name) for block in blocks])


def compute_s(problem: Problem, table: Any) -> Any:
    """Seconds of computation of one micro-batch on the whole model, forward and backward, for each row of
    `table`.

    `table` has the columns of WORK_FIELDS.
    """
    model = problem.model
    total_s = 0.0 * table.tp
    for index, kind in enumerate(model.kinds):
        work = _work_of(problem, table, kind.operators, kind.experts)
        total_s = total_s + model.pattern.count(index) * _all_compute_s(work)
    for operators, experts in ((model.embedding, None), (model.head, model.head_experts)):
        total_s = total_s + _all_compute_s(_work_of(problem, table, operators, experts))
    return total_s


def _all_compute_s(work: BlockCost) -> Any:
    return work.forward.compute_s + work.backward_input.compute_s + work.backward_weight.compute_s


def _tied_ends_s(
    problem: Problem, fabric: CollectiveModel, groups: ProcessGroups, embedding: BlockCost
) -> Any:
    is_tied = 1.0 if problem.model.embedding_copies else 0.0
    tier, senders = groups.stages.wraparound_tier, groups.stages.wraparound_senders
    both_s = tied_ends_s(problem, fabric, embedding.trained_dense, tier, senders)
    return is_tied * np.where(embedding.trained_dense > 0.0, both_s, 0.0)


def tied_ends_s(problem: Problem, fabric: CollectiveModel, elements: Any, tier: Any, senders: Any) -> Any:
    """Seconds of the all-reduce of two gradients of `elements` weights at the ends of a pipeline.

    Each end sends one half to the other, then the half that it has reduced, in both directions at once.
    """
    return 2.0 * fabric.send_s(elements * problem.recipe.reduced_bytes / 2.0, tier, senders)


def _replicated_s(
    problem: Problem, table: Any, fabric: CollectiveModel, groups: ProcessGroups, kinds: Sequence[BlockCost]
) -> Any:
    counts = [problem.patterns.count(k) / table.pp for k in range(len(kinds))]
    elements = sum(kind.replicated_weights * count for kind, count in zip(kinds, counts, strict=True))
    is_partial = has_partial_gradients(problem, table.sequence_parallel == 1)
    return replicated_s(problem, fabric, elements, groups.tensor, is_partial)


def has_partial_gradients(problem: Problem, is_sequence_parallel: Any) -> Any:
    """Whether each tp rank has a part of the gradients of weights that are whole on every tp rank.

    Those of norms are parts under sequence parallelism, where each rank has some of the tokens. Those of an
    adapter are parts always: one of its matrices is sharded over tp, and the whole one has a sum over it.
    """
    return is_sequence_parallel | (problem.model.lora is not None)


def replicated_s(
    problem: Problem, fabric: CollectiveModel, elements: Any, tensor: Sizes, is_partial: Any
) -> Any:
    """Seconds of the all-reduce over tp of the gradients of weights that every tp rank has whole (`elements`
    on its stage), where each rank has a part of them (`has_partial_gradients`).
    """
    reduced_s = fabric.all_reduce_s(elements * problem.recipe.reduced_bytes, tensor)
    return np.where(is_partial, reduced_s, 0.0)


def block_cost(
    problem: Problem,
    table: Any,
    groups: ProcessGroups,
    fabric: CollectiveModel,
    operators: Sequence[Operator],
    experts: Experts | None,
    tensor_s: tuple[Any, Any],
    work: BlockCost | None = None,
) -> BlockCost:
    """The sum over `operators`, with the collectives that join their partial results.

    `tensor_s` are seconds of the tensor-parallel collectives (forward, backward). `work` is the sum without
    communication, where it is known already.
    """
    work = _work_of(problem, table, operators, experts) if work is None else work
    forward, backward = (
        _communication(
            problem, table, groups, fabric, operators, experts, joined_s, hiding, weights_s, is_backward
        )
        for joined_s, hiding, weights_s, is_backward in (
            (tensor_s[0], work.forward, 0.0, False),
            (tensor_s[1], work.backward_input, work.backward_weight.matmul_s, True),
        )
    )
    passes = (work.forward + forward, work.backward_input + backward, work.backward_weight)
    names = ("forward", "backward_input", "backward_weight")
    paced = {
        name: replace(one, host_s=np.maximum(host_s - one.total_s, 0.0))
        for name, one, host_s in zip(names, passes, _host_s(problem, operators), strict=True)
    }
    repeated = operators[: _first_left_out(problem, operators)]
    repeated_s = np.maximum(passes[0].total_s - work.repeated_s, _host_s(problem, repeated)[0])
    return replace(work, repeated_s=repeated_s, **paced)


def _host_s(problem: Problem, operators: Sequence[Operator]) -> tuple[float, float, float]:
    """Host seconds to launch a block's kernels: (forward, input gradient, weight gradient).

    Where the device finishes earlier, it waits.
    """
    profile = problem.profile
    weighted = sum(
        repeats_of(operator)
        for operator in operators
        if isinstance(operator, Matmul | GroupedMatmul | Lookup) and operator.trained
    )
    routed = any(isinstance(operator, GroupedMatmul) for operator in operators)
    block_s = profile.expert_dispatch_s if routed else 0.0
    kernels = float(sum(map(repeats_of, operators)))
    forward_only = float(sum(map(repeats_of, filter(is_forward_only, operators))))
    return (
        kernels * profile.dispatch_s + block_s,
        (kernels - forward_only) * profile.dispatch_s + block_s,
        weighted * profile.dispatch_s,
    )


def _work_of(
    problem: Problem, table: Any, operators: Sequence[Operator], experts: Experts | None
) -> BlockCost:
    """The sum over `operators` without communication; its `repeated_s` are seconds that recomputation leaves
    out.
    """
    zero = 0.0 * table.tp
    forward, backward_input, backward_weight, selective = (dict.fromkeys(COMPONENTS, zero) for _ in range(4))
    left_out_s = zero
    first_left_out = _first_left_out(problem, operators)
    for place, operator in enumerate(operators):
        times = operator_times(problem, table, operator, experts)
        part = _part_name(operator)
        forward[part] = forward[part] + times.forward_s
        backward_input[part] = backward_input[part] + times.input_s
        backward_weight[part] = backward_weight[part] + times.weight_s
        if place >= first_left_out:
            left_out_s = left_out_s + times.forward_s
        if _is_selective(operator):
            selective[part] = selective[part] + times.forward_s
    dense, of_experts = _weights_by_family(operators)
    trained, trained_of_experts = _weights_by_family([each for each in operators if is_trained(each)])
    saved = [
        _saved_bytes(problem, table, operator, experts)
        for operator in operators
        if not isinstance(operator, Loss)
    ]
    released, moved = _offloaded_bytes(problem, table, operators, experts)
    losses = [operator for operator in operators if isinstance(operator, Loss)]
    products = [operator for operator in operators if isinstance(operator, Matmul | GroupedMatmul)]
    saved_total = sum((total for total, _, _ in saved), start=zero)
    return BlockCost(
        forward=PhaseTimes(**forward),
        backward_input=PhaseTimes(**backward_input),
        backward_weight=PhaseTimes(**backward_weight),
        selective=PhaseTimes(**selective),
        repeated_s=left_out_s,
        dense_weights=sum((_weight_elements(problem, table, weight) for weight in dense), start=zero),
        expert_weights=sum((_weight_elements(problem, table, weight) for weight in of_experts), start=zero),
        trained_dense=sum((_weight_elements(problem, table, weight) for weight in trained), start=zero),
        trained_expert=sum(
            (_weight_elements(problem, table, weight) for weight in trained_of_experts), start=zero
        ),
        replicated_weights=zero + sum(weight.parameters for weight in trained if _is_whole(weight)),
        saved_bytes=saved_total - released,
        selective_bytes=sum((selective_saved for _, selective_saved, _ in saved), start=zero) - released,
        input_bytes=_hidden_bytes(problem, table, "sequence"),
        largest_bytes=_largest([largest for _, _, largest in saved], zero),
        waiting_bytes=zero + _waiting_bytes(problem, table, operators, experts, saved_total),
        copied_bytes=sum((_copied_bytes(problem, table, product) for product in products), start=zero),
        logits_bytes=sum((_saved_bytes(problem, table, loss, experts)[0] for loss in losses), start=zero),
        offloaded_bytes=released,
        moved_bytes=moved,
    )


def _weights_by_family(operators: Sequence[Operator]) -> tuple[list[Weight], list[Weight]]:
    """(Dense weights, expert weights) of operators."""
    weights = [weight for operator in operators for weight in operator.weights]
    return (
        [weight for weight in weights if not _is_of_experts(weight)],
        [weight for weight in weights if _is_of_experts(weight)],
    )


SMALLEST_OFFLOADED = 1 << 20
"""Elements of the smallest tensor that modules move to the host (`min_offloaded_tensor_size`)."""


def _offloaded_bytes(
    problem: Problem, table: Any, operators: Sequence[Operator], experts: Experts | None
) -> tuple[Any, Any]:
    """(Bytes that leave the device, bytes that are copied to the host) of the saved tensors of a layer, where
    the software moves those of named modules."""
    released = moved = 0.0 * table.tp
    if any(operator.rows == "patches" for operator in operators):
        return released, moved  # modules of layers move tensors, those of a vision tower do not
    for tensor in offloaded_tensors(operators, problem.profile.offload_modules):
        operator = operators[tensor.operator]
        saved = operator.saved[tensor.place]
        nbytes = saved_tensor_bytes(problem, table, operator, saved, experts)
        elements = nbytes / element_bytes(problem, saved.dtype)
        nbytes = np.where(elements >= tensor.parts * SMALLEST_OFFLOADED, nbytes, 0.0)
        released = released + (nbytes if tensor.is_released else 0.0)
        moved = moved + tensor.copies * nbytes
    return released, moved


def _first_left_out(problem: Problem, operators: Sequence[Operator]) -> int:
    """Index of the first operator that early-stopping recomputation leaves out: the last product."""
    products = [i for i, operator in enumerate(operators) if isinstance(operator, Matmul | GroupedMatmul)]
    if not problem.profile.recompute_stops_early or not products:
        return len(operators)
    return products[-1]


def _part_name(operator: Operator) -> str:
    names = {
        "matmul": "matmul_s",
        "grouped_matmul": "matmul_s",
        "attention": "attention_s",
        "scan": "attention_s",
    }
    return names.get(operator.kind, "memory_bound_s")


def _is_selective(operator: Operator) -> bool:
    """Whether selective recomputation repeats it: core attention and marked memory-bound operators."""
    return isinstance(operator, Attention) or (isinstance(operator, Pointwise) and operator.selective)


def _is_of_experts(weight: Weight) -> bool:
    """Whether each expert has one; the number of experts may be a column."""
    return isinstance(weight.experts, np.ndarray) or weight.experts > 0


def _is_whole(weight: Weight) -> bool:
    return all(extent.role == "whole" for extent in weight.shape)


def _weight_elements(problem: Problem, table: Any, weight: Weight) -> Any:
    """Elements of a weight on one rank, before sharding over data parallel ranks."""
    elements = 1.0
    for extent in weight.shape:
        elements = elements * width_of(problem, table, extent)
    return elements * (weight.experts / table.ep if _is_of_experts(weight) else 1.0 + 0.0 * table.tp)


def _saved_bytes(
    problem: Problem, table: Any, operator: Operator, experts: Experts | None
) -> tuple[Any, Any, Any]:
    """Bytes that an operator saves for the backward pass: (all, under selective recomputation, largest
    tensor).
    """
    total = selective = largest = 0.0 * table.tp
    if is_forward_only(operator):
        return total, selective, largest
    if isinstance(operator, Attention) and problem.attention is None:
        total = largest = score_bytes(problem, table, operator, experts)
    for saved in operator.saved:
        nbytes = saved_tensor_bytes(problem, table, operator, saved, experts)
        total = total + nbytes
        selective = selective + (0.0 if saved.selective else 1.0) * nbytes
        largest = np.maximum(largest, nbytes)
    if problem.profile.eager_modules:
        rows = rows_of(problem, table, operator.rows, experts)
        nbytes = rows * eager_row_bytes(problem, table, operator) * repeats_of(operator)
        total = total + nbytes
        selective = selective + (0.0 if _is_selective(operator) else 1.0) * nbytes
    return total, selective, largest


def score_bytes(problem: Problem, table: Any, operator: Attention, experts: Experts | None) -> Any:
    """Bytes of what unfused attention saves of its scores."""
    rows = rows_of(problem, table, operator.rows, experts)
    each = saved_score_bytes(problem, problem.profile, has_dropout=problem.model.has_dropout)
    keys = problem.job.seq_len if operator.block is None else operator.block
    return rows * keys * width_of(problem, table, operator.heads) * (each * operator.repeats)


def saved_tensor_bytes(
    problem: Problem, table: Any, operator: Operator, saved: Saved, experts: Experts | None
) -> Any:
    """Bytes on a rank of a tensor that `operator` lists among its saved ones."""
    is_gathered = problem.profile.keeps_gathered_inputs and isinstance(operator, Matmul)
    rows = rows_of(problem, table, operator.rows if is_gathered else saved.rows, experts)
    return rows * width_of(problem, table, saved.width) * element_bytes(problem, saved.dtype)


def eager_row_bytes(problem: Problem, table: Any, operator: Operator) -> Any:
    """Bytes per row that an operator of eager modules saves in addition to those of a fused one.

    An RMSNorm has its input in fp32 instead of its own dtype, and the normalised input before the product
    with a trained weight. A gated activation has the output of its function, before the product with the
    other half. Experts have their outputs, before the product with the router's weights. What else some
    families save is in `eager`.
    """
    element = problem.recipe.activation_bytes
    if isinstance(operator, GroupedMatmul) and operator.n.role == "whole":
        return operator.n.size * element
    if not isinstance(operator, Pointwise):
        return 0.0
    more = elements_of(problem, table, operator.eager) * element
    is_norm = operator.weights and all(len(weight.shape) == 1 for weight in operator.weights)
    if is_norm and not any(weight.name.endswith(".bias") for weight in operator.weights):
        # Of the two passes over each element of an RMSNorm; 4 B for the copy, `element` more and less.
        passes = sum((width_of(problem, table, extent) for extent in operator.forward), start=0.0)
        return passes / 2.0 * (FP32_BYTES if operator.trained else FP32_BYTES - element) + more
    (inputs,) = operator.saved if len(operator.saved) == 1 else (None,)
    if inputs is not None and 3 * inputs.width.size == 2 * operator.forward[0].size * operator.repeats:
        return width_of(problem, table, inputs.width) / (2.0 * operator.repeats) * element + more
    return more


FP32_BYTES = 4.0


def _waiting_bytes(
    problem: Problem, table: Any, operators: Sequence[Operator], experts: Experts | None, saved_bytes: Any
) -> Any:
    """Bytes that wait for the weight gradients after a backward pass of the inputs: inputs of products with
    trained weights, and the gradients of their outputs.

    Software that keeps the graph of a split backward pass has all saved tensors (`saved_bytes`) instead of
    the inputs, and the gradients of the outputs of norms too.
    """
    keeps_graph = problem.profile.keeps_split_graphs
    total = saved_bytes if keeps_graph else 0.0
    before: Operator | None = None
    for operator in operators:
        if is_forward_only(operator):
            continue
        if isinstance(operator, Matmul | GroupedMatmul) and not operator.trained:
            continue
        if isinstance(operator, Matmul | GroupedMatmul):
            total = total + _output_gradient_bytes(problem, table, operator, experts)
            if not keeps_graph:
                inputs = operator.saved
                if not inputs and isinstance(before, Attention):
                    # Of what attention saves, its output alone is recomputed in the compute dtype.
                    inputs = tuple(one for one in before.saved if one.selective and one.dtype == "compute")
                for saved in inputs:
                    total = total + saved_tensor_bytes(problem, table, operator, saved, experts)
        elif keeps_graph and isinstance(operator, Pointwise) and operator.weights:
            # A norm's forward pass reads and writes each element once.
            moved = sum((width_of(problem, table, extent) for extent in operator.forward), start=0.0)
            rows = rows_of(problem, table, operator.rows, experts) * operator.repeats
            total = total + rows * moved / 2.0 * problem.recipe.activation_bytes
        before = operator
    return total


def _output_gradient_bytes(
    problem: Problem, table: Any, product: Matmul | GroupedMatmul, experts: Experts | None
) -> Any:
    """Bytes of the gradient of a product's output, as the product for the weight gradient reads it: in the
    dtype of its operands where the software has cast it for that."""
    recipe = problem.recipe
    elements = rows_of(problem, table, product.rows, experts) * width_of(problem, table, product.n)
    elements = elements * repeats_of(product)
    is_cast = product.rows != "head" and not problem.profile.keeps_split_graphs
    return elements * (recipe.operand_bytes if is_cast else recipe.activation_bytes)


COPIES_OF_WEIGHTS = 2.0
"""Low-precision copies of a weight: for the product and, transposed, for the gradient of its input."""


def _copied_bytes(problem: Problem, table: Any, product: Matmul | GroupedMatmul) -> Any:
    """Bytes of the low-precision copies of a product's weights, without the weights that they replace; 0
    where the software keeps none. The output projection stays in 16 bits."""
    recipe = problem.recipe
    if not problem.profile.keeps_low_precision_weights or not recipe.cast_bytes or product.rows == "head":
        return 0.0
    matrices = (weight for weight in product.weights if len(weight.shape) > 1)
    elements = sum((_weight_elements(problem, table, weight) for weight in matrices), start=0.0)
    replaced = recipe.weight_bytes if problem.profile.has_fp8_parameters else 0.0
    return elements * max(COPIES_OF_WEIGHTS * recipe.operand_bytes - replaced, 0.0)


def _largest(columns: Sequence[Any], start: Any) -> Any:
    for column in columns:
        start = np.maximum(start, column)
    return start


def _hidden_bytes(problem: Problem, table: Any, rows: str) -> Any:
    """Bytes of one hidden state of a rank's rows."""
    return rows_of(problem, table, rows, None) * problem.model.hidden * problem.recipe.activation_bytes


def _communication(
    problem: Problem,
    table: Any,
    groups: ProcessGroups,
    fabric: CollectiveModel,
    operators: Sequence[Operator],
    experts: Experts | None,
    tensor_s: Any,
    work: PhaseTimes,
    weights_s: Any,
    is_backward: bool,
) -> PhaseTimes:
    """Exposed communication of one pass through the block.

    `tensor_s` joins its partial results. It overlaps with the matmuls of `work` and, in the backward pass,
    with `weights_s` seconds of matmuls for weight gradients.
    """
    profile = problem.profile
    slowdown = problem.efficiency.overlap_slowdown
    attention = [one for one in operators if isinstance(one, Attention) and one.block is None]
    context_s = sum(
        (_context_s(problem, table, groups, fabric, core, is_backward) for core in attention),
        start=0.0 * table.tp,
    )
    scans = [operator for operator in operators if isinstance(operator, Scan)]
    scan_s = sum((_exchange_s(problem, table, groups, fabric, scan) for scan in scans), start=0.0 * table.tp)
    expert_s = 0.0 * table.tp
    routed = [operator for operator in operators if isinstance(operator, GroupedMatmul)]
    if experts is not None and routed:
        expert_s = _expert_s(problem, table, groups, fabric, experts)
    expert_overlap = np.where(table.ep > 1, profile.expert_overlap, 0.0)
    ring_overlap = np.where(table.cp_kind == 0, profile.context_overlap, 0.0)
    tensor_overlap: Any = profile.tensor_overlap + (profile.tensor_backward_overlap if is_backward else 0.0)
    if profile.needs_sequence_parallel:
        tensor_overlap = np.where(table.sequence_parallel == 1, tensor_overlap, 0.0)
    return PhaseTimes(
        matmul_s=0.0 * table.tp,
        attention_s=0.0 * table.tp,
        memory_bound_s=0.0 * table.tp,
        tensor_s=compute.exposed_s(tensor_s, work.matmul_s + weights_s, tensor_overlap, slowdown),
        context_s=compute.exposed_s(context_s, work.attention_s, ring_overlap, slowdown) + scan_s,
        expert_s=compute.exposed_s(expert_s, work.matmul_s, expert_overlap, slowdown),
    )


def tensor_sync_s(problem: Problem, table: Any, groups: ProcessGroups, fabric: CollectiveModel) -> Any:
    """Seconds of joining the partial results of one tensor-parallel region, in either direction.

    Under sequence parallelism an all-gather in and a reduce-scatter out, else one all-reduce (Korthikanti et
    al. 2022, section 4.2.2).
    """
    nbytes = _hidden_bytes(problem, table, "tokens")
    return np.where(
        table.sequence_parallel == 1,
        fabric.all_gather_s(nbytes, groups.tensor) + fabric.reduce_scatter_s(nbytes, groups.tensor),
        fabric.all_reduce_s(nbytes, groups.tensor),
    )


def _context_s(
    problem: Problem,
    table: Any,
    groups: ProcessGroups,
    fabric: CollectiveModel,
    core: Attention,
    is_backward: bool,
) -> Any:
    """Seconds of ring attention (Liu et al. 2023) or of all-to-all attention (Jacobs et al. 2023).

    The ring sends keys and values, in the backward pass their gradients too. The all-to-all sends q, k, v and
    the output.
    """
    element = problem.recipe.activation_bytes
    tokens = rows_of(problem, table, "tokens", None)
    kv = width_of(problem, table, core.kv_heads) * (core.qk_dim + core.v_dim)
    heads = width_of(problem, table, core.heads) * (core.qk_dim + core.v_dim)
    ring_s = fabric.all_gather_s(tokens * kv * element * table.cp, groups.context) * (
        2.0 if is_backward else 1.0
    )
    a2a_s = 4.0 * fabric.all_to_all_s(tokens * (kv + heads) * element / 4.0, groups.context)
    return np.where(table.cp > 1, np.where(table.cp_kind == 0, ring_s, a2a_s), 0.0)


def _exchange_s(
    problem: Problem, table: Any, groups: ProcessGroups, fabric: CollectiveModel, scan: Scan
) -> Any:
    """Seconds of a scan's all-to-alls in either direction: its inputs from tokens to heads, and its output
    back (Megatron-Core's context parallelism of Mamba layers, with a ring of attention as well)."""
    tokens = rows_of(problem, table, "tokens", None)
    nbytes = tokens * elements_of(problem, table, scan.exchanged) * problem.recipe.activation_bytes
    return np.where(table.cp > 1, 2.0 * fabric.all_to_all_s(nbytes / 2.0, groups.context), 0.0)


def _expert_s(
    problem: Problem, table: Any, groups: ProcessGroups, fabric: CollectiveModel, experts: Experts
) -> Any:
    """Seconds of token dispatch and combine: two all-to-alls over ep, and all-gather and reduce-scatter over
    etp.

    Every tp rank sends its share of the tokens, `top_k` copies each, with the load of the imbalance. Beyond
    the innermost tier a token is sent once to each part of the group that has some of its experts, and is
    copied there (DeepSeek-V3, section 3.2.2). Under node-limited routing there are at most `groups_per_token`
    such parts. Without sequence parallelism the result is all-gathered over tp again.
    """
    routed_bytes = (
        rows_of(problem, table, "routed", experts) * problem.model.hidden * problem.recipe.activation_bytes
    )
    sent_bytes = routed_bytes / table.etp
    most = np.where(experts.groups > 1, experts.groups_per_token, np.inf)
    achieved = np.minimum(comm.expected_groups(comm.group_size(groups.expert[1:]), experts.top_k), most)
    a2a_s = 2.0 * fabric.all_to_all_s(sent_bytes, groups.expert, achieved / experts.top_k)
    members = groups.expert_tensor
    join_s = fabric.all_gather_s(routed_bytes, members) + fabric.reduce_scatter_s(routed_bytes, members)
    whole_s = fabric.all_gather_s(_hidden_bytes(problem, table, "tokens"), groups.tensor)
    return (
        np.where(table.ep > 1, a2a_s, 0.0)
        + np.where(table.etp > 1, join_s, 0.0)
        + np.where((table.sequence_parallel == 0) & (table.tp > 1), whole_s, 0.0)
    )
