"""Lower bounds of the nodes of the proof: memory of the tightest rank (docs/concepts/cost-model.md, section
14) and step time (section 13). They hold for every candidate below a node.

Memory: the bytes of a rank grow with its layers and fall with recomputed layers and sharding degrees. So the
bound takes the fewest layers, the most recomputed ones, and the largest degree for every open one.

Step time: the longest of some paths through the table, with the shortest possible stages. Every path is a
chain of actions that wait for each other. Per rank r, with w its work on one micro-batch:

- from the start of the step to the rank, m w, and from its last action to the end of the step;
- entered at its first backward: all stages forward, back to the rank, and its work without the warm-up
  forwards;
- left at its last forward, from which the last micro-batch still goes to the last stage and back;
- entered at the first backward and left at the last forward.

And the mean of the first of these over all ranks, which needs only the sum of all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise_verify.memory import (
    boundary_buffers,
    frees_gradients,
    host_bytes,
    own_bytes,
    reduced_bytes,
    reduces_in_single_backward,
    single_backward_parts,
    temporary_bytes,
)
from shardwise_verify.nodes import (
    EMBEDDING,
    FULL,
    HEAD,
    LayerBounds,
    PipelineContext,
    ProofNodes,
    layer_bounds_of,
)
from shardwise_verify.records import OFFLOADS, RECOMPUTES
from shardwise_verify.schedules import IN_FLIGHT, WAITING
from shardwise_verify.sharding import Shardings, gathering_s, reduced_and_gathered, reduction_s
from shardwise_verify.strategy_rows import Column
from shardwise_verify.times import copies_s, norm_s, optimizer_s

SELECTIVE = RECOMPUTES.index("selective")


def has_activation_offload(nodes: ProofNodes) -> Column:
    return (nodes.offload == OFFLOADS.index("activations")) | (nodes.offload == OFFLOADS.index("both"))


def has_optimizer_offload(nodes: ProofNodes) -> Column:
    return (nodes.offload == OFFLOADS.index("optimizer")) | (nodes.offload == OFFLOADS.index("both"))


def shardings_of_nodes(pipeline: PipelineContext, nodes: ProofNodes, *, is_paired: bool) -> Shardings:
    """Sharding degrees of weights; every open degree is the number of ranks."""
    most = pipeline.grid_costs.ranks[nodes.grid]
    param = pipeline.pairs.param[nodes.pair] if is_paired else most
    grad = pipeline.pairs.grad[nodes.pair] if is_paired else most
    optim = np.where(nodes.optim > 0, nodes.optim, most)
    return pipeline.grid_costs.shardings(nodes.grid, param, grad, optim)


def least_saved_bytes(
    pipeline: PipelineContext, layers: LayerBounds, nodes: ProofNodes, most: Column
) -> Column:
    """Lower bound of the activations that each stage saves of one micro-batch, where at most `most` layers
    are recomputed."""
    all_saved = pipeline.amount("saved_bytes", nodes)
    found = layers.summed(all_saved)
    if (nodes.recompute == SELECTIVE).any():
        selective = layers.summed(pipeline.amount("saved_selective_bytes", nodes))
        found = np.where(nodes.recompute == SELECTIVE, selective, found)
    if (nodes.recompute == FULL).any():
        share = np.minimum(most, layers.least) / np.maximum(layers.least, 1)
        inputs = layers.summed(np.minimum(all_saved, pipeline.amount("input_bytes", nodes)))
        full = (1 - share) * layers.summed(all_saved) + share * inputs
        found = np.where(nodes.recompute == FULL, full, found)
    return found


NEEDED = ("largest_bytes", "saved_bytes", "dense", "trained_dense", "logits_bytes")
"""Amounts of each block that the lower bound of memory needs."""


def memory_lower_bound(
    pipeline: PipelineContext, nodes: ProofNodes, most: Column, *, is_paired: bool
) -> tuple[Column, Column]:
    """Lower bounds of the bytes on the device and on the host of the tightest rank; at most `most` layers
    are recomputed."""
    figures, grid_costs = pipeline.figures, pipeline.grid_costs
    recipe = figures.recipe
    layers = layer_bounds_of(pipeline, nodes.box)
    shardings = shardings_of_nodes(pipeline, nodes, is_paired=is_paired)
    all_dense, all_expert = least_rank_elements(pipeline, layers, nodes)
    dense, expert = least_rank_elements(pipeline, layers, nodes, of="trained_")
    d, e = shardings.dense, shardings.expert
    # Parts that depend on several degrees at once count only where all of them are fixed.
    is_known = np.full(len(nodes), is_paired) & (nodes.optim > 0)
    least_own = recipe.master_bytes + figures.state_bytes
    states = sum(
        elements / f.optim * np.where(is_known, own_bytes(figures, f), least_own)
        for elements, f in ((dense, d), (expert, e))
    )
    # Where offload is open, nothing counts on the device, and nothing for certain on the host.
    is_open = nodes.offload < 0
    optimizer_offloaded = has_optimizer_offload(nodes)
    weights = (all_dense / d.param + all_expert / e.param) * recipe.weight_bytes
    single_backward = reduces_in_single_backward(figures, grid_costs.microbatches[nodes.grid], pipeline.pp)
    dense_grad, expert_grad = (
        np.where(single_backward & ((f.grad == 1) | ~is_known), np.maximum(f.grad, f.optim), f.grad)
        for f in (d, e)
    )
    is_gone = figures.profile.offloads_gradients & (optimizer_offloaded | is_open)
    gradients = (dense / dense_grad + expert / expert_grad) * recipe.gradient_bytes * ~is_gone
    of_ranks = weights + gradients + np.where(optimizer_offloaded | is_open, 0.0, states)
    all_saved = pipeline.amount("saved_bytes", nodes)[:EMBEDDING].max(axis=0)
    activations_offloaded = has_activation_offload(nodes)
    live = _LiveBytes(
        saved=least_saved_bytes(pipeline, layers, nodes, most),
        copied=_least_copied_bytes(pipeline, layers, nodes, most),
        waiting=layers.summed(pipeline.amount("waiting_bytes", nodes)),
        is_copied=activations_offloaded | is_open,
    )
    recomputed = _recomputed_of_layer(pipeline, nodes, all_saved)
    *kinds, embedding, head = [
        {name: pipeline.amount(name, nodes)[block] for name in NEEDED}
        for block in (*range(len(figures.model.kinds)), EMBEDDING, HEAD)
    ]
    is_early = is_known & ((d.grad > 1) | (single_backward & (d.optim > 1)))
    works = []
    for stage_head in (None, head):
        working = temporary_bytes(figures, kinds, stage_head)
        sent = np.maximum(reduced_bytes(figures, kinds, stage_head, single_backward) - working, 0)
        works.append(working + np.where(is_early, sent, 0) + np.zeros(len(nodes)))
    activations, offloaded = _least_activations(pipeline, nodes, live, works, head["logits_bytes"])
    allocated = (of_ranks + activations).max(axis=0) + recomputed
    if pipeline.pp == 1 and np.any(single_backward):
        is_transient = single_backward & frees_gradients(figures, d.optim) & ((d.param == 1) | ~is_known)
        transient = single_backward_parts(
            figures, [*kinds, embedding], head, is_shared=is_known & (d.optim > 1), saved=live.of_one_stage,
            recomputed=recomputed, parameters=weights[0], gradients=gradients[0], degree=d.optim,
            others=all_dense[0] - embedding["dense"],
        )  # fmt: skip
        persistent = of_ranks[0] - weights[0] - gradients[0]
        allocated = np.where(is_transient, persistent + sum(transient.values()), allocated)
    allocated = allocated + _shared_bytes(pipeline, shardings, nodes, is_paired=is_paired)
    device = _device_bytes(pipeline, nodes, allocated)
    offloaded_bytes = (dense / d.optim + expert / e.optim) * host_bytes(figures)
    host = np.where(optimizer_offloaded, offloaded_bytes, 0.0) + np.where(
        activations_offloaded, offloaded, 0.0
    )
    return device, host.max(axis=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LiveBytes:
    """Least bytes of one micro-batch on each stage, [stages, nodes]: saved, and what waits for weight
    gradients; and of each rank what is on its device while activations are copied to the host, as they may
    be where `is_copied`."""

    saved: Column
    waiting: Column
    copied: Column
    is_copied: Column

    @property
    def of_one_stage(self) -> Column:
        """What a single stage has of its one micro-batch."""
        here = np.minimum(self.saved[0], self.copied[0])
        return np.where(self.is_copied, here, self.saved[0])


def _least_activations(
    pipeline: PipelineContext, nodes: ProofNodes, live: _LiveBytes, works: Sequence[Column], logits: Column
) -> tuple[Column, Column]:
    """Lower bounds of each rank, [pp, nodes]: activations with the work of its largest operation, on the
    device; and activations on the host. `works` are those without and with the head."""
    is_open = nodes.offload < 0
    device = np.zeros((pipeline.pp, len(nodes)))
    host = np.zeros((pipeline.pp, len(nodes)))
    ranks_of_stages = pipeline.rank_of
    for few, of_ranks in pipeline.moments(nodes):
        for rank, counts in enumerate(of_ranks):
            own = np.flatnonzero(ranks_of_stages == rank)
            saved, waiting = live.saved[own][:, few], live.waiting[own][:, few]
            in_flight = counts[:, IN_FLIGHT] @ saved
            copied = live.copied[rank, few]
            if is_open[few].any():
                copied = np.where(is_open[few], np.minimum(in_flight, copied), copied)
            here = np.where(live.is_copied[few], copied, in_flight)
            heads = counts[:, IN_FLIGHT, -1] if own[-1] == pipeline.stages - 1 else 0 * counts[:, 0, 0]
            work = np.where(heads[:, None] > 0, works[1][few], works[0][few])
            losses = np.maximum(heads - 1, 0)[:, None] * logits[few]
            device[rank, few] = (here + counts[:, WAITING] @ waiting + work + losses).max(axis=0)
            host[rank, few] = in_flight.max(axis=0)
    return device, host


def _recomputed_of_layer(pipeline: PipelineContext, nodes: ProofNodes, all_saved: Column) -> Column:
    """Bytes of a layer's tensors that exist at once while it is recomputed; `all_saved` without it."""
    selective = pipeline.amount("selective_peak_bytes", nodes)[:EMBEDDING].max(axis=0)
    full = all_saved - pipeline.amount("input_bytes", nodes)[:EMBEDDING].max(axis=0)
    found: Column = np.where(nodes.recompute == SELECTIVE, selective, 0.0)
    return np.where(nodes.recompute == FULL, full, found)


def _device_bytes(pipeline: PipelineContext, nodes: ProofNodes, allocated: Column) -> Column:
    """Bytes on the device for these allocated bytes: with fragmentation, context and communicators."""
    efficiency, rows = pipeline.figures.efficiency, pipeline.grid_costs.rows
    axes = ("tp", "cp", "pp", "dp", "ep")
    communicators = 1 + sum((getattr(rows, axis)[nodes.grid] > 1).astype(np.int64) for axis in axes)
    device = allocated * (1 + efficiency.fragmentation_ratio) + efficiency.context_bytes
    found: Column = device + efficiency.communicator_bytes * communicators
    return found


def _least_copied_bytes(
    pipeline: PipelineContext, layers: LayerBounds, nodes: ProofNodes, most: Column
) -> Column:
    """Lower bound of the bytes on each rank's device, [pp, nodes], while activations are copied to the host:
    two layers of the largest kind, or all that a micro-batch saves on the rank."""
    amounts = {name: pipeline.amount(name, nodes) for name in ("saved_bytes", "input_bytes")}
    saved, inputs = (each[:EMBEDDING].max(axis=0) for each in amounts.values())
    number = pipeline.of_ranks(layers.least)
    fullest = np.array([layers.least[pipeline.rank_of == rank].max(axis=0) for rank in range(pipeline.pp)])
    all_saved = pipeline.of_ranks(layers.summed(amounts["saved_bytes"]))
    all_inputs = pipeline.of_ranks(layers.summed(np.minimum(*amounts.values())))
    share = np.minimum(most * pipeline.vpp, number) / np.maximum(number, 1)
    whole = np.where(nodes.recompute == FULL, (1 - share) * all_saved + share * all_inputs, all_saved)
    pair = 2 * saved
    if (nodes.recompute == SELECTIVE).any():
        selective = pipeline.amount("saved_selective_bytes", nodes)
        is_selective = nodes.recompute == SELECTIVE
        whole = np.where(is_selective, pipeline.of_ranks(layers.summed(selective)), whole)
        pair = np.where(is_selective, 2 * selective[:EMBEDDING].max(axis=0), pair)
    other = np.where(most < fullest, saved, inputs)
    return np.minimum(whole, np.where(nodes.recompute == FULL, inputs + other, pair))


def least_rank_elements(
    pipeline: PipelineContext, layers: LayerBounds, nodes: ProofNodes, *, of: str = ""
) -> tuple[Column, Column]:
    """Lower bounds of the dense and expert elements of each rank: [pp, node] each. `of` is `trained_` for
    those of trained weights."""
    dense = pipeline.amount(f"{of}dense", nodes)
    of_ranks = pipeline.of_ranks(layers.summed(dense))
    if pipeline.ends_apart:
        of_ranks[-1] += dense[EMBEDDING] * pipeline.figures.model.embedding_copies
    return of_ranks, pipeline.of_ranks(layers.summed(pipeline.amount(f"{of}expert", nodes)))


def _shared_bytes(
    pipeline: PipelineContext, shardings: Shardings, nodes: ProofNodes, *, is_paired: bool
) -> Column:
    """Bytes of gathered weights and buffers."""
    rows, recipe = pipeline.grid_costs.rows, pipeline.figures.recipe
    grid = nodes.grid
    tokens = rows.micro_batch_size[grid] * pipeline.figures.job.seq_len / rows.cp[grid]
    hidden = tokens / rows.tp[grid] * pipeline.figures.model.hidden * recipe.activation_bytes
    each = boundary_buffers(pipeline.figures, pipeline.grid_costs.microbatches[grid], rows.tp[grid])
    buffers = each * hidden * (pipeline.pp > 1)
    if not is_paired or pipeline.figures.profile.gathered_elements:
        return buffers
    gathered: Column = 0.0
    for name, degree in (("dense", shardings.dense.param), ("expert", shardings.expert.param)):
        most = pipeline.amount(name, nodes)[:EMBEDDING].max(axis=0)
        gathered = gathered + np.where(degree > 1, most, 0.0)
    return buffers + 2 * recipe.weight_bytes * gathered


@dataclass(frozen=True, slots=True, kw_only=True)
class _Actions:
    """Lower bounds of seconds: of the actions of each stage, [stage, node]; of the hops between them,
    [stages - 1, node]; and of all stages for one micro-batch, (nodes,)."""

    forward_s: Column
    input_s: Column
    weight_s: Column
    hops_s: Column
    model_s: Column


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    """Seconds before the first forward and after the last backward of stage 0, and after all actions."""

    gather_s: Column
    reduce_s: Column
    step_s: Column


def time_lower_bound(
    pipeline: PipelineContext, nodes: ProofNodes, *, is_paired: bool, is_sharded: bool
) -> Column:
    """Lower bound of the seconds per step: (nodes,). `is_paired` where all nodes have a shard pair,
    `is_sharded` where they also have an optim_shard."""
    layers = layer_bounds_of(pipeline, nodes.box)
    shardings = shardings_of_nodes(pipeline, nodes, is_paired=is_paired)
    actions = _actions(pipeline, layers, nodes, is_paired=is_paired)
    ends = _ends(pipeline, layers, nodes, shardings, is_paired=is_paired, is_sharded=is_sharded)
    return _longest_path_s(pipeline, actions, ends, nodes) + ends.step_s


def work_lower_bound(pipeline: PipelineContext) -> Column:
    """Lower bound of the seconds per step of each grid under any schedule, stage split or sharding: (grids,).

    All layers forward and backward for every micro-batch, shared evenly by the ranks.
    """
    grid_costs = pipeline.grid_costs
    of_blocks = sum(grid_costs.amounts[f"{phase}_s"] for phase in ("forward", "input", "weight"))
    model_s = pipeline.whole_model(of_blocks)
    seconds: Column = grid_costs.microbatches * model_s / pipeline.pp
    return seconds


def _actions(
    pipeline: PipelineContext, layers: LayerBounds, nodes: ProofNodes, *, is_paired: bool
) -> _Actions:
    host_s, share = pipeline.figures.profile.host_action_s, pipeline.figures.profile.pipeline_overlap
    sent_s = _sent_s(pipeline, nodes)
    waiting_s = (1 - share) * sent_s
    # The last stage sends no activations, the first no gradients.
    nothing = np.zeros((1, len(nodes)))
    on_s, back_s = np.concatenate([waiting_s, nothing]), np.concatenate([nothing, waiting_s])
    of_blocks = {
        phase: pipeline.with_traffic(phase, nodes, is_paired=is_paired)
        for phase in ("forward", "input", "weight")
    }
    recompute_s, all_recompute_s = _recompute_s(pipeline, layers, nodes)
    out_s, in_s, offload_transfer_s = _offload_s(pipeline, layers, nodes)
    forward_s = _summed_s(layers, of_blocks["forward"], "forward", nodes) + host_s + on_s + out_s
    input_s = _summed_s(layers, of_blocks["input"], "input", nodes) + host_s + back_s + recompute_s + in_s
    # In DualPipe-V some backwards are one action, which the host starts once.
    starts = 3 if pipeline.splits_backward and pipeline.schedule != "dualpipe_v" else 2
    weight_s = layers.summed(of_blocks["weight"]) + (starts - 2) * host_s
    model_s = sum(layers.total(seconds) for seconds in of_blocks.values())
    model_s = model_s + starts * host_s * pipeline.stages + 2 * waiting_s.sum(axis=0)
    model_s = model_s + all_recompute_s + offload_transfer_s
    return _Actions(
        forward_s=forward_s, input_s=input_s, weight_s=weight_s, hops_s=share * sent_s, model_s=model_s
    )


def _sent_s(pipeline: PipelineContext, nodes: ProofNodes) -> Column:
    """Seconds of a message from each stage to the next, [stages - 1, nodes]."""
    stage = np.arange(pipeline.stages - 1)
    # A V returns over the same hops; where it turns, both stages are on one rank and the message is free.
    hop = np.minimum(stage, 2 * pipeline.pp - 2 - stage) if pipeline.is_v else stage % pipeline.pp
    found = pipeline.grid_costs.hops_s[np.ix_(hop, nodes.grid)]
    if pipeline.is_v:
        found[pipeline.pp - 1] = 0.0
    return found


def _summed_s(layers: LayerBounds, of_blocks: Column, phase: str, nodes: ProofNodes) -> Column:
    """Lower bound of the seconds of a phase of each stage. With offloaded activations, computation and the
    remainder are bounded separately: less computation hides less of the copies, so a bound of their sum
    alone is not valid."""
    if len(layers.mixes) == 1 or not has_activation_offload(nodes).any():
        return layers.summed(of_blocks)
    alone = layers.pipeline.amount(f"{phase}_computation_s", nodes)
    return layers.summed(alone) + layers.summed(of_blocks - alone)


def _recompute_s(pipeline: PipelineContext, layers: LayerBounds, nodes: ProofNodes) -> tuple[Column, Column]:
    """Lower bounds of recomputation per micro-batch, in seconds: of each stage and of all."""
    recompute_s = np.zeros(layers.least.shape)
    all_recompute_s = np.zeros(len(nodes))
    if (nodes.recompute == SELECTIVE).any():
        seconds = pipeline.amount("selective_s", nodes)
        is_selective = nodes.recompute == SELECTIVE
        recompute_s = np.where(is_selective, layers.summed(seconds), recompute_s)
        all_recompute_s = np.where(is_selective, layers.total(seconds), all_recompute_s)
    if (nodes.recompute == FULL).any():
        seconds = pipeline.amount("repeated_s", nodes)
        number = np.minimum(nodes.box.layers_low, layers.least)
        cheapest = seconds[:EMBEDDING].min(axis=0)
        each = np.repeat(cheapest[None], pipeline.stages, axis=0)
        if len(seconds) > 3:
            # The mean counts only where the layers are fixed: one more cheap layer may lower it.
            mean = layers.of_layers(seconds) / np.maximum(layers.least, 1)
            each = np.where(nodes.box.is_point & (layers.least > 0), mean, each)
        is_full = nodes.recompute == FULL
        recompute_s = np.where(is_full, number * each, recompute_s)
        all_recompute_s = np.where(is_full, number.sum(axis=0) * cheapest, all_recompute_s)
    return recompute_s, all_recompute_s


def _offload_s(
    pipeline: PipelineContext, layers: LayerBounds, nodes: ProofNodes
) -> tuple[Column, Column, Column]:
    """Lower bounds of the exposed seconds of activation offload: out and in of each stage, and both of all
    stages together."""
    nothing = np.zeros(layers.least.shape)
    is_offloaded = has_activation_offload(nodes)
    if not is_offloaded.any():
        return nothing, nothing, np.zeros(len(nodes))
    figures, link = pipeline.figures, pipeline.figures.host_link_bytes_per_s
    saved_s = least_saved_bytes(pipeline, layers, nodes, nodes.box.layers_high) / link
    forward = pipeline.amount("forward_computation_s", nodes)
    backward = pipeline.amount("input_computation_s", nodes)
    # Computation plus its exposed copies increases in both.
    out_s = np.where(is_offloaded, figures.exposed_s(saved_s, layers.summed(forward), 1.0), 0.0)
    in_s = np.where(is_offloaded, figures.exposed_s(saved_s, layers.summed(backward), 1.0), 0.0)
    of_all_s = _all_saved_bytes(pipeline, layers, nodes) / link
    all_s = sum(_exposed_at_least_s(pipeline, of_all_s, layers.total(each)) for each in (forward, backward))
    return out_s, in_s, np.where(is_offloaded, all_s, 0.0)


def _exposed_at_least_s(
    pipeline: PipelineContext, offload_transfer_s: Column, computation_s: Column
) -> Column:
    """For sums over stages: at most the sum of the exposed times of the stages, because exposure is convex
    and homogeneous."""
    slowdown = pipeline.figures.efficiency.overlap_slowdown
    if slowdown > 2:
        return offload_transfer_s
    return np.maximum(
        (slowdown - 1) * offload_transfer_s, offload_transfer_s - (2 - slowdown) * computation_s
    )


def _all_saved_bytes(pipeline: PipelineContext, layers: LayerBounds, nodes: ProofNodes) -> Column:
    """Lower bound of the saved activations of one micro-batch on all stages together."""
    all_saved = pipeline.amount("saved_bytes", nodes)
    found = layers.total(all_saved)
    selective = layers.total(pipeline.amount("saved_selective_bytes", nodes))
    recompute_saving = np.maximum(all_saved - pipeline.amount("input_bytes", nodes), 0.0)[:EMBEDDING].max(
        axis=0
    )
    number = np.minimum(nodes.box.layers_high * pipeline.stages, pipeline.splits.layers)
    full = np.maximum(found - number * recompute_saving, 0.0)
    found = np.where(nodes.recompute == SELECTIVE, selective, found)
    return np.where(nodes.recompute == FULL, full, found)


def _longest_path_s(pipeline: PipelineContext, actions: _Actions, ends: _Ends, nodes: ProofNodes) -> Column:
    """The longest of the paths, from the start of the step to the end of stage 0's gradient reduction."""
    pp, whole = pipeline.pp, not pipeline.splits_backward
    m = pipeline.grid_costs.microbatches[nodes.grid]
    forward_s, weight_s = actions.forward_s, actions.weight_s
    back_s = actions.input_s + weight_s if whole else actions.input_s
    both_s = actions.input_s + weight_s
    zero = np.zeros((1, len(nodes)))
    hop_ups = np.concatenate([zero, actions.hops_s])
    # Per stage: from the start to its forward; from its backward to the end of stage 0's backward; from its
    # forward to the end of the last stage's forward; and from there back to the start of its own backward.
    up_s = np.cumsum(np.concatenate([zero, forward_s[:-1]]) + hop_ups, axis=0)
    down_s = np.cumsum(np.concatenate([zero, back_s[:-1]]) + hop_ups, axis=0)
    there_s = up_s[-1] + forward_s[-1] - up_s - forward_s
    back_to_s = down_s[-1] + back_s[-1] - down_s - back_s
    all_up_s, all_down_s = up_s[-1] + forward_s[-1], down_s[-1] + back_s[-1]
    work_s = m * pipeline.of_ranks(forward_s + both_s)
    at = np.arange(len(nodes))
    before_s = pipeline.of_ranks(pipeline.ramp("warmup_forwards", nodes) * forward_s)
    after_s = pipeline.of_ranks(
        pipeline.ramp("cooldown_backwards", nodes) * both_s
        + pipeline.ramp("cooldown_inputs", nodes) * actions.input_s
        + pipeline.ramp("cooldown_weights", nodes) * weight_s
    )
    enter_s = up_s[:pp] + ends.gather_s
    from_first_backward_s = (
        all_up_s + back_to_s[pipeline.ramp("first_backward_stage", nodes), at] - before_s + ends.gather_s
    )
    leave_s = down_s[:pp] + ends.reduce_s if whole else np.zeros((pp, len(nodes)))
    if not whole:
        leave_s[0] += ends.reduce_s
    last_s = ends.reduce_s if whole else weight_s[0] + ends.reduce_s
    to_last_forward_s = (
        there_s[pipeline.ramp("last_forward_stage", nodes), at] + all_down_s + last_s - after_s
    )
    both_ends_s = np.where(
        pipeline.ramp("has_steady_state", nodes), from_first_backward_s + to_last_forward_s, 0.0
    )
    of_ranks = np.maximum(np.maximum(enter_s, from_first_backward_s) + leave_s, enter_s + to_last_forward_s)
    found = (work_s + np.maximum(of_ranks, both_ends_s)).max(axis=0)
    mean = m * actions.model_s / pp + (enter_s + leave_s).mean(axis=0)
    longest: Column = np.maximum(found, mean)
    return longest


def _ends(
    pipeline: PipelineContext,
    layers: LayerBounds,
    nodes: ProofNodes,
    shardings: Shardings,
    *,
    is_paired: bool,
    is_sharded: bool,
) -> _Ends:
    figures, grid_costs = pipeline.figures, pipeline.grid_costs
    dense, expert = least_rank_elements(pipeline, layers, nodes, of="trained_")
    d, e = shardings.dense, shardings.expert
    of_blocks = pipeline.amount("trained_dense", nodes)
    all_dense = layers.total(of_blocks)
    if pipeline.ends_apart:
        all_dense = all_dense + of_blocks[EMBEDDING] * figures.model.embedding_copies
    all_expert = layers.total(pipeline.amount("trained_expert", nodes))
    mean = (all_dense / d.optim + all_expert / e.optim) / pipeline.pp
    owned = np.maximum((dense / d.optim + expert / e.optim).max(axis=0), mean)
    optimizer_offloaded = has_optimizer_offload(nodes)
    here_s, there_s = (optimizer_s(figures, np.full(len(nodes), flag), owned) for flag in (False, True))
    update_lower_bound_s = np.where(
        nodes.offload < 0, np.minimum(here_s, there_s), np.where(optimizer_offloaded, there_s, here_s)
    )
    ranks = figures.cluster.devices
    step_s = (
        norm_s(figures, pipeline.fabric, ranks, owned)
        + update_lower_bound_s
        + copies_s(
            figures,
            grid_costs.microbatches[nodes.grid],
            owned,
            (dense + expert).max(axis=0),
            is_unsharded=(d.optim == 1) & (e.optim == 1),
        )
        + grid_costs.tied_s[pipeline.ends_apart][nodes.grid]
        + figures.profile.host_step_s
    )
    zero = np.zeros(len(nodes))
    if not is_sharded:
        return _Ends(gather_s=zero, reduce_s=zero, step_s=step_s)
    forward_s, last_s = _first_stage_upper_bound_s(pipeline, layers, nodes, is_paired=is_paired)
    if grid_costs.has_whole_stages:
        last_s = zero
    buckets = np.maximum(layers.most_first, 1)
    names = ("dense", "expert", "dense_blocks", "expert_blocks")
    trained_names = ("trained_dense", "trained_expert", "trained_blocks")
    of_first = {name: layers.summed(pipeline.amount(name, nodes))[0] for name in (*names, *trained_names)}
    if figures.model.tied_embeddings and pipeline.pp == 1:  # both ends share one table, counted in one block
        of_first["dense_blocks"] = of_first["dense_blocks"] - 1
        are_trained = [
            any(one.trained and one.weights for one in block)
            for block in (figures.model.embedding, figures.model.head)
        ]
        of_first["trained_blocks"] = of_first["trained_blocks"] - all(are_trained)
    # Fewer elements in fewer collectives never take longer.
    reduced, gathered = reduced_and_gathered(
        figures, *(tuple(of_first[name] for name in each) for each in (names, trained_names))
    )
    reduction = reduction_s(figures, pipeline.fabric, shardings, reduced)
    gathering = gathering_s(figures, pipeline.fabric, shardings, gathered)
    profile = figures.profile
    overlap = np.where(d.optim == 1, profile.data_overlap, profile.state_overlap)
    return _Ends(
        gather_s=_added_s(gathering, overlap, forward_s, buckets),
        reduce_s=_added_s(reduction, overlap, last_s, buckets),
        step_s=step_s,
    )


def _added_s(seconds: Column, overlap: Column, action_s: Column, buckets: Column) -> Column:
    """Lower bound of the seconds that an all-gather or reduction adds to an action of at most this length."""
    hidden_s = np.minimum(overlap * seconds, action_s)
    return seconds - hidden_s + hidden_s / buckets


def _first_stage_upper_bound_s(
    pipeline: PipelineContext, layers: LayerBounds, nodes: ProofNodes, *, is_paired: bool
) -> tuple[Column, Column]:
    """Upper bounds of the two actions of stage 0 that hide communication: its forward (parameter
    all-gather) and its last action (gradient reduction). Collectives that contend for the same cards are
    left out."""
    figures = pipeline.figures
    host_s = figures.profile.host_action_s
    box, most = nodes.box, layers.most_first
    of_blocks = {
        phase: pipeline.with_traffic(phase, nodes, is_paired=is_paired)
        for phase in ("forward", "input", "weight")
    }
    for phase in ("forward", "input"):
        of_blocks[phase] = of_blocks[phase] - pipeline.amount(f"{phase}_contended_s", nodes)
    forward_s, input_s, weight_s = (layers.first_stage_upper_bound(each) for each in of_blocks.values())
    if pipeline.splits_backward:
        input_s = 0.0 * input_s
    repeated = pipeline.amount("repeated_s", nodes) - pipeline.amount("repeated_contended_s", nodes)
    mean = (layers.first_stage_upper_bound(repeated) - repeated[EMBEDDING]) / np.maximum(most, 1)
    each = np.where(box.first_low == box.first_high, mean, repeated[:EMBEDDING].max(axis=0))
    full = np.minimum(box.layers_high, most) * each
    selective = layers.first_stage_upper_bound(pipeline.amount("selective_s", nodes))
    recompute_s = np.where(nodes.recompute == FULL, full, 0.0)
    recompute_s = np.where(nodes.recompute == SELECTIVE, selective, recompute_s)
    saved = layers.first_stage_upper_bound(pipeline.amount("saved_bytes", nodes))
    inputs = layers.first_stage_upper_bound(pipeline.amount("input_bytes", nodes))
    share = np.minimum(box.layers_low, most) / np.maximum(most, 1)
    selected = layers.first_stage_upper_bound(pipeline.amount("saved_selective_bytes", nodes))
    saved = np.where(nodes.recompute == FULL, saved - share * (saved - inputs), saved)
    saved = np.where(nodes.recompute == SELECTIVE, selected, saved)
    offload_transfer_s = np.where(has_activation_offload(nodes), saved, 0.0) / figures.host_link_bytes_per_s
    out_s, in_s = (
        figures.exposed_s(
            offload_transfer_s,
            layers.first_stage_upper_bound(pipeline.amount(f"{phase}_computation_s", nodes)),
            1.0,
        )
        for phase in ("forward", "input")
    )
    share = figures.profile.pipeline_overlap
    sent_s = _sent_s(pipeline, nodes)[:1].sum(axis=0)
    forward_s = forward_s + host_s + (1 - share) * sent_s + out_s
    if pipeline.splits_backward:
        return forward_s, weight_s
    return forward_s, input_s + host_s + recompute_s + in_s + weight_s
