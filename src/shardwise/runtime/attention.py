"""Attention blocks; every rank of a tensor group works on its own heads."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.model import GroupedQueryAttentionShape, LatentAttentionShape
from shardwise.runtime.context import ContextParallelAttention
from shardwise.runtime.gradients import local
from shardwise.runtime.norms import RmsNorm
from shardwise.runtime.numerics import Numerics
from shardwise.runtime.rope import Rotation, rotated
from shardwise.runtime.scores import Scores, scored_attention

PositionEncoding: TypeAlias = Rotation | Tensor | None
"""How a layer's queries and keys know where they are: by a rotation, by the places themselves (tokens,) where
scores have slopes, or from the embeddings."""


class CausalAttention(nn.Module):
    """What attention blocks share: causal attention of queries on keys. `slopes` are those of this rank's
    heads, where a key's score falls with its distance."""

    def __init__(self, scores: Scores, *, sinks: int = 0) -> None:
        super().__init__()
        self.scores = scores
        self.sinks = nn.Parameter(torch.zeros(sinks)) if sinks else None
        self.slopes: tuple[float, ...] = ()
        self.context: ContextParallelAttention | None = None

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of q on k and v, each (batch, heads, tokens, elements); a value may have more or fewer
        elements than a key."""
        scores, tokens, width = self.scores, q.shape[2], v.shape[3]
        if scores.cap is not None or self.sinks is not None:
            return scored_attention(q, k, v, None if self.sinks is None else local(self.sinks), scores)
        if q.shape[3] != width:
            # Fused kernels take queries, keys and values of one width alone, some of them multiples of 8.
            # Zeros add nothing.
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
        """Queries and keys with elements more, whose products are slope * place of the key: what ALiBi adds
        to a score, but for a part that all keys of a query have. A place is two elements, each of which bf16
        tells exactly, of less than 65,536."""
        slopes = torch.tensor(self.slopes, device=q.device) / self.scores.scale
        of_q = torch.stack((slopes * 256, slopes), dim=-1).to(q.dtype)
        of_k = torch.stack((places // 256, places % 256), dim=-1).to(k.dtype)[:, None]
        return (
            torch.cat((q, of_q.expand(*q.shape[:3], 2)), dim=-1),
            torch.cat((k, of_k.expand(*k.shape[:3], 2)), dim=-1),
        )


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """ALiBi's slopes (Press et al. 2021, arXiv 2108.12409): 2^(-8/n), its square and so on for n heads, a
    power of 2; for others those of the power below, and between them every other one of the power above."""
    below = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * number / below) for number in range(1, below + 1)]
    slopes += [2.0 ** (-4.0 * number / below) for number in range(1, 2 * (heads - below) + 1, 2)]
    return tuple(slopes)


class Latents(nn.Module):
    """What all heads share of each token: tensors that are the same on every rank of a tensor group."""

    def forward(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """`parts`, each (batch, tokens, elements), of all tokens."""
        return parts


class LatentAttention(CausalAttention):
    """Multi-head latent attention: keys and values, and queries where the shape has a rank for them, come
    from a normed latent, and beside it one part of the keys, the one that turns, is the same for all heads
    (DeepSeek-V2, arXiv 2405.04434)."""

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
