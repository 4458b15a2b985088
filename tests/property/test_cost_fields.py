"""Every field of a strategy changes the estimate in the direction that physics says, on real models and
clusters.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

import numpy as np
import pytest

from shardwise.cluster import load_cluster
from shardwise.cost import Problem, bind, peaks_of
from shardwise.model import load_model
from shardwise.plans import Result
from shardwise.search.result import result_of
from shardwise.strategy import (
    FIELDS,
    RULES,
    Job,
    Strategy,
    StrategyTable,
    complete,
    first_broken,
    parse_fields,
)

Test = TypeVar("Test")

CHECKED: dict[str, str] = {}
"""Fields that some test below varies, by the name of the test."""


def varies(*fields: str) -> Callable[[Test], Test]:
    """Marks a test as the one that varies these fields."""

    def marked(test: Test) -> Test:
        CHECKED.update(dict.fromkeys(fields, str(test)))
        return test

    return marked


def problem(model: str, cluster: str, *, batch: int = 64, seq_len: int = 4096) -> Problem:
    job = Job(seq_len=seq_len, global_batch_size=batch, dtype="bf16")
    return bind(load_model(model), load_cluster(cluster), job)


@pytest.fixture(scope="module")
def dense() -> Problem:
    return problem("llama-3.1-8b", "2x8xH100-SXM")


@pytest.fixture(scope="module")
def routed() -> Problem:
    return problem("qwen3-30b-a3b", "2x8xH100-SXM")


def strategy(p: Problem, text: str) -> Strategy:
    experts = p.model.experts
    return complete(
        parse_fields(text),
        devices=p.cluster.devices,
        layers=p.model.layers,
        experts=experts.experts if experts else None,
        global_batch_size=p.job.global_batch_size,
    )


def results(p: Problem, *texts: str) -> list[Result]:
    """Estimates of strategies, all of which are legal."""
    listed = [strategy(p, text) for text in texts]
    broken = first_broken(StrategyTable.of(listed), p.limits, RULES)
    assert broken.tolist() == [-1] * len(listed)
    return [result_of(p, each) for each in listed]


def rising(values: list[float]) -> bool:
    return all(a < b for a, b in pairwise(values))


def parts(found: list[Result], name: str) -> list[float]:
    return [result.breakdown[name] for result in found]


def memory_of(found: list[Result], name: str) -> list[float]:
    return [result.memory[name] for result in found]


@varies("tp", "dp")
def test_more_tensor_parallelism_needs_less_memory_and_more_communication(dense: Problem) -> None:
    found = results(dense, *(f"tp={tp},sequence_parallel=no" for tp in (8, 4, 2, 1)))
    assert rising(memory_of(found, "parameters")) and rising(memory_of(found, "activations"))
    assert rising([-seconds for seconds in parts(found, "tensor_communication")])
    assert found[-1].breakdown["tensor_communication"] == 0.0


def test_tensor_ranks_beyond_the_key_value_heads_repeat_them() -> None:
    # gemma-2-9b and llama-2-70b have 8 key-value heads: 16 ranks hold each twice, so more than half of what 8
    # hold.
    p = problem("llama-2-70b", "2x8xH100-SXM")
    eight, sixteen = results(p, "tp=8", "tp=16")
    ratio = sixteen.memory["parameters"] / eight.memory["parameters"]
    assert 0.5 < ratio < 0.52


@varies("pp")
def test_more_stages_need_less_memory_and_have_a_larger_bubble(dense: Problem) -> None:
    found = results(dense, *(f"pp={pp}" for pp in (8, 4, 2, 1)))
    assert rising(memory_of(found, "parameters"))
    assert rising([-seconds for seconds in parts(found, "pipeline_bubble")])


@varies("cp")
def test_more_context_parallelism_saves_fewer_activations_and_sends_keys() -> None:
    p = problem("llama-3.1-8b", "2x8xH100-SXM", batch=16, seq_len=131_072)
    found = results(p, *(f"cp={cp},dp={16 // cp}" for cp in (16, 8, 4, 2, 1)))
    assert rising(memory_of(found, "activations"))
    ratio = found[3].memory["activations"] / found[4].memory["activations"]
    assert ratio == pytest.approx(0.5, rel=1e-12)
    assert found[-1].breakdown["context_communication"] == 0.0
    assert all(seconds > 0.0 for seconds in parts(found[:-1], "context_communication"))


@varies("cp_kind")
def test_a_ring_hides_communication_that_an_all_to_all_of_heads_exposes() -> None:
    # A long sequence: 0.9 of the ring's messages overlap with attention; the all-to-all sends queries and
    # output too.
    p = problem("llama-3.1-8b", "2x8xH100-SXM", batch=16, seq_len=131_072)
    ring, call = results(p, "cp=2,cp_kind=ring", "cp=2,cp_kind=all_to_all")
    assert 0.0 < ring.breakdown["context_communication"] < call.breakdown["context_communication"]
    assert ring.peak_memory == call.peak_memory


@varies("ep")
def test_more_expert_parallelism_holds_fewer_experts_and_sends_tokens(routed: Problem) -> None:
    found = results(routed, *(f"ep={ep}" for ep in (16, 8, 4, 2, 1)))
    assert rising(memory_of(found, "parameters"))
    sent = parts(found, "expert_communication")
    assert sent[-1] == 0.0 and rising([-seconds for seconds in sent[1:]])
    assert sent[0] > 1.05 * sent[1]  # between nodes, though a token goes to another node once


@varies("etp")
def test_experts_split_over_tensor_ranks_join_more_than_they_send(routed: Problem) -> None:
    alone, split = results(routed, "tp=4,ep=4,etp=1", "tp=4,ep=4,etp=4")
    assert split.memory["parameters"] < alone.memory["parameters"]
    assert split.breakdown["expert_communication"] > alone.breakdown["expert_communication"]


@varies("axis_order")
def test_tensor_ranks_in_different_nodes_communicate_slowly(dense: Problem) -> None:
    near, far = results(dense, "tp=2,dp=8", "tp=2,dp=8,axis_order=dp-tp-cp-pp")
    # 50 GB/s of network instead of 450 GB/s of NVLink.
    assert far.breakdown["tensor_communication"] > 4.0 * near.breakdown["tensor_communication"]
    assert far.breakdown["matmul"] == pytest.approx(near.breakdown["matmul"], rel=1e-12)
    # The data parallel ranks are now inside a node.
    p = bind(dense.model, dense.cluster, dense.job)
    together, apart = results(p, "tp=8,dp=2,axis_order=dp-tp-cp-pp", "tp=8,dp=2")
    assert together.breakdown["tensor_communication"] > apart.breakdown["tensor_communication"]
    assert together.breakdown["gradient_reduction"] < apart.breakdown["gradient_reduction"]


@varies("sequence_parallel")
def test_sequence_parallelism_saves_less_and_works_less_on_norms(dense: Problem) -> None:
    without, with_ = results(dense, "tp=8,sequence_parallel=no", "tp=8,sequence_parallel=yes")
    assert with_.memory["activations"] < without.memory["activations"]
    assert with_.breakdown["memory_bound"] < without.breakdown["memory_bound"]
    assert with_.breakdown["tied_weights"] > without.breakdown["tied_weights"]


@varies("micro_batch_size")
def test_larger_microbatches_save_more_bubble_more_and_compute_better(dense: Problem) -> None:
    found = results(dense, *(f"tp=8,pp=2,micro_batch_size={size}" for size in (1, 4, 16)))
    assert rising(memory_of(found, "activations"))
    assert rising(parts(found, "pipeline_bubble"))
    assert found[0].breakdown["matmul"] >= found[1].breakdown["matmul"]
    assert rising([-seconds for seconds in parts(found, "host_actions")])


@varies("schedule", "vpp")
def test_schedules_trade_waiting_for_memory(dense: Problem) -> None:
    texts = ("gpipe", "1f1b", "zb_h1", "zb_h2")
    gpipe, plain, h1, h2 = results(dense, *(f"tp=2,pp=8,schedule={name}" for name in texts))
    assert plain.memory["activations"] < gpipe.memory["activations"]
    assert plain.peak_memory.device <= h1.peak_memory.device < h2.peak_memory.device
    assert h2.breakdown["pipeline_bubble"] <= h1.breakdown["pipeline_bubble"] * (1 + 1e-9)
    two, four = results(dense, "tp=2,pp=8,vpp=2", "tp=2,pp=8,vpp=4")
    assert four.breakdown["pipeline_bubble"] < two.breakdown["pipeline_bubble"]
    assert two.breakdown["pipeline_bubble"] < plain.breakdown["pipeline_bubble"]
    assert two.memory["activations"] > plain.memory["activations"]


@varies("first_stage_layers", "last_stage_layers")
def test_fewer_layers_on_the_stage_with_the_head_shorten_the_step() -> None:
    # gemma-2-9b's head of 256,000 words is worth several layers.
    p = problem("gemma-2-9b", "4x3xH100-SXM", batch=96)
    even, less = results(p, "pp=6,tp=2", "pp=6,tp=2,last_stage_layers=4")
    assert less.step_time_s < even.step_time_s
    ends = [f"pp=6,tp=2,last_stage_layers=4,first_stage_layers={count}" for count in (0, 7)]
    none, many = results(p, *ends)
    assert none.layout.pipelines[0].stages[0].layers == (0,)
    assert none.step_time_s > many.step_time_s


@varies("recompute", "recompute_layers")
def test_recomputation_trades_time_for_memory(dense: Problem) -> None:
    texts = ("none", "selective", *(f"full,recompute_layers={count}" for count in (8, 16, 32)))
    found = results(dense, *(f"tp=2,recompute={text}" for text in texts))
    none, selective, *full = found
    assert none.breakdown["recompute"] == 0.0 < selective.breakdown["recompute"]
    assert rising(parts(full, "recompute")) and rising([each.step_time_s for each in (none, *full)])
    assert rising([-nbytes for nbytes in memory_of(full, "activations")])
    assert full[-1].memory["activations"] < selective.memory["activations"] < none.memory["activations"]
    # All layers again: a forward of all but the ends, somewhat more than a quarter of the computation.
    again = full[-1].breakdown["recompute"]
    once = none.breakdown["matmul"] + none.breakdown["attention"] + none.breakdown["memory_bound"]
    assert 0.25 < again / once < 0.5


@varies("optim_shard", "grad_shard", "param_shard")
def test_sharding_trades_messages_for_memory(dense: Problem) -> None:
    found = results(dense, *(f"tp=2,zero_stage={stage}" for stage in range(4)))
    assert rising([-result.peak_memory.allocated for result in found])
    assert memory_of(found, "optimizer")[1] == pytest.approx(memory_of(found, "optimizer")[0] / 8, rel=1e-12)
    assert memory_of(found, "gradients")[2] == pytest.approx(memory_of(found, "gradients")[1] / 8, rel=1e-12)
    assert memory_of(found, "parameters")[3] == pytest.approx(
        memory_of(found, "parameters")[2] / 8, rel=1e-12
    )
    assert parts(found, "shard_communication")[:2] == [0.0, 0.0]
    assert rising(parts(found, "shard_communication")[1:])
    assert rising([-seconds for seconds in parts(found, "optimizer")[:2]])


@pytest.mark.parametrize("field", ["optim_shard", "grad_shard", "param_shard"])
def test_each_degree_of_sharding_holds_less(dense: Problem, field: str) -> None:
    found = results(dense, *(f"tp=2,{field}={degree}" for degree in (1, 2, 4, 8)))
    assert rising([-result.memory["optimizer"] for result in found])
    if field != "optim_shard":
        assert rising([-result.memory["gradients"] for result in found])
    if field == "param_shard":
        assert rising([-result.memory["parameters"] for result in found])


@varies("offload")
def test_offload_moves_bytes_to_the_host_and_takes_time(dense: Problem) -> None:
    texts = [f"tp=4,pp=4,offload={kind}" for kind in ("none", "optimizer", "activations", "both")]
    none, optimizer, activations, both = results(dense, *texts)
    peaks = peaks_of(dense, StrategyTable.of([strategy(dense, text) for text in texts]))
    on_host = peaks.host_bytes
    assert on_host[0] == 0.0
    assert np.argsort(on_host).tolist()[-1] == 3 and on_host[3] <= on_host[1] + on_host[2] + 1.0
    assert optimizer.memory["optimizer"] == both.memory["optimizer"] == 0.0 < none.memory["optimizer"]
    assert both.memory["activations"] == activations.memory["activations"] < none.memory["activations"]
    assert optimizer.breakdown["optimizer"] > none.breakdown["optimizer"]
    assert activations.breakdown["offload"] > none.breakdown["offload"] == 0.0
    assert none.step_time_s < min(optimizer.step_time_s, activations.step_time_s)
    assert max(optimizer.step_time_s, activations.step_time_s) < both.step_time_s


@varies("recompute_modules")
def test_more_modules_hold_less_and_take_longer(dense: Problem) -> None:
    sets = ("core_attn", "core_attn+mlp", "core_attn+layernorm+mlp")
    texts = (f"tp=2,recompute=selective,recompute_modules={modules}" for modules in sets)
    found = results(dense, "tp=2", *texts)
    assert rising([-nbytes for nbytes in memory_of(found, "activations")])
    assert rising(parts(found, "recompute")) and found[0].breakdown["recompute"] == 0.0


def test_every_field_is_varied() -> None:
    assert set(CHECKED) == set(FIELDS)
