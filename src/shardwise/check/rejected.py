"""How many candidates of a space break each rule first, counted by sums of products, never row by row.

The rules come in four sets that share no field but pp and dp (docs/concepts/cost-model.md, section 3): how
attention is split, how experts are split, how batch and layers are split, and the schedule. What passes one
set meets the next; all fields that no rule reads only multiply. The limits of a target come before the
schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from shardwise.check.beyond import NO_TARGET_LIMITS, TARGET_REASON, TargetLimits
from shardwise.check.count import SpaceDefinition, chains_of, divisors
from shardwise.check.figures import DegreeLimits, Figures
from shardwise.check.rules import (
    ATTENTION_RULES,
    BATCH_RULES,
    EXPERT_RULES,
    SCHEDULE_RULES,
    first_broken_of,
)
from shardwise.strategy import CP_KINDS, Job


def rejected_counts(
    figures: Figures,
    space: str,
    fixed: Mapping[str, object],
    axes: Mapping[str, Collection[object]] | None = None,
    target_limits: TargetLimits = NO_TARGET_LIMITS,
) -> dict[str, int]:
    """The number of candidates per code of the first rule that they break; codes of none are left out.

    `space` is `core` or `default`; `fixed` and `axes` as in `count_space`. What is `target_limits` the target
    comes after the rules on grids and before those on schedules."""
    rows = SpaceDefinition(
        layers=figures.limits.layers,
        is_moe=figures.model.experts is not None,
        devices=figures.cluster.devices,
        batch=figures.job.global_batch_size,
        is_core=space == "core",
        fixed=fixed,
        axes={} if axes is None else axes,
        target_limits=target_limits,
    )
    found: Counter[str] = Counter()
    layer_choices: dict[int, int] = {}
    for tp, cp, pp, dp in rows.degrees():
        grid = SimpleNamespace(tp=tp, cp=cp, pp=pp, dp=dp)
        grids = _grids(rows, grid, figures.limits, figures.job)
        chains = rows.shards(dp * cp).count
        within = sum(map(len, chains_of(rows, dp * cp).values())) if target_limits.shards else chains
        schedules = _schedules(rows, grid, figures.limits, figures.job, layer_choices)
        for code, number in grids.items():
            if code:
                found[code] += number * chains * schedules.total() * rows.offloads().count
        legal = grids[""] * rows.offloads().count
        found[TARGET_REASON] += legal * (chains - within) * schedules.total()
        for code, number in schedules.items():
            found[code] += legal * within * number
    return {code: number for code, number in found.items() if code and number}


def _grids(rows: SpaceDefinition, grid: Any, limits: DegreeLimits, job: Job) -> Counter[str]:
    """Grids with these degrees, each with its axis orders, by the first rule on grids that they break, or by
    what is beyond the target."""
    target_limits = rows.target_limits
    orders = sorted(map(str, _orders(rows, grid)))
    batch = first_broken_of(grid, BATCH_RULES, limits, job)
    found: Counter[str] = Counter()
    experts = [(one, first_broken_of(one, EXPERT_RULES, limits, job)) for one in _expert_grids(rows, grid)]
    for first in _attention_grids(rows, grid):
        broken = first_broken_of(first, ATTENTION_RULES, limits, job)
        for second, also_broken in experts:
            code = broken or also_broken or batch
            if code or not (target_limits.grid or target_limits.orders):
                found[code] += len(orders)
                continue
            values = {**vars(grid), **vars(first), **vars(second)}
            is_excluded = target_limits.excludes_grid(values)
            for order in orders:
                is_out = is_excluded or target_limits.excludes_order({**values, "axis_order": order})
                found[TARGET_REASON if is_out else ""] += 1
    return found


def _orders(rows: SpaceDefinition, grid: Any) -> Collection[object]:
    """Row 4 of the space."""
    return rows.axis_orders(grid.tp > 1, grid.cp > 1, grid.dp > 1, grid.pp > 1).values["axis_order"]


def _attention_grids(rows: SpaceDefinition, grid: Any) -> Iterable[Any]:
    """Rows 2 and 5 of the space."""
    for kind in CP_KINDS if grid.cp > 1 else CP_KINDS[:1]:
        for flag in (False, True) if grid.tp > 1 else (False,):
            if rows.allows(cp_kind=kind, sequence_parallel=flag):
                yield SimpleNamespace(tp=grid.tp, cp=grid.cp, cp_kind=kind, sequence_parallel=flag)


def _expert_grids(rows: SpaceDefinition, grid: Any) -> Iterable[Any]:
    """Row 3 of the space."""
    width = grid.tp * grid.cp * grid.dp
    if not rows.is_moe:
        pairs = [(1, 1)]
    elif rows.is_core:
        pairs = [(grid.tp, 1)]
    else:
        pairs = [(etp, ep) for etp in divisors(width) for ep in divisors(width // etp)]
    for etp, ep in pairs:
        if rows.allows(etp=etp, ep=ep):
            yield SimpleNamespace(etp=etp, ep=ep)


def _schedules(
    rows: SpaceDefinition, grid: Any, limits: DegreeLimits, job: Job, layer_choices: dict[int, int]
) -> Counter[str]:
    """Rows 6 to 9 of the space: micro-batch sizes, schedules, and so many ways to lay out the layers."""
    found: Counter[str] = Counter()
    sizes = [
        size
        for size in (
            divisors(job.global_batch_size // grid.dp) if job.global_batch_size % grid.dp == 0 else (1,)
        )
        if rows.allows(micro_batch_size=size)
    ]
    for schedule, vpp in rows.schedules(grid.pp):
        if not rows.allows(schedule=schedule, vpp=vpp):
            continue
        stages = grid.pp * vpp
        if stages not in layer_choices:
            layer_choices[stages] = rows.stage_layers(stages).count
        for size in sizes:
            full = SimpleNamespace(dp=grid.dp, pp=grid.pp, vpp=vpp, schedule=schedule, micro_batch_size=size)
            code = first_broken_of(full, SCHEDULE_RULES, limits, job)
            found[code] += layer_choices[stages]
    return found
