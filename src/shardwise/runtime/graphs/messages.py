"""Collectives of several tensors as one message."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor, distributed

from shardwise.runtime.graphs.grid import ProcessMesh

CollectiveKind = Literal["reduce_scatter", "exchange", "all_reduce", "all_gather"]

_COLLECTIVE_ORDER: Sequence[CollectiveKind] = ("reduce_scatter", "exchange", "all_reduce", "all_gather")
"""What shrinks a tensor comes before what grows it (docs/concepts/pareto-search.md)."""

FlatRows = list[Tensor]
"""Flat tensors."""


MAX_BATCH_BYTES = 25 * 2**20
"""Tensors go together up to so many bytes, which is what is copied for that at most: as many as PyTorch's
DistributedDataParallel has in a bucket by default. Latency is little beside the time of such a message."""


@dataclass(frozen=True, slots=True)
class CollectiveRequest:
    """What a rank tells those that differ from it along `axes`, and itself.

    Of a `reduce_scatter` and an `exchange` what is `sent` are rows one after the other, of so many elements
    as `sizes` says for each of them, in the order of their group; of an `all_reduce` and an `all_gather` it
    is the same for all. From each of them an exchange brings so many elements as `taken` says. It is about a
    tensor of `whole` elements, of which ranks may have parts of unequal sizes. The answer to a call are rows:
    the sum of this rank's rows, or of an exchange and an all-gather the row of each of them. What is sent may
    be written to where it `may_overwrite`; what an all-gather brings may lie in `buffer`, of as many
    elements."""

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
        """What is the same of calls that go as one."""
        return _COLLECTIVE_ORDER.index(self.kind), self.axes, str(self.sent.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, which all ranks know alike."""
        return self.whole * self.sent.element_size()

    @property
    def rows(self) -> FlatRows:
        """What each of them gets."""
        return list(self.sent.split(list(self.sizes)))


CollectiveCoroutine = Generator[CollectiveRequest, FlatRows, Tensor]
"""A tensor on its way: what it asks of other ranks, one call after the other, and what it ends in."""


def run_batched(grid: ProcessMesh, coroutines: Iterable[CollectiveCoroutine]) -> list[Tensor]:
    """What each of the ways ends in. Calls of a kind, along the same axes and in the same dtype, that are due
    at the same time go as one message; every rank must go the same ways."""
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
    """What a way ends in."""
    (end,) = run_batched(grid, (coroutine,))
    return end


def _fitting(nbytes: Sequence[int]) -> int:
    """How many from the first on go as one message; one at least. By sizes that are the same on all ranks, as
    the messages have to be."""
    return max(1, sum(total <= MAX_BATCH_BYTES for total in accumulate(nbytes)))


def _run_calls(grid: ProcessMesh, calls: Sequence[CollectiveRequest]) -> list[FlatRows]:
    """The answer to each of some calls of a kind, made as one. What is sent changes only where all of it is
    spare and lies in a row: its sum takes its place then."""
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
    """Tensors as the flat one that they make where they lie; None where they do not one behind the other."""
    first, end = tensors[0], tensors[0].storage_offset()
    for tensor in tensors:
        is_next = tensor.storage_offset() == end and tensor.is_contiguous()
        if tensor.untyped_storage() is not first.untyped_storage() or not is_next:
            return None
        end += tensor.numel()
    return first.as_strided((end - first.storage_offset(),), (1,), first.storage_offset())


def _by_member(calls: Sequence[CollectiveRequest]) -> Tensor:
    """What all calls send, rows of the same member one after the other."""
    if len(calls) == 1:
        return calls[0].sent
    return torch.cat([row for rows in zip(*(call.rows for call in calls), strict=True) for row in rows])


def _split_rows(received: Tensor, sizes: Sequence[Sequence[int]]) -> list[FlatRows]:
    """For each call its row from each member, of `received`, where rows of the same member lie one after the
    other; `sizes` are by call and member."""
    by_member = list(zip(*sizes, strict=True))
    parts = received.split([size for row in by_member for size in row])
    return [
        [parts[member * len(sizes) + place] for member in range(len(by_member))]
        for place in range(len(sizes))
    ]
