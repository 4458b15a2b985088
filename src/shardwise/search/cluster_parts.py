"""The part of a cluster that a plan uses: the one with the best objective value (docs/reference/space.md).

`listed_parts` lists the parts with their quick bound: the computation of a step, divided over all devices of
the part. It lists no grids; a device count without legal degrees has no candidates. `best_part` searches the
parts in order of their quick bound and prunes those that cannot be better. `is_mixed` says on which clusters
uneven plans are searched too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product
from math import inf, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cluster import Cluster, Parts, Selection, pools_of
from shardwise.cost import Problem, any_micro_batch_compute_bound_s
from shardwise.errors import ConfigError
from shardwise.plans import PROVEN_GAP, SearchedPart, usd_per_step
from shardwise.search.bnb.incumbent import Fastest, Goal
from shardwise.search.bnb.solver import SearchResult
from shardwise.search.clock import SearchClock
from shardwise.search.question import Question
from shardwise.search.space import Degrees, Space, divisors
from shardwise.strategy import CP_KINDS, GRID_RULES, Limits, StrategyTable, first_broken

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


# Quick bounds of parts


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """Lower bound of the device-seconds of a step by tp * cp, and the host seconds added to their share."""

    by_width: Mapping[int, float]
    host_s: float

    def least_s(self, width: int, devices: Any) -> Any:
        """Lower bound in seconds of a step on `devices` devices, where `width` is tp * cp."""
        return self.by_width[width] / devices + self.host_s


class DegreeBounds:
    """Bounds for one space and job, on up to `most` devices of one or several kinds."""

    def __init__(self, space: Space, limits: Limits, most: int) -> None:
        self._space, self._limits, self._most = space, limits, most

    def work(self, problem: Problem) -> DeviceWork:
        """The device-seconds of a step on the devices of `problem`.

        A sample takes least in the largest micro-batch, which is the whole batch on one replica. All replicas
        and stages share its device-seconds.
        """
        table, host_s = self._shapes, problem.profile.host_step_s
        if not len(table):
            return DeviceWork({}, host_s)
        widths = np.asarray(table.tp * table.cp)
        work = (any_micro_batch_compute_bound_s(problem, table) - host_s) * widths
        return DeviceWork(
            {width: float(work[widths == width].min()) for width in np.unique(widths).tolist()}, host_s
        )

    def least_s(self, work: DeviceWork) -> Floats:
        """Lower bounds in seconds of a step, indexed by the number of devices; infinity if no degrees are
        legal, and at index 0."""
        found = np.full(self._most + 1, np.inf)
        for width in work.by_width:
            counts = width * self._replicas_by_stages
            counts = counts[counts <= self._most]
            found[counts] = np.minimum(found[counts], work.least_s(width, counts))
        return found

    def legal_counts(self) -> NDArray[np.bool_]:
        """Whether some degrees are legal on each number of devices, from 0 to the most."""
        found = np.zeros(self._most + 1, dtype=np.bool_)
        for width in np.unique(np.asarray(self._shapes.tp * self._shapes.cp)).tolist():
            counts = width * self._replicas_by_stages
            found[counts[counts <= self._most]] = True
        return found

    def degrees_below(self, work: DeviceWork, devices: int, below_s: float) -> list[Degrees]:
        """The legal degrees on `devices` devices whose bound is below `below_s`."""
        table = self._shapes
        pairs = dict.fromkeys(zip(table.tp.tolist(), table.cp.tolist(), strict=True))
        return [
            (tp, cp, devices // (tp * cp * pp), pp)
            for tp, cp in pairs
            if devices % (tp * cp) == 0 and work.least_s(tp * cp, devices) < below_s
            for pp in self._stages
            if devices % (tp * cp * pp) == 0 and devices // (tp * cp * pp) in self._replicas
        ]

    @cached_property
    def _shapes(self) -> StrategyTable:
        """Every legal choice of tp, cp and expert degrees of one replica without pipeline stages, whose
        micro-batch is the whole batch."""
        space, limits = self._space, self._limits
        of_heads = divisors(limits.heads)
        of_sequence = (1,) if space.is_core else divisors(limits.seq_len)
        tps = [tp for tp in space.allowed("tp", of_heads) if tp <= self._most]
        cps = [cp for cp in space.allowed("cp", of_sequence) if cp <= self._most]
        experts = self._expert_degrees()
        rows = [
            (tp, cp, etp if experts else 1, ep, kind, sequence_parallel)
            for tp in tps
            for cp in cps
            if tp * cp <= self._most
            for etp, ep in (experts or [(1, 1)])
            if not (space.is_core and experts and etp != tp)
            for kind in (range(len(CP_KINDS)) if cp > 1 else (0,))
            for sequence_parallel in ((1, 0) if tp > 1 else (0,))
        ]
        names = ("tp", "cp", "etp", "ep", "cp_kind", "sequence_parallel")
        columns = np.array(rows, dtype=np.int64).reshape(-1, len(names)).T
        ones = np.ones(columns.shape[1], dtype=np.int64)
        table = space.plain({**dict(zip(names, columns, strict=True)), "dp": ones, "pp": ones})
        table = table.replaced(micro_batch_size=limits.global_batch_size * ones)
        return table.take(np.flatnonzero(first_broken(table, limits, GRID_RULES) < 0))

    def _expert_degrees(self) -> list[tuple[int, int]]:
        """Every pair of etp and ep; none if the model has no experts."""
        if not self._space.experts:
            return []
        limits = self._limits
        etps = self._space.allowed("etp", divisors(limits.expert_ffn))
        eps = (1,) if self._space.is_core else self._space.allowed("ep", divisors(limits.experts))
        return [(etp, ep) for etp in etps for ep in eps if etp * ep <= self._most]

    @cached_property
    def _replicas(self) -> frozenset[int]:
        """Every legal dp."""
        return frozenset(self._space.allowed("dp", divisors(self._limits.global_batch_size)))

    @cached_property
    def _stages(self) -> list[int]:
        """Every legal pp."""
        return self._space.allowed("pp", range(1, self._limits.layers + 1))

    @cached_property
    def _replicas_by_stages(self) -> Ints:
        """Every product of a legal dp and a legal pp, ascending."""
        dps, pps = np.array(sorted(self._replicas), dtype=np.int64), np.array(self._stages, dtype=np.int64)
        return np.unique(dps[:, None] * pps[None, :])


# List of parts

MOST_COMBINED_POOLS = 8
"""Largest number of pools of which all sets are considered (255 sets); beyond, single pools and all pools."""

MOST_COUNTS = 1 << 16
"""Largest number of combinations of node counts considered for one set of pools; beyond, each pool is used
completely."""


@dataclass(frozen=True, slots=True)
class BoundedPart:
    """A part with its devices, the price of its nodes (USD per hour; None: unknown), the device-seconds of a
    step on its pools, and its quick bound in seconds."""

    part: Selection
    devices: int
    usd_per_hour: float | None
    work: DeviceWork
    least_s: float


@dataclass(frozen=True, slots=True)
class PartList:
    """The parts of a cluster that have legal degrees, the number of parts without any, and the number of
    parts that were not considered because there are too many."""

    bounds: DegreeBounds
    parts: list[BoundedPart]
    without_candidates: int
    unconsidered: int

    def degrees_below(self, one: BoundedPart, below_s: float) -> list[Degrees]:
        """The degrees with which a step on the part may take less than `below_s`."""
        return self.bounds.degrees_below(one.work, one.devices, below_s)


def listed_parts(question: Question, parts: Parts, clock: SearchClock | None = None) -> PartList:
    """The parts of the question's cluster, each with its quick bound. The others are not considered where the
    user interrupts, or where the cluster has many pools and time is over."""
    bounds = DegreeBounds(question.candidates(), question.problem().limits, question.cluster.devices)
    found: list[BoundedPart] = []
    considered = 0
    has_many, clock = len(parts.pools) > MOST_COMBINED_POOLS, clock or SearchClock()
    for pools in _sets_of_pools(len(parts.pools)):
        if clock.is_interrupted or (has_many and found and clock.is_over):
            break
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


def device_counts(question: Question, parts: Parts) -> list[int]:
    """The device counts of the parts in `listed_parts`, ascending, without a list of the parts: their number
    is the product of the pools' nodes, that of their device counts at most the devices."""
    most = question.cluster.devices
    legal = DegreeBounds(question.candidates(), question.problem().limits, most).legal_counts()
    found = 0
    for pools in _sets_of_pools(len(parts.pools)):
        found |= _reached(parts, pools)
        if len(pools) == 1:
            found |= (1 << parts.pools[pools[0]].node.devices) - 2  # 1 and more of the devices of one node
    # A bit for each count; the bytes are read from the lowest on, so that the n-th bit is that of count n.
    bits = np.frombuffer(found.to_bytes(most // 8 + 1, "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little")[: most + 1] & legal).tolist()


def _reached(parts: Parts, pools: tuple[int, ...]) -> int:
    """The device counts of `_parts_of` with whole nodes, as the bits of a number."""
    is_complete = prod(parts.pools[place].nodes for place in pools) > MOST_COUNTS
    found = 1
    for pool in (parts.pools[place] for place in pools):
        if is_complete:
            found <<= pool.nodes * pool.node.devices
            continue
        found <<= pool.node.devices  # one node, then up to all of them
        covered = 1
        while covered < pool.nodes:
            more = min(covered, pool.nodes - covered)
            found |= found << (more * pool.node.devices)
            covered += more
    return found


def _sets_of_pools(pools: int) -> Iterator[tuple[int, ...]]:
    """Every set of pools, single pools first; if there are too many, single pools and the set of all."""
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


# Search of parts

SearchFor = Callable[[Question, Goal, Sequence[Degrees] | None], SearchResult]
"""Searches a question's space on all devices of its cluster, optionally only candidates with given
degrees."""

ObjectiveValue = tuple[float, ...]
"""Value of the objective, compared lexicographically; less is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """The question on the chosen part of the cluster, and its outcome.

    `part` names the used nodes, `parts` the searched parts. `pruned` counts parts that were pruned by their
    quick bound, are equivalent to a searched one, or have no candidates. `unexplored` counts parts left out
    because time was over or there are too many. `whole` is the outcome on all devices, if all candidates were
    searched there. `best_pool_s` is the best step time on a part of a single pool, named `best_pool`.
    `is_complete`: the outcome covers all candidates and has all requested runners-up.
    """

    question: Question
    outcome: SearchResult
    part: Selection
    parts: tuple[SearchedPart, ...] = ()
    pruned: int = 0
    unexplored: int = 0
    whole: SearchResult | None = None
    best_pool_s: float | None = None
    best_pool: str | None = None
    is_complete: bool = True


def on_all_devices(question: Question, outcome: SearchResult) -> Searched:
    """The result of searching the whole cluster only."""
    return Searched(question=question, outcome=outcome, part=Parts(question.cluster).whole, whole=outcome)


def best_part(question: Question, clock: SearchClock, search_for: SearchFor) -> Searched:
    """Searches the part of the cluster with the best objective; if nothing fits on any part, the whole
    cluster.

    - `devices`: the fewest devices on which something fits, and the fastest strategy there.
    - `cost`: the least product of step time and price of the part's nodes.
    - `time`: the least step time.

    Each part must beat the best part before it. With the objective `time`, parts of a single pool come first,
    which gives the best step time of one device class. Within each group, parts with the least quick bound
    come first. Raises ConfigError for the objective `cost` without prices.
    """
    if question.objective == "cost" and question.cluster.price_usd_per_hour is None:
        raise ConfigError(
            "needs the price of every node", key="objective", found="cost",
            allowed="a cluster file with `price: 25USD/h` for each entry of `nodes`",
        )  # fmt: skip
    comparison = _Comparison(question, clock, search_for)
    comparison.run()
    return comparison.searched()


class _Comparison:
    """Searches the parts one after another and holds the best so far."""

    def __init__(self, question: Question, clock: SearchClock, search_for: SearchFor) -> None:
        self._question, self._clock, self._search_for = question, clock, search_for
        self._cluster_parts = Parts(question.cluster)
        self._listed = listed_parts(question, self._cluster_parts, clock)
        self._parts: list[SearchedPart] = []
        self._best: Searched | None = None
        self._best_value: ObjectiveValue = (inf, inf)
        self._best_pool: tuple[float, str] | None = None
        self._whole: SearchResult | None = None
        self._pruned, self._unexplored = 0, 0
        self._seen: set[tuple[object, ...]] = set()

    def run(self) -> None:
        """Searches the parts in order and prunes those that cannot be better."""
        self._pruned, self._unexplored = self._listed.without_candidates, self._listed.unconsidered
        for one in sorted(self._listed.parts, key=self._order):
            if self._least_value(one) >= self._best_value:
                self._pruned += 1
            elif self._clock.is_interrupted or (self._clock.is_over and self._parts):
                self._unexplored += 1
            else:
                self._search(one)

    def searched(self) -> Searched:
        """The outcome on the best part."""
        found = self._best
        if found is None:
            whole = self._whole or self._search_for(self._question, Fastest(self._question.top + 1), None)
            found = on_all_devices(self._question, whole)
        return replace(
            found,
            parts=tuple(self._parts),
            pruned=self._pruned,
            unexplored=self._unexplored,
            whole=self._whole,
            best_pool_s=None if self._best_pool is None else self._best_pool[0],
            best_pool=None if self._best_pool is None else self._best_pool[1],
        )

    def _order(self, one: BoundedPart) -> ObjectiveValue:
        is_union = len(one.part.pools) > 1 and self._question.objective == "time"
        return (float(is_union), *self._least_value(one), one.least_s, -float(one.devices))

    def _least_value(self, one: BoundedPart) -> ObjectiveValue:
        return self._value(one, one.least_s)

    def _value(self, one: BoundedPart, time_s: float) -> ObjectiveValue:
        if self._question.objective == "devices":
            return (float(one.devices), time_s)
        return (time_s * self._price(one), 0.0)

    def _price(self, one: BoundedPart) -> float:
        """Price of the part per hour if cost is the objective, else 1."""
        return (one.usd_per_hour or 1.0) if self._question.objective == "cost" else 1.0

    def _upper_bound_s(self, one: BoundedPart) -> float:
        """The step time that strategies on a part must beat."""
        value, time_s = self._best_value
        if self._question.objective == "devices":
            least_s = time_s if value == one.devices else inf
        else:
            least_s = value / self._price(one)
        return least_s * (1.0 - PROVEN_GAP)  # rounding alone makes no part better

    def _search(self, one: BoundedPart) -> None:
        cluster = self._cluster_parts.cluster_of(one.part)
        key = (one.part.pools, one.devices, cluster.tiers)
        requested, below_s = replace(self._question, cluster=cluster), self._upper_bound_s(one)
        is_first = below_s == inf
        if key in self._seen:
            self._pruned += 1
            return
        self._seen.add(key)
        if is_first:
            outcome = self._search_for(requested, Fastest(requested.top + 1), None)
        else:
            degrees = self._listed.degrees_below(one, below_s)
            outcome = self._search_for(requested, Fastest(1, below_s=below_s), degrees)
        if is_first and cluster is self._question.cluster:
            self._whole = outcome
        self._parts.append(_part_of(requested, outcome))
        if not outcome.found:
            return
        best_s = outcome.found[0].time_s
        self._best_value = self._value(one, best_s)
        self._best = Searched(question=requested, outcome=outcome, part=one.part, is_complete=is_first)
        if len(one.part.pools) == 1:
            self._best_pool = best_s, self._cluster_parts.pools[one.part.pools[0]].name


def _part_of(requested: Question, outcome: SearchResult) -> SearchedPart:
    cluster = requested.cluster
    best_s = outcome.found[0].time_s if outcome.found else None
    return SearchedPart(
        devices=cluster.devices,
        nodes=len(cluster.nodes),
        step_time_s=best_s,
        usd_per_step=None if best_s is None else usd_per_step(cluster, best_s),
        is_complete=outcome.unexplored == 0,
    )


# Clusters with uneven plans

MOST_POOLS = 4
"""Largest number of pools of a cluster on which uneven plans are searched."""


def is_mixed(cluster: Cluster) -> bool:
    """Whether uneven plans are searched: the cluster has 2 to `MOST_POOLS` pools, and tiers rather than a
    link graph."""
    return not cluster.links and 1 < len(pools_of(cluster)) <= MOST_POOLS


def why_not_mixed(cluster: Cluster) -> str | None:
    """Why no uneven plan is searched on a cluster of several pools; None if uneven plans are searched."""
    pools = len(pools_of(cluster))
    if cluster.links:
        return "uneven plans are not searched on a cluster with a link graph"
    if pools > MOST_POOLS:
        return f"uneven plans are searched on 2 to {MOST_POOLS} kinds of nodes; this cluster has {pools}"
    return None
