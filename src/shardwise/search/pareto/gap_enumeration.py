"""Gap enumeration: all solutions whose weighted sum is between a Lagrangian bound and a limit, by label
setting.

`enumerate_gap` finds all solutions below a limit in a box; `tighten` raises a bound with dualised memory.
`MultiplierSet` holds several multipliers under which every needed solution is below the cutoff.
`relaxed_tolerances` gives the tolerances after an enumeration that exceeded its limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shardwise.pareto import Segment, non_dominated
from shardwise.search.pareto import tuning
from shardwise.search.pareto.bound_sets import representatives
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
from shardwise.ties import ROUNDING

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class MultiplierSet:
    """J multipliers: weights (J, 2) of time and memory, `shares` (J) of hidden_s in the weight of time, and
    `peaks` (J, segments), the multipliers of each segment's peak. A needed solution has a sum below `cutoff`
    under all of them. The first is the bound as it was solved.

    The larger time is at least any mean of both, and the largest peak at least any mean of peaks. So every
    choice of multipliers gives a bound. The first is the highest for the whole; for a label that has much of
    one column, others are higher.
    """

    weights: Values
    shares: Values
    peaks: Values
    cutoff: float

    @staticmethod
    def of_bound(weights: Values, share: float, peaks: Values, cutoff: float) -> MultiplierSet:
        """The multipliers of a bound as it was solved, of weights (2) and peaks (segments)."""
        return MultiplierSet(weights[None], np.array([share]), peaks[None], cutoff)

    def below(self, weights: Values, share: float, peaks: Values, cutoff: float) -> MultiplierSet:
        """Add multipliers under which needed solutions are below `cutoff`, scaled to the cutoff of the
        others."""
        scaled = weights * (self.cutoff / cutoff)
        return MultiplierSet(
            np.concatenate([self.weights, scaled[None]]), np.append(self.shares, share),
            np.concatenate([self.peaks, peaks[None]]), self.cutoff,
        )  # fmt: skip

    def with_others(self, near: PresolvedChain, offsets: Sequence[float] = ()) -> MultiplierSet:
        """Add the multipliers of one time alone, of one segment's peak alone, and of the bound's share of
        hidden_s plus each of `offsets`, as far as solutions differ in them."""
        weights, share, parts = self.weights[0], self.shares[0], self.peaks[0]
        found = self
        if weights[0] > 0.0 and near.decided_share is None:
            for one in (1.0, 0.0, *(share + more for more in offsets)):
                if abs(one - share) > tuning.TUNING.same_multiplier and 0.0 <= one <= 1.0:
                    found = found.below(weights, one, parts, self.cutoff)
        if weights[1] > 0.0:
            for place, segment in enumerate(near.chain):
                alone = np.zeros(len(near.chain))
                alone[place] = 1.0 / segment.repeat
                if _has_temporaries(segment) and np.abs(alone - parts).max() > tuning.TUNING.same_multiplier:
                    found = found.below(weights, share, alone, self.cutoff)
        return found

    def highest(self, state: State, near: PresolvedChain) -> ChainSums:
        """The chain's sums under the bound's multipliers and the others with the highest least sums, up to
        `Tuning.most_multipliers`."""
        found = self.of(state, near)
        if len(self.shares) <= tuning.TUNING.most_multipliers:
            return found
        others = 1 + np.argsort(-found.least[1:], kind="stable")[: tuning.TUNING.most_multipliers - 1]
        return found.some(np.array([0, *others.tolist()], dtype=np.intp))

    def of(self, state: State, near: PresolvedChain) -> ChainSums:
        """The chain's sums under all multipliers."""
        return state.chain_sums(near, self.weights, self.shares, self.peaks)


def _has_temporaries(segment: Segment) -> bool:
    costs = (factor.costs[..., 3:] for _, part in segment.modes for factor in part.factors)
    return any(bool((np.isfinite(own) & (own > 0.0)).any()) for own in costs)


Indices = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Tolerances of an enumeration: a label that stands for another costs at most `labels` (4) more in each
    folded column; a point of the answer is within a factor 1 + `points`. `relative` is the label tolerance
    relative to the least time and memory."""

    labels: Values
    points: float
    relative: float

    @staticmethod
    def of(labels: float, points: float, least_s: float, least_bytes: float) -> Tolerances:
        """Tolerances with labels within a factor 1 + `labels` of every solution, since no solution has less
        than the least time and memory."""
        peak_share = 1.0 - tuning.TUNING.resident_share
        least = np.array(
            [least_s, least_s, tuning.TUNING.resident_share * least_bytes, peak_share * least_bytes]
        )
        return Tolerances(labels * least, points, labels)

    def times(self, factor: float) -> Tolerances:
        """The tolerances times a factor, of both together."""
        whole = factor * ((1.0 + self.relative) * (1.0 + self.points) - 1.0)
        relative = factor * self.relative
        return Tolerances(factor * self.labels, (1.0 + whole) / (1.0 + relative) - 1.0, relative)

    def weighted_by(self, weights: Values) -> float:
        """How much higher the sum of a label that stands for another may be, under any multipliers with these
        weights (2)."""
        return float(weights @ [self.labels[:2].max(), self.labels[2:].sum()])


UNBOUNDED_BOX = np.array([np.inf, np.inf])
"""A box without limits."""


def enumerate_gap(
    state: State, lower_bound: int, limit: float, tolerances: Tolerances, box: Values = UNBOUNDED_BOX
) -> None:
    """Find all solutions below `box` (2) in time and memory whose sum under a bound's weights is below
    `limit`, up to the tolerances.

    If the bound weighs one objective only, find the least of this objective. Raises TooManyLabels.
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
    """Raise a bound of both objectives to the least weighted sum of any solution, up to the tolerances, and
    take a solution that reaches it.

    Memory is dualised at the slope of the bound, so labels have two times and a peak only, and are few. If
    the bound is far below all solutions because none has the mean of both times, this closes the gap at
    little cost. Raises TooManyLabels.
    """
    weights = state.lower_bounds.weights[lower_bound]
    dualised_chain = memory_dualised(state.presolved.chain, float(weights[1] / weights[0]))
    least = float((state.incumbents.points @ weights).min())
    start = replace(state.presolved, chain=dualised_chain)
    end = _labels_near(state, start, lower_bound, least * (1.0 + ROUNDING), tolerances, UNBOUNDED_BOX)
    if end is not None:
        near, labels = end
        sums = labels.points @ weights
        best = int(sums.argmin())
        state.take(near.originals(labels.solutions(np.array([best]))))
        # The tolerance of labels is at most this part of the least time, with dualised memory, and of the
        # least peak.
        least = min(least, float(sums[best]) * (1.0 - tolerances.relative))
    state.lower_bounds.raise_to(lower_bound, least)


def _labels_near(
    state: State, start: PresolvedChain, lower_bound: int, limit: float, tolerances: Tolerances, box: Values,
    *, with_completions: bool = False,
) -> tuple[PresolvedChain, ChainFrontier] | None:  # fmt: skip
    """The presolved chain near a bound and in a box, and its frontier; None if no choices or labels are left.

    With `with_completions`, labels that no explicit completion keeps below the limit are dropped as well. The
    cutoff is above the limit by the tolerance, since a label that stands for another may cost that much more.
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
            pass  # pruning by completion bounds alone
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
    """Whether a bound weighs a mean of both times."""
    return 0.0 < share < 1.0


def _segment_labels(
    state: State, near: PresolvedChain, bounds: CompletionBounds
) -> list[SegmentLabels] | None:
    """The labels of all segments; None if a segment has none."""
    segments = [
        segment_labels(near.chain, state.orders_in(near), place, bounds) for place in range(len(near.chain))
    ]
    return segments if all(len(segment.table) for segment in segments) else None


def _completions(
    state: State, near: PresolvedChain, lower_bound: int, bounds: CompletionBounds, tolerances: Tolerances
) -> Completions | None:
    """The explicit completions at each border of a presolved chain, with memory dualised at a bound's slope;
    None if there are none below the cutoff."""
    weights = state.lower_bounds.weights[lower_bound]
    rate = float(weights[1] / weights[0])
    dualised_near = replace(near, chain=memory_dualised(near.chain, rate))
    completion_tolerances = tolerances.times(tuning.TUNING.completion_share)
    cutoff = bounds.limit + completion_tolerances.weighted_by(weights)
    multipliers = MultiplierSet.of_bound(
        weights, float(state.lower_bounds.shares[lower_bound]), state.lower_bounds.peaks[lower_bound], cutoff
    )
    own = CompletionBounds(
        multipliers.with_others(dualised_near, tuning.TUNING.share_offsets).highest(state, dualised_near),
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
    """The presolved chain near a bound and in a box, and its completion bounds; None if nothing is left."""
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
    offsets = tuning.TUNING.share_offsets if state.is_tightened else ()
    before, multipliers = near, as_solved.with_others(near, offsets)
    if len(multipliers.shares) > len(as_solved.shares):
        near = _presolved_below(before, multipliers.of(state, before), cutoff)
        if not all(segment.modes for segment in near.chain):
            return near, None
        if choices_of(near.chain) > tuning.TUNING.worthwhile_choices * choices_of(before.chain):
            multipliers = as_solved
    return near, CompletionBounds(multipliers.highest(state, near), cutoff, tolerances.labels)


def _multipliers(
    state: State, near: PresolvedChain, lower_bound: int, limit: float, tolerances: Tolerances, box: Values
) -> MultiplierSet:
    """The multipliers of a bound as it was solved, and of time and memory alone where the box limits them."""
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
    """The chain without choices whose least total is above the cutoff under any multipliers."""
    return presolved(near, found, np.full((1, len(found.least)), cutoff))


def _own_tolerances(state: State, near: PresolvedChain, peaks: Values, tolerances: Tolerances) -> Tolerances:
    """The tolerances relative to the least time and memory of the presolved chain."""
    weights = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    least = state.chain_sums(near, weights, np.array([1.0, 0.0, 1.0]), np.repeat(peaks, 3, axis=0)).least
    return Tolerances.of(tolerances.relative, tolerances.points, float(least[:2].max()), float(least[2]))


def _fresh_representatives(state: State, points: Values, tolerance: float) -> Indices:
    """Which points of an enumeration to take: the non-dominated ones that no incumbent matches or dominates,
    thinned by the tolerance."""
    every = np.concatenate([state.incumbents.points, points])
    known = len(state.incumbents.points)
    fresh = np.array([row - known for row in non_dominated(every).tolist() if row >= known], dtype=np.intp)
    return np.asarray(fresh[representatives(points[fresh], tolerance)])


def _in_one_time(
    state: State, near: PresolvedChain, weights: Values, peaks: Values, cutoff: float
) -> PresolvedChain:
    """Drop the time that is the smaller one in every needed solution: one whose sum under `weights` (2) of
    larger time and memory is below `cutoff`.

    For any k >= 0, the excess of one time over the other is at least the least of excess + k (sum - cutoff).
    The sum counts the larger time alone, as labels do afterwards. A solution that is below the cutoff only by
    its smaller time would otherwise be dropped without proof.
    """
    if near.decided_share is not None:
        return near
    penalties = np.array(tuning.TUNING.penalties)
    for larger, smaller in ((0, 1), (1, 0)):
        excess, sum_weights = np.zeros(5), np.zeros(5)
        excess[larger], excess[smaller] = 1.0, -1.0
        sum_weights[larger], sum_weights[2:] = weights
        columns = excess[None] + penalties[:, None] * sum_weights[None]
        least = state.summed(near, columns, np.repeat(peaks, len(penalties), axis=0)).least
        if (least - penalties * cutoff >= 0.0).any():
            return replace(near, chain=without_columns(near.chain, smaller))
    return near


def relaxed_tolerances(state: State, tolerances: Tolerances, enough: float | None = None) -> Tolerances:
    """The tolerances after an enumeration that exceeded its limits, relaxed up to an epsilon of `enough`, by
    default `Tuning.relaxed_epsilon`; unchanged if that is hardly more."""
    state.is_hard = True
    enough = tuning.TUNING.relaxed_epsilon if enough is None else enough
    after = min(tuning.TUNING.relax_factor * state.working_epsilon, enough)
    if after < tuning.TUNING.least_relax_factor * state.working_epsilon or not state.working_epsilon:
        return tolerances
    factor, state.working_epsilon = after / state.working_epsilon, after
    return tolerances.times(factor)
