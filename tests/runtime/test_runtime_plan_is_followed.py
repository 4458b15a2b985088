"""The plan is obeyed: a step has the collectives that the cost model counts, with equal kinds, bytes and
numbers.

Tiny llama: hidden size 32, 4 heads and 2 key-value heads of 8, 4 layers, sequence 32, batch 8, fp32. The
hidden states of a sample have 32 * 32 * 4 = 4,096 bytes. A layer has 7,744 parameters, the embedding 96 * 32
= 3,072, the head with its norm 3,104: 30,976, 12,288 and 12,416 bytes, 148,608 in all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
import torch
from tests.runtime.counted_collectives import KINDS, predicted
from tests.runtime.equality import batches, whole_module
from tests.runtime.plans import make_plan
from tests.runtime.recorded_collectives import CollectiveRecord, record_collectives
from torch import distributed
from torch.profiler import ProfilerActivity, profile

from shardwise.cluster import find_device
from shardwise.plans import Plan
from shardwise.runtime import WorkerPool, parallelize
from shardwise.runtime.uniform import UniformTrainingJob
from shardwise.runtime.workers import Report

Times = dict[tuple[str, int], int]
"""How often a step has a collective of this kind and number of bytes."""

NORM: Times = {("all_reduce", 8): 1}
"""Loss and squared gradient norm, of which the cost model counts the latency only."""

BLOCKS = {12_288: 1, 12_416: 1, 30_976: 4}
"""Bytes of the blocks' parameters, and the number of such blocks."""

TIED_BLOCKS = {16_640: 1, 34_176: 4}
"""The same of a tiny GPT with hidden 32 and ffn 64: tables of 96 and 32 rows and the last norm, 32 * (96 + 32
+ 2) parameters; in a layer 4 * 33 * 32 of attention, 33 * 64 + 65 * 32 of the MLP and 4 * 32 of norms."""


@dataclass(frozen=True)
class Case:
    """`obeyed`: collectives that the cost model counts with the same bytes. `summed`: collectives whose bytes
    together count as one. `extra`: collectives that do not count; a comment gives the reason."""

    text: str
    model: str = "llama"
    obeyed: Times = field(default_factory=dict)
    summed: Times = field(default_factory=dict)
    extra: Times = field(default_factory=dict)


GLOO = find_device("cpu").backend


def each_block(kind: str, times: int, blocks: dict[int, int] = BLOCKS) -> Times:
    return {(kind, nbytes): count * times for nbytes, count in blocks.items()}


CASES = {
    # One reduction of all gradients.
    "replicas": Case("dp=2,micro_batch_size=2", summed=each_block("all_reduce", 1), extra=NORM),
    # Both ends of a tied table are one block.
    "replicas of a tied table": Case(
        "dp=2,micro_batch_size=2", "gpt", summed=each_block("all_reduce", 1, TIED_BLOCKS), extra=NORM
    ),
    "optimizer states of a tied table": Case(
        "dp=2,zero_stage=1,micro_batch_size=2",
        "gpt",
        summed={
            **each_block("reduce_scatter", 1, TIED_BLOCKS),
            **each_block("all_gather", 1, TIED_BLOCKS),
        },
        extra=NORM,
    ),
    # Gradients are reduced to their owners once, parameters are gathered once.
    "optimizer states": Case(
        "dp=2,zero_stage=1,micro_batch_size=2",
        summed={**each_block("reduce_scatter", 1), **each_block("all_gather", 1)},
        extra=NORM,
    ),
    # Two micro-batches: gradients are reduced to their owners in each.
    "gradients": Case(
        "dp=2,zero_stage=2,micro_batch_size=2",
        obeyed=each_block("reduce_scatter", 2),
        summed=each_block("all_gather", 1),
        extra=NORM,
    ),
    # Parameters are gathered in both passes of both micro-batches.
    "parameters": Case(
        "dp=2,zero_stage=3,micro_batch_size=2",
        obeyed={**each_block("reduce_scatter", 2), **each_block("all_gather", 4)},
        extra=NORM,
    ),
    # Two groups of two: gradients are reduce-scattered within a group, and their halves all-reduced between
    # groups.
    "groups of replicas": Case(
        "dp=4,zero_stage=2,dp_shard=2,micro_batch_size=1",
        obeyed=each_block("reduce_scatter", 2),
        summed={
            **each_block("all_gather", 1),
            **{("all_reduce", nbytes // 2): count for nbytes, count in BLOCKS.items()},
        },
        extra=NORM,
    ),
    # Eight micro-batches of one sample: two all-reduces in each layer's forward pass and two in its backward
    # pass, one after the embedding and one in the backward pass of the head. The vocab-parallel loss adds an
    # all-reduce of the maximum of 32 tokens, and one of their sum with the target's logit.
    "tensor ranks": Case(
        "tp=2,sequence_parallel=false",
        obeyed={("all_reduce", 4_096): 8 * (4 * 4 + 2)},
        extra={**NORM, ("all_reduce", 32 * 4): 8, ("all_reduce", 2 * 32 * 4): 8},
    ),
    # Each all-reduce becomes a reduce-scatter and an all-gather; gradients of 9 norms are all-reduced.
    "divided sequence": Case(
        "tp=2,sequence_parallel=true",
        obeyed={("all_gather", 4_096): 8 * (4 * 4 + 2), ("reduce_scatter", 4_096): 8 * (4 * 4 + 2)},
        extra={**NORM, ("all_reduce", 32 * 4): 8 + 9, ("all_reduce", 2 * 32 * 4): 8},
    ),
    # Attention: half of the sequence's queries, keys, values and outputs, forward and backward: 16 tokens *
    # (4 + 2 + 2 + 4) heads * 8 * 4 bytes, on average 1,536 for each of the four.
    "heads for tokens": Case(
        "cp=2,cp_kind=all_to_all",
        summed=each_block("all_reduce", 1),
        obeyed={("all_to_all", 2_048): 8 * 4 * 4, ("all_to_all", 1_024): 8 * 4 * 4},
        extra=NORM,
    ),
    # Hidden states of four micro-batches of two samples each way: rank 0 sends forward and receives backward.
    "pipeline": Case(
        "pp=2,schedule=1f1b,micro_batch_size=2",
        obeyed={("send", 8_192): 4},
        extra={**NORM, ("recv", 8_192): 4},
    ),
    # Each of two tensor ranks sends half, and the receivers all-gather the halves: on rank 0 those of
    # gradients.
    "pipeline of tensor ranks": Case(
        "pp=2,tp=2,schedule=1f1b,micro_batch_size=2,sequence_parallel=false",
        obeyed={
            ("send", 4_096): 4,
            ("all_gather", 8_192): 4,
            ("all_reduce", 8_192): 4 * (2 * 4 + 1),
        },
        extra={**NORM, ("recv", 4_096): 4},
    ),
}

QUARTERS = {("all_to_all", 2_048): 1_536, ("all_to_all", 1_024): 1_536}
"""Queries and outputs are larger than keys and values; the cost model counts four of their average."""


def step_of(report: Report, plan: Plan) -> Counter[CollectiveRecord]:
    """The collectives of a rank's second step (the first one includes setup)."""
    job = parallelize(whole_module(plan.model, 0), plan)
    job.step(batches(plan, 0).batch(0))
    with record_collectives() as record:
        job.step(batches(plan, 0).batch(1))
    return record.counts


def times_of(counts: Counter[CollectiveRecord]) -> Times:
    return {(collective.kind, collective.nbytes): times for collective, times in counts.items()}


def total(*parts: Times) -> Times:
    sums: Counter[tuple[str, int]] = Counter()
    for part in parts:
        sums.update(part)
    return dict(sums)


@pytest.mark.parametrize("name", CASES)
def test_a_step_has_the_predicted_collectives(team: WorkerPool, name: str) -> None:
    case = CASES[name]
    plan = make_plan(case.text, model=case.model)
    found = times_of(team.run(plan.cluster.devices, step_of, plan)[0])
    assert found == total(case.obeyed, case.summed, case.extra)
    estimated = predicted(plan)
    for kind, nbytes in case.obeyed:
        assert (KINDS[GLOO.substitute(kind)], QUARTERS.get((kind, nbytes), nbytes)) in estimated
    for kind in {kind for kind, _ in case.summed}:
        together = sum(nbytes * times for (other, nbytes), times in case.summed.items() if other == kind)
        assert (KINDS[GLOO.substitute(kind)], together) in estimated


def test_a_ring_passes_keys_and_values_once_around(team: WorkerPool) -> None:
    """Two ranks have keys and values of 4,096 bytes, estimated once forward and twice backward. Each rank
    sends its half: forward keys and values of 1,024 bytes, backward the same, and their gradients twice (the
    second time to their owner, which the cost model leaves out). 8 micro-batches of 4 layers."""
    plan = make_plan("cp=2")
    found = times_of(team.run(2, step_of, plan)[0])
    assert found[("send", 1_024)] == found[("recv", 1_024)] == 8 * 4 * (2 + 2 + 2 * 2)
    assert ("pass", 2 * 2_048) in predicted(plan)


@pytest.mark.parametrize(
    ("text", "row_bytes"),
    [
        # 32 tokens of a sample, two experts each: 64 rows of 128 bytes.
        ("dp=2,ep=2", 8_192),
        # Each of two tensor ranks has half of the tokens.
        ("tp=2,ep=2,sequence_parallel=false", 4_096),
    ],
)
def test_tokens_go_to_their_experts_and_back(team: WorkerPool, text: str, row_bytes: int) -> None:
    """Forward and backward, to the experts and back, in each of 4 layers and for each of a replica's
    micro-batches. The bytes that a rank returns depend on the routing; in sum they are those that arrived.
    The cost model assumes the load of the busiest rank, 1.1 by default. Counts (8 bytes for each expert) and
    probabilities (4 bytes a row) are sent separately."""
    plan = make_plan(text, model="mixtral")
    ranks = [times_of(counts) for counts in team.run(2, step_of, plan)]
    sent = [
        (nbytes, times)
        for rank in ranks
        for (kind, nbytes), times in rank.items()
        if kind == "all_to_all" and nbytes > 1_024
    ]
    microbatches = 8 // plan.best.strategy.dp
    calls = 2 * microbatches * 4 * 4  # on two ranks
    assert sum(times for _, times in sent) == calls
    assert sum(nbytes * times for nbytes, times in sent) == calls * row_bytes
    assert ("all_to_all", round(1.1 * row_bytes, 3)) in predicted(plan)
    assert all(rank[("all_to_all", 4 * 8)] == microbatches * 4 for rank in ranks)
    if plan.best.strategy.tp > 1:  # halves of the tokens are gathered
        assert all(rank[("all_gather", 4_096)] == 2 * microbatches * 4 for rank in ranks)
        assert ("pass", 4_096) in predicted(plan)


def test_parts_of_experts_are_gathered_and_added_up(team: WorkerPool) -> None:
    """64 rows of 128 bytes, half from each of two ranks; forward and backward, 8 micro-batches of 4
    layers."""
    plan = make_plan("tp=2,etp=2,sequence_parallel=true", model="mixtral")
    found = times_of(team.run(2, step_of, plan)[0])
    assert found[("all_gather", 8_192)] == found[("reduce_scatter", 8_192)] == 2 * 8 * 4
    assert {("pass", round(1.1 * 8_192, 3)), ("all_reduce", round(1.1 * 8_192, 3))} <= predicted(plan)


def test_latents_are_joined_in_place_of_hidden_states(team: WorkerPool) -> None:
    """A token has 36 latent elements: 20 for queries, 12 for keys and values, 4 rotary ones. So a message of
    32 * 36 * 4 = 4,608 bytes per layer, micro-batch and direction, for which the cost model counts a hidden
    state (4,096). Each of 8 micro-batches gathers hidden states before 4 MLPs (one dense, three shared
    experts) and the head, and in the backward pass after the embedding, 4 attentions and 4 MLPs.

    Replicated parameters are all-reduced once: 9 norms of 32; in each layer norms of 20 and 12 and
    projections of 32 by 20 and by 16; three routers of 8 by 32. These are 5,792 elements; the cost model
    leaves out the last norm.
    """
    plan = make_plan("tp=2,ep=1,sequence_parallel=true", model="deepseek_v3")
    found = times_of(team.run(2, step_of, plan)[0])
    for kind in ("all_gather", "reduce_scatter"):
        assert found[kind, 4_608] == 8 * 4
        assert found[kind, 4_096] == 8 * (4 + 1 + 9)
    estimated = predicted(plan)
    assert {("pass", 4_096), ("scatter", 4_096)} <= estimated
    whole = {4 * 32: 9, 4 * 20: 4, 4 * 12: 4, 4 * 32 * 20: 4, 4 * 32 * 16: 4, 4 * 8 * 32: 3}
    loss = {4 * 32: 8}
    for nbytes, times in whole.items():
        assert found["all_reduce", nbytes] == times + loss.get(nbytes, 0)
    assert ("all_reduce", sum(nbytes * times for nbytes, times in whole.items()) - 4 * 32) in estimated


def begun_before_the_end(report: Report, plan: Plan) -> tuple[int, int]:
    """The number of this rank's gradient blocks whose reduction has started when a step's backward passes
    end, and the number of all blocks."""
    job = parallelize(whole_module(plan.model, 0), plan)
    assert isinstance(job, UniformTrainingJob)
    (replicas,) = [stage.replicas for _, stage in job.stages if stage.replicas is not None]
    begun = []
    reduce = replicas.reduce

    def reported() -> None:
        begun.append(len(replicas._works))
        reduce()

    with patch.object(replicas, "reduce", reported):
        job.step(batches(plan, 0).batch(0))
    return begun[0], len(replicas.memory)


@pytest.mark.parametrize(
    ("text", "is_overlapped"),
    [
        ("dp=2", True),
        ("pp=2,dp=2,schedule=1f1b", True),
        ("pp=2,dp=2,schedule=gpipe", True),
        ("tp=2,dp=2", True),
        # Weight gradients have a pass of their own, without hooks that report when they are ready.
        ("pp=2,dp=2,schedule=zb_h1", False),
    ],
)
def test_gradients_are_reduced_during_the_last_backward_pass(
    team: WorkerPool, text: str, is_overlapped: bool
) -> None:
    plan = make_plan(text)
    for begun, blocks in team.run(plan.cluster.devices, begun_before_the_end, plan):
        assert begun == (blocks if is_overlapped else 0) and blocks > 1


def names_of(report: Report, collective: str) -> list[str]:
    """The operations that gloo carries out for one collective of two ranks, by PyTorch's profiler."""
    shard, whole = torch.ones(4), torch.ones(8)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: distributed.all_reduce(whole),
        "all_gather": lambda: distributed.all_gather_single(whole, shard),
        "reduce_scatter": lambda: distributed.reduce_scatter_single(shard, whole),
        "all_to_all": lambda: distributed.all_to_all_single(torch.empty(8), whole),
    }
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        calls[collective]()
    found = [event.name for event in seen.events() if event.name.startswith("gloo:")]
    return [name.removeprefix("gloo:") for name in found]


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_gloo_runs_the_collectives_of_its_backend_file(team: WorkerPool, collective: str) -> None:
    assert team.run(2, names_of, collective) == [[GLOO.substitute(collective)]] * 2
