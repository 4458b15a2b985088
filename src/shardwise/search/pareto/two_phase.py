"""The whole frontier of chains of choices: lines from outside, solutions from inside, and looks at what is
left between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from shardwise.pareto import Chain
from shardwise.search.pareto.bound_sets import IncumbentSet, is_open, weighted
from shardwise.search.pareto.bound_tightening import tighten_between, tighten_by_peak
from shardwise.search.pareto.chain_labels import ChainFrontier, eliminate_small_chain
from shardwise.search.pareto.gap_enumeration import (
    RELAXED_EPSILON_IF_WIDE,
    Tolerances,
    enumerate_gap,
    relaxed_tolerances,
)
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

ANSWER_SHARE = 0.1
"""Of an epsilon, the part for leaving out points of the answer."""

LABELS_SHARE = 0.85
"""Of what is left, the part for labels that stand for like ones; the rest is for points of a look that do."""

FIRST_STEP, TIGHTENED_FIRST_STEP = 0.5, 2.0
"""How far beyond its line a first look goes, in epsilons; and where lines were raised to what there is."""

FIRST_EXTREME_STEP = 0.005
"""How far beyond the line of one objective alone the first look for the least of it goes."""

EXACT_FIRST_STEP = 1.0 / 16.0
"""The same where there is no epsilon, of the way to what is open."""

FEW_LABELS_STORED, TIGHTENED_FEW_LABELS_STORED = 1500, 500
"""A look that kept fewer labels than that was a small one."""

NADIR_MARGIN = 1.15
"""How far looks go at most, of the way to the furthest corner that is open: what they find opens others."""

FAILED_LABELS = 40_000
"""Labels that a look counts for which would keep too many."""

POOL_EPSILON, POOL_LABELS = 0.001, 40_000
"""How closely what can be made of pieces of solutions is tracked, at most, and how many labels that keeps."""

POOL_CHOICES_SHARE = 0.5
"""Pieces are put together where there are so many of a chain's choices among them, at most."""

BISECTIONS = 40
"""Steps to the least epsilon that is proven."""


STEP_GROWTH, SMALL_STEP_GROWTH = 2.0, 3.0
"""How many times as far the next look at a line goes as this one; and where this was a small one."""

BOX_RATIO = 10.0
"""A look keeps to a box around the corners that are at most so many times as far beyond its line as it goes:
what it finds there may close them."""


@dataclass(frozen=True, slots=True)
class Effort:
    """What it took: weighted sums asked for, choices of all variables, and labels kept of links and walks; a
    look that was too much counts as `FAILED_LABELS`. What is put together of pieces is not counted."""

    weights: int
    choices: int
    labels: int


@dataclass(frozen=True, slots=True, eq=False)
class ParetoSearchResult:
    """The frontier of chains: `points` (n, 2), seconds ascending and bytes descending; for each the number of
    its chain and a solution of it.

    Every solution of the chains is matched within a factor 1 + epsilon by some point; with epsilon 0 the
    points are the frontier itself. Where the search was stopped, epsilon is what is proven by then.
    """

    points: Values
    solutions: tuple[tuple[int, Solution], ...]
    epsilon: float
    efforts: tuple[Effort, ...]


def pareto_search(
    chains: Sequence[Chain], *, epsilon: float = 0.0, most_labels: float = inf, most_bytes: float = inf
) -> ParetoSearchResult:
    """Track the frontier of all `chains` together, exact up to a relative `epsilon`.

    Several chains are the cases of one question, such as meshes to choose from; a chain of which one link is
    most falls into cases itself. What one case found is held against the others. Small chains are eliminated
    at once, without lines and looks, and exact whatever the epsilon. Where a look would go through too many
    labels, it and those after it lose more (`relaxed_tolerances`); once all that are left would even so, or
    looks have kept `most_labels` for a case, what is proven so far is the answer: the same on any machine.
    Only what takes at most `most_bytes` is tracked: where nothing fits, the smallest is the answer.

    How the epsilon is shared: `ANSWER_SHARE` of it for leaving out points of the answer that others match,
    the rest for tracking. There each solution is matched in one of two ways, which do not add up: a solution
    in hand is held against all that lines do not forbid, up to that rest; or a look finds it, up to
    `LABELS_SHARE` of the rest by what labels stand for others over the whole chain, and what remains by
    points that stand for others.
    """
    search_epsilon = (1.0 + epsilon) / (1.0 + epsilon * ANSWER_SHARE) - 1.0
    labels = search_epsilon * LABELS_SHARE
    points = (1.0 + search_epsilon) / (1.0 + labels) - 1.0
    found = IncumbentSet(most_bytes)
    small = _small_frontiers(chains, found)
    large = [number for number in range(len(chains)) if number not in small]
    cases = [(number, each) for number in large for each in cases_of(chains[number])]
    states = [State.of(number, chains[number], start, found, search_epsilon) for number, start in cases]
    # What a case finds is held against the others: all lines of all cases come before any look at one.
    tolerances = [Tolerances.of(labels, points, *scalarise_extremes(state)) for state in states]
    tolerances = [
        relaxed_tolerances(state, own, RELAXED_EPSILON_IF_WIDE) if state.is_wide else own
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
    answer = found.thinned(epsilon * ANSWER_SHARE if large else epsilon)
    efforts = tuple(
        _effort(chain, small.get(number), [state for state in states if state.case == number])
        for number, chain in enumerate(chains)
    )
    return ParetoSearchResult(
        answer.points, tuple(answer.solutions), _proven(states, epsilon, search_epsilon), efforts
    )


def _small_frontiers(chains: Sequence[Chain], found: IncumbentSet) -> dict[int, ChainFrontier]:
    """Those of the chains, by number, that are small enough to be eliminated at once; all of their frontiers
    is found then."""
    small = {}
    for number, chain in enumerate(chains):
        chain_frontier = eliminate_small_chain(chain)
        if chain_frontier is not None:
            small[number] = chain_frontier
            found.add([(measure(chain, each), (number, each)) for each in chain_frontier.solutions()])
    return small


def _recombine(state: State) -> None:
    """Take what lies between solutions in hand, where corners are open and a look was too much: elsewhere
    looks find it. First what is made of two neighbours; where that leaves corners open what is made of the
    pieces of all, which is a question of its own, of few choices."""
    if state.is_exhausted or not state.is_hard:
        return
    recombine_neighbours(state)
    if not len(state.open_nadir_points()):
        return
    own = (solution for case, solution in state.incumbents.solutions if case == state.case)
    pool = solution_pool(state.given, [*state.supported, *own])
    choices = choices_of(pool.chain)
    if choices == state.pool_choices or choices > POOL_CHOICES_SHARE * choices_of(state.given):
        return
    state.pool_choices = choices
    epsilon, most_bytes = max(state.working_epsilon, POOL_EPSILON), state.incumbents.most_bytes
    found = pareto_search([pool.chain], epsilon=epsilon, most_labels=POOL_LABELS, most_bytes=most_bytes)
    state.take([pool.original(solution) for _, solution in found.solutions])


def _settle_extremes(state: State, tolerances: Tolerances) -> Tolerances:
    """The least time and the least memory of all solutions, where lines alone do not tell; and the losses
    from then on."""
    _tighten_memory_bound(state)
    for column in (0, 1):
        is_done, step_beyond = False, FIRST_EXTREME_STEP
        while not is_done:
            alone = np.flatnonzero(state.lower_bounds.weights[:, 1 - column] == 0.0)
            nadir_point = state.incumbents.extremes(state.working_epsilon)[column]
            if state.is_exhausted or not is_open(state.lower_bounds, nadir_point[None])[0]:
                break
            lower_bound = int(alone[state.lower_bounds.explored_sums[alone].argmax()])
            weight, whole = float(state.lower_bounds.weights[lower_bound, column]), float(nadir_point[column])
            # At most as far as what is found, so that the least is known as it is; and at once where the line
            # is nothing, of which no multiple is any further.
            limit, own = (
                whole * (1.0 + state.working_epsilon),
                float(state.lower_bounds.explored_sums[lower_bound]) / weight,
            )
            if own > 0.0:
                limit = min(limit, own * (1.0 + step_beyond))
            try:
                enumerate_gap(state, lower_bound, limit * weight, tolerances)
                state.holds_from = max(state.holds_from, state.working_epsilon)
                step_beyond *= STEP_GROWTH
                is_done = limit >= whole  # what is lost may leave the corner open: others tell what is proven
            except TooManyLabels:
                state.labels += FAILED_LABELS
                tolerances = relaxed_tolerances(state, tolerances)
                break  # even if more were lost it would hardly be less
    return tolerances


def _tighten_memory_bound(state: State) -> None:
    """Raise the line of memory alone, where less than what is found may be there."""
    if (
        state.is_exhausted
        or not is_open(state.lower_bounds, state.incumbents.extremes(state.working_epsilon)[1:])[0]
    ):
        return
    alone = np.flatnonzero(state.lower_bounds.weights[:, 0] == 0.0)
    tighten_by_peak(state, alone[[state.lower_bounds.proven_sums[alone].argmax()]])


def _tighten_all(state: State, tolerances: Tolerances) -> Tolerances:
    """Raise lines to what there is, where that is worth it; of a wide chain, where no look will do, once more
    with all that may be lost."""
    tolerances = tighten_between(state, tolerances, _recombine)
    while state.is_wide and not state.is_exhausted and len(state.open_nadir_points()):
        before, tolerances = state.working_epsilon, relaxed_tolerances(state, tolerances)
        if state.working_epsilon == before:
            break
        tolerances = tighten_between(state, tolerances, _recombine)
    return tolerances


def _as_relaxed(state: State, tolerances: Tolerances, others: list[State]) -> Tolerances:
    """The losses of a case that matches no more closely than any of some others: the answer would be no
    closer."""
    before, state.working_epsilon = state.working_epsilon, max(other.working_epsilon for other in others)
    return tolerances if state.working_epsilon == before else tolerances.times(state.working_epsilon / before)


def _enumerate_gaps(state: State, tolerances: Tolerances, most_labels: float) -> None:
    """Look further and further beyond the lines that have least to see below what is open,
    until nothing is, or no line is left at which a look is not too much, however loose."""
    is_near = state.is_tightened and not state.is_relaxed
    start, few_labels = (
        (TIGHTENED_FIRST_STEP, TIGHTENED_FEW_LABELS_STORED) if is_near else (FIRST_STEP, FEW_LABELS_STORED)
    )
    step_beyond: dict[int, float] = {}
    usual_step = 0.0  # how far looks had to go, relative, before the next line was closer
    failed: set[int] = set()
    while not state.is_exhausted and state.labels < most_labels:
        nadir_points = state.open_nadir_points()
        nadir_points = nadir_points[
            np.isfinite(nadir_points).all(axis=1)
        ]  # the ends are settled, or never will be
        lower_bound, is_target = _next_gap(state, nadir_points, failed)
        if lower_bound is None:
            return
        weights, least = (
            state.lower_bounds.weights[lower_bound],
            float(state.lower_bounds.proven_sums[lower_bound]),
        )
        beyond_bound = nadir_points @ weights - least
        distances = beyond_bound[is_target]  # not a product of their own, which may round otherwise
        if lower_bound not in step_beyond:
            first = max(state.working_epsilon * start, usual_step)
            step_beyond[lower_bound] = first * least or EXACT_FIRST_STEP * float(distances.max())
        labels, beyond = state.labels, min(step_beyond[lower_bound], NADIR_MARGIN * float(distances.max()))
        near = nadir_points[beyond_bound <= max(BOX_RATIO * beyond, float(distances.min()))]
        try:
            enumerate_gap(state, lower_bound, least + beyond, tolerances, near.max(axis=0))
        except TooManyLabels:
            state.labels += FAILED_LABELS
            recombine_neighbours(state)  # while what lies between is not matched yet
            before, tolerances = state.working_epsilon, relaxed_tolerances(state, tolerances)
            if state.working_epsilon == before:
                failed.add(lower_bound)
                _recombine(state)
            else:
                tolerances = tighten_between(state, tolerances, _recombine)
            continue
        state.holds_from = max(state.holds_from, state.working_epsilon)
        usual_step = max(usual_step, beyond / least) if least > 0.0 else usual_step
        step_beyond[lower_bound] *= SMALL_STEP_GROWTH if state.labels - labels < few_labels else STEP_GROWTH


def _next_gap(
    state: State, nadir_points: Values, without: set[int]
) -> tuple[int | None, npt.NDArray[np.bool_]]:
    """The line to look at next, and which of the corners are closest to it: of all but some the one that has
    least to see. None where there is none, or no corner.

    What a look sees grows with how much more time, and how much more memory, a solution may take than the
    least, relative to what it takes: their product is the square of what is compared here.
    """
    # From where a line was drawn, wherever looks at it have come: all on the way is seen again.
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
    """The epsilon up to which nothing is open: the one that was asked for, or, where looks were stopped or
    had to be looser, the least above it."""

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
    return epsilon if high == search_epsilon else (1.0 + high) * (1.0 + epsilon * ANSWER_SHARE) - 1.0


def _effort(chain: Chain, chain_frontier: ChainFrontier | None, states: list[State]) -> Effort:
    """What a chain took, at once or in all of its cases."""
    labels = (
        0
        if chain_frontier is None
        else sum(len(segment.table) for segment in chain_frontier.segments) + len(chain_frontier.end)
    )
    labels += sum(state.labels for state in states)
    return Effort(sum(state.sums_solved for state in states), choices_of(chain), labels)
