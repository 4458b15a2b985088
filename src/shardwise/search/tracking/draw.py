"""Drawing lines that no solution is below, and taking the solutions that lie on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.search.tracking.chained import Weighed, solutions
from shardwise.search.tracking.lines import is_open
from shardwise.search.tracking.solution import Solution, occurrences, part_costs
from shardwise.search.tracking.state import State

Values = npt.NDArray[np.float64]

WEIGHTS_AT_ONCE = 16
"""Weights that one pass over a chain answers."""

ROUNDS = 24
"""Rounds of lines; each draws them between neighbours that are still open."""

SHARES = 3
"""Times that the share of hidden_s is sought between all and none."""

TILT = 1e-7
"""Weight of the other objective where one alone is asked for, so that of equal solutions the better is
found."""


def draw_ends(state: State) -> tuple[float, float]:
    """The lines of time alone and of memory alone, and what they tell of both: no solution takes less."""
    ends = np.array([[1.0, 0.0], [0.0, 1.0]])
    own = _ask(state, ends, np.ones(2))
    if state.is_exhausted:
        return 0.0, 0.0
    (fast_s, fast_bytes), (slow_s, slow_bytes) = state.found.points[0], state.found.points[-1]
    state.peak = _peak(state, state.narrowed.original(solutions(own)[0]))
    tilted = np.array([[1.0, _tilt(fast_s, fast_bytes)], [_tilt(slow_bytes, slow_s), 1.0]])
    whole = _ask(state, np.concatenate([ends, tilted]), np.ones(4)).least
    none = _ask(state, ends[:1], np.zeros(1)).least
    return float(max(whole[0], none[0])), float(whole[1])


def draw_between(state: State) -> None:
    """Lines between neighbours that are still open, until none of them tells anything new."""
    tried: set[float] = set()
    for _ in range(ROUNDS):
        fresh = [slope for slope in dict.fromkeys(_between(state)) if slope not in tried]
        if not fresh or state.is_exhausted:
            break
        slopes = _spread(fresh, 4 * WEIGHTS_AT_ONCE)
        tried |= set(slopes)
        _draw(state, slopes)


def _ask(state: State, weights: Values, shares: Values) -> Weighed:
    """Lines and the solutions on them, of weights (J, 2) of time and memory."""
    state.asked += len(weights)
    answer = state.weighed(state.narrowed, weights, shares)
    if not np.isfinite(answer.least).all():
        state.is_exhausted = True
        return answer
    state.lines.add(weights, shares, answer.least)
    state.take([state.narrowed.original(solution) for solution in dict.fromkeys(solutions(answer))])
    return answer


def _between(state: State) -> list[float]:
    """Memory's weight along the line through neighbours between which a corner is open; by time."""
    points = state.found.points
    opened = is_open(state.lines, state.found.corners(state.matched))
    slopes = []
    for place in np.flatnonzero(opened[1:-1]).tolist():
        (fast_s, large), (slow_s, small) = points[place], points[place + 1]
        # Rounded, since all neighbours along one edge have one slope.
        slopes.append(float(f"{(slow_s - fast_s) / (large - small):.8g}"))
    return slopes


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A line: the share of hidden_s, the least sum, and how much more hidden_s than exposed_s the solution on
    it has."""

    share: float
    least: float
    excess_s: float


def _draw(state: State, slopes: list[float]) -> None:
    """Lines of these weights of memory beside a second's weight of 1, each with the share of hidden_s that
    makes it highest.

    That is all of it where hidden_s is the larger time of the solution on the line, none where exposed_s is;
    else it lies between, where solutions of more hidden_s and of more exposed_s have the same sum.
    """
    whole = _drawn(state, [(slope, 1.0) for slope in slopes])
    unsettled = [(slope, line) for slope, line in zip(slopes, whole, strict=False) if line.excess_s < 0.0]
    none = _drawn(state, [(slope, 0.0) for slope, _ in unsettled])
    between = [
        (slope, low, high) for (slope, high), low in zip(unsettled, none, strict=False) if low.excess_s > 0.0
    ]
    for _ in range(SHARES):
        fresh = _drawn(state, [(slope, _meeting(low, high)) for slope, low, high in between])
        between = [
            (slope, line, high) if line.excess_s > 0.0 else (slope, low, line)
            for (slope, low, high), line in zip(between, fresh, strict=False)
        ]


def _drawn(state: State, asked: list[tuple[float, float]]) -> list[_Drawn]:
    """Lines of weights of memory and shares of hidden_s; fewer where there is no solution."""
    found: list[_Drawn] = []
    for start in range(0, len(asked), WEIGHTS_AT_ONCE):
        slopes, shares = np.array(asked[start : start + WEIGHTS_AT_ONCE]).T
        answer = _ask(state, np.column_stack([np.ones(len(slopes)), slopes]), shares)
        if state.is_exhausted:
            break
        for share, least, solution in zip(shares, answer.least, solutions(answer), strict=True):
            costs = state.costs(state.narrowed.original(solution))
            found.append(_Drawn(float(share), float(least), float(costs[0] - costs[1])))
    return found


def _meeting(low: _Drawn, high: _Drawn) -> float:
    """The share at which the sums of two solutions are the same: the least sum is highest near there."""
    rise = low.least - low.excess_s * low.share - high.least + high.excess_s * high.share
    return float(np.clip(rise / (high.excess_s - low.excess_s), low.share, high.share))


def _peak(state: State, solution: Solution) -> tuple[int, tuple[int | None, ...]]:
    """Where the peak of a solution is: the link, and in each of its modes the factor of the largest least."""
    places = list(occurrences(state.given))
    peaks = []
    for place, choice in zip(places, solution, strict=True):
        costs = part_costs(state.given[place].modes[choice.mode][1], choice.choices)
        peaks.append(costs[3] + costs[4])
    place = places[int(np.argmax(peaks))]
    factors = tuple(
        int(np.argmax([_least_peak(factor.costs) for factor in part.factors])) if part.factors else None
        for _, part in state.narrowed.chain[place].modes
    )
    return place, factors


def _least_peak(costs: Values) -> float:
    finite = costs.reshape(-1, costs.shape[-1])
    finite = finite[np.isfinite(finite).all(axis=1)]
    return float(finite[:, 4].min()) if len(finite) else 0.0


def _tilt(wanted: float, other: float) -> float:
    """A weight of the other objective that is nothing beside the wanted one."""
    return TILT * wanted / other if other > 0.0 else 0.0


def _spread(slopes: list[float], count: int) -> list[float]:
    """At most so many of the slopes, evenly spread over them."""
    if len(slopes) <= count:
        return slopes
    return [slopes[int(place)] for place in np.linspace(0, len(slopes) - 1, count)]
