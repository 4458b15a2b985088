"""Tracking frontiers along a chain: linear dynamic programming from the first link to the last, or
elimination of the borders between links alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shardwise.frontier import Chain, reduce
from shardwise.search.tracking.bounds import Bounds
from shardwise.search.tracking.labels import Allowance, Ends, Labels, joined, unfolded
from shardwise.search.tracking.links import LinkLabels
from shardwise.search.tracking.rests import Rests
from shardwise.search.tracking.solution import Choice, Solution, measures, occurrences

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]


COMPLETED_ENDS = 64_000_000
"""Pairs of labels at most where walks meet that leave out what no rest completes: few of them stay."""


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


def walked(
    chain: Chain,
    links: list[LinkLabels],
    bounds: Bounds | None = None,
    rests: Rests | None = None,
    allowance: Allowance | None = None,
) -> Walked:
    """The frontier by linear dynamic programming (FT-LDP): what every border's choices can come to from the
    start, and from the end, by steps of a run of like links at a time; always from where there is less, until
    both meet. Labels that no rest of the chain completes are left out, where `rests` tells. Without bounds an
    `allowance` may say where to give up."""
    borders, tables = _pieces(chain, links, bounds, allowance)
    if len(tables) == 1:
        return _ended(chain, links, tables[0])
    first, last = 0, len(tables) - 1
    ahead = _completed(tables[first], borders[1], rests, is_ahead=True)
    behind = _completed(tables[last], borders[last], rests, is_ahead=False)
    while last - first > 1:
        if _pairs_at_most(ahead, tables[first + 1]) <= _pairs_at_most(behind, tables[last - 1]):
            first += 1
            ahead = _further(ahead, tables[first], borders[first], borders[first + 1], bounds, allowance)
            ahead = _completed(ahead, borders[first + 1], rests, is_ahead=True)
        else:
            last -= 1
            here, after = borders[last + 1], borders[last]
            behind = _back(tables[last], behind, here, after, borders[-1], bounds, allowance)
            behind = _completed(behind, borders[last], rests, is_ahead=False)
    within, slack = (None, None) if bounds is None else bounds.in_whole(borders[last])
    ends = Ends(slack, 0 if rests is None else COMPLETED_ENDS)
    end = joined(ahead, behind, without=borders[last], within=within, ends=ends, allowance=allowance)
    return _ended(chain, links, end)


def completed(links: list[LinkLabels], chain: Chain, rests: Rests) -> list[LinkLabels]:
    """The labels of links that some rest completes, of those that are there once."""
    found, border = [], 0
    for link in links:
        after = border + link.link.repeat
        if link.link.repeat == 1 and len(chain) > 1:
            mask = rests.completed_between(_between(link.table, border, after), border, after)
            link = link.some(np.flatnonzero(mask))
        found.append(link)
        border = after
    return found


def rests_of(
    chain: Chain, links: list[LinkLabels], bounds: Bounds, rate: float, share: float, reach: float
) -> Rests:
    """All that a chain whose held bytes are paid in seconds, at so many a byte, comes to ahead of each border
    and behind it: what labels may end in, as far as the whole weighs less than `reach` seconds."""
    borders, tables = _pieces(chain, links, bounds)
    last = len(tables) - 1
    ahead, behind = {borders[1]: tables[0]}, {borders[last]: tables[last]}
    for place in range(1, last):
        here, after = borders[place], borders[place + 1]
        ahead[after] = _further(ahead[here], tables[place], here, after, bounds)
    for place in range(last - 1, 0, -1):
        here, after = borders[place + 1], borders[place]
        behind[after] = _back(tables[place], behind[here], here, after, borders[-1], bounds)
    return Rests(ahead, behind, rate, share, reach)


def _pieces(
    chain: Chain, links: list[LinkLabels], bounds: Bounds | None, allowance: Allowance | None = None
) -> tuple[list[int], list[Labels]]:
    """The borders between runs of like links, and the tables of these runs between them."""
    tables: list[Labels] = []
    borders = [0]
    for place, link in enumerate(chain):
        length = 1 << (link.repeat.bit_length() - 1) // 2
        start = borders[-1]
        pieces = [(1, links[place].table)] * (link.repeat % length)
        pieces += [(length, _run(links[place], start, length, bounds, allowance))] * (link.repeat // length)
        for covered, table in pieces:
            borders.append(borders[-1] + covered)
            tables.append(_between(table, borders[-2], borders[-1]))
    return borders, tables


def _further(
    ahead: Labels,
    table: Labels,
    border: int,
    after: int,
    bounds: Bounds | None,
    allowance: Allowance | None = None,
) -> Labels:
    """What is ahead of a border and a table that leads from there to the next."""
    within, grid = (None, None) if bounds is None else bounds.in_walk(border, after, 0)
    return joined(ahead, table, without=border, within=within, grid=grid, allowance=allowance)


def _back(
    table: Labels,
    behind: Labels,
    border: int,
    after: int,
    end: int,
    bounds: Bounds | None,
    allowance: Allowance | None = None,
) -> Labels:
    """What is behind a border and a table that leads there from the one before."""
    within, grid = (None, None) if bounds is None else bounds.in_walk(border, after, end)
    return joined(table, behind, without=border, within=within, grid=grid, allowance=allowance)


def _completed(table: Labels, border: int, rests: Rests | None, *, is_ahead: bool) -> Labels:
    """The labels ahead of a border, or behind it, that some rest completes."""
    return table if rests is None else rests.completed(table, border, is_ahead=is_ahead)


def _pairs_at_most(a: Labels, b: Labels) -> int:
    return len(a) * len(b)


def _run(
    link: LinkLabels, start: int, length: int, bounds: Bounds | None, allowance: Allowance | None
) -> Labels:
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
        halves = _between(table, 0, 1), _between(table, 1, 2)
        both = joined(*halves, without=1, within=within, grid=grid, allowance=allowance)
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
