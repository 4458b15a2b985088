"""Lines raised to what there is, where none of the solutions has a mean of both times, or of several
peaks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from shardwise.search.tracking.cases import largest_of
from shardwise.search.tracking.chained import solutions
from shardwise.search.tracking.draw import draw_round
from shardwise.search.tracking.labels import TooManyLabels
from shardwise.search.tracking.levels import raise_by_levels
from shardwise.search.tracking.lines import weighted
from shardwise.search.tracking.look import FINER, Losses, sharpen
from shardwise.search.tracking.loosen import loosened
from shardwise.search.tracking.state import State

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]

TRIED = 3
"""Lines that tell whether others are worth it."""

FAR_BELOW = 10.0
"""How many epsilons one of them must lie below all solutions, at least, where that is less than `FAR`."""

FAR, BEYOND_EPSILON = 0.01, 2.0
"""How far, relative, and how many epsilons: looks that go so far beyond a line see much, however closely."""

IN_TIME = 0.5
"""Of what a line lies below all that is found, the part by which the solution on it takes longer than the
line's mean of both times, at least, where that mean is why."""

ALIKE = 0.05
"""How much more two lines weigh memory, relative, that are raised as one."""

FAILURES = 2
"""Lines that are too much before a round ends: each takes long to tell."""

ROUNDS = 2
"""Rounds of lines between what is found then."""


def sharpen_between(state: State, losses: Losses, fill: Callable[[State], None]) -> Losses:
    """Raise lines to the least weighted sums that there are, and draw more of them between neighbours that
    are still open: where lines of a mean of both times are far below all solutions, or looks are too much.
    After each round `fill` takes what else is found between. What may be lost from then on: more, where
    raising one was too much."""
    corners = state.open_corners() if not state.is_exhausted else np.empty((0, 2))
    if not len(corners):
        return losses
    if not state.is_hard:
        if not _is_mixed(state):
            return losses
        closest = state.lines.closest(corners, TRIED)
        shares = state.lines.shares[closest]
        rises, losses = _raised_each(state, closest[(shares > 0.0) & (shares < 1.0)].tolist(), losses)
        state.is_raised = _are_worth_it(rises, state.wanted)
        if not (state.is_raised or state.is_hard):
            return losses
    slopes_tried: set[float] = set()
    for _ in range(ROUNDS):
        slopes = draw_round(state, slopes_tried)
        told_apart = [slopes[row] for row in unlike(np.array(slopes))]
        drawn = [np.flatnonzero((state.lines.weights == [1.0, slope]).all(axis=1)) for slope in told_apart]
        lines = np.concatenate([np.empty(0, dtype=np.intp), *drawn])
        in_time = _apart_in_time(state, lines) if state.is_hard else lines
        rises, losses = _raised_each(state, in_time.tolist(), losses)
        state.is_raised |= _are_worth_it(rises, state.wanted)
        if state.is_hard:
            raise_by_levels(state, np.setdiff1d(lines, in_time))
        fill(state)
        if not slopes or state.is_exhausted or not len(state.open_corners()):
            return losses
        state.narrow()
    return losses


def unlike(slopes: Values) -> Indices:
    """Which lines to raise, of some that weigh memory so much beside a second: where one is raised, others of
    nearly its weight tell nothing new."""
    kept: list[int] = []
    for place in np.argsort(slopes, kind="stable").tolist():
        if not kept or slopes[place] > (1.0 + ALIKE) * slopes[kept[-1]]:
            kept.append(place)
    return np.array(sorted(kept), dtype=np.intp)


def _is_mixed(state: State) -> bool:
    """Whether looks tell how much higher a line is with both times than with a mean of them: not where one of
    them is nothing, nor where one block is most of a chain and looks take what it takes."""
    return state.narrowed.decided_share is None and largest_of(state.given) is None


def _apart_in_time(state: State, lines: Indices) -> Indices:
    """Those of some lines that lie below what is found since they count a mean of both times."""
    if not len(lines) or not _is_mixed(state):
        return lines[:0]
    weights, shares = state.lines.weights[lines], state.lines.shares[lines]
    answer = state.weighed(state.narrowed, weights, shares, np.array(state.lines.peaks)[lines])
    on_them = state.narrowed.originals(solutions(answer))
    both_s = np.array([state.costs(solution)[:2] for solution in on_them])
    mean_s = shares * both_s[:, 0] + (1.0 - shares) * both_s[:, 1]
    longer = weights[:, 0] * (both_s.max(axis=1) - mean_s)
    below = weighted(weights, state.found.points).min(axis=0) - state.lines.drawn[lines]
    return np.asarray(lines[(longer > IN_TIME * below) & (shares > 0.0) & (shares < 1.0)])


def _raised_each(state: State, lines: list[int], losses: Losses) -> tuple[list[float | None], Losses]:
    """How much higher some lines are, relative, once they are raised to what there is, one after the other,
    and what may be lost from then on; those behind a second one that is too much are left as they are."""
    rises = []
    for line in lines:
        rises.append(_raised(state, line, losses.times(FINER)))
        if rises[-1] is None:
            if not state.is_hard:
                losses = loosened(state, losses)
            if rises.count(None) >= FAILURES:
                break
    return rises, losses


def _are_worth_it(rises: list[float | None], wanted: float) -> bool:
    """Whether any of the lines that were tried rose far, relative."""
    far = min(FAR_BELOW * wanted, max(FAR, BEYOND_EPSILON * wanted))
    return any(rise is not None and rise > far for rise in rises)


def _raised(state: State, line: int, losses: Losses) -> float | None:
    """How much higher a line is, relative, once it is raised to what there is; None where it is too much."""
    before = float(state.lines.drawn[line])
    try:
        sharpen(state, line, losses)
    except TooManyLabels:
        return None
    return float(state.lines.drawn[line]) / before - 1.0
