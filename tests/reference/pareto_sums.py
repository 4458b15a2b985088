"""Weighted sums by variable elimination in NumPy, table by table: what compiled loops are compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce

import numpy as np
import numpy.typing as npt

from shardwise.pareto import FactorGraph
from shardwise.search.pareto.elimination_order import EliminationOrder, EliminationStep, order_of

Values = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]


@dataclass(eq=False)
class ReferenceSums:
    """The tables of a factor graph under weights (J, 5), each (choices of its variables..., J); the peak is
    weighed at `peak_shares`. `outside` has the least sum outside each table, after `distribute`.
    """

    part: FactorGraph
    weights: Values
    peak_shares: tuple[tuple[int, float], ...] = ()
    outside: dict[int, Values] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.order: EliminationOrder = order_of(self.part)
        self.tables: dict[int, Values] = {}
        shares = dict(self.peak_shares)
        for place, factor in enumerate(self.part.factors):
            own = self.weights.copy()
            own[:, -1] *= shares.get(place, 0.0)
            is_out = np.asarray(~np.isfinite(factor.costs).all(axis=-1))
            self.tables[place] = np.where(is_out[..., None], 0.0, factor.costs) @ own.T
            self.tables[place][is_out] = np.inf
        for step in self.order.steps:
            joint = self._joint(step, step.inputs, np.zeros(len(self.weights)))
            self.tables[step.output] = joint if step.variable is None else joint.min(axis=-2)

    @property
    def last(self) -> Values:
        """The table on the separator."""
        return self.tables[self.order.last]

    def distribute(self, outside: Values) -> None:
        """Set `outside`, given that of the last table."""
        self.outside = {self.order.last: outside}
        for step in reversed(self.order.steps):
            rest = _before(step, self.outside[step.output])
            for table in step.inputs:
                others = [other for other in step.inputs if other != table]
                self.outside[table] = self._least_for(step, table, self._joint(step, others, rest))

    def potentials(self, outside: Values) -> dict[int, Values]:
        """The potential of each table under the first weights, given that of the last table."""
        counts = dict.fromkeys(range(len(self.part.factors)), 1)
        for step in self.order.steps:
            counts[step.output] = sum(counts[table] for table in step.inputs)
        found = {self.order.last: outside}
        for step in reversed(self.order.steps):
            rest = _before(step, found[step.output])
            waiting = sorted(step.inputs, key=lambda table: (-counts[table], table))
            for place, table in enumerate(waiting):
                joint = self._joint(step, waiting[place + 1 :], rest)
                found[table] = self._least_for(step, table, joint)
                taken = self._aligned(step, table, found[table])
                with np.errstate(invalid="ignore"):
                    rest = np.where(np.isfinite(taken), rest - taken, np.inf)
        return found

    def min_marginals(self) -> list[Values]:
        """The largest bound of any factor on each choice of each variable, (choices, J)."""
        best = [np.full((size, len(self.weights)), -np.inf) for size in self.part.sizes]
        for place, factor in enumerate(self.part.factors):
            total = self.tables[place] + self.outside[place]
            for variable in factor.variables:
                away = tuple(axis for axis, other in enumerate(factor.variables) if other != variable)
                best[variable] = np.maximum(best[variable], total.min(axis=away) if away else total)
        return best

    def choices(self, fixed: dict[int, Indices]) -> dict[int, Indices]:
        """Choices of all variables that reach the least sums, one per weight, given those of the
        separator."""
        found = dict(fixed)
        for step in reversed(self.order.steps):
            if step.variable is None:
                continue
            total = np.zeros((len(self.weights), self.part.sizes[step.variable]))
            for table in step.inputs:
                variables = self.order.variables_of(table)
                for each in range(len(self.weights)):
                    index = tuple(slice(None) if v == step.variable else found[v][each] for v in variables)
                    total[each] += self.tables[table][(*index, each)]
            found[step.variable] = total.argmin(axis=1)
        return found

    def _joint(self, step: EliminationStep, tables: tuple[int, ...] | list[int], rest: Values) -> Values:
        """The sum of some inputs of a step and `rest` over all of its variables, the eliminated one last."""
        aligned = [
            self._aligned(step, table, self.tables[table])[..., : self._width(rest)] for table in tables
        ]
        shape = (*(self.part.sizes[variable] for variable in _variables(step)), self._width(rest))
        return np.broadcast_to(reduce(np.add, aligned, rest), shape)

    def _width(self, rest: Values) -> int:
        return int(rest.shape[-1])

    def _aligned(self, step: EliminationStep, table: int, values: Values) -> Values:
        """A table with an axis for each variable of a step, of size 1 where it does not have it."""
        own, onto = self.order.variables_of(table), _variables(step)
        order = [own.index(variable) for variable in onto if variable in own]
        shape = [self.part.sizes[variable] if variable in own else 1 for variable in onto]
        return values.transpose((*order, len(own))).reshape((*shape, values.shape[-1]))

    def _least_for(self, step: EliminationStep, table: int, joint: Values) -> Values:
        """The least of a joint sum for each choice of a table's variables."""
        own, onto = self.order.variables_of(table), _variables(step)
        away = tuple(axis for axis, variable in enumerate(onto) if variable not in own)
        least = joint.min(axis=away) if away else joint
        left = [variable for variable in onto if variable in own]
        return np.asarray(least.transpose((*(left.index(variable) for variable in own), len(own))))


def _variables(step: EliminationStep) -> tuple[int, ...]:
    return step.variables if step.variable is None else (*step.variables, step.variable)


def _before(step: EliminationStep, output: Values) -> Values:
    """A step's output, with an axis for the eliminated variable."""
    return output if step.variable is None else output[..., None, :]
