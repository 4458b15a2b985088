"""Routed experts: every token takes the few of highest score. Nothing is dropped, and no loss is added that
would balance them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional

from shardwise.model import RoutedMlp
from shardwise.runtime.dispatch import Dispatch
from shardwise.runtime.feed_forward import FeedForward, activated
from shardwise.runtime.numerics import Activation, Numerics
from shardwise.runtime.parts import Shared


class Router(nn.Module):
    """Scores of all experts for every token, and the `top_k` of highest probability."""

    def __init__(self, shape: RoutedMlp, hidden: int, *, renormalised: bool) -> None:
        super().__init__()
        self.top_k = shape.top_k
        self.renormalised = renormalised
        self.weight = nn.Parameter(torch.empty(shape.experts, hidden))
        nn.init.normal_(self.weight, std=hidden**-0.5)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Experts and their probabilities in fp32, each (rows, top_k); of equal scores the first expert."""
        weight = self.weight
        if isinstance(weight, DTensor):  # whole on every rank, each of which sees tokens of its own
            weight = weight.to_local(grad_placements=[Partial()])
        scores = functional.linear(tokens, weight).float().softmax(dim=-1)
        probabilities, experts = scores.sort(dim=-1, descending=True, stable=True)
        probabilities, experts = probabilities[:, : self.top_k], experts[:, : self.top_k]
        if self.renormalised:
            probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
        return experts, probabilities


class Experts(nn.Module):
    """Gated MLPs, one stacked behind the other; a rank of an expert group holds some of them, or parts."""

    def __init__(self, shape: RoutedMlp, hidden: int, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        width, count = shape.expert.ffn, shape.experts
        self.gate = nn.Parameter(torch.empty(count, width, hidden))
        self.up = nn.Parameter(torch.empty(count, width, hidden))
        self.down = nn.Parameter(torch.empty(count, hidden, width))
        for parameter, fan_in in ((self.gate, hidden), (self.up, hidden), (self.down, width)):
            nn.init.normal_(parameter, std=fan_in**-0.5)

    def forward(self, rows: Tensor, probabilities: Tensor, counts: list[int]) -> Tensor:
        """What the experts make of `rows` sorted by expert, `counts` of them for each, by their probabilities
        (rows, 1); these are taken in before the last product, so that its output need not be kept."""
        gate, up, down = (
            weight.to_local() if isinstance(weight, DTensor) else weight
            for weight in (self.gate, self.up, self.down)
        )
        made = []
        for expert, (mine, share) in enumerate(
            zip(rows.split(counts), probabilities.split(counts), strict=True)
        ):
            inner = activated(functional.linear(mine, gate[expert]), self.activation)
            inner = inner * functional.linear(mine, up[expert]) * share.to(rows.dtype)
            made.append(functional.linear(inner, down[expert]))
        return torch.cat(made)


class MixtureOfExperts(nn.Module):
    """Router and experts, and the MLP beside them that all tokens take, where there is one.

    `dispatch` is set where experts lie on several ranks, `shared_tokens` where tensor ranks all have the same
    tokens.
    """

    def __init__(self, shape: RoutedMlp, hidden: int, numerics: Numerics) -> None:
        super().__init__()
        self.router = Router(shape, hidden, renormalised=numerics.renormalised)
        self.experts = Experts(shape, hidden, numerics.activation)
        self.shared = FeedForward(shape.shared, hidden, numerics.activation) if shape.shared else None
        self.dispatch: Dispatch | None = None
        self.shared_tokens: Shared | None = None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        mine = tokens if self.shared_tokens is None else self.shared_tokens.own(tokens)
        made = self._routed(mine)
        if self.shared_tokens is not None:
            made = self.shared_tokens.joined(made, len(tokens))
        made = made.view_as(x)
        return made if self.shared is None else made + self.shared(x)

    def _routed(self, tokens: Tensor) -> Tensor:
        experts, probabilities = self.router(tokens)
        order = experts.flatten().argsort(stable=True)
        rows = tokens[order // experts.shape[1]]
        shares = probabilities.flatten()[order].unsqueeze(1)
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
