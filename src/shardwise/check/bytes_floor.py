"""The least bytes of the tightest rank of every candidate of a cell (docs/concepts/cost-model.md, section
14).

What a rank holds grows with its layers and falls with the layers recomputed and with the degrees of sharding;
so the fewest layers, the most recomputed, and for what is open the largest degrees, hold the least.
"""

from __future__ import annotations

import numpy as np

from shardwise.check.cells import EMBEDDING, HEAD, LayerBounds, PipelineContext, ProofNodes, layer_bounds_of
from shardwise.check.memory import (
    boundary_buffers,
    frees_gradients,
    host_bytes,
    own_bytes,
    reduced_bytes,
    reduces_in_single_backward,
    single_backward_parts,
    temporary_bytes,
)
from shardwise.check.rows import Column
from shardwise.check.sharding import Shardings
from shardwise.check.splits import FULL
from shardwise.strategy import OFFLOADS, RECOMPUTES

SELECTIVE = RECOMPUTES.index("selective")


def has_activation_offload(nodes: ProofNodes) -> Column:
    return (nodes.offload == OFFLOADS.index("activations")) | (nodes.offload == OFFLOADS.index("both"))


def has_optimizer_offload(nodes: ProofNodes) -> Column:
    return (nodes.offload == OFFLOADS.index("optimizer")) | (nodes.offload == OFFLOADS.index("both"))


def shardings_of_nodes(pipeline: PipelineContext, nodes: ProofNodes, *, is_paired: bool) -> Shardings:
    """How weights are sharded; what is open over all ranks."""
    most = pipeline.grid_costs.ranks[nodes.grid]
    param = pipeline.pairs.param[nodes.pair] if is_paired else most
    grad = pipeline.pairs.grad[nodes.pair] if is_paired else most
    optim = np.where(nodes.optim > 0, nodes.optim, most)
    return pipeline.grid_costs.shardings(nodes.grid, param, grad, optim)


def least_saved_bytes(
    pipeline: PipelineContext, layers: LayerBounds, nodes: ProofNodes, most: Column
) -> Column:
    """What each stage keeps of one microbatch at least, where at most `most` layers are recomputed."""
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


def least_recomputed_bytes(
    pipeline: PipelineContext, layers: LayerBounds, nodes: ProofNodes, most: Column
) -> Column:
    """What each stage makes again of one microbatch, where at most `most` layers are recomputed: with so much
    beside what is stored at least, no stage has less.

    With k kept, s stored, p in flight, w <= p waiting: p s + w (k - s) = (p - w) s + w k, which is least
    where both s and k are; and falls with the layers recomputed, as s does.
    """
    whole = layers.of_layers(pipeline.amount("saved_bytes", nodes))
    found = np.zeros_like(whole)
    if (nodes.recompute == SELECTIVE).any():
        selective = layers.of_layers(pipeline.amount("saved_selective_bytes", nodes))
        found = np.where(nodes.recompute == SELECTIVE, whole - selective, found)
    if (nodes.recompute == FULL).any():
        all_saved, inputs = pipeline.amount("saved_bytes", nodes), pipeline.amount("input_bytes", nodes)
        share = np.minimum(most, layers.least) / np.maximum(layers.least, 1)
        full = share * (whole - layers.of_layers(np.minimum(all_saved, inputs)))
        found = np.where(nodes.recompute == FULL, full, found)
    return found


NEEDED = ("largest_bytes", "saved_bytes", "dense", "logits_bytes")
"""Amounts of each block on which the least memory depends."""


def memory_lower_bound(
    pipeline: PipelineContext, nodes: ProofNodes, most: Column, *, is_paired: bool
) -> tuple[Column, Column]:
    """Bytes on the device and on the host of the tightest rank, at least; `most` layers are recomputed."""
    figures, grid_costs = pipeline.figures, pipeline.grid_costs
    recipe = figures.recipe
    layers = layer_bounds_of(pipeline, nodes.box)
    shardings = shardings_of_nodes(pipeline, nodes, is_paired=is_paired)
    dense, expert = least_rank_elements(pipeline, layers, nodes)
    d, e = shardings.dense, shardings.expert
    # Of what depends on several degrees at once, nothing counts where one of them is open.
    is_known = np.full(len(nodes), is_paired) & (nodes.optim > 0)
    least_own = recipe.master_bytes + figures.state_bytes
    states = sum(
        elements / f.optim * np.where(is_known, own_bytes(figures, f), least_own)
        for elements, f in ((dense, d), (expert, e))
    )
    # Where it is open what is moved, all of it is: none of it is on the device, nor for certain on the host.
    is_open = nodes.offload < 0
    optimizer_offloaded = has_optimizer_offload(nodes)
    weights = (dense / d.param + expert / e.param) * recipe.weight_bytes
    single_backward = reduces_in_single_backward(figures, grid_costs.microbatches[nodes.grid], pipeline.pp)
    dense_grad, expert_grad = (
        np.where(single_backward & ((f.grad == 1) | ~is_known), np.maximum(f.grad, f.optim), f.grad)
        for f in (d, e)
    )
    gradients = (dense / dense_grad + expert / expert_grad) * recipe.gradient_bytes
    of_ranks = weights + gradients + np.where(optimizer_offloaded | is_open, 0.0, states)
    saved = least_saved_bytes(pipeline, layers, nodes, most)
    rank = pipeline.rank_of
    in_flight = pipeline.ramp("in_flight", nodes)[rank] * saved
    all_saved = pipeline.amount("saved_bytes", nodes)[:EMBEDDING].max(axis=0)
    activations_offloaded = has_activation_offload(nodes)
    pair = _two_layers_bytes(pipeline, layers, nodes, most)
    activations = activations_here = np.where(
        activations_offloaded | is_open, np.minimum(in_flight, np.minimum(saved, pair)), in_flight
    )
    recomputed = all_saved - pipeline.amount("input_bytes", nodes)[:EMBEDDING].max(axis=0)
    recomputed = np.where(nodes.recompute == FULL, recomputed, 0.0)
    if pipeline.splits_backward:
        many = pipeline.ramp("pending_weights", nodes)[rank]
        waits = many * least_recomputed_bytes(pipeline, layers, nodes, most)
        # Where the rest is moved away, more is held with more layers recomputed: what is said of all that
        # recompute at most so many holds of one alone.
        is_one = nodes.box.is_point & ((nodes.recompute != FULL) | (nodes.box.layers_low == most))
        activations = activations + np.maximum(
            recomputed, np.where(is_open | (activations_offloaded & ~is_one), 0.0, waits)
        )
        activations = activations + many * layers.of_layers(pipeline.amount("output_bytes", nodes))
    else:
        activations = activations + recomputed
    *kinds, embedding, head = [
        {name: pipeline.amount(name, nodes)[block] for name in NEEDED}
        for block in (*range(len(figures.model.kinds)), EMBEDDING, HEAD)
    ]
    logits = head["logits_bytes"]
    is_early = is_known & ((d.grad > 1) | (single_backward & (d.optim > 1)))
    for stages, stage_head in ((slice(0, -1), None), (slice(-1, None), head)):
        working = temporary_bytes(figures, kinds, stage_head)
        sent = np.maximum(reduced_bytes(figures, kinds, stage_head, single_backward) - working, 0)
        activations[stages] += working + np.where(is_early, sent, 0)
    if pipeline.schedule == "gpipe" or pipeline.splits_backward:
        activations[-1] += (pipeline.ramp("in_flight", nodes)[rank[-1]] - 1) * logits
    allocated = (of_ranks[rank] + activations).max(axis=0)
    if pipeline.pp == 1 and np.any(single_backward):
        is_transient = single_backward & frees_gradients(figures, d.optim) & ((d.param == 1) | ~is_known)
        transient = single_backward_parts(
            figures, [*kinds, embedding], head, is_shared=is_known & (d.optim > 1), saved=activations_here[0],
            recomputed=recomputed, parameters=weights[0], gradients=gradients[0], degree=d.optim,
            others=dense[0] - embedding["dense"],
        )  # fmt: skip
        persistent = of_ranks[0] - weights[0] - gradients[0]
        allocated = np.where(is_transient, persistent + sum(transient.values()), allocated)
    allocated = allocated + _shared_bytes(pipeline, shardings, nodes, is_paired=is_paired)
    device = _device_bytes(pipeline, nodes, allocated)
    offloaded_bytes = (dense / d.optim + expert / e.optim) * host_bytes(figures)
    host = np.where(optimizer_offloaded, offloaded_bytes, 0.0)[rank] + np.where(
        activations_offloaded, in_flight, 0.0
    )
    return device, host.max(axis=0)


def _device_bytes(pipeline: PipelineContext, nodes: ProofNodes, allocated: Column) -> Column:
    """Bytes on the device where so many are allocated: with fragmentation, context and communicators."""
    efficiency, rows = pipeline.figures.efficiency, pipeline.grid_costs.rows
    axes = ("tp", "cp", "pp", "dp", "ep")
    communicators = 1 + sum((getattr(rows, axis)[nodes.grid] > 1).astype(np.int64) for axis in axes)
    device = allocated * (1 + efficiency.fragmentation_ratio) + efficiency.context_bytes
    found: Column = device + efficiency.communicator_bytes * communicators
    return found


def _two_layers_bytes(
    pipeline: PipelineContext, layers: LayerBounds, nodes: ProofNodes, most: Column
) -> Column:
    """The least that two layers of a kind that holds most hold, whose activations are moved."""
    all_saved = pipeline.amount("saved_bytes", nodes)[:EMBEDDING].max(axis=0)
    found = 2 * all_saved
    if (nodes.recompute == SELECTIVE).any():
        selective = pipeline.amount("saved_selective_bytes", nodes)[:EMBEDDING].max(axis=0)
        found = np.where(nodes.recompute == SELECTIVE, 2 * selective, found)
    inputs = pipeline.amount("input_bytes", nodes)[:EMBEDDING].max(axis=0)
    other = np.where(most < layers.least, all_saved, inputs)
    return np.where(nodes.recompute == FULL, inputs + other, found)


def least_rank_elements(
    pipeline: PipelineContext, layers: LayerBounds, nodes: ProofNodes
) -> tuple[Column, Column]:
    """Dense and expert elements of each rank, at least: [pp, cell] each."""
    dense = pipeline.amount("dense", nodes)
    of_ranks = pipeline.of_ranks(layers.summed(dense))
    if pipeline.figures.model.tied_embeddings and pipeline.ends_apart:
        of_ranks[-1] += dense[EMBEDDING]
    return of_ranks, pipeline.of_ranks(layers.summed(pipeline.amount("expert", nodes)))


def _shared_bytes(
    pipeline: PipelineContext, shardings: Shardings, nodes: ProofNodes, *, is_paired: bool
) -> Column:
    """Gathered weights and buffers."""
    rows, recipe = pipeline.grid_costs.rows, pipeline.figures.recipe
    grid = nodes.grid
    tokens = rows.micro_batch_size[grid] * pipeline.figures.job.seq_len / rows.cp[grid]
    hidden = tokens / rows.tp[grid] * pipeline.figures.model.hidden * recipe.activation_bytes
    each = boundary_buffers(pipeline.figures, pipeline.grid_costs.microbatches[grid], rows.tp[grid])
    buffers = each * hidden * (pipeline.pp > 1)
    if not is_paired:
        return buffers
    gathered: Column = 0.0
    for name, degree in (("dense", shardings.dense.param), ("expert", shardings.expert.param)):
        most = pipeline.amount(name, nodes)[:EMBEDDING].max(axis=0)
        gathered = gathered + np.where(degree > 1, most, 0.0)
    return buffers + 2 * recipe.weight_bytes * gathered
