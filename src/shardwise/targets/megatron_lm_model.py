"""A model under the names of Megatron-LM's arguments: `MegatronModel`, built from a plan's model or from
read-back arguments. `model_flags` writes its flags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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

TARGET = "megatron-lm-0.19"

Found = TypeVar("Found")

FAMILIES = ("gpt2", "llama", "megatron", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Families of models that Megatron-LM's flags describe exactly."""

_GATED = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")

_EPSILON = {"llama": 1e-6, "mistral": 1e-6, "mixtral": 1e-5, "qwen2": 1e-6, "qwen3": 1e-6, "qwen3_moe": 1e-6}
"""Default of Transformers for `rms_norm_eps`."""

_ROTARY_BASE = {"mixtral": 1e6}
"""Default of Transformers for `rope_theta`, where it is not 10,000."""

_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")

LLAMA3_SCALING = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
"""Constants of Megatron-LM's `--use-rope-scaling` (`rotary_pos_embedding.py`); its factor is a flag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronExperts:
    """Routed experts. `pattern` has 1 for layers with experts and 0 for dense layers."""

    num_experts: int
    moe_router_topk: int
    moe_ffn_hidden_size: int
    pattern: tuple[int, ...]
    moe_shared_expert_intermediate_size: int | None
    moe_router_pre_softmax: bool
    moe_token_dispatcher_type: str = "alltoall"


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronModel:
    """A GPT model under the names of Megatron-LM's arguments.

    `exact_gelu` is true for the exact GELU, false for its tanh approximation (that of the fused kernel).
    `window` is the number of keys of a query in the layers whose `window_pattern` is 1; it is None where it
    is not below the sequence length. `rope_scaling_factor` is None without scaling.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    padded_vocab_size: int
    untie_embeddings_and_output_weights: bool
    max_position_embeddings: int
    position_embedding_type: str
    rotary_base: int | None
    rotary_percent: float | None
    rope_scaling_factor: float | None
    normalization: str
    norm_epsilon: float
    qk_layernorm: bool
    swiglu: bool
    exact_gelu: bool
    add_bias_linear: bool
    add_qkv_bias: bool
    attention_dropout: float
    hidden_dropout: float
    init_method_std: float
    window: int | None
    window_pattern: tuple[int, ...] | None
    experts: MegatronExperts | None


def check_model(model: Model, seq_len: int) -> None:
    """Raise ConfigError, with the key of the plan file, where the model cannot be exported to Megatron-LM
    for sequences of this length."""
    megatron_model(model, seq_len=seq_len)


def megatron_model(model: Model, *, seq_len: int) -> MegatronModel:
    """The model under Megatron-LM's names, for sequences of `seq_len`. Raises ConfigError where it cannot
    be exported."""
    if model.family not in FAMILIES:
        raise refusal("model.config.model_type", model.family, ", ".join(FAMILIES))
    for part in model.special_parts:
        raise refusal("model.config", part, "models without it")
    decoder = decoder_of(model)
    config = {key: value for key, value in decoder_config(model).items() if value is not None}
    shapes = set(decoder.layers)
    attention = _attention(decoder)
    dense = _one({shape.mlp for shape in shapes if isinstance(shape.mlp, Mlp)}, "dense MLPs")
    routed = _one({shape.mlp for shape in shapes if isinstance(shape.mlp, RoutedMlp)}, "layers of experts")
    has_bias, has_qkv_bias = _biases(attention, dense, routed)
    window, pattern = _window(decoder.layers, seq_len)
    swiglu, exact_gelu = _activation(model.family, config, dense, routed)
    attention_dropout, hidden_dropout = _dropouts(model.family, config)
    base, percent, scaling = _rotary(model.family, config) if attention.rotary else (None, None, None)
    kind = "rope" if attention.rotary else "learned_absolute" if decoder.positions else "none"
    if decoder.positions and seq_len > decoder.positions:
        raise refusal("job.seq_len", seq_len, f"at most {decoder.positions}, the learned positions")
    return MegatronModel(
        num_layers=len(decoder.layers),
        hidden_size=decoder.hidden,
        ffn_hidden_size=dense.ffn if dense else routed.expert.ffn if routed else 0,
        num_attention_heads=attention.heads,
        num_query_groups=attention.kv_heads,
        kv_channels=attention.head_dim,
        padded_vocab_size=decoder.vocab,
        untie_embeddings_and_output_weights=not decoder.tied,
        max_position_embeddings=decoder.positions or max(decoder.max_seq_len or 0, seq_len),
        position_embedding_type=kind,
        rotary_base=base,
        rotary_percent=percent,
        rope_scaling_factor=scaling,
        normalization="RMSNorm" if decoder.layers[0].norm == "rms" else "LayerNorm",
        norm_epsilon=_epsilon(model.family, config),
        qk_layernorm=attention.qk_norm,
        swiglu=swiglu,
        exact_gelu=exact_gelu,
        add_bias_linear=has_bias,
        add_qkv_bias=has_qkv_bias,
        attention_dropout=attention_dropout,
        hidden_dropout=hidden_dropout,
        init_method_std=_number(config, "initializer_range", 0.02),
        window=window,
        window_pattern=pattern,
        experts=None if routed is None else _experts(model.family, config, decoder, routed),
    )


def refusal(key: str, found: object, allowed: str) -> ConfigError:
    """The error for a value of the model that cannot be exported, with its key in the plan file."""
    return refusal_of(target_of(TARGET), key, found, allowed)


def _one(found: set[Found], what: str) -> Found | None:
    if len(found) > 1:
        raise refusal("model.config", f"{len(found)} kinds of {what}", "one kind")
    return next(iter(found), None)


def _attention(decoder: Decoder) -> GroupedQueryAttentionShape:
    """The sizes of the attention that all layers share, windows excepted."""
    shape = decoder.layers[0].attention
    if not isinstance(shape, GroupedQueryAttentionShape) or shape.sinks or shape.softcap:
        raise refusal("model.config", "latent attention, a soft cap or sinks", "grouped-query attention")
    return shape


def _biases(
    attention: GroupedQueryAttentionShape, dense: Mlp | None, routed: RoutedMlp | None
) -> tuple[bool, bool]:
    """Whether all linear layers have a bias, and whether queries, keys and values have one."""
    mlps = [mlp for mlp in (dense, *((routed.expert, routed.shared) if routed else ())) if mlp is not None]
    rest = {attention.out_bias, *(mlp.bias for mlp in mlps)}
    if len(rest) > 1 or (rest == {True} and not attention.qkv_bias):
        raise refusal(
            "model.config", "biases on only some linear layers",
            "biases on all of them, on none, or only on queries, keys and values",
        )  # fmt: skip
    has_bias = rest == {True}
    if has_bias and routed is not None:
        raise refusal("model.config.bias", True, "false with experts, because the router would have one")
    return has_bias, attention.qkv_bias


def _window(layers: tuple[LayerShape, ...], seq_len: int) -> tuple[int | None, tuple[int, ...] | None]:
    """The window where it is below the sequence length, and which layers have it."""
    windows = [
        shape.attention.window for shape in layers if isinstance(shape.attention, GroupedQueryAttentionShape)
    ]
    limited = [window is not None and window < seq_len for window in windows]
    window = _one(
        {width for width, is_limited in zip(windows, limited, strict=True) if is_limited}, "windows"
    )
    return window, tuple(map(int, limited)) if window is not None else None


def _activation(
    family: str, config: Mapping[str, Any], dense: Mlp | None, routed: RoutedMlp | None
) -> tuple[bool, bool]:
    """Whether MLPs are gated by SiLU, and whether they use the exact GELU."""
    if family == "megatron":
        mlp = dense or (routed.expert if routed else None)
        is_gated = mlp is not None and mlp.gated
        # Without biases Megatron-LM has no fused kernel, and so no approximation.
        return is_gated, not is_gated and mlp is not None and not mlp.bias
    if family in _GATED:
        if (found := config.get("hidden_act", "silu")) not in ("silu", "swish"):
            raise refusal("model.config.hidden_act", found, "silu")
        return True, False
    found = config.get("activation_function", "gelu_new")
    if found != "gelu" and found not in _TANH_GELU:
        raise refusal("model.config.activation_function", found, ", ".join(("gelu", *_TANH_GELU)))
    return False, found == "gelu"


def _dropouts(family: str, config: Mapping[str, Any]) -> tuple[float, float]:
    """Dropout of attention, and of the hidden states."""
    if family == "megatron":
        both = _number(config, "dropout", 0.1)
        return both, both
    if family in _GATED:
        return _number(config, "attention_dropout", 0.0), 0.0
    for key, plain in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if config.get(key, plain) != plain:
            raise refusal(f"model.config.{key}", config[key], str(plain).lower())
    hidden, embedding = _number(config, "resid_pdrop", 0.1), _number(config, "embd_pdrop", 0.1)
    if hidden != embedding:
        raise refusal("model.config.embd_pdrop", embedding, f"{hidden:g}, as resid_pdrop")
    return _number(config, "attn_pdrop", 0.1), hidden


def _rotary(family: str, config: Mapping[str, Any]) -> tuple[int, float, float | None]:
    """Base and share of rotary embeddings, and the factor of Llama 3's scaling."""
    scaling = config.get("rope_scaling") or {}
    given = {**(config.get("rope_parameters") or {}), **scaling}
    base = _number({**given, **config}, "rope_theta", _ROTARY_BASE.get(family, 1e4))
    if not base.is_integer():
        raise refusal("model.config.rope_theta", base, "a whole number")
    percent = _number({**given, **config}, "partial_rotary_factor", 1.0)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return int(base), percent, None
    key = f"model.config.{'rope_scaling' if scaling else 'rope_parameters'}"
    if kind != "llama3":
        raise refusal(key, kind, "default, llama3")
    for name, value in LLAMA3_SCALING.items():
        if given.get(name) != value:
            raise refusal(f"{key}.{name}", given.get(name), str(value))
    return int(base), percent, _number(given, "factor", 8.0)


def _epsilon(family: str, config: Mapping[str, Any]) -> float:
    if family == "gpt2":
        return _number(config, "layer_norm_epsilon", 1e-5)
    return _number(config, "rms_norm_eps", _EPSILON[family]) if family in _GATED else 1e-5


def _experts(family: str, config: Mapping[str, Any], decoder: Decoder, routed: RoutedMlp) -> MegatronExperts:
    """The routed experts under Megatron-LM's names. With softmax before the top-k the expert weights stay
    as they are; with softmax after it they sum to one."""
    is_normalized = family == "mixtral" or (family == "qwen3_moe" and config.get("norm_topk_prob", False))
    if family == "megatron":
        is_normalized = routed.top_k > 1
    if is_normalized and routed.top_k == 1:
        raise refusal("model.config.num_experts_per_tok", 1, "2 or more, because their weights sum to 1")
    if routed.groups > 1 or routed.router_bias:
        raise refusal("model.config", "groups of experts, or a bias of the router", "neither")
    return MegatronExperts(
        num_experts=routed.experts,
        moe_router_topk=routed.top_k,
        moe_ffn_hidden_size=routed.expert.ffn,
        pattern=tuple(int(isinstance(shape.mlp, RoutedMlp)) for shape in decoder.layers),
        moe_shared_expert_intermediate_size=routed.shared.ffn if routed.shared else None,
        moe_router_pre_softmax=not is_normalized,
    )


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    found = config.get(key, default)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise refusal(f"model.config.{key}", found, "a number")
    return float(found)


def model_flags(model: MegatronModel) -> Iterator[tuple[str, ...]]:
    """The flags of the model."""
    yield "--num-layers", str(model.num_layers)
    yield "--hidden-size", str(model.hidden_size)
    yield "--ffn-hidden-size", str(model.ffn_hidden_size)
    yield "--num-attention-heads", str(model.num_attention_heads)
    if model.num_query_groups != model.num_attention_heads:
        yield ("--group-query-attention",)
        yield "--num-query-groups", str(model.num_query_groups)
    yield "--kv-channels", str(model.kv_channels)
    yield "--max-position-embeddings", str(model.max_position_embeddings)
    yield "--position-embedding-type", model.position_embedding_type
    if model.rotary_base is not None:
        yield "--rotary-base", str(model.rotary_base)
        yield "--rotary-percent", _text(model.rotary_percent)
    if model.rope_scaling_factor is not None:
        yield ("--use-rope-scaling",)
        yield "--rope-scaling-factor", _text(model.rope_scaling_factor)
    if model.window is not None and model.window_pattern is not None:
        yield "--window-size", f"{model.window - 1},0"
        if not all(model.window_pattern):
            yield "--window-attn-skip-freq", _pattern_text(model.window_pattern)
    yield "--normalization", model.normalization
    yield "--norm-epsilon", _text(model.norm_epsilon)
    yield from _switches(model)
    yield "--attention-dropout", _text(model.attention_dropout)
    yield "--hidden-dropout", _text(model.hidden_dropout)
    yield "--init-method-std", _text(model.init_method_std)
    yield "--vocab-size", str(model.padded_vocab_size)
    yield "--padded-vocab-size", str(model.padded_vocab_size)
    yield "--tokenizer-type", "NullTokenizer"
    if model.experts is not None:
        yield from _expert_flags(model.experts)


def _switches(model: MegatronModel) -> Iterator[tuple[str, ...]]:
    for flag, is_on in (
        ("--qk-layernorm", model.qk_layernorm),
        ("--swiglu", model.swiglu),
        ("--no-bias-gelu-fusion", model.exact_gelu),
        ("--disable-bias-linear", not model.add_bias_linear),
        ("--add-qkv-bias", model.add_qkv_bias and not model.add_bias_linear),
        ("--untie-embeddings-and-output-weights", model.untie_embeddings_and_output_weights),
    ):
        if is_on:
            yield (flag,)


def _expert_flags(experts: MegatronExperts) -> Iterator[tuple[str, ...]]:
    yield "--num-experts", str(experts.num_experts)
    yield "--moe-router-topk", str(experts.moe_router_topk)
    yield "--moe-ffn-hidden-size", str(experts.moe_ffn_hidden_size)
    if not all(experts.pattern):
        yield "--moe-layer-freq", _pattern_text(experts.pattern)
    if experts.moe_shared_expert_intermediate_size is not None:
        yield "--moe-shared-expert-intermediate-size", str(experts.moe_shared_expert_intermediate_size)
    if experts.moe_router_pre_softmax:
        yield ("--moe-router-pre-softmax",)
    yield "--moe-router-load-balancing-type", "aux_loss"
    yield "--moe-router-dtype", "fp32"
    yield "--moe-token-dispatcher-type", experts.moe_token_dispatcher_type
    yield ("--moe-grouped-gemm",)


def _pattern_text(pattern: tuple[int, ...]) -> str:
    """A list in Megatron-LM's spelling: `[0]*3+[1]*24`."""
    runs: list[list[int]] = []
    for value in pattern:
        if runs and runs[-1][0] == value:
            runs[-1][1] += 1
        else:
            runs.append([value, 1])
    return "+".join(f"[{value}]*{count}" for value, count in runs)


def _text(number: float | None) -> str:
    """The shortest text of a number."""
    return f"{number:g}" if number is not None and float(f"{number:g}") == number else repr(number)
