"""Drawing lines that no solution is below, and taking the solutions that lie on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shardwise.search.pareto.bound_sets import is_open
from shardwise.search.pareto.recombination import recombined
from shardwise.search.pareto.solution import Solution, occurrences
from shardwise.search.pareto.state import State

Values = npt.NDArray[np.float64]

SLOPES_AT_ONCE = 16
"""Slopes that one round draws lines of; what they find tells the next."""

WEIGHTS_AT_ONCE = 16
"""Weights that one pass over a chain answers."""

SCALARISATION_ROUNDS = 3
"""Rounds of lines, before other cases are drawn and after; each draws them between neighbours that are still
open. Of eight shipped graphs that were tried with more, one came out otherwise (resnet50 on 16 V100), and
took longer."""

FIRST_SCALARISATION_ROUNDS = 2
"""Rounds before choices that lead nowhere are left out: each is cheaper then."""

SHARE_STEPS = 3
"""Times that the share of hidden_s is sought between all and none."""

ASCENT_STEPS = 8
"""Steps towards where the peak is best weighed, for the line of memory alone; and half of it for others."""

MEMORY_ASCENT_STEPS = 16
"""Steps towards a solution of the least memory."""

TIGHT_GAP = 0.25
"""Of what may be lost, how far a line may be below the solution on it and is high enough."""

TIE_WEIGHT = 1e-7
"""Weight of the other objective where one alone is asked for, so that of equal solutions the better is
found."""


def scalarise_extremes(state: State) -> tuple[float, float]:
    """The lines of time alone and of memory alone, and what they tell of both: no solution takes less."""
    extremes = np.array([[1.0, 0.0], [0.0, 1.0]])
    no_peaks = np.zeros((2, len(state.given)))
    own, _ = _solve_sums(state, extremes, np.ones(2), no_peaks)
    if state.is_exhausted:
        return 0.0, 0.0
    _ascend_shares(state, _solve(state, [_Multipliers(0.0, 1.0, no_peaks[0])]))
    memory = _dual_ascent(state, [_Multipliers(1.0, 1.0, no_peaks[0])], ASCENT_STEPS, time_weight=0.0)
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
    """Solutions of less memory, until one is on the line of memory alone: the first that were found there may
    have larger temporaries where the line weighs none. `peaks` (links), and the peak's shares within links,
    move towards the largest temporaries of what is found."""
    shares = [[dict(own) for own in modes] for modes in state.peak_shares]
    memory = np.array([[0.0, 0.0, 1.0, 1.0, 1.0]])
    for step in range(MEMORY_ASCENT_STEPS):
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
    """The first lines between neighbours, and their slopes."""
    tried: set[float] = set()
    for _ in range(FIRST_SCALARISATION_ROUNDS):
        if not scalarise_round(state, tried):
            break
    return tried


def scalarise_between(state: State, tried: set[float]) -> None:
    """Lines between neighbours that are still open, but for slopes that were tried, until none of them tells
    anything new; without the choices that lead nowhere, which are more after each round."""
    for _ in range(SCALARISATION_ROUNDS):
        if state.is_exhausted or not len(state.open_nadir_points()):
            break
        state.presolve()
        if not scalarise_round(state, tried):
            break


def recombine_neighbours(state: State) -> None:
    """Take what lies between neighbours on the hull of what is found beyond which a corner is open."""
    solutions = state.incumbents.solutions
    for a, b in _open_hull_edges(state):
        (case, one), (other_case, other) = solutions[a], solutions[b]
        if case == other_case == state.case:
            state.take(recombined(state.given, (one, other)))


def scalarise_round(state: State, tried: set[float]) -> list[float]:
    """Draw some of the lines whose slopes were not tried yet, and tell these."""
    fresh = [slope for slope in dict.fromkeys(_gap_slopes(state)) if slope not in tried]
    if not fresh or state.is_exhausted:
        return []
    slopes = _spread(fresh, SLOPES_AT_ONCE)
    tried |= set(slopes)
    _scalarise(state, slopes)
    return slopes


def _solve_sums(
    state: State, weights: Values, shares: Values, peaks: Values
) -> tuple[Values, list[Solution]]:
    """The least sum by each of some lines and a solution on it, of weights (J, 2) of time and memory; `peaks`
    (J, links). No solution where there is none."""
    state.sums_solved += len(weights)
    answer = state.chain_sums(state.presolved, weights, shares, peaks)
    if not np.isfinite(answer.least).all():
        state.is_exhausted = True
        return answer.least, []
    state.lower_bounds.add(weights, shares, peaks, answer.least)
    return answer.least, state.take_supported(answer)


def _gap_slopes(state: State) -> list[float]:
    """Memory's weight along the edges of what is found, seen from below, beyond which a corner is open; by
    time."""
    points = state.incumbents.points
    # Rounded, so that one that was tried is known again.
    return [
        float(f"{(points[b, 0] - points[a, 0]) / (points[a, 1] - points[b, 1]):.8g}")
        for a, b in _open_hull_edges(state)
    ]


def _open_hull_edges(state: State) -> list[tuple[int, int]]:
    """Edges along the hull of what is found, by the rows of their ends, beyond which a corner is open."""
    is_open_edge = is_open(state.lower_bounds, state.incumbents.nadir_points(state.working_epsilon))[1:-1]
    return [(a, b) for a, b in pairwise(_hull(state.incumbents.points)) if is_open_edge[a:b].any()]


def _hull(points: Values) -> list[int]:
    """The points (n, 2), by time, that a weighted sum can have as its least."""
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
    """Memory's weight, the share of hidden_s in time's, and the parts (links) of the peak's."""

    slope: float
    share: float
    peaks: Values


@dataclass(frozen=True, slots=True)
class _Scalarised:
    """A line as it was asked for, its least sum, and of the solution on it how much more hidden_s than
    exposed_s it has, the link of its largest peak, and how much more that peak
    weighs than the line has it."""

    multipliers: _Multipliers
    least: float
    excess_s: float
    peak_segment: int
    peak_gap: float


def _scalarise(state: State, slopes: list[float]) -> None:
    """Lines of these weights of memory beside a second's weight of 1, each with the parts of the peak's
    weight and the share of hidden_s that make it highest.

    That share is all where hidden_s is the larger time of the solution on the line, none where exposed_s is;
    else it lies between, where solutions of more hidden_s and of more exposed_s have the same sum.
    """
    multipliers = [_Multipliers(slope, 1.0, _peaks_near(state, slope)) for slope in slopes]
    _ascend_shares(state, _dual_ascent(state, multipliers, ASCENT_STEPS // 2))


def _ascend_shares(state: State, whole: list[_Scalarised]) -> None:
    """The same lines with other shares of hidden_s, where all makes less of them."""
    unsettled = [solved for solved in whole if solved.excess_s < 0.0]
    none = _solve(state, [replace(solved.multipliers, share=0.0) for solved in unsettled])
    between = [(low, high) for high, low in zip(unsettled, none, strict=False) if low.excess_s > 0.0]
    for _ in range(SHARE_STEPS):
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
    """Of each line the highest that steps of the peak's weight come to, each towards where the peak of the
    solution on the line is (Frank and Wolfe's, on the mean of which the largest is no less)."""
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
    """Whether a line is as high as the solution on it, as closely as solutions are matched."""
    return solved.peak_gap <= TIGHT_GAP * state.working_epsilon * solved.least


def _ascent_step(state: State, solved: _Scalarised, part: float) -> _Multipliers:
    """So much of the peak's weight taken from where it is to the link of the solution's largest peak."""
    return replace(
        solved.multipliers, peaks=_shifted(state, solved.multipliers.peaks, solved.peak_segment, part)
    )


def _shifted(state: State, peaks: Values, segment: int, part: float) -> Values:
    """The parts of the peak's weight (links), with so much of each moved to one link."""
    shifted = peaks * (1.0 - part)
    shifted[segment] += part / state.given[segment].repeat
    return shifted


def _peaks_near(state: State, slope: float) -> Values:
    """Where the peak was weighed best for the line of the closest slope."""
    own, least = state.lower_bounds.weights, state.lower_bounds.explored_sums
    with np.errstate(divide="ignore"):
        away = np.abs(np.log(own[:, 1]) - np.log(own[:, 0]) - np.log(slope))
    closest = np.flatnonzero(away == away.min())
    return state.lower_bounds.peaks[int(closest[least[closest].argmax()])]


def _solve(state: State, multipliers: list[_Multipliers], time_weight: float = 1.0) -> list[_Scalarised]:
    """Lines as asked for; fewer where there is no solution."""
    found: list[_Scalarised] = []
    for start in range(0, len(multipliers), WEIGHTS_AT_ONCE):
        some = multipliers[start : start + WEIGHTS_AT_ONCE]
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
    """How much more the peak of a solution weighs than a line makes of it."""
    repeats = np.array([segment.repeat for segment in state.given], dtype=np.float64)
    parts = multipliers.peaks * repeats
    return multipliers.slope * float(costs[3] - parts @ peaks)


def _crossing_share(low: _Scalarised, high: _Scalarised) -> float:
    """The share at which the sums of two solutions are the same: the least sum is highest near there."""
    least, most = low.multipliers.share, high.multipliers.share
    offset = low.least - low.excess_s * least - high.least + high.excess_s * most
    return float(np.clip(offset / (high.excess_s - low.excess_s), least, most))


def _tie_weight(objective: float, other: float) -> float:
    """A weight of the other objective that is nothing beside the wanted one."""
    return TIE_WEIGHT * objective / other if other > 0.0 else 0.0


def _spread(slopes: list[float], count: int) -> list[float]:
    """At most so many of the slopes, evenly spread over them."""
    if len(slopes) <= count:
        return slopes
    return [slopes[int(place)] for place in np.linspace(0, len(slopes) - 1, count)]
