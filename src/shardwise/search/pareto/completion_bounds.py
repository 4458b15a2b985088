"""Completion bounds (cost to go) of labels along a chain, and the label tolerance of each join.

`CompletionBounds` gives each join its pruning (least cost of the rest of a solution) and its
epsilon-dominance (share of the label tolerance). `LeastPeaks` is the least peak outside a part of the chain.
`Completions` are the explicit costs of all prefixes and suffixes, with dualised memory: they bound both times
and the peak separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shardwise.pareto import FactorGraph
from shardwise.search.pareto import tuning
from shardwise.search.pareto.dominance import EpsilonDominance
from shardwise.search.pareto.labels import LabelPruning, Labels, keys_on
from shardwise.search.pareto.weighted_sums import ChainSums, shared_of
from shardwise.ties import ROUNDING

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class LeastPeaks:
    """The least peak of every prefix and of every suffix at each border, for each choice at the border.

    The largest peak of a solution counts, so a label's own smaller peak makes no difference.
    """

    prefix: list[Values]
    suffix: list[Values]

    @staticmethod
    def of(tables: list[Labels]) -> LeastPeaks:
        """From the tables of all occurrences on (entry, exit) or one of them, for any choice of the shared
        variables."""
        least = [_least(table, is_first=place == 0) for place, table in enumerate(tables)]
        prefix, suffix = [np.zeros(1)], [np.zeros(1)]
        for table in least:
            prefix.append(np.maximum(prefix[-1][:, None], table).min(axis=0))
        for table in reversed(least):
            suffix.append(np.maximum(table, suffix[-1][None]).min(axis=1))
        return LeastPeaks(prefix, suffix[::-1])

    def outside(self, spans: list[range]) -> Values:
        """The least peak outside any of these spans of occurrences, (entry, exit)."""
        return np.asarray(
            np.minimum.reduce(
                [np.maximum(self.prefix[span.start][:, None], self.suffix[span.stop][None]) for span in spans]
            )
        )


def _least(table: Labels, *, is_first: bool) -> Values:
    """The least peak in each cell of a table, (entry or 1, exit or 1); infinite where there is no label."""
    least = np.full(int(np.prod(table.sizes, dtype=np.intp)), np.inf)
    np.minimum.at(least, table.cells, table.points[:, -1])
    sizes = [size for variable, size in zip(table.variables, table.sizes, strict=True) if variable >= 0]
    least = np.asarray(least.reshape((-1, *sizes)).min(axis=0))
    if len(sizes) == 2:
        return least
    return least.reshape((1, -1) if is_first else (-1, 1))


@dataclass(frozen=True, slots=True, eq=False)
class CompletionBounds:
    """A chain under several multipliers, the limit of the weighted sum of each, and the label tolerance.

    A solution is needed only if its sum is below `limit` under all multipliers. `tolerance` (4) is how much
    more a label that stands for another may cost in each folded column, over the whole chain; 0 if it may
    not. `peaks` are the least peaks of the rest, once they are known.

    The tolerance of a table counts once per occurrence of its segment. An extension spends more the longer
    the prefix is, since labels are farther apart there.
    """

    chain_sums: ChainSums
    limit: float
    tolerance: Values
    peaks: LeastPeaks | None = None

    @property
    def weights(self) -> Values:
        """Weights of the folded columns under each of J multipliers, (4, J)."""
        return np.asarray(self.chain_sums.chain_weights.weights[:, [0, 1, 2, 4]].T)

    @property
    def occurrences(self) -> int:
        """Number of segments, repetitions counted."""
        return sum(segment.repeat for segment in self.chain_sums.chain)

    def span(self, place: int) -> range:
        """The occurrences of segment `place`."""
        start = sum(segment.repeat for segment in self.chain_sums.chain[:place])
        return range(start, start + self.chain_sums.chain[place].repeat)

    def _weight(self, place: int) -> float:
        """Share of one occurrence of a segment in the tolerance: its share of all variables."""
        counts, total = self._variables
        return counts[place] / total

    @property
    def _variables(self) -> tuple[list[int], int]:
        """Number of variables of each segment, and of all occurrences of all segments together."""
        chain = self.chain_sums.chain
        counts = [max(len(part.sizes) for _, part in segment.modes) for segment in chain]
        return counts, sum(count * segment.repeat for count, segment in zip(counts, chain, strict=True))

    @property
    def _parts_share(self) -> float:
        """Share of the label tolerance that elimination within segments spends."""
        counts, total = self._variables
        return max(
            tuning.TUNING.parts_share,
            (tuning.TUNING.parts_share + tuning.TUNING.extension_share) * max(counts) / total,
        )

    def in_segment(self, place: int) -> EpsilonDominance | None:
        """Epsilon-dominance of the labels of a segment, all modes together."""
        spans = [range(at, at + 1) for at in self.span(place)]
        share = tuning.TUNING.segments_share * self._weight(place)
        return self._dominance(share, tuning.TUNING.segments_excess_share, spans, self.weights_in(spans[0]))

    def in_part(self, place: int, part: FactorGraph) -> EpsilonDominance | None:
        """Epsilon-dominance of the labels of one mode of a segment, whose factor graph is `part`, during
        elimination. The potential is that of the last table, variables by their numbers."""
        spans = [range(at, at + 1) for at in self.span(place)]
        share = self._parts_share * self._weight(place)
        dominance = self._dominance(share, tuning.TUNING.parts_excess_share, spans, self.weights_in(spans[0]))
        if dominance is None:
            return None
        potential = self.chain_sums.borders.from_axes(part, self._least_potential(spans)[..., None])
        return replace(dominance, potential=_finite(potential))

    def in_run(self, starts: range, length: int, part: float) -> tuple[LabelPruning, EpsilonDominance | None]:
        """Pruning and epsilon-dominance of runs of `length` segments that start at any of these occurrences.
        They spend `part` of the tolerance of all runs."""
        spans = [range(at, at + length) for at in starts]
        shared = self._shared_of_span(range(starts.start, starts.start + 1))
        outside = self.chain_sums.borders.min_marginal(self.chain_sums.outside(spans, shared), shared)
        peaks = self.peaks.outside(spans) if self.peaks is not None else np.zeros(1)
        share = tuning.TUNING.runs_share * part * length / self.occurrences
        first = spans[0]
        half = first.start + length // 2
        dominance = self._dominance(
            share, tuning.TUNING.runs_excess_share * part, spans, self.weights_in(first)
        )
        return self._pruning((range(first.start, half), range(half, first.stop)), outside, peaks), dominance

    def in_extension(self, border: int, after: int, end: int) -> tuple[LabelPruning, EpsilonDominance | None]:
        """Pruning and epsilon-dominance of the extension from a border to the next. `end` is the end of the
        chain from which the labels come: 0 (prefix) or the last border (suffix)."""
        way = range(min(end, after), max(end, after))
        rest = self.chain_sums.suffix[after] if end == 0 else self.chain_sums.prefix[after]
        outside = self.chain_sums.borders.min_marginal(rest, self._shared_of_span(way))
        peaks = np.zeros(1)
        if self.peaks is not None:
            peaks = self.peaks.suffix[after] if end == 0 else self.peaks.prefix[after]
        parts = (range(way.start, border), range(border, way.stop))
        part = _spendable_by(len(way) / self.occurrences) - _spendable_by(
            abs(border - end) / self.occurrences
        )
        share = (1.0 - tuning.TUNING.final_join_share) * self._extension_share * part
        return self._pruning(parts, outside, peaks), EpsilonDominance.even(
            self.tolerance * share
        ) if self.tolerance.any() else None

    @property
    def _extension_share(self) -> float:
        """Share of the label tolerance that extension and the terminal join spend."""
        return tuning.TUNING.parts_share + tuning.TUNING.extension_share - self._parts_share

    def in_final_join(self, border: int) -> tuple[LabelPruning, Values | None]:
        """Pruning of whole solutions where prefix and suffix meet at a border, and the seconds and bytes of
        tolerance there."""
        shared = self._shared_of_span(range(self.occurrences))
        outside = self.chain_sums.borders.min_marginal(np.zeros_like(self.chain_sums.prefix[0]), shared)[
            ..., 0, :
        ]
        pruning = self._pruning((range(border), range(border, self.occurrences)), outside, np.zeros(()))
        if not self.tolerance.any():
            return pruning, None
        own = tuning.TUNING.final_join_share * self._extension_share * self.tolerance
        return pruning, np.array([own[:2].max(), own[2:].sum()])

    def _dominance(
        self, share: float, excess_share: float, spans: list[range], weights: Values
    ) -> EpsilonDominance | None:
        """Epsilon-dominance of a table on (shared variables..., entry, exit) of labels under `weights`, for
        all these spans of occurrences, which have the same shared variables. `share` of the tolerance is
        even; `excess_share` is in proportion to a label's part of the largest excess, under the first
        multipliers."""
        if not self.tolerance.any():
            return None
        potential = _finite(
            self.chain_sums.borders.min_marginal(self._least_potential(spans), self._shared_of_span(spans[0]))
        )
        excess = self.limit - float(self.chain_sums.least[0])
        return EpsilonDominance(
            self.tolerance * share, self.tolerance * excess_share / excess, weights[:, 0], potential
        )

    def _least_potential(self, spans: list[range]) -> Values:
        """The least potential of any of these spans, (shared variables..., entry, exit)."""
        return np.asarray(np.minimum.reduce([self._potential(span) for span in spans]))

    def _potential(self, span: range) -> Values:
        """Least cost of what follows a span less the least cost from the span on, (shared variables...,
        entry, exit)."""
        before, after = (
            self.chain_sums.suffix[span.start][..., :, None, 0],
            self.chain_sums.suffix[span.stop][..., None, :, 0],
        )
        return np.where(np.isfinite(before), after, np.inf) - np.where(np.isfinite(before), before, 0.0)

    def _shared_of_span(self, span: range) -> set[str]:
        """The shared variables of the segments with these occurrences."""
        chain = self.chain_sums.chain
        return shared_of([segment for place, segment in enumerate(chain) if _overlap(self.span(place), span)])

    def weights_in(self, span: range) -> Values:
        """Weights of the folded columns in a span of occurrences, (4, J): the peak has the multipliers of
        these segments."""
        repeats = [segment.repeat for segment in self.chain_sums.chain]
        parts = np.repeat(self.chain_sums.chain_weights.peaks, repeats, axis=0)
        own = self.weights.copy()
        own[3] *= parts[span.start : span.stop].sum(axis=0)
        return own

    def _pruning(self, spans: tuple[range, range], outside: Values, peaks: Values) -> LabelPruning:
        """Pruning of the labels of two adjacent spans of occurrences together, by the least sums and the
        least peaks of the rest."""
        peaks = np.broadcast_to(peaks, outside.shape[:-1])
        is_some = np.isfinite(peaks)
        return LabelPruning(
            self.weights_in(spans[0]), self.weights_in(spans[1]),
            self.weights_in(range(spans[0].start, spans[1].stop)),
            np.where(is_some[..., None], outside, np.inf), self.limit, np.where(is_some, peaks, 0.0),
        )  # fmt: skip


def _spendable_by(part: float) -> float:
    """Share of the extension's tolerance that may be spent once this part of the chain is covered.

    It grows slowly at first, where labels are few and close together. A prefix and a suffix that meet have
    spent all of it, wherever they meet.
    """
    return 2.0 * part**2 if part < 0.5 else 1.0 - 2.0 * (1.0 - part) ** 2


def _finite(potential: Values) -> Values:
    """A potential by cell; 0 where no label is feasible."""
    return np.where(np.isfinite(potential), potential, 0.0).reshape(-1)


def _overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class Completions:
    """Explicit completions of a chain with dualised memory: all labels of the prefix and of the suffix at
    each border.

    `rate` is the multiplier of memory in seconds per byte. A solution is needed only if its larger time,
    dualised memory included, plus `rate` times its largest peak is below `cutoff` seconds. `share` is the
    share of hidden_s in the sum by which completions are sorted.

    A weighted sum bounds a mean of both times and of all peaks, which is weak if a few large costs are in one
    of the times. Completions have both times and the peak themselves.
    """

    prefix: Mapping[int, Labels]
    suffix: Mapping[int, Labels]
    rate: float
    share: float
    cutoff: float

    def completed(self, table: Labels, border: int, *, is_prefix: bool) -> Labels:
        """The labels of a prefix or suffix table that some completion keeps below the cutoff."""
        from shardwise.search.pareto.joins_numba import are_within

        matches = _Matches.of(
            table, (self.suffix if is_prefix else self.prefix)[border], self.rate, self.share
        )
        left = np.flatnonzero(matches.is_there)
        own = dualised_points(table.points[left], self.rate)
        found = are_within(
            own, matches.at[left], matches.completions, matches.places, self.cutoff * (1.0 + ROUNDING)
        )
        return _some(table, left[found])

    def completed_between(self, table: Labels, before: int, after: int) -> Mask:
        """Which labels of a table between two borders some prefix and some suffix keep below the cutoff; at
        an end of the chain, some completion on the other side."""
        from shardwise.search.pareto.joins_numba import are_within_both

        own = dualised_points(table.points, self.rate)
        nothing = _Matches(np.zeros(len(table), dtype=np.intp), np.ones(len(table), dtype=bool),
                       np.zeros((1, 3)), np.array([0, 1], dtype=np.intp))  # fmt: skip
        sides = [
            _Matches.of(table, completions[border], self.rate, self.share)
            if border in completions
            else nothing
            for completions, border in ((self.prefix, before), (self.suffix, after))
        ]
        found: Mask = sides[0].is_there & sides[1].is_there
        left = np.flatnonzero(found)
        one, other = sides
        found[left] = are_within_both(
            np.ascontiguousarray(own[left]), one.at[left], one.completions, one.places, other.at[left],
            other.completions,
            other.places, self.share, self.cutoff * (1.0 + ROUNDING),
        )  # fmt: skip
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Matches:
    """The completions of each label: rows places[at] to places[at + 1] of `completions` (n, 3), by ascending
    weighted sum of both times. `is_there` tells whether a label has any."""

    at: Indices
    is_there: Mask
    completions: Values
    places: Indices

    @staticmethod
    def of(table: Labels, rest: Labels, rate: float, share: float) -> _Matches:
        """Match labels and completions that agree in their common variables. hidden_s has this share in the
        sorting sum."""
        shared = tuple(variable for variable in table.variables if variable in rest.variables)
        points = dualised_points(rest.points, rate)
        keys, table_keys = keys_on(rest, shared), keys_on(table, shared)
        order = np.lexsort((points[:, :2] @ [share, 1.0 - share], keys))
        known, starts = np.unique(keys[order], return_index=True)
        at = np.minimum(np.searchsorted(known, table_keys), max(len(known) - 1, 0))
        is_there = known[at] == table_keys if len(known) else np.zeros(len(table), dtype=bool)
        places = np.append(starts, len(order)).astype(np.intp)
        return _Matches(at, is_there, np.ascontiguousarray(points[order]), places)


def dualised_points(points: Values, rate: float) -> Values:
    """Folded columns (n, 4) in seconds, memory dualised: both times with resident bytes, and the peak, (n,
    3)."""
    resident_s = rate * points[:, 2]
    return np.stack([points[:, 0] + resident_s, points[:, 1] + resident_s, rate * points[:, 3]], axis=1)


def _some(table: Labels, rows: Indices) -> Labels:
    """The labels of some rows of a table."""
    if len(rows) == len(table):
        return table
    return Labels(table.variables, table.sizes, table.cells[rows], table.points[rows], ((table, rows),))
