"""All layouts of one operator, as columns: one rule per mesh axis, unfiltered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from shardwise.cost.layouts.forms import Integers, Values
from shardwise.errors import InternalError
from shardwise.graph import REPLICATE, OpNode, ShardingRule, allows, local_sizes, rules_of


@dataclass(frozen=True, slots=True, eq=False)
class OperatorLayouts:
    """The K layouts of an operator.

    `rules` are one per axis, `sizes` the elements (K) of each dim on the rank with most; `inputs`,
    `parameters` and `output` are placements (K, axes).
    """

    op: OpNode
    rules: tuple[tuple[ShardingRule, ...], ...]
    sizes: Mapping[str, Values]
    inputs: tuple[Integers, ...]
    parameters: tuple[Integers, ...]
    output: Integers

    def __len__(self) -> int:
        return len(self.rules)

    def extent(self, dims: tuple[str, ...]) -> Values:
        """Elements (K) of a tensor with these dims on a rank."""
        return np.asarray(prod((self.sizes[dim] for dim in dims), start=np.ones(len(self.rules))))

    @property
    def share(self) -> Values:
        """The part (K) of all iterations that one rank does."""
        return np.asarray(self.extent(tuple(self.op.dims)) / float(prod(self.op.dims.values())))


def operator_layouts_of(op: OpNode, ranks: tuple[int, ...]) -> OperatorLayouts:
    """Every way to give each axis a rule of `op`'s that goes together with the others; along an axis of one
    rank there is nothing to choose."""
    rules = rules_of(op)
    plain = [rule for rule in rules if rule.split is None and rule.output == REPLICATE]
    among = [rules if size > 1 else plain[:1] for size in ranks]
    found = tuple(combined for combined in product(*among) if allows(op, combined, ranks))
    if not found:
        raise InternalError(f"operator {op.name} has no layout")
    sizes = [local_sizes(op, combined, ranks) for combined in found]

    def placed(of: list[list[int]]) -> Integers:
        return np.array(of, dtype=np.int64)

    return OperatorLayouts(
        op=op,
        rules=found,
        sizes={dim: np.array([each[dim] for each in sizes], dtype=np.float64) for dim in op.dims},
        inputs=tuple(
            placed([[rule.inputs[slot] for rule in combined] for combined in found])
            for slot in range(len(op.inputs))
        ),
        parameters=tuple(
            placed([[rule.parameters[slot] for rule in combined] for combined in found])
            for slot in range(len(op.parameters))
        ),
        output=placed([[rule.output for rule in combined] for combined in found]),
    )
