"""Pruning and bound tightening of nodes.

`Pruner` rejects nodes that exceed memory and prunes nodes that cannot improve on the incumbents; it counts
the outcome of their candidates. `BoundTightening` raises the bounds of nodes by the fewest recomputed layers
that fit, and tests the capacity relaxation: whether all layers fit on all ranks together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import (
    CriticalPaths,
    Grids,
    LayerCapacity,
    Problem,
    Split,
    Subproblem,
    capacity_of,
    end_s,
    host_lower_bound_bytes,
    layer_counts_of,
    lower_bound_bytes,
    lower_bound_s,
    memory_capacity,
    most_sharded,
    schedules_lower_bound_bytes,
    subproblem_of,
)
from shardwise.schedule import full_moment
from shardwise.search.bnb.incumbent import Goal
from shardwise.search.bnb.ledger import OutcomeCounts
from shardwise.search.bnb.nodes import NO_SPLIT, SPLIT_FIELDS, SearchNodes, empty_like, take_splits
from shardwise.search.space import FAMILIES, FULL, Space, Variants
from shardwise.search.step_times import microbatches_of
from shardwise.strategy import HOST_MEMORY, MEMORY, StrategyTable
from shardwise.ties import ROUNDING

BYTES_FACTOR = 1.0 - ROUNDING
"""Factor on bytes before a node is rejected or pruned."""


class Pruner:
    """Rejects and prunes nodes; `outcomes` counts their candidates.

    With `is_exhaustive` nothing is pruned. `without` names techniques that are switched off: levels whose
    bounds are ignored (see `ledger.LEVELS`), "capacity" (the capacity relaxation), and "memory" (rejection of
    nodes by memory; strategies that do not fit are never evaluated).
    """

    def __init__(
        self,
        problem: Problem,
        goal: Goal,
        outcomes: OutcomeCounts,
        *,
        is_exhaustive: bool,
        without: frozenset[str] = frozenset(),
    ) -> None:
        self._problem, self._goal, self.outcomes = problem, goal, outcomes
        self.is_exhaustive, self._without = is_exhaustive, without

    def add(self, outcome: str, of_grid: Any, candidates: Any) -> None:
        """Counts candidates with an outcome below grids."""
        self.outcomes.add(outcome, of_grid, candidates)

    def prune(self, level: str, of_grid: Any, candidates: Any) -> None:
        """Counts candidates as pruned at a level."""
        self.outcomes.add(f"cut_{level}", of_grid, candidates)

    def may_improve(self, level: str, time_s: Any, device_bytes: Any) -> Any:
        """Which rows may improve on the incumbents, given lower bounds of time and bytes."""
        self.outcomes.bounded_nodes += int(np.size(time_s))
        if self.is_exhaustive or level in self._without:
            return np.ones(np.shape(time_s), dtype=bool)
        return self._goal.may_improve(time_s, BYTES_FACTOR * device_bytes)

    def may_improve_kind(self, table: StrategyTable, time_s: Any, device_bytes: Any) -> Any:
        """Which rows may improve on the incumbents, given their kind."""
        if self.is_exhaustive:
            return np.ones(len(table), dtype=bool)
        return self._goal.may_improve_kind(table, time_s, device_bytes)

    def fits(self, device_bytes: Any) -> Any:
        """Which rows may fit on the device."""
        return (BYTES_FACTOR * device_bytes <= self._problem.usable_bytes) | ("memory" in self._without)

    def fits_host(self, host_bytes: Any) -> Any:
        """Which rows may fit on the host. In an exhaustive search this is left to single strategies."""
        return (BYTES_FACTOR * host_bytes <= self._problem.host_bytes_per_device) | (
            self.is_exhaustive or "memory" in self._without
        )

    def has_capacity(self, capacity: LayerCapacity) -> Any:
        """Which rows pass the capacity relaxation."""
        return capacity.is_enough | (self.is_exhaustive or "capacity" in self._without)

    def pruned(
        self, nodes: SearchNodes, level: str, time_s: Any, device_bytes: Any | None = None
    ) -> SearchNodes:
        """Gives nodes their new bounds; returns those that fit and may improve, and counts the others."""
        nodes = nodes.replaced(lower_bound_s=time_s)
        if device_bytes is None:
            return self.pruned_to(nodes, level, self.may_improve(level, time_s, nodes.device_bytes))
        return self._pruned_by_memory(nodes, level, device_bytes, self.fits(device_bytes), True)

    def pruned_by_capacity(
        self, nodes: SearchNodes, level: str, device_bytes: Any, capacity: LayerCapacity
    ) -> SearchNodes:
        """The nodes that fit, may improve, and whose ranks have capacity for all layers."""
        fit = self.fits(np.where(capacity.fits, device_bytes, np.inf))
        return self._pruned_by_memory(nodes, level, device_bytes, fit, self.has_capacity(capacity))

    def _pruned_by_memory(
        self, nodes: SearchNodes, level: str, device_bytes: Any, fit: Any, matters: Any
    ) -> SearchNodes:
        """The nodes that fit, match `matters` and may improve, with their new bytes."""
        nodes = nodes.replaced(device_bytes=np.maximum(nodes.device_bytes, device_bytes))
        keep = matters & self.may_improve(level, nodes.lower_bound_s, nodes.device_bytes)
        if not np.all(fit):
            lost = nodes.take(~fit)
            self.add(MEMORY, lost.of_grid, lost.candidates)
            nodes, keep = nodes.take(fit), keep[fit]
        return self.pruned_to(nodes, level, keep)

    def pruned_to(self, nodes: SearchNodes, level: str, keep: Any) -> SearchNodes:
        """The nodes under `keep`; the others count as pruned."""
        if np.all(keep):
            return nodes
        self.prune(level, nodes.of_grid[~keep], nodes.candidates[~keep])
        return nodes.take(keep)


class BoundTightening:
    """Raises the bounds of nodes below some grids of a space."""

    def __init__(self, problem: Problem, space: Space, grids: Grids, goal: Goal, pruner: Pruner) -> None:
        self._problem, self._space, self._grids, self._goal, self._pruner = (
            problem,
            space,
            grids,
            goal,
            pruner,
        )
        self._layers = problem.model.layers

    def _block(self, nodes: SearchNodes, split: Split) -> Subproblem:
        return subproblem_of(self._problem, nodes.table, split)

    def recomputes_within_capacity(self, nodes: SearchNodes) -> SearchNodes:
        """The nodes whose ranks have capacity for all layers under some schedule, with everything sharded as
        far as possible and no traffic for it. No schedule has fewer micro-batches in flight than 1F1B."""
        parts = [empty_like(nodes)]
        for pp in np.unique(nodes.table.pp).tolist():
            few = nodes.take(np.flatnonzero(nodes.table.pp == pp))
            problem, totals = self._problem, self._grids.totals_at(few.of_grid, few.table.recompute_modules)
            block = self._block(few, replace(NO_SPLIT, largest=self._layers))
            block, ranks = replace(block, recompute_most=self._layers), few.table.dp * few.table.cp
            most = most_sharded(replace(block, recompute_layers=self._layers), ranks)
            in_flight_count = np.minimum(block.microbatches, np.arange(pp, 0, -1)[:, None])
            device_bytes = schedules_lower_bound_bytes(problem, most, totals, in_flight_count)
            cutoff_s = self._goal.cutoff_s(device_bytes)
            capacity = capacity_of(problem, block, most, totals, few.traffic, cutoff_s, in_flight_count)
            parts.append(self._pruner.pruned_by_capacity(few, "kept", device_bytes, capacity))
        return SearchNodes.joined(parts)

    def families_within_capacity(
        self, nodes: SearchNodes, level: str, pp: int, families: Mapping[int, Variants]
    ) -> SearchNodes:
        """The nodes of one `pp`, each with a family of schedules, whose ranks have capacity for all layers.

        At level "family", memory counts everything as sharded as far as possible.
        """
        problem, totals = self._problem, self._grids.totals_at(nodes.of_grid, nodes.table.recompute_modules)
        family, m = FAMILIES[nodes.table.schedule], microbatches_of(problem, nodes.table)
        first, of_row = np.unique(family, return_inverse=True)
        each = [families[index] for index in first.tolist()]
        splits = [self._space.range_of_all(pp * variants.vpp) for variants in each]
        columns = ([getattr(split, name) for split in splits] for name in SPLIT_FIELDS)
        split = Split(*(np.array(column, dtype=np.int64)[of_row] for column in columns))
        in_flight_count = np.empty((pp, len(nodes)))
        for index, variants in enumerate(each):
            same = of_row == index
            in_flight_count[:, same] = variants.fewest_in_flight(pp, m[same])
        block = replace(self._block(nodes, split), recompute_most=self._layers)
        most = replace(block, recompute_layers=self._layers)
        if level == "family":
            most = most_sharded(most, nodes.table.dp * nodes.table.cp)
        device_bytes = schedules_lower_bound_bytes(problem, most, totals, in_flight_count)
        paths = CriticalPaths(problem, block, layer_counts_of(block), totals, nodes.traffic)
        pipeline_makespan_s, has_ranks = (
            paths.whole_s,
            np.array([len(set(v.vpp.tolist())) == 1 for v in each], dtype=bool),
        )
        if has_ranks.any():
            pipeline_makespan_s = np.where(
                has_ranks[of_row], np.maximum(pipeline_makespan_s, paths.ranks_s), pipeline_makespan_s
            )
        nodes = nodes.replaced(
            lower_bound_s=np.maximum(pipeline_makespan_s + end_s(problem, block, totals), nodes.lower_bound_s)
        )
        cutoff_s = self._goal.cutoff_s(device_bytes)
        capacity = capacity_of(problem, block, most, totals, nodes.traffic, cutoff_s, in_flight_count, paths)
        return self._pruner.pruned_by_capacity(nodes, level, device_bytes, capacity)

    def _in_flight_per_rank(self, nodes: SearchNodes, pp: int) -> Any:
        """Micro-batches in flight on every stage of each rank at one moment; shape (pp, nodes)."""
        table, rank = nodes.table, np.arange(pp)[:, None]
        m = microbatches_of(self._problem, table)
        return full_moment(table.schedule, table.pp, m, table.vpp, rank).each

    def schedules_within_capacity(self, nodes: SearchNodes, split: Split, pp: int) -> SearchNodes:
        """The nodes of one `pp`, each with a schedule, whose ranks have capacity for all layers."""
        problem, totals = self._problem, self._grids.totals_at(nodes.of_grid, nodes.table.recompute_modules)
        block = replace(self._block(nodes, split), recompute_most=split.largest)
        most = replace(block, recompute_layers=np.where(block.recompute == FULL, split.largest, 0))
        layer_counts = layer_counts_of(block)
        paths = CriticalPaths(problem, block, layer_counts, totals, nodes.traffic)
        device_bytes = lower_bound_bytes(problem, most, layer_counts, totals)
        cutoff_s, in_flight_count = self._goal.cutoff_s(device_bytes), self._in_flight_per_rank(nodes, pp)
        capacity = capacity_of(problem, block, most, totals, nodes.traffic, cutoff_s, in_flight_count, paths)
        return self._pruner.pruned_by_capacity(nodes, "schedule", device_bytes, capacity)

    def tightened(
        self, nodes: SearchNodes, split: Split, level: str, pp: int | None = None
    ) -> tuple[SearchNodes, Split]:
        """The nodes that may fit, with their splits. With full recomputation, the fewest recomputed layers
        are raised to the fewest that fit, and the bound with them.

        With `pp` (nodes of one depth with open splits), all ranks together must have memory for all layers.
        """
        block = self._block(nodes, split)
        most = replace(block, recompute_layers=np.where(block.recompute == FULL, split.largest, 0))
        totals, layer_counts = (
            self._grids.totals_at(nodes.of_grid, nodes.table.recompute_modules),
            layer_counts_of(most),
        )
        device_bytes = np.maximum(
            lower_bound_bytes(self._problem, most, layer_counts, totals), nodes.device_bytes
        )
        keep = self._pruner.fits(device_bytes) & self._pruner.may_improve(
            level, nodes.lower_bound_s, device_bytes
        )
        exceeds_host = keep & ~self._pruner.fits_host(
            host_lower_bound_bytes(self._problem, most, layer_counts, totals)
        )
        if np.any(exceeds_host):
            lost = nodes.take(exceeds_host)
            self._pruner.add(HOST_MEMORY, lost.of_grid, lost.candidates)
            nodes, split = nodes.take(~exceeds_host), take_splits(split, ~exceeds_host)
            device_bytes, keep = device_bytes[~exceeds_host], keep[~exceeds_host]
        nodes = self._pruner.pruned(nodes, level, nodes.lower_bound_s, device_bytes)
        split = take_splits(split, keep)
        full = np.flatnonzero(nodes.table.recompute == FULL)
        if not len(full):
            return nodes, split
        few, few_split = nodes.take(full), take_splits(split, full)
        least = self._fewest_that_fit(few, few_split, pp)
        few = few.replaced(table=few.table.replaced(recompute_layers=least))
        block = replace(self._block(few, few_split), recompute_most=few_split.largest)
        totals = self._grids.totals_at(few.of_grid, few.table.recompute_modules)
        full_s = lower_bound_s(self._problem, block, layer_counts_of(block), totals, few.traffic)
        layers, time_s = nodes.table.recompute_layers.copy(), nodes.lower_bound_s.copy()
        layers[full], time_s[full] = least, np.maximum(full_s, few.lower_bound_s)
        nodes = nodes.replaced(table=nodes.table.replaced(recompute_layers=layers))
        keep = self._pruner.may_improve(level, time_s, nodes.device_bytes)
        return self._pruner.pruned_to(nodes.replaced(lower_bound_s=time_s), level, keep), take_splits(
            split, keep
        )

    def _fewest_that_fit(self, nodes: SearchNodes, split: Split, pp: int | None) -> NDArray[np.int64]:
        """The fewest recomputed layers with which each node may fit, by bisection; all nodes fit with the
        most."""
        problem, totals = self._problem, self._grids.totals_at(nodes.of_grid, nodes.table.recompute_modules)
        block = self._block(nodes, split)
        layer_counts, in_flight_count = (
            layer_counts_of(block),
            None if pp is None else self._in_flight_per_rank(nodes, pp),
        )
        low, high = nodes.table.recompute_layers.copy(), np.array(split.largest, dtype=np.int64)
        low = np.minimum(low, high)
        while (low < high).any():
            middle = (low + high) // 2
            tried = replace(block, recompute_layers=middle)
            fit = self._pruner.fits(lower_bound_bytes(problem, tried, layer_counts, totals))
            if in_flight_count is not None:
                fit &= memory_capacity(problem, tried, totals, in_flight_count, layer_counts.is_v)
            high = np.where(fit, middle, high)
            low = np.where(fit, low, np.minimum(middle + 1, high))
        return high
