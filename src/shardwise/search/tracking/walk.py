"""Tracking frontiers along a chain: linear dynamic programming from the first link to the last, or
elimination of the borders between links alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shardwise.frontier import Chain, reduce
from shardwise.search.tracking.bounds import Bounds
from shardwise.search.tracking.grid import Grid
from shardwise.search.tracking.labels import Ends, Labels, Within, joined, unfolded
from shardwise.search.tracking.links import LinkLabels
from shardwise.search.tracking.solution import Choice, Solution, measures, occurrences

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]


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
            found = self.links[place].choices(known)
            choices.append([found[at] for at in inverse])
        return list(zip(*choices, strict=True))


def _between(table: Labels, border: int, after: int) -> Labels:
    """A table on (hubs..., entry, exit), or one of them, as one on two borders."""
    names = tuple((border, after)[variable] if variable >= 0 else variable for variable in table.variables)
    return Labels(names, table.sizes, table.cells, table.points, table.origins)


def _named(links: list[LinkLabels], place: int, border: int) -> Labels:
    """A link's table between two borders."""
    return _between(links[place].table, border, border + 1)


def walked(chain: Chain, links: list[LinkLabels], bounds: Bounds | None = None) -> Walked:
    """The frontier by linear dynamic programming (FT-LDP): what every border's choices can come to from the
    start, and from the end, by steps of a run of like links at a time; always from where there is less, until
    both meet."""
    tables: list[Labels] = []
    borders = [0]
    for place, link in enumerate(chain):
        length = 1 << (link.repeat.bit_length() - 1) // 2
        start = borders[-1]
        pieces = [(1, links[place].table)] * (link.repeat % length)
        pieces += [(length, _run(links[place], start, length, bounds))] * (link.repeat // length)
        for covered, table in pieces:
            borders.append(borders[-1] + covered)
            tables.append(_between(table, borders[-2], borders[-1]))
    if len(tables) == 1:
        return _ended(chain, links, tables[0])
    first, last = 0, len(tables) - 1
    ahead, behind = tables[first], tables[last]
    while last - first > 1:
        if _pairs_at_most(ahead, tables[first + 1]) <= _pairs_at_most(behind, tables[last - 1]):
            first += 1
            within, grid = _limits(bounds, borders[first], borders[first + 1], 0)
            ahead = joined(ahead, tables[first], without=borders[first], within=within, grid=grid)
        else:
            last -= 1
            within, grid = _limits(bounds, borders[last + 1], borders[last], borders[-1])
            behind = joined(tables[last], behind, without=borders[last + 1], within=within, grid=grid)
    within, slack = (None, None) if bounds is None else bounds.in_whole(borders[last])
    end = joined(ahead, behind, without=borders[last], within=within, ends=Ends(slack))
    return _ended(chain, links, end)


def _pairs_at_most(a: Labels, b: Labels) -> int:
    return len(a) * len(b)


def _limits(bounds: Bounds | None, border: int, after: int, end: int) -> tuple[Within | None, Grid | None]:
    """Of what a walk from an end of the chain comes to, on the way from a border to the next."""
    return (None, None) if bounds is None else bounds.in_walk(border, after, end)


def _run(link: LinkLabels, start: int, length: int, bounds: Bounds | None) -> Labels:
    """The table of so many of a link in a row, a power of 2, as one on (hubs..., entry, exit); the first
    occurrence of the link is `start`."""
    table = link.table
    reach = 1
    while reach < length:
        reach *= 2
        within = grid = None
        if bounds is not None:
            starts = range(start, start + link.link.repeat - reach + 1)
            within, grid = bounds.in_run(starts, reach, 1.0 / (length.bit_length() - 1))
        both = joined(_between(table, 0, 1), _between(table, 1, 2), without=1, within=within, grid=grid)
        table = replace(both, variables=link.table.variables)
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
