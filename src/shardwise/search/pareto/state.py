"""State of the Pareto search of one chain, or of one case of it: bounds, incumbents, presolved chain,
effort."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from shardwise.pareto import Chain, FactorGraph
from shardwise.search.pareto import tuning
from shardwise.search.pareto.bound_sets import IncumbentSet, LagrangianBounds, is_open, weighted
from shardwise.search.pareto.elimination_order import EliminationOrder, order_of
from shardwise.search.pareto.presolve import (
    PresolvedChain,
    presolved,
    separator_choices,
    without_idle_columns,
)
from shardwise.search.pareto.solution import (  # fmt: skip
    Measure,
    SegmentChoice,
    Solution,
    folded,
    joined_all,
    measures,
    occurrences,
    part_costs,
)
from shardwise.search.pareto.weighted_sums import ChainSums, ChainWeights, PeakShares, chain_sums, solutions

Values = npt.NDArray[np.float64]


ModePeakShares = tuple[tuple[PeakShares, ...], ...]
"""Factors at which each mode of each segment weighs the peak."""


@dataclass(slots=True, eq=False)
class State:
    """A chain (number `case` of a question) or one case of it, with its bounds and the incumbents of all
    cases.

    - `working_epsilon`, `requested_epsilon`: incumbents match others within this factor 1 + epsilon, now and
      as requested.
    - `presolved`: the chain without columns that never decide and choices that cannot be needed.
    - `peak_shares`: the factor at which each mode weighs the largest temporary. `orders`: elimination orders.
    - `is_exhausted`: no solution is left to find.
    - `is_tightened`: bounds that weigh a mean of both times were far below all solutions and were raised.
    - `is_hard`: an enumeration has exceeded its limits.
    - `supported`: solutions of weighted sums. `pool_choices`: number of choices when the pool was last
      searched.
    - `holds_from`: the proofs hold for this epsilon and larger ones; it is the working epsilon at which
      choices or labels were last dropped.
    - `sums_solved`, `labels`: effort.
    """

    case: int
    given: Chain
    incumbents: IncumbentSet
    working_epsilon: float
    requested_epsilon: float
    presolved: PresolvedChain
    peak_shares: ModePeakShares
    orders: list[list[EliminationOrder]]
    lower_bounds: LagrangianBounds = field(default_factory=LagrangianBounds)
    is_exhausted: bool = False
    is_tightened: bool = False
    is_hard: bool = False
    supported: dict[Solution, None] = field(default_factory=dict)
    pool_choices: int = 0
    holds_from: float = 0.0
    sums_solved: int = 0
    labels: int = 0
    _costs: dict[tuple[int, SegmentChoice], Values] = field(default_factory=dict)

    @staticmethod
    def of(
        case: int, chain: Chain, start: PresolvedChain, found: IncumbentSet, working_epsilon: float
    ) -> State:
        """The initial state of a chain, or of the case `start` of it."""
        presolved = replace(start, chain=without_idle_columns(start.chain))
        peak_shares = []
        for segment, modes, given in zip(presolved.chain, presolved.modes, chain, strict=True):
            own = {mode: _peak_shares(part) for mode, (_, part) in zip(modes, segment.modes, strict=True)}
            peak_shares.append(tuple(own.get(mode, ()) for mode in range(len(given.modes))))
        return State(
            case,
            chain,
            found,
            working_epsilon,
            working_epsilon,
            presolved,
            tuple(peak_shares),
            orders_of(chain),
        )

    @property
    def is_relaxed(self) -> bool:
        """Whether incumbents match others less closely than requested."""
        return self.working_epsilon > self.requested_epsilon

    @property
    def is_wide(self) -> bool:
        """Whether any enumeration is expected to exceed its limits: some separator has more choices than
        labels are allowed."""
        return separator_choices(self.given) > tuning.TUNING.wide_separator_choices

    def open_nadir_points(self) -> Values:
        """Nadir points below which there may be solutions that no incumbent matches."""
        nadir_points = self.incumbents.nadir_points(self.working_epsilon)
        return nadir_points[is_open(self.lower_bounds, nadir_points)]

    def presolve(self) -> None:
        """Drop the choices whose least total is above every open nadir point (reduced-cost fixing).

        Incumbents match every solution that is dropped. Bounds solved from now on hold for the remaining
        solutions.
        """
        nadir_points = self.open_nadir_points()
        lower_bounds = self.lower_bounds.closest(nadir_points, tuning.TUNING.fixing_bounds)
        if not len(lower_bounds):
            return
        weights = self.lower_bounds.weights[lower_bounds]
        answer = self.chain_sums(
            self.presolved,
            weights,
            self.lower_bounds.shares[lower_bounds],
            np.array(self.lower_bounds.peaks)[lower_bounds],
        )
        self.presolved = presolved(self.presolved, answer, weighted(weights, nadir_points))
        self.holds_from = max(self.holds_from, self.working_epsilon)
        self.is_exhausted = not all(segment.modes for segment in self.presolved.chain)

    def take_supported(self, answer: ChainSums) -> list[Solution]:
        """Take the solutions of weighted sums of the presolved chain; returns one for each weight, in numbers
        of the given chain."""
        found = self.presolved.originals(solutions(answer))
        self.supported |= dict.fromkeys(found)
        self.take(list(dict.fromkeys(found)))
        return found

    def take(self, fresh: list[Solution]) -> None:
        """Add solutions of the given chain to the incumbents."""
        self.incumbents.add([(self._measured(solution), (self.case, solution)) for solution in fresh])

    def _measured(self, solution: Solution) -> Measure:
        """Seconds and bytes of a solution; equal choices are evaluated once."""
        time_s, memory_bytes = measures(self.costs(solution))
        return float(time_s), float(memory_bytes)

    def costs(self, solution: Solution) -> Values:
        """Folded columns of a solution."""
        return joined_all(self._costs_of_segments(solution))

    def _costs_of_segments(self, solution: Solution) -> Values:
        """Folded columns of each occurrence of a segment, (occurrences, 4)."""
        found = []
        for key in zip(occurrences(self.given), solution, strict=True):
            own = self._costs.get(key)
            if own is None:
                place, choice = key
                part = self.given[place].modes[choice.mode][1]
                own = self._costs[key] = folded(part_costs(part, choice.choices))
            found.append(own)
        return np.array(found).reshape(-1, 4)

    def chain_sums(
        self, presolved: PresolvedChain, weights: Values, shares: Values, peaks: Values
    ) -> ChainSums:
        """Weighted sums of a presolved chain under weights (J, 2) of time and memory. hidden_s has the shares
        `shares` (J) of the weight of time; `peaks` (J, segments) are the multipliers of the peaks of each
        occurrence."""
        decided = presolved.decided_share
        shares = np.full(len(weights), decided) if decided is not None else shares
        columns = np.zeros((len(weights), 5))
        columns[:, 0] = weights[:, 0] * shares
        columns[:, 1] = weights[:, 0] * (1.0 - shares)
        columns[:, 2:] = weights[:, 1:]
        return self.summed(presolved, columns, peaks)

    def summed(
        self,
        presolved: PresolvedChain,
        columns: Values,
        peaks: Values,
        peak_shares: ModePeakShares | None = None,
    ) -> ChainSums:
        """Weighted sums of a presolved chain under weights (J, 5) of the columns. The peak is weighed at
        `peak_shares`, by default those of the state."""
        own = tuple(
            tuple(own[mode] for mode in modes)
            for own, modes in zip(
                self.peak_shares if peak_shares is None else peak_shares, presolved.modes, strict=True
            )
        )
        return chain_sums(presolved.chain, self.orders_in(presolved), ChainWeights(columns, peaks.T, own))

    def orders_in(self, presolved: PresolvedChain) -> list[list[EliminationOrder]]:
        """The elimination order of each remaining mode of each segment."""
        return [
            [own[mode] for mode in modes] for own, modes in zip(self.orders, presolved.modes, strict=True)
        ]

    def largest_temporary(self, place: int, choice: SegmentChoice) -> int | None:
        """The factor at which a segment with this choice has its largest temporary."""
        part = self.given[place].modes[choice.mode][1]
        peaks = [
            factor.costs[(*(choice.choices[variable] for variable in factor.variables), -1)]
            for factor in part.factors
        ]
        return int(np.argmax(peaks)) if peaks else None

    def peaks_of(self, solution: Solution) -> Values:
        """The mean peak of the occurrences of each segment in a solution, (segments)."""
        repeats = np.array([segment.repeat for segment in self.given])
        places = np.repeat(np.arange(len(repeats)), repeats)
        peaks = self._costs_of_segments(solution)[:, 3]
        return np.asarray(np.bincount(places, peaks / repeats[places], len(repeats)), dtype=np.float64)


def orders_of(chain: Chain) -> list[list[EliminationOrder]]:
    """The elimination order of each mode of each segment."""
    return [[order_of(part) for _, part in segment.modes] for segment in chain]


def _peak_shares(part: FactorGraph) -> PeakShares:
    """Weigh the peak at the factor whose least peak is largest."""
    if not part.factors:
        return ()
    return ((int(np.argmax([_least_peak(factor.costs) for factor in part.factors])), 1.0),)


def _least_peak(costs: Values) -> float:
    finite = costs.reshape(-1, costs.shape[-1])
    finite = finite[np.isfinite(finite).all(axis=1)]
    return float(finite[:, 4].min()) if len(finite) else 0.0
