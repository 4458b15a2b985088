"""What a config says of a model beside its sizes: activations, epsilons, positions, scales, routing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from shardwise.errors import ConfigError
from shardwise.inputs import Fields
from shardwise.model import GroupedQuery, Latent, Model
from shardwise.runtime.rope import SCALINGS, Rope, Scaling, Yarn, rope_fields, scaling_of, yarn_lengths

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """How a gated MLP puts its two halves together: activated(gate) * (up + `shift`).

    With a `limit` both are cut there first (the gate only above); SiLU is x * sigmoid(`gain` * x).
    """

    activation: Activation
    gain: float = 1.0
    shift: float = 0.0
    limit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a token's experts are found, and what weighs them.

    `score` of an expert is its probability among all (`softmax`) or its own (`sigmoid`). A group of experts
    counts as much as its `best_of_group` highest together. What a token takes is `renormalised` to sum 1 or
    not, and multiplied by `scale`. With `correction` a vector that no gradient changes is added to the scores
    where experts are chosen, not where they are weighed (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalised: bool = False
    scale: float = 1.0
    best_of_group: int = 1
    correction: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """All that modules compute with and that no size tells.

    `rope_share` of each head turns. Layers with a window turn by `window_theta` and without scaling, where
    that is given. Scores are divided by the square root of `score_divisor` (None: of the elements of a key),
    multiplied by `score_factor` and kept below `score_cap`, logits below `logit_cap`, smoothly. `alibi` says
    what a head's slope is multiplied by where positions are slopes (Press et al. 2021, arXiv 2108.12409).
    Learned positions begin at row `first_position` of their table; token embeddings are multiplied by
    `embedding_scale`. `latent_epsilon` is that of the norms of latents.
    """

    activation: Activation
    epsilon: float = 1e-6
    latent_epsilon: float = 1e-6
    rope_share: float = 1.0
    theta: float = 10_000.0
    scaling: Scaling | None = None
    window_theta: float | None = None
    interleaved: bool = False
    turned_length: float = 1.0
    alibi: float | None = None
    score_divisor: float | None = None
    score_factor: float = 1.0
    score_cap: float | None = None
    logit_cap: float | None = None
    first_position: int = 0
    embedding_scale: float = 1.0
    expert_gate: Gate | None = None
    routing: Routing = field(default_factory=Routing)

    @property
    def gate(self) -> Gate:
        """Of the MLPs that every token takes."""
        return Gate(activation=self.activation)

    def rope(self, shape: GroupedQuery | Latent) -> Rope | None:
        """How queries and keys of attention of this shape turn; None where they do not."""
        if isinstance(shape, Latent):
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
            length=self.turned_length,
        )
        if self.window_theta is not None and isinstance(shape, GroupedQuery) and shape.window is not None:
            return replace(rope, theta=self.window_theta, scaling=None, length=1.0)
        return rope

    def score_scale(self, elements: int) -> float:
        """What products of queries and keys of so many `elements` are multiplied by."""
        return (self.score_divisor or elements) ** -0.5 * self.score_factor


_FAMILIES: Mapping[str, Numerics] = {
    "bloom": Numerics(activation="gelu_tanh", epsilon=1e-5, alibi=1.0),
    "deepseek_v2": Numerics(activation="silu", interleaved=True),
    "deepseek_v3": Numerics(
        activation="silu",
        interleaved=True,
        routing=Routing(
            score="sigmoid", renormalised=True, scale=2.5, best_of_group=2, correction=True
        ),
    ),
    "falcon": Numerics(activation="gelu", epsilon=1e-5),
    "gemma2": Numerics(activation="gelu_tanh", score_divisor=256.0, score_cap=50.0, logit_cap=30.0),
    "gemma3": Numerics(
        activation="gelu_tanh", theta=1e6, window_theta=1e4, score_divisor=256.0
    ),
    "gpt2": Numerics(activation="gelu_tanh", epsilon=1e-5),
    "gpt_neox": Numerics(activation="gelu", epsilon=1e-5, rope_share=0.25),
    "gpt_oss": Numerics(
        activation="silu",
        epsilon=1e-5,
        theta=150_000.0,
        expert_gate=Gate(activation="silu", gain=1.702, shift=1.0, limit=7.0),
        routing=Routing(renormalised=True),
    ),
    "llama": Numerics(activation="silu"),
    "megatron": Numerics(activation="gelu", epsilon=1e-5),
    "mistral": Numerics(activation="silu"),
    "mixtral": Numerics(activation="silu", epsilon=1e-5, theta=1e6, routing=Routing(renormalised=True)),
    "opt": Numerics(activation="relu", epsilon=1e-5, first_position=2),
    "phi3": Numerics(activation="silu", epsilon=1e-5),
    "qwen2": Numerics(activation="silu"),
    "qwen3": Numerics(activation="silu"),
    "qwen3_moe": Numerics(activation="silu"),
}  # fmt: skip
"""What holds for a family where its config does not say (the configuration and modelling files of
Transformers 5; Megatron-LM for plain dimensions)."""


def numerics_of(model: Model) -> Numerics:
    """The numerics of `model`. ConfigError for a family, an activation, a scaling or another choice that has
    no module here."""
    if model.family not in _FAMILIES:
        raise ConfigError(
            "cannot be trained: there is no module for this family",
            key="model",
            found=model.family,
            allowed=", ".join(_FAMILIES),
        )
    default = _FAMILIES[model.family]
    fields = _text_fields(Fields(model.config))
    if model.family == "megatron" and fields.boolean("gated", default=False):
        default = replace(default, activation="silu")
    _refuse_unlike(model.family, fields)
    return _with_scores(
        model,
        fields,
        replace(
            _with_rope(model, fields, default),
            activation=_activation(fields, default.activation),
            epsilon=_first(fields, ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"), default.epsilon),
            expert_gate=_expert_gate(fields, default.expert_gate),
            routing=_routing(model.family, fields, default.routing),
        ),
    )


def _text_fields(fields: Fields) -> Fields:
    """The config of the text decoder, where that of a model of several kinds of input holds it."""
    if isinstance(fields.any("text_config", default=None), Mapping):
        return fields.mapping("text_config")
    return fields


def _refuse_unlike(family: str, fields: Fields) -> None:
    """ConfigError for a choice that changes what a family computes and that no module here makes."""
    refused = {
        "bloom": "apply_residual_connection_post_layernorm",
        "deepseek_v2": "norm_topk_prob",
    }
    key = refused.get(family)
    if key is not None and fields.has(key) and fields.boolean(key):
        raise fields.error(key, "has no module here", found="true", allowed="false")


def _with_rope(model: Model, fields: Fields, default: Numerics) -> Numerics:
    """With what the config says of rotary embeddings, and of slopes in their place."""
    rope, local = rope_fields(fields), Fields({})
    if model.family == "gemma3" and rope.has("full_attention"):
        local = rope.mapping("sliding_attention", default={})
        rope = rope.mapping("full_attention")
    elif model.family == "gpt_oss" and not (fields.has("rope_parameters") or fields.has("rope_scaling")):
        rope = Fields(_GPT_OSS_YARN)
    # Phi-3's kinds are others under the same names.
    scaling = scaling_of(rope, known=() if model.family == "phi3" else SCALINGS)
    length, of_scores = yarn_lengths(rope) if isinstance(scaling, Yarn) else (1.0, 1.0)
    theta = _first(fields, ("rope_theta", "rotary_emb_base"), default.theta)
    window_theta = default.window_theta
    if window_theta is not None:
        window_theta = fields.number("rope_local_base_freq", default=window_theta)
        window_theta = local.number("rope_theta", default=window_theta)
    alibi = default.alibi
    if model.family == "falcon" and fields.boolean("alibi", default=False):
        # Falcon adds slopes before it divides scores.
        alibi = (model.hidden // model.heads) ** -0.5
    return replace(
        default,
        rope_share=_share(fields, rope, default.rope_share),
        theta=rope.number("rope_theta", default=theta),
        window_theta=window_theta,
        scaling=scaling,
        interleaved=default.interleaved and fields.boolean("rope_interleave", default=True),
        turned_length=length,
        score_factor=of_scores if model.family.startswith("deepseek") else 1.0,
        alibi=alibi,
    )


_GPT_OSS_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
"""What Transformers takes where a file is silent."""


def _with_scores(model: Model, fields: Fields, numerics: Numerics) -> Numerics:
    """With what Gemma's configs say of scores, logits and embeddings."""
    if not model.family.startswith("gemma"):
        return numerics
    return replace(
        numerics,
        score_divisor=fields.number("query_pre_attn_scalar", low=1e-6, default=numerics.score_divisor or 1.0),
        score_cap=_cap(fields, "attn_logit_softcapping", numerics.score_cap),
        logit_cap=_cap(fields, "final_logit_softcapping", numerics.logit_cap),
        embedding_scale=model.hidden**0.5,
    )


def _cap(fields: Fields, key: str, default: float | None) -> float | None:
    """A cap; none where the config has null."""
    if not fields.has(key):
        return None if key in fields.names else default
    return fields.number(key, low=1e-6, high=1e6)


def _expert_gate(fields: Fields, default: Gate | None) -> Gate | None:
    if default is None:
        return None
    return replace(
        default,
        gain=fields.number("swiglu_alpha", low=-1e6, high=1e6, default=default.gain),
        limit=fields.number("swiglu_limit", high=1e6, default=default.limit or 0.0),
    )


def _routing(family: str, fields: Fields, default: Routing) -> Routing:
    if family.startswith("deepseek"):
        scale = fields.number("routed_scaling_factor", high=1e6, default=default.scale)
        default = replace(default, scale=scale)
    if family in ("deepseek_v3", "qwen3_moe"):
        normed = fields.boolean("norm_topk_prob", default=default.renormalised)
        default = replace(default, renormalised=normed)
    return default


def _activation(fields: Fields, default: Activation) -> Activation:
    for key in ("hidden_activation", "hidden_act", "activation_function", "activation"):
        if fields.has(key):
            return _ACTIVATIONS[fields.choice(key, tuple(_ACTIVATIONS))]
    return default


def _first(fields: Fields, keys: tuple[str, ...], default: float) -> float:
    """The number under the first of `keys` that is there."""
    return next((fields.number(key, high=1e9) for key in keys if fields.has(key)), default)


def _share(fields: Fields, rope: Fields, default: float) -> float:
    for source, key in (
        (rope, "partial_rotary_factor"), (fields, "partial_rotary_factor"), (fields, "rotary_pct")
    ):  # fmt: skip
        if source.has(key):
            return source.number(key, low=0.0, high=1.0)
    return default
