"""Durations of the actions of a schedule, stage by stage (`StageTimes`), and the end of the step (`StepEnd`).

docs/concepts/cost-model.md, sections 12 and 13.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.cost.activations import BOTH, OPTIMIZER
from shardwise.cost.estimate import TableCosts
from shardwise.cost.problem import Problem
from shardwise.cost.stage_formulas import Phases, StageEnds


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one micro-batch on each place, and of the work once per step; shape (places, rows).

    `backward_input_s` and `backward_weight_s` are the two actions of a split backward, `backward_s` is a
    whole backward. `gather_s` is the exposed gathering of parameters before the first forward, `reduce_s` the
    exposed gradient reduction after the last backward. `recompute_s`, `shard_s` and `offload_s` are parts of
    the phases, listed for the breakdown. `hop_s` is the send from a place's stage to the next, as far as it
    overlaps. `ends` has gathering and reduction before any overlap.
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
    ends: StageEnds


def stage_times(problem: Problem, table: Any, costs: TableCosts) -> StageTimes:
    """Times of every place of every row; `costs` are those of `costs_of_all_stages`."""
    activation_costs, shards = costs.activation_costs, costs.shards
    of_activations, of_shards, of_partition = costs.of_activations, costs.of_shards, costs.of_partition
    phases = phases_at(costs, slice(None))
    ends = ends_of_step(problem, costs, phases, slice(None))
    gather_s, reduce_s = ends.exposed_s
    traffic_s = shards.forward_gather_s + shards.backward_gather_s + shards.reduce_scatter_s
    return StageTimes(
        forward_s=phases.forward_s,
        backward_s=phases.backward_s,
        backward_input_s=phases.input_s,
        backward_weight_s=phases.weight_s + problem.profile.host_action_s,
        gather_s=gather_s,
        reduce_s=reduce_s,
        recompute_s=activation_costs.recompute_s[:, of_activations],
        shard_s=traffic_s[:, of_shards],
        offload_s=activation_costs.offload_s[:, of_activations] + 0.0 * of_partition,
        hop_s=costs.partition.hop_s[:, of_partition],
        ends=ends,
    )


def phases_at(costs: TableCosts, places: slice) -> Phases:
    """The phases of one micro-batch at `places`, with the exposed traffic of sharding."""
    activation_costs, shards = costs.activation_costs, costs.shards
    both = (
        (activation_costs.forward_s, shards.forward_gather_s),
        (activation_costs.input_s, shards.backward_gather_s),
        (activation_costs.weight_s, shards.reduce_scatter_s),
    )
    return Phases(
        *(
            own_s[places][:, costs.of_activations] + added_s[places][:, costs.of_shards]
            for own_s, added_s in both
        )
    )


def ends_of_step(problem: Problem, costs: TableCosts, phases: Phases, places: slice) -> StageEnds:
    """Gathering before the first forward and reduction after the last backward, at `places`.

    `phases` are those at these places. In split schedules the last action is the weight gradient. Neither
    overlaps with collectives that use the same network cards. Whole stages are reduced after all backward
    passes, which nothing hides.
    """
    partition, of_partition = costs.partition, costs.of_partition
    layers = partition.places.layers.sum(axis=0)[places][:, of_partition]
    contended_s, backward_contended_s = (
        each[places][:, costs.of_activations]
        for each in (costs.activation_costs.forward_contended_s, costs.activation_costs.input_contended_s)
    )
    is_split, backward_s = partition.is_split[of_partition], phases.backward_s - backward_contended_s
    last_s = np.where(is_split, phases.weight_s, backward_s)
    last_s = np.where(costs.shards.is_whole[costs.of_shards], 0.0, last_s)
    profile, shares_states = problem.profile, costs.shards.shares_states[costs.of_shards]
    overlap = np.where(shares_states, profile.state_overlap, profile.data_overlap)
    gathering_s = costs.shards.gathering_s[:, costs.of_shards]
    reduction_s = costs.shards.reduction_s[:, costs.of_shards]
    return StageEnds(gathering_s, reduction_s, phases.forward_s - contended_s, last_s, layers, overlap)


@dataclass(frozen=True, slots=True)
class StepEnd:
    """Seconds after the pipeline makespan, when all gradients are reduced; shape (rows,)."""

    norm_s: Any
    tied_s: Any
    optimizer_s: Any
    host_s: Any

    @property
    def total_s(self) -> Any:
        return self.norm_s + self.tied_s + self.optimizer_s + self.host_s


def step_end(problem: Problem, table: Any, costs: TableCosts) -> StepEnd:
    """Seconds of gradient norm and clipping, synchronisation of tied and replicated weights, optimizer, host.

    The norm is an all-reduce over all ranks, so the rank with most optimizer states counts.
    """
    shards, of_shards = costs.shards, costs.of_shards
    is_offloaded = (table.offload == OPTIMIZER) | (table.offload == BOTH)
    return StepEnd(
        norm_s=shards.norm_s[of_shards],
        tied_s=shards.tied_s[of_shards],
        optimizer_s=np.where(is_offloaded, shards.host_update_s[of_shards], shards.device_update_s[of_shards])
        + shards.copies_s[of_shards],
        host_s=problem.profile.host_step_s + 0.0 * table.tp,
    )
