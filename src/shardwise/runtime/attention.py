"""Attention blocks. With tensor parallelism, each rank computes its own heads.

`GroupedQueryAttention` covers multi-head, grouped-query and multi-query attention; `LatentAttention` is
multi-head latent attention. Both use PyTorch's fused kernels where these can compute the scores.
`scored_attention` computes attention with a soft-cap or attention sinks, for which fused kernels have no
gradient: it processes `QUERIES` queries at a time and recomputes their scores in the backward pass, so it
saves no more than a fused kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from shardwise.model import GroupedQueryAttentionShape, LatentAttentionShape
from shardwise.runtime.context_parallel import ContextParallelAttention
from shardwise.runtime.gradients import local
from shardwise.runtime.layers import RmsNorm
from shardwise.runtime.numerics import Numerics
from shardwise.runtime.rope import Rotation, rotated

# Attention with soft-caps, windows and sinks

QUERIES = 128
"""Queries per block in `scored_attention`; bounds the memory of the scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """How products of queries and keys become scores.

    They are multiplied by `scale`, soft-capped (cap * tanh(score / cap)), and limited to the last `window`
    keys. None turns cap or window off.
    """

    scale: float
    cap: float | None = None
    window: int | None = None


def scored_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scores: Scores) -> Tensor:
    """Causal attention of q (batch, heads, tokens, elements) on k and v, which may have fewer heads (GQA).

    Each of `sinks` (heads,) is the score of a virtual key that all queries of its head see and whose value is
    zero (attention sinks, Xiao et al. 2023, arXiv 2309.17453). Scores and softmax are fp32.
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
    """Blocks of queries, each with the range of keys that any of them sees."""
    for start in range(0, tokens, QUERIES):
        stop = min(start + QUERIES, tokens)
        first = 0 if window is None else max(0, start - window + 1)
        yield slice(start, stop), slice(first, stop)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scores: Scores, own: slice, seen: slice
) -> Tensor:
    """Attention of the queries at positions `own` on the keys at positions `seen`."""
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
    """x @ y, where x is (batch, heads, rows, ...) and y has `groups` times fewer heads."""
    return (x.unflatten(1, (-1, groups)) @ y.unsqueeze(2)).flatten(1, 2)


# Attention blocks

PositionEncoding: TypeAlias = Rotation | Tensor | None
"""Position encoding of a layer: rotary embedding, positions (tokens,) for ALiBi, or None (learned
embeddings)."""


class CausalAttention(nn.Module):
    """Base of attention blocks: causal attention of queries on keys. `slopes` are the ALiBi slopes of this
    rank's heads."""

    def __init__(self, scores: Scores, *, sinks: int = 0) -> None:
        super().__init__()
        self.scores = scores
        self.sinks = nn.Parameter(torch.zeros(sinks)) if sinks else None
        self.slopes: tuple[float, ...] = ()
        self.context: ContextParallelAttention | None = None

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of q on k and v, each (batch, heads, tokens, elements). Values may have another width
        than keys."""
        scores, tokens, width = self.scores, q.shape[2], v.shape[3]
        if scores.cap is not None or self.sinks is not None:
            return scored_attention(q, k, v, None if self.sinks is None else local(self.sinks), scores)
        if q.shape[3] != width:
            # Fused kernels need queries, keys and values of one width; some need a multiple of 8. Padding
            # with zeros changes nothing.
            wide = -(-max(q.shape[3], width) // 8) * 8
            q, k, v = (functional.pad(each, (0, wide - each.shape[3])) for each in (q, k, v))
        if self.context is not None:
            out = self.context.attention(q, k, v, scale=scores.scale)
        else:
            mask = None
            if scores.window is not None and scores.window < tokens:
                place = torch.arange(tokens, device=q.device)
                distance = place[:, None] - place
                mask = (distance >= 0) & (distance < scores.window)
            out = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scores.scale, enable_gqa=True
            )
        return out if out.shape[3] == width else out[..., :width]


class GroupedQueryAttention(CausalAttention):
    """Multi-head, grouped-query and multi-query attention."""

    def __init__(self, shape: GroupedQueryAttentionShape, hidden: int, numerics: Numerics) -> None:
        scores = Scores(
            scale=numerics.score_scale(shape.head_dim), cap=numerics.score_cap, window=shape.window
        )
        super().__init__(scores, sinks=shape.heads if shape.sinks else 0)
        self.head_dim = shape.head_dim
        self.kv_heads = shape.kv_heads
        if numerics.alibi is not None:
            self.slopes = tuple(slope * numerics.alibi for slope in alibi_slopes(shape.heads))
        self.q = nn.Linear(hidden, shape.heads * shape.head_dim, bias=shape.qkv_bias)
        self.k = nn.Linear(hidden, shape.kv_heads * shape.head_dim, bias=shape.qkv_bias)
        self.v = nn.Linear(hidden, shape.kv_heads * shape.head_dim, bias=shape.qkv_bias)
        self.q_norm = RmsNorm(shape.head_dim, numerics.epsilon) if shape.qk_norm else None
        self.k_norm = RmsNorm(shape.head_dim, numerics.epsilon) if shape.qk_norm else None
        self.out = nn.Linear(shape.heads * shape.head_dim, hidden, bias=shape.out_bias)

    def forward(self, x: Tensor, places: PositionEncoding) -> Tensor:
        q, k, v = (
            projected.view(*projected.shape[:2], -1, self.head_dim)
            for projected in (self.q(x), self.k(x), self.v(x))
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if isinstance(places, Rotation):
            q, k = rotated(q, places), rotated(k, places)
        elif places is not None:
            q, k = self._with_alibi(q, k, places)
        heads = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.out(heads.transpose(1, 2).flatten(2))

    def _with_alibi(self, q: Tensor, k: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys with two more elements, whose product is slope * position of the key (ALiBi).

        ALiBi's other term is equal for all keys of a query and cancels in the softmax. A position below
        65,536 is split into two elements that bf16 represents exactly.
        """
        slopes = torch.tensor(self.slopes, device=q.device) / self.scores.scale
        of_q = torch.stack((slopes * 256, slopes), dim=-1).to(q.dtype)
        of_k = torch.stack((places // 256, places % 256), dim=-1).to(k.dtype)[:, None]
        return (
            torch.cat((q, of_q.expand(*q.shape[:3], 2)), dim=-1),
            torch.cat((k, of_k.expand(*k.shape[:3], 2)), dim=-1),
        )


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """ALiBi slopes of `heads` heads (Press et al. 2021, arXiv 2108.12409).

    For n heads, a power of 2, these are the powers of 2^(-8/n). Other numbers use the slopes of the next
    lower power of 2, then every other slope of the next higher one.
    """
    below = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * number / below) for number in range(1, below + 1)]
    slopes += [2.0 ** (-4.0 * number / below) for number in range(1, 2 * (heads - below) + 1, 2)]
    return tuple(slopes)


class Latents(nn.Module):
    """Latents of each token, which all heads share: equal on every tensor-parallel rank."""

    def forward(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """`parts`, each (batch, tokens, elements), for all tokens."""
        return parts


class LatentAttention(CausalAttention):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    Keys and values are projected from a normed latent, and so are queries if the shape has a `q_rank`. The
    rotary part of the keys is the same for all heads.
    """

    def __init__(self, shape: LatentAttentionShape, hidden: int, numerics: Numerics) -> None:
        super().__init__(Scores(scale=numerics.score_scale(shape.qk_dim)))
        self.shape = shape
        queries, epsilon = shape.heads * shape.qk_dim, numerics.latent_epsilon
        self.q: nn.Linear | None = None
        if shape.q_rank is None:
            self.q = nn.Linear(hidden, queries, bias=False)
        else:
            self.q_down = nn.Linear(hidden, shape.q_rank, bias=shape.bias)
            self.q_norm = RmsNorm(shape.q_rank, epsilon)
            self.q_up = nn.Linear(shape.q_rank, queries, bias=False)
        self.kv_down = nn.Linear(hidden, shape.kv_rank + shape.rope_dim, bias=shape.bias)
        self.kv_norm = RmsNorm(shape.kv_rank, epsilon)
        self.kv_up = nn.Linear(shape.kv_rank, shape.heads * (shape.nope_dim + shape.v_dim), bias=False)
        self.latents = Latents()
        self.out = nn.Linear(shape.heads * shape.v_dim, hidden, bias=shape.bias)

    def forward(self, x: Tensor, places: PositionEncoding) -> Tensor:
        if not isinstance(places, Rotation):
            raise TypeError(type(places).__name__)
        shape = self.shape
        latent, rope_k = self.kv_down(x).split((shape.kv_rank, shape.rope_dim), dim=-1)
        latent = self.kv_norm(latent)
        if self.q is not None:
            latent, rope_k = self.latents(latent, rope_k)
            q = self.q(x)
        else:
            latent, rope_k, of_q = self.latents(latent, rope_k, self.q_norm(self.q_down(x)))
            q = self.q_up(of_q)
        q, rope_q = q.unflatten(-1, (-1, shape.qk_dim)).split((shape.nope_dim, shape.rope_dim), dim=-1)
        q = torch.cat((q, rotated(rope_q, places)), dim=-1)
        k, v = self.kv_up(latent).unflatten(-1, (q.shape[2], -1)).split((shape.nope_dim, shape.v_dim), dim=-1)
        rotated_k = rotated(rope_k.unsqueeze(2), places).expand(-1, -1, k.shape[2], -1)
        k = torch.cat((k, rotated_k), dim=-1)
        heads = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.out(heads.transpose(1, 2).flatten(2))
