"""The planner's cost model of layers without attention and the checker's agree, for all software."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.property.software import SOFTWARE
from tests.property.test_verification_evaluator import assert_same_columns, legal_strategies

import shardwise as sw
from shardwise.cluster import load_cluster
from shardwise.cost import Problem, bind
from shardwise.cost import layers as cost_layers
from shardwise.cost import operators as cost_operators
from shardwise.model import MODULE_SETS, Model, model_from_config, modules_of_layers, names_of
from shardwise.questions import checked_plan
from shardwise.strategy import Job

ROWS, FEW_ROWS, ALL_ROWS = 60, 8, 1000

SIZES: dict[str, Any] = {"hidden_size": 384, "vocab_size": 5000}
HEADS = {"num_attention_heads": 12}

LATENT = {
    "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "first_k_dense_replace": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
    "intermediate_size": 768, "num_key_value_heads": 12,
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        "hybrid_override_pattern": "M-M*-ME", "num_key_value_heads": 4, "head_dim": 32,
        "intermediate_size": 1152, "mamba_num_heads": 12, "mamba_head_dim": 64, "n_groups": 4,
        "ssm_state_size": 16, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
        "moe_shared_expert_intermediate_size": 192,
    },
    "granitemoehybrid": {
        "num_hidden_layers": 6, "layer_types": ["mamba", "attention"] * 3, "num_key_value_heads": 4,
        "mamba_n_heads": 12, "mamba_d_state": 16, "num_local_experts": 6, "num_experts_per_tok": 2,
        "intermediate_size": 96, "shared_intermediate_size": 192,
    },
    "falcon_h1": {
        "num_hidden_layers": 6, "num_key_value_heads": 4, "mamba_d_ssm": 768, "mamba_n_heads": 12,
        "mamba_n_groups": 4, "mamba_d_state": 16, "intermediate_size": 768,
    },
    "jamba": {
        "num_hidden_layers": 6, "num_key_value_heads": 4, "attn_layer_period": 3, "attn_layer_offset": 1,
        "num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 96,
    },
    "mamba2": {"num_hidden_layers": 6, "num_heads": 12, "head_dim": 64, "n_groups": 2},
    "qwen3_next": {
        "num_hidden_layers": 6, "num_key_value_heads": 2, "linear_num_key_heads": 6,
        "linear_num_value_heads": 12,
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 192, "intermediate_size": 768,
    },
    "kimi_linear": {
        **LATENT, "num_hidden_layers": 6, "linear_num_heads": 6, "linear_head_dim": 64,
        "num_local_experts": 6, "q_lora_rank": None,
    },
    "minimax": {
        "num_hidden_layers": 6, "num_key_value_heads": 4, "num_local_experts": 6, "num_experts_per_tok": 2,
        "intermediate_size": 96,
    },
    "lfm2": {"num_hidden_layers": 6, "num_key_value_heads": 4, "full_attn_idxs": [1, 4]},
    "glm_moe_dsa": {
        **LATENT, "num_hidden_layers": 6, "q_lora_rank": 96, "n_routed_experts": 6, "index_n_heads": 4,
        "index_topk": 512, "indexer_types": ["full", "full", "full", "shared", "full", "shared"],
    },
}  # fmt: skip
"""Layers of one block, Mamba-2 with groups and with one, Mamba-1, Mamba-2 next to attention and alone; Gated
DeltaNet, Kimi Delta Attention, Lightning attention, short convolutions, sparse attention."""


def model_of(name: str) -> Model:
    heads = {} if name == "mamba2" else HEADS
    return model_from_config({"model_type": name, **SIZES, **heads, **CONFIGS[name]}, name=name)


def problem_of(name: str, software: str = "plain") -> Problem:
    job = Job(seq_len=1536, global_batch_size=36, dtype="bf16", optimizer="adamw", profile=SOFTWARE[software])
    return bind(model_of(name), load_cluster("3x4xH100-SXM"), job)


@pytest.mark.parametrize("name", CONFIGS)
def test_times_and_bytes_of_many_rows(name: str, full: bool) -> None:
    problem = problem_of(name)
    assert_same_columns(problem, legal_strategies(problem, ALL_ROWS if full else ROWS, seed=41))
    own = modules_of_layers(kind.operators for kind in problem.model.kinds)
    sets = tuple(one for one in MODULE_SETS[1:] if set(names_of(one)) <= set(own))
    if sets:
        rows = legal_strategies(problem, ALL_ROWS if full else ROWS, seed=42, module_sets=sets)
        assert_same_columns(problem, rows)


@pytest.mark.parametrize("software", SOFTWARE, ids=lambda name: name[:40])
@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_next", "glm_moe_dsa"])
def test_all_software(name: str, software: str, full: bool) -> None:
    problem = problem_of(name, software)
    assert_same_columns(problem, legal_strategies(problem, ALL_ROWS if full else FEW_ROWS, seed=43))


EXCHANGE_S, OPERATOR_TIMES = cost_layers._exchange_s, cost_operators.operator_times


def _free(*given: Any) -> Any:
    return 0.0 * EXCHANGE_S(*given)


def _forward_alone(problem: Any, table: Any, operator: Any, experts: Any) -> Any:
    seconds = OPERATOR_TIMES(problem, table, operator, experts)
    return replace(seconds, input_s=seconds.forward_s) if operator.kind == "scan" else seconds


@pytest.mark.parametrize(
    ("name", "broken"),
    [("_exchange_s", _free), ("operator_times", _forward_alone)],
    ids=["exchange between tokens and heads", "backward of a scan"],
)
def test_omissions_are_noticed(
    name: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_of("nemotron_h")
    rows = legal_strategies(problem, ROWS, seed=41)
    monkeypatch.setattr(cost_layers, name, broken)
    with pytest.raises(AssertionError):
        assert_same_columns(problem, rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nemotron_h", "granitemoehybrid", "qwen3_next", "glm_moe_dsa"])
def test_the_checker_proves_their_plans(name: str, tmp_path: Any) -> None:
    plan = sw.plan(model_of(name), cluster="1x4xH100-SXM", seq_len=2048, global_batch_size=8, target="any")
    plan.save(tmp_path / "plan.yaml")
    checked = checked_plan(str(tmp_path / "plan.yaml"), 60.0)
    assert not checked.failed


def test_tensor_parallelism_divides_the_groups_of_mamba() -> None:
    """tp 12 divides the 12 heads and is a multiple of the 4 key-value heads. It does not divide 4 groups of B
    and C, and 4 does not divide 2; a single group is on every rank."""
    degrees = {
        name: {row.tp for row in legal_strategies(problem_of(name), 200, seed=44)}
        for name in ("nemotron_h", "granitemoehybrid", "mamba2")
    }
    assert degrees == {"nemotron_h": {1, 2, 4}, "granitemoehybrid": {1, 2, 4, 12}, "mamba2": {1, 2}}
