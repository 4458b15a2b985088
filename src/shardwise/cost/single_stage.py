"""What one stage costs by itself: so many layers on devices of one kind, wherever the other stages lie.

A uniform strategy is priced as a whole (`price.py`); an uneven plan is made of stages that differ. Both use
the same prices of layers, fabrics and memory, so that a stage of a uniform strategy costs the same here.
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
from shardwise.cost.sharding import device_update_s, own_bytes
from shardwise.cost.stages import Contended, Sums, block_columns, contended_columns, over_places
from shardwise.equations import memory, pipeline
from shardwise.strategy import RECOMPUTES, StrategyTable, complete


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """Columns that say which stages are priced; they broadcast against kinds of devices (the last axis).

    `layers` decoder layers; `held` microbatches in flight, which is the stage's place counted from the last
    (1); `is_first` and `is_last` (0 or 1) say which ends of the model it holds. `replicas` says how many
    pipelines there are, one or more such numbers; in at least `groups` groups, or as many as there are of
    them, that meet on the outermost tier.
    """

    layers: Any
    in_flight: Any
    is_first: Any
    is_last: Any
    replicas: Sequence[int]
    groups: int = 1


@dataclass(frozen=True, slots=True)
class NodeSlot:
    """Where a stage lies among those of its pipeline: `stages_per_node` with so many, itself included, in one
    node, which has so many `devices` (0: what leaves it shares its cards with all others). `is_whole` where
    these are all stages of the pipeline."""

    stages_per_node: int = 1
    devices: int = 0
    is_whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Of every shape on every kind: seconds of a forward and of a backward, of gathering before the first
    forward and reducing after the last backward, of the end of the step; bytes per device, in tensors and
    in all.

    All but `forward_s` have a leading axis of the numbers of replicas, which in `backward_s` is of one entry;
    and `backward_s`, `reduce_s` and the bytes one more before it, one entry per value of RECOMPUTES.
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
    """Kinds of stages on one pool of devices: `tp` ranks that share each layer, `dp` replicas that share the
    rows of a microbatch. `grid` has their prices, `fabric` the tiers on which their replicas meet;
    `contended` is as if tensor ranks and replicas left by the same cards."""

    problem: Problem
    tp: Any
    dp: Any
    grid: GridCost
    fabric: CollectiveModel
    blocks: Any
    contended: Any

    def among(self, problem: Problem) -> StageKinds:
        """The same kinds with another outermost tier, over which no stage reaches."""
        return replace(self, problem=problem, fabric=collective_model_of(problem))


def stage_kinds_of(problem: Problem, kinds: Sequence[tuple[int, int]], micro_batch_size: int) -> StageKinds:
    """The prices of (tp, dp) stages of one pool, whose `problem` has the tiers on which replicas meet.

    `micro_batch_size` sequences make a microbatch of the stage; each of its dp replicas takes an equal part.
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
    """Seconds to hand one microbatch's hidden states to the next stage over a tier, all ranks sending their
    parts at once; one per kind.

    Of what the tier joins so many devices next to each other send at once, at most all of them; 0 for all.
    """
    nbytes = kinds.grid.hop_bytes
    index = tier % len(kinds.problem.tiers)
    inside = kinds.problem.tiers[index - 1].span if index else 1
    return kinds.fabric.send_s(nbytes, np.full(np.shape(nbytes), index), np.minimum(senders, inside))


def stage_costs(kinds: StageKinds, shape: StageShape, slot: NodeSlot = NodeSlot()) -> StageCosts:
    """What stages of these shapes cost on each kind; optimizer states are split over all replicas (ZeRO-1).

    Replicas of a stage fill the tiers from the innermost on, as far as the pipeline's other stages in the
    node leave room. A stage whose weights are tied to those at the other end holds a copy and joins the
    gradients.
    """
    return stage_costs_by_slot(kinds, shape, (slot,))[0]


def stage_costs_by_slot(kinds: StageKinds, shape: StageShape, slots: Sequence[NodeSlot]) -> list[StageCosts]:
    """The same for stages that lie otherwise among those of their pipelines, by seat: gathering, reducing and
    the end of the step differ, all else is the same."""
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
    """Bytes per device of stages, in tensors and in all, as in `StageCosts`: they alone depend on how many
    microbatches are `held`."""
    sums, _, weights, replicas = _stage_sums(kinds, shape)
    allocated = _allocated_bytes(kinds, shape, sums, weights, replicas)
    return allocated, _device_bytes(kinds, shape, allocated, replicas)


def _stage_sums(kinds: StageKinds, shape: StageShape) -> tuple[Sums, Any, Any, Any]:
    """Sums over the layers of stages; weights of the embedding that stages at both ends of the model have;
    weights in all; and replicas of each."""
    sums = Sums(*over_places(kinds.blocks, np.asarray(shape.layers)[None], shape.is_first, shape.is_last))
    tied = kinds.grid.embedding.dense_weights * (1.0 if kinds.problem.model.tied_embeddings else 0.0)
    weights = sums.dense_weights + tied * (shape.is_last - shape.is_first * shape.is_last)
    return sums, tied, weights, np.asarray(shape.replicas)[:, None, None] * kinds.dp


def _gradients_s(
    kinds: StageKinds, shape: StageShape, weights: Any, forward_s: Any, backward_s: Any, stages_per_node: int
) -> tuple[Any, Any]:
    """Gathering before the first forward and reducing after the last backward, where so many stages of a
    pipeline lie together in a node."""
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
    """Replicas per tier, filled from the innermost, in at least so many groups on the outermost; where they
    do not fill a tier evenly, the next one counts whole groups. What a tier joins holds so many stages of
    each pipeline `stages_per_node`, so that there is less room for replicas of each; those of one stage are
    next to each other."""
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

    The norm joins all devices of the problem's outermost tier.
    """
    problem, fabric = kinds.problem, kinds.fabric
    gradient_bytes = problem.recipe.gradient_bytes
    bandwidth = problem.memory_bytes_per_s * problem.efficiency.memory.fraction
    join_s = 2.0 * np.log2(problem.tiers[-1].span) * fabric.alphas_s[-1]
    norm_s = 3.0 * owned * gradient_bytes / bandwidth + join_s
    replicated = kinds.grid.kinds[0].replicated_weights * shape.layers * gradient_bytes
    replicated_s = np.where(kinds.tp > 1, fabric.all_reduce_s(replicated, kinds.grid.groups.tensor), 0.0)
    return norm_s + replicated_s + device_update_s(problem, owned) + problem.profile.host_step_s


def _tied_s(kinds: StageKinds, tied: Any, slot: NodeSlot) -> Any:
    """Adding up the gradients of weights that first and last stage both have: over the node's links where
    both lie in one, else over the outermost tier, all groups of the node sending at once."""
    index, within = _where_ends_meet(kinds.problem.tiers, slot)
    senders = kinds.tp * kinds.dp if slot.is_whole else np.array(slot.devices // slot.stages_per_node)
    nbytes = tied * kinds.problem.recipe.gradient_bytes / 2.0
    tier = np.full(np.shape(nbytes), index)
    return np.where(tied > 0, 2.0 * kinds.fabric.send_s(nbytes, tier, np.minimum(senders, within)), 0.0)


def _where_ends_meet(tiers: Sequence[Tier], slot: NodeSlot) -> tuple[int, int]:
    """The tier on which first and last stage of a pipeline meet, and the devices of a group of the tier
    below it."""
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
    """The same with what the allocator, the communicators and the context take."""
    efficiency = kinds.problem.efficiency
    opened = 1.0 + (kinds.tp > 1) + _is_piped(shape) + (replicas > 1)
    return (
        memory.reserved_bytes(allocated, efficiency.fragmentation_ratio)
        + opened * efficiency.communicator_bytes
        + efficiency.context_bytes
    )


def _is_piped(shape: StageShape) -> Any:
    """Whether the stage has neighbours (0 or 1)."""
    return 1 - shape.is_first * shape.is_last
