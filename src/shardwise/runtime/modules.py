"""Reference modules of decoder-only transformers, built from a plan's model record.

A `Stage` holds consecutive decoder layers and, at the ends of the model, its embedding and its head; the
whole model is the stage that holds everything. Parameters keep the names that they have in the whole model,
so every rank's checkpoint speaks of the same tensors. Dropout is never applied: a step is a function of its
samples and parameters alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from shardwise.errors import ConfigError
from shardwise.model import Decoder, GroupedQuery, LayerShape, Mlp, Model, RoutedMlp, decoder_of
from shardwise.runtime.context import Context
from shardwise.runtime.experts import MixtureOfExperts
from shardwise.runtime.feed_forward import FeedForward
from shardwise.runtime.host_activations import HostActivations
from shardwise.runtime.norms import RmsNorm
from shardwise.runtime.numerics import Numerics, Rope, numerics_of
from shardwise.runtime.parts import Boundary
from shardwise.runtime.recompute import Store, recomputed
from shardwise.runtime.replicas import Replicas

Rotation = tuple[Tensor, Tensor] | None
"""Cosines and sines of shape (tokens, rotated elements / 2), or None where positions are learned."""


def rotation_of(rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles at `positions` (tokens,), in fp32 (Su et al. 2021, arXiv 2104.09864).

    Llama 3.1's scaling stretches low frequencies by `factor` and blends those between.
    """
    exponents = torch.arange(0, rope.dims, 2, dtype=torch.float32, device=positions.device) / rope.dims
    frequencies = rope.theta**-exponents
    if rope.scaling is not None:
        factor, low, high, length = rope.scaling
        turns = length * frequencies / (2 * torch.pi)  # over the original context
        blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        frequencies = frequencies * (blend + (1 - blend) / factor)
    angles = positions.float()[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """`x` (batch, tokens, heads, elements) with element i turned against element i + half, as Llama does."""
    cos, sin = (part[:, None, :].to(x.dtype) for part in rotation)
    turned: Tensor = _Rotated.apply(x, cos, sin)
    return turned


class _Rotated(Function):
    """A rotation, whose backward pass turns the gradient back. (Autograd's own would lay each half's gradient
    into zeros of the whole, and add them up: three times as much to move.)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, -sin), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.mul(first, cos, out=turned[..., :half]).addcmul_(second, sin, value=-1.0)
    torch.mul(second, cos, out=turned[..., half : 2 * half]).addcmul_(first, sin)
    turned[..., 2 * half :] = x[..., 2 * half :]
    return turned


def norm_module(shape: LayerShape, width: int, epsilon: float) -> nn.Module:
    if shape.norm == "rms":
        return RmsNorm(width, epsilon)
    return nn.LayerNorm(width, eps=epsilon, elementwise_affine=shape.norm == "layer")


class Attention(nn.Module):
    """Causal grouped-query attention; every rank of a tensor group works on its own heads."""

    def __init__(self, shape: GroupedQuery, hidden: int, numerics: Numerics) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.kv_heads = shape.kv_heads
        self.window = shape.window
        self.context: Context | None = None
        self.q = nn.Linear(hidden, shape.heads * shape.head_dim, bias=shape.qkv_bias)
        self.k = nn.Linear(hidden, shape.kv_heads * shape.head_dim, bias=shape.qkv_bias)
        self.v = nn.Linear(hidden, shape.kv_heads * shape.head_dim, bias=shape.qkv_bias)
        self.q_norm = RmsNorm(shape.head_dim, numerics.epsilon) if shape.qk_norm else None
        self.k_norm = RmsNorm(shape.head_dim, numerics.epsilon) if shape.qk_norm else None
        self.out = nn.Linear(shape.heads * shape.head_dim, hidden, bias=shape.out_bias)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        q, k, v = (
            projected.view(*projected.shape[:2], -1, self.head_dim)
            for projected in (self.q(x), self.k(x), self.v(x))
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotated(q, rotation), rotated(k, rotation)
        heads = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.out(heads.transpose(1, 2).flatten(2))

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of q on k and v, each (batch, heads, tokens, elements)."""
        if self.context is not None:
            return self.context.attention(q, k, v)
        tokens = q.shape[2]
        if self.window is None or self.window >= tokens:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        place = torch.arange(tokens, device=q.device)
        behind = place[:, None] - place
        mask = (behind >= 0) & (behind < self.window)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


class Layer(nn.Module):
    """One decoder layer: attention and MLP one after the other, or side by side (`order`).

    `recompute` says what its backward pass computes again, and `is_split` whether that pass is done in two
    halves, for inputs and for weights. Of a layer that recomputes, `store` has what it keeps.
    """

    def __init__(self, shape: LayerShape, numerics: Numerics) -> None:
        super().__init__()
        attention, mlp = _supported(shape)
        self.order = shape.order
        self.recompute = "none"
        self.is_split = False
        self.store: Store | None = None
        self.rope = numerics.rope(attention.head_dim) if attention.rotary else None
        self.attention_norm = norm_module(shape, shape.hidden, numerics.epsilon)
        self.attention = Attention(attention, shape.hidden, numerics)
        own_norm = shape.order != "parallel_shared"
        self.mlp_norm = norm_module(shape, shape.hidden, numerics.epsilon) if own_norm else None
        self.mlp: FeedForward | MixtureOfExperts
        if isinstance(mlp, RoutedMlp):
            self.mlp = MixtureOfExperts(mlp, shape.hidden, numerics)
        else:
            self.mlp = FeedForward(mlp, shape.hidden, numerics.activation)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        if self.recompute == "none":
            return self._hidden(x, rotation)
        run = recomputed(self._hidden, self.recompute, is_split=self.is_split, store=self.store)
        return run(x, rotation)

    def _hidden(self, x: Tensor, rotation: Rotation) -> Tensor:
        if self.order == "post":
            x = self.attention_norm(x + self.attention(x, rotation))
            return self._normed_again(x + self.mlp(x))
        normed = self.attention_norm(x)
        if self.order == "pre":
            x = x + self.attention(normed, rotation)
            return x + self.mlp(self._normed_again(x))
        beside = normed if self.mlp_norm is None else self.mlp_norm(x)
        return x + self.attention(normed, rotation) + self.mlp(beside)

    def _normed_again(self, x: Tensor) -> Tensor:
        return x if self.mlp_norm is None else self.mlp_norm(x)


class Embedding(nn.Module):
    """Token embeddings, and learned positions where the model has them."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.tokens = nn.Embedding(decoder.vocab, decoder.hidden)
        self.positions = nn.Embedding(decoder.positions, decoder.hidden) if decoder.positions else None

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Hidden states of `tokens` (batch, tokens) that stand at `positions` (those that this rank
        keeps)."""
        x = self.tokens(tokens)
        return x if self.positions is None else x + self.positions(positions)


class Head(nn.Module):
    """The last norm and the output projection."""

    def __init__(self, decoder: Decoder, epsilon: float) -> None:
        super().__init__()
        last = decoder.layers[-1]
        self.norm = norm_module(last, decoder.hidden, epsilon) if decoder.final_norm else None
        self.output = nn.Linear(decoder.hidden, decoder.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(x if self.norm is None else self.norm(x))


class Stage(nn.Module):
    """Some consecutive layers of a model, with its embedding and its head where they are at its ends.

    `positions` are the places in the sequence of the tokens that this rank works on, `kept` those among them
    that its hidden states have between layers (fewer where the sequence is split over tensor ranks).
    `replicas` adds up the gradients of a stage that data ranks hold whole; `host` has what its layers keep
    for the backward pass, where that goes there.
    """

    def __init__(self, model: Model, layers: Iterable[tuple[int, Layer]]) -> None:
        super().__init__()
        self.model = model
        self.embedding: Embedding | None = None
        self.layers = nn.ModuleDict({str(index): layer for index, layer in layers})
        self.head: Head | None = None
        self.positions: Tensor | None = None
        self.kept: Tensor | None = None
        self.boundary: Boundary | None = None
        self.replicas: Replicas | None = None
        self.host: HostActivations | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Logits (or hidden states) of tokens (or hidden states); with a `boundary`, hidden states come and
        go in parts."""
        if self.boundary is not None and self.embedding is None:
            x = self.boundary.received(x)
        positions = self.places(x.shape[1])
        if self.embedding is not None:
            x = self.embedding(x, positions if self.kept is None else self.kept)
        if self.host is not None:
            self.host.begin()
        rotations: dict[Rope, tuple[Tensor, Tensor]] = {}
        for layer in self.layers.values():
            rotation = None
            if layer.rope is not None:
                if layer.rope not in rotations:
                    rotations[layer.rope] = rotation_of(layer.rope, positions)
                rotation = rotations[layer.rope]
            with nullcontext() if self.host is None else self.host.layer(layer, rotation or ()):
                x = layer(x, rotation)
        if self.head is not None:
            with nullcontext() if self.host is None else self.host.head():
                return self.head(x)
        return x if self.boundary is None else self.boundary.sent(x)

    def places(self, tokens: int) -> Tensor:
        """Where in a sequence of `tokens` this rank's tokens stand."""
        return torch.arange(tokens) if self.positions is None else self.positions

    def part(self, start: int, stop: int, *, ends: frozenset[str]) -> Stage:
        """The stage with layers `start` to `stop` of this whole model and those of its `ends` (`embedding`,
        `head`); it shares their parameters."""
        stage = Stage(self.model, ((index, self.layers[str(index)]) for index in range(start, stop)))
        if "embedding" in ends:
            stage.embedding = self.embedding
        if "head" in ends:
            stage.head = self.head
        return stage


def reference_module(model: Model) -> Stage:
    """The whole of `model`, with parameters as PyTorch's modules set them. ConfigError where a part has no
    module here."""
    decoder, numerics = decoder_of(model), numerics_of(model)
    if decoder.embedding_width != decoder.hidden or decoder.mtp_modules or decoder.logit_softcap:
        raise _no_module("end", "projected embeddings, capped logits or multi-token prediction", "plain ends")
    stage = Stage(model, ((index, Layer(shape, numerics)) for index, shape in enumerate(decoder.layers)))
    stage.embedding = Embedding(decoder)
    stage.head = Head(decoder, numerics.epsilon)
    if decoder.tied:
        stage.head.output.weight = stage.embedding.tokens.weight
    return stage


def _supported(shape: LayerShape) -> tuple[GroupedQuery, Mlp | RoutedMlp]:
    """Attention and MLP of a layer. ConfigError where one of them has no module here."""
    if not isinstance(shape.attention, GroupedQuery) or shape.attention.sinks:
        raise _no_module("attention", "latent attention or sinks", "multi-head and grouped-query attention")
    routed = shape.mlp if isinstance(shape.mlp, RoutedMlp) else None
    if routed is not None and (routed.capacity_factor is not None or routed.groups > 1 or routed.router_bias):
        raise _no_module(
            "mixture of experts", "capacity factors, groups of experts or biases", "dropless top-k routing"
        )
    if shape.order == "sandwich":
        raise _no_module("order of norms", "norms before and after each block", "norms before or after")
    return shape.attention, shape.mlp


def _no_module(what: str, found: str, allowed: str) -> ConfigError:
    return ConfigError(
        f"cannot be trained: its {what} has no module here", key="model", found=found, allowed=allowed
    )
