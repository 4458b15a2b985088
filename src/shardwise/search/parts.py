"""Which part of the cluster to use: the one on which the objective is best (docs/reference/space.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from shardwise.cluster import Parts, Selection
from shardwise.errors import ConfigError
from shardwise.plan import PROVEN_GAP, SearchedPart, usd_per_step
from shardwise.search.clock import SearchClock
from shardwise.search.drive import SearchResult
from shardwise.search.goals import Fastest, Goal
from shardwise.search.part_list import BoundedPart, listed_parts
from shardwise.search.question import Question
from shardwise.search.space import Degrees

SearchFor = Callable[[Question, Goal, Sequence[Degrees] | None], SearchResult]
"""Searches a question's space on all devices of its cluster, or only candidates with these degrees."""

ObjectiveValue = tuple[float, ...]
"""What is to be least: compared from the first number on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """The question on the part of the cluster that is used, and its outcome.

    `part` says which nodes are used, `parts` which parts were searched. `pruned` parts were pruned by their
    quick bound, cost the same as one that was searched, or have no candidates; `unexplored` ones were left
    out, because time was over or there are too many. `whole` is the outcome on all devices, where they were
    searched for their best. `best_pool_s` is the best of the parts of a single pool, named `best_pool`.
    `is_complete`: the outcome is of all candidates and has as many runners-up as the question wants.
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
    """The search of the whole cluster alone."""
    return Searched(question=question, outcome=outcome, part=Parts(question.cluster).whole, whole=outcome)


def best_part(question: Question, clock: SearchClock, search_for: SearchFor) -> Searched:
    """The part of the cluster on which the objective is best; where nothing fits on any, the whole cluster.

    `devices`: the fewest devices on which something fits, and the fastest there. `cost`: the least time x
    price of the part's nodes. `time`: the least time. Each part has to beat the best before it. With the
    objective `time`, parts of a single pool come first, so that what one class of devices takes is known;
    of either kind those with the least quick bound. Raises ConfigError for costs without prices.
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
    """The parts, one after another, and the best so far."""

    def __init__(self, question: Question, clock: SearchClock, search_for: SearchFor) -> None:
        self._question, self._clock, self._search_for = question, clock, search_for
        self._cluster_parts = Parts(question.cluster)
        self._listed = listed_parts(question, self._cluster_parts)
        self._parts: list[SearchedPart] = []
        self._best: Searched | None = None
        self._best_value: ObjectiveValue = (inf, inf)
        self._best_pool: tuple[float, str] | None = None
        self._whole: SearchResult | None = None
        self._pruned, self._unexplored = 0, 0
        self._seen: set[tuple[object, ...]] = set()

    def run(self) -> None:
        """Searches the parts in order; those that cannot be better are pruned."""
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
        """What a second costs, where cost is the objective; else every part is worth the same."""
        return (one.usd_per_hour or 1.0) if self._question.objective == "cost" else 1.0

    def _upper_bound_s(self, one: BoundedPart) -> float:
        """The time that strategies on a part must beat."""
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
