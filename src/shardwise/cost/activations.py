"""Recomputation and offload: times of a micro-batch on a stage, and its saved activations.

`activation_costs_of` estimates each choice of (recompute, recompute_layers, offload) of a partition.
docs/concepts/cost-model.md, sections 10 and 14.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.cost.problem import Problem
from shardwise.cost.stage_formulas import peak_activation_bytes, phases_of, recompute_s, saved_bytes
from shardwise.cost.stages import PartitionCosts, Sums
from shardwise.equations import compute, memory

ACTIVATION_FIELDS = ("recompute", "recompute_layers", "offload")
SELECTIVE, FULL = 1, 2
"""Indices in RECOMPUTES."""

OPTIMIZER, BOTH = 1, 3
"""Indices in OFFLOADS whose optimizer states are on the host."""

ACTIVATIONS = 2
"""From this index in OFFLOADS on, activations are offloaded."""


@dataclass(frozen=True, slots=True)
class ActivationCosts:
    """Times and bytes of one micro-batch without sharding; shape (places, rows).

    Seconds: the phases of the stage, of which `recompute_s` and `offload_s` are parts. The `contended`
    columns are seconds of collectives that use the network cards of the gradient reduction, in the forward
    pass and in the input gradient.

    Bytes: saved activations of one micro-batch on the stage (`stage_bytes`); of all in flight on the device
    (`in_flight_bytes`), also with recomputed tensors at the peak (`device_bytes`); and those on the host.
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
    """Costs of each row's recomputation and offload; row i of `table` has partition `of_partition[i]`."""
    stage, in_flight = partition.stage.taken(of_partition), partition.in_flight[:, of_partition]
    per_stage = np.where(table.recompute == FULL, table.recompute_layers, 0)
    layers = partition.places.layers.sum(axis=0)[:, of_partition]
    share = memory.recomputed_share(per_stage, layers)
    is_selective = table.recompute == SELECTIVE
    again_s = recompute_s(stage, is_selective, share)
    one = saved_bytes(stage, is_selective, share)
    out_s, in_s = offload_s(problem, table, one, stage)
    blocked_on_s, blocked_back_s = (
        each_s[:, of_partition] for each_s in (partition.blocked_on_s, partition.blocked_back_s)
    )
    added_s = blocked_on_s + out_s, blocked_back_s + in_s
    phases = phases_of(stage, problem.profile.host_action_s, again_s, added_s)
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
    contended = partition.contended.taken(of_partition)
    layer_recomputed = np.where(table.recompute == FULL, layer_saved - layer_input, 0.0)
    return ActivationCosts(
        forward_s=phases.forward_s,
        input_s=phases.input_s,
        weight_s=phases.weight_s,
        recompute_s=again_s,
        offload_s=out_s + in_s,
        forward_contended_s=contended.forward_s,
        input_contended_s=contended.backward_s(share),
        stage_bytes=one,
        in_flight_bytes=on_device,
        device_bytes=peak_activation_bytes(
            on_device,
            layer_recomputed,
            pending_weights * (stage.saved_bytes - one),
            pending_weights * stage.output_bytes,
        ),
        host_bytes=np.where(moves, outstanding, 0.0),
    )


def two_layers_bytes(table: Any, partition: PartitionCosts, of_partition: Any, saves_some: Any) -> Any:
    """Bytes of two layers with offloaded activations: one computes while those of the other are copied.

    A layer under full recomputation has its input only; its recomputed tensors count elsewhere. Where the
    stage also `saves_some` layers whole, one of these is next to a recomputed layer.
    """
    saved, inputs = partition.layer_saved_bytes[of_partition], partition.layer_input_bytes[of_partition]
    plain = 2.0 * np.where(table.recompute == SELECTIVE, partition.layer_selective_bytes[of_partition], saved)
    return np.where(table.recompute == FULL, inputs + np.where(saves_some, saved, inputs), plain)


def offload_s(problem: Problem, table: Any, nbytes: Any, sums: Sums) -> tuple[Any, Any]:
    """Exposed seconds of copying `nbytes` of activations: (to the host in the forward pass, back in the
    backward).
    """
    slowdown = problem.efficiency.overlap_slowdown
    moved_s = np.where(table.offload >= ACTIVATIONS, nbytes / problem.host_link_bytes_per_s, 0.0)
    return (
        compute.exposed_s(moved_s, sums.forward_compute_s, 1.0, slowdown),
        compute.exposed_s(moved_s, sums.input_compute_s, 1.0, slowdown),
    )
