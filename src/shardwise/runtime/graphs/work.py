"""One operator on one rank: which elements it has, and what it tells the ranks that do the rest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd import Function
from torch.distributed import ProcessGroup

from shardwise.graph import OpNode, Placement, ShardingRule, divided_dims
from shardwise.runtime.graphs.bring import TensorSpec
from shardwise.runtime.graphs.forms import Coordinates, shard_range
from shardwise.runtime.graphs.grid import ProcessMesh
from shardwise.runtime.marks import OPERATOR_COLLECTIVES, TRAFFIC_MARK, profiled_range

Dims = tuple[str, ...]


@dataclass(frozen=True)
class ShardedOperator:
    """An operator under one rule per mesh axis, on this rank of `grid`.

    `settings` are what its kind does not say of it: epsilons, numbers, the function of its elements.
    """

    op: OpNode
    rules: tuple[ShardingRule, ...]
    grid: ProcessMesh
    settings: Mapping[str, Any] = field(default_factory=dict)

    def interval(self, dim: str, at: Coordinates | None = None) -> tuple[int, int]:
        """The elements of `dim` that the rank at `at` (this one) has where tensors are split along it."""
        place = self.grid.here if at is None else at
        start, stop = 0, self.op.dims[dim]
        for axis, rule in enumerate(self.rules):
            if dim in divided_dims(self.op, rule):
                count, unit = self.grid.counts[axis], self.unit(dim, rule)
                start, stop = shard_range(start, stop, count, place[axis], unit)
        return start, stop

    def length(self, dim: str) -> int:
        """How many elements of `dim` this rank has."""
        start, stop = self.interval(dim)
        return stop - start

    def is_divided(self, dim: str) -> bool:
        """Whether ranks have parts of `dim`."""
        return self.interval(dim) != (0, self.op.dims[dim])

    def unit(self, dim: str, rule: ShardingRule) -> int:
        """Elements of `dim` that a rule leaves together."""
        size = self.op.dims[dim]
        return size // rule.units if rule.split is not None and size % rule.units == 0 else 1

    def spec(self, dims: Dims, placements: Sequence[Placement]) -> TensorSpec:
        """How a tensor of these dims lies under `placements`, one per axis."""
        units = [
            self.unit(dims[placement], rule) if placement >= 0 else 1
            for placement, rule in zip(placements, self.rules, strict=True)
        ]
        return TensorSpec(self.op.shape(dims), placements, units)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """How it reads each of its inputs."""
        return tuple(
            self.spec(operand.dims, [rule.inputs[slot] for rule in self.rules])
            for slot, operand in enumerate(self.op.inputs)
        )

    @property
    def parameters(self) -> tuple[TensorSpec, ...]:
        """How it reads each of its parameters."""
        return tuple(
            self.spec(parameter.dims, [rule.parameters[slot] for rule in self.rules])
            for slot, parameter in enumerate(self.op.parameters)
        )

    @property
    def output(self) -> TensorSpec:
        """How it makes its output."""
        return self.spec(self.op.output, [rule.output for rule in self.rules])

    def axes(self, split: Collection[str]) -> tuple[int, ...]:
        """The mesh axes of several ranks along which one of the dims `split` is split."""
        return tuple(
            axis for axis, rule in enumerate(self.rules) if rule.split in split and self.grid.counts[axis] > 1
        )

    def summed(self, tensor: Tensor, split: Collection[str], *, gradients: str) -> Tensor:
        """The sum over the ranks that split one of `split`. Behind it a rank has a part of the gradient, to
        be `summed` too, or the `whole` of it."""
        axes = self.axes(split)
        if not axes:
            return tensor
        backward = self.grid.group(axes) if gradients == "summed" else None
        result: Tensor = _Summed.apply(tensor, self.grid.group(axes), backward)
        return result

    def largest(self, tensor: Tensor, split: Collection[str]) -> Tensor:
        """The maximum over the ranks that split one of `split`, without gradient."""
        result = tensor.detach()
        if axes := self.axes(split):
            result = result.clone(memory_format=torch.contiguous_format)
            with profiled_range(TRAFFIC_MARK, OPERATOR_COLLECTIVES):
                distributed.all_reduce(result, op=distributed.ReduceOp.MAX, group=self.grid.group(axes))
        return result


class _Summed(Function):
    """An all-reduce whose backward pass is one too, in the group `back`, or none."""

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
"""What a kind computes on a rank: from its parts of inputs and parameters its part of the output."""


def without(dims: Sequence[str], left_out: Collection[str]) -> Dims:
    """`dims` in their order but for those left out."""
    return tuple(dim for dim in dims if dim not in left_out)


def wide(tensor: Tensor) -> Tensor:
    """`tensor` in fp32 where it is narrower: sums of many numbers, and differences of such sums, need it."""
    return tensor if tensor.dtype.itemsize >= 4 else tensor.float()


def aligned(tensor: Tensor, dims: Sequence[str], order: Sequence[str]) -> Tensor:
    """A tensor of `dims` with its dims in `order`, those that it has not of size 1."""
    present = [dim for dim in order if dim in dims]
    tensor = tensor.permute([list(dims).index(dim) for dim in present])
    for at, dim in enumerate(order):
        if dim not in dims:
            tensor = tensor.unsqueeze(at)
    return tensor


def arranged(tensor: Tensor, dims: Sequence[str], order: Sequence[str]) -> Tensor:
    """A tensor of `dims` with the same dims in `order`."""
    return tensor if tuple(dims) == tuple(order) else tensor.permute([list(dims).index(dim) for dim in order])
