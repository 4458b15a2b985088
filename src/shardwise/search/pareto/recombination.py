"""Recombination: new incumbents from the choices of known solutions.

Weighted sums choose equally for equal segments, so solutions that mix two incumbents are not supported
points. `recombined` builds them: each segment chooses as in one of two solutions. `solution_pool` is a chain
with few choices: all inner variables of a segment together have one option for each joint choice seen in any
solution, with any choices seen at its borders and of shared variables. Both give points of the whole chain
and prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.pareto import ADDITIVE, Chain, Factor, FactorGraph, Segment, non_dominated
from shardwise.search.pareto import tuning
from shardwise.search.pareto.dominance import EpsilonDominance, reduced
from shardwise.search.pareto.solution import SegmentChoice, Solution, folded, measures, occurrences

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class _SegmentOptions:
    """Options of a segment: `costs` (n, 4) folded, the choices (n) of its entry and exit, 0 where it has
    none, and the choices of all variables."""

    costs: Values
    entries: Indices
    exits: Indices
    choices: list[SegmentChoice]


def recombined(chain: Chain, pair: tuple[Solution, Solution]) -> list[Solution]:
    """Solutions of `chain` whose segments choose as in one of a pair, in any combination. For each set of
    choices of the shared variables in one of the pair, the non-dominated ones."""
    among = [_among(chain, pair, place) for place in range(len(chain))]
    found: list[Solution] = []
    for shared in _shared_of_pair(chain, pair):
        options = [_options(chain, place, among, shared) for place in range(len(chain))]
        found += _put_together(chain, options)
    return found


def _among(chain: Chain, pair: tuple[Solution, Solution], place: int) -> list[SegmentChoice]:
    """The choices of a segment in the solutions."""
    at = [number for number, own in enumerate(occurrences(chain)) if own == place]
    return list(dict.fromkeys(solution[number] for solution in pair for number in at))


def _shared_of_pair(chain: Chain, pair: tuple[Solution, Solution]) -> list[dict[str, int]]:
    """The choices of the shared variables in each solution; once if they are equal."""
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
    """The options of a segment: as in one of the solutions, with any choices at its borders that occur
    there."""
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
    """The choices that occur at a border in the solutions, on both sides. Both ends of a repeated segment are
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
    """Choices (n, variables) of a factor graph with any of these entries and exits, and these shared
    variables."""
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
    """Folded columns (n, 4) of choices (n, variables) of all variables of a factor graph."""
    total = np.zeros((len(rows), 5))
    for factor in part.factors:
        own = factor.costs[tuple(rows[:, variable] for variable in factor.variables)]
        total[:, :4] += own[:, :4]
        total[:, 4] = np.maximum(total[:, 4], own[:, 4])
    return folded(total)


def _put_together(chain: Chain, options: Sequence[_SegmentOptions]) -> list[Solution]:
    """The non-dominated solutions from these options, by label setting from the first segment to the last."""
    order = list(occurrences(chain))
    if not all(len(each.costs) for each in options):
        return []
    scale = np.add.reduce([options[place].costs.mean(axis=0) for place in order])
    scale[scale <= 0.0] = 1.0
    steps = scale / (tuning.TUNING.resolution * len(order))
    points, borders = np.zeros((1, 4)), np.zeros(1, dtype=np.intp)
    history: list[tuple[Indices, Indices]] = []
    for place in order:
        own = options[place]
        a, b = np.nonzero(borders[:, None] == own.entries[None])
        sums = points[a] + own.costs[b]
        sums[:, 3] = np.maximum(points[a, 3], own.costs[b, 3])
        undominated = reduced(own.exits[b], sums, sums @ (1.0 / scale), EpsilonDominance.even(steps))
        while len(undominated) > tuning.TUNING.most_options:
            steps = steps * tuning.TUNING.coarsening
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
    """The choices of one mode of a segment in the pool. `separator` are the choices seen of each separator
    variable, by its number. `rows` (n, inner variables) are the joint choices of the inner variables."""

    mode: int
    sizes: int
    separator: dict[int, Indices]
    inner: tuple[int, ...]
    rows: Indices

    @property
    def number(self) -> dict[int, int]:
        """The numbers of the separator variables in the pool's factor graph; the joint inner variable is the
        last one."""
        return {variable: number for number, variable in enumerate(self.separator)}

    def original(self, choices: tuple[int, ...]) -> SegmentChoice:
        """The choices of all variables."""
        found = dict(zip(self.inner, self.rows[choices[-1]].tolist(), strict=True))
        for (variable, seen), choice in zip(self.separator.items(), choices, strict=False):
            found[variable] = int(seen[choice])
        return SegmentChoice(self.mode, tuple(found[variable] for variable in range(self.sizes)))


@dataclass(frozen=True, slots=True, eq=False)
class SolutionPool:
    """The chain of the pool, and the original choices of each mode of its segments."""

    chain: Chain
    mode_pools: tuple[tuple[_ModePool, ...], ...]

    def original(self, solution: Solution) -> Solution:
        """A solution of the pool's chain as one of the original chain."""
        return tuple(
            self.mode_pools[place][choice.mode].original(choice.choices)
            for place, choice in zip(occurrences(self.chain), solution, strict=True)
        )


def solution_pool(chain: Chain, solutions: Iterable[Solution]) -> SolutionPool:
    """The pool of some solutions of `chain`, at least one. Each segment may choose, in each of its
    occurrences, as in any of them, with the choices seen at its borders and of shared variables."""
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
    """The choices seen at each border between segments; both ends of a repeated segment are one."""
    found: list[set[int]] = [set() for _ in range(len(chain) + 1)]
    for place, choices in enumerate(among):
        for choice in choices:
            part = chain[place].modes[choice.mode][1]
            for border, end in ((place, part.entry), (place + 1, part.exit)):
                if end is not None:
                    found[border].add(choice.choices[end])
    places = [place for place, segment in enumerate(chain) if segment.repeat > 1]
    for place in (*places, *reversed(places)):  # in both directions, for repeated neighbours
        found[place] = found[place + 1] = found[place] | found[place + 1]
    return [np.array(sorted(seen), dtype=np.intp) for seen in found]


def _shared_seen(chain: Chain, among: list[dict[SegmentChoice, None]]) -> dict[str, Indices]:
    """The choices seen of each shared variable."""
    found: dict[str, set[int]] = {}
    for place, choices in enumerate(among):
        for choice in choices:
            for name, variable in chain[place].modes[choice.mode][1].shared:
                found.setdefault(name, set()).add(choice.choices[variable])
    return {name: np.array(sorted(seen), dtype=np.intp) for name, seen in found.items()}


def _part(part: FactorGraph, mode_pools: _ModePool) -> FactorGraph:
    """A factor graph whose inner variables are joined into one, with the joint choices seen."""
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
    """The variables of a factor in the pool's factor graph, ascending, and its costs there."""
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
    """Total of two costs of the same choices, (..., columns)."""
    summed = one[..., :ADDITIVE] + other[..., :ADDITIVE]
    return np.concatenate([summed, np.maximum(one[..., ADDITIVE:], other[..., ADDITIVE:])], axis=-1)
