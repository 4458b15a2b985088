"""Recomputation of named modules: what a set of modules adds to a layer's backward pass, and what it saves.

`SelectiveRows` has the costs of every kind of layer under the set of each row, or under the own set of our
runtime where a row names no modules. docs/concepts/cost-model.md, sections 10 and 14.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from shardwise.cost.layers import (
    WORK_FIELDS,
    BlockCost,
    Contention,
    GridCost,
    eager_row_bytes,
    saved_tensor_bytes,
    score_bytes,
)
from shardwise.cost.operators import operator_times, rows_of
from shardwise.cost.problem import Problem
from shardwise.model import MODULE_SETS, MODULES, Layer, ModuleOperators, modules_of_layer, repeated_modules
from shardwise.operators import Attention

IS_REPEATED: Final = np.array(
    [[1.0 * (module in repeated_modules(modules)) for module in MODULES] for modules in MODULE_SETS]
)
"""[set, module]: 1 where the set repeats the module by itself, 0 where it does not or another one of the set
contains it."""

SECONDS, CONTENDED, SAVED, RECOMPUTED = range(4)
"""Fields of `SelectiveRows.columns`."""


@dataclass(frozen=True)
class SelectiveRows:
    """Rows of a table with their selective recomputation; row i has the grid `of_grid[i]`.

    `contention` are the collectives that contend, if not those with the cards of the gradient reduction.
    """

    problem: Problem
    table: Any
    grid: GridCost
    of_grid: Any
    contention: Contention | None = None

    @cached_property
    def has_modules(self) -> bool:
        """Whether some row names modules."""
        return bool(np.any(self.table.recompute_modules))

    @cached_property
    def columns(self) -> Any:
        """Costs of each block under the selective recomputation of each row.

        Shape (fields, blocks, rows), blocks being the kinds of layers, the embedding and the head. Fields:
        seconds that a backward pass repeats (SECONDS), those of them in collectives that use the network
        cards of the gradient reduction (CONTENDED), bytes of saved activations (SAVED), and bytes of the
        tensors that exist at once while they are recomputed (RECOMPUTED).
        """
        is_own = np.asarray(self.table.recompute_modules) == 0
        kinds = range(len(self.grid.kinds))
        columns = [np.where(is_own, self._own(kind), self._named(kind)) for kind in kinds]
        for end in (self.grid.embedding, self.grid.head):
            saved = self._at(end.saved_bytes)
            columns.append(np.array([0.0 * saved, 0.0 * saved, saved, 0.0 * saved]))
        return np.array(columns).swapaxes(0, 1)

    @property
    def contended_s(self) -> Any:
        """CONTENDED of each block and row; zero where no row names modules."""
        if not self.has_modules:
            return np.zeros((len(self.grid.blocks), len(self.of_grid)))
        return self.columns[CONTENDED]

    def _own(self, kind: int) -> Any:
        """The fields under the own set of our runtime, which repeats no collectives."""
        block = self.grid.kinds[kind]
        saved = self._at(block.selective_bytes)
        return np.array([self._at(block.selective.total_s), 0.0 * saved, saved, 0.0 * saved])

    def _named(self, kind: int) -> Any:
        """The fields under the set of named modules of each row.

        The tensors of one half of a layer (attention, MLP) exist at once: recomputed norms and activations
        are read by operators that are recomputed together with them.
        """
        rows, of_row = self.problem.distinct([getattr(self.table, name) for name in WORK_FIELDS])
        few = self.table.take(rows)
        layer, block = self.problem.model.kinds[kind], self.grid.kinds[kind]
        repeated = IS_REPEATED[self.table.recompute_modules]
        seconds = contended_s = dispatch_s = attention = mlp = np.zeros(len(of_row))
        for module in modules_of_layer(layer.operators):
            share = repeated[:, MODULES.index(module.name)]
            if not np.any(share):
                continue
            own_s, nbytes = _module_work(self.problem, few, layer, module)
            for one_s, contends in self._repeated_collectives(module, layer, block):
                seconds = seconds + share * self._at(one_s)
                contended_s = contended_s + share * self._at(contends * one_s)
            seconds = seconds + share * own_s[of_row]
            dispatch_s = dispatch_s + share * _dispatch_s(self.problem, module)
            dropped = share * nbytes[of_row]
            attention, mlp = attention + module.is_attention * dropped, mlp + module.is_mlp * dropped
        return np.array(
            [
                np.maximum(seconds, dispatch_s),
                contended_s,
                self._at(block.saved_bytes) - (attention + mlp),
                np.maximum(attention, mlp),
            ]
        )

    def _repeated_collectives(
        self, module: ModuleOperators, layer: Layer, block: BlockCost
    ) -> Iterator[tuple[Any, Any]]:
        """Exposed seconds of each kind of collective that the module repeats, and whether it contends with
        the gradient reduction."""
        contention = self.contention or Contention.of(self.problem.tiers, self.grid.groups)
        if module.joins:  # one of the layer's collectives over tensor ranks is that of the module
            yield block.forward.tensor_s / max(layer.tensor_syncs, 1), contention.tensor
        if module.attends:
            yield block.forward.context_s, contention.context
        if module.routes:
            yield block.forward.expert_s, contention.expert

    def _at(self, column: Any) -> Any:
        """A column of grids at each row."""
        return (column + np.zeros(len(self.grid.hop_bytes)))[self.of_grid]


def _module_work(problem: Problem, table: Any, layer: Layer, module: ModuleOperators) -> tuple[Any, Any]:
    """(Seconds of computation that the module repeats, bytes that it drops), for each row of `table`."""
    zero = 0.0 * table.tp
    operators = [layer.operators[i] for i in module.repeated]
    times = [operator_times(problem, table, operator, layer.experts).forward_s for operator in operators]
    nbytes = [
        saved_tensor_bytes(problem, table, layer.operators[i], layer.operators[i].saved[j], layer.experts)
        for i, j in module.dropped
    ]
    if module.drops_scores and problem.attention is None:
        cores = [operator for operator in operators if isinstance(operator, Attention)]
        nbytes += [score_bytes(problem, table, core, layer.experts) for core in cores]
    if problem.profile.eager_modules:
        nbytes += [
            rows_of(problem, table, operator.rows, layer.experts) * eager_row_bytes(problem, table, operator)
            for operator in operators
        ]
    return sum(times, start=zero), sum(nbytes, start=zero)


def _dispatch_s(problem: Problem, module: ModuleOperators) -> float:
    """Host seconds to launch the module's kernels again."""
    profile = problem.profile
    return len(module.repeated) * profile.dispatch_s + (profile.expert_dispatch_s if module.routes else 0.0)
