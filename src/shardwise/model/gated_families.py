"""From a Hugging Face config to the sizes of its decoder: dense RMSNorm families with a gated MLP."""

from __future__ import annotations

from dataclasses import replace

from shardwise.model.config_fields import ConfigFields
from shardwise.model.config_sizes import (
    gated_decoder,
    gated_mlp,
    grouped_query,
    layer_count,
    qwen_sliding,
    qwen_window,
    sliding_layers,
)
from shardwise.model.shape import Decoder


def llama(fields: ConfigFields) -> Decoder:
    """Llama 1 to 3: RMSNorm, rotary, gated MLP, grouped-query attention."""
    bias = fields.boolean("attention_bias", default=False)
    return gated_decoder(
        fields,
        "llama",
        attention=grouped_query(fields, default_heads=(None, 0), qkv_bias=bias, out_bias=bias),
        mlp=gated_mlp(fields, bias=fields.boolean("mlp_bias", default=False)),
    )


def mistral(fields: ConfigFields) -> Decoder:
    """Mistral: like Llama, with a sliding window on every layer where the file has one."""
    window = fields.nullable_count("sliding_window", absent=4096)
    return gated_decoder(
        fields, "mistral", attention=grouped_query(fields, window=window), mlp=gated_mlp(fields)
    )


def phi3(fields: ConfigFields) -> Decoder:
    """Phi-3: like Llama with fused projections, which are counted apart, and a sliding window."""
    window = fields.nullable_count("sliding_window", absent=None)
    return gated_decoder(
        fields,
        "phi3",
        attention=grouped_query(fields, default_heads=(None, 0), window=window),
        mlp=gated_mlp(fields),
        dropout=fields.is_positive("resid_pdrop"),
    )


def qwen2(fields: ConfigFields) -> Decoder:
    """Qwen2 and Qwen2.5: like Llama, with biases on queries, keys and values."""
    return gated_decoder(
        fields,
        "qwen2",
        attention=grouped_query(fields, qkv_bias=True, window=qwen_window(fields)),
        mlp=gated_mlp(fields),
        sliding=qwen_sliding(fields),
    )


def qwen3(fields: ConfigFields) -> Decoder:
    """Qwen3: like Llama, with norms on the queries and keys of each head."""
    bias = fields.boolean("attention_bias", default=False)
    return gated_decoder(
        fields,
        "qwen3",
        attention=grouped_query(
            fields,
            default_head_dim=128,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=True,
            window=qwen_window(fields),
        ),
        mlp=gated_mlp(fields),
        sliding=qwen_sliding(fields),
    )


def gemma2(fields: ConfigFields) -> Decoder:
    """Gemma 2: norms before and after, alternating sliding windows, capped logits, tied embeddings."""
    return _gemma(fields, "gemma2", period=2, qk_norm=False)


def gemma3(fields: ConfigFields) -> Decoder:
    """Gemma 3: five sliding layers to a full one, norms on queries and keys; the text decoder of either
    config.

    The vision tower of a multimodal config is not part of the language model and is not counted. Public
    files leave out sizes that have their default, so these have one here too.
    """
    if fields.has("text_config"):
        return _multimodal_gemma3(fields)
    period = fields.count(fields.spelling("sliding_window_pattern", "_sliding_window_pattern"), default=6)
    return _gemma(fields, "gemma3", period=period, qk_norm=True)


def _multimodal_gemma3(fields: ConfigFields) -> Decoder:
    fields.mapping("text_config")
    for name in ("vision_config", "mm_tokens_per_image"):
        fields.has(name)
    text = ConfigFields(fields.any("text_config"), key="text_config")
    text.choice("model_type", ("gemma3_text",), default="gemma3_text")
    decoder = gemma3(text)
    text.refuse_unread_sizes("gemma3_text")
    return replace(decoder, tied=fields.boolean("tie_word_embeddings", default=decoder.tied))


def _gemma(fields: ConfigFields, family: str, *, period: int, qk_norm: bool) -> Decoder:
    fields.require("use_bidirectional_attention", False, "is not a causal language model")
    is_third = family == "gemma3"
    bias = fields.boolean("attention_bias", default=False)
    window = fields.spelling("sliding_window", "sliding_window_size")
    layers = layer_count(fields)
    alternate = [(i + 1) % period != 0 for i in range(layers)]
    return gated_decoder(
        fields,
        family,
        norm_placement="sandwich",
        attention=grouped_query(
            fields,
            default_heads=(8, 4) if is_third else (None, None),
            default_head_dim=256,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=qk_norm,
            window=fields.nullable_count(window, absent=4096),
            softcap=_has_cap(fields, "attn_logit_softcapping", 0.0 if is_third else 50.0),
        ),
        mlp=gated_mlp(fields),
        sliding=sliding_layers(fields, alternate),
        tied=True,
        default_vocab=262_208 if is_third else None,
        logit_softcap=_has_cap(fields, "final_logit_softcapping", 0.0 if is_third else 30.0),
    )


def _has_cap(fields: ConfigFields, name: str, absent: float) -> bool:
    """Whether there is a cap: null stands for none."""
    is_null = name in fields.names and not fields.has(name)
    return not is_null and fields.is_positive(name, default=absent, high=1e6)
