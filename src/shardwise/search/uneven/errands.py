"""What a search of uneven plans does block by block: bounding soon, dividing, laying out.

An errand is one such step for one block, and what it does depends on it and on the errands before it for the
same micro-batch size alone: so errands for several sizes may be done at a time, in as many processes as there
are, and give the same plans and the same bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from shardwise.search.clock import SearchClock
from shardwise.search.uneven.block import subproblem_search
from shardwise.search.uneven.laid_out import IMPROVEMENT_FACTOR, UnevenIncumbent
from shardwise.search.uneven.options import StageCostModel
from shardwise.search.uneven.proving import MAX_STEP_S, SubproblemSearch
from shardwise.search.uneven.space import UnevenSpace, UnevenSubproblem

BOUND_TOLERANCE = 1e-6
"""How near the bound of a block is to the time of its best plan when only that plan may be left between."""

GAP_SHARE = 0.75
"""Of the gap that is allowed: a block whose plans cannot be better by more is not searched."""

MANY_PIPELINES = 16
"""Pipelines whose gradients cost about as much as those of more: a ring moves 15 sixteenths of what it would
move among any number of replicas."""

SKIP_BOUND_RATIO = 0.8
"""Of the time to beat: where what is soon told of a wide range is less, closer bounds are not tried on it."""

HALVINGS = 12
"""Of the interval in which a block's bound lies, where layouts were given up."""

EXACT_EFFORT, GAP_EFFORT = 1000, 32
"""Layouts of one pipeline that are evaluated, where no gap is allowed, and where one is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenNode:
    """A block to look at closer, all of whose plans take at least `lower_bound_s`, where plans that take less
    than `incumbent_s` are looked for. `parent` is the block that it is a part of, None where it is none."""

    subproblem: UnevenSubproblem
    lower_bound_s: float
    parent: UnevenSubproblem | None = None
    incumbent_s: float = float("inf")


@dataclass(slots=True)
class NodeOutcome:
    """What came of it: blocks that are left to look at; what is closed, and the seconds that its plans take
    at least; the best plan, if it is better; layouts that were evaluated, and runs that were bounded."""

    best: UnevenIncumbent
    left: list[OpenNode] = field(default_factory=list)
    fathomed_bound_s: float | None = None
    evaluated: int = 0
    bounded: int = 0


class NodeProcessor:
    """Does errands for one space; what is known of a block it keeps for those that come after."""

    def __init__(self, space: UnevenSpace, clock: SearchClock, gap: float) -> None:
        self._space, self._clock, self._gap = space, clock, gap
        self.pricing = StageCostModel(space)
        self._effort = EXACT_EFFORT if gap == 0.0 else GAP_EFFORT
        self._searches: dict[UnevenSubproblem, SubproblemSearch] = {}

    def process(self, node: OpenNode) -> NodeOutcome:
        """Does it."""
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
        """Looks for plans whose pipelines lie on one pool each, which are few: a time to beat. Of many
        pipelines first, which devices that hold the whole model are."""
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
        """Plans that take less are looked for."""
        return outcome.best.time_s * (IMPROVEMENT_FACTOR - GAP_SHARE * self._gap)

    def _is_open(self, lower_bound_s: float, outcome: NodeOutcome) -> bool:
        """Whether plans that take no less may be better by more than the gap."""
        return lower_bound_s < outcome.best.time_s * (IMPROVEMENT_FACTOR - self._gap)

    def _bound_quickly(self, node: OpenNode, outcome: NodeOutcome) -> None:
        """Bounds the block soon."""
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
        """A wide range, unless bounds forbid all of it; before anything good is found they rarely do."""
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
        """Looks for plans of the block; what is left of it is halved, or looked at again with more effort."""
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
        """Improves the best plan by the block's, while there is time; returns what the block's plans take at
        least, or that they cannot be better than the best so far."""
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
    """Whether the block's least figures are far below those of most of its numbers of pipelines."""
    return subproblem.least < MANY_PIPELINES and subproblem.most >= 2 * subproblem.least


def _doubling_ranges(subproblem: UnevenSubproblem) -> list[UnevenSubproblem]:
    """A wide range of numbers of pipelines in parts none of which is wide."""
    found, least = [], subproblem.least
    while least <= subproblem.most:
        most = subproblem.most if least >= MANY_PIPELINES else min(2 * least - 1, subproblem.most)
        found.append(replace(subproblem, least=least, most=most))
        least = most + 1
    return found


def _proven_s(search: SubproblemSearch, lower_bound_s: float, most_s: float) -> float:
    """A time within which no plan of the block is possible, as long as can be told, at most `most_s`."""
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
