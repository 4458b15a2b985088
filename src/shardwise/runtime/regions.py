"""Regions of tensors that ranks hold, and the transfers that give every rank the regions it needs.

`transfers` lets each node fetch every missing element once from another node; ranks of a node share it. Its
inputs are regions and its output is a list of transfers; it does not communicate. `gather_rank_regions`
collects the regions of all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed

from shardwise.runtime.private import chunk_of

# Transfers

Region = tuple[tuple[int, int], ...]
"""A box of a tensor: start and stop along every dim."""

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RankRegion:
    """A rank that holds (or needs) a region of a tensor, which has a number."""

    rank: int
    tensor: int
    region: Region


@dataclass(frozen=True, slots=True)
class Transfer:
    """`source` sends a region of a tensor to `target`. In round 0 it held the region before; in round 1 it
    received it in round 0."""

    round: int
    source: int
    target: int
    tensor: int
    region: Region

    @property
    def elements(self) -> int:
        """Number of elements of the region."""
        return int(np.prod([stop - start for start, stop in self.region]))


def transfers(
    have: Sequence[RankRegion], need: Sequence[RankRegion], node_of: Sequence[int]
) -> list[Transfer]:
    """Transfers after which every rank has the regions it needs, ordered by round and tensor.

    `node_of` has the node of every rank. Regions that nobody holds are not sent.
    """
    sent: dict[int, int] = defaultdict(int)
    found: list[Transfer] = []
    needed = _by_tensor(need)
    for tensor, current_regions in sorted(_by_tensor(have).items()):
        for region, holders, requesters in _disjoint_boxes(
            current_regions, needed.get(tensor, []), len(node_of)
        ):
            for round_number, source, target in _pairs(holders, requesters, node_of, sent):
                found.append(Transfer(round_number, source, target, tensor, region))
                sent[source] += found[-1].elements
    return sorted(found, key=lambda one: one.round)


def overlap(one: Region, other: Region) -> Region | None:
    """Intersection of two boxes; None if it is empty."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def _by_tensor(rank_regions: Sequence[RankRegion]) -> dict[int, list[RankRegion]]:
    found: dict[int, list[RankRegion]] = defaultdict(list)
    for rank_region in rank_regions:
        found[rank_region.tensor].append(rank_region)
    return found


def _disjoint_boxes(
    have: Sequence[RankRegion], need: Sequence[RankRegion], ranks: int
) -> Iterator[tuple[Region, list[int], list[int]]]:
    """Boxes that no region divides, each with the ranks that hold it and those that lack it. Boxes that
    nobody lacks are left out."""
    boxes = [rank_region.region for rank_region in (*have, *need)]
    boundaries = _boundaries(boxes)
    holders = _covered(have, boundaries, ranks)
    lacking = _covered(need, boundaries, ranks) & ~holders
    disjoint = list(product(*(pairwise(along) for along in boundaries)))
    for place in np.flatnonzero(lacking.any(axis=0)):
        on, missing = (np.flatnonzero(flags[:, place]).tolist() for flags in (holders, lacking))
        yield disjoint[place], on, missing


def owners(
    current_regions: Sequence[RankRegion], ranks: int
) -> Iterator[tuple[int, Region, tuple[int, ...]]]:
    """Boxes of every tensor that no region divides, each with all ranks that hold it, ordered by tensor."""
    for tensor, rank_regions in sorted(_by_tensor(current_regions).items()):
        boundaries = _boundaries([rank_region.region for rank_region in rank_regions])
        covered = _covered(rank_regions, boundaries, ranks)
        for place, region in enumerate(product(*(pairwise(along) for along in boundaries))):
            yield tensor, region, tuple(np.flatnonzero(covered[:, place]).tolist())


def _boundaries(boxes: Sequence[Region]) -> list[list[int]]:
    """Starts and stops of all boxes along every dim, sorted."""
    return [sorted({end for box in boxes for end in box[dim]}) for dim in range(len(boxes[0]))]


def _covered(rank_regions: Sequence[RankRegion], boundaries: Sequence[Sequence[int]], ranks: int) -> Flags:
    """Whether the regions of each rank contain each box of the grid of `boundaries`; shape (ranks, boxes)."""
    result = np.zeros((ranks, *(len(along) - 1 for along in boundaries)), dtype=np.bool_)
    for rank_region in rank_regions:
        bounds = zip(rank_region.region, boundaries, strict=True)
        result[rank_region.rank][
            tuple(slice(along.index(start), along.index(stop)) for (start, stop), along in bounds)
        ] = True
    return result.reshape(ranks, -1)


def _pairs(
    holders: Sequence[int], lacking: Sequence[int], node_of: Sequence[int], sent: dict[int, int]
) -> Iterator[tuple[int, int, int]]:
    """Round, source and target for every rank that lacks a box. The source is a rank of the same node if one
    has the box or receives it; else the rank elsewhere that has sent the least so far."""
    if not holders:
        return
    holder_by_node: dict[int, int] = {}
    for rank in reversed(holders):
        holder_by_node[node_of[rank]] = rank
    receiver_by_node: dict[int, int] = {}
    for target in lacking:
        node = node_of[target]
        if node in holder_by_node:
            yield 0, holder_by_node[node], target
        elif node in receiver_by_node:
            yield 1, receiver_by_node[node], target
        else:
            receiver_by_node[node] = target
            yield 0, min(holders, key=lambda rank: (sent[rank], rank)), target


# Regions of a rank

DIMS = 3
"""Most dims of a parameter; missing dims count as size 1."""


@dataclass(frozen=True, slots=True)
class LocalRegion:
    """A region of a tensor on this rank, with its values by kind: `model`, and the names of optimizer
    states."""

    region: Region
    tensors: Mapping[str, Tensor]

    def view(self, kind: str, region: Region) -> Tensor:
        """The values at `region`, as a view."""
        shape = [stop - start for start, stop in self.region]
        places = tuple(
            slice(start - first, stop - first)
            for (start, stop), (first, _) in zip(region, self.region, strict=True)
        )
        return self.tensors[kind].view(shape)[places]


def region_of(parameter: Tensor) -> Region:
    """This rank's region of `parameter` in the full tensor."""
    region = tuple((start, start + size) for start, size in zip(*chunk_of(parameter), strict=True))
    return region + ((0, 1),) * (DIMS - len(region))


def gather_rank_regions(regions: Iterable[tuple[int, Region]]) -> list[RankRegion]:
    """Gather the non-empty regions, each with the number of its tensor, of all ranks. Call it on every
    rank."""
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
