"""How the work of a round is divided into lanes: the same for any number of workers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwise.search.listing import Listing
from shardwise.search.space import Degrees, Space

LISTING_LANES, DEGREES_PER_LANE = 4, 32
"""Lanes that grids are listed in, at most, and the choices of (tp, cp, dp) in each, at least."""

ROWS_ALONE, FIRST_ROWS_ALONE = 1 << 12, 1 << 9
"""Grids with micro-batch sizes that are searched in one lane, and those of a first look."""

ROWS_WITH_MEMORY = 64
"""How many times more a row takes where its memory matters as much as its time."""

MUCH, MUCH_WITH_MEMORY = 0.2, 0.08
"""The share of a round's work from which on the grids of one depth are two lanes; less where memory matters
too: there `_work` counts too little for deep pipelines."""


def listing_lanes(degrees: list[Degrees]) -> list[list[Degrees]]:
    """The degrees whose grids are listed together."""
    lanes = max(min(len(degrees) // DEGREES_PER_LANE, LISTING_LANES), 1)
    return [degrees[lane::lanes] for lane in range(lanes)]


def first_lanes(space: Space, grids: Listing, *, weighs_memory: bool) -> list[Listing]:
    """The lanes of a first look, where all depends on what is found first: some of everything in each."""
    lanes = 1 if _are_few(space, grids, FIRST_ROWS_ALONE, weighs_memory) else 2
    return [grids.take(slice(lane, None, lanes)) for lane in range(lanes)]


def lanes_of(space: Space, grids: Listing, *, weighs_memory: bool) -> list[Listing]:
    """The lanes of a round, those with most work first: one for each depth, since depths are bounded apart,
    two for one that is much of the round."""
    if _are_few(space, grids, ROWS_ALONE, weighs_memory):
        return [grids]
    rows = space.count_micro_batches(grids.table.dp)
    depths = [np.flatnonzero(grids.table.pp == pp) for pp in np.unique(grids.table.pp)]
    works = [_work(rows[same], grids.candidates[same]) for same in depths]
    much = (MUCH_WITH_MEMORY if weighs_memory else MUCH) * sum(works)
    lanes: list[tuple[float, Listing]] = []
    for same, work in zip(depths, works, strict=True):
        number = 2 if work > much and len(same) > 1 else 1
        lanes += [(work / number, grids.take(same[lane::number])) for lane in range(number)]
    return [lane for _, lane in sorted(lanes, key=lambda each: -each[0])]


def _are_few(space: Space, grids: Listing, alone: int, weighs_memory: bool) -> bool:
    """Whether grids are too few to be divided."""
    rows = int(space.count_micro_batches(grids.table.dp).sum())
    return rows * (ROWS_WITH_MEMORY if weighs_memory else 1) <= alone


def _work(rows: NDArray[np.int64], candidates: NDArray[np.int64]) -> float:
    """About how much work grids of one depth are, in no unit: it grows with their rows, and slowly with what
    lies below them."""
    return float(rows.sum() * float(candidates.sum()) ** 0.125)
