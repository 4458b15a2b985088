"""Lines raised to what there is, where none of the solutions has a mean of both times, or of several
peaks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from shardwise.search.tracking.cases import dominant_segment
from shardwise.search.tracking.chained import solutions
from shardwise.search.tracking.draw import scalarise_round
from shardwise.search.tracking.labels import TooManyLabels
from shardwise.search.tracking.levels import tighten_by_peak
from shardwise.search.tracking.lines import weighted
from shardwise.search.tracking.look import TIGHTENING_SHARE, Tolerances, tighten
from shardwise.search.tracking.loosen import relaxed_tolerances
from shardwise.search.tracking.state import State

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]

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
