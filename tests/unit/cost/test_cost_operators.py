"""Times of single operators, and their widths and rows on a rank, all by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.unit.cost.hand_made import (
    IDEAL,
    SOFTWARE,
    cluster,
    device,
    operator_model,
    problem,
    table,
    with_efficiency,
    with_software,
)

from shardwise.cluster import AttentionCurve, Efficiency
from shardwise.cluster.device import GroupedMatmulCurve, MatmulCurve, MemoryCurve
from shardwise.cost import Problem
from shardwise.cost.operators import degree_of, element_bytes, operator_times, rows_of, width_of
from shardwise.model import Experts
from shardwise.operators import (
    Attention,
    Extent,
    GroupedMatmul,
    Lookup,
    Loss,
    Matmul,
    Operator,
    Pointwise,
    Weight,
)

EXPERTS = Experts(experts=8, top_k=2)
HALF_SPEED = MatmulCurve(peak_fraction=0.5, tile_m=1, tile_n=1, units=1, k_half=10.0, small_tile_fraction=1.0)
SLOW_MEMORY = MemoryCurve(fraction=0.5, half_bytes=100.0)


def given(efficiency: dict[str, Any], *, experts: Experts | None = None, **job: Any) -> Problem:
    model = operator_model((Pointwise(name="none", forward=(), backward=()),), experts=experts)
    return problem(model, cluster(of=with_efficiency(**efficiency)), **job)


def seconds(p: Problem, operator: Operator, text: str, experts: Experts | None = None) -> tuple[float, ...]:
    """Forward, input gradient, weight gradient."""
    times = operator_times(p, table(p, text), operator, experts)
    columns = (times.forward_s, times.input_s, times.weight_s)
    return tuple(float(np.broadcast_to(column, 1)[0]) for column in columns)


@pytest.mark.parametrize(
    ("role", "expected"),
    [("whole", 12.0), ("heads", 3.0), ("kv_heads", 6.0), ("ffn", 3.0), ("vocab", 3.0), ("expert_ffn", 6.0)],
)
def test_a_width_is_split_by_its_role(role: Any, expected: float) -> None:
    # tp 4, etp 2; two key-value heads are repeated on pairs of tp ranks.
    p = given({}, experts=EXPERTS)
    assert width_of(p, table(p, "tp=4,etp=2"), Extent(12, role)) == expected
    assert 12 / degree_of(p, table(p, "tp=4,etp=2"), Extent(12, role)) == expected


def test_key_value_heads_are_split_while_there_are_enough() -> None:
    p = given({})
    assert width_of(p, table(p, "tp=2"), Extent(12, "kv_heads")) == 6.0
    assert width_of(p, table(p, "tp=1"), Extent(12, "kv_heads")) == 12.0


@pytest.mark.parametrize(
    ("text", "rows", "expected"),
    [
        ("micro_batch_size=1", "tokens", 16.0),
        ("tp=2,micro_batch_size=2,sequence_parallel=no", "tokens", 32.0),
        ("tp=2,cp=2,micro_batch_size=2", "tokens", 16.0),
        ("tp=2,cp=2,micro_batch_size=2", "head", 16.0),
        ("tp=2,cp=2,micro_batch_size=2", "sequence", 8.0),
        ("tp=2,cp=2,micro_batch_size=2,sequence_parallel=no", "sequence", 16.0),
        # 16 tokens * 2 experts each * imbalance 1.5; a group of etp ranks takes the tokens of tp / etp
        # groups.
        ("tp=1,etp=1", "routed", 48.0),
        ("tp=2,etp=2", "routed", 48.0),
        ("tp=2,etp=1", "routed", 24.0),
        ("tp=2,cp=2,etp=1", "routed", 12.0),
    ],
)
def test_rows_on_a_rank(text: str, rows: str, expected: float) -> None:
    p = given({}, experts=EXPERTS, seq_len=16, batch=16, expert_imbalance=1.5)
    assert rows_of(p, table(p, text), rows, EXPERTS) == expected


def test_a_capacity_takes_the_place_of_the_imbalance() -> None:
    p = given({}, experts=EXPERTS, seq_len=16, expert_imbalance=1.5)
    capped = Experts(experts=8, top_k=2, capacity_factor=1.25)
    assert rows_of(p, table(p, "tp=1"), "routed", capped) == 40.0  # 16 * 2 * 1.25


def test_bytes_of_saved_elements() -> None:
    p = given({})
    kinds = ("compute", "operand", "fp32", "mask")
    assert [element_bytes(p, kind) for kind in kinds] == [2.0, 2.0, 4.0, 1.0]
    assert [element_bytes(given({}, dtype="fp8"), kind) for kind in kinds] == [2.0, 1.0, 4.0, 1.0]
    assert [element_bytes(given({}, dtype="fp32"), kind) for kind in kinds] == [4.0, 4.0, 4.0, 1.0]


MATMUL = Matmul(name="m", k=Extent(10), n=Extent(20, "ffn"))


def test_an_ideal_matmul() -> None:
    # 2 * 5 * 10 * 20 = 2000 flop at 1000 flop/s, each phase.
    assert seconds(given({}), MATMUL, "tp=1") == (2.0, 2.0, 2.0)
    assert seconds(given({}), MATMUL, "tp=2") == (1.0, 1.0, 1.0)


def test_a_matmul_by_its_inner_dimension() -> None:
    p = given({"matmul": HALF_SPEED, "launch_s": 0.25})
    # Forward k = 10: half saturated, 2000 / (500 / 2); input k = 20: 2000 / (500 * 2/3); weight k = 5: / (500
    # / 3).
    assert seconds(p, MATMUL, "tp=1") == pytest.approx((8.25, 6.25, 12.25), rel=1e-14)
    # n is 10 on a rank: 1000 flop; forward and input k = 10, weight k = 5.
    assert seconds(p, MATMUL, "tp=2") == pytest.approx((4.25, 4.25, 6.25), rel=1e-14)


def test_a_matmul_by_its_tiles() -> None:
    curve = MatmulCurve(peak_fraction=1.0, tile_m=4, tile_n=8, units=2, k_half=0.0, small_tile_fraction=0.5)
    p = given({"matmul": curve})
    # Forward [5, 20]: 2 x 3 tiles in 3 waves fill 100 / (3 * 2 * 32); small ones 0.5 * 100 / (8 * 2 * 8) =
    # 0.39.
    forward = 100 / 192
    # Input [5, 10]: 2 x 2 tiles in 2 waves 50 / 128; small 0.5 * 50 / (5 * 16) = 0.31.
    # Weight [10, 20]: 3 x 3 in 5 waves 200 / 320; small 5 x 5 in 13 waves 0.5 * 200 / 208 = 0.48.
    expected = (2.0 / forward, 2.0 / (50 / 128), 2.0 / (200 / 320))
    assert seconds(p, MATMUL, "tp=1") == pytest.approx(expected, rel=1e-14)


def test_a_matmul_that_memory_limits() -> None:
    # (5 * 10 + 10 * 20 + 5 * 20) * 2 B = 700 B at 1000 * 0.1 B/s.
    p = given({"memory": MemoryCurve(fraction=0.1, half_bytes=100.0)})
    assert seconds(p, MATMUL, "tp=1") == (7.0, 7.0, 7.0)


GROUPED = GroupedMatmul(name="g", experts=8, k=Extent(10), n=Extent(20, "expert_ffn"))


def grouped_problem(**efficiency: Any) -> Problem:
    return given(efficiency, experts=EXPERTS, seq_len=8, expert_imbalance=1.25)


def test_a_grouped_matmul_by_tokens_per_expert() -> None:
    p = grouped_problem(
        grouped_matmul=GroupedMatmulCurve(fraction=0.8, tokens_half=5.0), launch_s=0.5, matmul=HALF_SPEED
    )
    # 8 * 2 * 1.25 = 20 rows on 8 / 2 = 4 experts: 5 each, half saturated; 2 * 20 * 10 * 20 = 8000 flop.
    # Speed 1000 * 0.5 * 0.8 / 2 = 200; inner 10: half of it, inner 20: 2/3, inner 5: 1/3.
    expected = (0.5 + 80.0, 0.5 + 60.0, 0.5 + 120.0)
    assert seconds(p, GROUPED, "tp=1,ep=2", EXPERTS) == pytest.approx(expected, rel=1e-14)
    # etp 2 with tp 2: the same rows, half the width: 4000 flop; inner 10: 40; inner 10: 40; inner 5: 60.
    found = seconds(p, GROUPED, "tp=2,etp=2,ep=2", EXPERTS)
    assert found == pytest.approx((40.5, 40.5, 60.5), rel=1e-14)


def test_a_grouped_matmul_reads_the_weights_of_all_its_experts() -> None:
    p = grouped_problem(memory=MemoryCurve(fraction=0.1, half_bytes=0.0))
    # (20 * 10 + 20 * 20 + 4 * 10 * 20) * 2 B = 2800 B at 100 B/s, over 8 s of arithmetic.
    assert seconds(p, GROUPED, "tp=1,ep=2", EXPERTS) == pytest.approx((28.0, 28.0, 28.0), rel=1e-14)


ATTENTION = Attention(
    name="a", heads=Extent(4, "heads"), kv_heads=Extent(2, "kv_heads"), qk_dim=3, v_dim=5, causal=True
)


def curve(seq_half: float = 0.0) -> dict[str, AttentionCurve]:
    return {"flash-2": AttentionCurve(forward_fraction=0.5, backward_fraction=0.25, seq_half=seq_half)}


def test_causal_attention() -> None:
    p = given({"attention": curve(seq_half=8.0), "launch_s": 0.5}, seq_len=8)
    # 2 * 8 queries * 4 keys * 4 heads * 8 = 2048 flop at 1000 * 0.5 * 8/16; backward 2.5 times at half the
    # speed.
    assert seconds(p, ATTENTION, "tp=1") == pytest.approx((8.692, 0.5 + 8.192 * 5, 0.0), rel=1e-14)
    assert seconds(p, ATTENTION, "tp=2") == pytest.approx((4.596, 0.5 + 4.096 * 5, 0.0), rel=1e-14)


def test_attention_runs_at_the_peak_of_the_other_dtype() -> None:
    # The recipe fp8 has 2000 flop/s for matmuls, and 1000 for attention.
    p = given({"attention": curve()}, seq_len=8, dtype="fp8")
    assert seconds(p, ATTENTION, "tp=1")[0] == pytest.approx(4.096, rel=1e-14)
    # [8, 10] x [10, 20] is 3200 flop at 2000 flop/s; casts of 4 B for each of 8 * 10 inputs and of 8 * 20
    # gradients of outputs, at 1000 B/s.
    assert seconds(p, MATMUL, "tp=1") == pytest.approx((1.6 + 0.32, 1.6 + 0.64, 1.6), rel=1e-14)


@pytest.mark.parametrize(
    ("window", "causal", "keys"),
    [(2, True, 1.75), (2, False, 1.75), (None, False, 8.0), (8, True, 4.0), (100, True, 4.0)],  # 2 - 4 / 16
)
def test_attention_within_a_window(window: int | None, causal: bool, keys: float) -> None:
    p = given({}, seq_len=8)
    core = Attention(
        name="a", heads=Extent(4, "heads"), kv_heads=Extent(2, "kv_heads"), qk_dim=3, v_dim=5,
        window=window, causal=causal,
    )  # fmt: skip
    # 2 * 8 * keys * 4 * 8 flop, and 0.768 s for the bytes below.
    assert seconds(p, core, "tp=1")[0] == pytest.approx(max(0.512 * keys, 0.768), rel=1e-14)


def test_attention_that_memory_limits() -> None:
    p = given({"memory": MemoryCurve(fraction=0.1, half_bytes=0.0)}, seq_len=8)
    # q and out 4 heads, k and v 2 heads, of (3 + 5) elements together: 8 * 6 * 8 * 2 B = 768 B at 100 B/s;
    # twice back.
    assert seconds(p, ATTENTION, "tp=1") == pytest.approx((7.68, 15.36, 0.0), rel=1e-14)
    # tp 4 has one head of the four, and one of the two key-value heads: 8 * 2 * 8 * 2 B.
    assert seconds(p, ATTENTION, "tp=4") == pytest.approx((2.56, 5.12, 0.0), rel=1e-14)


def test_attention_over_a_part_of_the_sequence() -> None:
    # cp 2 has half of the queries, each with all of the keys.
    p = given({}, seq_len=8)
    assert seconds(p, ATTENTION, "cp=2")[0] == pytest.approx(1.024, rel=1e-14)


def unfused(efficiency: dict[str, Any] | None = None, **changes: Any) -> Problem:
    """Sequences of 8 with software that has no fused attention."""
    return with_software(given(efficiency or {}, seq_len=8, **changes), attention=())


def test_unfused_attention() -> None:
    # Scores: [32, 3] x [3, 8] for 8 queries of 4 heads, 2 * 32 * 8 * 3 flop; values: [32, 8] x [8, 5], 2 * 32
    # * 8 * 5 flop: 4.096 s. 256 scores of 2 B are accessed 4.5 times forward, 5.5 times backward; twice the
    # products backward.
    expected = (4.096 + 2.304, 8.192 + 2.816, 0.0)
    assert seconds(unfused(), ATTENTION, "tp=1") == pytest.approx(expected, rel=1e-14)
    # A device without a fused kernel has the same times.
    assert seconds(given({"attention": {}}, seq_len=8), ATTENTION, "tp=1") == pytest.approx(
        expected, rel=1e-14
    )
    # tp 2 has half of the heads, cp 2 half of the queries.
    half = tuple(phase / 2 for phase in expected)
    assert seconds(unfused(), ATTENTION, "tp=2") == pytest.approx(half, rel=1e-14)
    assert seconds(unfused(), ATTENTION, "cp=2") == pytest.approx(half, rel=1e-14)
    # Two products and a softmax are three launches forward, five backward.
    started = (expected[0] + 1.5, expected[1] + 2.5, 0.0)
    assert seconds(unfused({"launch_s": 0.5}), ATTENTION, "tp=1") == pytest.approx(started, rel=1e-14)


def test_unfused_attention_computes_scores_outside_of_a_window() -> None:
    core = Attention(
        name="a", heads=Extent(4, "heads"), kv_heads=Extent(2, "kv_heads"), qk_dim=3, v_dim=5, window=2
    )
    assert seconds(unfused(), core, "tp=1") == seconds(unfused(), ATTENTION, "tp=1")
    assert seconds(given({}, seq_len=8), core, "tp=1")[0] < 1.0


def test_unfused_attention_runs_at_the_speed_of_matmuls() -> None:
    # Half of the peak, times 3 / 13 and 8 / 18 of it for the short inner dimensions; the softmax as before.
    found = seconds(unfused({"matmul": HALF_SPEED}), ATTENTION, "tp=1")
    forward = 1.536 / (0.5 * 3 / 13) + 2.56 / (0.5 * 8 / 18)
    assert found == pytest.approx((forward + 2.304, 2 * forward + 2.816, 0.0), rel=1e-14)
    # At the peak of the other dtype, without casts.
    assert seconds(unfused(dtype="fp8"), ATTENTION, "tp=1")[0] == pytest.approx(6.4, rel=1e-14)
    # Memory: keys of each of four heads, (32 * 3 + 4 * 3 * 8 + 32 * 8) * 2 B and
    # (32 * 8 + 4 * 8 * 5 + 32 * 5) * 2 B, at 100 B/s; the scores at 100 B/s too.
    slow = unfused({"memory": MemoryCurve(fraction=0.1, half_bytes=0.0)})
    moved = 8.96 + 11.52
    assert seconds(slow, ATTENTION, "tp=1") == pytest.approx(
        (moved + 23.04, 2 * moved + 28.16, 0.0), rel=1e-14
    )


def test_software_prefers_its_first_kernel_that_the_device_has() -> None:
    slow = AttentionCurve(forward_fraction=0.5, backward_fraction=0.25, seq_half=0.0)
    fast = AttentionCurve(forward_fraction=1.0, backward_fraction=1.0, seq_half=0.0)
    p = given({"attention": {"flash-2": slow, "flash-3": fast}}, seq_len=8)
    for order, curve in (
        (("flash-3", "flash-2"), fast),
        (("flash-2", "flash-3"), slow),
        (("flash-4", "flash-2"), slow),
        (("flash-1",), None),
        ((), None),
    ):
        assert with_software(p, attention=order).attention is curve


def test_memory_bound_work_moves_bytes_as_often_as_the_profile_says() -> None:
    p = with_software(given({"memory": SLOW_MEMORY, "launch_s": 0.5}), pointwise_passes=2.0)
    pointwise = Pointwise(name="p", forward=(Extent(10),), backward=(Extent(30),), rows="tokens")
    # 5 * 10 * 2 B and 5 * 30 * 2 B, twice, each with 100 B, at 500 B/s.
    assert seconds(p, pointwise, "tp=1") == pytest.approx((1.1, 1.9, 0.0), rel=1e-14)
    # The softmax of unfused attention too: 4.5 and 5.5 times.
    twice = with_software(unfused(), pointwise_passes=2.0)
    found = seconds(twice, ATTENTION, "tp=1")
    assert found == pytest.approx((4.096 + 4.608, 8.192 + 5.632, 0.0), rel=1e-14)
    # The traffic of products, lookups and losses does not change.
    for operator in (MATMUL, Lookup(name="l", width=Extent(10)), Loss(name="l", classes=Extent(20, "vocab"))):
        assert seconds(twice, operator, "tp=1") == seconds(given({}, seq_len=8), operator, "tp=1")


@pytest.mark.parametrize(("dtype", "cast"), [("bf16", 0.0), ("fp32", 0.0), ("fp8", 1.0), ("nvfp4", 1.0)])
def test_casts_before_products_of_low_precision(dtype: str, cast: float) -> None:
    peaks = dict.fromkeys(("bf16", "fp8", "fp4", "fp32"), 1000.0)
    of = device(with_efficiency(launch_s=0.5).efficiency, peak_flop_per_s=peaks)
    model = operator_model((MATMUL,), experts=EXPERTS)
    p = problem(model, cluster(of=of), seq_len=8, dtype=dtype)
    # Read in 2 B and written twice in one: 8 * 10 inputs, 8 * 20 gradients; each cast is a launch of 0.5 s.
    found, plain = seconds(p, MATMUL, "tp=1"), 0.5 + 3.2
    assert found == pytest.approx((plain + cast * 0.82, plain + cast * 1.14, plain), rel=1e-14)
    # 16 routed rows on 4 experts, 6400 flop; 16 * 10 and 16 * 20 elements are cast.
    found, plain = seconds(p, GROUPED, "tp=1,ep=2", EXPERTS), 0.5 + 6.4
    assert found == pytest.approx((plain + cast * 1.14, plain + cast * 1.78, plain), rel=1e-14)


def test_pointwise_work() -> None:
    p = given({"memory": SLOW_MEMORY, "launch_s": 0.5})
    pointwise = Pointwise(
        name="p", forward=(Extent(10), Extent(20, "ffn")), backward=(Extent(40, "ffn"),), rows="tokens"
    )
    # 5 * 30 * 2 B = 300 B and 5 * 40 * 2 = 400 B, each with 100 B, at 500 B/s.
    assert seconds(p, pointwise, "tp=1") == pytest.approx((1.3, 1.5, 0.0), rel=1e-14)
    # tp 2: 5 * 20 * 2 and 5 * 20 * 2.
    assert seconds(p, pointwise, "tp=2") == pytest.approx((1.1, 1.1, 0.0), rel=1e-14)


def test_pointwise_work_that_moves_nothing_is_a_launch() -> None:
    p = given({"memory": SLOW_MEMORY, "launch_s": 0.5})
    assert seconds(p, Pointwise(name="p", forward=(), backward=()), "tp=1") == (0.5, 0.5, 0.0)


def test_a_lookup_reads_and_writes_rows_and_adds_gradients_in_fp32() -> None:
    p = given({"memory": SLOW_MEMORY, "launch_s": 0.5})
    # 2 * 5 * 10 * 2 B and 5 * 10 * (2 + 4 + 4) B, each with 100 B, at 500 B/s; no gradient of an input.
    assert seconds(p, Lookup(name="l", width=Extent(10)), "tp=1") == pytest.approx((1.1, 0.0, 1.7), rel=1e-14)


def test_a_loss_passes_over_fp32_logits() -> None:
    p = given({"memory": SLOW_MEMORY, "launch_s": 0.5})
    # 5 * 20 * 4 = 400 B three times and twice, each with 100 B, at 500 B/s.
    loss = Loss(name="l", classes=Extent(20, "vocab"))
    assert seconds(p, loss, "tp=1") == pytest.approx((3.1, 2.3, 0.0), rel=1e-14)
    assert seconds(p, loss, "tp=2") == pytest.approx((1.9, 1.5, 0.0), rel=1e-14)


def test_the_ideal_device_is_ideal() -> None:
    fixed = ("launch_s", "context_bytes", "communicator_bytes")
    assert isinstance(IDEAL, Efficiency)
    assert all(getattr(IDEAL, name) == 0.0 for name in fixed)
    of_host = ("dispatch_s", "expert_dispatch_s", "host_action_s", "host_step_s")
    assert all(getattr(SOFTWARE, name) == 0.0 for name in of_host)


@pytest.mark.parametrize(
    ("software", "added_s"),
    [
        ({}, 0.0),
        ({"accumulated_bytes": 6.0}, 1.2),  # 10 * 20 weights of 6 B at 1000 B/s
        ({"accumulated_bytes": 6.0, "reduces_by_block": True}, 0.0),  # in copies_s, once per step
    ],
)
def test_gradients_that_a_kernel_of_its_own_adds_up(software: dict[str, Any], added_s: float) -> None:
    matmul = Matmul(name="m", k=Extent(10), n=Extent(20))
    plain = seconds(given({}), matmul, "")
    found = seconds(with_software(given({}), **software), matmul, "")
    assert found == pytest.approx((plain[0], plain[1], plain[2] + added_s))
    # Eight experts on a rank: as many weights for each.
    grouped = GroupedMatmul(name="g", experts=8, k=Extent(10), n=Extent(20), weights=())
    plain = seconds(given({}, experts=EXPERTS), grouped, "", EXPERTS)
    found = seconds(with_software(given({}, experts=EXPERTS), **software), grouped, "", EXPERTS)
    assert found == pytest.approx((plain[0], plain[1], plain[2] + 8 * added_s))


def test_a_product_that_adds_its_gradient_to_the_accumulated_one() -> None:
    """It reads and writes 4 bytes per weight where it would write 2: 4 times the end of a tile."""
    matmul = Matmul(name="m", k=Extent(10), n=Extent(20))
    efficiency = {"matmul": HALF_SPEED}
    plain = seconds(given(efficiency), matmul, "")
    found = seconds(with_software(given(efficiency), fuses_accumulation=True), matmul, "")
    # Weight gradient, inner 5: 2000 flop at 500 * 5 / (5 + 10) flop/s, then at 500 * 5 / (5 + 40).
    assert plain[2] == pytest.approx(12.0) and found == pytest.approx((*plain[:2], 36.0))
    # Gradients in 16 bits: 2 + 2 bytes, 500 * 5 / (5 + 20).
    narrow = with_software(given(efficiency), fuses_accumulation=True, reduce_in_fp32=False)
    assert seconds(narrow, matmul, "")[2] == pytest.approx(20.0)
    # Limited by memory: (5 * 10 + 5 * 20 + 4 * 10 * 20) * 2 B = 1900 B at 100 B/s.
    slow = {"memory": MemoryCurve(fraction=0.1, half_bytes=0.0)}
    assert seconds(with_software(given(slow), fuses_accumulation=True), matmul, "")[2] == pytest.approx(19.0)
    # Of eight experts, 5 * 2 / 8 tokens each: 8 * 200 weights.
    grouped = GroupedMatmul(name="g", experts=8, k=Extent(10), n=Extent(20), weights=())
    p = with_software(given(slow, experts=EXPERTS), fuses_accumulation=True)
    # (10 * 10 + 10 * 20 + 4 * 1600) * 2 B = 13400 B; without: (300 + 1600) * 2 B = 3800 B.
    assert seconds(p, grouped, "", EXPERTS)[2] == pytest.approx(134.0)
    assert seconds(given(slow, experts=EXPERTS), grouped, "", EXPERTS)[2] == pytest.approx(38.0)


def test_kernels_of_each_expert_add_biases() -> None:
    """4 experts of a rank have 20 rows of 10 elements: 200 elements of 28 and 40 B at 1000 B/s, and 2 and 5
    kernels of each expert with a launch of 0.5 s, after one that starts the pass over memory."""
    bias = Weight(name="bias", shape=(Extent(10),), experts=8)
    weight = Weight(name="weight", shape=(Extent(10), Extent(20, "expert_ffn")), experts=8)
    last = GroupedMatmul(
        name="down", experts=8, k=Extent(20, "expert_ffn"), n=Extent(10), weights=(weight, bias)
    )
    plain = grouped_problem(launch_s=0.5)
    fused = seconds(plain, last, "tp=1,ep=2", EXPERTS)
    p = with_software(plain, expert_bias_forward_bytes=28.0, expert_bias_backward_bytes=40.0)
    added = [own - other for own, other in zip(seconds(p, last, "tp=1,ep=2", EXPERTS), fused, strict=True)]
    assert added == pytest.approx([4.0 + 0.5 + 5.6, 10.0 + 0.5 + 8.0, 0.0])
    # Without biases, and for the first product, whose biases are part of it, there are no such kernels.
    for other in (replace(last, weights=(weight,)), replace(last, k=Extent(20))):
        assert seconds(p, other, "tp=1,ep=2", EXPERTS) == seconds(plain, other, "tp=1,ep=2", EXPERTS)
