"""Label setting along a chain: the frontiers of segments, joined to the frontier of the chain.

`segment_labels` eliminates the inner variables of one segment. `chain_frontier` joins segments by linear
dynamic programming from both ends (FT-LDP). `merged` eliminates the borders in any order (FT-elimination).
`eliminate_small_chain` solves small chains directly and exactly, since the two-phase method takes longer
there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shardwise.pareto import Chain, Segment, non_dominated
from shardwise.search.pareto import tuning
from shardwise.search.pareto.completion_bounds import CompletionBounds, Completions, LeastPeaks
from shardwise.search.pareto.dominance import reduced
from shardwise.search.pareto.elimination import EliminationLimits, eliminated
from shardwise.search.pareto.elimination_order import EliminationOrder
from shardwise.search.pareto.labels import (
    Allowance,
    Labels,
    TerminalJoin,
    TooManyLabels,
    chosen,
    joined,
    leaf_rows,
)
from shardwise.search.pareto.solution import SegmentChoice, Solution, folded, measures, occurrences
from shardwise.search.pareto.state import orders_of
from shardwise.search.pareto.weighted_sums import SeparatorAxes, shared_of

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class SegmentLabels:
    """The frontiers of a segment, all modes together.

    `table` is on (shared variables..., entry, exit), with entry and exit as variables 0 and 1, in folded
    columns. Label i is row rows[i] of the table of mode modes[i].
    """

    segment: Segment
    table: Labels
    modes: Indices
    rows: Indices
    by_mode: tuple[Labels, ...]

    def with_outside_peaks(self, peaks: Values) -> SegmentLabels:
        """The labels that stay non-dominated if the rest of every solution has at least these peaks (entry,
        exit). Infinite: no solution has these border choices."""
        least = peaks.reshape(-1)[self.table.cells % peaks.size]
        points = self.table.points.copy()
        points[:, -1] = np.maximum(points[:, -1], least)
        left = np.flatnonzero(np.isfinite(least))
        best = left[non_dominated(points[left], groups=self.table.cells[left])]
        return replace(self, table=replace(self.table, points=points)).some(best)

    def some(self, rows: Indices) -> SegmentLabels:
        """The labels of some rows."""
        table = replace(self.table, cells=self.table.cells[rows], points=self.table.points[rows])
        return replace(self, table=table, modes=self.modes[rows], rows=self.rows[rows])

    def choices(self, rows: Indices) -> list[SegmentChoice]:
        """The mode and the choices of each of some labels."""
        found: list[SegmentChoice | None] = [None] * len(rows)
        for mode in np.unique(self.modes[rows]).tolist():
            own = np.flatnonzero(self.modes[rows] == mode)
            by_variable = chosen(self.by_mode[mode], self.rows[rows[own]])
            columns = [by_variable[variable] for variable in range(len(self.segment.modes[mode][1].sizes))]
            picked = np.stack(columns, axis=1).tolist() if columns else [[]] * len(own)
            for place, numbers in zip(own.tolist(), picked, strict=True):
                found[place] = SegmentChoice(mode, tuple(numbers))
        return [choice for choice in found if choice is not None]


def segment_labels(
    chain: Chain,
    orders: list[list[EliminationOrder]],
    place: int,
    bounds: CompletionBounds | None = None,
    allowance: Allowance | None = None,
) -> SegmentLabels:
    """The frontiers of segment `place`, all modes together.

    Raises TooManyLabels if joins exceed their limits; without bounds an `allowance` may set these limits.
    """
    segment, borders = chain[place], SeparatorAxes.of(chain)
    tables: list[Labels] = []
    cells: list[Indices] = []
    for mode, (_, part) in enumerate(segment.modes):
        if bounds is None:
            found = eliminated(part, orders[place][mode], allowance=allowance)
        else:
            chain_sums = bounds.chain_sums
            factor_sums = chain_sums.factor_sums[place][mode]
            beyond = chain_sums.outside(
                [range(at, at + 1) for at in bounds.span(place)], shared_of([segment])
            )
            factor_sums.distribute(borders.from_axes(part, beyond))
            found = eliminated(
                part,
                orders[place][mode],
                EliminationLimits(factor_sums, bounds.limit, bounds.in_part(place, part)),
            )
        tables.append(found)
        at, cell = found.coordinates(), np.zeros(len(found), dtype=np.intp)
        for variable in borders.variables(part).values():
            cell = cell * part.sizes[variable] + at[variable]
        cells.append(cell)
    _, part = segment.modes[0]
    variables = tuple(borders.variables(part))
    sizes = tuple(part.sizes[variable] for variable in borders.variables(part).values())
    points = folded(np.concatenate([table.points for table in tables]))
    cell = np.concatenate(cells)
    modes = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    rows = np.concatenate([np.arange(len(table)) for table in tables])
    weights, dominance = np.ones(4), None
    if bounds is not None:
        weights, dominance = bounds.weights[:, 0], bounds.in_segment(place)
    best = reduced(cell, points, points @ weights, dominance)
    table = Labels(variables, sizes, cell[best], points[best])
    return SegmentLabels(segment, table, modes[best], rows[best], tuple(tables))


def with_least_peaks(
    chain: Chain, segments: list[SegmentLabels], bounds: CompletionBounds
) -> tuple[list[SegmentLabels], CompletionBounds]:
    """The labels of all segments, without those that differ in peaks only below the least peak of the rest,
    and the bounds with the least peaks."""
    peaks = LeastPeaks.of([segments[place].table for place in occurrences(chain)])
    found = [
        segment.with_outside_peaks(peaks.outside([range(at, at + 1) for at in bounds.span(place)]))
        for place, segment in enumerate(segments)
    ]
    return found, replace(bounds, peaks=peaks)


@dataclass(frozen=True, slots=True, eq=False)
class ChainFrontier:
    """The frontier of a chain: `points` (n, 2) in seconds and bytes. Point i is row rows[i] of `end`, whose
    origins are the tables of the segments in their order."""

    chain: Chain
    segments: list[SegmentLabels]
    end: Labels
    points: Values
    rows: Indices

    def solutions(self, which: Indices | None = None) -> list[Solution]:
        """A solution for each point, or for the points of these numbers."""
        rows = self.rows if which is None else self.rows[which]
        choices: list[list[SegmentChoice]] = []
        for place, own in zip(occurrences(self.chain), leaf_rows(self.end, rows), strict=True):
            known, inverse = np.unique(own, return_inverse=True)
            found = self.segments[place].choices(known)
            choices.append([found[at] for at in inverse])
        return list(zip(*choices, strict=True))


def _between(table: Labels, border: int, after: int) -> Labels:
    """A table on (shared variables..., entry, exit), or on one of them, as a table on two borders."""
    names = tuple((border, after)[variable] if variable >= 0 else variable for variable in table.variables)
    return Labels(names, table.sizes, table.cells, table.points, table.origins)


def _named(segments: list[SegmentLabels], place: int, border: int) -> Labels:
    """A segment's table between two borders."""
    return _between(segments[place].table, border, border + 1)


def chain_frontier(
    chain: Chain,
    segments: list[SegmentLabels],
    bounds: CompletionBounds | None = None,
    completions: Completions | None = None,
    allowance: Allowance | None = None,
) -> ChainFrontier:
    """The frontier of a chain by linear dynamic programming (FT-LDP).

    A prefix and a suffix are extended by one run of equal segments at a time, always the one with fewer pairs
    of labels, until they meet in the terminal join. With `completions`, labels that no completion keeps below
    the cutoff are dropped. Raises TooManyLabels if a join exceeds its limits; without bounds an `allowance`
    may set these limits.
    """
    borders, tables = _runs(chain, segments, bounds, allowance)
    if len(tables) == 1:
        return _finished(chain, segments, tables[0])
    first, last = 0, len(tables) - 1
    prefix = _completed(tables[first], borders[1], completions, is_prefix=True)
    suffix = _completed(tables[last], borders[last], completions, is_prefix=False)
    while last - first > 1:
        if _pairs_at_most(prefix, tables[first + 1]) <= _pairs_at_most(suffix, tables[last - 1]):
            first += 1
            prefix = _extended_prefix(
                prefix, tables[first], borders[first], borders[first + 1], bounds, allowance
            )
            prefix = _completed(prefix, borders[first + 1], completions, is_prefix=True)
        else:
            last -= 1
            here, after = borders[last + 1], borders[last]
            suffix = _extended_suffix(tables[last], suffix, here, after, borders[-1], bounds, allowance)
            suffix = _completed(suffix, borders[last], completions, is_prefix=False)
    pruning, slack = (None, None) if bounds is None else bounds.in_final_join(borders[last])
    terminal = TerminalJoin(slack, 0 if completions is None else tuning.TUNING.most_completed_pairs)
    end = joined(
        prefix, suffix, without=borders[last], pruning=pruning, terminal=terminal, allowance=allowance
    )
    return _finished(chain, segments, end)


def completed(segments: list[SegmentLabels], chain: Chain, completions: Completions) -> list[SegmentLabels]:
    """The labels of segments that some completion keeps below the cutoff; segments with repetitions stay as
    they are."""
    found, border = [], 0
    for segment in segments:
        after = border + segment.segment.repeat
        if segment.segment.repeat == 1 and len(chain) > 1:
            mask = completions.completed_between(_between(segment.table, border, after), border, after)
            segment = segment.some(np.flatnonzero(mask))
        found.append(segment)
        border = after
    return found


def completions_of(
    chain: Chain,
    segments: list[SegmentLabels],
    bounds: CompletionBounds,
    rate: float,
    share: float,
    cutoff: float,
) -> Completions:
    """The explicit completions of a chain with dualised memory: all labels of the prefix and of the suffix at
    each border.

    `rate` is the multiplier of memory in seconds per byte. Whole solutions are needed up to a weighted sum of
    `cutoff` seconds.
    """
    borders, tables = _runs(chain, segments, bounds)
    last = len(tables) - 1
    prefix, suffix = {borders[1]: tables[0]}, {borders[last]: tables[last]}
    for place in range(1, last):
        here, after = borders[place], borders[place + 1]
        prefix[after] = _extended_prefix(prefix[here], tables[place], here, after, bounds)
    for place in range(last - 1, 0, -1):
        here, after = borders[place + 1], borders[place]
        suffix[after] = _extended_suffix(tables[place], suffix[here], here, after, borders[-1], bounds)
    return Completions(prefix, suffix, rate, share, cutoff)


def _runs(
    chain: Chain,
    segments: list[SegmentLabels],
    bounds: CompletionBounds | None,
    allowance: Allowance | None = None,
) -> tuple[list[int], list[Labels]]:
    """The borders between runs of equal segments, and the tables of these runs."""
    tables: list[Labels] = []
    borders = [0]
    for place, segment in enumerate(chain):
        length = 1 << (segment.repeat.bit_length() - 1) // 2
        start = borders[-1]
        runs = [(1, segments[place].table)] * (segment.repeat % length)
        runs += [(length, _run(segments[place], start, length, bounds, allowance))] * (
            segment.repeat // length
        )
        for covered, table in runs:
            borders.append(borders[-1] + covered)
            tables.append(_between(table, borders[-2], borders[-1]))
    return borders, tables


def _extended_prefix(
    prefix: Labels,
    table: Labels,
    border: int,
    after: int,
    bounds: CompletionBounds | None,
    allowance: Allowance | None = None,
) -> Labels:
    """The prefix at a border, extended by a table to the next border."""
    pruning, dominance = (None, None) if bounds is None else bounds.in_extension(border, after, 0)
    return joined(prefix, table, without=border, pruning=pruning, dominance=dominance, allowance=allowance)


def _extended_suffix(
    table: Labels,
    suffix: Labels,
    border: int,
    after: int,
    end: int,
    bounds: CompletionBounds | None,
    allowance: Allowance | None = None,
) -> Labels:
    """The suffix at a border, extended by a table that leads there from the border before."""
    pruning, dominance = (None, None) if bounds is None else bounds.in_extension(border, after, end)
    return joined(table, suffix, without=border, pruning=pruning, dominance=dominance, allowance=allowance)


def _completed(table: Labels, border: int, completions: Completions | None, *, is_prefix: bool) -> Labels:
    """The labels of a prefix or suffix that some completion keeps below the cutoff."""
    return table if completions is None else completions.completed(table, border, is_prefix=is_prefix)


def _pairs_at_most(a: Labels, b: Labels) -> int:
    return len(a) * len(b)


def _run(
    segment: SegmentLabels,
    start: int,
    length: int,
    bounds: CompletionBounds | None,
    allowance: Allowance | None,
) -> Labels:
    """The table of `length` equal segments in a row, a power of 2, on (shared variables..., entry, exit). The
    first occurrence of the segment is `start`."""
    table = segment.table
    run_length = 1
    while run_length < length:
        run_length *= 2
        pruning = dominance = None
        if bounds is not None:
            starts = range(start, start + segment.segment.repeat - run_length + 1)
            pruning, dominance = bounds.in_run(starts, run_length, 1.0 / (length.bit_length() - 1))
        halves = _between(table, 0, 1), _between(table, 1, 2)
        both = joined(*halves, without=1, pruning=pruning, dominance=dominance, allowance=allowance)
        table = replace(both, variables=segment.table.variables)
    return table


def merged(chain: Chain, segments: list[SegmentLabels]) -> ChainFrontier:
    """The frontier by elimination alone (FT-elimination): neighbouring segments are joined until one is
    left."""
    left = [_named(segments, place, border) for border, place in enumerate(occurrences(chain))]
    borders = list(range(1, len(left)))
    while len(left) > 1:
        pairs = [
            joined(a, b, without=border)
            for a, b, border in zip(left[::2], left[1::2], borders[::2], strict=False)
        ]
        left = pairs + left[2 * len(pairs) :]
        borders = borders[1::2]
    return _finished(chain, segments, left[0])


def _finished(chain: Chain, segments: list[SegmentLabels], end: Labels) -> ChainFrontier:
    points = measures(end.points)
    best = non_dominated(points)
    return ChainFrontier(chain, segments, end, points[best], best)


def eliminate_small_chain(chain: Chain) -> ChainFrontier | None:
    """The exact frontier of a chain by direct elimination; None if it exceeds the limits."""
    parts = [part for segment in chain for _, part in segment.modes]
    costs = sum(factor.costs[..., 0].size for part in parts for factor in part.factors)
    if costs > tuning.TUNING.small_chain_costs:
        return None
    allowance = Allowance(tuning.TUNING.small_chain_pairs, tuning.TUNING.small_chain_labels)
    orders = orders_of(chain)
    try:
        segments = [segment_labels(chain, orders, place, allowance=allowance) for place in range(len(chain))]
        return chain_frontier(chain, segments, allowance=allowance)
    except TooManyLabels:
        return None
