"""Legality rules (docs/concepts/cost-model.md, section 3), and the number of candidates that each rule
rejects first.

A rule is true where it is broken; it reads numbers or columns, and `grid` has the fields of a strategy.
Rejected candidates are counted by sums of products, never row by row. The rules form four sets that share
only pp and dp: on attention, on experts, on batch and layers, and on the schedule. A candidate that passes
one set meets the next; fields that no rule reads only multiply. The limits of a target come before the
schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, TypedDict

import numpy as np

from shardwise_verify.modules import is_set
from shardwise_verify.problem import DegreeLimits, Figures
from shardwise_verify.reading import InputError
from shardwise_verify.records import AXES, CP_KINDS, FIELDS, CertificateRecord, JobRecord
from shardwise_verify.space import ALIASES, SpaceDefinition, chains_of, count_space, divisors
from shardwise_verify.strategy_rows import Column, StrategyRows
from shardwise_verify.targets import NO_TARGET_LIMITS, TARGET_REASON, TargetLimits

Rule = Callable[[Any, DegreeLimits, JobRecord], Column]

MEMORY, HOST_MEMORY = "memory", "host_memory"


def _heads_cp(grid: Any, limits: DegreeLimits, job: JobRecord) -> Column:
    kv_heads = np.maximum(limits.kv_heads // grid.tp, 1)
    splits = ((limits.heads // grid.tp) % grid.cp == 0) & (kv_heads % grid.cp == 0)
    return (grid.cp_kind == "all_to_all") & (splits == False)  # noqa: E712


def _microbatches(grid: Any, job: JobRecord) -> Column:
    return job.global_batch_size // (grid.dp * grid.micro_batch_size)


def _interleaved(grid: Any, limits: DegreeLimits, job: JobRecord) -> Column:
    m = _microbatches(grid, job)
    broken = (m < 1) | (grid.vpp < 2) | (grid.pp < 2) | (m % grid.pp != 0)
    return (grid.schedule == "interleaved_1f1b") & broken


def _v_shaped(grid: Any, limits: DegreeLimits, job: JobRecord) -> Column:
    broken = (grid.vpp != 2) | (grid.pp < 2) | (_microbatches(grid, job) < 2 * grid.pp)
    return ((grid.schedule == "zb_v") | (grid.schedule == "dualpipe_v")) & broken


ATTENTION_RULES: Mapping[str, Rule] = {
    "heads_tp": lambda grid, limits, job: limits.heads % grid.tp != 0,
    "kv_heads_tp": lambda grid, limits, job: (
        (limits.kv_heads % grid.tp != 0) & (grid.tp % np.maximum(limits.kv_heads, 1) != 0)
    ),
    "ffn_tp": lambda grid, limits, job: limits.ffn % grid.tp != 0,
    "seq_cp": lambda grid, limits, job: (
        (grid.cp > 1) & (job.seq_len % (grid.cp * (1 + (grid.cp_kind == "ring"))) != 0)
    ),
    "heads_cp": _heads_cp,
    "seq_tp": lambda grid, limits, job: (
        (grid.sequence_parallel & True) & ((job.seq_len // grid.cp) % grid.tp != 0)
    ),
    "tp_overlap": lambda grid, limits, job: (
        (grid.sequence_parallel & (job.profile.linked_devices > 0))
        & (max(job.profile.linked_devices, 1) % grid.tp != 0)
    ),
}
"""Rules on tp, cp, cp_kind, sequence_parallel."""

EXPERT_RULES: Mapping[str, Rule] = {
    "experts_ep": lambda grid, limits, job: limits.experts % grid.ep != 0,
    "expert_ffn_etp": lambda grid, limits, job: limits.expert_ffn % grid.etp != 0,
}
"""Rules on ep, etp."""

BATCH_RULES: Mapping[str, Rule] = {
    "batch_dp": lambda grid, limits, job: job.global_batch_size % grid.dp != 0,
    "layers_pp": lambda grid, limits, job: grid.pp > limits.layers,
}
"""Rules on dp, pp."""

SCHEDULE_RULES: Mapping[str, Rule] = {
    "layers_vpp": lambda grid, limits, job: (
        grid.pp * grid.vpp > limits.layers + 2 * (grid.schedule == "interleaved_1f1b")
    ),
    "interleaved_microbatches": _interleaved,
    "v_microbatches": _v_shaped,
}
"""Rules on pp, vpp, schedule and the number of micro-batches."""

RULES: Mapping[str, Rule] = {**ATTENTION_RULES, **EXPERT_RULES, **BATCH_RULES, **SCHEDULE_RULES}
"""All rules that need no estimate, in order of precedence."""


def first_broken(rows: StrategyRows, figures: Figures) -> Column:
    """Per row, the code of the first broken rule; empty where the row is legal."""
    broken = [np.asarray(rule(rows, figures.limits, figures.job)) for rule in RULES.values()]
    return np.select(broken, list(RULES), default="")


def first_broken_of(grid: Any, rules: Mapping[str, Rule], limits: DegreeLimits, job: JobRecord) -> str:
    """The first of `rules` that one grid breaks; empty if none."""
    return next((code for code, rule in rules.items() if rule(grid, limits, job)), "")


class Wider(TypedDict):
    """By what a space is wider than its name and its fields say: see `count_space`."""

    empty_ends: bool
    own_set: bool


def wider_of(proof: CertificateRecord) -> Wider:
    """By what the space of a certificate is wider."""
    return {"empty_ends": bool(proof.empty_ends), "own_set": bool(proof.own_set)}


def is_candidate(
    figures: Figures,
    strategy: object,
    space: str,
    fixed: Mapping[str, object],
    axes: Mapping[str, Collection[object]] | None = None,
    *,
    empty_ends: bool = False,
    own_set: bool = False,
) -> bool:
    """Whether the strategy is a candidate of the space: with every field fixed, the space has exactly one
    candidate.

    False for an unknown space.
    """
    values = {name: getattr(strategy, name) for name in FIELDS}
    if any(name in values and values[name] != value for name, value in fixed.items()):
        return False
    if any(values[name] not in allowed for name, allowed in (axes or {}).items()):
        return False
    if any(values[name] < 1 for name in AXES):
        return False
    is_own_set = values["recompute"] == "selective" and not values["recompute_modules"]
    if is_own_set and not own_set and any((axes or {}).get("recompute_modules", ())):
        return False  # a space that names modules has the own set of our runtime only where it says so
    aliases = {name: value for name, value in fixed.items() if name in ALIASES}
    try:
        return count(figures, space, {**values, **aliases}, empty_ends=empty_ends, own_set=own_set) == 1
    except InputError:
        return False


def fault_of(figures: Figures, strategy: Any) -> str:
    """What makes a strategy illegal besides RULES; empty if nothing does. A strategy that no search found may
    have stages that no space has."""
    s, layers, batch = strategy, figures.limits.layers, figures.job.global_batch_size
    stages, first, last = s.pp * s.vpp, s.first_stage_layers, s.last_stage_layers
    whole = {1: first == last == layers, 2: first + last == layers}.get(stages, first + last <= layers)
    chain = (s.param_shard, s.grad_shard, s.optim_shard, s.dp * s.cp)
    vpps = {"interleaved_1f1b": s.vpp > 1, "zb_v": s.vpp == 2, "dualpipe_v": s.vpp == 2}
    has_experts = figures.model.experts is not None
    splits = s.tp * s.cp * s.dp % (s.etp * s.ep) == 0 if has_experts else (s.etp, s.ep) == (1, 1)
    low, high = (1, layers) if s.recompute == "full" else (0, 0)
    faults = {
        "degrees": s.tp * s.cp * s.pp * s.dp != figures.cluster.devices,
        "axis_order": sorted(s.axis_order.split("-")) != sorted(AXES),
        "sharding": any(more % less for less, more in pairwise(chain)),
        "experts": not splits,
        "schedule": not vpps.get(s.schedule, s.vpp == 1) or (s.pp == 1 and s.schedule != "1f1b"),
        "layers": not whole,
        "batch": batch % s.dp == 0 and batch // s.dp % s.micro_batch_size != 0,
        "recompute": not low <= s.recompute_layers <= high,
        "modules": not is_set(s.recompute_modules)
        or bool(s.recompute_modules and s.recompute != "selective"),
    }
    return ", ".join(name for name, is_broken in faults.items() if is_broken)


def count(
    figures: Figures,
    space: str,
    fixed: Mapping[str, object],
    axes: Mapping[str, Collection[object]] | None = None,
    *,
    empty_ends: bool = False,
    own_set: bool = False,
) -> int:
    """The number of candidates of the space. Raises InputError for an unknown space."""
    experts = figures.model.experts
    return count_space(
        model_layers=figures.limits.layers,
        experts=None if experts is None else experts.experts,
        devices=figures.cluster.devices,
        global_batch_size=figures.job.global_batch_size,
        space=space,
        fixed=fixed,
        axes=axes,
        empty_ends=empty_ends,
        own_set=own_set,
    ).count


def rejected_counts(
    figures: Figures,
    space: str,
    fixed: Mapping[str, object],
    axes: Mapping[str, Collection[object]] | None = None,
    target_limits: TargetLimits = NO_TARGET_LIMITS,
    *,
    empty_ends: bool = False,
    own_set: bool = False,
) -> dict[str, int]:
    """The number of candidates per code of the first broken rule; codes without candidates are omitted.

    `space` is `core` or `default`; `fixed`, `axes`, `empty_ends` and `own_set` as in `count_space`. The
    limits of the target (`target_limits`) come after the rules on grids and before those on schedules.
    """
    rows = SpaceDefinition(
        layers=figures.limits.layers,
        is_moe=figures.model.experts is not None,
        devices=figures.cluster.devices,
        batch=figures.job.global_batch_size,
        is_core=space == "core",
        fixed=fixed,
        axes={} if axes is None else axes,
        target_limits=target_limits,
        empty_ends=empty_ends,
        own_set=own_set,
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


def _grids(rows: SpaceDefinition, grid: Any, limits: DegreeLimits, job: JobRecord) -> Counter[str]:
    """Grids with these degrees, each with its axis orders, counted by the first broken rule on grids or
    the target limit."""
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
    rows: SpaceDefinition, grid: Any, limits: DegreeLimits, job: JobRecord, layer_choices: dict[int, int]
) -> Counter[str]:
    """Rows 6 to 9 of the space: micro-batch sizes and schedules, times the choices of stage layers, by
    broken rule."""
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
