"""Presolve: smaller chains with the same frontier.

`presolved` drops choices whose least total is above every limit (reduced-cost fixing). `without_idle_columns`
drops columns that never decide, since fewer columns give smaller frontiers. `memory_dualised` moves memory
into the time columns. `cases_of` makes one case for each mode of a dominant segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt

from shardwise.pareto import COLUMNS, Chain, Factor, FactorGraph, Segment, first_occurrences, shared_sizes
from shardwise.search.pareto import tuning
from shardwise.search.pareto.solution import SegmentChoice, Solution, occurrences
from shardwise.search.pareto.weighted_sums import ChainSums, Sums, costs_of, shared_of
from shardwise.ties import ROUNDING

Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class PresolvedChain:
    """A chain with fewer choices, and their original numbers: `modes[i]` of the modes of segment i,
    `choices[i][m][v]` of the choices of variable v."""

    chain: Chain
    modes: tuple[tuple[int, ...], ...]
    choices: tuple[tuple[tuple[Indices, ...], ...], ...]

    @cached_property
    def decided_share(self) -> float | None:
        """The share of hidden_s in time if the other time is 0 for all choices; else None."""
        parts = [part for segment in self.chain for _, part in segment.modes if part.factors]
        for column, share in ((1, 1.0), (0, 0.0)):
            if not any(costs_of(part)[column].any() for part in parts):
                return share
        return None

    @staticmethod
    def of(chain: Chain) -> PresolvedChain:
        """A chain with all of its choices."""
        return PresolvedChain(
            chain,
            tuple(tuple(range(len(segment.modes))) for segment in chain),
            tuple(
                tuple(tuple(np.arange(size) for size in part.sizes) for _, part in segment.modes)
                for segment in chain
            ),
        )

    def original(self, solution: Solution) -> Solution:
        """A solution of the presolved chain in the numbers of the original."""
        return self.originals([solution])[0]

    def originals(self, solutions: list[Solution]) -> list[Solution]:
        """Several solutions in the numbers of the original; equal choices are converted once."""
        memo: dict[tuple[int, SegmentChoice], SegmentChoice] = {}
        places = list(occurrences(self.chain))
        found = []
        for solution in solutions:
            keys = list(zip(places, solution, strict=True))
            for key in keys:
                if key not in memo:
                    memo[key] = self._original(*key)
            found.append(tuple(memo[key] for key in keys))
        return found

    def _original(self, place: int, choice: SegmentChoice) -> SegmentChoice:
        numbers = self.choices[place][choice.mode]
        picked = zip(numbers, choice.choices, strict=True)
        return SegmentChoice(self.modes[place][choice.mode], tuple(int(each[own]) for each, own in picked))


def presolved(before: PresolvedChain, found: ChainSums, limits: npt.NDArray[np.float64]) -> PresolvedChain:
    """Drop the choices that lead to no solution below any row of `limits` (n, weights). `found` is `before`'s
    chain under the weights."""
    masks = [
        [_alive(found, place, mode, limits) for mode in range(len(segment.modes))]
        for place, segment in enumerate(before.chain)
    ]
    _agree_on_borders(before.chain, masks)
    _agree_on_shared(before.chain, masks)
    segments: list[Segment] = []
    modes: list[tuple[int, ...]] = []
    choices: list[tuple[tuple[Indices, ...], ...]] = []
    for place, segment in enumerate(before.chain):
        left = [mode for mode, mask in enumerate(masks[place]) if all(each.any() for each in mask)]
        rows_left = {mode: [np.flatnonzero(mask) for mask in masks[place][mode]] for mode in left}
        segments.append(
            replace(
                segment,
                modes=tuple(
                    (segment.modes[mode][0], _part(segment.modes[mode][1], rows_left[mode])) for mode in left
                ),
            )
        )
        modes.append(tuple(before.modes[place][mode] for mode in left))
        choices.append(
            tuple(
                tuple(
                    own[rows] for own, rows in zip(before.choices[place][mode], rows_left[mode], strict=True)
                )
                for mode in left
            )
        )
    return PresolvedChain(tuple(segments), tuple(modes), tuple(choices))


def choices_of(chain: Chain) -> int:
    """Number of choices of all variables of a chain."""
    return sum(sum(part.sizes) for segment in chain for _, part in segment.modes)


def separator_choices(chain: Chain) -> int:
    """Most choices of a segment's separator."""
    parts = [part for segment in chain for _, part in segment.modes]
    return max((prod(part.sizes[variable] for variable in part.separator) for part in parts), default=0)


def _part(part: FactorGraph, rows_left: Sequence[Indices]) -> FactorGraph:
    """The factor graph with these choices of each variable only."""
    is_whole = [len(rows) == size for rows, size in zip(rows_left, part.sizes, strict=True)]
    factors = tuple(
        factor
        if all(is_whole[variable] for variable in factor.variables)
        else Factor(factor.variables, factor.costs[np.ix_(*(rows_left[each] for each in factor.variables))])
        for factor in part.factors
    )
    row_keys = [rows.tobytes() for rows in rows_left]
    first_equal = first_occurrences(
        (like, *(row_keys[variable] for variable in factor.variables))
        for like, factor in zip(part.first_equal, part.factors, strict=True)
    )
    return part.changed(tuple(len(rows) for rows in rows_left), factors, first_equal)


def may_matter(bounds: Sums, limits: npt.NDArray[np.float64]) -> Mask:
    """Which rows of bounds (n, J) are below some row of limits (m, J) under all weights: (n)."""
    padded_limits = limits * (1.0 + ROUNDING)
    is_alive = np.zeros(len(bounds), dtype=bool)
    rows = np.flatnonzero((bounds < padded_limits.max(axis=0, initial=-np.inf)).all(axis=1))
    for limit in padded_limits:
        if not len(rows):
            break
        is_alive[rows[(bounds[rows] < limit).all(axis=1)]] = True
        rows = rows[~is_alive[rows]]
    return is_alive


def _alive(found: ChainSums, place: int, mode: int, limits: npt.NDArray[np.float64]) -> list[Mask]:
    """Which choices of each variable of a mode may be needed, in any occurrence of its segment."""
    start = sum(segment.repeat for segment in found.chain[:place])
    factor_sums = found.factor_sums[place][mode]
    spans = [range(at, at + 1) for at in range(start, start + found.chain[place].repeat)]
    beyond = found.outside(spans, shared_of([found.chain[place]]))
    factor_sums.distribute(found.borders.from_axes(factor_sums.part, beyond))
    is_alive = may_matter(np.concatenate(factor_sums.min_marginals()), limits)
    return np.split(is_alive, np.cumsum(factor_sums.part.sizes)[:-1])


def _agree_on_borders(chain: Chain, masks: list[list[list[Mask]]]) -> None:
    """Make all variables of one border keep the same choices: those that any mode on either side may need.

    All borders of a repeated segment are one, since its entry and exit are the same tensor.
    """
    groups: list[list[Mask]] = []
    for place, segment in enumerate(chain):
        entries = [masks[place][m][p.entry] for m, (_, p) in enumerate(segment.modes) if p.entry is not None]
        exits = [masks[place][m][p.exit] for m, (_, p) in enumerate(segment.modes) if p.exit is not None]
        if entries and groups:
            groups[-1] += entries
        if segment.repeat > 1 and groups:
            groups[-1] += exits
        else:
            groups.append(exits)
    for group in groups:
        if group:
            # A choice that one side has dropped stays if the other side may need it.
            alive = np.logical_or.reduce(group)
            for mask in group:
                mask[:] = alive


def _agree_on_shared(chain: Chain, masks: list[list[list[Mask]]]) -> None:
    """Make all variables of one shared variable keep the same choices: those that some mode of every segment
    with it may need."""
    for name in shared_sizes(chain):
        own = [
            [masks[place][m][dict(part.shared)[name]] for m, (_, part) in enumerate(segment.modes)]
            for place, segment in enumerate(chain)
            if name in shared_of([segment])
        ]
        alive = np.logical_and.reduce([np.logical_or.reduce(of_modes) for of_modes in own])
        for mask in (mask for of_modes in own for mask in of_modes):
            mask[:] = alive


Values = npt.NDArray[np.float64]


def without_idle_columns(chain: Chain) -> Chain:
    """The same solutions with the same measures, with 0 in columns that never decide.

    If computation hides every gradient synchronisation for all choices, the time is hidden_s alone. A factor
    graph whose temporaries stay below what another one needs in any case does not decide the peak.
    """
    return _without_small_peaks(_without_idle_time(chain))


def _every(part: FactorGraph) -> Values:
    """The costs of all factors of a factor graph, one after the other, (cells, 5); infinite in every column
    where any is."""
    costs = [factor.costs.reshape(-1, len(COLUMNS)) for factor in part.factors]
    every = np.concatenate(costs) if costs else np.empty((0, len(COLUMNS)))
    every[~np.isfinite(every).all(axis=1)] = np.inf
    return every


def _with_costs(part: FactorGraph, every: Values) -> FactorGraph:
    """A factor graph with these costs; equal factors stay equal."""
    factors, start = [], 0
    for factor in part.factors:
        stop = start + factor.costs.size // len(COLUMNS)
        factors.append(Factor(factor.variables, every[start:stop].reshape(factor.costs.shape)))
        start = stop
    return part.changed(part.sizes, tuple(factors), part.first_equal)


def _by_factor(part: FactorGraph, values: Values, extreme: np.ufunc) -> Values:
    """The least or the largest of the values of all cells of each factor."""
    sizes = [factor.costs.size // len(COLUMNS) for factor in part.factors]
    if not sizes:
        return np.empty(0)
    return np.asarray(extreme.reduceat(values, np.cumsum([0, *sizes[:-1]])))


def _differences(part: FactorGraph) -> tuple[float, float]:
    """The least and the largest total of hidden_s - exposed_s in a factor graph."""
    every = _every(part)
    is_finite = np.isfinite(every[:, 0])
    difference = np.where(is_finite, every[:, 0], 0.0) - np.where(is_finite, every[:, 1], 0.0)
    least = _by_factor(part, np.where(is_finite, difference, np.inf), np.minimum)
    largest = _by_factor(part, np.where(is_finite, difference, -np.inf), np.maximum)
    return float(least[np.isfinite(least)].sum()), float(largest[np.isfinite(largest)].sum())


def _without_idle_time(chain: Chain) -> Chain:
    bounds = [
        (segment.repeat, [_differences(part) for _, part in segment.modes])
        for segment in chain
        if segment.modes
    ]
    least = sum(repeat * min(low for low, _ in modes) for repeat, modes in bounds)
    largest = sum(repeat * max(high for _, high in modes) for repeat, modes in bounds)
    if least >= 0.0:
        return without_columns(chain, 1)
    return without_columns(chain, 0) if largest <= 0.0 else chain


def without_columns(chain: Chain, *columns: int) -> Chain:
    """The chain with 0 in some of its columns."""

    def of(part: FactorGraph) -> FactorGraph:
        every = _every(part)
        for column in columns:
            every[:, column] = np.where(np.isfinite(every[:, column]), 0.0, np.inf)
        return _with_costs(part, every)

    return tuple(
        replace(segment, modes=tuple((name, of(part)) for name, part in segment.modes)) for segment in chain
    )


def memory_dualised(chain: Chain, rate: float) -> Chain:
    """The chain with memory dualised: resident bytes are charged as `rate` seconds per byte in both times.
    The larger time plus `rate` times the memory of a solution is unchanged, with one column less."""

    def of(part: FactorGraph) -> FactorGraph:
        every = _every(part)
        every[:, :2] += rate * every[:, 2:3]
        every[:, 2] = np.where(np.isfinite(every[:, 2]), 0.0, np.inf)
        return _with_costs(part, every)

    return tuple(
        replace(segment, modes=tuple((name, of(part)) for name, part in segment.modes)) for segment in chain
    )


def _without_small_peaks(chain: Chain) -> Chain:
    threshold = max(
        (min(_least_peak(part) for _, part in segment.modes) for segment in chain if segment.modes),
        default=0.0,
    )
    return tuple(
        replace(segment, modes=tuple((name, _above(part, threshold)) for name, part in segment.modes))
        for segment in chain
    )


def _least_peak(part: FactorGraph) -> float:
    """The least temporary that any choice needs in a factor graph."""
    least = _by_factor(part, _every(part)[:, 4], np.minimum)
    return float(least[np.isfinite(least)].max(initial=0.0))


def _above(part: FactorGraph, threshold: float) -> FactorGraph:
    """The factor graph without temporaries that stay below `threshold`, recomputed bytes included. Those that
    reach it stay, so the peak is unchanged."""
    every = _every(part)
    is_finite = np.isfinite(every[:, 0])
    most = _by_factor(part, np.where(is_finite, every[:, 3], -np.inf), np.maximum)
    recomputed = float(most[np.isfinite(most)].sum())
    highest = float(every[is_finite, 4].max(initial=0.0))
    every[is_finite & (every[:, 4] + recomputed < threshold), 4] = 0.0
    if recomputed + highest < threshold:
        every[is_finite, 3] = 0.0
    return _with_costs(part, every)


def cases_of(chain: Chain) -> list[PresolvedChain]:
    """A case for each mode of the dominant segment; the chain itself if it has none.

    A bound is below every mean of two solutions, so far below all solutions between two modes of a dominant
    segment. Bounds of each mode alone are closer. Each solution is in exactly one case.
    """
    whole, place = PresolvedChain.of(chain), dominant_segment(chain)
    if place is None:
        return [whole]
    return [_in_mode(whole, place, mode) for mode in range(len(chain[place].modes))]


def dominant_segment(chain: Chain) -> int | None:
    """The index of the segment with most of a chain's variables, if there is one; repeated segments do not
    count."""
    counts = [
        segment.repeat * max((len(part.sizes) for _, part in segment.modes), default=0) for segment in chain
    ]
    for place, (segment, count) in enumerate(zip(chain, counts, strict=True)):
        if segment.repeat == 1 and count > tuning.TUNING.dominant_segment_share * sum(counts):
            return place
    return None


def _in_mode(whole: PresolvedChain, place: int, mode: int) -> PresolvedChain:
    """A chain with all of its choices but only one mode of a segment."""
    own = replace(whole.chain[place], modes=(whole.chain[place].modes[mode],))
    return PresolvedChain(
        (*whole.chain[:place], own, *whole.chain[place + 1 :]),
        (*whole.modes[:place], (mode,), *whole.modes[place + 1 :]),
        (*whole.choices[:place], (whole.choices[place][mode],), *whole.choices[place + 1 :]),
    )
