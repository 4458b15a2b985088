"""The upper levels of the tree: micro-batches, what is kept, families of schedules, what is sharded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from shardwise.cost import grid_least_s, grid_work_s, traffic_table
from shardwise.search.cells import (
    CELLS_AT_A_TIME,
    NO_SPLIT,
    NO_TRAFFIC_ROWS,
    alike_rows,
    asked_once,
    none_of,
    slices,
)
from shardwise.search.evaluate import microbatches_of
from shardwise.search.level import Level
from shardwise.search.rows import Rows
from shardwise.search.space import expanded
from shardwise.search.variants import FAMILIES
from shardwise.strategy import Column

FEW_ROWS = 2048
"""Rows of one depth that are bounded together though their schedules are of several families."""


class UpperLevels(Level):
    """From grids to rows whose sharding of parameters and gradients is known."""

    def legal(self) -> Rows:
        """The grids, each with the candidates whose schedule is legal."""
        space, table = self.space, self.grids.table
        pp, m = table.pp, microbatches_of(self.problem, table)
        legal = asked_once(
            lambda ranks, microbatches: sum(
                space.count_legal(ranks, microbatches, int(kind)) for kind in space.recomputes
            ),
            pp,
            m,
        )
        below = len(space.offloads) * space.count_shards(table.dp * table.cp) * self.weights
        none = np.zeros(len(table))
        return Rows(table, np.arange(len(table)), none, none, legal * below)

    def micro_batches(self, rows: Rows) -> Rows:
        """Grids with their micro-batch sizes, by all of their work."""
        block = self.block(rows, NO_SPLIT)
        return self.sift.sifted(rows, "micro_batch", grid_work_s(self.problem, block, self.grids.totals))

    def kept(self, rows: Rows) -> Rows:
        """What is recomputed and offloaded; states are sharded as far as they can be."""
        space = self.space
        kinds, offloads = np.meshgrid(space.recomputes, space.offloads, indexing="ij")
        options = {"recompute": kinds.ravel(), "offload": offloads.ravel()}
        parent, table = expanded(rows.table, [0 * rows.table.tp], lambda _: options)
        m = microbatches_of(self.problem, table)
        legal = asked_once(space.count_legal, table.pp, m, table.recompute)
        candidates = legal * (space.count_shards(table.dp * table.cp) * self.weights[rows.of_grid[parent]])
        least = asked_once(self._fewest_layers, table.pp, table.recompute)
        common = asked_once(self._common_states, table.dp * table.cp)
        table = table.replaced(recompute_layers=least, optim_shard=common)
        rows = rows.below(parent, table, candidates).take(candidates > 0)
        block = replace(self.block(rows, NO_SPLIT), recompute_most=self.space.layers)
        totals = self.grids.totals_at(rows.of_grid)
        time_s = grid_least_s(self.problem, block, totals, rows.traffic)
        rows = self.sift.sifted(rows, "kept", np.maximum(time_s, rows.bound_s))
        return self.narrowing.kept_with_room(rows)

    def _fewest_layers(self, pp: int, recompute: int) -> int:
        """Layers of a stage that any schedule of a pipeline recomputes at least, where it recomputes in
        full."""
        stages = np.unique(pp * self.space.variants(pp).vpp)
        return min((self.fewest_on(int(n), recompute) for n in stages), default=0)

    def _common_states(self, ranks: int) -> int:
        """A degree that all of the optimizer's states over so many ranks divide."""
        return int(np.lcm.reduce(self.space.shards(ranks)["optim_shard"], initial=1))

    def families(self, rows: Rows) -> Rows:
        """Families of schedules: those that have room, with everything sharded as far as can be and no
        traffic for it."""
        parts = [none_of(rows)]
        for pp in np.unique(rows.table.pp).tolist():
            same = rows.take(np.flatnonzero(rows.table.pp == pp))
            below = [none_of(rows)]
            for variants in self.variants(pp).families.values():
                candidates = self.candidates_with(same, pp, variants).sum(axis=1)
                few, one = same.replaced(candidates=candidates).take(candidates > 0), variants.stand_in(pp)
                below.append(few.replaced(table=few.table.replaced(
                    schedule=np.broadcast_to(one.schedule, (len(few),)),
                    vpp=np.broadcast_to(one.vpp, (len(few),)),
                )))  # fmt: skip
            parts.append(self._families_with_room(Rows.joined(below), "family", pp))
        return Rows.joined(parts)

    def _families_with_room(self, rows: Rows, level: str, pp: int) -> Rows:
        """The rows of one depth and families of schedules that fit and may matter, and whose ranks have room
        for all layers."""
        families, parts = self.variants(pp).families, [none_of(rows)]
        if len(rows) < FEW_ROWS:
            return self.narrowing.families_with_room(rows, level, pp, families)
        for family in families:
            for same in alike_rows(rows, FAMILIES[rows.table.schedule] == family, 1):
                few = rows.take(same)
                parts.append(self.narrowing.families_with_room(few, level, pp, families))
        return Rows.joined(parts)

    def sharded(self, rows: Rows) -> Rows:
        """Degrees of parameters and gradients."""
        parts = [none_of(rows).replaced(traffic=NO_TRAFFIC_ROWS)]
        each, of_each = np.unique(rows.table.dp * rows.table.cp, return_inverse=True)
        for index, ranks in enumerate(each.tolist()):
            options = self.space.sharings(ranks)
            same = np.flatnonzero(of_each == index)
            for part in slices(len(same), max(CELLS_AT_A_TIME // max(len(options["states"]), 1), 1)):
                parts.append(self._sharded_alike(rows.take(same[part]), ranks, options))
        sharded = Rows.joined(parts)
        parts = [none_of(sharded)]
        for pp in np.unique(sharded.table.pp).tolist():
            parts.append(self._families_with_room(sharded.take(sharded.table.pp == pp), "sharded", pp))
        return Rows.joined(parts)

    def _sharded_alike(self, rows: Rows, ranks: int, options: Mapping[str, Column]) -> Rows:
        """The same for rows of one number of ranks: every row (down) with every option (across)."""
        problem, grids = self.problem, self.grids
        used, place = np.unique(rows.of_grid, return_inverse=True)
        param, grad, optim = (options[name] for name in ("param_shard", "grad_shard", "optim_shard"))
        traffic = traffic_table(problem, grids, used, np.unique([param, grad]))
        block = self.spread(rows, NO_SPLIT, recompute_most=self.space.layers)
        block = replace(block, optim_shard=optim[None])
        totals = grids.totals_at(rows.of_grid[:, None])
        cells = traffic.at(param[None], grad[None], place[:, None])
        time_s = np.maximum(grid_least_s(problem, block, totals, cells), rows.bound_s[:, None])
        per_state = rows.candidates // int(self.space.count_shards(np.array([ranks]))[0])
        candidates = per_state[:, None] * options["states"][None]
        row, option = self.open_options(rows, time_s, rows.device_bytes[:, None], candidates, "sharded")
        table = rows.table.take(row).replaced(
            param_shard=param[option], grad_shard=grad[option], optim_shard=optim[option]
        )
        below = rows.below(row, table, candidates[row, option])
        moved = traffic.at(param[option], grad[option], place[row])
        return below.replaced(bound_s=time_s[row, option], traffic=moved)
