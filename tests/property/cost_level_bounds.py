"""Lower bounds of the cost model for the subproblems that contain some strategies, by name of the level and
of the rows that are evaluated together.

Bounds take short cuts where no row of a table needs a term, so the result could depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from tests.property.cost_levels import ANY_SPLIT, Level, Levels, each, most_recomputed

from shardwise.cost import (
    NO_TRAFFIC,
    CriticalPaths,
    Index,
    LayerCapacity,
    Problem,
    Subproblem,
    Totals,
    Traffic,
    any_micro_batch_compute_bound_s,
    any_micro_batch_lower_bound_s,
    capacity_of,
    end_s,
    grid_lower_bound_s,
    grid_work_lower_bound_s,
    host_lower_bound_bytes,
    layer_counts_of,
    lower_bound_bytes,
    lower_bound_s,
    memory_capacity,
    most_sharded,
    schedules_lower_bound_bytes,
    subproblem_of,
)

Bounds = Mapping[str, Any]

GROUPINGS = ((), ("pp",), ("pp", "schedule"), ("recompute", "offload"))
"""Fields in which rows that are bounded together are equal."""


def least_times_s(levels: Levels) -> Bounds:
    """Lower bound of the seconds of each row's subproblems."""
    rows, problem = levels.all_rows, levels.problem
    plain = subproblem_of(problem, levels.table, ANY_SPLIT)
    found = {
        "any micro batch": _any_micro_batch_s(levels, any_micro_batch_lower_bound_s),
        "computation alone": _any_micro_batch_s(levels, any_micro_batch_compute_bound_s),
        "grid": grid_work_lower_bound_s(problem, plain, levels.totals(rows)),
        "recompute_chosen": grid_lower_bound_s(problem, *levels.recompute_chosen(rows)),
        "sharded": grid_lower_bound_s(problem, *levels.sharded(rows)),
        "family": levels.by_group(lambda some: _family_s(levels, some), "pp", "schedule"),
        "open family": levels.by_group(lambda some: _open_family_s(levels, some), "pp", "schedule"),
    }
    several: dict[str, Level] = {
        "schedule": levels.scheduled,
        "split": levels.divided,
        "layers": levels.recomputed,
        "tight schedule": levels.scheduled_tight,
        "tight split": levels.divided_tight,
    }
    for name, level in several.items():
        for grouping in GROUPINGS:
            least = _least_of(levels, level)
            found[f"{name} by {', '.join(grouping) or 'nothing'}"] = levels.by_group(least, *grouping)
    return found


def _any_micro_batch_s(levels: Levels, least: Callable[[Problem, Any], Any]) -> Any:
    space = levels.space
    most = each(lambda dp: int(space.micro_batch_sizes(dp)["micro_batch_size"].max()), levels.table.dp)
    return least(levels.problem, levels.table.replaced(micro_batch_size=most))


def _family_s(levels: Levels, rows: Index) -> Any:
    return _paths_s(levels, rows, *levels.family(rows))


def _open_family_s(levels: Levels, rows: Index) -> Any:
    """The same, before sharding degrees are chosen."""
    block, totals, _ = levels.family(rows)
    return _paths_s(levels, rows, replace(block, optim_shard=levels.any_states(rows)), totals, NO_TRAFFIC)


def _paths_s(levels: Levels, rows: Index, block: Subproblem, totals: Totals, traffic: Traffic) -> Any:
    """Critical paths, by all work and by the work of single ranks, where all schedules of a family have the
    same number of stages.
    """
    paths = CriticalPaths(levels.problem, block, layer_counts_of(block), totals, traffic)
    pipeline_makespan_s = paths.whole_s
    if len(set(levels.family_of(rows).vpp.tolist())) == 1:
        pipeline_makespan_s = np.maximum(pipeline_makespan_s, paths.ranks_s)
    return pipeline_makespan_s + end_s(levels.problem, block, totals)


def _least_of(levels: Levels, level: Level) -> Callable[[Index], Any]:
    def least(rows: Index) -> Any:
        block, totals, traffic = level(rows)
        return lower_bound_s(levels.problem, block, layer_counts_of(block), totals, traffic)

    return least


def least_device_bytes(levels: Levels) -> Bounds:
    """Lower bound of each row's device bytes, on some rank."""

    def of_sharded(rows: Index) -> Any:
        block, totals, _ = levels.sharded(rows)
        return schedules_lower_bound_bytes(levels.problem, block, totals, levels.in_flight_of_any(rows))

    def of_family(rows: Index) -> Any:
        block, totals, _ = levels.family(rows)
        most = replace(block, recompute_layers=levels.space.layers)
        return schedules_lower_bound_bytes(levels.problem, most, totals, levels.in_flight_of_family(rows))

    return {
        "sharded": levels.by_group(of_sharded, "pp"),
        "family": levels.by_group(of_family, "pp", "schedule"),
        **_bytes_of_levels(levels, lower_bound_bytes),
    }


def least_hosts_bytes(levels: Levels) -> Bounds:
    """Lower bound of each row's host bytes, on some host."""
    return _bytes_of_levels(levels, host_lower_bound_bytes)


def _bytes_of_levels(levels: Levels, least: Any) -> dict[str, Any]:
    several: dict[str, tuple[Level, bool]] = {
        "schedule": (levels.scheduled, True),
        "split": (levels.divided, True),
        "layers": (levels.recomputed, False),
        "tight schedule": (levels.scheduled_tight, False),
    }
    found = {}
    for name, (level, is_open) in several.items():

        def nbytes(rows: Index, level: Level = level, is_open: bool = is_open) -> Any:
            block, totals, _ = level(rows)
            block = most_recomputed(block) if is_open else block
            return least(levels.problem, block, layer_counts_of(block), totals)

        for grouping in GROUPINGS[:2]:
            found[f"{name} by {', '.join(grouping) or 'nothing'}"] = levels.by_group(nbytes, *grouping)
    return found


def capacities(levels: Levels, limit_s: Any, usable_bytes: Any) -> Mapping[str, LayerCapacity]:
    """Whether the layers of each row's subproblems fit into this memory, and also into the row's
    time limit.
    """
    by_group = {
        "recompute_chosen": (_recompute_capacity, ("pp",)),
        "open family": (_open_family_capacity, ("pp", "schedule")),
        "sharded": (_sharded_capacity, ("pp",)),
        "family": (_family_capacity, ("pp", "schedule")),
        "schedule": (_schedule_capacity, ("pp",)),
        "schedule alone": (_schedule_capacity, ("pp", "schedule")),
        "tight schedule": (_tight_capacity, ("pp",)),
    }
    capacity_bytes = usable_bytes / (1.0 - levels.problem.job.memory_margin)
    found = {}
    for name, (capacity, grouping) in by_group.items():
        fits, is_enough = np.zeros(len(levels), dtype=bool), np.zeros(len(levels), dtype=bool)
        for rows in levels.groups(*grouping):
            problem = replace(levels.problem, capacity_bytes=capacity_bytes[rows])
            each_capacity = capacity(problem, levels, rows, limit_s[rows])
            fits[rows], is_enough[rows] = each_capacity.fits, each_capacity.is_enough
        found[name] = LayerCapacity(fits, is_enough)
    return found


def _recompute_capacity(problem: Problem, levels: Levels, rows: Index, limit_s: Any) -> LayerCapacity:
    block, totals, traffic = levels.recompute_chosen(rows)
    block = replace(block, split=replace(ANY_SPLIT, largest=levels.space.layers))
    most = replace(block, recompute_layers=levels.space.layers)
    most = most_sharded(most, levels.table.dp[rows] * levels.table.cp[rows])
    return capacity_of(problem, block, most, totals, traffic, limit_s, levels.in_flight_of_any(rows))


def _open_family_capacity(problem: Problem, levels: Levels, rows: Index, limit_s: Any) -> LayerCapacity:
    block, totals, _ = levels.family(rows)
    block = replace(block, optim_shard=levels.any_states(rows))
    most = replace(block, recompute_layers=levels.space.layers)
    most = most_sharded(most, levels.table.dp[rows] * levels.table.cp[rows])
    paths = CriticalPaths(problem, block, layer_counts_of(block), totals, NO_TRAFFIC)
    in_flight_per_rank = levels.in_flight_of_family(rows)
    return capacity_of(problem, block, most, totals, NO_TRAFFIC, limit_s, in_flight_per_rank, paths)


def _sharded_capacity(problem: Problem, levels: Levels, rows: Index, limit_s: Any) -> LayerCapacity:
    block, totals, traffic = levels.sharded(rows)
    block = replace(block, split=replace(ANY_SPLIT, largest=levels.space.layers))
    most = replace(block, recompute_layers=levels.space.layers)
    return capacity_of(problem, block, most, totals, traffic, limit_s, levels.in_flight_of_any(rows))


def _family_capacity(problem: Problem, levels: Levels, rows: Index, limit_s: Any) -> LayerCapacity:
    block, totals, traffic = levels.family(rows)
    most = replace(block, recompute_layers=levels.space.layers)
    paths = CriticalPaths(problem, block, layer_counts_of(block), totals, traffic)
    return capacity_of(
        problem, block, most, totals, traffic, limit_s, levels.in_flight_of_family(rows), paths
    )


def _schedule_capacity(problem: Problem, levels: Levels, rows: Index, limit_s: Any) -> LayerCapacity:
    block, totals, traffic = levels.scheduled(rows)
    paths = CriticalPaths(problem, block, layer_counts_of(block), totals, traffic)
    most = most_recomputed(block)
    return capacity_of(problem, block, most, totals, traffic, limit_s, levels.in_flight_per_rank(rows), paths)


def _tight_capacity(problem: Problem, levels: Levels, rows: Index, limit_s: Any) -> LayerCapacity:
    """The capacity relaxation by memory alone, with the row's recomputed layers as the fewest."""
    block, totals, _ = levels.scheduled_tight(rows)
    fits = memory_capacity(
        problem, block, totals, levels.in_flight_per_rank(rows), layer_counts_of(block).is_v
    )
    return LayerCapacity(fits, fits)
