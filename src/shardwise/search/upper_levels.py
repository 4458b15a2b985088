"""The upper levels of the tree: micro-batches, what is kept, families of schedules, what is sharded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from shardwise.cost import grid_lower_bound_s, grid_work_lower_bound_s, traffic_table
from shardwise.search.cells import (
    NO_SPLIT,
    NO_TRAFFIC_ROWS,
    PAIRS_PER_BATCH,
    alike_nodes,
    empty_like,
    map_distinct,
    slices,
)
from shardwise.search.evaluate import microbatches_of
from shardwise.search.level import Branching
from shardwise.search.rows import SearchNodes
from shardwise.search.space import expanded
from shardwise.search.variants import FAMILIES
from shardwise.strategy import Column

FEW_NODES = 2048
"""Rows of one depth that are bounded together though their schedules are of several families."""


class CoarseBranching(Branching):
    """From grids to rows whose sharding of parameters and gradients is known."""

    def root_nodes(self) -> SearchNodes:
        """The grids, each with the candidates whose schedule is legal."""
        space, table = self.space, self.grids.table
        pp, m = table.pp, microbatches_of(self.problem, table)
        legal = map_distinct(
            lambda ranks, microbatches: sum(
                space.count_legal(ranks, microbatches, int(kind)) for kind in space.recomputes
            ),
            pp,
            m,
        )
        below = len(space.offloads) * space.count_shards(table.dp * table.cp) * self.weights
        none = np.zeros(len(table))
        return SearchNodes(table, np.arange(len(table)), none, none, legal * below)

    def bound_micro_batches(self, nodes: SearchNodes) -> SearchNodes:
        """Grids with their micro-batch sizes, by all of their work."""
        block = self.block(nodes, NO_SPLIT)
        return self.pruner.pruned(
            nodes, "micro_batch", grid_work_lower_bound_s(self.problem, block, self.grids.totals)
        )

    def branch_recompute(self, nodes: SearchNodes) -> SearchNodes:
        """What is recomputed and offloaded; states are sharded as far as they can be."""
        space = self.space
        kinds, offloads = np.meshgrid(space.recomputes, space.offloads, indexing="ij")
        options = {"recompute": kinds.ravel(), "offload": offloads.ravel()}
        parent, table = expanded(nodes.table, [0 * nodes.table.tp], lambda _: options)
        m = microbatches_of(self.problem, table)
        legal = map_distinct(space.count_legal, table.pp, m, table.recompute)
        candidates = legal * (space.count_shards(table.dp * table.cp) * self.weights[nodes.of_grid[parent]])
        least = map_distinct(self._fewest_layers, table.pp, table.recompute)
        common = map_distinct(self._common_states, table.dp * table.cp)
        table = table.replaced(recompute_layers=least, optim_shard=common)
        nodes = nodes.children(parent, table, candidates).take(candidates > 0)
        block = replace(self.block(nodes, NO_SPLIT), recompute_most=self.space.layers)
        totals = self.grids.totals_at(nodes.of_grid)
        time_s = grid_lower_bound_s(self.problem, block, totals, nodes.traffic)
        nodes = self.pruner.pruned(nodes, "kept", np.maximum(time_s, nodes.lower_bound_s))
        return self.tightening.recomputes_within_capacity(nodes)

    def _fewest_layers(self, pp: int, recompute: int) -> int:
        """Layers of a stage that any schedule of a pipeline recomputes at least, where it recomputes in
        full."""
        stages = np.unique(pp * self.space.variants(pp).vpp)
        return min((self.fewest_recompute_layers(int(n), recompute) for n in stages), default=0)

    def _common_states(self, ranks: int) -> int:
        """A degree that all of the optimizer's states over so many ranks divide."""
        return int(np.lcm.reduce(self.space.shards(ranks)["optim_shard"], initial=1))

    def branch_family(self, nodes: SearchNodes) -> SearchNodes:
        """Families of schedules: those that have room, with everything sharded as far as can be and no
        traffic for it."""
        parts = [empty_like(nodes)]
        for pp in np.unique(nodes.table.pp).tolist():
            same = nodes.take(np.flatnonzero(nodes.table.pp == pp))
            below = [empty_like(nodes)]
            for variants in self.variants(pp).families.values():
                candidates = self.candidates_with(same, pp, variants).sum(axis=1)
                few, one = (
                    same.replaced(candidates=candidates).take(candidates > 0),
                    variants.representative(pp),
                )
                below.append(few.replaced(table=few.table.replaced(
                    schedule=np.broadcast_to(one.schedule, (len(few),)),
                    vpp=np.broadcast_to(one.vpp, (len(few),)),
                )))  # fmt: skip
            parts.append(self._families_within_capacity(SearchNodes.joined(below), "family", pp))
        return SearchNodes.joined(parts)

    def _families_within_capacity(self, nodes: SearchNodes, level: str, pp: int) -> SearchNodes:
        """The rows of one depth and families of schedules that fit and may matter, and whose ranks have room
        for all layers."""
        families, parts = self.variants(pp).families, [empty_like(nodes)]
        if len(nodes) < FEW_NODES:
            return self.tightening.families_within_capacity(nodes, level, pp, families)
        for family in families:
            for same in alike_nodes(nodes, FAMILIES[nodes.table.schedule] == family, 1):
                few = nodes.take(same)
                parts.append(self.tightening.families_within_capacity(few, level, pp, families))
        return SearchNodes.joined(parts)

    def branch_sharding(self, nodes: SearchNodes) -> SearchNodes:
        """Degrees of parameters and gradients."""
        parts = [empty_like(nodes).replaced(traffic=NO_TRAFFIC_ROWS)]
        each, of_each = np.unique(nodes.table.dp * nodes.table.cp, return_inverse=True)
        for index, ranks in enumerate(each.tolist()):
            options = self.space.param_grad_shards(ranks)
            same = np.flatnonzero(of_each == index)
            for part in slices(len(same), max(PAIRS_PER_BATCH // max(len(options["states"]), 1), 1)):
                parts.append(self._sharded_alike(nodes.take(same[part]), ranks, options))
        sharded = SearchNodes.joined(parts)
        parts = [empty_like(sharded)]
        for pp in np.unique(sharded.table.pp).tolist():
            parts.append(self._families_within_capacity(sharded.take(sharded.table.pp == pp), "sharded", pp))
        return SearchNodes.joined(parts)

    def _sharded_alike(self, nodes: SearchNodes, ranks: int, options: Mapping[str, Column]) -> SearchNodes:
        """The same for rows of one number of ranks: every row (down) with every option (across)."""
        problem, grids = self.problem, self.grids
        used, place = np.unique(nodes.of_grid, return_inverse=True)
        param, grad, optim = (options[name] for name in ("param_shard", "grad_shard", "optim_shard"))
        traffic = traffic_table(problem, grids, used, np.unique([param, grad]))
        block = self.as_column(nodes, NO_SPLIT, recompute_most=self.space.layers)
        block = replace(block, optim_shard=optim[None])
        totals = grids.totals_at(nodes.of_grid[:, None])
        pair_traffic = traffic.at(param[None], grad[None], place[:, None])
        time_s = np.maximum(
            grid_lower_bound_s(problem, block, totals, pair_traffic), nodes.lower_bound_s[:, None]
        )
        per_state = nodes.candidates // int(self.space.count_shards(np.array([ranks]))[0])
        candidates = per_state[:, None] * options["states"][None]
        row, option = self.improving_options(
            nodes, time_s, nodes.device_bytes[:, None], candidates, "sharded"
        )
        table = nodes.table.take(row).replaced(
            param_shard=param[option], grad_shard=grad[option], optim_shard=optim[option]
        )
        below = nodes.children(row, table, candidates[row, option])
        child_traffic = traffic.at(param[option], grad[option], place[row])
        return below.replaced(lower_bound_s=time_s[row, option], traffic=child_traffic)
