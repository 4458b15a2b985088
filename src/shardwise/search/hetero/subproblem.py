"""One block of uneven plans: the least time in which its pipelines do all microbatches, or that none is less.

Whether a block can be done within a time is a question of shares: how many microbatches each pipeline does
by then, at most by its bound. Where the shares suffice, the pipelines that were taken are bounded closer,
laid out and evaluated; those that take longer than their bound said do fewer microbatches from then on, and
the question is asked again. So a block is done within a time only where evaluated pipelines do it.

What is known of the pipelines of a block: how many microbatches each may do in a time, and its layouts.

Pipelines are bounded soon, and closer where they matter; those that are chosen are laid out and evaluated,
and do fewer microbatches from then on where they take longer than their bound said.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwise.search.clock import SearchClock
from shardwise.search.hetero.capacity_relaxation import CapacityRelaxation
from shardwise.search.hetero.knapsack import Items, KnapsackDual, best_set, is_exact_dp, non_dominated
from shardwise.search.hetero.lower_bounds import StageTable, SuffixRelaxation
from shardwise.search.hetero.pipeline_search import PipelineSolution, best_pipeline, next_above
from shardwise.search.hetero.space import PipelineShape, UnevenSubproblem, families_of, shapes_of
from shardwise.search.hetero.stage_costs import StageOptions

Ints = NDArray[np.int64]

MAX_STEP_S = 1e9
"""No step takes so long."""

BOUNDS_PER_ROUND = 128
"""Pipelines that are bounded closer before shares are told."""

EFFORT_FACTOR, MAX_EFFORT = 8, 2000
"""Times as many partial layouts where too few did not do, and how many are too many for that."""

MAX_ROUNDS = 60
"""Times that pipelines are bounded closer for a wide range of their numbers."""

BISECTIONS = 2
"""Halvings of the time in which a block's bound lies before it is searched."""


@dataclass(frozen=True, slots=True)
class EvaluatedPipeline:
    """One pipeline of a plan: its shape, microbatches and best layout."""

    shape: PipelineShape
    microbatches: int
    found: PipelineSolution


class SubproblemSearch(ABC):
    """Answers whether pipelines of a block do all microbatches within a time, sharper each time. Subclasses
    tell which pipelines are taken together. What holds in a `parent` block, whose figures are no more, holds
    here."""

    def __init__(
        self,
        options: StageOptions,
        least: int,
        most: int,
        effort: int,
        parent: SubproblemSearch | None = None,
        most_sites: int | None = None,
        clock: SearchClock | None = None,
    ) -> None:
        self._clock = clock or SearchClock()
        self.options, self.least, self.most = options, least, most
        self._effort, self._parent = effort, parent
        self.shapes = shapes_of(
            options.stage_devices,
            options.spread,
            options.devices,
            options.units,
            options.most_stages,
            most_sites or len(options.sites),
        )
        # Of pipelines that come in sets larger than all may be there are none.
        self._most = np.where(self.shapes.set_size <= most, options.microbatches, 0)
        self.capacity = CapacityRelaxation(options, self.shapes.kinds, self.shapes.counts)
        self._bounds: dict[int, dict[int, float]] = {}
        self._family_bounds: dict[int, dict[int, float]] = {}
        self._family_members: dict[int, Ints] = {}
        self._known: dict[int, dict[int, PipelineSolution]] = {}
        self._horizon_s = 0.0  # the longest time that was asked for: what takes longer is not told apart
        self.evaluated, self.bounded = 0, 0
        """Layouts that were evaluated; runs of stages whose layouts were bounded together."""
        self.was_truncated = False
        """Whether layouts were left unevaluated, or time was over: then `within` may miss a plan, but not
        `is_possible`."""

    @cached_property
    def _table(self) -> StageTable:
        return StageTable(self.options)

    @cached_property
    def _families(self) -> Ints:
        return families_of(self.options.spread, self.shapes)

    @property
    def share(self) -> int:
        """Microbatches of a pipeline, at most; more are not asked for."""
        return self.options.microbatches

    @property
    @abstractmethod
    def is_exact(self) -> bool:
        """Whether plans with other numbers of pipelines than from `least` to `most` are told apart."""

    def may_finish(self, time_s: float) -> bool:
        """Whether what is soon told does not forbid a plan within `time_s`: asked first of the pipelines that
        matter if all do what they may at most, at the fewest microbatches with which they matter."""
        done = self.quick_bound(time_s)
        can = np.zeros_like(done)
        while True:
            places, threshold = self.critical(done)
            open_ = can[places] < threshold
            if not len(places) or not open_.any():
                break
            places, threshold = places[open_], threshold[open_]
            is_possible = self.capacity.can_do(places, threshold, time_s)
            can[places[is_possible]] = threshold[is_possible]
            done[places[~is_possible]] = threshold[~is_possible] - 1
        return len(places) > 0 and len(self.critical(self.proven(time_s))[0]) > 0

    def are_too_few(self, pipelines: int, time_s: float) -> bool:
        """Whether so many pipelines cannot do all microbatches within `time_s`, whatever they are."""
        return pipelines * int(self.quick_bound(time_s).max(initial=0)) < self.options.microbatches

    @abstractmethod
    def critical(self, done: Ints) -> tuple[Ints, Ints]:
        """The shapes without which all microbatches cannot be done, the dearest first, if each does so many;
        none where they cannot be done anyway. And how many microbatches of each are too few to be so dear,
        and one more."""

    @abstractmethod
    def chosen(self, done: Ints) -> Counter[int] | None:
        """Sets of shapes, with counts, that do all microbatches if each shape does so many; None where none
        do."""

    def bound_s(self, lower_bound_s: float, most_s: float) -> float:
        """Seconds that every plan of the block takes at least, between `lower_bound_s` and `most_s`, soon
        told."""
        if most_s == float("inf"):
            most_s = lower_bound_s
            while not self.may_finish(most_s) and most_s < MAX_STEP_S:
                lower_bound_s, most_s = most_s, 2.0 * most_s
        elif not self.may_finish(most_s):
            return most_s
        for _ in range(BISECTIONS):
            middle_s = (lower_bound_s + most_s) / 2.0
            if self.may_finish(middle_s):
                most_s = middle_s
            else:
                lower_bound_s = middle_s
        return lower_bound_s

    def within(self, time_s: float) -> list[tuple[EvaluatedPipeline, int]] | None:
        """Pipelines, with counts, that do all microbatches within `time_s`; None where there are none, or
        none was found."""
        self._horizon_s = max(self._horizon_s, time_s)
        while not self._clock.is_over:
            done = self._optimistic(time_s)
            most_critical, threshold = self.critical(done)
            if not len(most_critical):
                return None
            if self._bound_new(most_critical[:BOUNDS_PER_ROUND], threshold[:BOUNDS_PER_ROUND], done):
                continue
            sets = self.chosen(done)
            if sets is None:
                return None
            shares = {place: int(done[place]) for place in sets}
            if all([self._is_proven(place, share, time_s) for place, share in shares.items()]):
                return [
                    (self._evaluated_pipeline(place, share), sets[place] * int(self.shapes.set_size[place]))
                    for place, share in shares.items()
                ]
        self.was_truncated = True
        return None

    def increase_effort(self) -> bool:
        """Takes up again what was given up, with more partial layouts; whether that is worth while."""
        if not self.was_truncated or self._effort >= MAX_EFFORT:
            return False
        self._effort *= EFFORT_FACTOR
        for known in self._known.values():
            for share in [share for share, found in known.items() if found.is_truncated]:
                del known[share]
        self.was_truncated = False
        return True

    def is_refuted(self, time_s: float) -> bool:
        """Whether bounds of pipelines, as close as they are at hand, forbid every plan within `time_s`; some
        rounds of them, while there is time."""
        self._horizon_s = max(self._horizon_s, time_s)
        for _ in range(MAX_ROUNDS):
            if self._clock.is_over:
                return False
            done = self.proven(time_s)
            most_critical, threshold = self.critical(done)
            if not len(most_critical):
                return True
            if not self._bound_new(most_critical[:BOUNDS_PER_ROUND], threshold[:BOUNDS_PER_ROUND], done):
                return False
        return False

    def is_possible(self, time_s: float) -> bool:
        """Whether nothing that is proven forbids a plan within `time_s`."""
        done = self.proven(time_s)
        return len(self.critical(done)[0]) > 0 and self.chosen(done) is not None

    def _bound_new(self, places: Ints, threshold: Ints, done: Ints) -> bool:
        """Bounds those of the shapes that are not: at the fewest microbatches that matter, which most of them
        cannot do, and then at what they do; whether there were any."""
        m = done[places]
        return (
            self._bound_by_family(places, threshold)
            or self._bound_individually(places, threshold[:, None])
            or self._bound_by_family(places, m)
            or self._bound_individually(places, np.stack([m, (m + threshold) // 2], axis=1))
        )

    def _bound_individually(self, places: Ints, microbatches: Ints) -> bool:
        """Bounds those of the shapes that are not at the first of so many microbatches, at all of them."""
        news = [
            at
            for at, (place, m) in enumerate(zip(places.tolist(), microbatches[:, 0].tolist(), strict=True))
            if m not in self._bounds.get(place, {})
        ]
        self._bound_shapes(places[news].tolist(), microbatches[news])
        return bool(news)

    def _bound_by_family(self, places: Ints, microbatches: Ints) -> bool:
        """The same of those that differ in how they are spread alone, at the most that is asked of any of
        them: what no way to spread them does needs no closer look."""
        requested: dict[int, tuple[int, int]] = {}
        for place, m in zip(places.tolist(), microbatches.tolist(), strict=True):
            family = int(self._families[place])
            if family >= 0 and m not in self._bounds.get(place, {}):
                requested[family] = max(requested.get(family, (0, 0)), (m, place))
        news = {
            family: (m, place)
            for family, (m, place) in requested.items()
            if m not in self._family_bounds.get(family, {})
        }
        if news:
            shapes = [self.shapes.at(place) for _, place in news.values()]
            relaxed_kinds = [(self._table.relaxed_kinds(shape.kinds), shape.counts) for shape in shapes]
            most = np.array([[m] for m, _ in news.values()])
            for family, bounds in zip(news, self._bounds_of(relaxed_kinds, most), strict=True):
                self._family_members.setdefault(family, np.flatnonzero(self._families == family))
                _tighten(self._family_bounds.setdefault(family, {}), bounds)
        return bool(news)

    def _optimistic(self, time_s: float) -> Ints:
        """The most that each shape does in time as far as is known; where its layouts were given up, as if
        the best of them were the best."""
        found = np.minimum(self.proven(time_s), self.share)
        for place, known in self._known.items():
            most = int(found[place])
            while most > 0 and (one := known.get(most)) is not None:
                if one.time_s <= time_s or not one.is_truncated:
                    break
                most = min(most - 1, int(most * time_s / one.time_s))  # 0 where nothing was evaluated
            found[place] = most
        return found

    def proven(self, time_s: float) -> Ints:
        """No shape does more than this in time."""
        time_s = min(time_s, MAX_STEP_S)
        return self._without_refuted(
            self.capacity.microbatches(time_s, self._parent_limit(time_s)).copy(), time_s
        )

    def quick_bound(self, time_s: float) -> Ints:
        """Nor more than this, which is told sooner."""
        time_s = min(time_s, MAX_STEP_S)
        return self._without_refuted(self.capacity.quick_bound(time_s, self._parent_limit(time_s)), time_s)

    def _parent_limit(self, time_s: float) -> Ints:
        """Nor than this, by what is known of the wider block."""
        return (
            self._most if self._parent is None else np.minimum(self._parent.quick_bound(time_s), self._most)
        )

    def _without_refuted(self, found: Ints, time_s: float) -> Ints:
        """Without what bounds of pipelines and of families refute."""
        for place, bounds in self._bounds.items():
            refuted = min((m for m, bound_s in bounds.items() if bound_s > time_s), default=None)
            if refuted is not None:
                found[place] = min(int(found[place]), refuted - 1)
        for family, bounds in self._family_bounds.items():
            refuted = min((m for m, bound_s in bounds.items() if bound_s > time_s), default=None)
            if refuted is not None:
                mine = self._family_members[family]
                found[mine] = np.minimum(found[mine], refuted - 1)
        return found

    def _is_proven(self, place: int, microbatches: int, time_s: float) -> bool:
        """Whether the shape is known to do so many microbatches in time; looks closer where it is not."""
        known = self._known.setdefault(place, {})
        found = known.get(microbatches)
        if found is not None and found.time_s <= time_s:
            return True
        shape, bounds = self.shapes.at(place), self._bounds.setdefault(place, {})
        if microbatches not in bounds:
            self._bound_shapes([place], np.array([[microbatches]]))
            if bounds[microbatches] > time_s:
                return False
        found = best_pipeline(
            self.options,
            self._table,
            shape.kinds,
            shape.counts,
            microbatches,
            time_s,
            self._effort,
            self._clock,
        )
        known[microbatches] = found
        bounds[microbatches] = max(bounds[microbatches], found.bound_s)
        self.evaluated += found.evaluated
        self.was_truncated |= found.is_truncated
        return found.time_s <= time_s

    def _bound_shapes(self, places: list[int], microbatches: Ints) -> None:
        """Bounds shapes at so many microbatches each, a row for each of them."""
        if not places:
            return
        shapes = [self.shapes.at(place) for place in places]
        every = self._bounds_of([(shape.kinds, shape.counts) for shape in shapes], microbatches)
        for place, found in zip(places, every, strict=True):
            _tighten(self._bounds.setdefault(place, {}), found)

    def _bounds_of(
        self, shapes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], microbatches: Ints
    ) -> list[dict[int, float]]:
        """Of pipelines of such kinds and counts, at so many microbatches each; as far as times matter."""
        requested = [shape for shape in shapes for _ in range(microbatches.shape[1])]
        relaxation = SuffixRelaxation(self._table, requested, microbatches.ravel(), None, self._horizon_s)
        self.bounded += relaxation.suffix_count
        bounds = np.minimum(relaxation.bounds(), next_above(self._horizon_s)).reshape(microbatches.shape)
        return [
            dict(zip(ms, found, strict=True))
            for ms, found in zip(microbatches.tolist(), bounds.tolist(), strict=True)
        ]

    def _evaluated_pipeline(self, place: int, microbatches: int) -> EvaluatedPipeline:
        found = self._known[place][microbatches]
        return EvaluatedPipeline(self.shapes.at(place), microbatches, found)


def _tighten(bounds: dict[int, float], more: dict[int, float]) -> None:
    """Takes over bounds by microbatches where they are higher."""
    for m, bound_s in more.items():
        bounds[m] = max(bounds.get(m, 0.0), bound_s)


_NONE: Ints = np.empty(0, dtype=np.int64)

ROUNDING = 1e-9
"""Of the microbatches that are wanted, for rounding."""


def subproblem_search(
    options: StageOptions,
    subproblem: UnevenSubproblem,
    effort: int,
    parent: SubproblemSearch | None = None,
    most_sites: int | None = None,
    clock: SearchClock | None = None,
) -> SubproblemSearch:
    """The search of a block, with at most so many partial layouts of one pipeline, until the `clock` is over;
    `parent` is that of a block with all of its numbers of pipelines and more."""
    kind = IdenticalPipelineSearch if subproblem.is_alike else KnapsackSearch
    return kind(options, subproblem.least, subproblem.most, effort, parent, most_sites, clock)


class KnapsackSearch(SubproblemSearch):
    """Any pipelines side by side: shares are a knapsack."""

    @property
    def is_exact(self) -> bool:
        """Whether plans with other numbers of pipelines than the block's are told apart."""
        items = self._items(self.proven(MAX_STEP_S))
        return is_exact_dp(self.options.available, len(non_dominated(items)), self.most)

    @cached_property
    def _dual(self) -> KnapsackDual:
        return KnapsackDual(self.options.available, self.shapes.devices)

    def critical(self, done: Ints) -> tuple[Ints, Ints]:
        """By prices on the devices."""
        required, set_size = self.options.microbatches, self.shapes.set_size
        if self.most * int(done.max(initial=0)) < required:
            return _NONE, _NONE
        places, threshold = self._dual.critical(done * set_size, required * (1.0 - ROUNDING))
        return places, np.clip(np.ceil(threshold / set_size[places]).astype(np.int64), 1, done[places])

    def chosen(self, done: Ints) -> Counter[int] | None:
        """By dynamic programming over devices."""
        options = self.options
        return best_set(options.available, self._items(done), self.least, self.most, options.microbatches)

    def _items(self, done: Ints) -> Items:
        shapes = self.shapes
        return Items(shapes.devices, done * shapes.set_size, shapes.set_size)


class IdenticalPipelineSearch(SubproblemSearch):
    """Pipelines that have the same stages: as many of one shape as are needed, if there are devices."""

    @property
    def share(self) -> int:
        """Its part of them, where pipelines are fewest."""
        return -(-self.options.microbatches // self.least)

    @property
    def is_exact(self) -> bool:
        """Numbers of pipelines are always told apart."""
        return True

    @cached_property
    def _needed(self) -> Ints:
        """What each shape has to do where there are as many of it as can be; nothing where there are too
        few."""
        sets = (np.array(self.options.available) // np.maximum(self.shapes.devices, 1)).astype(np.int64)
        sets = np.where(self.shapes.devices > 0, sets, self.most).min(axis=1)
        number = np.minimum(sets, self.most // self.shapes.set_size) * self.shapes.set_size
        needed: Ints = -(-self.options.microbatches // np.maximum(number, 1))
        return np.where(number >= self.least, needed, 0)

    def may_finish(self, time_s: float) -> bool:
        """Whether any shape may do what it has to."""
        places = np.flatnonzero(self._needed)
        return bool(self.capacity.can_do(places, self._needed[places], time_s).any())

    def critical(self, done: Ints) -> tuple[Ints, Ints]:
        """Those of which there are devices for as many as do all microbatches."""
        number = self._number(done)
        there = np.array(self.options.available)
        sets = number // self.shapes.set_size
        fits = (number <= self.most) & (sets[:, None] * self.shapes.devices <= there).all(axis=1)
        places = np.flatnonzero(fits)
        found: Ints = places[np.argsort(-done[places], kind="stable")]
        return found, self._needed[found]

    def chosen(self, done: Ints) -> Counter[int] | None:
        """The one that does most."""
        places, _ = self.critical(done)
        if not len(places):
            return None
        place = int(places[0])
        return Counter({place: int(self._number(done)[place] // self.shapes.set_size[place])})

    def _number(self, done: Ints) -> Ints:
        """Pipelines of each shape that are needed, in whole sets."""
        needed = -(-self.options.microbatches // np.maximum(done, 1))
        number = np.maximum(np.where(done > 0, needed, self.most + 1), self.least)
        found: Ints = -(-number // self.shapes.set_size) * self.shapes.set_size
        return found
