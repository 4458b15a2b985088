"""Bound tightening: raise Lagrangian bounds that are below all solutions because of a duality gap.

Two gaps occur. A bound weighs a mean of both times, but no solution has this mean: `tighten_between` closes
this gap by label setting with dualised memory (`gap_enumeration.tighten`). A bound weighs one segment's peak,
or a mean of several: `tighten_by_peak` closes this gap by branch and bound on the largest peak.
docs/concepts/pareto-search.md, section "Bound tightening".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shardwise.pareto import Chain, Factor, FactorGraph
from shardwise.search.pareto import tuning
from shardwise.search.pareto.bound_sets import weighted
from shardwise.search.pareto.elimination_order import EliminationOrder
from shardwise.search.pareto.gap_enumeration import Tolerances, relaxed_tolerances, tighten
from shardwise.search.pareto.labels import TooManyLabels
from shardwise.search.pareto.presolve import PresolvedChain, dominant_segment, presolved
from shardwise.search.pareto.state import State
from shardwise.search.pareto.supported_points import scalarise_round
from shardwise.search.pareto.weighted_sums import FactorSums, solutions

Values = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class _PeakInterval:
    """Subproblem of the branch and bound: solutions whose largest peak is from `low` to `high` bytes.

    All of them consist of choices in `start`. None has a weighted sum below `least` (bounds).
    """

    start: PresolvedChain
    low: float
    high: float
    least: Values

    def bisect(self) -> tuple[_PeakInterval, _PeakInterval]:
        """The lower and the upper half."""
        middle = (self.low + self.high) / 2.0
        return replace(self, high=middle), replace(self, low=middle)


def tighten_by_peak(state: State, lower_bounds: Indices) -> None:
    """Raise bounds to the least weighted sum of any solution, up to a part of the working epsilon and not
    above the incumbents; solutions found become incumbents.

    The peak of a segment is its recomputed bytes and its largest temporary. In a subproblem whose largest
    peak is between two levels, choices with a larger peak are dropped in every segment. The lower level
    counts in full, in whichever segment it occurs. The subproblem farthest below the incumbents is bisected
    first.
    """
    for lower_bound, least in zip(
        lower_bounds.tolist(), _interval_bounds(state, lower_bounds).tolist(), strict=True
    ):
        state.lower_bounds.raise_to(lower_bound, least)


def _interval_bounds(state: State, lower_bounds: Indices) -> Values:
    """Lower bounds of the weighted sums of some bounds, by branch and bound."""
    targets = weighted(state.lower_bounds.weights[lower_bounds], state.incumbents.points).min(axis=0)
    targets *= 1.0 - tuning.TUNING.target_gap * state.working_epsilon
    memory_bytes = float(state.incumbents.points[-1, 1])
    width = max(tuning.TUNING.interval_width * state.working_epsilon, tuning.TUNING.least_interval_width)
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
    for _ in range(tuning.TUNING.most_bisections):
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
    """Upper bound of the peak of any segment, bytes."""
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
    """Bound a subproblem by weighted sums, for the bounds that are still below their targets.

    Returns None if no solution in it is below any target. Solutions of the sums become incumbents.
    """
    some = np.flatnonzero(case.least < targets)
    own, aims = lower_bounds[some], targets[some]
    start = replace(case.start, chain=_chain_below(state, case.start, case.high))
    weights = np.tile(state.lower_bounds.weights[own], (2, 1))
    repeats = np.array([segment.repeat for segment in start.chain])
    even = np.full((len(own), len(repeats)), tuning.TUNING.tie_share) / (len(repeats) * repeats)
    peaks = np.concatenate([np.array(state.lower_bounds.peaks)[own], even])
    answer = state.chain_sums(start, weights, np.tile(state.lower_bounds.shares[own], 2), peaks)
    state.sums_solved += len(weights)
    if not np.isfinite(answer.least).all():
        return None
    state.take(list(dict.fromkeys(start.originals(solutions(answer)))))
    # The largest peak is at least any mean of peaks, and at least the lower end of the interval.
    least_peaks = np.repeat([0.0, (1.0 - tuning.TUNING.tie_share) * case.low], len(own)) * weights[:, 1]
    least = case.least.copy()
    least[some] = np.maximum(case.least[some], (answer.least + least_peaks).reshape(2, -1).max(axis=0))
    is_below = least[some] < aims
    if not is_below.any():
        return None
    rows = np.tile(np.eye(len(own), dtype=bool)[is_below], 2)
    start = presolved(start, answer, np.where(rows, np.tile(aims, 2) - least_peaks, np.inf))
    return replace(case, start=start, least=least) if all(segment.modes for segment in start.chain) else None


def _chain_below(state: State, start: PresolvedChain, peak_limit: float) -> Chain:
    """The chain without choices whose peak is above a limit, in any segment."""
    segments = []
    for segment, orders in zip(start.chain, state.orders_in(start), strict=True):
        own = zip(segment.modes, orders, strict=True)
        modes = tuple((name, _part_below(part, order, peak_limit)) for (name, part), order in own)
        segments.append(replace(segment, modes=modes))
    return tuple(segments)


def _part_below(part: FactorGraph, order: EliminationOrder, peak_limit: float) -> FactorGraph:
    """A factor graph without costs whose temporary, plus the least recomputed bytes, is above a limit."""
    factors = []
    for factor, recomputed in zip(part.factors, _least_recomputed(part, order), strict=True):
        is_above = factor.costs[..., 4] + recomputed > peak_limit
        costs = np.where(is_above[..., None], np.inf, factor.costs) if is_above.any() else factor.costs
        factors.append(Factor(factor.variables, costs))
    return replace(part, factors=tuple(factors))


def _least_recomputed(part: FactorGraph, order: EliminationOrder) -> list[Values]:
    """The least recomputed bytes of a factor graph with each cost of each factor."""
    recomputed = [factor.costs[..., 3] for factor in part.factors]
    if not any(((own > 0.0) & np.isfinite(own)).any() for own in recomputed):
        return [np.zeros(1)] * len(part.factors)
    factor_sums = FactorSums.of(part, order, np.array([[0.0, 0.0, 0.0, 1.0, 0.0]]))
    factor_sums.distribute(np.zeros_like(factor_sums.last))
    return [
        (factor_sums.tables[place] + factor_sums.outside[place])[..., 0] for place in range(len(part.factors))
    ]


def tighten_between(state: State, tolerances: Tolerances, recombine: Callable[[State], None]) -> Tolerances:
    """Tighten bounds that are below the incumbents because they weigh a mean of both times, and solve more
    weighted sums for open nadir points.

    This runs if trial bounds rise far enough, or if enumerations have exceeded their limits. `recombine` runs
    after each round. Returns the tolerances from then on: relaxed if a tightening has exceeded the limits.
    """
    nadir_points = state.open_nadir_points() if not state.is_exhausted else np.empty((0, 2))
    if not len(nadir_points):
        return tolerances
    if not state.is_hard:
        if not _bounds_mix_times(state):
            return tolerances
        closest = state.lower_bounds.closest(nadir_points, tuning.TUNING.trial_bounds)
        shares = state.lower_bounds.shares[closest]
        gains, tolerances = _tightened_each(
            state, closest[(shares > 0.0) & (shares < 1.0)].tolist(), tolerances
        )
        state.is_tightened = _are_worth_it(gains, state.requested_epsilon)
        if not (state.is_tightened or state.is_hard):
            return tolerances
    slopes_tried: set[float] = set()
    for _ in range(tuning.TUNING.tightening_rounds):
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
    """Which of these slopes to tighten: those more than `Tuning.same_slope` apart. Bounds of nearly equal
    slopes add nothing."""
    representatives: list[int] = []
    for place in np.argsort(slopes, kind="stable").tolist():
        factor = 1.0 + tuning.TUNING.same_slope
        if not representatives or slopes[place] > factor * slopes[representatives[-1]]:
            representatives.append(place)
    return np.array(sorted(representatives), dtype=np.intp)


def _bounds_mix_times(state: State) -> bool:
    """Whether tightening by both times can help. It cannot if one time is 0, or if the chain has a dominant
    segment: there it takes as long as a full enumeration."""
    return state.presolved.decided_share is None and dominant_segment(state.given) is None


def _low_in_time(state: State, lower_bounds: Indices) -> Indices:
    """The bounds that are below the incumbents because they weigh a mean of both times."""
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
    return np.asarray(
        lower_bounds[(longer > tuning.TUNING.time_gap_share * below) & (shares > 0.0) & (shares < 1.0)]
    )


def _tightened_each(
    state: State, lower_bounds: list[int], tolerances: Tolerances
) -> tuple[list[float | None], Tolerances]:
    """Relative rise of each bound by tightening, None where it exceeded the limits, and the tolerances from
    then on. Stops after `Tuning.most_failures` failures."""
    gains = []
    for lower_bound in lower_bounds:
        gains.append(_tightened(state, lower_bound, tolerances.times(tuning.TUNING.tightening_share)))
        if gains[-1] is None:
            if not state.is_hard:
                tolerances = relaxed_tolerances(state, tolerances)
            if gains.count(None) >= tuning.TUNING.most_failures:
                break
    return gains, tolerances


def _are_worth_it(gains: list[float | None], requested_epsilon: float) -> bool:
    """Whether any trial bound rose far enough."""
    worthwhile = min(
        tuning.TUNING.worthwhile_epsilons * requested_epsilon,
        max(tuning.TUNING.worthwhile_gap, tuning.TUNING.worthwhile_gap_epsilons * requested_epsilon),
    )
    return any(gain is not None and gain > worthwhile for gain in gains)


def _tightened(state: State, lower_bound: int, tolerances: Tolerances) -> float | None:
    """Relative rise of a bound by tightening; None if it exceeds the limits."""
    before = float(state.lower_bounds.proven_sums[lower_bound])
    try:
        tighten(state, lower_bound, tolerances)
    except TooManyLabels:
        return None
    return float(state.lower_bounds.proven_sums[lower_bound]) / before - 1.0
