"""The frontiers of one link of a chain: labels on its entry and exit, whatever its mode."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shardwise.frontier import Chain, Link, reduce
from shardwise.search.tracking.borders import Borders, hubs_of
from shardwise.search.tracking.bounds import Bounds
from shardwise.search.tracking.eliminate import Limits, eliminated
from shardwise.search.tracking.grid import reduced
from shardwise.search.tracking.labels import Allowance, Labels, chosen
from shardwise.search.tracking.peaks import Peaks
from shardwise.search.tracking.solution import Choice, folded, occurrences
from shardwise.search.tracking.steps import Order

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class LinkLabels:
    """The frontiers of a link, whatever its mode: `table` on (hubs..., entry, exit), entry and exit as
    variables 0 and 1, with folded columns; label i is row rows[i] of mode modes[i]."""

    link: Link
    table: Labels
    modes: Indices
    rows: Indices
    by_mode: tuple[Labels, ...]

    def beside(self, peaks: Values) -> LinkLabels:
        """The labels that are left where all others of a solution have at least these peaks (entry, exit), or
        where there is none (infinite)."""
        least = peaks.reshape(-1)[self.table.cells % peaks.size]
        points = self.table.points.copy()
        points[:, -1] = np.maximum(points[:, -1], least)
        left = np.flatnonzero(np.isfinite(least))
        best = left[reduce(points[left], cells=self.table.cells[left])]
        return replace(self, table=replace(self.table, points=points)).some(best)

    def some(self, rows: Indices) -> LinkLabels:
        """Some of the labels."""
        table = replace(self.table, cells=self.table.cells[rows], points=self.table.points[rows])
        return replace(self, table=table, modes=self.modes[rows], rows=self.rows[rows])

    def choices(self, rows: Indices) -> list[Choice]:
        """What each of some labels chose."""
        found: list[Choice | None] = [None] * len(rows)
        for mode in np.unique(self.modes[rows]).tolist():
            own = np.flatnonzero(self.modes[rows] == mode)
            by_variable = chosen(self.by_mode[mode], self.rows[rows[own]])
            columns = [by_variable[variable] for variable in range(len(self.link.modes[mode][1].sizes))]
            told = np.stack(columns, axis=1).tolist() if columns else [[]] * len(own)
            for place, numbers in zip(own.tolist(), told, strict=True):
                found[place] = Choice(mode, tuple(numbers))
        return [choice for choice in found if choice is not None]


def link_labels(
    chain: Chain,
    orders: list[list[Order]],
    place: int,
    bounds: Bounds | None = None,
    allowance: Allowance | None = None,
) -> LinkLabels:
    """The frontiers of link `place`, all modes together. Without bounds an `allowance` may say where to give
    up."""
    link, borders = chain[place], Borders.of(chain)
    tables: list[Labels] = []
    cells: list[Indices] = []
    for mode, (_, part) in enumerate(link.modes):
        if bounds is None:
            found = eliminated(part, orders[place][mode], allowance=allowance)
        else:
            weighed = bounds.weighed
            scalars = weighed.scalars[place][mode]
            beyond = weighed.outside([range(at, at + 1) for at in bounds.span(place)], hubs_of([link]))
            scalars.spread(borders.unbordered(part, beyond))
            found = eliminated(
                part, orders[place][mode], Limits(scalars, bounds.limit, bounds.in_part(place, part))
            )
        tables.append(found)
        at, cell = found.coordinates(), np.zeros(len(found), dtype=np.intp)
        for variable in borders.variables(part).values():
            cell = cell * part.sizes[variable] + at[variable]
        cells.append(cell)
    _, part = link.modes[0]
    variables = tuple(borders.variables(part))
    sizes = tuple(part.sizes[variable] for variable in borders.variables(part).values())
    points = folded(np.concatenate([table.points for table in tables]))
    cell = np.concatenate(cells)
    modes = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    rows = np.concatenate([np.arange(len(table)) for table in tables])
    weights, grid = np.ones(4), None
    if bounds is not None:
        weights, grid = bounds.weights[:, 0], bounds.in_link(place)
    best = reduced(cell, points, points @ weights, grid)
    table = Labels(variables, sizes, cell[best], points[best])
    return LinkLabels(link, table, modes[best], rows[best], tuple(tables))


def beside_peaks(chain: Chain, links: list[LinkLabels], bounds: Bounds) -> tuple[list[LinkLabels], Bounds]:
    """The labels of all links without those that differ in peaks that make no difference; the bounds with the
    least peaks."""
    peaks = Peaks.of([links[place].table for place in occurrences(chain)])
    found = [
        link.beside(peaks.around([range(at, at + 1) for at in bounds.span(place)]))
        for place, link in enumerate(links)
    ]
    return found, replace(bounds, peaks=peaks)
