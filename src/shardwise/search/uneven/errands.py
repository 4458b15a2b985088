"""What a search of uneven plans does block by block: bounding soon, dividing, laying out.

An errand is one such step for one block, and what it does depends on it and on the errands before it for the
same micro-batch size alone: so errands for several sizes may be done at a time, in as many processes as there
are, and give the same plans and the same bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from shardwise.search.clock import Clock
from shardwise.search.uneven.block import search_of
from shardwise.search.uneven.laid_out import ALMOST, Best
from shardwise.search.uneven.options import Pricing
from shardwise.search.uneven.proving import FOREVER_S, Search
from shardwise.search.uneven.space import Block, UnevenSpace

NEAR = 1e-6
"""How near the bound of a block is to the time of its best plan when only that plan may be left between."""

WORTH = 0.75
"""Of the gap that is allowed: a block whose plans cannot be better by more is not searched."""

MANY = 16
"""Pipelines whose gradients cost about as much as those of more: a ring moves 15 sixteenths of what it would
move among any number of replicas."""

HOPELESS = 0.8
"""Of the time to beat: where what is soon told of a wide range is less, closer bounds are not tried on it."""

HALVINGS = 12
"""Of the interval in which a block's bound lies, where layouts were given up."""

THOROUGH, BRIEF = 1000, 32
"""Layouts of one pipeline that are evaluated, where no gap is allowed, and where one is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """A block to look at closer, all of whose plans take at least `least_s`, where plans that take less than
    `best_s` are looked for. `wider` is the block that it is a part of, None where it is none."""

    block: Block
    least_s: float
    wider: Block | None = None
    best_s: float = float("inf")


@dataclass(slots=True)
class Report:
    """What came of it: blocks that are left to look at; what is closed, and the seconds that its plans take
    at least; the best plan, if it is better; layouts that were evaluated, and runs that were bounded."""

    best: Best
    left: list[Errand] = field(default_factory=list)
    closed_s: float | None = None
    evaluated: int = 0
    bounded: int = 0


class Errands:
    """Does errands for one space; what is known of a block it keeps for those that come after."""

    def __init__(self, space: UnevenSpace, clock: Clock, gap: float) -> None:
        self._space, self._clock, self._gap = space, clock, gap
        self.pricing = Pricing(space)
        self._effort = THOROUGH if gap == 0.0 else BRIEF
        self._searches: dict[Block, Search] = {}

    def done(self, errand: Errand) -> Report:
        """Does it."""
        report = Report(best=Best(plan=None, time_s=errand.best_s))
        search = self._searches.get(errand.block)
        if search is None:
            self._look(errand, report)
        elif is_wide(errand.block):
            self._divide(errand, search, report)
        else:
            self._search(errand, search, report)
        if report.closed_s is not None:
            self._searches.pop(errand.block, None)
        return report

    def sketched(self, best_s: float) -> Report:
        """Looks for plans whose pipelines lie on one pool each, which are few: a time to beat. Of many
        pipelines first, which devices that hold the whole model are."""
        report = Report(best=Best(plan=None, time_s=best_s))
        blocks = [block for block in self._space.blocks() if not block.is_alike]
        for least_s, _, block in sorted((self.pricing.soon_s(one), at, one) for at, one in enumerate(blocks)):
            if not self._is_left(least_s, report) or self._clock.is_over:
                break
            whole = self._search_of(block, most_sites=1)
            for part in reversed(_doublings(block)):
                if whole.is_refuted(self._beat_s(report)) or whole.are_few(part.most, self._beat_s(report)):
                    break  # nor are fewer pipelines enough
                few = self._search_of(part, whole, most_sites=1)
                self._searched_s(part, few, least_s, report)
        return report

    def _search_of(self, block: Block, wider: Search | None = None, most_sites: int | None = None) -> Search:
        options = self.pricing.options(block)
        return search_of(options, block, self._effort, wider, most_sites, self._clock)

    def _beat_s(self, report: Report) -> float:
        """Plans that take less are looked for."""
        return report.best.time_s * (ALMOST - WORTH * self._gap)

    def _is_left(self, least_s: float, report: Report) -> bool:
        """Whether plans that take no less may be better by more than the gap."""
        return least_s < report.best.time_s * (ALMOST - self._gap)

    def _look(self, errand: Errand, report: Report) -> None:
        """Bounds the block soon."""
        block, beat_s = errand.block, self._beat_s(report)
        wider = None if errand.wider is None else self._searches[errand.wider]
        if wider is not None and beat_s > errand.least_s and wider.are_few(block.most, beat_s):
            report.closed_s = beat_s
            return
        options = self.pricing.options(block)
        least_s = max(errand.least_s, self.pricing.least_s(block, options))
        if not self._is_left(least_s, report):
            report.closed_s = least_s
            return
        search = self._search_of(block, wider)
        self._searches[block] = search
        report.left.append(replace(errand, least_s=search.bound_s(least_s, beat_s)))

    def _divide(self, errand: Errand, search: Search, report: Report) -> None:
        """A wide range, unless bounds forbid all of it; before anything good is found they rarely do."""
        bounded, beat_s = search.bounded, self._beat_s(report)
        is_refuted = HOPELESS * beat_s < errand.least_s and search.is_refuted(beat_s)
        report.bounded += search.bounded - bounded
        if is_refuted:
            report.closed_s = beat_s
            return
        parts = _doublings(errand.block)
        report.left += [Errand(block=part, least_s=errand.least_s, wider=errand.block) for part in parts]

    def _search(self, errand: Errand, search: Search, report: Report) -> None:
        """Looks for plans of the block; what is left of it is halved, or looked at again with more effort."""
        block = errand.block
        least_s = self._searched_s(block, search, errand.least_s, report)
        if not self._is_left(least_s, report):
            report.closed_s = least_s
        elif self._clock.is_over:
            report.left.append(replace(errand, least_s=least_s))
        elif block.least < block.most:
            report.left += [Errand(block=part, least_s=least_s, wider=block) for part in block.halves()]
        elif search.look_further():
            report.left.append(replace(errand, least_s=least_s))
        else:
            report.closed_s = least_s

    def _searched_s(self, block: Block, search: Search, least_s: float, report: Report) -> float:
        """Improves the best plan by the block's, while there is time; returns what the block's plans take at
        least, or that they cannot be better than the best so far."""
        best, gap = report.best, self._gap
        high_s, before, bounded = best.time_s, search.evaluated, search.bounded
        if high_s == float("inf"):
            high_s = 2.0 * least_s
            while (found := search.within(high_s)) is None and high_s < FOREVER_S:
                high_s = 2.0 * high_s
        else:
            high_s = high_s * (ALMOST - WORTH * gap)
            found = search.within(high_s)
        low_s = least_s if found is not None else high_s
        is_one = block.least == block.most
        precision = max(gap / 10.0 if is_one else gap, NEAR)
        if is_one and gap == 0.0 and search.is_exact:
            precision = 0.0
        while found is not None:
            high_s = max(laid.found.time_s for laid, _ in found)
            best.improve(self.pricing, block, found)
            if high_s * (1.0 - precision) <= low_s or self._clock.is_over:
                break
            is_last = high_s - low_s <= NEAR * high_s
            middle_s = high_s * ALMOST if is_last else (low_s + high_s) / 2.0
            better = search.within(middle_s)
            if better is not None:
                found = better
            elif is_last:
                low_s = high_s
                break
            else:
                low_s = middle_s
        report.evaluated += search.evaluated - before
        report.bounded += search.bounded - bounded
        return _proven_s(search, least_s, low_s) if search.gave_up else low_s


def is_wide(block: Block) -> bool:
    """Whether the block's least figures are far below those of most of its numbers of pipelines."""
    return block.least < MANY and block.most >= 2 * block.least


def _doublings(block: Block) -> list[Block]:
    """A wide range of numbers of pipelines in parts none of which is wide."""
    found, least = [], block.least
    while least <= block.most:
        most = block.most if least >= MANY else min(2 * least - 1, block.most)
        found.append(replace(block, least=least, most=most))
        least = most + 1
    return found


def _proven_s(search: Search, least_s: float, most_s: float) -> float:
    """A time within which no plan of the block is possible, as long as can be told, at most `most_s`."""
    if not search.is_possible(most_s * ALMOST):
        return most_s
    low_s, high_s = least_s, most_s
    for _ in range(HALVINGS):
        middle_s = (low_s + high_s) / 2.0
        if search.is_possible(middle_s):
            high_s = middle_s
        else:
            low_s = middle_s
    return low_s
