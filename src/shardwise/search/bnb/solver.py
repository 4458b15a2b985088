"""The search: the one loop with a clock.

    sketch --look--> close-up --look--> what others must beat          (not where candidates are few)
    grids --rules, symmetry, bound--> rounds of grids with micro-batch sizes --dive--> what was found

Grids are taken in the order of their bound, a round at a time. A round is cut into lanes that do not see each
other's finds, so that any number of workers gives the same answer and the same ledger.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from shardwise.cost import Problem, peaks_of
from shardwise.errors import InternalError
from shardwise.search.bnb.branch import SubtreeSearch
from shardwise.search.bnb.heuristics import NeighbourhoodSpace, neighbourhood_space, restricted_space
from shardwise.search.bnb.incumbent import NO_INCUMBENTS, Goal, Incumbent, Incumbents, incumbents_of
from shardwise.search.bnb.ledger import CandidateLedger
from shardwise.search.bnb.roots import (
    DEGREES_PER_BATCH,
    RootNodes,
    batches_of,
    heuristic_batches,
    list_roots,
    listing_batches,
)
from shardwise.search.clock import SearchClock
from shardwise.search.space import Degrees, Space
from shardwise.search.step_times import step_times_s
from shardwise.search.worker_pool import SearchWorkers
from shardwise.strategy import RULES, Strategy, StrategyTable, first_broken

Progress = Callable[[str], None]

INCUMBENT_SLACK = 1e-12
"""How much slower and larger a strategy of the sketch stands until the search itself meets it."""

HEURISTIC_ROOTS = 256
"""Grids of a first look, at most: those with the least bounds."""

SMALL_SPACE, SMALL_SPACE_WITH_MEMORY = 1 << 18, 1 << 14
"""Candidates, at most, of a space that is searched without a look before; fewer where their memory matters as
much as their time, since less is cut then."""

FIRST_ROUND, LARGEST_ROUND = 1 << 14, 1 << 17
"""Grids with micro-batch sizes in a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search found, best first; what became of every candidate; the clock.

    `unexplored` candidates were not looked at when the budget was spent or the user interrupted; none takes
    less than `lower_bound_s`.
    """

    found: list[Incumbent]
    ledger: CandidateLedger
    unexplored: int
    lower_bound_s: float
    is_interrupted: bool
    search_s: float
    search_cpu_s: float

    @property
    def enumerated(self) -> int:
        """Candidates that were rejected, cut or evaluated."""
        return self.ledger.total


@dataclass(frozen=True, slots=True)
class SearchRegion:
    """A part of the space: all of it, its sketch, or what lies next to strategies, `centers`."""

    is_restricted: bool = False
    centers: StrategyTable | None = None

    @property
    def is_whole(self) -> bool:
        return self.centers is None and not self.is_restricted


@dataclass(frozen=True, slots=True)
class RootTask:
    """Degrees whose grids are to be listed, and what is known."""

    region: SearchRegion
    degrees: list[Degrees]
    goal: Goal


@dataclass(frozen=True, slots=True)
class SubtreeTask:
    """Grids to be searched, and what is known when their round starts."""

    region: SearchRegion
    grids: RootNodes
    goal: Goal


Task = RootTask | SubtreeTask


@dataclass(frozen=True, slots=True)
class TaskResult:
    """Listed grids (none where a task was to search), or what was found below grids; their ledger, or None
    where time ran out before all was done."""

    grids: RootNodes
    incumbents: Incumbents
    ledger: CandidateLedger | None


WHOLE_SPACE, RESTRICTED = SearchRegion(), SearchRegion(is_restricted=True)


class BranchAndBound:
    """One search over one space. `run` gives its outcome; nothing is kept between two searches.

    `goal` is what is looked for. With `exhaustive`, nothing is cut and every legal candidate that fits is
    evaluated. `clock` ends the search early. `warm_start` are strategies of the space that may be good: where
    as many as are looked for are legal and fit, it begins next to them, and needs no sketch. With `degrees`,
    the candidates are only those that have them, and a goal with an upper bound is expected. `without` names
    means that are not used, for comparison: "sketch" (and what follows from it), "close-up", "symmetry",
    "room", "memory" (of blocks), and the levels (`outcomes.LEVELS`) whose bounds are ignored. With any of
    these the answer is the same."""

    def __init__(
        self,
        problem: Problem,
        space: Space,
        goal: Goal,
        *,
        exhaustive: bool = False,
        workers: int = 1,
        clock: SearchClock | None = None,
        warm_start: Sequence[Strategy] = (),
        degrees: Sequence[Degrees] | None = None,
        without: frozenset[str] = frozenset(),
    ) -> None:
        self._problem, self._space, self._restricted = problem, space, restricted_space(space)
        self._warm_start, self._degrees = warm_start, degrees
        self._neighbourhood: NeighbourhoodSpace | None = None
        self._exhaustive, self._workers, self._clock = exhaustive, workers, clock or SearchClock()
        self._without = without
        self._pass = _Pass(goal)

    def run(self, progress: Progress | None = None) -> SearchResult:
        """Searches the whole space, or until the clock is over: what is left is listed even then."""
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        whole = self._pass
        with SearchWorkers(self._workers, self._run_task) as pool:
            if not self._exhaustive and "sketch" not in self._without:
                self._offer_warm_start()
                if not self._is_small_space:
                    if whole.goal.cutoff_s(0.0) == float("inf"):
                        self._run_heuristic(pool, RESTRICTED)
                    self._search_neighbourhood(pool)
            grids = self._list_roots(pool, whole, WHOLE_SPACE)
            self._search(pool, whole, WHOLE_SPACE, grids, progress)
            pool_cpu_s = pool.cpu_s
        return SearchResult(
            found=whole.goal.incumbents,
            ledger=whole.ledger,
            unexplored=whole.unexplored,
            lower_bound_s=whole.lower_bound_s,
            is_interrupted=self._clock.is_interrupted,
            search_s=time.perf_counter() - started_s,
            search_cpu_s=time.process_time() - started_cpu_s + pool_cpu_s,
        )

    @cached_property
    def _is_small_space(self) -> bool:
        """Whether a search takes no longer than a look at a sketch would, so that it begins at once."""
        degrees = self._space.degrees()
        if len(degrees) > DEGREES_PER_BATCH:
            return False
        shapes = self._space.shapes(degrees)
        candidates = self._space.count_orders(shapes) * self._space.count_below_grids(shapes)
        few = SMALL_SPACE_WITH_MEMORY if self._pass.goal.weighs_memory else SMALL_SPACE
        return bool(candidates.sum() <= few)

    @property
    def _prunes_roots(self) -> bool:
        return not self._exhaustive and "degrees" not in self._without

    def _list_roots(
        self, pool: SearchWorkers[Task, TaskResult], whole: _Pass, region: SearchRegion
    ) -> RootNodes:
        """Lists all legal grids."""
        parts, degrees = [], self._space_of(region).degrees()
        if region.is_whole and self._degrees is not None:
            degrees = list(self._degrees)
        tasks = [RootTask(region, few, whole.goal.copy()) for few in listing_batches(degrees)]
        for answer in pool.results(tasks):
            parts.append(answer.grids)
            whole.ledger.merge(answer.ledger or CandidateLedger())
        whole.left = RootNodes.joined(parts)
        return whole.left

    def _offer_warm_start(self) -> None:
        """Takes what may be good into account, where it can run. It stands as a little worse than it is, so
        that it is met, and counted, like all others."""
        table = StrategyTable.of(self._warm_start)
        if len(table):
            table = table.take(first_broken(table, self._problem.limits, RULES) < 0)
        for limit in self._space.limits:
            table = table.take(~limit.excluded(table))
        if len(table):
            peaks = peaks_of(self._problem, table)
            fits = peaks.device_bytes <= self._problem.usable_bytes
            fits &= peaks.host_bytes <= self._problem.host_bytes_per_device
            table, device_bytes = table.take(fits), peaks.device_bytes[fits]
        if len(table):
            more = 1.0 + INCUMBENT_SLACK
            self._pass.goal.offer(table, step_times_s(self._problem, table) * more, device_bytes * more)

    def _run_heuristic(self, pool: SearchWorkers[Task, TaskResult], region: SearchRegion) -> None:
        """A first look at a part of the space: what it finds is what the search must not exceed. It is met,
        evaluated and counted again, since it stands as a little worse than it is."""
        heuristic = _Pass(self._pass.goal.copy())
        grids = self._list_roots(pool, heuristic, region).take(slice(0, HEURISTIC_ROOTS))
        self._search(pool, heuristic, region, grids, None)
        incumbents, more = incumbents_of(heuristic.goal), 1.0 + INCUMBENT_SLACK
        self._pass.goal.offer(incumbents.table, incumbents.time_s * more, incumbents.device_bytes * more)

    def _search_neighbourhood(self, pool: SearchWorkers[Task, TaskResult]) -> None:
        """A look at what lies next to what is known; the core space is so small that one look is enough, and
        what lies next to all of a frontier is much of the space."""
        known = [found.table for found in self._pass.goal.incumbents]
        is_enough = self._space.is_core or self._pass.goal.weighs_memory
        if known and not is_enough and "close-up" not in self._without and not self._clock.is_over:
            self._run_heuristic(pool, SearchRegion(centers=StrategyTable.joined(known)))

    def _search(
        self,
        pool: SearchWorkers[Task, TaskResult],
        whole: _Pass,
        region: SearchRegion,
        left: RootNodes,
        progress: Progress | None,
    ) -> None:
        """Round after round, until nothing is left that may matter or the time is over."""
        space, total, size = self._space_of(region), len(left.table), FIRST_ROUND
        while len(left.table):
            if self._prunes_roots:
                left = left.pruned(whole.goal, whole.ledger)
            whole.left = left
            if self._must_end(region, whole.goal):
                return
            count = self._count(space, left, size)
            first, rest = left.take(slice(0, count)), left.take(slice(count, None))
            tasks = [SubtreeTask(region, few, whole.goal.copy()) for few in self._batches_of(region, first)]
            results = zip(tasks, pool.results(tasks), strict=True)
            undone = [task.grids for task, answer in results if not whole.merged(answer)]
            whole.left = RootNodes.joined([*undone, rest])
            if progress is not None:
                progress(f"{total - len(whole.left.table):,} of {total:,} grids, best {whole.best_s:.4g} s")
            if undone:
                return
            left, size = rest, min(2 * size, LARGEST_ROUND)

    def _must_end(self, region: SearchRegion, goal: Goal) -> bool:
        """Whether the time is over. The first look, or the search of a small space, goes on until it has
        found something, but for an interrupt, or where nothing is needed because an upper bound is given."""
        is_first = region.is_restricted or (region.is_whole and self._is_small_space)
        is_needed = not goal.incumbents and goal.cutoff_s(0.0) == float("inf")
        must_continue = is_first and is_needed and not self._clock.is_interrupted
        return self._clock.is_over and not must_continue

    def _count(self, space: Space, grids: RootNodes, size: int) -> int:
        """How many grids have about so many rows with micro-batch sizes; one at least, if there is one."""
        below = np.cumsum(space.count_micro_batches(grids.table.dp))
        return min(max(int(np.searchsorted(below, size, side="right")), 1), len(grids.table))

    def _batches_of(self, region: SearchRegion, grids: RootNodes) -> list[RootNodes]:
        """The parts of a round."""
        batches = heuristic_batches if region.is_restricted else batches_of
        return batches(self._space_of(region), grids, weighs_memory=self._pass.goal.weighs_memory)

    def _space_of(self, region: SearchRegion) -> Space:
        if region.centers is None:
            return self._restricted if region.is_restricted else self._space
        if self._neighbourhood is None:
            self._neighbourhood = neighbourhood_space(self._space, region.centers)
        return self._neighbourhood

    def _run_task(self, task: Task) -> TaskResult:
        if isinstance(task, RootTask):
            grids, ledger = list_roots(
                self._problem, self._space_of(task.region), task.degrees, task.goal,
                merges_symmetric=not self._exhaustive and "symmetry" not in self._without,
                prunes=self._prunes_roots,
                most=None if task.region.is_whole else HEURISTIC_ROOTS,
            )  # fmt: skip
            return TaskResult(grids, NO_INCUMBENTS, ledger)
        return self._search_subtrees(task)

    def _search_subtrees(self, task: SubtreeTask) -> TaskResult:
        """Searches below a task's grids."""

        def check() -> None:
            if self._must_end(task.region, task.goal):
                raise TimeLimitError

        space = self._space_of(task.region)
        table, weights = task.grids.with_micro_batches(space)
        subtrees = SubtreeSearch(
            self._problem, space, task.goal, table, weights,
            exhaustive=self._exhaustive, without=self._without, check=check,
        )  # fmt: skip
        try:
            subtrees.run()
        except TimeLimitError:
            return TaskResult(task.grids.take(slice(0, 0)), incumbents_of(task.goal), None)
        ledger = CandidateLedger()
        ledger.add(table, subtrees.outcomes)
        expected = int(task.grids.candidates.sum())
        if ledger.total != expected:
            raise InternalError(f"the ledger holds {ledger.total} of {expected} candidates")
        return TaskResult(task.grids.take(slice(0, 0)), incumbents_of(task.goal), ledger)


@dataclass
class _Pass:
    """What a pass over a space has found, what became of its candidates, and the grids that are left."""

    goal: Goal
    ledger: CandidateLedger = field(default_factory=CandidateLedger)
    left: RootNodes | None = None

    @property
    def best_s(self) -> float:
        return min((found.time_s for found in self.goal.incumbents), default=float("inf"))

    @property
    def unexplored(self) -> int:
        """Candidates below the grids that are left."""
        return 0 if self.left is None else sum(self.left.candidates.tolist())

    @property
    def lower_bound_s(self) -> float:
        """No candidate takes less."""
        bounds = np.zeros(0) if self.left is None else self.left.lower_bound_s
        return min(self.best_s, float(bounds.min(initial=float("inf"))))

    def merged(self, answer: TaskResult) -> bool:
        """Takes an answer into account; whether it is complete."""
        self.goal.offer(answer.incumbents.table, answer.incumbents.time_s, answer.incumbents.device_bytes)
        if answer.ledger is None:
            return False
        self.ledger.merge(answer.ledger)
        return True


class TimeLimitError(Exception):
    """The budget is spent, or the user interrupted."""
