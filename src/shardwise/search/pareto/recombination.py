"""Solutions between two others: each link does what it does in one of them or in the other.

Lines find solutions in which links that are alike do alike, since that has the least weighted sum. Between
two of these lie those in which some of the links do as in one and the rest as in the other: on no line, and
made at little cost.

A chain of what links did in some solutions, put together in any way.

Lines find solutions in which links that are alike do alike, and those that are on the way between time and
memory by their weighted sums alone. Most of what lies between is made of the same pieces: what all inner
variables of a link chose somewhere is one choice here, beside any border and any hubs that were seen there.
So there are few choices, and the frontier of these is found soon: points of the whole chain, though not all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.pareto import ADDITIVE, Chain, Factor, FactorGraph, Segment, non_dominated
from shardwise.search.pareto.dominance import EpsilonDominance, reduced
from shardwise.search.pareto.solution import SegmentChoice, Solution, folded, measures, occurrences

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


@dataclass(frozen=True, slots=True, eq=False)
class _ModePool:
    """What a mode of a link did: `separator` are the choices that were seen of each variable that others see,
    by its number; `rows` (n, inner variables) what the others chose together."""

    mode: int
    sizes: int
    separator: dict[int, Indices]
    inner: tuple[int, ...]
    rows: Indices

    @property
    def number(self) -> dict[int, int]:
        """The variables that others see as they are numbered in what is pooled; the piece is the last one."""
        return {variable: number for number, variable in enumerate(self.separator)}

    def original(self, choices: tuple[int, ...]) -> SegmentChoice:
        """The choices of all variables."""
        found = dict(zip(self.inner, self.rows[choices[-1]].tolist(), strict=True))
        for (variable, seen), choice in zip(self.separator.items(), choices, strict=False):
            found[variable] = int(seen[choice])
        return SegmentChoice(self.mode, tuple(found[variable] for variable in range(self.sizes)))


@dataclass(frozen=True, slots=True, eq=False)
class SolutionPool:
    """The chain, and the pieces of each mode of its links."""

    chain: Chain
    mode_pools: tuple[tuple[_ModePool, ...], ...]

    def original(self, solution: Solution) -> Solution:
        """A solution of the pooled chain as one of the whole."""
        return tuple(
            self.mode_pools[place][choice.mode].original(choice.choices)
            for place, choice in zip(occurrences(self.chain), solution, strict=True)
        )


def solution_pool(chain: Chain, solutions: Iterable[Solution]) -> SolutionPool:
    """What is made of the pieces of solutions of `chain`, of which there is one at least: each link does in
    each of its places what it did in any of them, with what any of them had at its borders and of hubs."""
    among: list[dict[SegmentChoice, None]] = [{} for _ in chain]
    for solution in solutions:
        for place, choice in zip(occurrences(chain), solution, strict=True):
            among[place][choice] = None
    borders, shared = _borders(chain, among), _shared_seen(chain, among)
    segments, mode_pools = [], []
    for place, segment in enumerate(chain):
        modes, own = [], []
        for mode, (name, part) in enumerate(segment.modes):
            rows = [choice.choices for choice in among[place] if choice.mode == mode]
            if not rows:
                continue
            sides = ((part.entry, borders[place]), (part.exit, borders[place + 1]))
            separator = {variable: seen for variable, seen in sides if variable is not None}
            separator |= {variable: shared[shared_variable] for shared_variable, variable in part.shared}
            inner = tuple(variable for variable in range(len(part.sizes)) if variable not in separator)
            some = np.unique(np.array(rows, dtype=np.intp)[:, inner], axis=0)
            own.append(_ModePool(mode, len(part.sizes), separator, inner, some))
            modes.append((name, _part(part, own[-1])))
        segments.append(Segment(segment.name, tuple(modes), segment.repeat))
        mode_pools.append(tuple(own))
    return SolutionPool(tuple(segments), tuple(mode_pools))


def _borders(chain: Chain, among: list[dict[SegmentChoice, None]]) -> list[Indices]:
    """What was seen at each border between links; of a repeated link both ends are one."""
    found: list[set[int]] = [set() for _ in range(len(chain) + 1)]
    for place, choices in enumerate(among):
        for choice in choices:
            part = chain[place].modes[choice.mode][1]
            for border, end in ((place, part.entry), (place + 1, part.exit)):
                if end is not None:
                    found[border].add(choice.choices[end])
    places = [place for place, segment in enumerate(chain) if segment.repeat > 1]
    for place in (*places, *reversed(places)):  # there and back, where one follows another
        found[place] = found[place + 1] = found[place] | found[place + 1]
    return [np.array(sorted(seen), dtype=np.intp) for seen in found]


def _shared_seen(chain: Chain, among: list[dict[SegmentChoice, None]]) -> dict[str, Indices]:
    """What was seen of each hub."""
    found: dict[str, set[int]] = {}
    for place, choices in enumerate(among):
        for choice in choices:
            for name, variable in chain[place].modes[choice.mode][1].shared:
                found.setdefault(name, set()).add(choice.choices[variable])
    return {name: np.array(sorted(seen), dtype=np.intp) for name, seen in found.items()}


def _part(part: FactorGraph, mode_pools: _ModePool) -> FactorGraph:
    """A part of which all inner variables are one, by its pieces."""
    number = mode_pools.number
    tables: dict[tuple[int, ...], Values] = {}
    for factor in part.factors:
        variables, costs = _pool_costs(factor, mode_pools)
        tables[variables] = _both(tables[variables], costs) if variables in tables else costs
    names = (*(part.names[variable] for variable in mode_pools.separator), "piece")
    return FactorGraph(
        names,
        (*(len(seen) for seen in mode_pools.separator.values()), len(mode_pools.rows)),
        tuple(Factor(variables, costs) for variables, costs in tables.items()),
        None if part.entry is None else number[part.entry],
        None if part.exit is None else number[part.exit],
        tuple((name, number[variable]) for name, variable in part.shared),
    )


def _pool_costs(factor: Factor, mode_pools: _ModePool) -> tuple[tuple[int, ...], Values]:
    """The variables of a factor in what is pooled, ascending, and its costs there."""
    number, inner_variable = mode_pools.number, len(mode_pools.separator)
    rows = {
        variable: mode_pools.rows[:, at] for at, variable in enumerate(mode_pools.inner)
    } | mode_pools.separator
    own = [number.get(variable, inner_variable) for variable in factor.variables]
    if len(own) == 2 and own[0] != own[1]:
        costs = factor.costs[np.ix_(*(rows[variable] for variable in factor.variables))]
        return tuple(sorted(own)), costs if own[0] < own[1] else costs.swapaxes(0, 1)
    return (own[0],), factor.costs[tuple(rows[variable] for variable in factor.variables)]


def _both(one: Values, other: Values) -> Values:
    """Two costs of the same choices, (..., columns)."""
    summed = one[..., :ADDITIVE] + other[..., :ADDITIVE]
    return np.concatenate([summed, np.maximum(one[..., ADDITIVE:], other[..., ADDITIVE:])], axis=-1)
