"""A chain of what links did in some solutions, put together in any way.

Lines find solutions in which links that are alike do alike, and those that are on the way between time and
memory by their weighted sums alone. Most of what lies between is made of the same pieces: what all inner
variables of a link chose somewhere is one choice here, beside any border and any hubs that were seen there.
So there are few choices, and the frontier of these is found soon: points of the whole chain, though not all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.frontier import ADDITIVE, Chain, Factor, FactorGraph, Segment
from shardwise.search.tracking.solution import SegmentChoice, Solution, occurrences

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]


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
