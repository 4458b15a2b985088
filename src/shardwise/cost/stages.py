"""Layers and costs of the stages of a pipeline, as columns over rows of a table.

A place is one stage of one row. Arrays have shape (places, rows): all stages of a table (`all_places`), or
the first (`first_places`). `partition_costs_of` sums the costs of layers over stages, and over ranks at the
moments that can be the peak of memory, before recomputation, sharding and offload are chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from shardwise.cost.layers import BlockCost, Contention, GridCost
from shardwise.cost.moments import Moments
from shardwise.cost.problem import Patterns, Problem, distinct_rows
from shardwise.schedule import SPLIT_NAMES
from shardwise.strategy import IS_V, SCHEDULES, stage_starts

# Places of layers

SPLIT_FIELDS = ("pp", "vpp", "schedule", "first_stage_layers", "last_stage_layers")
"""The fields that decide which layers each stage has."""

IS_SPLIT = np.array([name in SPLIT_NAMES for name in SCHEDULES])
"""Per schedule: whether weight gradients are actions of their own (split backward)."""


@dataclass(frozen=True, slots=True)
class Places:
    """Stage and pipeline rank of each place, and its layers by kind, of shape (kinds, places, rows).

    `has_embedding` and `has_head` are 1 where the stage has that end of the model, else 0.
    """

    stage: Any
    rank: Any
    layers: Any
    has_embedding: Any
    has_head: Any

    def take(self, rows: Any) -> Places:
        """The places of the rows at these indices."""
        return Places(**{f.name: getattr(self, f.name)[..., rows] for f in fields(Places)})

    def at(self, places: slice) -> Places:
        """Some of the places of every row."""
        return Places(**{f.name: getattr(self, f.name)[..., places, :] for f in fields(Places)})


def all_places(problem: Problem, table: Any) -> Places:
    """Every stage of every row in order, padded to the largest number of stages."""
    return _by_size(problem, table, _stages)


def _stages(patterns: Patterns, table: Any) -> Places:
    """Every stage of every row; places beyond a row's stages repeat its first."""
    pp, stages = table.pp, table.pp * table.vpp
    index = np.arange(int(stages.max()))[:, None]
    stage = np.where(index < stages, index, 0)
    split = (patterns.layers, stages, table.first_stage_layers, table.last_stage_layers)
    layers = patterns.between(stage_starts(*split, stage), stage_starts(*split, stage + 1))
    rank = np.where(IS_V[table.schedule], np.minimum(stage, 2 * pp - 1 - stage), stage % pp)
    return Places(
        stage=stage,
        rank=rank,
        layers=layers,
        has_embedding=(stage == 0) * 1.0,
        has_head=(stage == stages - 1) * 1.0,
    )


def first_places(problem: Problem, table: Any) -> Places:
    """The first stage of every row."""
    return _by_size(problem, table, lambda patterns, few: _stages(patterns, few).at(slice(0, 1)))


def _by_size(problem: Problem, table: Any, places_of: Callable[[Patterns, Any], Places]) -> Places:
    """`places_of` for the distinct splits among the rows, in one padded array.

    Splits with similar numbers of stages are processed together.
    """
    patterns = problem.patterns
    rows, inverse = distinct_rows([*(getattr(table, name) for name in SPLIT_FIELDS), *patterns.columns])
    few, patterns = table.take(rows), patterns.taken(rows)
    size = np.ceil(np.log2(few.pp * few.vpp)).astype(np.int64)
    groups: list[tuple[Any, Places]] = []
    for same in np.unique(size):
        index = np.flatnonzero(size == same)
        groups.append((index, places_of(patterns.taken(index), few.take(index))))
    width = max(places.stage.shape[0] for _, places in groups)
    return _padded(groups, width, len(rows)).take(inverse)


def _padded(groups: list[tuple[Any, Places]], width: int, rows: int) -> Places:
    """All groups in one array; short ones repeat their place 0."""
    columns: dict[str, Any] = {}
    for f in fields(Places):
        sample = getattr(groups[0][1], f.name)
        full = np.empty((*sample.shape[:-2], width, rows), dtype=sample.dtype)
        for index, places in groups:
            values = getattr(places, f.name)
            have = values.shape[-2]
            full[..., :have, index] = values
            full[..., have:, index] = values[..., :1, :]
        columns[f.name] = full
    return Places(**columns)


# Costs of partitions


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over layers (and ends) of one micro-batch, per place or per row.

    `*_s`: seconds of the phases and of their computation alone, and seconds that selective or full
    recomputation adds. `saved_bytes`, `selective_bytes`, `input_bytes`: saved activations without
    recomputation, under selective, and the inputs alone (all equal for embedding and head). `waiting_bytes`:
    what waits for the weight gradients in a split backward pass. `copied_bytes`: low-precision copies of
    weights. `offloaded_bytes`, `moved_bytes`: taken from the device, and copied to the host, by named
    modules. `*_weights`: elements of dense and of expert weights; `trained_*`: those that are not frozen.
    """

    forward_s: Any
    forward_compute_s: Any
    input_s: Any
    input_compute_s: Any
    weight_s: Any
    selective_s: Any
    full_s: Any
    saved_bytes: Any
    selective_bytes: Any
    input_bytes: Any
    waiting_bytes: Any
    copied_bytes: Any
    offloaded_bytes: Any
    moved_bytes: Any
    dense_weights: Any
    expert_weights: Any
    trained_dense: Any
    trained_expert: Any

    def taken(self, rows: Any) -> Sums:
        """The sums of these rows."""
        return Sums(*(getattr(self, f.name)[..., rows] for f in fields(Sums)))


@dataclass(frozen=True, slots=True)
class Contended:
    """Seconds of collectives that use the network cards of the gradient reduction, per place and micro-batch.

    In the forward pass, in the input gradient, and in a forward pass that is recomputed in full.
    """

    forward_s: Any
    input_s: Any
    recompute_s: Any

    def backward_s(self, share: Any) -> Any:
        """In a backward pass that recomputes this share of the layers' work in full."""
        return self.input_s + share * self.recompute_s

    def taken(self, rows: Any) -> Contended:
        """The seconds of these rows."""
        return Contended(self.forward_s[:, rows], self.input_s[:, rows], self.recompute_s[:, rows])


@dataclass(frozen=True, slots=True)
class PartitionCosts:
    """Everything of a row that its grid, schedule and stage split decide.

    `stage` and `contended` are sums over each place's stage; shape (places, rows). `rank` has the sums over
    the rank of each of the `moments`, of which `temporary_bytes` and `sent_bytes` are too; shape (moments,
    rows). `unreduced_dense` and `unreduced_expert` are its trained weights with whole gradients at the
    moment, where the software reduces them once per step. `blocks` has the columns of `Sums` for every kind
    of layer, embedding and head. `layer_*` and `boundary_bytes` are single layers and tensors, `end_weights`
    the larger of embedding and head, `trained_end_weights` that of their trained ones. `tied_s` synchronises
    gradients that several ranks accumulate (a V has both ends on one rank). `hop_s` is the send to the next
    stage, as far as it overlaps. A forward blocks for `blocked_on_s` on its send, a backward for
    `blocked_back_s`. `sent_bytes` are copies of gradients beyond `temporary_bytes`, where blocks are reduced
    one by one.
    """

    places: Places
    moments: Moments
    stage: Sums
    rank: Sums
    unreduced_dense: Any
    unreduced_expert: Any
    blocks: Sums
    contended: Contended
    microbatches: Any
    is_split: Any
    hop_s: Any
    blocked_on_s: Any
    blocked_back_s: Any
    boundary_bytes: Any
    layer_saved_bytes: Any
    layer_dense_weights: Any
    layer_expert_weights: Any
    end_weights: Any
    trained_end_weights: Any
    temporary_bytes: Any
    sent_bytes: Any
    tied_s: Any


def partition_costs_of(
    problem: Problem, table: Any, grid: GridCost, of_grid: Any, places: Places, moments: Moments
) -> PartitionCosts:
    """Sums for each row of `table` at its places and moments; row i has the grid `of_grid[i]`.

    Where the head uses the embedding's weights on another rank, that rank has a copy of them.
    """
    microbatches = problem.job.global_batch_size // (table.dp * table.micro_batch_size)
    blocks = block_columns(grid)[:, :, of_grid]
    contended = contended_columns(grid, Contention.of(problem.tiers, grid.groups))[:, :, of_grid]
    is_split = IS_SPLIT[table.schedule]
    losses_bytes = np.maximum(moments.last - 1, 0) * grid.head.logits_bytes[of_grid]
    temporary_bytes, reduced_bytes = grid.temporaries.on_stages(np.minimum(moments.last, 1), of_grid)
    are_ends_apart = (table.pp > 1) & ~IS_V[table.schedule]
    copies = float(problem.model.embedding_copies)
    copied, trained = (
        np.where(are_ends_apart, copies * weights[of_grid], 0.0)
        for weights in (grid.embedding.dense_weights, grid.embedding.trained_dense)
    )
    hops, is_v, overlap = grid.hops.taken(of_grid), IS_V[table.schedule], problem.profile.pipeline_overlap
    # The last stage sends nothing forward, the first nothing back.
    on_s = np.where(places.has_head > 0.0, 0.0, hops.after_s(places.stage, is_v))
    back_s = np.where(places.stage > 0, hops.after_s(places.stage - 1, is_v), 0.0)
    stage = _sums(blocks, places.layers, places.has_embedding, places.has_head)
    rank = _sums(blocks, moments.rank_layers, moments.rank_has_embedding, moments.rank_has_head)
    names = [f.name for f in fields(Sums)]
    unreduced_dense, unreduced_expert = (
        over_places(
            blocks[names.index(name)],
            moments.unreduced_layers,
            moments.unreduced_embedding,
            moments.unreduced_head,
        )
        for name in ("trained_dense", "trained_expert")
    )
    return PartitionCosts(
        places=places,
        moments=moments,
        stage=replace(
            stage,
            dense_weights=stage.dense_weights + places.has_head * copied,
            trained_dense=stage.trained_dense + places.has_head * trained,
        ),
        rank=replace(
            rank,
            dense_weights=rank.dense_weights + moments.rank_has_head * copied,
            trained_dense=rank.trained_dense + moments.rank_has_head * trained,
        ),
        unreduced_dense=unreduced_dense + moments.unreduced_head * trained,
        unreduced_expert=unreduced_expert,
        blocks=Sums(*blocks),
        contended=Contended(*over_places(contended, places.layers, places.has_embedding, places.has_head)),
        microbatches=microbatches,
        is_split=is_split,
        hop_s=overlap * on_s,
        blocked_on_s=(1.0 - overlap) * on_s,
        blocked_back_s=(1.0 - overlap) * back_s,
        boundary_bytes=grid.hop_bytes[of_grid],
        layer_saved_bytes=_over_kinds(grid, "saved_bytes", np.maximum)[of_grid],
        layer_dense_weights=_over_kinds(grid, "dense_weights", np.maximum)[of_grid],
        layer_expert_weights=_over_kinds(grid, "expert_weights", np.maximum)[of_grid],
        end_weights=np.maximum(grid.embedding.dense_weights, grid.head.dense_weights)[of_grid],
        trained_end_weights=np.maximum(grid.embedding.trained_dense, grid.head.trained_dense)[of_grid],
        temporary_bytes=temporary_bytes + losses_bytes,
        sent_bytes=reduced_bytes - temporary_bytes,
        tied_s=grid.replicated_s[of_grid] + np.where(are_ends_apart, grid.tied_ends_s[of_grid], 0.0),
    )


def contended_columns(grid: GridCost, contention: Contention) -> Any:
    """The columns of `Contended` for every kind of layer, embedding and head.

    Shape (fields of Contended, blocks, grids).
    """
    forward_s = np.array([block.forward.contended_s(contention) for block in grid.blocks])
    input_s = np.array([block.backward_input.contended_s(contention) for block in grid.blocks])
    recompute_s = forward_s.copy()
    recompute_s[len(grid.kinds) :] = 0.0  # the ends are never recomputed
    return np.array([forward_s, input_s, recompute_s])


def block_columns(grid: GridCost) -> Any:
    """The columns of `Sums` for every kind of layer, embedding and head; shape (fields of Sums, blocks,
    grids).
    """
    columns = [_layer_columns(kind) for kind in grid.kinds]
    columns += [_end_columns(grid.embedding), _end_columns(grid.head)]
    return np.array([[getattr(block, f.name) for block in columns] for f in fields(Sums)])


def _layer_columns(block: BlockCost) -> Sums:
    return Sums(
        forward_s=block.forward.total_s,
        forward_compute_s=block.forward.compute_s,
        input_s=block.backward_input.total_s,
        input_compute_s=block.backward_input.compute_s,
        weight_s=block.backward_weight.total_s,
        selective_s=block.selective.total_s,
        full_s=block.repeated_s,
        saved_bytes=block.saved_bytes,
        selective_bytes=block.selective_bytes,
        input_bytes=block.input_bytes,
        waiting_bytes=block.waiting_bytes,
        copied_bytes=block.copied_bytes,
        offloaded_bytes=block.offloaded_bytes,
        moved_bytes=block.moved_bytes,
        dense_weights=block.dense_weights,
        expert_weights=block.expert_weights,
        trained_dense=block.trained_dense,
        trained_expert=block.trained_expert,
    )


def _end_columns(block: BlockCost) -> Sums:
    """Columns of embedding or head, which are never recomputed."""
    layer = _layer_columns(block)
    never = {name: 0.0 * block.saved_bytes for name in ("selective_s", "full_s")}
    always = {"selective_bytes": block.saved_bytes, "input_bytes": block.saved_bytes}
    return Sums(**{f.name: getattr(layer, f.name) for f in fields(Sums)} | never | always)


def _sums(blocks: Any, layers: Any, has_embedding: Any, has_head: Any) -> Sums:
    """Sums of blocks (fields, blocks, rows), each times its number at a place; shape (places, rows) per
    field.
    """
    return Sums(*over_places(blocks, layers, has_embedding, has_head))


def over_places(columns: Any, layers: Any, has_embedding: Any, has_head: Any) -> Any:
    """Sums of columns (..., blocks, rows) over the blocks at each place; shape (..., places, rows)."""
    total = columns[..., -2, None, :] * has_embedding + columns[..., -1, None, :] * has_head
    for k, count in enumerate(layers):
        total += columns[..., k, None, :] * count
    return total


def whole_sums(problem: Problem, blocks: Any) -> Sums:
    kinds = blocks.shape[1] - 2
    counts = np.array([problem.model.pattern.count(k) for k in range(kinds)] + [1, 1], dtype=np.float64)
    return Sums(*np.tensordot(blocks, counts, axes=([1], [0])))


def _over_kinds(grid: GridCost, name: str, fold: Any) -> Any:
    """A field of every kind of layer, reduced by a ufunc."""
    return fold.reduce([getattr(kind, name) for kind in grid.kinds])
