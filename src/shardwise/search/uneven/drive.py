"""The search for the best uneven plan: blocks in order of their bounds, until none can be better."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count

from shardwise.search.clock import Clock
from shardwise.search.lanes import Lanes
from shardwise.search.uneven.errands import Errand, Errands, Report
from shardwise.search.uneven.laid_out import ALMOST, Best, UnevenPlan
from shardwise.search.uneven.space import Block, UnevenSpace

EAGER = 0.95
"""Of the bound of a block of alike pipelines, which are soon laid out: what it is searched by."""

ENOUGH, ENOUGH_BOUNDED = 2500, 400_000
"""Layouts that are evaluated in all where a gap is allowed, and runs of stages that are bounded: then the
search ends with the gap that it has."""

AT_ONCE = 4
"""Errands of a round, whatever the number of workers is: each for another micro-batch size."""

NEARLY = 1.02
"""Of a round are blocks that are searched by no more than so much of the first one's bound: what is found
there may show that others are not needed."""

PASSED_OVER = 8
"""Blocks of sizes that a round has already which are left for the next, at most."""

ALONE = 1
"""Rounds before which no other process is started: the smallest searches need no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenOutcome:
    """The best plan below the time to beat (None: there is none), and what all plans take at least.

    Every triple of pools, micro-batch size and number of pipelines is one candidate: `cut` by a bound,
    `searched` (layouts of pipelines were evaluated, `evaluated` in all, or one was the best for a while), or
    `unexplored` when time was over.
    """

    plan: UnevenPlan | None
    lower_bound_s: float
    cut: int
    searched: int
    unexplored: int
    evaluated: int
    search_s: float
    search_cpu_s: float


def search_uneven(
    space: UnevenSpace,
    *,
    clock: Clock | None = None,
    beat_s: float = float("inf"),
    gap: float = 0.0,
    workers: int = 1,
    progress: Callable[[str], None] | None = None,
) -> UnevenOutcome:
    """The best plan of the space that takes less than `beat_s`; ends where nothing can be better by more than
    the share `gap`, or the clock says so. Any number of `workers` finds the same plan, with the same
    ledger."""
    return _Drive(space, clock or Clock(), beat_s, gap, workers, progress).run()


class _Drive:
    """Blocks by their bounds, the next few of which are looked at closer: bounded soon, divided, or
    searched."""

    def __init__(
        self,
        space: UnevenSpace,
        clock: Clock,
        beat_s: float,
        gap: float,
        workers: int,
        progress: Callable[[str], None] | None,
    ) -> None:
        self._started_s, self._started_cpu_s = time.perf_counter(), time.process_time()
        self._space, self._clock, self._gap, self._workers = space, clock, gap, workers
        self._errands = Errands(space, clock, gap)
        self._best = Best(plan=None, time_s=beat_s)
        self._open_s = float("inf")
        self._cut, self._searched, self._evaluated, self._bounded = 0, 0, 0, 0
        self._order = count()
        self._heap: list[tuple[float, int, Errand]] = []
        self._progress = progress

    def run(self) -> UnevenOutcome:
        """Until no block is left that matters."""
        for block in self._space.blocks():
            self._push(Errand(block=block, least_s=self._errands.pricing.soon_s(block)))
        self._take(self._errands.sketched(self._best.time_s))
        with Lanes(self._workers, self._errands.done) as lanes:
            for turn in count():
                errands = self._next()
                if not errands:
                    break
                self._tell(errands[0])
                sizes = [errand.block.micro_batch_size for errand in errands]
                reports = lanes.answers_at(sizes, errands) if turn >= ALONE else self._by_itself(errands)
                for errand, report in zip(errands, reports, strict=True):
                    self._take(report)
                    if report.closed_s is not None:
                        self._close(errand.block, report.closed_s, is_searched=report.evaluated > 0)
            return self._outcome(lanes.cpu_s)

    def _by_itself(self, errands: list[Errand]) -> list[Report]:
        return [self._errands.done(errand) for errand in errands]

    def _next(self) -> list[Errand]:
        """The blocks of a round, none where the search is at its end; those that bounds cut are closed."""
        found: list[Errand] = []
        aside: list[tuple[float, int, Errand]] = []
        nearly_s = float("inf")
        while self._heap and len(found) < AT_ONCE and len(aside) < PASSED_OVER:
            is_enough = self._evaluated > ENOUGH or self._bounded > ENOUGH_BOUNDED
            is_over = not self._is_left(self._heap[0][0]) or (self._gap > 0.0 and is_enough)
            if is_over or self._clock.is_over or self._heap[0][0] > nearly_s:
                break
            entry = heappop(self._heap)
            errand = entry[2]
            if not self._is_left(errand.least_s):
                self._close(errand.block, errand.least_s)
            elif errand.block.micro_batch_size in {one.block.micro_batch_size for one in found}:
                aside.append(entry)
            else:
                nearly_s = min(nearly_s, NEARLY * entry[0])
                found.append(replace(errand, best_s=self._best.time_s))
        for entry in aside:
            heappush(self._heap, entry)
        return found

    def _is_left(self, least_s: float) -> bool:
        """Whether plans that take no less may be better by more than the gap."""
        return least_s < self._best.time_s * (ALMOST - self._gap)

    def _push(self, errand: Errand) -> None:
        key = errand.least_s * (EAGER if errand.block.is_alike else 1.0)
        heappush(self._heap, (key, next(self._order), errand))

    def _take(self, report: Report) -> None:
        """Takes over what came of an errand."""
        self._evaluated += report.evaluated
        self._bounded += report.bounded
        self._best.laid |= report.best.laid
        if report.best.plan is not None and report.best.time_s < self._best.time_s * ALMOST:
            self._best.plan, self._best.time_s = report.best.plan, report.best.time_s
        for errand in report.left:
            self._push(errand)

    def _close(self, block: Block, least_s: float, *, is_searched: bool = False) -> None:
        """Leaves the block, whose plans take at least so long."""
        self._open_s = min(self._open_s, least_s)
        searched = block.size if is_searched else self._laid_in(block)
        self._searched += searched
        self._cut += block.size - searched

    def _laid_in(self, block: Block) -> int:
        """How many of its numbers of pipelines had a plan that was the best for a while."""
        return sum(
            block.least <= one.least <= block.most and replace(block, least=one.least, most=one.most) == one
            for one in self._best.laid
        )

    def _tell(self, errand: Errand) -> None:
        if self._progress is not None:
            best_s, left = self._best.time_s, len(self._heap) + 1
            self._progress(f"best {best_s:.4g} s, at least {errand.least_s:.4g} s, {left} blocks left")

    def _outcome(self, more_cpu_s: float) -> UnevenOutcome:
        left_s = min((errand.least_s for _, _, errand in self._heap), default=float("inf"))
        left = sum(errand.block.size for _, _, errand in self._heap)
        laid = sum(self._laid_in(errand.block) for _, _, errand in self._heap)
        is_over = self._is_left(left_s)
        return UnevenOutcome(
            plan=self._best.plan,
            lower_bound_s=min(left_s, self._open_s, self._best.time_s),
            cut=self._cut + (0 if is_over else left - laid),
            unexplored=left if is_over else 0,
            searched=self._searched + (0 if is_over else laid),
            evaluated=self._evaluated,
            search_s=time.perf_counter() - self._started_s,
            search_cpu_s=time.process_time() - self._started_cpu_s + more_cpu_s,
        )
