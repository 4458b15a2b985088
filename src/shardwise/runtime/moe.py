"""Routed experts: every token takes the few of highest score. Nothing is dropped, and no loss is added that
would balance them.

Tokens to their experts and back, over the ranks of a stage.

Every rank brings tokens of its own. Its rows, one per token and expert, go to the ranks that hold the
experts by an all-to-all; where an expert is divided over several ranks (`etp`), each of these then gathers
the rows of all of them, and what they compute is added up on the way back. Nothing is dropped: counts go
first, and an all-to-all has as many rows for each rank as its experts were chosen.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import functional

from shardwise.model import RoutedMlp
from shardwise.runtime.collectives import SharedTokens, all_gather_rows, padded, reduce_scatter_rows
from shardwise.runtime.gradients import local
from shardwise.runtime.layers import FeedForward, activated, gated
from shardwise.runtime.numerics import Gate, Numerics, Routing
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


class Router(nn.Module):
    """Scores of all experts for every token, and the `top_k` that it takes, by a `Routing`."""

    def __init__(self, shape: RoutedMlp, hidden: int, routing: Routing) -> None:
        super().__init__()
        self.shape = shape
        self.routing = routing
        self.weight = nn.Parameter(torch.empty(shape.experts, hidden))
        self.bias = nn.Parameter(torch.zeros(shape.experts)) if shape.router_bias else None
        self.correction: nn.Parameter | None = None
        if routing.correction:
            self.correction = nn.Parameter(torch.zeros(shape.experts), requires_grad=False)
        nn.init.normal_(self.weight, std=hidden**-0.5)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Experts and what weighs them in fp32, each (rows, top_k); of equal scores the first expert."""
        weight, bias = _own(self.weight), None if self.bias is None else _own(self.bias)
        logits = functional.linear(tokens, weight, bias).float()
        scores = logits.softmax(dim=-1) if self.routing.score == "softmax" else logits.sigmoid()
        ranked = self._eligible(scores.detach()).sort(dim=-1, descending=True, stable=True)
        experts = ranked.indices[:, : self.shape.top_k]
        weights = scores.gather(1, experts)
        if self.routing.renormalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return experts, weights * self.routing.scale if self.routing.scale != 1.0 else weights

    def _eligible(self, scores: Tensor) -> Tensor:
        """What experts are chosen by: `scores` (rows, experts), corrected, and nothing in groups beyond the
        best `groups_per_token`."""
        if self.correction is not None:
            scores = scores + local(self.correction)
        groups, taken = self.shape.groups, self.shape.groups_per_token
        if groups == taken:
            return scores
        each = scores.unflatten(-1, (groups, -1))
        of_group = each.topk(self.routing.best_of_group, dim=-1).values.sum(dim=-1)
        best = of_group.sort(dim=-1, descending=True, stable=True).indices[:, :taken]
        is_beyond = torch.ones_like(of_group, dtype=torch.bool).scatter_(1, best, False)
        return each.masked_fill(is_beyond.unsqueeze(-1), -torch.inf).flatten(1)


def _own(weight: Tensor) -> Tensor:
    """A weight that is whole on every rank, each of which sees tokens of its own."""
    return weight.to_local(grad_placements=[Partial()]) if isinstance(weight, DTensor) else weight


class GroupedExperts(nn.Module):
    """MLPs, one stacked behind the other; a rank of an expert group holds some of them, or parts.

    `parts` says on how many ranks each expert lies, whose outputs are added up.
    """

    def __init__(self, shape: RoutedMlp, hidden: int, how: Gate) -> None:
        super().__init__()
        self.how = how
        self.parts = 1
        width, count, mlp = shape.expert.ffn, shape.experts, shape.expert
        self.gate = _matrices(count, width, hidden) if mlp.gated else None
        self.up = _matrices(count, width, hidden)
        self.down = _matrices(count, hidden, width)
        self.gate_bias = _biases(count, width) if mlp.bias and mlp.gated else None
        self.up_bias = _biases(count, width) if mlp.bias else None
        self.down_bias = _biases(count, hidden) if mlp.bias else None

    def forward(self, rows: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
        """What the experts make of `rows` sorted by expert, `counts` of them for each, by what weighs them
        (rows, 1); this is taken in before the last product, so that its output need not be kept."""
        gate, gate_bias, up_bias = (
            None if each is None else local(each) for each in (self.gate, self.gate_bias, self.up_bias)
        )
        up, down = local(self.up), local(self.down)
        down_bias = self.down_bias
        if isinstance(down_bias, DTensor):  # all parts of an expert have it, and add up what they make
            down_bias = down_bias.to_local(grad_placements=[Shard(0), Partial()])
        made = []
        for expert, (mine, weight) in enumerate(zip(rows.split(counts), weights.split(counts), strict=True)):
            share = weight.to(rows.dtype)
            inner = functional.linear(mine, up[expert], _of(up_bias, expert))
            if gate is None:
                inner = activated(inner, self.how.activation)
            else:
                inner = gated(functional.linear(mine, gate[expert], _of(gate_bias, expert)), inner, self.how)
            out = functional.linear(inner * share, down[expert])
            if down_bias is not None:
                out = out + down_bias[expert] / self.parts * share
            made.append(out)
        return torch.cat(made)


def _matrices(count: int, outputs: int, inputs: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(count, outputs, inputs).normal_(std=inputs**-0.5))


def _biases(count: int, outputs: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(count, outputs))


def _of(biases: Tensor | None, expert: int) -> Tensor | None:
    return None if biases is None else biases[expert]


class MixtureOfExperts(nn.Module):
    """Router and experts, and the MLP beside them that all tokens take, where there is one.

    `dispatch` is set where experts lie on several ranks, `shared_tokens` where tensor ranks all have the same
    tokens.
    """

    def __init__(self, shape: RoutedMlp, hidden: int, numerics: Numerics) -> None:
        super().__init__()
        self.router = Router(shape, hidden, numerics.routing)
        self.experts = GroupedExperts(shape, hidden, numerics.expert_gate or numerics.gate)
        self.shared = FeedForward(shape.shared, hidden, numerics.gate) if shape.shared else None
        self.dispatch: TokenDispatcher | None = None
        self.shared_tokens: SharedTokens | None = None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        mine = tokens if self.shared_tokens is None else self.shared_tokens.own(tokens)
        made = self._routed(mine)
        if self.shared_tokens is not None:
            made = self.shared_tokens.joined(made, len(tokens))
        made = made.view_as(x)
        return made if self.shared is None else made + self.shared(x)

    def _routed(self, tokens: Tensor) -> Tensor:
        experts, weights = self.router(tokens)
        order = experts.flatten().argsort(stable=True)
        rows = tokens[order // experts.shape[1]]
        shares = weights.flatten()[order].unsqueeze(1)
        chosen = torch.bincount(experts.flatten(), minlength=self.router.weight.shape[0])
        if self.dispatch is None:
            made = self.experts(rows, shares, chosen.tolist())
        else:
            route = self.dispatch.route(chosen)
            made = self.experts(route.to_experts(rows), route.to_experts(shares), route.here)
            made = route.from_experts(made)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return made[back].view(*experts.shape, -1).sum(dim=1)
