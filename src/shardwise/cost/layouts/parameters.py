"""Costs of parameters: storage, optimizer update, gathering for their readers, gradient reduction.

`storage_costs` are for each stored placement, `parameter_traffic` for each pair of stored and used
placements. A parameter has one reader (`single_reader_costs`), or is shared (`shared_parameter_costs` for all
readers, `one_reader_costs` for each).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.cost.layouts.context import CostColumns, CostContext
from shardwise.cost.layouts.operators import edge_of
from shardwise.cost.layouts.redistribute import (
    Integers,
    PlacementTable,
    Values,
    gradient_placements,
    placement_table,
    redistribute_s,
    value_placements,
)
from shardwise.cost.sharding import PREFETCHED_LAYERS, norm_passes_s, update_s
from shardwise.graph import REPLICATE, REPLICATE_SHARD_STATES, REPLICATE_SUM_GRAD, shard


def storage_placements(shape: tuple[int, ...], ranks: tuple[int, ...]) -> PlacementTable:
    """Placements in which a parameter may be stored."""
    return placement_table(shape, ranks, (*map(shard, range(len(shape))), REPLICATE, REPLICATE_SHARD_STATES))


def use_placements(shape: tuple[int, ...], ranks: tuple[int, ...]) -> PlacementTable:
    """Placements of a shared parameter for all of its readers."""
    return placement_table(shape, ranks, (*map(shard, range(len(shape))), REPLICATE, REPLICATE_SUM_GRAD))


def storage_costs(context: CostContext, table: PlacementTable) -> CostColumns:
    """Resident bytes of each stored placement, and its part of the optimizer update."""
    recipe, optimizer = context.machine.recipe, context.machine.optimizer
    whole = table.local_elements(value_placements(table.placements))
    owned = table.local_elements(table.placements)
    columns = CostColumns()
    columns.hold(whole * recipe.weight_bytes, "parameters")
    columns.hold(whole * recipe.gradient_bytes, "gradients")
    columns.hold(owned * (recipe.master_bytes + optimizer.state_bytes), "optimizer")
    width = float(min(table.shape)) if len(table.shape) > 1 else 0.0  # vectors are updated element by element
    columns.once(update_s(context.machine, owned, width) + norm_passes_s(context.machine, owned), "optimizer")
    return columns


@dataclass(frozen=True, slots=True)
class ParameterTraffic:
    """Collectives of a parameter from each stored placement to each used one; shape (S, U).

    `gather_s` is the gather before a use. `reduce_scatter_s` reduces the gradient of a gathered parameter
    along the axes that shard it, `sync_s` reduces the rest of the gradient, or all of it. `update_s` gathers
    updated weights once per step where optimizer states are sharded.

    Bytes of a use in addition to storage: `gathered_bytes` of weights; `gradient_bytes` where the reader has
    another number of elements than is stored; `separate_gradient_bytes` of a gradient that cannot be
    accumulated in the stored one.
    """

    gather_s: Values
    reduce_scatter_s: Values
    sync_s: Values
    update_s: Values
    gathered_bytes: Values
    gradient_bytes: Values
    separate_gradient_bytes: Values


def parameter_traffic(
    context: CostContext, table: PlacementTable, uses: Integers, bucket: float
) -> ParameterTraffic:
    """Traffic from the placements of `table` (S) to placements `uses` (U, axes).

    Software batches the parameters of a block into one message. This parameter takes the share `bucket` of
    the time of a message for all of them.
    """
    recipe, mesh = context.machine.recipe, context.mesh
    stored_placements, used = table.placements[:, None], uses[None]

    def seconds(element_bytes: float, start: Integers, end: Integers) -> Values:
        return bucket * redistribute_s(context.fabric, mesh, table.shape, element_bytes / bucket, start, end)

    gather_s = seconds(recipe.weight_bytes, value_placements(stored_placements), value_placements(used))
    is_gathered = gather_s > 0.0
    whole = gradient_placements(used)
    parts = np.where(is_gathered[..., None] & (stored_placements >= 0), stored_placements, whole)
    reduce_scatter_s = seconds(recipe.gradient_bytes, whole, parts)
    sync_s = seconds(recipe.gradient_bytes, parts, stored_placements)
    update_s = (
        seconds(recipe.weight_bytes, stored_placements, value_placements(stored_placements)) + 0.0 * gather_s
    )
    in_use = table.local_elements(value_placements(used)) + 0.0 * gather_s
    gradient_bytes = recipe.gradient_bytes * in_use
    is_of_more = in_use != table.local_elements(value_placements(stored_placements))
    is_other = (value_placements(stored_placements) != value_placements(used)).any(axis=-1)
    return ParameterTraffic(
        gather_s=gather_s,
        reduce_scatter_s=reduce_scatter_s,
        sync_s=sync_s,
        update_s=update_s,
        gathered_bytes=np.where(is_gathered, recipe.weight_bytes * in_use, 0.0),
        gradient_bytes=np.where(is_of_more, gradient_bytes, 0.0),
        separate_gradient_bytes=np.where(is_other, gradient_bytes, 0.0),
    )


def copied_bytes(context: CostContext, moved: ParameterTraffic) -> Values:
    """Bytes (S, U) of copies during a use, in addition to storage: gathered weights, and a larger gradient.

    Gathered are the weights of this use, and of the next one where gathers overlap with computation.
    """
    uses = PREFETCHED_LAYERS if context.profile.shard_overlap > 0.0 else 1.0
    return uses * moved.gathered_bytes + moved.gradient_bytes


def single_reader_costs(
    context: CostContext,
    moved: ParameterTraffic,
    *,
    forward_s: Values,
    backward_s: Values,
    recompute_s: Values | None,
    working_bytes: Values,
) -> CostColumns:
    """Costs of the only use of a parameter, which overlaps with its reader's computation.

    `forward_s` and `backward_s` are the reader's seconds, `working_bytes` its temporaries. `recompute_s` is
    the repeated computation of a recomputed block, for which weights are gathered once more.

    All-gathers of sharded weights overlap with the forward pass and with one half of the backward pass,
    reduce-scatters of their gradients with the other half. Other gradients are reduced once per step and
    overlap with any backward computation: those of unsharded weights, and those along axes that do not shard.
    Updated weights are gathered during the next forward pass.
    """
    columns = CostColumns(peak_bytes=working_bytes + copied_bytes(context, moved))
    profile = context.profile
    half_s = backward_s / 2.0
    share = profile.shard_overlap
    columns.forward(context.exposed_and_hidden_s(moved.gather_s, forward_s, share)[0], "gathers")
    if recompute_s is not None:
        columns.hidden_backward(context.exposed_and_hidden_s(moved.gather_s, recompute_s, share), "gathers")
    columns.hidden_backward(context.exposed_and_hidden_s(moved.gather_s, half_s, share), "gathers")
    columns.hidden_backward(context.exposed_and_hidden_s(moved.reduce_scatter_s, half_s, share), "gradients")
    columns.summed_gradients(moved.sync_s, profile.data_overlap)
    columns.once(moved.update_s - np.minimum(profile.state_overlap * moved.update_s, forward_s), "gathers")
    return columns


def shared_parameter_costs(context: CostContext, moved: ParameterTraffic, readers: int) -> CostColumns:
    """Costs (S, U) of redistributing a shared parameter to one placement for all readers.

    The gather counts for each reader in both passes, the gradient once; its reduction may overlap. A gradient
    that cannot be accumulated in the stored one stays allocated.
    """
    columns = CostColumns(peak_bytes=copied_bytes(context, moved))
    columns.hold(moved.separate_gradient_bytes, "gradients")
    profile = context.profile
    columns.forward(readers * moved.gather_s, "gathers")
    columns.blocked(readers * moved.gather_s, "gathers")
    columns.once(moved.update_s, "gathers")
    overlap = np.where(moved.gather_s > 0.0, profile.shard_overlap, profile.data_overlap)
    columns.summed_gradients(moved.reduce_scatter_s + moved.sync_s, overlap)
    return columns


def one_reader_costs(
    context: CostContext, shape: tuple[int, ...], shared: Integers, own: Integers, working_bytes: Values
) -> CostColumns:
    """Costs (U, K) of one reader of a shared parameter.

    The parameter is redistributed in both passes from `shared` (U, axes), its placement for all readers, to
    `own` (K, axes), that of this reader; so is its gradient in the other direction.
    """
    recipe = context.machine.recipe
    edge = edge_of(
        context, shape, shared, own, needs_gradient=True,
        value_bytes=recipe.weight_bytes, gradient_bytes=recipe.gradient_bytes,
    )  # fmt: skip
    columns = CostColumns()
    columns.forward(edge.forward_s, "gathers")
    columns.blocked(edge.forward_s + edge.backward_s, "gathers")
    copy = edge.end_bytes * (1.0 + recipe.gradient_bytes / recipe.weight_bytes)
    columns.peak_bytes = np.where(edge.is_same, 0.0, working_bytes[None] + copy)
    return columns
