"""Redistribution of tensors between placements, with autograd.

`redistribute_path` finds the steps from one placement to another, by boxes only. `run_batched` runs the
collectives of several tensors and sends equal ones as one message. `redistribute_local_tensor` redistributes
one tensor; `redistribute` does so with a gradient that returns the other way. `TensorSpec` has the shape and
placements of a tensor and of its gradient, like DTensorSpec.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, combinations
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, distributed
from torch.autograd import Function

from shardwise.graph import Placement
from shardwise.runtime.graphs.placements import (
    AxisPlacement,
    Box,
    Coordinates,
    MeshPlacements,
    ProcessMesh,
    box_of,
    elements,
    extents,
    gradient_placements,
    intersection,
    mesh_coordinates,
    slices,
    value_placements,
    within,
)
from shardwise.runtime.profiling import CONVERSIONS, TRAFFIC_MARK, profiled_range

# Paths

StepKind = Literal["cut", "reduce_scatter", "exchange", "all_reduce", "all_gather", "pad", "first_only"]


@dataclass(frozen=True, slots=True)
class RedistributeStep:
    """One step among the ranks that differ along `axes`, after which the placements are `then`.

    `cut` (slice), `pad` (zeros around a shard) and `first_only` (zeros on all ranks but the first of `axes`)
    are local. An `exchange` is an all-to-all: it sends boxes from ranks that have them to ranks that need
    them.
    """

    kind: StepKind
    axes: tuple[int, ...]
    then: MeshPlacements


_STEP_ORDER = ("cut", "reduce_scatter", "exchange", "all_reduce", "all_gather", "pad", "first_only")
"""Steps that shrink a tensor come before those that grow it (docs/concepts/pareto-search.md, Costs)."""


def _step_kind(start: AxisPlacement, end: AxisPlacement, units_differ: bool) -> str:
    """The kind of step that an axis needs; `none` where ranks have what they need."""
    if start == "whole":
        return {"whole": "none", "partial": "first_only"}.get(str(end), "cut")
    if start == "partial":
        return {"whole": "all_reduce", "partial": "none"}.get(str(end), "reduce_scatter")
    if isinstance(end, int):
        return "exchange" if end != start or units_differ else "none"
    return "all_gather" if end == "whole" else "pad"


@lru_cache(maxsize=4096)
def redistribute_path(
    shape: tuple[int, ...], counts: tuple[int, ...], start: MeshPlacements, end: MeshPlacements
) -> tuple[RedistributeStep, ...]:
    """The steps from `start` to `end` of a tensor of `shape` on a mesh of `counts` ranks per axis.

    Axes that need the same step form one group. Where several axes shard a dim and an outer one changes,
    whole shards shift: an all-to-all runs among all ranks that hold part of them.
    """
    kinds = [
        "none" if count == 1 else _step_kind(a, b, isinstance(a, int) and u != v)
        for a, b, u, v, count in zip(start.by_axis, end.by_axis, start.units, end.units, counts, strict=True)
    ]
    builder = _PathBuilder(shape, counts, start)
    for kind in _STEP_ORDER:
        axes = tuple(axis for axis, own in enumerate(kinds) if own == kind)
        if axes:
            builder.add(kind, axes, end)
    if builder.boxes(builder.now) != builder.boxes(end):  # an outer axis moved the units of an inner one
        builder.all_to_all(_axes_of_parts(end), end)
    return tuple(builder.path)


class _PathBuilder:
    """The steps so far, and the placements after them."""

    def __init__(self, shape: tuple[int, ...], counts: tuple[int, ...], start: MeshPlacements) -> None:
        self.shape, self.counts, self.now = shape, counts, start
        self.path: list[RedistributeStep] = []

    def boxes(self, placements: MeshPlacements) -> dict[Coordinates, Box]:
        return {at: box_of(self.shape, self.counts, placements, at) for at in mesh_coordinates(self.counts)}

    def step(self, kind: StepKind, axes: tuple[int, ...], then: MeshPlacements) -> None:
        self.path.append(RedistributeStep(kind, axes, then))
        self.now = then

    def add(self, kind: str, axes: tuple[int, ...], end: MeshPlacements) -> None:
        then = self.now.with_axes_of(axes, end)
        before, after = self.boxes(self.now), self.boxes(then)
        shrinks = all(within(after[at], before[at]) for at in before)
        grows = all(within(before[at], after[at]) for at in before)
        if kind == "exchange" and before == after:
            self.now = then  # other units, the same elements
        elif kind == "cut" and shrinks:
            self.step("cut", axes, then)
        elif kind == "reduce_scatter" and shrinks:
            self.step("reduce_scatter", axes, then)
        elif kind == "reduce_scatter":
            self.step("all_reduce", axes, self.now.with_axes_as(axes, "whole"))
            self.add("cut", axes, end)
        elif kind == "all_reduce":
            self.step("all_reduce", axes, then)
        elif kind == "first_only":
            self.step("first_only", axes, then)
        elif kind == "all_gather" and grows and self._covered(axes, after):
            self.step("all_gather", axes, then)
        elif kind == "pad" and grows:
            self.step("pad", axes, then)
        elif kind == "pad":
            self.all_to_all(axes, self.now.with_axes_as(axes, "whole"))
            self.step("first_only", axes, then)
        else:
            self.all_to_all(axes, then)

    def all_to_all(self, axes: tuple[int, ...], then: MeshPlacements) -> None:
        """Add an all-to-all among the fewest ranks that together have all that each needs."""
        after = self.boxes(then)
        others = [axis for axis in _axes_of_parts(self.now) if axis not in axes]
        for count in range(len(others) + 1):
            for more in combinations(others, count):
                chosen = tuple(sorted({*axes, *more}))
                if self._covered(chosen, after):
                    self.step("exchange", chosen, then)
                    return

    def _covered(self, axes: Sequence[int], after: dict[Coordinates, Box]) -> bool:
        """Whether every rank finds its box among the ranks that differ from it along `axes`."""
        before = self.boxes(self.now)
        return all(
            sum(
                elements(intersection(before[other], box))
                for other in before
                if sends_to(self.now, axes, other, at)
            )
            == elements(box)
            for at, box in after.items()
        )


def sends_to(now: MeshPlacements, axes: Sequence[int], sender: Coordinates, receiver: Coordinates) -> bool:
    """Whether `sender` sends to `receiver` in an all-to-all along `axes`.

    Of ranks that have the same elements, the one with the receiver's index along other axes sends.
    """
    return all(
        sender[axis] == receiver[axis] or (axis in axes and isinstance(placement, int))
        for axis, placement in enumerate(now.by_axis)
    )


def _axes_of_parts(placements: MeshPlacements) -> tuple[int, ...]:
    return tuple(axis for axis, placement in enumerate(placements.by_axis) if isinstance(placement, int))


# Batched collectives

CollectiveKind = Literal["reduce_scatter", "exchange", "all_reduce", "all_gather"]

_COLLECTIVE_ORDER: Sequence[CollectiveKind] = ("reduce_scatter", "exchange", "all_reduce", "all_gather")
"""Collectives that shrink a tensor come before those that grow it (docs/concepts/pareto-search.md, Costs)."""

FlatRows = list[Tensor]
"""Flat tensors, one per rank of a group."""


MAX_BATCH_BYTES = 25 * 2**20
"""Bytes of tensors batched into one message; bounds the copies that batching makes. PyTorch's
DistributedDataParallel has the same default bucket size: latency is small against the time of such a
message."""


@dataclass(frozen=True, slots=True)
class CollectiveRequest:
    """One collective of a tensor among the ranks that differ along `axes`.

    For a `reduce_scatter` and an `exchange`, `sent` has one row per rank in the order of their group, with
    `sizes` elements each; for an `all_reduce` and an `all_gather` it is the same for all. `taken` are the
    elements that an exchange receives from each rank. `whole` is the number of elements of the whole tensor,
    of which ranks may have unequal shards.

    The result has rows: the sum of this rank's rows; or one row per rank for an exchange and an all-gather.
    `may_overwrite` allows writing to `sent`. `buffer`, of the result's size, may receive an all-gather.
    """

    kind: CollectiveKind
    axes: tuple[int, ...]
    sent: Tensor
    whole: int
    sizes: Sequence[int] = ()
    taken: Sequence[int] = ()
    may_overwrite: bool = False
    buffer: Tensor | None = None

    @property
    def key(self) -> tuple[int, tuple[int, ...], str]:
        """Requests with the same key are batched."""
        return _COLLECTIVE_ORDER.index(self.kind), self.axes, str(self.sent.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, the same on all ranks."""
        return self.whole * self.sent.element_size()

    @property
    def rows(self) -> FlatRows:
        """The row for each rank."""
        return list(self.sent.split(list(self.sizes)))


CollectiveCoroutine = Generator[CollectiveRequest, FlatRows, Tensor]
"""A computation of one tensor: yields collective requests, receives their rows, returns the tensor."""


def run_batched(grid: ProcessMesh, coroutines: Iterable[CollectiveCoroutine]) -> list[Tensor]:
    """Run all coroutines; returns their results.

    Pending requests of one kind, dtype and set of axes are sent as one message. Every rank runs the same
    coroutines.
    """
    running = list(coroutines)
    results: dict[int, Tensor] = {}
    pending: dict[int, CollectiveRequest] = {}

    def advance(number: int, answer: FlatRows | None) -> None:
        try:
            pending[number] = next(running[number]) if answer is None else running[number].send(answer)
        except StopIteration as end:
            results[number] = end.value

    for number in range(len(running)):
        advance(number, None)
    while pending:
        first = min(call.key for call in pending.values())
        alike = sorted(number for number, call in pending.items() if call.key == first)
        chosen = alike[: _fitting([pending[number].nbytes for number in alike])]
        answers = _run_calls(grid, [pending.pop(number) for number in chosen])
        for number, answer in zip(chosen, answers, strict=True):
            advance(number, answer)
    return [results[number] for number in range(len(running))]


def run_alone(grid: ProcessMesh, coroutine: CollectiveCoroutine) -> Tensor:
    """Run one coroutine; returns its result."""
    (end,) = run_batched(grid, (coroutine,))
    return end


def _fitting(nbytes: Sequence[int]) -> int:
    """How many of the first tensors fit one message; at least one. `nbytes` is the same on all ranks, as the
    messages must be."""
    return max(1, sum(total <= MAX_BATCH_BYTES for total in accumulate(nbytes)))


def _run_calls(grid: ProcessMesh, calls: Sequence[CollectiveRequest]) -> list[FlatRows]:
    """Run requests of one kind as one collective; returns the rows of each.

    Sent tensors are overwritten only if all may be and are adjacent in memory: the sum then replaces them.
    """
    axes, kind = calls[0].axes, calls[0].kind
    members, group = grid.members(axes), grid.group(axes)
    if kind == "all_reduce":
        sent = [call.sent for call in calls]
        in_place = contiguous_view(sent) if all(call.may_overwrite for call in calls) else None
        flat = torch.cat(sent) if in_place is None else in_place
        distributed.all_reduce(flat, group=group)
        return [[row] for row in flat.split([len(call.sent) for call in calls])]
    if kind == "all_gather":
        sent = torch.cat([call.sent for call in calls]) if len(calls) > 1 else calls[0].sent.contiguous()
        gathered = calls[0].buffer if len(calls) == 1 else None
        if gathered is None:
            gathered = sent.new_empty(len(members) * len(sent))
        distributed.all_gather_single(gathered, sent, group=group)
        return _split_rows(gathered, [[len(call.sent)] * len(members) for call in calls])
    sizes = [sum(row) for row in zip(*(call.sizes for call in calls), strict=True)]
    if kind == "exchange":
        taken = [sum(row) for row in zip(*(call.taken for call in calls), strict=True)]
        received = calls[0].sent.new_empty(sum(taken))
        distributed.all_to_all_single(received, _by_member(calls), taken, sizes, group=group)
        return _split_rows(received, [call.taken for call in calls])
    here = members.index(grid.here)
    result = calls[0].sent.new_empty(sizes[here])
    if len(set(sizes)) == 1:
        distributed.reduce_scatter_single(result, _by_member(calls), group=group)
    else:
        distributed.reduce_scatter(result, list(_by_member(calls).split(sizes)), group=group)
    return [[row] for row in result.split([call.sizes[here] for call in calls])]


def contiguous_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensors as one flat view; None where they are not adjacent in memory."""
    first, end = tensors[0], tensors[0].storage_offset()
    for tensor in tensors:
        is_next = tensor.storage_offset() == end and tensor.is_contiguous()
        if tensor.untyped_storage() is not first.untyped_storage() or not is_next:
            return None
        end += tensor.numel()
    return first.as_strided((end - first.storage_offset(),), (1,), first.storage_offset())


def _by_member(calls: Sequence[CollectiveRequest]) -> Tensor:
    """The rows of all requests, those for the same rank adjacent."""
    if len(calls) == 1:
        return calls[0].sent
    return torch.cat([row for rows in zip(*(call.rows for call in calls), strict=True) for row in rows])


def _split_rows(received: Tensor, sizes: Sequence[Sequence[int]]) -> list[FlatRows]:
    """For each request its row from each rank. In `received`, rows of the same rank are adjacent; `sizes` are
    by request and rank."""
    by_member = list(zip(*sizes, strict=True))
    parts = received.split([size for row in by_member for size in row])
    return [
        [parts[member * len(sizes) + place] for member in range(len(by_member))]
        for place in range(len(sizes))
    ]


# Redistribution of local tensors


def redistribute_local_tensor(
    grid: ProcessMesh, local: Tensor, shape: Sequence[int], start: MeshPlacements, end: MeshPlacements
) -> Tensor:
    """This rank's shard under `end` of a tensor of `shape`, from its shard under `start`.

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
    """`redistribute_local_tensor` as a coroutine that can be batched. `may_overwrite` allows changing
    `local`."""
    now = start
    for step in redistribute_path(tuple(shape), grid.counts, start, end):
        local = yield from _StepOnRank(grid, tuple(shape), now, step, may_overwrite).run(local)
        now = step.then
    return local


class _StepOnRank:
    """One step of one tensor on this rank."""

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
        steps = {
            "reduce_scatter": self._reduce_scatter, "all_gather": self._all_gather,
            "exchange": self._all_to_all
        }[self.step.kind](local)  # fmt: skip
        return (yield from steps)

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
        """The shard after the step, put together from boxes at the start of each row.

        No copy is made where the rows are in order in memory. `rows` is cleared, since its caller holds it
        during the next step.
        """
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
    """Parts of a tensor as one flat tensor; no copy where they are adjacent."""
    contiguous = contiguous_view(parts)
    if contiguous is not None:
        return contiguous
    result = local.new_empty(sum(part.numel() for part in parts))
    for buffer, part in zip(result.split([part.numel() for part in parts]), parts, strict=True):
        buffer.view(part.shape).copy_(part)
    return result


def _are_slabs(boxes: Sequence[Box], whole: Box) -> bool:
    """Whether `boxes` divide `whole` in order along its first dim with more than one element."""
    first = next((dim for dim, (low, high) in enumerate(whole) if high - low > 1), None)
    if first is None or any(
        box[:first] + box[first + 1 :] != whole[:first] + whole[first + 1 :] for box in boxes
    ):
        return False
    bounds = [whole[first][0], *(box[first][1] for box in boxes)]
    return [box[first][0] for box in boxes] == bounds[:-1] and bounds[-1] == whole[first][1]


# Redistribution with autograd


class TensorSpec:
    """Shape and placements of a tensor and of its gradient (DTensorSpec).

    `placements` has one per mesh axis; `units` are the elements that stay together along the dim an axis
    shards.
    """

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
    """The tensor in the placements of `end`; its gradient is redistributed the other way.

    `what` is its category in profiles.
    """
    if start.value == end.value and start.gradient == end.gradient:
        return local
    result: Tensor = _Redistribute.apply(local, grid, start, end, what)
    return result


class _Redistribute(Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, grid: ProcessMesh, start: TensorSpec, end: TensorSpec, what: str
    ) -> Tensor:
        ctx.arguments = (grid, start, end, what)
        with profiled_range(TRAFFIC_MARK, what):
            result = redistribute_local_tensor(grid, local, start.shape, start.value, end.value)
        return result.view_as(result) if result is local else result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grid, start, end, what = ctx.arguments
        with profiled_range(TRAFFIC_MARK, what):
            gradient = redistribute_local_tensor(
                grid, gradients[0], start.shape, end.gradient, start.gradient
            )
        return gradient, None, None, None, None
