"""What a config says of a model beside its sizes: activations, epsilons, rotary embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardwise.errors import ConfigError
from shardwise.inputs import Fields
from shardwise.model import Model

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

_DEFAULTS: dict[str, tuple[Activation, float, float]] = {
    "gpt2": ("gelu_tanh", 1e-5, 1.0),
    "gpt_neox": ("gelu", 1e-5, 0.25),
    "llama": ("silu", 1e-6, 1.0),
    "megatron": ("gelu", 1e-5, 1.0),
    "mistral": ("silu", 1e-6, 1.0),
    "mixtral": ("silu", 1e-5, 1.0),
    "qwen2": ("silu", 1e-6, 1.0),
    "qwen3": ("silu", 1e-6, 1.0),
    "qwen3_moe": ("silu", 1e-6, 1.0),
}
"""Activation, epsilon of the norms and share of a head that is rotated, where a config of the family does not
say (the configuration files of Transformers 5; Megatron-LM for plain dimensions)."""

_THETAS = {"mixtral": 1e6}
"""Base of the rotary angles where a config of the family does not say, if not 10,000 (the same source)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embedding: the first `dims` elements of a head turn, element pair i by
    position * theta^(-2i/dims).

    `scaling` are Llama 3.1's (factor, low and high frequency factor, original length), or None.
    """

    dims: int
    theta: float
    scaling: tuple[float, float, float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    activation: Activation
    epsilon: float
    rope_share: float
    theta: float
    scaling: tuple[float, float, float, float] | None
    renormalised: bool
    """Whether the probabilities of the experts that a token takes are scaled to sum 1."""

    def rope(self, head_dim: int) -> Rope:
        return Rope(dims=int(head_dim * self.rope_share), theta=self.theta, scaling=self.scaling)


def numerics_of(model: Model) -> Numerics:
    """The numerics of `model`. ConfigError for a family, an activation or a scaling that has no module
    here."""
    if model.family not in _DEFAULTS:
        raise ConfigError(
            "cannot be trained: there is no module for this family",
            key="model",
            found=model.family,
            allowed=", ".join(_DEFAULTS),
        )
    activation, epsilon, share = _DEFAULTS[model.family]
    fields = Fields(model.config)
    rope = _rope_fields(fields)
    if model.family == "megatron" and fields.boolean("gated", default=False):
        activation = "silu"
    return Numerics(
        activation=_activation(fields, activation),
        epsilon=_first(fields, ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"), epsilon),
        rope_share=_share(fields, rope, share),
        theta=_theta(model.family, fields, rope),
        scaling=_scaling(rope),
        renormalised=model.family == "mixtral" or fields.boolean("norm_topk_prob", default=False),
    )


def _activation(fields: Fields, default: Activation) -> Activation:
    for key in ("hidden_act", "activation_function"):
        if fields.has(key):
            return _ACTIVATIONS[fields.choice(key, tuple(_ACTIVATIONS))]
    return default


def _first(fields: Fields, keys: tuple[str, ...], default: float) -> float:
    """The number under the first of `keys` that is there."""
    return next((fields.number(key, high=1e9) for key in keys if fields.has(key)), default)


def _theta(family: str, fields: Fields, rope: Fields) -> float:
    default = _first(fields, ("rope_theta", "rotary_emb_base"), _THETAS.get(family, 10_000.0))
    return rope.number("rope_theta", default=default)


def _rope_fields(fields: Fields) -> Fields:
    """The mapping that describes rotary embeddings: `rope_parameters`, or `rope_scaling` of older files."""
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(fields.any(key, default=None), Mapping):
            return fields.mapping(key)
    return Fields({})


def _share(fields: Fields, rope: Fields, default: float) -> float:
    for source, key in (
        (rope, "partial_rotary_factor"), (fields, "partial_rotary_factor"), (fields, "rotary_pct")
    ):  # fmt: skip
        if source.has(key):
            return source.number(key, low=0.0, high=1.0)
    return default


def _scaling(rope: Fields) -> tuple[float, float, float, float] | None:
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise rope.error("rope_type", "has no module here", found=kind, allowed="default, llama3")
    return (
        rope.number("factor", high=1e6),
        rope.number("low_freq_factor", high=1e6),
        rope.number("high_freq_factor", high=1e6),
        rope.number("original_max_position_embeddings", high=1e9),
    )
