"""Durations of stages and the end of a step, by hand, for bricks on ideal devices.

A brick is 1.1 s forward (0.1 s of it its norm), 1.2 s for the input gradient, 1.0 s for the weight gradient.
The embedding is 0.2 s forward and 0.5 s for its weight gradient; the head 3.2 s, 2.8 s and 2 s.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.unit.cost.hand_made import (
    IDEAL,
    brick,
    brick_model,
    cluster,
    end_of,
    exposed,
    node,
    operator_model,
    problem,
    times_of,
    with_efficiency,
    with_software,
)

from shardwise.cluster.device import MemoryCurve
from shardwise.cost import Problem
from shardwise.model import Experts
from shardwise.operators import Extent, GroupedMatmul, Weight


def close(found: Any, *expected: float) -> None:
    """Values of the only row, index by index."""
    np.testing.assert_allclose(np.asarray(found)[..., 0].ravel(), expected, rtol=1e-12, atol=1e-15)


def one_node(**efficiency: Any) -> Problem:
    """Four devices at 100 B/s, with software that overlaps nothing."""
    return exposed(problem(on=cluster(1, of=with_efficiency(**efficiency))))


def two_nodes(**efficiency: Any) -> Problem:
    return exposed(problem(on=cluster(2, of=with_efficiency(**efficiency))))


def test_two_stages() -> None:
    times = times_of(one_node(), "pp=2")
    close(times.forward_s, 2.4, 5.4)  # 0.2 + 2 * 1.1; 2 * 1.1 + 3.2
    close(times.backward_input_s, 2.4, 5.2)  # 2 * 1.2; 2 * 1.2 + 2.8
    close(times.backward_weight_s, 2.5, 4.0)  # 0.5 + 2 * 1; 2 * 1 + 2
    close(times.backward_s, 4.9, 9.2)
    close(times.recompute_s, 0.0, 0.0)


def test_layers_of_several_kinds_and_uneven_end_stages() -> None:
    # The other kind: 2 s per phase and its norm.
    p = exposed(problem(brick_model((1, 0, 0, 1)), cluster(1)))
    times = times_of(p, "pp=2,first_stage_layers=1")
    close(times.forward_s, 2.3, 2 * 1.1 + 2.1 + 3.2)
    close(times.backward_weight_s, 2.5, 6.0)


def test_the_host_launches_every_action() -> None:
    times = times_of(with_software(one_node(), host_action_s=0.25), "pp=2")
    close(times.forward_s, 2.65, 5.65)
    close(times.backward_s, 5.15, 9.45)
    # A split backward is two actions.
    close(times.backward_input_s, 2.65, 5.45)
    close(times.backward_weight_s, 2.75, 4.25)


def test_a_sender_waits_for_exposed_communication() -> None:
    # 100 B within a node take a second: three quarters of it with each forward but the last stage's and each
    # backward for inputs but the first stage's, which send nothing.
    times = times_of(with_software(one_node(), pipeline_overlap=0.25, host_action_s=0.25), "pp=2")
    close(times.forward_s, 2.65 + 0.75, 5.65)
    close(times.backward_input_s, 2.65, 5.45 + 0.75)
    close(times.backward_weight_s, 2.75, 4.25)
    # A single device sends nothing.
    close(times_of(with_software(one_node(), pipeline_overlap=0.25), "dp=4").forward_s, 7.8)


def test_gradients_in_the_dtype_of_the_weights_are_half_as_long() -> None:
    times = times_of(with_software(one_node(), reduce_in_fp32=False), "zero_stage=1")
    # 840 * 2 B: a reduce-scatter of 3/4 * 1680 / 100, and an all-gather of as much.
    close(times.reduce_s, 12.6)
    close(times.gather_s, 12.6)
    end = end_of(with_software(one_node(), reduce_in_fp32=False), "zero_stage=0")
    close(end.norm_s, 3 * 840 * 2 / 1000)
    close(end.optimizer_s, 840 * 28 / 1000)  # 2 + 2 * 4 + 2 * 8 + 2


def test_tensor_communication_on_the_same_cards_hides_no_gradients() -> None:
    """A backward of 16.3 s within one node, of which 9 s are collectives of tensor ranks (2 of 1 s in each of
    four layers, 1 in the head): 7.3 s remain to overlap with 17.6 s of gradients in four buckets, 17.6 -
    3/4 * 7.3.
    """
    hiding = with_software(one_node(), data_overlap=1.0, state_overlap=1.0)
    assert times_of(hiding, "tp=2,dp=2").backward_s[0, 0] == pytest.approx(16.3)
    close(times_of(hiding, "tp=2,dp=2").reduce_s, 12.125)
    # Recomputed forwards take 10.2 s more, 8 of them in collectives: 17.6 - 3/4 * 9.5.
    close(times_of(hiding, "tp=2,dp=2,recompute=full").reduce_s, 10.475)
    # Sharded states: half of it is a reduce-scatter, 8.8 s; the all-gather of 4.4 s overlaps with 13 - 9 s.
    shared = times_of(hiding, "tp=2,dp=2,zero_stage=1")
    close(shared.reduce_s, 3.325)
    close(shared.gather_s, 1.4)
    # Over two nodes tensor ranks stay within theirs: all of the 16.3 s overlap with 1760 B over two cards of
    # 20 B/s, once each way.
    hiding = with_software(two_nodes(), data_overlap=1.0, state_overlap=1.0)
    close(times_of(hiding, "tp=2,dp=4").reduce_s, 44.0 - 0.75 * 16.3)


@pytest.mark.parametrize("recompute", ["full,recompute_layers=4", "selective"])
def test_recomputation_that_stops_early(recompute: str) -> None:
    # Layers with the norm first: only that is recomputed in each, also by selective recomputation.
    norm_first = replace(brick(), operators=tuple(reversed(brick().operators)))
    p = problem(brick_model(kinds=(norm_first,)), cluster(1))
    early = with_software(exposed(p), recompute_stops_early=True)
    close(times_of(early, f"dp=4,recompute={recompute}").recompute_s, 0.4)
    close(times_of(exposed(p), "dp=4,recompute=full,recompute_layers=4").recompute_s, 4.4)


@pytest.mark.parametrize(
    ("recompute", "first", "last"),
    [
        ("none", 0.0, 0.0),
        ("selective", 0.1, 0.3),  # norms of 1 and of 3 layers
        ("full,recompute_layers=1", 1.1, 1.1),
        ("full,recompute_layers=2", 1.1, 2.2),  # the first stage has only one
        ("full,recompute_layers=3", 1.1, 3.3),
    ],
)
def test_recomputation_lengthens_the_backward(recompute: str, first: float, last: float) -> None:
    times = times_of(one_node(), f"pp=2,first_stage_layers=1,recompute={recompute}")
    close(times.recompute_s, first, last)
    close(times.backward_input_s, 1.2 + first, 3.6 + 2.8 + last)
    close(times.backward_s, 1.2 + first + 1.5, 3.6 + 2.8 + last + 5.0)
    close(times.forward_s, 1.3, 6.5)


def test_kinds_are_recomputed_in_proportion() -> None:
    # One layer of 1.1 s and one of 2.1 s: half of each.
    p = exposed(problem(brick_model((0, 1)), cluster(1)))
    close(times_of(p, "pp=1,recompute_layers=1").recompute_s, 1.6)


@pytest.mark.parametrize(
    ("recompute", "first_bytes", "last_bytes"),
    [("none", 600.0, 600.0), ("selective", 200.0, 200.0), ("full,recompute_layers=1", 400.0, 400.0)],
)
def test_offloaded_activations_that_do_not_hide(
    recompute: str, first_bytes: float, last_bytes: float
) -> None:
    # Two layers of 300 B (100 B without the tensors that selective recomputes, 100 B of input); logits stay.
    times = times_of(one_node(overlap_slowdown=1.5), f"pp=2,offload=activations,recompute={recompute}")
    again = {"none": 0.0, "selective": 0.2, "full,recompute_layers=1": 1.1}[recompute]

    def added(nbytes: float, computation_s: float) -> float:
        """50 B/s over the host link; overlapped transfers slow the computation by half."""
        hidden = min(nbytes / 50, computation_s)
        return nbytes / 50 - hidden + 0.5 * hidden

    forward = added(first_bytes, 2.4), added(last_bytes, 5.4)
    backward = added(first_bytes, 2.4), added(last_bytes, 5.2)
    close(times.forward_s, 2.4 + forward[0], 5.4 + forward[1])
    close(times.backward_input_s, 2.4 + again + backward[0], 5.2 + again + backward[1])
    close(times.offload_s, forward[0] + backward[0], forward[1] + backward[1])


@pytest.mark.parametrize(
    ("offload", "is_moved"), [("none", False), ("optimizer", False), ("activations", True), ("both", True)]
)
def test_which_offloads_move_activations(offload: str, is_moved: bool) -> None:
    # 600 B are 12 s, of which 2.4 s overlap with the forward and 2.4 s with the backward.
    close(times_of(one_node(), f"pp=2,offload={offload}").offload_s[:1], 19.2 if is_moved else 0.0)


# Sharding over four ranks of one node: a collective of B bytes takes 3/4 B / 100. A layer has 110 weights,
# an end 200.


def test_sharded_parameters_are_gathered_in_each_pass() -> None:
    times = times_of(one_node(), "zero_stage=3")
    # 110 * 2 B: 1.65 s for each of four layers; 200 * 2 B: 3 s for each end. Gradients of 4 B take twice
    # that.
    close(times.forward_s, 0.2 + 4.4 + 3.2 + 12.6)
    close(times.backward_input_s, 4.8 + 2.8 + 12.6)
    close(times.backward_weight_s, 0.5 + 4.0 + 2.0 + 25.2)
    close(times.shard_s, 50.4)


def test_sharded_gradients_are_reduced_with_every_microbatch() -> None:
    times = times_of(one_node(), "zero_stage=2")
    close(times.forward_s, 7.8)
    close(times.backward_weight_s, 6.5 + 25.2)
    close(times.shard_s, 25.2)


def test_sharded_optimizer_states_cost_a_microbatch_nothing() -> None:
    close(times_of(one_node(), "zero_stage=1").shard_s, 0.0)


def test_sharding_is_hidden_by_the_neighbouring_layer() -> None:
    p = with_software(one_node(overlap_slowdown=1.5), shard_overlap=0.9)
    times = times_of(p, "zero_stage=3")
    # All-gathers in the forward: of a layer's 1.65 s 1.1 s overlap (all its forward), adding 0.55 + 0.55; of
    # the embedding's 3 s 0.2 s: 2.9; of the head's 3 s 2.7 s: 0.3 + 1.35.
    there = 4 * 1.1 + 2.9 + 1.65
    # All-gathers in the input gradient: 1.2 s of 1.65: 0.45 + 0.6; the embedding has none: 3; 2.7 of 3
    # with the head's 2.8: 1.65.
    back = 4 * 1.05 + 3.0 + 1.65
    # Reductions in the weight gradient: 3.3 s with 1 s: 2.3 + 0.5; 6 with 0.5: 5.75; 6 with 2: 5.
    reductions = 4 * 2.8 + 5.75 + 5.0
    close(times.forward_s, 7.8 + there)
    close(times.backward_input_s, 7.6 + back)  # 4 * 1.2 + 2.8
    close(times.backward_weight_s, 6.5 + reductions)
    close(times.shard_s, there + back + reductions)


@pytest.mark.parametrize(
    ("shards", "gather", "reduce"),
    [
        # 840 weights; all-reduce of 3360 B: 2 * 3/4 * 33.6.
        ("zero_stage=0", 0.0, 50.4),
        ("zero_stage=1", 12.6, 25.2),  # reduce-scatter, and an all-gather of 1680 B
        ("zero_stage=2", 12.6, 0.0),  # reduced with the micro-batches
        ("zero_stage=3", 0.0, 0.0),
        # Pairs: reduce-scatter 1/2 * 33.6, then all-reduce of a half over two pairs 2 * 1/2 * 16.8; gather
        # 1/2 * 16.8.
        ("optim_shard=2", 8.4, 33.6),
        # Gradients in pairs: half is all-reduced over two; states over four: gather 3/4 * 16.8.
        ("grad_shard=2,optim_shard=4", 12.6, 16.8),
        # Parameters in pairs: a half is gathered over two pairs, 1/2 * 8.4.
        ("param_shard=2,grad_shard=2,optim_shard=4", 4.2, 16.8),
        ("param_shard=2", 0.0, 16.8),
    ],
)
def test_reduction_and_gathering_once_per_step(shards: str, gather: float, reduce: float) -> None:
    times = times_of(one_node(), shards)
    close(times.gather_s, gather)
    close(times.reduce_s, reduce)


@pytest.mark.parametrize(
    ("shards", "gather", "reduce"),
    [
        # Over eight ranks on two nodes trees are fastest: max(2 * 33.6, 3360 / (4 * 20)); one flat ring takes
        # 7/8 * max(33.6, 42), and an all-reduce two of them.
        ("zero_stage=0", 0.0, 67.2),
        ("zero_stage=1", 18.375, 36.75),
        # Sharded within a node, replicated between: a quarter, 840 B, is all-reduced over two nodes at 20
        # B/s.
        ("param_shard=4", 0.0, 42.0),
        ("optim_shard=4", 12.6, 67.2),
        ("grad_shard=4,optim_shard=8", 18.375, 42.0),
    ],
)
def test_sharding_keeps_to_the_inner_tier(shards: str, gather: float, reduce: float) -> None:
    times = times_of(two_nodes(), shards)
    close(times.gather_s, gather)
    close(times.reduce_s, reduce)


@pytest.mark.parametrize(
    ("text", "gather", "reduce"),
    [
        # Two stages of 420 weights over two ranks each: a gather of 840 B, 1/2 * 8.4, and a reduce-scatter of
        # 1680 B, 1/2 * 16.8, once; and nothing with each of the micro-batches.
        ("pp=2,zero_stage=3", 4.2, 8.4),
        ("pp=2,zero_stage=2", 4.2, 8.4),  # updated shares are gathered
        ("pp=2,zero_stage=1", 4.2, 8.4),
        ("pp=2,zero_stage=0", 0.0, 16.8),
    ],
)
def test_stages_of_pytorch_gather_and_reduce_once_per_step(text: str, gather: float, reduce: float) -> None:
    """PyTorch's pipelining: `backward_maybe_with_nosync` and `perform_reduce_grad` of its stages."""
    times = times_of(with_software(one_node(), whole_in_pipelines=True), text)
    close(times.shard_s, 0.0, 0.0)
    close(times.gather_s, gather, gather)
    close(times.reduce_s, reduce, reduce)
    # The first forward hides what is gathered, in two buckets of layers; no action hides the reduction, which
    # follows the last backward pass.
    hiding = with_software(one_node(), whole_in_pipelines=True, data_overlap=1.0, state_overlap=1.0)
    hidden = times_of(hiding, text)
    close(hidden.gather_s[:1], gather - min(gather, float(hidden.forward_s[0, 0])) / 2)
    close(hidden.reduce_s, reduce, reduce)


def test_stages_of_other_software_gather_and_reduce_with_every_microbatch() -> None:
    # 110 * 2 B over two ranks: 1.1 s per layer, 200 * 2 B 2 s per end; three times, the gradients twice that:
    # 4 * (2 * 1.1 + 2).
    times = times_of(one_node(), "pp=2,zero_stage=3")
    close(times.shard_s, 16.8, 16.8)
    close(times.gather_s, 0.0, 0.0)
    close(times.reduce_s, 0.0, 0.0)


def test_software_that_reduces_by_block_starts_a_collective_for_each() -> None:
    curve = replace(IDEAL.scale_up, startup_s=0.5)
    whole = one_node(scale_up=curve)
    by_block = with_software(whole, reduces_by_block=True)
    # Embedding, four layers and head start six collectives of 0.5 s instead of one; the bytes are the same.
    close(times_of(whole, "zero_stage=1").gather_s, 12.6 + 0.5)
    close(times_of(by_block, "zero_stage=1").gather_s, 12.6 + 3.0)
    close(times_of(by_block, "zero_stage=1").reduce_s, 25.2 + 3.0)
    close(times_of(by_block, "zero_stage=0").reduce_s, 50.4 + 3.0)
    # Two stages of an end and two layers: 420 weights over two ranks, 1/2 * 840 / 100.
    close(times_of(by_block, "pp=2,zero_stage=1").gather_s, 4.2 + 1.5, 4.2 + 1.5)


def test_the_two_ends_of_a_tied_table_are_one_block_where_a_stage_has_both() -> None:
    on = cluster(1, of=with_efficiency(scale_up=replace(IDEAL.scale_up, startup_s=0.5)))
    tied = with_software(exposed(problem(brick_model(tied=True), on)), reduces_by_block=True)
    # 640 weights over four ranks in five parts: the table and four layers.
    close(times_of(tied, "zero_stage=1").gather_s, 0.75 * 1280.0 / 100.0 + 2.5)
    close(times_of(tied, "zero_stage=1").reduce_s, 0.75 * 2560.0 / 100.0 + 2.5)
    # On two stages each end has the table, and counts as a block.
    close(times_of(tied, "pp=2,zero_stage=1").gather_s, 4.2 + 1.5, 4.2 + 1.5)


def test_context_ranks_share_gradients_too() -> None:
    times = times_of(one_node(), "cp=2,zero_stage=1")
    close(times.gather_s, 12.6)
    close(times.reduce_s, 25.2)


def test_reductions_are_hidden_by_the_last_backward() -> None:
    p = with_software(one_node(), data_overlap=0.25, state_overlap=0.5)
    times = times_of(p, "zero_stage=1")
    # Four layers are four buckets. Half of 25.2, 12.6, overlaps with 7.6 + 6.5: 25.2 - 12.6 * 3/4; half of
    # 12.6 with 7.8: 12.6 - 6.3 * 3/4.
    close(times.reduce_s, 25.2 - 9.45)
    close(times.gather_s, 12.6 - 4.725)
    # Whole copies on every rank are all-reduced, 2 * 1/2 of twice the bytes, without an all-gather: a quarter
    # of it, 12.6, where ranks do not shard states.
    close(times_of(p, "zero_stage=0").reduce_s, 2 * 25.2 - 9.45)
    # All of it would overlap, but there is only 7.6 + 6.5.
    p = with_software(one_node(), data_overlap=1.0)
    close(times_of(p, "zero_stage=0").reduce_s, 2 * 25.2 - 14.1 * 0.75)


def test_a_split_backward_ends_with_the_weights() -> None:
    p = with_software(one_node(), data_overlap=1.0)
    split, whole = (times_of(p, f"pp=2,schedule={name}") for name in ("zb_h1", "1f1b"))
    # Stage 0: 420 weights over two ranks: 2 * 1/2 * 16.8; two buckets; with 2.5 s of weight gradients, or the
    # whole 4.9 s.
    close(split.reduce_s[:1], 16.8 - 1.25)
    close(whole.reduce_s[:1], 16.8 - 2.45)


def test_a_stage_without_layers_has_one_bucket() -> None:
    p = with_software(one_node(), data_overlap=1.0)
    times = times_of(p, "pp=2,first_stage_layers=0")
    close(times.forward_s[:1], 0.2)
    # The embedding's 200 weights: 2 * 1/2 * 800 / 100, which overlap only with its own 0.5 s.
    close(times.reduce_s[:1], 8.0)


# The end of the step: 840 weights on a rank.


def test_adamw_moves_thirty_bytes_per_parameter() -> None:
    # Gradient 4, master 2 * 4, two moments 2 * 8, copy 2; at 1000 B/s.
    close(end_of(one_node(), "zero_stage=0").optimizer_s, 25.2)
    close(end_of(one_node(), "zero_stage=1").optimizer_s, 6.3)  # a quarter of them
    close(end_of(one_node(), "pp=2").optimizer_s, 12.6)  # 420 on either stage


def test_software_that_works_by_block_copies_gathered_and_reduced_tensors() -> None:
    """In addition to the update's 30 B (7.5 where a quarter is owned), per owned weight: 4 read for the cast,
    2 * 2 into the gathered tensor. Per weight: 2 * 2 out of the gathered tensor, with two micro-batches 6
    and 10 to accumulate gradients and 2 * 4 into the reduced tensor; a rank without replicas: 2 * 2 and 2
    * 4 to gather and reduce.
    """
    by_block = with_software(one_node(), reduces_by_block=True)
    close(end_of(by_block, "zero_stage=0").optimizer_s, 0.84 * (30 + 8 + 4 + 24 + 12))
    close(end_of(by_block, "zero_stage=1").optimizer_s, 0.84 * (7.5 + 8 / 4 + 4 + 24))
    # One micro-batch: its gradients are cast on their way into the reduced tensor, 2 + 4.
    close(end_of(by_block, "micro_batch_size=2,zero_stage=0").optimizer_s, 0.84 * (30 + 8 + 4 + 6 + 12))
    # Weights in the compute dtype need no copy.
    wide = with_software(problem(on=cluster(1), dtype="fp32"), reduces_by_block=True)
    close(end_of(wide, "dp=4").optimizer_s, 0.84 * 28)


@pytest.mark.parametrize(
    ("optimizer", "dtype", "nbytes"),
    [
        ("adamw", "bf16", 30.0),
        ("adafactor", "bf16", 14.0),  # 4 + 8 + 0 + 2
        ("sgd", "bf16", 22.0),  # 4 + 8 + 8 + 2
        ("adamw", "fp32", 28.0),  # 4 + the weights 2 * 4 + 16, no copy
    ],
)
def test_bytes_that_an_optimizer_moves(optimizer: str, dtype: str, nbytes: float) -> None:
    p = exposed(problem(on=cluster(1), optimizer=optimizer, dtype=dtype))
    close(end_of(p, "dp=4").optimizer_s, 840 * nbytes / 1000)


def test_muon_multiplies_matrices() -> None:
    p = exposed(problem(on=cluster(1), optimizer="muon"))
    # 22 B per parameter, and 30 * hidden 10 flop at 1000 flop/s.
    close(end_of(p, "dp=4").optimizer_s, 840 * (0.022 + 0.3))


def test_an_update_reaches_a_fraction_of_the_memory_bandwidth() -> None:
    slow = one_node(memory=MemoryCurve(fraction=0.5, half_bytes=0.0))
    close(end_of(slow, "dp=4").optimizer_s, 50.4)


def test_the_rank_that_owns_most_counts() -> None:
    # One layer and the embedding, 310; three layers and the head, 530.
    close(end_of(one_node(), "pp=2,first_stage_layers=1").optimizer_s, 530 * 0.03)
    # A V: stages of 1 layer; rank 0 holds both ends: 2 * 110 + 400.
    close(end_of(one_node(), "pp=2,schedule=zb_v").optimizer_s, 620 * 0.03)


@pytest.mark.parametrize(
    ("offload", "seconds"), [("none", 25.2), ("activations", 25.2), ("optimizer", 604.8), ("both", 604.8)]
)
def test_states_on_the_host_are_updated_at_the_host_link(offload: str, seconds: float) -> None:
    # Gradient 4 and weight 2 cross the link of 50 B/s, and the 30 of the update run at its rate: 840 * 36 /
    # 50.
    close(end_of(one_node(), f"offload={offload}").optimizer_s, seconds)


def test_gradient_norm_reads_twice_and_writes_once() -> None:
    close(end_of(one_node(), "dp=4").norm_s, 10.08)  # 3 * 840 * 4 / 1000
    half = MemoryCurve(fraction=0.5, half_bytes=0.0)
    close(end_of(one_node(memory=half), "zero_stage=1").norm_s, 5.04)
    # One small tree over all 8 ranks at the outermost latency: 2 * 3 * 0.5.
    far = exposed(problem(on=cluster(2, latency_s=(0.1, 0.5))))
    close(end_of(far, "dp=8").norm_s, 10.08 + 3.0)
    # tp 2, pp 2: two layers of 60 weights and half of an end's 200.
    close(end_of(far, "tp=2,pp=2,dp=2,sequence_parallel=no").norm_s, 3 * 4 * 220 / 1000 + 3.0)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("pp=1", 0.0),
        ("pp=2", 40.0),  # half of 200 * 4 B between nodes at 20 B/s, twice
        ("pp=2,axis_order=pp-tp-cp-dp", 8.0),
        ("pp=2,tp=2,sequence_parallel=no", 20.0),
        ("pp=2,vpp=2", 40.0),
        ("pp=2,schedule=zb_v", 0.0),  # both ends on one rank
        ("pp=2,schedule=dualpipe_v", 0.0),
    ],
)
def test_tied_embeddings_are_added_up_where_the_ends_are_apart(text: str, seconds: float) -> None:
    tied = exposed(problem(brick_model(tied=True), batch=16))
    close(end_of(tied, text).tied_s, seconds)
    close(end_of(exposed(problem(batch=16)), text).tied_s, 0.0)


def test_norms_are_added_up_under_sequence_parallelism() -> None:
    # 10 weights in each of four layers of 4 B over two ranks: 2 * 1/2 * 160 / 100; half of the layers with pp
    # 2.
    close(end_of(one_node(), "tp=2,sequence_parallel=yes").tied_s, 1.6)
    close(end_of(one_node(), "tp=2,sequence_parallel=no").tied_s, 0.0)
    close(end_of(one_node(), "tp=2,pp=2,sequence_parallel=yes").tied_s, 0.8)


def test_the_host_ends_the_step() -> None:
    end = end_of(with_software(one_node(), host_step_s=0.125), "dp=4")
    close(end.host_s, 0.125)
    close(end.total_s, 10.08 + 25.2 + 0.125)


def test_the_host_link_is_that_of_the_slowest_node() -> None:
    plain = cluster(2)
    uneven = replace(plain, nodes=(node(), node(host_link_bytes_per_s=25.0)))
    close(end_of(exposed(problem(on=uneven)), "offload=optimizer").optimizer_s, 1209.6)


# Experts: two layers of 1600 expert weights and 110 dense ones over four ranks of one node, no ends.


def expert_problem(**job: Any) -> Problem:
    n = Extent(20, "expert_ffn")
    weight = Weight(name="w", shape=(Extent(10), n), experts=8)
    work = GroupedMatmul(name="g", experts=8, k=Extent(10), n=n, weights=(weight,))
    model = operator_model(
        (*brick().operators, work), experts=Experts(experts=8, top_k=1), embedding=(), head=()
    )
    return exposed(problem(model, cluster(1), **job))


@pytest.mark.parametrize(
    ("shards", "gather", "reduce"),
    [
        # Dense: 220 * 4 B all-reduced over four, 13.2; experts on one rank each four-fold: 3200 * 4 B, 192.
        ("ep=1", 0.0, 205.2),
        # ep 2: 1600 expert weights, two replicas on ranks 0 and 2: 2 * 1/2 * 64.
        ("ep=2", 0.0, 77.2),
        # ep 4: no replica.
        ("ep=4", 0.0, 13.2),
        # States sharded: reduce-scatter 6.6 and 32, gather 440 B and 3200 B: 3.3 and 16.
        ("ep=2,zero_stage=1", 19.3, 38.6),
        ("ep=4,zero_stage=1", 3.3, 6.6),
        ("ep=2,zero_stage=2", 19.3, 0.0),
        ("ep=2,zero_stage=3", 0.0, 0.0),
        # Dense parameters in pairs: 1/2 * 220 / 100; the two replicas of an expert shard all states over
        # both.
        ("ep=2,param_shard=2,grad_shard=2,optim_shard=4", 1.1, 4.4),
    ],
)
def test_experts_are_reduced_over_their_own_replicas(shards: str, gather: float, reduce: float) -> None:
    times = times_of(expert_problem(), shards)
    close(times.gather_s, gather)
    close(times.reduce_s, reduce)


def test_four_replicas_of_experts_gather_their_sharded_states() -> None:
    # Pairs hold a half of 220 and of 3200 weights: two pairs gather 1/2 of 220 B and of 3200 B.
    times = times_of(expert_problem(), "ep=1,param_shard=2,grad_shard=2,optim_shard=4")
    close(times.gather_s, 17.1)


def test_a_stage_without_experts_pays_no_latency_for_them() -> None:
    # A dense stage before one with experts: dense collectives with a latency of 0.5 s per step, nothing else.
    moe = expert_problem()
    dense = replace(moe.model.kinds[0], operators=brick().operators, experts=None)
    model = replace(moe.model, kinds=(dense, moe.model.kinds[0]), pattern=(0, 1))
    p = exposed(problem(model, cluster(1, latency_s=(0.5, 0.5))))
    # 110 weights over two ranks: two passes of 0.5 + 1/2 * 440 / 100, and with experts 1600 * 4 B besides.
    close(times_of(p, "pp=2,ep=1").reduce_s, 5.4, 5.4 + 1.0 + 64.0)
    close(times_of(p, "pp=2,ep=1,zero_stage=1").gather_s, 0.5 + 1.1, 0.5 + 1.1 + 0.5 + 16.0)
    # By block: an end and a layer on each stage start two, and the experts one more on the last.
    by_block = with_software(p, reduces_by_block=True)
    close(times_of(by_block, "pp=2,ep=1,zero_stage=1").gather_s, 1.0 + 1.1, 1.0 + 1.1 + 0.5 + 16.0)
    # The embedding's 200 weights too: gathers of 1.6 and 2.5 s in each pass, reductions of 2.7 and 4.5 s.
    ends = brick_model((0, 1), kinds=model.kinds)
    with_ends = exposed(problem(ends, cluster(1, latency_s=(0.5, 0.5))))
    close(times_of(with_ends, "pp=2,ep=1,zero_stage=3").shard_s[:1], 2 * 4.1 + 7.2)


def test_offload_that_is_fully_overlapped() -> None:
    fast = replace(cluster(1), nodes=(node(host_link_bytes_per_s=1000.0),))
    # 600 B overlap 0.6 s with 2.4 s, both ways; nothing is slowed.
    close(times_of(exposed(problem(on=fast)), "pp=2,offload=activations").offload_s[:1], 0.0)
    slowed = replace(fast, classes={"ideal": with_efficiency(overlap_slowdown=1.5)})
    close(times_of(exposed(problem(on=slowed)), "pp=2,offload=activations").offload_s[:1], 0.6)


def test_experts_are_gathered_over_their_own_replicas() -> None:
    # Per layer 220 B over four, 1.65, and 800 * 2 B over two replicas, 8; gradients twice that; two layers.
    close(times_of(expert_problem(), "ep=2,zero_stage=3").shard_s, 2 * 2 * 9.65 + 2 * 19.3)
    close(times_of(expert_problem(), "ep=4,zero_stage=3").shard_s, 2 * 2 * 1.65 + 2 * 3.3)


def test_the_update_owns_shards_of_dense_and_expert_weights() -> None:
    close(end_of(expert_problem(), "ep=2,zero_stage=0").optimizer_s, (220 + 1600) * 0.03)
    close(end_of(expert_problem(), "ep=2,zero_stage=1").optimizer_s, (55 + 800) * 0.03)
    close(end_of(expert_problem(), "ep=4,zero_stage=1").optimizer_s, (55 + 800) * 0.03)


def test_muon_multiplies_at_the_speed_of_matmuls() -> None:
    curve = replace(IDEAL.matmul, peak_fraction=0.5)
    p = exposed(problem(on=cluster(1, of=with_efficiency(matmul=curve)), optimizer="muon"))
    close(end_of(p, "dp=4").optimizer_s, 840 * (0.022 + 0.6))


def test_the_norm_joins_all_ranks() -> None:
    # Eight ranks in any arrangement: 2 * 3 * 0.5 s, and 3 * 4 B for each of the weights on a rank.
    far = exposed(problem(on=cluster(2, latency_s=(0.1, 0.5))))
    close(end_of(far, "cp=8").norm_s, 10.08 + 3.0)
    close(end_of(far, "cp=4,dp=2").norm_s, 10.08 + 3.0)


def test_all_parts_at_the_end_of_a_step_are_added() -> None:
    tied = with_software(exposed(problem(brick_model(tied=True), cluster(1))), host_step_s=0.5)
    # 640 weights: norm 7.68, update 19.2; pp 2: 420 on each stage, 5.04 and 12.6, and 800 B twice at 100 B/s.
    close(end_of(tied, "dp=4").total_s, 7.68 + 19.2 + 0.5)
    close(end_of(tied, "pp=2").total_s, 5.04 + 12.6 + 8.0 + 0.5)
