"""Costs of a hop of an uneven pipeline: within a node, between nodes, and to another pool."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.cluster import load_cluster
from shardwise.model import load_model
from shardwise.plans import Layout, PeakMemory, Pipeline, Result, Stage
from shardwise.search import UnevenSpace
from shardwise.search.hetero import RecordPrediction, predict_record
from shardwise.search.hetero.pipeline_search import pipeline_s
from shardwise.search.hetero.space import UnevenSubproblem, max_stages_per_node
from shardwise.search.hetero.stage_costs import (
    StageCostModel,
    StageHops,
    group_sizes,
    hops_s,
)
from shardwise.strategy import Job

SEQ_LEN, HIDDEN = 1024, 768
NBYTES = 2.0 * SEQ_LEN * HIDDEN
"""Bytes that a stage of one device sends for a micro-batch of one sequence."""


@pytest.fixture(scope="module")
def hops() -> tuple[StageHops, ...]:
    """Two nodes of 8 A100-80G and two of 4 V100-16G, which have one card of 10 Gb/s per node."""
    job = Job(seq_len=SEQ_LEN, global_batch_size=16, dtype="fp16")
    cluster = load_cluster("2x8xA100-80G+2x4xV100-16G", inter_node="10Gb/s")
    space = UnevenSpace(load_model("gpt2"), cluster, job)
    return (
        StageCostModel(space)
        .options(UnevenSubproblem(pools=(0, 1), micro_batch_size=1, least=1, most=4))
        .hops
    )


@pytest.mark.parametrize(
    ("stages", "most", "sizes"),
    [(1, 8, (1,)), (3, 8, (2, 1)), (7, 4, (4, 2, 1)), (8, 4, (4, 4)), (3, 1, (1,) * 3)],
)
def test_stages_are_placed_in_groups_of_powers_of_two(stages: int, most: int, sizes: tuple[int, ...]) -> None:
    assert group_sizes(stages, most) == sizes


def test_a_node_holds_as_many_stages_as_divide_it() -> None:
    assert [max_stages_per_node(8, size) for size in (1, 2, 4, 8)] == [8, 4, 2, 1]
    assert [max_stages_per_node(6, size) for size in (1, 2)] == [2, 1]


def test_a_hop_inside_a_node_goes_over_its_links(hops: tuple[StageHops, ...]) -> None:
    near_s = hops[0].near_s[0]
    # 300 GB/s one way between A100s, and a few microseconds.
    assert NBYTES / 300e9 < near_s[8, 8] < 5 * NBYTES / 300e9 + 20e-6
    # Three stages are two at the end in one node and one before them, which may be in another node.
    assert near_s[3, 2] == near_s[8, 8] and near_s[3, 3] > 10 * near_s[8, 8]


def test_a_group_that_fills_its_node_has_the_card_for_itself(hops: tuple[StageHops, ...]) -> None:
    far_s = hops[1].far_s[0]
    # The whole card, or the share of each of 2 or 4 stages that leave their node at once.
    alone_s = NBYTES / 1.25e9
    for stages, senders in ((4, 1), (2, 2), (1, 4)):
        # A message has about 0.7 of that bandwidth.
        assert senders * alone_s < far_s[stages, 1] < 1.5 * senders * alone_s


def test_hops_follow_the_stages_of_their_pools(hops: tuple[StageHops, ...]) -> None:
    (found,) = hops_s(hops, (0, 0), np.array([[0, 1, 1, 0, 0]]))
    fast, slow = hops
    # The first pool has three stages, grouped as 1 + 2; the other has two, in one group.
    expected = [
        max(fast.far_s[0, 3, 3], slow.far_s[0, 2, 2]),
        slow.near_s[0, 2, 2],
        max(slow.far_s[0, 2, 1], fast.far_s[0, 3, 2]),
        fast.near_s[0, 3, 2],
    ]
    np.testing.assert_allclose(found, expected)


def by_hand(space: UnevenSpace, ranks: tuple[str, str]) -> Result:
    """A plan of one pipeline with two stages of six layers, on these ranks of the first pool."""
    stages = tuple(
        Stage(devices=1, ranks=of, device_class=space.pools[0].name, tp=1, dp=1, layers=(6,), share=1.0)
        for of in ranks
    )
    nothing = PeakMemory(allocated=0.0, reserved=0.0, device=0.0, capacity=1.0)
    pipeline = Pipeline(stages=stages, micro_batch_size=1, microbatches=16, rows=16, makespan_s=1.0)
    return Result(
        fields=None, layout=Layout(pipelines=(pipeline,)), step_time_s=1.0, band_s=(1.0, 1.0),
        tokens_per_s_per_device=1.0, mfu=0.1, mfu_full_attention=0.1, peak_memory=nothing, breakdown={},
        memory_band_bytes=(0.0, 0.0), fits_probability=1.0,
        memory={}, tightest_rank=0, pools=(space.pools[0].name,), is_alike=False, evaluator="by hand",
    )  # fmt: skip


def test_a_pool_with_one_tier_over_its_nodes_has_the_cost_of_its_record() -> None:
    """NVLink joins 72 GB200 in nodes of four: no tier ends within a node."""
    job = Job(seq_len=SEQ_LEN, global_batch_size=16, dtype="fp16")
    cluster = load_cluster("2x4xGB200+1x4xT4")
    space = UnevenSpace(load_model("gpt2"), cluster, job)
    predicted = predict_record(space.model, cluster, job, by_hand(space, ("0", "1")))
    options = StageCostModel(space).options(UnevenSubproblem(pools=(0,), micro_batch_size=1, least=1, most=1))
    assert not predicted.faults
    assert predicted.pipeline_s[0] == pytest.approx(
        pipeline_s(options, (0,), ((0, 6), (0, 6)), 16), rel=1e-12
    )


def test_stages_spread_over_nodes_that_they_do_not_fill_are_detected() -> None:
    job = Job(seq_len=SEQ_LEN, global_batch_size=16, dtype="fp16")
    cluster = load_cluster("2x2xA100-40G+1x2xV100-16G", inter_node="10Gb/s")
    space = UnevenSpace(load_model("gpt2"), cluster, job)

    def again(*ranks: str) -> RecordPrediction:
        return predict_record(space.model, cluster, job, by_hand(space, (ranks[0], ranks[1])))

    predicted = again("0", "1")
    options = StageCostModel(space).options(UnevenSubproblem(pools=(0,), micro_batch_size=1, least=1, most=1))
    assert not predicted.faults
    assert predicted.pipeline_s[0] == pytest.approx(
        pipeline_s(options, (0,), ((0, 6), (0, 6)), 16), rel=1e-12
    )
    assert again("1", "2").faults == ("pipeline 0 is spread over nodes that identical pipelines do not fill",)
