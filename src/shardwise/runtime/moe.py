"""Mixture of experts: dropless top-k routing, without a load-balancing loss, and expert parallelism.

`Router` chooses experts, `GroupedExperts` computes them, `MixtureOfExperts` combines both with shared
experts. `TokenDispatcher` sends rows (one per token and expert) to the ranks that hold the experts, with one
all-to-all, and their results back with another. Counts are sent first, so each rank receives exactly the rows
routed to it. With expert tensor parallelism (`etp`), ranks all-gather their rows and reduce-scatter the
results.
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

# Token dispatch


class TokenDispatcher:
    """Process groups of experts: ranks of `expert` hold different experts, those of `tensor` shards of the
    same."""

    def __init__(self, expert: ProcessGroup, tensor: ProcessGroup) -> None:
        self.expert = expert
        self.tensor = tensor

    def counts(self, chosen: Tensor) -> Tensor:
        """Rows that each rank sends to each local expert, (ep, local experts), from the number of rows that
        this rank sends to each expert (experts,)."""
        size = distributed.get_world_size(self.expert)
        sent = chosen.reshape(size, -1).contiguous()
        if size == 1:
            return sent
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent, group=self.expert)
        return received

    def route(self, chosen: Tensor) -> TokenRoute:
        """The route of rows sorted by expert, `chosen` rows for each expert."""
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
    """Route of one micro-batch's rows to their experts and back."""

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
        """`counts` (etp, ep, local experts) is the number of gathered rows by source rank and expert.

        Each of the etp parts is padded to `longest` rows; `own` is the number of this rank's rows without
        padding.
        """
        self._expert, self._tensor = dispatch.expert, dispatch.tensor
        self._sent, self._received = sent, received
        self._longest, self._own = longest, own
        self.here = counts.sum(dim=(0, 1)).tolist()
        self._order, self._back = _by_expert(counts, longest)

    def to_experts(self, rows: Tensor) -> Tensor:
        """Send this rank's rows, sorted by expert; returns the rows of the local experts, sorted."""
        rows = _routed_rows(rows, self._sent, self._received, self._expert)
        if distributed.get_world_size(self._tensor) > 1:
            rows = _Gather.apply(padded(rows, self._longest), self._tensor)
        return rows[self._order]

    def from_experts(self, rows: Tensor) -> Tensor:
        """Send results back. The partial results of expert tensor-parallel ranks are summed."""
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
    """The permutation that sorts gathered rows by expert and drops padding, and its inverse."""
    parts, senders, experts = counts.shape
    numbers = partial(torch.arange, device=counts.device)
    of_expert = numbers(experts).repeat(parts * senders)
    places = torch.cat([part * longest + numbers(int(of_part.sum())) for part, of_part in enumerate(counts)])
    order = torch.argsort(of_expert.repeat_interleave(counts.flatten()), stable=True)
    return places[order], torch.argsort(order)


def _routed_rows(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    return rows if len(sent) == 1 else _AllToAllRows.apply(rows, sent, received, group)


class _AllToAllRows(Function):
    """All-to-all of rows: `sent` and `received` are the numbers of rows per rank. The backward pass reverses
    it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.ways, ctx.group = (sent, received), group
        return all_to_all_rows(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sent, received = ctx.ways
        return all_to_all_rows(grads[0], received, sent, ctx.group), None, None, None


class _Gather(Function):
    """All-gather of rows; gradients are reduce-scattered."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather_rows(rows, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_scatter_rows(grads[0], ctx.group), None


class _Scatter(Function):
    """Reduce-scatter of rows; gradients are all-gathered."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter_rows(rows, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return all_gather_rows(grads[0], ctx.group), None


# Experts


class Router(nn.Module):
    """Scores of all experts for every token, and the choice of `top_k` experts by a `Routing`."""

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
        """Experts and their fp32 weights, each (rows, top_k). Ties go to the first expert."""
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
        """Scores (rows, experts) for the choice of experts: with the correction bias, and -inf outside the
        best `groups_per_token` groups."""
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
    """Local tensor of a replicated weight that each rank applies to its own tokens (partial gradients)."""
    return weight.to_local(grad_placements=[Partial()]) if isinstance(weight, DTensor) else weight


class GroupedExperts(nn.Module):
    """MLPs of experts, stacked along the first dim. A rank holds some of them, or shards.

    `parts` is the number of ranks over which each expert is sharded, whose outputs are summed.
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
        """Outputs of the experts for `rows` sorted by expert, `counts` rows each, multiplied by `weights`
        (rows, 1). Weights are applied before the last product, so that its output need not be saved."""
        gate, gate_bias, up_bias = (
            None if each is None else local(each) for each in (self.gate, self.gate_bias, self.up_bias)
        )
        up, down = local(self.up), local(self.down)
        down_bias = self.down_bias
        if isinstance(down_bias, DTensor):  # on all shards of an expert, which sum their outputs
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
    """Router and routed experts, with shared experts if the model has them.

    `dispatch` is set with expert parallelism. `shared_tokens` is set if tensor-parallel ranks hold equal
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
