"""Plans from text, without a search, and the tiny models that they are for."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise import search
from shardwise.cluster import load_cluster
from shardwise.model import Model, model_from_config
from shardwise.plan import Plan
from shardwise.strategy import Job, complete, parse_fields

GPT = {"layers": 4, "hidden": 32, "ffn": 64, "heads": 4, "vocab": 96, "seq_len": 32}
"""LayerNorms, biases, learned positions; one table is both embedding and output projection."""

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
"""RMSNorms, rotary positions, gated MLPs, grouped queries."""

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
"""Attention and MLP side by side; a quarter of each head is rotated."""

MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
"""Four experts in every layer, of which a token takes two."""

QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
    "norm_topk_prob": False, "mlp_only_layers": [1], "max_window_layers": 0,
}  # fmt: skip
"""Eight experts, probabilities as they are, and one layer without experts."""

CONFIGS: Mapping[str, Mapping[str, object]] = {
    "gpt": GPT, "llama": LLAMA, "qwen3": QWEN3, "neox": NEOX, "mixtral": MIXTRAL, "qwen3_moe": QWEN3_MOE,
}  # fmt: skip

SEQ_LEN = 32
BATCH = 8


def tiny(name: str) -> Model:
    return model_from_config(CONFIGS[name], name=name)


def make_plan(
    text: str,
    *,
    model: str = "llama",
    dtype: str = "fp32",
    optimizer: str = "adamw",
    seq_len: int = SEQ_LEN,
    global_batch_size: int = BATCH,
) -> Plan:
    """The plan of the strategy that `text` names, on as many cpu devices as it needs; priced, not searched
    for."""
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
