"""Cases by where the largest temporary of the largest link lies: lines weigh it at one operator, and lie far
below all solutions where it is elsewhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from shardwise.frontier import Factor, Part
from shardwise.search.tracking.cases import largest_of
from shardwise.search.tracking.draw import WEIGHTS_AT_ONCE
from shardwise.search.tracking.lines import SLACK, Lines, weighted
from shardwise.search.tracking.prune import Narrowed, narrowed
from shardwise.search.tracking.simplify import simplified
from shardwise.search.tracking.state import State

Values = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]


WEIGHED = 0.5
"""How much of the peak's weight lines have in the link, at least: else its peaks are not what decides."""

WIDTH = 0.3
"""How far apart the levels of a case may lie, in what is matched of the least memory."""


def by_levels(state: State) -> list[State] | None:
    """A case as cases of its own, by the largest temporary of its largest link: those below which some corner
    is open, each within a part of what is matched of the least memory; None where no link is most of it, or
    its peak is not what lines weigh.

    With no temporary above a level, and each counted as the lowest of the case at least, a line has the peak
    itself and not a mean of peaks. Each solution is in the case that its peak is in, and costs there what it
    does.
    """
    place, corners = largest_of(state.narrowed.chain), state.open_corners()
    if state.is_exhausted or place is None or len(state.narrowed.chain[place].modes) != 1:
        return None
    lines = state.lines.closest(corners, WEIGHTS_AT_ONCE)
    if not len(lines) or not np.isfinite(corners).all():  # lines of one objective tell nothing new
        return None
    ((_, part),) = state.narrowed.chain[place].modes
    levels = _levels(part)
    if len(levels) < 2 or np.array(state.lines.peaks)[lines, place].mean() < WEIGHED:
        return None
    width = WIDTH * state.matched * float(state.found.points[:, 1].min())
    waiting, found = [(state.narrowed, corners, levels)], []
    while waiting:
        start, below, own = waiting.pop()
        start = _with_peaks(start, place, float(own[0]), float(own[-1]))
        peaks = np.array(state.lines.peaks)[lines]
        answer = state.weighed(start, state.lines.weights[lines], state.lines.shares[lines], peaks)
        state.asked += len(lines)
        limits = weighted(state.lines.weights[lines], below)
        is_open = (answer.least * (1.0 + SLACK) < limits).all(axis=1)
        if not is_open.any():
            continue
        start = narrowed(start, answer, limits[is_open])
        if not all(link.modes for link in start.chain):
            continue
        if own[-1] - own[0] <= width:
            found.append(_case_of(state, start, lines, answer.least))
            continue
        cut = int(np.diff(own).argmax()) + 1
        waiting += [(start, below[is_open], own[cut:]), (start, below[is_open], own[:cut])]
    return found


def _case_of(state: State, start: Narrowed, lines: Indices, least: Values) -> State:
    """So much of a case as a case of its own, with some of its lines as high as they are there, and what is
    known of the whole."""
    own, found = state.lines, Lines(seen=list(state.lines.seen))
    ends = np.flatnonzero(~own.weights.all(axis=1))
    for some, drawn in ((lines, np.maximum(least, own.drawn[lines])), (ends, own.drawn[ends])):
        found.add(own.weights[some], own.shares[some], np.array(own.peaks)[some], drawn)
    found.least = np.maximum(found.least, own.least[[*lines, *ends]])
    narrow = replace(start, chain=simplified(start.chain))
    return replace(state, narrowed=narrow, lines=found, is_exhausted=False, asked=0, labels=0)


def _levels(part: Part) -> Values:
    """The values that the largest temporary of a part can have."""
    every = [factor.costs.reshape(-1, factor.costs.shape[-1]) for factor in part.factors]
    peaks = [costs[np.isfinite(costs).all(axis=1), -1] for costs in every]
    peaks = [own for own in peaks if len(own)]
    if not peaks:
        return np.empty(0)
    levels = np.unique(np.concatenate(peaks))
    return np.asarray(levels[levels >= max(float(own.min()) for own in peaks)])


def _with_peaks(start: Narrowed, place: int, low: float, high: float) -> Narrowed:
    """So much of a chain as has largest temporaries from `low` to `high` in a link."""
    link = start.chain[place]
    modes = tuple((name, _between(part, low, high)) for name, part in link.modes)
    own = replace(link, modes=modes)
    return replace(start, chain=(*start.chain[:place], own, *start.chain[place + 1 :]))


def _between(part: Part, low: float, high: float) -> Part:
    """A part without temporaries above `high`, and none below `low`."""
    factors = []
    for factor in part.factors:
        costs = factor.costs.copy()
        costs[costs[..., -1] > high] = np.inf
        costs[..., -1] = np.maximum(costs[..., -1], low)
        factors.append(Factor(factor.variables, costs))
    return replace(part, factors=tuple(factors))
