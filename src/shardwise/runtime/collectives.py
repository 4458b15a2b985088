"""Collectives of the runtime, with their gradients.

- `SharedTokens`, `Boundary`: tensor-parallel ranks that hold equal tensors split them and gather them again.
- `reduce_over` (all-reduce, reduce-scatter) and `all_gathered` (all-gather) are differentiable.
- `all_gather_json` gathers a value of each rank as JSON: received data is never unpickled.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd import Function
from torch.distributed import ProcessGroup

# Collectives with gradients


def padded(rows: Tensor, length: int) -> Tensor:
    """`rows`, padded with zero rows to `length` rows."""
    return torch.cat((rows, rows.new_zeros(length - len(rows), rows.shape[1])))


def all_gather_rows(rows: Tensor, group: ProcessGroup) -> Tensor:
    """All-gather along the first dim."""
    whole = rows.new_empty(len(rows) * distributed.get_world_size(group), *rows.shape[1:])
    distributed.all_gather_single(whole, rows.contiguous(), group=group)
    return whole


def reduce_scatter_rows(rows: Tensor, group: ProcessGroup) -> Tensor:
    """Reduce-scatter (sum) along the first dim."""
    part = rows.new_empty(len(rows) // distributed.get_world_size(group), *rows.shape[1:])
    distributed.reduce_scatter_single(part, rows.contiguous(), group=group)
    return part


class SharedTokens:
    """Tokens that all ranks of a tensor-parallel group hold. Each rank routes its own part of them."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def own(self, tokens: Tensor) -> Tensor:
        """This rank's part of `tokens` (rows, elements), padded to equal parts."""
        size = distributed.get_world_size(self._group)
        return _Split.apply(padded(tokens, -(-len(tokens) // size) * size), 0, self._group)

    def joined(self, part: Tensor, tokens: int) -> Tensor:
        """All `tokens` on every rank, gathered from the parts."""
        return _Gather.apply(part, 0, self._group)[:tokens]


class Boundary:
    """Scatter-gather between pipeline stages whose tensor-parallel ranks hold equal hidden states: each rank
    sends its part, and the receiving ranks all-gather them (Narayanan et al. 2021, section 4.1)."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def sent(self, hidden: Tensor) -> Tensor:
        """This rank's part of (rows, tokens, elements), split along the elements."""
        return _Split.apply(hidden, -1, self._group)

    def received(self, part: Tensor) -> Tensor:
        """The whole hidden states, all-gathered from the received parts."""
        return _Gather.apply(part, -1, self._group)


class _Split(Function):
    """This rank's chunk, along a dim, of a tensor that all ranks hold. The gradient is all-gathered."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _local_chunk(whole, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(grads[0], ctx.dim, ctx.group), None, None


class _Gather(Function):
    """All-gather along a dim. All ranks have the same gradient, so each takes its chunk."""

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
    """Sum over the ranks of `group`: all-reduced (`dim` None), or reduce-scattered along `dim`. Each rank's
    `tensor` has the whole gradient of the sum."""
    summed: Tensor = _Reduce.apply(tensor, dim, group)
    return summed


class _Reduce(Function):
    """All-reduce (dim None) or reduce-scatter. The gradient of a reduce-scatter is all-gathered."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int | None, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _reduce(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] if ctx.dim is None else _gather(grads[0], ctx.dim, ctx.group), None, None


def all_gathered(tensor: Tensor, dim: int | None, group: ProcessGroup) -> Tensor:
    """All-gather along `dim` over `group`; with `dim` None, `tensor` is already whole. The gradient is summed
    over the ranks."""
    whole: Tensor = _AllGather.apply(tensor, dim, group)
    return whole


class _AllGather(Function):
    """All-gather, or identity (dim None). The gradient is reduce-scattered or all-reduced."""

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


# Values as JSON


def all_gather_json(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Gather a JSON-serialisable value of each rank of a process group (None: default group), ordered by
    rank.

    Tuples become lists. All ranks of the group must call it.
    """
    payload = _encoded(json.dumps(value))
    ranks = distributed.get_world_size(group)
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(ranks)]
    distributed.all_gather(sizes, torch.tensor([payload.numel()]), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: payload.numel()] = payload
    every = [torch.empty_like(padded) for _ in range(ranks)]
    distributed.all_gather(every, padded, group=group)
    return [json.loads(text[: int(size)].numpy().tobytes()) for text, size in zip(every, sizes, strict=True)]


def _encoded(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
