"""Bytes on a rank, part by part, by hand: bricks of 110 weights that save 300 B of activations per
micro-batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.unit.cost.hand_made import (
    brick_model,
    bytes_of,
    cluster,
    device,
    matmul,
    operator_model,
    problem,
    table,
    with_efficiency,
    with_software,
)

from shardwise.cost import Problem, costs_of_all_stages, host_bytes, peaks_of
from shardwise.cost.memory import communicators_of
from shardwise.model import Experts
from shardwise.operators import Attention, Extent, GroupedMatmul, Loss, Saved, Weight


def close(found: Any, *expected: float) -> None:
    """Values of the only row, index by index."""
    np.testing.assert_allclose(np.asarray(found)[..., 0].ravel(), expected, rtol=1e-12, atol=1e-15)


def one_node(**efficiency: Any) -> Problem:
    return problem(on=cluster(1, of=with_efficiency(**efficiency)))


def test_mixed_precision_adamw_takes_eighteen_bytes_per_parameter() -> None:
    memory = bytes_of(one_node(), "dp=4")
    # 440 + 400 weights: 2 B of weights, 4 B of gradients, 4 + 8 B of master copy and moments.
    close(memory.parameters, 1680.0)
    close(memory.gradients, 3360.0)
    close(memory.optimizer, 10080.0)
    close(memory.parameters + memory.gradients + memory.optimizer, 18 * 840.0)


@pytest.mark.parametrize(
    ("optimizer", "dtype", "per_parameter"),
    [
        ("adamw", "bf16", 12.0),
        ("sgd", "bf16", 8.0),
        ("adafactor", "bf16", 4.0),
        ("muon", "bf16", 8.0),
        ("adamw", "fp32", 8.0),
        ("adamw", "fp8", 12.0),
    ],
)
def test_optimizer_states(optimizer: str, dtype: str, per_parameter: float) -> None:
    memory = bytes_of(problem(on=cluster(1), optimizer=optimizer, dtype=dtype), "dp=4")
    close(memory.optimizer, 840 * per_parameter)
    close(memory.parameters, 840 * (4.0 if dtype == "fp32" else 2.0))


@pytest.mark.parametrize(
    ("shards", "parameters", "gradients", "states", "gathered"),
    [
        ("zero_stage=0", 1680.0, 3360.0, 10080.0, 0.0),
        ("zero_stage=1", 1680.0, 3360.0, 2520.0, 0.0),
        ("zero_stage=2", 1680.0, 840.0, 2520.0, 0.0),
        ("zero_stage=3", 420.0, 840.0, 2520.0, 440.0),  # two whole layers of 110 * 2 B
        ("param_shard=2,grad_shard=2,optim_shard=4", 840.0, 1680.0, 2520.0, 440.0),
        ("cp=2,zero_stage=1", 1680.0, 3360.0, 2520.0, 0.0),  # dp * cp ranks share states
    ],
)
def test_sharded_states(
    shards: str, parameters: float, gradients: float, states: float, gathered: float
) -> None:
    memory = bytes_of(one_node(), shards)
    close(memory.parameters, parameters)
    close(memory.gradients, gradients)
    close(memory.optimizer, states)
    close(memory.gathered, gathered)


@pytest.mark.parametrize(
    ("text", "parameters", "gradients", "gathered"),
    [
        # Stages of 420 weights on two ranks each, four micro-batches: 2 B and 4 B each, nothing to gather.
        ("pp=2,dp=2,zero_stage=3", 840.0, 1680.0, 0.0),
        ("pp=2,dp=2,zero_stage=2", 840.0, 1680.0, 0.0),
        # One micro-batch: its 4 x 600 B of activations are there before any gradient is, and only its shard
        # counts, 420 * 4 / 2 = 840 B. After its backward pass there are 1680 B and no activations.
        ("pp=2,dp=2,zero_stage=3,micro_batch_size=4", 840.0, 840.0, 0.0),
        # Without a pipeline every backward pass reduces.
        ("dp=4,zero_stage=3", 420.0, 840.0, 440.0),
    ],
)
def test_stages_of_pytorch_are_whole_until_gradients_are_reduced(
    text: str, parameters: float, gradients: float, gathered: float
) -> None:
    p = with_software(one_node(), whole_in_pipelines=True)
    memory = bytes_of(p, text)
    for found, expected in (
        (memory.parameters, parameters), (memory.gradients, gradients), (memory.gathered, gathered),
    ):  # fmt: skip
        assert np.all(np.asarray(found) == expected)
    sharded = bytes_of(one_node(), "pp=2,dp=2,zero_stage=3")
    close(sharded.parameters, 420.0, 420.0)
    close(sharded.gradients, 840.0, 840.0)


def test_gradients_are_whole_from_the_first_backward_pass_of_a_stage_on() -> None:
    """Four micro-batches of 600 B each on stages of 420 weights; shards of gradients have 840 B."""
    p = with_software(one_node(), whole_in_pipelines=True)
    # GPipe: with all four in flight 2400 + 840 B, after the first backward pass 1800 + 1680 B, which is more.
    # On the last stage losses of 3 more micro-batches (5 rows of 20 logits, 4 B each: 1200 B) turn it.
    memory = bytes_of(p, "pp=2,dp=2,zero_stage=3,schedule=gpipe")
    close(memory.gradients, 1680.0, 840.0)
    close(memory.activations, 1800.0, 2400.0)
    # Without sharding gradients are never reduced into shards: 310, 110, 110 and 310 weights of 4 B.
    close(bytes_of(p, "pp=4,schedule=gpipe").gradients, 1240.0, 440.0, 440.0, 1240.0)


def test_a_rank_with_many_stages_has_whole_gradients_of_one() -> None:
    """Interleaved stages with as many micro-batches as ranks pass backward one stage after the other."""
    model = brick_model(pattern=(0,) * 8)
    p = with_software(problem(model, cluster(1), batch=4), whole_in_pipelines=True)
    memory = bytes_of(p, "pp=2,dp=2,vpp=4,schedule=interleaved_1f1b,zero_stage=3")
    # Both ranks have four layers of 110 weights, and 200 of an end: 640, whose shards have 4 / 2 B each. Two
    # micro-batches of 4 layers save 8 * 300 B. Rank 0 has its peak with all of them: the first backward pass
    # frees 300 B, and 110 gradients grow by 2 B each. On rank 1 the first stage that passes backward has the
    # head too, whose (110 + 200) * 2 B are more than the 300 B.
    close(memory.activations, 2400.0, 2100.0)
    close(memory.gradients, 640 * 2.0, 640 * 2.0 + 310 * 2.0)


@pytest.mark.parametrize(
    ("text", "narrow", "wide"),
    [
        # 840 weights / 4 ranks * 4 B of the sum = 840 B in both. The head's 200 weights have 2 B of gradient
        # and 2 or 4 B of the reduction buffer, of which 620 B are temporaries: 800 - 620 or 1200 - 620.
        ("dp=4,zero_stage=3", (840.0 + 180.0,), (840.0 + 580.0,)),
        # Stages of 420 weights are whole until the reduction, 2 or 4 B each; buffers of a layer of 110
        # weights are 440 - 620 < 0 or 660 - 620 = 40, those of the head as above.
        ("pp=2,dp=2,zero_stage=3", (840.0, 840.0 + 180.0), (1680.0 + 40.0, 1680.0 + 580.0)),
    ],
)
def test_gradients_that_are_cast_after_their_reduction(
    text: str, narrow: tuple[float, ...], wide: tuple[float, ...]
) -> None:
    """fully_shard with reduce_dtype=bf16: what is sent is narrow, what stays is fp32
    (tests/targets/test_fsdp_pipeline.py counts it)."""
    software: dict[str, Any] = {"whole_in_pipelines": True, "reduces_by_block": True}
    close(bytes_of(with_software(one_node(), **software), text).gradients, *wide)
    software |= {"reduce_in_fp32": False, "accumulates_in_fp32": True}
    close(bytes_of(with_software(one_node(), **software), text).gradients, *narrow)


def test_tensor_ranks_share_split_states() -> None:
    # Norms of 10 weights are whole on both ranks: 4 * 60 + 200.
    close(bytes_of(one_node(), "tp=2").parameters, 880.0)


def test_experts_shard_over_their_own_replicas() -> None:
    weight = Weight(name="w", shape=(Extent(10), Extent(20, "expert_ffn")), experts=8)
    work = GroupedMatmul(name="g", experts=8, k=Extent(10), n=Extent(20, "expert_ffn"), weights=(weight,))
    model = operator_model((work,), experts=Experts(experts=8, top_k=1), embedding=(), head=())
    p = problem(model, cluster(1))
    # Two layers of 1600 weights. ep 2 leaves 1600 on a rank, with two replicas of each expert.
    close(bytes_of(p, "ep=2,zero_stage=0").optimizer, 1600 * 12.0)
    close(bytes_of(p, "ep=2,zero_stage=1").optimizer, 800 * 12.0)  # dp 4, but only two replicas
    close(bytes_of(p, "ep=4,zero_stage=1").optimizer, 800 * 12.0)  # 800 on a rank, no replica
    memory = bytes_of(p, "ep=2,zero_stage=3")
    close(memory.parameters, 800 * 2.0)
    close(memory.gathered, 2 * 800 * 2.0)  # two layers' experts of one rank


@pytest.mark.parametrize(
    ("text", "by_degree", "by_instance"),
    [
        # 1600 elements of experts on a rank with 2 replicas each; dp 4 of dense weights. States over 4 ranks:
        # one instance, which has both replicas. Over 2: two instances, each with one replica of an expert.
        ("ep=2,zero_stage=1", 800, 800),
        ("ep=2,param_shard=1,grad_shard=1,optim_shard=2", 800, 1600),
        ("ep=2,param_shard=1,grad_shard=1,optim_shard=1", 1600, 1600),
        # 3200 elements, 4 replicas: two instances with two replicas each.
        ("ep=1,param_shard=1,grad_shard=1,optim_shard=2", 1600, 1600),
        # 800 elements without a second replica.
        ("ep=4,param_shard=1,grad_shard=1,optim_shard=2", 800, 800),
        # Instances have shards of states alone.
        ("ep=2,param_shard=1,grad_shard=2,optim_shard=2", 800, 800),
    ],
)
def test_experts_have_states_in_every_instance_of_the_optimizer(
    text: str, by_degree: int, by_instance: int
) -> None:
    weight = Weight(name="w", shape=(Extent(10), Extent(20, "expert_ffn")), experts=8)
    work = GroupedMatmul(name="g", experts=8, k=Extent(10), n=Extent(20, "expert_ffn"), weights=(weight,))
    model = operator_model((work,), experts=Experts(experts=8, top_k=1), embedding=(), head=())
    p = problem(model, cluster(1))
    close(bytes_of(p, text).optimizer, by_degree * 12.0)
    close(bytes_of(with_software(p, shards_experts_by_instance=True), text).optimizer, by_instance * 12.0)


def test_activations_of_one_stage() -> None:
    # One micro-batch in flight: four layers of 300 B; the logits are temporaries.
    close(bytes_of(one_node(), "dp=4").activations, 1200.0)
    close(bytes_of(one_node(), "dp=4,micro_batch_size=2").activations, 2400.0)


@pytest.mark.parametrize(
    ("text", "activations"),
    [
        # Eight micro-batches, one layer per stage.
        ("pp=4,schedule=1f1b", (4 * 300, 3 * 300, 2 * 300, 300)),
        ("pp=4,schedule=gpipe", (8 * 300, 8 * 300, 8 * 300, 8 * 300)),
        # Micro-batches that wait for W have 200 B of the product, and 200 B of the head on the last rank: of
        # four, r + 1 at most; of seven, 2 r + 1 at most.
        ("pp=4,schedule=zb_h1", (4 * 300, 3 * 300 + 200, 2 * 300 + 2 * 200, 4 * 400)),
        ("pp=4,schedule=zb_h2", (7 * 300, 5 * 300 + 2 * 200, 3 * 300 + 4 * 200, 7 * 400)),
        # Two stages of two layers and two replicas: four micro-batches.
        ("pp=2,schedule=1f1b", (2 * 600, 600)),
        # Four stages on two ranks: 2 * (2 - 1 - r) + 2 + 1 chunks on rank r.
        ("pp=2,vpp=2", (5 * 300, 3 * 300)),
        # Three on the first stage while one of the last stage waits.
        ("pp=2,schedule=zb_v", (3 * 300 + 400, 4 * 300)),
        ("pp=2,schedule=dualpipe_v", (5 * 300, 5 * 300)),
    ],
)
def test_microbatches_in_flight(text: str, activations: tuple[float, ...]) -> None:
    close(bytes_of(one_node(), text).activations, *activations)


@pytest.mark.parametrize(
    ("text", "saved_losses"),
    [
        # The backward of the loss follows at once, and its logits of 400 B are freed ...
        ("pp=4,schedule=1f1b", 0),
        ("pp=2,schedule=1f1b", 0),
        ("pp=2,vpp=2", 0),
        ("dp=4", 0),
        # ... also where weight gradients come later: what waits for them counts among the activations ...
        ("pp=4,schedule=zb_h1", 0),
        ("pp=4,schedule=zb_h2", 0),
        ("pp=2,schedule=zb_v", 0),
        ("pp=2,schedule=dualpipe_v", 0),
        # ... but if all forwards come first: logits of all in flight but one.
        ("pp=4,schedule=gpipe", 7),
    ],
)
def test_losses_that_are_saved(text: str, saved_losses: int) -> None:
    # Temporaries: 2 * 200 B of the norm and 110 * 2 B of gradients; the logits alone need no more.
    found = np.asarray(bytes_of(one_node(), text).temporaries)[:, 0]
    assert found.tolist() == [620.0] * (len(found) - 1) + [620.0 + saved_losses * 400.0]


@pytest.mark.parametrize(
    ("recompute", "activations"),
    [
        ("none", (2 * 600, 600)),
        ("selective", (2 * 200, 200)),  # norm outputs are not saved
        # Half of the bytes that recomputation frees (300 - 100 per layer); and one recomputed layer, 200 B.
        ("full,recompute_layers=1", (2 * 400 + 200, 400 + 200)),
        ("full,recompute_layers=2", (2 * 200 + 200, 200 + 200)),
    ],
)
def test_recomputation_saves_fewer_activations(recompute: str, activations: tuple[float, ...]) -> None:
    close(bytes_of(one_node(), f"pp=2,recompute={recompute}").activations, *activations)


@pytest.mark.parametrize(
    ("text", "activations"),
    [
        # Of four micro-batches r + 1 wait with 200 B (and 200 B of the head on the last rank), the others
        # have their inputs of 100 B; and 200 B of one layer are recomputed.
        (
            "pp=4,schedule=zb_h1,recompute=full",
            (300 + 200 + 200, 200 + 400 + 200, 100 + 600 + 200, 1600 + 200),
        ),
        # Without names, selective recomputation has no tensors of a whole layer at once.
        ("pp=4,schedule=zb_h1,recompute=selective", (300 + 200, 200 + 400, 100 + 600, 1600)),
        # The input of one alone, where those of the others are on the host.
        (
            "pp=4,schedule=zb_h1,recompute=full,offload=activations",
            (100 + 200 + 200, 100 + 400 + 200, 100 + 600 + 200, 100 + 1600 + 200),
        ),
        # Of seven, 2 r + 1 wait.
        (
            "pp=4,schedule=zb_h2,recompute=full",
            (600 + 200 + 200, 400 + 600 + 200, 200 + 1000 + 200, 2800 + 200),
        ),
        # Stages of two layers, of which one is recomputed: 400 B in flight, 400 B that wait (600 with the
        # head); two micro-batches.
        ("pp=2,schedule=zb_h1,recompute=full,recompute_layers=1", (2 * 400 + 200, 2 * 600 + 200)),
        # Rank 0 has three of the first stage and the waiting one of the last; rank 1 three that wait, or five
        # in flight.
        ("pp=2,schedule=zb_v,recompute=full", (300 + 400 + 200, 600 + 200)),
        ("pp=2,schedule=dualpipe_v,recompute=full", (300 + 400 + 200, 500 + 200)),
    ],
)
def test_recomputed_activations_wait_for_the_weight_gradients(
    text: str, activations: tuple[float, ...]
) -> None:
    close(bytes_of(one_node(), text).activations, *activations)


def test_sequence_parallelism_splits_saved_activations_of_norms() -> None:
    close(bytes_of(one_node(), "tp=2,sequence_parallel=no").activations, 4 * 300.0)
    close(bytes_of(one_node(), "tp=2,sequence_parallel=yes").activations, 4 * 150.0)


@pytest.mark.parametrize(
    ("text", "activations"),
    [
        # Stages of one layer, which saves 300 B.
        ("pp=4,offload=activations", (300, 300, 300, 300)),
        ("pp=4,offload=both", (300, 300, 300, 300)),
        ("pp=4,offload=optimizer", (1200, 900, 600, 300)),
        # Of two layers, and of four: one computes while another's activations are copied.
        ("pp=2,offload=activations", (600, 600)),
        ("dp=4,offload=activations", (600,)),
        ("dp=4,offload=activations,recompute=selective", (200,)),
        # Two inputs, and 200 B that are recomputed.
        ("dp=4,offload=activations,recompute=full", (400,)),
        # Half of the layers save everything: such a one together with another one.
        ("dp=4,offload=activations,recompute=full,recompute_layers=2", (600,)),
    ],
)
def test_offloaded_activations_leave_two_layers(text: str, activations: tuple[float, ...]) -> None:
    close(bytes_of(one_node(), text).activations, *activations)


@pytest.mark.parametrize(
    ("offload", "states", "on_host"),
    [
        ("none", 310.0 * 12, 0.0),
        # The ends have a layer and 200 weights: states and master copies of 12 B, and 2 B that return.
        ("optimizer", 0.0, 310.0 * 14),
        ("activations", 310.0 * 12, 4 * 300.0),
        ("both", 0.0, 310.0 * 14 + 4 * 300.0),
    ],
)
def test_offloaded_bytes_move_to_the_host(offload: str, states: float, on_host: float) -> None:
    p = one_node()
    rows = table(p, f"pp=4,offload={offload}")
    close(bytes_of(p, f"pp=4,offload={offload}").optimizer[:1], states)
    close(host_bytes(p, rows, costs_of_all_stages(p, rows)), on_host)
    close(peaks_of(p, rows).host_bytes, on_host)


def test_temporaries_are_the_largest_tensor_its_gradient_and_gradients_of_weights() -> None:
    # The norm's output of 200 B twice, and 110 gradients of 2 B before they are accumulated; on the last
    # stage the logits' 400 B need no more.
    close(bytes_of(one_node(), "pp=2").temporaries, 620.0, 620.0)
    # tp 2 with sequence parallelism: 2 * 100 B and 60 gradients of 2 B, logits 200 B.
    close(bytes_of(one_node(), "pp=2,tp=2").temporaries, 320.0, 320.0)
    # Without it norms are whole: 2 * 200 B; tp halves the logits alone.
    close(bytes_of(one_node(), "pp=2,tp=2,sequence_parallel=no").temporaries, 520.0, 520.0)
    # Two kinds: the 210 gradients of the larger kind, on all stages.
    uneven = problem(brick_model((0, 0, 1, 0)), cluster(1))
    close(bytes_of(uneven, "pp=2").temporaries, 820.0, 820.0)
    # fp32: 2 * 400 B, and 110 gradients of 4 B.
    fp32 = problem(on=cluster(1), dtype="fp32")
    close(bytes_of(fp32, "pp=2").temporaries, 1240.0, 1240.0)


def test_a_large_head_decides_the_temporaries_of_its_stage() -> None:
    # 5 * 200 logits of 4 B instead of two tensors of 200 B; the gradients of a layer's weights with either.
    words = Extent(200, "vocab")
    loss = Loss(
        name="loss", classes=words, saved=(Saved(name="logits", width=words, rows="head", dtype="fp32"),)
    )
    p = problem(brick_model(head=(loss,)), cluster(1))
    close(bytes_of(p, "pp=2").temporaries, 620.0, 4220.0)
    close(bytes_of(p, "pp=2,schedule=zb_v").temporaries, 4220.0, 620.0)
    close(bytes_of(p, "dp=4").temporaries, 4220.0)


@pytest.mark.parametrize(
    ("loss", "dtype", "nbytes"),
    [
        ("in_place", "bf16", 4000.0),
        ("megatron", "bf16", 2000.0 + 4000.0),
        ("megatron", "fp32", 4000.0),  # the cast of logits in fp32 copies nothing
        ("eager", "bf16", 3 * 4000.0),
        ("eager", "fp32", 3 * 4000.0),
        ("compiled", "bf16", 2 * 2000.0),
        ("compiled", "fp32", 2 * 4000.0),
        ("fused", "bf16", 2000.0),
        ("fused", "fp32", 4000.0),
    ],
)
def test_the_loss_has_the_bytes_of_its_software(loss: str, dtype: str, nbytes: float) -> None:
    # 5 * 200 logits, and 110 gradients of a layer's weights.
    words = Extent(200, "vocab")
    logits = Saved(name="logits", width=words, rows="head", dtype="fp32")
    model = brick_model(head=(Loss(name="loss", classes=words, saved=(logits,)),))
    p = with_software(problem(model, cluster(1), dtype=dtype), loss=loss)
    own = 110 * (2.0 if dtype == "bf16" else 4.0)
    close(bytes_of(p, "dp=4").temporaries, nbytes + own)


def test_losses_of_prediction_modules_wait_for_their_backward() -> None:
    # Three losses of 1000 logits: at the last one, 6 B a logit; of the first two the softmax, 4 B a logit.
    words = Extent(200, "vocab")
    logits = Saved(name="logits", width=words, rows="head", dtype="fp32")
    losses = tuple(Loss(name=f"loss {place}", classes=words, saved=(logits,)) for place in range(3))
    model = replace(brick_model(head=losses), head_layers=2)
    p = with_software(problem(model, cluster(1)), loss="megatron")
    close(bytes_of(p, "dp=4").temporaries, 6000.0 + 2 * 4000.0 + 220.0)
    eager = with_software(p, loss="eager")
    close(bytes_of(eager, "dp=4").temporaries, 12000.0 + 2 * 4000.0 + 220.0)


@pytest.mark.parametrize(
    ("text", "temporaries", "gradients"),
    [
        # fp32. A layer: 2 * 400 B of temporaries, 110 gradients of 4 B. The head: 100 logits of 4 B with
        # 200 gradients of 4 B, 1200 B; or the gradients and a copy that is sent, 1600 B: 360 B more than
        # 1240 B, with a quarter of 840 gradients.
        ("dp=4,zero_stage=2", (1240.0,), (840.0 + 360.0,)),
        # Stages of 420 weights, on two ranks.
        ("pp=2,dp=2,zero_stage=3", (1240.0, 1240.0), (840.0, 840.0 + 360.0)),
        # Gradients accumulated by the end of the step are sent when no activations are saved any more.
        ("dp=4,zero_stage=1", (1240.0,), (3360.0,)),
        # One micro-batch of two rows: 1600 + 440 B of a layer; the sent copy takes less. The gradients are
        # a quarter of the head's 200 then.
        ("dp=4,micro_batch_size=2,zero_stage=1", (2040.0,), (200.0,)),
    ],
)
def test_temporaries_of_blocks_that_are_reduced_one_by_one(
    text: str, temporaries: tuple[float, ...], gradients: tuple[float, ...]
) -> None:
    p = with_software(problem(on=cluster(1), dtype="fp32"), reduces_by_block=True)
    close(bytes_of(p, text).temporaries, *temporaries)
    close(bytes_of(p, text).gradients, *gradients)


def test_gathered_inputs_are_saved_if_the_profile_says_so() -> None:
    # Four layers: each tensor rank has half of the product's input of 100 B, and of the norm's 200 B.
    p = one_node()
    close(bytes_of(p, "tp=2,dp=2").activations, 4 * (50.0 + 100.0))
    keeps = with_software(p, keeps_gathered_inputs=True)
    close(bytes_of(keeps, "tp=2,dp=2").activations, 4 * (100.0 + 100.0))
    close(
        bytes_of(keeps, "tp=2,dp=2,recompute=full,recompute_layers=4").activations, 4 * 50.0 + (200.0 - 50.0)
    )  # inputs of layers are shards; one layer is gathered
    whole = "tp=2,dp=2,sequence_parallel=no"
    close(bytes_of(keeps, whole).activations, float(np.asarray(bytes_of(p, whole).activations)[0, 0]))


@pytest.mark.parametrize(
    ("dtype", "each"),
    [
        ("bf16", 0.0),
        ("fp8", 2.0),
        ("fp8-block", 2 * (1 + 4 / 128)),
        ("mxfp8", 2 * (1 + 1 / 32)),
        ("nvfp4", 1.125),
    ],
)
def test_low_precision_copies_of_weights_stay_where_the_software_keeps_them(dtype: str, each: float) -> None:
    peaks = dict.fromkeys(("bf16", "fp8", "fp4", "fp32"), 1000.0)
    on = cluster(1, of=device(peak_flop_per_s=peaks))
    p = with_software(problem(on=on, dtype=dtype), keeps_low_precision_weights=True)
    # Four layers with a product of 10 x 10 weights, twice; norms, embedding and head have no copies.
    close(bytes_of(p, "dp=4").parameters, 840 * 2.0 + 4 * 100 * each)
    close(bytes_of(p, "tp=2,dp=2").parameters, 440 * 2.0 + 4 * 50 * each)
    # Sharded parameters are gathered, and cast, layer by layer.
    close(bytes_of(p, "dp=4,zero_stage=3").parameters, 420.0)
    close(bytes_of(with_software(p, keeps_low_precision_weights=False), "dp=4").parameters, 840 * 2.0)


def test_unfused_attention_saves_its_scores() -> None:
    core = Attention(
        name="a", heads=Extent(4, "heads"), kv_heads=Extent(2, "kv_heads"), qk_dim=3, v_dim=5,
        saved=(Saved(name="q", width=Extent(12, "heads")),),
    )  # fmt: skip
    model = operator_model((core,), embedding=(), head=())
    fused = problem(model, cluster(1), seq_len=8)
    unfused = with_software(fused, attention=())
    # Two layers: 8 * 12 * 2 B, and 8 * 8 * 4 scores of 2 B; recomputed scores and their gradient.
    close(bytes_of(fused, "dp=4").activations, 2 * 192.0)
    close(bytes_of(unfused, "dp=4").activations, 2 * (192.0 + 512.0))
    close(bytes_of(fused, "dp=4").temporaries, 2 * 192.0)
    close(bytes_of(unfused, "dp=4").temporaries, 2 * 512.0)
    close(bytes_of(unfused, "dp=4,recompute=selective").activations, 2 * 192.0)


def test_inputs_of_one_matmul_are_saved_in_its_dtype() -> None:
    operand = Saved(name="input", width=Extent(128), dtype="operand")
    work = matmul("m", Extent(128), Extent(10, "ffn"), saved=(operand,))
    model = operator_model((work,), embedding=(), head=())
    each = {
        "bf16": 2.0,
        "fp32": 4.0,
        "fp8": 1.0,
        "fp8-current": 1.0,
        "fp8-block": 1.0 + 4 / 128,  # a scale of four bytes for each 128
        "mxfp8": 1.0 + 1 / 32,  # one byte for each 32
        "nvfp4": 0.5 + 1 / 16,  # one byte for each 16
    }
    peaks = dict.fromkeys(("bf16", "fp8", "fp4", "fp32"), 1000.0)
    on = cluster(1, of=device(peak_flop_per_s=peaks))
    for dtype, nbytes in each.items():
        close(bytes_of(problem(model, on, dtype=dtype), "dp=4").activations, 2 * 5 * 128 * nbytes)


def test_gradients_in_the_dtype_of_the_weights() -> None:
    p = with_software(one_node(), reduce_in_fp32=False)
    memory = bytes_of(p, "dp=4")
    close(memory.gradients, 840 * 2.0)
    close(memory.optimizer, 840 * 12.0)
    # In fp32 nothing changes.
    fp32 = problem(on=cluster(1), dtype="fp32")
    close(bytes_of(with_software(fp32, reduce_in_fp32=False), "dp=4").gradients, 840 * 4.0)


@pytest.mark.parametrize(
    ("text", "buffers"),
    [
        # Eight micro-batches: eight messages sent and eight received of 100 B.
        ("pp=4", 16 * 100.0),
        ("pp=2", 8 * 100.0),  # four
        ("pp=2,dp=2,micro_batch_size=2", 4 * 200.0),  # two
        ("pp=2,dp=2,micro_batch_size=4", 4 * 400.0),  # one, but never fewer than the four of a pipeline
        # Messages are whole on every tensor rank: eight times two, of 50 B each.
        ("pp=2,tp=2", 16 * 2 * 50.0),
        ("pp=1,dp=4", 0.0),
    ],
)
def test_buffers_of_a_whole_step(text: str, buffers: float) -> None:
    p = with_software(one_node(), buffers_all_microbatches=True)
    close(np.asarray(bytes_of(p, text).buffers)[:1], buffers)
    close(peaks_of(p, table(p, text)).device_bytes, float(bytes_of(p, text).device.max()))


@pytest.mark.parametrize(
    ("text", "gradients", "states"),
    [
        # 840 weights of 4 B, two micro-batches: whole gradients accumulate; two moments.
        ("dp=4,micro_batch_size=1,zero_stage=0", 3360.0, 8 * 840.0),
        # The rank's own quarter of the weights is stored in addition to the whole ones.
        ("dp=4,micro_batch_size=1,zero_stage=1", 3360.0, (8 + 4) * 210.0),
        # With ZeRO-3 this quarter is the stored weights; the head's gradients are sent, 360 B beyond the
        # temporaries.
        ("dp=4,micro_batch_size=1,zero_stage=3", 840.0 + 360.0, 8 * 210.0),
        # One micro-batch: no gradient stays whole, and at the last layer only the head's 200 have one.
        ("dp=4,micro_batch_size=2,zero_stage=1", 200.0, (8 + 4) * 210.0),
        ("dp=4,micro_batch_size=2,zero_stage=0", 3360.0, 8 * 840.0),
    ],
)
def test_states_reduced_by_block(text: str, gradients: float, states: float) -> None:
    p = with_software(problem(on=cluster(1), dtype="fp32"), reduces_by_block=True)
    memory = bytes_of(p, text)
    close(memory.gradients, gradients)
    close(memory.optimizer, states)
    close(peaks_of(p, table(p, text)).device_bytes, float(memory.device.max()))


def test_a_step_of_one_microbatch_has_gradients_instead_of_activations() -> None:
    """bf16, two rows: 840 weights of 2 B; four layers save 600 B each. Logits take 800 B in fp32 and 400 B in
    addition, a layer 2 * 400 B, and gradients of 2 B of 200 and 110 weights; accumulated ones take 4 B.
    """
    p = with_software(one_node(), reduces_by_block=True)
    alone = "dp=4,micro_batch_size=2,zero_stage=0"
    # At the last layer: 1680 + 800 + 2400 + 1020. (At the head 1680 + 2400 + 1600; at the first layer
    # 1680 - 2 * 530 + 4 * 530 + 600 + 1020; at the embedding 1680 - 2 * 640 + 3360 + 400.)
    memory = bytes_of(p, alone)
    parts = (memory.parameters, memory.gradients, memory.activations, memory.temporaries)
    for found, expected in zip(parts, (1680.0, 800.0, 2400.0, 1020.0), strict=True):
        close(found, expected)
    close(peaks_of(p, table(p, alone)).device_bytes, float(memory.device.max()))
    # With several micro-batches gradients stay, and so do weights.
    several = bytes_of(p, "dp=4,zero_stage=0")
    close(several.parameters, 1680.0)
    close(several.gradients, 3360.0)
    # Where ranks have equal weights and compute with them directly, gradients are allocated all the time.
    same = with_software(problem(on=cluster(1), dtype="fp32"), reduces_by_block=True)
    close(bytes_of(same, alone).gradients, 3360.0)


def test_buffers_between_stages() -> None:
    close(bytes_of(one_node(), "pp=2").buffers, 400.0, 400.0)  # four of 100 B
    close(bytes_of(one_node(), "pp=1").buffers, 0.0)
    # Each tensor rank sends half of each message, whether the sequence is split or not.
    close(bytes_of(one_node(), "pp=2,tp=2,sequence_parallel=yes").buffers, 200.0, 200.0)
    close(bytes_of(one_node(), "pp=2,tp=2,sequence_parallel=no").buffers, 200.0, 200.0)


def test_what_the_allocator_and_the_driver_add() -> None:
    memory = bytes_of(
        one_node(fragmentation_ratio=0.1, context_bytes=1000.0, communicator_bytes=10.0), "pp=2,tp=2"
    )
    allocated = memory.allocated[:, 0]
    parts = ("parameters", "gradients", "optimizer", "gathered", "activations", "temporaries", "buffers")
    np.testing.assert_allclose(allocated, sum(getattr(memory, part)[:, 0] for part in parts), rtol=1e-14)
    close(memory.fragmentation, *(0.1 * allocated))
    close(memory.context, 1000.0, 1000.0)
    close(memory.communicators, 30.0, 30.0)  # the world, tp and pp
    close(memory.reserved, *(1.1 * allocated))
    close(memory.device, *(1.1 * allocated + 1030.0))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("tp=8", 2),
        ("pp=8", 2),
        ("cp=8", 2),
        ("dp=8", 2),
        ("tp=2,pp=2,cp=2", 4),
        ("tp=2,dp=4", 3),
        ("tp=4,dp=2", 3),
    ],
)
def test_communicators_in_use(text: str, count: int) -> None:
    p = problem(brick_model((0,) * 8))
    assert communicators_of(table(p, text))[0] == count
    assert communicators_of(table(p, text).replaced(ep=2))[0] == count + 1


def test_the_peak_is_that_of_the_tightest_rank() -> None:
    p = one_node(fragmentation_ratio=0.1, context_bytes=1000.0, communicator_bytes=10.0)
    for text in (
        "pp=4",
        "pp=2,vpp=2",
        "pp=2,schedule=zb_v,offload=both",
        "zero_stage=3",
        "pp=4,schedule=gpipe",
    ):
        memory = bytes_of(p, text)
        close(peaks_of(p, table(p, text)).device_bytes, float(memory.device.max()))


@pytest.mark.parametrize(
    ("tied", "text", "weights"),
    [
        (False, "dp=4", (840,)),  # four layers of 110, two tables of 200
        (False, "pp=2", (420, 420 + 200)),  # the prediction modules' copy of the embedding
        (False, "pp=4,schedule=gpipe", (310, 110, 110, 310 + 200)),
        (False, "pp=2,schedule=zb_v", (420 + 200, 220)),  # both ends on one rank
        (True, "dp=4", (640,)),
        (True, "pp=2", (420, 220 + 2 * 200)),  # and one for the output projection
    ],
)
def test_prediction_modules_have_a_copy_of_the_embedding(
    tied: bool, text: str, weights: tuple[int, ...]
) -> None:
    model = replace(brick_model(tied=tied), head_layers=1)
    memory = bytes_of(problem(model, cluster(1)), text)
    close(memory.parameters, *(2.0 * count for count in weights))
    close(memory.gradients, *(4.0 * count for count in weights))
    close(memory.optimizer, *(12.0 * count for count in weights))


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("dp=4", (640,)),  # four layers of 110, one table of 200
        ("pp=2", (420, 420)),  # the head's stage has a copy of the table
        ("pp=2,vpp=2", (420, 420)),
        ("pp=4", (310, 110, 110, 310)),
        ("pp=2,schedule=zb_v", (420, 220)),  # both ends on one rank
    ],
)
def test_a_tied_embedding_is_on_both_ends(text: str, weights: tuple[int, ...]) -> None:
    memory = bytes_of(problem(brick_model(tied=True), cluster(1)), text)
    close(memory.parameters, *(2.0 * count for count in weights))
    close(memory.optimizer, *(12.0 * count for count in weights))
