"""Lines raised to what there is, where none of the solutions has a mean of both times, or of several
peaks.

Lines raised by how large the largest peak is: a line weighs one block's peak, or a mean of several, and
lies far below all solutions where each block would have a larger one, did it decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shardwise.pareto import Chain, Factor, FactorGraph
from shardwise.search.pareto.bound_sets import weighted
from shardwise.search.pareto.elimination_order import EliminationOrder
from shardwise.search.pareto.gap_enumeration import TIGHTENING_SHARE, Tolerances, relaxed_tolerances, tighten
from shardwise.search.pareto.labels import TooManyLabels
from shardwise.search.pareto.presolve import PresolvedChain, dominant_segment, presolved
from shardwise.search.pareto.state import State
from shardwise.search.pareto.supported_points import scalarise_round
from shardwise.search.pareto.weighted_sums import FactorSums, solutions

Values = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

MOST_BISECTIONS = 64
"""Times that cases are cut in two, at most."""

INTERVAL_WIDTH, LEAST_INTERVAL_WIDTH = 0.3, 1e-3
"""A case is not cut further where it is so narrow, in what is matched of the least memory that it may have;
and, where all has to be matched, of that memory."""

TARGET_GAP = 0.25
"""A line is high enough so close below what is found, in what is matched."""

TIE_SHARE = 0.001
"""Of the peak's weight, what is shared by all links alike where the least of a case is weighed instead, so
that of equal solutions one of smaller peaks is found."""


@dataclass(frozen=True, slots=True, eq=False)
class _PeakInterval:
    """Solutions with a largest peak from `low` to `high`, all of them made of what is in `start`; none weighs
    less by any line than `least` (lines)."""

    start: PresolvedChain
    low: float
    high: float
    least: Values

    def bisect(self) -> tuple[_PeakInterval, _PeakInterval]:
        """Both halves."""
        middle = (self.low + self.high) / 2.0
        return replace(self, high=middle), replace(self, low=middle)


def tighten_by_peak(state: State, lower_bounds: Indices) -> None:
    """Raise lines to the least weighted sums that there are, as closely as solutions are matched; not higher
    than what is found, which is added to.

    A peak is what one link makes again and its largest temporary. In a case of solutions whose largest lies
    between two levels, choices with a larger one are left out in every link, and the lowest level counts in
    full, whatever link has it. Cases are cut in two, the one furthest below what is found first.
    """
    for lower_bound, least in zip(
        lower_bounds.tolist(), _interval_bounds(state, lower_bounds).tolist(), strict=True
    ):
        state.lower_bounds.raise_to(lower_bound, least)


def _interval_bounds(state: State, lower_bounds: Indices) -> Values:
    """What no solution weighs less than by each of some lines."""
    targets = weighted(state.lower_bounds.weights[lower_bounds], state.incumbents.points).min(axis=0)
    targets *= 1.0 - TARGET_GAP * state.working_epsilon
    memory_bytes = float(state.incumbents.points[-1, 1])
    width = max(INTERVAL_WIDTH * state.working_epsilon, LEAST_INTERVAL_WIDTH)
    scale = np.zeros(len(lower_bounds))
    np.divide(1.0, targets, out=scale, where=targets > 0.0)
    waiting = [
        _PeakInterval(
            state.presolved,
            0.0,
            _largest_peak(state.presolved.chain),
            state.lower_bounds.proven_sums[lower_bounds],
        )
    ]
    for _ in range(MOST_BISECTIONS):
        waiting = [case for case in waiting if (case.least < targets).any()]
        if not waiting:
            break
        furthest = int(np.argmax([((targets - case.least) * scale).max() for case in waiting]))
        case = waiting.pop(furthest)
        if case.high - case.low <= width * (memory_bytes + case.low):
            targets = np.minimum(targets, case.least)
            continue
        halves = (_bounded_interval(state, lower_bounds, half, targets) for half in case.bisect())
        waiting += [half for half in halves if half is not None]
    return np.asarray(np.minimum.reduce([targets, *(case.least for case in waiting)]))


def _largest_peak(chain: Chain) -> float:
    """What no peak is larger than."""
    largest = 0.0
    for segment in chain:
        for _, part in segment.modes:
            every = [factor.costs[np.isfinite(factor.costs).all(axis=-1)] for factor in part.factors]
            recomputed = sum(float(costs[:, 3].max(initial=0.0)) for costs in every)
            temporary = max((float(costs[:, 4].max(initial=0.0)) for costs in every), default=0.0)
            largest = max(largest, recomputed + temporary)
    return largest


def _bounded_interval(
    state: State, lower_bounds: Indices, case: _PeakInterval, targets: Values
) -> _PeakInterval | None:
    """A case with what weighted sums tell of it, by those lines by which it may hold less than is wanted;
    None where it holds nothing that is less by any. Solutions on them are taken in."""
    some = np.flatnonzero(case.least < targets)
    own, aims = lower_bounds[some], targets[some]
    start = replace(case.start, chain=_chain_below(state, case.start, case.high))
    weights = np.tile(state.lower_bounds.weights[own], (2, 1))
    repeats = np.array([segment.repeat for segment in start.chain])
    even = np.full((len(own), len(repeats)), TIE_SHARE) / (len(repeats) * repeats)
    peaks = np.concatenate([np.array(state.lower_bounds.peaks)[own], even])
    answer = state.chain_sums(start, weights, np.tile(state.lower_bounds.shares[own], 2), peaks)
    state.sums_solved += len(weights)
    if not np.isfinite(answer.least).all():
        return None
    state.take(list(dict.fromkeys(start.originals(solutions(answer)))))
    # The largest peak is no less than a mean of peaks, nor than the least of the case.
    least_peaks = np.repeat([0.0, (1.0 - TIE_SHARE) * case.low], len(own)) * weights[:, 1]
    least = case.least.copy()
    least[some] = np.maximum(case.least[some], (answer.least + least_peaks).reshape(2, -1).max(axis=0))
    is_below = least[some] < aims
    if not is_below.any():
        return None
    rows = np.tile(np.eye(len(own), dtype=bool)[is_below], 2)
    start = presolved(start, answer, np.where(rows, np.tile(aims, 2) - least_peaks, np.inf))
    return replace(case, start=start, least=least) if all(segment.modes for segment in start.chain) else None


def _chain_below(state: State, start: PresolvedChain, peak_limit: float) -> Chain:
    """A chain without what makes a peak above a level, in any of its links."""
    segments = []
    for segment, orders in zip(start.chain, state.orders_in(start), strict=True):
        own = zip(segment.modes, orders, strict=True)
        modes = tuple((name, _part_below(part, order, peak_limit)) for (name, part), order in own)
        segments.append(replace(segment, modes=modes))
    return tuple(segments)


def _part_below(part: FactorGraph, order: EliminationOrder, peak_limit: float) -> FactorGraph:
    """A part without temporaries that come above a level with the least that is made again beside them."""
    factors = []
    for factor, recomputed in zip(part.factors, _least_recomputed(part, order), strict=True):
        is_above = factor.costs[..., 4] + recomputed > peak_limit
        costs = np.where(is_above[..., None], np.inf, factor.costs) if is_above.any() else factor.costs
        factors.append(Factor(factor.variables, costs))
    return replace(part, factors=tuple(factors))


def _least_recomputed(part: FactorGraph, order: EliminationOrder) -> list[Values]:
    """The least that is made again in a part with each cost of each factor."""
    recomputed = [factor.costs[..., 3] for factor in part.factors]
    if not any(((own > 0.0) & np.isfinite(own)).any() for own in recomputed):
        return [np.zeros(1)] * len(part.factors)
    factor_sums = FactorSums.of(part, order, np.array([[0.0, 0.0, 0.0, 1.0, 0.0]]))
    factor_sums.distribute(np.zeros_like(factor_sums.last))
    return [
        (factor_sums.tables[place] + factor_sums.outside[place])[..., 0] for place in range(len(part.factors))
    ]


TRIAL_BOUNDS = 3
"""Lines that tell whether others are worth it."""

WORTHWHILE_EPSILONS = 10.0
"""How many epsilons one of them must lie below all solutions, at least, where that is less than
`WORTHWHILE_GAP`."""

WORTHWHILE_GAP, WORTHWHILE_GAP_EPSILONS = 0.01, 2.0
"""How far, relative, and how many epsilons: looks that go so far beyond a line see much, however closely."""

TIME_GAP_SHARE = 0.5
"""Of what a line lies below all that is found, the part by which the solution on it takes longer than the
line's mean of both times, at least, where that mean is why."""

SAME_SLOPE = 0.05
"""How much more two lines weigh memory, relative, that are raised as one."""

MOST_FAILURES = 2
"""Lines that are too much before a round ends: each takes long to tell."""

TIGHTENING_ROUNDS = 2
"""Rounds of lines between what is found then."""


def tighten_between(state: State, tolerances: Tolerances, recombine: Callable[[State], None]) -> Tolerances:
    """Raise lines to the least weighted sums that there are, and draw more of them between neighbours that
    are still open: where lines of a mean of both times are far below all solutions, or looks are too much.
    After each round `recombine` takes what else is found between. What may be lost from then on: more, where
    raising one was too much."""
    nadir_points = state.open_nadir_points() if not state.is_exhausted else np.empty((0, 2))
    if not len(nadir_points):
        return tolerances
    if not state.is_hard:
        if not _bounds_mix_times(state):
            return tolerances
        closest = state.lower_bounds.closest(nadir_points, TRIAL_BOUNDS)
        shares = state.lower_bounds.shares[closest]
        gains, tolerances = _tightened_each(
            state, closest[(shares > 0.0) & (shares < 1.0)].tolist(), tolerances
        )
        state.is_tightened = _are_worth_it(gains, state.requested_epsilon)
        if not (state.is_tightened or state.is_hard):
            return tolerances
    slopes_tried: set[float] = set()
    for _ in range(TIGHTENING_ROUNDS):
        slopes = scalarise_round(state, slopes_tried)
        distinct = [slopes[row] for row in distinct_slopes(np.array(slopes))]
        solved = [
            np.flatnonzero((state.lower_bounds.weights == [1.0, slope]).all(axis=1)) for slope in distinct
        ]
        lower_bounds = np.concatenate([np.empty(0, dtype=np.intp), *solved])
        in_time = _low_in_time(state, lower_bounds) if state.is_hard else lower_bounds
        gains, tolerances = _tightened_each(state, in_time.tolist(), tolerances)
        state.is_tightened |= _are_worth_it(gains, state.requested_epsilon)
        if state.is_hard:
            tighten_by_peak(state, np.setdiff1d(lower_bounds, in_time))
        recombine(state)
        if not slopes or state.is_exhausted or not len(state.open_nadir_points()):
            return tolerances
        state.presolve()
    return tolerances


def distinct_slopes(slopes: Values) -> Indices:
    """Which lines to raise, of some that weigh memory so much beside a second: where one is raised, others of
    nearly its weight tell nothing new."""
    representatives: list[int] = []
    for place in np.argsort(slopes, kind="stable").tolist():
        if not representatives or slopes[place] > (1.0 + SAME_SLOPE) * slopes[representatives[-1]]:
            representatives.append(place)
    return np.array(sorted(representatives), dtype=np.intp)


def _bounds_mix_times(state: State) -> bool:
    """Whether looks tell how much higher a line is with both times than with a mean of them: not where one of
    them is nothing, nor where one block is most of a chain and looks take what it takes."""
    return state.presolved.decided_share is None and dominant_segment(state.given) is None


def _low_in_time(state: State, lower_bounds: Indices) -> Indices:
    """Those of some lines that lie below what is found since they count a mean of both times."""
    if not len(lower_bounds) or not _bounds_mix_times(state):
        return lower_bounds[:0]
    weights, shares = state.lower_bounds.weights[lower_bounds], state.lower_bounds.shares[lower_bounds]
    answer = state.chain_sums(
        state.presolved, weights, shares, np.array(state.lower_bounds.peaks)[lower_bounds]
    )
    on_them = state.presolved.originals(solutions(answer))
    both_s = np.array([state.costs(solution)[:2] for solution in on_them])
    mean_s = shares * both_s[:, 0] + (1.0 - shares) * both_s[:, 1]
    longer = weights[:, 0] * (both_s.max(axis=1) - mean_s)
    below = (
        weighted(weights, state.incumbents.points).min(axis=0) - state.lower_bounds.proven_sums[lower_bounds]
    )
    return np.asarray(lower_bounds[(longer > TIME_GAP_SHARE * below) & (shares > 0.0) & (shares < 1.0)])


def _tightened_each(
    state: State, lower_bounds: list[int], tolerances: Tolerances
) -> tuple[list[float | None], Tolerances]:
    """How much higher some lines are, relative, once they are raised to what there is, one after the other,
    and what may be lost from then on; those behind a second one that is too much are left as they are."""
    gains = []
    for lower_bound in lower_bounds:
        gains.append(_tightened(state, lower_bound, tolerances.times(TIGHTENING_SHARE)))
        if gains[-1] is None:
            if not state.is_hard:
                tolerances = relaxed_tolerances(state, tolerances)
            if gains.count(None) >= MOST_FAILURES:
                break
    return gains, tolerances


def _are_worth_it(gains: list[float | None], requested_epsilon: float) -> bool:
    """Whether any of the lines that were tried rose far, relative."""
    worthwhile = min(
        WORTHWHILE_EPSILONS * requested_epsilon,
        max(WORTHWHILE_GAP, WORTHWHILE_GAP_EPSILONS * requested_epsilon),
    )
    return any(gain is not None and gain > worthwhile for gain in gains)


def _tightened(state: State, lower_bound: int, tolerances: Tolerances) -> float | None:
    """How much higher a line is, relative, once it is raised to what there is; None where it is too much."""
    before = float(state.lower_bounds.proven_sums[lower_bound])
    try:
        tighten(state, lower_bound, tolerances)
    except TooManyLabels:
        return None
    return float(state.lower_bounds.proven_sums[lower_bound]) / before - 1.0
