"""Small plans for exports, made without a search."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.cluster import load_cluster
from shardwise.model import model_from_config
from shardwise.plans import Plan
from shardwise.search import plan_of_strategy
from shardwise.strategy import Job, complete, parse_fields

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 10,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 2048,
    "num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "tie_word_embeddings": True, "sliding_window": None,
}  # fmt: skip

GPT2: dict[str, Any] = {
    "model_type": "gpt2", "n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 1024, "vocab_size": 512,
}  # fmt: skip

PLAIN: dict[str, Any] = {
    "layers": 4, "hidden": 256, "ffn": 512, "heads": 4, "vocab": 512, "seq_len": 2048,
}  # fmt: skip


def small_plan(
    config: dict[str, Any], strategy: str = "", *, cluster: str = "1x8xH100-SXM", **job: Any
) -> Plan:
    """The plan of a strategy, completed as `evaluate` does it."""
    model = model_from_config(config, name="small")
    devices = load_cluster(cluster)
    requested = Job(**{"seq_len": 1024, "global_batch_size": 32, "dtype": "bf16", **job})
    experts = model.experts
    completed = complete(
        parse_fields(strategy, key="strategy"),
        devices=devices.devices,
        layers=model.layers,
        experts=None if experts is None else experts.experts,
        global_batch_size=requested.global_batch_size,
    )
    return plan_of_strategy(model, devices, requested, completed)


def with_fields(plan: Plan, **fields: Any) -> Plan:
    """The plan with other values of its strategy, legal or not; its estimate stays."""
    return replace(plan, best=replace(plan.best, fields=replace(plan.best.strategy, **fields)))
