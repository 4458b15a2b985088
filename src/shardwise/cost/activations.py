"""Recomputation and offload: times of a micro-batch on a stage, and its saved activations.

`activation_costs_of` estimates each choice of ACTIVATION_FIELDS of a partition.
docs/concepts/cost-model.md, sections 10 and 14.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from shardwise.cost.layers import GridCost
from shardwise.cost.module_costs import CONTENDED, RECOMPUTED, SAVED, SECONDS, SelectiveRows
from shardwise.cost.moments import Moments
from shardwise.cost.problem import Problem
from shardwise.cost.stage_formulas import peak_activation_bytes, phases_of, recompute_s, saved_bytes
from shardwise.cost.stages import PartitionCosts, Sums, over_places
from shardwise.equations import compute, memory

ACTIVATION_FIELDS = ("recompute", "recompute_modules", "recompute_layers", "offload")
SELECTIVE, FULL = 1, 2
"""Indices in RECOMPUTES."""

OPTIMIZER, BOTH = 1, 3
"""Indices in OFFLOADS whose optimizer states are on the host."""

ACTIVATIONS = 2
"""From this index in OFFLOADS on, activations are offloaded."""


@dataclass(frozen=True, slots=True)
class ActivationCosts:
    """Times and bytes without sharding.

    Of one micro-batch, shape (places, rows): the seconds of the phases of the stage, of which `recompute_s`
    and `offload_s` are parts, and its saved activations (`stage_bytes`). The `contended` columns are seconds
    of collectives that use the network cards of the gradient reduction, in the forward pass and in the input
    gradient.

    Bytes at each moment, shape (moments, rows): of all micro-batches in flight on the device
    (`in_flight_bytes`); also with recomputed tensors and what waits for weight gradients (`device_bytes`);
    and those on the host.
    """

    forward_s: Any
    input_s: Any
    weight_s: Any
    recompute_s: Any
    offload_s: Any
    forward_contended_s: Any
    input_contended_s: Any
    stage_bytes: Any
    in_flight_bytes: Any
    device_bytes: Any
    host_bytes: Any


def activation_costs_of(
    problem: Problem, table: Any, partition: PartitionCosts, of_partition: Any, grid: GridCost, of_grid: Any
) -> ActivationCosts:
    """Costs of each row's recomputation and offload; row i of `table` has partition `of_partition[i]` and
    grid `of_grid[i]`."""
    rows = SelectiveRows(problem, table, grid, of_grid)
    selective = _SelectiveStages(rows, partition, of_partition)
    stage = selective.sums
    per_stage = np.where(table.recompute == FULL, table.recompute_layers, 0)
    share = memory.recomputed_share(per_stage, partition.places.layers.sum(axis=0)[:, of_partition])
    is_selective = table.recompute == SELECTIVE
    again_s = recompute_s(stage, is_selective, share)
    one = saved_bytes(stage, is_selective, share)
    moves = table.offload >= ACTIVATIONS
    out_s, in_s = offload_s(problem, np.where(moves, one, 0.0) + stage.moved_bytes, stage)
    blocked_on_s, blocked_back_s = (
        each_s[:, of_partition] for each_s in (partition.blocked_on_s, partition.blocked_back_s)
    )
    added_s = blocked_on_s + out_s, blocked_back_s + in_s
    phases = phases_of(stage, problem.profile.host_action_s, again_s, added_s)
    contended = partition.contended.taken(of_partition)
    live = _LiveActivations(table, partition, of_partition, per_stage, selective)
    on_device = np.where(moves, live.copied_bytes, live.in_flight_bytes) + live.moving_bytes
    return ActivationCosts(
        forward_s=phases.forward_s,
        input_s=phases.input_s,
        weight_s=phases.weight_s,
        recompute_s=again_s,
        offload_s=out_s + in_s,
        forward_contended_s=contended.forward_s,
        input_contended_s=contended.backward_s(share) + np.where(is_selective, selective.contended_s, 0.0),
        stage_bytes=one,
        in_flight_bytes=on_device,
        device_bytes=peak_activation_bytes(on_device, live.recomputed_bytes, live.waiting_bytes),
        host_bytes=np.where(moves, live.in_flight_bytes, 0.0) + live.moved_bytes,
    )


@dataclass(frozen=True)
class _LiveActivations:
    """Bytes of activations at the moments of each row; `per_stage` layers of a stage are recomputed in
    full."""

    table: Any
    partition: PartitionCosts
    of_partition: Any
    per_stage: Any
    selective: _SelectiveStages

    @cached_property
    def moments(self) -> Moments:
        return self.partition.moments.taken(self.of_partition)

    @cached_property
    def blocks(self) -> Sums:
        return self.partition.blocks.taken(self.of_partition)

    @cached_property
    def _ends_bytes(self) -> Any:
        """Saved by the embedding and by the head."""
        return self.blocks.saved_bytes[-2:]

    def _saved_by_kind(self, layers: Any) -> Any:
        """Saved by a layer of each kind on a stage with this number of layers; shape (kinds, rows)."""
        saved, inputs = self.blocks.saved_bytes[:-2], self.blocks.input_bytes[:-2]
        share = memory.recomputed_share(self.per_stage, layers)
        partly = memory.saved_activation_bytes(saved, inputs, share)
        return np.where(self.table.recompute == SELECTIVE, self.selective.kinds_bytes, partly)

    @cached_property
    def in_flight_bytes(self) -> Any:
        """Saved activations of all micro-batches in flight."""
        moments, (embedding, head) = self.moments, self._ends_bytes
        ends = moments.first * embedding + moments.last * head
        return ends + self._in_flight(self._saved_by_kind)

    def _in_flight(self, by_kind: Callable[[Any], Any]) -> Any:
        """The sum over layers and micro-batches in flight of `by_kind`, values of each kind of layer on a
        stage with a number of layers; shape (kinds, rows)."""
        moments = self.moments
        first, last = (
            (layers * by_kind(layers.sum(axis=0))).sum(axis=0)
            for layers in (moments.first_layers, moments.last_layers)
        )
        low, high = (by_kind(moments.low_layers + more)[:, None] for more in (0, 1))
        return (
            moments.first * first
            + moments.last * last
            + (moments.low * low + moments.high * high).sum(axis=0)
        )

    @property
    def moved_bytes(self) -> Any:
        """Copied to the host by named modules."""
        return self._in_flight(lambda _: self.blocks.moved_bytes[:-2])

    @property
    def moving_bytes(self) -> Any:
        """Of what named modules take from the device, a layer is on its way to the host, and one is on its
        way back."""
        offloaded = self.blocks.offloaded_bytes[:-2]
        layers = self._in_flight(lambda _: np.ones_like(offloaded))
        return np.minimum(2.0, layers) * offloaded.max(axis=0)

    @property
    def waiting_bytes(self) -> Any:
        """What waits for weight gradients."""
        waiting = self.blocks.waiting_bytes
        moments, (embedding, head) = self.moments, waiting[-2:]
        of_layers = (moments.waits * waiting[:-2, None]).sum(axis=0)
        return of_layers + moments.waits_first * embedding + moments.waits_last * head

    @property
    def recomputed_bytes(self) -> Any:
        """Tensors of one layer that exist at once while it is recomputed."""
        saved, inputs = (getattr(self.blocks, name)[:-2] for name in ("saved_bytes", "input_bytes"))
        named = np.where(self.table.recompute == SELECTIVE, self.selective.recomputed_bytes, 0.0)
        return np.where(self.table.recompute == FULL, saved.max(axis=0) - inputs.max(axis=0), named)

    @property
    def copied_bytes(self) -> Any:
        """On the device while saved activations are copied to the host: those of two layers at most, of what
        a micro-batch saves on the rank."""
        moments, chunks, (embedding, head) = self.moments, self.table.vpp, self._ends_bytes
        layers = moments.rank_layers.sum(axis=0)
        saved, inputs = (getattr(self.blocks, name)[:-2, None] for name in ("saved_bytes", "input_bytes"))
        share = memory.recomputed_share(self.per_stage * chunks, layers)
        partly = memory.saved_activation_bytes(saved, inputs, share)
        by_kind = np.where(self.table.recompute == SELECTIVE, self.selective.kinds_bytes[:, None], partly)
        whole = (moments.rank_layers * by_kind).sum(axis=0)
        whole = whole + moments.rank_has_embedding * embedding + moments.rank_has_head * head
        return np.minimum(whole, self._two_layers_bytes(self.per_stage < moments.most_layers))

    def _two_layers_bytes(self, saves_some: Any) -> Any:
        """Bytes of two layers: one computes while those of the other are copied.

        A layer under full recomputation has its input only; its recomputed tensors count elsewhere. Where a
        stage also `saves_some` layers whole, one of these is next to a recomputed layer.
        """
        saved, inputs = (
            getattr(self.blocks, name)[:-2].max(axis=0) for name in ("saved_bytes", "input_bytes")
        )
        plain = np.where(self.table.recompute == SELECTIVE, self.selective.kinds_bytes.max(axis=0), saved)
        of_full = inputs + np.where(saves_some, saved, inputs)
        return np.where(self.table.recompute == FULL, of_full, 2.0 * plain)


@dataclass(frozen=True)
class _SelectiveStages:
    """What selective recomputation means for the stages of each row."""

    rows: SelectiveRows
    partition: PartitionCosts
    of_partition: Any

    @property
    def sums(self) -> Sums:
        """The sums of each place under the set of modules of the row."""
        stage = self.partition.stage.taken(self.of_partition)
        if not self.rows.has_modules:
            return stage
        return replace(stage, selective_s=self._at_places[SECONDS], selective_bytes=self._at_places[SAVED])

    @property
    def contended_s(self) -> Any:
        """Seconds of repeated collectives that use the network cards of the gradient reduction."""
        return self._at_places[CONTENDED] if self.rows.has_modules else 0.0

    @property
    def kinds_bytes(self) -> Any:
        """Saved activations of a layer of each kind; shape (kinds, rows)."""
        if not self.rows.has_modules:
            return self.partition.blocks.selective_bytes[:-2, self.of_partition]
        return self.rows.columns[SAVED, : len(self.rows.grid.kinds)]

    @property
    def recomputed_bytes(self) -> Any:
        """Tensors of the largest kind of layer that exist at once while they are recomputed."""
        if not self.rows.has_modules:
            return 0.0
        return self.rows.columns[RECOMPUTED, : len(self.rows.grid.kinds)].max(axis=0)

    @cached_property
    def _at_places(self) -> Any:
        places, rows = self.partition.places, self.of_partition
        ends = places.has_embedding[:, rows], places.has_head[:, rows]
        return over_places(self.rows.columns, places.layers[..., rows], *ends)


def offload_s(problem: Problem, nbytes: Any, sums: Sums) -> tuple[Any, Any]:
    """Exposed seconds of copying `nbytes` of activations: (to the host in the forward pass, back in the
    backward).
    """
    slowdown = problem.efficiency.overlap_slowdown
    moved_s = nbytes / problem.host_link_bytes_per_s
    return (
        compute.exposed_s(moved_s, sums.forward_compute_s, 1.0, slowdown),
        compute.exposed_s(moved_s, sums.input_compute_s, 1.0, slowdown),
    )
