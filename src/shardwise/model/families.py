"""Reads the sizes of a decoder from a Hugging Face config, with one function per `model_type` (FAMILIES).

Keys, defaults and shapes are those of the configuration and modelling files of Transformers 5. Tests compare
the parameter counts with the models that it builds. A key without a default here is required. First come
LayerNorm families with a plain MLP, then dense RMSNorm families with a gated MLP, then mixtures of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from shardwise.inputs import nearest, short_repr
from shardwise.model.hugging_face_config import (
    MAX_LAYERS,
    ConfigFields,
    gated_decoder,
    gated_mlp,
    grouped,
    grouped_query,
    head_dim,
    layer_count,
    max_seq_len,
    qwen_sliding,
    qwen_window,
    sliding_layers,
    vocab,
)
from shardwise.model.shape import (
    Decoder,
    GroupedQueryAttentionShape,
    LatentAttentionShape,
    LayerShape,
    Mlp,
    Norm,
    NormPlacement,
    RoutedMlp,
    capacity_factor,
)


# LayerNorm families with a plain MLP
def gpt2(fields: ConfigFields) -> Decoder:
    """GPT-2 and GPT-3: LayerNorm, biases, learned positions, tied embeddings."""
    fields.require("add_cross_attention", False, "is not supported")
    hidden = fields.count("n_embd", "hidden_size")
    heads = fields.count("n_head", "num_attention_heads")
    layer = LayerShape(
        hidden=hidden,
        norm="layer",
        norm_placement="pre",
        attention=GroupedQueryAttentionShape(
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim(fields, hidden, heads, "n_head"),
            qkv_bias=True,
            out_bias=True,
            rotary=False,
        ),
        mlp=Mlp(ffn=fields.count("n_inner", default=4 * hidden), gated=False, bias=True),
        dropout=fields.is_positive("resid_pdrop", default=0.1),
    )
    positions = fields.count("n_positions", "max_position_embeddings")
    return Decoder(
        family="gpt2",
        hidden=hidden,
        vocab=vocab(fields),
        layers=(layer,) * layer_count(fields, "n_layer", "num_hidden_layers"),
        tied=fields.boolean("tie_word_embeddings", default=True),
        positions=positions,
        embedding_width=hidden,
        embedding_dropout=fields.is_positive("embd_pdrop", default=0.1),
        max_seq_len=positions,
    )


def gpt_neox(fields: ConfigFields) -> Decoder:
    """GPT-NeoX and Pythia: attention and MLP in parallel with a norm each, rotary positions."""
    hidden = fields.count("hidden_size")
    heads = fields.count("num_attention_heads")
    bias = fields.boolean("attention_bias", default=True)
    parallel = fields.boolean("use_parallel_residual", default=True)
    dropout = fields.is_positive("hidden_dropout")
    layer = LayerShape(
        hidden=hidden,
        norm="layer",
        norm_placement="parallel" if parallel else "pre",
        attention=GroupedQueryAttentionShape(
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim(fields, hidden, heads, "num_attention_heads"),
            qkv_bias=bias,
            out_bias=bias,
        ),
        mlp=Mlp(ffn=fields.count("intermediate_size"), gated=False, bias=True),
        dropout=dropout,
    )
    return Decoder(
        family="gpt_neox",
        hidden=hidden,
        vocab=vocab(fields),
        layers=(layer,) * layer_count(fields),
        tied=fields.boolean("tie_word_embeddings", default=False),
        embedding_width=hidden,
        embedding_dropout=dropout,
        max_seq_len=max_seq_len(fields),
    )


def opt(fields: ConfigFields) -> Decoder:
    """OPT: like GPT-2; the 350m has post-norm layers and embeddings of half the width."""
    hidden = fields.count("hidden_size")
    heads = fields.count("num_attention_heads")
    bias = fields.boolean("enable_bias", default=True)
    pre_norm = fields.boolean("do_layer_norm_before", default=True)
    norm: Norm = "layer" if fields.boolean("layer_norm_elementwise_affine", default=True) else "plain"
    positions = fields.count("max_position_embeddings")
    layer = LayerShape(
        hidden=hidden,
        norm=norm,
        norm_placement="pre" if pre_norm else "post",
        attention=GroupedQueryAttentionShape(
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim(fields, hidden, heads, "num_attention_heads"),
            qkv_bias=bias,
            out_bias=bias,
            rotary=False,
        ),
        mlp=Mlp(ffn=fields.count("ffn_dim"), gated=False, bias=bias),
        dropout=fields.is_positive("dropout", default=0.1),
    )
    return Decoder(
        family="opt",
        hidden=hidden,
        vocab=vocab(fields),
        layers=(layer,) * layer_count(fields),
        tied=fields.boolean("tie_word_embeddings", default=True),
        positions=positions + 2,  # OPT's position table is offset by two rows.
        embedding_width=fields.count("word_embed_proj_dim", default=hidden),
        final_norm=pre_norm and not fields.boolean("_remove_final_layer_norm", default=False),
        max_seq_len=positions,
    )


def bloom(fields: ConfigFields) -> Decoder:
    """BLOOM: ALiBi (no position embeddings), and a norm after the embedding."""
    hidden = fields.count("hidden_size", "n_embed")
    heads = fields.count("n_head", "num_attention_heads")
    layer = LayerShape(
        hidden=hidden,
        norm="layer",
        norm_placement="pre",
        attention=GroupedQueryAttentionShape(
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim(fields, hidden, heads, "n_head"),
            qkv_bias=True,
            out_bias=True,
            rotary=False,
        ),
        mlp=Mlp(ffn=4 * hidden, gated=False, bias=True),
        dropout=fields.is_positive("hidden_dropout"),
    )
    return Decoder(
        family="bloom",
        hidden=hidden,
        vocab=vocab(fields),
        layers=(layer,) * layer_count(fields, "n_layer", "num_hidden_layers"),
        tied=fields.boolean("tie_word_embeddings", default=True),
        embedding_width=hidden,
        embedding_norm=True,
        max_seq_len=fields.nullable_count("seq_length", absent=None),
    )


def falcon(fields: ConfigFields) -> Decoder:
    """Falcon: multi-query or grouped-query attention in parallel with the MLP, with one norm or two."""
    hidden = fields.count("hidden_size", "n_embed")
    heads = fields.count("num_attention_heads", "n_head")
    bias = fields.boolean("bias", default=False)
    is_new = fields.boolean("new_decoder_architecture", default=False)
    multi_query = fields.boolean("multi_query", default=True)
    kv_heads = fields.count("num_kv_heads", "n_head_kv", default=heads)
    layer = LayerShape(
        hidden=hidden,
        norm="layer",
        norm_placement=_falcon_norm_placement(fields, is_new),
        attention=GroupedQueryAttentionShape(
            heads=heads,
            kv_heads=grouped(
                fields, heads, kv_heads if is_new else 1 if multi_query else heads, "num_kv_heads"
            ),
            head_dim=head_dim(fields, hidden, heads, "num_attention_heads"),
            qkv_bias=bias,
            out_bias=bias,
            rotary=not fields.boolean("alibi", default=False),
        ),
        mlp=Mlp(ffn=fields.count("ffn_hidden_size", default=4 * hidden), gated=False, bias=bias),
        dropout=fields.is_positive("hidden_dropout"),
    )
    return Decoder(
        family="falcon",
        hidden=hidden,
        vocab=vocab(fields),
        layers=(layer,) * layer_count(fields, "num_hidden_layers", "n_layer"),
        tied=fields.boolean("tie_word_embeddings", default=True),
        embedding_width=hidden,
        max_seq_len=max_seq_len(fields),
    )


def _falcon_norm_placement(fields: ConfigFields, is_new: bool) -> NormPlacement:
    norms = fields.integer("num_ln_in_parallel_attn", low=1, high=2, default=2 if is_new else 1)
    if fields.boolean("parallel_attn", default=True):
        return "parallel" if norms == 2 else "parallel_shared"
    if is_new:
        raise fields.error(
            "parallel_attn", "contradicts new_decoder_architecture", found="false", allowed="true"
        )
    return "pre"


# RMSNorm families with a gated MLP
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
    """Mistral: like Llama, with a sliding window on every layer where the config has one."""
    window = fields.nullable_count("sliding_window", absent=4096)
    return gated_decoder(
        fields, "mistral", attention=grouped_query(fields, window=window), mlp=gated_mlp(fields)
    )


def phi3(fields: ConfigFields) -> Decoder:
    """Phi-3: like Llama, with a sliding window; its fused projections are counted as separate ones."""
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
    """Gemma 2: sandwich norms, alternating sliding windows, soft-capped logits, tied embeddings."""
    return _gemma(fields, "gemma2", period=2, qk_norm=False)


def gemma3(fields: ConfigFields) -> Decoder:
    """Gemma 3: five layers with a sliding window per full layer, and norms on queries and keys.

    It reads text configs and the text decoder of multimodal ones, without the vision tower. Public configs
    omit sizes with default values, so these have defaults here too.
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
    """Whether the config has a soft cap; null means none."""
    is_null = name in fields.names and not fields.has(name)
    return not is_null and fields.is_positive(name, default=absent, high=1e6)


# Mixtures of experts
MAX_EXPERTS = 100_000


def mixtral(fields: ConfigFields) -> Decoder:
    """Mixtral: Mistral's attention, with routed gated experts in every layer."""
    routed = _routed(fields, ffn=fields.count("intermediate_size"))
    return gated_decoder(
        fields,
        "mixtral",
        attention=grouped_query(fields, window=fields.nullable_count("sliding_window", absent=None)),
        mlp=(routed,) * layer_count(fields),
    )


def qwen3_moe(fields: ConfigFields) -> Decoder:
    """Qwen3-MoE: Qwen3's attention; experts on every `decoder_sparse_step`-th layer except
    `mlp_only_layers`."""
    layers = layer_count(fields)
    bias = fields.boolean("attention_bias", default=False)
    step = fields.count("decoder_sparse_step", default=1)
    dense_only = _layer_indices(fields, "mlp_only_layers", layers)
    routed = _routed(fields, ffn=fields.count("moe_intermediate_size"))
    dense = gated_mlp(fields)
    # Transformers builds no per-layer pattern from this key: all layers have the window, or none has it.
    fields.integer("max_window_layers", low=0, high=MAX_LAYERS, default=0)
    return gated_decoder(
        fields,
        "qwen3_moe",
        attention=grouped_query(
            fields, qkv_bias=bias, out_bias=bias, qk_norm=True, window=qwen_window(fields)
        ),
        mlp=[
            routed if layer not in dense_only and (layer + 1) % step == 0 else dense
            for layer in range(layers)
        ],
    )


def gpt_oss(fields: ConfigFields) -> Decoder:
    """gpt-oss: biases on all matmuls, attention sinks, a sliding window on every other layer."""
    bias = fields.boolean("attention_bias", default=True)
    layers = layer_count(fields)
    ffn = fields.count("intermediate_size")
    top_k = ("num_experts_per_tok", "experts_per_token")
    return gated_decoder(
        fields,
        "gpt_oss",
        attention=grouped_query(
            fields,
            default_head_dim=64,
            window=fields.nullable_count("sliding_window", absent=128),
            qkv_bias=bias,
            out_bias=bias,
            sinks=True,
        ),
        mlp=(_routed(fields, ffn=ffn, bias=True, top_k=top_k),) * layers,
        sliding=sliding_layers(fields, [layer % 2 == 0 for layer in range(layers)]),
    )


def deepseek_v2(fields: ConfigFields) -> Decoder:
    """DeepSeek-V2: latent attention, shared experts, leading dense layers, group-limited routing."""
    return _deepseek(fields, "deepseek_v2", mlp_bias=fields.boolean("mlp_bias", default=False))


def deepseek_v3(fields: ConfigFields) -> Decoder:
    """DeepSeek-V3: like V2, with multi-token-prediction modules where the config has their number.

    Transformers does not build these modules, so the default is none.
    """
    fields.require("mlp_bias", False, "is not supported")
    key = fields.spelling("num_nextn_predict_layers", "num_mtp_layers")
    return _deepseek(fields, "deepseek_v3", mtp_modules=fields.integer(key, low=0, high=100, default=0))


def _deepseek(fields: ConfigFields, family: str, *, mlp_bias: bool = False, mtp_modules: int = 0) -> Decoder:
    fields.require("moe_layer_freq", 1, "is not supported")
    layers = layer_count(fields)
    leading = fields.integer("first_k_dense_replace", low=0, high=MAX_LAYERS)
    if mtp_modules and leading >= layers:
        raise fields.error("first_k_dense_replace", "leaves no layer with experts", found=str(leading))
    ffn = fields.count("moe_intermediate_size")
    shared = fields.integer("n_shared_experts", low=0, high=MAX_EXPERTS, default=0)
    routed = _routed(
        fields,
        ffn=ffn,
        shared=Mlp(ffn=shared * ffn, gated=True, bias=mlp_bias) if shared else None,
        experts=("n_routed_experts", "num_local_experts"),
        groups=fields.count("n_group", default=1, high=MAX_EXPERTS),
        groups_per_token=fields.count("topk_group", default=1, high=MAX_EXPERTS),
    )
    dense = gated_mlp(fields, bias=mlp_bias)
    return gated_decoder(
        fields,
        family,
        attention=_latent(fields),
        mlp=[dense if layer < leading else routed for layer in range(layers)],
        mtp_modules=mtp_modules,
    )


def _latent(fields: ConfigFields) -> LatentAttentionShape:
    heads = fields.count("num_attention_heads")
    grouped(fields, heads, fields.count("num_key_value_heads", default=heads), "num_key_value_heads")
    nope, rope = fields.count("qk_nope_head_dim"), fields.count("qk_rope_head_dim")
    fields.require("qk_head_dim", nope + rope, "is not qk_nope_head_dim + qk_rope_head_dim")
    fields.has("head_dim")  # a copy of the rotary part in files that Transformers wrote
    if "q_lora_rank" not in fields.names:
        raise fields.error("q_lora_rank", "is missing", allowed="an integer, or null for full queries")
    return LatentAttentionShape(
        heads=heads,
        q_rank=fields.nullable_count("q_lora_rank", absent=None),
        kv_rank=fields.count("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope,
        v_dim=fields.count("v_head_dim"),
        bias=fields.boolean("attention_bias", default=False),
    )


def _routed(
    fields: ConfigFields,
    *,
    ffn: int,
    bias: bool = False,
    shared: Mlp | None = None,
    experts: tuple[str, ...] = ("num_local_experts", "num_experts"),
    top_k: tuple[str, ...] = ("num_experts_per_tok",),
    groups: int = 1,
    groups_per_token: int = 1,
) -> RoutedMlp:
    """Gated experts. ConfigError where a token has more experts than there are, or groups do not divide
    them."""
    count = fields.count(*experts, high=MAX_EXPERTS)
    per_token = fields.count(*top_k, high=MAX_EXPERTS)
    if per_token > count:
        raise fields.error(
            fields.spelling(*top_k),
            "is more than the number of experts",
            found=str(per_token),
            allowed=f"1 to {count}",
        )
    if count % groups:
        raise fields.error(
            "n_group", "does not divide the experts", found=str(groups), allowed=f"a divisor of {count}"
        )
    if groups_per_token > groups:
        raise fields.error(
            "topk_group", "is more than n_group", found=str(groups_per_token), allowed=f"1 to {groups}"
        )
    return RoutedMlp(
        experts=count,
        top_k=per_token,
        expert=Mlp(ffn=ffn, gated=True, bias=bias),
        shared=shared,
        groups=groups,
        groups_per_token=groups_per_token,
        router_bias=bias,
        capacity_factor=capacity_factor(fields),
    )


def _layer_indices(fields: ConfigFields, key: str, layers: int) -> frozenset[int]:
    found: set[int] = set()
    for index, layer in enumerate(fields.sequence(key, default=())):
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < layers:
            raise fields.item_error(key, index, "is not a layer", found=layer, allowed=f"0 to {layers - 1}")
        found.add(layer)
    return frozenset(found)


# All families
FAMILIES: Final[Mapping[str, Callable[[ConfigFields], Decoder]]] = MappingProxyType(
    {
        "bloom": bloom,
        "deepseek_v2": deepseek_v2,
        "deepseek_v3": deepseek_v3,
        "falcon": falcon,
        "gemma2": gemma2,
        "gemma3": gemma3,
        "gemma3_text": gemma3,
        "gpt2": gpt2,
        "gpt_neox": gpt_neox,
        "gpt_oss": gpt_oss,
        "llama": llama,
        "mistral": mistral,
        "mixtral": mixtral,
        "opt": opt,
        "phi3": phi3,
        "qwen2": qwen2,
        "qwen3": qwen3,
        "qwen3_moe": qwen3_moe,
    }
)


def decoder_from_config(fields: ConfigFields) -> Decoder:
    """The decoder of a config with a `model_type`. ConfigError for an unknown one and for wrong keys."""
    family = fields.any("model_type", allowed=", ".join(FAMILIES))
    if not isinstance(family, str) or family not in FAMILIES:
        guess = nearest(family, FAMILIES) if isinstance(family, str) else None
        hint = f" (did you mean {guess}?)" if guess else ""
        raise fields.error(
            "model_type",
            f"is not a known family{hint}",
            found=short_repr(family),
            allowed=", ".join(FAMILIES),
        )
    decoder = FAMILIES[family](fields)
    fields.refuse_unread_sizes(family)
    return decoder
