"""Plans from text without a search, and the tiny models that they are for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from shardwise import search
from shardwise.cluster import load_cluster
from shardwise.model import Model, model_from_config
from shardwise.plans import Plan
from shardwise.strategy import Job, complete, parse_fields

GPT = {"layers": 4, "hidden": 32, "ffn": 64, "heads": 4, "vocab": 96, "seq_len": 32}
"""LayerNorm, biases, learned positions; the embedding and the output projection are tied."""

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "rope_theta": 1000.0,
    "tie_word_embeddings": False,
}
"""RMSNorm, rotary positions, gated MLPs, grouped-query attention."""

QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
"""Norms on queries and keys."""

NEOX = {
    "model_type": "gpt_neox",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
"""Attention and MLP in parallel; a quarter of each head is rotated."""

MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
"""Four experts in every layer; a token goes to two."""

QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
    "norm_topk_prob": False, "mlp_only_layers": [1], "max_window_layers": 0,
}  # fmt: skip
"""Eight experts, probabilities that are not normalised, and one dense layer."""

GPT_MOE = GPT | {"experts": 4, "top_k": 2, "dense_layers": 1, "expert_ffn": 24, "shared_ffn": 16}
"""Ungated experts with biases, a shared expert, and a dense layer first."""

OPT = {
    "model_type": "opt", "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "vocab_size": 96, "max_position_embeddings": 64, "word_embed_proj_dim": 16, "do_layer_norm_before": False,
    "pad_token_id": None,
}  # fmt: skip
"""Norms after the residuals; embeddings of half the width, projected."""

PHI3 = LLAMA | {"model_type": "phi3", "sliding_window": 6, "pad_token_id": None}
"""A sliding window on every layer."""

BLOOM = {"model_type": "bloom", "hidden_size": 48, "n_head": 6, "n_layer": 4, "vocab_size": 96}
"""ALiBi slopes for six heads, and a norm after the embedding."""

FALCON = {
    "model_type": "falcon", "hidden_size": 32, "num_attention_heads": 4, "num_kv_heads": 2,
    "new_decoder_architecture": True, "num_hidden_layers": 4, "vocab_size": 96,
}  # fmt: skip
"""Attention and MLP in parallel, each with its own norm; grouped-query attention."""

FALCON_7B = FALCON | {"new_decoder_architecture": False}
"""The same with one norm for both, and one key-value head."""

FALCON_RW = FALCON_7B | {
    "alibi": True,
    "multi_query": False,
    "num_kv_heads": 4,
    "parallel_attn": False,
    "bias": True,
}
"""Attention, then MLP, with ALiBi slopes."""

GEMMA2 = LLAMA | {
    "model_type": "gemma2", "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 12,
    "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "tie_word_embeddings": True,
    "pad_token_id": None,
}  # fmt: skip
"""Sandwich norms, sliding windows on every other layer, soft-caps on scores and logits that take effect."""

GEMMA3 = LLAMA | {
    "model_type": "gemma3_text", "head_dim": 8, "sliding_window": 6, "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 12, "rope_local_base_freq": 100.0, "tie_word_embeddings": True,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "pad_token_id": None,
}  # fmt: skip
"""Two layers with sliding windows to one without, with two rotary bases; norms on queries and keys."""

GPT_OSS = LLAMA | {
    "model_type": "gpt_oss", "head_dim": 8, "sliding_window": 6, "num_local_experts": 4,
    "num_experts_per_tok": 2, "intermediate_size": 24, "swiglu_limit": 1.0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False,
    },
}  # fmt: skip
"""Attention sinks, windows on every other layer, biases everywhere, experts with clamped gates."""

DEEPSEEK_V2 = {
    "model_type": "deepseek_v2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 96, "max_position_embeddings": 64,
    "q_lora_rank": None,
    "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
    "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 2.0,
    "rope_scaling": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7,
        "mscale_all_dim": 0.5,
    },
}  # fmt: skip
"""Latent attention with full-rank queries, grouped experts with shared ones, one dense layer."""

DEEPSEEK_V3 = DEEPSEEK_V2 | {
    "model_type": "deepseek_v3", "q_lora_rank": 20, "norm_topk_prob": True, "num_nextn_predict_layers": 0,
}  # fmt: skip
"""Queries from a latent too; experts chosen by sigmoid scores with a correction bias."""

CONFIGS: Mapping[str, Mapping[str, object]] = {
    "gpt": GPT, "llama": LLAMA, "qwen3": QWEN3, "neox": NEOX, "mixtral": MIXTRAL, "qwen3_moe": QWEN3_MOE,
    "gpt_moe": GPT_MOE, "opt": OPT, "phi3": PHI3, "bloom": BLOOM, "falcon": FALCON, "falcon-7b": FALCON_7B,
    "falcon-rw": FALCON_RW, "gemma2": GEMMA2, "gemma3": GEMMA3, "gpt_oss": GPT_OSS,
    "deepseek_v2": DEEPSEEK_V2, "deepseek_v3": DEEPSEEK_V3,
}  # fmt: skip

SLOPED_ONCE = "sdpa"
"""Attention implementation of Transformers 5 that adds a Falcon's ALiBi slopes once; its `eager` one adds
them twice."""

SEQ_LEN = 32
BATCH = 8


def tiny(name: str) -> Model:
    return model_from_config(CONFIGS[name], name=name)


@cache
def make_plan(
    text: str,
    *,
    model: str = "llama",
    dtype: str = "fp32",
    optimizer: str = "adamw",
    seq_len: int = SEQ_LEN,
    global_batch_size: int = BATCH,
) -> Plan:
    """The plan of the strategy that `text` names, on as many cpu devices as it needs; estimated without a
    search."""
    fields = parse_fields(text)
    devices = 1
    for axis in ("tp", "cp", "pp", "dp"):
        devices *= int(fields.get(axis, 1))
    trained = tiny(model)
    experts = trained.experts
    strategy = complete(
        {"dp": 1, **fields},
        devices=devices,
        layers=trained.layers,
        experts=None if experts is None else experts.experts,
        global_batch_size=global_batch_size,
    )
    job = Job(seq_len=seq_len, global_batch_size=global_batch_size, dtype=dtype, optimizer=optimizer)  # type: ignore[arg-type]
    cluster = load_cluster(f"1x{devices}xcpu")
    return search.plan_of_strategy(trained, cluster, job, strategy)
