"""Numerics of a model family: activation, epsilons, position encoding, scales, soft-caps and routing.

`numerics_of` reads them from a model's family and config (`_FAMILIES` has the defaults); modules take them
from one `Numerics` record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from shardwise.errors import ConfigError
from shardwise.inputs import Fields
from shardwise.model import GroupedQueryAttentionShape, LatentAttentionShape, Model, decoder_config
from shardwise.runtime.rope import (
    SCALINGS,
    Rope,
    Scaling,
    YarnScaling,
    rope_fields,
    scaling_of,
    yarn_attention_factors,
)

# The record

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Gated activation of an MLP: activation(gate) * (up + `shift`).

    With a `limit`, both halves are clamped first (the gate only from above). SiLU is x * sigmoid(`gain` * x).
    """

    activation: Activation
    gain: float = 1.0
    shift: float = 0.0
    limit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How experts are chosen and weighted.

    `score` of an expert is its probability among all experts (`softmax`) or its own (`sigmoid`). A group of
    experts is scored by the sum of its `best_of_group` highest. Weights are `renormalised` to sum 1 or not,
    and multiplied by `scale`. With `correction`, a bias without gradient is added to the scores for the
    choice of experts, but not to their weights (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalised: bool = False
    scale: float = 1.0
    best_of_group: int = 1
    correction: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """Numerics of a model that do not follow from its sizes.

    - Rotary embedding: `rope_share` is the rotated share of each head. Layers with a window use
      `window_theta` without scaling if it is given.
    - Scores are divided by sqrt(`score_divisor`) (None: the head's width), multiplied by `score_factor` and
      soft-capped at `score_cap`; logits are soft-capped at `logit_cap`.
    - `alibi` multiplies the slopes of heads (Press et al. 2021, arXiv 2108.12409).
    - Learned positions start at row `first_position` of their table. Token embeddings are multiplied by the
      square root of the hidden size if `are_scaled`. `latent_epsilon` is that of the norms of latents.
    """

    activation: Activation
    epsilon: float = 1e-6
    latent_epsilon: float = 1e-6
    rope_share: float = 1.0
    theta: float = 10_000.0
    scaling: Scaling | None = None
    window_theta: float | None = None
    interleaved: bool = False
    rope_attention_factor: float = 1.0
    alibi: float | None = None
    score_divisor: float | None = None
    score_factor: float = 1.0
    score_cap: float | None = None
    logit_cap: float | None = None
    first_position: int = 0
    are_scaled: bool = False
    expert_gate: Gate | None = None
    routing: Routing = field(default_factory=Routing)

    @property
    def gate(self) -> Gate:
        """Gated activation of dense MLPs."""
        return Gate(activation=self.activation)

    def rope(self, shape: GroupedQueryAttentionShape | LatentAttentionShape) -> Rope | None:
        """Rotary embedding for this shape of attention, None if it has none."""
        if isinstance(shape, LatentAttentionShape):
            dims = shape.rope_dim
        elif shape.rotary:
            dims = int(shape.head_dim * self.rope_share)
        else:
            return None
        rope = Rope(
            dims=dims,
            theta=self.theta,
            scaling=self.scaling,
            interleaved=self.interleaved,
            length=self.rope_attention_factor,
        )
        if (
            self.window_theta is not None
            and isinstance(shape, GroupedQueryAttentionShape)
            and shape.window is not None
        ):
            return replace(rope, theta=self.window_theta, scaling=None, length=1.0)
        return rope

    def score_scale(self, elements: int) -> float:
        """Factor of query-key products for heads of width `elements`."""
        return (self.score_divisor or elements) ** -0.5 * self.score_factor


# Families and configs

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """Defaults of a family and how its config is read.

    `scalings` are the supported kinds of RoPE scaling; `rope` is the default RoPE config. With
    `scales_scores`, YaRN also scales the attention scores. `is_normed` says that `norm_topk_prob` is read.
    `refused` is a key that must not be true. With `divides_slopes`, ALiBi slopes are divided by the square
    root of the head width.
    """

    numerics: Numerics
    scalings: tuple[str, ...] = SCALINGS
    rope: Mapping[str, object] = field(default_factory=dict)
    scales_scores: bool = False
    is_normed: bool = False
    refused: str | None = None
    divides_slopes: bool = False


_SILU = _Family(numerics=Numerics(activation="silu"))

_FAMILIES: Mapping[str, _Family] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _SILU),
    "bloom": _Family(
        numerics=Numerics(activation="gelu_tanh", epsilon=1e-5, alibi=1.0),
        refused="apply_residual_connection_post_layernorm",
    ),
    "deepseek_v2": _Family(
        numerics=Numerics(activation="silu", interleaved=True), scales_scores=True, refused="norm_topk_prob"
    ),
    "deepseek_v3": _Family(
        numerics=Numerics(
            activation="silu",
            interleaved=True,
            routing=Routing(
                score="sigmoid", renormalised=True, scale=2.5, best_of_group=2, correction=True
            ),
        ),
        scales_scores=True,
        is_normed=True,
    ),
    "falcon": _Family(numerics=Numerics(activation="gelu", epsilon=1e-5), divides_slopes=True),
    "gemma2": _Family(
        numerics=Numerics(
            activation="gelu_tanh", score_divisor=256.0, score_cap=50.0, logit_cap=30.0, are_scaled=True
        )
    ),
    "gemma3": _Family(
        numerics=Numerics(
            activation="gelu_tanh", theta=1e6, window_theta=1e4, score_divisor=256.0, are_scaled=True
        )
    ),
    "gpt2": _Family(numerics=Numerics(activation="gelu_tanh", epsilon=1e-5)),
    "gpt_neox": _Family(numerics=Numerics(activation="gelu", epsilon=1e-5, rope_share=0.25)),
    "gpt_oss": _Family(
        numerics=Numerics(
            activation="silu",
            epsilon=1e-5,
            theta=150_000.0,
            expert_gate=Gate(activation="silu", gain=1.702, shift=1.0, limit=7.0),
            routing=Routing(renormalised=True),
        ),
        rope={
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    "megatron": _Family(numerics=Numerics(activation="gelu", epsilon=1e-5)),
    "mixtral": _Family(
        numerics=Numerics(activation="silu", epsilon=1e-5, theta=1e6, routing=Routing(renormalised=True))
    ),
    "opt": _Family(numerics=Numerics(activation="relu", epsilon=1e-5, first_position=2)),
    "phi3": _Family(numerics=Numerics(activation="silu", epsilon=1e-5), scalings=()),
    "qwen3_moe": _Family(numerics=Numerics(activation="silu"), is_normed=True),
}  # fmt: skip
"""Defaults from the configuration and modelling files of Transformers 5, and from Megatron-LM for plain
dimensions."""


def numerics_of(model: Model) -> Numerics:
    """The numerics of `model`. ConfigError for a family, activation, RoPE scaling or option that is not
    supported."""
    if model.family not in _FAMILIES:
        raise ConfigError(
            "cannot be trained: this family is not supported",
            key="model",
            found=model.family,
            allowed=", ".join(_FAMILIES),
        )
    family, fields = _FAMILIES[model.family], Fields(decoder_config(model))
    if family.refused is not None and fields.boolean(family.refused, default=False):
        raise fields.error(family.refused, "is not supported by the runtime", found="true", allowed="false")
    default = family.numerics
    epsilons = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps")
    slopes = default.alibi
    if family.divides_slopes and fields.boolean("alibi", default=False):
        slopes = (model.hidden // model.heads) ** -0.5
    return replace(
        _with_rope(family, fields),
        activation=_activation(fields, default.activation),
        epsilon=_first(fields, epsilons, default.epsilon),
        alibi=slopes,
        score_divisor=_optional(fields, "query_pre_attn_scalar", default.score_divisor),
        score_cap=_optional(fields, "attn_logit_softcapping", default.score_cap),
        logit_cap=_optional(fields, "final_logit_softcapping", default.logit_cap),
        expert_gate=_expert_gate(fields, default.expert_gate),
        routing=_routing(family, fields),
    )


def _with_rope(family: _Family, fields: Fields) -> Numerics:
    """The family's numerics with the RoPE settings of the config, also with separate settings for windowed
    layers."""
    default, rope, local = family.numerics, rope_fields(fields, family.rope), Fields({})
    if rope.has("full_attention"):
        local = rope.mapping("sliding_attention", default={})
        rope = rope.mapping("full_attention")
    scaling = scaling_of(rope, known=family.scalings)
    length, of_scores = yarn_attention_factors(rope) if isinstance(scaling, YarnScaling) else (1.0, 1.0)
    window_theta = default.window_theta
    if window_theta is not None:
        window_theta = fields.number("rope_local_base_freq", default=window_theta)
        window_theta = local.number("rope_theta", default=window_theta)
    theta = _first(fields, ("rope_theta", "rotary_emb_base"), default.theta)
    return replace(
        default,
        rope_share=_share(fields, rope, default.rope_share),
        theta=rope.number("rope_theta", default=theta),
        window_theta=window_theta,
        scaling=scaling,
        interleaved=default.interleaved and fields.boolean("rope_interleave", default=True),
        rope_attention_factor=length,
        score_factor=of_scores if family.scales_scores else 1.0,
    )


def _share(fields: Fields, rope: Fields, default: float) -> float:
    for source, key in (
        (rope, "partial_rotary_factor"), (fields, "partial_rotary_factor"), (fields, "rotary_pct")
    ):  # fmt: skip
        if source.has(key):
            return source.number(key, low=0.0, high=1.0)
    return default


def _optional(fields: Fields, key: str, default: float | None) -> float | None:
    """A positive number, or None if the config has null."""
    if not fields.has(key):
        return None if key in fields.names else default
    return fields.number(key, low=1e-6, high=1e6)


def _expert_gate(fields: Fields, default: Gate | None) -> Gate | None:
    if default is None:
        return None
    return replace(
        default,
        gain=fields.number("swiglu_alpha", low=-1e6, high=1e6, default=default.gain),
        limit=_optional(fields, "swiglu_limit", default.limit),
    )


def _routing(family: _Family, fields: Fields) -> Routing:
    default = family.numerics.routing
    normed = default.renormalised
    if family.is_normed:
        normed = fields.boolean("norm_topk_prob", default=normed)
    scale = fields.number("routed_scaling_factor", high=1e6, default=default.scale)
    return replace(default, renormalised=normed, scale=scale)


def _activation(fields: Fields, default: Activation) -> Activation:
    if fields.has("gated") and fields.boolean("gated"):
        return "silu"  # plain dimensions do not name an activation
    for key in ("hidden_activation", "hidden_act", "activation_function", "activation"):
        if fields.has(key):
            return _ACTIVATIONS[fields.choice(key, tuple(_ACTIVATIONS))]
    return default


def _first(fields: Fields, keys: tuple[str, ...], default: float) -> float:
    """The number of the first of `keys` that the config has."""
    return next((fields.number(key, high=1e9) for key in keys if fields.has(key)), default)
