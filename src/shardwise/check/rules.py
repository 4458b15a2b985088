"""Which strategies are legal (docs/concepts/cost-model.md, section 3): each rule says where it is broken.

The rules read degrees as numbers or columns; `grid` has the fields of a strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from shardwise.check.count import ALIASES, count_space
from shardwise.check.figures import DegreeLimits, Figures
from shardwise.check.rows import Column, StrategyRows
from shardwise.errors import ConfigError
from shardwise.strategy import FIELDS, Job, Strategy

Rule = Callable[[Any, DegreeLimits, Job], Column]

MEMORY, HOST_MEMORY = "memory", "host_memory"


def _heads_cp(grid: Any, limits: DegreeLimits, job: Job) -> Column:
    kv_heads = np.maximum(limits.kv_heads // grid.tp, 1)
    splits = ((limits.heads // grid.tp) % grid.cp == 0) & (kv_heads % grid.cp == 0)
    return (grid.cp_kind == "all_to_all") & (splits == False)  # noqa: E712


def _microbatches(grid: Any, job: Job) -> Column:
    return job.global_batch_size // (grid.dp * grid.micro_batch_size)


def _interleaved(grid: Any, limits: DegreeLimits, job: Job) -> Column:
    m = _microbatches(grid, job)
    broken = (m < 1) | (grid.vpp < 2) | (grid.pp < 2) | (m % grid.pp != 0)
    return (grid.schedule == "interleaved_1f1b") & broken


def _v_shaped(grid: Any, limits: DegreeLimits, job: Job) -> Column:
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
    "layers_vpp": lambda grid, limits, job: grid.pp * grid.vpp > limits.layers,
    "interleaved_microbatches": _interleaved,
    "v_microbatches": _v_shaped,
}
"""Rules on pp, vpp, schedule and the number of microbatches."""

RULES: Mapping[str, Rule] = {**ATTENTION_RULES, **EXPERT_RULES, **BATCH_RULES, **SCHEDULE_RULES}
"""All rules that need no price, in their order."""


def first_broken(rows: StrategyRows, figures: Figures) -> Column:
    """For every row the code of the first rule that it breaks; empty where it is legal."""
    broken = [np.asarray(rule(rows, figures.limits, figures.job)) for rule in RULES.values()]
    return np.select(broken, list(RULES), default="")


def first_broken_of(grid: Any, rules: Mapping[str, Rule], limits: DegreeLimits, job: Job) -> str:
    """The first of `rules` that one grid breaks; empty if none."""
    return next((code for code, rule in rules.items() if rule(grid, limits, job)), "")


def is_candidate(
    figures: Figures,
    strategy: Strategy,
    space: str,
    fixed: Mapping[str, object],
    axes: Mapping[str, Collection[object]] | None = None,
) -> bool:
    """Whether the strategy is a candidate of the space: counted with every field fixed, it is exactly one.

    False for a space that is not known.
    """
    values = {name: getattr(strategy, name) for name in FIELDS}
    if any(name in values and values[name] != value for name, value in fixed.items()):
        return False
    if any(values[name] not in allowed for name, allowed in (axes or {}).items()):
        return False
    if any(strategy_degree < 1 for strategy_degree in (strategy.tp, strategy.cp, strategy.pp, strategy.dp)):
        return False
    aliases = {name: value for name, value in fixed.items() if name in ALIASES}
    try:
        return count(figures, space, {**values, **aliases}) == 1
    except ConfigError:
        return False


def count(
    figures: Figures,
    space: str,
    fixed: Mapping[str, object],
    axes: Mapping[str, Collection[object]] | None = None,
) -> int:
    """The number of candidates of the space. ConfigError for a space that is not known."""
    experts = figures.model.experts
    return count_space(
        model_layers=figures.limits.layers,
        experts=None if experts is None else experts.experts,
        devices=figures.cluster.devices,
        global_batch_size=figures.job.global_batch_size,
        space=space,
        fixed=fixed,
        axes=axes,
    ).count
