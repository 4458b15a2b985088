"""The search for the best uneven plan: blocks in order of their bounds, until none can be better."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count

from shardwise.search.clock import SearchClock
from shardwise.search.lanes import SearchWorkers
from shardwise.search.uneven.errands import NodeOutcome, NodeProcessor, OpenNode
from shardwise.search.uneven.laid_out import IMPROVEMENT_FACTOR, UnevenIncumbent, UnevenPlan
from shardwise.search.uneven.space import UnevenSpace, UnevenSubproblem

IDENTICAL_PRIORITY = 0.95
"""Of the bound of a block of alike pipelines, which are soon laid out: what it is searched by."""

MAX_EVALUATED, MAX_BOUNDED = 2500, 400_000
"""Layouts that are evaluated in all where a gap is allowed, and runs of stages that are bounded: then the
search ends with the gap that it has."""

BATCH_SIZE = 4
"""Errands of a round, whatever the number of workers is: each for another micro-batch size."""

ROUND_BOUND_RATIO = 1.02
"""Of a round are blocks that are searched by no more than so much of the first one's bound: what is found
there may show that others are not needed."""

MAX_DEFERRED = 8
"""Blocks of sizes that a round has already which are left for the next, at most."""

SERIAL_ROUNDS = 1
"""Rounds before which no other process is started: the smallest searches need no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenOutcome:
    """The best plan below the time to beat (None: there is none), and what all plans take at least.

    Every triple of pools, micro-batch size and number of pipelines is one candidate: `pruned` by a bound,
    `searched` (layouts of pipelines were evaluated, `evaluated` in all, or one was the best for a while), or
    `unexplored` when time was over.
    """

    plan: UnevenPlan | None
    lower_bound_s: float
    pruned: int
    searched: int
    unexplored: int
    evaluated: int
    search_s: float
    search_cpu_s: float


def search_uneven(
    space: UnevenSpace,
    *,
    clock: SearchClock | None = None,
    cutoff_s: float = float("inf"),
    gap: float = 0.0,
    workers: int = 1,
    progress: Callable[[str], None] | None = None,
) -> UnevenOutcome:
    """The best plan of the space that takes less than `cutoff_s`; ends where nothing can be better by more
    than the share `gap`, or the clock says so. Any number of `workers` finds the same plan, with the same
    ledger."""
    return _BranchAndBound(space, clock or SearchClock(), cutoff_s, gap, workers, progress).run()


class _BranchAndBound:
    """Blocks by their bounds, the next few of which are looked at closer: bounded soon, divided, or
    searched."""

    def __init__(
        self,
        space: UnevenSpace,
        clock: SearchClock,
        cutoff_s: float,
        gap: float,
        workers: int,
        progress: Callable[[str], None] | None,
    ) -> None:
        self._started_s, self._started_cpu_s = time.perf_counter(), time.process_time()
        self._space, self._clock, self._gap, self._workers = space, clock, gap, workers
        self._processor = NodeProcessor(space, clock, gap)
        self._incumbent = UnevenIncumbent(plan=None, time_s=cutoff_s)
        self._min_fathomed_s = float("inf")
        self._pruned, self._searched, self._evaluated, self._bounded = 0, 0, 0, 0
        self._order = count()
        self._heap: list[tuple[float, int, OpenNode]] = []
        self._progress = progress

    def run(self) -> UnevenOutcome:
        """Until no block is left that matters."""
        for subproblem in self._space.subproblems():
            self._push(
                OpenNode(
                    subproblem=subproblem, lower_bound_s=self._processor.pricing.quick_bound_s(subproblem)
                )
            )
        self._apply(self._processor.initial_incumbent(self._incumbent.time_s))
        with SearchWorkers(self._workers, self._processor.process) as pool:
            for round_index in count():
                nodes = self._next_round()
                if not nodes:
                    break
                self._report_progress(nodes[0])
                sizes = [node.subproblem.micro_batch_size for node in nodes]
                outcomes = (
                    pool.results_at(sizes, nodes) if round_index >= SERIAL_ROUNDS else self._serially(nodes)
                )
                for node, outcome in zip(nodes, outcomes, strict=True):
                    self._apply(outcome)
                    if outcome.fathomed_bound_s is not None:
                        self._fathom(
                            node.subproblem, outcome.fathomed_bound_s, is_searched=outcome.evaluated > 0
                        )
            return self._outcome(pool.cpu_s)

    def _serially(self, nodes: list[OpenNode]) -> list[NodeOutcome]:
        return [self._processor.process(node) for node in nodes]

    def _next_round(self) -> list[OpenNode]:
        """The blocks of a round, none where the search is at its end; those that bounds cut are closed."""
        found: list[OpenNode] = []
        deferred: list[tuple[float, int, OpenNode]] = []
        round_limit_s = float("inf")
        while self._heap and len(found) < BATCH_SIZE and len(deferred) < MAX_DEFERRED:
            is_enough = self._evaluated > MAX_EVALUATED or self._bounded > MAX_BOUNDED
            is_over = not self._is_open(self._heap[0][0]) or (self._gap > 0.0 and is_enough)
            if is_over or self._clock.is_over or self._heap[0][0] > round_limit_s:
                break
            entry = heappop(self._heap)
            node = entry[2]
            if not self._is_open(node.lower_bound_s):
                self._fathom(node.subproblem, node.lower_bound_s)
            elif node.subproblem.micro_batch_size in {one.subproblem.micro_batch_size for one in found}:
                deferred.append(entry)
            else:
                round_limit_s = min(round_limit_s, ROUND_BOUND_RATIO * entry[0])
                found.append(replace(node, incumbent_s=self._incumbent.time_s))
        for entry in deferred:
            heappush(self._heap, entry)
        return found

    def _is_open(self, lower_bound_s: float) -> bool:
        """Whether plans that take no less may be better by more than the gap."""
        return lower_bound_s < self._incumbent.time_s * (IMPROVEMENT_FACTOR - self._gap)

    def _push(self, node: OpenNode) -> None:
        key = node.lower_bound_s * (IDENTICAL_PRIORITY if node.subproblem.is_alike else 1.0)
        heappush(self._heap, (key, next(self._order), node))

    def _apply(self, outcome: NodeOutcome) -> None:
        """Takes over what came of an errand."""
        self._evaluated += outcome.evaluated
        self._bounded += outcome.bounded
        self._incumbent.improving |= outcome.best.improving
        if (
            outcome.best.plan is not None
            and outcome.best.time_s < self._incumbent.time_s * IMPROVEMENT_FACTOR
        ):
            self._incumbent.plan, self._incumbent.time_s = outcome.best.plan, outcome.best.time_s
        for node in outcome.left:
            self._push(node)

    def _fathom(
        self, subproblem: UnevenSubproblem, lower_bound_s: float, *, is_searched: bool = False
    ) -> None:
        """Leaves the block, whose plans take at least so long."""
        self._min_fathomed_s = min(self._min_fathomed_s, lower_bound_s)
        searched = subproblem.size if is_searched else self._improving_in(subproblem)
        self._searched += searched
        self._pruned += subproblem.size - searched

    def _improving_in(self, subproblem: UnevenSubproblem) -> int:
        """How many of its numbers of pipelines had a plan that was the best for a while."""
        return sum(
            subproblem.least <= one.least <= subproblem.most
            and replace(subproblem, least=one.least, most=one.most) == one
            for one in self._incumbent.improving
        )

    def _report_progress(self, node: OpenNode) -> None:
        if self._progress is not None:
            incumbent_s, left = self._incumbent.time_s, len(self._heap) + 1
            self._progress(
                f"best {incumbent_s:.4g} s, at least {node.lower_bound_s:.4g} s, {left} blocks left"
            )

    def _outcome(self, more_cpu_s: float) -> UnevenOutcome:
        left_s = min((node.lower_bound_s for _, _, node in self._heap), default=float("inf"))
        left = sum(node.subproblem.size for _, _, node in self._heap)
        improving = sum(self._improving_in(node.subproblem) for _, _, node in self._heap)
        is_over = self._is_open(left_s)
        return UnevenOutcome(
            plan=self._incumbent.plan,
            lower_bound_s=min(left_s, self._min_fathomed_s, self._incumbent.time_s),
            pruned=self._pruned + (0 if is_over else left - improving),
            unexplored=left if is_over else 0,
            searched=self._searched + (0 if is_over else improving),
            evaluated=self._evaluated,
            search_s=time.perf_counter() - self._started_s,
            search_cpu_s=time.process_time() - self._started_cpu_s + more_cpu_s,
        )
