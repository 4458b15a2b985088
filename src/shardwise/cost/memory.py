"""Peak memory of strategies by part, and the seconds outside of their schedules.

`rank_bytes` has the bytes of each rank by part (MEMORY_PARTS), `peak_bytes` and `peaks_of` those of the
tightest rank, `host_bytes` those on the host. `single_backward_bytes` is the peak of a step with a single
backward pass, where gradients replace activations. docs/concepts/cost-model.md, section 14.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.cost.activations import BOTH, OPTIMIZER
from shardwise.cost.estimate import TableCosts, costs_of_peak_stages
from shardwise.cost.layers import has_single_backward
from shardwise.cost.problem import Problem
from shardwise.cost.recipe import FP32_BYTES
from shardwise.cost.sharding import narrow_gradient_bytes
from shardwise.cost.stage_formulas import (
    allocated_bytes,
    boundary_buffers,
    boundary_bytes,
    communicators,
    device_bytes,
    outside_tensors,
)
from shardwise.cost.times import ends_of_step, phases_at, step_end

# Single backward pass


@dataclass(frozen=True, slots=True)
class SingleBackwardBytes:
    """Bytes of some rows of a table at the moment of the single backward pass that needs most."""

    rows: Any
    parameters: Any
    gradients: Any
    activations: Any
    temporaries: Any

    @property
    def total(self) -> Any:
        return self.parameters + self.gradients + self.activations + self.temporaries


def single_backward_bytes(problem: Problem, table: Any, costs: TableCosts) -> SingleBackwardBytes:
    """Peaks of the rows with a single backward pass: gradients replace activations as it proceeds.

    It applies to software that reduces by block, with one micro-batch on one stage. Weights are unsharded
    until their gradients are reduced. Gradients are not allocated throughout the step, unlike with
    replicated weights that have no master copy.

    Equal layers allocate and free the same bytes, so one of four moments is the peak. At the head, all
    activations are saved and there is no gradient. At the last layer, there are the head's gradients and the
    layer's recomputed tensors. At the first layer, all other layers have gradients instead of activations and
    unsharded weights. At the embedding, all have, and its own gradients exist in both dtypes.
    """
    goes = has_single_backward(problem, table) * problem.profile.reduces_by_block
    moves = (table.optim_shard > 1) | (problem.recipe.master_bytes > 0)
    rows = np.flatnonzero(goes * moves * (table.param_shard == 1))
    grid, partition, shards = costs.partitions.grid, costs.partition, costs.shards
    of_partition, of_shards = costs.of_partition[rows], costs.of_shards[rows]
    of_grid = costs.partitions.of_grid[of_partition]
    is_shared = shards.shares_states[of_shards]
    works = grid.temporaries
    at_layer = np.where(is_shared, works.reduced_layer[of_grid], works.layer[of_grid])
    at_head = np.where(is_shared, works.reduced_head[of_grid], works.head[of_grid])
    saved = costs.activation_costs.in_flight_bytes[0][costs.of_activations[rows]]
    recomputed = costs.activation_costs.device_bytes[0][costs.of_activations[rows]] - saved
    sent = np.where(is_shared, partition.sent_bytes[0][of_partition], 0.0)
    gradients = shards.gradient_bytes[0][of_shards] - sent
    per_weight = problem.recipe.gradient_bytes / table.optim_shard[rows]
    of_head = grid.head.trained_dense[of_grid] * per_weight
    table_weights = grid.embedding.dense_weights[of_grid]
    layer_weights = np.min([kind.dense_weights for kind in grid.kinds], axis=0)[of_grid]
    trained_layer = np.min([kind.trained_dense for kind in grid.kinds], axis=0)[of_grid]
    trained_table = grid.embedding.trained_dense[of_grid]
    before = gradients - (trained_layer + trained_table) * per_weight
    parameters, one_layer = shards.parameter_bytes[0][of_shards], partition.layer_saved_bytes[of_partition]
    weight_bytes = problem.recipe.weight_bytes
    of_table = trained_table * (weight_bytes + problem.recipe.reduced_bytes)
    others = partition.rank.dense_weights[0][of_partition] - table_weights
    nothing = 0.0 * saved
    moments = np.array(
        [
            [parameters, nothing, saved, at_head],
            [parameters, of_head, saved + recomputed, at_layer],
            [parameters - weight_bytes * (others - layer_weights), before, one_layer, at_layer],
            [parameters - weight_bytes * others, gradients, nothing, of_table],
        ]
    )  # moment, part, row
    most = moments[moments.sum(axis=1).argmax(axis=0), :, np.arange(len(rows))]
    return SingleBackwardBytes(rows, *most.T)


# Parts of the memory of a rank

MEMORY_PARTS = (
    "parameters", "gradients", "optimizer", "gathered", "activations", "temporaries", "buffers",
    "fragmentation", "communicators", "context",
)  # fmt: skip
"""Parts of a rank's memory, in the order in which they are reported."""


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Parts of a rank's memory in bytes; shape (moments, rows)."""

    parameters: Any
    gradients: Any
    optimizer: Any
    gathered: Any
    activations: Any
    temporaries: Any
    buffers: Any
    fragmentation: Any
    communicators: Any
    context: Any

    @property
    def allocated(self) -> Any:
        """Bytes in tensors."""
        return allocated_bytes(
            self.parameters, self.gradients, self.optimizer, self.gathered, self.activations,
            self.temporaries, self.buffers,
        )  # fmt: skip

    @property
    def reserved(self) -> Any:
        """Bytes that the allocator reserves."""
        return self.allocated + self.fragmentation

    @property
    def device(self) -> Any:
        """Bytes that the driver counts."""
        return self.reserved + self.communicators + self.context


def rank_bytes(problem: Problem, table: Any, costs: TableCosts) -> RankBytes:
    """Memory of the rank of each moment by part; the peak of a row is the maximum over its moments."""
    partition, activation_costs, shards = costs.partition, costs.activation_costs, costs.shards
    of_partition, of_shards = costs.of_partition, costs.of_shards
    activations = activation_costs.device_bytes[:, costs.of_activations]
    zero = 0.0 * activations
    parts = {
        "parameters": shards.parameter_bytes[:, of_shards] + zero,
        "gradients": _on_device(problem, table) * shards.gradient_bytes[:, of_shards] + zero,
        "optimizer": np.where(_owns_states(table), 1.0, 0.0) * shards.state_bytes[:, of_shards],
        "gathered": shards.gathered_bytes[of_shards] + zero,
        "activations": activations + zero,
        "temporaries": partition.temporary_bytes[:, of_partition] + zero,
        "buffers": buffer_bytes(problem, table, partition.boundary_bytes[of_partition]) + zero,
    }
    backward = single_backward_bytes(problem, table, costs)
    for name in ("parameters", "gradients", "activations", "temporaries"):
        parts[name][:, backward.rows] = getattr(backward, name)
    if problem.profile.bucket_elements:
        parts["buffers"] += bucketed_bytes(problem, table, costs, parts)
    allocated = allocated_bytes(**parts)
    fragmentation, opened, context = outside_tensors(problem.efficiency, allocated, communicators_of(table))
    return RankBytes(
        **parts, fragmentation=fragmentation, communicators=opened + zero, context=context + zero
    )


def peak_bytes(problem: Problem, table: Any, costs: TableCosts) -> Any:
    """Device bytes on the tightest rank of each row: the maximum of `rank_bytes(...).device`, from fewer
    columns.

    The bytes of partitions, activations and shards are summed first, each on its own rows.
    """
    if problem.profile.bucket_elements:
        return rank_bytes(problem, table, costs).device.max(axis=0)
    partition, activation_costs, shards = costs.partition, costs.activation_costs, costs.shards
    saved = activation_costs.device_bytes + partition.temporary_bytes[:, costs.activations_partition]
    whole = shards.parameter_bytes + shards.gradient_bytes + shards.gathered_bytes
    resident = np.concatenate([whole, whole + shards.state_bytes], axis=1)
    of_resident = costs.of_shards + np.where(_owns_states(table), whole.shape[1], 0)
    allocated = resident[0][of_resident] + saved[0][costs.of_activations]
    for moment in range(1, len(resident)):
        allocated = np.maximum(allocated, resident[moment][of_resident] + saved[moment][costs.of_activations])
    backward = single_backward_bytes(problem, table, costs)
    of_rows = of_resident[backward.rows], costs.of_shards[backward.rows]
    replaced = shards.parameter_bytes[0][of_rows[1]] + shards.gradient_bytes[0][of_rows[1]]
    allocated[backward.rows] = resident[0][of_rows[0]] - replaced + backward.total
    allocated += buffer_bytes(problem, table, partition.boundary_bytes[costs.of_partition])
    return device_bytes(problem.efficiency, allocated, communicators_of(table))


def bucketed_bytes(problem: Problem, table: Any, costs: TableCosts, parts: dict[str, Any]) -> Any:
    """Bytes of reduction buckets and of copies of gradients, beyond the other `parts` of a rank.

    The larger of two moments counts. In a backward pass the buckets are whole, and one of them is copied to
    be reduced while a layer computes, or while the gradient of an end is there. In the update the gradients
    of `update_elements` are in the dtype of the weights and in fp32, while activations and gathered weights
    are gone; the bucket of sharded parameters stays. (DeepSpeed 0.19: stage_1_and_2.py, stage3.py,
    coalesced_collectives.py.)
    """
    profile, recipe = problem.profile, problem.recipe
    narrow, wide, bucket = recipe.weight_bytes, recipe.gradient_bytes, profile.bucket_elements
    is_sharded, is_cast = table.param_shard > 1, wide > narrow
    reduces_whole = (table.grad_shard == 1) & (narrow_gradient_bytes(problem) > 0)
    count = np.where(reduces_whole, 0.0, np.where(is_sharded | (profile.state_overlap == 0.0), 1.0, 2.0))
    buckets = bucket * np.where(is_sharded, wide, narrow) * count
    rank, of_partition = costs.partition.rank, costs.of_partition
    weights = (rank.trained_dense + rank.trained_expert)[:, of_partition]
    # A gradient that micro-batches accumulated is freed when it is copied into a bucket.
    copies = np.where(table.grad_shard == 1, 0.0, narrow + is_cast * wide)
    copies = np.where(is_sharded | reduces_whole, wide, copies)
    copied = np.minimum(bucket, weights) * copies
    at_layer = costs.partitions.grid.temporaries.layer[costs.partitions.of_grid[of_partition]]
    of_end = narrow * costs.partition.trained_end_weights[of_partition]
    in_backward = buckets + np.maximum(np.maximum(at_layer, of_end) + copied - parts["temporaries"], 0.0)
    owned = weights / table.optim_shard
    owned = np.where(is_sharded, np.minimum(owned, profile.update_elements), owned)
    is_flat = is_cast & ~is_sharded  # fp32 gradients are in one tensor already
    cast = np.where(is_flat, 0.0, wide + (wide < FP32_BYTES) * FP32_BYTES)
    in_update = np.where(_owns_states(table), owned * cast, 0.0) + np.where(is_sharded, buckets, 0.0)
    freed = parts["activations"] + parts["temporaries"] + parts["gathered"]
    return np.maximum(in_backward, in_update - freed)


def _on_device(problem: Problem, table: Any) -> Any:
    """1.0 where gradients are on the device, 0.0 where they are offloaded with the optimizer."""
    if not problem.profile.offloads_gradients:
        return 1.0
    return np.where(_owns_states(table) | (table.grad_shard == 1), 1.0, 0.0)


def host_bytes(problem: Problem, table: Any, costs: TableCosts) -> Any:
    """Bytes of a process with offloaded states and activations on the host, per device, on the rank with
    most of them."""
    total = np.zeros(len(table.tp))
    moves = (costs.activation_costs.host_bytes > 0.0).any(axis=0)
    rows = np.flatnonzero((np.asarray(table.offload) > 0) | moves[costs.of_activations])
    if len(rows):
        offloaded = costs.activation_costs.host_bytes[:, costs.of_activations[rows]]
        states = costs.shards.host_state_bytes[:, costs.of_shards[rows]]
        owns = _owns_states(table)[rows]
        total[rows] = (np.where(owns, 0.0, states) + offloaded).max(axis=0)
        total[rows] += problem.profile.host_process_bytes
    return total


def _owns_states(table: Any) -> Any:
    """Whether optimizer states are on the device."""
    return (table.offload != OPTIMIZER) & (table.offload != BOTH)


def buffer_bytes(problem: Problem, table: Any, hop_bytes: Any) -> Any:
    """Buffers for sends between stages; 0 without a pipeline."""
    microbatches = problem.job.global_batch_size // (table.dp * table.micro_batch_size)
    return boundary_bytes(table.pp > 1, hop_bytes, boundary_buffers(problem.profile, microbatches, table.tp))


def communicators_of(table: Any) -> Any:
    """Communicators that a rank opens."""
    return communicators(table.tp, table.cp, table.pp, table.dp, table.ep)


# Peaks, and seconds outside of the schedule

FIRST = slice(0, 1)
"""The place of `costs_of_peak_stages`: the first stage."""


@dataclass(frozen=True, slots=True)
class PeakBytes:
    """Per row: bytes on its tightest rank, and on the host per device."""

    device_bytes: Any
    host_bytes: Any


def peaks_of(problem: Problem, table: Any, costs: TableCosts | None = None) -> PeakBytes:
    """Peak memory of every row of a StrategyTable of legal strategies.

    `costs` is that of `costs_of_peak_stages`.
    """
    costs = costs_of_peak_stages(problem, table) if costs is None else costs
    return PeakBytes(peak_bytes(problem, table, costs), host_bytes(problem, table, costs))


def outside_schedule_s(problem: Problem, table: Any, costs: TableCosts | None = None) -> Any:
    """Lower bound of the seconds of every row outside of its pipeline makespan.

    It sums the gathering before the first stage's first forward, the reduction after its last backward where
    that ends the schedule, and the end of the step.
    """
    costs = costs_of_peak_stages(problem, table) if costs is None else costs
    return _outside_s(problem, costs) + step_end(problem, table, costs).total_s


def _outside_s(problem: Problem, costs: TableCosts) -> Any:
    """Gathering before the first stage's first forward, and reduction after its last backward if that ends
    all paths.
    """
    before_s, after_s = ends_of_step(problem, costs, phases_at(costs, FIRST), FIRST).exposed_s
    return before_s[0] + np.where(costs.partition.is_split[costs.of_partition], 0.0, after_s[0])
