"""How the work of a round is divided into lanes: the same for any number of workers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwise.search.listing import RootNodes
from shardwise.search.space import Degrees, Space

LISTING_BATCHES, DEGREES_PER_BATCH = 4, 32
"""Lanes that grids are listed in, at most, and the choices of (tp, cp, dp) in each, at least."""

ONE_BATCH_NODES, ONE_BATCH_HEURISTIC_NODES = 1 << 12, 1 << 9
"""Grids with micro-batch sizes that are searched in one lane, and those of a first look."""

MEMORY_NODE_WEIGHT = 64
"""How many times more a row takes where its memory matters as much as its time."""

LARGE_SHARE, LARGE_SHARE_WITH_MEMORY = 0.2, 0.08
"""The share of a round's work from which on the grids of one depth are two lanes; less where memory matters
too: there `_work` counts too little for deep pipelines."""


def listing_batches(degrees: list[Degrees]) -> list[list[Degrees]]:
    """The degrees whose grids are listed together."""
    batches = max(min(len(degrees) // DEGREES_PER_BATCH, LISTING_BATCHES), 1)
    return [degrees[batch::batches] for batch in range(batches)]


def heuristic_batches(space: Space, grids: RootNodes, *, weighs_memory: bool) -> list[RootNodes]:
    """The lanes of a first look, where all depends on what is found first: some of everything in each."""
    batches = 1 if _is_one_batch(space, grids, ONE_BATCH_HEURISTIC_NODES, weighs_memory) else 2
    return [grids.take(slice(batch, None, batches)) for batch in range(batches)]


def batches_of(space: Space, grids: RootNodes, *, weighs_memory: bool) -> list[RootNodes]:
    """The lanes of a round, those with most work first: one for each depth, since depths are bounded apart,
    two for one that is much of the round."""
    if _is_one_batch(space, grids, ONE_BATCH_NODES, weighs_memory):
        return [grids]
    rows = space.count_micro_batches(grids.table.dp)
    depths = [np.flatnonzero(grids.table.pp == pp) for pp in np.unique(grids.table.pp)]
    works = [_work(rows[same], grids.candidates[same]) for same in depths]
    large_work = (LARGE_SHARE_WITH_MEMORY if weighs_memory else LARGE_SHARE) * sum(works)
    batches: list[tuple[float, RootNodes]] = []
    for same, work in zip(depths, works, strict=True):
        number = 2 if work > large_work and len(same) > 1 else 1
        batches += [(work / number, grids.take(same[batch::number])) for batch in range(number)]
    return [batch for _, batch in sorted(batches, key=lambda each: -each[0])]


def _is_one_batch(space: Space, grids: RootNodes, most_nodes: int, weighs_memory: bool) -> bool:
    """Whether grids are too few to be divided."""
    rows = int(space.count_micro_batches(grids.table.dp).sum())
    return rows * (MEMORY_NODE_WEIGHT if weighs_memory else 1) <= most_nodes


def _work(rows: NDArray[np.int64], candidates: NDArray[np.int64]) -> float:
    """About how much work grids of one depth are, in no unit: it grows with their rows, and slowly with what
    lies below them."""
    return float(rows.sum() * float(candidates.sum()) ** 0.125)
