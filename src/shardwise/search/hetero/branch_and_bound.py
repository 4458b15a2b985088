"""Branch and bound for the best uneven plan: open nodes in the order of their bounds, in rounds.

`search_uneven` is the entry. `NodeProcessor.process` takes one `OpenNode` (a subproblem with its lower
bound): it bounds it quickly, branches a wide range of numbers of pipelines, or searches it for better plans.
Its result depends only on the node and on earlier nodes of the same micro-batch size. So the nodes of a
round, which have different sizes, may run in any number of processes, with the same plans and bounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count

import numpy as np

from shardwise.search.clock import SearchClock
from shardwise.search.hetero.pipeline_search import StagePlacement, pipeline_s
from shardwise.search.hetero.space import PipelineShape, UnevenSpace, UnevenSubproblem, spread_set_size
from shardwise.search.hetero.stage_costs import StageCostModel, StageOptions
from shardwise.search.hetero.subproblem import (
    MAX_STEP_S,
    EvaluatedPipeline,
    SubproblemSearch,
    subproblem_search,
)
from shardwise.search.worker_pool import SearchWorkers
from shardwise.ties import PROVEN_TIE, first_largest, is_less

IMPROVEMENT_FACTOR = 1.0 - PROVEN_TIE
"""A plan improves on the incumbent if it takes less than this factor of its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenPipeline:
    """One pipeline of a plan: the kind of its stages on each site, its stages in order, its micro-batches,
    and the seconds of its step."""

    kinds: tuple[int, ...]
    stages: tuple[StagePlacement, ...]
    microbatches: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenPlan:
    """The pipelines of a plan, the slowest of which takes `time_s`. `subproblem` has its pools, micro-batch
    size and number of pipelines."""

    subproblem: UnevenSubproblem
    pipelines: tuple[UnevenPipeline, ...]
    time_s: float


@dataclass(slots=True)
class UnevenIncumbent:
    """The best plan so far and the upper bound of the step time, which may be less than the plan's own at
    first. `improving` are subproblems of one number of pipelines whose plan was the incumbent at some time.
    """

    plan: UnevenPlan | None
    time_s: float
    improving: set[UnevenSubproblem] = field(default_factory=set)

    def improve(
        self,
        pricing: StageCostModel,
        subproblem: UnevenSubproblem,
        found: Sequence[tuple[EvaluatedPipeline, int]],
    ) -> None:
        """Replaces the incumbent by these pipelines if they are faster at the costs of their own number of
        pipelines."""
        pipelines = _capped(found, pricing.options(subproblem))
        if pipelines is None:
            return
        own = replace(subproblem, least=len(pipelines), most=len(pipelines))
        options = pricing.options(own)
        trimmed = _trimmed(options, pipelines, options.microbatches)
        time_s = max(pipeline.time_s for pipeline in trimmed)
        if is_less(time_s, self.time_s, PROVEN_TIE):
            self.improving.add(own)
            self.plan = UnevenPlan(subproblem=own, pipelines=tuple(trimmed), time_s=time_s)
            self.time_s = time_s


_Pipeline = tuple[PipelineShape, tuple[StagePlacement, ...], int]
"""Its shape, its stages and its micro-batches."""


def _capped(found: Sequence[tuple[EvaluatedPipeline, int]], options: StageOptions) -> list[_Pipeline] | None:
    """At most as many pipelines as micro-batches, and those with spread stages in whole sets; None where
    these do not do all micro-batches."""
    required, pipelines = options.microbatches, list[_Pipeline]()
    for evaluated, times in found:
        set_size = spread_set_size(options.spread, evaluated.shape)
        fitting = min(times, required - len(pipelines)) // set_size * set_size
        pipelines += [(evaluated.shape, evaluated.found.stages, evaluated.microbatches)] * fitting
    return pipelines if sum(microbatches for _, _, microbatches in pipelines) >= required else None


def _trimmed(options: StageOptions, pipelines: Sequence[_Pipeline], required: int) -> list[UnevenPipeline]:
    """The pipelines with exactly the required micro-batches: the excess is taken from the slowest, one at a
    time."""
    known: dict[_Pipeline, float] = {}

    def time_s(one: _Pipeline) -> float:
        if one not in known:
            known[one] = pipeline_s(options, one[0].kinds, one[1], one[2])
        return known[one]

    trimmed, times = list(pipelines), np.array([time_s(one) for one in pipelines])
    may_do_less = np.array([one[2] > 1 for one in pipelines])
    for _ in range(sum(one[2] for one in pipelines) - required):
        slowest = int(first_largest(np.where(may_do_less, times, 0.0)))
        shape, stages, microbatches = trimmed[slowest]
        trimmed[slowest] = (shape, stages, microbatches - 1)
        times[slowest], may_do_less[slowest] = time_s(trimmed[slowest]), microbatches > 2
    return [
        UnevenPipeline(kinds=shape.kinds, stages=stages, microbatches=microbatches, time_s=seconds)
        for (shape, stages, microbatches), seconds in zip(trimmed, times.tolist(), strict=True)
    ]


# Processing of a node

BOUND_TOLERANCE = 1e-6
"""Relative difference between the bound and the best time of a subproblem at which its optimum is tested
directly."""

GAP_SHARE = 0.75
"""A subproblem whose plans cannot improve by more than this share of the allowed gap is not searched."""

MANY_PIPELINES = 16
"""Number of pipelines above which gradients cost about the same: a ring of 16 moves 15/16 of the bytes that a
ring of any number of replicas moves at most."""

SKIP_BOUND_RATIO = 0.8
"""Share of the cutoff: where the quick bound of a wide range is below it, closer bounds are not tried on the
range."""

HALVINGS = 12
"""Bisections of the interval of a subproblem's bound after a truncated search."""

EXACT_EFFORT, GAP_EFFORT = 1000, 32
"""Partial pipelines of one pipeline that are expanded, where no gap is allowed and where one is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenNode:
    """An open node: a subproblem none of whose plans takes less than `lower_bound_s`. Only plans below
    `incumbent_s` are searched for. `parent` is the subproblem that it was branched from, if any."""

    subproblem: UnevenSubproblem
    lower_bound_s: float
    parent: UnevenSubproblem | None = None
    incumbent_s: float = float("inf")


@dataclass(slots=True)
class NodeOutcome:
    """The outcome of processing a node: the incumbent; the open nodes that are left (`left`); the bound of
    its plans, if it was fathomed; layouts evaluated, and suffixes bounded."""

    best: UnevenIncumbent
    left: list[OpenNode] = field(default_factory=list)
    fathomed_bound_s: float | None = None
    evaluated: int = 0
    bounded: int = 0


class NodeProcessor:
    """Processes nodes of one space. It keeps the search of a subproblem for its later nodes."""

    def __init__(self, space: UnevenSpace, clock: SearchClock, gap: float) -> None:
        self._space, self._clock, self._gap = space, clock, gap
        self.pricing = StageCostModel(space)
        self._effort = EXACT_EFFORT if gap == 0.0 else GAP_EFFORT
        self._searches: dict[UnevenSubproblem, SubproblemSearch] = {}

    def process(self, node: OpenNode) -> NodeOutcome:
        """Bounds, branches or searches the node."""
        outcome = NodeOutcome(best=UnevenIncumbent(plan=None, time_s=node.incumbent_s))
        search = self._searches.get(node.subproblem)
        if search is None:
            self._bound_quickly(node, outcome)
        elif is_wide(node.subproblem):
            self._branch(node, search, outcome)
        else:
            self._search_node(node, search, outcome)
        if outcome.fathomed_bound_s is not None:
            self._searches.pop(node.subproblem, None)
        return outcome

    def initial_incumbent(self, incumbent_s: float) -> NodeOutcome:
        """Searches for a first incumbent among plans whose pipelines are on one pool each, which are few.
        Many pipelines are tried first: devices that hold the whole model can be pipelines of their own."""
        outcome = NodeOutcome(best=UnevenIncumbent(plan=None, time_s=incumbent_s))
        subproblems = [subproblem for subproblem in self._space.subproblems() if not subproblem.is_alike]
        for lower_bound_s, _, subproblem in sorted(
            (self.pricing.quick_bound_s(one), at, one) for at, one in enumerate(subproblems)
        ):
            if not self._is_open(lower_bound_s, outcome) or self._clock.is_over:
                break
            whole = self._search_of(subproblem, most_sites=1)
            for part in reversed(_doubling_ranges(subproblem)):
                if whole.is_refuted(self._cutoff_s(outcome)) or whole.are_too_few(
                    part.most, self._cutoff_s(outcome)
                ):
                    break  # nor are fewer pipelines enough
                few = self._search_of(part, whole, most_sites=1)
                self._improved_bound_s(part, few, lower_bound_s, outcome)
        return outcome

    def _search_of(
        self,
        subproblem: UnevenSubproblem,
        parent: SubproblemSearch | None = None,
        most_sites: int | None = None,
    ) -> SubproblemSearch:
        options = self.pricing.options(subproblem)
        return subproblem_search(options, subproblem, self._effort, parent, most_sites, self._clock)

    def _cutoff_s(self, outcome: NodeOutcome) -> float:
        """The cutoff: only plans with a smaller step time are searched for."""
        return outcome.best.time_s * (IMPROVEMENT_FACTOR - GAP_SHARE * self._gap)

    def _is_open(self, lower_bound_s: float, outcome: NodeOutcome) -> bool:
        """Whether plans with this lower bound may improve by more than the gap."""
        return lower_bound_s < outcome.best.time_s * (IMPROVEMENT_FACTOR - self._gap)

    def _bound_quickly(self, node: OpenNode, outcome: NodeOutcome) -> None:
        """Bounds the subproblem by its quick bounds."""
        subproblem, cutoff_s = node.subproblem, self._cutoff_s(outcome)
        parent = None if node.parent is None else self._searches[node.parent]
        if (
            parent is not None
            and cutoff_s > node.lower_bound_s
            and parent.are_too_few(subproblem.most, cutoff_s)
        ):
            outcome.fathomed_bound_s = cutoff_s
            return
        options = self.pricing.options(subproblem)
        lower_bound_s = max(node.lower_bound_s, self.pricing.lower_bound_s(subproblem, options))
        if not self._is_open(lower_bound_s, outcome):
            outcome.fathomed_bound_s = lower_bound_s
            return
        search = self._search_of(subproblem, parent)
        self._searches[subproblem] = search
        outcome.left.append(replace(node, lower_bound_s=search.bound_s(lower_bound_s, cutoff_s)))

    def _branch(self, node: OpenNode, search: SubproblemSearch, outcome: NodeOutcome) -> None:
        """Branches a wide range, unless bounds exclude all of it. Without a good incumbent they rarely do."""
        bounded, cutoff_s = search.bounded, self._cutoff_s(outcome)
        is_refuted = SKIP_BOUND_RATIO * cutoff_s < node.lower_bound_s and search.is_refuted(cutoff_s)
        outcome.bounded += search.bounded - bounded
        if is_refuted:
            outcome.fathomed_bound_s = cutoff_s
            return
        parts = _doubling_ranges(node.subproblem)
        outcome.left += [
            OpenNode(subproblem=part, lower_bound_s=node.lower_bound_s, parent=node.subproblem)
            for part in parts
        ]

    def _search_node(self, node: OpenNode, search: SubproblemSearch, outcome: NodeOutcome) -> None:
        """Searches the subproblem for plans. A subproblem that stays open is halved, or searched again with
        more effort."""
        subproblem = node.subproblem
        lower_bound_s = self._improved_bound_s(subproblem, search, node.lower_bound_s, outcome)
        if not self._is_open(lower_bound_s, outcome):
            outcome.fathomed_bound_s = lower_bound_s
        elif self._clock.is_over:
            outcome.left.append(replace(node, lower_bound_s=lower_bound_s))
        elif subproblem.least < subproblem.most:
            outcome.left += [
                OpenNode(subproblem=part, lower_bound_s=lower_bound_s, parent=subproblem)
                for part in subproblem.halves()
            ]
        elif search.increase_effort():
            outcome.left.append(replace(node, lower_bound_s=lower_bound_s))
        else:
            outcome.fathomed_bound_s = lower_bound_s

    def _improved_bound_s(
        self,
        subproblem: UnevenSubproblem,
        search: SubproblemSearch,
        lower_bound_s: float,
        outcome: NodeOutcome,
    ) -> float:
        """Improves the incumbent by plans of the subproblem, while there is time.

        Bisects the time between bound and incumbent. Returns a lower bound of the subproblem's plans, or a
        time from which they cannot improve on the incumbent.
        """
        best, gap = outcome.best, self._gap
        high_s, before, bounded = best.time_s, search.evaluated, search.bounded
        if high_s == float("inf"):
            high_s = 2.0 * lower_bound_s
            while (found := search.within(high_s)) is None and high_s < MAX_STEP_S:
                high_s = 2.0 * high_s
        else:
            high_s = high_s * (IMPROVEMENT_FACTOR - GAP_SHARE * gap)
            found = search.within(high_s)
        low_s = lower_bound_s if found is not None else high_s
        is_one = subproblem.least == subproblem.most
        precision = max(gap / 10.0 if is_one else gap, BOUND_TOLERANCE)
        if is_one and gap == 0.0 and search.is_exact:
            precision = 0.0
        while found is not None:
            high_s = max(pipeline.found.time_s for pipeline, _ in found)
            best.improve(self.pricing, subproblem, found)
            if high_s * (1.0 - precision) <= low_s or self._clock.is_over:
                break
            is_last = high_s - low_s <= BOUND_TOLERANCE * high_s
            middle_s = high_s * IMPROVEMENT_FACTOR if is_last else (low_s + high_s) / 2.0
            better = search.within(middle_s)
            if better is not None:
                found = better
            elif is_last:
                low_s = high_s
                break
            else:
                low_s = middle_s
        outcome.evaluated += search.evaluated - before
        outcome.bounded += search.bounded - bounded
        return _proven_s(search, lower_bound_s, low_s) if search.was_truncated else low_s


def is_wide(subproblem: UnevenSubproblem) -> bool:
    """Whether the least costs of the range are far below those of most numbers of pipelines in it."""
    return subproblem.least < MANY_PIPELINES and subproblem.most >= 2 * subproblem.least


def _doubling_ranges(subproblem: UnevenSubproblem) -> list[UnevenSubproblem]:
    """A wide range of numbers of pipelines in parts, none of which is wide."""
    found, least = [], subproblem.least
    while least <= subproblem.most:
        most = subproblem.most if least >= MANY_PIPELINES else min(2 * least - 1, subproblem.most)
        found.append(replace(subproblem, least=least, most=most))
        least = most + 1
    return found


def _proven_s(search: SubproblemSearch, lower_bound_s: float, most_s: float) -> float:
    """A time up to `most_s` within which the proven bounds exclude every plan of the subproblem, by
    bisection."""
    if not search.is_possible(most_s * IMPROVEMENT_FACTOR):
        return most_s
    low_s, high_s = lower_bound_s, most_s
    for _ in range(HALVINGS):
        middle_s = (low_s + high_s) / 2.0
        if search.is_possible(middle_s):
            high_s = middle_s
        else:
            low_s = middle_s
    return low_s


# Rounds of open nodes

IDENTICAL_PRIORITY = 0.95
"""Factor on the bound of a subproblem of identical pipelines in the order of nodes: these are laid out
quickly."""

MAX_EVALUATED, MAX_BOUNDED = 2500, 400_000
"""Layouts evaluated and suffixes bounded in all, where a gap is allowed: above either the search ends with
its present gap."""

BATCH_SIZE = 4
"""Nodes of a round, each with another micro-batch size, for any number of workers."""

ROUND_BOUND_RATIO = 1.02
"""Nodes of a round have bounds within this factor of the first one's: its incumbents may make the others
unnecessary."""

MAX_DEFERRED = 8
"""Nodes with a micro-batch size that the round has already, which are left for the next one, at most."""

SERIAL_ROUNDS = 1
"""Rounds before other processes are started: the smallest searches need no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenOutcome:
    """The best plan below the cutoff (None: there is none), and a lower bound of all plans.

    Every triple of pools, micro-batch size and number of pipelines is one candidate. It is `pruned` by a
    bound, `searched` (layouts of its pipelines were evaluated, or one was the incumbent at some time), or
    `unexplored` when time was over. `evaluated` counts layouts.
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
    """The best plan of the space that takes less than `cutoff_s`.

    The search ends when no plan can be better by more than the share `gap`, or when the clock is over. Any
    number of `workers` finds the same plan with the same ledger.
    """
    return _BranchAndBound(space, clock or SearchClock(), cutoff_s, gap, workers, progress).run()


class _BranchAndBound:
    """The heap of open nodes, the incumbent and the ledger; processes nodes in rounds."""

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
        """Runs rounds until no open node may improve."""
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
                    pool.results_at(sizes, nodes)
                    if round_index >= SERIAL_ROUNDS
                    else [self._processor.process(node) for node in nodes]
                )
                for node, outcome in zip(nodes, outcomes, strict=True):
                    self._apply(outcome)
                    if outcome.fathomed_bound_s is not None:
                        self._fathom(
                            node.subproblem, outcome.fathomed_bound_s, is_searched=outcome.evaluated > 0
                        )
            return self._outcome(pool.cpu_s)

    def _next_round(self) -> list[OpenNode]:
        """The nodes of the next round, none where the search has ended; nodes that their bound prunes are
        fathomed."""
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
        """Whether plans with this lower bound may improve by more than the gap."""
        return lower_bound_s < self._incumbent.time_s * (IMPROVEMENT_FACTOR - self._gap)

    def _push(self, node: OpenNode) -> None:
        key = node.lower_bound_s * (IDENTICAL_PRIORITY if node.subproblem.is_alike else 1.0)
        heappush(self._heap, (key, next(self._order), node))

    def _apply(self, outcome: NodeOutcome) -> None:
        """Merges the outcome of a node."""
        self._evaluated += outcome.evaluated
        self._bounded += outcome.bounded
        best = outcome.best
        self._incumbent.improving |= best.improving
        if best.plan is not None and is_less(best.time_s, self._incumbent.time_s, PROVEN_TIE):
            self._incumbent.plan, self._incumbent.time_s = best.plan, best.time_s
        for node in outcome.left:
            self._push(node)

    def _fathom(
        self, subproblem: UnevenSubproblem, lower_bound_s: float, *, is_searched: bool = False
    ) -> None:
        """Closes the subproblem, none of whose plans takes less than the bound."""
        self._min_fathomed_s = min(self._min_fathomed_s, lower_bound_s)
        searched = subproblem.size if is_searched else self._improving_in(subproblem)
        self._searched += searched
        self._pruned += subproblem.size - searched

    def _improving_in(self, subproblem: UnevenSubproblem) -> int:
        """How many of the subproblem's numbers of pipelines had the incumbent at some time."""
        return sum(
            subproblem.least <= one.least <= subproblem.most
            and replace(subproblem, least=one.least, most=one.most) == one
            for one in self._incumbent.improving
        )

    def _report_progress(self, node: OpenNode) -> None:
        if self._progress is not None:
            incumbent_s, left = self._incumbent.time_s, len(self._heap) + 1
            self._progress(
                f"best {incumbent_s:.4g} s, at least {node.lower_bound_s:.4g} s, {left} subproblems left"
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
