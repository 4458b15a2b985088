"""One rank of a mesh: how fast it computes and talks to groups of others, one number at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod
from typing import Literal

from shardwise.cluster import AttentionCurve, Cluster, Mesh
from shardwise.cost.problem import Machine, machine_of
from shardwise.cost.training import Training
from shardwise.equations import comm
from shardwise.graph import PARTIAL, REPLICATE, REPLICATE_SHARD_STATES, REPLICATE_SUM_GRAD, Placement
from shardwise.strategy import Profile

LocalShard = int | Literal["whole", "partial", "share"]
"""What a rank holds of a tensor along an axis: its part of a dim, all of it, a partial sum, or (of optimizer
states) a share of no dim in particular."""

Placements = tuple[Placement, ...]


def value_shards(placements: Placements) -> tuple[LocalShard, ...]:
    """What ranks hold of a tensor that lies so."""
    words: dict[int, LocalShard] = {
        REPLICATE: "whole",
        REPLICATE_SUM_GRAD: "whole",
        REPLICATE_SHARD_STATES: "whole",
        PARTIAL: "partial",
    }
    return tuple(words.get(each, int(each)) for each in placements)


def gradient_shards(placements: Placements) -> tuple[LocalShard, ...]:
    """What ranks hold of the gradient of a tensor that lies so."""
    words: dict[int, LocalShard] = {REPLICATE: "whole", REPLICATE_SUM_GRAD: "partial", PARTIAL: "whole"}
    return tuple(words.get(each, int(each)) for each in placements)


def owned_shards(placements: Placements) -> tuple[LocalShard, ...]:
    """What ranks hold of the optimizer states of a parameter that is stored so."""
    return tuple(
        "share" if each == REPLICATE_SHARD_STATES else shards
        for each, shards in zip(placements, value_shards(placements), strict=True)
    )


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank of `mesh` on `machine`, with the customs of its software."""

    machine: Machine
    profile: Profile
    mesh: Mesh

    @property
    def activation_bytes(self) -> float:
        return self.machine.recipe.activation_bytes

    @property
    def stream_bytes_per_s(self) -> float:
        """What a pass over much memory reaches."""
        return self.machine.memory_bytes_per_s * self.machine.efficiency.memory.fraction

    @property
    def slowdown(self) -> float:
        """How much computation is slowed by what runs beside it."""
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
        """Members per tier of the group that so many axes span."""
        tiers = range(len(self.machine.tiers))
        return [prod(self.mesh.axes[axis].sizes[tier] for axis in axes) for tier in tiers]

    def _linked(self, sizes: list[int]) -> list[float]:
        """Bytes per second of such a group per tier, over the links that its members have to each other."""
        speeds, below = [], 1
        for tier, size in zip(self.machine.tiers, sizes, strict=True):
            curve = self.machine.efficiency.scale_out if tier.is_network else self.machine.efficiency.scale_up
            shares = [share for members, share in tier.part_shares if members <= size]
            crowded = (tier.span / below) ** -curve.crowding
            speeds.append(curve.fraction * crowded * tier.bytes_per_s * (shares[-1] if shares else 1.0))
            below = tier.span
        return speeds

    def _ring_speeds(self, sizes: list[int]) -> tuple[list[float], list[float], list[float]]:
        """Latency, what passes before the first byte, and bytes per second of rings through such a group, per
        tier."""
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
        """Once around a ring: an all-gather to so many bytes, or a reduce-scatter of them."""
        alphas, _, speeds = self._ring_speeds(sizes)
        if prod(sizes) == 2:
            speeds = self._bidirectional(speeds)
        return float(comm.all_gather_s(nbytes, sizes, alphas, speeds)) + self._start_s(sizes)

    def all_reduce_s(self, nbytes: float, sizes: list[int]) -> float:
        alphas, _, speeds = self._ring_speeds(sizes)
        has_switch = [1.0 if tier.in_switch_reduction else 0.0 for tier in self.machine.tiers]
        return float(comm.all_reduce_s(nbytes, sizes, alphas, speeds, has_switch)) + self._start_s(sizes)

    def reduce_scatter_s(self, nbytes: float, sizes: list[int]) -> float:
        """A reduce-scatter of so many bytes, or the all-reduce that the backend does in its place."""
        sums = self.machine.backend.substitute("reduce_scatter") == "all_reduce"
        return self.all_reduce_s(nbytes, sizes) if sums else self.all_gather_s(nbytes, sizes)

    def all_to_all_s(self, nbytes: float, sizes: list[int]) -> float:
        alphas, _, _ = self._ring_speeds(sizes)
        speeds = self._bidirectional(self._linked(sizes))
        moved_s = float(comm.all_to_all_s(nbytes, sizes, alphas, speeds, [1.0] * len(sizes)))
        return moved_s + self._start_s(sizes)

    def _bidirectional(self, speeds: list[float]) -> list[float]:
        """What is left of these speeds per tier where two ranks send to each other at once."""
        efficiency = self.machine.efficiency
        curves = [efficiency.scale_out if t.is_network else efficiency.scale_up for t in self.machine.tiers]
        return [speed * curve.exchange_fraction for speed, curve in zip(speeds, curves, strict=True)]

    def halo_s(self, nbytes: float, sizes: list[int]) -> float:
        """So many bytes to the nearest ranks of a group, over the outermost tier that it meets on."""
        met = [tier for tier, size in enumerate(sizes) if size > 1]
        tier = met[-1] if met else 0
        efficiency = self.machine.efficiency
        curve = efficiency.scale_out if self.machine.tiers[tier].is_network else efficiency.scale_up
        alpha_s = self.machine.tiers[tier].latency_s + curve.startup_s
        speed = self._linked([2] * len(sizes))[tier]
        return float(comm.point_to_point_s(nbytes, alpha_s, speed))

    def send_s(self, nbytes: float, tier: int, senders: int) -> float:
        """One message to a rank behind `tier`, while so many send at once that share the way out: they have
        no less of it than where all devices send."""
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
        """From what is held to what is to be held: parts are cut out first, then partial sums summed up to
        parts, parts exchanged, partial sums summed up whole, parts gathered; zeros around parts last."""
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
        """The most elements of a tensor that are there while it is brought so: as it lies, before and behind
        each step, and once more where what a collective takes or brings has to be put in order."""
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
        """Whether the parts that the axes of `group` make of what a rank has as `whole` lie in a row."""
        dims = {word for axis in group if isinstance(word := parts[axis], int)}
        if len(dims) != 1:
            return False
        in_front = range(min(dims))
        return all(ceil(shape[dim] / self._parts(whole, dim)) == 1 for dim in in_front)

    def _is_padded(self, shape: tuple[int, ...], shards: tuple[LocalShard, ...], axis: int) -> bool:
        """Whether parts but the last along the axis are not alike, which a collective fills up."""
        dim = shards[axis]
        if not isinstance(dim, int):
            return False
        parts = self._parts(shards, dim)
        return shape[dim] % parts not in (0, parts - 1)


Step = tuple[str, list[int], tuple[LocalShard, ...], tuple[LocalShard, ...]]
"""What to do, along which axes, and what is held before and behind it."""


def _steps(start: tuple[LocalShard, ...], end: tuple[LocalShard, ...]) -> Iterator[Step]:
    """What brings a tensor from what is held to what is to be held, one after the other."""
    now = start
    for kind in ("cut", "reduce-scatter", "all-to-all", "all-reduce", "all-gather", "pad"):
        group = [axis for axis, pair in enumerate(zip(start, end, strict=True)) if action_of(*pair) == kind]
        if group:
            then = tuple(end[axis] if axis in group else word for axis, word in enumerate(now))
            yield kind, group, now, then
            now = then


def _shifted_axes(was: tuple[LocalShard, ...], now: tuple[LocalShard, ...]) -> list[int]:
    """The axes that have other parts of a dim than before, though they split it as before: an axis in front
    of them splits it now, or does so no longer."""
    found = []
    for axis, dim in enumerate(was):
        if isinstance(dim, int) and now[axis] == dim:
            in_front = [(a == dim, b == dim) for a, b in zip(was[:axis], now[:axis], strict=True)]
            if any(a != b for a, b in in_front):
                found.append(axis)
    return found


def action_of(start: LocalShard, end: LocalShard) -> str:
    """What an axis has to do, in a word; none where ranks have what they need, or can make it alone."""
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
