"""Collectives of several tensors as one message."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from shardwise.runtime.graphs.grid import Grid

Collective = Literal["reduce_scatter", "exchange", "all_reduce", "all_gather"]

_ORDER: Sequence[Collective] = ("reduce_scatter", "exchange", "all_reduce", "all_gather")
"""What shrinks a tensor comes before what grows it (docs/tracking.md)."""

Rows = Sequence[Tensor]
"""Flat tensors."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a rank tells those that differ from it along `axes`, and itself.

    Of a `reduce_scatter` and an `exchange` the `rows` are what each of them gets, in the order of their
    group; of an `all_reduce` and an `all_gather` there is one for all. From each of them an exchange brings
    so many elements as `counts` says. The answer to a call are rows: the sum of this rank's rows, or of an
    exchange and an all-gather the row of each of them.
    """

    kind: Collective
    axes: tuple[int, ...]
    rows: Rows
    counts: Sequence[int] = ()

    @property
    def key(self) -> tuple[int, tuple[int, ...], str]:
        """What is the same of calls that go as one."""
        return _ORDER.index(self.kind), self.axes, str(self.rows[0].dtype)


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
        answers = _answers(grid, [due.pop(number) for number in alike])
        for number, answer in zip(alike, answers, strict=True):
            go_on(number, answer)
    return [ends[number] for number in range(len(going))]


def alone(grid: Grid, way: Way) -> Tensor:
    """What a way ends in."""
    (end,) = together(grid, (way,))
    return end


def _answers(grid: Grid, calls: Sequence[Call]) -> list[Rows]:
    """The answer to each of some calls of a kind, made as one. Rows are never changed."""
    axes, members = calls[0].axes, grid.members(calls[0].axes)
    group, here = grid.group(axes), members.index(grid.here)
    kind = calls[0].kind
    if kind == "all_reduce":
        flat = torch.cat([call.rows[0] for call in calls])
        distributed.all_reduce(flat, group=group)
        return [[row] for row in flat.split([len(call.rows[0]) for call in calls])]
    if kind == "all_gather":
        return _gathered(calls, len(members), group)
    by_member = [[call.rows[member] for call in calls] for member in range(len(members))]
    sizes = [sum(map(len, rows)) for rows in by_member]
    if kind == "exchange":
        return _exchanged(calls, by_member, sizes, group)
    result = calls[0].rows[0].new_empty(sizes[here])
    if len(set(sizes)) == 1:
        distributed.reduce_scatter_single(
            result, torch.cat([row for rows in by_member for row in rows]), group=group
        )
    else:
        distributed.reduce_scatter(result, [torch.cat(rows) for rows in by_member], group=group)
    return [[row] for row in result.split(list(map(len, by_member[here])))]


def _gathered(calls: Sequence[Call], members: int, group: ProcessGroup | None) -> list[Rows]:
    rows = [call.rows[0] for call in calls]
    sent = torch.cat(rows) if len(rows) > 1 else rows[0].contiguous()
    gathered = sent.new_empty(members * len(sent))
    distributed.all_gather_single(gathered, sent, group=group)
    parts = [row.split(list(map(len, rows))) for row in gathered.split(len(sent))] if len(sent) else []
    return [[own[place] for own in parts] or [row] * members for place, row in enumerate(rows)]


def _exchanged(
    calls: Sequence[Call], by_member: Sequence[Rows], sizes: Sequence[int], group: ProcessGroup | None
) -> list[Rows]:
    counts = [[call.counts[member] for call in calls] for member in range(len(by_member))]
    taken = list(map(sum, counts))
    received = by_member[0][0].new_empty(sum(taken))
    sent = torch.cat([row for rows in by_member for row in rows])
    distributed.all_to_all_single(received, sent, taken, list(sizes), group=group)
    parts = [own.split(each) for own, each in zip(received.split(taken), counts, strict=True)]
    return [[own[place] for own in parts] for place in range(len(calls))]
