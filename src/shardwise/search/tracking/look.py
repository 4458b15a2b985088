"""Looking at all solutions near a line, by labels: what they cost, column by column."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shardwise.frontier import reduce
from shardwise.search.tracking.bounds import Bounds
from shardwise.search.tracking.chained import Weighed
from shardwise.search.tracking.forms import BESIDE, Forms
from shardwise.search.tracking.found import representatives
from shardwise.search.tracking.labels import TooManyLabels
from shardwise.search.tracking.lines import SLACK
from shardwise.search.tracking.links import LinkLabels, beside_peaks, link_labels
from shardwise.search.tracking.prune import Narrowed, choices_of, narrowed
from shardwise.search.tracking.rests import Rests
from shardwise.search.tracking.simplify import priced, simplified, without
from shardwise.search.tracking.state import State
from shardwise.search.tracking.walk import Walked, completed, rests_of, walked

Values = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

HELD_SHARE = 0.75
"""Of the memory that labels may lose, the part of held_bytes; the rest is the peak's."""

FINER = 0.125
"""Of what labels may lose, the part that they do where held bytes are paid in seconds: few columns are
left."""

RESTS = 0.5
"""The same of what labels may end in."""

TELLING = 0.95
"""Labels are weighed in other forms of a line where these leave at most so many of the choices."""

PENALTIES = np.array([0.0, 0.5, 1.0, 2.0, 4.0, 8.0])
"""Weights of a sum beside the difference of the two times, tried for one that shows which time is larger."""


@dataclass(frozen=True, slots=True)
class Losses:
    """What may stand for a solution of a look: labels that cost at most `labels` (4) more in each folded
    column, and points of the answer within a factor 1 + `points`."""

    labels: Values
    points: float
    relative: float

    @staticmethod
    def of(labels: float, points: float, least_s: float, least_bytes: float) -> Losses:
        """Labels within a factor 1 + labels of every solution, since none takes less than the least time and
        memory."""
        peak_share = 1.0 - HELD_SHARE
        least = np.array([least_s, least_s, HELD_SHARE * least_bytes, peak_share * least_bytes])
        return Losses(labels * least, points, labels)

    def times(self, factor: float) -> Losses:
        """So many times as much, of both together."""
        whole = factor * ((1.0 + self.relative) * (1.0 + self.points) - 1.0)
        relative = factor * self.relative
        return Losses(factor * self.labels, (1.0 + whole) / (1.0 + relative) - 1.0, relative)

    def weighing(self, weights: Values) -> float:
        """How much more than a solution what stands for it may weigh, whatever form `weights` (2) take."""
        return float(weights @ [self.labels[:2].max(), self.labels[2:].sum()])


EVERYWHERE = np.array([np.inf, np.inf])
"""A box that all is in."""


def look(state: State, line: int, limit: float, losses: Losses, box: Values = EVERYWHERE) -> None:
    """Find all solutions below `box` (2) in time and memory whose sum, weighted as in a line, is below the
    limit, up to the losses.

    A line of one objective is looked at for the least of it alone.
    """
    if state.lines.weights[line].all():
        end = _near(state, state.narrowed, line, limit, losses, box, with_rests=True)
        if end is not None:
            near, labels = end
            wanted = _wanted(state, labels.points, losses.points)
            state.take(near.originals(labels.solutions(wanted)))
    else:
        column = int(np.flatnonzero(state.lines.weights[line])[0])
        others = (2, 3, 4) if column == 0 else (0, 1)
        alone = replace(state.narrowed, chain=without(state.narrowed.chain, *others))
        end = _near(state, alone, line, limit, losses, EVERYWHERE)
        if end is not None:
            near, labels = end
            state.take(near.originals(labels.solutions()))
            lost = losses.labels[:2].max() if column == 0 else losses.labels[2:].sum()
            least = float(labels.points[:, column].min() - lost)
            limit = min(limit, float(state.lines.weights[line, column]) * least)
    state.lines.advance(line, limit, box)


def sharpen(state: State, line: int, losses: Losses) -> None:
    """Raise a line of both objectives to the least weighted sum that there is, up to the losses, and take a
    solution that has it.

    What is held is paid in seconds as the line weighs it, so that labels have the two times and a peak alone,
    and are few: where a line lies far below all solutions, since none has a mean of both times, this tells
    at little cost how far.
    """
    weights = state.lines.weights[line]
    priced_chain = priced(state.narrowed.chain, float(weights[1] / weights[0]))
    least = float((state.found.points @ weights).min())
    start = replace(state.narrowed, chain=priced_chain)
    end = _near(state, start, line, least * (1.0 + SLACK), losses, EVERYWHERE)
    if end is not None:
        near, labels = end
        sums = labels.points @ weights
        best = int(sums.argmin())
        state.take(near.originals(labels.solutions(np.array([best]))))
        # Labels lose no more than that part of the least time, held bytes included, and the least peak.
        least = min(least, float(sums[best]) * (1.0 - losses.relative))
    state.lines.rise(line, least)


def _near(
    state: State, start: Narrowed, line: int, limit: float, losses: Losses, box: Values,
    *, with_rests: bool = False,
) -> tuple[Narrowed, Walked] | None:  # fmt: skip
    """What is left of a chain near a line and in a box, and the end of the walk along it; None where nothing
    is. `with_rests`, labels that nothing completes are left out of walks.

    What stands for a solution may weigh as much more as it costs more.
    """
    near, bounds = _bounded(state, start, line, limit, losses, box)
    if bounds is None:
        return None
    rests = None
    if with_rests and state.is_raised and _is_mixed(float(state.lines.shares[line])):
        try:
            rests = _rests(state, near, line, bounds, losses)
        except TooManyLabels:
            pass  # labels are left out by the line alone
        else:
            if rests is None:
                return None
    links = _link_labels(state, near, bounds)
    if links is None:
        return None
    links, bounds = beside_peaks(near.chain, links, bounds)
    if rests is not None:
        links = completed(links, near.chain, rests)
        if not all(len(link.table) for link in links):
            return None
    end = walked(near.chain, links, bounds, rests)
    state.labels += sum(len(link.table) for link in links) + len(end.end)
    return (near, end) if len(end.points) else None


def _is_mixed(share: float) -> bool:
    """Whether a line counts a mean of both times."""
    return 0.0 < share < 1.0


def _link_labels(state: State, near: Narrowed, bounds: Bounds) -> list[LinkLabels] | None:
    """The labels of all links; None where one has none."""
    links = [
        link_labels(near.chain, state.orders_in(near), place, bounds) for place in range(len(near.chain))
    ]
    return links if all(len(link.table) for link in links) else None


def _rests(state: State, near: Narrowed, line: int, bounds: Bounds, losses: Losses) -> Rests | None:
    """All that what is left of a chain comes to ahead of each border and behind it, with held bytes paid in
    seconds as a line weighs them; None where nothing is within reach."""
    weights = state.lines.weights[line]
    rate = float(weights[1] / weights[0])
    paid = replace(near, chain=priced(near.chain, rate))
    finer = losses.times(RESTS)
    reach = bounds.limit + finer.weighing(weights)
    forms = Forms.of_line(weights, float(state.lines.shares[line]), state.lines.peaks[line], reach)
    own = Bounds(forms.with_others(paid, BESIDE).highest(state, paid), reach, finer.labels)
    links = _link_labels(state, paid, own)
    if links is None:
        return None
    links, own = beside_peaks(paid.chain, links, own)
    return rests_of(paid.chain, links, own, rate, float(state.lines.shares[line]), reach / float(weights[0]))


def _bounded(
    state: State, start: Narrowed, line: int, limit: float, losses: Losses, box: Values
) -> tuple[Narrowed, Bounds | None]:
    """What is left of a chain near a line and in a box, and its bounds; none where nothing is."""
    weights, peaks = state.lines.weights[line], state.lines.peaks[line][None]
    as_drawn = _forms(state, start, line, limit, losses, box)
    near = _within(start, as_drawn.of(state, start), as_drawn.reach)
    if not all(link.modes for link in near.chain):
        return near, None
    if weights.all():
        losses = _own(state, near, peaks, losses)
    near = replace(near, chain=simplified(near.chain))
    as_drawn = _forms(state, near, line, limit, losses, box)
    reach = as_drawn.reach
    near = _in_one_time(state, near, weights, peaks, reach)
    before, forms = near, as_drawn.with_others(near, BESIDE if state.is_raised else ())
    if len(forms.shares) > len(as_drawn.shares):
        near = _within(before, forms.of(state, before), reach)
        if not all(link.modes for link in near.chain):
            return near, None
        if choices_of(near.chain) > TELLING * choices_of(before.chain):
            forms = as_drawn
    return near, Bounds(forms.highest(state, near), reach, losses.labels)


def _forms(state: State, near: Narrowed, line: int, limit: float, losses: Losses, box: Values) -> Forms:
    """A line as it was drawn, and time and memory alone where a box bounds them."""
    lines = state.lines
    weights = lines.weights[line]
    reach = limit + losses.weighing(weights)
    found = Forms.of_line(weights, float(lines.shares[line]), lines.peaks[line], reach)
    for column, alone in enumerate(np.eye(2)):
        own = np.flatnonzero(lines.weights[:, 1 - column] == 0.0)
        if not np.isfinite(box[column]) or not len(own):
            continue
        best = int(own[lines.drawn[own].argmax()])
        below = float(box[column]) + losses.weighing(alone)
        shares = [float(lines.shares[best])] if column or near.decided_share is not None else [1.0, 0.0]
        for share in shares:
            found = found.below(alone, share, lines.peaks[best], below)
    return found


def _within(near: Narrowed, found: Weighed, reach: float) -> Narrowed:
    """The choices that lead to a solution within reach in each of the weighted sums."""
    return narrowed(near, found, np.full((1, len(found.least)), reach))


def _own(state: State, near: Narrowed, peaks: Values, losses: Losses) -> Losses:
    """The losses where no solution takes less than what is left of a chain does at least."""
    weights = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    least = state.weighed(near, weights, np.array([1.0, 0.0, 1.0]), np.repeat(peaks, 3, axis=0)).least
    return Losses.of(losses.relative, losses.points, float(least[:2].max()), float(least[2]))


def _wanted(state: State, points: Values, loss: float) -> Indices:
    """Which of the points of a look to take: of those that none found yet is as good as, as few as stand for
    the others."""
    every = np.concatenate([state.found.points, points])
    known = len(state.found.points)
    fresh = np.array([row - known for row in reduce(every).tolist() if row >= known], dtype=np.intp)
    return np.asarray(fresh[representatives(points[fresh], loss)])


def _in_one_time(state: State, near: Narrowed, weights: Values, peaks: Values, reach: float) -> Narrowed:
    """Without the time that is the smaller one in every solution that matters: whose sum, weighted by
    `weights` (2) of the larger time and of memory, is below `reach`.

    Whatever k is, no such solution has less excess of the one over the other than the least of
    excess + k (sum - reach). The sum counts the larger time alone, as labels do afterwards: of a solution
    that is within reach by it but not by the smaller one nothing else would be known.
    """
    if near.decided_share is not None:
        return near
    for larger, smaller in ((0, 1), (1, 0)):
        excess, line = np.zeros(5), np.zeros(5)
        excess[larger], excess[smaller] = 1.0, -1.0
        line[larger], line[2:] = weights
        columns = excess[None] + PENALTIES[:, None] * line[None]
        least = state.summed(near, columns, np.repeat(peaks, len(PENALTIES), axis=0)).least
        if (least - PENALTIES * reach >= 0.0).any():
            return replace(near, chain=without(near.chain, smaller))
    return near
