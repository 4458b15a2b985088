"""Collectives of several tensors as one message."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor, distributed

from shardwise.runtime.graphs.grid import Grid

Collective = Literal["reduce_scatter", "exchange", "all_reduce", "all_gather"]

_ORDER: Sequence[Collective] = ("reduce_scatter", "exchange", "all_reduce", "all_gather")
"""What shrinks a tensor comes before what grows it (docs/tracking.md)."""

Rows = list[Tensor]
"""Flat tensors."""


MOST_BYTES = 25 * 2**20
"""Tensors go together up to so many bytes, which is what is copied for that at most: as many as PyTorch's
DistributedDataParallel has in a bucket by default. Latency is little beside the time of such a message."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a rank tells those that differ from it along `axes`, and itself.

    Of a `reduce_scatter` and an `exchange` what is `sent` are rows one after the other, of so many elements
    as `sizes` says for each of them, in the order of their group; of an `all_reduce` and an `all_gather` it
    is the same for all. From each of them an exchange brings so many elements as `taken` says. It is about a
    tensor of `whole` elements, of which ranks may have parts of unequal sizes. The answer to a call are rows:
    the sum of this rank's rows, or of an exchange and an all-gather the row of each of them. What is sent may
    be written to where it `is_spare`; what an all-gather brings may lie in `room`, of as many elements.
    """

    kind: Collective
    axes: tuple[int, ...]
    sent: Tensor
    whole: int
    sizes: Sequence[int] = ()
    taken: Sequence[int] = ()
    is_spare: bool = False
    room: Tensor | None = None

    @property
    def key(self) -> tuple[int, tuple[int, ...], str]:
        """What is the same of calls that go as one."""
        return _ORDER.index(self.kind), self.axes, str(self.sent.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, which all ranks know alike."""
        return self.whole * self.sent.element_size()

    @property
    def rows(self) -> Rows:
        """What each of them gets."""
        return list(self.sent.split(list(self.sizes)))


Way = Generator[Call, Rows, Tensor]
"""A tensor on its way: what it asks of other ranks, one call after the other, and what it ends in."""


def together(grid: Grid, ways: Iterable[Way]) -> list[Tensor]:
    """What each of the ways ends in. Calls of a kind, along the same axes and in the same dtype, that are due
    at the same time go as one message; every rank must go the same ways."""
    going = list(ways)
    ends: dict[int, Tensor] = {}
    due: dict[int, Call] = {}

    def go_on(number: int, answer: Rows | None) -> None:
        try:
            due[number] = next(going[number]) if answer is None else going[number].send(answer)
        except StopIteration as end:
            ends[number] = end.value

    for number in range(len(going)):
        go_on(number, None)
    while due:
        first = min(call.key for call in due.values())
        alike = sorted(number for number, call in due.items() if call.key == first)
        chosen = alike[: _fitting([due[number].nbytes for number in alike])]
        answers = _answers(grid, [due.pop(number) for number in chosen])
        for number, answer in zip(chosen, answers, strict=True):
            go_on(number, answer)
    return [ends[number] for number in range(len(going))]


def alone(grid: Grid, way: Way) -> Tensor:
    """What a way ends in."""
    (end,) = together(grid, (way,))
    return end


def _fitting(nbytes: Sequence[int]) -> int:
    """How many from the first on go as one message; one at least. By sizes that are the same on all ranks, as
    the messages have to be."""
    return max(1, sum(total <= MOST_BYTES for total in accumulate(nbytes)))


def _answers(grid: Grid, calls: Sequence[Call]) -> list[Rows]:
    """The answer to each of some calls of a kind, made as one. What is sent changes only where all of it is
    spare and lies in a row: its sum takes its place then."""
    axes, kind = calls[0].axes, calls[0].kind
    members, group = grid.members(axes), grid.group(axes)
    if kind == "all_reduce":
        sent = [call.sent for call in calls]
        in_place = in_a_row(sent) if all(call.is_spare for call in calls) else None
        flat = torch.cat(sent) if in_place is None else in_place
        distributed.all_reduce(flat, group=group)
        return [[row] for row in flat.split([len(call.sent) for call in calls])]
    if kind == "all_gather":
        sent = torch.cat([call.sent for call in calls]) if len(calls) > 1 else calls[0].sent.contiguous()
        gathered = calls[0].room if len(calls) == 1 else None
        if gathered is None:
            gathered = sent.new_empty(len(members) * len(sent))
        distributed.all_gather_single(gathered, sent, group=group)
        return _shared_out(gathered, [[len(call.sent)] * len(members) for call in calls])
    sizes = [sum(row) for row in zip(*(call.sizes for call in calls), strict=True)]
    if kind == "exchange":
        taken = [sum(row) for row in zip(*(call.taken for call in calls), strict=True)]
        received = calls[0].sent.new_empty(sum(taken))
        distributed.all_to_all_single(received, _by_member(calls), taken, sizes, group=group)
        return _shared_out(received, [call.taken for call in calls])
    here = members.index(grid.here)
    result = calls[0].sent.new_empty(sizes[here])
    if len(set(sizes)) == 1:
        distributed.reduce_scatter_single(result, _by_member(calls), group=group)
    else:
        distributed.reduce_scatter(result, list(_by_member(calls).split(sizes)), group=group)
    return [[row] for row in result.split([call.sizes[here] for call in calls])]


def in_a_row(tensors: Sequence[Tensor]) -> Tensor | None:
    """Tensors as the flat one that they make where they lie; None where they do not one behind the other."""
    first, end = tensors[0], tensors[0].storage_offset()
    for tensor in tensors:
        is_next = tensor.storage_offset() == end and tensor.is_contiguous()
        if tensor.untyped_storage() is not first.untyped_storage() or not is_next:
            return None
        end += tensor.numel()
    return first.as_strided((end - first.storage_offset(),), (1,), first.storage_offset())


def _by_member(calls: Sequence[Call]) -> Tensor:
    """What all calls send, rows of the same member one after the other."""
    if len(calls) == 1:
        return calls[0].sent
    return torch.cat([row for rows in zip(*(call.rows for call in calls), strict=True) for row in rows])


def _shared_out(received: Tensor, sizes: Sequence[Sequence[int]]) -> list[Rows]:
    """For each call its row from each member, of `received`, where rows of the same member lie one after the
    other; `sizes` are by call and member."""
    by_member = list(zip(*sizes, strict=True))
    parts = received.split([size for row in by_member for size in row])
    return [
        [parts[member * len(sizes) + place] for member in range(len(by_member))]
        for place in range(len(sizes))
    ]
