"""Seconds of an operator's own work on a rank, for all of its layouts, by the kernels of plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.cost.layouts.choices import OperatorLayouts
from shardwise.cost.layouts.forms import Values
from shardwise.cost.layouts.ground import CostContext
from shardwise.cost.operators import (
    FUSED_BACKWARD_WORK,
    SOFTMAX_BACKWARD_PASSES,
    SOFTMAX_FORWARD_PASSES,
    cast_s,
    moved_s,
    product_s,
)
from shardwise.equations import compute
from shardwise.graph import KernelWork, work_of

FUSED_KINDS = ("embedding", "cross_entropy")
"""Memory-bound kinds that software fuses as far as can be: their passes are counted one by one."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Whether the left and the right operand of an operator's products need gradients, and whether its
    backward pass does anything."""

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
    """Computation of the operator; the host hands over one kernel for each pass, and one more for the
    gradients of parameters, and the device waits for it where it is sooner done."""
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
    """Where there is anything to compute, no sooner than the host has handed it over."""
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
    """The product of the dims that are not walked step by step."""
    return choices.extent(tuple(dim for dim in dims if dim not in work.serial))


def _matmul(context: CostContext, choices: OperatorLayouts, work: KernelWork, needs: Needs) -> Times:
    m, n, k = (_extent(choices, work, dims) for dims in (work.m, work.n, work.k))
    batch = _extent(choices, work, work.batch)
    is_batched = bool(work.batch)

    def product(rows: Values, columns: Values, inner: Values) -> Any:
        keys = rows if is_batched else None
        return product_s(context.machine, batch * rows, columns, inner, keys)

    def cast(elements: Values) -> Any:
        return 0.0 if is_batched else cast_s(context.machine, elements)

    forward_s = product(m, n, k) + cast(m * k)
    backward_s = 0.0 * forward_s
    if needs.left:
        backward_s = backward_s + product(m, k, n) + cast(m * n)
    if needs.right:
        parts = _sum_parts(context, k, n, m) if work.splits_sums else 1.0
        backward_s = backward_s + product(k * parts, n, m / parts)
    steps = _steps(choices, work)
    return Times(steps * forward_s, steps * backward_s)


SPLIT_SUM = 1024.0
"""The fewest summands that are worth a part of a sum of its own."""


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
    machine, curve = context.machine, context.attention
    queries = choices.extent(work.batch) * choices.extent(work.m)
    keys, width, values = (choices.extent(dims) for dims in (work.n, work.k, work.v))
    window = keys if work.window is None else np.minimum(float(work.window), keys)
    met = compute.keys_per_query(keys, window, 0.5 if work.causal else 1.0)
    flop = compute.attention_work(queries, met, 1.0, width, values)
    saturated = compute.saturation(keys, curve.seq_half)
    op = choices.op
    nbytes = sum((choices.extent(operand.dims) for operand in op.inputs), choices.extent(op.output))
    nbytes = nbytes * context.activation_bytes
    forward_s, backward_s = (
        machine.efficiency.launch_s
        + compute.roofline_s(
            scale * flop,
            passes * nbytes,
            machine.other_flop_per_s * fraction * saturated,
            context.stream_bytes_per_s,
        )
        for scale, passes, fraction in (
            (1.0, 1.0, curve.forward_fraction), (FUSED_BACKWARD_WORK, 2.0, curve.backward_fraction),
        )
    )  # fmt: skip
    return Times(forward_s, backward_s)


def scores_of(choices: OperatorLayouts, work: KernelWork) -> Values:
    """Scores (K) of unfused attention on a rank."""
    return choices.extent((*work.batch, *work.m, *work.n))


def _unfused(context: CostContext, choices: OperatorLayouts, work: KernelWork) -> Times:
    queries, batch = choices.extent(work.m), choices.extent(work.batch)
    keys, width, values = (choices.extent(dims) for dims in (work.n, work.k, work.v))
    pass_bytes = scores_of(choices, work) * (context.activation_bytes * context.profile.pointwise_passes)
    score_s = product_s(context.machine, batch * queries, keys, width, queries)
    value_s = product_s(context.machine, batch * queries, values, keys, queries)
    forward_s, backward_s = (
        moved_s(context.machine, passes * pass_bytes)
        for passes in (SOFTMAX_FORWARD_PASSES, SOFTMAX_BACKWARD_PASSES)
    )
    return Times(score_s + value_s + forward_s, 2.0 * (score_s + value_s) + backward_s)


def _given(
    context: CostContext, choices: OperatorLayouts, works: tuple[KernelWork, ...], needs: Needs
) -> Times:
    """A roofline of the flop and bytes that the graph's file gives, each rank its share of them; backward
    as much again for each operand that needs a gradient."""
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
