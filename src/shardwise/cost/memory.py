"""Bytes on a rank at the peak of a step, by part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.cost.at_once import single_backward_bytes
from shardwise.cost.keeping import BOTH, OPTIMIZER
from shardwise.cost.price import TableCosts
from shardwise.cost.problem import Problem
from shardwise.equations import memory

BOUNDARY_BUFFERS = 4.0
"""Receive and send buffers of a pipeline stage, each way."""

MEMORY_PARTS = (
    "parameters", "gradients", "optimizer", "gathered", "activations", "temporaries", "buffers",
    "fragmentation", "communicators", "context",
)  # fmt: skip
"""Parts of a rank's memory, in the order in which they are told."""


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Parts of a rank's memory; shape (places, rows)."""

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
        return (
            self.parameters + self.gradients + self.optimizer + self.gathered + self.activations
            + self.temporaries + self.buffers
        )  # fmt: skip

    @property
    def reserved(self) -> Any:
        """Bytes that the allocator holds."""
        return self.allocated + self.fragmentation

    @property
    def device(self) -> Any:
        """Bytes that the driver counts."""
        return self.reserved + self.communicators + self.context


def rank_bytes(problem: Problem, table: Any, costs: TableCosts) -> RankBytes:
    """Memory of the rank of each place, part by part, its activations as if all in flight were on the place's
    stage.

    The peak of a row is the maximum over its places: all that is in flight on a rank, at the heaviest of its
    stages.
    """
    partition, activation_costs, shards = costs.partition, costs.activation_costs, costs.shards
    of_partition, of_shards = costs.of_partition, costs.of_shards
    activations = activation_costs.device_bytes[:, costs.of_activations]
    zero = 0.0 * activations
    parts = {
        "parameters": shards.parameter_bytes[:, of_shards] + zero,
        "gradients": shards.gradient_bytes[:, of_shards] + zero,
        "optimizer": np.where(_owns_states(table), 1.0, 0.0) * shards.state_bytes[:, of_shards],
        "gathered": shards.gathered_bytes[of_shards] + zero,
        "activations": activations + zero,
        "temporaries": partition.temporary_bytes[:, of_partition] + zero,
        "buffers": boundary_bytes(problem, table, partition.boundary_bytes[of_partition]) + zero,
    }
    backward = single_backward_bytes(problem, table, costs)
    for name in ("parameters", "gradients", "activations", "temporaries"):
        parts[name][:, backward.rows] = getattr(backward, name)
    allocated = sum(parts.values())
    efficiency = problem.efficiency
    return RankBytes(
        **parts,
        fragmentation=memory.reserved_bytes(allocated, efficiency.fragmentation_ratio) - allocated,
        communicators=communicators(table) * efficiency.communicator_bytes + zero,
        context=efficiency.context_bytes + zero,
    )


def peak_bytes(problem: Problem, table: Any, costs: TableCosts) -> Any:
    """Device bytes on the tightest rank of each row: the maximum of `rank_bytes(...).device`, from fewer
    columns.

    What the node decides, what is kept and what is sharded are summed first, each on its own rows.
    """
    partition, activation_costs, shards = costs.partition, costs.activation_costs, costs.shards
    saved = activation_costs.device_bytes + partition.temporary_bytes[:, costs.activations_partition]
    whole = shards.parameter_bytes + shards.gradient_bytes + shards.gathered_bytes
    resident = np.concatenate([whole, whole + shards.state_bytes], axis=1)
    of_resident = costs.of_shards + np.where(_owns_states(table), whole.shape[1], 0)
    allocated = resident[0][of_resident] + saved[0][costs.of_activations]
    for place in range(1, len(resident)):
        allocated = np.maximum(allocated, resident[place][of_resident] + saved[place][costs.of_activations])
    backward = single_backward_bytes(problem, table, costs)
    of_rows = of_resident[backward.rows], costs.of_shards[backward.rows]
    replaced = shards.parameter_bytes[0][of_rows[1]] + shards.gradient_bytes[0][of_rows[1]]
    allocated[backward.rows] = resident[0][of_rows[0]] - replaced + backward.total
    allocated += boundary_bytes(problem, table, partition.boundary_bytes[costs.of_partition])
    efficiency = problem.efficiency
    return (
        memory.reserved_bytes(allocated, efficiency.fragmentation_ratio)
        + communicators(table) * efficiency.communicator_bytes
        + efficiency.context_bytes
    )


def host_bytes(table: Any, costs: TableCosts) -> Any:
    """Bytes of offloaded states and activations on the host, per device, on the rank with most of them."""
    total = np.zeros(len(table.tp))
    rows = np.flatnonzero(table.offload)
    if len(rows):
        offloaded = costs.activation_costs.host_bytes[:, costs.of_activations[rows]]
        states = costs.shards.host_state_bytes[:, costs.of_shards[rows]]
        owns = _owns_states(table)[rows]
        total[rows] = (np.where(owns, 0.0, states) + offloaded).max(axis=0)
    return total


def _owns_states(table: Any) -> Any:
    """Whether optimizer states are on the device."""
    return (table.offload != OPTIMIZER) & (table.offload != BOTH)


def boundary_bytes(problem: Problem, table: Any, hop_bytes: Any) -> Any:
    """Buffers for what stages send each other; none without a pipeline."""
    buffers: Any = BOUNDARY_BUFFERS
    if problem.profile.buffers_all_microbatches:
        microbatches = problem.job.global_batch_size // (table.dp * table.micro_batch_size)
        buffers = np.maximum(2.0 * microbatches * table.tp, BOUNDARY_BUFFERS)
    return np.where(table.pp > 1, buffers, 0.0) * hop_bytes


def communicators(table: Any) -> Any:
    """Communicators that a rank opens: one for the world, one per axis in use."""
    return (
        1.0 + 1.0 * (table.tp > 1) + 1.0 * (table.cp > 1) + 1.0 * (table.pp > 1) + 1.0 * (table.dp > 1)
        + 1.0 * (table.ep > 1)
    )  # fmt: skip
