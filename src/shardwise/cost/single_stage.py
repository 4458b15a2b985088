"""Costs of single stages: given layers on devices of one kind, whatever the other stages are.

`stage_kinds_of` estimates the kinds of stages of one pool, `stage_costs` the stages of uneven plans. A
uniform strategy is estimated as a whole (`cost.estimate`). Both use the same costs of layers, collectives and
memory, so that a stage of a uniform strategy costs the same here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from shardwise.cluster import Tier
from shardwise.cost.collectives import CollectiveModel, Sizes, collective_model_of, contends
from shardwise.cost.layers import Contention, GridCost, grid_cost
from shardwise.cost.memory import BOUNDARY_BUFFERS
from shardwise.cost.problem import Problem
from shardwise.cost.sharding import device_update_s, norm_s, own_bytes
from shardwise.cost.stages import Contended, Sums, block_columns, contended_columns, over_places
from shardwise.equations import memory, pipeline
from shardwise.strategy import RECOMPUTES, StrategyTable, complete


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """Columns that describe stages; they broadcast against kinds of devices (the last axis).

    `layers` counts decoder layers. `in_flight` counts micro-batches in flight: the stage's position counted
    from the last stage, which has 1. `is_first` and `is_last` (0 or 1) state which ends of the model it has.
    `replicas` are one or more numbers of pipelines. These are in at least `groups` groups (or in as many as
    there are pipelines) that meet on the outermost tier.
    """

    layers: Any
    in_flight: Any
    is_first: Any
    is_last: Any
    replicas: Sequence[int]
    groups: int = 1


@dataclass(frozen=True, slots=True)
class NodeSlot:
    """The slot of a stage among those of its pipeline in a node.

    `stages_per_node` stages of a pipeline, this one included, share a node of `devices` devices (0: sends out
    of the node share its cards with all others). `is_whole` where these are all stages of the pipeline.
    """

    stages_per_node: int = 1
    devices: int = 0
    is_whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Costs of every shape on every kind of stage, in seconds and in bytes per device.

    `forward_s` and `backward_s` are per micro-batch. `gather_s` is exposed gathering before the first
    forward, `reduce_s` exposed reduction after the last backward, `end_s` the end of the step.
    `allocated_bytes` are in tensors, `device_bytes` are all bytes on the device.

    All but `forward_s` have a leading axis over numbers of replicas, of length 1 in `backward_s`.
    `backward_s`, `reduce_s` and the bytes have another axis before it, one entry per value of RECOMPUTES.
    """

    forward_s: Any
    backward_s: Any
    gather_s: Any
    reduce_s: Any
    end_s: Any
    allocated_bytes: Any
    device_bytes: Any


@dataclass(frozen=True, slots=True)
class StageKinds:
    """Kinds of stages on one pool: `tp` ranks share each layer, `dp` replicas share the rows of a
    micro-batch.

    `grid` has their costs, `fabric` the tiers on which their replicas meet. `contended` has columns as if
    tensor ranks and replicas used the same cards.
    """

    problem: Problem
    tp: Any
    dp: Any
    grid: GridCost
    fabric: CollectiveModel
    blocks: Any
    contended: Any

    def among(self, problem: Problem) -> StageKinds:
        """The same kinds with another outermost tier, which no stage crosses."""
        return replace(self, problem=problem, fabric=collective_model_of(problem))


def stage_kinds_of(problem: Problem, kinds: Sequence[tuple[int, int]], micro_batch_size: int) -> StageKinds:
    """Costs of (tp, dp) stages of one pool, whose `problem` has the tiers on which replicas meet.

    `micro_batch_size` sequences make a micro-batch of the stage; each of its dp replicas gets an equal part.
    """
    layers = problem.model.layers
    rows = [
        complete(
            {"tp": tp, "dp": dp, "micro_batch_size": micro_batch_size // dp},
            devices=tp * dp,
            layers=layers,
            experts=None,
            global_batch_size=micro_batch_size,
        )
        for tp, dp in kinds
    ]
    table = StrategyTable.of(rows)
    grid = grid_cost(problem, table)
    return StageKinds(
        problem,
        table.tp,
        table.dp,
        grid,
        collective_model_of(problem),
        block_columns(grid),
        contended_columns(grid, Contention()),
    )


def hop_s(kinds: StageKinds, tier: int = -1, senders: Any = 0) -> Any:
    """Seconds of sending one micro-batch's hidden states to the next stage over a tier; one per kind.

    All ranks send their parts at once. `senders` adjacent devices below the tier send at once, at most all of
    them; 0 stands for all.
    """
    nbytes = kinds.grid.hop_bytes
    index = tier % len(kinds.problem.tiers)
    inside = kinds.problem.tiers[index - 1].span if index else 1
    return kinds.fabric.send_s(nbytes, np.full(np.shape(nbytes), index), np.minimum(senders, inside))


def stage_costs(kinds: StageKinds, shape: StageShape, slot: NodeSlot = NodeSlot()) -> StageCosts:
    """Costs of stages of these shapes on each kind; optimizer states are sharded over all replicas (ZeRO-1).

    Replicas of a stage fill the tiers from the innermost on, as far as the pipeline's other stages in the
    node leave devices. A stage with weights tied to those at the other end has a copy and joins their
    gradients.
    """
    return stage_costs_by_slot(kinds, shape, (slot,))[0]


def stage_costs_by_slot(kinds: StageKinds, shape: StageShape, slots: Sequence[NodeSlot]) -> list[StageCosts]:
    """The same for several node slots. Gathering, reduction and the end of the step differ; all else is
    equal.
    """
    profile = kinds.problem.profile
    sums, tied, weights, replicas = _stage_sums(kinds, shape)
    is_alone = shape.is_first * shape.is_last
    forward_s = sums.forward_s + profile.host_action_s
    backward_s = sums.input_s + sums.weight_s + profile.host_action_s
    backward_s = backward_s + np.array([0.0 * sums.full_s, sums.selective_s, sums.full_s])[:, None]
    allocated, device_bytes = stage_bytes(kinds, shape)
    gradients = cache(
        lambda stages_per_node: _gradients_s(kinds, shape, weights, forward_s, backward_s, stages_per_node)
    )
    update_s = _end_s(kinds, shape, weights / replicas)
    tied = tied * (shape.is_first + shape.is_last - 2 * is_alone)
    found = []
    for slot in slots:
        gather_s, reduce_s = gradients(slot.stages_per_node)
        found.append(
            StageCosts(
                forward_s=forward_s,
                backward_s=backward_s,
                gather_s=gather_s,
                reduce_s=reduce_s,
                end_s=update_s + _tied_s(kinds, tied, slot),
                allocated_bytes=allocated,
                device_bytes=device_bytes,
            )
        )
    return found


def stage_bytes(kinds: StageKinds, shape: StageShape) -> tuple[Any, Any]:
    """Bytes per device of stages: (in tensors, on the device), as in `StageCosts`.

    Of the costs only these depend on `in_flight`.
    """
    sums, _, weights, replicas = _stage_sums(kinds, shape)
    allocated = _allocated_bytes(kinds, shape, sums, weights, replicas)
    return allocated, _device_bytes(kinds, shape, allocated, replicas)


def _stage_sums(kinds: StageKinds, shape: StageShape) -> tuple[Sums, Any, Any, Any]:
    """(Sums over the layers of stages, elements of a tied embedding, weights, replicas of each)."""
    sums = Sums(*over_places(kinds.blocks, np.asarray(shape.layers)[None], shape.is_first, shape.is_last))
    tied = kinds.grid.embedding.dense_weights * (1.0 if kinds.problem.model.tied_embeddings else 0.0)
    weights = sums.dense_weights + tied * (shape.is_last - shape.is_first * shape.is_last)
    return sums, tied, weights, np.asarray(shape.replicas)[:, None, None] * kinds.dp


def _gradients_s(
    kinds: StageKinds, shape: StageShape, weights: Any, forward_s: Any, backward_s: Any, stages_per_node: int
) -> tuple[Any, Any]:
    """(Exposed gathering before the first forward, exposed reduction after the last backward)."""
    problem, recipe = kinds.problem, kinds.problem.recipe
    pipelines = np.asarray(shape.replicas)[:, None, None]
    sizes = _sizes(kinds, pipelines * kinds.dp, np.minimum(shape.groups, pipelines), stages_per_node)
    gathering_s = kinds.fabric.all_gather_s(weights * recipe.weight_bytes, sizes)
    reduction_s = kinds.fabric.reduce_scatter_s(weights * recipe.gradient_bytes, sizes)
    buckets, overlap = np.maximum(shape.layers, 1), problem.profile.state_overlap
    layers = np.asarray(shape.layers)[None]
    sent = Contended(*over_places(kinds.contended, layers, shape.is_first, shape.is_last))
    shares_cards = 1.0 * contends(problem.tiers, kinds.grid.groups.tensor, sizes)
    there_s = forward_s - shares_cards * sent.forward_s
    recompute_s = np.array([0.0 * sent.recompute_s, 0.0 * sent.recompute_s, sent.recompute_s])[:, None]
    back_s = backward_s - shares_cards * (sent.input_s + recompute_s)
    return (
        pipeline.gathering_before_forward_s(gathering_s, there_s, buckets, overlap),
        pipeline.reduction_after_backward_s(reduction_s, back_s, buckets, overlap),
    )


def _sizes(kinds: StageKinds, replicas: Any, groups: Any, stages_per_node: int) -> Sizes:
    """Replicas per tier, filled from the innermost, in at least `groups` groups on the outermost tier.

    Where replicas do not fill a tier evenly, the next tier counts whole groups. A group of a tier has
    `stages_per_node` stages of each pipeline, which leaves fewer devices for the replicas of each. The
    replicas of one stage are adjacent.
    """
    below: Any = np.ones_like(replicas)
    near = -(-replicas // groups)
    sizes = []
    tiers = kinds.problem.tiers
    for tier in tiers[:-1]:
        own = np.minimum(kinds.dp, tier.span // kinds.tp)
        capacity = np.maximum(np.maximum(tier.span // (kinds.tp * stages_per_node), own), below)
        inside = np.minimum(near, capacity)
        sizes.append(np.maximum(inside // below, 1))
        below = below * sizes[-1]
    return (*sizes, -(-replicas // below))


def _end_s(kinds: StageKinds, shape: StageShape, owned: Any) -> Any:
    """Norm and clipping, replicated weights, optimizer and host, after the gradients are reduced.

    The norm is an all-reduce over all devices of the problem's outermost tier.
    """
    problem, fabric = kinds.problem, kinds.fabric
    gradient_bytes = problem.recipe.gradient_bytes
    clipped_s = norm_s(problem, fabric, owned, problem.tiers[-1].span)
    replicated = kinds.grid.kinds[0].replicated_weights * shape.layers * gradient_bytes
    replicated_s = np.where(kinds.tp > 1, fabric.all_reduce_s(replicated, kinds.grid.groups.tensor), 0.0)
    return clipped_s + replicated_s + device_update_s(problem, owned) + problem.profile.host_step_s


def _tied_s(kinds: StageKinds, tied: Any, slot: NodeSlot) -> Any:
    """All-reduce of the gradients of weights that both first and last stage have.

    It uses the node's links where both are in one node. Else it uses the outermost tier, with all groups of
    the node sending at once.
    """
    index, within = _where_ends_meet(kinds.problem.tiers, slot)
    senders = kinds.tp * kinds.dp if slot.is_whole else np.array(slot.devices // slot.stages_per_node)
    nbytes = tied * kinds.problem.recipe.gradient_bytes / 2.0
    tier = np.full(np.shape(nbytes), index)
    return np.where(tied > 0, 2.0 * kinds.fabric.send_s(nbytes, tier, np.minimum(senders, within)), 0.0)


def _where_ends_meet(tiers: Sequence[Tier], slot: NodeSlot) -> tuple[int, int]:
    """(Tier on which first and last stage of a pipeline meet, devices of a group of the tier below it)."""
    meeting = len(tiers) - 1
    if slot.is_whole:
        meeting = max((tier for tier, one in enumerate(tiers) if one.span <= slot.devices), default=meeting)
    return meeting, tiers[meeting - 1].span if meeting else 1


def _allocated_bytes(kinds: StageKinds, shape: StageShape, sums: Sums, weights: Any, replicas: Any) -> Any:
    """Bytes in tensors on a device of the stage at the peak, for each value of RECOMPUTES."""
    problem, grid, recipe = kinds.problem, kinds.grid, kinds.problem.recipe
    state_bytes = own_bytes(problem, 1, replicas)
    weight_state_bytes = weights * (recipe.weight_bytes + recipe.gradient_bytes + state_bytes / replicas)
    one = np.array([sums.saved_bytes, sums.selective_bytes, sums.input_bytes])[:, None]
    layer = grid.kinds[0]
    recomputed = np.zeros((len(RECOMPUTES), *[1] * (one.ndim - 1)))
    recomputed[RECOMPUTES.index("full")] = 1.0
    activations = shape.in_flight * one + recomputed * (layer.saved_bytes - layer.input_bytes)
    temporaries = np.maximum(grid.temporaries.layer, shape.is_last * grid.temporaries.head)
    return (
        weight_state_bytes + activations + temporaries + _is_piped(shape) * BOUNDARY_BUFFERS * grid.hop_bytes
    )


def _device_bytes(kinds: StageKinds, shape: StageShape, allocated: Any, replicas: Any) -> Any:
    """The same plus allocator fragmentation, communicators and context."""
    efficiency = kinds.problem.efficiency
    opened = 1.0 + (kinds.tp > 1) + _is_piped(shape) + (replicas > 1)
    return (
        memory.reserved_bytes(allocated, efficiency.fragmentation_ratio)
        + opened * efficiency.communicator_bytes
        + efficiency.context_bytes
    )


def _is_piped(shape: StageShape) -> Any:
    """1 where the stage has neighbours, else 0."""
    return 1 - shape.is_first * shape.is_last
