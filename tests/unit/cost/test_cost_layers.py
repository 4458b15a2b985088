"""Costs of a block: operators summed by phase and part, weights, activations, and communication that overlaps
with them.
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
    operator_model,
    problem,
    table,
    with_efficiency,
    with_software,
)

from shardwise.cost import PhaseTimes, Problem
from shardwise.cost.collectives import collective_model_of, groups_of
from shardwise.cost.layers import BlockCost, block_cost, grid_cost, tensor_sync_s
from shardwise.cost.operators import saved_score_bytes
from shardwise.model import Experts, model_from_config
from shardwise.model.layers import dropout_operator
from shardwise.model.model import Layer
from shardwise.operators import Attention, Extent, GroupedMatmul, Matmul, Pointwise, Saved, Weight


def layer_cost(p: Problem, text: str, layer: Layer) -> BlockCost:
    rows = table(p, text)
    fabric, groups = collective_model_of(p), groups_of(p, rows)
    joined_s = layer.tensor_syncs * tensor_sync_s(p, rows, groups, fabric)
    return block_cost(p, rows, groups, fabric, layer.operators, layer.experts, (joined_s, joined_s))


def close(found: Any, expected: float) -> None:
    np.testing.assert_allclose(np.broadcast_to(found, 1), [expected], rtol=1e-13, atol=1e-15)


def test_parts_add_up() -> None:
    parts = PhaseTimes(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
    assert parts.compute_s == 71.0  # including the wait for the host
    assert parts.total_s == 127.0
    assert (parts + parts.scaled(2.0)).total_s == 381.0
    assert parts.scaled(3.0).expert_s == 96.0


SMOLLM2 = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
    "num_key_value_heads": 32, "intermediate_size": 8192, "vocab_size": 49152,
}  # fmt: skip


@pytest.mark.parametrize(("eager", "norm", "mlp"), [(False, 2 + 2, 3 * 2), (True, 4 + 2 + 2, 4 * 2)])
def test_eager_modules_save_what_their_operators_save(eager: bool, norm: int, mlp: int) -> None:
    # Two norms of 2048: input and output in 16 bits; eager: input in fp32, normalised input, output. q, k, v
    # and output of attention, and 4 B for each of 32 heads. The MLP of 8192: gate, up and their product;
    # eager: also the output of the function. 82,048 and 114,816 B.
    p = problem(model_from_config(SMOLLM2), cluster(1), seq_len=1)
    p = with_software(p, eager_modules=eager)
    expected = 2 * norm * 2048 + 4 * 2 * 2048 + 4 * 32 + mlp * 8192
    assert expected == (114_816 if eager else 82_048)
    (layer,) = grid_cost(p, table(p, "dp=4")).kinds
    close(layer.saved_bytes, float(expected))


@pytest.mark.parametrize(("function", "steps"), [("gelu", 0), ("gelu_new", 3)])
def test_a_layer_norm_saves_the_same_in_eager_modules(function: str, steps: int) -> None:
    """One kernel for a norm, and its MLP has no gate. `gelu_new` is computed in steps, of which three tensors
    of the MLP's 4 * 64 elements of 2 B are saved."""
    gpt2 = {
        "activation_function": function,
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 64,
        "vocab_size": 100,
    }
    p = problem(model_from_config(gpt2), cluster(1), seq_len=1)
    (fused,), (eager,) = (
        grid_cost(with_software(p, eager_modules=eager), table(p, "dp=4")).kinds for eager in (False, True)
    )
    close(eager.saved_bytes, fused.saved_bytes[0] + steps * 4 * 64 * 2.0)


def test_eager_experts_save_their_outputs() -> None:
    # Rows of 10 through experts of 6 with a gate, on all 5 tokens: the function's output of 6, and the output
    # of 10, 2 B each.
    up = GroupedMatmul(name="up", experts=2, k=Extent(10), n=Extent(12, "expert_ffn"))
    gate = Pointwise(
        name="gate", rows="routed", forward=(Extent(18, "expert_ffn"),), backward=(Extent(30, "expert_ffn"),),
        saved=(Saved(name="up", width=Extent(12, "expert_ffn"), rows="routed"),), selective=True,
    )  # fmt: skip
    down = GroupedMatmul(name="down", experts=2, k=Extent(6, "expert_ffn"), n=Extent(10))
    layer = Layer(name="routed", operators=(up, gate, down), experts=Experts(experts=2, top_k=1))
    model = operator_model(layer.operators, experts=layer.experts, embedding=(), head=())
    p = problem(model, cluster(1))
    fused, eager = (
        layer_cost(with_software(p, eager_modules=eager), "tp=1", layer) for eager in (False, True)
    )
    rows = float(fused.saved_bytes[0]) / (2 * 12)
    close(eager.saved_bytes, 2 * rows * (12 + 6 + 10))
    close(eager.selective_bytes, 2 * rows * (12 + 10))  # the function is computed again


def test_a_layer_on_one_device() -> None:
    cost = layer_cost(problem(), "tp=1", brick())
    close(cost.forward.matmul_s, 1.0)  # 2 * 5 * 10 * 10 flop at 1000 flop/s
    close(cost.forward.memory_bound_s, 0.1)  # 5 * 10 * 2 B at 1000 B/s
    close(cost.forward.total_s, 1.1)
    close(cost.backward_input.total_s, 1.2)
    close(cost.backward_weight.total_s, 1.0)
    close(cost.selective.total_s, 0.1)  # the norm alone
    close(cost.dense_weights, 110.0)
    close(cost.expert_weights, 0.0)
    close(cost.replicated_weights, 10.0)
    close(cost.saved_bytes, 300.0)  # input 5 * 10 * 2 B, norm output 5 * 20 * 2 B
    close(cost.selective_bytes, 100.0)
    close(cost.input_bytes, 100.0)
    close(cost.largest_bytes, 200.0)
    # The product's input and the gradient of its output, 5 * 10 * 2 B each.
    close(cost.waiting_bytes, 200.0)
    graph = with_software(problem(), keeps_split_graphs=True)
    # All that is saved, that gradient, and that of the norm's output: half of 100 B that it moves.
    close(layer_cost(graph, "tp=1", brick()).waiting_bytes, 300.0 + 100.0 + 50.0)


@pytest.mark.parametrize(
    ("sequence_parallel", "norm_s", "saved_bytes"), [("no", 0.1, 300.0), ("yes", 0.05, 150.0)]
)
def test_a_layer_on_two_tensor_ranks(sequence_parallel: str, norm_s: float, saved_bytes: float) -> None:
    cost = layer_cost(problem(), f"tp=2,sequence_parallel={sequence_parallel}", brick())
    close(cost.forward.matmul_s, 0.5)
    close(cost.forward.memory_bound_s, norm_s)
    # Two all-reduces of 100 B, 2 * 1/2 * 100 / 100 each; or two passes twice, the same.
    close(cost.forward.tensor_s, 2.0)
    close(cost.backward_input.tensor_s, 2.0)
    close(cost.backward_weight.tensor_s, 0.0)
    close(cost.dense_weights, 60.0)
    close(cost.saved_bytes, saved_bytes)
    close(cost.input_bytes, 50.0 if sequence_parallel == "yes" else 100.0)


def test_sequence_parallel_passes_beat_a_switch_only_without_it() -> None:
    p = problem(on=cluster(2, in_switch=True))
    # All-reduce of 100 B in the switch 100 / 100 = 1; the two passes over 4 ranks 2 * 3/4.
    close(layer_cost(p, "tp=4,sequence_parallel=no", brick()).forward.tensor_s, 2.0)
    close(layer_cost(p, "tp=4,sequence_parallel=yes", brick()).forward.tensor_s, 3.0)


def test_tensor_communication_hides_as_far_as_the_software_can() -> None:
    p = problem(on=cluster(of=with_efficiency(overlap_slowdown=1.5)))
    p = with_software(p, tensor_overlap=0.2)
    # Of 2 s, 0.4 s overlap with 0.5 s of matmul and slow it by half of 0.4 s.
    close(layer_cost(p, "tp=2", brick()).forward.tensor_s, 1.8)


@pytest.mark.parametrize(
    ("tensor", "backward", "forward_s", "input_s"),
    [
        # Forward 2 s overlap with 0.5 s of matmul, backward with 1 s: that of the weight gradients too.
        (0.2, 0.0, 1.6, 1.6),  # 0.4 of 2 s overlap
        (0.0, 0.4, 2.0, 1.2),  # 0.8 s overlap
        (0.2, 0.2, 1.6, 1.2),
        (0.2, 0.8, 1.6, 1.0),  # all could overlap, but not with more than 1 s
    ],
)
def test_tensor_communication_hides_more_in_the_backward(
    tensor: float, backward: float, forward_s: float, input_s: float
) -> None:
    p = with_software(problem(), tensor_overlap=tensor, tensor_backward_overlap=backward)
    cost = layer_cost(p, "tp=2", brick())
    close(cost.forward.tensor_s, forward_s)
    close(cost.backward_input.tensor_s, input_s)
    close(cost.backward_weight.tensor_s, 0.0)


# The host starts the two kernels of a brick in every pass for the inputs, and one for the weight.


@pytest.mark.parametrize(
    ("dispatch_s", "waits"),
    [
        (0.5, (0.0, 0.0, 0.0)),  # 1 s, 1 s and 0.5 s during 1.1 s, 1.2 s and 1 s of work
        (0.6, (0.1, 0.0, 0.0)),
        (2.0, (2.9, 2.8, 1.0)),  # 4 - 1.1, 4 - 1.2, 2 - 1
    ],
)
def test_a_device_that_ends_first_waits_for_the_host(
    dispatch_s: float, waits: tuple[float, float, float]
) -> None:
    cost = layer_cost(with_software(problem(), dispatch_s=dispatch_s), "tp=1", brick())
    for one, host_s in zip((cost.forward, cost.backward_input, cost.backward_weight), waits, strict=True):
        close(one.host_s, host_s)
    close(cost.forward.total_s, 1.1 + waits[0])
    close(cost.repeated_s, 1.1 + waits[0])  # recomputed kernels wait as in the first pass


def test_communication_covers_the_waiting_for_the_host() -> None:
    # tp 2: 0.6 s of work and 2 s of messages forward, so 2 * 2 s leave 1.4 s; backward 0.7 + 2.
    cost = layer_cost(with_software(problem(), dispatch_s=2.0), "tp=2,sequence_parallel=no", brick())
    close(cost.forward.host_s, 1.4)
    close(cost.backward_input.host_s, 1.3)
    close(cost.backward_weight.host_s, 1.5)  # 2 - 0.5


def test_a_pass_through_experts_keeps_the_host_busy_longer() -> None:
    # One kernel and 10 s more; the work of 6.4 s overlaps with as much of it.
    p = with_software(expert_problem(), dispatch_s=0.5, expert_dispatch_s=10.0)
    cost = layer_cost(p, "ep=1", expert_layer())
    close(cost.forward.host_s, 10.5 - 6.4)
    close(cost.backward_input.host_s, 10.5 - 6.4)
    close(cost.backward_weight.host_s, 0.0)
    # Blocks without routed work do not have it: two kernels of 0.5 s.
    close(layer_cost(p, "ep=1", brick()).forward.host_s, 0.0)


def test_embedding_and_head_wait_for_the_host_too() -> None:
    p = with_software(problem(), dispatch_s=2.0)
    grid = grid_cost(p, table(p, "tp=1"))
    # The embedding is one kernel of 0.2 s, one for its gradient of 0.5 s; the host starts one for the input's
    # gradient in any case. Matmul and loss of the head are 3.2 s, 2.8 s and 2 s.
    close(grid.embedding.forward.host_s, 1.8)
    close(grid.embedding.backward_input.host_s, 2.0)
    close(grid.embedding.backward_weight.host_s, 1.5)
    close(grid.head.forward.host_s, 0.8)
    close(grid.head.backward_input.host_s, 1.2)
    close(grid.head.backward_weight.host_s, 0.0)


def test_recomputation_that_stops_early_omits_the_last_matmul_and_its_successors() -> None:
    early = with_software(problem(), recompute_stops_early=True)
    close(layer_cost(problem(), "tp=1", brick()).repeated_s, 1.1)
    close(layer_cost(early, "tp=1", brick()).repeated_s, 0.0)  # the matmul comes first
    # Two bricks in one layer: the second's matmul and norm are not repeated.
    first, second = brick(), brick(20, "second")
    both = replace(first, operators=(*first.operators, *second.operators))
    close(layer_cost(problem(), "tp=1", both).repeated_s, 1.1 + 2.1)
    close(layer_cost(early, "tp=1", both).repeated_s, 1.1)
    # Its communication is repeated in full: 2 s; and 0.5 + 0.1 s of the first brick.
    close(layer_cost(early, "tp=2,sequence_parallel=no", both).repeated_s, 2.6)
    # Without a product everything is repeated.
    plain = replace(first, operators=first.operators[1:])
    close(layer_cost(early, "tp=1", plain).repeated_s, 0.1)
    # The host starts two of the four kernels again, 2 s each, however long the others take on the device.
    slow = with_software(early, dispatch_s=2.0)
    close(layer_cost(slow, "tp=1", both).repeated_s, 4.0)
    close(layer_cost(with_software(problem(), dispatch_s=2.0), "tp=1", both).repeated_s, 8.0)
    # Grouped products count as products.
    grouped = replace(expert_layer(), operators=(*first.operators, *expert_layer().operators))
    p = with_software(expert_problem(), recompute_stops_early=True)
    close(layer_cost(p, "tp=1", grouped).repeated_s, 1.6 + 0.16)  # the brick on 8 tokens


def unfused(p: Problem) -> Problem:
    return with_software(p, attention=())


def test_unfused_attention_saves_two_bytes_of_every_score() -> None:
    cost = layer_cost(unfused(attention_problem()), "cp=1", attention_layer())
    # 8 queries * 8 keys * 4 heads * 2 B in addition to the saved tensors; selective recomputation drops all
    # but the log-sum-exp and the scores.
    close(cost.saved_bytes, 368.0 + 512.0)
    close(cost.selective_bytes, 240.0)
    close(cost.largest_bytes, 512.0)
    # cp 2 leaves half of the queries, tp 2 half of the heads.
    close(layer_cost(unfused(attention_problem()), "cp=2,tp=2", attention_layer()).largest_bytes, 128.0)


def test_bytes_per_score() -> None:
    """16-bit softmax 2, with dropout 2 + 1 + 2; in fp32 4 and 4 + 1 + 4. Modules of Transformers have a
    softmax in fp32, of which a 16-bit copy is read: 4 + 2, with dropout 4 + 1 + 2; in fp32 there is no copy.
    """

    def each(dtype: str, *, has_dropout: bool, **changes: bool) -> float:
        p = with_software(problem(dtype=dtype), **changes)
        return saved_score_bytes(p, p.profile, has_dropout=has_dropout)

    assert [each("bf16", has_dropout=drops) for drops in (False, True)] == [2.0, 5.0]
    assert [each("fp32", has_dropout=drops) for drops in (False, True)] == [4.0, 9.0]
    eager = {"eager_modules": True}
    assert [each("bf16", has_dropout=drops, **eager) for drops in (False, True)] == [6.0, 7.0]
    assert [each("fp32", has_dropout=drops, **eager) for drops in (False, True)] == [4.0, 9.0]


def test_a_layer_with_dropout_drops_scores_too() -> None:
    layer = attention_layer()
    drops = replace(layer, operators=(*layer.operators, dropout_operator("a", 8)))
    p = unfused(attention_problem())
    model = replace(p.model, kinds=(drops,))
    with_dropout = replace(p, model=model)
    # 8 * 8 * 4 scores of 5 B.
    close(layer_cost(with_dropout, "cp=1", drops).largest_bytes, 1280.0)
    close(layer_cost(replace(p, model=model.without_dropout()), "cp=1", layer).largest_bytes, 512.0)


def test_regions_that_tensor_parallelism_joins_are_counted() -> None:
    close(layer_cost(problem(), "tp=2", replace(brick(), tensor_syncs=1)).forward.tensor_s, 1.0)


def attention_layer(window: int | None = None) -> Layer:
    """Attention of four heads and two key-value heads of 3 + 5 elements, and nothing else."""
    core = Attention(
        name="a", heads=Extent(4, "heads"), kv_heads=Extent(2, "kv_heads"), qk_dim=3, v_dim=5, window=window,
        saved=(
            Saved(name="q", width=Extent(12, "heads")),
            Saved(name="lse", width=Extent(4, "heads"), dtype="fp32", selective=True),
            Saved(name="mask", width=Extent(6), dtype="mask"),
        ),
    )  # fmt: skip
    return Layer(name="attention", operators=(core,), tensor_syncs=0)


def attention_problem(*, overlap: float = 0.0, slowdown: float = 1.0) -> Problem:
    p = problem(
        operator_model(attention_layer().operators),
        cluster(of=with_efficiency(overlap_slowdown=slowdown)),
        seq_len=8,
    )
    return with_software(p, context_overlap=overlap)


def test_attention_is_a_part_of_its_own_and_selective() -> None:
    cost = layer_cost(attention_problem(), "cp=1", attention_layer())
    close(cost.forward.attention_s, 2.048)  # 2 * 8 * 4 * 4 * 8 flop
    close(cost.backward_input.attention_s, 5.12)
    close(cost.selective.attention_s, 2.048)
    # 8 * 12 * 2 B, 8 * 4 * 4 B, 8 * 6 * 1 B; selective recomputation computes the log-sum-exp again.
    close(cost.saved_bytes, 368.0)
    close(cost.selective_bytes, 240.0)
    close(cost.largest_bytes, 192.0)


def test_ring_attention_moves_keys_and_values() -> None:
    # 4 tokens * 2 heads * 8 * 2 B = 128 B per rank, 256 B in total: 1/2 * 256 / 100; gradients too in the
    # backward.
    cost = layer_cost(attention_problem(), "cp=2", attention_layer())
    close(cost.forward.context_s, 1.28)
    close(cost.backward_input.context_s, 2.56)
    # Key-value heads are split over tp: half the bytes.
    close(layer_cost(attention_problem(), "cp=2,tp=2", attention_layer()).forward.context_s, 0.64)


def test_ring_attention_is_hidden_by_attention() -> None:
    cost = layer_cost(attention_problem(overlap=0.5, slowdown=1.25), "cp=2", attention_layer())
    # Forward: 0.64 of 1.28 s overlap with 1.024 s and cost a quarter of it; backward twice as much with 2.56
    # s.
    close(cost.forward.context_s, 0.8)
    close(cost.backward_input.context_s, 1.6)


def test_all_to_all_attention_moves_heads_and_hides_nothing() -> None:
    # q, k, v and output of 4 tokens: (4 + 2) heads * 8 * 2 B * 4 = 384 B in four all-to-alls, half to the
    # other rank.
    cost = layer_cost(attention_problem(overlap=0.5), "cp=2,cp_kind=all_to_all", attention_layer())
    close(cost.forward.context_s, 1.92)
    close(cost.backward_input.context_s, 1.92)


def test_attention_on_the_whole_sequence_moves_nothing() -> None:
    cost = layer_cost(attention_problem(), "cp=1", attention_layer())
    close(cost.forward.context_s, 0.0)


FREE = Experts(experts=8, top_k=2)


def expert_layer(experts: Experts = FREE) -> Layer:
    weight = Weight(name="w", shape=(Extent(10), Extent(20, "expert_ffn")), experts=8)
    saved = (Saved(name="input", width=Extent(10), rows="routed"),)
    work = GroupedMatmul(
        name="g", experts=8, k=Extent(10), n=Extent(20, "expert_ffn"), weights=(weight,), saved=saved
    )
    return Layer(name="experts", operators=(work,), experts=experts, tensor_syncs=0)


def expert_problem(experts: Experts = FREE, **job: Any) -> Problem:
    return problem(operator_model(expert_layer().operators, experts=experts), seq_len=8, **job)


def test_experts_on_one_rank_send_nothing() -> None:
    cost = layer_cost(expert_problem(), "tp=1,ep=1", expert_layer())
    close(cost.forward.matmul_s, 6.4)  # 16 rows * 2 * 10 * 20 flop
    close(cost.forward.expert_s, 0.0)
    close(cost.expert_weights, 1600.0)  # 8 experts * 10 * 20
    close(cost.dense_weights, 0.0)
    close(cost.saved_bytes, 320.0)  # 16 routed rows * 10 * 2 B


@pytest.mark.parametrize(("imbalance", "seconds"), [(1.0, 3.2), (1.5, 4.8)])
def test_tokens_are_sent_to_experts_and_back(imbalance: float, seconds: float) -> None:
    # 8 tokens * 2 * 10 * 2 B = 320 B per rank (more for the busiest), half to the other rank, twice: 2 * 160
    # / 100.
    p = expert_problem(expert_imbalance=imbalance)
    cost = layer_cost(p, "ep=2", expert_layer())
    close(cost.forward.expert_s, seconds)
    close(cost.backward_input.expert_s, seconds)
    close(cost.expert_weights, 800.0)


def test_a_block_without_routed_work_sends_nothing() -> None:
    cost = layer_cost(expert_problem(), "ep=2", replace(brick(), experts=FREE))
    close(cost.forward.expert_s, 0.0)


def test_a_capacity_bounds_the_tokens_sent() -> None:
    capped = Experts(experts=8, top_k=2, capacity_factor=2.0)
    cost = layer_cost(expert_problem(capped, expert_imbalance=1.5), "ep=2", expert_layer(capped))
    close(cost.forward.expert_s, 6.4)
    close(cost.forward.matmul_s, 12.8)


@pytest.mark.parametrize(
    ("groups", "groups_per_token", "seconds"),
    [
        # Over two nodes 4/8 of 320 B leave the node at 20 B/s, twice: 16 s if every copy is sent. Two random
        # experts are on 2 (1 - 1/4) = 1.5 of the two nodes, so of two copies three quarters are.
        (1, 1, 12.0),
        (2, 1, 8.0),
        (4, 1, 8.0),  # only one of two copies to one group of experts crosses
        (4, 2, 12.0),
        (4, 4, 12.0),  # never more than without groups
    ],
)
def test_a_token_goes_to_a_node_once(groups: int, groups_per_token: int, seconds: float) -> None:
    experts = Experts(experts=8, top_k=2, groups=groups, groups_per_token=groups_per_token)
    cost = layer_cost(expert_problem(experts), "ep=8", expert_layer(experts))
    close(cost.forward.expert_s, seconds)


def test_experts_split_over_tensor_ranks_join_their_tokens() -> None:
    # etp 2: all-gather and reduce-scatter of 16 rows * 10 * 2 B: 2 * 1/2 * 320 / 100; and with ep 2, each
    # rank sends half.
    cost = layer_cost(expert_problem(), "tp=2,etp=2,ep=1", expert_layer())
    close(cost.forward.expert_s, 3.2)
    close(cost.expert_weights, 800.0)
    cost = layer_cost(expert_problem(), "tp=2,etp=2,ep=2", expert_layer())
    close(cost.forward.expert_s, 3.2 + 1.6)  # 2 * 1/2 * 160 / 100 within the node


def test_tensor_ranks_without_sequence_parallelism_gather_the_result() -> None:
    # tp 2, ep 1, etp 1: 8 * 10 * 2 B over two ranks, 1/2 * 160 / 100.
    cost = layer_cost(expert_problem(), "tp=2,etp=1,ep=1,sequence_parallel=no", expert_layer())
    close(cost.forward.expert_s, 0.8)
    cost = layer_cost(expert_problem(), "tp=2,etp=1,ep=1,sequence_parallel=yes", expert_layer())
    close(cost.forward.expert_s, 0.0)


def test_expert_communication_hides_as_far_as_the_software_can() -> None:
    p = with_software(expert_problem(), expert_overlap=0.5)
    close(layer_cost(p, "ep=2", expert_layer()).forward.expert_s, 1.6)


def test_a_weight_that_is_partly_split_is_not_whole() -> None:
    layer = Layer(
        name="mixed",
        operators=(
            Matmul(
                name="m",
                k=Extent(10),
                n=Extent(20, "kv_heads"),
                weights=(
                    Weight(name="w", shape=(Extent(10), Extent(20, "kv_heads"))),
                    Weight(name="bias", shape=(Extent(20, "kv_heads"),)),
                    Weight(name="scale", shape=(Extent(3), Extent(2))),
                ),
            ),
        ),
    )
    cost = layer_cost(problem(), "tp=4", layer)
    close(cost.dense_weights, 116.0)  # 220 over two key-value heads, and 6 replicated
    close(cost.replicated_weights, 6.0)


def test_work_that_is_not_selective_is_not_recomputed() -> None:
    layer = Layer(
        name="plain", operators=(Pointwise(name="p", forward=(Extent(10),), backward=(Extent(10),)),)
    )
    close(layer_cost(problem(), "tp=1", layer).selective.total_s, 0.0)


def test_a_grid_has_costs_of_every_kind_and_both_ends() -> None:
    p = problem(brick_model((0, 1)))
    grid = grid_cost(p, table(p, "tp=1,pp=2"))
    close(grid.kinds[1].forward.total_s, 2.1)
    close(grid.embedding.forward.total_s, 0.2)  # 2 * 5 * 10 * 2 B at 1000 B/s
    close(grid.embedding.backward_weight.total_s, 0.5)  # 5 * 10 * (2 + 8) B
    close(grid.head.forward.total_s, 3.2)  # 2000 flop; 3 * 400 B of logits
    close(grid.head.backward_input.total_s, 2.8)
    close(grid.head.backward_weight.total_s, 2.0)
    close(grid.head.logits_bytes, 400.0)
    close(grid.head.largest_bytes, 0.0)
    close(grid.head.saved_bytes, 0.0)
    # Two of 200 B, and 210 gradients of the larger kind's weights of 2 B; of the head, 400 B and the same.
    close(grid.temporaries.layer, 820.0)
    close(grid.temporaries.head, 820.0)
    close(grid.hop_bytes, 100.0)
    close(grid.hops.by_tier_s[-1], 5.0)  # 100 B between nodes at 20 B/s
    close(grid.replicas, 4.0)
    assert IDEAL is p.efficiency


def test_embedding_and_head_gather_their_vocabulary() -> None:
    p = problem()
    grid = grid_cost(p, table(p, "tp=2"))
    # One region of 100 B: the looked-up rows, forward; the gradients of the head's input, backward.
    close(grid.embedding.forward.tensor_s, 1.0)
    close(grid.embedding.backward_input.tensor_s, 0.0)
    close(grid.head.forward.tensor_s, 0.0)
    close(grid.head.backward_input.tensor_s, 1.0)
    deeper = problem(brick_model(head_tensor_syncs=2))
    head = grid_cost(deeper, table(deeper, "tp=2")).head
    close(head.forward.tensor_s, 2.0)
    close(head.backward_input.tensor_s, 3.0)


@pytest.mark.parametrize(
    ("text", "seconds", "nbytes"),
    [
        ("pp=1", 0.0, 100.0),
        ("pp=2", 5.0, 100.0),
        ("pp=2,axis_order=pp-tp-cp-dp", 1.0, 100.0),
        ("pp=2,micro_batch_size=2", 10.0, 200.0),
        # A half each, and an all-gather of both within the node: 50 / 20 + 1/2 * 100 / 100.
        ("pp=2,tp=2,sequence_parallel=no", 3.0, 50.0),
        ("pp=2,tp=4,sequence_parallel=no", 1.25 + 0.75, 25.0),
        ("pp=1,tp=2,sequence_parallel=no", 0.0, 50.0),
        ("pp=2,tp=2,sequence_parallel=yes", 2.5, 50.0),
    ],
)
def test_a_hop_between_stages(text: str, seconds: float, nbytes: float) -> None:
    p = problem()
    grid = grid_cost(p, table(p, text))
    close(grid.hops.mean_s, seconds)
    close(grid.hop_bytes, nbytes)


def test_replicas_of_dense_and_expert_weights() -> None:
    p = expert_problem()
    grid = grid_cost(p, table(p, "tp=2,cp=2,dp=2,ep=2,etp=1"))
    close(grid.replicas, 4.0)
    close(grid.expert_replicas, 4.0)
    grid = grid_cost(p, table(p, "tp=2,cp=2,dp=2,ep=4,etp=2"))
    close(grid.expert_replicas, 1.0)
