"""Leaving out choices that cannot matter: chains with fewer choices and the same frontier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt

from shardwise.frontier import Chain, Factor, FactorGraph, Segment, first_occurrences, shared_sizes
from shardwise.search.tracking.borders import shared_of
from shardwise.search.tracking.chained import ChainSums
from shardwise.search.tracking.flat import costs_of
from shardwise.search.tracking.lines import SLACK
from shardwise.search.tracking.scalars import Sums
from shardwise.search.tracking.solution import SegmentChoice, Solution, occurrences

Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class PresolvedChain:
    """A chain with fewer choices, and which of the original each is: `modes[i]` the original numbers of link
    i's modes, `choices[i][m][v]` those of the choices of variable v."""

    chain: Chain
    modes: tuple[tuple[int, ...], ...]
    choices: tuple[tuple[tuple[Indices, ...], ...], ...]

    @cached_property
    def decided_share(self) -> float | None:
        """The share of hidden_s in time where the other time is nothing whatever is chosen; else None."""
        parts = [part for segment in self.chain for _, part in segment.modes if part.factors]
        for column, share in ((1, 1.0), (0, 0.0)):
            if not any(costs_of(part)[column].any() for part in parts):
                return share
        return None

    @staticmethod
    def of(chain: Chain) -> PresolvedChain:
        """A chain with all of its choices."""
        return PresolvedChain(
            chain,
            tuple(tuple(range(len(segment.modes))) for segment in chain),
            tuple(
                tuple(tuple(np.arange(size) for size in part.sizes) for _, part in segment.modes)
                for segment in chain
            ),
        )

    def original(self, solution: Solution) -> Solution:
        """A solution of the narrowed chain in the numbers of the original."""
        return self.originals([solution])[0]

    def originals(self, solutions: list[Solution]) -> list[Solution]:
        """The same of many; what several of them chose is told once."""
        memo: dict[tuple[int, SegmentChoice], SegmentChoice] = {}
        places = list(occurrences(self.chain))
        found = []
        for solution in solutions:
            keys = list(zip(places, solution, strict=True))
            for key in keys:
                if key not in memo:
                    memo[key] = self._original(*key)
            found.append(tuple(memo[key] for key in keys))
        return found

    def _original(self, place: int, choice: SegmentChoice) -> SegmentChoice:
        numbers = self.choices[place][choice.mode]
        picked = zip(numbers, choice.choices, strict=True)
        return SegmentChoice(self.modes[place][choice.mode], tuple(int(each[own]) for each, own in picked))


def presolved(before: PresolvedChain, found: ChainSums, limits: npt.NDArray[np.float64]) -> PresolvedChain:
    """Without the choices that lead to no solution below `limits` (n, weights) of any row: `found` is
    `before`'s chain under the weights."""
    masks = [
        [_alive(found, place, mode, limits) for mode in range(len(segment.modes))]
        for place, segment in enumerate(before.chain)
    ]
    _agree_on_borders(before.chain, masks)
    _agree_on_shared(before.chain, masks)
    segments: list[Segment] = []
    modes: list[tuple[int, ...]] = []
    choices: list[tuple[tuple[Indices, ...], ...]] = []
    for place, segment in enumerate(before.chain):
        left = [mode for mode, mask in enumerate(masks[place]) if all(each.any() for each in mask)]
        rows_left = {mode: [np.flatnonzero(mask) for mask in masks[place][mode]] for mode in left}
        segments.append(
            replace(
                segment,
                modes=tuple(
                    (segment.modes[mode][0], _part(segment.modes[mode][1], rows_left[mode])) for mode in left
                ),
            )
        )
        modes.append(tuple(before.modes[place][mode] for mode in left))
        choices.append(
            tuple(
                tuple(
                    own[rows] for own, rows in zip(before.choices[place][mode], rows_left[mode], strict=True)
                )
                for mode in left
            )
        )
    return PresolvedChain(tuple(segments), tuple(modes), tuple(choices))


def choices_of(chain: Chain) -> int:
    """How many choices all variables of a chain have."""
    return sum(sum(part.sizes) for segment in chain for _, part in segment.modes)


def separator_choices(chain: Chain) -> int:
    """How many choices together what others see of a link has, at most."""
    parts = [part for segment in chain for _, part in segment.modes]
    return max((prod(part.sizes[variable] for variable in part.separator) for part in parts), default=0)


def _part(part: FactorGraph, rows_left: Sequence[Indices]) -> FactorGraph:
    """The part with these choices of each variable only."""
    is_whole = [len(rows) == size for rows, size in zip(rows_left, part.sizes, strict=True)]
    factors = tuple(
        factor
        if all(is_whole[variable] for variable in factor.variables)
        else Factor(factor.variables, factor.costs[np.ix_(*(rows_left[each] for each in factor.variables))])
        for factor in part.factors
    )
    row_keys = [rows.tobytes() for rows in rows_left]
    first_equal = first_occurrences(
        (like, *(row_keys[variable] for variable in factor.variables))
        for like, factor in zip(part.first_equal, part.factors, strict=True)
    )
    return part.changed(tuple(len(rows) for rows in rows_left), factors, first_equal)


def may_matter(bounds: Sums, limits: npt.NDArray[np.float64]) -> Mask:
    """Which rows of bounds (n, J) are below some row of limits (m, J) in all weights: (n)."""
    padded_limits = limits * (1.0 + SLACK)
    is_alive = np.zeros(len(bounds), dtype=bool)
    rows = np.flatnonzero((bounds < padded_limits.max(axis=0, initial=-np.inf)).all(axis=1))
    for limit in padded_limits:
        if not len(rows):
            break
        is_alive[rows[(bounds[rows] < limit).all(axis=1)]] = True
        rows = rows[~is_alive[rows]]
    return is_alive


def _alive(found: ChainSums, place: int, mode: int, limits: npt.NDArray[np.float64]) -> list[Mask]:
    """Which choices of each variable of a mode may matter, in any occurrence of its link."""
    start = sum(segment.repeat for segment in found.chain[:place])
    factor_sums = found.factor_sums[place][mode]
    spans = [range(at, at + 1) for at in range(start, start + found.chain[place].repeat)]
    beyond = found.outside(spans, shared_of([found.chain[place]]))
    factor_sums.distribute(found.borders.from_axes(factor_sums.part, beyond))
    is_alive = may_matter(np.concatenate(factor_sums.min_marginals()), limits)
    return np.split(is_alive, np.cumsum(factor_sums.part.sizes)[:-1])


def _agree_on_borders(chain: Chain, masks: list[list[list[Mask]]]) -> None:
    """Make all variables of one border keep the same choices: what any mode on either side may want.

    All borders of a repeated link are one, since its entry and exit are the same tensor.
    """
    groups: list[list[Mask]] = []
    for place, segment in enumerate(chain):
        entries = [masks[place][m][p.entry] for m, (_, p) in enumerate(segment.modes) if p.entry is not None]
        exits = [masks[place][m][p.exit] for m, (_, p) in enumerate(segment.modes) if p.exit is not None]
        if entries and groups:
            groups[-1] += entries
        if segment.repeat > 1 and groups:
            groups[-1] += exits
        else:
            groups.append(exits)
    for group in groups:
        if group:
            # A border keeps what both of its sides may want: a choice dead on one side is dead.
            alive = np.logical_or.reduce(group)
            for mask in group:
                mask[:] = alive


def _agree_on_shared(chain: Chain, masks: list[list[list[Mask]]]) -> None:
    """Make all variables of one hub keep the same choices: what any mode of every link that has it may
    want."""
    for name in shared_sizes(chain):
        own = [
            [masks[place][m][dict(part.shared)[name]] for m, (_, part) in enumerate(segment.modes)]
            for place, segment in enumerate(chain)
            if name in shared_of([segment])
        ]
        alive = np.logical_and.reduce([np.logical_or.reduce(of_modes) for of_modes in own])
        for mask in (mask for of_modes in own for mask in of_modes):
            mask[:] = alive
