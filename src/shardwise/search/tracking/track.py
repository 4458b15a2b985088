"""The whole frontier of a chain of choices: lines from outside, solutions from inside, and labels for what is
left between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.frontier import Chain
from shardwise.search.tracking.chained import Weighed, Weighing, solutions, weighed
from shardwise.search.tracking.lines import Found, Lines, is_open, weighted
from shardwise.search.tracking.prune import Narrowed, narrowed
from shardwise.search.tracking.simplify import simplified
from shardwise.search.tracking.solution import Solution, measure, occurrences, part_costs
from shardwise.search.tracking.steps import Order, order_of
from shardwise.search.tracking.walk import Bounds, link_labels, walked

Values = npt.NDArray[np.float64]

WEIGHTS_AT_ONCE = 16
"""Weights that one pass over a chain answers."""

ROUNDS = 24
"""Rounds of weighted sums before labels take over; each weighs between neighbours that are still open."""

TILT = 1e-7
"""Weight of the other objective where one alone is asked for, so that of equal solutions the better is
found."""


@dataclass(frozen=True, slots=True)
class Effort:
    """What it took: weighted sums asked for, choices before and after narrowing, labels kept at the end of
    links, and whether weighted sums alone settled it."""

    weights: int
    choices: int
    choices_left: int
    labels: int


@dataclass(frozen=True, slots=True, eq=False)
class Tracked:
    """The frontier of chains: `points` (n, 2), seconds ascending and bytes descending; for each the number of
    its chain and a solution of it.

    Every solution of the chains is matched within a factor 1 + epsilon by some point; with epsilon 0 the
    points are the frontier itself.
    """

    points: Values
    solutions: tuple[tuple[int, Solution], ...]
    epsilon: float
    efforts: tuple[Effort, ...]


def tracked(chains: Sequence[Chain], *, epsilon: float = 0.0) -> Tracked:
    """Track the frontier of all `chains` together, exact up to a relative `epsilon`.

    Several chains are the cases of one question: what conditioning on a choice makes of a chain that no rule
    reduces, or meshes to choose from. What one case found is held against the next.

    The epsilon is spent once, where a solution in hand is held against all that could still come: never in a
    step of the computation, so nothing accumulates.
    """
    found = Found()
    efforts = []
    for case, chain in enumerate(chains):
        tracker = _Tracker(case, chain, epsilon, found)
        tracker.weigh()
        labels = 0 if tracker.is_settled() else tracker.label()
        efforts.append(Effort(tracker.asked, _choices(chain), _choices(tracker.narrowed.chain), labels))
    return Tracked(found.points, tuple(found.solutions), epsilon, tuple(efforts))


def _choices(chain: Chain) -> int:
    return sum(sum(part.sizes) for link in chain for _, part in link.modes)


class _Tracker:
    """What is known of one chain: lines, solutions, and the choices that may still matter."""

    def __init__(self, case: int, chain: Chain, epsilon: float, found: Found) -> None:
        self.case = case
        self.given = chain
        self.epsilon = epsilon
        self.narrowed = Narrowed.of(simplified(chain))
        self.lines = Lines()
        self.found = found
        self.asked = 0
        self.peak: tuple[int, tuple[int | None, ...]] | None = None
        self.orders = _orders(self.narrowed.chain)
        self.is_exhausted = False

    def is_settled(self) -> bool:
        """Whether nothing is left that could matter."""
        return self.is_exhausted or not len(self.open_corners())

    def open_corners(self) -> Values:
        """Corners below which there may be solutions that no found one matches."""
        corners = self.found.corners(self.epsilon)
        return corners[is_open(self.lines, corners)]

    def ask(self, weights: Values, shares: Values) -> Weighed:
        """Weigh time and memory by `weights` (J, 2), hidden_s with `shares` (J) of time's weight: adds lines
        and solutions."""
        self.asked += len(weights)
        answer = self._weighed(weights, shares)
        least = answer.least
        if not np.isfinite(least).all():
            self.is_exhausted = True
            return answer
        self.lines.add(weights, least)
        fresh = dict.fromkeys(solutions(answer))
        self.take([self.narrowed.original(solution) for solution in fresh])
        return answer

    def take(self, fresh: list[Solution]) -> None:
        """Add solutions to what is found."""
        self.found.add([(measure(self.given, solution), (self.case, solution)) for solution in fresh])

    def _weighed(self, weights: Values, shares: Values) -> Weighed:
        columns = np.zeros((len(weights), 5))
        columns[:, 0] = weights[:, 0] * shares
        columns[:, 1] = weights[:, 0] * (1.0 - shares)
        columns[:, 2:] = weights[:, 1:]
        place, factors = self.peak if self.peak is not None else (None, ())
        return weighed(self.narrowed.chain, self.orders, Weighing(columns, place, factors))

    def weigh(self) -> None:
        """Weighted sums between neighbours that are still open, until none of them tells anything new."""
        ends = np.array([[1.0, 0.0], [0.0, 1.0]])
        own = self.ask(ends, np.ones(2))
        if self.is_exhausted:
            return
        (fast_s, fast_bytes), (slow_s, slow_bytes) = self.found.points[0], self.found.points[-1]
        self.peak = self._peak(self.narrowed.original(solutions(own)[0]))
        tilted = np.array([[1.0, _tilt(fast_s, fast_bytes)], [_tilt(slow_bytes, slow_s), 1.0]])
        self.ask(np.concatenate([ends, tilted]), np.ones(4))
        tried: set[tuple[float, float]] = set()
        for _ in range(ROUNDS):
            fresh = [pair for pair in self._between() if pair not in tried]
            if not fresh or self.is_exhausted:
                return
            chosen = _spread(fresh, 4 * WEIGHTS_AT_ONCE)
            tried |= set(chosen)
            for start in range(0, len(chosen), WEIGHTS_AT_ONCE):
                batch = np.array(chosen[start : start + WEIGHTS_AT_ONCE])
                answer = self.ask(np.column_stack([np.ones(len(batch)), batch[:, 0]]), batch[:, 1])
                if self.is_exhausted:
                    return
            self.narrow(answer, batch)

    def _between(self) -> list[tuple[float, float]]:
        """Memory's weight, and hidden_s's share of time's, along the line through neighbours between which a
        corner is open; by time."""
        points = self.found.points
        corners = self.found.corners(self.epsilon)
        opened = is_open(self.lines, corners)
        pairs = []
        for place in np.flatnonzero(opened[1:-1]).tolist():
            (fast_s, large), (slow_s, small) = points[place], points[place + 1]
            slope = float((slow_s - fast_s) / (large - small))
            pairs += [(slope, share) for share in self._shares(place)]
        if opened[0]:
            pairs.append((0.0, 0.0))
        return pairs

    def _shares(self, place: int) -> list[float]:
        """Which of the two times counts around a point."""
        del place
        return [1.0]

    def _peak(self, solution: Solution) -> tuple[int, tuple[int | None, ...]]:
        """Where the peak of a solution is: the link, and the factor of each of its modes
        that is largest there or, in other modes, at least."""
        places = list(occurrences(self.given))
        peaks = []
        for place, choice in zip(places, solution, strict=True):
            costs = part_costs(self.given[place].modes[choice.mode][1], choice.choices)
            peaks.append(costs[3] + costs[4])
        place = places[int(np.argmax(peaks))]
        factors = tuple(
            int(np.argmax([_least_peak(factor.costs) for factor in part.factors])) if part.factors else None
            for _, part in self.narrowed.chain[place].modes
        )
        return place, factors

    def narrow(self, answer: Weighed, batch: Values) -> None:
        """Drop the choices that lead below no open corner, by the lines of the last answer."""
        corners = self.open_corners()
        if not len(corners):
            return
        weights = np.column_stack([np.ones(len(batch)), batch[:, 0]])
        before = _choices(self.narrowed.chain)
        after = narrowed(self.narrowed, answer, weighted(weights, corners))
        if _choices(after.chain) == before:
            return
        if not all(link.modes for link in after.chain):
            self.is_exhausted = True
            return
        if self.peak is not None:
            place, factors = self.peak
            own = self.narrowed.modes[place]
            self.peak = (place, tuple(factors[own.index(mode)] for mode in after.modes[place]))
        self.narrowed = after
        self.orders = _orders(after.chain)

    def label(self) -> int:
        """Track labels between the lines and the solutions found; the number of labels of all links."""
        corners = self.open_corners()
        weights = self._tightest(corners)
        self.narrowed = Narrowed(simplified(self.narrowed.chain), self.narrowed.modes, self.narrowed.choices)
        answer = self._weighed(weights, np.ones(len(weights)))
        bounds = Bounds(answer, weighted(weights, corners))
        chain = self.narrowed.chain
        links = [link_labels(chain, self.orders, place, bounds) for place in range(len(chain))]
        if all(len(link.table) for link in links):
            end = walked(chain, links, bounds)
            self.take([self.narrowed.original(solution) for solution in end.solutions()])
        return sum(len(link.table) for link in links)

    def _tightest(self, corners: Values) -> Values:
        """Weights of the lines that pass closest to the corners: two for each, each once."""
        slack = weighted(self.lines.weights, corners) / np.maximum(self.lines.least, 1e-300) - 1.0
        near = np.unique(np.argsort(slack, axis=1)[:, :2])
        return self.lines.weights[near]


def _tilt(wanted: float, other: float) -> float:
    """A weight of the other objective that is nothing beside the wanted one."""
    return TILT * wanted / other if other > 0.0 else 0.0


def _least_peak(costs: Values) -> float:
    finite = costs.reshape(-1, costs.shape[-1])
    finite = finite[np.isfinite(finite).all(axis=1)]
    return float(finite[:, 4].min()) if len(finite) else 0.0


def _orders(chain: Chain) -> list[list[Order]]:
    return [[order_of(part) for _, part in link.modes] for link in chain]


def _spread(pairs: list[tuple[float, float]], count: int) -> list[tuple[float, float]]:
    """At most so many of the pairs, evenly spread over them."""
    if len(pairs) <= count:
        return pairs
    return [pairs[int(place)] for place in np.linspace(0, len(pairs) - 1, count)]
