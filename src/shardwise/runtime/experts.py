"""Routed experts: every token takes the few of highest score. Nothing is dropped, and no loss is added that
would balance them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import functional

from shardwise.model import RoutedMlp
from shardwise.runtime.dispatch import TokenDispatcher
from shardwise.runtime.feed_forward import FeedForward, activated, gated
from shardwise.runtime.gradients import local
from shardwise.runtime.numerics import Gate, Numerics, Routing
from shardwise.runtime.parts import SharedTokens


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
