"""Tokens to their experts and back, over the ranks of a stage.

Every rank brings tokens of its own. Its rows, one per token and expert, go to the ranks that hold the
experts by an all-to-all; where an expert is divided over several ranks (`etp`), each of these then gathers
the rows of all of them, and what they compute is added up on the way back. Nothing is dropped: counts go
first, and an all-to-all has as many rows for each rank as its experts were chosen.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd import Function
from torch.distributed import ProcessGroup

from shardwise.runtime.parts import all_gather_rows, padded, reduce_scatter_rows
from shardwise.runtime.private import all_to_all_rows


class TokenDispatcher:
    """The ranks among which experts lie: `expert` holds different experts, `tensor` parts of the same."""

    def __init__(self, expert: ProcessGroup, tensor: ProcessGroup) -> None:
        self.expert = expert
        self.tensor = tensor

    def counts(self, chosen: Tensor) -> Tensor:
        """How many rows each rank sends to each expert that is here: (ep, experts here), from the numbers
        (experts,) that this rank sends."""
        size = distributed.get_world_size(self.expert)
        sent = chosen.reshape(size, -1).contiguous()
        if size == 1:
            return sent
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent, group=self.expert)
        return received

    def route(self, chosen: Tensor) -> TokenRoute:
        """The way of rows that are sorted by expert, `chosen` of them for each."""
        received = self.counts(chosen)
        size, ways = received.shape[0], distributed.get_world_size(self.tensor)
        here = received.sum()
        each = [received]
        if ways > 1:
            each = [torch.empty_like(received) for _ in range(ways)]
            distributed.all_gather(each, received, group=self.tensor)
        return TokenRoute(
            dispatch=self,
            sent=chosen.reshape(size, -1).sum(1).tolist(),
            received=received.sum(1).tolist(),
            longest=max(int(counts.sum()) for counts in each),
            counts=torch.stack(each),
            own=int(here),
        )


class TokenRoute:
    """The way of one microbatch's rows: how many go where."""

    def __init__(
        self,
        *,
        dispatch: TokenDispatcher,
        sent: list[int],
        received: list[int],
        longest: int,
        counts: Tensor,
        own: int,
    ) -> None:
        """`counts` are (etp, ep, experts here): whose rows are here once they are gathered, in order; each of
        the etp parts is padded to `longest` rows, of which `own` of this rank's are real."""
        self._expert, self._tensor = dispatch.expert, dispatch.tensor
        self._sent, self._received = sent, received
        self._longest, self._own = longest, own
        self.here = counts.sum(dim=(0, 1)).tolist()
        self._order, self._back = _by_expert(counts, longest)

    def to_experts(self, rows: Tensor) -> Tensor:
        """This rank's rows, sorted by expert, exchanged for the rows of the experts that are here, sorted."""
        rows = _routed_rows(rows, self._sent, self._received, self._expert)
        if distributed.get_world_size(self._tensor) > 1:
            rows = _Gather.apply(padded(rows, self._longest), self._tensor)
        return rows[self._order]

    def from_experts(self, rows: Tensor) -> Tensor:
        """The way back; what ranks with parts of the same expert computed is added up."""
        if distributed.get_world_size(self._tensor) > 1:
            every = rows.new_zeros(self._longest * self._parts, rows.shape[1])
            rows = _Scatter.apply(every.index_copy(0, self._order, rows), self._tensor)[: self._own]
        else:
            rows = rows[self._back]
        return _routed_rows(rows, self._received, self._sent, self._expert)

    @property
    def _parts(self) -> int:
        return distributed.get_world_size(self._tensor)


def _by_expert(counts: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """The order that sorts gathered rows by expert (padding left out), and its inverse."""
    parts, senders, experts = counts.shape
    numbers = partial(torch.arange, device=counts.device)
    of_expert = numbers(experts).repeat(parts * senders)
    places = torch.cat([part * longest + numbers(int(of_part.sum())) for part, of_part in enumerate(counts)])
    order = torch.argsort(of_expert.repeat_interleave(counts.flatten()), stable=True)
    return places[order], torch.argsort(order)


def _routed_rows(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    return rows if len(sent) == 1 else _AllToAllRows.apply(rows, sent, received, group)


class _AllToAllRows(Function):
    """An all-to-all of rows, of which `sent` go to each rank and `received` come; backward is the reverse."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.ways, ctx.group = (sent, received), group
        return all_to_all_rows(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sent, received = ctx.ways
        return all_to_all_rows(grads[0], received, sent, ctx.group), None, None, None


class _Gather(Function):
    """Rows of all ranks; backward adds up their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather_rows(rows, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_scatter_rows(grads[0], ctx.group), None


class _Scatter(Function):
    """Each rank's part of the sum of all; backward gathers."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter_rows(rows, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return all_gather_rows(grads[0], ctx.group), None
