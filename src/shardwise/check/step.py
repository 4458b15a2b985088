"""The end of a step, after the last action: norm, tied weights, optimizer (docs/concepts/cost-model.md,
13)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.check.collectives import Fabric, all_reduce_s, send_s
from shardwise.check.durations import offloads_optimizer
from shardwise.check.figures import Figures
from shardwise.check.groups import Groups, hop_senders, hop_tier
from shardwise.check.layer import Amounts
from shardwise.check.rows import Column, Family
from shardwise.check.sharding import Shardings


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """Seconds after the makespan."""

    norm_s: Column
    tied_s: Column
    optimizer_s: Column

    @property
    def total_s(self) -> Column:
        """All three; what the host needs for a step comes on top."""
        return self.norm_s + self.tied_s + self.optimizer_s


def optimizer_step(
    figures: Figures,
    fabric: Fabric,
    groups: Groups,
    family: Family,
    shardings: Shardings,
    blocks: Sequence[Amounts],
    dense: Sequence[Column],
    expert: Sequence[Column],
) -> OptimizerStep:
    """The end of the step on every row; `dense` and `expert` are the elements on each pipeline rank."""
    rows = family.rows
    owned = dense[0] / shardings.dense.optim + expert[0] / shardings.expert.optim
    local_elements = dense[0] + expert[0]
    for of_dense, of_expert in zip(dense[1:], expert[1:], strict=True):
        owned = np.maximum(owned, of_dense / shardings.dense.optim + of_expert / shardings.expert.optim)
        local_elements = np.maximum(local_elements, of_dense + of_expert)
    ranks = rows.tp * rows.cp * rows.pp * rows.dp
    return OptimizerStep(
        norm_s=norm_s(figures, fabric, ranks, owned),
        tied_s=tied_s(figures, fabric, groups, family, blocks),
        optimizer_s=optimizer_s(figures, offloads_optimizer(rows), owned)
        + copies_s(
            figures,
            family.microbatches,
            owned,
            local_elements,
            is_unsharded=(shardings.dense.optim == 1) & (shardings.expert.optim == 1),
        ),
    )


def norm_s(figures: Figures, fabric: Fabric, ranks: Column, owned: Column) -> Column:
    """Seconds of the gradient norm over `ranks` ranks that own so many elements each."""
    nbytes = 3 * owned * figures.recipe.gradient_bytes
    return nbytes / figures.memory_bytes_per_s + 2 * np.log2(ranks) * fabric[-1].latency_s


def tied_s(
    figures: Figures, fabric: Fabric, groups: Groups, family: Family, blocks: Sequence[Amounts]
) -> Column:
    """Seconds of what ranks that hold the same weights, whole or tied, reduce among them."""
    *kinds, embedding, _ = blocks
    count = Counter(figures.model.pattern)
    replicated = sum(count[kind] * block["replicated"] for kind, block in enumerate(kinds)) / family.pp
    nbytes = figures.recipe.gradient_bytes * replicated
    found = np.where(family.rows.sequence_parallel, all_reduce_s(fabric, nbytes, groups.tensor), 0.0)
    if figures.model.tied_embeddings and family.ends_apart:
        nbytes = embedding["dense"] * figures.recipe.gradient_bytes
        tier = hop_tier(groups, 0, family.pp - 1)
        found = found + 2 * send_s(fabric, nbytes / 2, tier, hop_senders(groups, tier))
    return found


def optimizer_s(figures: Figures, is_offloaded: Column, owned: Column) -> Column:
    """Seconds of the update of `owned` elements, on the device or, where `is_offloaded`, on its host."""
    recipe = figures.recipe
    own = recipe.master_bytes or recipe.weight_bytes
    copy = recipe.weight_bytes if recipe.master_bytes else 0
    update_bytes = recipe.gradient_bytes + 2 * own + 2 * figures.state_bytes + copy
    peak = figures.matmul_flop_per_s * figures.efficiency.matmul.peak_fraction
    here_s = (
        owned * update_bytes / figures.memory_bytes_per_s
        + owned * figures.update_flop * figures.model.hidden / peak
    )
    there = recipe.gradient_bytes + recipe.weight_bytes + update_bytes
    there_s = owned * there / figures.host_link_bytes_per_s
    return np.where(is_offloaded, there_s, here_s)


def copies_s(
    figures: Figures, microbatches: Column, owned: Column, local_elements: Column, *, is_unsharded: Column
) -> Column:
    """Seconds of what fully_shard copies in a step where gradients are wider than the weights that are
    computed with: of each element, and of each that the rank owns."""
    recipe = figures.recipe
    if not (figures.profile.reduces_by_block and recipe.master_bytes):
        return 0 * owned
    narrow, wide = recipe.weight_bytes, recipe.gradient_bytes
    # In and out of what is gathered; the narrow weights are written with the update.
    nbytes = local_elements * 2 * narrow + owned * (recipe.master_bytes + 2 * narrow)
    # Sums, the first of which only widens, and into what is reduced; one microbatch's are widened there.
    added = (narrow + wide) + (microbatches - 1) * (narrow + 2 * wide) + 2 * wide
    nbytes = nbytes + local_elements * np.where(microbatches > 1, added, narrow + wide)
    # In a group of one what is gathered and reduced is copied.
    nbytes = nbytes + np.where(is_unsharded, local_elements * 2 * (narrow + wide), 0)
    return nbytes / figures.memory_bytes_per_s
