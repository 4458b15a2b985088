"""Tracking frontiers along a chain: linear dynamic programming from the first link to the last, or
elimination of the borders between links alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.frontier import Chain, Link, reduce
from shardwise.search.tracking.chained import Weighed, unbordered
from shardwise.search.tracking.eliminate import Limits, eliminated
from shardwise.search.tracking.labels import (
    Indices,
    Labels,
    Values,
    Within,
    chosen,
    joined,
    reduced,
    unfolded,
)
from shardwise.search.tracking.solution import Choice, Solution, folded, measures, occurrences
from shardwise.search.tracking.steps import Order

LINKS_SHARE, RUNS_SHARE, WALK_SHARE = 0.2, 0.2, 0.6
"""Of what may be lost along a chain, the parts of its links, of runs of like links, and of the walk."""


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """A chain under one weight, the weighted sum up to which solutions are wanted, and how much more than it
    each may cost that stands for it: `loss` (4), of each folded column; zeros where none may.

    What a table loses counts as often as the chain has it: a link's once per occurrence. A walk loses in
    proportion to how far it has come, since labels lie further apart there.
    """

    weighed: Weighed
    limit: float
    loss: Values

    @property
    def weights(self) -> Values:
        """What the folded columns weigh."""
        some = next(iter(self.weighed.peaked.values()), self.weighed.plain[0])
        return np.asarray(some[0].weights[0][[0, 1, 2, 4]])

    @property
    def occurrences(self) -> int:
        """How many links there are, repetitions counted."""
        return sum(link.repeat for link in self.weighed.chain)

    def grid(self, share: float) -> Values | None:
        """A share of the loss, or None where nothing may be lost."""
        return self.loss * share if self.loss.any() else None

    def within(self, spans: tuple[range, range], outside: Values) -> Within:
        """What may matter of the labels of two spans of occurrences together; the peak is weighed in one."""
        chain = self.weighed.chain
        ends = np.cumsum([link.repeat for link in chain]) - 1
        peaked = [int(ends[place]) for place in self.weighed.peaked]

        def weights(*spans: range) -> Values:
            own = self.weights.copy()
            if not any(place in span for place in peaked for span in spans):
                own[3] = 0.0
            return own

        return Within(weights(spans[0]), weights(spans[1]), weights(*spans), outside, self.limit)


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
    grid = bounds.grid(LINKS_SHARE / bounds.occurrences) if bounds is not None else None
    ranks = points @ (bounds.weights if bounds is not None else np.ones(4))
    best = reduced(cell, points, ranks, grid)
    table = Labels(variables, sizes, cell[best], points[best])
    return LinkLabels(link, table, modes[best], rows[best], tuple(tables))


@dataclass(frozen=True, slots=True, eq=False)
class Walked:
    """The frontier of a chain: `points` (n, 2) in seconds and bytes, and how to come back to each: row
    rows[i] of `end`, made of the tables of the links, in their order."""

    chain: Chain
    links: list[LinkLabels]
    end: Labels
    points: Values
    rows: Indices

    def solutions(self, which: Indices | None = None) -> list[Solution]:
        """A solution for each point, or for those with these numbers."""
        rows = self.rows if which is None else self.rows[which]
        choices: list[list[Choice]] = []
        for place, own in zip(occurrences(self.chain), unfolded(self.end, rows), strict=True):
            known, inverse = np.unique(own, return_inverse=True)
            found = [self.links[place].choice(int(row)) for row in known]
            choices.append([found[at] for at in inverse])
        return list(zip(*choices, strict=True))


def _between(table: Labels, border: int, after: int) -> Labels:
    """A table on (entry, exit), or one of them, as one on two borders."""
    names = tuple((border, after)[variable] for variable in table.variables)
    return Labels(names, table.sizes, table.cells, table.points, table.origins)


def _named(links: list[LinkLabels], place: int, border: int) -> Labels:
    """A link's table between two borders."""
    return _between(links[place].table, border, border + 1)


def walked(chain: Chain, links: list[LinkLabels], bounds: Bounds | None = None) -> Walked:
    """The frontier by linear dynamic programming (FT-LDP): what every border's choices can come to from the
    start, by steps of a run of like links at a time."""
    pieces: list[tuple[int, Labels]] = []
    for place, link in enumerate(chain):
        length = 1 << (link.repeat.bit_length() - 1) // 2
        start = sum(length for length, _ in pieces)
        pieces += [(1, links[place].table)] * (link.repeat % length)
        pieces += [(length, _run(links[place], start, length, bounds))] * (link.repeat // length)
    reached = np.cumsum([length for length, _ in pieces])
    state = _between(pieces[0][1], 0, int(reached[0]))
    for (_, table), border, after in zip(
        pieces[1:], reached[:-1].tolist(), reached[1:].tolist(), strict=True
    ):
        within = grid = None
        if bounds is not None:
            outside = bounds.weighed.behind[after][..., 0]
            own = outside if after < reached[-1] else outside[0]
            within = bounds.within((range(border), range(border, after)), own)
            grid = bounds.grid(WALK_SHARE * after / float(reached.sum()))
        state = joined(state, _between(table, border, after), without=border, within=within, grid=grid)
    return _ended(chain, links, state)


def _run(link: LinkLabels, start: int, length: int, bounds: Bounds | None) -> Labels:
    """The table of so many of a link in a row, a power of 2, as one on (entry, exit); the first occurrence of
    the link is `start`."""
    table = link.table
    reach = 1
    while reach < length:
        reach *= 2
        within = grid = None
        if bounds is not None:
            weighed = bounds.weighed
            starts = range(start, start + link.link.repeat - reach + 1)
            outside = np.minimum.reduce(
                [weighed.ahead[at][:, None, 0] + weighed.behind[at + reach][None, :, 0] for at in starts]
            )
            within = bounds.within((range(0), range(0)), outside)
            grid = bounds.grid(RUNS_SHARE / (length.bit_length() - 1) * reach / bounds.occurrences)
        both = joined(_between(table, 0, 1), _between(table, 1, 2), without=1, within=within, grid=grid)
        table = Labels((0, 1), both.sizes, both.cells, both.points, both.origins)
    return table


def merged(chain: Chain, links: list[LinkLabels]) -> Walked:
    """The frontier by elimination alone: neighbouring links become one, until one is left."""
    left = [_named(links, place, border) for border, place in enumerate(occurrences(chain))]
    borders = list(range(1, len(left)))
    while len(left) > 1:
        pairs = [
            joined(a, b, without=border)
            for a, b, border in zip(left[::2], left[1::2], borders[::2], strict=False)
        ]
        left = pairs + left[2 * len(pairs) :]
        borders = borders[1::2]
    return _ended(chain, links, left[0])


def _ended(chain: Chain, links: list[LinkLabels], end: Labels) -> Walked:
    points = measures(end.points)
    best = reduce(points)
    return Walked(chain, links, end, points[best], best)
