"""Weighted sums by variable elimination: least sums, solutions that reach them, and completion bounds.

`FactorSums` has the tables of one factor graph as weighted sums for many weights at once, and the least sum
outside each table. `SeparatorAxes` gives separators along the chain common axes: each shared variable, then
entry and exit. `ChainSums` has the sums of a whole chain: prefix, suffix and the least outside each segment.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from math import prod
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from shardwise.pareto import COLUMNS, Chain, FactorGraph, Segment, shared_sizes
from shardwise.search.pareto.elimination_order import EliminationOrder, EliminationStep
from shardwise.search.pareto.solution import SegmentChoice, Solution

if TYPE_CHECKING:
    from shardwise.search.pareto.weighted_sums_numba import EliminationProgram


PeakShares = tuple[tuple[int, float], ...]
"""Factors at which the peak is weighed, and the share of its weight at each; they add to 1, or there are
none."""

Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]


@lru_cache(maxsize=256)
def program_of(order: EliminationOrder) -> EliminationProgram:
    """The steps of an elimination order as arrays for compiled loops."""
    from shardwise.search.pareto.weighted_sums_numba import EliminationProgram

    tables = [*order.factors, *(step.variables for step in order.steps)]
    return EliminationProgram(
        _starts(tables),
        _joined(tables),
        len(order.factors),
        _starts([step.inputs for step in order.steps]),
        _joined([step.inputs for step in order.steps]),
        np.array([-1 if step.variable is None else step.variable for step in order.steps], dtype=np.intp),
    )


_COSTS: WeakKeyDictionary[FactorGraph, Values] = WeakKeyDictionary()
"""Cache of `costs_of`, as long as the factor graph is in use."""


def costs_of(part: FactorGraph) -> Values:
    """The costs of all factors one after the other, (6, cells). Infeasible cells are 0 in all columns and
    infinite in the last row."""
    if part not in _COSTS:
        _COSTS[part] = _costs(part)
    return _COSTS[part]


def _costs(part: FactorGraph) -> Values:
    nothing = np.empty((0, len(COLUMNS)))
    every = np.concatenate([nothing, *(factor.costs.reshape((-1, len(COLUMNS))) for factor in part.factors)])
    is_out = ~np.isfinite(every).all(axis=1)
    every[is_out] = 0.0
    return np.concatenate([every.T, np.where(is_out, np.inf, 0.0)[None]])


def _starts(groups: list[tuple[int, ...]]) -> Indices:
    return np.cumsum([0, *map(len, groups)], dtype=np.intp)


def _joined(groups: list[tuple[int, ...]]) -> Indices:
    return np.array([each for group in groups for each in group], dtype=np.intp)


@dataclass(frozen=True, slots=True, eq=False)
class TableViews:
    """Tables stored one after the other in `columns` (weights, cells), from offsets[t] on: each with an axis
    for each of its variables and one for the weights."""

    order: EliminationOrder
    sizes: tuple[int, ...]
    offsets: Indices
    columns: Values

    def __getitem__(self, table: int) -> Values:
        sizes = tuple(self.sizes[variable] for variable in self.order.variables_of(table))
        start = int(self.offsets[table])
        own = self.columns[:, start : start + prod(sizes)].reshape((-1, *sizes))
        return own.transpose((*range(1, own.ndim), 0))


Sums = npt.NDArray[np.float64]
"""(choices of each variable of a table..., weights). Along a chain: (choices of each shared variable, or 1
where it makes no difference..., choices at borders..., weights)."""


@dataclass(slots=True, eq=False)
class FactorSums:
    """The tables of a factor graph as weighted sums, in one array: cell c of table t is column offsets[t] + c
    of `columns` (weights, cells). Equal tables share the columns of the `first` of them.

    `outside` has the least sum outside each table, after `distribute`; table t starts at places[t] there.
    """

    part: FactorGraph
    order: EliminationOrder
    weights: Values
    peak_shares: PeakShares
    first: Indices
    offsets: Indices
    columns: Values
    places: Indices
    outside: TableViews

    @staticmethod
    def of(
        part: FactorGraph, order: EliminationOrder, weights: Values, peak_shares: PeakShares = ()
    ) -> FactorSums:
        """Under weights (J, 5). The last column, of the peak, counts at `peak_shares`, since the largest of
        several values is at least any mean of them.

        A block may contain equal tables, such as layers that all read one tensor. Each is computed once.
        """
        from shardwise.search.pareto.weighted_sums_numba import least_sums, table_sizes, weighted_costs

        sizes, program = np.array(part.sizes, dtype=np.intp), program_of(order)
        cells = table_sizes(program, sizes)
        firsts = equal_tables(order, peak_shares, part.first_equal)
        first = np.array([firsts[table] for table in range(len(cells))], dtype=np.intp)
        count = len(part.factors)
        is_made = first[count:] == np.arange(count, len(cells))
        given = np.cumsum([0, *cells[:count]], dtype=np.intp)
        offsets = np.concatenate([given[:-1], given[-1] + np.cumsum([0, *(cells[count:] * is_made)])[:-1]])
        columns = np.empty((len(weights), int(given[-1] + (cells[count:] * is_made).sum())))
        costs = costs_of(part)
        weighted_costs(costs, np.ascontiguousarray(weights), columns)
        for factor, share in peak_shares:
            own = slice(int(given[factor]), int(given[factor + 1]))
            columns[:, own] += weights[:, 4:] * (share * costs[4, own])
        offsets = offsets[first]
        least_sums(program, sizes, first, offsets, columns)
        places = np.cumsum([0, *cells], dtype=np.intp)
        outside = TableViews(order, part.sizes, places, np.empty((len(weights), 0)))
        return FactorSums(part, order, weights, peak_shares, first, offsets, columns, places, outside)

    def some(self, rows: Indices) -> FactorSums:
        """The same under some of the weights."""
        return replace(self, weights=self.weights[rows], columns=self.columns[rows])

    @property
    def tables(self) -> TableViews:
        """Views of all tables."""
        return TableViews(self.order, self.part.sizes, self.offsets, self.columns)

    @property
    def last(self) -> Sums:
        """The table on the separator."""
        return self.tables[self.order.last]

    def distribute(self, outside: Sums) -> None:
        """Set `outside`: for each table, the least sum of everything outside it, given that of the last
        table."""
        from shardwise.search.pareto.weighted_sums_numba import sums_outside

        self.outside = self._views(len(self.columns))
        self.outside[self.order.last][:] = outside
        sums_outside(*self._arrays, self.places, self.outside.columns)

    def potentials(self, outside: Sums) -> TableViews:
        """The potential of each table, given that of the last table, (..., 1), under the first weights: what
        a label adds to the excess of the whole besides its own sum.

        Excesses (sum plus potential) are at least 0, and those of a step's inputs add up to at most that of
        its output. The input with most factors gets the least of the others as its potential; the remainder
        is divided among the others in the same way. So the excesses of disjoint labels add up to at most that
        of the whole.
        """
        from shardwise.search.pareto.weighted_sums_numba import potential_sums

        found = self._views(1)
        found[self.order.last][:] = outside
        potential_sums(*self._arrays, self.places, found.columns)
        return found

    def min_marginals(self) -> list[Sums]:
        """The min-marginals of each variable, (choices, weights), after `distribute`: no solution with a
        choice has a smaller total. It is the largest bound of any factor on the variable; -inf if there is
        none."""
        from shardwise.search.pareto.weighted_sums_numba import min_marginal_sums

        start, found = min_marginal_sums(*self._arrays, self.places, self.outside.columns)
        return [found[:, start[variable] : start[variable + 1]].T for variable in range(len(self.part.sizes))]

    def choices(self, fixed: Mapping[int, Indices]) -> dict[int, Indices]:
        """Choices of all variables that reach the least sums, one per weight, given those of the
        separator; of equal ones the first."""
        from shardwise.search.pareto.weighted_sums_numba import least_choices

        chosen = np.zeros((len(self.part.sizes), len(self.columns)), dtype=np.intp)
        for variable, own in fixed.items():
            chosen[variable] = own
        least_choices(*self._arrays, chosen)
        return dict(enumerate(chosen))

    @property
    def _arrays(self) -> tuple[EliminationProgram, Indices, Indices, Values]:
        sizes = np.array(self.part.sizes, dtype=np.intp)
        return program_of(self.order), sizes, self.offsets, self.columns

    def _views(self, weights: int) -> TableViews:
        """Uninitialised tables at `places`, under so many weights."""
        return TableViews(self.order, self.part.sizes, self.places, np.empty((weights, int(self.places[-1]))))


def _joint_axes(step: EliminationStep) -> tuple[int, ...]:
    return step.variables if step.variable is None else (*step.variables, step.variable)


@lru_cache(maxsize=4096)
def equal_tables(
    order: EliminationOrder, peak_shares: PeakShares, first_equal: tuple[int, ...]
) -> dict[int, int]:
    """The first table that is equal to each, given which factors are equal."""
    made: dict[int, int] = {}
    like: dict[Hashable, int] = {}
    shares = dict(peak_shares)
    for place, kind in enumerate(first_equal):
        made[place] = like.setdefault((kind, shares.get(place, 0.0)), place)
    for step, onto, axes in _step_axes(order):
        inputs = tuple((made[table], own) for table, own in axes)
        joined_axes = {axis for _, own in axes for axis in own}
        # Variables on no input have their own number of choices, which equal inputs do not determine.
        others = tuple(variable for axis, variable in enumerate(onto) if axis not in joined_axes)
        key = (step.variable is None, len(onto), others, inputs)
        made[step.output] = like.setdefault(key, step.output)
    return made


_StepAxes = tuple[EliminationStep, tuple[int, ...], tuple[tuple[int, tuple[int, ...]], ...]]
"""A step, all of its variables, and for each input the positions of its axes among these."""


@lru_cache(maxsize=256)
def _step_axes(order: EliminationOrder) -> list[_StepAxes]:
    found = []
    for step in order.steps:
        onto = _joint_axes(step)
        own = tuple((table, tuple(map(onto.index, order.variables_of(table)))) for table in step.inputs)
        found.append((step, onto, own))
    return found


@dataclass(frozen=True, slots=True)
class SeparatorAxes:
    """The shared variables of a chain, in a fixed order, and their numbers of choices."""

    shared: tuple[str, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def of(chain: Chain) -> SeparatorAxes:
        """The shared variables of a chain."""
        found = shared_sizes(chain)
        return SeparatorAxes(tuple(found), tuple(found.values()))

    def start(self, weights: int) -> Sums:
        """Sums of an empty prefix: (1..., 1, weights)."""
        return np.zeros((*(1 for _ in self.shared), 1, weights))

    def variables(self, part: FactorGraph) -> dict[int, int]:
        """The separator variables of a factor graph, by their numbers in tables along the chain: shared
        variables below 0, so that they come first; entry 0 and exit 1."""
        numbers = (*range(-len(self.shared), 0), 0, 1)
        own = zip(numbers, self._axes(part), strict=True)
        return {number: variable for number, variable in own if variable is not None}

    def to_axes(self, part: FactorGraph, table: Sums) -> Sums:
        """A table on the separator of a factor graph, variables by their numbers, as (shared variables...,
        entry, exit, weights), of size 1 where it has none."""
        own = self._axes(part)
        there = [part.separator.index(variable) for variable in own if variable is not None]
        sizes = (1 if variable is None else part.sizes[variable] for variable in own)
        return table.transpose((*there, len(there))).reshape((*sizes, table.shape[-1]))

    def from_axes(self, part: FactorGraph, values: Sums) -> Sums:
        """The least of values (shared variables..., entry, exit, weights) for the separator of a factor
        graph, as a table."""
        own = self._axes(part)
        values = self.min_marginal(values, [name for name, _ in part.shared])
        there = [variable for variable in own if variable is not None]
        values = values.reshape((*(part.sizes[variable] for variable in there), values.shape[-1]))
        return values.transpose((*(there.index(variable) for variable in part.separator), len(there)))

    def min_marginal(self, values: Sums, shared: Collection[str]) -> Sums:
        """The least of values (shared variables..., any...) for each choice of the given shared variables:
        (these..., any...)."""
        away = tuple(axis for axis, name in enumerate(self.shared) if name not in shared)
        rest = values.shape[len(self.shared) :]
        shape = (size for name, size in zip(self.shared, self.sizes, strict=True) if name in shared)
        return np.broadcast_to(values.min(axis=away) if away else values, (*shape, *rest))

    def _axes(self, part: FactorGraph) -> list[int | None]:
        """The variable of each axis; None where the factor graph has none."""
        at = dict(part.shared)
        return [*(at.get(name) for name in self.shared), part.entry, part.exit]


def shared_of(segments: Collection[Segment]) -> set[str]:
    """The shared variables of some segments."""
    return {name for segment in segments for _, part in segment.modes for name, _ in part.shared}


_StepKey = tuple[int, int, int, int]
"""Weight, choice at the border before, mode, choice at the border after."""


@dataclass(frozen=True, slots=True)
class ChainWeights:
    """Weights (J, 5) of the columns and multipliers of the peak: `peaks` (segments, J) for each occurrence of
    a segment, and `peak_shares` for the factors within each mode.

    Every weighted sum is a lower bound of the same sum of a solution's measure if three conditions hold. The
    weights of hidden_s and exposed_s add to that of time. Those of resident_bytes and the peak are that of
    memory. The multipliers of all occurrences add to at most 1, since the largest of several values is at
    least any mean of them.
    """

    weights: npt.NDArray[np.float64]
    peaks: npt.NDArray[np.float64]
    peak_shares: tuple[tuple[PeakShares, ...], ...]


@dataclass(slots=True)
class ChainSums:
    """A chain under weights. `factor_sums[i][m]` are the tables of mode m of segment i. `prefix` and `suffix`
    are the least sums before and after each border between occurrences, (shared variables..., border,
    weights)."""

    chain: Chain
    borders: SeparatorAxes
    chain_weights: ChainWeights
    factor_sums: list[list[FactorSums]]
    prefix: list[Sums]
    suffix: list[Sums]

    @property
    def least(self) -> npt.NDArray[np.float64]:
        """The least total under each weight, (J)."""
        return np.asarray(_flat(self.prefix[-1]).min(axis=0))

    def some(self, rows: npt.NDArray[np.intp]) -> ChainSums:
        """The same under some of the weights."""
        chain_weights = ChainWeights(
            self.chain_weights.weights[rows],
            self.chain_weights.peaks[:, rows],
            self.chain_weights.peak_shares,
        )
        factor_sums = [[own.some(rows) for own in parts] for parts in self.factor_sums]
        prefix, suffix = ([sums[..., rows] for sums in every] for every in (self.prefix, self.suffix))
        return ChainSums(self.chain, self.borders, chain_weights, factor_sums, prefix, suffix)

    def outside(self, spans: Sequence[range], shared: Collection[str]) -> Sums:
        """The least sum outside any of some spans of occurrences, for each choice of the given shared
        variables: (shared variables..., entry, exit, weights), of size 1 for the others."""
        away = [axis for axis, name in enumerate(self.borders.shared) if name not in shared]
        both = ((self.prefix[span.start], self.suffix[span.stop]) for span in spans)
        return reduce(np.minimum, (_outside(prefix, suffix, away) for prefix, suffix in both))


def _without(sums: Sums, axes: Sequence[int]) -> Sums:
    """The least along some axes, which get size 1."""
    return np.asarray(sums.min(axis=tuple(axes), keepdims=True)) if axes else sums


def _outside(prefix: Sums, suffix: Sums, away: Sequence[int]) -> Sums:
    """The least total of prefix and suffix, (shared variables..., entry, exit, weights), of size 1 for the
    axes `away`."""
    from shardwise.search.pareto.weighted_sums_numba import least_outside

    # A shared variable on one side only can be minimised there alone.
    alone = [axis for axis in away if prefix.shape[axis] == 1 or suffix.shape[axis] == 1]
    prefix, suffix = _without(prefix, alone), _without(suffix, alone)
    shape = np.broadcast_shapes(prefix.shape[:-2], suffix.shape[:-2])
    sizes_outside = (prefix.shape[-2], suffix.shape[-2])
    shape_left = tuple(1 if axis in away else size for axis, size in enumerate(shape))
    found = np.full((prefix.shape[-1], prod(shape_left), *sizes_outside), np.inf)
    least_outside(
        _by_weight(prefix, 1), _by_weight(suffix, 1),
        _rows(prefix.shape[:-2], shape), _rows(suffix.shape[:-2], shape), _rows(shape_left, shape), found,
    )  # fmt: skip
    return np.moveaxis(found, 0, -1).reshape((*shape_left, *sizes_outside, len(found)))


def _by_weight(sums: Sums, borders: int) -> Sums:
    """Sums (shared variables..., borders..., weights) as a contiguous (weights, all shared choices,
    borders...)."""
    first = np.moveaxis(sums, -1, 0)
    return np.ascontiguousarray(first.reshape((len(first), -1, *sums.shape[-1 - borders : -1])))


def _rows(own: tuple[int, ...], shape: tuple[int, ...]) -> npt.NDArray[np.intp]:
    """The row of each choice of the shared variables (of `shape`) among those of a table (of `own`, or 1)."""
    return np.broadcast_to(np.arange(prod(own), dtype=np.intp).reshape(own), shape).reshape(-1)


@dataclass(frozen=True, slots=True, eq=False)
class _Extension:
    """The sums of a segment, (shared variables..., from, after, weights), and the same by weight."""

    table: Sums
    by_weight: Sums

    @staticmethod
    def of(table: Sums) -> _Extension:
        """Of a segment's sums."""
        return _Extension(table, _by_weight(table, 2))

    def least(self, before: Sums) -> Sums:
        """The least total of a prefix and the segment, (shared variables..., after, weights)."""
        from shardwise.search.pareto.weighted_sums_numba import extended_sums

        own, table = before.shape[:-2], self.table.shape[:-3]
        shape = np.broadcast_shapes(own, table)
        found = np.full((len(self.by_weight), prod(shape), self.table.shape[-2]), np.inf)
        extended_sums(_by_weight(before, 1), self.by_weight, _rows(own, shape), _rows(table, shape), found)
        return np.moveaxis(found, 0, -1).reshape((*shape, *found.shape[2:], len(found)))


def _flat(sums: Sums) -> Sums:
    """Sums at an end of a chain, (shared choices, weights)."""
    return sums.reshape((-1, sums.shape[-1]))


def segment_table(borders: SeparatorAxes, parts: list[FactorSums]) -> Sums:
    """The least of a segment's modes, (shared variables..., entry, exit, weights)."""
    return reduce(np.minimum, (borders.to_axes(factor_sums.part, factor_sums.last) for factor_sums in parts))


def chain_sums(chain: Chain, orders: list[list[EliminationOrder]], chain_weights: ChainWeights) -> ChainSums:
    """`chain` under the weights; `orders[i][m]` is the elimination order of mode m of segment i."""
    factor_sums: list[list[FactorSums]] = []
    for place, segment in enumerate(chain):
        own = chain_weights.weights.copy()
        own[:, 3:] *= chain_weights.peaks[place][:, None]
        parts = zip(segment.modes, orders[place], chain_weights.peak_shares[place], strict=True)
        factor_sums.append(
            [FactorSums.of(part, order, own, peak_shares) for (_, part), order, peak_shares in parts]
        )
    borders = SeparatorAxes.of(chain)
    start = borders.start(len(chain_weights.weights))
    found = ChainSums(chain, borders, chain_weights, factor_sums, [start], [start])
    tables = [segment_table(borders, parts) for parts in factor_sums]
    for segment, table in zip(chain, tables, strict=True):
        onward = _Extension.of(table)
        for _ in range(segment.repeat):
            found.prefix.append(onward.least(found.prefix[-1]))
    for segment, table in zip(reversed(chain), reversed(tables), strict=True):
        back = _Extension.of(table.swapaxes(-3, -2))
        for _ in range(segment.repeat):
            found.suffix.append(back.least(found.suffix[-1]))
    found.suffix.reverse()
    return found


def solutions(found: ChainSums) -> list[Solution]:
    """A solution of the least total under each weight; of equal choices the first."""
    count = found.prefix[0].shape[-1]
    each = np.arange(count)
    at = np.zeros(count, dtype=np.intp)
    borders = found.borders
    end = found.prefix[-1]
    shared = np.unravel_index(_flat(end).argmin(axis=0), end.shape[:-1])[:-1]  # without the end border
    chosen: list[list[SegmentChoice]] = [[] for _ in range(count)]
    border = 0
    for place, segment in enumerate(found.chain):
        memo: dict[_StepKey, SegmentChoice] = {}
        parts = found.factor_sums[place]
        stacked = np.stack([borders.to_axes(factor_sums.part, factor_sums.last) for factor_sums in parts])
        tables = np.moveaxis(stacked, -2, 1)  # (modes, exits, shared variables..., entries, weights)
        own = tuple(
            np.minimum(shared_variable, size - 1)
            for shared_variable, size in zip(shared, tables.shape[2:], strict=False)
        )
        for _ in range(segment.repeat):
            border += 1
            suffix = np.moveaxis(found.suffix[border], -2, 0)  # (exits, shared variables..., weights)
            whose = tuple(
                np.minimum(shared_variable, size - 1)
                for shared_variable, size in zip(shared, suffix.shape[1:], strict=False)
            )
            # (modes, exits, weights) from the current border choice of each weight
            onward = tables[(slice(None), slice(None), *own, at, each)] + suffix[(slice(None), *whose, each)]
            best = onward.reshape(-1, count).argmin(axis=0)
            modes, after = best // onward.shape[1], best % onward.shape[1]
            _choose(parts, dict(zip(borders.shared, shared, strict=True)), at, modes, after, memo, chosen)
            at = after
    return [tuple(choices) for choices in chosen]


def _choose(
    parts: list[FactorSums],
    shared: dict[str, npt.NDArray[np.intp]],
    at: npt.NDArray[np.intp],
    modes: npt.NDArray[np.intp],
    after: npt.NDArray[np.intp],
    memo: dict[_StepKey, SegmentChoice],
    chosen: list[list[SegmentChoice]],
) -> None:
    """Append to `chosen` the choice of a segment under each weight between its borders; equal steps are
    solved once."""
    step_keys = [
        (weight, *where)
        for weight, where in enumerate(zip(at.tolist(), modes.tolist(), after.tolist(), strict=True))
    ]
    for mode, factor_sums in enumerate(parts):
        unknown = [key for key in step_keys if key[2] == mode and key not in memo]
        if not unknown:
            continue
        part = factor_sums.part
        fixed = {end: each for end, each in ((part.entry, at), (part.exit, after)) if end is not None}
        fixed |= {variable: shared[name] for name, variable in part.shared}
        found = factor_sums.choices(fixed)
        rows = np.stack([found[variable] for variable in range(len(part.sizes))], axis=1)
        memo |= {key: SegmentChoice(mode, tuple(rows[key[0]].tolist())) for key in unknown}
    for key in step_keys:
        chosen[key[0]].append(memo[key])
