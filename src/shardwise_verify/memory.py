"""Memory of a rank, part by part (docs/concepts/cost-model.md, section 14).

`memory_of` gives the bytes of every stage. Functions for single parts also serve the lower bounds of the
proof.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from shardwise_verify.layers import Amounts
from shardwise_verify.problem import Figures
from shardwise_verify.schedules import in_flight, pending_weights
from shardwise_verify.sharding import Sharding, Shardings
from shardwise_verify.strategy_rows import Column, Family, first_largest
from shardwise_verify.times import offloads_activations, offloads_optimizer, saved_bytes

ALLOCATED = (
    "parameters", "gradients", "optimizer", "gathered", "activations", "temporaries", "buffers",
)  # fmt: skip
TRANSIENT_PARTS = ("parameters", "gradients", "activations", "temporaries")
"""Parts that are freed and allocated during a single backward pass."""

PARTS = (*ALLOCATED, "fragmentation", "communicators", "context")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of every stage, by parts and in total on its device; the pipeline rank of each stage; and the
    largest bytes on a host."""

    ranks: tuple[int, ...]
    parts: tuple[Mapping[str, Column], ...]
    of_stages: tuple[Column, ...]
    host_bytes: Column

    @property
    def device_bytes(self) -> Column:
        """Per row, the bytes of the stage that needs most of its device."""
        return reduce(np.maximum, self.of_stages)

    def tightest(self, row: int) -> tuple[int, dict[str, float]]:
        """The pipeline rank of the stage that needs most of its device in a row (of equal ones the lowest
        rank), and the parts of its bytes."""
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
            # The losses of all micro-batches in flight are saved.
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
    """Parameters, gradients, activations and temporaries of a single backward pass: one stage, one
    micro-batch, where each block's gradients are reduced when its backward ends.

    The instant with the largest sum of all four counts:

    - at the head: all `saved` activations and no gradients;
    - at the last layer: in addition its `recomputed` activations;
    - at the first layer: all `gradients` but its own and the embedding's, and the activations of one layer;
    - at the embedding: all gradients, and its own in the narrow dtype and as the buffer to be reduced.

    Gradients are sharded over `degree` ranks. Where they are sharded (`is_shared`), the send buffer of a
    block takes the place of its weights. `others` are all elements but the embedding's; their weights are
    freed with their gradients. The last of `blocks` is the embedding.
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
    """Bytes that the head needs: logits in fp32, with a copy in the compute dtype where that is narrower;
    then the gradient of this copy and the weight gradients."""
    logits, own = head["logits_bytes"], head["dense"] * figures.recipe.weight_bytes
    narrow = figures.recipe.activation_bytes
    if narrow >= 4:
        return logits + own
    return np.maximum(logits + logits * narrow / 4, logits * narrow / 4 + own)


def reduces_in_single_backward(figures: Figures, microbatches: Column, pp: int) -> Column:
    """Whether the single backward pass of a step reduces each block's gradients when its backward ends."""
    return figures.profile.reduces_by_block & (np.asarray(microbatches) == 1) & (pp == 1)


def frees_gradients(figures: Figures, degree: Column) -> Column:
    """Whether gradients are freed during the single backward pass. They are not where they are unsharded
    and in the dtype of the weights."""
    return (np.asarray(degree) > 1) | (figures.recipe.master_bytes > 0)


def temporary_bytes(figures: Figures, kinds: Sequence[Amounts], head: Amounts | None) -> Column:
    """Bytes of the largest operation of a stage: a tensor and its gradient, or the logits, and weight
    gradients before they are accumulated: those of a layer, or of each block."""
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
    """Bytes of a block's gradients when they are sent: unsharded, in the place of freed weights (single
    backward pass) or in addition to them, and a copy."""
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
    """Bytes of weights, gradients and optimizer states of a rank; and its optimizer bytes on the host."""
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
    """Host bytes per element with optimizer offload: states, master weight, and the weight to be copied
    back."""
    return figures.state_bytes + figures.recipe.master_bytes + figures.recipe.weight_bytes


def own_bytes(figures: Figures, sharding: Sharding) -> Column:
    """Bytes per element that a rank's optimizer owns: states, and a master weight or an own copy of
    weights that are sharded less elsewhere."""
    recipe = figures.recipe
    own = recipe.master_bytes + figures.state_bytes
    if figures.profile.reduces_by_block and recipe.master_bytes == 0 and figures.state_bytes > 0:
        return own + np.where(sharding.param < sharding.optim, recipe.weight_bytes, 0)
    return own


def _activations(
    family: Family, kinds: Sequence[Amounts], stage: Mapping[str, Column], layers: Column, rank: int
) -> tuple[Column, Column, Column]:
    """Bytes of activations: saved on the device; recomputed on the device; and on the host.

    The recomputed ones are those of one layer, or of the whole stage while weight gradients are pending,
    together with the pending gradients.
    """
    pairs = in_flight(family, rank)
    saved = saved_bytes(family.rows, layers, stage)
    is_offloaded = offloads_activations(family.rows)
    all_saved = _largest(kinds, "saved_bytes")
    inputs, recompute = _largest(kinds, "input_bytes"), family.rows.recompute
    # While one layer computes, the activations of another are copied.
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
    """Messages of a tensor rank for which a pipeline stage has buffers: two per direction, or all of a
    step, unsharded."""
    if figures.profile.buffers_all_microbatches:
        return np.maximum(4, 2 * microbatches * tp)
    return 4


def _shared(
    figures: Figures, family: Family, shardings: Shardings, kinds: Sequence[Amounts]
) -> dict[str, Column]:
    """Parts that are equal on every stage."""
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
