"""What all levels of the tree share: what decides about rows, and rows beside options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import Grids, Problem, Split, Subproblem, known_split, subproblem_of
from shardwise.search.cells import BLOCK_FIELDS, legal_pairs, map_distinct
from shardwise.search.evaluate import microbatches_of
from shardwise.search.goals import Goal
from shardwise.search.narrow import BoundTightening
from shardwise.search.rows import SearchNodes
from shardwise.search.sift import Pruner
from shardwise.search.space import FULL, Space
from shardwise.search.variants import Variants
from shardwise.strategy import StrategyTable


@dataclass(frozen=True)
class Branching:
    """Some levels of the tree below some grids; `weights` says how many grids each of them stands for."""

    problem: Problem
    space: Space
    goal: Goal
    grids: Grids
    pruner: Pruner
    weights: NDArray[np.int64]

    @cached_property
    def tightening(self) -> BoundTightening:
        """What narrows the rows of these grids."""
        return BoundTightening(self.problem, self.space, self.grids, self.goal, self.pruner)

    def block(self, nodes: SearchNodes, split: Split) -> Subproblem:
        """The blocks of rows, with these splits."""
        return subproblem_of(self.problem, nodes.table, split)

    def variants(self, pp: int) -> Variants:
        """Schedules of a pipeline of so many ranks that has enough layers for them."""
        variants = self.space.variants(pp)
        return variants.take(pp * variants.vpp <= self.space.layers)

    def candidates_with(self, nodes: SearchNodes, pp: int, variants: Variants) -> NDArray[np.int64]:
        """Candidates below each row (down), of all schedules, with each of some (across): none where it is
        illegal."""
        table, m = nodes.table, microbatches_of(self.problem, nodes.table)
        legal = map_distinct(self.space.count_legal, table.pp, m, table.recompute)
        return self.candidates_by_variant(nodes, pp, variants, legal)

    def candidates_by_variant(
        self, nodes: SearchNodes, pp: int, variants: Variants, legal: Any
    ) -> NDArray[np.int64]:
        """The same where `legal` schedules, splits and recomputed layers lie below each row."""
        space, m = self.space, microbatches_of(self.problem, nodes.table)
        stages = (pp * variants.vpp).tolist()
        below = np.array([[space.count_splits(n, kind) for n in stages] for kind in range(FULL + 1)])
        per_split = nodes.candidates // np.maximum(legal, 1)
        return np.where(
            legal_pairs(space, pp, m, variants), below[nodes.table.recompute] * per_split[:, None], 0
        )

    def as_column(self, nodes: SearchNodes, split: Split, **changes: Any) -> Subproblem:
        """The blocks of rows, down, to be combined with options, across."""
        block = self.block(nodes, split)
        down = {name: getattr(block, name)[:, None] for name in BLOCK_FIELDS}
        return replace(block, split=split, **(down | changes))

    def improving_options(
        self, nodes: SearchNodes, time_s: Any, device_bytes: Any, candidates: NDArray[np.int64], level: str
    ) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Row and option of the combinations that may matter; the others are counted. Combinations without
        candidates are none."""
        keep = self.pruner.may_improve(level, time_s, device_bytes)
        self.pruner.prune(level, nodes.of_grid, np.where(keep, 0, candidates).sum(axis=1))
        row, option = np.nonzero(keep & (candidates > 0))
        return row, option

    def fewest_recompute_layers(self, stages: int, recompute: int) -> int:
        """Layers of a stage that are recomputed at least over so many stages, whatever the split."""
        space = self.space
        if space.is_core and recompute == FULL:
            return int(space.split_range(stages).largest)
        return int(space.recompute_layers(recompute, space.layers).min(initial=space.layers))

    def split_of(self, table: StrategyTable) -> Split:
        """The splits of a table whose splits are known."""
        return known_split(
            self.space.layers, table.pp * table.vpp, table.first_stage_layers, table.last_stage_layers
        )
