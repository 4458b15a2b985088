"""The least bytes of the tightest rank of every candidate of a cell (docs/cost-model.md, section 14).

What a rank holds grows with its layers and falls with the layers recomputed and with the degrees of sharding;
so the fewest layers, the most recomputed, and for what is open the largest degrees, hold the least.
"""

from __future__ import annotations

import numpy as np

from shardwise.check.cells import EMBEDDING, HEAD, Cells, Layers, Pipeline, layers_of
from shardwise.check.memory import (
    at_once_parts,
    boundary_buffers,
    host_bytes,
    moves_gradients,
    own_bytes,
    reduced_bytes,
    reduces_at_once,
    temporary_bytes,
)
from shardwise.check.rows import Column
from shardwise.check.sharding import Shardings
from shardwise.check.splits import FULL
from shardwise.strategy import OFFLOADS, RECOMPUTES

SELECTIVE = RECOMPUTES.index("selective")


def moves_activations(cells: Cells) -> Column:
    return (cells.offload == OFFLOADS.index("activations")) | (cells.offload == OFFLOADS.index("both"))


def moves_optimizer(cells: Cells) -> Column:
    return (cells.offload == OFFLOADS.index("optimizer")) | (cells.offload == OFFLOADS.index("both"))


def degrees_of(pipeline: Pipeline, cells: Cells, *, is_paired: bool) -> Shardings:
    """How weights are sharded; what is open over all ranks."""
    most = pipeline.ground.ranks[cells.grid]
    param = pipeline.pairs.param[cells.pair] if is_paired else most
    grad = pipeline.pairs.grad[cells.pair] if is_paired else most
    optim = np.where(cells.optim > 0, cells.optim, most)
    return pipeline.ground.shardings(cells.grid, param, grad, optim)


def least_stored_bytes(pipeline: Pipeline, layers: Layers, cells: Cells, most: Column) -> Column:
    """What each stage keeps of one microbatch at least, where at most `most` layers are recomputed."""
    kept = pipeline.amount("kept_bytes", cells)
    found = layers.summed(kept)
    if (cells.recompute == SELECTIVE).any():
        selective = layers.summed(pipeline.amount("kept_selective_bytes", cells))
        found = np.where(cells.recompute == SELECTIVE, selective, found)
    if (cells.recompute == FULL).any():
        share = np.minimum(most, layers.least) / np.maximum(layers.least, 1)
        inputs = layers.summed(np.minimum(kept, pipeline.amount("input_bytes", cells)))
        full = (1 - share) * layers.summed(kept) + share * inputs
        found = np.where(cells.recompute == FULL, full, found)
    return found


def least_made_again_bytes(pipeline: Pipeline, layers: Layers, cells: Cells, most: Column) -> Column:
    """What each stage makes again of one microbatch, where at most `most` layers are recomputed: with so much
    beside what is stored at least, no stage has less.

    With k kept, s stored, p in flight, w <= p waiting: p s + w (k - s) = (p - w) s + w k, which is least
    where both s and k are; and falls with the layers recomputed, as s does.
    """
    whole = layers.of_layers(pipeline.amount("kept_bytes", cells))
    found = np.zeros_like(whole)
    if (cells.recompute == SELECTIVE).any():
        selective = layers.of_layers(pipeline.amount("kept_selective_bytes", cells))
        found = np.where(cells.recompute == SELECTIVE, whole - selective, found)
    if (cells.recompute == FULL).any():
        kept, inputs = pipeline.amount("kept_bytes", cells), pipeline.amount("input_bytes", cells)
        share = np.minimum(most, layers.least) / np.maximum(layers.least, 1)
        full = share * (whole - layers.of_layers(np.minimum(kept, inputs)))
        found = np.where(cells.recompute == FULL, full, found)
    return found


def bytes_floor(pipeline: Pipeline, cells: Cells, most: Column, *, is_paired: bool) -> tuple[Column, Column]:
    """Bytes on the device and on the host of the tightest rank, at least; `most` layers are recomputed."""
    figures, ground = pipeline.figures, pipeline.ground
    recipe, efficiency = figures.recipe, figures.efficiency
    layers = layers_of(pipeline, cells.box)
    shardings = degrees_of(pipeline, cells, is_paired=is_paired)
    dense, expert = held_elements(pipeline, layers, cells)
    d, e = shardings.dense, shardings.expert
    # Of what depends on several degrees at once, nothing counts where one of them is open.
    is_known = np.full(len(cells), is_paired) & (cells.optim > 0)
    least_own = recipe.master_bytes + figures.state_bytes
    states = sum(
        elements / f.optim * np.where(is_known, own_bytes(figures, f), least_own)
        for elements, f in ((dense, d), (expert, e))
    )
    # Where it is open what is moved, all of it is: none of it is on the device, nor for certain on the host.
    is_open = cells.offload < 0
    away = moves_optimizer(cells)
    weights = (dense / d.param + expert / e.param) * recipe.weight_bytes
    at_once = reduces_at_once(figures, ground.microbatches[cells.grid], pipeline.pp)
    dense_grad, expert_grad = (
        np.where(at_once & ((f.grad == 1) | ~is_known), np.maximum(f.grad, f.optim), f.grad) for f in (d, e)
    )
    gradients = (dense / dense_grad + expert / expert_grad) * recipe.gradient_bytes
    of_ranks = weights + gradients + np.where(away | is_open, 0.0, states)
    stored = least_stored_bytes(pipeline, layers, cells, most)
    rank = pipeline.rank_of
    in_flight = pipeline.turn("held", cells)[rank] * stored
    kept = pipeline.amount("kept_bytes", cells)[:EMBEDDING].max(axis=0)
    away_too = moves_activations(cells)
    pair = _two_layers_bytes(pipeline, layers, cells, most)
    held = kept_here = np.where(
        away_too | is_open, np.minimum(in_flight, np.minimum(stored, pair)), in_flight
    )
    again = kept - pipeline.amount("input_bytes", cells)[:EMBEDDING].max(axis=0)
    again = np.where(cells.recompute == FULL, again, 0.0)
    if pipeline.splits_backward:
        many = pipeline.turn("waiting", cells)[rank]
        waits = many * least_made_again_bytes(pipeline, layers, cells, most)
        # Where the rest is moved away, more is held with more layers recomputed: what is said of all that
        # recompute at most so many holds of one alone.
        is_one = cells.box.is_point & ((cells.recompute != FULL) | (cells.box.layers_low == most))
        held = held + np.maximum(again, np.where(is_open | (away_too & ~is_one), 0.0, waits))
        held = held + many * layers.of_layers(pipeline.amount("output_bytes", cells))
    else:
        held = held + again
    names = ("largest_bytes", "kept_bytes", "dense", "logits_bytes")
    blocks = [
        {name: pipeline.amount(name, cells)[block] for name in names}
        for block in (*range(len(figures.model.kinds)), EMBEDDING, HEAD)
    ]
    *kinds, embedding, head = blocks
    logits = head["logits_bytes"]
    is_early = is_known & ((d.grad > 1) | (at_once & (d.optim > 1)))
    for stages, ends_here in ((slice(0, -1), None), (slice(-1, None), head)):
        working = temporary_bytes(figures, kinds, ends_here)
        sent = np.maximum(reduced_bytes(figures, kinds, ends_here, at_once) - working, 0)
        held[stages] += working + np.where(is_early, sent, 0)
    if pipeline.schedule == "gpipe" or pipeline.splits_backward:
        held[-1] += (pipeline.turn("held", cells)[rank[-1]] - 1) * logits
    allocated = (of_ranks[rank] + held).max(axis=0)
    if pipeline.pp == 1 and np.any(at_once):
        is_moving = at_once & moves_gradients(figures, d.optim) & ((d.param == 1) | ~is_known)
        moving = at_once_parts(
            figures, [*kinds, embedding], head, is_shared=is_known & (d.optim > 1), stored=kept_here[0],
            again=again, parameters=weights[0], gradients=gradients[0], degree=d.optim,
            others=dense[0] - embedding["dense"],
        )  # fmt: skip
        resting = of_ranks[0] - weights[0] - gradients[0]
        allocated = np.where(is_moving, resting + sum(moving.values()), allocated)
    allocated = allocated + _shared_bytes(pipeline, shardings, cells, is_paired=is_paired)
    rows = ground.rows
    communicators = 1 + sum(
        (getattr(rows, axis)[cells.grid] > 1).astype(np.int64) for axis in ("tp", "cp", "pp", "dp", "ep")
    )
    device = allocated * (1 + efficiency.fragmentation_ratio) + efficiency.context_bytes
    device = device + efficiency.communicator_bytes * communicators
    moved = (dense / d.optim + expert / e.optim) * host_bytes(figures)
    host = np.where(away, moved, 0.0)[rank] + np.where(away_too, in_flight, 0.0)
    return device, host.max(axis=0)


def _two_layers_bytes(pipeline: Pipeline, layers: Layers, cells: Cells, most: Column) -> Column:
    """The least that two layers of a kind that holds most hold, whose activations are moved."""
    kept = pipeline.amount("kept_bytes", cells)[:EMBEDDING].max(axis=0)
    found = 2 * kept
    if (cells.recompute == SELECTIVE).any():
        selective = pipeline.amount("kept_selective_bytes", cells)[:EMBEDDING].max(axis=0)
        found = np.where(cells.recompute == SELECTIVE, 2 * selective, found)
    inputs = pipeline.amount("input_bytes", cells)[:EMBEDDING].max(axis=0)
    other = np.where(most < layers.least, kept, inputs)
    return np.where(cells.recompute == FULL, inputs + other, found)


def held_elements(pipeline: Pipeline, layers: Layers, cells: Cells) -> tuple[Column, Column]:
    """Dense and expert elements of each rank, at least: [pp, cell] each."""
    dense = pipeline.amount("dense", cells)
    of_ranks = pipeline.of_ranks(layers.summed(dense))
    if pipeline.figures.model.tied_embeddings and pipeline.ends_apart:
        of_ranks[-1] += dense[EMBEDDING]
    return of_ranks, pipeline.of_ranks(layers.summed(pipeline.amount("expert", cells)))


def _shared_bytes(pipeline: Pipeline, shardings: Shardings, cells: Cells, *, is_paired: bool) -> Column:
    """Gathered weights and buffers."""
    rows, recipe = pipeline.ground.rows, pipeline.figures.recipe
    grid = cells.grid
    tokens = rows.micro_batch_size[grid] * pipeline.figures.job.seq_len / rows.cp[grid]
    hidden = tokens / rows.tp[grid] * pipeline.figures.model.hidden * recipe.activation_bytes
    each = boundary_buffers(pipeline.figures, pipeline.ground.microbatches[grid], rows.tp[grid])
    buffers = each * hidden * (pipeline.pp > 1)
    if not is_paired:
        return buffers
    gathered: Column = 0.0
    for name, degree in (("dense", shardings.dense.param), ("expert", shardings.expert.param)):
        most = pipeline.amount(name, cells)[:EMBEDDING].max(axis=0)
        gathered = gathered + np.where(degree > 1, most, 0.0)
    return buffers + 2 * recipe.weight_bytes * gathered
