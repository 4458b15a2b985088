"""The Pareto search of one or several chains: a two-phase method, exact or up to an epsilon.

Weighted sums give supported points and Lagrangian bounds; gap enumeration finds or excludes solutions below
the open nadir points. `pareto_search` is the entry point. It spends the epsilon, orders the phases, and
proves an epsilon at the end. docs/concepts/pareto-search.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from shardwise.pareto import Chain
from shardwise.search.pareto import tuning
from shardwise.search.pareto.bound_sets import IncumbentSet, is_open, weighted
from shardwise.search.pareto.bound_tightening import tighten_between, tighten_by_peak
from shardwise.search.pareto.chain_labels import ChainFrontier, eliminate_small_chain
from shardwise.search.pareto.gap_enumeration import Tolerances, enumerate_gap, relaxed_tolerances
from shardwise.search.pareto.labels import TooManyLabels
from shardwise.search.pareto.presolve import cases_of, choices_of
from shardwise.search.pareto.recombination import solution_pool
from shardwise.search.pareto.solution import Solution, measure
from shardwise.search.pareto.state import State
from shardwise.search.pareto.supported_points import (
    recombine_neighbours,
    scalarise_between,
    scalarise_extremes,
    scalarise_first,
)

Values = npt.NDArray[np.float64]

BISECTIONS = 40
"""Bisections to find the least epsilon that is proven."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Effort: weighted sums solved, choices of all variables, and labels kept. A failed enumeration counts as
    `Tuning.failed_labels`; the search of the solution pool is not counted."""

    weights: int
    choices: int
    labels: int


@dataclass(frozen=True, slots=True, eq=False)
class ParetoSearchResult:
    """Pareto frontier of chains: `points` (n, 2), seconds ascending and bytes descending, with a solution of
    each and the number of its chain.

    Every solution of the chains is matched by some point within a factor 1 + epsilon. With epsilon 0 the
    points are the frontier itself. If the search stopped early, epsilon is what is proven.
    """

    points: Values
    solutions: tuple[tuple[int, Solution], ...]
    epsilon: float
    efforts: tuple[Effort, ...]


def pareto_search(
    chains: Sequence[Chain], *, epsilon: float = 0.0, most_labels: float = inf, most_bytes: float = inf
) -> ParetoSearchResult:
    """Find the Pareto frontier of all `chains` together, exact up to a relative `epsilon`.

    Several chains are the cases of one question, such as meshes to choose from. A chain with a dominant
    segment is divided into cases itself. Incumbents are shared between all cases. Small chains are eliminated
    directly, exactly for any epsilon.

    If an enumeration exceeds its limits, the tolerance is relaxed (`relaxed_tolerances`). A case ends when
    every remaining bound fails, or when it has kept `most_labels` labels; its result is then proven to a
    larger epsilon. Limits count labels, so the answer is the same on any machine. Solutions above
    `most_bytes` are not searched; if none fits, the answer is the one of least memory.

    `Tuning.answer_share` of epsilon is for dropping points of the answer that others match. In the search,
    each solution is matched in one of two ways, which do not add up. An incumbent matches it within the rest.
    Or an enumeration finds it: `Tuning.labels_share` of the rest is for merging labels over the whole chain,
    the remainder for merging points.
    """
    search_epsilon = (1.0 + epsilon) / (1.0 + epsilon * tuning.TUNING.answer_share) - 1.0
    labels = search_epsilon * tuning.TUNING.labels_share
    points = (1.0 + search_epsilon) / (1.0 + labels) - 1.0
    found = IncumbentSet(most_bytes)
    small = _small_frontiers(chains, found)
    large = [number for number in range(len(chains)) if number not in small]
    cases = [(number, each) for number in large for each in cases_of(chains[number])]
    states = [State.of(number, chains[number], start, found, search_epsilon) for number, start in cases]
    # Incumbents are shared: all weighted sums of all cases come before any enumeration.
    tolerances = [Tolerances.of(labels, points, *scalarise_extremes(state)) for state in states]
    tolerances = [
        relaxed_tolerances(state, own, tuning.TUNING.relaxed_epsilon_if_wide) if state.is_wide else own
        for state, own in zip(states, tolerances, strict=True)
    ]
    tried = [scalarise_first(state) for state in states]
    tolerances = [_settle_extremes(state, own) for state, own in zip(states, tolerances, strict=True)]
    for _ in range(2):
        for state, slopes in zip(states, tried, strict=True):
            scalarise_between(state, slopes)
            _recombine(state)
    tolerances = [_tighten_all(state, own) for state, own in zip(states, tolerances, strict=True)]
    for number in range(len(states)):
        _enumerate_gaps(states[number], _as_relaxed(states[number], tolerances[number], states), most_labels)
    for state in states:
        _recombine(state)
    answer = found.thinned(epsilon * tuning.TUNING.answer_share if large else epsilon)
    efforts = tuple(
        _effort(chain, small.get(number), [state for state in states if state.case == number])
        for number, chain in enumerate(chains)
    )
    return ParetoSearchResult(
        answer.points, tuple(answer.solutions), _proven(states, epsilon, search_epsilon), efforts
    )


def _small_frontiers(chains: Sequence[Chain], found: IncumbentSet) -> dict[int, ChainFrontier]:
    """Eliminate the small chains directly and add their frontiers to the incumbents; by number."""
    small = {}
    for number, chain in enumerate(chains):
        chain_frontier = eliminate_small_chain(chain)
        if chain_frontier is not None:
            small[number] = chain_frontier
            found.add([(measure(chain, each), (number, each)) for each in chain_frontier.solutions()])
    return small


def _recombine(state: State) -> None:
    """Recombine incumbents if nadir points are open and an enumeration has exceeded its limits; elsewhere
    enumeration finds these solutions. Neighbours come first. If nadir points stay open, the solution pool is
    searched as a chain of its own."""
    if state.is_exhausted or not state.is_hard:
        return
    recombine_neighbours(state)
    if not len(state.open_nadir_points()):
        return
    own = (solution for case, solution in state.incumbents.solutions if case == state.case)
    pool = solution_pool(state.given, [*state.supported, *own])
    choices = choices_of(pool.chain)
    if choices == state.pool_choices or choices > tuning.TUNING.pool_choices_share * choices_of(state.given):
        return
    state.pool_choices = choices
    epsilon, most_bytes = max(state.working_epsilon, tuning.TUNING.pool_epsilon), state.incumbents.most_bytes
    found = pareto_search(
        [pool.chain], epsilon=epsilon, most_labels=tuning.TUNING.pool_labels, most_bytes=most_bytes
    )
    state.take([pool.original(solution) for _, solution in found.solutions])


def _settle_extremes(state: State, tolerances: Tolerances) -> Tolerances:
    """Settle the least time and the least memory by enumerations, if bounds alone do not. Returns the
    tolerances from then on."""
    _tighten_memory_bound(state)
    for column in (0, 1):
        is_done, step_beyond = False, tuning.TUNING.first_extreme_step
        while not is_done:
            alone = np.flatnonzero(state.lower_bounds.weights[:, 1 - column] == 0.0)
            nadir_point = state.incumbents.extremes(state.working_epsilon)[column]
            if state.is_exhausted or not is_open(state.lower_bounds, nadir_point[None])[0]:
                break
            lower_bound = int(alone[state.lower_bounds.explored_sums[alone].argmax()])
            weight, whole = float(state.lower_bounds.weights[lower_bound, column]), float(nadir_point[column])
            # At most up to the incumbent, so that the least value is known exactly; and at once if the bound
            # is 0, of which no multiple is larger.
            limit, own = (
                whole * (1.0 + state.working_epsilon),
                float(state.lower_bounds.explored_sums[lower_bound]) / weight,
            )
            if own > 0.0:
                limit = min(limit, own * (1.0 + step_beyond))
            try:
                enumerate_gap(state, lower_bound, limit * weight, tolerances)
                state.holds_from = max(state.holds_from, state.working_epsilon)
                step_beyond *= tuning.TUNING.step_growth
                is_done = limit >= whole  # merged labels may leave the nadir point open
            except TooManyLabels:
                state.labels += tuning.TUNING.failed_labels
                tolerances = relaxed_tolerances(state, tolerances)
                break  # a larger tolerance would hardly help
    return tolerances


def _tighten_memory_bound(state: State) -> None:
    """Tighten the bound of memory alone if its nadir point is open."""
    if (
        state.is_exhausted
        or not is_open(state.lower_bounds, state.incumbents.extremes(state.working_epsilon)[1:])[0]
    ):
        return
    alone = np.flatnonzero(state.lower_bounds.weights[:, 0] == 0.0)
    tighten_by_peak(state, alone[[state.lower_bounds.proven_sums[alone].argmax()]])


def _tighten_all(state: State, tolerances: Tolerances) -> Tolerances:
    """Tighten bounds if that is worthwhile. In a wide chain, where every enumeration fails, tighten again
    with the tolerance relaxed further."""
    tolerances = tighten_between(state, tolerances, _recombine)
    while state.is_wide and not state.is_exhausted and len(state.open_nadir_points()):
        before, tolerances = state.working_epsilon, relaxed_tolerances(state, tolerances)
        if state.working_epsilon == before:
            break
        tolerances = tighten_between(state, tolerances, _recombine)
    return tolerances


def _as_relaxed(state: State, tolerances: Tolerances, others: list[State]) -> Tolerances:
    """The tolerances of a case raised to the largest working epsilon of any case: the answer cannot be
    closer."""
    before, state.working_epsilon = state.working_epsilon, max(other.working_epsilon for other in others)
    return tolerances if state.working_epsilon == before else tolerances.times(state.working_epsilon / before)


def _enumerate_gaps(state: State, tolerances: Tolerances, most_labels: float) -> None:
    """Enumerate farther and farther beyond the cheapest bounds until no nadir point is open, every bound has
    failed even with relaxed tolerances, or `most_labels` are kept."""
    is_near = state.is_tightened and not state.is_relaxed
    start, few_labels = (
        (tuning.TUNING.tightened_first_step, tuning.TUNING.tightened_few_labels_stored)
        if is_near
        else (tuning.TUNING.first_step, tuning.TUNING.few_labels_stored)
    )
    step_beyond: dict[int, float] = {}
    usual_step = 0.0  # relative distance that enumerations needed before another bound was closer
    failed: set[int] = set()
    while not state.is_exhausted and state.labels < most_labels:
        nadir_points = state.open_nadir_points()
        nadir_points = nadir_points[
            np.isfinite(nadir_points).all(axis=1)
        ]  # the extremes are settled, or never will be
        lower_bound, is_target = _next_gap(state, nadir_points, failed)
        if lower_bound is None:
            return
        weights, least = (
            state.lower_bounds.weights[lower_bound],
            float(state.lower_bounds.proven_sums[lower_bound]),
        )
        beyond_bound = nadir_points @ weights - least
        distances = beyond_bound[is_target]  # a second matrix product could round differently
        if lower_bound not in step_beyond:
            first = max(state.working_epsilon * start, usual_step)
            exact_first = tuning.TUNING.exact_first_step * float(distances.max())
            step_beyond[lower_bound] = first * least or exact_first
        farthest = tuning.TUNING.nadir_margin * float(distances.max())
        labels, beyond = state.labels, min(step_beyond[lower_bound], farthest)
        near = nadir_points[beyond_bound <= max(tuning.TUNING.box_ratio * beyond, float(distances.min()))]
        try:
            enumerate_gap(state, lower_bound, least + beyond, tolerances, near.max(axis=0))
        except TooManyLabels:
            state.labels += tuning.TUNING.failed_labels
            recombine_neighbours(state)  # before the relaxed tolerance matches the solutions between
            before, tolerances = state.working_epsilon, relaxed_tolerances(state, tolerances)
            if state.working_epsilon == before:
                failed.add(lower_bound)
                _recombine(state)
            else:
                tolerances = tighten_between(state, tolerances, _recombine)
            continue
        state.holds_from = max(state.holds_from, state.working_epsilon)
        usual_step = max(usual_step, beyond / least) if least > 0.0 else usual_step
        is_small = state.labels - labels < few_labels
        step_beyond[lower_bound] *= tuning.TUNING.small_step_growth if is_small else tuning.TUNING.step_growth


def _next_gap(
    state: State, nadir_points: Values, without: set[int]
) -> tuple[int | None, npt.NDArray[np.bool_]]:
    """The bound to enumerate at next, and which of the nadir points are closest to it; None if there is no
    bound or no nadir point.

    The effort of an enumeration grows with the extra time and the extra memory that it allows, each relative
    to the total. Their product is the square of the value compared here.
    """
    # From the bound itself, not from explored sums: an enumeration covers the explored part again.
    beyond = weighted(state.lower_bounds.weights, nadir_points) - state.lower_bounds.proven_sums
    parts = np.sqrt((state.lower_bounds.weights[None] * nadir_points[:, None]).prod(axis=2))
    relative = np.full(beyond.shape, np.inf)
    np.divide(beyond, parts, out=relative, where=parts > 0.0)
    relative[:, list(without)] = np.inf
    nearest = relative.argmin(axis=1)
    least = relative.min(axis=1)
    if not np.isfinite(least).any():
        return None, np.zeros(len(nadir_points), dtype=bool)
    lower_bound = int(nearest[least.argmin()])
    return lower_bound, nearest == lower_bound


def _proven(states: list[State], epsilon: float, search_epsilon: float) -> float:
    """The least epsilon for which no nadir point is open: the requested one, unless enumerations stopped
    early or tolerances were relaxed."""

    def is_proven(search_epsilon: float) -> bool:
        return not any(
            is_open(state.lower_bounds, state.incumbents.nadir_points(search_epsilon)).any()
            for state in states if not state.is_exhausted
        )  # fmt: skip

    low = max([search_epsilon, *(state.holds_from for state in states)])
    high = max([low, *(state.working_epsilon for state in states)])
    while not is_proven(high):
        low, high = high, 2.0 * high + 1.0
    if is_proven(low):
        high = low
    for _ in range(BISECTIONS if high > low else 0):
        middle = (low + high) / 2.0
        low, high = (low, middle) if is_proven(middle) else (middle, high)
    if high == search_epsilon:
        return epsilon
    return (1.0 + high) * (1.0 + epsilon * tuning.TUNING.answer_share) - 1.0


def _effort(chain: Chain, chain_frontier: ChainFrontier | None, states: list[State]) -> Effort:
    """The effort of a chain, over direct elimination and all of its cases."""
    labels = (
        0
        if chain_frontier is None
        else sum(len(segment.table) for segment in chain_frontier.segments) + len(chain_frontier.end)
    )
    labels += sum(state.labels for state in states)
    return Effort(sum(state.sums_solved for state in states), choices_of(chain), labels)
