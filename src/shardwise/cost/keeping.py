"""What recomputation and offload decide: how long a microbatch takes on a stage, and what it keeps there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.cost.nodes import Node, Sums
from shardwise.cost.problem import Problem
from shardwise.equations import compute, memory

KEEP_FIELDS = ("recompute", "recompute_layers", "offload")
SELECTIVE, FULL = 1, 2
"""Indices in RECOMPUTES."""

OPTIMIZER, BOTH = 1, 3
"""Indices in OFFLOADS that move optimizer states."""

ACTIVATIONS = 2
"""From this index in OFFLOADS on, activations are moved."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """Per place, one microbatch without sharding.

    Phases of its stage in seconds, of which `recompute_s` and `offload_s` are told apart; of the forward and
    of the gradient of the input `contended`: what passes in collectives by the cards by which gradients are
    summed.

    Bytes: kept by one microbatch on the stage (`stage_bytes`); of all in flight on the device
    (`held_bytes`), with what is made again there at the peak (`device_bytes`), and moved to the host.
    """

    forward_s: Any
    input_s: Any
    weight_s: Any
    recompute_s: Any
    offload_s: Any
    forward_contended_s: Any
    input_contended_s: Any
    stage_bytes: Any
    held_bytes: Any
    device_bytes: Any
    host_bytes: Any


def keeping_of(problem: Problem, table: Any, node: Node, of_node: Any) -> Keeping:
    """Each row's choice of what to keep; row i of `table` has node `of_node[i]`."""
    host_s, places = problem.profile.host_action_s, node.places
    stage, in_flight = node.stage.taken(of_node), node.in_flight[:, of_node]
    per_stage = np.where(table.recompute == FULL, table.recompute_layers, 0)
    layers = places.layers.sum(axis=0)[:, of_node]
    share = memory.recomputed_share(per_stage, layers)
    is_selective = table.recompute == SELECTIVE
    recompute_s = np.where(is_selective, stage.selective_s, share * stage.full_s)
    one = np.where(
        is_selective,
        stage.selective_bytes,
        memory.kept_activation_bytes(stage.kept_bytes, stage.input_bytes, share),
    )
    out_s, in_s = offload_s(problem, table, one, stage)
    forward_s = stage.forward_s + host_s + node.blocked_on_s[:, of_node] + out_s
    input_s = stage.input_s + host_s + node.blocked_back_s[:, of_node] + recompute_s + in_s
    layer_kept, layer_input = node.layer_kept_bytes[of_node], node.layer_input_bytes[of_node]
    moves = table.offload >= ACTIVATIONS
    held = in_flight * one
    near = np.where(moves, np.minimum(one, two_layers_bytes(table, node, of_node, per_stage < layers)), held)
    waiting = node.waiting[:, of_node]
    layer_again = np.where(table.recompute == FULL, layer_kept - layer_input, 0.0)
    return Keeping(
        forward_s=forward_s,
        input_s=input_s,
        weight_s=stage.weight_s,
        recompute_s=recompute_s,
        offload_s=out_s + in_s,
        forward_contended_s=node.contended.forward_s[:, of_node],
        input_contended_s=node.contended.input_s[:, of_node] + share * node.contended.again_s[:, of_node],
        stage_bytes=one,
        held_bytes=near,
        device_bytes=near
        # What is made again in a backward of the inputs stays until that of the weights; else a layer's goes
        # before the next one's comes.
        + np.maximum(waiting * (stage.kept_bytes - one), layer_again)
        # And so do the gradients of products, which the one has and the other needs.
        + waiting * stage.output_bytes,
        host_bytes=np.where(moves, held, 0.0),
    )


def two_layers_bytes(table: Any, node: Node, of_node: Any, keeps_some: Any) -> Any:
    """What two layers hold whose activations are moved: while one computes, those of the other go or come.

    Of layers that recompute in full all but the input is made again, and counted there; where the stage
    `keeps_some` whole, such a one is beside another.
    """
    kept, inputs = node.layer_kept_bytes[of_node], node.layer_input_bytes[of_node]
    plain = 2.0 * np.where(table.recompute == SELECTIVE, node.layer_selective_bytes[of_node], kept)
    return np.where(table.recompute == FULL, inputs + np.where(keeps_some, kept, inputs), plain)


def offload_s(problem: Problem, table: Any, nbytes: Any, sums: Sums) -> tuple[Any, Any]:
    """What moving `nbytes` of activations adds to the forward and to the backward beside which they move."""
    slowdown = problem.efficiency.overlap_slowdown
    moved_s = np.where(table.offload >= ACTIVATIONS, nbytes / problem.host_link_bytes_per_s, 0.0)
    return (
        compute.exposed_s(moved_s, sums.forward_compute_s, 1.0, slowdown),
        compute.exposed_s(moved_s, sums.input_compute_s, 1.0, slowdown),
    )
