"""Parts of what all ranks of a tensor group have: each takes its own, and joins those of all again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd import Function
from torch.distributed import ProcessGroup


def padded(rows: Tensor, length: int) -> Tensor:
    return torch.cat((rows, rows.new_zeros(length - len(rows), rows.shape[1])))


def all_gather_rows(rows: Tensor, group: ProcessGroup) -> Tensor:
    whole = rows.new_empty(len(rows) * distributed.get_world_size(group), *rows.shape[1:])
    distributed.all_gather_single(whole, rows.contiguous(), group=group)
    return whole


def reduce_scatter_rows(rows: Tensor, group: ProcessGroup) -> Tensor:
    part = rows.new_empty(len(rows) // distributed.get_world_size(group), *rows.shape[1:])
    distributed.reduce_scatter_single(part, rows.contiguous(), group=group)
    return part


class SharedTokens:
    """Tokens that all ranks of a tensor group have, of which each routes its own part."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def own(self, tokens: Tensor) -> Tensor:
        """This rank's part of `tokens` (rows, elements), padded to equal parts."""
        size = distributed.get_world_size(self._group)
        return _Split.apply(padded(tokens, -(-len(tokens) // size) * size), 0, self._group)

    def joined(self, part: Tensor, tokens: int) -> Tensor:
        """All `tokens` again, on every rank, from the parts."""
        return _Gather.apply(part, 0, self._group)[:tokens]


class Boundary:
    """Hidden states between two stages where all tensor ranks have them whole: each sends its part, and they
    are joined behind the hop (Narayanan et al. 2021, section 4.1)."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def sent(self, hidden: Tensor) -> Tensor:
        """This rank's part of (rows, tokens, elements), along the elements."""
        return _Split.apply(hidden, -1, self._group)

    def received(self, part: Tensor) -> Tensor:
        return _Gather.apply(part, -1, self._group)


class _Split(Function):
    """The rank's part of what all have, along a dim; gradients of all parts are joined."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _local_chunk(whole, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(grads[0], ctx.dim, ctx.group), None, None


class _Gather(Function):
    """What all have from the ranks' parts; gradients are alike on all ranks, so each takes its part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gather(part, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _local_chunk(grads[0], ctx.dim, ctx.group), None, None


def _local_chunk(whole: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return whole.chunk(distributed.get_world_size(group), dim)[distributed.get_rank(group)].contiguous()


def _gather(part: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return torch.cat(all_gather_rows(part.unsqueeze(0), group).unbind(), dim)


def reduce_over(tensor: Tensor, dim: int | None, group: ProcessGroup) -> Tensor:
    """The sum over the ranks of `group`: whole on every rank, or this rank's part along `dim`. The gradient
    of it is that of every rank's `tensor`."""
    summed: Tensor = _Reduce.apply(tensor, dim, group)
    return summed


class _Reduce(Function):
    """The sum over ranks, whole (dim None) or in parts; gradients of parts are joined."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int | None, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _reduce(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] if ctx.dim is None else _gather(grads[0], ctx.dim, ctx.group), None, None


def all_gathered(tensor: Tensor, dim: int | None, group: ProcessGroup) -> Tensor:
    """What all ranks of `group` have, from this rank's part along `dim`; with None they have it whole. The
    gradient of a part is the sum of what all ranks have for it."""
    whole: Tensor = _AllGather.apply(tensor, dim, group)
    return whole


class _AllGather(Function):
    """The inverse of `_Reduce`: parts are joined, gradients summed over the ranks, whole or in parts."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int | None, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return tensor.view_as(tensor) if dim is None else _gather(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _reduce(grads[0], ctx.dim, ctx.group), None, None


def _reduce(tensor: Tensor, dim: int | None, group: ProcessGroup) -> Tensor:
    if dim is None:
        total = tensor.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total, group=group)
        return total
    return reduce_scatter_rows(tensor.transpose(0, dim), group).transpose(0, dim).contiguous()
