"""The whole frontier of a chain of choices: lines from outside, solutions from inside, and labels for what is
left between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.frontier import Chain
from shardwise.search.tracking.chained import Weighed, Weighing, solutions, weighed
from shardwise.search.tracking.found import Found
from shardwise.search.tracking.lines import Lines, is_open, weighted
from shardwise.search.tracking.prune import Narrowed, narrowed
from shardwise.search.tracking.simplify import simplified
from shardwise.search.tracking.solution import Solution, measure, occurrences, part_costs, solution_costs
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


THINNED = 0.25
"""Of an epsilon, the part for leaving out points of the answer."""


@dataclass(frozen=True, slots=True)
class Effort:
    """What it took: weighted sums asked for, choices of all variables, and labels kept of links and walks."""

    weights: int
    choices: int
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

    How the epsilon is shared: `THINNED` of it for leaving out points of the answer that others match, the rest
    for the tracking. There each solution is matched in one of two ways, which do not add up: a solution in
    hand is held against all that lines do not forbid, up to that rest; and within a look, what labels leave
    out for like ones adds up over the whole chain to no more than that rest of the least time and memory.
    """
    found = Found()
    thinning = epsilon * THINNED
    tracking = (1.0 + epsilon) / (1.0 + thinning) - 1.0
    efforts = []
    for case, chain in enumerate(chains):
        tracker = _Tracker(case, chain, tracking, found)
        tracker.weigh()
        tracker.settle()
        efforts.append(Effort(tracker.asked, _choices(chain), tracker.labels))
    thinned = found.thinned(thinning)
    return Tracked(thinned.points, tuple(thinned.solutions), epsilon, tuple(efforts))


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
        self.labels = 0
        self.peak: tuple[int, tuple[int | None, ...]] | None = None
        self.is_exhausted = False

    def open_corners(self) -> Values:
        """Corners below which there may be solutions that no found one matches."""
        corners = self.found.corners(self.epsilon)
        return corners[is_open(self.lines, corners)]

    def ask(self, weights: Values, shares: Values) -> Weighed:
        """Weigh time and memory by `weights` (J, 2), hidden_s with `shares` (J) of time's weight: adds lines
        and solutions."""
        self.asked += len(weights)
        answer = self._weighed(self.narrowed, weights, shares)
        least = answer.least
        if not np.isfinite(least).all():
            self.is_exhausted = True
            return answer
        self.lines.add(weights, shares, least)
        self.take([self.narrowed.original(solution) for solution in dict.fromkeys(solutions(answer))])
        return answer

    def draw(self, slopes: list[float]) -> None:
        """Lines of these weights of memory beside a second's weight of 1, each with the share of hidden_s
        that makes it highest: all where hidden_s is the larger of the two times in the least solution, none
        where exposed_s is, and between them where that of all has more exposed_s and that of none more
        hidden_s."""
        below = self._drawn([(slope, 1.0) for slope in slopes])
        unsettled = [(slope, found) for slope, found in zip(slopes, below, strict=True) if found.excess_s < 0.0]
        above = self._drawn([(slope, 0.0) for slope, _ in unsettled])
        pairs = [
            (slope, none, whole)
            for (slope, whole), none in zip(unsettled, above, strict=True)
            if none.excess_s > 0.0
        ]
        for _ in range(SHARES):
            asked = [(slope, _meeting(none, whole)) for slope, none, whole in pairs]
            fresh = self._drawn(asked)
            pairs = [
                (slope, found, whole) if found.excess_s > 0.0 else (slope, none, found)
                for (slope, none, whole), found in zip(pairs, fresh, strict=True)
            ]

    def _drawn(self, asked: list[tuple[float, float]]) -> list[_Drawn]:
        """Draw lines of weights of memory and shares of hidden_s."""
        found: list[_Drawn] = []
        for start in range(0, len(asked), WEIGHTS_AT_ONCE):
            slopes, shares = np.array(asked[start : start + WEIGHTS_AT_ONCE]).T
            answer = self.ask(np.column_stack([np.ones(len(slopes)), slopes]), shares)
            if self.is_exhausted:
                return []
            for share, least, solution in zip(shares, answer.least, solutions(answer), strict=True):
                costs = solution_costs(self.given, self.narrowed.original(solution))
                found.append(_Drawn(float(share), float(least), float(costs[0] - costs[1])))
        return found

    def take(self, fresh: list[Solution]) -> None:
        """Add solutions to what is found."""
        self.found.add([(measure(self.given, solution), (self.case, solution)) for solution in fresh])

    def _weighed(self, narrowed: Narrowed, weights: Values, shares: Values) -> Weighed:
        decided = _decided(narrowed.chain)
        shares = np.full(len(weights), decided) if decided is not None else shares
        columns = np.zeros((len(weights), 5))
        columns[:, 0] = weights[:, 0] * shares
        columns[:, 1] = weights[:, 0] * (1.0 - shares)
        columns[:, 2:] = weights[:, 1:]
        place, factors = self.peak if self.peak is not None else (None, ())
        if place is not None:
            factors = tuple(factors[mode] for mode in narrowed.modes[place])
        chain = narrowed.chain
        return weighed(chain, _orders(chain), Weighing(columns, place, factors))

    def weigh(self) -> None:
        """Weighted sums between neighbours that are still open, until none of them tells anything new."""
        ends = np.array([[1.0, 0.0], [0.0, 1.0]])
        own = self.ask(ends, np.ones(2))
        if self.is_exhausted:
            return
        (fast_s, fast_bytes), (slow_s, slow_bytes) = self.found.points[0], self.found.points[-1]
        self.peak = self._peak(self.narrowed.original(solutions(own)[0]))
        tilted = np.array([[1.0, _tilt(fast_s, fast_bytes)], [_tilt(slow_bytes, slow_s), 1.0]])
        first = self.ask(np.concatenate([ends, tilted]), np.ones(4))
        self.least = (float(first.least[0]), float(first.least[1]))
        tried: set[float] = set()
        for _ in range(ROUNDS):
            fresh = [slope for slope in self._between() if slope not in tried]
            if not fresh or self.is_exhausted:
                return
            chosen = _spread(fresh, 4 * WEIGHTS_AT_ONCE)
            tried |= set(chosen)
            self.draw(chosen)

    def _between(self) -> list[float]:
        """Memory's weight along the line through neighbours between which a corner is open; by time."""
        points = self.found.points
        opened = is_open(self.lines, self.found.corners(self.epsilon))
        slopes = [0.0] if opened[0] else []
        for place in np.flatnonzero(opened[1:-1]).tolist():
            (fast_s, large), (slow_s, small) = points[place], points[place + 1]
            slopes.append(float((slow_s - fast_s) / (large - small)))
        return slopes

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

    def settle(self) -> None:
        """Find everything near the lines that are closest to what is open, further and further away from
        them, until nothing is open."""
        reach: dict[int, float] = {}
        while not self.is_exhausted and len(corners := self.open_corners()):
            sums = weighted(self.lines.weights, corners)
            beyond = sums / np.maximum(self.lines.least, 1e-300) - 1.0
            nearest = beyond.argmin(axis=1)
            line = int(np.bincount(nearest, minlength=len(self.lines.least)).argmax())
            wanted = beyond[nearest == line, line]
            limit = reach.get(line, self.epsilon * FIRST_REACH or float(wanted.max()) * FIRST_REACH)
            reach[line] = limit * FURTHER
            self.look(line, float(self.lines.least[line]) * (1.0 + min(limit, float(wanted.max()))))

    def look(self, line: int, limit: float) -> None:
        """Find all solutions whose sum, weighted as in a line, is below the limit, up to the epsilon.

        Up to the epsilon of the least time and the least memory, that is; what stands for a solution may
        weigh so much more than it.
        """
        weights, shares = self.lines.weights[line : line + 1], self.lines.shares[line : line + 1]
        least_s, least_bytes = self.least
        loss = self.epsilon * np.array([least_s, least_s, 0.75 * least_bytes, 0.25 * least_bytes])
        slack = self.epsilon * float(weights[0] @ [least_s, least_bytes])
        near = self.narrowed
        answer = self._weighed(near, weights, shares)
        near = narrowed(near, answer, np.array([[limit + slack]]))
        if all(link.modes for link in near.chain):
            near = Narrowed(simplified(near.chain), near.modes, near.choices)
            chain, orders = near.chain, _orders(near.chain)
            answer = self._weighed(near, weights, shares)
            bounds = Bounds(answer, limit + slack, loss)
            links = [link_labels(chain, orders, place, bounds) for place in range(len(chain))]
            if all(len(link.table) for link in links):
                end = walked(chain, links, bounds)
                self.labels += sum(len(table) for table in (*(l.table for l in links), end.end))
                self.take([near.original(solution) for solution in end.solutions()])
                if DEBUG:
                    print("  look", line, self.lines.weights[line], limit/self.lines.least[line]-1, "choices", _choices(near.chain), "labels", [len(l.table) for l in links], len(end.end), "found", len(self.found.points), "open", len(self.open_corners()))
        self.lines.advance(line, limit)

DEBUG = False
FIRST_REACH = 1.0
FURTHER = 2.0
SHARES = 3


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A line: the share of hidden_s, the least sum, and how much more hidden_s than exposed_s the solution of
    it has."""

    share: float
    least: float
    excess_s: float


def _meeting(none: _Drawn, whole: _Drawn) -> float:
    """The share at which the sums of two solutions are the same: the least sum is highest near there."""
    share = (whole.least - whole.excess_s * whole.share - none.least + none.excess_s * none.share) / (
        none.excess_s - whole.excess_s
    )
    return float(np.clip(share, none.share, whole.share))


def _decided(chain: Chain) -> float | None:
    """The share of hidden_s where the other time is nothing whatever is chosen."""
    for column, share in ((1, 1.0), (0, 0.0)):
        if all(
            not np.where(np.isfinite(factor.costs[..., column]), factor.costs[..., column], 0.0).any()
            for link in chain for _, part in link.modes for factor in part.factors
        ):  # fmt: skip
            return share
    return None


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
