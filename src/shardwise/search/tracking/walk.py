"""Tracking frontiers along a chain: linear dynamic programming from the first link to the last, or
elimination of the borders between links alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.frontier import Chain, Link, reduce
from shardwise.search.tracking.chained import Weighed, unbordered
from shardwise.search.tracking.eliminate import Limits, eliminated
from shardwise.search.tracking.labels import Indices, Labels, Values, Within, chosen, joined, origins_of, reduced
from shardwise.search.tracking.solution import Choice, Solution, folded, measures, occurrences
from shardwise.search.tracking.steps import Order


LINKS_SHARE = 0.25
"""Of what may be lost along a chain, the part that its links lose within themselves."""

@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """A chain under one weight, the weighted sum up to which solutions are wanted, and how much more than it
    each may cost that stands for it: `loss` (4), of each folded column; zeros where none may.

    A link loses its share once per occurrence; a walk after each of them, in proportion to how far it has
    come, since labels lie further apart there.
    """

    weighed: Weighed
    limit: float
    loss: Values

    @property
    def weights(self) -> Values:
        """What the folded columns weigh."""
        some = next(iter(self.weighed.peaked.values()), self.weighed.plain[0])
        return np.asarray(some[0].weights[0][[0, 1, 2, 4]])

    def link_grid(self, occurrences: int) -> Values | None:
        """What one occurrence of a link may lose."""
        return self.loss * (LINKS_SHARE / occurrences) if self.loss.any() else None

    def walk_grid(self, occurrence: int, occurrences: int) -> Values | None:
        """What a walk may lose after an occurrence, counted from 1."""
        if not self.loss.any():
            return None
        whole = occurrences * (occurrences + 1) / 2
        return self.loss * ((1.0 - LINKS_SHARE) * occurrence / whole)


@dataclass(frozen=True, slots=True, eq=False)
class LinkLabels:
    """The frontiers of a link, whatever its mode: `table` on (entry, exit) as variables 0 and 1, with folded
    columns; label i is row rows[i] of mode modes[i]."""

    link: Link
    table: Labels
    modes: Indices
    rows: Indices
    by_mode: tuple[Labels, ...]

    def choice(self, row: int) -> Choice:
        """What a label chose."""
        mode = int(self.modes[row])
        found = chosen(self.by_mode[mode], int(self.rows[row]))
        part = self.link.modes[mode][1]
        return Choice(mode, tuple(found[variable] for variable in range(len(part.sizes))))


def link_labels(
    chain: Chain, orders: list[list[Order]], place: int, bounds: Bounds | None = None
) -> LinkLabels:
    """The frontiers of link `place`, all modes together."""
    link = chain[place]
    tables: list[Labels] = []
    cells: list[Indices] = []
    for mode, (_, part) in enumerate(link.modes):
        if bounds is None:
            found = eliminated(part, orders[place][mode])
        else:
            weighed = bounds.weighed
            start = sum(each.repeat for each in chain[:place])
            borders = range(start, start + link.repeat)
            is_peaked = place in weighed.peaked and link.repeat == 1
            scalars = (weighed.peaked if is_peaked else weighed.plain)[place][mode]
            beyond = np.minimum.reduce(
                [weighed.ahead[border][:, None] + weighed.behind[border + 1][None] for border in borders]
            )
            scalars.spread(unbordered(part, beyond))
            found = eliminated(part, orders[place][mode], Limits(scalars, bounds.limit))
        tables.append(found)
        at = found.coordinates()
        entry = at[part.entry] if part.entry is not None else 0
        leaving = at[part.exit] if part.exit is not None else 0
        exits = 1 if part.exit is None else part.sizes[part.exit]
        cells.append(np.zeros(len(found), dtype=np.intp) + entry * exits + leaving)
    _, part = link.modes[0]
    variables = (*(() if part.entry is None else (0,)), *(() if part.exit is None else (1,)))
    sizes = tuple(part.sizes[end] for end in (part.entry, part.exit) if end is not None)
    points = folded(np.concatenate([table.points for table in tables]))
    cell = np.concatenate(cells)
    modes = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    rows = np.concatenate([np.arange(len(table)) for table in tables])
    grid = bounds.link_grid(sum(each.repeat for each in chain)) if bounds is not None else None
    ranks = points @ (bounds.weights if bounds is not None else np.ones(4))
    best = reduced(cell, points, ranks, grid)
    table = Labels(variables, sizes, cell[best], points[best])
    return LinkLabels(link, table, modes[best], rows[best], tuple(tables))


@dataclass(frozen=True, slots=True, eq=False)
class Walked:
    """The frontier of a chain: `points` (n, 2) in seconds and bytes, and how to come back to each: row
    rows[i] of `end`, made of `tables`, one per occurrence of a link."""

    chain: Chain
    links: list[LinkLabels]
    tables: list[Labels]
    end: Labels
    points: Values
    rows: Indices

    def solutions(self) -> list[Solution]:
        """A solution for each point."""
        occurrence_of = {id(table): occurrence for occurrence, table in enumerate(self.tables)}
        places = list(occurrences(self.chain))
        memo: dict[tuple[int, int], Choice] = {}
        found = []
        for row in self.rows.tolist():
            own: dict[int, Choice] = {}
            for table, at in origins_of(self.end, row):
                occurrence = occurrence_of[id(table)]
                key = (places[occurrence], at)
                if key not in memo:
                    memo[key] = self.links[places[occurrence]].choice(at)
                own[occurrence] = memo[key]
            found.append(tuple(own[occurrence] for occurrence in range(len(places))))
        return found


def _placed(chain: Chain, links: list[LinkLabels]) -> list[Labels]:
    """The tables of all occurrences, with the borders around them as variables."""
    tables = []
    for occurrence, place in enumerate(occurrences(chain)):
        table = links[place].table
        names = tuple(occurrence + variable for variable in table.variables)
        tables.append(Labels(names, table.sizes, table.cells, table.points))
    return tables


def walked(chain: Chain, links: list[LinkLabels], bounds: Bounds | None = None) -> Walked:
    """The frontier by linear dynamic programming (FT-LDP): what every border's choices can come to from the
    start."""
    tables = _placed(chain, links)
    state = tables[0]
    for border, table in enumerate(tables[1:], start=1):
        within = _within(bounds, chain, border) if bounds is not None else None
        grid = bounds.walk_grid(border + 1, len(tables)) if bounds is not None else None
        state = joined(state, table, without=border, within=within, grid=grid)
    return _ended(chain, links, tables, state)


def merged(chain: Chain, links: list[LinkLabels]) -> Walked:
    """The frontier by elimination alone: neighbouring links become one, until one is left."""
    tables = _placed(chain, links)
    left = list(tables)
    borders = list(range(1, len(left)))
    while len(left) > 1:
        pairs = [
            joined(a, b, without=border)
            for a, b, border in zip(left[::2], left[1::2], borders[::2], strict=False)
        ]
        left = pairs + left[2 * len(pairs) :]
        borders = borders[1::2]
    return _ended(chain, links, tables, left[0])


def _ended(chain: Chain, links: list[LinkLabels], tables: list[Labels], end: Labels) -> Walked:
    points = measures(end.points)
    best = reduce(points)
    return Walked(chain, links, tables, end, points[best], best)


def _within(bounds: Bounds, chain: Chain, border: int) -> Within:
    """Which labels may lead below the limit when the occurrence after `border` joins those before it."""
    weighed = bounds.weighed
    ends = np.cumsum([link.repeat for link in chain]) - 1
    full = bounds.weights
    peaked = [int(ends[place]) for place in weighed.peaked]

    def weights(first: int, last: int) -> Values:
        own = full.copy()
        if not any(first <= place <= last for place in peaked):
            own[3] = 0.0
        return own

    return Within(
        weights(0, border - 1), weights(border, border), weights(0, border),
        weighed.behind[border + 1][..., 0], bounds.limit,
    )  # fmt: skip
