"""Leaving out choices that cannot matter: chains with fewer choices and the same frontier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt

from shardwise.frontier import Chain, Factor, Link, Part, firsts, hub_sizes
from shardwise.search.tracking.borders import hubs_of
from shardwise.search.tracking.chained import Weighed
from shardwise.search.tracking.flat import costs_of
from shardwise.search.tracking.lines import SLACK
from shardwise.search.tracking.scalars import Sums
from shardwise.search.tracking.solution import Choice, Solution, occurrences

Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Narrowed:
    """A chain with fewer choices, and which of the original each is: `modes[i]` the original numbers of link
    i's modes, `choices[i][m][v]` those of the choices of variable v."""

    chain: Chain
    modes: tuple[tuple[int, ...], ...]
    choices: tuple[tuple[tuple[Indices, ...], ...], ...]

    @cached_property
    def decided_share(self) -> float | None:
        """The share of hidden_s in time where the other time is nothing whatever is chosen; else None."""
        parts = [part for link in self.chain for _, part in link.modes if part.factors]
        for column, share in ((1, 1.0), (0, 0.0)):
            if not any(costs_of(part)[column].any() for part in parts):
                return share
        return None

    @staticmethod
    def of(chain: Chain) -> Narrowed:
        """A chain with all of its choices."""
        return Narrowed(
            chain,
            tuple(tuple(range(len(link.modes))) for link in chain),
            tuple(
                tuple(tuple(np.arange(size) for size in part.sizes) for _, part in link.modes)
                for link in chain
            ),
        )

    def original(self, solution: Solution) -> Solution:
        """A solution of the narrowed chain in the numbers of the original."""
        return self.originals([solution])[0]

    def originals(self, solutions: list[Solution]) -> list[Solution]:
        """The same of many; what several of them chose is told once."""
        memo: dict[tuple[int, Choice], Choice] = {}
        places = list(occurrences(self.chain))
        found = []
        for solution in solutions:
            keys = list(zip(places, solution, strict=True))
            for key in keys:
                if key not in memo:
                    memo[key] = self._original(*key)
            found.append(tuple(memo[key] for key in keys))
        return found

    def _original(self, place: int, choice: Choice) -> Choice:
        numbers = self.choices[place][choice.mode]
        picked = zip(numbers, choice.choices, strict=True)
        return Choice(self.modes[place][choice.mode], tuple(int(each[own]) for each, own in picked))


def narrowed(before: Narrowed, found: Weighed, limits: npt.NDArray[np.float64]) -> Narrowed:
    """Without the choices that lead to no solution below `limits` (n, weights) of any row: `found` is
    `before`'s chain under the weights."""
    masks = [
        [_alive(found, place, mode, limits) for mode in range(len(link.modes))]
        for place, link in enumerate(before.chain)
    ]
    _agree_on_borders(before.chain, masks)
    _agree_on_hubs(before.chain, masks)
    links: list[Link] = []
    modes: list[tuple[int, ...]] = []
    choices: list[tuple[tuple[Indices, ...], ...]] = []
    for place, link in enumerate(before.chain):
        left = [mode for mode, mask in enumerate(masks[place]) if all(each.any() for each in mask)]
        kept = {mode: [np.flatnonzero(mask) for mask in masks[place][mode]] for mode in left}
        links.append(
            replace(
                link,
                modes=tuple((link.modes[mode][0], _part(link.modes[mode][1], kept[mode])) for mode in left),
            )
        )
        modes.append(tuple(before.modes[place][mode] for mode in left))
        choices.append(
            tuple(
                tuple(own[rows] for own, rows in zip(before.choices[place][mode], kept[mode], strict=True))
                for mode in left
            )
        )
    return Narrowed(tuple(links), tuple(modes), tuple(choices))


def choices_of(chain: Chain) -> int:
    """How many choices all variables of a chain have."""
    return sum(sum(part.sizes) for link in chain for _, part in link.modes)


def cells_of(chain: Chain) -> int:
    """How many choices together what others see of a link has, at most."""
    parts = [part for link in chain for _, part in link.modes]
    return max((prod(part.sizes[variable] for variable in part.kept) for part in parts), default=0)


def _part(part: Part, kept: Sequence[Indices]) -> Part:
    """The part with these choices of each variable only."""
    is_whole = [len(rows) == size for rows, size in zip(kept, part.sizes, strict=True)]
    factors = tuple(
        factor
        if all(is_whole[variable] for variable in factor.variables)
        else Factor(factor.variables, factor.costs[np.ix_(*(kept[each] for each in factor.variables))])
        for factor in part.factors
    )
    told = [rows.tobytes() for rows in kept]
    likes = firsts(
        (like, *(told[variable] for variable in factor.variables))
        for like, factor in zip(part.likes, part.factors, strict=True)
    )
    return part.changed(tuple(len(rows) for rows in kept), factors, likes)


def may_matter(bounds: Sums, limits: npt.NDArray[np.float64]) -> Mask:
    """Which rows of bounds (n, J) are below some row of limits (m, J) in all weights: (n)."""
    reach = limits * (1.0 + SLACK)
    is_alive = np.zeros(len(bounds), dtype=bool)
    rows = np.flatnonzero((bounds < reach.max(axis=0, initial=-np.inf)).all(axis=1))
    for limit in reach:
        if not len(rows):
            break
        is_alive[rows[(bounds[rows] < limit).all(axis=1)]] = True
        rows = rows[~is_alive[rows]]
    return is_alive


def _alive(found: Weighed, place: int, mode: int, limits: npt.NDArray[np.float64]) -> list[Mask]:
    """Which choices of each variable of a mode may matter, in any occurrence of its link."""
    start = sum(link.repeat for link in found.chain[:place])
    scalars = found.scalars[place][mode]
    spans = [range(at, at + 1) for at in range(start, start + found.chain[place].repeat)]
    beyond = found.outside(spans, hubs_of([found.chain[place]]))
    scalars.spread(found.borders.unbordered(scalars.part, beyond))
    is_alive = may_matter(np.concatenate(scalars.through()), limits)
    return np.split(is_alive, np.cumsum(scalars.part.sizes)[:-1])


def _agree_on_borders(chain: Chain, masks: list[list[list[Mask]]]) -> None:
    """Make all variables of one border keep the same choices: what any mode on either side may want.

    All borders of a repeated link are one, since its entry and exit are the same tensor.
    """
    groups: list[list[Mask]] = []
    for place, link in enumerate(chain):
        entries = [masks[place][m][p.entry] for m, (_, p) in enumerate(link.modes) if p.entry is not None]
        exits = [masks[place][m][p.exit] for m, (_, p) in enumerate(link.modes) if p.exit is not None]
        if entries and groups:
            groups[-1] += entries
        if link.repeat > 1 and groups:
            groups[-1] += exits
        else:
            groups.append(exits)
    for group in groups:
        if group:
            # A border keeps what both of its sides may want: a choice dead on one side is dead.
            wanted = np.logical_or.reduce(group)
            for mask in group:
                mask[:] = wanted


def _agree_on_hubs(chain: Chain, masks: list[list[list[Mask]]]) -> None:
    """Make all variables of one hub keep the same choices: what any mode of every link that has it may
    want."""
    for name in hub_sizes(chain):
        own = [
            [masks[place][m][dict(part.hubs)[name]] for m, (_, part) in enumerate(link.modes)]
            for place, link in enumerate(chain)
            if name in hubs_of([link])
        ]
        wanted = np.logical_and.reduce([np.logical_or.reduce(of_modes) for of_modes in own])
        for mask in (mask for of_modes in own for mask in of_modes):
            mask[:] = wanted
