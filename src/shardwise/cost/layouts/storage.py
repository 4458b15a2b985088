"""How parameters wait between uses, what that takes, and what bringing them to their readers costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.cost.layouts.columns import Columns
from shardwise.cost.layouts.conversions import move_s
from shardwise.cost.layouts.edges import edge_of
from shardwise.cost.layouts.forms import Forms, Integers, Values, forms_of, gradient_forms, value_forms
from shardwise.cost.layouts.ground import Ground
from shardwise.cost.sync import PREFETCHED_LAYERS, update_bytes
from shardwise.graph import STATES_SPLIT, WHOLE, WHOLE_SUMMED, shard

NORM_PASSES = 3.0
"""Gradients are read twice and written once for their norm and its clipping."""


def storage_forms(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Forms:
    """How a parameter may be stored."""
    return forms_of(shape, ranks, (*map(shard, range(len(shape))), WHOLE, STATES_SPLIT))


def use_forms(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Forms:
    """To what a parameter with several readers may be brought for all of them."""
    return forms_of(shape, ranks, (*map(shard, range(len(shape))), WHOLE, WHOLE_SUMMED))


def stored(ground: Ground, forms: Forms) -> Columns:
    """What each form (F) holds all the time, and its part of the optimizer's step."""
    recipe, optimizer = ground.machine.recipe, ground.machine.optimizer
    whole = forms.local_elements(value_forms(forms.placements))
    owned = forms.local_elements(forms.placements)
    columns = Columns(
        held_bytes=whole * (recipe.weight_bytes + recipe.gradient_bytes)
        + owned * (recipe.master_bytes + optimizer.state_bytes)
    )
    moved_bytes = update_bytes(ground.machine) + NORM_PASSES * recipe.gradient_bytes
    # Newton-Schulz works on the smaller side of a matrix; vectors are updated element by element.
    width = float(min(forms.shape)) if len(forms.shape) > 1 else 0.0
    speed = ground.machine.matmul_flop_per_s * ground.machine.efficiency.matmul.peak_fraction
    columns.once(
        owned * moved_bytes / ground.stream_bytes_per_s
        + owned * optimizer.work_flop_per_hidden * width / speed
    )
    return columns


@dataclass(frozen=True, slots=True)
class Brought:
    """Bringing a parameter from each form in which it is stored to each in which it is used, (S, U).

    `gather_s` before a use; for the gradient of what is gathered `scatter_s` along axes that split it, and
    `sync_s` for what is left of its sum, or all of it; `update_s` once per step for weights whose states are
    split. Beside what is stored, a use has `gathered_bytes` of weights, and `gradient_bytes`, where its
    reader has another number of elements than is stored; `waiting_bytes` are those of a gradient that cannot
    be added to what is stored.
    """

    gather_s: Values
    scatter_s: Values
    sync_s: Values
    update_s: Values
    gathered_bytes: Values
    gradient_bytes: Values
    waiting_bytes: Values


def brought(ground: Ground, forms: Forms, uses: Integers, bucket: float) -> Brought:
    """From `forms` (S) to placements `uses` (U, axes).

    Software moves the parameters of a block together: this one bears what it is, the share `bucket`, of the
    time of moving all of them as it is moved.
    """
    recipe, mesh = ground.machine.recipe, ground.mesh
    waiting, used = forms.placements[:, None], uses[None]

    def seconds(element_bytes: float, start: Integers, end: Integers) -> Values:
        return bucket * move_s(ground.fabric, mesh, forms.shape, element_bytes / bucket, start, end)

    gather_s = seconds(recipe.weight_bytes, value_forms(waiting), value_forms(used))
    is_gathered = gather_s > 0.0
    whole = gradient_forms(used)
    parts = np.where(is_gathered[..., None] & (waiting >= 0), waiting, whole)
    scatter_s = seconds(recipe.gradient_bytes, whole, parts)
    sync_s = seconds(recipe.gradient_bytes, parts, waiting)
    update_s = seconds(recipe.weight_bytes, waiting, value_forms(waiting)) + 0.0 * gather_s
    in_use = forms.local_elements(value_forms(used)) + 0.0 * gather_s
    gradient_bytes = recipe.gradient_bytes * in_use
    is_of_more = in_use != forms.local_elements(value_forms(waiting))
    is_other = (value_forms(waiting) != value_forms(used)).any(axis=-1)
    return Brought(
        gather_s=gather_s,
        scatter_s=scatter_s,
        sync_s=sync_s,
        update_s=update_s,
        gathered_bytes=np.where(is_gathered, recipe.weight_bytes * in_use, 0.0),
        gradient_bytes=np.where(is_of_more, gradient_bytes, 0.0),
        waiting_bytes=np.where(is_other, gradient_bytes, 0.0),
    )


def _gathered_at_once(ground: Ground) -> float:
    """How many gathered weights are there at a time: those of this use, and of the next where they come
    beside computation."""
    return PREFETCHED_LAYERS if ground.profile.shard_overlap > 0.0 else 1.0


def used_beside(
    ground: Ground,
    moved: Brought,
    *,
    forward_s: Values,
    backward_s: Values,
    again_s: Values | None,
    working_bytes: Values,
) -> Columns:
    """Costs of one use, beside `forward_s` and `backward_s` of its reader's computation, which needs
    `working_bytes` meanwhile; `again_s` is what a recomputation computes once more, for which weights are
    gathered once more too.

    Sharded weights are gathered beside the forward pass and one half of the backward pass, their gradients
    scattered beside the other half. Gradients of weights that are stored whole, and along axes along which
    sharded ones are, are summed once, beside any backward computation of the step; what others updated is
    gathered beside the next forward pass.
    """
    copies_bytes = _gathered_at_once(ground) * moved.gathered_bytes
    columns = Columns(peak_bytes=working_bytes + copies_bytes + moved.gradient_bytes)
    profile = ground.profile
    half_s = backward_s / 2.0
    columns.forward(ground.beside(moved.gather_s, forward_s, profile.shard_overlap)[0])
    if again_s is not None:
        columns.hidden_backward(*ground.beside(moved.gather_s, again_s, profile.shard_overlap))
    columns.hidden_backward(*ground.beside(moved.gather_s, half_s, profile.shard_overlap))
    columns.hidden_backward(*ground.beside(moved.scatter_s, half_s, profile.shard_overlap))
    columns.summed_gradients(moved.sync_s, profile.data_overlap)
    columns.once(moved.update_s - np.minimum(profile.state_overlap * moved.update_s, forward_s))
    return columns


def used_by_all(ground: Ground, moved: Brought, readers: int) -> Columns:
    """Costs (S, U) of bringing a parameter to one place for several readers, for each of them in both passes,
    and of its one gradient, which may hide, and which is held where it cannot be added to what is stored."""
    columns = Columns(
        held_bytes=moved.waiting_bytes,
        peak_bytes=_gathered_at_once(ground) * moved.gathered_bytes + moved.gradient_bytes,
    )
    profile = ground.profile
    columns.forward(readers * moved.gather_s)
    columns.blocked(readers * moved.gather_s)
    columns.once(moved.update_s)
    overlap = np.where(moved.gather_s > 0.0, profile.shard_overlap, profile.data_overlap)
    columns.summed_gradients(moved.scatter_s + moved.sync_s, overlap)
    return columns


def used_by_one(
    ground: Ground, shape: tuple[int, ...], shared: Integers, own: Integers, working_bytes: Values
) -> Columns:
    """Costs (U, K) of one of several readers: from where a parameter lies for all, `shared` (U, axes), to
    where this one reads it, `own` (K, axes), in both passes, and of its gradient back."""
    recipe = ground.machine.recipe
    edge = edge_of(
        ground, shape, shared, own, needs_gradient=True,
        value_bytes=recipe.weight_bytes, gradient_bytes=recipe.gradient_bytes,
    )  # fmt: skip
    columns = Columns()
    columns.forward(edge.forward_s)
    columns.blocked(edge.forward_s + edge.backward_s)
    copy = edge.end_bytes * (1.0 + recipe.gradient_bytes / recipe.weight_bytes)
    columns.peak_bytes = np.where(edge.is_same, 0.0, working_bytes[None] + copy)
    return columns
