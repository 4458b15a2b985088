"""Memory of a rank, part by part (docs/concepts/cost-model.md, section 14).

`memory_of` gives the bytes of every rank at its peak. Functions for single parts also serve the lower bounds
of the proof.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from shardwise_verify.layers import Amounts
from shardwise_verify.problem import Figures
from shardwise_verify.schedules import (
    IN_FLIGHT,
    UNREDUCED,
    WAITING,
    moments_of,
    moments_until_reduction,
)
from shardwise_verify.sharding import Sharding, Shardings
from shardwise_verify.strategy_rows import Column, Family, first_largest
from shardwise_verify.times import RankElements, offloads_activations, offloads_optimizer, saved_bytes

ALLOCATED = (
    "parameters", "gradients", "optimizer", "gathered", "activations", "temporaries", "buffers",
)  # fmt: skip
TRANSIENT_PARTS = ("parameters", "gradients", "activations", "temporaries")
"""Parts that are freed and allocated during a single backward pass."""

PARTS = (*ALLOCATED, "fragmentation", "communicators", "context")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of every pipeline rank at its peak, by parts and in total on its device; and the largest bytes
    on a host."""

    parts: tuple[Mapping[str, Column], ...]
    of_ranks: tuple[Column, ...]
    host_bytes: Column

    @property
    def device_bytes(self) -> Column:
        """Per row, the bytes of the rank that needs most of its device."""
        return reduce(np.maximum, self.of_ranks)

    def tightest(self, row: int) -> tuple[int, dict[str, float]]:
        """The pipeline rank that needs most of its device in a row (of equal ones the lowest), and the parts
        of its bytes."""
        rank = int(first_largest([one[row] for one in self.of_ranks]))
        shape = self.of_ranks[rank].shape
        parts = self.parts[rank]
        return rank, {name: float(np.broadcast_to(parts[name], shape)[row]) for name in PARTS}


def memory_of(
    figures: Figures,
    family: Family,
    shardings: Shardings,
    blocks: Sequence[Amounts],
    stages: Sequence[Mapping[str, Column]],
    layers: Sequence[Column],
    elements: RankElements,
    copies: Sequence[Column],
    of_stages: tuple[Sequence[Column], Sequence[Column]],
) -> Memory:
    """The memory of every row; `copies` are the bytes of copies of weights in the dtype of the matmuls,
    `of_stages` the trained elements of each stage, dense and expert ones."""
    of_ranks: list[Column] = []
    parts_of_ranks: list[Mapping[str, Column]] = []
    host: Column = np.zeros(len(family.rows))
    *kinds, embedding, head = blocks
    shared = _shared(figures, family, shardings, kinds)
    ends = np.maximum(embedding["dense"], head["dense"])
    trained_ends = np.maximum(embedding["trained_dense"], head["trained_dense"])
    dense, expert = elements.dense, elements.expert
    weights = reduce(np.maximum, [one + other for one, other in zip(dense, expert, strict=True)])
    if figures.profile.gathered_elements:
        shared["gathered"] = prefetched_bytes(figures, shardings, weights, ends)
    single_backward = reduces_in_single_backward(figures, family.microbatches, family.pp)
    is_early = (shardings.dense.grad > 1) | (single_backward & (shardings.dense.optim > 1))
    recomputed, nothing = _recomputed(family, kinds), np.zeros(len(family.rows))
    is_whole = has_whole_stages(figures, family)
    counted = moments_until_reduction if is_whole else moments_of
    for rank in range(family.pp):
        states, host_states = _states(figures, family, shardings, elements, rank)
        states["parameters"] = states["parameters"] + np.where(shardings.dense.param == 1, copies[rank], 0)
        counts_of_rank = counted(family.schedule, family.pp, family.vpp, family.microbatches)[rank]
        moments = [
            _at_moment(figures, family, kinds, head, stages, layers, rank, counts, single_backward)
            for counts in counts_of_rank
        ]
        columns = [np.array([getattr(one, name) + nothing for one in moments]) for name in _MOMENT_FIELDS]
        saved, waiting, largest, reduced, on_host = columns
        unreduced = np.zeros_like(saved)
        for moment, counts in enumerate(counts_of_rank if is_whole else ()):
            for stage, is_there in zip(family.stages_of(rank), counts[UNREDUCED], strict=True):
                if is_there:
                    of_stage = of_stages[0][stage], of_stages[1][stage]
                    unreduced[moment] += _unreduced_bytes(figures, shardings, *of_stage)
        sent = np.where(is_early, np.maximum(reduced - largest, 0), 0)
        most = (saved + waiting + largest + sent + unreduced).argmax(axis=0), np.arange(len(family.rows))
        whole = states["gradients"]
        states["gradients"] = states["gradients"] + sent[most] + unreduced[most]
        activations = saved[most] + waiting[most] + recomputed
        parts = {**states, **shared, "activations": activations, "temporaries": largest[most]}
        if family.pp == 1 and np.any(single_backward):
            degree = shardings.dense.optim
            is_transient = single_backward & frees_gradients(figures, degree) & (shardings.dense.param == 1)
            transient = single_backward_parts(
                figures, blocks[:-1], head, is_shared=degree > 1,
                saved=saved[most], recomputed=recomputed,
                parameters=states["parameters"], gradients=whole, degree=degree,
                others=dense[rank] - blocks[-2]["dense"],
            )  # fmt: skip
            parts |= {name: np.where(is_transient, transient[name], parts[name]) for name in TRANSIENT_PARTS}
        if figures.profile.bucket_elements:
            layer = temporary_bytes(figures, kinds, None)
            parts["buffers"] = parts["buffers"] + bucketed_bytes(
                figures, family, shardings, elements.trained_dense[rank] + elements.trained_expert[rank],
                parts, np.maximum(layer, trained_ends * figures.recipe.weight_bytes),
            )  # fmt: skip
        allocated = sum(parts[name] for name in ALLOCATED)
        parts["fragmentation"] = figures.efficiency.fragmentation_ratio * allocated
        parts_of_ranks.append(parts)
        of_ranks.append(sum(parts[name] for name in PARTS) + np.zeros(len(family.rows)))
        host = np.maximum(host, host_states + on_host.max(axis=0))
    host = np.where(host > 0, host + figures.profile.host_process_bytes, host)
    return Memory(parts=tuple(parts_of_ranks), of_ranks=tuple(of_ranks), host_bytes=host)


@dataclass(frozen=True, slots=True)
class _Moment:
    """Bytes of a rank at a moment: saved activations on the device, what waits for weight gradients, the
    largest operation, gradients that are sent, and activations on the host."""

    saved: Column
    waiting: Column
    largest: Column
    reduced: Column
    on_host: Column


_MOMENT_FIELDS = ("saved", "waiting", "largest", "reduced", "on_host")


def _at_moment(
    figures: Figures,
    family: Family,
    kinds: Sequence[Amounts],
    head: Amounts,
    stages: Sequence[Mapping[str, Column]],
    layers: Sequence[Column],
    rank: int,
    counts: Column,
    single_backward: Column,
) -> _Moment:
    """The bytes of `rank` with `counts[IN_FLIGHT]` micro-batches in flight on its stages, `counts[WAITING]`
    of which the weight gradients are missing."""
    own, rows = family.stages_of(rank), family.rows
    in_flight = sum(
        int(count) * saved_bytes(rows, layers[stage], stages[stage])
        for stage, count in zip(own, counts[IN_FLIGHT], strict=True)
    )
    waiting = sum(
        int(count) * stages[stage]["waiting_bytes"] for stage, count in zip(own, counts[WAITING], strict=True)
    )
    moved = sum(
        int(count) * stages[stage]["moved_bytes"] for stage, count in zip(own, counts[IN_FLIGHT], strict=True)
    )
    held = sum(int(count) * layers[stage] for stage, count in zip(own, counts[IN_FLIGHT], strict=True))
    # A layer is on its way to the host, and one on its way back.
    moving = np.minimum(2, held) * _largest(kinds, "offloaded_bytes")
    is_offloaded = offloads_activations(rows)
    heads = int(counts[IN_FLIGHT][own.index(family.stages - 1)]) if family.stages - 1 in own else 0
    largest = temporary_bytes(figures, kinds, head if heads else None)
    return _Moment(
        saved=np.where(is_offloaded, _copied_bytes(family, kinds, stages, layers, own), in_flight) + moving,
        waiting=waiting,
        # The losses of all micro-batches in flight are saved.
        largest=largest + max(heads - 1, 0) * head["logits_bytes"],
        reduced=reduced_bytes(figures, kinds, head if heads else None, single_backward)
        + max(heads - 1, 0) * head["logits_bytes"],
        on_host=np.where(is_offloaded, in_flight, 0.0) + moved,
    )


def _unreduced_bytes(figures: Figures, shardings: Shardings, dense: Column, expert: Column) -> Column:
    """What the whole gradients of a stage, in the dtype of their reduction, have beyond their shards."""
    recipe, found = figures.recipe, np.zeros(1)
    for sharding, elements in ((shardings.dense, dense), (shardings.expert, expert)):
        beyond = recipe.reduced_bytes - recipe.gradient_bytes / sharding.grad
        found = found + np.where(sharding.grad > 1, elements * beyond, 0.0)
    return found


def _copied_bytes(
    family: Family,
    kinds: Sequence[Amounts],
    stages: Sequence[Mapping[str, Column]],
    layers: Sequence[Column],
    own: Sequence[int],
) -> Column:
    """Bytes on the device while saved activations are copied to the host: two layers, one that computes and
    one that is copied, or all of a rank's stages where these have less."""
    rows, number = family.rows, len(own)
    names = ("saved_bytes", "input_bytes", "saved_selective_bytes")
    together = {name: sum(stages[stage][name] for stage in own) for name in names}
    of_rank = sum(layers[stage] for stage in own)
    repeated = np.minimum(rows.recompute_layers * number, of_rank) / np.maximum(of_rank, 1)
    full = together["saved_bytes"] - repeated * (together["saved_bytes"] - together["input_bytes"])
    saved = np.where(
        rows.recompute == "selective", together["saved_selective_bytes"], together["saved_bytes"]
    )
    saved = np.where(rows.recompute == "full", full, saved)
    all_saved, inputs = _largest(kinds, "saved_bytes"), _largest(kinds, "input_bytes")
    most = reduce(np.maximum, (layers[stage] for stage in own))
    other = np.where(rows.recompute_layers < most, all_saved, inputs)
    pair = np.where(
        rows.recompute == "selective", 2 * _largest(kinds, "saved_selective_bytes"), 2 * all_saved
    )
    return np.minimum(saved, np.where(rows.recompute == "full", inputs + other, pair))


def _recomputed(family: Family, kinds: Sequence[Amounts]) -> Column:
    """Bytes of the tensors of one layer (of one half of it under selective recomputation) that exist at once
    while it is recomputed."""
    recompute = family.rows.recompute
    found = np.where(recompute == "selective", _largest(kinds, "selective_peak_bytes"), 0.0)
    full = _largest(kinds, "saved_bytes") - _largest(kinds, "input_bytes")
    return np.where(recompute == "full", full, found)


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
    sent = _largest(blocks, "trained_dense") * recipe.reduced_bytes
    layer = np.where(is_shared, np.maximum(layer, sent), layer)
    sent = head["trained_dense"] * recipe.reduced_bytes
    of_head = np.where(is_shared, np.maximum(of_head, sent), of_head)
    each = recipe.gradient_bytes / degree
    least, least_trained = blocks[0]["dense"], blocks[0]["trained_dense"]
    for block in blocks[1:]:
        least = np.minimum(least, block["dense"])
        least_trained = np.minimum(least_trained, block["trained_dense"])
    left = recipe.weight_bytes * (others - least)
    own = embedding["trained_dense"] * (recipe.weight_bytes + recipe.reduced_bytes)
    early = gradients - (least_trained + embedding["trained_dense"]) * each
    instants = (
        (parameters, 0 * saved, saved, of_head),
        (parameters, head["trained_dense"] * each, saved + recomputed, layer),
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
    """Bytes that the head needs: the loss; then the gradient of the logits and the weight gradients."""
    own = head["trained_dense"] * figures.recipe.weight_bytes
    narrow = head["logits_bytes"] * figures.recipe.activation_bytes / 4
    return np.maximum(loss_bytes(figures, head), narrow + own)


def loss_bytes(figures: Figures, head: Amounts) -> Column:
    """Bytes of logits when the last loss of a head is computed; `logits_bytes` has 4 for each logit of each
    loss. Losses of prediction modules come first: what their backward passes read is saved."""
    narrow = figures.recipe.activation_bytes
    saved: float = 4
    profile = figures.profile
    match profile.loss or ("megatron" if profile.reduces_by_block else "in_place"):
        case "megatron":
            peak: float = 4 if narrow == 4 else 4 + narrow
        case "eager":
            peak = 12
        case "compiled":
            peak, saved = 2 * narrow, narrow
        case "fused":
            peak = saved = narrow
        case _:
            peak = 4
    modules = figures.model.head_layers
    return head["logits_bytes"] * (peak + modules * saved) / (4 * (1 + modules))


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
    layer = _largest(kinds, "trained_dense") * weight_bytes
    found = 2 * _largest(kinds, "largest_bytes") + layer
    if head is None:
        return found
    if not figures.profile.reduces_by_block:
        return np.maximum(found, loss_bytes(figures, head) + layer)
    return np.maximum(found, head_bytes(figures, head))


def reduced_bytes(
    figures: Figures, kinds: Sequence[Amounts], head: Amounts | None, single_backward: Column
) -> Column:
    """Bytes of a block's gradients when they are sent: unsharded, in the place of freed weights (single
    backward pass) or in addition to them, and a copy."""
    if not figures.profile.reduces_by_block:
        return np.zeros(1)
    weights = _largest([*kinds, *([] if head is None else [head])], "trained_dense")
    recipe = figures.recipe
    return weights * (recipe.reduced_bytes + np.where(single_backward, 0, recipe.weight_bytes))


def _largest(blocks: Sequence[Amounts], name: str) -> Column:
    found = blocks[0][name]
    for block in blocks[1:]:
        found = np.maximum(found, block[name])
    return found


def _states(
    figures: Figures, family: Family, shardings: Shardings, elements: RankElements, rank: int
) -> tuple[dict[str, Column], Column]:
    """Bytes of weights, gradients and optimizer states of a rank; and its optimizer bytes on the host. Frozen
    weights have neither of the latter."""
    recipe, d, e = figures.recipe, shardings.dense, shardings.expert
    dense, expert = elements.trained_dense[rank], elements.trained_expert[rank]
    all_dense, all_expert = elements.dense[rank], elements.expert[rank]
    states = dense / d.optim * own_bytes(figures, d) + expert / e.optim * own_bytes(figures, e)
    for frozen, f in ((elements.frozen_dense[rank], d), (elements.frozen_expert[rank], e)):
        states = states + frozen / f.optim * frozen_bytes(figures, f)
    single_backward = reduces_in_single_backward(figures, family.microbatches, family.pp)
    dense_grad, expert_grad = (np.where(single_backward & (f.grad == 1), f.optim, f.grad) for f in (d, e))
    is_offloaded = offloads_optimizer(family.rows)
    is_whole = has_whole_stages(figures, family)
    param_d, param_e = (np.where(is_whole, 1, degree) for degree in (d.param, e.param))
    resident = {
        "parameters": (all_dense / param_d + all_expert / param_e) * recipe.weight_bytes,
        "gradients": (dense / dense_grad + expert / expert_grad) * recipe.gradient_bytes,
        "optimizer": np.where(is_offloaded, 0.0, states),
    }
    if figures.profile.offloads_gradients:
        is_there = ~is_offloaded | (d.grad == 1)
        whole = np.where(d.grad == 1, (dense + expert) * narrow_gradient_bytes(figures), 0.0)
        resident["gradients"] = np.where(is_there, resident["gradients"] + whole, 0.0)
    elif figures.profile.keeps_narrow_gradients:
        whole = (dense + expert) * narrow_gradient_bytes(figures)
        resident["gradients"] = resident["gradients"] + np.where(d.grad == 1, whole, 0.0)
    on_host = (dense / d.optim + expert / e.optim) * host_bytes(figures)
    return resident, np.where(is_offloaded, on_host, 0.0)


def has_whole_stages(figures: Figures, family: Family) -> bool:
    """Whether a rank has all parameters and gradients of its stages, also sharded ones, until the backward
    passes of a step are done: so does PyTorch's pipelining."""
    return figures.profile.whole_in_pipelines and family.pp > 1


def host_bytes(figures: Figures) -> float:
    """Host bytes per element with optimizer offload: states, master weight, and the weight to be copied
    back; or those of the software, and the gradients if they are offloaded too."""
    profile = figures.profile
    if profile.host_weight_bytes:
        moved = figures.recipe.gradient_bytes if profile.offloads_gradients else 0
        return figures.state_bytes + profile.host_weight_bytes + moved
    return figures.state_bytes + figures.recipe.master_bytes + figures.recipe.weight_bytes


def narrow_gradient_bytes(figures: Figures) -> float:
    """Bytes per element of gradients that are there a second time, in the dtype of the weights."""
    recipe = figures.recipe
    is_wide = recipe.gradient_bytes > recipe.weight_bytes
    return recipe.weight_bytes if figures.profile.keeps_narrow_gradients and is_wide else 0


def prefetched_bytes(figures: Figures, shardings: Shardings, weights: Column, ends: Column) -> Column:
    """Bytes of sharded weights that are gathered ahead: up to a number of elements, or the larger end of the
    model, and no more than all `weights`."""
    most = np.minimum(np.maximum(ends, figures.profile.gathered_elements), weights)
    return np.where(shardings.dense.param > 1, most * figures.recipe.weight_bytes, 0.0)


def bucketed_bytes(
    figures: Figures,
    family: Family,
    shardings: Shardings,
    weights: Column,
    parts: Mapping[str, Column],
    layer: Column,
) -> Column:
    """Bytes by which reduction buckets and gradients for the update exceed the other `parts` of a rank of
    `weights` elements; `layer` are the temporaries of a layer, or the gradient of an end of the model.

    While these are there, there are the buckets and a copy of one. In the update there are gradients in both
    dtypes, and no activations, temporaries and gathered weights.
    """
    profile, recipe, sharding = figures.profile, figures.recipe, shardings.dense
    narrow, wide = recipe.weight_bytes, recipe.gradient_bytes
    shards_parameters = sharding.param > 1
    is_whole = (sharding.grad == 1) & (narrow_gradient_bytes(figures) > 0)
    pair = profile.bucket_elements * narrow * (2 if profile.state_overlap > 0 else 1)
    buckets = np.where(shards_parameters, profile.bucket_elements * wide, np.where(is_whole, 0.0, pair))
    both = np.where(sharding.grad > 1, narrow + wide if wide > narrow else narrow, 0.0)
    copied = np.minimum(weights, profile.bucket_elements) * np.where(shards_parameters | is_whole, wide, both)
    backward = np.maximum(parts["temporaries"], layer + copied) - parts["temporaries"] + buckets
    own = weights / sharding.optim
    cast = own * (wide if wide >= 4 else wide + 4)
    at_once = np.minimum(own, profile.update_elements) * (wide if wide >= 4 else wide + 4)
    cast = np.where(shards_parameters, at_once, np.where(wide > narrow, 0.0, cast))
    update = np.where(offloads_optimizer(family.rows), 0.0, cast) + np.where(shards_parameters, buckets, 0.0)
    gone: Column = parts["activations"] + parts["temporaries"] + parts["gathered"]
    return np.maximum(backward, update - gone)


def own_bytes(figures: Figures, sharding: Sharding) -> Column:
    """Bytes per element that a rank's optimizer owns: states, and a master weight or an own copy of
    weights that are sharded less elsewhere."""
    recipe = figures.recipe
    own = recipe.master_bytes + figures.state_bytes
    if figures.profile.reduces_by_block and recipe.master_bytes == 0 and figures.state_bytes > 0:
        return own + np.where(sharding.param < sharding.optim, recipe.weight_bytes, 0)
    return own


def frozen_bytes(figures: Figures, sharding: Sharding) -> Column:
    """Bytes per element of a rank's own share of frozen weights in addition to the weights in use: none, but
    where fully_shard has them in the dtype of the trained ones of the same block."""
    if not figures.profile.reduces_by_block:
        return np.full(1, figures.recipe.master_bytes * figures.profile.has_wide_frozen_weights)
    if figures.recipe.master_bytes > 0:
        return np.full(1, figures.recipe.master_bytes)
    return np.where(sharding.param < sharding.optim, figures.recipe.weight_bytes, 0)


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
        "gathered": 2 * recipe.weight_bytes * gathered * (not has_whole_stages(figures, family)),
        "buffers": buffers * hidden * (family.pp > 1),
        "communicators": efficiency.communicator_bytes * communicators,
        "context": efficiency.context_bytes,
    }
