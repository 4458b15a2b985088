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
from shardwise.search.clock import Clock
from shardwise.search.closeup import CloseUp, close_up_of
from shardwise.search.dive import Dive
from shardwise.search.division import DEGREES_PER_LANE, first_lanes, lanes_of, listing_lanes
from shardwise.search.evaluate import step_times_s
from shardwise.search.fates import Ledger
from shardwise.search.goals import NO_FINDS, Finds, Found, Goal, finds_of
from shardwise.search.lanes import Lanes
from shardwise.search.listing import Listing, listed
from shardwise.search.sketch import sketch_of
from shardwise.search.space import Degrees, Space
from shardwise.strategy import RULES, Strategy, StrategyTable, first_broken

Progress = Callable[[str], None]

REMEMBERED = 1e-12
"""How much slower and larger a strategy of the sketch stands until the search itself meets it."""

LOOKED_AT = 256
"""Grids of a first look, at most: those with the least bounds."""

FEW, FEW_WITH_MEMORY = 1 << 18, 1 << 14
"""Candidates, at most, of a space that is searched without a look before; fewer where their memory matters as
much as their time, since less is cut then."""

FIRST_ROUND, LARGEST_ROUND = 1 << 14, 1 << 17
"""Grids with micro-batch sizes in a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a search found, best first; what became of every candidate; the clock.

    `unexplored` candidates were not looked at when the budget was spent or the user interrupted; none takes
    less than `lower_bound_s`.
    """

    found: list[Found]
    ledger: Ledger
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
class Part:
    """A part of the space: all of it, its sketch, or what lies next to strategies, `around`."""

    is_sketch: bool = False
    around: StrategyTable | None = None

    @property
    def is_whole(self) -> bool:
        return self.around is None and not self.is_sketch


@dataclass(frozen=True, slots=True)
class ListTask:
    """Degrees whose grids are to be listed, and what is known."""

    part: Part
    degrees: list[Degrees]
    goal: Goal


@dataclass(frozen=True, slots=True)
class DiveTask:
    """Grids to be searched, and what is known when their round starts."""

    part: Part
    grids: Listing
    goal: Goal


Task = ListTask | DiveTask


@dataclass(frozen=True, slots=True)
class Answer:
    """Listed grids (none where a task was to search), or what was found below grids; their ledger, or None
    where time ran out before all was done."""

    grids: Listing
    finds: Finds
    ledger: Ledger | None


WHOLE, SKETCH = Part(), Part(is_sketch=True)


class Search:
    """One search over one space. `run` gives its outcome; nothing is kept between two searches.

    `goal` is what is looked for. With `exhaustive`, nothing is cut and every legal candidate that fits is
    evaluated. `clock` ends the search early. `near` are strategies of the space that may be good: where as
    many as are looked for are legal and fit, it begins next to them, and needs no sketch. With `degrees`, the
    candidates are only those that have them, and a goal with an upper bound is expected. `without` names
    means that are not used, for comparison: "sketch" (and what follows from it), "close-up", "symmetry",
    "room", "memory" (of blocks), and the levels (`fates.LEVELS`) whose bounds are ignored. With any of these
    the answer is the same.
    """

    def __init__(
        self,
        problem: Problem,
        space: Space,
        goal: Goal,
        *,
        exhaustive: bool = False,
        workers: int = 1,
        clock: Clock | None = None,
        near: Sequence[Strategy] = (),
        degrees: Sequence[Degrees] | None = None,
        without: frozenset[str] = frozenset(),
    ) -> None:
        self._problem, self._space, self._sketch = problem, space, sketch_of(space)
        self._near, self._degrees = near, degrees
        self._close_up: CloseUp | None = None
        self._exhaustive, self._workers, self._clock = exhaustive, workers, clock or Clock()
        self._without = without
        self._pass = _Pass(goal)

    def run(self, progress: Progress | None = None) -> Outcome:
        """Searches the whole space, or until the clock is over: what is left is listed even then."""
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        whole = self._pass
        with Lanes(self._workers, self._answered) as lanes:
            if not self._exhaustive and "sketch" not in self._without:
                self._offer_near()
                if not self._is_small:
                    if whole.goal.limit_s(0.0) == float("inf"):
                        self._look(lanes, SKETCH)
                    self._look_closer(lanes)
            grids = self._list(lanes, whole, WHOLE)
            self._search(lanes, whole, WHOLE, grids, progress)
            lanes_cpu_s = lanes.cpu_s
        return Outcome(
            found=whole.goal.found,
            ledger=whole.ledger,
            unexplored=whole.unexplored,
            lower_bound_s=whole.lower_bound_s,
            is_interrupted=self._clock.is_interrupted,
            search_s=time.perf_counter() - started_s,
            search_cpu_s=time.process_time() - started_cpu_s + lanes_cpu_s,
        )

    @cached_property
    def _is_small(self) -> bool:
        """Whether a search takes no longer than a look at a sketch would, so that it begins at once."""
        degrees = self._space.degrees()
        if len(degrees) > DEGREES_PER_LANE:
            return False
        shapes = self._space.shapes(degrees)
        candidates = self._space.count_orders(shapes) * self._space.count_below_grids(shapes)
        few = FEW_WITH_MEMORY if self._pass.goal.weighs_memory else FEW
        return bool(candidates.sum() <= few)

    @property
    def _cuts_grids(self) -> bool:
        return not self._exhaustive and "degrees" not in self._without

    def _list(self, lanes: Lanes[Task, Answer], whole: _Pass, part: Part) -> Listing:
        """Lists all legal grids."""
        parts, degrees = [], self._space_of(part).degrees()
        if part.is_whole and self._degrees is not None:
            degrees = list(self._degrees)
        tasks = [ListTask(part, few, whole.goal.copy()) for few in listing_lanes(degrees)]
        for answer in lanes.answers(tasks):
            parts.append(answer.grids)
            whole.ledger.merge(answer.ledger or Ledger())
        whole.left = Listing.joined(parts)
        return whole.left

    def _offer_near(self) -> None:
        """Takes what may be good into account, where it can run. It stands as a little worse than it is, so
        that it is met, and counted, like all others."""
        table = StrategyTable.of(self._near)
        if len(table):
            table = table.take(first_broken(table, self._problem.limits, RULES) < 0)
        for limit in self._space.limits:
            table = table.take(~limit.beyond(table))
        if len(table):
            peaks = peaks_of(self._problem, table)
            fits = peaks.device_bytes <= self._problem.usable_bytes
            fits &= peaks.host_bytes <= self._problem.host_bytes_per_device
            table, device_bytes = table.take(fits), peaks.device_bytes[fits]
        if len(table):
            more = 1.0 + REMEMBERED
            self._pass.goal.offer(table, step_times_s(self._problem, table) * more, device_bytes * more)

    def _look(self, lanes: Lanes[Task, Answer], part: Part) -> None:
        """A first look at a part of the space: what it finds is what the search must not exceed. It is met,
        evaluated and counted again, since it stands as a little worse than it is."""
        look = _Pass(self._pass.goal.copy())
        grids = self._list(lanes, look, part).take(slice(0, LOOKED_AT))
        self._search(lanes, look, part, grids, None)
        finds, more = finds_of(look.goal), 1.0 + REMEMBERED
        self._pass.goal.offer(finds.table, finds.time_s * more, finds.device_bytes * more)

    def _look_closer(self, lanes: Lanes[Task, Answer]) -> None:
        """A look at what lies next to what is known; the core space is so small that one look is enough, and
        what lies next to all of a frontier is much of the space."""
        known = [found.table for found in self._pass.goal.found]
        is_enough = self._space.is_core or self._pass.goal.weighs_memory
        if known and not is_enough and "close-up" not in self._without and not self._clock.is_over:
            self._look(lanes, Part(around=StrategyTable.joined(known)))

    def _search(
        self,
        lanes: Lanes[Task, Answer],
        whole: _Pass,
        part: Part,
        left: Listing,
        progress: Progress | None,
    ) -> None:
        """Round after round, until nothing is left that may matter or the time is over."""
        space, total, size = self._space_of(part), len(left.table), FIRST_ROUND
        while len(left.table):
            if self._cuts_grids:
                left = left.opened(whole.goal, whole.ledger)
            whole.left = left
            if self._must_end(part, whole.goal):
                return
            count = self._count(space, left, size)
            first, rest = left.take(slice(0, count)), left.take(slice(count, None))
            tasks = [DiveTask(part, few, whole.goal.copy()) for few in self._lanes_of(part, first)]
            answers = zip(tasks, lanes.answers(tasks), strict=True)
            undone = [task.grids for task, answer in answers if not whole.merged(answer)]
            whole.left = Listing.joined([*undone, rest])
            if progress is not None:
                progress(f"{total - len(whole.left.table):,} of {total:,} grids, best {whole.best_s:.4g} s")
            if undone:
                return
            left, size = rest, min(2 * size, LARGEST_ROUND)

    def _must_end(self, part: Part, goal: Goal) -> bool:
        """Whether the time is over. The first look, or the search of a small space, goes on until it has
        found something, but for an interrupt, or where nothing is needed because an upper bound is given."""
        is_first = part.is_sketch or (part.is_whole and self._is_small)
        is_needed = not goal.found and goal.limit_s(0.0) == float("inf")
        is_wanted = is_first and is_needed and not self._clock.is_interrupted
        return self._clock.is_over and not is_wanted

    def _count(self, space: Space, grids: Listing, size: int) -> int:
        """How many grids have about so many rows with micro-batch sizes; one at least, if there is one."""
        below = np.cumsum(space.count_micro_batches(grids.table.dp))
        return min(max(int(np.searchsorted(below, size, side="right")), 1), len(grids.table))

    def _lanes_of(self, part: Part, grids: Listing) -> list[Listing]:
        """The parts of a round."""
        divided = first_lanes if part.is_sketch else lanes_of
        return divided(self._space_of(part), grids, weighs_memory=self._pass.goal.weighs_memory)

    def _space_of(self, part: Part) -> Space:
        if part.around is None:
            return self._sketch if part.is_sketch else self._space
        if self._close_up is None:
            self._close_up = close_up_of(self._space, part.around)
        return self._close_up

    def _answered(self, task: Task) -> Answer:
        if isinstance(task, ListTask):
            grids, ledger = listed(
                self._problem, self._space_of(task.part), task.degrees, task.goal,
                folds=not self._exhaustive and "symmetry" not in self._without,
                cuts=self._cuts_grids,
                most=None if task.part.is_whole else LOOKED_AT,
            )  # fmt: skip
            return Answer(grids, NO_FINDS, ledger)
        return self._dived(task)

    def _dived(self, task: DiveTask) -> Answer:
        """Searches below a task's grids."""

        def check() -> None:
            if self._must_end(task.part, task.goal):
                raise OutOfTimeError

        space = self._space_of(task.part)
        table, weights = task.grids.with_micro_batches(space)
        dive = Dive(
            self._problem, space, task.goal, table, weights,
            exhaustive=self._exhaustive, without=self._without, check=check,
        )  # fmt: skip
        try:
            dive.run()
        except OutOfTimeError:
            return Answer(task.grids.take(slice(0, 0)), finds_of(task.goal), None)
        ledger = Ledger()
        ledger.add(table, dive.fates)
        expected = int(task.grids.candidates.sum())
        if ledger.total != expected:
            raise InternalError(f"the ledger holds {ledger.total} of {expected} candidates")
        return Answer(task.grids.take(slice(0, 0)), finds_of(task.goal), ledger)


@dataclass
class _Pass:
    """What a pass over a space has found, what became of its candidates, and the grids that are left."""

    goal: Goal
    ledger: Ledger = field(default_factory=Ledger)
    left: Listing | None = None

    @property
    def best_s(self) -> float:
        return min((found.time_s for found in self.goal.found), default=float("inf"))

    @property
    def unexplored(self) -> int:
        """Candidates below the grids that are left."""
        return 0 if self.left is None else sum(self.left.candidates.tolist())

    @property
    def lower_bound_s(self) -> float:
        """No candidate takes less."""
        bounds = np.zeros(0) if self.left is None else self.left.bound_s
        return min(self.best_s, float(bounds.min(initial=float("inf"))))

    def merged(self, answer: Answer) -> bool:
        """Takes an answer into account; whether it is complete."""
        self.goal.offer(answer.finds.table, answer.finds.time_s, answer.finds.device_bytes)
        if answer.ledger is None:
            return False
        self.ledger.merge(answer.ledger)
        return True


class OutOfTimeError(Exception):
    """The budget is spent, or the user interrupted."""
