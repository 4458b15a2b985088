"""One rank of a mesh in plain scalars: collectives, redistribution, and the computation of one operator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod
from typing import Literal

from shardwise.cluster import AttentionCurve, Cluster, Mesh
from shardwise.cost.problem import Machine, machine_of
from shardwise.cost.training import Training
from shardwise.equations import comm, compute
from shardwise.graph import (
    PARTIAL,
    REPLICATE,
    REPLICATE_SHARD_STATES,
    REPLICATE_SUM_GRAD,
    KernelWork,
    OpNode,
    Placement,
    ShardingRule,
    work_of,
)
from shardwise.strategy import Profile

# Collectives and redistribution

LocalShard = int | Literal["whole", "partial", "share"]
"""Part of a tensor on a rank, along an axis: a shard of a dim, the whole, a partial sum, or a share.

A share (of optimizer states) is along no dim in particular.
"""

Placements = tuple[Placement, ...]


def value_shards(placements: Placements) -> tuple[LocalShard, ...]:
    """Local shards, per axis, of the values of a tensor with these placements."""
    words: dict[int, LocalShard] = {
        REPLICATE: "whole",
        REPLICATE_SUM_GRAD: "whole",
        REPLICATE_SHARD_STATES: "whole",
        PARTIAL: "partial",
    }
    return tuple(words.get(each, int(each)) for each in placements)


def gradient_shards(placements: Placements) -> tuple[LocalShard, ...]:
    """Local shards, per axis, of the gradient of a tensor with these placements."""
    words: dict[int, LocalShard] = {REPLICATE: "whole", REPLICATE_SUM_GRAD: "partial", PARTIAL: "whole"}
    return tuple(words.get(each, int(each)) for each in placements)


def owned_shards(placements: Placements) -> tuple[LocalShard, ...]:
    """Local shards, per axis, of the optimizer states of a parameter with these stored placements."""
    return tuple(
        "share" if each == REPLICATE_SHARD_STATES else shards
        for each, shards in zip(placements, value_shards(placements), strict=True)
    )


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank of `mesh` on `machine`, with its software profile."""

    machine: Machine
    profile: Profile
    mesh: Mesh

    @property
    def activation_bytes(self) -> float:
        return self.machine.recipe.activation_bytes

    @property
    def stream_bytes_per_s(self) -> float:
        """Achieved memory bandwidth of a long sequential pass."""
        return self.machine.memory_bytes_per_s * self.machine.efficiency.memory.fraction

    @property
    def slowdown(self) -> float:
        """Factor by which overlapped communication slows down computation."""
        return self.machine.efficiency.overlap_slowdown

    @property
    def fused_attention(self) -> AttentionCurve | None:
        kernels = self.machine.efficiency.attention
        for name in self.profile.attention:
            if name in kernels:
                return kernels[name]
        return None

    def elements(self, shape: tuple[int, ...], shards: tuple[LocalShard, ...]) -> float:
        """Elements of a tensor on the rank with most of them."""
        counts = list(shape)
        shares = 1
        parts = [1] * len(shape)
        for word, axis in zip(shards, self.mesh.axes, strict=True):
            if word == "share":
                shares *= axis.size
            elif isinstance(word, int):
                parts[word] *= axis.size
        counts = [ceil(count / part) for count, part in zip(counts, parts, strict=True)]
        return float(ceil(prod(counts) / shares))

    def group(self, axes: list[int]) -> list[int]:
        """Members per tier of the group that these axes form."""
        tiers = range(len(self.machine.tiers))
        return [prod(self.mesh.axes[axis].sizes[tier] for axis in axes) for tier in tiers]

    def _linked(self, sizes: list[int]) -> list[float]:
        """Bandwidth per tier of a group of these sizes, over the links inside the group."""
        speeds, below = [], 1
        for tier, size in zip(self.machine.tiers, sizes, strict=True):
            curve = self.machine.efficiency.scale_out if tier.is_network else self.machine.efficiency.scale_up
            shares = [share for members, share in tier.part_shares if members <= size]
            crowded = (tier.span / below) ** -curve.crowding
            speeds.append(curve.fraction * crowded * tier.bytes_per_s * (shares[-1] if shares else 1.0))
            below = tier.span
        return speeds

    def _ring_speeds(self, sizes: list[int]) -> tuple[list[float], list[float], list[float]]:
        """(Latency, call overhead, bandwidth) per tier of rings through a group of these sizes."""
        tiers, efficiency = self.machine.tiers, self.machine.efficiency
        alphas, starts, speeds = [], [], []
        inside, below = 1, 1
        for tier, size, speed in zip(tiers, sizes, self._linked(sizes), strict=True):
            curve = efficiency.scale_out if tier.is_network else efficiency.scale_up
            one_card = below * tier.bytes_per_s <= tier.flow_bytes_per_s * (1 + 1e-9)
            if 1 < inside < below and not one_card:
                speed *= curve.partial_fraction
            alphas.append(tier.latency_s)
            starts.append(curve.before_s)
            speeds.append(speed)
            inside *= size
            below = tier.span
        return alphas, starts, speeds

    def _start_s(self, sizes: list[int]) -> float:
        starts = self._ring_speeds(sizes)[1]
        return max((start for start, size in zip(starts, sizes, strict=True) if size > 1), default=0.0)

    def all_gather_s(self, nbytes: float, sizes: list[int]) -> float:
        """Seconds of one ring pass: an all-gather to `nbytes`, or a reduce-scatter of them."""
        alphas, _, speeds = self._ring_speeds(sizes)
        if prod(sizes) == 2:
            speeds = self._bidirectional(speeds)
        return float(comm.all_gather_s(nbytes, sizes, alphas, speeds)) + self._start_s(sizes)

    def all_reduce_s(self, nbytes: float, sizes: list[int]) -> float:
        alphas, _, speeds = self._ring_speeds(sizes)
        has_switch = [1.0 if tier.in_switch_reduction else 0.0 for tier in self.machine.tiers]
        sends = 2.0 if self.machine.backend.instead else 1.0  # of the whole tensor between two groups
        whole_s = comm.all_reduce_s(nbytes, sizes, alphas, speeds, has_switch, sends)
        return float(whole_s) + self._start_s(sizes)

    def reduce_scatter_s(self, nbytes: float, sizes: list[int]) -> float:
        """Seconds of a reduce-scatter of `nbytes`, or of the all-reduce that the backend substitutes."""
        sums = self.machine.backend.substitute("reduce_scatter") == "all_reduce"
        return self.all_reduce_s(nbytes, sizes) if sums else self.all_gather_s(nbytes, sizes)

    def all_to_all_s(self, nbytes: float, sizes: list[int]) -> float:
        alphas, _, _ = self._ring_speeds(sizes)
        speeds = self._bidirectional(self._linked(sizes))
        moved_s = float(comm.all_to_all_s(nbytes, sizes, alphas, speeds, [1.0] * len(sizes)))
        return moved_s + self._start_s(sizes)

    def _bidirectional(self, speeds: list[float]) -> list[float]:
        """These bandwidths per tier when two ranks send to each other at the same time."""
        efficiency = self.machine.efficiency
        curves = [efficiency.scale_out if t.is_network else efficiency.scale_up for t in self.machine.tiers]
        return [speed * curve.exchange_fraction for speed, curve in zip(speeds, curves, strict=True)]

    def halo_s(self, nbytes: float, sizes: list[int]) -> float:
        """Seconds of sending `nbytes` to the nearest ranks of a group, over the outermost tier that it
        crosses.
        """
        met = [tier for tier, size in enumerate(sizes) if size > 1]
        tier = met[-1] if met else 0
        efficiency = self.machine.efficiency
        curve = efficiency.scale_out if self.machine.tiers[tier].is_network else efficiency.scale_up
        alpha_s = self.machine.tiers[tier].latency_s + curve.startup_s
        speed = self._linked([2] * len(sizes))[tier]
        return float(comm.point_to_point_s(nbytes, alpha_s, speed))

    def send_s(self, nbytes: float, tier: int, senders: int) -> float:
        """Seconds of one message to a rank across `tier` while `senders` ranks share the links to it.

        They get at least the bandwidth with all devices sending.
        """
        one, efficiency = self.machine.tiers[tier], self.machine.efficiency
        curve = efficiency.scale_out if one.is_network else efficiency.scale_up
        gain = max(one.flow_bytes_per_s / one.bytes_per_s / senders, 1.0)
        speed = gain * self._linked([2] * len(self.machine.tiers))[tier]
        return float(comm.point_to_point_s(nbytes, one.latency_s + curve.startup_s, speed))

    def redistribute_s(
        self,
        shape: tuple[int, ...],
        element_bytes: float,
        start: tuple[LocalShard, ...],
        end: tuple[LocalShard, ...],
    ) -> float:
        """Seconds to redistribute a tensor from `start` to `end`.

        The order is: slices, reduce-scatters, all-to-alls, all-reduces, all-gathers, zero padding.
        """
        seconds = 0.0
        for kind, group, was, then in _steps(start, end):
            before, after = (self.elements(shape, shards) * element_bytes for shards in (was, then))
            if later := _shifted_axes(was, then):
                apart = self.group(later)
                members = prod(apart)
                most = after if kind == "cut" else max(before, after)
                seconds += self.all_to_all_s(most * members / (members - 1), apart)
            sizes = self.group(group)
            if kind == "reduce-scatter":
                seconds += self.reduce_scatter_s(before, sizes)
            elif kind == "all-to-all":
                seconds += self.all_to_all_s(before, sizes)
            elif kind == "all-reduce":
                seconds += self.all_reduce_s(before, sizes)
            elif kind == "all-gather":
                seconds += self.all_gather_s(after, sizes)
        return seconds

    def peak_elements(
        self, shape: tuple[int, ...], start: tuple[LocalShard, ...], end: tuple[LocalShard, ...]
    ) -> float:
        """Peak elements of a tensor during its redistribution.

        Counted are the tensor before, both ends of each step, and a copy where a collective needs contiguous
        parts.
        """
        initial = self.elements(shape, start)
        most = initial + self.elements(shape, end)
        for kind, group, was, then in _steps(start, end):
            before, after = (self.elements(shape, shards) for shards in (was, then))
            copied = 0.0
            if _shifted_axes(was, then):
                copied = max(before, after)
            else:
                if kind in ("reduce-scatter", "all-to-all") and not self._is_contiguous(
                    shape, was, then, group
                ):
                    copied = before
                if kind == "all-to-all" and not self._is_contiguous(shape, then, was, group):
                    copied = max(copied, after)
                if kind == "all-gather":
                    copied = before * prod(self.mesh.axes[axis].size for axis in group)
                    is_padded = any(self._is_padded(shape, was, axis) for axis in group)
                    if self._is_contiguous(shape, then, was, group) and not is_padded:
                        copied -= after
            most = max(most, initial + (before if was != start else 0.0) + after + copied)
        return most

    def _parts(self, shards: tuple[LocalShard, ...], dim: int) -> int:
        return prod(axis.size for word, axis in zip(shards, self.mesh.axes, strict=True) if word == dim)

    def _is_contiguous(
        self,
        shape: tuple[int, ...],
        whole: tuple[LocalShard, ...],
        parts: tuple[LocalShard, ...],
        group: list[int],
    ) -> bool:
        """Whether the parts that the axes of `group` make of a rank's tensor are contiguous."""
        dims = {word for axis in group if isinstance(word := parts[axis], int)}
        if len(dims) != 1:
            return False
        in_front = range(min(dims))
        return all(ceil(shape[dim] / self._parts(whole, dim)) == 1 for dim in in_front)

    def _is_padded(self, shape: tuple[int, ...], shards: tuple[LocalShard, ...], axis: int) -> bool:
        """Whether parts along the axis, other than the last, are unequal, so that a collective pads them."""
        dim = shards[axis]
        if not isinstance(dim, int):
            return False
        parts = self._parts(shards, dim)
        return shape[dim] % parts not in (0, parts - 1)


Step = tuple[str, list[int], tuple[LocalShard, ...], tuple[LocalShard, ...]]
"""Kind of redistribution step, its axes, local shards before it and after it."""


def _steps(start: tuple[LocalShard, ...], end: tuple[LocalShard, ...]) -> Iterator[Step]:
    """The steps of a redistribution, in order."""
    now = start
    for kind in ("cut", "reduce-scatter", "all-to-all", "all-reduce", "all-gather", "pad"):
        group = [axis for axis, pair in enumerate(zip(start, end, strict=True)) if action_of(*pair) == kind]
        if group:
            then = tuple(end[axis] if axis in group else word for axis, word in enumerate(now))
            yield kind, group, now, then
            now = then


def _shifted_axes(was: tuple[LocalShard, ...], now: tuple[LocalShard, ...]) -> list[int]:
    """The axes whose parts of a dim shift, though they split it before and after.

    An axis outside of them begins or ends to split the same dim.
    """
    found = []
    for axis, dim in enumerate(was):
        if isinstance(dim, int) and now[axis] == dim:
            in_front = [(a == dim, b == dim) for a, b in zip(was[:axis], now[:axis], strict=True)]
            if any(a != b for a, b in in_front):
                found.append(axis)
    return found


def action_of(start: LocalShard, end: LocalShard) -> str:
    """The step of an axis; "none" where ranks have what they need or can make it locally."""
    if start == "whole":
        return "none" if end in ("whole", "partial") else "cut"
    if start == "partial":
        return {"whole": "all-reduce", "partial": "none"}.get(str(end), "reduce-scatter")
    if end == "whole":
        return "all-gather"
    if end == "partial":
        return "pad"
    return "all-to-all" if isinstance(end, int) and end != start else "none"


def rank_of(cluster: Cluster, training: Training, mesh: Mesh) -> Rank:
    """A rank of the mesh."""
    machine = machine_of(cluster, training.dtype, training.optimizer, training.profile)
    return Rank(machine, training.profile, mesh)


# Computation of operators

Extents = dict[str, int]
"""Elements of each dim of an operator on the rank."""


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Seconds of the forward and the backward pass."""

    forward_s: float
    backward_s: float


def size(sizes: Extents, dims: tuple[str, ...]) -> float:
    """Elements of a tensor with these dims."""
    return float(prod(sizes[dim] for dim in dims))


def compute_s(rank: Rank, op: OpNode, sizes: Extents, gradients: list[bool]) -> PassSeconds:
    """Computation of one operator; `gradients` states for each input whether it needs one."""
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


def _product_s(
    rank: Rank, batch: float, m: float, n: float, k: float, is_batched: bool, moved: float = 1.0
) -> float:
    """Seconds of `batch` products of [m, k] x [k, n], which move `moved` elements for each output.

    Batched products are in the dtype of attention, with their rows counted together.
    """
    efficiency, machine = rank.machine.efficiency, rank.machine
    curve = efficiency.matmul
    achieved = compute.matmul_efficiency(
        batch * m, n, k, peak_fraction=curve.peak_fraction, tile_m=curve.tile_m, tile_n=curve.tile_n,
        units=curve.units, k_half=curve.k_half * moved, small_tile_fraction=curve.small_tile_fraction,
    )  # fmt: skip
    peak = machine.other_flop_per_s if is_batched else machine.matmul_flop_per_s
    nbytes = batch * (m * k + k * n + moved * m * n) * rank.activation_bytes
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
            # Split-k: processors without a tile of the weight gradient take a part of its sum, of 1024
            # summands or more.
            curve = rank.machine.efficiency.matmul
            tiles = ceil(k / curve.tile_m) * ceil(n / curve.tile_n)
            parts = float(max(1, min(curve.units // tiles, m // 1024)))
        moved = 1.0
        if rank.profile.fuses_accumulation and not is_batched:
            # The accumulated gradient is read and written.
            moved = 2.0 * rank.machine.recipe.gradient_bytes / rank.activation_bytes
        backward_s += _product_s(rank, batch, k * parts, n, m / parts, is_batched, moved)
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
        # Softmax and dropout have 4.5 passes over the scores forward and 5.5 backward
        # (docs/concepts/cost-model.md, section 7).
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
    # The backward has five products for two, and twice the traffic (Dao 2023, section 3.1).
    for work_share, moves, fraction in (
        (1.0, 1.0, curve.forward_fraction),
        (2.5, 2.0, curve.backward_fraction),
    ):
        busy_s = work_share * flop / (machine.other_flop_per_s * fraction * saturated)
        seconds.append(machine.efficiency.launch_s + max(busy_s, moves * nbytes / rank.stream_bytes_per_s))
    return PassSeconds(*seconds)


def collective_s(rank: Rank, rules: tuple[ShardingRule, ...], sizes: Extents) -> PassSeconds:
    """Seconds of the collective calls inside the operator; axes with the same rule form one group."""
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
