"""Which regions of which tensors every rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from shardwise.runtime.private import chunk_of
from shardwise.runtime.transfers import RankRegion, Region

DIMS = 3
"""Most dims of a parameter; those that it lacks count as of size 1."""


@dataclass(frozen=True, slots=True)
class LocalRegion:
    """A region of a tensor that a rank holds, with what it holds of it by kind: `model`, and the names of the
    optimizer's states."""

    region: Region
    tensors: Mapping[str, Tensor]

    def view(self, kind: str, region: Region) -> Tensor:
        """What lies at `region`, in place."""
        shape = [stop - start for start, stop in self.region]
        places = tuple(
            slice(start - first, stop - first)
            for (start, stop), (first, _) in zip(region, self.region, strict=True)
        )
        return self.tensors[kind].view(shape)[places]


def region_of(parameter: Tensor) -> Region:
    """Where this rank's part of `parameter` lies in the whole."""
    region = tuple((start, start + size) for start, size in zip(*chunk_of(parameter), strict=True))
    return region + ((0, 1),) * (DIMS - len(region))


def gather_rank_regions(regions: Iterable[tuple[int, Region]]) -> list[RankRegion]:
    """What all ranks hold, as each tells it: numbers of tensors, and regions that are not empty. Call it on
    every rank."""
    rows = [[tensor, *(end for bounds in region for end in bounds)] for tensor, region in regions]
    most = torch.tensor([len(rows)])
    distributed.all_reduce(most, op=distributed.ReduceOp.MAX)
    own = torch.full((int(most), 1 + 2 * DIMS), -1, dtype=torch.int64)
    if rows:
        own[: len(rows)] = torch.tensor(rows)
    gathered = own.new_empty(distributed.get_world_size() * len(own), own.shape[1])
    distributed.all_gather_single(gathered, own)
    return [
        RankRegion(place // len(own), row[0], tuple(zip(row[1::2], row[2::2], strict=True)))
        for place, row in enumerate(gathered.tolist())
        if row[0] >= 0
    ]
