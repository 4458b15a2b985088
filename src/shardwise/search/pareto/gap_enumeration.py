"""Looking at all solutions near a line, by labels: what they cost, column by column.

The forms of a line: sums that all are below the weighted sum of a solution, so that each of them tells.

What becomes of a chain at which looks are too much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shardwise.pareto import Segment, non_dominated
from shardwise.search.pareto.bound_sets import SLACK, representatives
from shardwise.search.pareto.chain_labels import (
    ChainFrontier,
    SegmentLabels,
    chain_frontier,
    completed,
    completions_of,
    segment_labels,
    with_least_peaks,
)
from shardwise.search.pareto.completion_bounds import CompletionBounds, Completions
from shardwise.search.pareto.labels import TooManyLabels
from shardwise.search.pareto.presolve import (
    PresolvedChain,
    choices_of,
    memory_dualised,
    presolved,
    without_columns,
    without_idle_columns,
)
from shardwise.search.pareto.state import State
from shardwise.search.pareto.weighted_sums import ChainSums

Values = npt.NDArray[np.float64]

MOST_MULTIPLIERS = 4
"""Forms under which labels are weighed, each of which costs as much as the line itself."""

SHARE_OFFSETS = (-0.3, -0.15, -0.07, -0.03, 0.03, 0.07, 0.15, 0.3)
"""How much more of hidden_s forms have than a line: what has decided on a few large costs is bounded best by
another share than the whole."""

SAME_MULTIPLIER = 1e-3
"""Difference of shares, or of parts of the peak, that tells nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class MultiplierSet:
    """Weights (J, 2) of time and memory in J forms, `shares` (J) of hidden_s in time's, and `peaks` (J,
    links), the parts of the peak's in each occurrence of a link: what is wanted weighs less than `cutoff` in
    all of them. The first is a line as it was drawn.

    The larger time is no less than any mean of both, the largest peak no less than any mean of peaks: a
    solution within reach is within reach in every form. As it was drawn the line is highest, and yet a label
    that has much of what another form weighs is further from that one.
    """

    weights: Values
    shares: Values
    peaks: Values
    cutoff: float

    @staticmethod
    def of_bound(weights: Values, share: float, peaks: Values, cutoff: float) -> MultiplierSet:
        """A line as it was drawn, of weights (2) and peaks (links)."""
        return MultiplierSet(weights[None], np.array([share]), peaks[None], cutoff)

    def below(self, weights: Values, share: float, peaks: Values, cutoff: float) -> MultiplierSet:
        """Besides, what is wanted weighs less than `cutoff` by these: as if by as much as in the others."""
        scaled = weights * (self.cutoff / cutoff)
        return MultiplierSet(
            np.concatenate([self.weights, scaled[None]]), np.append(self.shares, share),
            np.concatenate([self.peaks, peaks[None]]), self.cutoff,
        )  # fmt: skip

    def with_others(self, near: PresolvedChain, offsets: Sequence[float] = ()) -> MultiplierSet:
        """Besides, the forms that have one time alone, the peak of one link alone, or so much more of
        hidden_s `offsets` the line's share, as far as solutions differ in them."""
        weights, share, parts = self.weights[0], self.shares[0], self.peaks[0]
        found = self
        if weights[0] > 0.0 and near.decided_share is None:
            for one in (1.0, 0.0, *(share + more for more in offsets)):
                if abs(one - share) > SAME_MULTIPLIER and 0.0 <= one <= 1.0:
                    found = found.below(weights, one, parts, self.cutoff)
        if weights[1] > 0.0:
            for place, segment in enumerate(near.chain):
                alone = np.zeros(len(near.chain))
                alone[place] = 1.0 / segment.repeat
                if _has_temporaries(segment) and np.abs(alone - parts).max() > SAME_MULTIPLIER:
                    found = found.below(weights, share, alone, self.cutoff)
        return found

    def highest(self, state: State, near: PresolvedChain) -> ChainSums:
        """A chain under the line as it was drawn, and those of the others whose least sums are highest."""
        found = self.of(state, near)
        if len(self.shares) <= MOST_MULTIPLIERS:
            return found
        others = 1 + np.argsort(-found.least[1:], kind="stable")[: MOST_MULTIPLIERS - 1]
        return found.some(np.array([0, *others.tolist()], dtype=np.intp))

    def of(self, state: State, near: PresolvedChain) -> ChainSums:
        """A chain under all of them."""
        return state.chain_sums(near, self.weights, self.shares, self.peaks)


def _has_temporaries(segment: Segment) -> bool:
    costs = (factor.costs[..., 3:] for _, part in segment.modes for factor in part.factors)
    return any(bool((np.isfinite(own) & (own > 0.0)).any()) for own in costs)


Indices = npt.NDArray[np.intp]

RESIDENT_SHARE = 0.75
"""Of the memory that labels may lose, the part of held_bytes; the rest is the peak's."""

TIGHTENING_SHARE = 0.125
"""Of what labels may lose, the part that they do where held bytes are paid in seconds: few columns are
left."""

COMPLETION_SHARE = 0.5
"""The same of what labels may end in."""

WORTHWHILE_CHOICES = 0.95
"""Labels are weighed in other forms of a line where these leave at most so many of the choices."""

PENALTIES = np.array([0.0, 0.5, 1.0, 2.0, 4.0, 8.0])
"""Weights of a sum beside the difference of the two times, tried for one that shows which time is larger."""


@dataclass(frozen=True, slots=True)
class Tolerances:
    """What may stand for a solution of a look: labels that cost at most `labels` (4) more in each folded
    column, and points of the answer within a factor 1 + `points`."""

    labels: Values
    points: float
    relative: float

    @staticmethod
    def of(labels: float, points: float, least_s: float, least_bytes: float) -> Tolerances:
        """Labels within a factor 1 + labels of every solution, since none takes less than the least time and
        memory."""
        peak_share = 1.0 - RESIDENT_SHARE
        least = np.array([least_s, least_s, RESIDENT_SHARE * least_bytes, peak_share * least_bytes])
        return Tolerances(labels * least, points, labels)

    def times(self, factor: float) -> Tolerances:
        """So many times as much, of both together."""
        whole = factor * ((1.0 + self.relative) * (1.0 + self.points) - 1.0)
        relative = factor * self.relative
        return Tolerances(factor * self.labels, (1.0 + whole) / (1.0 + relative) - 1.0, relative)

    def weighted_by(self, weights: Values) -> float:
        """How much more than a solution what stands for it may weigh, whatever form `weights` (2) take."""
        return float(weights @ [self.labels[:2].max(), self.labels[2:].sum()])


UNBOUNDED_BOX = np.array([np.inf, np.inf])
"""A box that all is in."""


def enumerate_gap(
    state: State, lower_bound: int, limit: float, tolerances: Tolerances, box: Values = UNBOUNDED_BOX
) -> None:
    """Find all solutions below `box` (2) in time and memory whose sum, weighted as in a line, is below the
    limit, up to the losses.

    A line of one objective is looked at for the least of it alone.
    """
    if state.lower_bounds.weights[lower_bound].all():
        end = _labels_near(state, state.presolved, lower_bound, limit, tolerances, box, with_completions=True)
        if end is not None:
            near, labels = end
            selected = _fresh_representatives(state, labels.points, tolerances.points)
            state.take(near.originals(labels.solutions(selected)))
    else:
        column = int(np.flatnonzero(state.lower_bounds.weights[lower_bound])[0])
        others = (2, 3, 4) if column == 0 else (0, 1)
        alone = replace(state.presolved, chain=without_columns(state.presolved.chain, *others))
        end = _labels_near(state, alone, lower_bound, limit, tolerances, UNBOUNDED_BOX)
        if end is not None:
            near, labels = end
            state.take(near.originals(labels.solutions()))
            label_tolerance = tolerances.labels[:2].max() if column == 0 else tolerances.labels[2:].sum()
            least = float(labels.points[:, column].min() - label_tolerance)
            limit = min(limit, float(state.lower_bounds.weights[lower_bound, column]) * least)
    state.lower_bounds.mark_explored(lower_bound, limit, box)


def tighten(state: State, lower_bound: int, tolerances: Tolerances) -> None:
    """Raise a line of both objectives to the least weighted sum that there is, up to the losses, and take a
    solution that has it.

    What is held is paid in seconds as the line weighs it, so that labels have the two times and a peak alone,
    and are few: where a line lies far below all solutions, since none has a mean of both times, this tells
    at little cost how far.
    """
    weights = state.lower_bounds.weights[lower_bound]
    dualised_chain = memory_dualised(state.presolved.chain, float(weights[1] / weights[0]))
    least = float((state.incumbents.points @ weights).min())
    start = replace(state.presolved, chain=dualised_chain)
    end = _labels_near(state, start, lower_bound, least * (1.0 + SLACK), tolerances, UNBOUNDED_BOX)
    if end is not None:
        near, labels = end
        sums = labels.points @ weights
        best = int(sums.argmin())
        state.take(near.originals(labels.solutions(np.array([best]))))
        # Labels lose no more than that part of the least time, held bytes included, and the least peak.
        least = min(least, float(sums[best]) * (1.0 - tolerances.relative))
    state.lower_bounds.raise_to(lower_bound, least)


def _labels_near(
    state: State, start: PresolvedChain, lower_bound: int, limit: float, tolerances: Tolerances, box: Values,
    *, with_completions: bool = False,
) -> tuple[PresolvedChain, ChainFrontier] | None:  # fmt: skip
    """What is left of a chain near a line and in a box, and the end of the walk along it; None where nothing
    is. `with_completions`, labels that nothing completes are left out of walks.

    What stands for a solution may weigh as much more as it costs more.
    """
    near, bounds = _bounded(state, start, lower_bound, limit, tolerances, box)
    if bounds is None:
        return None
    completions = None
    if (
        with_completions
        and state.is_tightened
        and _counts_both_times(float(state.lower_bounds.shares[lower_bound]))
    ):
        try:
            completions = _completions(state, near, lower_bound, bounds, tolerances)
        except TooManyLabels:
            pass  # labels are left out by the line alone
        else:
            if completions is None:
                return None
    segments = _segment_labels(state, near, bounds)
    if segments is None:
        return None
    segments, bounds = with_least_peaks(near.chain, segments, bounds)
    if completions is not None:
        segments = completed(segments, near.chain, completions)
        if not all(len(segment.table) for segment in segments):
            return None
    end = chain_frontier(near.chain, segments, bounds, completions)
    state.labels += sum(len(segment.table) for segment in segments) + len(end.end)
    return (near, end) if len(end.points) else None


def _counts_both_times(share: float) -> bool:
    """Whether a line counts a mean of both times."""
    return 0.0 < share < 1.0


def _segment_labels(
    state: State, near: PresolvedChain, bounds: CompletionBounds
) -> list[SegmentLabels] | None:
    """The labels of all links; None where one has none."""
    segments = [
        segment_labels(near.chain, state.orders_in(near), place, bounds) for place in range(len(near.chain))
    ]
    return segments if all(len(segment.table) for segment in segments) else None


def _completions(
    state: State, near: PresolvedChain, lower_bound: int, bounds: CompletionBounds, tolerances: Tolerances
) -> Completions | None:
    """All that what is left of a chain comes to ahead of each border and behind it, with held bytes paid in
    seconds as a line weighs them; None where nothing is within reach."""
    weights = state.lower_bounds.weights[lower_bound]
    rate = float(weights[1] / weights[0])
    dualised_near = replace(near, chain=memory_dualised(near.chain, rate))
    completion_tolerances = tolerances.times(COMPLETION_SHARE)
    cutoff = bounds.limit + completion_tolerances.weighted_by(weights)
    multipliers = MultiplierSet.of_bound(
        weights, float(state.lower_bounds.shares[lower_bound]), state.lower_bounds.peaks[lower_bound], cutoff
    )
    own = CompletionBounds(
        multipliers.with_others(dualised_near, SHARE_OFFSETS).highest(state, dualised_near),
        cutoff,
        completion_tolerances.labels,
    )
    segments = _segment_labels(state, dualised_near, own)
    if segments is None:
        return None
    segments, own = with_least_peaks(dualised_near.chain, segments, own)
    return completions_of(
        dualised_near.chain,
        segments,
        own,
        rate,
        float(state.lower_bounds.shares[lower_bound]),
        cutoff / float(weights[0]),
    )


def _bounded(
    state: State, start: PresolvedChain, lower_bound: int, limit: float, tolerances: Tolerances, box: Values
) -> tuple[PresolvedChain, CompletionBounds | None]:
    """What is left of a chain near a line and in a box, and its bounds; none where nothing is."""
    weights, peaks = state.lower_bounds.weights[lower_bound], state.lower_bounds.peaks[lower_bound][None]
    as_solved = _multipliers(state, start, lower_bound, limit, tolerances, box)
    near = _presolved_below(start, as_solved.of(state, start), as_solved.cutoff)
    if not all(segment.modes for segment in near.chain):
        return near, None
    if weights.all():
        tolerances = _own_tolerances(state, near, peaks, tolerances)
    near = replace(near, chain=without_idle_columns(near.chain))
    as_solved = _multipliers(state, near, lower_bound, limit, tolerances, box)
    cutoff = as_solved.cutoff
    near = _in_one_time(state, near, weights, peaks, cutoff)
    before, multipliers = near, as_solved.with_others(near, SHARE_OFFSETS if state.is_tightened else ())
    if len(multipliers.shares) > len(as_solved.shares):
        near = _presolved_below(before, multipliers.of(state, before), cutoff)
        if not all(segment.modes for segment in near.chain):
            return near, None
        if choices_of(near.chain) > WORTHWHILE_CHOICES * choices_of(before.chain):
            multipliers = as_solved
    return near, CompletionBounds(multipliers.highest(state, near), cutoff, tolerances.labels)


def _multipliers(
    state: State, near: PresolvedChain, lower_bound: int, limit: float, tolerances: Tolerances, box: Values
) -> MultiplierSet:
    """A line as it was drawn, and time and memory alone where a box bounds them."""
    lower_bounds = state.lower_bounds
    weights = lower_bounds.weights[lower_bound]
    cutoff = limit + tolerances.weighted_by(weights)
    found = MultiplierSet.of_bound(
        weights, float(lower_bounds.shares[lower_bound]), lower_bounds.peaks[lower_bound], cutoff
    )
    for column, alone in enumerate(np.eye(2)):
        own = np.flatnonzero(lower_bounds.weights[:, 1 - column] == 0.0)
        if not np.isfinite(box[column]) or not len(own):
            continue
        best = int(own[lower_bounds.proven_sums[own].argmax()])
        below = float(box[column]) + tolerances.weighted_by(alone)
        shares = (
            [float(lower_bounds.shares[best])] if column or near.decided_share is not None else [1.0, 0.0]
        )
        for share in shares:
            found = found.below(alone, share, lower_bounds.peaks[best], below)
    return found


def _presolved_below(near: PresolvedChain, found: ChainSums, cutoff: float) -> PresolvedChain:
    """The choices that lead to a solution within reach in each of the weighted sums."""
    return presolved(near, found, np.full((1, len(found.least)), cutoff))


def _own_tolerances(state: State, near: PresolvedChain, peaks: Values, tolerances: Tolerances) -> Tolerances:
    """The losses where no solution takes less than what is left of a chain does at least."""
    weights = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    least = state.chain_sums(near, weights, np.array([1.0, 0.0, 1.0]), np.repeat(peaks, 3, axis=0)).least
    return Tolerances.of(tolerances.relative, tolerances.points, float(least[:2].max()), float(least[2]))


def _fresh_representatives(state: State, points: Values, tolerance: float) -> Indices:
    """Which of the points of a look to take: of those that none found yet is as good as, as few as stand for
    the others."""
    every = np.concatenate([state.incumbents.points, points])
    known = len(state.incumbents.points)
    fresh = np.array([row - known for row in non_dominated(every).tolist() if row >= known], dtype=np.intp)
    return np.asarray(fresh[representatives(points[fresh], tolerance)])


def _in_one_time(
    state: State, near: PresolvedChain, weights: Values, peaks: Values, cutoff: float
) -> PresolvedChain:
    """Without the time that is the smaller one in every solution that matters: whose sum, weighted by
    `weights` (2) of the larger time and of memory, is below `cutoff`.

    Whatever k is, no such solution has less excess of the one over the other than the least of
    excess + k (sum - reach). The sum counts the larger time alone, as labels do afterwards: of a solution
    that is within reach by it but not by the smaller one nothing else would be known.
    """
    if near.decided_share is not None:
        return near
    for larger, smaller in ((0, 1), (1, 0)):
        excess, sum_weights = np.zeros(5), np.zeros(5)
        excess[larger], excess[smaller] = 1.0, -1.0
        sum_weights[larger], sum_weights[2:] = weights
        columns = excess[None] + PENALTIES[:, None] * sum_weights[None]
        least = state.summed(near, columns, np.repeat(peaks, len(PENALTIES), axis=0)).least
        if (least - PENALTIES * cutoff >= 0.0).any():
            return replace(near, chain=without_columns(near.chain, smaller))
    return near


RELAX_FACTOR, LEAST_RELAX_FACTOR = 8.0, 1.5
"""How many times as much may be lost from a look on that would be too much, at most; no more where that is
hardly more."""

RELAXED_EPSILON = 0.015
"""How much is enough to lose then."""

RELAXED_EPSILON_IF_WIDE = 0.0075
"""How much is enough for wide chains, at which no look has been tried yet."""


def relaxed_tolerances(state: State, tolerances: Tolerances, enough: float = RELAXED_EPSILON) -> Tolerances:
    """What may be lost from now on, since a look was too much; as before where that is about enough."""
    state.is_hard = True
    after = min(RELAX_FACTOR * state.working_epsilon, enough)
    if after < LEAST_RELAX_FACTOR * state.working_epsilon or not state.working_epsilon:
        return tolerances
    factor, state.working_epsilon = after / state.working_epsilon, after
    return tolerances.times(factor)
