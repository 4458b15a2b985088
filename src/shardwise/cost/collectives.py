"""Process groups on the tiers of a cluster, and the seconds of their collectives and sends.

`Neighbours` and `HopTimes` are sends between neighbouring pipeline stages, `ProcessGroups` the groups of a
table of strategies by their sizes per tier. `CollectiveModel` has the times of all-reduce, all-gather,
reduce-scatter, all-to-all and send. docs/concepts/cost-model.md, sections 4 and 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np

from shardwise.cluster import NATIVE, Backend, Tier, group_members
from shardwise.cost.problem import Machine, Problem, distinct_rows
from shardwise.equations import comm
from shardwise.strategy import axis_strides

# Sends between pipeline stages


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Placement of the ranks of pipelines with `pp` ranks, as columns.

    `borders` and `strides` are per tier except the last, in lowest terms. Counted in ranks from the start of
    a pipeline, groups of the tier begin at the multiples of `borders`, and neighbouring ranks are `strides`
    apart. Both are 1 where every hop leaves its group.

    `senders` is per tier: how many adjacent devices of a group of the tier below send at each hop over the
    tier. It is 0 where none sends, or where so few senders have no more bandwidth than with all devices
    sending.
    """

    pp: Any
    borders: tuple[Any, ...]
    strides: tuple[Any, ...]
    senders: tuple[Any, ...]

    def taken(self, rows: Any) -> Neighbours:
        """The columns at these rows."""
        borders, strides, senders = (
            tuple(each[rows] for each in per_tier) for per_tier in (self.borders, self.strides, self.senders)
        )
        return Neighbours(self.pp[rows], borders, strides, senders)

    def tier(self, rank: Any) -> Any:
        """Index of the innermost tier with both each pipeline rank and the next, for the worst placed
        pipeline.
        """
        index: Any = 0 * (rank + self.pp)
        for border, stride in zip(self.borders, self.strides, strict=True):
            # Their devices are from rank * stride to before (rank + 2) * stride: is there a border inside?
            index = index + (((rank + 2) * stride - 1) // border > rank * stride // border)
        return index

    @property
    def wraparound_tier(self) -> Any:
        """The innermost tier with both the first rank and the last."""
        index: Any = 0 * self.pp
        for border, stride in zip(self.borders, self.strides, strict=True):
            index = index + (border != self.pp * stride)
        return index

    @property
    def wraparound_senders(self) -> Any:
        """Number of ranks that send from the first rank to the last at once: `senders` of the tier between
        them.
        """
        return np.choose(self.wraparound_tier, self.senders)

    @property
    def leaving(self) -> list[Any]:
        """How many of the pp - 1 hops leave their group, per tier: all of them for tier -1, none for the
        last.
        """
        counts = [self.pp - 1]
        for border, stride in zip(self.borders, self.strides, strict=True):
            inside = self.pp * stride // border - 1
            # Two hops cross a border between the devices of a rank, one crosses a border between two ranks.
            counts.append(2 * inside - inside // stride)
        return [*counts, 0 * self.pp]


def neighbours_of(tiers: Sequence[Tier], pp: Any, stride: Any) -> Neighbours:
    """Neighbours of pipelines with `pp` ranks that are `stride` ranks apart."""
    borders, strides = [], []
    senders = [_senders(tiers[0], 1, stride, pp > 1)]
    for tier, outer in pairwise(tiers):
        border = np.gcd(stride * pp, tier.span)
        common = np.gcd(border, stride)
        leaves = border < 2 * stride
        borders.append(np.where(leaves, 1, border // common))
        strides.append(np.where(leaves, 1, stride // common))
        senders.append(_senders(outer, tier.span, stride, border < stride * pp))
    return Neighbours(pp, tuple(borders), tuple(strides), tuple(senders))


def _senders(tier: Tier, inside: int, stride: Any, is_crossed: Any) -> Any:
    """Devices that send at once over the tier: the last `stride` of the `inside` devices of a group below it.

    They belong to one stage where stages fit the groups, else to two at most.
    """
    count = np.minimum(stride, inside)
    return np.where(is_crossed & (count * tier.bytes_per_s < tier.flow_bytes_per_s), count, 0)


@dataclass(frozen=True, slots=True)
class HopTimes:
    """Seconds of a send between neighbouring stages by the tier between them; shape (tiers, rows)."""

    neighbours: Neighbours
    by_tier_s: Any

    def taken(self, rows: Any) -> HopTimes:
        """The columns at these rows."""
        return HopTimes(self.neighbours.taken(rows), self.by_tier_s[:, rows])

    def after_s(self, stage: Any, is_v: Any) -> Any:
        """Seconds of a send from each stage to the next, or back; 0 at the turn of a V.

        `stage` has shape (places, 1 or rows).
        """
        pp = self.neighbours.pp
        turned = is_v & (stage >= pp)
        rank = np.where(turned, 2 * pp - 2 - stage, stage % pp)
        ends = ~np.asarray(is_v) & (rank == pp - 1)
        tier = np.where(ends, self.neighbours.wraparound_tier, self.neighbours.tier(rank))
        seconds = np.take_along_axis(self.by_tier_s, tier, axis=0)
        return np.where(is_v & (stage == pp - 1), 0.0, seconds)

    @property
    def mean_s(self) -> Any:
        """Mean of the hops from the first rank to the last."""
        leaving = self.neighbours.leaving
        total_s = sum(
            (more - less) * hop_s
            for more, less, hop_s in zip(leaving, leaving[1:], self.by_tier_s, strict=False)
        )
        return total_s / np.maximum(self.neighbours.pp - 1, 1)

    @property
    def shortest_s(self) -> Any:
        """The shortest of these hops and of the hop from the last rank to the first."""
        leaving, ends = self.neighbours.leaving, self.neighbours.wraparound_tier
        found: Any = np.inf
        for tier, hop_s in enumerate(self.by_tier_s):
            is_used = (leaving[tier] > leaving[tier + 1]) | (ends == tier)
            found = np.where(is_used, np.minimum(found, hop_s), found)
        return found


# Process groups

Sizes = tuple[Any, ...]
"""Members of a group per tier, innermost first: columns whose product is the group's size."""


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """The process groups of each row of a table, by their sizes per tier.

    `data` joins dp and cp (gradients of dense weights), `experts_data` the replicas of an expert. `stages`
    has the placement of neighbouring pipeline ranks.
    """

    tensor: Sizes
    context: Sizes
    data: Sizes
    expert: Sizes
    expert_tensor: Sizes
    experts_data: Sizes
    stages: Neighbours


def sizes_of(tiers: Sequence[Tier], stride: Any, size: Any) -> Sizes:
    """Sizes per tier of groups of `size` ranks that are `stride` apart."""
    members = group_members(tiers, stride, size)
    below: Any = 1
    sizes = []
    for count in members:
        sizes.append(count // below)
        below = count
    return tuple(sizes)


def joined(a: Sizes, b: Sizes) -> Sizes:
    """Sizes of the group that two axes form together."""
    return tuple(x * y for x, y in zip(a, b, strict=True))


def inner_part(sizes: Sizes, k: Any) -> Sizes:
    """Sizes of the k closest members of a group, from the innermost tier on; k divides the group's size."""
    rest = k
    part = []
    for size in sizes[:-1]:
        taken = np.gcd(size, rest)
        part.append(taken)
        rest = rest // taken
    return (*part, rest)


def outer_part(sizes: Sizes, part: Sizes) -> Sizes:
    """Sizes of the groups that join equal members of the inner parts."""
    left = tuple(np.maximum(size // taken, 1) for size, taken in zip(sizes, part, strict=True))
    return left


def contends(tiers: Sequence[Tier], group: Sizes, replicas: Sizes) -> Any:
    """Whether a group uses the links that set the pace of its replicas' group.

    They contend where both cross the network, on any tiers of it, or where both stay inside a node.
    """

    def crosses(sizes: Sizes, is_network: bool) -> Any:
        found: Any = False
        for size, tier in zip(sizes, tiers, strict=True):
            if tier.is_network == is_network:
                found = found | np.greater(size, 1)
        return found

    are_both_inside = crosses(replicas, False) & crosses(group, False)
    return np.where(crosses(replicas, True), crosses(group, True), are_both_inside)


def groups_of(problem: Problem, table: Any) -> ProcessGroups:
    """The groups of each row: mesh axes by the row's axis order, experts on the ranks of a stage."""
    tiers = problem.tiers
    stride = axis_strides(table)
    data = joined(sizes_of(tiers, stride["dp"], table.dp), sizes_of(tiers, stride["cp"], table.cp))
    replicas = table.tp * table.cp * table.dp // (table.etp * table.ep)
    return ProcessGroups(
        tensor=sizes_of(tiers, stride["tp"], table.tp),
        context=sizes_of(tiers, stride["cp"], table.cp),
        data=data,
        expert=_stage_group(tiers, table, stride["pp"], table.etp, table.ep),
        expert_tensor=_stage_group(tiers, table, stride["pp"], 1, table.etp),
        experts_data=_stage_group(tiers, table, stride["pp"], table.etp * table.ep, replicas),
        stages=neighbours_of(tiers, table.pp, stride["pp"]),
    )


def alike_grids(problem: Problem, table: Any) -> tuple[Any, Any]:
    """Grids with equal costs: (representatives, which of them each row equals).

    Rows that differ in `axis_order` alone have equal costs under two conditions. Every group has the same
    sizes per tier, and neighbouring stages have the same tiers between them with as many senders. The first
    of them is the representative.
    """
    groups = groups_of(problem, table)
    sizes = [size for f in fields(ProcessGroups) if f.name != "stages" for size in getattr(groups, f.name)]
    borders = (*groups.stages.borders, *groups.stages.strides, *groups.stages.senders)
    names = ("tp", "cp", "cp_kind", "pp", "dp", "ep", "etp", "micro_batch_size", "sequence_parallel")
    columns = [np.broadcast_to(column, table.tp.shape) for column in (*sizes, *borders)]
    return distinct_rows([*(getattr(table, name) for name in names), *columns])


def _stage_group(tiers: Sequence[Tier], table: Any, pp_stride: Any, offset: Any, size: Any) -> Sizes:
    """Sizes of groups of `size` ranks, `offset` apart in the order of one stage's ranks.

    The ranks of a stage are contiguous up to the pipeline axis' stride and pp times as far apart beyond it. A
    group that crosses this border joins an inner and an outer group.
    """
    inner = np.gcd(size, np.maximum(pp_stride // np.maximum(offset, 1), 1))
    outer = size // inner
    far = np.maximum(offset * inner, pp_stride) * table.pp
    distant = np.where(offset * inner < pp_stride, offset * inner, far)
    near = np.where(offset < pp_stride, offset, offset * table.pp)
    return joined(sizes_of(tiers, near, inner), sizes_of(tiers, distant, outer))


# Collectives


@dataclass(frozen=True, slots=True)
class CollectiveModel:
    """Latency and achieved bandwidth per tier, and the collectives of the backend on groups of any sizes.

    Per tier: `alphas_s` latency of a message; `startups_s` overhead of a send, `call_overheads_s` of a
    collective, before its first byte; `bytes_per_s` per rank while all send, `flow_bytes_per_s` of a rank
    that sends alone; `in_switch` 1 where the switch reduces; `partial` factor for rings through some devices
    of a group; `pairwise` factor for bidirectional exchanges; `inner_spans` devices of a group below;
    `part_shares` link shares of small groups.
    """

    alphas_s: tuple[float, ...]
    startups_s: tuple[float, ...]
    call_overheads_s: tuple[float, ...]
    bytes_per_s: tuple[float, ...]
    flow_bytes_per_s: tuple[float, ...]
    in_switch: tuple[float, ...]
    partial: tuple[Any, ...]
    pairwise: tuple[float, ...]
    inner_spans: tuple[int, ...]
    part_shares: tuple[tuple[tuple[int, float], ...], ...]
    backend: Backend = NATIVE

    def reduce_scatter_s(self, nbytes: Any, sizes: Sizes) -> Any:
        """Seconds of a reduce-scatter of a whole tensor of `nbytes`: one ring pass, or the backend's
        substitute.
        """
        substitute = (
            self.all_reduce_s
            if self.backend.substitute("reduce_scatter") == "all_reduce"
            else self.all_gather_s
        )
        return substitute(nbytes, sizes)

    def all_gather_s(self, nbytes: Any, sizes: Sizes) -> Any:
        """Seconds of an all-gather of a whole tensor of `nbytes`, or of another collective with one ring
        pass.
        """
        is_pair = np.equal(comm.group_size(sizes), 2)
        achieved = tuple(
            bytes_per_s * np.where(is_pair, pairwise, 1.0)
            for bytes_per_s, pairwise in zip(self._ring_bytes_per_s(sizes), self.pairwise, strict=True)
        )
        return comm.all_gather_s(nbytes, sizes, self.alphas_s, achieved) + self._call_overhead_s(sizes)

    def all_reduce_s(self, nbytes: Any, sizes: Sizes) -> Any:
        """Seconds of an all-reduce of a whole tensor of `nbytes`."""
        whole_s = comm.all_reduce_s(
            nbytes,
            sizes,
            self.alphas_s,
            self._ring_bytes_per_s(sizes),
            self.in_switch,
            self.backend.pair_sends,
        )
        return whole_s + self._call_overhead_s(sizes)

    def all_to_all_s(self, nbytes: Any, sizes: Sizes, outer_copies: Any = 1.0) -> Any:
        """Seconds of an all-to-all with `nbytes` sent per rank; `outer_copies` is the share beyond the
        innermost tier.
        """
        copies = (1.0,) + (outer_copies,) * (len(sizes) - 1)
        linked = zip(self._linked_bytes_per_s(sizes), self.pairwise, strict=True)
        achieved = tuple(bytes_per_s * pairwise for bytes_per_s, pairwise in linked)
        moved_s = comm.all_to_all_s(nbytes, sizes, self.alphas_s, achieved, copies)
        return moved_s + self._call_overhead_s(sizes)

    def send_s(self, nbytes: Any, tier: Any, senders: Any = 0) -> Any:
        """Seconds of one message of `nbytes` to a rank across tier `tier` (a column of indices).

        `senders` adjacent devices send at once and share the bandwidth of one that sends alone (in a node,
        the network card next to them). They get at least the bandwidth with all devices sending, which is the
        value for 0.
        """
        alpha_s = _of_tier(self.alphas_s, tier) + _of_tier(self.startups_s, tier)
        pair = self._linked_bytes_per_s((2,) * len(self.alphas_s))
        gains = [alone / all_ for alone, all_ in zip(self.flow_bytes_per_s, self.bytes_per_s, strict=True)]
        few = np.asarray(senders) > 0
        gain = np.where(few, np.maximum(_of_tier(gains, tier) / np.maximum(senders, 1), 1.0), 1.0)
        return comm.point_to_point_s(nbytes, alpha_s, _of_tier(pair, tier) * gain)

    def number_s(self, devices: Any) -> Any:
        """Seconds of an all-reduce of one number over all devices: a tree over the outermost tier."""
        return 2.0 * np.log2(devices) * self.alphas_s[-1]

    def _linked_bytes_per_s(self, sizes: Sizes) -> tuple[Any, ...]:
        """Achieved bandwidth of groups of these sizes on each tier, over the links inside the group."""
        achieved = []
        for size, bytes_per_s, shares in zip(sizes, self.bytes_per_s, self.part_shares, strict=True):
            share: Any = 1.0
            for members, part in shares:
                share = np.where(np.asarray(size) >= members, part, share)
            achieved.append(bytes_per_s * share)
        return tuple(achieved)

    def _ring_bytes_per_s(self, sizes: Sizes) -> tuple[Any, ...]:
        """Achieved bandwidth of rings through groups of these sizes on each tier."""
        inside: Any = 1
        achieved = []
        tiers = zip(sizes, self._linked_bytes_per_s(sizes), self.partial, self.inner_spans, strict=True)
        for size, bytes_per_s, partial, span in tiers:
            is_partial = (inside > 1) & (inside < span)
            achieved.append(bytes_per_s * np.where(is_partial, partial, 1.0))
            inside = inside * size
        return tuple(achieved)

    def _call_overhead_s(self, sizes: Sizes) -> Any:
        return comm.flat_ring_alpha_s(sizes, self.call_overheads_s)


def _of_tier(figures: Sequence[Any], tier: Any) -> Any:
    """The figure of the tier in each row; figures may be columns themselves."""
    return np.choose(tier, [np.broadcast_to(figure, np.shape(tier)) for figure in figures])


def _has_several_links(tier: Tier, span: int) -> Any:
    """Whether `span` devices below the tier have together more bandwidth than one has alone.

    If so, a ring through some of them has fewer network cards than one through all. With a single card per
    node, all rings use that card.
    """
    return span * tier.bytes_per_s > tier.flow_bytes_per_s * (1 + 1e-9)


def collective_model_of(problem: Machine) -> CollectiveModel:
    """The cluster's tiers with the efficiency curves of their collectives: scale-out for network tiers, else
    scale-up.
    """
    efficiency = problem.efficiency
    curves = [efficiency.scale_out if tier.is_network else efficiency.scale_up for tier in problem.tiers]
    inner_spans = (1, *(tier.span for tier in problem.tiers[:-1]))
    fractions = [
        curve.fraction * (tier.span / span) ** -curve.crowding
        for tier, curve, span in zip(problem.tiers, curves, inner_spans, strict=True)
    ]
    pairs = list(zip(problem.tiers, fractions, strict=True))
    return CollectiveModel(
        alphas_s=tuple(tier.latency_s for tier in problem.tiers),
        startups_s=tuple(curve.startup_s for curve in curves),
        call_overheads_s=tuple(curve.before_s for curve in curves),
        bytes_per_s=tuple(fraction * tier.bytes_per_s for tier, fraction in pairs),
        flow_bytes_per_s=tuple(fraction * tier.flow_bytes_per_s for tier, fraction in pairs),
        in_switch=tuple(1.0 if tier.in_switch_reduction else 0.0 for tier in problem.tiers),
        partial=tuple(
            np.where(_has_several_links(tier, span), curve.partial_fraction, 1.0)
            for tier, curve, span in zip(problem.tiers, curves, inner_spans, strict=True)
        ),
        pairwise=tuple(curve.exchange_fraction for curve in curves),
        inner_spans=inner_spans,
        part_shares=tuple(tier.part_shares for tier in problem.tiers),
        backend=problem.backend,
    )
