"""Search of one subproblem: pipelines that process all micro-batches within a time, or a proof that none can.

Whether a time is possible is a knapsack: how many micro-batches each pipeline may do by then, at most by its
bound. The pipelines that the knapsack chooses are bounded more closely, laid out and evaluated. Those that
take longer than their bound do fewer micro-batches from then on, and the knapsack is solved again. So a time
is reached only by evaluated pipelines. `KnapsackSearch` combines any pipelines, `IdenticalPipelineSearch`
uses one shape.
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
from shardwise.ties import ROUNDING

Ints = NDArray[np.int64]

MAX_STEP_S = 1e9
"""Seconds that no step exceeds."""

BOUNDS_PER_ROUND = 128
"""Critical pipelines that are bounded closely before the knapsack is solved again."""

EFFORT_FACTOR, MAX_EFFORT = 8, 2000
"""Factor on the number of partial pipelines after a truncated search, and the number from which it is not
increased."""

MAX_ROUNDS = 60
"""Rounds of close bounds for a wide range of numbers of pipelines, at most."""

BISECTIONS = 2
"""Bisections of the time interval of a subproblem's quick bound."""


@dataclass(frozen=True, slots=True)
class EvaluatedPipeline:
    """One pipeline of a plan: its shape, micro-batches and best layout."""

    shape: PipelineShape
    microbatches: int
    found: PipelineSolution


class SubproblemSearch(ABC):
    """Decides whether pipelines of a subproblem process all micro-batches within a time, with bounds that get
    closer with each call.

    Subclasses say which pipelines may be combined. The costs of a `parent` subproblem are no higher, so its
    bounds hold here too.
    """

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
        # Pipelines whose sets are larger than `most` cannot be used.
        self._most = np.where(self.shapes.set_size <= most, options.microbatches, 0)
        self.capacity = CapacityRelaxation(options, self.shapes.kinds, self.shapes.counts)
        self._bounds: dict[int, dict[int, float]] = {}
        self._family_bounds: dict[int, dict[int, float]] = {}
        self._family_members: dict[int, Ints] = {}
        self._known: dict[int, dict[int, PipelineSolution]] = {}
        self._horizon_s = 0.0  # the longest time requested so far; bounds above it are not distinguished
        self.evaluated, self.bounded = 0, 0
        """Layouts evaluated; suffixes (runs of stages) whose layouts were bounded together."""
        self.was_truncated = False
        """Whether layouts were left unevaluated, or time was over. Then `within` may miss a plan;
        `is_possible` remains valid."""

    @cached_property
    def _table(self) -> StageTable:
        return StageTable(self.options)

    @cached_property
    def _families(self) -> Ints:
        return families_of(self.options.spread, self.shapes)

    @property
    def share(self) -> int:
        """Micro-batches of a pipeline, at most."""
        return self.options.microbatches

    @property
    @abstractmethod
    def is_exact(self) -> bool:
        """Whether plans with numbers of pipelines outside `least` to `most` are excluded."""

    def may_finish(self, time_s: float) -> bool:
        """Whether quick bounds allow a plan within `time_s`.

        They are first tested for the critical pipelines, at the fewest micro-batches with which these are
        critical.
        """
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
        """Whether `pipelines` pipelines cannot process all micro-batches within `time_s`, whatever they
        are."""
        return pipelines * int(self.quick_bound(time_s).max(initial=0)) < self.options.microbatches

    @abstractmethod
    def critical(self, done: Ints) -> tuple[Ints, Ints]:
        """The critical shapes, most critical first, if each does `done` micro-batches: without them not all
        micro-batches can be done. None if these cannot be done in any case.

        Also returns, for each of them, the fewest micro-batches with which it is critical.
        """

    @abstractmethod
    def chosen(self, done: Ints) -> Counter[int] | None:
        """Sets of shapes, with counts, that process all micro-batches if each shape does `done`; None where
        no sets do."""

    def bound_s(self, lower_bound_s: float, most_s: float) -> float:
        """Quick lower bound in seconds of every plan of the subproblem, between `lower_bound_s` and
        `most_s`."""
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
        """Pipelines, with counts, that process all micro-batches within `time_s`; None where there are none,
        or none was found."""
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
        """Allows truncated searches more partial pipelines; returns whether that is useful."""
        if not self.was_truncated or self._effort >= MAX_EFFORT:
            return False
        self._effort *= EFFORT_FACTOR
        for known in self._known.values():
            for share in [share for share, found in known.items() if found.is_truncated]:
                del known[share]
        self.was_truncated = False
        return True

    def is_refuted(self, time_s: float) -> bool:
        """Whether the bounds of pipelines exclude every plan within `time_s`. Critical pipelines are bounded
        closely for some rounds, while there is time."""
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
        """Whether the proven bounds allow a plan within `time_s`."""
        done = self.proven(time_s)
        return len(self.critical(done)[0]) > 0 and self.chosen(done) is not None

    def _bound_new(self, places: Ints, threshold: Ints, done: Ints) -> bool:
        """Bounds the shapes that have no bound yet: first at the fewest critical micro-batches, which most
        cannot do, then at `done`. Returns whether there were any."""
        m = done[places]
        return (
            self._bound_by_family(places, threshold)
            or self._bound_individually(places, threshold[:, None])
            or self._bound_by_family(places, m)
            or self._bound_individually(places, np.stack([m, (m + threshold) // 2], axis=1))
        )

    def _bound_individually(self, places: Ints, microbatches: Ints) -> bool:
        """Bounds the shapes that have no bound at the first of their `microbatches`, at all of these."""
        news = [
            at
            for at, (place, m) in enumerate(zip(places.tolist(), microbatches[:, 0].tolist(), strict=True))
            if m not in self._bounds.get(place, {})
        ]
        self._bound_shapes(places[news].tolist(), microbatches[news])
        return bool(news)

    def _bound_by_family(self, places: Ints, microbatches: Ints) -> bool:
        """The same for families of shapes that differ only in their spread, at the most micro-batches
        requested of any member. A refuted family needs no bounds of its members."""
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
        """The most micro-batches that each shape may do in time. Where the search of its layouts was
        truncated, the best known layout counts as the optimum."""
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
        """Upper bound of the micro-batches of each shape in time."""
        time_s = min(time_s, MAX_STEP_S)
        return self._without_refuted(
            self.capacity.microbatches(time_s, self._parent_limit(time_s)).copy(), time_s
        )

    def quick_bound(self, time_s: float) -> Ints:
        """The same from quick bounds: cheaper and no closer."""
        time_s = min(time_s, MAX_STEP_S)
        return self._without_refuted(self.capacity.quick_bound(time_s, self._parent_limit(time_s)), time_s)

    def _parent_limit(self, time_s: float) -> Ints:
        """The same from the parent subproblem."""
        return (
            self._most if self._parent is None else np.minimum(self._parent.quick_bound(time_s), self._most)
        )

    def _without_refuted(self, found: Ints, time_s: float) -> Ints:
        """Lowers `found` to the numbers that the bounds of pipelines and families allow."""
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
        """Whether a layout of the shape does `microbatches` in time; searches for one where none is known."""
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
        """Bounds shapes at a row of numbers of micro-batches each."""
        if not places:
            return
        shapes = [self.shapes.at(place) for place in places]
        every = self._bounds_of([(shape.kinds, shape.counts) for shape in shapes], microbatches)
        for place, found in zip(places, every, strict=True):
            _tighten(self._bounds.setdefault(place, {}), found)

    def _bounds_of(
        self, shapes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], microbatches: Ints
    ) -> list[dict[int, float]]:
        """Bounds of shapes (kinds and counts) by micro-batches, a row of numbers each; up to the horizon."""
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
    """Updates bounds by micro-batches where `more` has higher ones."""
    for m, bound_s in more.items():
        bounds[m] = max(bounds.get(m, 0.0), bound_s)


_NONE: Ints = np.empty(0, dtype=np.int64)


def subproblem_search(
    options: StageOptions,
    subproblem: UnevenSubproblem,
    effort: int,
    parent: SubproblemSearch | None = None,
    most_sites: int | None = None,
    clock: SearchClock | None = None,
) -> SubproblemSearch:
    """The search of a subproblem, with at most `effort` partial pipelines for one pipeline, until the `clock`
    is over.

    `parent` is the search of a subproblem that includes this one's numbers of pipelines.
    """
    kind = IdenticalPipelineSearch if subproblem.is_alike else KnapsackSearch
    return kind(options, subproblem.least, subproblem.most, effort, parent, most_sites, clock)


class KnapsackSearch(SubproblemSearch):
    """Any pipelines together: their shares are a knapsack."""

    @property
    def is_exact(self) -> bool:
        """Whether the knapsack is exact in the number of pipelines."""
        items = self._items(self.proven(MAX_STEP_S))
        return is_exact_dp(self.options.available, len(non_dominated(items)), self.most)

    @cached_property
    def _dual(self) -> KnapsackDual:
        return KnapsackDual(self.options.available, self.shapes.devices)

    def critical(self, done: Ints) -> tuple[Ints, Ints]:
        """By Lagrangian multipliers on devices."""
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
    """Identical pipelines: as many of one shape as are needed, if there are devices."""

    @property
    def share(self) -> int:
        """The share of a pipeline where pipelines are fewest."""
        return -(-self.options.microbatches // self.least)

    @property
    def is_exact(self) -> bool:
        """Numbers of pipelines are always exact."""
        return True

    @cached_property
    def _needed(self) -> Ints:
        """Micro-batches that each shape must do if there are as many pipelines as the devices allow; 0 where
        these are too few."""
        sets = (np.array(self.options.available) // np.maximum(self.shapes.devices, 1)).astype(np.int64)
        sets = np.where(self.shapes.devices > 0, sets, self.most).min(axis=1)
        number = np.minimum(sets, self.most // self.shapes.set_size) * self.shapes.set_size
        needed: Ints = -(-self.options.microbatches // np.maximum(number, 1))
        return np.where(number >= self.least, needed, 0)

    def may_finish(self, time_s: float) -> bool:
        """Whether any shape may do the micro-batches that it must."""
        places = np.flatnonzero(self._needed)
        return bool(self.capacity.can_do(places, self._needed[places], time_s).any())

    def critical(self, done: Ints) -> tuple[Ints, Ints]:
        """The shapes for which there are devices to do all micro-batches."""
        number = self._number(done)
        there = np.array(self.options.available)
        sets = number // self.shapes.set_size
        fits = (number <= self.most) & (sets[:, None] * self.shapes.devices <= there).all(axis=1)
        places = np.flatnonzero(fits)
        found: Ints = places[np.argsort(-done[places], kind="stable")]
        return found, self._needed[found]

    def chosen(self, done: Ints) -> Counter[int] | None:
        """The shape that does most."""
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
