"""What the ranks of a mesh hold of a tensor, as columns over all the ways it may lie.

What it takes to bring a tensor from one form into another (docs/concepts/pareto-search.md).
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


SLICE, REDUCE_SCATTER, ALL_TO_ALL, ALL_REDUCE, ALL_GATHER, PAD = range(1, 7)
"""What an axis needs, in the order in which it is done: what shrinks the tensor first, what grows it last.
Slicing and padding with zeros are a rank's own doing; the others are a reduce-scatter, an all-to-all, an
all-reduce and an all-gather among the ranks of all axes that need it."""


def actions_of(start: Integers, end: Integers) -> Integers:
    """The action per axis from held form `start` to held form `end`; 0 where nothing is to be done."""
    is_split, is_partial = start >= 0, start == PARTIAL
    becomes_part = (end >= 0) | (end == REPLICATE_SHARD_STATES)
    action = np.where((start == REPLICATE) & becomes_part, SLICE, 0)
    action = np.where(is_partial & becomes_part, REDUCE_SCATTER, action)
    action = np.where(is_split & (end >= 0) & (start != end), ALL_TO_ALL, action)
    action = np.where(is_partial & (end == REPLICATE), ALL_REDUCE, action)
    # A shard of states is of no dim: what is split already is each rank's own.
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
    """Seconds (...) to bring a tensor of `shape` from held forms `start` to `end`, (..., axes) each.

    Axes that need the same collective do it as one group. Each collective moves what the rank with the
    largest parts has: a reduce-scatter, an all-to-all and an all-reduce what is there before them, an
    all-gather what is there after it. Parts that shift (`shifted_axes`) are exchanged besides: what is there
    behind a slice, the more of before and after elsewhere, of which some rank has nothing yet.
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
    """What some pairs of forms have to do next: the axes (..., axes) that `moves` are of, from `now` to
    `then`."""

    action: int
    moves: npt.NDArray[np.bool_]
    now: Integers
    then: Integers

    @property
    def ends(self) -> tuple[Integers, Integers]:
        return self.now, self.then


def _steps_between(start: Integers, end: Integers) -> Iterator[_Step]:
    """The steps from `start` to `end` that any pair of them needs, in their order."""
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
    """The most elements (...) of a tensor of `shape` that a rank has while it is brought from `start` to
    `end`, (..., axes) each, which differ: the tensor as it lies and what a step begins and ends with.

    Collectives take and bring one rank's part behind another's. Where parts do not lie so in the tensor that
    is sent or received, which they do along its first dim (of more than one element), it is there once more;
    and where parts that are gathered are filled up to the largest.
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
    """Whether the parts that `moves` of axes make of what a rank has under `whole` lie one behind the other:
    of one dim, in front of which it has one element along each."""
    dims = len(shape)
    own = [np.where(moves & (parts >= 0), parts, other) for other in (dims, -1)]
    first, last = own[0].min(axis=-1), own[1].max(axis=-1)
    extents = -(-np.array(shape) // split_parts(dims, ranks, whole)[..., :dims])
    in_front = np.where(np.arange(dims) < first[..., None], extents, 1).prod(axis=-1)
    return np.asarray((first == last) & (in_front == 1))


def _is_even(shape: tuple[int, ...], ranks: tuple[int, ...], parts: Integers, moves: Any) -> Any:
    """Whether dims along which axes `moves` have parts are divided into equal ones, or the last alone is
    smaller: others are filled up in between."""
    dims = len(shape)
    counts = split_parts(dims, ranks, parts)[..., :dims]
    left = np.array(shape, dtype=np.int64) % counts
    is_moved = ((parts[..., None] == np.arange(dims)) & moves[..., None]).any(axis=-2)
    return ((left == 0) | (left == counts - 1) | ~is_moved).all(axis=-1)


def shifted_axes(now: Integers, then: Integers) -> npt.NDArray[np.bool_]:
    """The axes (..., axes) whose parts of a dim shift in a step, since an axis outside of them begins or ends
    to split the same dim: the outer axis cuts a dim first, so that their parts are others then."""
    stays = (now == then) & (now >= 0)
    shifts = np.zeros(now.shape, dtype=bool)
    for inner in range(now.shape[-1]):
        for outer in range(inner):
            meets = (now[..., outer] == now[..., inner]) != (then[..., outer] == now[..., inner])
            shifts[..., inner] |= stays[..., inner] & meets
    return shifts


def group_sizes(mesh: Mesh, is_in: Any) -> tuple[Any, ...]:
    """Sizes per tier of the groups that the axes in `is_in` (..., axes) span together."""
    sizes: list[Any] = [1] * len(mesh.axes[0].sizes)
    for place, axis in enumerate(mesh.axes):
        for tier, members in enumerate(axis.sizes):
            sizes[tier] = sizes[tier] * np.where(is_in[..., place], members, 1)
    return tuple(sizes)


@dataclass(frozen=True, slots=True, eq=False)
class Redistributions:
    """Bringing a tensor from any held form into any other: `seconds` (forms, forms), and `copies_bytes`
    (forms, forms), which the rank with most has meanwhile, none where nothing changes; `nbytes` (forms) are
    what it holds."""

    table: PlacementTable
    seconds: Values
    copies_bytes: Values
    nbytes: Values


def redistributions_of(
    fabric: CollectiveModel, mesh: Mesh, shape: tuple[int, ...], element_bytes: float
) -> Redistributions:
    """Conversions of a tensor of `shape` between all that ranks may hold of it."""
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
