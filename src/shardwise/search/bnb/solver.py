"""Branch and bound over the uniform strategies of one space, in rounds of root nodes.

    restricted space -> neighbourhood search -> incumbents         (primal heuristics; not for small spaces)
    grids -> rules, symmetry, bounds -> rounds of grids with micro-batch sizes -> subtree search -> incumbents

Grids are taken by increasing bound, a round at a time. A round is divided into batches that do not see each
other's incumbents, so any number of workers gives the same answer and the same ledger. Only this module reads
a clock. docs/concepts/exact-search.md follows one search.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from shardwise.cost import Problem, peaks_of
from shardwise.errors import InternalError
from shardwise.plans import PROVEN_GAP
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
from shardwise.search.clock import SearchClock, left_text
from shardwise.search.space import Degrees, Space
from shardwise.search.step_times import step_times_s
from shardwise.search.worker_pool import SearchWorkers
from shardwise.strategy import RULES, Strategy, StrategyTable, first_broken

Progress = Callable[[str], None]

INCUMBENT_SLACK = PROVEN_GAP
"""Relative slack that is added to the time and bytes of a heuristic's incumbent, so that the search meets,
evaluates and counts it once: more than PROVEN_TIE, and no more than PRUNE_FACTOR allows."""

HEURISTIC_ROOTS = 256
"""Grids that a primal heuristic searches, at most: those with the least bounds."""

SMALL_SPACE, SMALL_SPACE_WITH_MEMORY = 1 << 18, 1 << 14
"""Candidates up to which a space is searched without primal heuristics; fewer where memory is part of the
objective, since less is pruned then."""

FIRST_ROUND, LARGEST_ROUND = 1 << 14, 1 << 17
"""Grids with micro-batch sizes in the first round, and in any round at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The incumbents of a search, best first, the ledger of all candidates, and the time that the search
    took.

    `unexplored` candidates were open when the budget was spent or the user interrupted. No candidate takes
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
        """Candidates that were rejected, pruned or evaluated."""
        return self.ledger.total


@dataclass(frozen=True, slots=True)
class SearchRegion:
    """A part of the space: the whole, the restricted space, or the neighbourhood of the strategies
    `centers`."""

    is_restricted: bool = False
    centers: StrategyTable | None = None

    @property
    def is_whole(self) -> bool:
        return self.centers is None and not self.is_restricted


@dataclass(frozen=True, slots=True)
class RootTask:
    """Degrees whose grids a worker lists, with the goal and its incumbents."""

    region: SearchRegion
    degrees: list[Degrees]
    goal: Goal


@dataclass(frozen=True, slots=True)
class SubtreeTask:
    """Grids that a worker searches, with the goal and the incumbents at the start of the round."""

    region: SearchRegion
    grids: RootNodes
    goal: Goal


Task = RootTask | SubtreeTask


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The grids of a `RootTask` (none for a `SubtreeTask`), or the incumbents of a `SubtreeTask`, with the
    ledger. The ledger is None where time ran out first."""

    grids: RootNodes
    incumbents: Incumbents
    ledger: CandidateLedger | None


WHOLE_SPACE, RESTRICTED = SearchRegion(), SearchRegion(is_restricted=True)


class BranchAndBound:
    """One search of one space for the incumbents of `goal`. Each instance serves one `run`.

    With `exhaustive`, nothing is pruned, and every legal candidate that fits is evaluated. `clock` ends the
    search early. `warm_start` are strategies of the space; those that are legal and fit become incumbents. If
    they fill the solution pool, the restricted space is not searched, only their neighbourhood. With
    `degrees`, the space has only these degrees, and the goal must have an upper bound.

    `without` names techniques that are switched off, for comparison: "heuristics" (all primal heuristics),
    "neighbourhood" (the neighbourhood search), "symmetry", "capacity" (the capacity relaxation), "memory"
    (rejection of nodes), and levels (`ledger.LEVELS`) whose bounds are ignored. The answer is the same with
    any of them."""

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
        """Searches the whole space, or until the clock is over; the grids are listed in any case."""
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        whole = self._pass
        with SearchWorkers(self._workers, self._run_task) as pool:
            if not self._exhaustive and "heuristics" not in self._without:
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
        """Whether the search takes no longer than its heuristics would."""
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
        """Lists all legal grids of a region."""
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
        """Makes incumbents of the warm start's strategies that are legal and fit, with `INCUMBENT_SLACK`."""
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
        """Searches a region for incumbents. They get `INCUMBENT_SLACK`, so that the search evaluates and
        counts them again."""
        heuristic = _Pass(self._pass.goal.copy())
        grids = self._list_roots(pool, heuristic, region).take(slice(0, HEURISTIC_ROOTS))
        self._search(pool, heuristic, region, grids, None)
        incumbents, more = incumbents_of(heuristic.goal), 1.0 + INCUMBENT_SLACK
        self._pass.goal.offer(incumbents.table, incumbents.time_s * more, incumbents.device_bytes * more)

    def _search_neighbourhood(self, pool: SearchWorkers[Task, TaskResult]) -> None:
        """Searches the neighbourhood of the incumbents. It is omitted in the space `core`, which is small,
        and for a frontier, whose neighbourhood is a large part of the space."""
        known = [found.table for found in self._pass.goal.incumbents]
        is_enough = self._space.is_core or self._pass.goal.weighs_memory
        if known and not is_enough and "neighbourhood" not in self._without and not self._clock.is_over:
            self._run_heuristic(pool, SearchRegion(centers=StrategyTable.joined(known)))

    def _search(
        self,
        pool: SearchWorkers[Task, TaskResult],
        whole: _Pass,
        region: SearchRegion,
        left: RootNodes,
        progress: Progress | None,
    ) -> None:
        """Runs rounds until no grid may improve or time is over."""
        space, total, size = self._space_of(region), len(left.table), FIRST_ROUND
        started_s, all_work = time.perf_counter(), self._work(space, left)
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
                done = f"{total - len(whole.left.table):,} of {total:,} grids, best {whole.best_s:.4g} s"
                left_work = self._work(space, whole.left)
                rest_text = left_text(time.perf_counter() - started_s, all_work - left_work, all_work)
                progress(f"{done}, {rest_text}" if rest_text and left_work else done)
            if undone:
                return
            left, size = rest, min(2 * size, LARGEST_ROUND)

    @staticmethod
    def _work(space: Space, grids: RootNodes) -> float:
        """Nodes of grids with their micro-batch sizes, to which the time of the search is about
        proportional."""
        return float(space.count_micro_batches(grids.table.dp).sum()) if len(grids.table) else 0.0

    def _must_end(self, region: SearchRegion, goal: Goal) -> bool:
        """Whether time is over. Without an incumbent or an upper bound, the restricted space or a small space
        is searched on, unless the user interrupted."""
        is_first = region.is_restricted or (region.is_whole and self._is_small_space)
        is_needed = not goal.incumbents and goal.cutoff_s(0.0) == float("inf")
        must_continue = is_first and is_needed and not self._clock.is_interrupted
        return self._clock.is_over and not must_continue

    def _count(self, space: Space, grids: RootNodes, size: int) -> int:
        """How many grids have about `size` nodes with their micro-batch sizes; at least one, if there is
        one."""
        below = np.cumsum(space.count_micro_batches(grids.table.dp))
        return min(max(int(np.searchsorted(below, size, side="right")), 1), len(grids.table))

    def _batches_of(self, region: SearchRegion, grids: RootNodes) -> list[RootNodes]:
        """The batches of a round."""
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
        """Searches below the grids of a task."""

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
    """The state of a search of one region: goal with incumbents, ledger, and the grids that are left."""

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
        """Seconds that no candidate undercuts."""
        bounds = np.zeros(0) if self.left is None else self.left.lower_bound_s
        return min(self.best_s, float(bounds.min(initial=float("inf"))))

    def merged(self, answer: TaskResult) -> bool:
        """Merges the result of a task; returns whether the task was completed."""
        self.goal.offer(answer.incumbents.table, answer.incumbents.time_s, answer.incumbents.device_bytes)
        if answer.ledger is None:
            return False
        self.ledger.merge(answer.ledger)
        return True


class TimeLimitError(Exception):
    """The budget is spent, or the user interrupted."""
