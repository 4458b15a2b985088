"""The parameters of an operator graph on one rank: stored, gathered for their readers, and updated.

`ShardedParameter` holds this rank's shard, its gradient and the part that the optimizer updates.
`reduce_gradients` and `publish` batch the collectives of several parameters (ZeRO-1 reduce-scatter and
all-gather).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shardwise.runtime.graphs.placements import (
    Coordinates,
    MeshPlacements,
    ProcessMesh,
    box_of,
    boxes_of_range,
    elements,
    extents,
    replicated_placements,
)
from shardwise.runtime.graphs.program import GraphProgram, ParameterSpec
from shardwise.runtime.graphs.redistribute import (
    CollectiveCoroutine,
    CollectiveKind,
    CollectiveRequest,
    TensorSpec,
    redistribute_local_tensor,
    redistribute_steps,
    run_alone,
    run_batched,
)
from shardwise.runtime.profiling import GATHERS, GRADIENTS, TRAFFIC_MARK, profiled_range


class ShardedParameter:
    """One parameter on this rank.

    `weight` is this rank's shard in the compute dtype. `owned` is what the optimizer updates, in the dtype of
    `whole`. It is the weight itself; or this rank's share of it where optimizer states are sharded (ZeRO-1);
    or a copy where the compute dtype differs.

    `sums` accumulates this rank's gradient until `gradient_steps`, in the dtype of `whole`. It is a view of
    `buffer`, which has `buffer_elements` elements. Where shares are ranges of elements, both buffers are
    padded so that they divide into equal shares; a share is then a view.
    """

    def __init__(
        self, grid: ProcessMesh, stored: ParameterSpec, whole: Tensor, dtype: torch.dtype, buffer: Tensor
    ) -> None:
        self.grid, self.stored = grid, stored
        shape = stored.spec.shape
        everywhere = replicated_placements(len(grid.counts))
        local = redistribute_local_tensor(
            grid, whole.reshape(shape), shape, everywhere, stored.spec.value
        ).detach()
        self.shares = stored.states_split
        self.is_copied = dtype != whole.dtype
        self._gradient_buffer = buffer
        self._weight_buffer = local.new_zeros(buffer_elements(grid, stored, stored.spec.value), dtype=dtype)
        self.weight = nn.Parameter(self._weight_buffer[: local.numel()].view(local.shape).copy_(local))
        self.owned = self.weight
        if self.is_copied or (self.shares and stored.parts is not None):
            self.owned = nn.Parameter(self._share(local).clone())
        elif self.shares:
            self.owned = nn.Parameter(self._own(self._weight_buffer))
        arrived = box_of(shape, grid.counts, stored.arrived, grid.here)
        self.sums = buffer[: elements(arrived)].view(extents(arrived))
        self._pending: Tensor | None = None

    @property
    def name(self) -> str:
        return self.stored.name

    def _share(self, local: Tensor) -> Tensor:
        """This rank's share of `local` among the ranks that share the states; all of it where states are not
        sharded."""
        if not self.shares:
            return local
        if self.stored.parts is not None:
            return redistribute_local_tensor(
                self.grid, local, self.stored.spec.shape, self.stored.spec.value, self.stored.parts
            )
        return self._own(_padded(local.reshape(-1), self.grid.size(self.shares)))

    def _own(self, buffer: Tensor) -> Tensor:
        """This rank's share of a flat buffer, whose size the number of shares divides."""
        members = self.grid.members(self.shares)
        return buffer.view(len(members), -1)[members.index(self.grid.here)]

    def redistribute(self, used: TensorSpec) -> Tensor:
        """The parameter in the placements `used`; its gradient accumulates in `sums`."""
        if self.stored.spec.value == used.value and not self.is_copied:
            return self.weight
        result: Tensor = _Gather.apply(self.weight, self, used)
        return result

    def is_in(self, used: Tensor) -> bool:
        """Whether `used` is the stored parameter or a view of it."""
        return used.untyped_storage() is self.weight.untyped_storage()

    def made(self, used: TensorSpec) -> Tensor:
        """The parameter in the placements of one reader, gathered once more and without a gradient."""
        start, weight = self.stored.spec, self.weight.detach()
        shared = self.stored.used or start
        with profiled_range(TRAFFIC_MARK, GATHERS):
            weight = redistribute_local_tensor(self.grid, weight, used.shape, start.value, shared.value)
            return redistribute_local_tensor(self.grid, weight, used.shape, shared.value, used.value)

    def reset_gradient(self) -> None:
        """Set the gradient to zero; backward passes accumulate in `sums`."""
        self.owned.grad = self._pending = None
        self.sums.zero_()
        if not self.is_copied and self.sums.shape == self.weight.shape:
            self.weight.grad = self.sums

    def receive(self, gradient: Tensor, used: TensorSpec) -> None:
        """Accumulate the gradient of a gathered parameter.

        With one reader, it is reduced to the parameter's placements at once. With several, the gradients are
        summed first, in the dtype of `owned`.
        """
        if self.stored.used is None:
            with profiled_range(TRAFFIC_MARK, GRADIENTS):
                self.sums += run_alone(self.grid, self._scatter_steps(gradient.to(self.owned.dtype), used))
        elif self._pending is None:
            self._pending = gradient.to(self.owned.dtype)
        else:
            self._pending = self._pending + gradient

    def _scatter_steps(self, gradient: Tensor, used: TensorSpec) -> CollectiveCoroutine:
        return (
            yield from redistribute_steps(self.grid, gradient, used.shape, used.gradient, self.stored.arrived)
        )

    def gradient_steps(self) -> CollectiveCoroutine:
        """The gradient in the placements of `owned`, reduced over ranks."""
        self.weight.grad = None
        if self._pending is not None and self.stored.used is not None:
            scattered = yield from self._scatter_steps(self._pending, self.stored.used)
            self._pending = None
            self.sums += scattered
        gradient = self.sums
        shape, stored, arrived = self.stored.spec.shape, self.stored.spec.value, self.stored.arrived
        if self.stored.parts is not None:
            return (
                yield from redistribute_steps(
                    self.grid, gradient, shape, arrived, self.stored.parts, may_overwrite=True
                )
            )
        late = tuple(axis for axis in self.shares if arrived.by_axis[axis] == "partial")
        begin = stored.with_axes_as(late, "partial")
        replicated = tuple(
            axis
            for axis, placement in enumerate(begin.by_axis)
            if placement == "whole" != arrived.by_axis[axis]
        )
        if late and late == self.shares and arrived == begin.with_axes_as(replicated, "partial"):
            share = yield from self._reduce_scatter_steps(gradient)  # shrinks the tensor first
            if replicated:
                (share,) = yield self._call("all_reduce", replicated, share)
            return share
        gradient = yield from redistribute_steps(
            self.grid, gradient, shape, arrived, begin, may_overwrite=True
        )
        if late and late == self.shares:
            return (yield from self._reduce_scatter_steps(gradient))
        if self.shares:
            gradient = yield from redistribute_steps(self.grid, gradient, shape, begin, stored)
            gradient = self._share(gradient).clone()
        return gradient

    def _reduce_scatter_steps(self, gradient: Tensor) -> CollectiveCoroutine:
        """This rank's share of the sum over the ranks that share the states, in the gradient buffer where it
        fits."""
        count = self.grid.size(self.shares)
        is_there = gradient is self.sums and len(self._gradient_buffer) % count == 0
        sent = self._gradient_buffer if is_there else _padded(gradient.reshape(-1), count)
        (own,) = yield self._call("reduce_scatter", self.shares, sent, (len(sent) // count,) * count)
        return self._own(self._gradient_buffer).copy_(own) if is_there else own

    def _call(
        self,
        kind: CollectiveKind,
        axes: tuple[int, ...],
        sent: Tensor,
        sizes: Sequence[int] = (),
        buffer: Tensor | None = None,
    ) -> CollectiveRequest:
        return CollectiveRequest(kind, axes, sent, prod(self.stored.spec.shape), sizes, buffer=buffer)

    def publish_steps(self) -> CollectiveCoroutine:
        """Write the updated shares of all ranks to `weight`, in its dtype."""
        share = self.owned.detach().to(self.weight.dtype)
        if self.shares and self.stored.parts is None:
            yield from self._all_gather_steps(share, self._weight_buffer)
        else:
            self.weight.copy_((yield from self._join_steps(share)))
        return self.weight

    def _join_steps(self, share: Tensor) -> CollectiveCoroutine:
        """The shares of all ranks of the group, joined."""
        if not self.shares:
            return share
        shape, stored = self.stored.spec.shape, self.stored.spec.value
        if self.stored.parts is not None:
            return (yield from redistribute_steps(self.grid, share, shape, self.stored.parts, stored))
        buffer = share.new_empty(share.numel() * self.grid.size(self.shares))
        yield from self._all_gather_steps(share, buffer)
        return buffer[: self.weight.numel()].view(self.weight.shape)

    def _all_gather_steps(self, share: Tensor, buffer: Tensor) -> CollectiveCoroutine:
        """All-gather the shares of the group into `buffer`; this rank's share may be in place already."""
        sent = share.reshape(-1).clone()
        rows = yield self._call("all_gather", self.shares, sent, buffer=buffer)
        for own, row in zip(buffer.split(len(sent)), rows, strict=True):
            if row.untyped_storage() is not buffer.untyped_storage():
                own.copy_(row)
        return buffer

    @property
    def replicated_axes(self) -> list[int]:
        """The axes along which ranks update the same elements."""
        by_axis = self.stored.spec.value.by_axis
        whole = [axis for axis, placement in enumerate(by_axis) if not isinstance(placement, int)]
        return [axis for axis in whole if axis not in self.shares]

    @property
    def replica_count(self) -> int:
        """The number of ranks that hold each element that the optimizer updates."""
        return self.grid.size(self.replicated_axes)

    @property
    def is_first_copy(self) -> bool:
        """Whether this rank is the first of those that update the same elements."""
        return all(self.grid.here[axis] == 0 for axis in self.replicated_axes)

    def chunks(self, own: Tensor) -> dict[Coordinates, Tensor]:
        """The boxes of the whole parameter that `own` covers, by the coordinates where each begins.

        `own` has one element for each that the optimizer updates: `owned` or one of its states. The boxes
        share its memory.
        """
        placements = self.stored.spec.value if self.stored.parts is None else self.stored.parts
        box = box_of(self.stored.spec.shape, self.grid.counts, placements, self.grid.here)
        start = tuple(first for first, _ in box)
        if not self.shares or self.stored.parts is not None:
            return {start: own} if own.numel() else {}
        first = self.grid.members(self.shares).index(self.grid.here) * own.numel()
        stop = min(first + own.numel(), elements(box))  # beyond it is the padding of the last share
        found: dict[Coordinates, Tensor] = {}
        taken = 0
        for box_of_range in boxes_of_range(extents(box), first, stop):
            place = tuple(at + offset for at, (offset, _) in zip(start, box_of_range, strict=True))
            found[place] = own[taken : taken + elements(box_of_range)].view(extents(box_of_range))
            taken += elements(box_of_range)
        return found


class _Gather(Function):
    """A parameter gathered for a reader; its gradient is reduced back."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, param: ShardedParameter, used: TensorSpec) -> Tensor:
        ctx.param, ctx.used = param, used
        with profiled_range(TRAFFIC_MARK, GATHERS):
            result = redistribute_local_tensor(
                param.grid, weight, used.shape, param.stored.spec.value, used.value
            )
        return result.view_as(result) if result is weight else result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.param.receive(gradients[0], ctx.used)  # has the shape of the gathered parameter, not of the shard
        return None, None, None


def _padded(flat: Tensor, parts: int) -> Tensor:
    """A flat tensor, with zeros added so that `parts` divides its size."""
    missing = -len(flat) % parts
    return torch.cat((flat, flat.new_zeros(missing))) if missing else flat


def shard_parameters(
    grid: ProcessMesh, program: GraphProgram, values: Mapping[str, Tensor], dtype: torch.dtype | None
) -> dict[str, ShardedParameter]:
    """This rank's shards of all parameters of a program, from their whole `values`.

    They are computed with in `dtype`, or in their own dtype if it is None. Gradients whose collectives are
    batched are adjacent in memory.
    """
    found: dict[str, ShardedParameter] = {}
    for names in program.parameter_groups:
        own = {name: program.parameters[name] for name in names}
        buffers = _gradient_buffers(grid, own, values)
        for name, stored in own.items():
            found[name] = ShardedParameter(
                grid, stored, values[name], dtype or values[name].dtype, buffers[name]
            )
    return {name: found[name] for name in program.parameters}


def _gradient_buffers(
    grid: ProcessMesh, parameters: Mapping[str, ParameterSpec], values: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """A gradient buffer for each parameter, in the dtype of its value; one allocation for each dtype."""
    found: dict[str, Tensor] = {}
    for dtype in dict.fromkeys(values[name].dtype for name in parameters):
        names = [name for name in parameters if values[name].dtype == dtype]
        sizes = [buffer_elements(grid, parameters[name], parameters[name].arrived) for name in names]
        memory = values[names[0]].new_zeros(sum(sizes))
        found |= zip(names, memory.split(sizes), strict=True)
    return found


def buffer_elements(grid: ProcessMesh, stored: ParameterSpec, placements: MeshPlacements) -> int:
    """Number of elements this rank has of a parameter in `placements`, with the padding that makes shares
    equal."""
    own = elements(box_of(stored.spec.shape, grid.counts, placements, grid.here))
    return own + (-own % grid.size(stored.states_split) if stored.parts is None else 0)


def reduce_gradients(grid: ProcessMesh, parameters: Sequence[ShardedParameter]) -> None:
    """Reduce the accumulated gradients into those of `owned`; equal collectives are batched."""
    gradients = run_batched(grid, (param.gradient_steps() for param in parameters))
    for param, gradient in zip(parameters, gradients, strict=True):
        param.owned.grad = gradient


def publish(grid: ProcessMesh, parameters: Iterable[ShardedParameter]) -> None:
    """All-gather the updated shares into the weights that ranks compute with, in batched collectives."""
    apart = [param for param in parameters if param.owned is not param.weight]
    with torch.no_grad(), profiled_range(TRAFFIC_MARK, GATHERS):
        run_batched(grid, (param.publish_steps() for param in apart))


def square_sum(parameters: Iterable[ShardedParameter], device_type: str) -> Tensor:
    """This rank's share of the squared gradient norm, a fp64 scalar on its device; the shares of all ranks
    sum to it."""
    squares = [
        param.owned.grad.square().sum(dtype=torch.float64) / param.replica_count
        for param in parameters
        if param.owned.grad is not None
    ]
    nothing = torch.zeros((), dtype=torch.float64, device=device_type)
    return torch.stack([nothing, *squares]).sum()
