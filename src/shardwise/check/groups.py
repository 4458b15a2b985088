"""Which ranks talk to each other, and over which tiers (docs/cost-model.md, section 4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.check.rows import Column, Rows, strides
from shardwise.cluster import Cluster

Sizes = tuple[Column, ...]
"""For each tier, innermost first, how many groups of the tier below meet in one of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups of every row; `hop_tier` is the tier between neighbouring stages."""

    tensor: Sizes
    context: Sizes
    data: Sizes
    expert: Sizes
    expert_tensor: Sizes
    expert_data: Sizes
    expert_replicas: Column
    hop_tier: Column


def groups_of(rows: Rows, cluster: Cluster) -> Groups:
    """The groups of the rows on the tiers of the cluster."""
    spans = [tier.span for tier in cluster.tiers]
    stride = strides(rows)
    pp_stride = stride["pp"]
    replicas = rows.tp * rows.cp * rows.dp // (rows.etp * rows.ep)

    def within_stage(offset: Column, size: Column) -> Sizes:
        """Ranks of one stage, `offset` apart if the stage's ranks are counted one after another."""
        few = np.gcd(size, np.maximum(pp_stride // offset, 1))
        near = np.where(offset < pp_stride, offset, offset * rows.pp)
        beyond = np.maximum(offset * few, pp_stride) * rows.pp
        reach = np.where(offset * few < pp_stride, offset * few, beyond)
        return joined(sizes(spans, near, few), sizes(spans, reach, size // few))

    ones = np.ones_like(rows.tp)
    return Groups(
        tensor=sizes(spans, stride["tp"], rows.tp),
        context=sizes(spans, stride["cp"], rows.cp),
        data=joined(sizes(spans, stride["dp"], rows.dp), sizes(spans, stride["cp"], rows.cp)),
        expert=within_stage(rows.etp, rows.ep),
        expert_tensor=within_stage(ones, rows.etp),
        expert_data=within_stage(rows.etp * rows.ep, replicas),
        expert_replicas=replicas,
        hop_tier=sum((2 * pp_stride > span for span in spans[:-1]), start=0 * pp_stride),
    )


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
    found, rest = [], count
    for size in group[:-1]:
        part = np.gcd(size, rest)
        found.append(part)
        rest = rest // part
    return (*found, rest)


def outer(group: Sizes, part: Sizes) -> Sizes:
    """The sizes of the groups that join equal members of the parts."""
    return tuple(np.maximum(whole // piece, 1) for whole, piece in zip(group, part, strict=True))
