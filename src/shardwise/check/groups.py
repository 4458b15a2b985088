"""Which ranks talk to each other, and over which tiers (docs/concepts/cost-model.md, section 4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.check.rows import Column, StrategyRows, strides
from shardwise.cluster import Cluster

Sizes = tuple[Column, ...]
"""For each tier, innermost first, how many groups of the tier below meet in one of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups of every row.

    Neighbouring stages: of each tier but the last, a group begins every `hop_every` / `hop_steps` stages (in
    lowest terms); 1 and 1 where no two neighbours are in one group. Over each tier `hop_senders` devices of a
    group of the one below hand over at once; 0 where none do, or so many that each has its share of all.
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


def groups_of(rows: StrategyRows, cluster: Cluster) -> Groups:
    """The groups of the rows on the tiers of the cluster."""
    spans = [tier.span for tier in cluster.tiers]
    stride = strides(rows)
    pp_stride = stride["pp"]
    replicas = rows.tp * rows.cp * rows.dp // (rows.etp * rows.ep)

    def within_stage(offset: Column, size: Column) -> Sizes:
        """Ranks of one stage, `offset` apart if the stage's ranks are counted one after another."""
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
    """`hop_every` and `hop_steps` of pipelines whose stages lie `stride` ranks apart."""
    every, steps = [], []
    for span in spans[:-1]:
        # Pipelines begin at multiples of pp * stride, groups at multiples of span.
        border = np.gcd(pp * stride, span)
        unit = np.where(border < 2 * stride, 0, np.gcd(border, stride))
        every.append(np.where(unit == 0, 1, border // np.maximum(unit, 1)))
        steps.append(np.where(unit == 0, 1, stride // np.maximum(unit, 1)))
    return {"hop_every": tuple(every), "hop_steps": tuple(steps)}


def _hop_senders(cluster: Cluster, stride: Column, pp: Column) -> Sizes:
    """`hop_senders`: a stage's ranks are neighbours, so many of them as there are, or as a group has."""
    found, below = [], 1
    for tier in cluster.tiers:
        senders = np.minimum(stride, below)
        leaves = (pp > 1) & ((below == 1) | (below % (pp * stride) != 0))
        gains = tier.flow_bytes_per_s / tier.bytes_per_s > senders
        found.append(np.where(leaves & gains, senders, 0))
        below = tier.span
    return tuple(found)


def hop_senders(groups: Groups, tier: Column) -> Column:
    """How many devices next to each other hand over at once where `tier` lies between two stages."""
    return np.choose(tier, groups.hop_senders)


def hop_tier(groups: Groups, first: int, second: int) -> Column:
    """The tier between the pipeline ranks `first` and `second` > `first`, where the pair lies worst: the
    first one's ranks and those of the second together reach over a group's border."""
    found: Column = 0
    for every, steps in zip(groups.hop_every, groups.hop_steps, strict=True):
        begin, end = first * steps, (second + 1) * steps
        next_border = (begin // every + 1) * every
        found = found + (next_border < end)
    return found


def sizes(spans: list[int], stride: Column, size: Column) -> Sizes:
    """The sizes of a group of `size` ranks that lie `stride` apart; `spans` of the tiers, innermost first."""
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
    """The sizes of the groups that join equal members of the parts."""
    return tuple(np.maximum(whole // part_size, 1) for whole, part_size in zip(group, part, strict=True))
