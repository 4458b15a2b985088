"""Weighted sums: supported points as incumbents, and Lagrangian bounds, with the multipliers that make them
highest.

`scalarise_extremes` solves time alone and memory alone. `scalarise_round` solves slopes along the lower
convex hull of the incumbents. Each bound's share of hidden_s is found by secant steps, its multipliers of the
peak by dual ascent (Frank-Wolfe).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shardwise.search.pareto import tuning
from shardwise.search.pareto.bound_sets import is_open
from shardwise.search.pareto.recombination import recombined
from shardwise.search.pareto.solution import Solution, occurrences
from shardwise.search.pareto.state import State

Values = npt.NDArray[np.float64]

TIE_WEIGHT = 1e-7
"""Weight of the other objective if one alone is minimised, relative; of equal solutions the better one is
found."""


def scalarise_extremes(state: State) -> tuple[float, float]:
    """Solve time alone and memory alone; returns the lower bounds of time (s) and of memory (bytes)."""
    extremes = np.array([[1.0, 0.0], [0.0, 1.0]])
    no_peaks = np.zeros((2, len(state.given)))
    own, _ = _solve_sums(state, extremes, np.ones(2), no_peaks)
    if state.is_exhausted:
        return 0.0, 0.0
    _ascend_shares(state, _solve(state, [_Multipliers(0.0, 1.0, no_peaks[0])]))
    memory = _dual_ascent(
        state, [_Multipliers(1.0, 1.0, no_peaks[0])], tuning.TUNING.ascent_steps, time_weight=0.0
    )
    peaks = memory[0].multipliers.peaks if memory else no_peaks[0]
    _minimise_memory(state, peaks)
    (fast_s, fast_bytes), (slow_s, slow_bytes) = state.incumbents.points[0], state.incumbents.points[-1]
    lexicographic = np.array([[1.0, _tie_weight(fast_s, fast_bytes)], [_tie_weight(slow_bytes, slow_s), 1.0]])
    _solve_sums(state, lexicographic, np.ones(2), np.stack([peaks, peaks]))
    whole, least_bytes = (
        own[0],
        state.lower_bounds.explored_sums[state.lower_bounds.weights[:, 0] == 0.0].max(),
    )
    none, _ = _solve_sums(state, extremes[:1], np.zeros(1), no_peaks[:1])
    return float(max(whole, none[0])), float(least_bytes)


def _minimise_memory(state: State, peaks: Values) -> None:
    """Solve weighted sums of memory until a solution reaches the bound of memory alone. The first solutions
    may have larger temporaries where the bound weighs none.

    `peaks` (segments) and the peak's shares within segments move towards the largest temporaries of the
    solutions.
    """
    shares = [[dict(own) for own in modes] for modes in state.peak_shares]
    memory = np.array([[0.0, 0.0, 1.0, 1.0, 1.0]])
    for step in range(tuning.TUNING.memory_ascent_steps):
        smallest = state.incumbents.extremes(state.working_epsilon)[1]
        if not is_open(state.lower_bounds, smallest[None])[0]:
            return
        state.sums_solved += 1
        peak_shares = tuple(tuple(tuple(own.items()) for own in modes) for modes in shares)
        answer = state.summed(state.presolved, memory, peaks[None], peak_shares)
        (solution,) = state.take_supported(answer)
        part = 1.0 / (step + 2.0)
        peaks = _shifted(state, peaks, int(state.peaks_of(solution).argmax()), part)
        for place, choice in dict.fromkeys(zip(occurrences(state.given), solution, strict=True)):
            own, largest = shares[place][choice.mode], state.largest_temporary(place, choice)
            if largest is not None:
                damped = {factor: share * (1.0 - part) for factor, share in own.items()}
                shares[place][choice.mode] = damped | {largest: damped.get(largest, 0.0) + part}


def scalarise_first(state: State) -> set[float]:
    """Solve the first rounds of weighted sums between neighbours; returns their slopes."""
    tried: set[float] = set()
    for _ in range(tuning.TUNING.first_scalarisation_rounds):
        if not scalarise_round(state, tried):
            break
    return tried


def scalarise_between(state: State, tried: set[float]) -> None:
    """Solve weighted sums between neighbours that are still open, at new slopes, until none finds a new
    slope. Each round starts with presolve."""
    for _ in range(tuning.TUNING.scalarisation_rounds):
        if state.is_exhausted or not len(state.open_nadir_points()):
            break
        state.presolve()
        if not scalarise_round(state, tried):
            break


def recombine_neighbours(state: State) -> None:
    """Recombine neighbours on the hull of the incumbents that have an open nadir point between them."""
    solutions = state.incumbents.solutions
    for a, b in _open_hull_edges(state):
        (case, one), (other_case, other) = solutions[a], solutions[b]
        if case == other_case == state.case:
            state.take(recombined(state.given, (one, other)))


def scalarise_round(state: State, tried: set[float]) -> list[float]:
    """Solve weighted sums at some slopes that were not tried yet; returns these slopes."""
    fresh = [slope for slope in dict.fromkeys(_gap_slopes(state)) if slope not in tried]
    if not fresh or state.is_exhausted:
        return []
    slopes = _spread(fresh, tuning.TUNING.slopes_at_once)
    tried |= set(slopes)
    _scalarise(state, slopes)
    return slopes


def _solve_sums(
    state: State, weights: Values, shares: Values, peaks: Values
) -> tuple[Values, list[Solution]]:
    """The least sum and a solution for each of the weights (J, 2) of time and memory, with `peaks` (J,
    segments). No solutions if the chain has none."""
    state.sums_solved += len(weights)
    answer = state.chain_sums(state.presolved, weights, shares, peaks)
    if not np.isfinite(answer.least).all():
        state.is_exhausted = True
        return answer.least, []
    state.lower_bounds.add(weights, shares, peaks, answer.least)
    return answer.least, state.take_supported(answer)


def _gap_slopes(state: State) -> list[float]:
    """Slopes (weight of memory, weight of time 1) of the hull's edges with an open nadir point, by time."""
    points = state.incumbents.points
    # Rounded, so that a slope that was tried is recognised.
    return [
        float(f"{(points[b, 0] - points[a, 0]) / (points[a, 1] - points[b, 1]):.8g}")
        for a, b in _open_hull_edges(state)
    ]


def _open_hull_edges(state: State) -> list[tuple[int, int]]:
    """Edges of the lower convex hull of the incumbents that have an open nadir point, as rows of their
    ends."""
    is_open_edge = is_open(state.lower_bounds, state.incumbents.nadir_points(state.working_epsilon))[1:-1]
    return [(a, b) for a, b in pairwise(_hull(state.incumbents.points)) if is_open_edge[a:b].any()]


def _hull(points: Values) -> list[int]:
    """The rows of points (n, 2), by time, on the lower convex hull."""
    hull: list[int] = []
    for row, (time_s, memory_bytes) in enumerate(points.tolist()):
        while len(hull) > 1:
            (fast_s, large), (slow_s, small) = points[hull[-2]], points[hull[-1]]
            if (slow_s - fast_s) * (large - memory_bytes) < (time_s - fast_s) * (large - small):
                break
            hull.pop()
        hull.append(row)
    return hull


@dataclass(frozen=True, slots=True)
class _Multipliers:
    """Multipliers of a weighted sum: the weight of memory, the share of hidden_s in the weight of time, and
    the multipliers (segments) of the peaks."""

    slope: float
    share: float
    peaks: Values


@dataclass(frozen=True, slots=True)
class _Scalarised:
    """A solved weighted sum: its multipliers and least sum, and of its solution hidden_s - exposed_s, the
    segment of the largest peak, and how much more the largest peak weighs than the mean that the bound
    weighs."""

    multipliers: _Multipliers
    least: float
    excess_s: float
    peak_segment: int
    peak_gap: float


def _scalarise(state: State, slopes: list[float]) -> None:
    """Solve weighted sums with these weights of memory (s/byte), each with the peak multipliers and the share
    of hidden_s that make the bound highest.

    The share is 1 if hidden_s is the larger time of the solution, 0 if exposed_s is. Otherwise it is between,
    where solutions of more hidden_s and of more exposed_s have equal sums.
    """
    multipliers = [_Multipliers(slope, 1.0, _peaks_near(state, slope)) for slope in slopes]
    _ascend_shares(state, _dual_ascent(state, multipliers, tuning.TUNING.ascent_steps // 2))


def _ascend_shares(state: State, whole: list[_Scalarised]) -> None:
    """Solve the same weighted sums with other shares of hidden_s where 1 is not the best share."""
    unsettled = [solved for solved in whole if solved.excess_s < 0.0]
    none = _solve(state, [replace(solved.multipliers, share=0.0) for solved in unsettled])
    between = [(low, high) for high, low in zip(unsettled, none, strict=False) if low.excess_s > 0.0]
    for _ in range(tuning.TUNING.share_steps):
        fresh = _solve(
            state, [replace(low.multipliers, share=_crossing_share(low, high)) for low, high in between]
        )
        between = [
            (solved, high) if solved.excess_s > 0.0 else (low, solved)
            for (low, high), solved in zip(between, fresh, strict=False)
        ]


def _dual_ascent(
    state: State, multipliers: list[_Multipliers], steps: int, time_weight: float = 1.0
) -> list[_Scalarised]:
    """The highest bound of each weighted sum over some steps of dual ascent of its peak multipliers. Each
    step moves weight to the segment with the largest peak of the solution (Frank-Wolfe)."""
    now = _solve(state, multipliers, time_weight)
    best = dict(enumerate(now))
    for step in range(steps):
        improvable = [place for place in best if not _is_tight(state, best[place])]
        part = 1.0 / (step + 1.0 + time_weight)
        fresh = _solve(state, [_ascent_step(state, now[place], part) for place in improvable], time_weight)
        for place, solved in zip(improvable, fresh, strict=False):
            now[place] = solved
            best[place] = max(best[place], solved, key=lambda solved: solved.least)
    return list(best.values())


def _is_tight(state: State, solved: _Scalarised) -> bool:
    """Whether a bound is as close to its solution as solutions are matched."""
    return solved.peak_gap <= tuning.TUNING.tight_gap * state.working_epsilon * solved.least


def _ascent_step(state: State, solved: _Scalarised, part: float) -> _Multipliers:
    """The multipliers with `part` of the peak's weight moved to the segment of the solution's largest
    peak."""
    return replace(
        solved.multipliers, peaks=_shifted(state, solved.multipliers.peaks, solved.peak_segment, part)
    )


def _shifted(state: State, peaks: Values, segment: int, part: float) -> Values:
    """The peak multipliers (segments), with `part` of each moved to one segment."""
    shifted = peaks * (1.0 - part)
    shifted[segment] += part / state.given[segment].repeat
    return shifted


def _peaks_near(state: State, slope: float) -> Values:
    """The best peak multipliers of the bound with the closest slope."""
    own, least = state.lower_bounds.weights, state.lower_bounds.explored_sums
    with np.errstate(divide="ignore"):
        away = np.abs(np.log(own[:, 1]) - np.log(own[:, 0]) - np.log(slope))
    closest = np.flatnonzero(away == away.min())
    return state.lower_bounds.peaks[int(closest[least[closest].argmax()])]


def _solve(state: State, multipliers: list[_Multipliers], time_weight: float = 1.0) -> list[_Scalarised]:
    """Solve weighted sums; fewer results if the chain has no solution."""
    found: list[_Scalarised] = []
    for start in range(0, len(multipliers), tuning.TUNING.weights_at_once):
        some = multipliers[start : start + tuning.TUNING.weights_at_once]
        weights = np.array([[time_weight, each.slope] for each in some])
        shares = np.array([each.share for each in some])
        sums, on_them = _solve_sums(state, weights, shares, np.stack([each.peaks for each in some]))
        if state.is_exhausted:
            break
        for each, least, solution in zip(some, sums, on_them, strict=True):
            costs, peaks = state.costs(solution), state.peaks_of(solution)
            excess_s, peak_gap = float(costs[0] - costs[1]), _peak_gap(state, each, costs, peaks)
            found.append(_Scalarised(each, float(least), excess_s, int(peaks.argmax()), peak_gap))
    return found


def _peak_gap(state: State, multipliers: _Multipliers, costs: Values, peaks: Values) -> float:
    """How much more the largest peak of a solution weighs than the mean that the bound weighs."""
    repeats = np.array([segment.repeat for segment in state.given], dtype=np.float64)
    parts = multipliers.peaks * repeats
    return multipliers.slope * float(costs[3] - parts @ peaks)


def _crossing_share(low: _Scalarised, high: _Scalarised) -> float:
    """The share at which the sums of two solutions are equal: the least sum is highest near there."""
    least, most = low.multipliers.share, high.multipliers.share
    offset = low.least - low.excess_s * least - high.least + high.excess_s * most
    return float(np.clip(offset / (high.excess_s - low.excess_s), least, most))


def _tie_weight(objective: float, other: float) -> float:
    """A weight of the other objective that is negligible compared with the first."""
    return TIE_WEIGHT * objective / other if other > 0.0 else 0.0


def _spread(slopes: list[float], count: int) -> list[float]:
    """At most `count` of the slopes, evenly spread."""
    if len(slopes) <= count:
        return slopes
    return [slopes[int(place)] for place in np.linspace(0, len(slopes) - 1, count)]
