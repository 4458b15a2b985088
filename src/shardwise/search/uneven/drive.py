"""The search for the best uneven plan: blocks in order of their bounds, until none can be better."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import count

from shardwise.search.clock import Clock
from shardwise.search.uneven.block import search_of
from shardwise.search.uneven.grown import Placed
from shardwise.search.uneven.options import Options, Pricing
from shardwise.search.uneven.partitions import pipeline_s
from shardwise.search.uneven.proving import FOREVER_S, Laid, Search
from shardwise.search.uneven.shapes import Shape
from shardwise.search.uneven.space import Block, UnevenSpace

ALMOST = 1.0 - 5e-13
"""A plan is better where it takes less than this share of the time: closer than what counts as proven."""

NEAR = 1e-6
"""How near the bound of a block is to the time of its best plan when only that plan may be left between."""

WORTH = 0.75
"""Of the gap that is allowed: a block whose plans cannot be better by more is not searched."""

MANY = 16
"""Pipelines whose gradients cost about as much as those of more: a ring moves 15 sixteenths of what it would
move among any number of replicas."""

HALVINGS = 12
"""Of the interval in which a block's bound lies, where layouts were given up."""

THOROUGH, BRIEF = 1000, 32
"""Layouts of one pipeline that are evaluated, where no gap is allowed, and where one is."""

EAGER = 0.95
"""Of the bound of a block of alike pipelines, which are soon laid out: what it is searched by."""

ENOUGH, ENOUGH_BOUNDED = 2500, 100_000
"""Layouts that are evaluated in all where a gap is allowed, and runs of stages that are bounded: then the
search ends with the gap that it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenPipeline:
    """One pipeline of a plan: kind of stage per pool of the union, stages in order, its microbatches, and the
    seconds of its step."""

    kinds: tuple[int, ...]
    stages: tuple[Placed, ...]
    microbatches: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenPlan:
    """Pipelines side by side, the slowest of which takes `time_s`; `block` says on which pools, with which
    micro-batch size, and how many there are."""

    block: Block
    pipelines: tuple[UnevenPipeline, ...]
    time_s: float


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


@dataclass(slots=True)
class _State:
    best: UnevenPlan | None
    best_s: float
    open_s: float = float("inf")
    cut: int = 0
    searched: int = 0
    evaluated: int = 0
    bounded: int = 0
    laid: set[Block] = field(default_factory=set)
    """Of one number of pipelines each: where a plan was laid out that was the best so far."""

    def laid_in(self, block: Block) -> int:
        """How many of them lie in the block."""
        return sum(
            block.least <= one.least <= block.most and replace(block, least=one.least, most=one.most) == one
            for one in self.laid
        )

    @property
    def is_enough(self) -> bool:
        """Whether so much was done that a gap is left."""
        return self.evaluated > ENOUGH or self.bounded > ENOUGH_BOUNDED


def search_uneven(
    space: UnevenSpace,
    *,
    clock: Clock | None = None,
    beat_s: float = float("inf"),
    gap: float = 0.0,
    progress: Callable[[str], None] | None = None,
) -> UnevenOutcome:
    """The best plan of the space that takes less than `beat_s`; ends where nothing can be better by more than
    the share `gap`, or the clock says so."""
    return _Drive(space, clock or Clock(), beat_s, gap, progress).run()


class _Drive:
    """Blocks by their bounds, the next of which is looked at closer: bounded soon, divided, or searched."""

    def __init__(
        self,
        space: UnevenSpace,
        clock: Clock,
        beat_s: float,
        gap: float,
        progress: Callable[[str], None] | None,
    ) -> None:
        self._started_s, self._started_cpu_s = time.perf_counter(), time.process_time()
        self._space, self._pricing, self._clock, self._gap = space, Pricing(space), clock, gap
        self._state = _State(best=None, best_s=beat_s)
        self._order = count()
        self._heap: list[tuple[float, int, float, Block, Search | None, Search | None]] = []
        self._effort = THOROUGH if gap == 0.0 else BRIEF
        self._progress = progress

    def run(self) -> UnevenOutcome:
        """Until no block is left that matters."""
        for block in self._space.blocks():
            self._push(block, self._pricing.soon_s(block))
        self._sketch()
        state = self._state
        while self._heap and not self._clock.is_over:
            if not self._is_left(self._heap[0][0]) or (self._gap > 0.0 and state.is_enough):
                break
            _, _, least_s, block, search, wider = heappop(self._heap)
            if self._progress is not None:
                self._progress(
                    f"best {state.best_s:.4g} s, at least {least_s:.4g} s, {len(self._heap)} blocks left"
                )
            if not self._is_left(least_s):
                self._close(block, least_s)
            elif search is None:
                self._look(block, least_s, wider)
            elif _is_wide(block):
                self._divide(block, least_s, search)
            else:
                self._search(block, least_s, search)
        return self._outcome()

    @property
    def _beat_s(self) -> float:
        """Plans that take less are looked for."""
        return self._state.best_s * (ALMOST - WORTH * self._gap)

    def _is_left(self, least_s: float) -> bool:
        """Whether plans that take no less may be better by more than the gap."""
        return least_s < self._state.best_s * (ALMOST - self._gap)

    def _push(
        self, block: Block, least_s: float, search: Search | None = None, wider: Search | None = None
    ) -> None:
        key = least_s * (EAGER if block.is_alike else 1.0)
        heappush(self._heap, (key, next(self._order), least_s, block, search, wider))

    def _close(self, block: Block, least_s: float, *, is_searched: bool = False) -> None:
        """Leaves the block, whose plans take at least so long."""
        state = self._state
        state.open_s = min(state.open_s, least_s)
        searched = block.size if is_searched else state.laid_in(block)
        state.searched += searched
        state.cut += block.size - searched

    def _look(self, block: Block, least_s: float, wider: Search | None) -> None:
        """Bounds the block soon."""
        options = self._pricing.options(block)
        least_s = max(least_s, self._pricing.least_s(block, options))
        if not self._is_left(least_s):
            self._close(block, least_s)
            return
        search = search_of(options, block, self._effort, wider)
        self._push(block, search.bound_s(least_s, self._beat_s), search)

    def _divide(self, block: Block, least_s: float, search: Search) -> None:
        """A wide range, unless bounds forbid all of it; before anything is found they rarely do."""
        state, bounded = self._state, search.bounded
        is_refuted = state.best is not None and search.is_refuted(self._beat_s)
        state.bounded += search.bounded - bounded
        if is_refuted:
            self._close(block, self._beat_s)
            return
        for part in _doublings(block):
            self._push(part, least_s, wider=search)

    def _sketch(self) -> None:
        """Looks for plans whose pipelines lie on one pool each, which are few: a time to beat. Of many
        pipelines first, which devices that hold the whole model are."""
        blocks = [block for block in self._space.blocks() if not block.is_alike]
        for least_s, _, block in sorted(
            (self._pricing.soon_s(one), at, one) for at, one in enumerate(blocks)
        ):
            if not self._is_left(least_s) or self._clock.is_over:
                break
            whole = search_of(self._pricing.options(block), block, self._effort, most_sites=1)
            for part in reversed(_doublings(block)):
                if whole.is_refuted(self._beat_s):
                    break
                few = search_of(self._pricing.options(part), part, self._effort, whole, most_sites=1)
                _search_block(self._pricing, part, few, least_s, self._state, self._gap, self._clock)

    def _search(self, block: Block, least_s: float, search: Search) -> None:
        """Looks for plans of the block; what is left of it is halved, or looked at again with more effort."""
        state, evaluated = self._state, self._state.evaluated
        least_s = _search_block(self._pricing, block, search, least_s, state, self._gap, self._clock)
        if self._is_left(least_s) and self._clock.is_over:
            self._push(block, least_s, search)
        elif self._is_left(least_s) and block.least < block.most:
            for part in block.halves():
                self._push(part, least_s, wider=search)
        elif self._is_left(least_s) and search.look_further():
            self._push(block, least_s, search)
        else:
            self._close(block, least_s, is_searched=state.evaluated > evaluated)

    def _outcome(self) -> UnevenOutcome:
        state = self._state
        left_s = min((least_s for _, _, least_s, *_ in self._heap), default=float("inf"))
        left = sum(block.size for _, _, _, block, *_ in self._heap)
        laid = sum(state.laid_in(block) for _, _, _, block, *_ in self._heap)
        is_over = self._is_left(left_s)
        return UnevenOutcome(
            plan=state.best,
            lower_bound_s=min(left_s, state.open_s, state.best_s),
            cut=state.cut + (0 if is_over else left - laid),
            unexplored=left if is_over else 0,
            searched=state.searched + (0 if is_over else laid),
            evaluated=state.evaluated,
            search_s=time.perf_counter() - self._started_s,
            search_cpu_s=time.process_time() - self._started_cpu_s,
        )


def _is_wide(block: Block) -> bool:
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


def _search_block(
    pricing: Pricing,
    block: Block,
    search: Search,
    least_s: float,
    state: _State,
    gap: float,
    clock: Clock,
) -> float:
    """Improves the best plan by the block's, while there is time; returns what the block's plans take at
    least, or that they cannot be better than the best so far."""
    high_s, before, bounded = state.best_s, search.evaluated, search.bounded
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
        _improve(pricing, block, found, state)
        if high_s * (1.0 - precision) <= low_s or clock.is_over:
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
    state.evaluated += search.evaluated - before
    state.bounded += search.bounded - bounded
    return _proven_s(search, least_s, low_s) if search.gave_up else low_s


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


def _improve(pricing: Pricing, block: Block, found: Sequence[tuple[Laid, int]], state: _State) -> None:
    """Takes over what was found where it is better at the prices of its own number of pipelines."""
    every = [
        (laid.shape, laid.found.stages, laid.microbatches) for laid, count in found for _ in range(count)
    ]
    pipelines = every[: pricing.options(block).microbatches]
    own = replace(block, least=len(pipelines), most=len(pipelines))
    options = pricing.options(own)
    trimmed = _trimmed(options, pipelines, options.microbatches)
    time_s = max(pipeline.time_s for pipeline in trimmed)
    if time_s < state.best_s * ALMOST:
        state.best_s = time_s
        state.laid.add(own)
        state.best = UnevenPlan(block=own, pipelines=tuple(trimmed), time_s=time_s)


def _trimmed(
    options: Options, pipelines: Sequence[tuple[Shape, tuple[Placed, ...], int]], wanted: int
) -> list[UnevenPipeline]:
    """The pipelines with no more microbatches than wanted: what is too much is taken from the slowest."""
    known: dict[tuple[Shape, tuple[Placed, ...], int], float] = {}

    def time_s(one: tuple[Shape, tuple[Placed, ...], int]) -> float:
        if one not in known:
            known[one] = pipeline_s(options, one[0].kinds, one[1], one[2])
        return known[one]

    entries = [(-time_s(one), place, one) for place, one in enumerate(pipelines)]
    heap = [entry for entry in entries if entry[2][2] > 1]
    done = [entry for entry in entries if entry[2][2] == 1]
    heapify(heap)
    for _ in range(sum(one[2] for one in pipelines) - wanted):
        _, place, (shape, stages, microbatches) = heappop(heap)
        one = (shape, stages, microbatches - 1)
        if one[2] > 1:
            heappush(heap, (-time_s(one), place, one))
        else:
            done.append((-time_s(one), place, one))
    return [
        UnevenPipeline(kinds=shape.kinds, stages=stages, microbatches=microbatches, time_s=-negative_s)
        for negative_s, _, (shape, stages, microbatches) in sorted(heap + done, key=lambda entry: entry[1])
    ]
