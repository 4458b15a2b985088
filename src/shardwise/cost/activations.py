"""What recomputation and offload decide: how long a microbatch takes on a stage, and what it keeps there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.cost.problem import Problem
from shardwise.cost.stages import PartitionCosts, Sums
from shardwise.equations import compute, memory

ACTIVATION_FIELDS = ("recompute", "recompute_layers", "offload")
SELECTIVE, FULL = 1, 2
"""Indices in RECOMPUTES."""

OPTIMIZER, BOTH = 1, 3
"""Indices in OFFLOADS that move optimizer states."""

ACTIVATIONS = 2
"""From this index in OFFLOADS on, activations are moved."""


@dataclass(frozen=True, slots=True)
class ActivationCosts:
    """Per place, one microbatch without sharding.

    Phases of its stage in seconds, of which `recompute_s` and `offload_s` are told apart; of the forward and
    of the gradient of the input `contended`: what passes in collectives by the cards by which gradients are
    summed.

    Bytes: kept by one microbatch on the stage (`stage_bytes`); of all in flight on the device
    (`in_flight_bytes`), with what is made again there at the peak (`device_bytes`), and moved to the host.
    """

    forward_s: Any
    input_s: Any
    weight_s: Any
    recompute_s: Any
    offload_s: Any
    forward_contended_s: Any
    input_contended_s: Any
    stage_bytes: Any
    in_flight_bytes: Any
    device_bytes: Any
    host_bytes: Any


def activation_costs_of(
    problem: Problem, table: Any, partition: PartitionCosts, of_partition: Any
) -> ActivationCosts:
    """Each row's choice of what to keep; row i of `table` has node `of_partition[i]`."""
    host_s, places = problem.profile.host_action_s, partition.places
    stage, in_flight = partition.stage.taken(of_partition), partition.in_flight[:, of_partition]
    per_stage = np.where(table.recompute == FULL, table.recompute_layers, 0)
    layers = places.layers.sum(axis=0)[:, of_partition]
    share = memory.recomputed_share(per_stage, layers)
    is_selective = table.recompute == SELECTIVE
    recompute_s = np.where(is_selective, stage.selective_s, share * stage.full_s)
    one = np.where(
        is_selective,
        stage.selective_bytes,
        memory.saved_activation_bytes(stage.saved_bytes, stage.input_bytes, share),
    )
    out_s, in_s = offload_s(problem, table, one, stage)
    forward_s = stage.forward_s + host_s + partition.blocked_on_s[:, of_partition] + out_s
    input_s = stage.input_s + host_s + partition.blocked_back_s[:, of_partition] + recompute_s + in_s
    layer_saved, layer_input = (
        partition.layer_saved_bytes[of_partition],
        partition.layer_input_bytes[of_partition],
    )
    moves = table.offload >= ACTIVATIONS
    outstanding = in_flight * one
    on_device = np.where(
        moves,
        np.minimum(one, two_layers_bytes(table, partition, of_partition, per_stage < layers)),
        outstanding,
    )
    pending_weights = partition.pending_weights[:, of_partition]
    layer_recomputed = np.where(table.recompute == FULL, layer_saved - layer_input, 0.0)
    return ActivationCosts(
        forward_s=forward_s,
        input_s=input_s,
        weight_s=stage.weight_s,
        recompute_s=recompute_s,
        offload_s=out_s + in_s,
        forward_contended_s=partition.contended.forward_s[:, of_partition],
        input_contended_s=partition.contended.input_s[:, of_partition]
        + share * partition.contended.recompute_s[:, of_partition],
        stage_bytes=one,
        in_flight_bytes=on_device,
        device_bytes=on_device
        # What is made again in a backward of the inputs stays until that of the weights; else a layer's goes
        # before the next one's comes.
        + np.maximum(pending_weights * (stage.saved_bytes - one), layer_recomputed)
        # And so do the gradients of products, which the one has and the other needs.
        + pending_weights * stage.output_bytes,
        host_bytes=np.where(moves, outstanding, 0.0),
    )


def two_layers_bytes(table: Any, partition: PartitionCosts, of_partition: Any, saves_some: Any) -> Any:
    """What two layers hold whose activations are moved: while one computes, those of the other go or come.

    Of layers that recompute in full all but the input is made again, and counted there; where the stage
    `saves_some` whole, such a one is beside another.
    """
    saved, inputs = partition.layer_saved_bytes[of_partition], partition.layer_input_bytes[of_partition]
    plain = 2.0 * np.where(table.recompute == SELECTIVE, partition.layer_selective_bytes[of_partition], saved)
    return np.where(table.recompute == FULL, inputs + np.where(saves_some, saved, inputs), plain)


def offload_s(problem: Problem, table: Any, nbytes: Any, sums: Sums) -> tuple[Any, Any]:
    """What moving `nbytes` of activations adds to the forward and to the backward beside which they move."""
    slowdown = problem.efficiency.overlap_slowdown
    moved_s = np.where(table.offload >= ACTIVATIONS, nbytes / problem.host_link_bytes_per_s, 0.0)
    return (
        compute.exposed_s(moved_s, sums.forward_compute_s, 1.0, slowdown),
        compute.exposed_s(moved_s, sums.input_compute_s, 1.0, slowdown),
    )
