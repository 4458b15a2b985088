"""Communication of a micro-batch on each stage by mechanism, before and after overlap.

The cost model has each communication as far as it is exposed. Of software without any overlap the exposed
seconds are all of them; on devices that overlap does not slow down, they are those that are not hidden. So a
problem is estimated three times (`without_overlap`, `without_slowdown`). docs/concepts/cost-model.md, section
15.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from shardwise.cluster import Cluster, Device
from shardwise.cost.activations import ACTIVATIONS, BOTH, FULL, OPTIMIZER, SELECTIVE
from shardwise.cost.collectives import collective_model_of
from shardwise.cost.estimate import TableCosts
from shardwise.cost.layers import Contention, GridCost
from shardwise.cost.module_costs import SelectiveRows
from shardwise.cost.problem import Problem
from shardwise.cost.sharding import update_bytes
from shardwise.cost.single_stage import StageKinds, StageShape
from shardwise.cost.stages import Contended, contended_columns, over_places
from shardwise.cost.times import StepEnd
from shardwise.equations import memory

OF_LAYERS = tuple(f.name for f in fields(Contention))
"""Mechanisms that communicate inside of layers."""


def without_overlap(problem: Problem) -> Problem:
    """The problem for software that overlaps no communication."""
    return replace(problem, job=replace(problem.job, profile=problem.profile.without_overlap()))


def without_slowdown(problem: Problem) -> Problem:
    """The problem on devices whose computation is not slowed down by communication."""
    return replace(problem, device=_device_without_slowdown(problem.device))


def cluster_without_slowdown(cluster: Cluster) -> Cluster:
    """The cluster with such devices."""
    classes = {name: _device_without_slowdown(device) for name, device in cluster.classes.items()}
    return replace(cluster, classes=classes)


def _device_without_slowdown(device: Device) -> Device:
    return replace(device, efficiency=replace(device.efficiency, overlap_slowdown=1.0))


def contention_of(mechanism: str) -> Contention:
    """Selects the collectives of one mechanism of `OF_LAYERS`."""
    return Contention(**{name: 1.0 * (name == mechanism) for name in OF_LAYERS})


def traffic_of(problem: Problem, table: Any, costs: TableCosts) -> dict[str, Any]:
    """Exposed seconds of each mechanism in all passes of a micro-batch, with those that recomputation
    repeats; shape (places, rows). `costs` are those of `costs_of_all_stages` for `problem`."""
    shards, of_shards = costs.shards, costs.of_shards
    gathers_s = shards.forward_gather_s + shards.backward_gather_s
    return {
        **{name: _in_layers_s(problem, table, costs, contention_of(name)) for name in OF_LAYERS},
        "parameter_gathering": gathers_s[:, of_shards],
        "gradient_reduction": shards.reduce_scatter_s[:, of_shards],
        "offload": costs.activation_costs.offload_s[:, costs.of_activations],
    }


def _in_layers_s(problem: Problem, table: Any, costs: TableCosts, contention: Contention) -> Any:
    """Exposed seconds of the selected collectives in the passes of a micro-batch and its recomputation."""
    partitions, of_partition = costs.partitions, costs.of_partition
    places, of_grid = costs.partition.places, partitions.of_grid[of_partition]
    stage = tuple(
        column[..., of_partition] for column in (places.layers, places.has_embedding, places.has_head)
    )
    columns = contended_columns(partitions.grid, contention)[:, :, of_grid]
    passes = Contended(*over_places(columns, *stage))
    per_stage = np.where(table.recompute == FULL, table.recompute_layers, 0)
    share = memory.recomputed_share(per_stage, stage[0].sum(axis=0))
    named = SelectiveRows(problem, table, partitions.grid, of_grid, contention)
    repeated_s = np.where(table.recompute == SELECTIVE, over_places(named.contended_s, *stage), 0.0)
    return passes.forward_s + passes.backward_s(share) + repeated_s


def offload_traffic_s(problem: Problem, table: Any, costs: TableCosts) -> Any:
    """Seconds of copying a micro-batch's activations to the host and back, before any overlap; shape (places,
    rows)."""
    saved = costs.activation_costs.stage_bytes[:, costs.of_activations]
    moved = costs.partition.stage.moved_bytes[:, costs.of_partition]
    nbytes = np.where(table.offload >= ACTIVATIONS, saved, 0.0) + moved
    return 2.0 * nbytes / problem.host_link_bytes_per_s


def single_stage_traffic(kinds: StageKinds, shape: StageShape, way: int) -> dict[str, Any]:
    """Exposed seconds of each mechanism of `OF_LAYERS` in the passes of a micro-batch on stages of this
    shape, which recompute as `RECOMPUTES[way]`; shape as the layers, one column per kind."""
    layers = np.asarray(shape.layers)[None]
    found = {}
    for name in OF_LAYERS:
        columns = contended_columns(kinds.grid, contention_of(name))
        passes = Contended(*over_places(columns, layers, shape.is_first, shape.is_last))
        found[name] = passes.forward_s + passes.backward_s(1.0 * (way == FULL))
    return found


def host_waits_s(grid: GridCost, counts: Sequence[Any]) -> Any:
    """Seconds of a micro-batch in which a stage waits for the host to launch kernels; `counts` has a number
    for each of `grid.blocks`. One value per grid."""
    waits_s = 0.0 * grid.hop_bytes
    for block, count in zip(grid.blocks, counts, strict=True):
        passes = (block.forward, block.backward_input, block.backward_weight)
        waits_s = waits_s + count * sum(phase.host_s for phase in passes)
    return waits_s


@dataclass(frozen=True, slots=True)
class EndParts:
    """The end of the step: communication by mechanism, and the computation; shape (rows,). Nothing of it
    overlaps."""

    communication: Mapping[str, Any]
    computation_s: Any
    host_s: Any


def end_parts(problem: Problem, end: StepEnd, devices: Any, copied_s: Any = 0.0) -> EndParts:
    """The parts of `end` on this many devices, of which the optimizer takes `copied_s` for copies."""
    number_s = collective_model_of(problem).number_s(devices)
    return EndParts(
        communication={"tied_weights": end.tied_s, "gradient_norm": number_s, "offload": copied_s},
        computation_s=end.norm_s - number_s + end.optimizer_s - copied_s,
        host_s=end.host_s,
    )


def offloaded_optimizer_s(problem: Problem, table: Any, costs: TableCosts) -> Any:
    """Seconds of copying gradients to an offloaded optimizer and weights back; shape (rows,)."""
    copied = problem.recipe.gradient_bytes + problem.recipe.weight_bytes
    share = copied / (copied + update_bytes(problem))
    is_offloaded = (table.offload == OPTIMIZER) | (table.offload == BOTH)
    return np.where(is_offloaded, share * costs.shards.host_update_s[costs.of_shards], 0.0)
