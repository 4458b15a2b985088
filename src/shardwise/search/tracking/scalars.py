"""Least weighted sums of a part, for many weights at once, and what everything outside a table costs at
least."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from functools import reduce as fold
from math import prod

import numpy as np
import numpy.typing as npt

from shardwise.frontier import FactorGraph
from shardwise.search.tracking.flat import FlatSums, PeakShares, TableViews
from shardwise.search.tracking.steps import EliminationOrder, EliminationStep

Sums = npt.NDArray[np.float64]
"""(choices of each variable of a table..., weights)."""

MOST_SUMS_AT_ONCE = 1 << 16
"""Sums of a step from which on they are not all held at once."""


@dataclass(slots=True)
class FactorSums:
    """The tables of a part as weighted sums: `tables[i]` of table i, variables in the order of `axes[i]`;
    `made[i]` is the first table that is like it. `flat` is where they lie if machine code works on them."""

    part: FactorGraph
    order: EliminationOrder
    weights: npt.NDArray[np.float64]
    peak_shares: PeakShares
    tables: dict[int, Sums] | TableViews
    axes: dict[int, tuple[int, ...]]
    made: dict[int, int]
    outside: dict[int, Sums] | TableViews = field(default_factory=dict)
    flat: FlatSums | None = None

    @staticmethod
    def of(
        part: FactorGraph,
        order: EliminationOrder,
        weights: npt.NDArray[np.float64],
        peak_shares: PeakShares = (),
    ) -> FactorSums:
        """Of weights (J, 5): the last column, of the peak, counts where it is `peak_shares`, since the
        largest of several values is at least any mean of them.

        A block may hold what is alike many times, such as layers that all read one tensor: a table that is
        made like another one is the same numbers, which are worked out once.
        """
        factor_sums = FactorSums(
            part, order, weights, peak_shares, {}, *_equal_tables(order, peak_shares, part.first_equal)
        )
        if order.uses_numba and part.factors:
            factor_sums.flat = FlatSums.of(part, order, factor_sums.made, weights, peak_shares)
            factor_sums.tables = factor_sums.flat.tables
            return factor_sums
        tables: dict[int, Sums] = {}
        factor_sums.tables = tables
        shares = dict(peak_shares)
        for place, factor in enumerate(part.factors):
            if factor_sums.made[place] == place:
                own = weights.copy()
                own[:, -1] *= shares.get(place, 0.0)
                tables[place] = _weighted(factor.costs, own)
            tables[place] = tables[factor_sums.made[place]]
        for step in order.steps:
            if factor_sums.made[step.output] == step.output:
                tables[step.output] = factor_sums._least(step)
            tables[step.output] = tables[factor_sums.made[step.output]]
        return factor_sums

    def some(self, rows: npt.NDArray[np.intp]) -> FactorSums:
        """Under some of the weights."""
        found = FactorSums(
            self.part, self.order, self.weights[rows], self.peak_shares, {}, self.axes, self.made
        )
        if self.flat is not None:
            found.flat = replace(self.flat, sums=self.flat.sums[rows])
            found.tables = found.flat.tables
        else:
            found.tables = {table: self.tables[table][..., rows] for table in self.axes}
        return found

    @property
    def last(self) -> Sums:
        """The table on the kept variables."""
        return self.tables[self.order.last]

    def _joint_axes(self, step: EliminationStep) -> tuple[int, ...]:
        return _joint_axes(step)

    def _aligned(self, table: int, onto: tuple[int, ...]) -> Sums:
        """A table with an axis for each variable of `onto`, of size 1 where it does not have it."""
        return self._as_on(self.tables[table], self.axes[table], onto)

    def _as_on(self, values: Sums, own: tuple[int, ...], onto: tuple[int, ...]) -> Sums:
        order = [own.index(variable) for variable in onto if variable in own]
        shape = [self.part.sizes[variable] if variable in own else 1 for variable in onto]
        return values.transpose((*order, len(own))).reshape((*shape, values.shape[-1]))

    def _joint(self, step: EliminationStep) -> Sums:
        """The sum of a step's inputs over all of its variables, the one that is taken out last."""
        onto = self._joint_axes(step)
        aligned = [self._aligned(table, onto) for table in step.inputs]
        if not aligned:
            return np.zeros((*(self.part.sizes[variable] for variable in onto), 1))
        joint = fold(np.add, aligned)
        shape = (*(self.part.sizes[variable] for variable in onto), joint.shape[-1])
        return np.broadcast_to(joint, shape)

    def _least(self, step: EliminationStep) -> Sums:
        if step.variable is None or not step.inputs:
            joint = self._joint(step)
            return joint if step.variable is None else np.asarray(joint.min(axis=-2))
        onto = self._joint_axes(step)
        aligned = sorted((self._aligned(table, onto) for table in step.inputs), key=lambda own: own.size)
        shape = np.broadcast_shapes(*(own.shape for own in aligned))
        if prod(shape) < MOST_SUMS_AT_ONCE:
            return np.asarray(fold(np.add, aligned).min(axis=-2))
        # Choice by choice, so that what is added up stays close to the processor.
        *some, last = (np.moveaxis(own, -2, 0) for own in aligned)
        least = np.full((*shape[:-2], shape[-1]), np.inf)
        total = np.empty_like(least)
        for choice in range(shape[-2]):
            before = fold(np.add, (own[choice] for own in some)) if some else 0.0
            np.minimum(least, np.add(before, last[choice], out=total), out=least)
        return least

    def distribute(self, outside: Sums) -> None:
        """Fill `outside`: for each table, the least sum of all that is not in it, given `outside` of the last
        table."""
        self.outside = self.outside_sums(outside) if self.flat is None else self.flat.distribute(outside)

    def outside_sums(self, outside: Sums) -> dict[int, Sums]:
        """For each table, the least sum of all that is not in it, given that of the last table."""
        found = {self.order.last: outside}
        for step in reversed(self.order.steps):
            onto, outside_sums = self._joint_axes(step), self._before(step, found[step.output])
            for table in step.inputs:
                others = [self._aligned(other, onto) for other in step.inputs if other != table]
                found[table] = self._least_for(table, onto, fold(np.add, others, outside_sums))
        return found

    def potentials(self, outside: Sums) -> dict[int, Sums] | TableViews:
        """For each table what a label of it adds to the excess of the whole beside its own sum, given that of
        the last table, (..., 1), under the first weights.

        Excesses (sum and potential) are none below 0, and those of a step's inputs come to no more than that
        of what it makes of them: the input that is made of most has what the others come to at least, and
        what that leaves is shared by those in the same way. So excesses of labels none of which is made of
        another come to no more than that of the whole.
        """
        if self.flat is not None:
            return self.flat.potentials(outside)
        counts = {table: 1 for table in range(len(self.part.factors))}
        for step in self.order.steps:
            counts[step.output] = sum(counts[table] for table in step.inputs)
        found = {self.order.last: outside}
        for step in reversed(self.order.steps):
            onto, rest = self._joint_axes(step), self._before(step, found[step.output])
            waiting = sorted(step.inputs, key=lambda table: (-counts[table], table))
            for place, table in enumerate(waiting):
                others = [self._aligned(other, onto) for other in waiting[place + 1 :]]
                found[table] = self._least_for(table, onto, fold(np.add, others, rest))
                taken = self._as_on(found[table], self.axes[table], onto)
                with np.errstate(invalid="ignore"):
                    rest = np.where(np.isfinite(taken), rest - taken, np.inf)
        return found

    def _before(self, step: EliminationStep, output: Sums) -> Sums:
        """What a step makes, with an axis for the variable that it takes out."""
        return output if step.variable is None else output[..., None, :]

    def _least_for(self, table: int, onto: tuple[int, ...], sums: Sums) -> Sums:
        """The least of sums on `onto` for each choice that a table has, in the order of its axes."""
        own = self.axes[table]
        away = tuple(place for place, variable in enumerate(onto) if variable not in own)
        shape = (*(self.part.sizes[variable] for variable in onto), sums.shape[-1])
        least = np.broadcast_to(sums, shape)
        least = least.min(axis=away) if away else least
        left = tuple(variable for variable in onto if variable in own)
        return np.asarray(least.transpose((*(left.index(v) for v in own), len(own))))

    def min_marginals(self) -> list[Sums]:
        """Of each variable a total that no solution with a choice of it is below, (choices, weights); after
        `distribute`. The largest that the factors on it tell, and nothing where there are none."""
        if self.flat is not None:
            return self.flat.min_marginals()
        weights = self.last.shape[-1]
        best = [np.full((size, weights), -np.inf) for size in self.part.sizes]
        for place, factor in enumerate(self.part.factors):
            total = self.tables[place] + self.outside[place]
            for variable in factor.variables:
                away = tuple(i for i, other in enumerate(factor.variables) if other != variable)
                least = total.min(axis=away) if away else total
                best[variable] = np.maximum(best[variable], least)
        return best

    def choices(self, fixed: dict[int, npt.NDArray[np.intp]]) -> dict[int, npt.NDArray[np.intp]]:
        """Choices of all variables that reach the least sums, one per weight, given those of the ends."""
        if self.flat is not None:
            return self.flat.choices(fixed)
        found = dict(fixed)
        for step in reversed(self.order.steps):
            if step.variable is None:
                continue
            each = np.arange(self.last.shape[-1])
            total = np.zeros((len(each), self.part.sizes[step.variable]))
            for table in step.inputs:
                own = self.axes[table]
                index = tuple(slice(None) if v == step.variable else found[v] for v in own)
                place = own.index(step.variable)
                total = total + _picked(self.tables[table], index, place, each)
            found[step.variable] = total.argmin(axis=1)
        return found


def _joint_axes(step: EliminationStep) -> tuple[int, ...]:
    return step.variables if step.variable is None else (*step.variables, step.variable)


@lru_cache(maxsize=4096)
def _equal_tables(
    order: EliminationOrder, peak_shares: PeakShares, first_equal: tuple[int, ...]
) -> tuple[dict[int, tuple[int, ...]], dict[int, int]]:
    """The variables of each table, in the order of its axes, and the first table that is made like it, for
    factors of which some are alike."""
    made: dict[int, int] = {}
    like: dict[Hashable, int] = {}
    shares = dict(peak_shares)
    for place, kind in enumerate(first_equal):
        made[place] = like.setdefault((kind, shares.get(place, 0.0)), place)
    for step, onto, axes in _step_axes(order):
        inputs = tuple((made[table], own) for table, own in axes)
        joined_axes = {axis for _, own in axes for axis in own}
        # Others have as many choices as they have: like inputs do not tell.
        others = tuple(variable for axis, variable in enumerate(onto) if axis not in joined_axes)
        key = (step.variable is None, len(onto), others, inputs)
        made[step.output] = like.setdefault(key, step.output)
    return _axes(order), made


_StepAxes = tuple[EliminationStep, tuple[int, ...], tuple[tuple[int, tuple[int, ...]], ...]]
"""A step, all of its variables, and for each of its inputs which of these its axes are."""


@lru_cache(maxsize=256)
def _step_axes(order: EliminationOrder) -> list[_StepAxes]:
    axes, found = _axes(order), []
    for step in order.steps:
        onto = _joint_axes(step)
        own = tuple((table, tuple(map(onto.index, axes[table]))) for table in step.inputs)
        found.append((step, onto, own))
    return found


@lru_cache(maxsize=256)
def _axes(order: EliminationOrder) -> dict[int, tuple[int, ...]]:
    """The variables of each table, in the order of its axes."""
    made = {step.output: step.variables for step in order.steps}
    return dict(enumerate(order.factors)) | made


def _picked(
    values: Sums, index: tuple[slice | npt.NDArray[np.intp], ...], place: int, each: npt.NDArray[np.intp]
) -> npt.NDArray[np.float64]:
    """Rows (weights, choices of the variable at `place`) of a table, all other variables chosen."""
    permuted = values.transpose([axis for axis in range(values.ndim) if axis != place] + [place])
    chosen = tuple(part for part in index if not isinstance(part, slice))
    return np.asarray(permuted[(*chosen, each)])


def _weighted(costs: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """costs (..., 5) times weights (J, 5): (..., J); infinite where any cost is, whatever its weight."""
    is_out = ~np.isfinite(costs).all(axis=-1)
    sums = np.where(np.isfinite(costs), costs, 0.0) @ weights.T
    sums[is_out] = np.inf
    return np.asarray(sums)
