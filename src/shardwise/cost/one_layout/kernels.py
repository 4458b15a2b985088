"""How long one operator computes on one rank, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from shardwise.cost.one_layout.rank import Rank
from shardwise.equations import compute
from shardwise.graph import KernelWork, OpNode, ShardingRule, work_of

Extents = dict[str, int]
"""Elements of each dim of an operator on the rank."""


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Of the two passes."""

    forward_s: float
    backward_s: float


def size(sizes: Extents, dims: tuple[str, ...]) -> float:
    """Elements of a tensor with these dims."""
    return float(prod(sizes[dim] for dim in dims))


def compute_s(rank: Rank, op: OpNode, sizes: Extents, gradients: list[bool]) -> PassSeconds:
    """The operator's own work; `gradients` says of each input whether it needs one."""
    left, right = operands_with_gradients(op, gradients)
    works = work_of(op)
    forward_s = backward_s = 0.0
    if op.flop is None and op.moved_bytes is None:
        for work in works:
            one = _of(rank, op, sizes, work, left, right)
            forward_s += one.forward_s
            backward_s += one.backward_s
    else:
        share = size(sizes, tuple(op.dims)) / prod(op.dims.values())
        is_product = any(work.kind == "matmul" for work in works)
        peak = rank.machine.matmul_flop_per_s if is_product else rank.machine.other_flop_per_s
        curve = rank.machine.efficiency.matmul
        forward_s = rank.machine.efficiency.launch_s + max(
            share * (op.flop or 0.0) / (peak * curve.peak_fraction),
            share * (op.moved_bytes or 0.0) / rank.stream_bytes_per_s,
        )
        backward_s = (left + right) * forward_s
    if not (left or right):
        backward_s = 0.0
    host_s = rank.profile.dispatch_s
    if forward_s > 0.0:
        forward_s = max(forward_s, host_s)
    if backward_s > 0.0:
        backward_s = max(backward_s, host_s * (2.0 if op.parameters else 1.0))
    return PassSeconds(forward_s, backward_s)


def operands_with_gradients(op: OpNode, gradients: list[bool]) -> tuple[bool, bool]:
    """Whether the left and the right operand of products need gradients."""
    if op.parameters:
        return any(gradients), True
    return any(gradients[:1]), any(gradients[1:])


def _of(rank: Rank, op: OpNode, sizes: Extents, work: KernelWork, left: bool, right: bool) -> PassSeconds:
    steps = size(sizes, work.serial)
    one = {dim: 1 if dim in work.serial else count for dim, count in sizes.items()}
    if work.kind == "attention":
        return _attention(rank, op, sizes, work)
    if work.kind == "matmul":
        seconds = _products(rank, one, work, left, right)
        return PassSeconds(steps * seconds.forward_s, steps * seconds.backward_s)
    fused = op.kind in ("embedding", "cross_entropy")
    passes = 1.0 if fused else rank.profile.pointwise_passes
    forward = backward = 0.0
    for moved in work.moved:
        nbytes = size(one, moved.dims) * (moved.element_bytes or rank.activation_bytes) * passes
        forward += moved.forward * nbytes
        backward += moved.backward * nbytes
    return PassSeconds(steps * _memory_s(rank, forward), steps * _memory_s(rank, backward))


def _memory_s(rank: Rank, nbytes: float) -> float:
    if nbytes == 0.0:
        return 0.0
    curve = rank.machine.efficiency.memory
    moved_s = compute.memory_bound_s(
        nbytes, rank.machine.memory_bytes_per_s, curve.fraction, curve.half_bytes
    )
    return rank.machine.efficiency.launch_s + float(moved_s)


def _product_s(rank: Rank, batch: float, m: float, n: float, k: float, is_batched: bool) -> float:
    """`batch` products of [m, k] x [k, n]; batched ones in the dtype of attention, their rows together."""
    efficiency, machine = rank.machine.efficiency, rank.machine
    curve = efficiency.matmul
    achieved = compute.matmul_efficiency(
        batch * m, n, k, peak_fraction=curve.peak_fraction, tile_m=curve.tile_m, tile_n=curve.tile_n,
        units=curve.units, k_half=curve.k_half, small_tile_fraction=curve.small_tile_fraction,
    )  # fmt: skip
    peak = machine.other_flop_per_s if is_batched else machine.matmul_flop_per_s
    nbytes = batch * (m * k + k * n + m * n) * rank.activation_bytes
    busy_s = compute.roofline_s(2.0 * batch * m * n * k, nbytes, peak * achieved, rank.stream_bytes_per_s)
    return efficiency.launch_s + float(busy_s)


def _products(rank: Rank, sizes: Extents, work: KernelWork, left: bool, right: bool) -> PassSeconds:
    batch, m, n, k = (size(sizes, dims) for dims in (work.batch, work.m, work.n, work.k))
    is_batched = bool(work.batch)
    cast = 0.0 if is_batched else rank.machine.recipe.cast_bytes
    forward_s = _product_s(rank, batch, m, n, k, is_batched) + _memory_s(rank, m * k * cast)
    backward_s = 0.0
    if left:
        backward_s += _product_s(rank, batch, m, k, n, is_batched) + _memory_s(rank, m * n * cast)
    if right:
        parts = 1.0
        if work.splits_sums:
            # Processors without a tile of the weight's gradient take a part of its sum, of 1024 or more.
            curve = rank.machine.efficiency.matmul
            tiles = ceil(k / curve.tile_m) * ceil(n / curve.tile_n)
            parts = float(max(1, min(curve.units // tiles, m // 1024)))
        backward_s += _product_s(rank, batch, k * parts, n, m / parts, is_batched)
    return PassSeconds(forward_s, backward_s)


def _attention(rank: Rank, op: OpNode, sizes: Extents, work: KernelWork) -> PassSeconds:
    machine, curve = rank.machine, rank.fused_attention
    batch, queries, keys, width, values = (
        size(sizes, dims) for dims in (work.batch, work.m, work.n, work.k, work.v)
    )
    if curve is None:
        scores = batch * queries * keys * rank.activation_bytes * rank.profile.pointwise_passes
        products_s = _product_s(rank, batch, queries, keys, width, True)
        products_s += _product_s(rank, batch, queries, values, keys, True)
        # Softmax and dropout move the scores 4.5 times forward and 5.5 times backward
        # (docs/concepts/cost-model.md).
        return PassSeconds(
            products_s + _memory_s(rank, 4.5 * scores), 2.0 * products_s + _memory_s(rank, 5.5 * scores)
        )
    met = keys * (0.5 if work.causal else 1.0)
    if work.window is not None and work.window < keys:
        met = work.window - work.window**2 / (2.0 * keys)
    flop = 2.0 * batch * queries * met * (width + values)
    tensors = [op.output, *(operand.dims for operand in op.inputs)]
    nbytes = sum(size(sizes, dims) for dims in tensors) * rank.activation_bytes
    saturated = keys / (keys + curve.seq_half)
    seconds = []
    # Backward is five products to two, and reads and writes twice as much (Dao 2023, section 3.1).
    for work_share, moves, fraction in (
        (1.0, 1.0, curve.forward_fraction),
        (2.5, 2.0, curve.backward_fraction),
    ):
        busy_s = work_share * flop / (machine.other_flop_per_s * fraction * saturated)
        seconds.append(machine.efficiency.launch_s + max(busy_s, moves * nbytes / rank.stream_bytes_per_s))
    return PassSeconds(*seconds)


def collective_s(rank: Rank, rules: tuple[ShardingRule, ...], sizes: Extents) -> PassSeconds:
    """What ranks tell each other inside the operator: axes that follow one rule do it together."""
    forward_s = backward_s = 0.0
    for name in sorted({rule.name for rule in rules if rule.collectives}):
        axes = [axis for axis, rule in enumerate(rules) if rule.name == name]
        rule = rules[axes[0]]
        for call in rule.collectives:
            elements = call.copies * size(sizes, call.dims)
            nbytes = elements * (call.element_bytes or rank.activation_bytes)
            group = rank.group(axes)
            if call.collective == "all_reduce":
                once_s = rank.all_reduce_s(nbytes, group)
            elif call.collective == "all_gather":
                once_s = rank.all_gather_s(nbytes, group)
            elif call.collective == "reduce_scatter":
                once_s = rank.reduce_scatter_s(nbytes, group)
            else:
                once_s = rank.halo_s(2.0 * nbytes, group)
            forward_s += call.forward_calls * once_s
            backward_s += call.backward_calls * once_s
    return PassSeconds(forward_s, backward_s)
