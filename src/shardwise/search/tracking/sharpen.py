"""Lines raised to what there is, where none of the solutions has a mean of both times."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardwise.search.tracking.draw import draw_round
from shardwise.search.tracking.labels import TooManyLabels
from shardwise.search.tracking.look import FINER, Losses, sharpen
from shardwise.search.tracking.state import State

TRIED = 3
"""Lines that tell whether others are worth it."""

FAR_BELOW = 10.0
"""How many epsilons one of them must lie below all solutions, at least, where that is less than `FAR`."""

FAR, BEYOND_EPSILON = 0.01, 2.0
"""How far, relative, and how many epsilons: looks that go so far beyond a line see much, however closely."""

ROUNDS = 2
"""Rounds of lines between what is found then."""


def sharpen_between(state: State, losses: Losses, fill: Callable[[State], None]) -> None:
    """Raise lines to the least weighted sums that there are, and draw more of them between neighbours that
    are still open: where lines of a mean of both times are far below all solutions. After each round `fill`
    takes what else is found between."""
    finer = losses.times(FINER)
    corners = state.open_corners() if not state.is_exhausted else np.empty((0, 2))
    if not len(corners) or state.narrowed.decided_share is not None:
        return
    lines = state.lines.closest(corners, TRIED).tolist()
    mixed = [line for line in lines if 0.0 < state.lines.shares[line] < 1.0]
    rises = [_raised(state, line, finer) for line in mixed]
    if not _are_worth_it(rises, state.wanted):
        return
    state.is_raised = True
    tried: set[float] = set()
    for _ in range(ROUNDS):
        slopes = draw_round(state, tried)
        drawn = [np.flatnonzero((state.lines.weights == [1.0, slope]).all(axis=1)) for slope in slopes]
        for line in (line for lines in drawn for line in lines.tolist()):
            if _raised(state, line, finer) is None:
                break  # those behind it are hardly less, and each takes long to tell
        fill(state)
        if not slopes or not len(state.open_corners()):
            return
        state.narrow()


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
