"""The forms of a line: sums that all are below the weighted sum of a solution, so that each of them tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.frontier import Segment
from shardwise.search.tracking.chained import ChainSums
from shardwise.search.tracking.prune import PresolvedChain
from shardwise.search.tracking.state import State

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
