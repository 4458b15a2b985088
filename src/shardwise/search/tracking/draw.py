"""Drawing lines that no solution is below, and taking the solutions that lie on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shardwise.search.tracking.lines import is_open
from shardwise.search.tracking.mixed import mixed
from shardwise.search.tracking.solution import Solution, occurrences
from shardwise.search.tracking.state import State

Values = npt.NDArray[np.float64]

SLOPES_AT_ONCE = 16
"""Slopes that one round draws lines of; what they find tells the next."""

WEIGHTS_AT_ONCE = 16
"""Weights that one pass over a chain answers."""

ROUNDS = 3
"""Rounds of lines, before other cases are drawn and after; each draws them between neighbours that are still
open. Of eight shipped graphs that were tried with more, one came out otherwise (resnet50 on 16 V100), and
took longer."""

FIRST_ROUNDS = 2
"""Rounds before choices that lead nowhere are left out: each is cheaper then."""

SHARES = 3
"""Times that the share of hidden_s is sought between all and none."""

STEPS = 8
"""Steps towards where the peak is best weighed, for the line of memory alone; and half of it for others."""

SMALLEST_STEPS = 16
"""Steps towards a solution of the least memory."""

TIGHT = 0.25
"""Of what may be lost, how far a line may be below the solution on it and is high enough."""

TILT = 1e-7
"""Weight of the other objective where one alone is asked for, so that of equal solutions the better is
found."""


def draw_ends(state: State) -> tuple[float, float]:
    """The lines of time alone and of memory alone, and what they tell of both: no solution takes less."""
    ends = np.array([[1.0, 0.0], [0.0, 1.0]])
    nowhere = np.zeros((2, len(state.given)))
    own, _ = _ask(state, ends, np.ones(2), nowhere)
    if state.is_exhausted:
        return 0.0, 0.0
    _share(state, _drawn(state, [_Asked(0.0, 1.0, nowhere[0])]))
    memory = _raised(state, [_Asked(1.0, 1.0, nowhere[0])], STEPS, time_weight=0.0)
    peaks = memory[0].asked.peaks if memory else nowhere[0]
    _draw_smallest(state, peaks)
    (fast_s, fast_bytes), (slow_s, slow_bytes) = state.found.points[0], state.found.points[-1]
    tilted = np.array([[1.0, _tilt(fast_s, fast_bytes)], [_tilt(slow_bytes, slow_s), 1.0]])
    _ask(state, tilted, np.ones(2), np.stack([peaks, peaks]))
    whole, least_bytes = own[0], state.lines.least[state.lines.weights[:, 0] == 0.0].max()
    none, _ = _ask(state, ends[:1], np.zeros(1), nowhere[:1])
    return float(max(whole, none[0])), float(least_bytes)


def _draw_smallest(state: State, peaks: Values) -> None:
    """Solutions of less memory, until one is on the line of memory alone: the first that were found there may
    have larger temporaries where the line weighs none. `peaks` (links), and the peak's shares within links,
    move towards the largest temporaries of what is found."""
    shares = [[dict(own) for own in modes] for modes in state.peaked]
    memory = np.array([[0.0, 0.0, 1.0, 1.0, 1.0]])
    for step in range(SMALLEST_STEPS):
        smallest = state.found.ends(state.matched)[1]
        if not is_open(state.lines, smallest[None])[0]:
            return
        state.asked += 1
        peaked = tuple(tuple(tuple(own.items()) for own in modes) for modes in shares)
        answer = state.summed(state.narrowed, memory, peaks[None], peaked)
        (solution,) = state.take_drawn(answer)
        part = 1.0 / (step + 2.0)
        peaks = _moved(state, peaks, int(state.peaks_of(solution).argmax()), part)
        for place, choice in dict.fromkeys(zip(occurrences(state.given), solution, strict=True)):
            own, largest = shares[place][choice.mode], state.largest_temporary(place, choice)
            if largest is not None:
                kept = {factor: share * (1.0 - part) for factor, share in own.items()}
                shares[place][choice.mode] = kept | {largest: kept.get(largest, 0.0) + part}


def draw_first(state: State) -> set[float]:
    """The first lines between neighbours, and their slopes."""
    tried: set[float] = set()
    for _ in range(FIRST_ROUNDS):
        if not draw_round(state, tried):
            break
    return tried


def draw_between(state: State, tried: set[float]) -> None:
    """Lines between neighbours that are still open, but for slopes that were tried, until none of them tells
    anything new; without the choices that lead nowhere, which are more after each round."""
    for _ in range(ROUNDS):
        if state.is_exhausted or not len(state.open_corners()):
            break
        state.narrow()
        if not draw_round(state, tried):
            break


def mix_between(state: State) -> None:
    """Take what lies between neighbours on the hull of what is found beyond which a corner is open."""
    solutions = state.found.solutions
    for a, b in _open_edges(state):
        (case, one), (other_case, other) = solutions[a], solutions[b]
        if case == other_case == state.case:
            state.take(mixed(state.given, (one, other)))


def draw_round(state: State, tried: set[float]) -> list[float]:
    """Draw some of the lines whose slopes were not tried yet, and tell these."""
    fresh = [slope for slope in dict.fromkeys(_between(state)) if slope not in tried]
    if not fresh or state.is_exhausted:
        return []
    slopes = _spread(fresh, SLOPES_AT_ONCE)
    tried |= set(slopes)
    _draw(state, slopes)
    return slopes


def _ask(state: State, weights: Values, shares: Values, peaks: Values) -> tuple[Values, list[Solution]]:
    """The least sum by each of some lines and a solution on it, of weights (J, 2) of time and memory; `peaks`
    (J, links). No solution where there is none."""
    state.asked += len(weights)
    answer = state.weighed(state.narrowed, weights, shares, peaks)
    if not np.isfinite(answer.least).all():
        state.is_exhausted = True
        return answer.least, []
    state.lines.add(weights, shares, peaks, answer.least)
    return answer.least, state.take_drawn(answer)


def _between(state: State) -> list[float]:
    """Memory's weight along the edges of what is found, seen from below, beyond which a corner is open; by
    time."""
    points = state.found.points
    # Rounded, so that one that was tried is known again.
    return [
        float(f"{(points[b, 0] - points[a, 0]) / (points[a, 1] - points[b, 1]):.8g}")
        for a, b in _open_edges(state)
    ]


def _open_edges(state: State) -> list[tuple[int, int]]:
    """Edges along the hull of what is found, by the rows of their ends, beyond which a corner is open."""
    opened = is_open(state.lines, state.found.corners(state.matched))[1:-1]
    return [(a, b) for a, b in pairwise(_hull(state.found.points)) if opened[a:b].any()]


def _hull(points: Values) -> list[int]:
    """The points (n, 2), by time, that a weighted sum can have as its least."""
    kept: list[int] = []
    for row, (time_s, memory_bytes) in enumerate(points.tolist()):
        while len(kept) > 1:
            (fast_s, large), (slow_s, small) = points[kept[-2]], points[kept[-1]]
            if (slow_s - fast_s) * (large - memory_bytes) < (time_s - fast_s) * (large - small):
                break
            kept.pop()
        kept.append(row)
    return kept


@dataclass(frozen=True, slots=True)
class _Asked:
    """Memory's weight, the share of hidden_s in time's, and the parts (links) of the peak's."""

    slope: float
    share: float
    peaks: Values


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A line as it was asked for, its least sum, and of the solution on it how much more hidden_s than
    exposed_s it has, the link of its largest peak, and how much more that peak
    weighs than the line has it."""

    asked: _Asked
    least: float
    excess_s: float
    peak_link: int
    beyond: float


def _draw(state: State, slopes: list[float]) -> None:
    """Lines of these weights of memory beside a second's weight of 1, each with the parts of the peak's
    weight and the share of hidden_s that make it highest.

    That share is all where hidden_s is the larger time of the solution on the line, none where exposed_s is;
    else it lies between, where solutions of more hidden_s and of more exposed_s have the same sum.
    """
    asked = [_Asked(slope, 1.0, _peaks_near(state, slope)) for slope in slopes]
    _share(state, _raised(state, asked, STEPS // 2))


def _share(state: State, whole: list[_Drawn]) -> None:
    """The same lines with other shares of hidden_s, where all makes less of them."""
    unsettled = [line for line in whole if line.excess_s < 0.0]
    none = _drawn(state, [replace(line.asked, share=0.0) for line in unsettled])
    between = [(low, high) for high, low in zip(unsettled, none, strict=False) if low.excess_s > 0.0]
    for _ in range(SHARES):
        fresh = _drawn(state, [replace(low.asked, share=_meeting(low, high)) for low, high in between])
        between = [
            (line, high) if line.excess_s > 0.0 else (low, line)
            for (low, high), line in zip(between, fresh, strict=False)
        ]


def _raised(state: State, asked: list[_Asked], steps: int, time_weight: float = 1.0) -> list[_Drawn]:
    """Of each line the highest that steps of the peak's weight come to, each towards where the peak of the
    solution on the line is (Frank and Wolfe's, on the mean of which the largest is no less)."""
    now = _drawn(state, asked, time_weight)
    best = dict(enumerate(now))
    for step in range(steps):
        loose = [place for place in best if not _is_tight(state, best[place])]
        part = 1.0 / (step + 1.0 + time_weight)
        fresh = _drawn(state, [_stepped(state, now[place], part) for place in loose], time_weight)
        for place, line in zip(loose, fresh, strict=False):
            now[place] = line
            best[place] = max(best[place], line, key=lambda line: line.least)
    return list(best.values())


def _is_tight(state: State, line: _Drawn) -> bool:
    """Whether a line is as high as the solution on it, as closely as solutions are matched."""
    return line.beyond <= TIGHT * state.matched * line.least


def _stepped(state: State, line: _Drawn, part: float) -> _Asked:
    """So much of the peak's weight taken from where it is to the link of the solution's largest peak."""
    return replace(line.asked, peaks=_moved(state, line.asked.peaks, line.peak_link, part))


def _moved(state: State, peaks: Values, link: int, part: float) -> Values:
    """The parts of the peak's weight (links), with so much of each moved to one link."""
    moved = peaks * (1.0 - part)
    moved[link] += part / state.given[link].repeat
    return moved


def _peaks_near(state: State, slope: float) -> Values:
    """Where the peak was weighed best for the line of the closest slope."""
    own, least = state.lines.weights, state.lines.least
    with np.errstate(divide="ignore"):
        away = np.abs(np.log(own[:, 1]) - np.log(own[:, 0]) - np.log(slope))
    closest = np.flatnonzero(away == away.min())
    return state.lines.peaks[int(closest[least[closest].argmax()])]


def _drawn(state: State, asked: list[_Asked], time_weight: float = 1.0) -> list[_Drawn]:
    """Lines as asked for; fewer where there is no solution."""
    found: list[_Drawn] = []
    for start in range(0, len(asked), WEIGHTS_AT_ONCE):
        some = asked[start : start + WEIGHTS_AT_ONCE]
        weights = np.array([[time_weight, each.slope] for each in some])
        shares = np.array([each.share for each in some])
        sums, on_them = _ask(state, weights, shares, np.stack([each.peaks for each in some]))
        if state.is_exhausted:
            break
        for each, least, solution in zip(some, sums, on_them, strict=True):
            costs, peaks = state.costs(solution), state.peaks_of(solution)
            excess_s, beyond = float(costs[0] - costs[1]), _beyond(state, each, costs, peaks)
            found.append(_Drawn(each, float(least), excess_s, int(peaks.argmax()), beyond))
    return found


def _beyond(state: State, asked: _Asked, costs: Values, peaks: Values) -> float:
    """How much more the peak of a solution weighs than a line makes of it."""
    repeats = np.array([link.repeat for link in state.given], dtype=np.float64)
    parts = asked.peaks * repeats
    return asked.slope * float(costs[3] - parts @ peaks)


def _meeting(low: _Drawn, high: _Drawn) -> float:
    """The share at which the sums of two solutions are the same: the least sum is highest near there."""
    least, most = low.asked.share, high.asked.share
    rise = low.least - low.excess_s * least - high.least + high.excess_s * most
    return float(np.clip(rise / (high.excess_s - low.excess_s), least, most))


def _tilt(wanted: float, other: float) -> float:
    """A weight of the other objective that is nothing beside the wanted one."""
    return TILT * wanted / other if other > 0.0 else 0.0


def _spread(slopes: list[float], count: int) -> list[float]:
    """At most so many of the slopes, evenly spread over them."""
    if len(slopes) <= count:
        return slopes
    return [slopes[int(place)] for place in np.linspace(0, len(slopes) - 1, count)]
