"""Bytes of a rank, part by part (docs/cost-model.md, section 14)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.check.durations import offloads_activations, offloads_optimizer, stored_bytes
from shardwise.check.figures import Figures
from shardwise.check.layer import Amounts
from shardwise.check.rows import Column, Family
from shardwise.check.schedules import in_flight
from shardwise.check.sharding import Shardings

ALLOCATED = (
    "parameters", "gradients", "optimizer", "gathered", "activations", "temporaries", "buffers",
)  # fmt: skip
PARTS = (*ALLOCATED, "fragmentation", "communicators", "context")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of the stage that needs most of its device, its pipeline rank, and the most bytes of a host."""

    parts: Mapping[str, Column]
    device_bytes: Column
    host_bytes: Column
    rank: Column


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
    best: Memory | None = None
    *kinds, _, head = blocks
    shared = _shared(figures, family, shardings, kinds)
    for number, stage in enumerate(stages):
        rank = family.rank_of(number)
        states, host_states = _states(figures, family, shardings, dense[rank], expert[rank])
        held, host_held = _activations(family, kinds, stage, layers[number], in_flight(family, rank))
        largest = temporary_bytes(figures, kinds)
        if number == len(stages) - 1:
            largest = np.maximum(largest, head_temporary_bytes(figures, kinds, head))
            if family.schedule == "gpipe" or family.splits_backward:
                # The losses of all microbatches in flight are kept.
                largest = largest + (in_flight(family, rank) - 1) * head["logits_bytes"]
        parts = {**states, **shared, "activations": held, "temporaries": largest}
        allocated = sum(parts[name] for name in ALLOCATED)
        parts["fragmentation"] = figures.efficiency.fragmentation_ratio * allocated
        device = sum(parts[name] for name in PARTS)
        found = Memory(
            parts={name: parts[name] + 0.0 * device for name in PARTS},
            device_bytes=device,
            host_bytes=host_states + host_held,
            rank=np.full(len(family.rows), rank),
        )
        best = found if best is None else _tighter(best, found)
    if best is None:
        raise ValueError("a pipeline has at least one stage")
    return best


def temporary_bytes(figures: Figures, kinds: Sequence[Amounts]) -> Column:
    """What the largest operation of a layer needs: a tensor and its gradient, and the gradients of the
    layer's weights before they are added up."""
    return 2 * _largest(kinds, "largest_bytes") + _largest(kinds, "dense") * figures.recipe.weight_bytes


def head_temporary_bytes(figures: Figures, kinds: Sequence[Amounts], head: Amounts) -> Column:
    """The same of the head: the logits in the place of the tensor and its gradient."""
    return head["logits_bytes"] + _largest(kinds, "dense") * figures.recipe.weight_bytes


def _tighter(a: Memory, b: Memory) -> Memory:
    """Of each row the one with more device bytes, the first of equal ones."""
    more = b.device_bytes > a.device_bytes
    return Memory(
        parts={name: np.where(more, b.parts[name], a.parts[name]) for name in PARTS},
        device_bytes=np.where(more, b.device_bytes, a.device_bytes),
        host_bytes=np.maximum(a.host_bytes, b.host_bytes),
        rank=np.where(more, b.rank, a.rank),
    )


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
    states = (dense / d.optim + expert / e.optim) * (recipe.master_bytes + figures.state_bytes)
    is_away = offloads_optimizer(family.rows)
    kept = {
        "parameters": (dense / d.param + expert / e.param) * recipe.weight_bytes,
        "gradients": (dense / d.grad + expert / e.grad) * recipe.gradient_bytes,
        "optimizer": np.where(is_away, 0.0, states),
    }
    return kept, np.where(is_away, states, 0.0)


def _activations(
    family: Family, kinds: Sequence[Amounts], stage: Mapping[str, Column], layers: Column, pairs: int
) -> tuple[Column, Column]:
    """Bytes of activations on the device and on the host."""
    stored = stored_bytes(family.rows, layers, stage)
    is_away = offloads_activations(family.rows)
    kept = _largest(kinds, "kept_bytes")
    near = np.where(is_away, np.minimum(pairs * stored, stored + kept), pairs * stored)
    again = np.where(family.rows.recompute == "full", kept - _largest(kinds, "input_bytes"), 0.0)
    return near + again, np.where(is_away, pairs * stored, 0.0)


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
