"""A model under the names of TorchTitan's configurations: `TitanModel`, built from a plan's model or from
what TorchTitan read (`torchtitan_code` writes it as Python)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeVar

from shardwise.errors import ConfigError
from shardwise.model import (
    Decoder,
    GroupedQueryAttentionShape,
    LayerShape,
    Mlp,
    Model,
    RoutedMlp,
    decoder_config,
    decoder_of,
)
from shardwise.strategy import target_of
from shardwise.targets.writing import refusal as refusal_of

TORCHTITAN = "torchtitan-0.3"

MODULES = {
    "llama": "llama3",
    "mistral": "llama3",
    "mixtral": "qwen3",
    "qwen2": "qwen3",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
}
"""Families of models, and the module of TorchTitan (`torchtitan/models`) with such layers."""

_EPSILON = {"mixtral": 1e-5}
"""Default of Transformers for `rms_norm_eps`, where it is not 1e-6."""

_ROTARY_BASE = {"mixtral": 1e6}
"""Default of Transformers for `rope_theta`, where it is not 10,000."""

Found = TypeVar("Found")

Scaling = tuple[float, float, float, int]
"""Llama 3's scaling of rotary embeddings: factor, low and high frequency factor, original positions."""

NORMALIZED_BY_DEFAULT = ("mixtral",)
"""Families whose expert weights always sum to one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TitanExperts:
    """Routed experts. `pattern` has 1 for layers with experts and 0 for dense layers. With `route_norm` the
    weights of a token's experts sum to one."""

    num_experts: int
    top_k: int
    hidden_dim: int
    pattern: tuple[int, ...]
    route_norm: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TitanModel:
    """A decoder under the names of TorchTitan's configurations.

    `module` is the module of TorchTitan with such layers. `ffn_hidden_dim` is the width of dense MLPs (None:
    all layers have experts). `max_seq_len` is the number of positions of the rotary embeddings.
    """

    module: str
    layers: int
    dim: int
    vocab_size: int
    enable_weight_tying: bool
    n_heads: int
    n_kv_heads: int
    head_dim: int
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    init_std: float
    theta: float
    scaling: Scaling | None
    max_seq_len: int
    ffn_hidden_dim: int | None
    experts: TitanExperts | None


def check_titan_model(model: Model, seq_len: int) -> None:
    """Raise ConfigError, with the key of the plan file, where the model cannot be exported to TorchTitan for
    sequences of this length."""
    titan_model(model, seq_len=seq_len)


def titan_model(model: Model, *, seq_len: int) -> TitanModel:
    """The model under TorchTitan's names, for sequences of `seq_len`. Raises ConfigError where it cannot be
    exported."""
    if model.family not in MODULES:
        raise _refusal("model.config.model_type", model.family, ", ".join(MODULES))
    for part in model.special_parts:
        raise _refusal("model.config", part, "models without it")
    decoder = decoder_of(model)
    config = {key: value for key, value in decoder_config(model).items() if value is not None}
    attention = _attention(decoder, seq_len)
    mlps = {shape.mlp for shape in decoder.layers}
    dense = _one({mlp for mlp in mlps if isinstance(mlp, Mlp)}, "dense MLPs")
    routed = _one({mlp for mlp in mlps if isinstance(mlp, RoutedMlp)}, "layers of experts")
    _check_computation(config, attention)
    module = MODULES[model.family]
    theta, scaling = _rotary(model.family, config, module)
    return TitanModel(
        module=module,
        layers=len(decoder.layers),
        dim=decoder.hidden,
        vocab_size=decoder.vocab,
        enable_weight_tying=decoder.tied,
        n_heads=attention.heads,
        n_kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        qkv_bias=attention.qkv_bias,
        qk_norm=attention.qk_norm,
        norm_eps=_number(config, "rms_norm_eps", _EPSILON.get(model.family, 1e-6)),
        init_std=_number(config, "initializer_range", 0.02),
        theta=theta,
        scaling=scaling,
        max_seq_len=max(decoder.max_seq_len or 0, seq_len),
        ffn_hidden_dim=dense.ffn if dense else None,
        experts=None if routed is None else _experts(model.family, config, decoder.layers, routed),
    )


def _refusal(key: str, found: object, allowed: str) -> ConfigError:
    return refusal_of(target_of(TORCHTITAN), key, found, allowed)


def _one(found: set[Found], what: str) -> Found | None:
    if len(found) > 1:
        raise _refusal("model.config", f"{len(found)} kinds of {what}", "one kind")
    return next(iter(found), None)


def _attention(decoder: Decoder, seq_len: int) -> GroupedQueryAttentionShape:
    """The sizes of the attention that all layers share."""
    shapes = [shape.attention for shape in decoder.layers]
    plain = [shape for shape in shapes if isinstance(shape, GroupedQueryAttentionShape)]
    if len(plain) < len(shapes) or any(shape.sinks or shape.softcap for shape in plain):
        raise _refusal("model.config", "latent attention, a soft cap or sinks", "grouped-query attention")
    for shape in plain:
        if shape.window is not None and shape.window < seq_len:
            raise _refusal(
                "model.config.sliding_window", shape.window, f"none, or at least the sequence of {seq_len}"
            )
    return plain[0]


def _check_computation(config: Mapping[str, Any], attention: GroupedQueryAttentionShape) -> None:
    """ConfigError for settings of the model that change what TorchTitan's layers compute."""
    if (found := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise _refusal("model.config.hidden_act", found, "silu")
    if dropout := _number(config, "attention_dropout", 0.0):
        raise _refusal("model.config.attention_dropout", dropout, "0, because TorchTitan has no dropout")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key, False) and (key == "mlp_bias" or attention.out_bias):
            raise _refusal(f"model.config.{key}", True, "biases on queries, keys and values alone")


def _rotary(family: str, config: Mapping[str, Any], module: str) -> tuple[float, Scaling | None]:
    """Base of rotary embeddings, and Llama 3's scaling."""
    scaling = config.get("rope_scaling") or {}
    given = {**(config.get("rope_parameters") or {}), **scaling}
    base = _number({**given, **config}, "rope_theta", _ROTARY_BASE.get(family, 1e4))
    if (share := _number({**given, **config}, "partial_rotary_factor", 1.0)) != 1.0:
        raise _refusal("model.config.partial_rotary_factor", share, "1")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return base, None
    key = f"model.config.{'rope_scaling' if scaling else 'rope_parameters'}"
    if kind != "llama3" or module != "llama3":
        raise _refusal(key, kind, "default; llama3 for the families llama and mistral")
    return base, (
        _number(given, "factor", 8.0),
        _number(given, "low_freq_factor", 1.0),
        _number(given, "high_freq_factor", 4.0),
        int(_number(given, "original_max_position_embeddings", 8192)),
    )


def _experts(
    family: str, config: Mapping[str, Any], layers: tuple[LayerShape, ...], routed: RoutedMlp
) -> TitanExperts:
    if routed.groups > 1 or routed.router_bias or routed.shared is not None:
        raise _refusal("model.config", "shared experts, groups of them, or a bias of the router", "none")
    return TitanExperts(
        num_experts=routed.experts,
        top_k=routed.top_k,
        hidden_dim=routed.expert.ffn,
        pattern=tuple(int(isinstance(shape.mlp, RoutedMlp)) for shape in layers),
        route_norm=family in NORMALIZED_BY_DEFAULT or bool(config.get("norm_topk_prob", False)),
    )


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    found = config.get(key, default)
    if isinstance(found, bool) or not isinstance(found, int | float) or not isfinite(found):
        raise _refusal(f"model.config.{key}", found, "a finite number")
    return float(found)
