"""The end of a step, after the last action: norm, tied weights, optimizer (docs/cost-model.md, 13)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.check.collectives import Fabric, all_reduce_s, message_s
from shardwise.check.durations import offloads_optimizer
from shardwise.check.figures import Figures
from shardwise.check.groups import Groups
from shardwise.check.layer import Amounts
from shardwise.check.rows import Column, Family
from shardwise.check.sharding import Shardings


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """Seconds after the makespan."""

    norm_s: Column
    tied_s: Column
    optimizer_s: Column

    @property
    def total_s(self) -> Column:
        """All three; what the host needs for a step comes on top."""
        return self.norm_s + self.tied_s + self.optimizer_s


def step_end(
    figures: Figures,
    fabric: Fabric,
    groups: Groups,
    family: Family,
    shardings: Shardings,
    blocks: Sequence[Amounts],
    dense: Sequence[Column],
    expert: Sequence[Column],
) -> StepEnd:
    """The end of the step on every row; `dense` and `expert` are the elements on each pipeline rank."""
    rows, recipe = family.rows, figures.recipe
    owned = dense[0] / shardings.dense.optim + expert[0] / shardings.expert.optim
    for of_dense, of_expert in zip(dense[1:], expert[1:], strict=True):
        owned = np.maximum(owned, of_dense / shardings.dense.optim + of_expert / shardings.expert.optim)
    ranks = rows.tp * rows.cp * rows.pp * rows.dp
    norm_s = (
        3 * owned * recipe.gradient_bytes / figures.memory_bytes_per_s
        + 2 * np.log2(ranks) * fabric[-1].latency_s
    )
    return StepEnd(
        norm_s=norm_s,
        tied_s=_tied_s(figures, fabric, groups, family, blocks),
        optimizer_s=_optimizer_s(figures, family, owned),
    )


def _tied_s(
    figures: Figures, fabric: Fabric, groups: Groups, family: Family, blocks: Sequence[Amounts]
) -> Column:
    *kinds, embedding, _ = blocks
    count = Counter(figures.model.pattern)
    replicated = sum(count[kind] * block["replicated"] for kind, block in enumerate(kinds)) / family.pp
    nbytes = figures.recipe.gradient_bytes * replicated
    tied_s = np.where(family.rows.sequence_parallel, all_reduce_s(fabric, nbytes, groups.tensor), 0.0)
    if figures.model.tied_embeddings and family.ends_apart:
        nbytes = embedding["dense"] * figures.recipe.gradient_bytes
        tied_s = tied_s + 2 * message_s(fabric, nbytes, groups.hop_tier)
    return tied_s


def _optimizer_s(figures: Figures, family: Family, owned: Column) -> Column:
    recipe = figures.recipe
    own = recipe.master_bytes or recipe.weight_bytes
    copy = recipe.weight_bytes if recipe.master_bytes else 0
    moved = recipe.gradient_bytes + 2 * own + 2 * figures.state_bytes + copy
    peak = figures.matmul_flop_per_s * figures.efficiency.matmul.peak_fraction
    here_s = (
        owned * moved / figures.memory_bytes_per_s + owned * figures.update_flop * figures.model.hidden / peak
    )
    there = recipe.gradient_bytes + recipe.weight_bytes + moved
    there_s = owned * there / figures.host_link_bytes_per_s
    return np.where(offloads_optimizer(family.rows), there_s, here_s)
