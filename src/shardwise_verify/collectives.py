"""Groups of ranks on the network tiers (docs/concepts/cost-model.md, section 4), and seconds of collectives
over them (section 5): all-gather, reduce-scatter, all-reduce, all-to-all, send.

`nbytes` is always the full tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise_verify.records import ClusterRecord, EfficiencyRecord, LibraryRecord
from shardwise_verify.strategy_rows import Column, StrategyRows, strides

Sizes = tuple[Column, ...]
"""For each tier, innermost first: the number of groups of the tier below that a group of ranks spans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups of every row.

    Neighbouring stages: on each tier but the last, a tier group begins every `hop_every` / `hop_steps` stages
    (in lowest terms); 1 and 1 where no two neighbouring stages share one. `hop_senders` is the number of
    devices of a group of the tier below that send at once over each tier; 0 where none send, or where each
    reaches only its share of the bandwidth.
    """

    tensor: Sizes
    context: Sizes
    data: Sizes
    expert: Sizes
    expert_tensor: Sizes
    expert_data: Sizes
    expert_replicas: Column
    hop_every: Sizes
    hop_steps: Sizes
    hop_senders: Sizes


def groups_of(rows: StrategyRows, cluster: ClusterRecord) -> Groups:
    """The groups of the rows on the tiers of the cluster."""
    spans = [tier.span for tier in cluster.tiers]
    stride = strides(rows)
    pp_stride = stride["pp"]
    replicas = rows.tp * rows.cp * rows.dp // (rows.etp * rows.ep)

    def within_stage(offset: Column, size: Column) -> Sizes:
        """A group within one stage, whose members are `offset` apart in the numbering of the stage's
        ranks."""
        few = np.gcd(size, np.maximum(pp_stride // offset, 1))
        near_stride = np.where(offset < pp_stride, offset, offset * rows.pp)
        outer_stride = np.maximum(offset * few, pp_stride) * rows.pp
        distant_stride = np.where(offset * few < pp_stride, offset * few, outer_stride)
        return joined(sizes(spans, near_stride, few), sizes(spans, distant_stride, size // few))

    ones = np.ones_like(rows.tp)
    return Groups(
        tensor=sizes(spans, stride["tp"], rows.tp),
        context=sizes(spans, stride["cp"], rows.cp),
        data=joined(sizes(spans, stride["dp"], rows.dp), sizes(spans, stride["cp"], rows.cp)),
        expert=within_stage(rows.etp, rows.ep),
        expert_tensor=within_stage(ones, rows.etp),
        expert_data=within_stage(rows.etp * rows.ep, replicas),
        expert_replicas=replicas,
        **_borders(spans, pp_stride, rows.pp),
        hop_senders=_hop_senders(cluster, pp_stride, rows.pp),
    )


def _borders(spans: list[int], stride: Column, pp: Column) -> dict[str, Sizes]:
    """`hop_every` and `hop_steps` of pipelines whose stages are `stride` ranks apart."""
    every, steps = [], []
    for span in spans[:-1]:
        # Pipelines begin at multiples of pp * stride, groups at multiples of span.
        border = np.gcd(pp * stride, span)
        unit = np.where(border < 2 * stride, 0, np.gcd(border, stride))
        every.append(np.where(unit == 0, 1, border // np.maximum(unit, 1)))
        steps.append(np.where(unit == 0, 1, stride // np.maximum(unit, 1)))
    return {"hop_every": tuple(every), "hop_steps": tuple(steps)}


def _hop_senders(cluster: ClusterRecord, stride: Column, pp: Column) -> Sizes:
    """`hop_senders`: the ranks of a stage are neighbours; all of them send, or as many as a group has."""
    found, below = [], 1
    for tier in cluster.tiers:
        senders = np.minimum(stride, below)
        leaves = (pp > 1) & ((below == 1) | (below % (pp * stride) != 0))
        gains = tier.flow_bytes_per_s / tier.bytes_per_s > senders
        found.append(np.where(leaves & gains, senders, 0))
        below = tier.span
    return tuple(found)


def hop_senders(groups: Groups, tier: Column) -> Column:
    """Number of neighbouring devices that send at once where `tier` is between two stages."""
    return np.choose(tier, groups.hop_senders)


def hop_tier(groups: Groups, first: int, second: int) -> Column:
    """The tier between the pipeline ranks `first` and `second` > `first`, in the worst pipeline: the tier
    whose group border is among the ranks of the two stages."""
    found: Column = 0
    for every, steps in zip(groups.hop_every, groups.hop_steps, strict=True):
        begin, end = first * steps, (second + 1) * steps
        next_border = (begin // every + 1) * every
        found = found + (next_border < end)
    return found


def sizes(spans: list[int], stride: Column, size: Column) -> Sizes:
    """The sizes of a group of `size` ranks that are `stride` apart; `spans` are those of the tiers,
    innermost first."""
    found = []
    before = np.ones_like(size)
    for span in spans[:-1]:
        fits = np.where(span % stride == 0, span // stride, 1)
        members = np.maximum(before, np.gcd(size, fits))
        found.append(members // before)
        before = members
    return (*found, np.maximum(before, size) // before)


def joined(first: Sizes, second: Sizes) -> Sizes:
    """The sizes of a group along two axes."""
    return tuple(a * b for a, b in zip(first, second, strict=True))


def inner(group: Sizes, count: Column) -> Sizes:
    """The sizes of the `count` closest members of a group."""
    found, remaining = [], count
    for size in group[:-1]:
        part = np.gcd(size, remaining)
        found.append(part)
        remaining = remaining // part
    return (*found, remaining)


def outer(group: Sizes, part: Sizes) -> Sizes:
    """The sizes of the groups that connect equal members of the parts."""
    return tuple(np.maximum(whole // part_size, 1) for whole, part_size in zip(group, part, strict=True))


@dataclass(frozen=True, slots=True)
class TierCost:
    """Costs of one tier: seconds per hop, bytes per second, seconds before the first byte (call overhead).

    Rings through several but not all of the `inside` devices below the tier reach the share `partial`, unless
    these devices share one card. `links` are pairs: groups of at least that many members reach that share of
    the bandwidth. A device that sends alone reaches `lone_factor` times the bandwidth, two devices that send
    to each other `pairwise` times. In a collective, but not in a send, ranks wait `wait_s` for each other.
    With `has_trees` two members of the tier all-reduce by trees in which each sends the tensor once.
    """

    latency_s: float
    bytes_per_s: float
    start_s: float
    in_switch: bool
    partial: float
    inside: int
    links: tuple[tuple[int, float], ...] = ()
    lone_factor: float = 1.0
    pairwise: float = 1.0
    wait_s: float = 0.0
    has_trees: bool = True

    @property
    def has_several_links(self) -> bool:
        """Whether the devices below the tier together have more bandwidth than one alone."""
        return self.inside > self.lone_factor * (1 + 1e-9)

    def bandwidth(self, members: Column) -> Column:
        """Bytes per second that this many members reach over the links between them."""
        if not self.links:
            return self.bytes_per_s
        share: Column = np.ones(np.shape(members))
        for least, part in self.links:
            share = np.where(np.greater_equal(members, least), part, share)
        return self.bytes_per_s * share


Fabric = tuple[TierCost, ...]


def fabric_of(cluster: ClusterRecord, efficiency: EfficiencyRecord, backend: LibraryRecord) -> Fabric:
    """The tiers, innermost first, with the bandwidths of the efficiency curves. Libraries that lack some
    collective have no trees."""
    found = []
    inside = 1
    for tier in cluster.tiers:
        curve = efficiency.scale_out if tier.is_network else efficiency.scale_up
        found.append(
            TierCost(
                latency_s=tier.latency_s,
                bytes_per_s=curve.fraction * tier.bytes_per_s / (tier.span / inside) ** curve.crowding,
                start_s=curve.startup_s,
                in_switch=tier.in_switch_reduction,
                partial=curve.partial_fraction,
                inside=inside,
                links=tier.part_shares,
                lone_factor=tier.flow_bytes_per_s / tier.bytes_per_s,
                pairwise=curve.exchange_fraction,
                wait_s=curve.lockstep_s,
                has_trees=not backend.instead,
            )
        )
        inside = tier.span
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Crossed:
    """Over the tiers that a group crosses: the largest latency, start and transfer time, and the largest
    time of all that a tree sends; and one trip around a ring, also for two members that send to each other
    (`pairwise_s`)."""

    members: Column
    latency_s: Column
    start_s: Column
    transfer_s: Column
    tree_s: Column
    ring_s: Column
    pairwise_s: Column
    in_switch: Column


def _crossed(fabric: Fabric, nbytes: Column, group: Sizes) -> _Crossed:
    below: Column = 1
    latency: Column = 0.0
    start: Column = 0.0
    transfer: Column = 0.0
    tree: Column = 0.0
    pairwise_transfer: Column = 0.0
    in_switch: Column = True
    for tier, size in zip(fabric, group, strict=True):
        crosses = size > 1
        bandwidth = tier.bandwidth(size)
        if tier.has_several_links and tier.partial != 1.0:
            bandwidth = bandwidth * np.where((below > 1) & (below < tier.inside), tier.partial, 1.0)
        seconds = np.where(crosses, nbytes / (below * bandwidth), 0.0)
        latency = np.maximum(latency, np.where(crosses, tier.latency_s, 0.0))
        start = np.maximum(start, np.where(crosses, tier.start_s + tier.wait_s, 0.0))
        transfer = np.maximum(transfer, seconds)
        tree = np.maximum(tree, seconds * np.where((size == 2) & tier.has_trees, 1, 2))
        pairwise_transfer = np.maximum(pairwise_transfer, seconds / tier.pairwise)
        in_switch = in_switch & (tier.in_switch | ~crosses)
        below = below * size
    hops_s, share = (below - 1) * latency, (below - 1) / below
    ring_s = hops_s + share * transfer
    pairwise_s = np.where(below == 2, hops_s + share * pairwise_transfer, ring_s)
    return _Crossed(below, latency, start, transfer, tree, ring_s, pairwise_s, in_switch)


def all_gather_s(fabric: Fabric, nbytes: Column, group: Sizes) -> Column:
    """All-gather with an output of `nbytes` per rank: once around a ring."""
    crossed = _crossed(fabric, nbytes, group)
    return crossed.pairwise_s + crossed.start_s


def reduce_scatter_s(fabric: Fabric, backend: LibraryRecord, nbytes: Column, group: Sizes) -> Column:
    """Reduce-scatter of an input of `nbytes` per rank; backends without it use an all-reduce."""
    if backend.instead.get("reduce_scatter") == "all_reduce":
        return all_reduce_s(fabric, nbytes, group)
    return all_gather_s(fabric, nbytes, group)


def all_reduce_s(fabric: Fabric, nbytes: Column, group: Sizes) -> Column:
    """All-reduce: reduce-scatter and all-gather, two trees, or in-switch reduction, whichever is fastest."""
    crossed = _crossed(fabric, nbytes, group)
    trees = 2 * np.log2(crossed.members) * crossed.latency_s + crossed.tree_s
    switched = np.where(crossed.in_switch, 2 * crossed.latency_s + crossed.transfer_s, np.inf)
    return np.minimum(np.minimum(2 * crossed.ring_s, trees), switched) + crossed.start_s


def all_to_all_s(fabric: Fabric, nbytes: Column, group: Sizes, copies: Column) -> Column:
    """All-to-all: every rank sends `nbytes`, the share `copies` of it beyond the innermost tier."""
    crossed = _crossed(fabric, nbytes, group)
    below: Column = 1
    slowest: Column = 0.0
    for place, (tier, size) in enumerate(zip(fabric, group, strict=True)):
        share = 1.0 if place == 0 else copies
        sent = nbytes * share * (size - 1) * below / crossed.members
        slowest = np.maximum(slowest, sent / (tier.bandwidth(size) * tier.pairwise))
        below = below * size
    return crossed.latency_s + slowest + crossed.start_s


def send_s(fabric: Fabric, nbytes: Column, tier: Column, senders: Column | int = 0) -> Column:
    """Send of one message over `tier`, while `senders` neighbouring devices send at once (0: all devices
    send)."""
    latency = np.array([cost.latency_s for cost in fabric])[tier]
    start = np.array([cost.start_s for cost in fabric])[tier]
    speed = np.array([cost.bandwidth(2) for cost in fabric])[tier]
    lone_factor = np.array([cost.lone_factor for cost in fabric])[tier]
    several = np.maximum(senders, 1)
    return (
        latency
        + start
        + nbytes / np.where(np.equal(senders, 0), speed, speed * np.maximum(1, lone_factor / several))
    )
