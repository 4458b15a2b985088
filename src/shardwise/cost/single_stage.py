"""Costs of single stages: given layers on devices of one kind, whatever the other stages are.

`stage_kinds_of` estimates the kinds of stages of one pool, `stage_costs` the stages of uneven plans. A
uniform strategy is estimated as a whole (`cost.estimate`). Both use the same costs of layers and collectives
and the same formulas (`cost.stage_formulas`), so that a stage of a uniform strategy costs the same here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from shardwise.cluster import Tier
from shardwise.cost.collectives import CollectiveModel, Sizes, collective_model_of, contends
from shardwise.cost.layers import (
    Contention,
    GridCost,
    grid_cost,
    has_partial_gradients,
    replicated_s,
    tied_ends_s,
)
from shardwise.cost.problem import Problem
from shardwise.cost.sharding import device_update_s, frozen_bytes, norm_s, own_bytes
from shardwise.cost.stage_formulas import (
    Phases,
    StageEnds,
    allocated_bytes,
    boundary_buffers,
    boundary_bytes,
    communicators,
    device_bytes,
    peak_activation_bytes,
    phases_of,
    recompute_s,
    saved_bytes,
)
from shardwise.cost.stages import Contended, Sums, block_columns, contended_columns, over_places
from shardwise.cost.times import StepEnd
from shardwise.equations import memory
from shardwise.strategy import RECOMPUTES, StrategyTable, complete

IS_SELECTIVE = np.array([way == "selective" for way in RECOMPUTES])[:, None, None, None]
"""For each value of RECOMPUTES, whether it is selective; a leading axis of the costs."""

FULL_SHARE = np.array([1.0 * (way == "full") for way in RECOMPUTES])[:, None, None, None]
"""For each value of RECOMPUTES, the share of a stage's layers that are recomputed in full."""


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
    """Seconds of every shape on every kind of stage.

    `forward_s` and `backward_s` are per micro-batch. `gather_s` is exposed gathering before the first
    forward, `reduce_s` exposed reduction after the last backward, `end_s` the end of the step.

    All but `forward_s` have a leading axis over numbers of replicas, of length 1 in `backward_s`.
    `backward_s` and `reduce_s` have another axis before it, one entry per value of RECOMPUTES.
    """

    forward_s: Any
    backward_s: Any
    gather_s: Any
    reduce_s: Any
    end_s: Any


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes per device of every shape on every kind of stage: in tensors, and all bytes on the device.

    Both have two leading axes: one entry per value of RECOMPUTES, then numbers of replicas.
    """

    allocated: Any
    device: Any


@dataclass(frozen=True, slots=True)
class StageKinds:
    """Kinds of stages on one pool: `tp` ranks share each layer, `dp` replicas share the rows of a
    micro-batch.

    `micro_batch_size` sequences make a micro-batch. `grid` has their costs, `fabric` the tiers on which their
    replicas meet. `contended` has columns as if tensor ranks and replicas used the same cards.
    """

    problem: Problem
    tp: Any
    dp: Any
    grid: GridCost
    fabric: CollectiveModel
    blocks: Any
    contended: Any
    micro_batch_size: int

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
        micro_batch_size,
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
    trained = weights.trained
    again_s = recompute_s(sums, IS_SELECTIVE, FULL_SHARE)
    phases = phases_of(sums, profile.host_action_s, again_s)
    gradients = cache(lambda stages_per_node: _gradients_s(kinds, shape, trained, phases, stages_per_node))
    end = _step_end(kinds, shape, trained / replicas)
    is_alone = shape.is_first * shape.is_last
    tied = tied * (shape.is_first + shape.is_last - 2 * is_alone)
    found = []
    for slot in slots:
        gather_s, reduce_s = gradients(slot.stages_per_node)
        found.append(
            StageCosts(
                forward_s=phases.forward_s,
                backward_s=phases.backward_s,
                gather_s=gather_s,
                reduce_s=reduce_s,
                end_s=end.total_s + _tied_s(kinds, tied, slot),
            )
        )
    return found


def stage_end(kinds: StageKinds, shape: StageShape, slot: NodeSlot = NodeSlot()) -> StepEnd:
    """The parts of `end_s` of these stages, with the axes of `StageCosts.end_s`."""
    _, tied, weights, replicas = _stage_sums(kinds, shape)
    end = _step_end(kinds, shape, weights.trained / replicas)
    has_other_end = shape.is_first + shape.is_last - 2 * shape.is_first * shape.is_last
    return replace(end, tied_s=end.tied_s + _tied_s(kinds, tied * has_other_end, slot))


def stage_bytes(kinds: StageKinds, shape: StageShape) -> StageBytes:
    """Bytes per device of stages of these shapes; of all costs only these depend on `in_flight`."""
    problem, grid, recipe = kinds.problem, kinds.grid, kinds.problem.recipe
    sums, _, weights, replicas = _stage_sums(kinds, shape)
    is_piped, layer = 1 - shape.is_first * shape.is_last, grid.kinds[0]
    # Of a pipeline with an equal share of the batch.
    batch = problem.job.global_batch_size / kinds.micro_batch_size
    microbatches = np.ceil(batch / np.asarray(shape.replicas))[:, None, None]
    allocated = allocated_bytes(
        parameters=memory.sharded_bytes(weights.all, recipe.weight_bytes, 1) + sums.copied_bytes,
        gradients=memory.sharded_bytes(weights.trained, recipe.gradient_bytes, 1),
        optimizer=memory.sharded_bytes(weights.trained, own_bytes(problem, 1, replicas), replicas)
        + memory.sharded_bytes(weights.frozen, frozen_bytes(problem, 1, replicas), replicas),
        gathered=0.0,
        activations=peak_activation_bytes(
            shape.in_flight * saved_bytes(sums, IS_SELECTIVE, FULL_SHARE),
            FULL_SHARE * (layer.saved_bytes - layer.input_bytes),
        ),
        temporaries=grid.temporaries.on_stages(shape.is_last)[0],
        buffers=boundary_bytes(
            is_piped, grid.hop_bytes, boundary_buffers(problem.profile, microbatches, kinds.tp)
        ),
    )
    opened = communicators(kinds.tp, 1 + is_piped, replicas)
    return StageBytes(allocated, device_bytes(problem.efficiency, allocated, opened))


@dataclass(frozen=True, slots=True)
class _StageWeights:
    """Elements of the weights of stages: all of them, and those that are not frozen."""

    all: Any
    trained: Any

    @property
    def frozen(self) -> Any:
        return self.all - self.trained


def _stage_sums(kinds: StageKinds, shape: StageShape) -> tuple[Sums, Any, _StageWeights, Any]:
    """(Sums over the layers of stages, trained elements of a tied embedding, weights, replicas of each)."""
    sums = Sums(*over_places(kinds.blocks, np.asarray(shape.layers)[None], shape.is_first, shape.is_last))
    copies, embedding = kinds.problem.model.embedding_copies, kinds.grid.embedding
    is_apart = shape.is_last - shape.is_first * shape.is_last
    tied, trained = (
        weights * min(copies, 1) for weights in (embedding.dense_weights, embedding.trained_dense)
    )
    weights = _StageWeights(
        sums.dense_weights + copies * tied * is_apart, sums.trained_dense + copies * trained * is_apart
    )
    return sums, trained, weights, np.asarray(shape.replicas)[:, None, None] * kinds.dp


def _gradients_s(
    kinds: StageKinds, shape: StageShape, weights: Any, phases: Phases, stages_per_node: int
) -> tuple[Any, Any]:
    """(Exposed gathering before the first forward, exposed reduction after the last backward) of trained
    `weights`."""
    problem, recipe = kinds.problem, kinds.problem.recipe
    pipelines = np.asarray(shape.replicas)[:, None, None]
    sizes = _sizes(kinds, pipelines * kinds.dp, np.minimum(shape.groups, pipelines), stages_per_node)
    layers = np.asarray(shape.layers)[None]
    contended = Contended(*over_places(kinds.contended, layers, shape.is_first, shape.is_last))
    shares_links = 1.0 * contends(problem.tiers, kinds.grid.groups.tensor, sizes)
    ends = StageEnds(
        np.where(weights > 0, kinds.fabric.all_gather_s(weights * recipe.weight_bytes, sizes), 0.0),
        np.where(weights > 0, kinds.fabric.reduce_scatter_s(weights * recipe.reduced_bytes, sizes), 0.0),
        phases.forward_s - shares_links * contended.forward_s,
        phases.backward_s - shares_links * contended.backward_s(FULL_SHARE),
        shape.layers,
        problem.profile.state_overlap,
    )
    return ends.exposed_s


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


def _step_end(kinds: StageKinds, shape: StageShape, owned: Any) -> StepEnd:
    """The end of the step except for tied embeddings, after the gradients are reduced.

    The norm is an all-reduce over all devices of the problem's outermost tier.
    """
    problem, fabric = kinds.problem, kinds.fabric
    replicated = kinds.grid.kinds[0].replicated_weights * shape.layers
    return StepEnd(
        norm_s=norm_s(problem, fabric, owned, problem.tiers[-1].span),
        tied_s=replicated_s(
            problem,
            fabric,
            replicated,
            kinds.grid.groups.tensor,
            has_partial_gradients(problem, kinds.tp > 1),
        ),
        optimizer_s=device_update_s(problem, owned),
        host_s=problem.profile.host_step_s,
    )


def _tied_s(kinds: StageKinds, tied: Any, slot: NodeSlot) -> Any:
    """All-reduce of the gradients of weights that both first and last stage have.

    It uses the node's links where both are in one node. Else it uses the outermost tier, with all groups of
    the node sending at once.
    """
    index, within = _where_ends_meet(kinds.problem.tiers, slot)
    senders = kinds.tp * kinds.dp if slot.is_whole else np.array(slot.devices // slot.stages_per_node)
    tier = np.full(np.shape(tied), index)
    both_s = tied_ends_s(kinds.problem, kinds.fabric, tied, tier, np.minimum(senders, within))
    return np.where(tied > 0, both_s, 0.0)


def _where_ends_meet(tiers: Sequence[Tier], slot: NodeSlot) -> tuple[int, int]:
    """(Tier on which first and last stage of a pipeline meet, devices of a group of the tier below it)."""
    meeting = len(tiers) - 1
    if slot.is_whole:
        meeting = max((tier for tier, one in enumerate(tiers) if one.span <= slot.devices), default=meeting)
    return meeting, tiers[meeting - 1].span if meeting else 1
