"""Bytes that a layer saves per token in the cost model, compared with those of each software's own layer.

Norms save a number per row, and rotary embeddings tables of angles, that the cost model neglects: the layers
here are wide enough for less than 2 %. Dropout is off: its masks have one byte on a GPU and two on a CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from tests.targets.counting import SavedBytes, count_calls
from tests.targets.megatron import environment
from tests.targets.titan import ROOT, titan_environment
from tests.unit.targets.small_plans import LLAMA, small_plan

from shardwise.cluster import load_cluster
from shardwise.cost import bind
from shardwise.cost.layers import grid_cost
from shardwise.model import model_from_config
from shardwise.strategy import PROFILES, Job, StrategyTable, complete, parse_fields
from shardwise.targets.torchtitan import torchtitan_files
from shardwise.targets.torchtitan_read_back import titan_request

WITHIN = 0.02
LENGTH, ROWS = 256, 4

SIZES: dict[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 4,
    "intermediate_size": 3584, "vocab_size": 256, "max_position_embeddings": 1024,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"model_type": "llama"},
    "llama, all heads": SIZES | {"model_type": "llama", "num_key_value_heads": 16},
    "qwen2": SIZES | {"model_type": "qwen2"},
    "qwen3": SIZES | {"model_type": "qwen3", "head_dim": 128},
    "mixtral": SIZES
    | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gpt2": {
        "model_type": "gpt2", "n_embd": 1024, "n_layer": 2, "n_head": 16, "n_positions": 1024,
        "vocab_size": 256, "activation_function": "gelu", "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "deepseek_v3": SIZES
    | {
        "model_type": "deepseek_v3", "num_key_value_heads": 16, "q_lora_rank": 512, "kv_lora_rank": 256,
        "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "first_k_dense_replace": 2,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "n_shared_experts": 1,
        "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0,
    },
}  # fmt: skip


def predicted(
    model: Mapping[str, Any],
    software: str,
    strategy: str = "",
    *,
    dtype: str = "bf16",
) -> float:
    """Bytes that the first layer saves, per token, on one rank."""
    built = model_from_config(model)
    fields = parse_fields(strategy)
    devices = int(fields.get("tp", 1))
    job = Job(
        seq_len=LENGTH, global_batch_size=ROWS, dtype=dtype, expert_imbalance=1.0, profile=PROFILES[software]
    )  # fmt: skip
    problem = bind(built, load_cluster(f"{devices}xH100-SXM"), job)
    row = complete(
        {"micro_batch_size": ROWS, **fields}, devices=devices, layers=built.layers, global_batch_size=ROWS,
        experts=None if built.experts is None else built.experts.experts,
    )  # fmt: skip
    grid = grid_cost(problem, StrategyTable.of([row]))
    return float(grid.kinds[built.pattern[0]].saved_bytes[0]) / (LENGTH * ROWS)


def assert_near(ours: float, counted: float) -> None:
    assert abs(ours / counted - 1.0) < WITHIN, f"counted {counted:.0f} bytes per token, ours {ours:.0f}"


# Transformers


@pytest.mark.parametrize("name", ["llama", "llama, all heads", "qwen2", "qwen3", "mixtral", "gpt2"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_layers_of_transformers(name: str, dtype: str) -> None:
    counted = of_transformers(MODELS[name], dtype)
    assert_near(predicted(MODELS[name], "fsdp2-eager", dtype=dtype), counted)
    if name != "gpt2":  # modules with fused kernels save less; a LayerNorm is one kernel anyway
        assert predicted(MODELS[name], "fsdp2", dtype=dtype) < 0.85 * counted


def of_transformers(settings: Mapping[str, Any], dtype: str) -> float:
    """Bytes that the second layer saves in addition to the first, which has the tables of angles for both."""
    import torch
    import transformers as package

    transformers: Any = package
    own = dict(settings)
    config = transformers.AutoConfig.for_model(own.pop("model_type"), **own, bos_token_id=0, eos_token_id=0)
    config._attn_implementation = "sdpa"
    build: Any = transformers.AutoModelForCausalLM.from_config
    model = build(config).to(torch.bfloat16 if dtype == "bf16" else torch.float32).train()
    base = model.base_model
    saved = SavedBytes(model)
    totals: list[int] = []
    for layer in base.layers if hasattr(base, "layers") else base.h:
        count_calls(layer, saved, totals)
    model(torch.randint(0, 256, (ROWS, LENGTH)), use_cache=False)
    return float(totals[1] - totals[0]) / (ROWS * LENGTH)


# Megatron-LM

GPT: dict[str, Any] = {"hidden_size": 1024, "num_attention_heads": 16, "ffn_hidden_size": 4096}
GATED = GPT | {
    "ffn_hidden_size": 3584, "num_query_groups": 4, "gated_linear_unit": True, "normalization": "RMSNorm",
    "add_bias_linear": False,
}  # fmt: skip
ROUTED = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 3584,
    "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip
LATENT = {
    "multi_latent_attention": True, "q_lora_rank": 512, "kv_lora_rank": 256, "qk_head_dim": 64,
    "v_head_dim": 64, "qk_pos_emb_head_dim": 32, "rope_type": "rope", "qk_layernorm": True,
    "num_query_groups": 16,
}  # fmt: skip
MEGATRON: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt": ("gpt2", GPT, ""),
    "llama": ("llama", GATED, ""),
    "llama, tp 2": ("llama", GATED | {"tp": 2}, "tp=2,sequence_parallel=no"),
    "qwen3": ("qwen3", GATED | {"qk_layernorm": True, "kv_channels": 128}, ""),
    "mixtral": ("mixtral", GATED | ROUTED, ""),
    "deepseek_v3": ("deepseek_v3", GATED | LATENT, ""),
}


@pytest.mark.parametrize("name", MEGATRON)
def test_layers_of_megatron_lm(name: str) -> None:
    model, settings, strategy = MEGATRON[name]
    (counted,) = answers("tests.targets.megatron_saved", [settings], environment())
    assert_near(predicted(MODELS[model], "megatron-lm-0.19", strategy), counted)


# TorchTitan


@pytest.mark.parametrize("changed", [{}, {"model_type": "qwen3", "head_dim": 64}])
def test_compiled_layers_of_torchtitan(changed: dict[str, Any]) -> None:
    model = LLAMA | SIZES | changed
    plan = small_plan(model, "", cluster="1x1xH100-SXM", dtype="bf16", seq_len=LENGTH)
    path = titan_environment()
    own = {**path, "PYTHONPATH": os.pathsep.join((path["PYTHONPATH"], str(ROOT)))}
    (counted,) = answers("tests.targets.titan_saved", [titan_request(plan, torchtitan_files(plan))], own)
    assert_near(predicted(model, "torchtitan-0.3"), counted)


def answers(module: str, requests: Sequence[Mapping[str, Any]], path: Mapping[str, str]) -> list[float]:
    """The numbers that a child process answers to all requests."""
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    done = subprocess.run(
        [sys.executable, "-m", module], input=lines, capture_output=True, text=True, check=False,
        env=dict(path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(line) for line in done.stdout.splitlines()]
