"""Costs of adapters on frozen weights, by hand: bytes, seconds, traffic; and that they never need more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.property.cost_samples import Case, problem_of
from tests.property.test_verification_evaluator import legal_strategies

from shardwise.cluster import load_cluster
from shardwise.cost import Problem, bind, costs_of_all_stages, rank_bytes
from shardwise.cost.layers import GridCost, grid_cost
from shardwise.cost.recipe import FP32_BYTES
from shardwise.model import lora_of_text, model_from_config, with_lora
from shardwise.search import default_job
from shardwise.strategy import PROFILES, StrategyTable, complete

TINY: dict[str, Any] = {
    "layers": 2, "hidden": 64, "ffn": 160, "heads": 4, "kv_heads": 2, "vocab": 100, "gated": True,
    "norm": "rmsnorm", "positions": "rope", "bias": False, "tied": False, "dropout": 0.0, "seq_len": 128,
}  # fmt: skip

TOKENS = 128
"""Tokens of a micro-batch of one sequence."""


def problem(adapters: str | None, cluster: str = "8xH100-SXM", software: str = "megatron-2026") -> Problem:
    model = model_from_config(TINY, name="tiny")
    model = model if adapters is None else with_lora(model, lora_of_text(adapters))
    on = load_cluster(cluster)
    job = default_job(model, on, seq_len=TOKENS, global_batch_size=8)
    return bind(model, on, replace(job, profile=PROFILES[software]))


def table(p: Problem, **fields: Any) -> StrategyTable:
    row = complete(
        fields, devices=p.cluster.devices, layers=p.model.layers, experts=None, global_batch_size=8
    )
    return StrategyTable.of([row])


def grid(p: Problem, **fields: Any) -> GridCost:
    return grid_cost(p, table(p, **fields))


def states(p: Problem, **fields: Any) -> dict[str, float]:
    rows = table(p, **fields)
    parts = rank_bytes(p, rows, costs_of_all_stages(p, rows))
    return {name: float(getattr(parts, name).max()) for name in ("parameters", "gradients", "optimizer")}


ALL_ATTENTION = "r=4,targets=q_proj+k_proj+v_proj+o_proj"
"""3,584 trained elements: 4 (64 + 64) for q and o and 4 (64 + 32) for k and v in each of 2 layers."""

BASE = 2 * (64 * (64 + 64 + 64) + 3 * 64 * 160 + 2 * 64) + 2 * 100 * 64 + 64
"""Frozen elements: q and out [64, 64], k and v [64, 32], three matrices of the MLP, two norms; both ends."""


def test_states_of_adapters_alone() -> None:
    """bf16: 2 B per element of all weights; of trained ones 4 B of gradient, 12 B of master and moments."""
    found = states(problem(ALL_ATTENTION))
    assert found == {
        "parameters": 2.0 * (BASE + 3584), "gradients": 4.0 * 3584, "optimizer": 12.0 * 3584,
    }  # fmt: skip
    assert states(problem(None))["optimizer"] == 12.0 * BASE


def test_zero_shards_the_states_of_adapters_and_all_parameters() -> None:
    found = states(problem(ALL_ATTENTION), zero_stage=3)
    assert found["parameters"] == 2.0 * (BASE + 3584) / 8
    assert found["gradients"] == 4.0 * 3584 / 8
    assert found["optimizer"] == 12.0 * 3584 / 8


def test_fully_shard_has_frozen_weights_in_fp32_shards() -> None:
    """Accelerate casts the whole model: 4 B more per frozen element, in shards."""
    found = states(problem(ALL_ATTENTION, software="fsdp2-eager"), zero_stage=3)
    assert found["optimizer"] == pytest.approx((12.0 * 3584 + FP32_BYTES * BASE) / 8)


def test_tensor_ranks_shard_one_matrix_of_each_adapter() -> None:
    """tp 2. A of q [64, 4] is whole and B [4, 64] has 32 columns; A of out has 32 rows and B is whole."""
    found = grid(problem(ALL_ATTENTION), tp=2)
    q, kv = 64 * 4 + 4 * 32, 64 * 4 + 4 * 16
    out = 32 * 4 + 4 * 64
    (layer,) = found.kinds
    assert float(layer.trained_dense[0]) == q + 2 * kv + out
    assert float(layer.replicated_weights[0]) == 3 * 64 * 4 + 4 * 64
    assert float(found.embedding.trained_dense[0]) == float(found.head.trained_dense[0]) == 0.0


def test_saved_activations_by_hand() -> None:
    """Elements of 2 B per token: the inputs of both norms and the output of the first, which A of q, k and v
    reads; q, keys and values, and the output of attention; gate and up; 4 outputs of A. And 4 B for each of 4
    heads. Full training also has the inputs of the MLP's matrices: 64 + 160."""
    shared = 64 + 64 + 64 + 64 + 2 * 32 + 64 + 2 * 160
    found = grid(problem(ALL_ATTENTION))
    assert float(found.kinds[0].saved_bytes[0]) == TOKENS * (2 * (shared + 4 * 4) + 4 * 4)
    full = grid(problem(None))
    assert float(full.kinds[0].saved_bytes[0]) == TOKENS * (2 * (shared + 64 + 160) + 4 * 4)


def test_frozen_matmuls_have_no_weight_gradient() -> None:
    """The backward of a frozen matmul takes about as long as its forward, not twice as long."""
    case = Case(model="llama-3.1-8b", cluster="8xH100-SXM", batch=8)
    full = problem_of(case)
    one = bind(with_lora(full.model, lora_of_text("r=1,targets=q_proj")), full.cluster, full.job)
    rows = legal_strategies(full, 1, seed=3)
    plain, adapted = (grid_cost(p, StrategyTable.of(rows)) for p in (full, one))
    for block in (adapted.embedding, adapted.head):
        assert float(block.backward_weight.total_s[0]) == 0.0
    weight_s, own_s = plain.kinds[0].backward_weight.matmul_s, adapted.kinds[0].backward_weight.matmul_s
    assert own_s[0] < 0.1 * weight_s[0]
    input_s, own_s = plain.kinds[0].backward_input.matmul_s, adapted.kinds[0].backward_input.matmul_s
    assert input_s[0] < own_s[0] < 1.1 * input_s[0]  # it has that of A and B too


def test_replicas_reduce_the_gradients_of_adapters_alone() -> None:
    """Bytes decide: gradients of 3,584 elements in fp32 over 8 ranks."""
    p = problem(ALL_ATTENTION)
    costs = costs_of_all_stages(p, table(p))
    fabric, sizes = costs.partitions.grid.fabric, costs.partitions.grid.groups.data
    expected = fabric.all_reduce_s(3584 * p.recipe.reduced_bytes, sizes)
    np.testing.assert_allclose(costs.shards.reduction_s.max(), np.max(expected), rtol=1e-12)


def test_whole_matrices_of_adapters_are_reduced_over_tensor_ranks() -> None:
    """With and without sequence parallelism: the sum over the other matrix' sharded side is one over tp. On
    two layers 3 A of [64, 4] and a B of [4, 64] each."""
    p = problem(ALL_ATTENTION)
    for sequence_parallel in (False, True):
        found = grid(p, tp=8 // 4, sequence_parallel=sequence_parallel)
        nbytes = 2 * (3 * 64 * 4 + 4 * 64) * p.recipe.reduced_bytes
        expected = found.fabric.all_reduce_s(nbytes, found.groups.tensor)
        np.testing.assert_allclose(found.replicated_s, expected, rtol=1e-12)


@pytest.mark.parametrize("software", ["plain", "whole stages", "by block"])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "tiny-dense", "mixtral-8x7b"])
def test_adapters_never_need_more_memory(model: str, software: str) -> None:
    """Less than full training, and less the smaller their rank; frozen weights alone need least. Where states
    are on the host, adapters add their weights and the outputs of A."""
    full = problem_of(Case(model=model, cluster="2x4xH100-SXM", batch=16, seq_len=1536, software=software))
    strategies = legal_strategies(full, 60, seed=41)
    rows = StrategyTable.of(strategies)
    targets = "q_proj+v_proj" if full.model.experts else "all-linear"
    whole = rank_bytes(full, rows, costs_of_all_stages(full, rows)).device.max(axis=0)
    sizes = []
    for r in (1, 2, 4, 8):
        p = bind(with_lora(full.model, lora_of_text(f"r={r},targets={targets}")), full.cluster, full.job)
        sizes.append(rank_bytes(p, rows, costs_of_all_stages(p, rows)).device.max(axis=0))
    steps = np.diff(np.array(sizes), axis=0)
    assert (steps >= 0.0).all() and (steps > 0.0).sum() > 0.9 * steps.size
    has_states = np.array([row.offload in ("none", "activations") for row in strategies])
    assert has_states.sum() > 20
    assert (sizes[-1] < whole)[has_states].all()
    # The steps from 1 to 2 and from 2 to 4 are as their ranks are, or more where another moment is the peak;
    # so rank 0, with frozen weights alone, is about as far below rank 1.
    assert (steps[1] >= 1.95 * steps[0]).all()
    assert (sizes[0] - steps[0] <= whole).all()
