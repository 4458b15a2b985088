"""Named modules: what Megatron-LM's own layers save for their backward pass, counted by autograd's hooks,
compared with the cost model.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from tests.targets.megatron import environment
from tests.unit.cost.test_cost_modules import elements, problem_of
from tests.unit.cost.test_cost_offload_modules import layer_of, per_token

from shardwise.model import Model, model_from_config

SIZES = {"hidden_size": 1024, "num_attention_heads": 16}
FFN, EXPERTS, TOP_K, EXPERT_FFN = 3584, 4, 2, 1024
LATENT = {"q_lora_rank": 384, "kv_lora_rank": 256, "v_head_dim": 64}
NOPE, ROPE = 64, 32

CONFIGS: dict[str, dict[str, Any]] = {
    "dense": {**SIZES, "ffn_hidden_size": FFN, "num_query_groups": 4, "kv_channels": 64},
    "experts": {
        **SIZES, "ffn_hidden_size": FFN, "num_query_groups": 4, "kv_channels": 64,
        "num_moe_experts": EXPERTS, "moe_router_topk": TOP_K, "moe_ffn_hidden_size": EXPERT_FFN,
        "moe_token_dispatcher_type": "alltoall",
    },
    "latent": {
        **SIZES, **LATENT, "ffn_hidden_size": FFN, "qk_head_dim": NOPE, "qk_pos_emb_head_dim": ROPE,
        "rope_type": "rope",
    },
}  # fmt: skip
"""Layers as fields of Megatron-LM's configuration."""

SETS = {
    "dense": ("", "core_attn", "layernorm", "core_attn+layernorm", "mlp", "layernorm+mlp"),
    "experts": ("", "core_attn", "layernorm", "moe", "layernorm+moe"),
    "latent": ("", "mla_up_proj", "mla_up_proj+mlp", "core_attn+mla_up_proj+layernorm", "layernorm"),
}
"""Sets that Megatron-LM's local modules recompute (moe_act needs a kernel of Transformer Engine)."""

TOLERANCE = 0.02


def model_of(name: str) -> Model:
    """The model with such a layer."""
    plain: dict[str, Any] = {
        **SIZES, "model_type": "llama", "intermediate_size": FFN, "num_hidden_layers": 2,
        "num_key_value_heads": 4, "vocab_size": 1024, "max_position_embeddings": 4096, "hidden_act": "silu",
    }  # fmt: skip
    if name == "experts":
        plain |= {
            "model_type": "mixtral", "intermediate_size": EXPERT_FFN, "num_local_experts": EXPERTS,
            "num_experts_per_tok": TOP_K, "sliding_window": None,
        }  # fmt: skip
    if name == "latent":
        plain |= {
            **LATENT, "model_type": "deepseek_v2", "num_key_value_heads": 16, "qk_nope_head_dim": NOPE,
            "qk_rope_head_dim": ROPE, "n_routed_experts": EXPERTS, "num_experts_per_tok": TOP_K,
            "moe_intermediate_size": EXPERT_FFN, "first_k_dense_replace": 1, "n_shared_experts": 1,
            "n_group": 1, "topk_group": 1, "moe_layer_freq": 1,
        }  # fmt: skip
    return model_from_config(plain, name=name)


@pytest.fixture(scope="module")
def counted() -> Mapping[tuple[str, str], float]:
    """Elements of two bytes per token of a layer, by name and set."""
    requests = [(name, modules) for name, sets in SETS.items() for modules in sets]
    answers = answered([(CONFIGS[name], modules.split("+") if modules else []) for name, modules in requests])
    return {key: answer["elements"] for key, answer in zip(requests, answers, strict=True)}


def answered(requests: Sequence[tuple[Mapping[str, Any], list[str]]]) -> list[Mapping[str, Any]]:
    """The answers of the counting process to all requests."""
    return responses([{"config": config, "modules": modules} for config, modules in requests])


def responses(requests: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The same for requests as the process takes them."""
    lines = [json.dumps(request) for request in requests]
    done = subprocess.run(
        [sys.executable, "-m", "tests.targets.saved_tensors"],
        input="\n".join(lines) + "\n", capture_output=True, text=True, check=False, env=environment(),
    )  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode or len(answers) != len(lines):
        raise AssertionError(f"the counting process ended: {done.stderr[-2000:]}")
    return answers


@pytest.mark.parametrize(("name", "modules"), [(name, one) for name, sets in SETS.items() for one in sets])
def test_saved_elements_are_those_that_megatron_lm_saves(
    name: str, modules: str, counted: Mapping[tuple[str, str], float]
) -> None:
    """Without modules, the cost model's layer without recomputation."""
    problem = problem_of(model_of(name))
    own = elements(problem, modules) if modules else whole(name)
    assert own == pytest.approx(counted[name, modules], rel=TOLERANCE)


def whole(name: str) -> float:
    """Elements that a layer saves without recomputation: those that `core_attn` leaves and the log-sum-exp
    that it drops, one number of 4 bytes for each of 16 heads."""
    return elements(problem_of(model_of(name)), "core_attn") + 2 * 16


def test_every_set_drops_something(counted: Mapping[tuple[str, str], float]) -> None:
    for name, sets in SETS.items():
        left = [counted[name, modules] for modules in sets if modules]
        assert max(left) < counted[name, ""]
        assert len(set(left)) == len(left)


MOVED = [
    # Local norms stand alone. Transformer Engine has those of the dense layer and before attention over heads
    # in the next product, so both are of that module, or of none.
    ("dense", ["attn_norm", "qkv_linear"], "qkv_linear"),
    ("dense", ["core_attn"], "core_attn"),
    ("dense", ["core_attn", "attn_proj"], "core_attn+attn_proj"),
    ("dense", ["attn_norm", "qkv_linear", "core_attn", "attn_proj"], "qkv_linear+core_attn+attn_proj"),
    ("experts", ["mlp_norm"], "mlp_norm"),
    ("experts", ["core_attn", "attn_proj", "mlp_norm"], "core_attn+attn_proj+mlp_norm"),
    ("latent", ["attn_norm"], "attn_norm"),
    ("latent", ["core_attn", "attn_proj"], "core_attn+attn_proj"),
]


def test_moved_elements_are_those_that_megatron_lm_moves() -> None:
    """What is left on the device, and what is copied. (expert_fc1 and moe_act are modules of Transformer
    Engine.)"""
    requests = [{"config": CONFIGS[name], "modules": [], "offload": theirs} for name, theirs, _ in MOVED]
    for (name, _, ours), answer in zip(MOVED, responses(requests), strict=True):
        layer = layer_of(problem_of(model_of(name)), ours)
        assert per_token(layer.saved_bytes) == pytest.approx(answer["elements"], rel=TOLERANCE), (name, ours)
        assert per_token(layer.moved_bytes) == pytest.approx(answer["moved"], rel=TOLERANCE), (name, ours)


def test_modules_that_a_layer_lacks_are_refused_by_megatron_lm_too() -> None:
    answers = answered([(CONFIGS["dense"], ["mla_up_proj"]), (CONFIGS["experts"], ["moe_act"])])
    assert "multi_latent_attention" in answers[0]["error"]
    assert "moe_grouped_gemm" in answers[1]["error"]
