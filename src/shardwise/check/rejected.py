"""How many candidates of a space break each rule first, counted by sums of products, never row by row.

The rules come in four sets that share no field but pp and dp (docs/cost-model.md, section 3): how attention
is split, how experts are split, how batch and layers are split, and the schedule. What passes one set meets
the next; all fields that no rule reads only multiply.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from shardwise.check.count import SpaceRows, divisors
from shardwise.check.figures import Figures, Limits
from shardwise.check.rules import (
    ATTENTION_RULES,
    BATCH_RULES,
    EXPERT_RULES,
    SCHEDULE_RULES,
    Rule,
    first_broken_of,
)
from shardwise.strategy import CP_KINDS, Job


def rejected_counts(
    figures: Figures,
    space: str,
    fixed: Mapping[str, object],
    axes: Mapping[str, Collection[object]] | None = None,
) -> dict[str, int]:
    """The number of candidates per code of the first rule that they break; codes of none are left out.

    `space` is `core` or `default`; `fixed` and `axes` as in `count_space`.
    """
    rows = SpaceRows(
        layers=figures.limits.layers,
        is_moe=figures.model.experts is not None,
        devices=figures.cluster.devices,
        batch=figures.job.global_batch_size,
        is_core=space == "core",
        fixed=fixed,
        axes={} if axes is None else axes,
    )
    found: Counter[str] = Counter()
    layer_choices: dict[int, int] = {}
    for tp, cp, pp, dp in rows.degrees():
        grid = SimpleNamespace(tp=tp, cp=cp, pp=pp, dp=dp)
        rest = (
            rows.axis_orders(tp > 1, cp > 1, dp > 1, pp > 1).count
            * rows.shards(dp * cp).count
            * rows.offloads().count
        )
        if rest:
            for code, number in _of_degrees(rows, grid, figures.limits, figures.job, layer_choices).items():
                found[code] += number * rest
    return {code: number for code, number in found.items() if code and number}


def _of_degrees(
    rows: SpaceRows, grid: Any, limits: Limits, job: Job, layer_choices: dict[int, int]
) -> Counter[str]:
    """Candidates with these degrees by first broken rule, over all fields that some rule or layer reads."""
    attention = _tally(_attention_grids(rows, grid), ATTENTION_RULES, limits, job)
    experts = _tally(_expert_grids(rows, grid), EXPERT_RULES, limits, job)
    schedules = _schedules(rows, grid, limits, job, layer_choices)
    found: Counter[str] = Counter()
    before = 1
    for tally, after in (
        (attention, experts.total() * schedules.total()),
        (experts, schedules.total()),
        (schedules, 1),
    ):
        for code, number in tally.items():
            if code:
                found[code] += before * number * after
        before *= tally[""]
    return found


def _tally(grids: Iterable[Any], rules: Mapping[str, Rule], limits: Limits, job: Job) -> Counter[str]:
    return Counter(first_broken_of(grid, rules, limits, job) for grid in grids)


def _attention_grids(rows: SpaceRows, grid: Any) -> Iterable[Any]:
    """Rows 2 and 5 of the space."""
    for kind in CP_KINDS if grid.cp > 1 else CP_KINDS[:1]:
        for flag in (False, True) if grid.tp > 1 else (False,):
            if rows.keeps(cp_kind=kind, sequence_parallel=flag):
                yield SimpleNamespace(tp=grid.tp, cp=grid.cp, cp_kind=kind, sequence_parallel=flag)


def _expert_grids(rows: SpaceRows, grid: Any) -> Iterable[Any]:
    """Row 3 of the space."""
    width = grid.tp * grid.cp * grid.dp
    if not rows.is_moe:
        pairs = [(1, 1)]
    elif rows.is_core:
        pairs = [(grid.tp, 1)]
    else:
        pairs = [(etp, ep) for etp in divisors(width) for ep in divisors(width // etp)]
    for etp, ep in pairs:
        if rows.keeps(etp=etp, ep=ep):
            yield SimpleNamespace(etp=etp, ep=ep)


def _schedules(
    rows: SpaceRows, grid: Any, limits: Limits, job: Job, layer_choices: dict[int, int]
) -> Counter[str]:
    """Rows 6 to 9 of the space: micro-batch sizes, schedules, and so many ways to lay out the layers."""
    found: Counter[str] = Counter()
    sizes = [
        size
        for size in (
            divisors(job.global_batch_size // grid.dp) if job.global_batch_size % grid.dp == 0 else (1,)
        )
        if rows.keeps(micro_batch_size=size)
    ]
    first = first_broken_of(grid, BATCH_RULES, limits, job)
    for schedule, vpp in rows.schedules(grid.pp):
        if not rows.keeps(schedule=schedule, vpp=vpp):
            continue
        stages = grid.pp * vpp
        if stages not in layer_choices:
            layer_choices[stages] = rows.stage_layers(stages).count
        for size in sizes:
            full = SimpleNamespace(dp=grid.dp, pp=grid.pp, vpp=vpp, schedule=schedule, micro_batch_size=size)
            code = first or first_broken_of(full, SCHEDULE_RULES, limits, job)
            found[code] += layer_choices[stages]
    return found
