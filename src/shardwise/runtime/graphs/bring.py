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
    MeshPlacements,
    box_of,
    elements,
    extents,
    gradient_placements,
    intersection,
    slices,
    value_placements,
)
from shardwise.runtime.graphs.grid import ProcessMesh
from shardwise.runtime.graphs.messages import (
    CollectiveCoroutine,
    CollectiveKind,
    CollectiveRequest,
    FlatRows,
    contiguous_view,
    run_alone,
)
from shardwise.runtime.graphs.moves import RedistributeStep, redistribute_path, sends_to
from shardwise.runtime.marks import CONVERSIONS, TRAFFIC_MARK, profiled_range


def redistribute_local_tensor(
    grid: ProcessMesh, local: Tensor, shape: Sequence[int], start: MeshPlacements, end: MeshPlacements
) -> Tensor:
    """This rank's part under `end` of a tensor of `shape` of which every rank has its part under `start`.

    Never changes `local`; may return it.
    """
    return run_alone(grid, redistribute_steps(grid, local, shape, start, end))


def redistribute_steps(
    grid: ProcessMesh,
    local: Tensor,
    shape: Sequence[int],
    start: MeshPlacements,
    end: MeshPlacements,
    *,
    may_overwrite: bool = False,
) -> CollectiveCoroutine:
    """The same as a way, which may be gone together with others. A `local` that is spare may change."""
    now = start
    for step in redistribute_path(tuple(shape), grid.counts, start, end):
        local = yield from _StepOnRank(grid, tuple(shape), now, step, may_overwrite).run(local)
        now = step.then
    return local


class _StepOnRank:
    """One move of one tensor on this rank."""

    def __init__(
        self,
        grid: ProcessMesh,
        shape: tuple[int, ...],
        now: MeshPlacements,
        step: RedistributeStep,
        may_overwrite: bool,
    ) -> None:
        self.grid, self.shape, self.now, self.step, self.may_overwrite = grid, shape, now, step, may_overwrite
        self.members = grid.members(step.axes)
        self.before = self._box(now, grid.here)
        self.after = self._box(step.then, grid.here)

    def _box(self, placements: MeshPlacements, at: Coordinates) -> Box:
        return box_of(self.shape, self.grid.counts, placements, at)

    def _call(
        self, kind: CollectiveKind, sent: Tensor, sizes: Sequence[int] = (), taken: Sequence[int] = ()
    ) -> CollectiveRequest:
        return CollectiveRequest(
            kind, self.step.axes, sent, prod(self.shape), sizes, taken, self.may_overwrite
        )

    def run(self, local: Tensor) -> CollectiveCoroutine:
        if self.step.kind == "all_reduce":
            (whole,) = yield self._call("all_reduce", local.reshape(-1))
            return whole.view(local.shape)
        if self.step.kind == "cut":
            return local[slices(self.after, self.before)].clone(memory_format=torch.contiguous_format)
        if self.step.kind == "pad":
            padded = local.new_zeros(extents(self.after))
            padded[slices(self.before, self.after)] = local
            return padded
        if self.step.kind == "first_only":
            is_first = all(self.grid.here[axis] == 0 for axis in self.step.axes)
            return local if is_first else torch.zeros_like(local)
        way = {
            "reduce_scatter": self._reduce_scatter, "all_gather": self._all_gather,
            "exchange": self._all_to_all
        }[self.step.kind](local)  # fmt: skip
        return (yield from way)

    def _reduce_scatter(self, local: Tensor) -> CollectiveCoroutine:
        boxes = [self._box(self.step.then, at) for at in self.members]
        sent = _flattened(local, [local[slices(box, self.before)] for box in boxes])
        (own,) = yield self._call("reduce_scatter", sent, list(map(elements, boxes)))
        return own.view(extents(self.after))

    def _all_gather(self, local: Tensor) -> CollectiveCoroutine:
        boxes = [self._box(self.now, at) for at in self.members]
        most = max(map(elements, boxes))
        sent = local.reshape(-1)
        if len(sent) < most:
            sent = torch.cat((sent, sent.new_zeros(most - len(sent))))
        rows = yield self._call("all_gather", sent)
        return self._put(local, boxes, rows)

    def _all_to_all(self, local: Tensor) -> CollectiveCoroutine:
        here, axes = self.grid.here, self.step.axes
        sent: list[Tensor] = []
        for at in self.members:
            received = intersection(self._box(self.step.then, at), self.before)
            takes = received is not None and sends_to(self.now, axes, here, at)
            sent.append(local[slices(received, self.before)] if takes and received else local.new_empty(0))
        taken = [
            intersection(self._box(self.now, at), self.after) if sends_to(self.now, axes, at, here) else None
            for at in self.members
        ]
        sizes = [part.numel() for part in sent]
        rows = yield self._call("exchange", _flattened(local, sent), sizes, list(map(elements, taken)))
        return self._put(local, taken, rows)

    def _put(self, local: Tensor, boxes: Sequence[Box | None], rows: FlatRows) -> Tensor:
        """The part behind the move, of boxes of it, each at the beginning of a row: no copy where they lie as
        they are to lie. Who handed `rows` over still has them while the next move is made, so they go."""
        received = [
            (box, row[: elements(box)].view(extents(box)))
            for box, row in zip(boxes, rows, strict=True)
            if box is not None
        ]
        rows.clear()
        whole = contiguous_view([part for _, part in received]) if received else None
        if whole is not None and _are_slabs([box for box, _ in received], self.after):
            return whole.view(extents(self.after))
        result = local.new_empty(extents(self.after))
        for box, part in received:
            result[slices(box, self.after)] = part
        return result


def _flattened(local: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Parts of a tensor flat one behind the other: where they lie so already, as they are."""
    contiguous = contiguous_view(parts)
    if contiguous is not None:
        return contiguous
    result = local.new_empty(sum(part.numel() for part in parts))
    for buffer, part in zip(result.split([part.numel() for part in parts]), parts, strict=True):
        buffer.view(part.shape).copy_(part)
    return result


def _are_slabs(boxes: Sequence[Box], whole: Box) -> bool:
    """Whether boxes are all rows of `whole` in their order: they differ along its first dim alone, of those
    that have more than one element."""
    first = next((dim for dim, (low, high) in enumerate(whole) if high - low > 1), None)
    if first is None or any(
        box[:first] + box[first + 1 :] != whole[:first] + whole[first + 1 :] for box in boxes
    ):
        return False
    bounds = [whole[first][0], *(box[first][1] for box in boxes)]
    return [box[first][0] for box in boxes] == bounds[:-1] and bounds[-1] == whole[first][1]


class TensorSpec:
    """How a tensor of `shape` lies: a placement for each axis, and the elements that stay together along the
    dim that an axis splits."""

    __slots__ = ("gradient", "shape", "value")

    def __init__(
        self, shape: Sequence[int], placements: Sequence[Placement], units: Sequence[int] | None = None
    ) -> None:
        self.shape = tuple(shape)
        self.value = value_placements(placements, units)
        self.gradient = gradient_placements(placements, units)


def redistribute(
    grid: ProcessMesh, local: Tensor, start: TensorSpec, end: TensorSpec, what: str = CONVERSIONS
) -> Tensor:
    """The tensor as `end` says, where it lies as `start` says; its gradient will come back the other way.
    Profiles call that `what`."""
    if start.value == end.value and start.gradient == end.gradient:
        return local
    result: Tensor = _Redistribute.apply(local, grid, start, end, what)
    return result


class _Redistribute(Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, grid: ProcessMesh, start: TensorSpec, end: TensorSpec, what: str
    ) -> Tensor:
        ctx.way = (grid, start, end, what)
        with profiled_range(TRAFFIC_MARK, what):
            result = redistribute_local_tensor(grid, local, start.shape, start.value, end.value)
        return result.view_as(result) if result is local else result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grid, start, end, what = ctx.way
        with profiled_range(TRAFFIC_MARK, what):
            gradient = redistribute_local_tensor(
                grid, gradients[0], start.shape, end.gradient, start.gradient
            )
        return gradient, None, None, None, None
