"""What the cost model says of the blocks that hold some strategies: by name of the level, and of the company
in which it was asked. Bounds take short cuts where no row of a table needs some term, so that company
matters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from tests.property.cost_levels import ANY_SPLIT, Level, Levels, each, most_recomputed

from shardwise.cost import (
    NO_TRAFFIC,
    Block,
    Index,
    Paths,
    Problem,
    Room,
    Totals,
    Traffic,
    block_of,
    end_s,
    family_least_bytes,
    grid_least_s,
    grid_work_s,
    least_bytes,
    least_compute_of_any_micro_batch_s,
    least_host_bytes,
    least_of_any_micro_batch_s,
    least_s,
    lie_of,
    memory_room,
    most_sharded,
    room_of,
)

Bounds = Mapping[str, Any]

COMPANIES = ((), ("pp",), ("pp", "schedule"), ("recompute", "offload"))
"""Fields in which rows are alike that are bounded together."""


def least_times_s(levels: Levels) -> Bounds:
    """Seconds that everything in each row's blocks takes at least."""
    rows, problem = levels.all_rows, levels.problem
    plain = block_of(problem, levels.table, ANY_SPLIT)
    found = {
        "any micro batch": _any_micro_batch_s(levels, least_of_any_micro_batch_s),
        "computation alone": _any_micro_batch_s(levels, least_compute_of_any_micro_batch_s),
        "grid": grid_work_s(problem, plain, levels.totals(rows)),
        "kept": grid_least_s(problem, *levels.kept(rows)),
        "sharded": grid_least_s(problem, *levels.sharded(rows)),
        "family": levels.asked(lambda some: _family_s(levels, some), "pp", "schedule"),
        "open family": levels.asked(lambda some: _open_family_s(levels, some), "pp", "schedule"),
    }
    several: dict[str, Level] = {
        "schedule": levels.scheduled,
        "split": levels.divided,
        "layers": levels.recomputed,
        "tight schedule": levels.scheduled_tight,
        "tight split": levels.divided_tight,
    }
    for name, level in several.items():
        for company in COMPANIES:
            least = _least_of(levels, level)
            found[f"{name} by {', '.join(company) or 'nothing'}"] = levels.asked(least, *company)
    return found


def _any_micro_batch_s(levels: Levels, least: Callable[[Problem, Any], Any]) -> Any:
    space = levels.space
    most = each(lambda dp: int(space.micro_batch_sizes(dp)["micro_batch_size"].max()), levels.table.dp)
    return least(levels.problem, levels.table.replaced(micro_batch_size=most))


def _family_s(levels: Levels, rows: Index) -> Any:
    return _paths_s(levels, rows, *levels.family(rows))


def _open_family_s(levels: Levels, rows: Index) -> Any:
    """The same before anything is sharded."""
    block, totals, _ = levels.family(rows)
    return _paths_s(levels, rows, replace(block, optim_shard=levels.any_states(rows)), totals, NO_TRAFFIC)


def _paths_s(levels: Levels, rows: Index, block: Block, totals: Totals, traffic: Traffic) -> Any:
    """By the whole of the work, and by that of single ranks where all of a family have as many stages."""
    paths = Paths(levels.problem, block, lie_of(block), totals, traffic)
    drained_s = paths.whole_s
    if len(set(levels.family_of(rows).vpp.tolist())) == 1:
        drained_s = np.maximum(drained_s, paths.ranks_s)
    return drained_s + end_s(levels.problem, block, totals)


def _least_of(levels: Levels, level: Level) -> Callable[[Index], Any]:
    def least(rows: Index) -> Any:
        block, totals, traffic = level(rows)
        return least_s(levels.problem, block, lie_of(block), totals, traffic)

    return least


def least_device_bytes(levels: Levels) -> Bounds:
    """Bytes that everything in each row's blocks takes at least on some rank."""

    def of_sharded(rows: Index) -> Any:
        block, totals, _ = levels.sharded(rows)
        return family_least_bytes(levels.problem, block, totals, levels.held_by_any(rows))

    def of_family(rows: Index) -> Any:
        block, totals, _ = levels.family(rows)
        most = replace(block, recompute_layers=levels.space.layers)
        return family_least_bytes(levels.problem, most, totals, levels.held_by_family(rows))

    return {
        "sharded": levels.asked(of_sharded, "pp"),
        "family": levels.asked(of_family, "pp", "schedule"),
        **_bytes_of_levels(levels, least_bytes),
    }


def least_hosts_bytes(levels: Levels) -> Bounds:
    """Bytes that everything in each row's blocks puts on some host at least."""
    return _bytes_of_levels(levels, least_host_bytes)


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
            return least(levels.problem, block, lie_of(block), totals)

        for company in COMPANIES[:2]:
            found[f"{name} by {', '.join(company) or 'nothing'}"] = levels.asked(nbytes, *company)
    return found


def rooms(levels: Levels, limit_s: Any, usable_bytes: Any) -> Mapping[str, Room]:
    """Whether each row's blocks have room in so much memory, and within the row's limit as well."""
    asked = {
        "kept": (_kept_room, ("pp",)),
        "open family": (_open_family_room, ("pp", "schedule")),
        "sharded": (_sharded_room, ("pp",)),
        "family": (_family_room, ("pp", "schedule")),
        "schedule": (_schedule_room, ("pp",)),
        "schedule alone": (_schedule_room, ("pp", "schedule")),
        "tight schedule": (_tight_room, ("pp",)),
    }
    capacity_bytes = usable_bytes / (1.0 - levels.problem.job.memory_margin)
    found = {}
    for name, (room, company) in asked.items():
        fits, is_enough = np.zeros(len(levels), dtype=bool), np.zeros(len(levels), dtype=bool)
        for rows in levels.groups(*company):
            problem = replace(levels.problem, capacity_bytes=capacity_bytes[rows])
            each_room = room(problem, levels, rows, limit_s[rows])
            fits[rows], is_enough[rows] = each_room.fits, each_room.is_enough
        found[name] = Room(fits, is_enough)
    return found


def _kept_room(problem: Problem, levels: Levels, rows: Index, limit_s: Any) -> Room:
    block, totals, traffic = levels.kept(rows)
    block = replace(block, split=replace(ANY_SPLIT, largest=levels.space.layers))
    most = replace(block, recompute_layers=levels.space.layers)
    most = most_sharded(most, levels.table.dp[rows] * levels.table.cp[rows])
    return room_of(problem, block, most, totals, traffic, limit_s, levels.held_by_any(rows))


def _open_family_room(problem: Problem, levels: Levels, rows: Index, limit_s: Any) -> Room:
    block, totals, _ = levels.family(rows)
    block = replace(block, optim_shard=levels.any_states(rows))
    most = replace(block, recompute_layers=levels.space.layers)
    most = most_sharded(most, levels.table.dp[rows] * levels.table.cp[rows])
    paths = Paths(problem, block, lie_of(block), totals, NO_TRAFFIC)
    held = levels.held_by_family(rows)
    return room_of(problem, block, most, totals, NO_TRAFFIC, limit_s, held, paths)


def _sharded_room(problem: Problem, levels: Levels, rows: Index, limit_s: Any) -> Room:
    block, totals, traffic = levels.sharded(rows)
    block = replace(block, split=replace(ANY_SPLIT, largest=levels.space.layers))
    most = replace(block, recompute_layers=levels.space.layers)
    return room_of(problem, block, most, totals, traffic, limit_s, levels.held_by_any(rows))


def _family_room(problem: Problem, levels: Levels, rows: Index, limit_s: Any) -> Room:
    block, totals, traffic = levels.family(rows)
    most = replace(block, recompute_layers=levels.space.layers)
    paths = Paths(problem, block, lie_of(block), totals, traffic)
    return room_of(problem, block, most, totals, traffic, limit_s, levels.held_by_family(rows), paths)


def _schedule_room(problem: Problem, levels: Levels, rows: Index, limit_s: Any) -> Room:
    block, totals, traffic = levels.scheduled(rows)
    paths = Paths(problem, block, lie_of(block), totals, traffic)
    most = most_recomputed(block)
    return room_of(problem, block, most, totals, traffic, limit_s, levels.held(rows), paths)


def _tight_room(problem: Problem, levels: Levels, rows: Index, limit_s: Any) -> Room:
    """Of memory alone: as much of it as with the recomputed layers of the row."""
    block, totals, _ = levels.scheduled_tight(rows)
    fits = memory_room(problem, block, totals, levels.held(rows), lie_of(block).is_v)
    return Room(fits, fits)
