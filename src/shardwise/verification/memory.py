"""Bytes of a rank, part by part (docs/concepts/cost-model.md, section 14)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from shardwise.ties import first_largest
from shardwise.verification.layers import Amounts
from shardwise.verification.problem import Figures
from shardwise.verification.schedules import in_flight, pending_weights
from shardwise.verification.sharding import Sharding, Shardings
from shardwise.verification.strategy_rows import Column, Family
from shardwise.verification.times import offloads_activations, offloads_optimizer, saved_bytes

ALLOCATED = (
    "parameters", "gradients", "optimizer", "gathered", "activations", "temporaries", "buffers",
)  # fmt: skip
TRANSIENT_PARTS = ("parameters", "gradients", "activations", "temporaries")
"""What comes and goes in a backward pass that reduces gradients as they come."""

PARTS = (*ALLOCATED, "fragmentation", "communicators", "context")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of every stage, by parts and on its device as a whole, the pipeline rank of each, and the most
    bytes of a host."""

    ranks: tuple[int, ...]
    parts: tuple[Mapping[str, Column], ...]
    of_stages: tuple[Column, ...]
    host_bytes: Column

    @property
    def device_bytes(self) -> Column:
        """Of each row the bytes of the stage that needs most of its device."""
        return reduce(np.maximum, self.of_stages)

    def tightest(self, row: int) -> tuple[int, dict[str, float]]:
        """The pipeline rank of the stage that needs most of its device in a row, of equals the lowest, and
        what its bytes are for."""
        in_order = sorted(range(len(self.ranks)), key=self.ranks.__getitem__)
        stage = in_order[int(first_largest([self.of_stages[one][row] for one in in_order]))]
        shape = self.of_stages[stage].shape
        parts = self.parts[stage]
        return self.ranks[stage], {name: float(np.broadcast_to(parts[name], shape)[row]) for name in PARTS}


def memory_of(
    figures: Figures,
    family: Family,
    shardings: Shardings,
    blocks: Sequence[Amounts],
    stages: Sequence[Mapping[str, Column]],
    layers: Sequence[Column],
    dense: Sequence[Column],
    expert: Sequence[Column],
) -> Memory:
    """The memory of every row; `dense` and `expert` are the elements on each pipeline rank."""
    ranks: list[int] = []
    of_stages: list[Column] = []
    parts_of_stages: list[Mapping[str, Column]] = []
    host: Column = np.zeros(len(family.rows))
    *kinds, _, head = blocks
    shared = _shared(figures, family, shardings, kinds)
    for number, stage in enumerate(stages):
        rank = family.rank_of(number)
        states, host_states = _states(figures, family, shardings, dense[rank], expert[rank])
        activations, recomputed, host_activations = _activations(family, kinds, stage, layers[number], rank)
        single_backward = reduces_in_single_backward(figures, family.microbatches, family.pp)
        stage_head = head if number == len(stages) - 1 else None
        largest = temporary_bytes(figures, kinds, stage_head)
        reduced = reduced_bytes(figures, kinds, stage_head, single_backward)
        whole = states["gradients"]
        is_early = (shardings.dense.grad > 1) | (single_backward & (shardings.dense.optim > 1))
        states["gradients"] = states["gradients"] + np.where(is_early, np.maximum(reduced - largest, 0), 0)
        if stage_head is not None and (family.schedule == "gpipe" or family.splits_backward):
            # The losses of all microbatches in flight are kept.
            largest = largest + (in_flight(family, rank) - 1) * head["logits_bytes"]
        parts = {**states, **shared, "activations": activations + recomputed, "temporaries": largest}
        if family.pp == 1 and np.any(single_backward):
            degree = shardings.dense.optim
            is_transient = single_backward & frees_gradients(figures, degree) & (shardings.dense.param == 1)
            transient = single_backward_parts(
                figures, blocks[:-1], head, is_shared=degree > 1,
                saved=activations, recomputed=recomputed,
                parameters=states["parameters"], gradients=whole, degree=degree,
                others=dense[rank] - blocks[-2]["dense"],
            )  # fmt: skip
            parts |= {name: np.where(is_transient, transient[name], parts[name]) for name in TRANSIENT_PARTS}
        allocated = sum(parts[name] for name in ALLOCATED)
        parts["fragmentation"] = figures.efficiency.fragmentation_ratio * allocated
        ranks.append(rank)
        parts_of_stages.append(parts)
        of_stages.append(sum(parts[name] for name in PARTS) + np.zeros(len(family.rows)))
        host = np.maximum(host, host_states + host_activations)
    return Memory(
        ranks=tuple(ranks), parts=tuple(parts_of_stages), of_stages=tuple(of_stages), host_bytes=host
    )


def single_backward_parts(
    figures: Figures,
    blocks: Sequence[Amounts],
    head: Amounts,
    *,
    is_shared: Column,
    saved: Column,
    recomputed: Column,
    parameters: Column,
    gradients: Column,
    degree: Column,
    others: Column,
) -> dict[str, Column]:
    """Weights, gradients, activations and temporaries of the one stage whose only backward pass reduces each
    block when it is done with it, at the moment that needs most of all four: at the head, where all `saved`
    activations are there and no gradient is; at the last layer, beside what it makes `recomputed`; at the
    first, where but its own and the embedding's all `gradients` are there, and the activations of a layer; or
    at the embedding, which has its own narrow, and laid out to be reduced, beside them all.

    Gradients are over `degree` ranks; where they share them (`is_shared`), what is sent of a block's takes
    the place of its weights. Of `others`, the elements but the embedding's, the weights are gone with their
    gradients. The last of `blocks` is the embedding.
    """
    recipe = figures.recipe
    *blocks, embedding = blocks
    layer = temporary_bytes(figures, blocks, None)
    of_head = head_bytes(figures, head)
    layer = np.where(is_shared, np.maximum(layer, _largest(blocks, "dense") * recipe.gradient_bytes), layer)
    of_head = np.where(is_shared, np.maximum(of_head, head["dense"] * recipe.gradient_bytes), of_head)
    each = recipe.gradient_bytes / degree
    least = blocks[0]["dense"]
    for block in blocks[1:]:
        least = np.minimum(least, block["dense"])
    left = recipe.weight_bytes * (others - least)
    own = embedding["dense"] * (recipe.weight_bytes + recipe.gradient_bytes)
    early = gradients - (least + embedding["dense"]) * each
    instants = (
        (parameters, 0 * saved, saved, of_head),
        (parameters, head["dense"] * each, saved + recomputed, layer),
        (parameters - np.maximum(left, 0), early, _largest(blocks, "saved_bytes"), layer),
        (parameters - recipe.weight_bytes * others, gradients, 0 * saved, own),
    )
    columns = np.broadcast_arrays(
        *(np.asarray(part, dtype=float) for instant in instants for part in instant)
    )
    table = np.array(columns).reshape(len(instants), len(TRANSIENT_PARTS), -1)
    most = table.sum(axis=1).argmax(axis=0)
    chosen = table[most, :, np.arange(table.shape[-1])]
    return dict(zip(TRANSIENT_PARTS, chosen.T, strict=True))


def head_bytes(figures: Figures, head: Amounts) -> Column:
    """What the head needs: its logits in fp32, and where it computes in less its own beside them; then the
    gradient of its own, and those of its weights."""
    logits, own = head["logits_bytes"], head["dense"] * figures.recipe.weight_bytes
    narrow = figures.recipe.activation_bytes
    if narrow >= 4:
        return logits + own
    return np.maximum(logits + logits * narrow / 4, logits * narrow / 4 + own)


def reduces_in_single_backward(figures: Figures, microbatches: Column, pp: int) -> Column:
    """Whether the only backward pass of a step reduces each block when it is done with it."""
    return figures.profile.reduces_by_block & (np.asarray(microbatches) == 1) & (pp == 1)


def frees_gradients(figures: Figures, degree: Column) -> Column:
    """Whether gradients are not whole all the time: as those are that ranks hold alike and compute with as
    they are."""
    return (np.asarray(degree) > 1) | (figures.recipe.master_bytes > 0)


def temporary_bytes(figures: Figures, kinds: Sequence[Amounts], head: Amounts | None) -> Column:
    """What the largest operation of a stage needs: a tensor and its gradient, or the logits, and gradients of
    weights before they are added up: a layer's, or each block's own."""
    weight_bytes = figures.recipe.weight_bytes
    layer = _largest(kinds, "dense") * weight_bytes
    found = 2 * _largest(kinds, "largest_bytes") + layer
    if head is None:
        return found
    if not figures.profile.reduces_by_block:
        return np.maximum(found, head["logits_bytes"] + layer)
    return np.maximum(found, head_bytes(figures, head))


def reduced_bytes(
    figures: Figures, kinds: Sequence[Amounts], head: Amounts | None, single_backward: Column
) -> Column:
    """What a block's gradients need when they are sent: whole, in the place of weights that are not needed
    again (at once) or beside them, and copied."""
    if not figures.profile.reduces_by_block:
        return np.zeros(1)
    weights = _largest([*kinds, *([] if head is None else [head])], "dense")
    recipe = figures.recipe
    return weights * (recipe.gradient_bytes + np.where(single_backward, 0, recipe.weight_bytes))


def _largest(blocks: Sequence[Amounts], name: str) -> Column:
    found = blocks[0][name]
    for block in blocks[1:]:
        found = np.maximum(found, block[name])
    return found


def _states(
    figures: Figures, family: Family, shardings: Shardings, dense: Column, expert: Column
) -> tuple[dict[str, Column], Column]:
    """What a rank keeps of weights, gradients and optimizer; and optimizer bytes on its host."""
    recipe, d, e = figures.recipe, shardings.dense, shardings.expert
    states = dense / d.optim * own_bytes(figures, d) + expert / e.optim * own_bytes(figures, e)
    single_backward = reduces_in_single_backward(figures, family.microbatches, family.pp)
    dense_grad, expert_grad = (np.where(single_backward & (f.grad == 1), f.optim, f.grad) for f in (d, e))
    is_offloaded = offloads_optimizer(family.rows)
    resident = {
        "parameters": (dense / d.param + expert / e.param) * recipe.weight_bytes,
        "gradients": (dense / dense_grad + expert / expert_grad) * recipe.gradient_bytes,
        "optimizer": np.where(is_offloaded, 0.0, states),
    }
    on_host = (dense / d.optim + expert / e.optim) * host_bytes(figures)
    return resident, np.where(is_offloaded, on_host, 0.0)


def host_bytes(figures: Figures) -> int:
    """Of an element whose states are on the host: these, a master copy, and the weight that goes back."""
    return figures.state_bytes + figures.recipe.master_bytes + figures.recipe.weight_bytes


def own_bytes(figures: Figures, sharding: Sharding) -> Column:
    """Of an element that a rank's optimizer owns: states, a master copy, or its own copy of weights that are
    less divided elsewhere."""
    recipe = figures.recipe
    own = recipe.master_bytes + figures.state_bytes
    if figures.profile.reduces_by_block and recipe.master_bytes == 0 and figures.state_bytes > 0:
        return own + np.where(sharding.param < sharding.optim, recipe.weight_bytes, 0)
    return own


def _activations(
    family: Family, kinds: Sequence[Amounts], stage: Mapping[str, Column], layers: Column, rank: int
) -> tuple[Column, Column, Column]:
    """Bytes of activations: what is stored on the device; what is made again there, of one layer, or of the
    whole stage where it waits for the weights, and the gradients that wait with it; and on the host."""
    pairs = in_flight(family, rank)
    saved = saved_bytes(family.rows, layers, stage)
    is_offloaded = offloads_activations(family.rows)
    all_saved = _largest(kinds, "saved_bytes")
    inputs, recompute = _largest(kinds, "input_bytes"), family.rows.recompute
    # While one layer computes, what another keeps comes or goes.
    other = np.where(family.rows.recompute_layers < layers, all_saved, inputs)
    pair = np.where(recompute == "selective", 2 * _largest(kinds, "saved_selective_bytes"), 2 * all_saved)
    pair = np.where(recompute == "full", inputs + other, pair)
    on_device = np.where(is_offloaded, np.minimum(saved, pair), pairs * saved)
    recomputed = np.where(recompute == "full", all_saved - inputs, 0.0)
    waits = pending_weights(family, rank)
    recomputed = (
        np.maximum(recomputed, waits * (stage["saved_bytes"] - saved)) + waits * stage["output_bytes"]
    )
    return on_device, recomputed, np.where(is_offloaded, pairs * saved, 0.0)


def boundary_buffers(figures: Figures, microbatches: Column, tp: Column) -> Column:
    """How many messages of a tensor rank a stage of a pipeline has room for: two each way, or all of a step,
    whole."""
    if figures.profile.buffers_all_microbatches:
        return np.maximum(4, 2 * microbatches * tp)
    return 4


def _shared(
    figures: Figures, family: Family, shardings: Shardings, kinds: Sequence[Amounts]
) -> dict[str, Column]:
    """Parts that are the same on every stage."""
    rows, efficiency, recipe = family.rows, figures.efficiency, figures.recipe
    tokens = rows.micro_batch_size * figures.job.seq_len / rows.cp
    hidden = tokens / rows.tp * figures.model.hidden * recipe.activation_bytes
    buffers = boundary_buffers(figures, family.microbatches, rows.tp)
    communicators = 1 + sum(
        (getattr(rows, axis) > 1).astype(np.int64) for axis in ("tp", "cp", "pp", "dp", "ep")
    )
    gathered = np.where(shardings.dense.param > 1, _largest(kinds, "dense"), 0.0) + np.where(
        shardings.expert.param > 1, _largest(kinds, "expert"), 0.0
    )
    return {
        "gathered": 2 * recipe.weight_bytes * gathered,
        "buffers": buffers * hidden * (family.pp > 1),
        "communicators": efficiency.communicator_bytes * communicators,
        "context": efficiency.context_bytes,
    }
