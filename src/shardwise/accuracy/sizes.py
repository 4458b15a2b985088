"""The model that a measured row describes: its own sizes on the shape of its family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from shardwise.accuracy.known import catalogue_model
from shardwise.accuracy.rows import Row
from shardwise.errors import ConfigError
from shardwise.inputs import short_repr
from shardwise.model import Model, catalogue_entry, model_from_config

GATED: Final = ("llama", "qwen", "deepseek", "oss", "mistral", "mixtral", "gemma", "phi")
"""Families whose MLPs have three matrices, RMS norms, rotary positions, no biases and no dropout."""

MPT: Final = ("mpt",)
"""ALiBi, plain MLPs, no biases, no dropout, tied embeddings (MosaicML llm-foundry)."""

NEMOTRON: Final = ("nemotron",)
"""Squared-ReLU plain MLPs, rotary positions, grouped queries of 8, untied, no biases (Nemotron-4 report)."""

KIMI_K2: Final = {
    "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0,
}  # fmt: skip
"""What Kimi K2's public config changes in DeepSeek-V3's, whose architecture it has."""

DEFAULT_VOCAB: Final = 51200
"""GPT-2's vocabulary, padded as Megatron-LM pads it for eight-way tensor parallelism."""

SIZES: Final = (
    "model_name", "arch", "layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "seq_len", "experts",
    "topk",
)  # fmt: skip
"""The columns that a model is made of."""

CONFIG_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "vocab": ("vocab_size",),
    "experts": ("n_routed_experts", "num_experts", "num_local_experts"),
    "topk": ("num_experts_per_tok", "experts_per_token"),
}
"""Where a public config has what a row states of a mixture of experts."""


def model_of(row: Row) -> tuple[Model, tuple[str, ...]]:
    """The model and what was assumed. ConfigError where the row does not say enough."""
    if row.arch.casefold() == "moe" or (row.experts or 1) > 1:
        return _expert_model(row)
    if any(getattr(row, key) is None for key in ("layers", "hidden", "heads")):
        return _public_model(row)
    config, assumed = _plain_config(row)
    return model_from_config(config, name=_name(row)), tuple(assumed)


def _name(row: Row) -> str:
    return row.model_name or "model"


def _has(row: Row, words: tuple[str, ...]) -> bool:
    name = row.model_name.casefold()
    return any(word in name for word in words)


def _plain_config(row: Row) -> tuple[dict[str, Any], list[str]]:
    """The row's sizes as plain dimensions, with what its family has by custom."""
    assumed = []
    if row.vocab is None:
        assumed.append(f"vocab: {DEFAULT_VOCAB}")
    is_gated = _has(row, GATED)
    ffn = row.ffn
    if ffn is None:
        if is_gated:
            raise ConfigError("is not given, and a gated MLP has no customary width", key="ffn")
        ffn = 4 * int(row.hidden or 0)
        assumed.append("ffn: 4 * hidden")
    config: dict[str, Any] = {
        "layers": row.layers,
        "hidden": row.hidden,
        "ffn": ffn,
        "heads": row.heads,
        "kv_heads": row.kv_heads or row.heads,
        "vocab": row.vocab or DEFAULT_VOCAB,
        "seq_len": row.seq_len,
    }
    if is_gated:
        config |= {"gated": True, "norm": "rmsnorm", "positions": "rope", "bias": False, "tied": False,
                   "dropout": 0.0, "qkv_bias": _has(row, ("qwen2",))}  # fmt: skip
    elif _has(row, NEMOTRON):
        if row.kv_heads is None:
            assumed.append("kv_heads: 8")
        config |= {"positions": "rope", "bias": False, "tied": False, "dropout": 0.0,
                   "kv_heads": row.kv_heads or 8}  # fmt: skip
    elif _has(row, MPT):
        config |= {"positions": "none", "bias": False, "dropout": 0.0}
    return config, assumed


def _public_model(row: Row) -> tuple[Model, tuple[str, ...]]:
    """A dense model without sizes: that of the catalogue whose name is within its name."""
    known = catalogue_model(row.model_name)
    if known is None:
        missing = [key for key in ("layers", "hidden", "heads") if getattr(row, key) is None]
        raise ConfigError(
            f"{', '.join(missing)} not given, and the model is not a known one", key="model_name",
            found=short_repr(row.model_name),
        )  # fmt: skip
    model = model_from_config(catalogue_entry(known).config, name=_name(row))
    return model, (f"model: sizes of {known}'s public config",)


def _expert_model(row: Row) -> tuple[Model, tuple[str, ...]]:
    """A mixture of experts: from the public config of the model, with the row's own sizes; of an unknown
    model from its sizes alone."""
    name = row.model_name.casefold()
    is_kimi = "kimi" in name
    known = "deepseek-v3" if is_kimi else catalogue_model(row.model_name)
    if known is None:
        return _plain_expert_model(row)
    config: dict[str, Any] = dict(catalogue_entry(known).config)
    assumed = [f"model: what has no column is from {known}'s public config"]
    if is_kimi:
        config |= KIMI_K2
    for column, keys in CONFIG_KEYS.items():
        value = getattr(row, column)
        config |= {key: value for key in keys if key in config and value is not None}
    if "w/o mtp" in name:
        config["num_nextn_predict_layers"] = 0
    if row.layers is not None and row.layers != config.get("num_hidden_layers"):
        config["num_hidden_layers"] = row.layers
        if "first_k_dense_replace" in config:
            config["first_k_dense_replace"] = min(int(config["first_k_dense_replace"]), 1)
            config["num_nextn_predict_layers"] = 0
            assumed.append("model: truncated, so one layer is dense and there is no extra prediction module")
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][: row.layers]
    return model_from_config(config, name=_name(row)), tuple(assumed)


def _plain_expert_model(row: Row) -> tuple[Model, tuple[str, ...]]:
    """A mixture of experts that is not in the catalogue, every layer a routed one."""
    needed = ("layers", "hidden", "heads", "ffn", "experts", "topk")
    missing = [key for key in needed if getattr(row, key) is None]
    if missing:
        raise ConfigError(
            f"is not a known mixture of experts, and {', '.join(missing)} not given", key="model_name",
            found=short_repr(row.model_name),
        )  # fmt: skip
    config, assumed = _plain_config(row)
    config |= {"gated": True, "norm": "rmsnorm", "positions": "rope", "bias": False, "tied": False,
               "dropout": 0.0, "experts": row.experts, "top_k": row.topk}  # fmt: skip
    assumed.append("model: gated experts in every layer, none of them shared")
    return model_from_config(config, name=_name(row)), tuple(assumed)
