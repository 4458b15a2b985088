"""Placements of a tensor on a mesh as columns, and the cost of redistribution between them.

A `PlacementTable` has placements of a tensor as rows. `redistribute_s` are seconds, `redistribution_elements`
the peak elements of a redistribution by slices and collectives; `Redistributions` caches both for all pairs.
docs/concepts/pareto-search.md, section "Costs".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.cluster import Mesh
from shardwise.cost.collectives import CollectiveModel
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
"""One placement per mesh axis."""

_LOWEST = REPLICATE_SHARD_STATES


# Placements


@dataclass(frozen=True, eq=False)
class PlacementTable:
    """Placements of a tensor of `shape` on a mesh of `ranks` per axis: rows of `placements` (placements,
    axes).
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: Integers

    def __len__(self) -> int:
        return len(self.placements)

    @property
    def named(self) -> tuple[Placements, ...]:
        """The rows as tuples of placements."""
        return tuple(tuple(Placement(each) for each in row) for row in self.placements.tolist())

    @cached_property
    def _place_of(self) -> Integers:
        """The row with each code, -1 where there is none."""
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
        """The rows (...) that equal these `placements` (..., axes); -1 where there is none."""
        return self._place_of[self._codes(placements)]

    def local_elements(self, placements: Integers) -> Values:
        """Elements (...) on the rank with most of them, under `placements` (..., axes)."""
        return local_elements(self.shape, self.ranks, placements)


def placement_table(
    shape: tuple[int, ...], ranks: tuple[int, ...], among: tuple[Placement, ...]
) -> PlacementTable:
    """All placements `among` these, except those that split a dim into more parts than it has elements.

    Along an axis of one rank, everything is replicated.
    """
    along = [among if size > 1 else (REPLICATE,) for size in ranks]
    found = np.array(list(product(*along)), dtype=np.int64)
    return PlacementTable(shape, ranks, found[_is_fine(shape, ranks, found)])


def activation_placements(shape: tuple[int, ...], ranks: tuple[int, ...]) -> PlacementTable:
    """All placements of an activation."""
    return placement_table(shape, ranks, placements_of(len(shape)))


def data_placements(shape: tuple[int, ...], ranks: tuple[int, ...]) -> PlacementTable:
    """All placements of the data of a tensor or of its gradient: shards, replicas, partial sums."""
    return placement_table(shape, ranks, (*map(shard, range(len(shape))), REPLICATE, PARTIAL))


def _is_fine(shape: tuple[int, ...], ranks: tuple[int, ...], placements: Integers) -> npt.NDArray[np.bool_]:
    parts = split_parts(len(shape), ranks, placements)
    return np.asarray((parts[..., : len(shape)] <= np.array(shape)).all(axis=-1))


def split_parts(dims: int, ranks: tuple[int, ...], placements: Integers) -> Integers:
    """Parts of each dim (..., dims + 1).

    The last entry is for the whole tensor as one row, which is split where only optimizer states are sharded.
    """
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
    """Placements of a tensor's values: replicated where only gradients or states are divided."""
    is_whole = (placements == REPLICATE_SUM_GRAD) | (placements == REPLICATE_SHARD_STATES)
    return np.where(is_whole, REPLICATE, placements)


def gradient_placements(placements: Integers) -> Integers:
    """Placements of a tensor's gradient.

    It is a partial sum where the tensor is replicated and its gradient summed, and whole where the tensor is
    a partial sum.
    """
    swapped = np.where(placements == REPLICATE_SUM_GRAD, PARTIAL, placements)
    return np.where(placements == PARTIAL, REPLICATE, swapped)


# Redistribution

SLICE, REDUCE_SCATTER, ALL_TO_ALL, ALL_REDUCE, ALL_GATHER, PAD = range(1, 7)
"""Redistribution steps of an axis, in their order: first those that shrink the tensor, last those that grow
it.

Slices and zero padding (PAD) are local. The others are collectives among the ranks of all axes that need the
same one.
"""


def actions_of(start: Integers, end: Integers) -> Integers:
    """The step per axis from placement `start` to `end`, as values; 0 where nothing is to be done."""
    is_split, is_partial = start >= 0, start == PARTIAL
    becomes_part = (end >= 0) | (end == REPLICATE_SHARD_STATES)
    action = np.where((start == REPLICATE) & becomes_part, SLICE, 0)
    action = np.where(is_partial & becomes_part, REDUCE_SCATTER, action)
    action = np.where(is_split & (end >= 0) & (start != end), ALL_TO_ALL, action)
    action = np.where(is_partial & (end == REPLICATE), ALL_REDUCE, action)
    # A shard of states is of no dim: a tensor that is split already is the rank's own.
    action = np.where((is_split | (start == REPLICATE_SHARD_STATES)) & (end == REPLICATE), ALL_GATHER, action)
    return np.where(is_split & (end == PARTIAL), PAD, action)


def redistribute_s(
    fabric: CollectiveModel,
    mesh: Mesh,
    shape: tuple[int, ...],
    element_bytes: float,
    start: Integers,
    end: Integers,
) -> Values:
    """Seconds (...) to redistribute a tensor of `shape` from `start` to `end`, both (..., axes).

    Axes with the same collective form one group. Each collective takes the bytes of the rank with the largest
    parts: those before it for reduce-scatter, all-to-all and all-reduce, those after it for all-gather. Parts
    that shift (`shifted_axes`) need an all-to-all in addition. It takes the bytes after a slice, and the
    larger of before and after for other steps: some rank may have none of them yet.
    """
    start, end = np.broadcast_arrays(start, end)
    seconds = np.zeros(start.shape[:-1])
    collective_costs: dict[int, Callable[[Values, Values, tuple[Any, ...]], Any]] = {
        REDUCE_SCATTER: lambda before, after, sizes: fabric.reduce_scatter_s(before, sizes),
        ALL_TO_ALL: lambda before, after, sizes: fabric.all_to_all_s(before, sizes),
        ALL_REDUCE: lambda before, after, sizes: fabric.all_reduce_s(before, sizes),
        ALL_GATHER: lambda before, after, sizes: fabric.all_gather_s(after, sizes),
    }
    for step in _steps_between(start, end):
        before, after = (
            local_elements(shape, mesh.ranks, placements) * element_bytes for placements in step.ends
        )
        if step.action in collective_costs:
            seconds = seconds + collective_costs[step.action](before, after, group_sizes(mesh, step.moves))
        shifts = shifted_axes(step.now, step.then)
        if shifts.any():
            sizes = group_sizes(mesh, shifts)
            nbytes = after if step.action == SLICE else np.maximum(before, after)
            members = np.maximum(2, prod(sizes))
            shift_s = fabric.all_to_all_s(nbytes * members / (members - 1.0), sizes)
            seconds = seconds + np.where(shifts.any(axis=-1), shift_s, 0.0)
    return seconds


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """A redistribution step that some pairs need: axes `moves` (..., axes) change from `now` to `then`."""

    action: int
    moves: npt.NDArray[np.bool_]
    now: Integers
    then: Integers

    @property
    def ends(self) -> tuple[Integers, Integers]:
        return self.now, self.then


def _steps_between(start: Integers, end: Integers) -> Iterator[_Step]:
    """The steps from `start` to `end` that any pair needs, in their order."""
    actions = actions_of(start, end)
    now = start
    for action in range(SLICE, PAD + 1):
        moves = actions == action
        if moves.any():
            then = np.where(moves, end, now)
            yield _Step(action, moves, now, then)
            now = then


def redistribution_elements(
    shape: tuple[int, ...], ranks: tuple[int, ...], start: Integers, end: Integers
) -> Values:
    """Peak elements (...) of a rank during the redistribution of a tensor of `shape`.

    `start` and `end` are (..., axes) and differ. Counted are the tensor before, and both ends of each step.
    Collectives send and receive the parts of ranks one after another. A further copy exists where these parts
    are not contiguous in the tensor that is sent or received. They are contiguous along its first dim of more
    than one element. All-gathers of uneven parts, which are padded to the largest, need a copy too.
    """
    start, end = np.broadcast_arrays(start, end)
    given = local_elements(shape, ranks, start)
    most = given + local_elements(shape, ranks, end)
    has_begun = np.zeros(given.shape, dtype=bool)
    for step in _steps_between(start, end):
        before, after = (local_elements(shape, ranks, placements) for placements in step.ends)
        sent = np.where(_is_contiguous(shape, ranks, step.now, step.then, step.moves), 0.0, before)
        is_taken = _is_contiguous(shape, ranks, step.then, step.now, step.moves)
        is_contiguous = is_taken & _is_even(shape, ranks, step.now, step.moves)
        gathered = np.where(step.moves, ranks, 1).prod(axis=-1) * before
        copied = {
            REDUCE_SCATTER: sent,
            ALL_TO_ALL: np.maximum(sent, np.where(is_taken, 0.0, after)),
            ALL_GATHER: np.where(is_contiguous, gathered - after, gathered),
        }.get(step.action, np.zeros_like(before))
        is_shifted = shifted_axes(step.now, step.then).any(axis=-1)
        copied = np.where(is_shifted, np.maximum(before, after), copied)
        there = given + np.where(has_begun, before, 0.0) + after + copied
        is_there = step.moves.any(axis=-1)
        most = np.where(is_there, np.maximum(most, there), most)
        has_begun |= is_there
    return most


def _is_contiguous(
    shape: tuple[int, ...], ranks: tuple[int, ...], whole: Integers, parts: Integers, moves: Any
) -> npt.NDArray[np.bool_]:
    """Whether the parts of a rank's tensor that `moves` of axes make are contiguous.

    They are if they divide one dim, and all dims before it have one element.
    """
    dims = len(shape)
    own = [np.where(moves & (parts >= 0), parts, other) for other in (dims, -1)]
    first, last = own[0].min(axis=-1), own[1].max(axis=-1)
    extents = -(-np.array(shape) // split_parts(dims, ranks, whole)[..., :dims])
    in_front = np.where(np.arange(dims) < first[..., None], extents, 1).prod(axis=-1)
    return np.asarray((first == last) & (in_front == 1))


def _is_even(shape: tuple[int, ...], ranks: tuple[int, ...], parts: Integers, moves: Any) -> Any:
    """Whether the parts along axes `moves` are equal, or only the last one is smaller; others are padded."""
    dims = len(shape)
    counts = split_parts(dims, ranks, parts)[..., :dims]
    left = np.array(shape, dtype=np.int64) % counts
    is_moved = ((parts[..., None] == np.arange(dims)) & moves[..., None]).any(axis=-2)
    return ((left == 0) | (left == counts - 1) | ~is_moved).all(axis=-1)


def shifted_axes(now: Integers, then: Integers) -> npt.NDArray[np.bool_]:
    """The axes (..., axes) whose parts of a dim shift in a step.

    That happens where an axis outside of them begins or ends to split the same dim: the outer axis cuts a dim
    first, so the parts of the inner axis change.
    """
    stays = (now == then) & (now >= 0)
    shifts = np.zeros(now.shape, dtype=bool)
    for inner in range(now.shape[-1]):
        for outer in range(inner):
            meets = (now[..., outer] == now[..., inner]) != (then[..., outer] == now[..., inner])
            shifts[..., inner] |= stays[..., inner] & meets
    return shifts


def group_sizes(mesh: Mesh, is_in: Any) -> tuple[Any, ...]:
    """Sizes per tier of the groups that the axes in `is_in` (..., axes) form together."""
    sizes: list[Any] = [1] * len(mesh.axes[0].sizes)
    for place, axis in enumerate(mesh.axes):
        for tier, members in enumerate(axis.sizes):
            sizes[tier] = sizes[tier] * np.where(is_in[..., place], members, 1)
    return tuple(sizes)


@dataclass(frozen=True, slots=True, eq=False)
class Redistributions:
    """Redistributions of a tensor between all placements of its data.

    `seconds` and `copies_bytes` are (from, to); the latter are peak bytes on a rank during the
    redistribution, 0 where nothing changes. `nbytes` are the bytes of each placement on the rank with most.
    """

    table: PlacementTable
    seconds: Values
    copies_bytes: Values
    nbytes: Values


def redistributions_of(
    fabric: CollectiveModel, mesh: Mesh, shape: tuple[int, ...], element_bytes: float
) -> Redistributions:
    """Redistributions of a tensor of `shape` between all placements of its data."""
    table = data_placements(shape, mesh.ranks)
    rows = table.placements
    copies = redistribution_elements(shape, mesh.ranks, rows[:, None], rows[None, :])
    np.fill_diagonal(copies, 0.0)
    return Redistributions(
        table=table,
        seconds=redistribute_s(fabric, mesh, shape, element_bytes, rows[:, None], rows[None, :]),
        copies_bytes=copies * element_bytes,
        nbytes=table.local_elements(rows) * element_bytes,
    )
