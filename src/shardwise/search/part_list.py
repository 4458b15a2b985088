"""Which parts of a cluster have candidates, each with the least that a step can take on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import prod

import numpy as np

from shardwise.cluster import Parts, Selection
from shardwise.search.part_bounds import DegreeBounds, DeviceWork
from shardwise.search.question import Question
from shardwise.search.space import Degrees

MOST_COMBINED_POOLS = 8
"""Pools of which every set is considered, at most: 255 sets."""

MOST_COUNTS = 1 << 16
"""Numbers of nodes of the pools of one set that are considered, at most; of more, all nodes or none."""


@dataclass(frozen=True, slots=True)
class BoundedPart:
    """A part with its devices, what its nodes cost (USD per hour; None: no price), the device-seconds of a
    step on its pools, and seconds of a step, at least; infinity where it has no candidates."""

    part: Selection
    devices: int
    usd_per_hour: float | None
    work: DeviceWork
    least_s: float


@dataclass(frozen=True, slots=True)
class PartList:
    """The parts of a cluster that have legal degrees, how many have none, and how many were not considered,
    where there are too many."""

    bounds: DegreeBounds
    parts: list[BoundedPart]
    without_candidates: int
    unconsidered: int

    def degrees_below(self, one: BoundedPart, below_s: float) -> list[Degrees]:
        """The degrees with which a step on the part may take less than `below_s`."""
        return self.bounds.degrees_below(one.work, one.devices, below_s)

    @property
    def device_counts(self) -> frozenset[int]:
        """How many devices a part may have."""
        return frozenset(one.devices for one in self.parts)


def listed_parts(question: Question, parts: Parts) -> PartList:
    """The parts of the question's cluster, each with its quick bound."""
    bounds = DegreeBounds(question.candidates(), question.problem().limits, question.cluster.devices)
    found: list[BoundedPart] = []
    considered = 0
    for pools in _sets_of_pools(len(parts.pools)):
        whole = Selection(
            nodes=tuple(pool.nodes if place in pools else 0 for place, pool in enumerate(parts.pools))
        )
        work = bounds.work(replace(question, cluster=parts.cluster_of(whole)).problem())
        least_s = bounds.least_s(work)
        for part in _parts_of(parts, pools):
            considered += 1
            devices = parts.devices_of(part)
            if np.isfinite(least_s[devices]):
                price = parts.price_of(part)
                found.append(BoundedPart(part, devices, price, work, float(least_s[devices])))
    every = prod(pool.nodes + 1 for pool in parts.pools) - 1
    every += sum(pool.node.devices - 1 for pool in parts.pools)
    return PartList(bounds, found, considered - len(found), every - considered)


def _sets_of_pools(pools: int) -> Iterator[tuple[int, ...]]:
    """Every set of pools, single ones first; where there are too many, single ones and all of them."""
    sizes = range(1, pools + 1) if pools <= MOST_COMBINED_POOLS else (1, pools)
    for size in sizes:
        yield from combinations(range(pools), size)


def _parts_of(parts: Parts, pools: tuple[int, ...]) -> Iterator[Selection]:
    """The parts with nodes of all of these pools and of no other."""
    counts = [parts.pools[place].nodes for place in pools]
    each = [range(1, count + 1) for count in counts] if prod(counts) <= MOST_COUNTS else [[c] for c in counts]
    for chosen in product(*each):
        nodes = dict(zip(pools, chosen, strict=True))
        yield Selection(nodes=tuple(nodes.get(place, 0) for place in range(len(parts.pools))))
    if len(pools) == 1:
        yield from parts.within_a_node(pools[0])
