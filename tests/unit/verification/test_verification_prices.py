"""Operators, steps and memory of the checker, computed by hand for the brick model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.checker_records import layers_of
from tests.unit.cost.hand_made import (
    IDEAL,
    SOFTWARE,
    brick_model,
    cluster,
    device,
    with_efficiency,
)
from tests.unit.verification.by_hand import brick_figures, strategy

from shardwise.cluster.device import MatmulCurve
from shardwise.strategy import Strategy
from shardwise_verify import problem
from shardwise_verify.collectives import fabric_of, groups_of
from shardwise_verify.estimate import (
    estimate_strategy,
    evaluate,
    fitting,
    model_flop_per_token,
    rank_hops_s,
    tokens_per_s_per_device,
)
from shardwise_verify.layers import LocalSizes, keys_of_query, operator_seconds
from shardwise_verify.problem import Figures, degree_limits_of
from shardwise_verify.reading import InputError
from shardwise_verify.records import (
    AttentionOperator,
    ExtentRecord,
    LayerOperator,
    MatmulOperator,
    SavedRecord,
)
from shardwise_verify.stages import layers_of_stages
from shardwise_verify.strategy_rows import families, rows_of


def seconds(operator: LayerOperator, chosen: Strategy, **changes: object) -> tuple[float, float, float]:
    """The three times of an operator on a device that is ideal except for `changes`."""
    figures = brick_figures(on=cluster(1, of=with_efficiency(**changes)))
    found = operator_seconds(operator, LocalSizes(figures=figures, rows=rows_of([chosen]), experts=None))
    forward, input_, weight = (
        float(np.ravel(part)[0]) for part in (found.forward, found.input, found.weight)
    )
    return forward, input_, weight


def test_a_matmul() -> None:
    """[5, 10] x [10, 10] is 1000 flop at 1000 flop/s; its 400 B take 0.4 s."""
    operator = MatmulOperator(name="m", k=ExtentRecord(10), n=ExtentRecord(10, "ffn"))
    assert seconds(operator, strategy()) == pytest.approx((1.0, 1.0, 1.0))
    assert seconds(operator, strategy(), launch_s=0.25) == pytest.approx((1.25, 1.25, 1.25))
    # tp 2: n = 5 on a rank.
    assert seconds(operator, strategy(tp=2)) == pytest.approx((0.5, 0.5, 0.5))


def test_a_matmul_on_tiles() -> None:
    """Tiles of 4 x 8 on 2 units, [5, 10] x [10, 10]: 2 x 2 tiles in 2 waves fill 50 of 2 * 2 * 32 = 128.

    Tiles of 2 x 4: 3 x 3 in ceil(9 / 2) = 5 waves fill 50 of 5 * 2 * 8 = 80, times 0.5: less than 50 / 128. k
    / (k + 10) = 1/2, peak 0.8: efficiency 0.8 * 0.5 * 50 / 128 = 0.15625, so 1 / 0.15625 = 6.4 s.
    """
    curve = MatmulCurve(peak_fraction=0.8, tile_m=4, tile_n=8, units=2, k_half=10.0, small_tile_fraction=0.5)
    operator = MatmulOperator(name="m", k=ExtentRecord(10), n=ExtentRecord(10))
    assert seconds(operator, strategy(), matmul=curve)[0] == pytest.approx(6.4)
    # With full weight of the small tiles 50 / 80 counts: 1 / (0.8 * 0.5 * 0.625) = 4 s.
    whole = replace(curve, small_tile_fraction=1.0)
    assert seconds(operator, strategy(), matmul=whole)[0] == pytest.approx(4.0)


def test_attention() -> None:
    """5 queries meet 2.5 keys each, 4 heads of 3 + 3: 2 * 5 * 2.5 * 4 * 6 = 600 flop; 2.5 times as much
    backward.
    """
    operator = AttentionOperator(
        name="a", heads=ExtentRecord(4, "heads"), kv_heads=ExtentRecord(2, "kv_heads"), qk_dim=3, v_dim=3
    )
    assert seconds(operator, strategy()) == pytest.approx((0.6, 1.5, 0.0))
    # All keys: 1200 flop. A window of 2: 2 - 4 / 10 = 1.6 keys, 384 flop, and 5 * 6 * 6 * 2 = 360 B.
    assert seconds(replace(operator, causal=False), strategy())[0] == pytest.approx(1.2)
    assert seconds(replace(operator, window=2), strategy())[0] == pytest.approx(0.384)
    # tp 4 leaves one head, and 2 kv heads are split at most to one: 5 * (1 + 1) * 6 * 2 = 120 B, 150 flop.
    assert seconds(operator, strategy(tp=4))[:2] == pytest.approx((0.15, 0.375))


def under(operator: LayerOperator, figures: Figures, chosen: Strategy | None = None) -> tuple[float, ...]:
    """The three times of an operator with any figures."""
    sizes = LocalSizes(figures=figures, rows=rows_of([chosen or strategy()]), experts=None)
    found = operator_seconds(operator, sizes)
    return tuple(float(np.ravel(part)[0]) for part in (found.forward, found.input, found.weight))


def test_attention_through_memory() -> None:
    """5 queries of 4 heads meet 5 keys in dimensions 3 and 3: two products of [20, 3] x [3, 5], 600 flop
    each; 100 scores of 2 B are accessed 4.5 and 5.5 times, half as often again with this software.
    """
    core = AttentionOperator(
        name="a", heads=ExtentRecord(4, "heads"), kv_heads=ExtentRecord(2, "kv_heads"), qk_dim=3, v_dim=3
    )
    software = replace(SOFTWARE, attention=(), pointwise_passes=1.5)
    figures = brick_figures(profile=software)
    assert under(core, figures) == pytest.approx((1.2 + 1.35, 2.4 + 1.65, 0.0))
    assert under(core, figures, strategy(tp=2)) == pytest.approx((0.6 + 0.675, 1.2 + 0.825, 0.0))
    assert under(replace(core, window=2, causal=False), figures) == under(core, figures)
    bare = cluster(1, of=with_efficiency(attention={}))
    assert under(core, brick_figures(on=bare)) == pytest.approx((1.2 + 0.9, 2.4 + 1.1, 0.0))


def test_casts() -> None:
    """[5, 10] x [10, 20] in fp8 at 2000 * 0.5 flop/s, 2 s; casts of 4 B for 50 inputs and for 100
    gradients.
    """
    operator = MatmulOperator(name="m", k=ExtentRecord(10), n=ExtentRecord(20))
    curve = replace(IDEAL.matmul, fp8_fraction=0.5)
    figures = brick_figures(on=cluster(1, of=with_efficiency(matmul=curve)), dtype="fp8")
    assert under(operator, figures) == pytest.approx((2.2, 2.4, 2.0))
    assert figures.attention_flop_per_s == 1000.0


def test_bytes_of_tensors_that_only_a_matmul_reads() -> None:
    tensor = SavedRecord(width=ExtentRecord(32), dtype="operand")
    each = {"bf16": 2.0, "fp32": 4.0, "fp8": 1.0, "fp8-block": 1.03125, "mxfp8": 1.03125, "nvfp4": 0.5625}
    peaks = dict.fromkeys(("bf16", "fp8", "fp4", "fp32"), 1000.0)
    on = cluster(1, of=device(peak_flop_per_s=peaks))
    for dtype, nbytes in each.items():
        sizes = LocalSizes(
            figures=brick_figures(on=on, dtype=dtype), rows=rows_of([strategy()]), experts=None
        )
        assert (
            float(
                np.ravel(
                    sizes.saved_bytes(tensor, MatmulOperator(name="m", k=ExtentRecord(1), n=ExtentRecord(1)))
                )[0]
            )
            == 5 * 32 * nbytes
        )


def test_a_step_that_waits_for_the_host() -> None:
    """dp 4, two micro-batches, 2 s for each kernel: of four bricks two forward, two for the inputs and one
    for the weight, 4 * 10 s; of the embedding one, one and one; of the head two, two and one. No kernel
    takes longer than that, so all of it counts.
    """
    own = estimate_strategy(brick_figures(profile=replace(SOFTWARE, dispatch_s=2.0)), strategy(dp=4))
    work_s = 2 * (7.8 + 7.6 + 6.5)
    assert own.breakdown["host_waits"] == pytest.approx(2 * (40 + 6 + 10) - work_s)
    computed = sum(own.breakdown[name] for name in ("matmul", "attention", "memory_bound"))
    assert computed == pytest.approx(work_s)
    # Full recomputation of all layers repeats 4 s of each, most of it waiting.
    recomputing = strategy(dp=4, recompute="full", recompute_layers=4)
    found = estimate_strategy(brick_figures(profile=replace(SOFTWARE, dispatch_s=2.0)), recomputing)
    assert found.breakdown["recompute"] == pytest.approx(2 * 4 * 4)
    # A brick begins with its matmul: a recomputation that stops early repeats nothing.
    early = replace(SOFTWARE, dispatch_s=2.0, recompute_stops_early=True)
    assert estimate_strategy(brick_figures(profile=early), recomputing).breakdown["recompute"] == 0.0


def test_messages_between_stages() -> None:
    """100 B within a node of 100 B/s; each of two tensor ranks sends half, 0.5 s, and they gather both, 1/2 *
    1 s, where the sequence is whole.
    """
    figures = brick_figures()
    pipelines = [
        strategy(pp=2, first_stage_layers=2, last_stage_layers=2, dp=2),
        strategy(pp=2, tp=2, first_stage_layers=2, last_stage_layers=2),
        strategy(pp=2, tp=2, first_stage_layers=2, last_stage_layers=2, sequence_parallel=True),
        strategy(dp=4),
    ]
    rows = rows_of(pipelines)
    fabric, groups = (
        fabric_of(figures.cluster, figures.efficiency, figures.backend),
        groups_of(rows, figures.cluster),
    )
    assert rank_hops_s(figures, fabric, groups, rows, 2)[0][:3] == pytest.approx([1.0, 1.0, 0.5])
    assert rank_hops_s(figures, fabric, groups, rows, 1)[0][3] == 0.0
    # Software that overlaps a quarter of them waits three quarters with each forward and backward.
    waiting = brick_figures(profile=replace(SOFTWARE, pipeline_overlap=0.25, data_overlap=0.0))
    plain = brick_figures(profile=replace(SOFTWARE, data_overlap=0.0))
    more = (
        estimate_strategy(waiting, pipelines[0]).step_time_s
        - estimate_strategy(plain, pipelines[0]).step_time_s
    )
    # The longest path has a forward on stage 0, four forwards and backwards on stage 1 and a backward on
    # stage 0, and two hops between them. That forward and those four backwards send something: 5 * 0.75 more,
    # and 2 * 0.75 less.
    assert more == pytest.approx(2.25)


def test_keys_of_a_query() -> None:
    assert keys_of_query(8, None, causal=True) == 4
    assert keys_of_query(8, None, causal=False) == 8
    assert keys_of_query(8, 8, causal=True) == 4
    assert keys_of_query(8, 4, causal=True) == 3  # 4 - 16 / 16


def test_a_whole_step() -> None:
    """Four bricks, dp 4, two micro-batches of one sequence.

    Forward 4 * 1.1 + 0.2 + 2 + 1.2 = 7.8; input 4 * 1.2 + 2 + 0.8 = 7.6; weight 4 + 0.5 + 2 = 6.5: twice that
    is 43.8. Weights: 4 * 110 + 200 + 200 = 840. All-reduce of 3360 B by rings 2 * 3/4 * 33.6 = 50.4, of which
    3/4 of the last backward of 14.1 hides 10.575. Norm: 3 * 3360 / 1000 = 10.08. Optimizer: 840 * 30 / 1000.
    """
    own = estimate_strategy(brick_figures(), strategy(dp=4))
    assert own.step_time_s == pytest.approx(43.8 + 39.825 + 10.08 + 25.2)
    assert own.breakdown["matmul"] == pytest.approx(2 * (3 * 4 + 3 * 2))
    assert own.breakdown["memory_bound"] == pytest.approx(2 * (4 * 0.3 + 0.2 + 1.2 + 0.8 + 0.5))
    assert own.breakdown["gradient_reduction"] == pytest.approx(39.825)
    assert own.breakdown["pipeline_bubble"] == pytest.approx(0.0, abs=1e-9)
    assert sum(own.breakdown.values()) == pytest.approx(own.step_time_s)


def test_software_that_works_by_block_copies_tensors() -> None:
    """840 weights at 1000 B/s, two micro-batches: 2 * 2 out of the gathered tensor, 4 and 2 * 2 into it, 6 +
    10 to accumulate gradients, 2 * 4 into the reduced tensor, and 12 to gather and reduce without
    replicas; for a quarter of them, with replicas, 8 / 4 and 28.
    """
    plain = brick_figures()
    by_block = brick_figures(profile=replace(SOFTWARE, reduces_by_block=True))
    for shard, nbytes in ((1, 48.0), (4, 30.0)):
        sharded = strategy(dp=4, optim_shard=shard)
        more = (
            estimate_strategy(by_block, sharded).breakdown["optimizer"]
            - estimate_strategy(plain, sharded).breakdown["optimizer"]
        )
        assert more == pytest.approx(0.84 * nbytes), shard


def test_the_memory_of_a_rank() -> None:
    """840 weights at 2, 4 and 12 B; one micro-batch saves 4 * 300; temporaries are 2 * 200 (the logits' 400
    is not more) and 110 gradients of 2 B.
    """
    own = estimate_strategy(brick_figures(), strategy(dp=4))
    expected = {
        "parameters": 1680, "gradients": 3360, "optimizer": 10080, "gathered": 0, "activations": 1200,
        "temporaries": 620, "buffers": 0, "fragmentation": 0, "communicators": 0, "context": 0,
    }  # fmt: skip
    assert own.memory == pytest.approx(expected)
    assert own.device_bytes == pytest.approx(16_940)
    # Optimizer states over 4 ranks: a quarter. Offloaded: none, and all of them on the host, with
    # the weights that return: 14 B.
    assert estimate_strategy(brick_figures(), strategy(dp=4, optim_shard=4)).memory[
        "optimizer"
    ] == pytest.approx(2520)
    away = estimate_strategy(brick_figures(), strategy(dp=4, offload="optimizer"))
    assert (away.memory["optimizer"], away.host_bytes) == pytest.approx((0, 11_760))


def test_recompute_saves_fewer_activations_and_repeats_work() -> None:
    """Selective: the 200 B of each norm are recomputed in 0.1 s. Full, 2 of 4: half of saved - input."""
    plain, selective, full = (
        estimate_strategy(brick_figures(), strategy(dp=4, recompute=kind, recompute_layers=layers))
        for kind, layers in (("none", 0), ("selective", 0), ("full", 2))
    )
    assert selective.memory["activations"] == pytest.approx(1200 - 4 * 200)
    assert selective.breakdown["recompute"] == pytest.approx(2 * 4 * 0.1)
    # 1200 - 1/2 * (1200 - 4 * 100), and one layer's 300 - 100 while it is recomputed.
    assert full.memory["activations"] == pytest.approx(800 + 200)
    assert full.breakdown["recompute"] == pytest.approx(2 * 0.5 * 4 * 1.1)
    assert plain.breakdown["recompute"] == 0


def test_activations_in_flight_of_a_pipeline() -> None:
    """pp 4, dp 1, 8 micro-batches: rank 0 has 4 of its brick's 300 B; only it has the embedding's 200."""
    chosen = strategy(pp=4, first_stage_layers=1, last_stage_layers=1)
    own = estimate_strategy(brick_figures(), chosen)
    # Rank 0: 310 weights * 18 + 4 * 300 + 620 + 4 * 100. Rank 3: the same weights, 300.
    assert own.device_bytes == pytest.approx(310 * 18 + 1200 + 620 + 400)
    assert own.tightest_rank == 0


@pytest.mark.parametrize(
    ("stages", "first", "last", "expected"),
    [
        (1, 7, 7, [7]),
        (2, 3, 4, [3, 4]),
        (3, 1, 2, [1, 4, 2]),
        (4, 1, 1, [1, 2, 3, 1]),
        (5, 0, 0, [0, 2, 2, 3, 0]),
    ],
)
def test_layers_of_stages(stages: int, first: int, last: int, expected: list[int]) -> None:
    chosen = strategy(pp=stages, first_stage_layers=first, last_stage_layers=last, schedule="1f1b")
    ((_, family),) = families(rows_of([chosen]), 8)
    assert [int(count[0]) for count in layers_of_stages(7, family)] == expected


def test_a_candidate_that_just_fits_fits() -> None:
    exact, short = (
        brick_figures(on=cluster(1, of=device(memory_bytes=nbytes))) for nbytes in (16_940, 16_939)
    )
    rows = rows_of([strategy(dp=4)])
    assert fitting(exact, evaluate(exact, rows))[0].tolist() == [True]
    assert fitting(short, evaluate(short, rows))[0].tolist() == [False]


def test_rates() -> None:
    """6 * (4 * 110 + 200) flop per token, no attention; 8 * 5 tokens in 10 s on 4 devices: one per second."""
    figures = brick_figures()
    assert model_flop_per_token(figures) == 6 * 640
    assert tokens_per_s_per_device(figures, 10.0) == 1.0
    # With tied embeddings the output projection uses the embedding's 200.
    assert model_flop_per_token(brick_figures(brick_model(tied=True))) == 6 * 640


def test_a_dtype_that_is_unknown_or_missing() -> None:
    figures = brick_figures()
    for dtype in ("bf17", "nvfp4"):
        with pytest.raises(InputError, match="dtype"):
            problem.figures_of(figures.model, figures.cluster, replace(figures.job, dtype=dtype))


def test_limits_of_a_model_without_heads() -> None:
    """Nothing to divide: the gcd of nothing is 0, which every degree divides."""
    limits = degree_limits_of(layers_of(brick_model()))
    assert (limits.layers, limits.heads, limits.kv_heads, limits.experts) == (4, 0, 0, 0)
    assert limits.ffn == 10


def test_the_slowest_class_sets_the_pace() -> None:
    slow = device(replace(IDEAL, launch_s=1.0), name="slow", peak_flop_per_s={"bf16": 500.0})
    one = cluster(1)
    mixed = replace(
        one, classes={**one.classes, "slow": slow}, nodes=(replace(one.nodes[0], device_class="slow"),)
    )
    figures = brick_figures(on=mixed)
    assert (figures.efficiency.launch_s, figures.matmul_flop_per_s) == (1.0, 500.0)
