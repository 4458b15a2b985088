"""Messages between neighbouring stages of a pipeline, each over the tier that lies between the two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from shardwise.cluster import Tier


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Where the ranks of pipelines of `pp` lie, as columns.

    Per tier but the last, in lowest terms: counted in ranks from where a pipeline begins, groups of the tier
    begin at the multiples of `borders`, some pipeline's at each of them, and neighbours are `strides` apart.
    Where every hop leaves its group, both are 1.

    Per tier: of a group of the tier below, `senders` devices next to each other send at each hop over it;
    0 where none does or all might as well send: they have no more than their share.
    """

    pp: Any
    borders: tuple[Any, ...]
    strides: tuple[Any, ...]
    senders: tuple[Any, ...]

    def taken(self, rows: Any) -> Neighbours:
        """The columns at these rows."""
        borders, strides, senders = (
            tuple(each[rows] for each in per_tier) for per_tier in (self.borders, self.strides, self.senders)
        )
        return Neighbours(self.pp[rows], borders, strides, senders)

    def tier(self, rank: Any) -> Any:
        """Index of the innermost tier that holds each rank of the pipeline and the one behind it, for the
        worst placed pipeline."""
        index: Any = 0 * (rank + self.pp)
        for border, stride in zip(self.borders, self.strides, strict=True):
            # Their devices lie between rank * stride and (rank + 2) * stride: is there a border inside?
            index = index + (((rank + 2) * stride - 1) // border > rank * stride // border)
        return index

    @property
    def wraparound_tier(self) -> Any:
        """The same of the first rank and the last."""
        index: Any = 0 * self.pp
        for border, stride in zip(self.borders, self.strides, strict=True):
            index = index + (border != self.pp * stride)
        return index

    @property
    def wraparound_senders(self) -> Any:
        """How many send from the first rank to the last at once, `senders` of the tier between them."""
        return np.choose(self.wraparound_tier, self.senders)

    @property
    def leaving(self) -> list[Any]:
        """How many of the pp - 1 hops leave their group, per tier: all of them tier -1, none the last."""
        counts = [self.pp - 1]
        for border, stride in zip(self.borders, self.strides, strict=True):
            inside = self.pp * stride // border - 1
            # Two hops pass a border between the devices of a rank, one passes that between two ranks.
            counts.append(2 * inside - inside // stride)
        return [*counts, 0 * self.pp]


def neighbours_of(tiers: Sequence[Tier], pp: Any, stride: Any) -> Neighbours:
    """Neighbours of pipelines of `pp` ranks that lie `stride` ranks apart."""
    borders, strides = [], []
    senders = [_senders(tiers[0], 1, stride, pp > 1)]
    for tier, outer in pairwise(tiers):
        border = np.gcd(stride * pp, tier.span)
        common = np.gcd(border, stride)
        leaves = border < 2 * stride
        borders.append(np.where(leaves, 1, border // common))
        strides.append(np.where(leaves, 1, stride // common))
        senders.append(_senders(outer, tier.span, stride, border < stride * pp))
    return Neighbours(pp, tuple(borders), tuple(strides), tuple(senders))


def _senders(tier: Tier, inside: int, stride: Any, is_crossed: Any) -> Any:
    """Of the `inside` devices of a group below the tier the last `stride` have their next stage elsewhere;
    all of them are of one stage where stages fit the groups, of two at most where they do not."""
    count = np.minimum(stride, inside)
    return np.where(is_crossed & (count * tier.bytes_per_s < tier.flow_bytes_per_s), count, 0)


@dataclass(frozen=True, slots=True)
class HopTimes:
    """Seconds of a message between neighbouring stages by the tier between them; shape (tiers, rows)."""

    neighbours: Neighbours
    by_tier_s: Any

    def taken(self, rows: Any) -> HopTimes:
        """The columns at these rows."""
        return HopTimes(self.neighbours.taken(rows), self.by_tier_s[:, rows])

    def after_s(self, stage: Any, is_v: Any) -> Any:
        """A message from each stage to the next, or back; nothing where a V turns round. `stage` has shape
        (places, 1 or rows)."""
        pp = self.neighbours.pp
        turned = is_v & (stage >= pp)
        rank = np.where(turned, 2 * pp - 2 - stage, stage % pp)
        ends = ~np.asarray(is_v) & (rank == pp - 1)
        tier = np.where(ends, self.neighbours.wraparound_tier, self.neighbours.tier(rank))
        seconds = np.take_along_axis(self.by_tier_s, tier, axis=0)
        return np.where(is_v & (stage == pp - 1), 0.0, seconds)

    @property
    def mean_s(self) -> Any:
        """The mean of the hops from the first rank to the last."""
        leaving = self.neighbours.leaving
        total_s = sum(
            (more - less) * hop_s
            for more, less, hop_s in zip(leaving, leaving[1:], self.by_tier_s, strict=False)
        )
        return total_s / np.maximum(self.neighbours.pp - 1, 1)

    @property
    def shortest_s(self) -> Any:
        """The shortest of them and of that from the last rank to the first."""
        leaving, ends = self.neighbours.leaving, self.neighbours.wraparound_tier
        found: Any = np.inf
        for tier, hop_s in enumerate(self.by_tier_s):
            is_used = (leaving[tier] > leaving[tier + 1]) | (ends == tier)
            found = np.where(is_used, np.minimum(found, hop_s), found)
        return found
