"""Seconds of collectives on tiers (docs/concepts/cost-model.md, section 5). `nbytes` is always the whole
tensor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.check.groups import Sizes
from shardwise.check.rows import Column
from shardwise.cluster import Backend, Cluster, Efficiency


@dataclass(frozen=True, slots=True)
class TierCost:
    """One tier: seconds per hop, bytes per second, seconds before the first byte moves.

    Rings through more than one but not all of the `inside` devices below the tier reach the share `partial`,
    unless one card is the only way out for all of these. Groups of at least so many members of the tier have
    the share of `links` that stands beside the number. A device that sends alone reaches `lone_factor` times
    that, two that send to each other `pairwise` times. At a collective, not at a message, ranks wait `wait_s`
    for each other."""

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

    @property
    def has_several_links(self) -> bool:
        """Whether the devices below the tier have more in all than one of them alone."""
        return self.inside > self.lone_factor * (1 + 1e-9)

    def bandwidth(self, members: Column) -> Column:
        """Bytes per second that so many members reach over the links between them."""
        if not self.links:
            return self.bytes_per_s
        share: Column = np.ones(np.shape(members))
        for least, part in self.links:
            share = np.where(np.greater_equal(members, least), part, share)
        return self.bytes_per_s * share


Fabric = tuple[TierCost, ...]


def fabric_of(cluster: Cluster, efficiency: Efficiency) -> Fabric:
    """The tiers, innermost first, at the pace of the efficiency's curves."""
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
            )
        )
        inside = tier.span
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Crossed:
    """Of the tiers that a group crosses: the largest latency, start and transfer time; and one trip around a
    ring, of two members too, which send to each other."""

    members: Column
    latency_s: Column
    start_s: Column
    transfer_s: Column
    ring_s: Column
    pairwise_s: Column
    in_switch: Column


def _crossed(fabric: Fabric, nbytes: Column, group: Sizes) -> _Crossed:
    below: Column = 1
    latency: Column = 0.0
    start: Column = 0.0
    transfer: Column = 0.0
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
        pairwise_transfer = np.maximum(pairwise_transfer, seconds / tier.pairwise)
        in_switch = in_switch & (tier.in_switch | ~crosses)
        below = below * size
    hops_s, share = (below - 1) * latency, (below - 1) / below
    ring_s = hops_s + share * transfer
    pairwise_s = np.where(below == 2, hops_s + share * pairwise_transfer, ring_s)
    return _Crossed(below, latency, start, transfer, ring_s, pairwise_s, in_switch)


def all_gather_s(fabric: Fabric, nbytes: Column, group: Sizes) -> Column:
    """Once around a ring: an all-gather of a rank's output of `nbytes`."""
    crossed = _crossed(fabric, nbytes, group)
    return crossed.pairwise_s + crossed.start_s


def reduce_scatter_s(fabric: Fabric, backend: Backend, nbytes: Column, group: Sizes) -> Column:
    """Reduce-scatter of a rank's input of `nbytes`; some backends have none and sum it everywhere."""
    if backend.substitute("reduce_scatter") == "all_reduce":
        return all_reduce_s(fabric, nbytes, group)
    return all_gather_s(fabric, nbytes, group)


def all_reduce_s(fabric: Fabric, nbytes: Column, group: Sizes) -> Column:
    """All-reduce: reduce-scatter and all-gather, or two trees, or in the switches."""
    crossed = _crossed(fabric, nbytes, group)
    trees = 2 * np.log2(crossed.members) * crossed.latency_s + 2 * crossed.transfer_s
    switched = np.where(crossed.in_switch, 2 * crossed.latency_s + crossed.transfer_s, np.inf)
    return np.minimum(np.minimum(2 * crossed.ring_s, trees), switched) + crossed.start_s


def all_to_all_s(fabric: Fabric, nbytes: Column, group: Sizes, copies: Column) -> Column:
    """Every rank sends `nbytes` in all, of which beyond the innermost tier the share `copies`."""
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
    """One message to a rank behind `tier`, beside those of a `senders` of neighbours (0: all devices
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
