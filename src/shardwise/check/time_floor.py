"""The least step time of every candidate of a cell: the longest of some paths through its table.

Every path is a chain of actions each of which waits for the one before, its stages as short as they can be in
the cell; so no step of the cell is shorter. Per rank r, with w its work on one microbatch:

- the way of the first microbatch to it, m w, and from its last action to the end of the step;
- the same, but entered at its first backward: all stages forward, back to the rank, and of its work all but
  the forwards it has done before (turns.py);
- the same, but left at its last forward, which still has its way to the last stage and back before it;
- entered at the first backward and left at the last forward.

And the mean over ranks of the first of these, for which only the sum of all layers counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.check.bytes_floor import (
    SELECTIVE,
    degrees_of,
    held_elements,
    least_stored_bytes,
    moves_activations,
    moves_optimizer,
)
from shardwise.check.cells import EMBEDDING, Cells, Layers, Pipeline, layers_of
from shardwise.check.rows import Column
from shardwise.check.sharding import Reduced, Shardings, gathering_s, reduction_s
from shardwise.check.splits import FULL
from shardwise.check.step import copies_s, norm_s, optimizer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Actions:
    """The least seconds of the actions of each stage, [stage, cell]; of the hops between them, [stages - 1,
    cell]; and of what all stages do for one microbatch, (cells,)."""

    forward_s: Column
    input_s: Column
    weight_s: Column
    hops_s: Column
    model_s: Column


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    """What comes before the first forward and after the last backward of stage 0, and after everything."""

    gather_s: Column
    reduce_s: Column
    step_s: Column


def time_floor(pipeline: Pipeline, cells: Cells, *, is_paired: bool, is_sharded: bool) -> Column:
    """Seconds per step, at least: (cells,). `is_paired` where all cells have a pair, `is_sharded` where they
    have an optim_shard too."""
    layers = layers_of(pipeline, cells.box)
    shardings = degrees_of(pipeline, cells, is_paired=is_paired)
    actions = _actions(pipeline, layers, cells, is_paired=is_paired)
    ends = _ends(pipeline, layers, cells, shardings, is_paired=is_paired, is_sharded=is_sharded)
    return _longest_path_s(pipeline, actions, ends, cells) + ends.step_s


def work_floor(pipeline: Pipeline) -> Column:
    """Seconds per step of each grid, at least, under any schedule, split or sharding: (grids,).

    All layers forward and backward for every microbatch, shared by the ranks as evenly as can be.
    """
    ground = pipeline.ground
    of_blocks = sum(ground.amounts[f"{phase}_s"] for phase in ("forward", "input", "weight"))
    model_s = pipeline.whole_model(of_blocks)
    seconds: Column = ground.microbatches * model_s / pipeline.pp
    return seconds


def _actions(pipeline: Pipeline, layers: Layers, cells: Cells, *, is_paired: bool) -> _Actions:
    host_s, share = pipeline.figures.profile.host_action_s, pipeline.figures.profile.pipeline_overlap
    sent_s = _sent_s(pipeline, cells)
    waiting_s = (1 - share) * sent_s
    # The last stage sends nothing on, the first nothing back.
    nothing = np.zeros((1, len(cells)))
    on_s, back_s = np.concatenate([waiting_s, nothing]), np.concatenate([nothing, waiting_s])
    of_blocks = {
        phase: pipeline.with_traffic(phase, cells, is_paired=is_paired)
        for phase in ("forward", "input", "weight")
    }
    again_s, all_again_s = _again_s(pipeline, layers, cells)
    out_s, in_s, moved_s = _moved_s(pipeline, layers, cells)
    forward_s = _summed_s(layers, of_blocks["forward"], "forward", cells) + host_s + on_s + out_s
    input_s = _summed_s(layers, of_blocks["input"], "input", cells) + host_s + back_s + again_s + in_s
    # In DualPipe some backwards are whole and cost the host one action.
    starts = 3 if pipeline.splits_backward and pipeline.schedule != "dualpipe_v" else 2
    weight_s = layers.summed(of_blocks["weight"]) + (starts - 2) * host_s
    model_s = sum(layers.total(seconds) for seconds in of_blocks.values())
    model_s = model_s + starts * host_s * pipeline.stages + 2 * waiting_s.sum(axis=0)
    model_s = model_s + all_again_s + moved_s
    return _Actions(
        forward_s=forward_s, input_s=input_s, weight_s=weight_s, hops_s=share * sent_s, model_s=model_s
    )


def _sent_s(pipeline: Pipeline, cells: Cells) -> Column:
    """Seconds of a message from each stage to the next, [stages - 1, cells]."""
    stage = np.arange(pipeline.stages - 1)
    # A V comes back over the hops that it went, and turns round on one rank for nothing.
    hop = np.minimum(stage, 2 * pipeline.pp - 2 - stage) if pipeline.is_v else stage % pipeline.pp
    found = pipeline.ground.hops_s[np.ix_(hop, cells.grid)]
    if pipeline.is_v:
        found[pipeline.pp - 1] = 0.0
    return found


def _summed_s(layers: Layers, of_blocks: Column, phase: str, cells: Cells) -> Column:
    """The least seconds of a phase of each stage. Where activations move beside it, the computation and the
    rest are each the least that they can be: less computation hides less, so it must not be more
    elsewhere."""
    if len(layers.mixes) == 1 or not moves_activations(cells).any():
        return layers.summed(of_blocks)
    alone = layers.pipeline.amount(f"{phase}_computation_s", cells)
    return layers.summed(alone) + layers.summed(of_blocks - alone)


def _again_s(pipeline: Pipeline, layers: Layers, cells: Cells) -> tuple[Column, Column]:
    """Seconds of recomputation per microbatch, at least: of each stage and of all."""
    again_s = np.zeros(layers.least.shape)
    all_again_s = np.zeros(len(cells))
    if (cells.recompute == SELECTIVE).any():
        seconds = pipeline.amount("selective_s", cells)
        is_selective = cells.recompute == SELECTIVE
        again_s = np.where(is_selective, layers.summed(seconds), again_s)
        all_again_s = np.where(is_selective, layers.total(seconds), all_again_s)
    if (cells.recompute == FULL).any():
        seconds = pipeline.amount("repeated_s", cells)
        number = np.minimum(cells.box.layers_low, layers.least)
        cheapest = seconds[:EMBEDDING].min(axis=0)
        each = np.repeat(cheapest[None], pipeline.stages, axis=0)
        if len(seconds) > 3:
            # Only of layers that are known does the mean count: one cheap layer more may lower it.
            mean = layers.of_layers(seconds) / np.maximum(layers.least, 1)
            each = np.where(cells.box.is_point & (layers.least > 0), mean, each)
        is_full = cells.recompute == FULL
        again_s = np.where(is_full, number * each, again_s)
        all_again_s = np.where(is_full, number.sum(axis=0) * cheapest, all_again_s)
    return again_s, all_again_s


def _moved_s(pipeline: Pipeline, layers: Layers, cells: Cells) -> tuple[Column, Column, Column]:
    """Exposed seconds of activations on their way to the host and back, at least: out and in of each stage,
    both of all stages."""
    nothing = np.zeros(layers.least.shape)
    is_away = moves_activations(cells)
    if not is_away.any():
        return nothing, nothing, np.zeros(len(cells))
    figures, link = pipeline.figures, pipeline.figures.host_link_bytes_per_s
    stored_s = least_stored_bytes(pipeline, layers, cells, cells.box.layers_high) / link
    forward = pipeline.amount("forward_computation_s", cells)
    backward = pipeline.amount("input_computation_s", cells)
    # A stage's computation and what is exposed beside it grow, together, with both.
    out_s = np.where(is_away, figures.exposed_s(stored_s, layers.summed(forward), 1.0), 0.0)
    in_s = np.where(is_away, figures.exposed_s(stored_s, layers.summed(backward), 1.0), 0.0)
    of_all_s = _all_stored_bytes(pipeline, layers, cells) / link
    all_s = sum(_exposed_at_least_s(pipeline, of_all_s, layers.total(each)) for each in (forward, backward))
    return out_s, in_s, np.where(is_away, all_s, 0.0)


def _exposed_at_least_s(pipeline: Pipeline, moved_s: Column, computation_s: Column) -> Column:
    """Of sums over stages no more than the sum of what each exposes: exposure is convex and homogeneous."""
    slowdown = pipeline.figures.efficiency.overlap_slowdown
    if slowdown > 2:
        return moved_s
    return np.maximum((slowdown - 1) * moved_s, moved_s - (2 - slowdown) * computation_s)


def _all_stored_bytes(pipeline: Pipeline, layers: Layers, cells: Cells) -> Column:
    """What all stages together keep of one microbatch at least."""
    kept = pipeline.amount("kept_bytes", cells)
    found = layers.total(kept)
    selective = layers.total(pipeline.amount("kept_selective_bytes", cells))
    saved = np.maximum(kept - pipeline.amount("input_bytes", cells), 0.0)[:EMBEDDING].max(axis=0)
    number = np.minimum(cells.box.layers_high * pipeline.stages, pipeline.splits.layers)
    full = np.maximum(found - number * saved, 0.0)
    found = np.where(cells.recompute == SELECTIVE, selective, found)
    return np.where(cells.recompute == FULL, full, found)


def _longest_path_s(pipeline: Pipeline, actions: _Actions, ends: _Ends, cells: Cells) -> Column:
    """The longest of the paths, from the start of the step to the end of stage 0's reduction."""
    pp, whole = pipeline.pp, not pipeline.splits_backward
    m = pipeline.ground.microbatches[cells.grid]
    forward_s, weight_s = actions.forward_s, actions.weight_s
    back_s = actions.input_s + weight_s if whole else actions.input_s
    both_s = actions.input_s + weight_s
    zero = np.zeros((1, len(cells)))
    hop_ups = np.concatenate([zero, actions.hops_s])
    # Of each stage: the way to its forward; from its backward to the end of stage 0's; from its forward to
    # the end of the last stage's; and from there back to where its own backward may start.
    up_s = np.cumsum(np.concatenate([zero, forward_s[:-1]]) + hop_ups, axis=0)
    down_s = np.cumsum(np.concatenate([zero, back_s[:-1]]) + hop_ups, axis=0)
    there_s = up_s[-1] + forward_s[-1] - up_s - forward_s
    back_to_s = down_s[-1] + back_s[-1] - down_s - back_s
    all_up_s, all_down_s = up_s[-1] + forward_s[-1], down_s[-1] + back_s[-1]
    work_s = m * pipeline.of_ranks(forward_s + both_s)
    at = np.arange(len(cells))
    before_s = pipeline.of_ranks(pipeline.turn("before", cells) * forward_s)
    after_s = pipeline.of_ranks(
        pipeline.turn("backwards", cells) * both_s
        + pipeline.turn("inputs", cells) * actions.input_s
        + pipeline.turn("weights", cells) * weight_s
    )
    enter_s = up_s[:pp] + ends.gather_s
    turn_in_s = all_up_s + back_to_s[pipeline.turn("first_back", cells), at] - before_s + ends.gather_s
    leave_s = down_s[:pp] + ends.reduce_s if whole else np.zeros((pp, len(cells)))
    if not whole:
        leave_s[0] += ends.reduce_s
    last_s = ends.reduce_s if whole else weight_s[0] + ends.reduce_s
    turn_out_s = there_s[pipeline.turn("last_forward", cells), at] + all_down_s + last_s - after_s
    turning = np.where(pipeline.turn("in_order", cells), turn_in_s + turn_out_s, 0.0)
    of_ranks = np.maximum(np.maximum(enter_s, turn_in_s) + leave_s, enter_s + turn_out_s)
    found = (work_s + np.maximum(of_ranks, turning)).max(axis=0)
    mean = m * actions.model_s / pp + (enter_s + leave_s).mean(axis=0)
    longest: Column = np.maximum(found, mean)
    return longest


def _ends(
    pipeline: Pipeline,
    layers: Layers,
    cells: Cells,
    shardings: Shardings,
    *,
    is_paired: bool,
    is_sharded: bool,
) -> _Ends:
    figures, ground = pipeline.figures, pipeline.ground
    dense, expert = held_elements(pipeline, layers, cells)
    d, e = shardings.dense, shardings.expert
    all_dense = layers.total(pipeline.amount("dense", cells))
    if figures.model.tied_embeddings and pipeline.ends_apart:
        all_dense = all_dense + pipeline.amount("dense", cells)[EMBEDDING]
    all_expert = layers.total(pipeline.amount("expert", cells))
    mean = (all_dense / d.optim + all_expert / e.optim) / pipeline.pp
    owned = np.maximum((dense / d.optim + expert / e.optim).max(axis=0), mean)
    away = moves_optimizer(cells)
    here_s, there_s = (optimizer_s(figures, np.full(len(cells), flag), owned) for flag in (False, True))
    least_s = np.where(cells.offload < 0, np.minimum(here_s, there_s), np.where(away, there_s, here_s))
    ranks = figures.cluster.devices
    step_s = (
        norm_s(figures, pipeline.fabric, ranks, owned)
        + least_s
        + copies_s(
            figures,
            ground.microbatches[cells.grid],
            owned,
            (dense + expert).max(axis=0),
            is_alone=(d.optim == 1) & (e.optim == 1),
        )
        + ground.tied_s[pipeline.ends_apart][cells.grid]
        + figures.profile.host_step_s
    )
    zero = np.zeros(len(cells))
    if not is_sharded:
        return _Ends(gather_s=zero, reduce_s=zero, step_s=step_s)
    forward_s, last_s = _first_stage_at_most_s(pipeline, layers, cells, is_paired=is_paired)
    buckets = np.maximum(layers.most_first, 1)
    names = ("dense", "expert", "dense_blocks", "expert_blocks")
    of_first = {name: layers.summed(pipeline.amount(name, cells))[0] for name in names}
    if figures.model.tied_embeddings and pipeline.pp == 1:  # both ends, one table, one block
        of_first["dense_blocks"] = of_first["dense_blocks"] - 1
    # Fewer elements in fewer parts never take longer.
    held = Reduced.of(figures, **{name: of_first[name] for name in names})
    reduction = reduction_s(figures, pipeline.fabric, shardings, held)
    gathering = gathering_s(figures, pipeline.fabric, shardings, held)
    profile = figures.profile
    overlap = np.where(d.optim == 1, profile.data_overlap, profile.state_overlap)
    return _Ends(
        gather_s=_added_s(gathering, overlap, forward_s, buckets),
        reduce_s=_added_s(reduction, overlap, last_s, buckets),
        step_s=step_s,
    )


def _added_s(seconds: Column, overlap: Column, action_s: Column, buckets: Column) -> Column:
    """What a gathering or reduction adds to an action that is no longer than this."""
    beside = np.minimum(overlap * seconds, action_s)
    return seconds - beside + beside / buckets


def _first_stage_at_most_s(
    pipeline: Pipeline, layers: Layers, cells: Cells, *, is_paired: bool
) -> tuple[Column, Column]:
    """The most of stage 0's forward and of its last action beside which parameters are gathered and gradients
    reduced: without what passes in collectives by the same cards."""
    figures = pipeline.figures
    host_s = figures.profile.host_action_s
    box, most = cells.box, layers.most_first
    of_blocks = {
        phase: pipeline.with_traffic(phase, cells, is_paired=is_paired)
        for phase in ("forward", "input", "weight")
    }
    for phase in ("forward", "input"):
        of_blocks[phase] = of_blocks[phase] - pipeline.amount(f"{phase}_contended_s", cells)
    forward_s, input_s, weight_s = (layers.first_at_most(each) for each in of_blocks.values())
    if pipeline.splits_backward:
        input_s = 0.0 * input_s
    repeated = pipeline.amount("repeated_s", cells) - pipeline.amount("repeated_contended_s", cells)
    mean = (layers.first_at_most(repeated) - repeated[EMBEDDING]) / np.maximum(most, 1)
    each = np.where(box.first_low == box.first_high, mean, repeated[:EMBEDDING].max(axis=0))
    full = np.minimum(box.layers_high, most) * each
    selective = layers.first_at_most(pipeline.amount("selective_s", cells))
    again_s = np.where(cells.recompute == FULL, full, 0.0)
    again_s = np.where(cells.recompute == SELECTIVE, selective, again_s)
    stored = layers.first_at_most(pipeline.amount("kept_bytes", cells))
    inputs = layers.first_at_most(pipeline.amount("input_bytes", cells))
    share = np.minimum(box.layers_low, most) / np.maximum(most, 1)
    selected = layers.first_at_most(pipeline.amount("kept_selective_bytes", cells))
    stored = np.where(cells.recompute == FULL, stored - share * (stored - inputs), stored)
    stored = np.where(cells.recompute == SELECTIVE, selected, stored)
    moved_s = np.where(moves_activations(cells), stored, 0.0) / figures.host_link_bytes_per_s
    out_s, in_s = (
        figures.exposed_s(
            moved_s, layers.first_at_most(pipeline.amount(f"{phase}_computation_s", cells)), 1.0
        )
        for phase in ("forward", "input")
    )
    share = figures.profile.pipeline_overlap
    sent_s = _sent_s(pipeline, cells)[:1].sum(axis=0)
    forward_s = forward_s + host_s + (1 - share) * sent_s + out_s
    if pipeline.splits_backward:
        return forward_s, weight_s
    return forward_s, input_s + host_s + again_s + in_s + weight_s
