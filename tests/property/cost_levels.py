"""The subproblems that contain some strategies, level by level of the search tree.

Each strategy gets its own ancestors: the subproblem of its grid, of its recomputation, of its sharding, of
its family of schedules, of its schedule, of its split and of its recomputed layers. A bound of a subproblem
holds for every strategy in it, so no bound of an ancestor may exceed the strategy's own cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from shardwise.cost import (
    NO_TRAFFIC,
    Grids,
    Index,
    Problem,
    Split,
    Subproblem,
    Totals,
    Traffic,
    distinct_rows,
    grids_of,
    known_split,
    subproblem_of,
)
from shardwise.cost.bounds.subproblem import traffic_of
from shardwise.cost.layers import GRID_FIELDS
from shardwise.schedule import full_moment
from shardwise.search.space import Space, Variants
from shardwise.strategy import StrategyTable

FULL = 2
"""Index of full recomputation."""

ANY_SPLIT = Split(0, 0, 0, 1)
"""A split of which nothing is known."""

BoundInputs = tuple[Subproblem, Totals, Traffic]
Level = Callable[[Index], BoundInputs]


@dataclass(frozen=True)
class Levels:
    """Strategies of one space and the subproblems that contain them. Each level takes rows and returns their
    subproblems with the totals and the traffic of their grids.
    """

    problem: Problem
    space: Space
    table: StrategyTable

    def __len__(self) -> int:
        return len(self.table)

    @property
    def all_rows(self) -> Index:
        return np.arange(len(self))

    @property
    def microbatches(self) -> Any:
        return self.problem.job.global_batch_size // (self.table.dp * self.table.micro_batch_size)

    def groups(self, *names: str) -> Iterator[Index]:
        """Rows grouped by equal values of some fields; one group of all rows without fields."""
        _, group = distinct_rows([getattr(self.table, name) for name in names] or [0 * self.table.tp])
        for index in range(int(group.max(initial=-1)) + 1):
            yield np.flatnonzero(group == index)

    def by_group(self, bound: Callable[[Index], Any], *names: str) -> Any:
        """A bound of every row, computed together for rows that are equal in some fields."""
        found = np.empty(len(self))
        for rows in self.groups(*names):
            found[rows] = bound(rows)
        return found

    # Costs.

    @cached_property
    def grids(self) -> tuple[Grids, Index]:
        """Distinct grids, and the grid of every row."""
        rows, of_grid = distinct_rows([getattr(self.table, name) for name in GRID_FIELDS])
        return grids_of(self.problem, self.table.take(rows)), of_grid

    def totals(self, rows: Index) -> Totals:
        grids, of_grid = self.grids
        return grids.totals_at(of_grid[rows])

    def traffic(self, rows: Index) -> Traffic:
        grids, of_grid = self.grids
        table = self.table.take(rows)
        return traffic_of(self.problem, grids, of_grid[rows], table.param_shard, table.grad_shard)

    # Open fields.

    def any_states(self, rows: Index) -> Any:
        """A degree that every sharding degree of the optimizer states divides."""
        table = self.table.take(rows)
        return each(self._all_states, table.dp * table.cp)

    def _all_states(self, ranks: int) -> int:
        return int(np.lcm.reduce(self.space.shards(ranks)["optim_shard"]))

    def states(self, rows: Index) -> Any:
        """The same with the row's sharding degrees of parameters and gradients."""
        table = self.table.take(rows)
        return each(self._states, table.dp * table.cp, table.param_shard, table.grad_shard)

    def _states(self, ranks: int, param_shard: int, grad_shard: int) -> int:
        return int(np.lcm.reduce(self.space.states(ranks, param_shard, grad_shard)["optim_shard"]))

    def fewest(self, rows: Index) -> Any:
        """Fewest recomputed layers of each stage under any split."""
        table = self.table.take(rows)
        return each(self._fewest, table.pp * table.vpp, table.recompute)

    def _fewest(self, stages: int, recompute: int) -> int:
        if recompute != FULL:
            return 0
        return self.space.split_range(stages).largest if self.space.is_core else 1

    def fewest_of_any(self, rows: Index) -> Any:
        """Fewest recomputed layers of each stage under any schedule."""

        def least(pp: int, recompute: int) -> int:
            vpp = self._variants(pp).vpp.tolist()
            return min(self._fewest(pp * chunks, recompute) for chunks in vpp)

        return each(least, self.table.pp[rows], self.table.recompute[rows])

    def _variants(self, pp: int) -> Variants:
        variants = self.space.variants(pp)
        return variants.take(pp * variants.vpp <= self.space.layers)

    def any_split(self, rows: Index) -> Split:
        """Every split of each row's schedule."""
        stages = self.table.pp[rows] * self.table.vpp[rows]
        ranges = [self.space.split_range(int(n)) for n in stages]
        names = ("first", "last", "between", "largest")
        return Split(*(np.array([getattr(split, name) for split in ranges]) for name in names))

    def own_split(self, rows: Index) -> Split:
        table = self.table.take(rows)
        ends = (table.first_stage_layers, table.last_stage_layers)
        return known_split(self.space.layers, table.pp * table.vpp, *ends)

    def _bound_inputs(self, rows: Index, split: Split, layers: Any, most: Any) -> BoundInputs:
        """The subproblems of rows whose sharding degrees are fixed."""
        table = self.table.take(rows).replaced(
            optim_shard=self.states(rows), recompute_layers=np.broadcast_to(layers, (len(rows),))
        )
        return subproblem_of(self.problem, table, split, most), self.totals(rows), self.traffic(rows)

    # Levels.

    def recompute_chosen(self, rows: Index) -> BoundInputs:
        """The recomputation of the grid is fixed."""
        block, totals, _ = self.sharded(rows)
        block = replace(block, param_shard=1, grad_shard=1, optim_shard=self.any_states(rows))
        return block, totals, NO_TRAFFIC

    def sharded(self, rows: Index) -> BoundInputs:
        """Recomputation and sharding degrees are fixed."""
        return self._bound_inputs(rows, ANY_SPLIT, self.fewest_of_any(rows), self.space.layers)

    def family_of(self, rows: Index) -> Variants:
        """The schedules whose bounds have the same terms as those of rows with one depth and schedule."""
        mine = int(self.table.schedule[rows[0]])
        families = self._variants(int(self.table.pp[rows[0]])).families.values()
        return next(family for family in families if mine in family.schedule)

    def family(self, rows: Index) -> BoundInputs:
        """In addition, the schedule is one of a family; for rows with one depth and schedule."""
        variants, pp = self.family_of(rows), int(self.table.pp[rows[0]])
        split, one = self.space.range_of_all(pp * variants.vpp), variants.representative(pp)
        block, totals, traffic = self._bound_inputs(rows, split, self.fewest_of_any(rows), self.space.layers)
        return replace(block, schedule=one.schedule, vpp=one.vpp), totals, traffic

    def scheduled(self, rows: Index) -> BoundInputs:
        """In addition, the schedule is fixed."""
        split = self.any_split(rows)
        return self._bound_inputs(rows, split, self.fewest(rows), split.largest)

    def divided(self, rows: Index) -> BoundInputs:
        """In addition, the split is fixed."""
        split = self.own_split(rows)
        return self._bound_inputs(rows, split, np.minimum(self.fewest(rows), split.largest), split.largest)

    def recomputed(self, rows: Index) -> BoundInputs:
        """In addition, the number of recomputed layers is fixed."""
        return self._bound_inputs(rows, self.own_split(rows), self.table.recompute_layers[rows], None)

    def scheduled_tight(self, rows: Index) -> BoundInputs:
        """Any split of the schedule, where memory demands as many recomputed layers as the row has."""
        split = self.any_split(rows)
        return self._bound_inputs(rows, split, self.table.recompute_layers[rows], split.largest)

    def divided_tight(self, rows: Index) -> BoundInputs:
        """The same for the row's own split."""
        split = self.own_split(rows)
        return self._bound_inputs(rows, split, self.table.recompute_layers[rows], split.largest)

    # Micro-batches in flight on each rank, averaged over its layers, of rows with one depth: shape (pp,
    # rows).

    def in_flight_per_rank(self, rows: Index) -> Any:
        """In-flight micro-batches under the row's schedule."""
        table = self.table.take(rows)
        rank = np.arange(int(table.pp[0]))[:, None]
        return full_moment(table.schedule, table.pp, self.microbatches[rows], table.vpp, rank).each

    def in_flight_of_family(self, rows: Index) -> Any:
        pp = int(self.table.pp[rows[0]])
        return self.family_of(rows).fewest_in_flight(pp, self.microbatches[rows])

    def in_flight_of_any(self, rows: Index) -> Any:
        pp = int(self.table.pp[rows[0]])
        return np.minimum(self.microbatches[rows], np.arange(pp, 0, -1)[:, None])


def most_recomputed(block: Subproblem) -> Subproblem:
    """The subproblem with the most recomputed layers."""
    return replace(block, recompute_layers=np.where(block.recompute == FULL, block.split.largest, 0))


def each(of: Callable[..., int], *columns: Any) -> Any:
    """A number for every row, computed once per distinct row."""
    rows, of_row = distinct_rows([np.asarray(column) for column in columns])
    numbers = [of(*(int(column[row]) for column in columns)) for row in rows]
    return np.array(numbers, dtype=np.int64)[of_row]
