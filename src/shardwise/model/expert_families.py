"""From a Hugging Face config to the sizes of its decoder: mixture-of-experts families."""

from __future__ import annotations

from shardwise.model.config_fields import MAX_LAYERS, ConfigFields
from shardwise.model.config_sizes import (
    gated_decoder,
    gated_mlp,
    grouped,
    grouped_query,
    layer_count,
    qwen_window,
    sliding_layers,
)
from shardwise.model.shape import Decoder, LatentAttentionShape, Mlp, RoutedMlp, capacity_factor

MAX_EXPERTS = 100_000


def mixtral(fields: ConfigFields) -> Decoder:
    """Mixtral: Mistral's attention, eight gated experts of which a token takes two."""
    routed = _routed(fields, ffn=fields.count("intermediate_size"))
    return gated_decoder(
        fields,
        "mixtral",
        attention=grouped_query(fields, window=fields.nullable_count("sliding_window", absent=None)),
        mlp=(routed,) * layer_count(fields),
    )


def qwen3_moe(fields: ConfigFields) -> Decoder:
    """Qwen3-MoE: Qwen3's attention; experts on every `decoder_sparse_step`-th layer but `mlp_only_layers`."""
    layers = layer_count(fields)
    bias = fields.boolean("attention_bias", default=False)
    step = fields.count("decoder_sparse_step", default=1)
    dense_only = _layer_indices(fields, "mlp_only_layers", layers)
    routed = _routed(fields, ffn=fields.count("moe_intermediate_size"))
    dense = gated_mlp(fields)
    # Transformers builds no per-layer pattern from this key; every layer has the window or none.
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
    """gpt-oss: biases everywhere, attention sinks, a sliding window on every other layer."""
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
    """DeepSeek-V3: V2 with multi-token-prediction modules where the file names them.

    Transformers does not build these modules, so a file that is silent about them has none.
    """
    fields.require("mlp_bias", False, "is not supported")
    key = fields.spelling("num_nextn_predict_layers", "num_mtp_layers")
    return _deepseek(fields, "deepseek_v3", mtp_modules=fields.integer(key, low=0, high=100, default=0))


def _deepseek(fields: ConfigFields, family: str, *, mlp_bias: bool = False, mtp_modules: int = 0) -> Decoder:
    fields.require("moe_layer_freq", 1, "is not supported")
    layers = layer_count(fields)
    leading = fields.integer("first_k_dense_replace", low=0, high=MAX_LAYERS)
    if mtp_modules and leading >= layers:
        raise fields.error("first_k_dense_replace", "leaves no layer of experts", found=str(leading))
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
    """Gated experts; ConfigError where a token takes more than there are, or groups do not divide them."""
    count = fields.count(*experts, high=MAX_EXPERTS)
    per_token = fields.count(*top_k, high=MAX_EXPERTS)
    if per_token > count:
        raise fields.error(
            fields.spelling(*top_k),
            "is more than there are experts",
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
