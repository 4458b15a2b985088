"""Boxes of splits: how many candidates lie between some first and last stages and recomputed layers.

Rows 8 and 9 of docs/reference/space.md as a table over (first, last), so that a box of it is counted by
prefix sums."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.check.count import SpaceDefinition
from shardwise.check.rows import Column
from shardwise.strategy import RECOMPUTES

FULL = RECOMPUTES.index("full")


@dataclass(frozen=True, slots=True)
class Box:
    """Ranges, ends included: of first and last stage and of recomputed layers; each of shape (boxes,).

    Below three stages the last follows from the first, and its range is 0 to 0.
    """

    first_low: Column
    first_high: Column
    last_low: Column
    last_high: Column
    layers_low: Column
    layers_high: Column

    def take(self, index: Column) -> Box:
        return Box(*(getattr(self, name)[index] for name in Box.__dataclass_fields__))

    @property
    def is_point(self) -> Column:
        """Whether first and last stage are single values."""
        return (self.first_low == self.first_high) & (self.last_low == self.last_high)


@dataclass(frozen=True, slots=True)
class Splits:
    """The splits of `layers` layers on `stages` stages that a space has, with their choices of recompute.

    `hulls` [recompute] is the smallest box that holds every split with that choice, None where there is none;
    `prefix_sums` [recompute][layers, first, last] counts those below both ends that recompute at least so
    many layers."""

    layers: int
    stages: int
    hulls: tuple[tuple[int, ...] | None, ...]
    prefix_sums: tuple[Column, ...]

    def count(self, recompute: Column, box: Box) -> Column:
        """Candidates of each box: splits times numbers of recomputed layers that they allow."""
        found = np.zeros(len(box.first_low), dtype=np.int64)
        for code, prefix_sums in enumerate(self.prefix_sums):
            at = np.flatnonzero(recompute == code)
            part = box.take(at)
            found[at] = _between(prefix_sums, part.layers_low, part) - _between(
                prefix_sums, part.layers_high + 1, part
            )
        return found


def _between(prefix_sums: Column, layers: Column, box: Box) -> Column:
    first, last = box.first_high + 1, box.last_high + 1
    return (
        prefix_sums[layers, first, last]
        - prefix_sums[layers, box.first_low, last]
        - prefix_sums[layers, first, box.last_low]
        + prefix_sums[layers, box.first_low, box.last_low]
    )


def splits_of(space: SpaceDefinition, stages: int) -> Splits:
    """The splits of the space for so many stages."""
    ends = _ends(space, stages)
    fullest = np.zeros_like(ends, dtype=np.int64)
    for first, last in np.argwhere(ends):
        fullest[first, last] = space.largest(int(first), _last(space, stages, int(first), int(last)), stages)
    hulls: list[tuple[int, ...] | None] = []
    prefix_sums = []
    for code, recompute in enumerate(RECOMPUTES):
        numbers = range(1, space.layers + 1) if code == FULL else (0,)
        chosen = [
            ends & _allowed_splits(space, recompute, number, fullest)
            if number in numbers
            else np.zeros_like(ends)
            for number in range(space.layers + 2)
        ]
        hulls.append(_hull(np.array(chosen)))
        from_on = np.cumsum(np.array(chosen, dtype=np.int64)[::-1], axis=0)[::-1]
        padded = np.pad(from_on.cumsum(axis=1).cumsum(axis=2), ((0, 1), (1, 0), (1, 0)))
        prefix_sums.append(padded)
    return Splits(space.layers, stages, tuple(hulls), tuple(prefix_sums))


def _allowed_splits(space: SpaceDefinition, recompute: str, number: int, fullest: Column) -> Column:
    """Which splits, by their fullest stage, have this choice of recompute."""
    if not space.allows(recompute=recompute, recompute_layers=number):
        return np.zeros(fullest.shape, dtype=bool)
    if number == 0:
        return np.ones(fullest.shape, dtype=bool)
    return fullest == number if space.is_core else fullest >= number


def _hull(chosen: Column) -> tuple[int, ...] | None:
    """The least box around what is chosen, as the members of a Box; `chosen` is [layers, first, last]."""
    if not chosen.any():
        return None
    found: list[int] = []
    for axis in (1, 2, 0):
        others = tuple(other for other in range(3) if other != axis)
        places = np.flatnonzero(chosen.any(axis=others))
        found += [int(places[0]), int(places[-1])]
    return tuple(found)


def _ends(space: SpaceDefinition, stages: int) -> Column:
    """[first, last] of the space; below three stages the last follows from the first, and its axis is 1."""
    even_first, even_last = space.even_ends(stages)
    wide = not space.is_core and stages > 1
    if stages <= 2:
        found = np.zeros((space.layers + 1, 1), dtype=bool)
        firsts = range(space.layers + 1) if wide else (even_first,)
        for first in firsts:
            last = _last(space, stages, first, 0)
            found[first, 0] = space.allows(first_stage_layers=first, last_stage_layers=last)
        return found
    found = np.zeros((even_first + 1, even_last + 1), dtype=bool)
    for first in range(even_first + 1) if wide else (even_first,):
        for last in range(even_last + 1) if wide else (even_last,):
            found[first, last] = space.allows(first_stage_layers=first, last_stage_layers=last)
    return found


def _last(space: SpaceDefinition, stages: int, first: int, last: int) -> int:
    """The last stage's layers of an entry of the table."""
    return {1: first, 2: space.layers - first}.get(stages, last)
