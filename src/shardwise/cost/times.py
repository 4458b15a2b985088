"""Durations of the actions of a schedule and of what surrounds them, stage by stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.cost.keeping import BOTH, OPTIMIZER
from shardwise.cost.price import Price
from shardwise.cost.problem import Problem
from shardwise.equations import pipeline


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one microbatch on each place, and of what comes once per step; shape (places, rows).

    `backward_input_s` and `backward_weight_s` are the two actions of a split backward, `backward_s` the one
    that is not split. `gather_s` must pass before the first forward, `reduce_s` remains after the last
    backward. `recompute_s`, `shard_s` and `offload_s` are contained in the phases: told apart for the
    breakdown. `hop_s` passes between a place's stage and the next.
    """

    forward_s: Any
    backward_s: Any
    backward_input_s: Any
    backward_weight_s: Any
    gather_s: Any
    reduce_s: Any
    recompute_s: Any
    shard_s: Any
    offload_s: Any
    hop_s: Any


def stage_times(problem: Problem, table: Any, price: Price) -> StageTimes:
    """Times of every place of every row; `price` has reductions priced at every place."""
    keeping, shards = price.keeping, price.shards
    of_keeping, of_shards, of_node = price.of_keeping, price.of_shards, price.of_node
    there_s, back_s = shards.forward_gather_s[:, of_shards], shards.backward_gather_s[:, of_shards]
    scatter_s = shards.scatter_s[:, of_shards]
    forward_s = keeping.forward_s[:, of_keeping] + there_s
    input_s = keeping.input_s[:, of_keeping] + back_s
    weight_s = keeping.weight_s[:, of_keeping] + scatter_s
    ends = ends_of_step(problem, price, forward_s, input_s, weight_s, slice(None))
    return StageTimes(
        forward_s=forward_s,
        backward_s=input_s + weight_s,
        backward_input_s=input_s,
        backward_weight_s=weight_s + problem.profile.host_action_s,
        gather_s=ends[0],
        reduce_s=ends[1],
        recompute_s=keeping.recompute_s[:, of_keeping],
        shard_s=there_s + back_s + scatter_s,
        offload_s=keeping.offload_s[:, of_keeping] + 0.0 * of_node,
        hop_s=price.node.hop_s[:, of_node],
    )


def ends_of_step(
    problem: Problem, price: Price, forward_s: Any, input_s: Any, weight_s: Any, places: slice
) -> tuple[Any, Any]:
    """What must be gathered before the first forward, and what remains to be reduced after the last backward,
    at `places`.

    The phases' times are those at these places; where backwards are split, the last action is the weights'
    gradient. Neither hides beside collectives that leave by the same cards.
    """
    node, of_node = price.node, price.of_node
    buckets = np.maximum(node.places.layers.sum(axis=0), 1)[places][:, of_node]
    contended_s, input_contended_s = (
        each[places][:, price.of_keeping]
        for each in (price.keeping.forward_contended_s, price.keeping.input_contended_s)
    )
    last_s = np.where(node.is_split[of_node], weight_s, input_s + weight_s - input_contended_s)
    profile, shares_states = problem.profile, price.shards.shares_states[price.of_shards]
    overlap = np.where(shares_states, profile.state_overlap, profile.data_overlap)
    gathering_s = price.shards.gathering_s[:, price.of_shards]
    reduction_s = price.shards.reduction_s[:, price.of_shards]
    return (
        pipeline.gathering_before_forward_s(gathering_s, forward_s - contended_s, buckets, overlap),
        pipeline.reduction_after_backward_s(reduction_s, last_s, buckets, overlap),
    )


@dataclass(frozen=True, slots=True)
class StepEnd:
    """Seconds after the pipeline has drained and gradients are reduced; shape (rows,)."""

    norm_s: Any
    tied_s: Any
    optimizer_s: Any
    host_s: Any

    @property
    def total_s(self) -> Any:
        return self.norm_s + self.tied_s + self.optimizer_s + self.host_s


def step_end(problem: Problem, table: Any, price: Price) -> StepEnd:
    """Norm and clipping, synchronisation of tied and replicated weights, the optimizer, the host.

    The norm joins all ranks, so the rank that owns most counts.
    """
    shards, of_shards = price.shards, price.of_shards
    is_offloaded = (table.offload == OPTIMIZER) | (table.offload == BOTH)
    return StepEnd(
        norm_s=shards.norm_s[of_shards],
        tied_s=shards.tied_s[of_shards],
        optimizer_s=np.where(is_offloaded, shards.host_update_s[of_shards], shards.device_update_s[of_shards])
        + shards.copies_s[of_shards],
        host_s=problem.profile.host_step_s + 0.0 * table.tp,
    )
