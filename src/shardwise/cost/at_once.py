"""Memory of a step with one backward pass, whose gradients come as activations go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.cost.price import TableCosts
from shardwise.cost.problem import Problem
from shardwise.cost.temporaries import has_single_backward


@dataclass(frozen=True, slots=True)
class SingleBackwardBytes:
    """Of the rows at these places of a table, bytes at the moment of the backward pass that needs most."""

    rows: Any
    parameters: Any
    gradients: Any
    activations: Any
    temporaries: Any

    @property
    def total(self) -> Any:
        return self.parameters + self.gradients + self.activations + self.temporaries


def single_backward_bytes(problem: Problem, table: Any, costs: TableCosts) -> SingleBackwardBytes:
    """The rows of software that reduces by block whose step is one microbatch on one stage, whose weights are
    whole until their gradients come, and whose gradients are not whole all the time, as those are that ranks
    hold alike and compute with as they are.

    Of layers that are alike each brings and takes away the same, so that it is one of four moments: at the
    head all activations are kept and no gradient is there; at the last layer, the head's are, and what the
    layer computes again; at the first, all other layers have gradients instead of activations, and of whole
    weights; and at the embedding, all have, and its own are there narrow and laid out beside.
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
    of_head = grid.head.dense_weights[of_grid] * per_weight
    table_weights = grid.embedding.dense_weights[of_grid]
    layer_weights = np.min([kind.dense_weights for kind in grid.kinds], axis=0)[of_grid]
    before = gradients - (layer_weights + table_weights) * per_weight
    parameters, one_layer = shards.parameter_bytes[0][of_shards], partition.layer_saved_bytes[of_partition]
    weight_bytes = problem.recipe.weight_bytes
    of_table = table_weights * (weight_bytes + problem.recipe.gradient_bytes)
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
