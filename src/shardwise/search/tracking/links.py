"""The frontiers of one link of a chain: labels on its entry and exit, whatever its mode."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shardwise.frontier import Chain, Segment, non_dominated
from shardwise.search.tracking.borders import SeparatorAxes, shared_of
from shardwise.search.tracking.bounds import CompletionBounds
from shardwise.search.tracking.eliminate import EliminationLimits, eliminated
from shardwise.search.tracking.grid import reduced
from shardwise.search.tracking.labels import Allowance, Labels, chosen
from shardwise.search.tracking.peaks import LeastPeaks
from shardwise.search.tracking.solution import SegmentChoice, folded, occurrences
from shardwise.search.tracking.steps import EliminationOrder

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class SegmentLabels:
    """The frontiers of a link, whatever its mode: `table` on (hubs..., entry, exit), entry and exit as
    variables 0 and 1, with folded columns; label i is row rows[i] of mode modes[i]."""

    segment: Segment
    table: Labels
    modes: Indices
    rows: Indices
    by_mode: tuple[Labels, ...]

    def with_outside_peaks(self, peaks: Values) -> SegmentLabels:
        """The labels that are left where all others of a solution have at least these peaks (entry, exit), or
        where there is none (infinite)."""
        least = peaks.reshape(-1)[self.table.cells % peaks.size]
        points = self.table.points.copy()
        points[:, -1] = np.maximum(points[:, -1], least)
        left = np.flatnonzero(np.isfinite(least))
        best = left[non_dominated(points[left], groups=self.table.cells[left])]
        return replace(self, table=replace(self.table, points=points)).some(best)

    def some(self, rows: Indices) -> SegmentLabels:
        """Some of the labels."""
        table = replace(self.table, cells=self.table.cells[rows], points=self.table.points[rows])
        return replace(self, table=table, modes=self.modes[rows], rows=self.rows[rows])

    def choices(self, rows: Indices) -> list[SegmentChoice]:
        """What each of some labels chose."""
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
    """The frontiers of link `place`, all modes together. Without bounds an `allowance` may say where to give
    up."""
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
    """The labels of all links without those that differ in peaks that make no difference; the bounds with the
    least peaks."""
    peaks = LeastPeaks.of([segments[place].table for place in occurrences(chain)])
    found = [
        segment.with_outside_peaks(peaks.outside([range(at, at + 1) for at in bounds.span(place)]))
        for place, segment in enumerate(segments)
    ]
    return found, replace(bounds, peaks=peaks)
