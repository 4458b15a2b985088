"""Rows at the edges of a part: every rank has those of the ranks beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd import Function

from shardwise.runtime.graphs.work import ShardedOperator
from shardwise.runtime.marks import OPERATOR_COLLECTIVES, TRAFFIC_MARK, profiled_range


def with_neighbours(
    work: ShardedOperator, value: Tensor, at: int, read: str, made: str
) -> tuple[Tensor, int]:
    """A tensor with as many rows more at either end of dim `at` as the rules that split `made` name, zeros
    beyond the ends; and the number of its first row."""
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
    """Rows from the ranks beside; backward their gradients, added to what the rank has itself."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, work: ShardedOperator, at: int, read: str, axes: tuple[int, ...], rows: int
    ) -> Tensor:
        ctx.way = (work, at, axes, rows)
        size = value.shape[at]
        before, after = _passed(work, axes, value.narrow(at, 0, rows), value.narrow(at, size - rows, rows))
        return torch.cat((before, value, after), dim=at)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        work, at, axes, rows = ctx.way
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
    """What the rank before and the rank behind give, where this one gives `first` to the one before it and
    `last` to the one behind it; zeros at the ends."""
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
