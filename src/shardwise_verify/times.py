"""Durations of the actions of each stage (docs/concepts/cost-model.md, sections 10 and 12), and of the end
of the step: gradient norm, tied weights, optimizer (section 13)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise_verify.collectives import Fabric, Groups, all_reduce_s, hop_senders, hop_tier, send_s
from shardwise_verify.layers import Amounts
from shardwise_verify.problem import FP32_BYTES, Figures
from shardwise_verify.sharding import Shardings
from shardwise_verify.strategy_rows import Column, Family, StrategyRows


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds of one stage; `recompute_s`, `offload_s` and `traffic_s` are parts of them, per micro-batch.

    `input_s` and `weight_s` are the halves of the backward, without the host time of a separate W action.
    """

    forward_s: Column
    input_s: Column
    weight_s: Column
    weight_action_s: Column
    gather_s: Column
    reduce_s: Column
    recompute_s: Column
    offload_s: Column
    traffic_s: Column

    def action_s(self, kind: str) -> Column:
        """Seconds of an action F, B, I or W."""
        return {
            "F": self.forward_s,
            "B": self.input_s + self.weight_s,
            "I": self.input_s,
            "W": self.weight_action_s,
        }[kind]

    def row(self, index: int) -> StageSeconds:
        """The times of one row as plain numbers."""
        return StageSeconds(
            **{name: float(getattr(self, name)[index]) for name in StageSeconds.__dataclass_fields__}
        )


def recomputed_share(rows: StrategyRows, layers: Column) -> Column:
    """The share of a stage's layers under full recomputation."""
    return np.minimum(rows.recompute_layers, layers) / np.maximum(layers, 1)


def saved_bytes(rows: StrategyRows, layers: Column, stage: Mapping[str, Column]) -> Column:
    """Saved activations of one micro-batch on a stage, bytes."""
    all_saved = stage["saved_bytes"]
    full = all_saved - recomputed_share(rows, layers) * (all_saved - stage["input_bytes"])
    selective = np.where(rows.recompute == "selective", stage["saved_selective_bytes"], all_saved)
    return np.where(rows.recompute == "full", full, selective)


def offloads_activations(rows: StrategyRows) -> Column:
    return (rows.offload == "activations") | (rows.offload == "both")


def offloads_optimizer(rows: StrategyRows) -> Column:
    return (rows.offload == "optimizer") | (rows.offload == "both")


def stage_times(
    figures: Figures,
    family: Family,
    stage: Mapping[str, Column],
    layers: Column,
    reduction_s: Column,
    gathering_s: Column,
    waits_s: tuple[Column, Column],
) -> StageSeconds:
    """The times of a stage with these amounts and layers.

    `reduction_s` and `gathering_s` are its gradient reduction and parameter all-gather before overlap.
    `waits_s` are the exposed send times of its forward and its backward.
    """
    rows, host_s = family.rows, figures.profile.host_action_s
    selective = np.where(rows.recompute == "selective", stage["selective_s"], 0.0)
    full = recomputed_share(rows, layers) * stage["repeated_s"]
    recompute_s = np.where(rows.recompute == "full", full, selective)
    nbytes = (
        np.where(offloads_activations(rows), saved_bytes(rows, layers, stage), 0.0) + stage["moved_bytes"]
    )
    offload_transfer_s = nbytes / figures.host_link_bytes_per_s
    out_s = figures.exposed_s(offload_transfer_s, stage["forward_computation_s"], 1.0)
    in_s = figures.exposed_s(offload_transfer_s, stage["input_computation_s"], 1.0)
    on_s, back_s = waits_s
    forward_s = stage["forward_s"] + host_s + on_s + out_s + stage["forward_traffic_s"]
    input_s = stage["input_s"] + host_s + back_s + recompute_s + in_s + stage["input_traffic_s"]
    weight_s = stage["weight_s"] + stage["weight_traffic_s"]
    # Collectives on the replicas' cards leave no bandwidth for the gradient reduction.
    repeated_s = np.where(
        rows.recompute == "full", recomputed_share(rows, layers) * stage["repeated_contended_s"], 0.0
    )
    selective_s = np.where(rows.recompute == "selective", stage["selective_contended_s"], 0.0)
    contended_s = stage["input_contended_s"] + repeated_s + selective_s
    last_s = weight_s if family.splits_backward else input_s + weight_s - contended_s
    profile = figures.profile
    if profile.whole_in_pipelines and family.pp > 1:  # reduced after all backward passes of the stage
        last_s = 0.0 * last_s
    overlap = np.where(rows.optim_shard == 1, profile.data_overlap, profile.state_overlap)
    return StageSeconds(
        forward_s=forward_s,
        input_s=input_s,
        weight_s=weight_s,
        weight_action_s=weight_s + host_s,
        gather_s=_added_s(gathering_s, overlap, forward_s - stage["forward_contended_s"], layers),
        reduce_s=_added_s(reduction_s, overlap, last_s, layers),
        recompute_s=recompute_s,
        offload_s=out_s + in_s,
        traffic_s=stage["forward_traffic_s"] + stage["input_traffic_s"] + stage["weight_traffic_s"],
    )


def _added_s(seconds: Column, overlap: Column, action_s: Column, layers: Column) -> Column:
    """Seconds that an all-gather or reduction adds to an action. It has one bucket per layer; all buckets
    but one overlap with the action."""
    buckets = np.maximum(layers, 1)
    hidden_s = np.minimum(overlap * seconds, action_s)
    return seconds - hidden_s + hidden_s / buckets


def times_of_row(times: Sequence[StageSeconds], index: int) -> list[StageSeconds]:
    """All stages of one row as plain numbers."""
    return [stage.row(index) for stage in times]


@dataclass(frozen=True, slots=True)
class RankElements:
    """Elements of weights on each pipeline rank: of all dense and expert weights, and of trained ones."""

    dense: tuple[Column, ...]
    expert: tuple[Column, ...]
    trained_dense: tuple[Column, ...]
    trained_expert: tuple[Column, ...]

    @property
    def frozen_dense(self) -> tuple[Column, ...]:
        return tuple(own - part for own, part in zip(self.dense, self.trained_dense, strict=True))

    @property
    def frozen_expert(self) -> tuple[Column, ...]:
        return tuple(own - part for own, part in zip(self.expert, self.trained_expert, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """Seconds after the makespan."""

    norm_s: Column
    tied_s: Column
    optimizer_s: Column

    @property
    def total_s(self) -> Column:
        """The sum of all three; the host time of the step is added elsewhere."""
        return self.norm_s + self.tied_s + self.optimizer_s


def optimizer_step(
    figures: Figures,
    fabric: Fabric,
    groups: Groups,
    family: Family,
    shardings: Shardings,
    blocks: Sequence[Amounts],
    of_ranks: RankElements,
) -> OptimizerStep:
    """The end of the step on every row."""
    rows = family.rows
    owned, local_elements = _most_elements(shardings, of_ranks.trained_dense, of_ranks.trained_expert)
    frozen = _most_elements(shardings, of_ranks.frozen_dense, of_ranks.frozen_expert)
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
        )
        + frozen_copies_s(figures, *frozen),
    )


def _most_elements(
    shardings: Shardings, dense: Sequence[Column], expert: Sequence[Column]
) -> tuple[Column, Column]:
    """Elements that the rank with most of them owns, and that it has."""
    owned = dense[0] / shardings.dense.optim + expert[0] / shardings.expert.optim
    local_elements = dense[0] + expert[0]
    for of_dense, of_expert in zip(dense[1:], expert[1:], strict=True):
        owned = np.maximum(owned, of_dense / shardings.dense.optim + of_expert / shardings.expert.optim)
        local_elements = np.maximum(local_elements, of_dense + of_expert)
    return owned, local_elements


def norm_s(figures: Figures, fabric: Fabric, ranks: Column, owned: Column) -> Column:
    """Seconds of the gradient norm over `ranks` ranks with `owned` elements each."""
    nbytes = 3 * owned * figures.recipe.gradient_bytes
    return nbytes / figures.memory_bytes_per_s + 2 * np.log2(ranks) * fabric[-1].latency_s


def tied_s(
    figures: Figures, fabric: Fabric, groups: Groups, family: Family, blocks: Sequence[Amounts]
) -> Column:
    """Seconds of the reductions of replicated weights over tensor ranks and of tied weights between the
    ends."""
    *kinds, embedding, _ = blocks
    count = Counter(figures.model.layer_kinds)
    replicated = sum(count[kind] * block["replicated"] for kind, block in enumerate(kinds)) / family.pp
    nbytes = figures.recipe.reduced_bytes * replicated
    # Of a pair of matrices of an adapter, the one that is whole has only a part of its gradient on each rank.
    is_partial = family.rows.sequence_parallel | figures.model.trains_adapters
    found = np.where(is_partial, all_reduce_s(fabric, nbytes, groups.tensor), 0.0)
    if figures.model.embedding_copies and family.ends_apart:
        nbytes = embedding["trained_dense"] * figures.recipe.reduced_bytes
        tier = hop_tier(groups, 0, family.pp - 1)
        both_s = 2 * send_s(fabric, nbytes / 2, tier, hop_senders(groups, tier))
        found = found + np.where(nbytes > 0, both_s, 0.0)
    return found


def optimizer_s(figures: Figures, is_offloaded: Column, owned: Column) -> Column:
    """Seconds of the update of `owned` elements, on the device or, where `is_offloaded`, on its host."""
    recipe = figures.recipe
    own = recipe.master_bytes or recipe.weight_bytes
    copy = recipe.weight_bytes if recipe.master_bytes else 0
    if 0 < recipe.master_bytes < FP32_BYTES:  # the bits of a master weight that its compute copy lacks
        copy = 2 * recipe.weight_bytes
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
    """Seconds of the copies of fully_shard in a step, where gradients are wider than the compute weights:
    for every local element, and for every owned element."""
    recipe = figures.recipe
    if not (figures.profile.reduces_by_block and recipe.master_bytes):
        return 0 * owned
    narrow, wide = recipe.weight_bytes, recipe.reduced_bytes
    # Copies into and out of the all-gather buffers. Then the optimizer writes the low-precision weights.
    nbytes = local_elements * 2 * narrow + owned * (recipe.master_bytes + 2 * narrow)
    if recipe.reduced_bytes != recipe.gradient_bytes:  # a reduced share is read, and written wider
        nbytes = nbytes + owned * (recipe.reduced_bytes + recipe.gradient_bytes)
    # Accumulation over micro-batches (the first only widens) and into the reduction buffer; a single
    # micro-batch is widened there.
    added = (narrow + wide) + (microbatches - 1) * (narrow + 2 * wide) + 2 * wide
    nbytes = nbytes + local_elements * np.where(microbatches > 1, added, narrow + wide)
    # In a group of one rank, all-gather and reduction are copies.
    nbytes = nbytes + np.where(is_unsharded, local_elements * 2 * (narrow + wide), 0)
    return nbytes / figures.memory_bytes_per_s


def frozen_copies_s(figures: Figures, owned: Column, local_elements: Column) -> Column:
    """Seconds of the same copies of frozen weights: a cast of the own share, into and out of the all-gather
    buffers."""
    recipe = figures.recipe
    if not (figures.profile.reduces_by_block and recipe.master_bytes):
        return 0 * owned
    cast = recipe.master_bytes + recipe.weight_bytes
    nbytes = owned * (cast + 2 * recipe.weight_bytes) + local_elements * 2 * recipe.weight_bytes
    return nbytes / figures.memory_bytes_per_s
