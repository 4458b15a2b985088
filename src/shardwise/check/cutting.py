"""How cells of a cover are cut into smaller ones: each level fixes one choice more, every way there is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from shardwise.check.cells import PipelineContext, ProofNodes, join_nodes
from shardwise.check.rows import Column, StrategyRows
from shardwise.check.splits import Box, Splits
from shardwise.strategy import FIELDS, OFFLOADS, RECOMPUTES


def branch_recompute(pipeline: PipelineContext, nodes: ProofNodes) -> ProofNodes:
    """Each cell with every choice of recomputation."""
    found = [
        replace(nodes, recompute=np.full(len(nodes), recompute), box=_box(hull, len(nodes)))
        for recompute, hull in enumerate(pipeline.splits.hulls)
        if hull is not None
    ]
    return join_nodes(found)


def branch_offload(nodes: ProofNodes, offloads: Sequence[int]) -> ProofNodes:
    """Each cell with each of these choices of offload."""
    found = [
        replace(nodes, offload=np.full(len(nodes), offload), weight=nodes.weight // len(offloads))
        for offload in offloads
    ]
    return join_nodes(found)


def branch_shard_pairs(pipeline: PipelineContext, nodes: ProofNodes) -> ProofNodes:
    """Each cell with every sharding of parameters and gradients."""
    pairs = pipeline.pairs
    number = pairs.number[nodes.grid]
    index = np.repeat(np.arange(len(nodes)), number)
    first = np.repeat(np.cumsum(number) - number, number)
    pair = pairs.start[nodes.grid][index] + np.arange(len(index)) - first
    weight = pipeline.grid_costs.multiplicity[nodes.grid][index] * pairs.chains[pair]
    return replace(nodes.take(index), pair=pair, weight=weight)


def count_of_splits(splits: Splits) -> int:
    """All splits of the table with all their choices of recompute."""
    return sum(int(prefix_sums[0, -1, -1]) for prefix_sums in splits.prefix_sums)


def _box(hull: tuple[int, ...], length: int) -> Box:
    return Box(*(np.full(length, value) for value in hull))


def root_nodes(pipeline: PipelineContext, grid: Column, weight: Column) -> ProofNodes:
    """One cell for each grid, everything else open."""
    hulls = np.array([hull for hull in pipeline.splits.hulls if hull is not None])
    least, most = hulls.min(axis=0), hulls.max(axis=0)
    hull = tuple(int(value) for value in np.where([True, False] * 3, least, most))
    undecided = np.full(len(grid), -1)
    return ProofNodes(
        grid=grid,
        recompute=undecided,
        offload=undecided,
        pair=undecided,
        optim=np.zeros(len(grid), dtype=np.int64),
        weight=weight,
        box=_box(hull, len(grid)),
    )


def branch_optim_shard(pipeline: PipelineContext, nodes: ProofNodes) -> ProofNodes:
    """Each cell with every sharding of the optimizer."""
    pairs, ranks = pipeline.pairs, pipeline.grid_costs.ranks
    listed = [
        pairs.optims[int(ranks[grid]), int(pairs.param[pair]), int(pairs.grad[pair])]
        for grid, pair in zip(nodes.grid, nodes.pair, strict=True)
    ]
    index = np.repeat(np.arange(len(nodes)), [len(optims) for optims in listed])
    optim = np.array([value for optims in listed for value in optims], dtype=np.int64)
    return replace(nodes.take(index), optim=optim, weight=pipeline.grid_costs.multiplicity[nodes.grid][index])


def batches_of(nodes: ProofNodes, length: int) -> Iterator[ProofNodes]:
    """The cells, so many at a time."""
    length = max(length, 1)
    for start in range(0, len(nodes), length):
        yield nodes.take(slice(start, start + length))


def widths(box: Box) -> Column:
    """[axis, box]: how many values each range has beyond one."""
    return np.array(
        [
            box.first_high - box.first_low,
            box.last_high - box.last_low,
            box.layers_high - box.layers_low,
        ]
    )


def bisected(nodes: ProofNodes) -> ProofNodes:
    """Both halves of every box, along its widest range."""
    widest = widths(nodes.box).argmax(axis=0)
    lower, upper = {}, {}
    for axis, name in enumerate(("first", "last", "layers")):
        low, high = getattr(nodes.box, f"{name}_low"), getattr(nodes.box, f"{name}_high")
        middle = (low + high) // 2
        lower[f"{name}_low"], upper[f"{name}_high"] = low, high
        lower[f"{name}_high"] = np.where(widest == axis, middle, high)
        upper[f"{name}_low"] = np.where(widest == axis, middle + 1, low)
    return join_nodes([replace(nodes, box=Box(**lower)), replace(nodes, box=Box(**upper))])


def rows_of_points(pipeline: PipelineContext, nodes: ProofNodes) -> StrategyRows:
    """The strategies that cells of single points are."""
    grids = pipeline.grid_costs.rows.take(nodes.grid)
    fields = {name: getattr(grids, name) for name in FIELDS}
    first = nodes.box.first_low
    last = nodes.box.last_low
    if pipeline.stages <= 2:
        last = first if pipeline.stages == 1 else pipeline.splits.layers - first
    fields |= {
        "schedule": np.full(len(nodes), pipeline.schedule),
        "vpp": np.full(len(nodes), pipeline.vpp),
        "first_stage_layers": first,
        "last_stage_layers": last,
        "recompute": np.array(RECOMPUTES)[nodes.recompute],
        "recompute_layers": nodes.box.layers_low,
        "offload": np.array(OFFLOADS)[nodes.offload],
        "param_shard": pipeline.pairs.param[nodes.pair],
        "grad_shard": pipeline.pairs.grad[nodes.pair],
        "optim_shard": nodes.optim,
    }
    return StrategyRows(**fields)
