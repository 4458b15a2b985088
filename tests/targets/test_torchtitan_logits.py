"""Exported models compute in TorchTitan what Transformers computes with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
from tests.targets.titan import logits_of_torchtitan
from tests.unit.targets.small_plans import LLAMA, small_plan

from shardwise.plans import Plan
from shardwise.targets.torchtitan import FILE, torchtitan_files

pytestmark = pytest.mark.xdist_group("torchtitan logits")

TOLERANCE = 1e-5
"""Relative, in fp32; the worst is 2e-6."""

SMALL = LLAMA | {
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64,
    "intermediate_size": 96, "vocab_size": 256, "initializer_range": 0.05,
}  # fmt: skip

SCALING = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip

ROUTED = SMALL | {
    "model_type": "qwen3_moe", "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1,
}  # fmt: skip

MODELS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "llama, tied": SMALL | {"tie_word_embeddings": True},
    "llama, scaled": SMALL | {"rope_scaling": SCALING},
    "mistral": SMALL | {"model_type": "mistral", "sliding_window": None, "rms_norm_eps": 1e-3},
    "qwen2": SMALL | {"model_type": "qwen2"},
    "qwen3": SMALL | {"model_type": "qwen3", "head_dim": 32},
    "mixtral": SMALL | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
                        "sliding_window": None},
    "qwen3_moe": ROUTED,
    "qwen3_moe, weights as they are": ROUTED | {"norm_topk_prob": False},
    "qwen3_moe, some layers dense": ROUTED | {"mlp_only_layers": [1]},
}  # fmt: skip

BROKEN = {
    "llama, scaled": ("scaling_factor=4.0", "scaling_factor=8.0"),
    "mistral": ("eps=0.001", "eps=0.01"),
    "qwen2": ("theta=500000.0", "theta=10000.0"),
    "qwen3_moe": ("route_norm=True", "route_norm=False"),
}
"""Slips in a module that leave all sizes as they are."""


def _plan(name: str) -> Plan:
    return small_plan(MODELS[name], "", cluster="1x1xH100-SXM", dtype="fp32", seq_len=64)


def test_logits_are_those_of_transformers() -> None:
    plans = [_plan(name) for name in MODELS]
    answers = logits_of_torchtitan(plans, [torchtitan_files(plan) for plan in plans])
    for name, answer in zip(MODELS, answers, strict=True):
        assert answer["missing"] == answer["unexpected"] == [], name
        assert answer["error"] < TOLERANCE, name


def test_other_logits_are_noticed() -> None:
    plans, files = [_plan(name) for name in BROKEN], []
    for plan, (right, wrong) in zip(plans, BROKEN.values(), strict=True):
        text = torchtitan_files(plan)[FILE]
        assert right in text
        files.append({FILE: text.replace(right, wrong)})
    for name, answer in zip(BROKEN, logits_of_torchtitan(plans, files), strict=True):
        assert answer["error"] > 100 * TOLERANCE, name
