"""Proof nodes that contain given strategies, at every level, with random ranges."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from shardwise.strategy import OFFLOADS, RECOMPUTES, Strategy
from shardwise_verify.collectives import fabric_of
from shardwise_verify.grids import GridCosts, ShardPairs, grid_costs_of, shard_pairs_of
from shardwise_verify.nodes import Box, PipelineContext, ProofNodes, splits_of
from shardwise_verify.problem import Figures
from shardwise_verify.space import SpaceDefinition
from shardwise_verify.strategy_rows import StrategyRows, rows_of

LEVELS = ("open", "recomputed", "kept", "paired", "sharded")


def default_space(figures: Figures) -> SpaceDefinition:
    """The whole default space of the figures' problem."""
    return SpaceDefinition(
        layers=figures.limits.layers,
        is_moe=figures.model.experts is not None,
        devices=figures.cluster.devices,
        batch=figures.job.global_batch_size,
        is_core=False,
        fixed={},
    )


def pipelines_of(
    figures: Figures, strategies: Sequence[Strategy]
) -> Iterator[tuple[list[int], PipelineContext, ProofNodes]]:
    """The strategies by pipeline: their indices, the pipeline, and each strategy as a node of one point."""
    space = default_space(figures)
    places: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for place, one in enumerate(strategies):
        places[one.schedule, one.pp, one.vpp].append(place)
    for (schedule, pp, vpp), some in places.items():
        rows = rows_of([strategies[place] for place in some])
        grid_costs = grid_costs_of(figures, pp, rows, np.ones(len(some), dtype=np.int64))
        pairs = shard_pairs_of(figures, space, grid_costs, np.ones(len(grid_costs.rows), dtype=bool))
        pipeline = PipelineContext(
            figures=figures,
            fabric=fabric_of(figures.cluster, figures.efficiency, figures.backend),
            grid_costs=grid_costs,
            pairs=pairs,
            pp=grid_costs.pp,
            schedule=schedule,
            vpp=vpp,
            splits=splits_of(space, pp * vpp),
        )
        yield some, pipeline, _points(pipeline, rows)


def _points(pipeline: PipelineContext, rows: StrategyRows) -> ProofNodes:
    last = rows.last_stage_layers if pipeline.stages > 2 else np.zeros(len(rows), dtype=np.int64)
    first, layers = rows.first_stage_layers, rows.recompute_layers
    return ProofNodes(
        grid=np.arange(len(rows)),
        recompute=np.array([RECOMPUTES.index(word) for word in rows.recompute]),
        modules=np.zeros(len(rows), dtype=np.int64),
        offload=np.array([OFFLOADS.index(word) for word in rows.offload]),
        pair=np.array([_pair(pipeline.grid_costs, pipeline.pairs, rows, row) for row in range(len(rows))]),
        optim=rows.optim_shard,
        weight=np.ones(len(rows), dtype=np.int64),
        box=Box(first, first, last, last, layers, layers),
    )


def _pair(grid_costs: GridCosts, pairs: ShardPairs, rows: StrategyRows, row: int) -> int:
    start, number = pairs.start[row], pairs.number[row]
    own = range(start, start + number)
    (found,) = [
        place
        for place in own
        if (pairs.param[place], pairs.grad[place]) == (rows.param_shard[row], rows.grad_shard[row])
    ]
    return found


def opened(nodes: ProofNodes, level: str) -> ProofNodes:
    """The same nodes with open ranges for everything that this level does not fix."""
    nothing = np.full(len(nodes), -1)
    if level != "sharded":
        nodes = replace(nodes, optim=np.zeros(len(nodes), dtype=np.int64))
    if level in ("open", "recomputed", "kept"):
        nodes = replace(nodes, pair=nothing)
    if level in ("open", "recomputed"):
        nodes = replace(nodes, offload=nothing)
    if level == "open":
        nodes = replace(nodes, recompute=nothing)
    return nodes


def widened(pipeline: PipelineContext, nodes: ProofNodes, rng: random.Random) -> ProofNodes:
    """The nodes with random ranges around their points."""
    layers, stages = pipeline.splits.layers, pipeline.stages
    shape = pipeline.splits.prefix_sums[0].shape
    most_first, most_last = shape[1] - 2, shape[2] - 2
    box = nodes.box
    ranges: list[list[int]] = []
    for first, last, number in zip(box.first_low, box.last_low, box.layers_low, strict=True):
        found: list[int] = []
        for value, low, high in (
            (int(first), 0 if stages > 1 else layers, most_first),
            (int(last), 0, most_last),
            (int(number), 1 if number else 0, layers if number else 0),
        ):
            found += [
                rng.choice((value, rng.randint(low, value))),
                rng.choice((value, rng.randint(value, high))),
            ]
        ranges.append(found)
    return replace(nodes, box=Box(*np.array(ranges).T))
