"""What it takes to bring a tensor from one form into another (docs/tracking.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.cluster import Mesh
from shardwise.cost.fabric import Fabric
from shardwise.cost.layouts.forms import Forms, Integers, Values, held_forms, local_elements
from shardwise.graph import PARTIAL, STATES_SPLIT, WHOLE

SLICE, SCATTER, EXCHANGE, REDUCE, GATHER, PAD = range(1, 7)
"""What an axis needs, in the order in which it is done: what shrinks the tensor first, what grows it last.
Slicing and padding with zeros are a rank's own doing; the others are a reduce-scatter, an all-to-all, an
all-reduce and an all-gather among the ranks of all axes that need it."""


def actions_of(start: Integers, end: Integers) -> Integers:
    """The action per axis from held form `start` to held form `end`; 0 where nothing is to be done."""
    is_split, is_partial = start >= 0, start == PARTIAL
    becomes_part = (end >= 0) | (end == STATES_SPLIT)
    action = np.where((start == WHOLE) & becomes_part, SLICE, 0)
    action = np.where(is_partial & becomes_part, SCATTER, action)
    action = np.where(is_split & (end >= 0) & (start != end), EXCHANGE, action)
    action = np.where(is_partial & (end == WHOLE), REDUCE, action)
    # A shard of states is of no dim: what is split already is each rank's own.
    action = np.where((is_split | (start == STATES_SPLIT)) & (end == WHOLE), GATHER, action)
    return np.where(is_split & (end == PARTIAL), PAD, action)


def move_s(
    fabric: Fabric,
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
    actions = actions_of(start, end)
    seconds = np.zeros(start.shape[:-1])
    now = start
    prices: dict[int, Callable[[Values, Values, tuple[Any, ...]], Any]] = {
        SCATTER: lambda before, after, sizes: fabric.scatter_s(before, sizes),
        EXCHANGE: lambda before, after, sizes: fabric.all_to_all_s(before, sizes),
        REDUCE: lambda before, after, sizes: fabric.all_reduce_s(before, sizes),
        GATHER: lambda before, after, sizes: fabric.pass_s(after, sizes),
    }
    for action in range(SLICE, PAD + 1):
        is_now = actions == action
        if not is_now.any():
            continue
        then = np.where(is_now, end, now)
        before, after = (local_elements(shape, mesh.ranks, form) * element_bytes for form in (now, then))
        if action in prices:
            seconds = seconds + prices[action](before, after, group_sizes(mesh, is_now))
        shifts = shifted_axes(now, then)
        if shifts.any():
            sizes = group_sizes(mesh, shifts)
            nbytes = after if action == SLICE else np.maximum(before, after)
            members = np.maximum(2, prod(sizes))
            shift_s = fabric.all_to_all_s(nbytes * members / (members - 1.0), sizes)
            seconds = seconds + np.where(shifts.any(axis=-1), shift_s, 0.0)
        now = then
    return seconds


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
class Conversions:
    """Bringing a tensor from any held form into any other: `seconds` (forms, forms); `nbytes` (forms) are
    what the rank with most holds."""

    forms: Forms
    seconds: Values
    nbytes: Values


def conversions_of(fabric: Fabric, mesh: Mesh, shape: tuple[int, ...], element_bytes: float) -> Conversions:
    """Conversions of a tensor of `shape` between all that ranks may hold of it."""
    forms = held_forms(shape, mesh.ranks)
    held = forms.placements
    return Conversions(
        forms=forms,
        seconds=move_s(fabric, mesh, shape, element_bytes, held[:, None], held[None, :]),
        nbytes=forms.local_elements(held) * element_bytes,
    )
