"""What a rank sends and receives: every collective of what runs inside `record_collectives`, with its
bytes.

Parts of what all ranks of a tensor group have: each takes its own, and joins those of all again.

What ranks tell each other, as text: nothing that is received is unpickled.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from shardwise.runtime.private import COLLECTIVE_OPERATORS, DispatchMode


@dataclass(frozen=True, slots=True, order=True)
class CollectiveRecord:
    """One kind of collective of one size.

    `nbytes` are those of the whole tensor, as the cost model counts them: what is reduced (all_reduce), what
    is joined (all_gather) or was whole before (reduce_scatter), what this rank sends in all (all_to_all) or
    to one other rank (send, recv).
    """

    kind: str
    nbytes: int


class CollectiveRecorder(DispatchMode):
    """Counts the collectives that this thread starts."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[CollectiveRecord] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what a distributed tensor does with it comes here again
        output = func(*args, **(kwargs or {}))
        if func in _MEASURED:
            kind, nbytes = _MEASURED[func]
            self.counts[CollectiveRecord(kind, nbytes(args, output))] += 1
        return output


def record_collectives() -> CollectiveRecorder:
    """A context whose `counts` are the collectives inside."""
    return CollectiveRecorder()


def _bytes(of: Any) -> int:
    """Bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(of, Tensor):
        return of.numel() * of.element_size()
    return sum(map(_bytes, of))


def _first(args: Any, output: Any) -> int:
    return _bytes(args[0])


def _second(args: Any, output: Any) -> int:
    return _bytes(args[1])


def _output(args: Any, output: Any) -> int:
    return _bytes(output)


_SIZED: dict[str, Callable[[Any, Any], int]] = {"first": _first, "second": _second, "output": _output}
_MEASURED = {operator: (kind, _SIZED[whole]) for operator, kind, whole in COLLECTIVE_OPERATORS}


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


def all_gather_json(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """What each rank of a process group (None: of the default one) has to say, by rank; `value` is what JSON
    holds (tuples become lists). Every rank of it calls this."""
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
