"""What the ranks of a mesh hold of a tensor, as columns over all the ways it may lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import numpy.typing as npt

from shardwise.graph import (
    PARTIAL,
    REPLICATE,
    REPLICATE_SHARD_STATES,
    REPLICATE_SUM_GRAD,
    Placement,
    placements_of,
    shard,
)

Integers = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]

Placements = tuple[Placement, ...]
"""How a tensor lies, one placement per mesh axis."""

_LOWEST = REPLICATE_SHARD_STATES


@dataclass(frozen=True, eq=False)
class PlacementTable:
    """Ways in which a tensor of `shape` may lie on a mesh of `ranks` per axis: `placements` (forms, axes)."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: Integers

    def __len__(self) -> int:
        return len(self.placements)

    @property
    def named(self) -> tuple[Placements, ...]:
        """The forms as placements."""
        return tuple(tuple(Placement(each) for each in row) for row in self.placements.tolist())

    @cached_property
    def _place_of(self) -> Integers:
        """The place of the form with each code, -1 where there is none."""
        places = np.full(self._base ** len(self.ranks), -1, dtype=np.int64)
        places[self._codes(self.placements)] = np.arange(len(self.placements))
        return places

    @property
    def _base(self) -> int:
        return len(self.shape) - _LOWEST

    def _codes(self, placements: Integers) -> Integers:
        code = np.zeros(placements.shape[:-1], dtype=np.int64)
        for axis in range(len(self.ranks)):
            code = code * self._base + (placements[..., axis] - _LOWEST)
        return code

    def find(self, placements: Integers) -> Integers:
        """The places (...) of forms with these `placements` (..., axes); -1 where that is no form."""
        return self._place_of[self._codes(placements)]

    def local_elements(self, placements: Integers) -> Values:
        """Elements (...) that the rank with most of them holds under `placements` (..., axes)."""
        return local_elements(self.shape, self.ranks, placements)


def placement_table(
    shape: tuple[int, ...], ranks: tuple[int, ...], among: tuple[Placement, ...]
) -> PlacementTable:
    """All forms with placements `among` these, but those that split a dim into more parts than it has
    elements; along an axis of one rank everything is whole."""
    along = [among if size > 1 else (REPLICATE,) for size in ranks]
    found = np.array(list(product(*along)), dtype=np.int64)
    return PlacementTable(shape, ranks, found[_is_fine(shape, ranks, found)])


def activation_placements(shape: tuple[int, ...], ranks: tuple[int, ...]) -> PlacementTable:
    """How an activation may lie."""
    return placement_table(shape, ranks, placements_of(len(shape)))


def data_placements(shape: tuple[int, ...], ranks: tuple[int, ...]) -> PlacementTable:
    """What ranks may hold of a tensor or of its gradient: parts, all of it, or partial sums."""
    return placement_table(shape, ranks, (*map(shard, range(len(shape))), REPLICATE, PARTIAL))


def _is_fine(shape: tuple[int, ...], ranks: tuple[int, ...], placements: Integers) -> npt.NDArray[np.bool_]:
    parts = split_parts(len(shape), ranks, placements)
    return np.asarray((parts[..., : len(shape)] <= np.array(shape)).all(axis=-1))


def split_parts(dims: int, ranks: tuple[int, ...], placements: Integers) -> Integers:
    """Into how many parts each dim is split (..., dims + 1); the last is the whole tensor read as one row,
    split where only its states are."""
    parts = np.ones((*placements.shape[:-1], dims + 1), dtype=np.int64)
    for axis, size in enumerate(ranks):
        own = placements[..., axis]
        for dim in range(dims):
            parts[..., dim] *= np.where(own == dim, size, 1)
        parts[..., dims] *= np.where(own == REPLICATE_SHARD_STATES, size, 1)
    return parts


def local_elements(shape: tuple[int, ...], ranks: tuple[int, ...], placements: Integers) -> Values:
    """Elements (...) on the rank with the largest parts."""
    parts = split_parts(len(shape), ranks, placements)
    elements = np.ones(placements.shape[:-1], dtype=np.float64)
    for dim, size in enumerate(shape):
        elements *= -(-size // parts[..., dim])
    return np.asarray(np.ceil(elements / parts[..., len(shape)]))


def value_placements(placements: Integers) -> Integers:
    """What ranks hold of a tensor that lies so: a tensor whose gradients or states alone are divided is
    whole."""
    is_whole = (placements == REPLICATE_SUM_GRAD) | (placements == REPLICATE_SHARD_STATES)
    return np.where(is_whole, REPLICATE, placements)


def gradient_placements(placements: Integers) -> Integers:
    """What ranks hold of the gradient of a tensor that lies so: a partial sum where the tensor is whole and
    its gradient summed, the whole where the tensor is a partial sum."""
    swapped = np.where(placements == REPLICATE_SUM_GRAD, PARTIAL, placements)
    return np.where(placements == PARTIAL, REPLICATE, swapped)
