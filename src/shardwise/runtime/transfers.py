"""Which parts of which tensors go from which rank to which, so that every rank has what it needs.

Each node fetches every element that it lacks once, from a rank of another node that holds it; ranks of a node
that need the same element take it from each other. Pure: regions in, transfers out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

Region = tuple[tuple[int, int], ...]
"""A box of a tensor: along every dim where it starts and where it stops."""

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Holding:
    """A rank holds (or needs) a region of a tensor, which is told by its number."""

    rank: int
    tensor: int
    region: Region


@dataclass(frozen=True, slots=True)
class Transfer:
    """`source` sends a region of a tensor to `target`. In round 0 it has held it before, in round 1 it has
    received it in round 0."""

    round: int
    source: int
    target: int
    tensor: int
    region: Region

    @property
    def elements(self) -> int:
        return int(np.prod([stop - start for start, stop in self.region]))


def transfers(have: Sequence[Holding], need: Sequence[Holding], node_of: Sequence[int]) -> list[Transfer]:
    """What is sent so that every rank has what it needs; `node_of` are the nodes of the ranks. In the order
    of rounds and tensors. What nobody holds is not sent."""
    sent: dict[int, int] = defaultdict(int)
    found: list[Transfer] = []
    wanted = _by_tensor(need)
    for tensor, held in sorted(_by_tensor(have).items()):
        for region, holders, needers in _cells(held, wanted.get(tensor, []), len(node_of)):
            for turn, source, target in _pairs(holders, needers, node_of, sent):
                found.append(Transfer(turn, source, target, tensor, region))
                sent[source] += found[-1].elements
    return sorted(found, key=lambda one: one.round)


def overlap(one: Region, other: Region) -> Region | None:
    """The box that two boxes have in common; None where it is empty."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def _by_tensor(holdings: Sequence[Holding]) -> dict[int, list[Holding]]:
    found: dict[int, list[Holding]] = defaultdict(list)
    for holding in holdings:
        found[holding.tensor].append(holding)
    return found


def _cells(
    have: Sequence[Holding], need: Sequence[Holding], ranks: int
) -> Iterator[tuple[Region, list[int], list[int]]]:
    """Boxes that no region cuts, each with the ranks that hold it and those that need it and do not; boxes
    that nobody lacks are left out."""
    boxes = [holding.region for holding in (*have, *need)]
    cuts = _cuts(boxes)
    holders = _covered(have, cuts, ranks)
    lacking = _covered(need, cuts, ranks) & ~holders
    cells = list(product(*(pairwise(along) for along in cuts)))
    for place in np.flatnonzero(lacking.any(axis=0)):
        on, missing = (np.flatnonzero(flags[:, place]).tolist() for flags in (holders, lacking))
        yield cells[place], on, missing


def owners(held: Sequence[Holding], ranks: int) -> Iterator[tuple[int, Region, tuple[int, ...]]]:
    """The boxes of every tensor that no region cuts, each with all ranks that hold it; in the order of
    tensors."""
    for tensor, holdings in sorted(_by_tensor(held).items()):
        cuts = _cuts([holding.region for holding in holdings])
        covered = _covered(holdings, cuts, ranks)
        for place, region in enumerate(product(*(pairwise(along) for along in cuts))):
            yield tensor, region, tuple(np.flatnonzero(covered[:, place]).tolist())


def _cuts(boxes: Sequence[Region]) -> list[list[int]]:
    """Along every dim where some box starts or stops."""
    return [sorted({end for box in boxes for end in box[dim]}) for dim in range(len(boxes[0]))]


def _covered(holdings: Sequence[Holding], cuts: Sequence[Sequence[int]], ranks: int) -> Flags:
    """Whether a rank's regions have each cell; of shape (ranks, cells)."""
    result = np.zeros((ranks, *(len(along) - 1 for along in cuts)), dtype=np.bool_)
    for holding in holdings:
        ends = zip(holding.region, cuts, strict=True)
        result[holding.rank][
            tuple(slice(along.index(start), along.index(stop)) for (start, stop), along in ends)
        ] = True
    return result.reshape(ranks, -1)


def _pairs(
    holders: Sequence[int], lacking: Sequence[int], node_of: Sequence[int], sent: dict[int, int]
) -> Iterator[tuple[int, int, int]]:
    """Round, source and target for every rank that lacks a cell: from a rank of its own node where one has it
    or gets it, else from the one elsewhere that has sent least so far."""
    if not holders:
        return
    near: dict[int, int] = {}
    for rank in reversed(holders):
        near[node_of[rank]] = rank
    got: dict[int, int] = {}
    for target in lacking:
        node = node_of[target]
        if node in near:
            yield 0, near[node], target
        elif node in got:
            yield 1, got[node], target
        else:
            got[node] = target
            yield 0, min(holders, key=lambda rank: (sent[rank], rank)), target
