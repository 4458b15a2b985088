"""What is known of one chain while its frontier is tracked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from shardwise.frontier import Chain, Part
from shardwise.search.tracking.chained import Weighed, Weighing, solutions, weighed
from shardwise.search.tracking.flat import Peaked
from shardwise.search.tracking.found import Found
from shardwise.search.tracking.labels import CLOSE_LABELS
from shardwise.search.tracking.lines import Lines, is_open, weighted
from shardwise.search.tracking.prune import Narrowed, cells_of, narrowed
from shardwise.search.tracking.simplify import simplified
from shardwise.search.tracking.solution import (
    Choice,
    Measure,
    Solution,
    folded,
    joined_all,
    measures,
    occurrences,
    part_costs,
)  # fmt: skip
from shardwise.search.tracking.steps import Order, order_of

Values = npt.NDArray[np.float64]


PeakedModes = tuple[tuple[Peaked, ...], ...]
"""Where each mode of each link weighs the peak."""

MANY_CELLS = CLOSE_LABELS
"""Choices of all that others see of a link, together: with more even one label each is too many."""

NARROWING = 5
"""Lines that tell which choices may matter."""


@dataclass(slots=True, eq=False)
class State:
    """A chain, number `case` of a question, or a case of it; lines that bound it, the solutions `found` for
    all cases, and up to which factor 1 + `matched` one of these stands for another, where 1 + `wanted` was
    asked for.

    `narrowed` is the chain without columns that decide nothing and choices that lead nowhere. `peaked` is
    where each mode of each link weighs the largest temporary, at one factor; `orders` how each is
    eliminated. `is_raised` where lines of a mean of both times were far below all solutions, and were raised
    to these; `is_hard` where a look was too much. `drawn` are all solutions that were on lines; `pooled` is
    how many choices there were when pieces of solutions were put together last. What lines and looks tell
    holds where at least `holds_from` may be lost: that much was when choices were left out, and looks went
    through labels, last. `asked` and `labels` count
    the effort.
    """

    case: int
    given: Chain
    found: Found
    matched: float
    wanted: float
    narrowed: Narrowed
    peaked: PeakedModes
    orders: list[list[Order]]
    lines: Lines = field(default_factory=Lines)
    is_exhausted: bool = False
    is_raised: bool = False
    is_hard: bool = False
    drawn: dict[Solution, None] = field(default_factory=dict)
    pooled: int = 0
    holds_from: float = 0.0
    asked: int = 0
    labels: int = 0
    _costs: dict[tuple[int, Choice], Values] = field(default_factory=dict)

    @staticmethod
    def of(case: int, chain: Chain, start: Narrowed, found: Found, matched: float) -> State:
        """Nothing known yet of a chain, or of so much of it as `start` has."""
        narrowed = replace(start, chain=simplified(start.chain))
        peaked = []
        for link, modes, given in zip(narrowed.chain, narrowed.modes, chain, strict=True):
            own = {mode: _peaked(part) for mode, (_, part) in zip(modes, link.modes, strict=True)}
            peaked.append(tuple(own.get(mode, ()) for mode in range(len(given.modes))))
        return State(case, chain, found, matched, matched, narrowed, tuple(peaked), orders_of(chain))

    @property
    def is_loose(self) -> bool:
        """Whether solutions match others less closely than was asked for."""
        return self.matched > self.wanted

    @property
    def is_wide(self) -> bool:
        """Whether looks are taken to be too much before any is: all that others see of some link has more
        choices together than labels are allowed to be there."""
        return cells_of(self.given) > MANY_CELLS

    def open_corners(self) -> Values:
        """Corners below which there may be solutions that no found one matches."""
        corners = self.found.corners(self.matched)
        return corners[is_open(self.lines, corners)]

    def narrow(self) -> None:
        """Leave out the choices that lead below no open corner.

        No solution that has one of them is missed: what is found matches it. Lines drawn from now on are
        below all others.
        """
        corners = self.open_corners()
        lines = self.lines.closest(corners, NARROWING)
        if not len(lines):
            return
        weights = self.lines.weights[lines]
        answer = self.weighed(
            self.narrowed, weights, self.lines.shares[lines], np.array(self.lines.peaks)[lines]
        )
        self.narrowed = narrowed(self.narrowed, answer, weighted(weights, corners))
        self.holds_from = max(self.holds_from, self.matched)
        self.is_exhausted = not all(link.modes for link in self.narrowed.chain)

    def take_drawn(self, answer: Weighed) -> list[Solution]:
        """Take in the solutions on lines, of the narrowed chain under their weights; the one of each weight,
        in numbers of the given chain."""
        found = self.narrowed.originals(solutions(answer))
        self.drawn |= dict.fromkeys(found)
        self.take(list(dict.fromkeys(found)))
        return found

    def take(self, fresh: list[Solution]) -> None:
        """Add solutions of the given chain to what is found."""
        self.found.add([(self._measured(solution), (self.case, solution)) for solution in fresh])

    def _measured(self, solution: Solution) -> Measure:
        """Seconds and bytes of a solution; links that chose alike are priced once."""
        time_s, memory_bytes = measures(self.costs(solution))
        return float(time_s), float(memory_bytes)

    def costs(self, solution: Solution) -> Values:
        """Folded columns of a solution."""
        return joined_all(self._costs_of_links(solution))

    def _costs_of_links(self, solution: Solution) -> Values:
        """Folded columns of each occurrence of a link, (occurrences, 4)."""
        found = []
        for key in zip(occurrences(self.given), solution, strict=True):
            own = self._costs.get(key)
            if own is None:
                place, choice = key
                part = self.given[place].modes[choice.mode][1]
                own = self._costs[key] = folded(part_costs(part, choice.choices))
            found.append(own)
        return np.array(found).reshape(-1, 4)

    def weighed(self, narrowed: Narrowed, weights: Values, shares: Values, peaks: Values) -> Weighed:
        """A chain of fewer choices under weights (J, 2) of time and memory; hidden_s has `shares` (J) of
        time's, the occurrences of links `peaks` (J, links) of the peak's."""
        decided = narrowed.decided_share
        shares = np.full(len(weights), decided) if decided is not None else shares
        columns = np.zeros((len(weights), 5))
        columns[:, 0] = weights[:, 0] * shares
        columns[:, 1] = weights[:, 0] * (1.0 - shares)
        columns[:, 2:] = weights[:, 1:]
        return self.summed(narrowed, columns, peaks)

    def summed(
        self, narrowed: Narrowed, columns: Values, peaks: Values, peaked: PeakedModes | None = None
    ) -> Weighed:
        """A chain of fewer choices under weights (J, 5) of the columns; the peak's where the case weighs it,
        or where it is `peaked`."""
        own = tuple(
            tuple(own[mode] for mode in modes)
            for own, modes in zip(self.peaked if peaked is None else peaked, narrowed.modes, strict=True)
        )
        return weighed(narrowed.chain, self.orders_in(narrowed), Weighing(columns, peaks.T, own))

    def orders_in(self, narrowed: Narrowed) -> list[list[Order]]:
        """The order of elimination of each mode that is left of each link."""
        return [[own[mode] for mode in modes] for own, modes in zip(self.orders, narrowed.modes, strict=True)]

    def largest_temporary(self, place: int, choice: Choice) -> int | None:
        """The factor at which a link that chose so has its largest temporary."""
        part = self.given[place].modes[choice.mode][1]
        peaks = [
            factor.costs[(*(choice.choices[variable] for variable in factor.variables), -1)]
            for factor in part.factors
        ]
        return int(np.argmax(peaks)) if peaks else None

    def peaks_of(self, solution: Solution) -> Values:
        """The mean of the peaks that a solution has in the occurrences of each link."""
        repeats = np.array([link.repeat for link in self.given])
        places = np.repeat(np.arange(len(repeats)), repeats)
        peaks = self._costs_of_links(solution)[:, 3]
        return np.asarray(np.bincount(places, peaks / repeats[places], len(repeats)), dtype=np.float64)


def orders_of(chain: Chain) -> list[list[Order]]:
    """The order of elimination of each mode of each link."""
    return [[order_of(part) for _, part in link.modes] for link in chain]


def _peaked(part: Part) -> Peaked:
    """At the factor whose least peak is largest."""
    if not part.factors:
        return ()
    return ((int(np.argmax([_least_peak(factor.costs) for factor in part.factors])), 1.0),)


def _least_peak(costs: Values) -> float:
    finite = costs.reshape(-1, costs.shape[-1])
    finite = finite[np.isfinite(finite).all(axis=1)]
    return float(finite[:, 4].min()) if len(finite) else 0.0
