"""Modules whose saved tensors are on the host: bytes that leave the device, bytes that are copied, and what
a plan has of them, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.unit.cost.test_cost_modules import LLAMA_70B, TOKENS, problem_of

from shardwise.cluster import load_cluster
from shardwise.cost import Problem, bind, peaks_of
from shardwise.cost.layers import BlockCost, grid_cost
from shardwise.model import load_model
from shardwise.plans import Plan
from shardwise.search import plan_of_strategy
from shardwise.strategy import NEWEST_MEGATRON_LM, Job, StrategyTable, complete, parse_fields

ATTENTION = "core_attn+attn_proj"


def with_modules(problem: Problem, modules: str) -> Problem:
    profile = replace(problem.profile, offload_modules=modules)
    return bind(problem.model, problem.cluster, replace(problem.job, profile=profile))


def layer_of(problem: Problem, modules: str, text: str = "") -> BlockCost:
    """The costs of the first kind of layer in a strategy."""
    experts = problem.model.experts
    strategy = complete(
        parse_fields(text), devices=64, layers=problem.model.layers,
        experts=None if experts is None else experts.experts, global_batch_size=64,
    )  # fmt: skip
    return (
        grid_cost(with_modules(problem, modules), StrategyTable.of([strategy])).kinds[0].taken(np.array([0]))
    )


def per_token(nbytes: Any) -> float:
    """Elements of two bytes per token."""
    return float(nbytes[0]) / 2 / TOKENS


@pytest.mark.parametrize(
    ("modules", "released", "moved"),
    [
        # The log-sum-exp has 64 x 4096 elements, less than 2**20, and stays.
        ("core_attn", ("q", "k and v"), ("q", "k and v", "core output")),
        (ATTENTION, ("q", "k and v", "core output"), ("q", "k and v", "core output", "core output")),
        ("qkv_linear", ("layer input", "attention norm"), ("layer input", "attention norm")),
        # Norms that Transformer Engine computes with the next product move nothing by themselves.
        ("attn_norm+mlp_norm", (), ()),
        ("expert_fc1+moe_act", (), ()),
    ],
)
def test_a_dense_layer(modules: str, released: tuple[str, ...], moved: tuple[str, ...]) -> None:
    problem = problem_of(load_model("llama-3.1-70b"))
    plain, found = layer_of(problem, ""), layer_of(problem, modules)
    assert per_token(found.offloaded_bytes) == sum(LLAMA_70B[name] for name in released)
    assert per_token(found.moved_bytes) == sum(LLAMA_70B[name] for name in moved)
    for name in ("saved_bytes", "selective_bytes"):
        left = per_token(getattr(plain, name)) - per_token(getattr(found, name))
        assert left == pytest.approx(sum(LLAMA_70B[one] for one in released), rel=1e-12)
    assert float(plain.moved_bytes[0]) == float(plain.offloaded_bytes[0]) == 0.0


def test_small_tensors_stay() -> None:
    """Over 8 tensor ranks queries have 4096 x 8192 / 8 = 2**22 elements; keys, and values, have
    4096 x 1024 / 8 = 2**19, less than 2**20."""
    problem = problem_of(load_model("llama-3.1-70b"))
    found = layer_of(problem, ATTENTION, "tp=8,sequence_parallel=yes")
    assert per_token(found.offloaded_bytes) == 8192 / 8 + 8192 / 8
    wide = layer_of(problem, ATTENTION, "tp=4,sequence_parallel=yes")
    assert per_token(wide.offloaded_bytes) == (8192 + 2048 + 8192) / 4


@pytest.mark.parametrize(
    ("modules", "released"),
    [("mlp_norm", 4096), ("expert_fc1", 2 * 4096), ("moe_act", 2 * 28672), ("mlp_norm+moe_act", 61440)],
)
def test_a_layer_with_experts(modules: str, released: int) -> None:
    """Hidden 4096; each token goes to 2 experts with gate and up of 14336 each."""
    found = layer_of(problem_of(load_model("mixtral-8x7b")), modules)
    assert per_token(found.offloaded_bytes) == per_token(found.moved_bytes) == released


def plan_of(modules: str, text: str = "tp=8,pp=2,dp=4,sequence_parallel=yes,zero_stage=1") -> Plan:
    model, cluster = load_model("llama-3.1-70b"), load_cluster("8x8xH100-SXM")
    profile = replace(NEWEST_MEGATRON_LM, offload_modules=modules)
    job = Job(seq_len=TOKENS, global_batch_size=128, dtype="bf16", profile=profile)
    strategy = complete(
        parse_fields(text), devices=64, layers=80, experts=None, global_batch_size=128
    )  # fmt: skip
    return plan_of_strategy(model, cluster, job, strategy)


def host_of(plan: Plan) -> float:
    """Bytes on the host, per device."""
    problem = bind(plan.model, plan.cluster, plan.job)
    return float(peaks_of(problem, StrategyTable.of([plan.strategy])).host_bytes[0])


def test_a_plan_with_modules_on_the_host() -> None:
    """tp 8, pp 2: the first stage has 40 layers and 2 micro-batches in flight. Of 80 layers, 2 are on the
    device: one on its way to the host, one on its way back. A layer releases (8192 + 8192) / 8
    elements of 2 B per token (keys and values are too small), and copies 8192 / 8 more. 32 micro-batches
    copy all there and back; hidden copies slow the computation by `overlap_slowdown` - 1."""
    plain, found = plan_of(""), plan_of(ATTENTION)
    released = (8192 + 8192) / 8 * 2 * TOKENS
    moved = released + 8192 / 8 * 2 * TOKENS
    saved = plain.best.memory["activations"] - found.best.memory["activations"]
    assert saved == pytest.approx((2 * 40 - 2) * released, rel=1e-9)
    assert host_of(plain) == 0.0
    of_process = found.job.profile.host_process_bytes
    assert host_of(found) == pytest.approx(2 * 40 * moved + of_process, rel=1e-9)
    node = found.cluster.nodes[0]
    (device,) = found.cluster.classes.values()
    hidden_s = 40 * moved / node.host_link_bytes_per_s
    expected_s = 32 * 2 * (device.efficiency.overlap_slowdown - 1.0) * hidden_s
    assert found.best.breakdown["offload"] == pytest.approx(expected_s, rel=1e-9)
    assert found.step_time_s > plain.step_time_s
