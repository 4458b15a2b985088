"""Reference modules of decoder-only transformers, built from a plan's model record.

A `ModelStage` has consecutive decoder layers, and the embedding or head at the ends of the model. The whole
model (`reference_module`) is the stage with everything. Parameters have the same names in every stage, so
checkpoints are independent of the pipeline split. There is no dropout: a step depends only on samples and
parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.model import (
    AttentionShape,
    Decoder,
    LatentAttentionShape,
    LayerShape,
    Mlp,
    Model,
    RecurrentShape,
    RoutedMlp,
    decoder_of,
)
from shardwise.runtime.attention import GroupedQueryAttention, LatentAttention, PositionEncoding
from shardwise.runtime.collectives import Boundary
from shardwise.runtime.gradients import GradientReducer
from shardwise.runtime.layers import FeedForward, RmsNorm, softcapped
from shardwise.runtime.moe import MixtureOfExperts
from shardwise.runtime.numerics import Numerics, numerics_of
from shardwise.runtime.offload import ActivationOffload
from shardwise.runtime.recompute import ActivationStore, recomputed
from shardwise.runtime.rope import Rope, Rotation, rotation_of

TABLE = "embedding.tokens.weight"
"""Name of the embedding table, which tied output projections share."""


def norm_module(shape: LayerShape, width: int, epsilon: float) -> nn.Module:
    """The norm of a layer of this shape: RMSNorm or LayerNorm, the latter with or without weights."""
    if shape.norm == "rms":
        return RmsNorm(width, epsilon)
    return nn.LayerNorm(width, eps=epsilon, elementwise_affine=shape.norm == "layer")


class DecoderLayer(nn.Module):
    """One decoder layer: attention and MLP, sequential or parallel (`norm_placement`).

    `recompute` is the kind of activation recomputation. `is_split` says that input and weight gradients are
    separate backward passes. `store` is where a layer that recomputes puts its saved activations.
    """

    def __init__(self, shape: LayerShape, numerics: Numerics) -> None:
        super().__init__()
        attention, mlp = _supported(shape)
        self.norm_placement = shape.norm_placement
        self.recompute = "none"
        self.is_split = False
        self.store: ActivationStore | None = None
        self.rope = numerics.rope(attention)
        self.attention_norm = self._norm(shape, numerics)
        self.attention: GroupedQueryAttention | LatentAttention
        if isinstance(attention, LatentAttentionShape):
            self.attention = LatentAttention(attention, shape.hidden, numerics)
        else:
            self.attention = GroupedQueryAttention(attention, shape.hidden, numerics)
        has_post_norms = shape.norm_placement == "sandwich"
        self.attention_post_norm = self._norm(shape, numerics) if has_post_norms else None
        self.mlp_norm = self._norm(shape, numerics) if shape.norm_placement != "parallel_shared" else None
        self.mlp: FeedForward | MixtureOfExperts
        if isinstance(mlp, RoutedMlp):
            self.mlp = MixtureOfExperts(mlp, shape.hidden, numerics)
        else:
            self.mlp = FeedForward(mlp, shape.hidden, numerics.gate)
        self.mlp_post_norm = self._norm(shape, numerics) if has_post_norms else None

    @staticmethod
    def _norm(shape: LayerShape, numerics: Numerics) -> nn.Module:
        return norm_module(shape, shape.hidden, numerics.epsilon)

    @property
    def norms(self) -> list[nn.Module]:
        """The norms of hidden states."""
        norms = (self.attention_norm, self.attention_post_norm, self.mlp_norm, self.mlp_post_norm)
        return [norm for norm in norms if norm is not None]

    def forward(self, x: Tensor, places: PositionEncoding) -> Tensor:
        if self.recompute == "none":
            return self._hidden(x, places)
        run = recomputed(self._hidden, self.recompute, is_split=self.is_split, store=self.store)
        return run(x, places)

    def _hidden(self, x: Tensor, places: PositionEncoding) -> Tensor:
        if self.norm_placement == "post":
            x = self.attention_norm(x + self.attention(x, places))
            return _apply_norm(self.mlp_norm, x + self.mlp(x))
        normed = self.attention_norm(x)
        if self.norm_placement.startswith("parallel"):
            mlp_input = normed if self.mlp_norm is None else self.mlp_norm(x)
            return x + self.attention(normed, places) + self.mlp(mlp_input)
        x = x + _apply_norm(self.attention_post_norm, self.attention(normed, places))
        return x + _apply_norm(self.mlp_post_norm, self.mlp(_apply_norm(self.mlp_norm, x)))


def _tensors(places: PositionEncoding) -> tuple[Tensor, ...]:
    if isinstance(places, Rotation):
        return places.cos, places.sin
    return () if places is None else (places,)


def _apply_norm(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


class Embedding(nn.Module):
    """Token embeddings, with their projection to the hidden size, learned positions and a norm if the model
    has them."""

    def __init__(self, decoder: Decoder, numerics: Numerics) -> None:
        super().__init__()
        self.scale = decoder.hidden**0.5 if numerics.are_scaled else 1.0
        self.first_position = numerics.first_position
        self.tokens = nn.Embedding(decoder.vocab, decoder.embedding_width)
        is_narrow = decoder.embedding_width != decoder.hidden
        self.project = nn.Linear(decoder.embedding_width, decoder.hidden, bias=False) if is_narrow else None
        self.positions = nn.Embedding(decoder.positions, decoder.hidden) if decoder.positions else None
        self.norm: nn.Module | None = None
        if decoder.embedding_norm:
            self.norm = norm_module(decoder.layers[0], decoder.hidden, numerics.epsilon)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Hidden states of `tokens` (batch, tokens) at `positions`, those of the hidden states on this
        rank."""
        x = self.tokens(tokens)
        if self.scale != 1.0:
            x = x * self.scale
        if self.project is not None:
            x = self.project(x)
        if self.positions is not None:
            x = x + self.positions(positions + self.first_position)
        return _apply_norm(self.norm, x)


class Head(nn.Module):
    """Final norm, projection to the embedding width and output projection, with a soft-cap of the logits if
    the model has one."""

    def __init__(self, decoder: Decoder, numerics: Numerics) -> None:
        super().__init__()
        last, width = decoder.layers[-1], decoder.embedding_width
        self.norm = norm_module(last, decoder.hidden, numerics.epsilon) if decoder.final_norm else None
        self.project = nn.Linear(decoder.hidden, width, bias=False) if width != decoder.hidden else None
        self.output = nn.Linear(width, decoder.vocab, bias=False)
        self.cap = numerics.logit_cap

    def forward(self, x: Tensor) -> Tensor:
        x = _apply_norm(self.norm, x)
        logits = self.output(x if self.project is None else self.project(x))
        return logits if self.cap is None else softcapped(logits, self.cap)


class ModelStage(nn.Module):
    """Consecutive layers of a model, with the embedding or head at its ends.

    `positions` are the sequence positions of this rank's tokens. `hidden_positions` are those of its hidden
    states between layers, which are fewer with sequence parallelism. `boundary` splits hidden states between
    stages over tensor-parallel ranks, `replicas` reduces gradients of replicated weights, and `host` offloads
    saved activations.
    """

    def __init__(self, model: Model, layers: Iterable[tuple[int, DecoderLayer]]) -> None:
        super().__init__()
        self.model = model
        self.embedding: Embedding | None = None
        self.layers = nn.ModuleDict({str(index): layer for index, layer in layers})
        self.head: Head | None = None
        self.positions: Tensor | None = None
        self.hidden_positions: Tensor | None = None
        self.boundary: Boundary | None = None
        self.replicas: GradientReducer | None = None
        self.host: ActivationOffload | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Logits (or hidden states) of tokens (or hidden states). With a `boundary`, hidden states enter and
        leave as shards."""
        if self.boundary is not None and self.embedding is None:
            x = self.boundary.received(x)
        positions = self.places(x.shape[1])
        if self.embedding is not None:
            x = self.embedding(x, positions if self.hidden_positions is None else self.hidden_positions)
        if self.host is not None:
            self.host.begin()
        rotations: dict[Rope, Rotation] = {}
        for layer in self.layers.values():
            places: PositionEncoding = None
            if layer.rope is not None:
                if layer.rope not in rotations:
                    rotations[layer.rope] = rotation_of(layer.rope, positions)
                places = rotations[layer.rope]
            elif layer.attention.slopes:
                places = positions
            with nullcontext() if self.host is None else self.host.layer(layer, _tensors(places)):
                x = layer(x, places)
        if self.head is not None:
            with nullcontext() if self.host is None else self.host.head():
                return self.head(x)
        return x if self.boundary is None else self.boundary.sent(x)

    def places(self, tokens: int) -> Tensor:
        """Positions of this rank's tokens in a sequence of `tokens`."""
        return torch.arange(tokens) if self.positions is None else self.positions

    def part(self, start: int, stop: int, *, end_modules: frozenset[str]) -> ModelStage:
        """The stage with layers `start` to `stop` of this whole model, and its `end_modules` (`embedding`,
        `head`). It shares their parameters, except that a tied output projection without the embedding is a
        copy."""
        stage = ModelStage(self.model, ((index, self.layers[str(index)]) for index in range(start, stop)))
        if "embedding" in end_modules:
            stage.embedding = self.embedding
        if "head" in end_modules and self.head is not None:
            stage.head = self.head
            if self.model.tied_embeddings and stage.embedding is None:
                stage.head.output.weight = nn.Parameter(stage.head.output.weight.detach().clone())
        return stage


def reference_module(model: Model) -> ModelStage:
    """The module of the whole `model`, with PyTorch's default initial values. ConfigError if a part of the
    model is not supported."""
    decoder, numerics = decoder_of(model), numerics_of(model)
    if decoder.mtp_modules:
        raise _no_module("head", f"{decoder.mtp_modules} multi-token-prediction modules", "none (0)")
    stage = ModelStage(
        model, ((index, DecoderLayer(shape, numerics)) for index, shape in enumerate(decoder.layers))
    )
    stage.embedding = Embedding(decoder, numerics)
    stage.head = Head(decoder, numerics)
    if decoder.tied:
        stage.head.output.weight = stage.embedding.tokens.weight
    return stage


def _supported(shape: LayerShape) -> tuple[AttentionShape, Mlp | RoutedMlp]:
    """The two halves of the layer. ConfigError if it has a part that is not supported."""
    if (
        shape.attention is None
        or shape.mlp is None
        or shape.mixer is not None
        or isinstance(shape.attention, RecurrentShape)
    ):
        raise _no_module("layer", "one without attention or without an MLP", "attention and an MLP")
    if isinstance(shape.mlp, RoutedMlp) and shape.mlp.capacity_factor is not None:
        raise _no_module("mixture of experts", "a capacity factor", "dropless top-k routing")
    return shape.attention, shape.mlp


def _no_module(what: str, found: str, allowed: str) -> ConfigError:
    return ConfigError(
        f"cannot be trained: its {what} is not supported", key="model", found=found, allowed=allowed
    )


def checked_stage(module: nn.Module, model: Model) -> ModelStage:
    """`module`, if it is the whole `model`; else ConfigError."""
    if not isinstance(module, ModelStage) or module.embedding is None or module.head is None:
        raise ConfigError(
            "is not a whole reference module",
            key="module",
            found=type(module).__name__,
            allowed="reference_module(plan.model)",
        )
    if module.model != model:
        raise ConfigError(
            "is not the plan's model", key="module", found=module.model.name, allowed=model.name
        )
    return module
