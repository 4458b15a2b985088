"""Attention whose scores are more than products: with a window, kept below a cap, beside a sink.

PyTorch's fused kernels give no gradient of these. Here queries are taken some at a time, and their scores are
made again in the backward pass, so that no more is kept than by a fused kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

QUERIES = 128
"""How many queries are taken at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """How scores come from products of queries and keys: times `scale`, below `cap` (cap * tanh(score /
    cap)), of the last `window` keys alone; None is without."""

    scale: float
    cap: float | None = None
    window: int | None = None


def scored_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scores: Scores) -> Tensor:
    """Causal attention of q (batch, heads, tokens, elements) on k and v of as many heads or fewer.

    Each of `sinks` (heads,) is the score of a key that all queries of its head see and whose value is zero
    (Xiao et al. 2023, arXiv 2309.17453). In fp32 between the products.
    """
    out: Tensor = _Scored.apply(q, k, v, sinks, scores)
    return out


class _Scored(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scores: Scores) -> Tensor:
        ctx.scores = scores
        ctx.save_for_backward(q, k, v, sinks)
        parts = [_attention(q[:, :, own], k[:, :, seen], v[:, :, seen], sinks, scores, own, seen)
                 for own, seen in _blocks(q.shape[2], scores.window)]  # fmt: skip
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks = ctx.saved_tensors
        totals = [torch.empty_like(q), *(torch.zeros_like(each, dtype=torch.float32) for each in (k, v))]
        of_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=torch.float32)
        for own, seen in _blocks(q.shape[2], ctx.scores.window):
            parts = (q[:, :, own], k[:, :, seen], v[:, :, seen])
            own_q, own_k, own_v = (each.detach().requires_grad_() for each in parts)
            again = None if sinks is None else sinks.detach().requires_grad_()
            with torch.enable_grad():
                out = _attention(own_q, own_k, own_v, again, ctx.scores, own, seen)
            inputs = [each for each in (own_q, own_k, own_v, again) if each is not None]
            found = torch.autograd.grad(out, inputs, grads[0][:, :, own])
            totals[0][:, :, own] = found[0]
            totals[1][:, :, seen] += found[1]
            totals[2][:, :, seen] += found[2]
            if of_sinks is not None:
                of_sinks += found[3]
        of_k, of_v = totals[1].to(k.dtype), totals[2].to(v.dtype)
        return totals[0], of_k, of_v, None if of_sinks is None else of_sinks.to(sinks.dtype), None


def _blocks(tokens: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Queries that are taken together, and the keys that some of them see."""
    for start in range(0, tokens, QUERIES):
        stop = min(start + QUERIES, tokens)
        first = 0 if window is None else max(0, start - window + 1)
        yield slice(start, stop), slice(first, stop)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scores: Scores, own: slice, seen: slice
) -> Tensor:
    """Attention of the queries at `own` places on the keys at `seen` ones."""
    groups = q.shape[1] // k.shape[1]
    found = _product(q, k.transpose(2, 3), groups).float() * scores.scale
    if scores.cap is not None:
        found = scores.cap * torch.tanh(found / scores.cap)
    place = torch.arange(own.start, own.stop, device=q.device)[:, None]
    distance = place - torch.arange(seen.start, seen.stop, device=q.device)
    is_seen = distance >= 0 if scores.window is None else (distance >= 0) & (distance < scores.window)
    found = found.masked_fill(~is_seen, -torch.inf)
    if sinks is not None:
        own_sinks = sinks.float()[None, :, None, None].expand(*found.shape[:3], 1)
        found = torch.cat((found, own_sinks), dim=-1)
    shares = found.softmax(dim=-1)[..., : k.shape[2]].to(v.dtype)
    return _product(shares, v, groups)


def _product(x: Tensor, y: Tensor, groups: int) -> Tensor:
    """x @ y, of x (batch, heads, rows, ...) and y of `groups` times fewer heads."""
    return (x.unflatten(1, (-1, groups)) @ y.unsqueeze(2)).flatten(1, 2)
