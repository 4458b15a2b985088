"""How cells of a cover are cut into smaller ones: each level fixes one choice more, every way there is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from shardwise.check.cells import Cells, Pipeline, joined_cells
from shardwise.check.rows import Column, Rows
from shardwise.check.splits import Box, Splits
from shardwise.strategy import FIELDS, OFFLOADS, RECOMPUTES


def with_recomputed(pipeline: Pipeline, cells: Cells) -> Cells:
    """Each cell with every choice of recomputation."""
    found = [
        replace(cells, recompute=np.full(len(cells), recompute), box=_box(hull, len(cells)))
        for recompute, hull in enumerate(pipeline.splits.whole)
        if hull is not None
    ]
    return joined_cells(found)


def with_offloads(cells: Cells, offloads: Sequence[int]) -> Cells:
    """Each cell with each of these choices of offload."""
    found = [
        replace(cells, offload=np.full(len(cells), offload), weight=cells.weight // len(offloads))
        for offload in offloads
    ]
    return joined_cells(found)


def with_pairs(pipeline: Pipeline, cells: Cells) -> Cells:
    """Each cell with every sharding of parameters and gradients."""
    pairs = pipeline.pairs
    number = pairs.number[cells.grid]
    index = np.repeat(np.arange(len(cells)), number)
    first = np.repeat(np.cumsum(number) - number, number)
    pair = pairs.start[cells.grid][index] + np.arange(len(index)) - first
    weight = pipeline.ground.alike[cells.grid][index] * pairs.chains[pair]
    return replace(cells.take(index), pair=pair, weight=weight)


def count_of_splits(splits: Splits) -> int:
    """All splits of the table with all their choices of recompute."""
    return sum(int(sums[0, -1, -1]) for sums in splits.sums)


def _box(hull: tuple[int, ...], length: int) -> Box:
    return Box(*(np.full(length, value) for value in hull))


def opened(pipeline: Pipeline, grid: Column, weight: Column) -> Cells:
    """One cell for each grid, everything else open."""
    hulls = np.array([hull for hull in pipeline.splits.whole if hull is not None])
    least, most = hulls.min(axis=0), hulls.max(axis=0)
    hull = tuple(int(value) for value in np.where([True, False] * 3, least, most))
    open_ = np.full(len(grid), -1)
    return Cells(
        grid=grid,
        recompute=open_,
        offload=open_,
        pair=open_,
        optim=np.zeros(len(grid), dtype=np.int64),
        weight=weight,
        box=_box(hull, len(grid)),
    )


def with_chains(pipeline: Pipeline, cells: Cells) -> Cells:
    """Each cell with every sharding of the optimizer."""
    pairs, ranks = pipeline.pairs, pipeline.ground.ranks
    listed = [
        pairs.optims[int(ranks[grid]), int(pairs.param[pair]), int(pairs.grad[pair])]
        for grid, pair in zip(cells.grid, cells.pair, strict=True)
    ]
    index = np.repeat(np.arange(len(cells)), [len(optims) for optims in listed])
    optim = np.array([value for optims in listed for value in optims], dtype=np.int64)
    return replace(cells.take(index), optim=optim, weight=pipeline.ground.alike[cells.grid][index])


def parts(cells: Cells, length: int) -> Iterator[Cells]:
    """The cells, so many at a time."""
    length = max(length, 1)
    for start in range(0, len(cells), length):
        yield cells.take(slice(start, start + length))


def widths(box: Box) -> Column:
    """[axis, box]: how many values each range has beyond one."""
    return np.array(
        [
            box.first_high - box.first_low,
            box.last_high - box.last_low,
            box.layers_high - box.layers_low,
        ]
    )


def halved(cells: Cells) -> Cells:
    """Both halves of every box, along its widest range."""
    widest = widths(cells.box).argmax(axis=0)
    lower, upper = {}, {}
    for axis, name in enumerate(("first", "last", "layers")):
        low, high = getattr(cells.box, f"{name}_low"), getattr(cells.box, f"{name}_high")
        middle = (low + high) // 2
        lower[f"{name}_low"], upper[f"{name}_high"] = low, high
        lower[f"{name}_high"] = np.where(widest == axis, middle, high)
        upper[f"{name}_low"] = np.where(widest == axis, middle + 1, low)
    return joined_cells([replace(cells, box=Box(**lower)), replace(cells, box=Box(**upper))])


def rows_of_cells(pipeline: Pipeline, cells: Cells) -> Rows:
    """The strategies that cells of single points are."""
    grids = pipeline.ground.rows.take(cells.grid)
    fields = {name: getattr(grids, name) for name in FIELDS}
    first = cells.box.first_low
    last = cells.box.last_low
    if pipeline.stages <= 2:
        last = first if pipeline.stages == 1 else pipeline.splits.layers - first
    fields |= {
        "schedule": np.full(len(cells), pipeline.schedule),
        "vpp": np.full(len(cells), pipeline.vpp),
        "first_stage_layers": first,
        "last_stage_layers": last,
        "recompute": np.array(RECOMPUTES)[cells.recompute],
        "recompute_layers": cells.box.layers_low,
        "offload": np.array(OFFLOADS)[cells.offload],
        "param_shard": pipeline.pairs.param[cells.pair],
        "grad_shard": pipeline.pairs.grad[cells.pair],
        "optim_shard": cells.optim,
    }
    return Rows(**fields)
