"""Bringing a tensor to where it is needed, and its gradient back."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shardwise.graph import Placement
from shardwise.runtime.graphs.forms import (
    Box,
    Coordinates,
    Form,
    box_of,
    elements,
    extents,
    gradient_form,
    shared,
    slices,
    value_form,
)
from shardwise.runtime.graphs.grid import Grid
from shardwise.runtime.graphs.messages import Call, Collective, Rows, Way, alone, in_a_row
from shardwise.runtime.graphs.moves import Move, gives, moves_of
from shardwise.runtime.marks import CONVERSIONS, TRAFFIC, marked


def moved(grid: Grid, local: Tensor, shape: Sequence[int], start: Form, end: Form) -> Tensor:
    """This rank's part under `end` of a tensor of `shape` of which every rank has its part under `start`.

    Never changes `local`; may return it.
    """
    return alone(grid, moving(grid, local, shape, start, end))


def moving(
    grid: Grid, local: Tensor, shape: Sequence[int], start: Form, end: Form, *, is_spare: bool = False
) -> Way:
    """The same as a way, which may be gone together with others. A `local` that is spare may change."""
    now = start
    for move in moves_of(tuple(shape), grid.counts, start, end):
        local = yield from _Step(grid, tuple(shape), now, move, is_spare).run(local)
        now = move.then
    return local


class _Step:
    """One move of one tensor on this rank."""

    def __init__(self, grid: Grid, shape: tuple[int, ...], now: Form, move: Move, is_spare: bool) -> None:
        self.grid, self.shape, self.now, self.move, self.is_spare = grid, shape, now, move, is_spare
        self.members = grid.members(move.axes)
        self.before = self._box(now, grid.here)
        self.after = self._box(move.then, grid.here)

    def _box(self, form: Form, at: Coordinates) -> Box:
        return box_of(self.shape, self.grid.counts, form, at)

    def _call(
        self, kind: Collective, sent: Tensor, sizes: Sequence[int] = (), taken: Sequence[int] = ()
    ) -> Call:
        return Call(kind, self.move.axes, sent, prod(self.shape), sizes, taken, self.is_spare)

    def run(self, local: Tensor) -> Way:
        if self.move.kind == "all_reduce":
            (whole,) = yield self._call("all_reduce", local.reshape(-1))
            return whole.view(local.shape)
        if self.move.kind == "cut":
            return local[slices(self.after, self.before)].clone(memory_format=torch.contiguous_format)
        if self.move.kind == "pad":
            padded = local.new_zeros(extents(self.after))
            padded[slices(self.before, self.after)] = local
            return padded
        if self.move.kind == "first_only":
            is_first = all(self.grid.here[axis] == 0 for axis in self.move.axes)
            return local if is_first else torch.zeros_like(local)
        way = {
            "reduce_scatter": self._reduce_scatter, "all_gather": self._all_gather, "exchange": self._exchange
        }[self.move.kind](local)  # fmt: skip
        return (yield from way)

    def _reduce_scatter(self, local: Tensor) -> Way:
        boxes = [self._box(self.move.then, at) for at in self.members]
        sent = _one_by_one(local, [local[slices(box, self.before)] for box in boxes])
        (own,) = yield self._call("reduce_scatter", sent, list(map(elements, boxes)))
        return own.view(extents(self.after))

    def _all_gather(self, local: Tensor) -> Way:
        boxes = [self._box(self.now, at) for at in self.members]
        most = max(map(elements, boxes))
        sent = local.reshape(-1)
        if len(sent) < most:
            sent = torch.cat((sent, sent.new_zeros(most - len(sent))))
        rows = yield self._call("all_gather", sent)
        return self._put(local, boxes, rows)

    def _exchange(self, local: Tensor) -> Way:
        here, axes = self.grid.here, self.move.axes
        sent: list[Tensor] = []
        for at in self.members:
            given = shared(self._box(self.move.then, at), self.before)
            takes = given is not None and gives(self.now, axes, here, at)
            sent.append(local[slices(given, self.before)] if takes and given else local.new_empty(0))
        taken = [
            shared(self._box(self.now, at), self.after) if gives(self.now, axes, at, here) else None
            for at in self.members
        ]
        sizes = [part.numel() for part in sent]
        rows = yield self._call("exchange", _one_by_one(local, sent), sizes, list(map(elements, taken)))
        return self._put(local, taken, rows)

    def _put(self, local: Tensor, boxes: Sequence[Box | None], rows: Rows) -> Tensor:
        """The part behind the move, of boxes of it, each at the beginning of a row: no copy where they lie as
        they are to lie. Who handed `rows` over still has them while the next move is made, so they go."""
        given = [
            (box, row[: elements(box)].view(extents(box)))
            for box, row in zip(boxes, rows, strict=True)
            if box is not None
        ]
        rows.clear()
        whole = in_a_row([part for _, part in given]) if given else None
        if whole is not None and _are_slabs([box for box, _ in given], self.after):
            return whole.view(extents(self.after))
        result = local.new_empty(extents(self.after))
        for box, part in given:
            result[slices(box, self.after)] = part
        return result


def _one_by_one(local: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Parts of a tensor flat one behind the other: where they lie so already, as they are."""
    lying = in_a_row(parts)
    if lying is not None:
        return lying
    result = local.new_empty(sum(part.numel() for part in parts))
    for room, part in zip(result.split([part.numel() for part in parts]), parts, strict=True):
        room.view(part.shape).copy_(part)
    return result


def _are_slabs(boxes: Sequence[Box], whole: Box) -> bool:
    """Whether boxes are all rows of `whole` in their order: they differ along its first dim alone, of those
    that have more than one element."""
    first = next((dim for dim, (low, high) in enumerate(whole) if high - low > 1), None)
    if first is None or any(
        box[:first] + box[first + 1 :] != whole[:first] + whole[first + 1 :] for box in boxes
    ):
        return False
    ends = [whole[first][0], *(box[first][1] for box in boxes)]
    return [box[first][0] for box in boxes] == ends[:-1] and ends[-1] == whole[first][1]


class Lie:
    """How a tensor of `shape` lies: a placement for each axis, and the elements that stay together along the
    dim that an axis splits."""

    __slots__ = ("gradient", "shape", "value")

    def __init__(
        self, shape: Sequence[int], placements: Sequence[Placement], units: Sequence[int] | None = None
    ) -> None:
        self.shape = tuple(shape)
        self.value = value_form(placements, units)
        self.gradient = gradient_form(placements, units)


def brought(grid: Grid, local: Tensor, start: Lie, end: Lie, what: str = CONVERSIONS) -> Tensor:
    """The tensor as `end` says, where it lies as `start` says; its gradient will come back the other way.
    Profiles call that `what`."""
    if start.value == end.value and start.gradient == end.gradient:
        return local
    result: Tensor = _Bring.apply(local, grid, start, end, what)
    return result


class _Bring(Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, grid: Grid, start: Lie, end: Lie, what: str) -> Tensor:
        ctx.way = (grid, start, end, what)
        with marked(TRAFFIC, what):
            result = moved(grid, local, start.shape, start.value, end.value)
        return result.view_as(result) if result is local else result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grid, start, end, what = ctx.way
        with marked(TRAFFIC, what):
            gradient = moved(grid, gradients[0], start.shape, end.gradient, start.gradient)
        return gradient, None, None, None, None
