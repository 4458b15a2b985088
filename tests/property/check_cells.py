"""Cells of a cover around given strategies, at every level, with ranges drawn at random."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from shardwise.check.cells import Cells, Pipeline
from shardwise.check.collectives import fabric_of
from shardwise.check.count import SpaceRows
from shardwise.check.figures import Figures
from shardwise.check.grounds import Ground, Pairs, ground_of, pairs_of_ground
from shardwise.check.rows import Rows, rows_of
from shardwise.check.splits import Box, splits_of
from shardwise.strategy import OFFLOADS, RECOMPUTES, Strategy

LEVELS = ("open", "recomputed", "kept", "paired", "sharded")


def default_space(figures: Figures) -> SpaceRows:
    """The whole default space of the figures' problem."""
    return SpaceRows(
        layers=figures.limits.layers,
        is_moe=figures.model.experts is not None,
        devices=figures.cluster.devices,
        batch=figures.job.global_batch_size,
        is_core=False,
        fixed={},
    )


def pipelines_of(
    figures: Figures, strategies: Sequence[Strategy]
) -> Iterator[tuple[list[int], Pipeline, Cells]]:
    """The strategies by pipeline: their places, the pipeline, and each as a cell of one point."""
    space = default_space(figures)
    places: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for place, one in enumerate(strategies):
        places[one.schedule, one.pp, one.vpp].append(place)
    for (schedule, pp, vpp), some in places.items():
        rows = rows_of([strategies[place] for place in some])
        ground = ground_of(figures, pp, rows, np.ones(len(some), dtype=np.int64))
        pairs = pairs_of_ground(figures, space, ground, np.ones(len(ground.rows), dtype=bool))
        pipeline = Pipeline(
            figures=figures,
            fabric=fabric_of(figures.cluster, figures.efficiency),
            ground=ground,
            pairs=pairs,
            schedule=schedule,
            vpp=vpp,
            splits=splits_of(space, pp * vpp),
        )
        yield some, pipeline, _points(pipeline, rows)


def _points(pipeline: Pipeline, rows: Rows) -> Cells:
    last = rows.last_stage_layers if pipeline.stages > 2 else np.zeros(len(rows), dtype=np.int64)
    first, layers = rows.first_stage_layers, rows.recompute_layers
    return Cells(
        grid=np.arange(len(rows)),
        recompute=np.array([RECOMPUTES.index(word) for word in rows.recompute]),
        offload=np.array([OFFLOADS.index(word) for word in rows.offload]),
        pair=np.array([_pair(pipeline.ground, pipeline.pairs, rows, row) for row in range(len(rows))]),
        optim=rows.optim_shard,
        weight=np.ones(len(rows), dtype=np.int64),
        box=Box(first, first, last, last, layers, layers),
    )


def _pair(ground: Ground, pairs: Pairs, rows: Rows, row: int) -> int:
    start, number = pairs.start[row], pairs.number[row]
    own = range(start, start + number)
    (found,) = [
        place
        for place in own
        if (pairs.param[place], pairs.grad[place]) == (rows.param_shard[row], rows.grad_shard[row])
    ]
    return found


def opened(cells: Cells, level: str) -> Cells:
    """The same cells, with what is not chosen at this level left open."""
    nothing = np.full(len(cells), -1)
    if level != "sharded":
        cells = replace(cells, optim=np.zeros(len(cells), dtype=np.int64))
    if level in ("open", "recomputed", "kept"):
        cells = replace(cells, pair=nothing)
    if level in ("open", "recomputed"):
        cells = replace(cells, offload=nothing)
    if level == "open":
        cells = replace(cells, recompute=nothing)
    return cells


def widened(pipeline: Pipeline, cells: Cells, rng: random.Random) -> Cells:
    """The cells with ranges around their points, drawn at random."""
    layers, stages = pipeline.splits.layers, pipeline.stages
    shape = pipeline.splits.sums[0].shape
    most_first, most_last = shape[1] - 2, shape[2] - 2
    box = cells.box
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
    return replace(cells, box=Box(*np.array(ranges).T))
