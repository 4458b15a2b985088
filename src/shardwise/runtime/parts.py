"""Parts of what all ranks of a tensor group have: each takes its own, and joins those of all again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd import Function
from torch.distributed import ProcessGroup


def padded(rows: Tensor, length: int) -> Tensor:
    return torch.cat((rows, rows.new_zeros(length - len(rows), rows.shape[1])))


def gathered(rows: Tensor, group: ProcessGroup) -> Tensor:
    whole = rows.new_empty(len(rows) * distributed.get_world_size(group), *rows.shape[1:])
    distributed.all_gather_single(whole, rows.contiguous(), group=group)
    return whole


def summed_part(rows: Tensor, group: ProcessGroup) -> Tensor:
    part = rows.new_empty(len(rows) // distributed.get_world_size(group), *rows.shape[1:])
    distributed.reduce_scatter_single(part, rows.contiguous(), group=group)
    return part


class Shared:
    """Tokens that all ranks of a tensor group have, of which each routes its own part."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def own(self, tokens: Tensor) -> Tensor:
        """This rank's part of `tokens` (rows, elements), padded to equal parts."""
        size = distributed.get_world_size(self._group)
        return _Own.apply(padded(tokens, -(-len(tokens) // size) * size), 0, self._group)

    def joined(self, part: Tensor, tokens: int) -> Tensor:
        """All `tokens` again, on every rank, from the parts."""
        return _Join.apply(part, 0, self._group)[:tokens]


class Boundary:
    """Hidden states between two stages where all tensor ranks have them whole: each sends its part, and they
    are joined behind the hop (Narayanan et al. 2021, section 4.1)."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def sent(self, hidden: Tensor) -> Tensor:
        """This rank's part of (rows, tokens, elements), along the elements."""
        return _Own.apply(hidden, -1, self._group)

    def received(self, part: Tensor) -> Tensor:
        return _Join.apply(part, -1, self._group)


class _Own(Function):
    """The rank's part of what all have, along a dim; gradients of all parts are joined."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _part(whole, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _joined(grads[0], ctx.dim, ctx.group), None, None


class _Join(Function):
    """What all have from the ranks' parts; gradients are alike on all ranks, so each takes its part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _joined(part, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _part(grads[0], ctx.dim, ctx.group), None, None


def _part(whole: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return whole.chunk(distributed.get_world_size(group), dim)[distributed.get_rank(group)].contiguous()


def _joined(part: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return torch.cat(gathered(part.unsqueeze(0), group).unbind(), dim)


def summed_over(tensor: Tensor, dim: int | None, group: ProcessGroup) -> Tensor:
    """The sum over the ranks of `group`: whole on every rank, or this rank's part along `dim`. The gradient
    of it is that of every rank's `tensor`."""
    summed: Tensor = _Sum.apply(tensor, dim, group)
    return summed


class _Sum(Function):
    """The sum over ranks, whole (dim None) or in parts; gradients of parts are joined."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int | None, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _summed(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] if ctx.dim is None else _joined(grads[0], ctx.dim, ctx.group), None, None


def whole_of(tensor: Tensor, dim: int | None, group: ProcessGroup) -> Tensor:
    """What all ranks of `group` have, from this rank's part along `dim`; with None they have it whole. The
    gradient of a part is the sum of what all ranks have for it."""
    whole: Tensor = _Whole.apply(tensor, dim, group)
    return whole


class _Whole(Function):
    """The inverse of `_Sum`: parts are joined, gradients summed over the ranks, whole or in parts."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int | None, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return tensor.view_as(tensor) if dim is None else _joined(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _summed(grads[0], ctx.dim, ctx.group), None, None


def _summed(tensor: Tensor, dim: int | None, group: ProcessGroup) -> Tensor:
    if dim is None:
        total = tensor.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total, group=group)
        return total
    return summed_part(tensor.transpose(0, dim), group).transpose(0, dim).contiguous()
