"""One operator on one rank: `ShardedOperator` has its shards of every dim and its collectives.

`all_gather_dim` and `local_part` change a dim inside an operator between sharded and whole. `with_neighbours`
exchanges halo rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd import Function
from torch.distributed import ProcessGroup

from shardwise.graph import OpNode, Placement, ShardingRule, divided_dims
from shardwise.runtime.graphs.placements import (
    AxisPlacement,
    MeshPlacements,
    ProcessMesh,
    shard_range,
)
from shardwise.runtime.graphs.redistribute import TensorSpec, redistribute_local_tensor
from shardwise.runtime.profiling import OPERATOR_COLLECTIVES, TRAFFIC_MARK, profiled_range

# Operators and their kernels

Dims = tuple[str, ...]


@dataclass(frozen=True)
class ShardedOperator:
    """An operator on this rank of `grid`, with one sharding rule per mesh axis.

    `settings` hold what its kind does not define: epsilon, numbers, elementwise function.
    """

    op: OpNode
    rules: tuple[ShardingRule, ...]
    grid: ProcessMesh
    settings: Mapping[str, Any] = field(default_factory=dict)

    def interval(self, dim: str) -> tuple[int, int]:
        """The elements of `dim` on this rank, where tensors are sharded along it."""
        start, stop = 0, self.op.dims[dim]
        for axis, rule in enumerate(self.rules):
            if dim in divided_dims(self.op, rule):
                count, unit = self.grid.counts[axis], self.unit(dim, rule)
                start, stop = shard_range(start, stop, count, self.grid.here[axis], unit)
        return start, stop

    def length(self, dim: str) -> int:
        """Number of elements of `dim` on this rank."""
        start, stop = self.interval(dim)
        return stop - start

    def is_divided(self, dim: str) -> bool:
        """Whether `dim` is sharded."""
        return self.interval(dim) != (0, self.op.dims[dim])

    def unit(self, dim: str, rule: ShardingRule) -> int:
        """Elements of `dim` that a rule keeps together."""
        size = self.op.dims[dim]
        return size // rule.units if rule.split is not None and size % rule.units == 0 else 1

    def spec(self, dims: Dims, placements: Sequence[Placement]) -> TensorSpec:
        """Shape and placements of a tensor with these dims; one placement per axis."""
        units = [
            self.unit(dims[placement], rule) if placement >= 0 else 1
            for placement, rule in zip(placements, self.rules, strict=True)
        ]
        return TensorSpec(self.op.shape(dims), placements, units)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The placements of its inputs."""
        return tuple(
            self.spec(operand.dims, [rule.inputs[slot] for rule in self.rules])
            for slot, operand in enumerate(self.op.inputs)
        )

    @property
    def parameters(self) -> tuple[TensorSpec, ...]:
        """The placements of its parameters."""
        return tuple(
            self.spec(parameter.dims, [rule.parameters[slot] for rule in self.rules])
            for slot, parameter in enumerate(self.op.parameters)
        )

    @property
    def output(self) -> TensorSpec:
        """The placements of its output."""
        return self.spec(self.op.output, [rule.output for rule in self.rules])

    def axes(self, split: Collection[str]) -> tuple[int, ...]:
        """The mesh axes of more than one rank along which one of the dims `split` is sharded."""
        return tuple(
            axis for axis, rule in enumerate(self.rules) if rule.split in split and self.grid.counts[axis] > 1
        )

    def summed(self, tensor: Tensor, split: Collection[str], *, gradients: str) -> Tensor:
        """All-reduce over the ranks that shard one of the dims `split`.

        `gradients` says whether a rank's gradient is a partial sum, to be `summed` too, or the `whole`.
        """
        axes = self.axes(split)
        if not axes:
            return tensor
        backward = self.grid.group(axes) if gradients == "summed" else None
        result: Tensor = _Summed.apply(tensor, self.grid.group(axes), backward)
        return result

    def largest(self, tensor: Tensor, split: Collection[str]) -> Tensor:
        """All-reduce of the maximum over the ranks that shard one of the dims `split`, without gradient."""
        result = tensor.detach()
        if axes := self.axes(split):
            result = result.clone(memory_format=torch.contiguous_format)
            with profiled_range(TRAFFIC_MARK, OPERATOR_COLLECTIVES):
                distributed.all_reduce(result, op=distributed.ReduceOp.MAX, group=self.grid.group(axes))
        return result


class _Summed(Function):
    """An all-reduce whose backward pass is an all-reduce in the group `back`, or nothing if that is None."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, back: ProcessGroup | None) -> Tensor:
        ctx.back = back
        return _reduced(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (gradients[0] if ctx.back is None else _reduced(gradients[0], ctx.back)), None, None


def _reduced(tensor: Tensor, group: ProcessGroup) -> Tensor:
    result = tensor.clone(memory_format=torch.contiguous_format)
    with profiled_range(TRAFFIC_MARK, OPERATOR_COLLECTIVES):
        distributed.all_reduce(result, group=group)
    return result


Kernel = Callable[[ShardedOperator, Sequence[Tensor], Sequence[Tensor]], Tensor]
"""Computes an operator kind on a rank: from its shards of inputs and parameters to its part of the output."""


def without(dims: Sequence[str], left_out: Collection[str]) -> Dims:
    """`dims` in order, without those in `left_out`."""
    return tuple(dim for dim in dims if dim not in left_out)


def wide(tensor: Tensor) -> Tensor:
    """`tensor` in at least fp32, which sums of many numbers and their differences need."""
    return tensor if tensor.dtype.itemsize >= 4 else tensor.float()


def aligned(tensor: Tensor, dims: Sequence[str], order: Sequence[str]) -> Tensor:
    """A tensor of `dims` with its dims in `order`; dims that it does not have get size 1."""
    present = [dim for dim in order if dim in dims]
    tensor = tensor.permute([list(dims).index(dim) for dim in present])
    for at, dim in enumerate(order):
        if dim not in dims:
            tensor = tensor.unsqueeze(at)
    return tensor


def arranged(tensor: Tensor, dims: Sequence[str], order: Sequence[str]) -> Tensor:
    """A tensor of `dims` permuted to `order`, which has the same dims."""
    return tensor if tuple(dims) == tuple(order) else tensor.permute([list(dims).index(dim) for dim in order])


# Redistribution inside an operator


def all_gather_dim(work: ShardedOperator, value: Tensor, at: int, dim: str) -> Tensor:
    """All-gather `dim`, which is dim `at` of `value`; gradients are reduce-scattered."""
    return _redistributed(work, value, at, dim, ("part", "whole"), ("partial", "part"))


def local_part(work: ShardedOperator, value: Tensor, at: int, dim: str) -> Tensor:
    """This rank's shard of a replicated `value` along `dim`; gradients are all-gathered."""
    return _redistributed(work, value, at, dim, ("whole", "part"), ("part", "whole"))


def _redistributed(
    work: ShardedOperator, value: Tensor, at: int, dim: str, there: tuple[str, str], back: tuple[str, str]
) -> Tensor:
    axes = work.axes((dim,))
    if not axes:
        return value
    shape = list(value.shape)
    shape[at] = work.op.dims[dim]
    units = [work.unit(dim, rule) for rule in work.rules]
    placements_list = [_placements_of(word, axes, at, units) for word in (*there, *back)]
    result: Tensor = _RedistributeBothWays.apply(value, work.grid, tuple(shape), *placements_list)
    return result


def _placements_of(word: str, axes: Sequence[int], at: int, units: Sequence[int]) -> MeshPlacements:
    """Placements along `axes`; along other axes the tensor counts as replicated."""
    along: AxisPlacement = at if word == "part" else "partial" if word == "partial" else "whole"
    by_axis = tuple(along if axis in axes else "whole" for axis in range(len(units)))
    return MeshPlacements(
        by_axis,
        tuple(unit if isinstance(each, int) else 1 for each, unit in zip(by_axis, units, strict=True)),
    )


class _RedistributeBothWays(Function):
    """Redistributes a value, and its gradient between two other placements."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, grid: ProcessMesh, shape: tuple[int, ...], *placements_list: MeshPlacements
    ) -> Tensor:
        start, end, *back = placements_list
        ctx.arguments = (grid, shape, *back)
        with profiled_range(TRAFFIC_MARK, OPERATOR_COLLECTIVES):
            return redistribute_local_tensor(grid, value, shape, start, end)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grid, shape, late, first = ctx.arguments
        with profiled_range(TRAFFIC_MARK, OPERATOR_COLLECTIVES):
            gradient = redistribute_local_tensor(grid, gradients[0].contiguous(), shape, late, first)
        return gradient, None, None, None, None, None, None


# Halo exchange


def with_neighbours(
    work: ShardedOperator, value: Tensor, at: int, read: str, made: str
) -> tuple[Tensor, int]:
    """A tensor with halo rows of its neighbours at both ends of dim `at`, and the number of its first row.

    The rules that shard `made` say how many rows. Rows beyond the ends are zero.
    """
    first, _ = work.interval(read)
    along = [
        (axis, rule)
        for axis, rule in enumerate(work.rules)
        if rule.split == made and work.grid.counts[axis] > 1 and rule.collectives
    ]
    if not along:
        return value, first
    rows = int(along[0][1].collectives[0].copies)
    result: Tensor = _Neighbours.apply(value, work, at, read, tuple(axis for axis, _ in along), rows)
    return result, first - rows


class _Neighbours(Function):
    """Halo rows from the neighbouring ranks; in the backward pass their gradients are added to the rank's own
    rows."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, work: ShardedOperator, at: int, read: str, axes: tuple[int, ...], rows: int
    ) -> Tensor:
        ctx.arguments = (work, at, axes, rows)
        size = value.shape[at]
        before, after = _passed(work, axes, value.narrow(at, 0, rows), value.narrow(at, size - rows, rows))
        return torch.cat((before, value, after), dim=at)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        work, at, axes, rows = ctx.arguments
        gradient = gradients[0]
        size = gradient.shape[at]
        own = gradient.narrow(at, rows, size - 2 * rows).clone()
        before, after = _passed(
            work, axes, gradient.narrow(at, 0, rows), gradient.narrow(at, size - rows, rows)
        )
        own.narrow(at, 0, rows).add_(before)
        own.narrow(at, own.shape[at] - rows, rows).add_(after)
        return own, None, None, None, None, None


def _passed(
    work: ShardedOperator, axes: tuple[int, ...], first: Tensor, last: Tensor
) -> tuple[Tensor, Tensor]:
    """Send `first` to the previous rank and `last` to the next; returns what these send, zeros at the
    ends."""
    group, members = work.grid.group(axes), work.grid.members(axes)
    here = members.index(work.grid.here)
    given = (first.contiguous(), last.contiguous())
    taken = (torch.zeros_like(given[0]), torch.zeros_like(given[1]))
    operations = []
    for place, sent, received in ((here - 1, given[0], taken[0]), (here + 1, given[1], taken[1])):
        if 0 <= place < len(members):
            rank = work.grid.ranks[members[place]]
            operations.append(distributed.P2POp(distributed.isend, sent, rank, group))
            operations.append(distributed.P2POp(distributed.irecv, received, rank, group))
    with profiled_range(TRAFFIC_MARK, OPERATOR_COLLECTIVES):
        for pending in distributed.batch_isend_irecv(operations) if operations else ():
            pending.wait()
    return taken
