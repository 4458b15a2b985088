"""Solutions between two others: each link does what it does in one of them or in the other.

Lines find solutions in which links that are alike do alike, since that has the least weighted sum. Between
two of these lie those in which some of the links do as in one and the rest as in the other: on no line, and
made at little cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.frontier import Chain, FactorGraph, non_dominated
from shardwise.search.tracking.grid import EpsilonDominance, reduced
from shardwise.search.tracking.solution import SegmentChoice, Solution, folded, measures, occurrences

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]

RESOLUTION = 10_000.0
"""Pieces of solutions that cost no more apart than so small a part of what the solutions take are one."""

MOST_OPTIONS = 500
"""Pieces at most that solutions are put together from at a time; where there are more they are one where they
cost further apart."""

COARSENING = 2.0
"""How many times as far, each time."""


@dataclass(frozen=True, slots=True, eq=False)
class _SegmentOptions:
    """What a link may do: `costs` (n, 4) folded, the choices (n) of its entry and exit, 0 where there is
    none, and all of them."""

    costs: Values
    entries: Indices
    exits: Indices
    choices: list[SegmentChoice]


def recombined(chain: Chain, pair: tuple[Solution, Solution]) -> list[Solution]:
    """Solutions of `chain` whose links do what they do in one of a pair, whatever lies before and behind
    them in either: of each choice of the hubs that one of them has, those that none of the others is better
    than."""
    among = [_among(chain, pair, place) for place in range(len(chain))]
    found: list[Solution] = []
    for shared in _shared_of_pair(chain, pair):
        options = [_options(chain, place, among, shared) for place in range(len(chain))]
        found += _put_together(chain, options)
    return found


def _among(chain: Chain, pair: tuple[Solution, Solution], place: int) -> list[SegmentChoice]:
    """What a link does in the solutions."""
    at = [number for number, own in enumerate(occurrences(chain)) if own == place]
    return list(dict.fromkeys(solution[number] for solution in pair for number in at))


def _shared_of_pair(chain: Chain, pair: tuple[Solution, Solution]) -> list[dict[str, int]]:
    """What the hubs choose in one of the solutions and in the other, where that differs."""
    found: list[dict[str, int]] = []
    for solution in pair:
        shared = {
            name: choice.choices[variable]
            for place, choice in zip(occurrences(chain), solution, strict=True)
            for name, variable in chain[place].modes[choice.mode][1].shared
        }
        if shared not in found:
            found.append(shared)
    return found


def _options(
    chain: Chain, place: int, among: Sequence[list[SegmentChoice]], shared: dict[str, int]
) -> _SegmentOptions:
    """All that a link may do: as in one of the solutions, between any borders that they have there."""
    entries, exits = _border(chain, among, place), _border(chain, among, place + 1)
    costs, begins, exit_choices, choices = [], [], [], []
    for mode, (_, part) in enumerate(chain[place].modes):
        own = [choice.choices for choice in among[place] if choice.mode == mode]
        if own:
            rows = _variants(part, np.array(own), entries, exits, shared)
            costs.append(_costs(part, rows))
            begins.append(_chosen(rows, part.entry))
            exit_choices.append(_chosen(rows, part.exit))
            choices += [SegmentChoice(mode, tuple(row)) for row in rows.tolist()]
    table, begin, end = np.concatenate(costs), np.concatenate(begins), np.concatenate(exit_choices)
    finite = np.flatnonzero(np.isfinite(table).all(axis=1))
    cells = begin[finite] * (int(end.max(initial=0)) + 1) + end[finite]
    best = finite[non_dominated(table[finite], groups=cells)]
    return _SegmentOptions(table[best], begin[best], end[best], [choices[row] for row in best.tolist()])


def _border(chain: Chain, among: Sequence[list[SegmentChoice]], border: int) -> list[int]:
    """What lies before a link in the solutions, seen from both sides; of a repeated link both ends are
    one."""
    found: dict[int, None] = {}
    for place in (border - 1, border):
        for choice in among[place] if 0 <= place < len(chain) else ():
            part = chain[place].modes[choice.mode][1]
            sides = (part.exit,) if place < border else (part.entry,)
            both = (part.entry, part.exit) if chain[place].repeat > 1 else sides
            found |= {choice.choices[end]: None for end in both if end is not None}
    return list(found)


def _variants(
    part: FactorGraph, rows: Indices, entries: list[int], exits: list[int], shared: dict[str, int]
) -> Indices:
    """Choices (n, variables) of a part with any entry and any exit, and these hubs."""
    for variable, among in ((part.entry, entries), (part.exit, exits)):
        if variable is not None:
            rows = np.repeat(rows, len(among), axis=0)
            rows[:, variable] = np.tile(among, len(rows) // len(among))
    for name, variable in part.shared:
        rows[:, variable] = shared[name]
    return np.unique(rows, axis=0)


def _chosen(rows: Indices, variable: int | None) -> Indices:
    return np.zeros(len(rows), dtype=np.intp) if variable is None else rows[:, variable]


def _costs(part: FactorGraph, rows: Indices) -> Values:
    """Folded columns (n, 4) of choices (n, variables) of all variables of a part."""
    total = np.zeros((len(rows), 5))
    for factor in part.factors:
        own = factor.costs[tuple(rows[:, variable] for variable in factor.variables)]
        total[:, :4] += own[:, :4]
        total[:, 4] = np.maximum(total[:, 4], own[:, 4])
    return folded(total)


def _put_together(chain: Chain, options: Sequence[_SegmentOptions]) -> list[Solution]:
    """The solutions that pieces make, from the first link to the last."""
    order = list(occurrences(chain))
    if not all(len(each.costs) for each in options):
        return []
    scale = np.add.reduce([options[place].costs.mean(axis=0) for place in order])
    scale[scale <= 0.0] = 1.0
    steps = scale / (RESOLUTION * len(order))
    points, borders = np.zeros((1, 4)), np.zeros(1, dtype=np.intp)
    history: list[tuple[Indices, Indices]] = []
    for place in order:
        own = options[place]
        a, b = np.nonzero(borders[:, None] == own.entries[None])
        sums = points[a] + own.costs[b]
        sums[:, 3] = np.maximum(points[a, 3], own.costs[b, 3])
        undominated = reduced(own.exits[b], sums, sums @ (1.0 / scale), EpsilonDominance.even(steps))
        while len(undominated) > MOST_OPTIONS:
            steps = steps * COARSENING
            some = reduced(
                own.exits[b][undominated],
                sums[undominated],
                sums[undominated] @ (1.0 / scale),
                EpsilonDominance.even(steps),
            )
            undominated = undominated[some]
        points, borders = sums[undominated], own.exits[b][undominated]
        history.append((a[undominated], b[undominated]))
    rows = non_dominated(measures(points))
    chosen: list[list[SegmentChoice]] = []
    for place, (before, row) in zip(reversed(order), reversed(history), strict=True):
        chosen.append([options[place].choices[each] for each in row[rows].tolist()])
        rows = before[rows]
    return list(zip(*reversed(chosen), strict=True))
