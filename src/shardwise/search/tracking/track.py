"""The whole frontier of chains of choices: lines from outside, solutions from inside, and looks at what is
left between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from shardwise.frontier import Chain
from shardwise.search.tracking.at_once import at_once
from shardwise.search.tracking.cases import cases_of
from shardwise.search.tracking.draw import draw_between, draw_ends, draw_first, mix_between
from shardwise.search.tracking.found import Found
from shardwise.search.tracking.labels import TooManyLabels
from shardwise.search.tracking.levels import raise_by_levels
from shardwise.search.tracking.lines import is_open, weighted
from shardwise.search.tracking.look import Losses, look
from shardwise.search.tracking.loosen import LOOSE_IF_WIDE, loosened
from shardwise.search.tracking.pooled import pooled
from shardwise.search.tracking.prune import choices_of
from shardwise.search.tracking.sharpen import sharpen_between
from shardwise.search.tracking.solution import Solution, measure
from shardwise.search.tracking.state import State
from shardwise.search.tracking.walk import Walked

Values = npt.NDArray[np.float64]

ANSWER_SHARE = 0.1
"""Of an epsilon, the part for leaving out points of the answer."""

LABELS_SHARE = 0.85
"""Of what is left, the part for labels that stand for like ones; the rest is for points of a look that do."""

FIRST_REACH, RAISED_REACH = 0.5, 2.0
"""How far beyond its line a first look goes, in epsilons; and where lines were raised to what there is."""

FIRST_END = 0.005
"""How far beyond the line of one objective alone the first look for the least of it goes."""

FIRST_PART = 1.0 / 16.0
"""The same where there is no epsilon, of the way to what is open."""

FEW_LABELS, RAISED_FEW = 1500, 500
"""A look that kept fewer labels than that was a small one."""

MARGIN = 1.15
"""How far looks go at most, of the way to the furthest corner that is open: what they find opens others."""

TOO_MUCH = 40_000
"""Labels that a look counts for which would keep too many."""

POOL_EPSILON, POOL_LABELS = 0.001, 40_000
"""How closely what can be made of pieces of solutions is tracked, at most, and how many labels that keeps."""

FEW_CHOICES = 0.5
"""Pieces are put together where there are so many of a chain's choices among them, at most."""

HALVINGS = 40
"""Steps to the least epsilon that is proven."""


FURTHER, FAR = 2.0, 3.0
"""How many times as far the next look at a line goes as this one; and where this was a small one."""

WIDE = 10.0
"""A look keeps to a box around the corners that are at most so many times as far beyond its line as it goes:
what it finds there may close them."""


@dataclass(frozen=True, slots=True)
class Effort:
    """What it took: weighted sums asked for, choices of all variables, and labels kept of links and walks; a
    look that was too much counts as `TOO_MUCH`. What is put together of pieces is not counted."""

    weights: int
    choices: int
    labels: int


@dataclass(frozen=True, slots=True, eq=False)
class Tracked:
    """The frontier of chains: `points` (n, 2), seconds ascending and bytes descending; for each the number of
    its chain and a solution of it.

    Every solution of the chains is matched within a factor 1 + epsilon by some point; with epsilon 0 the
    points are the frontier itself. Where the search was stopped, epsilon is what is proven by then.
    """

    points: Values
    solutions: tuple[tuple[int, Solution], ...]
    epsilon: float
    efforts: tuple[Effort, ...]


def tracked(
    chains: Sequence[Chain], *, epsilon: float = 0.0, most_labels: float = inf, most_bytes: float = inf
) -> Tracked:
    """Track the frontier of all `chains` together, exact up to a relative `epsilon`.

    Several chains are the cases of one question, such as meshes to choose from; a chain of which one link is
    most falls into cases itself. What one case found is held against the others. Small chains are eliminated
    at once, without lines and looks, and exact whatever the epsilon. Where a look would go through too many
    labels, it and those after it lose more (`loosened`); once all that are left would even so, or looks have
    kept `most_labels` for a case, what is proven so far is the answer: the same on any machine. Only what
    takes at most `most_bytes` is tracked: where nothing fits, the smallest is the answer.

    How the epsilon is shared: `ANSWER_SHARE` of it for leaving out points of the answer that others match,
    the rest for tracking. There each solution is matched in one of two ways, which do not add up: a solution
    in hand is held against all that lines do not forbid, up to that rest; or a look finds it, up to
    `LABELS_SHARE` of the rest by what labels stand for others over the whole chain, and what remains by
    points that stand for others.
    """
    tracking = (1.0 + epsilon) / (1.0 + epsilon * ANSWER_SHARE) - 1.0
    labels = tracking * LABELS_SHARE
    points = (1.0 + tracking) / (1.0 + labels) - 1.0
    found = Found(most_bytes)
    small = _small(chains, found)
    large = [number for number in range(len(chains)) if number not in small]
    cases = [(number, each) for number in large for each in cases_of(chains[number])]
    states = [State.of(number, chains[number], start, found, tracking) for number, start in cases]
    # What a case finds is held against the others: all lines of all cases come before any look at one.
    losses = [Losses.of(labels, points, *draw_ends(state)) for state in states]
    losses = [
        loosened(state, own, LOOSE_IF_WIDE) if state.is_wide else own
        for state, own in zip(states, losses, strict=True)
    ]
    tried = [draw_first(state) for state in states]
    losses = [_settle_ends(state, own) for state, own in zip(states, losses, strict=True)]
    for _ in range(2):
        for state, slopes in zip(states, tried, strict=True):
            draw_between(state, slopes)
            _fill(state)
    losses = [_raise_all(state, own) for state, own in zip(states, losses, strict=True)]
    for number in range(len(states)):
        _settle(states[number], _as_loose(states[number], losses[number], states), most_labels)
    for state in states:
        _fill(state)
    answer = found.thinned(epsilon * ANSWER_SHARE if large else epsilon)
    efforts = tuple(
        _effort(chain, small.get(number), [state for state in states if state.case == number])
        for number, chain in enumerate(chains)
    )
    return Tracked(answer.points, tuple(answer.solutions), _proven(states, epsilon, tracking), efforts)


def _small(chains: Sequence[Chain], found: Found) -> dict[int, Walked]:
    """Those of the chains, by number, that are small enough to be eliminated at once; all of their frontiers
    is found then."""
    small = {}
    for number, chain in enumerate(chains):
        walked = at_once(chain)
        if walked is not None:
            small[number] = walked
            found.add([(measure(chain, each), (number, each)) for each in walked.solutions()])
    return small


def _fill(state: State) -> None:
    """Take what lies between solutions in hand, where corners are open and a look was too much: elsewhere
    looks find it. First what is made of two neighbours; where that leaves corners open what is made of the
    pieces of all, which is a question of its own, of few choices."""
    if state.is_exhausted or not state.is_hard:
        return
    mix_between(state)
    if not len(state.open_corners()):
        return
    own = (solution for case, solution in state.found.solutions if case == state.case)
    pool = pooled(state.given, [*state.drawn, *own])
    choices = choices_of(pool.chain)
    if choices == state.pooled or choices > FEW_CHOICES * choices_of(state.given):
        return
    state.pooled = choices
    epsilon, most_bytes = max(state.matched, POOL_EPSILON), state.found.most_bytes
    found = tracked([pool.chain], epsilon=epsilon, most_labels=POOL_LABELS, most_bytes=most_bytes)
    state.take([pool.original(solution) for _, solution in found.solutions])


def _settle_ends(state: State, losses: Losses) -> Losses:
    """The least time and the least memory of all solutions, where lines alone do not tell; and the losses
    from then on."""
    _raise_smallest(state)
    for column in (0, 1):
        is_done, reach = False, FIRST_END
        while not is_done:
            alone = np.flatnonzero(state.lines.weights[:, 1 - column] == 0.0)
            corner = state.found.ends(state.matched)[column]
            if state.is_exhausted or not is_open(state.lines, corner[None])[0]:
                break
            line = int(alone[state.lines.least[alone].argmax()])
            weight, whole = float(state.lines.weights[line, column]), float(corner[column])
            # At most as far as what is found, so that the least is known as it is; and at once where the line
            # is nothing, of which no multiple is any further.
            limit, own = whole * (1.0 + state.matched), float(state.lines.least[line]) / weight
            if own > 0.0:
                limit = min(limit, own * (1.0 + reach))
            try:
                look(state, line, limit * weight, losses)
                state.holds_from = max(state.holds_from, state.matched)
                reach *= FURTHER
                is_done = limit >= whole  # what is lost may leave the corner open: others tell what is proven
            except TooManyLabels:
                state.labels += TOO_MUCH
                losses = loosened(state, losses)
                break  # even if more were lost it would hardly be less
    return losses


def _raise_smallest(state: State) -> None:
    """Raise the line of memory alone, where less than what is found may be there."""
    if state.is_exhausted or not is_open(state.lines, state.found.ends(state.matched)[1:])[0]:
        return
    alone = np.flatnonzero(state.lines.weights[:, 0] == 0.0)
    raise_by_levels(state, alone[[state.lines.drawn[alone].argmax()]])


def _raise_all(state: State, losses: Losses) -> Losses:
    """Raise lines to what there is, where that is worth it; of a wide chain, where no look will do, once more
    with all that may be lost."""
    losses = sharpen_between(state, losses, _fill)
    while state.is_wide and not state.is_exhausted and len(state.open_corners()):
        before, losses = state.matched, loosened(state, losses)
        if state.matched == before:
            break
        losses = sharpen_between(state, losses, _fill)
    return losses


def _as_loose(state: State, losses: Losses, others: list[State]) -> Losses:
    """The losses of a case that matches no more closely than any of some others: the answer would be no
    closer."""
    before, state.matched = state.matched, max(other.matched for other in others)
    return losses if state.matched == before else losses.times(state.matched / before)


def _settle(state: State, losses: Losses, most_labels: float) -> None:
    """Look further and further beyond the lines that have least to see below what is open,
    until nothing is, or no line is left at which a look is not too much, however loose."""
    is_near = state.is_raised and not state.is_loose
    start, few = (RAISED_REACH, RAISED_FEW) if is_near else (FIRST_REACH, FEW_LABELS)
    reach: dict[int, float] = {}
    usual = 0.0  # how far looks had to go, relative, before the next line was closer
    too_much: set[int] = set()
    while not state.is_exhausted and state.labels < most_labels:
        corners = state.open_corners()
        corners = corners[np.isfinite(corners).all(axis=1)]  # the ends are settled, or never will be
        line, is_target = _next(state, corners, too_much)
        if line is None:
            return
        weights, least = state.lines.weights[line], float(state.lines.drawn[line])
        far = corners @ weights - least
        wanted = far[is_target]  # not a product of their own, which may round otherwise
        if line not in reach:
            first = max(state.matched * start, usual)
            reach[line] = first * least or FIRST_PART * float(wanted.max())
        labels, beyond = state.labels, min(reach[line], MARGIN * float(wanted.max()))
        near = corners[far <= max(WIDE * beyond, float(wanted.min()))]
        try:
            look(state, line, least + beyond, losses, near.max(axis=0))
        except TooManyLabels:
            state.labels += TOO_MUCH
            mix_between(state)  # while what lies between is not matched yet
            before, losses = state.matched, loosened(state, losses)
            if state.matched == before:
                too_much.add(line)
                _fill(state)
            else:
                losses = sharpen_between(state, losses, _fill)
            continue
        state.holds_from = max(state.holds_from, state.matched)
        usual = max(usual, beyond / least) if least > 0.0 else usual
        reach[line] *= FAR if state.labels - labels < few else FURTHER


def _next(state: State, corners: Values, without: set[int]) -> tuple[int | None, npt.NDArray[np.bool_]]:
    """The line to look at next, and which of the corners are closest to it: of all but some the one that has
    least to see. None where there is none, or no corner.

    What a look sees grows with how much more time, and how much more memory, a solution may take than the
    least, relative to what it takes: their product is the square of what is compared here.
    """
    # From where a line was drawn, wherever looks at it have come: all on the way is seen again.
    beyond = weighted(state.lines.weights, corners) - state.lines.drawn
    parts = np.sqrt((state.lines.weights[None] * corners[:, None]).prod(axis=2))
    relative = np.full(beyond.shape, np.inf)
    np.divide(beyond, parts, out=relative, where=parts > 0.0)
    relative[:, list(without)] = np.inf
    nearest = relative.argmin(axis=1)
    least = relative.min(axis=1)
    if not np.isfinite(least).any():
        return None, np.zeros(len(corners), dtype=bool)
    line = int(nearest[least.argmin()])
    return line, nearest == line


def _proven(states: list[State], epsilon: float, tracking: float) -> float:
    """The epsilon up to which nothing is open: the one that was asked for, or, where looks were stopped or
    had to be looser, the least above it."""

    def is_proven(tracking: float) -> bool:
        return not any(
            is_open(state.lines, state.found.corners(tracking)).any()
            for state in states if not state.is_exhausted
        )  # fmt: skip

    low = max([tracking, *(state.holds_from for state in states)])
    high = max([low, *(state.matched for state in states)])
    while not is_proven(high):
        low, high = high, 2.0 * high + 1.0
    if is_proven(low):
        high = low
    for _ in range(HALVINGS if high > low else 0):
        middle = (low + high) / 2.0
        low, high = (low, middle) if is_proven(middle) else (middle, high)
    return epsilon if high == tracking else (1.0 + high) * (1.0 + epsilon * ANSWER_SHARE) - 1.0


def _effort(chain: Chain, walked: Walked | None, states: list[State]) -> Effort:
    """What a chain took, at once or in all of its cases."""
    labels = 0 if walked is None else sum(len(link.table) for link in walked.links) + len(walked.end)
    labels += sum(state.labels for state in states)
    return Effort(sum(state.asked for state in states), choices_of(chain), labels)
