"""The proportional split: the usual choice by hand on a mixed cluster."""

from __future__ import annotations

import pytest

from shardwise.cluster import load_cluster
from shardwise.model import load_model
from shardwise.search import UnevenSpace
from shardwise.search.hetero import proportional_split, search_uneven
from shardwise.search.hetero.proportional import largest_remainders
from shardwise.strategy import Job


def test_largest_remainders_get_the_remaining_units() -> None:
    # 40 in proportion 312 to 125: 28.56 and 11.44, the first has the larger remainder.
    assert largest_remainders(40, [312.0, 125.0]) == [29, 11]
    assert largest_remainders(7, [1.0, 1.0]) == [4, 3] and largest_remainders(3, [1.0]) == [3]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [16, 60])
def test_the_split_is_whole_and_never_faster_than_the_best_plan(batch: int) -> None:
    job = Job(seq_len=512, global_batch_size=batch, dtype="fp16")
    space = UnevenSpace(load_model("gpt2"), load_cluster("1x4xA100-40G+1x4xV100-16G"), job)
    split, best = proportional_split(space), search_uneven(space).plan
    assert split is not None and best is not None
    microbatches = sum(pipeline.microbatches for pipeline in split.pipelines)
    assert microbatches * split.subproblem.micro_batch_size == batch
    for pipeline in split.pipelines:
        assert sum(layers for _, layers in pipeline.stages) == 12
    assert {pool for pipeline in split.pipelines for pool, _ in pipeline.stages} == {0, 1}
    assert split.time_s == max(pipeline.time_s for pipeline in split.pipelines)
    assert best.time_s <= split.time_s < 2.0 * best.time_s


@pytest.mark.slow
def test_layers_follow_the_speed_where_no_pool_holds_the_model() -> None:
    job = Job(seq_len=1024, global_batch_size=32, dtype="fp16")
    space = UnevenSpace(load_model("llama-2-13b"), load_cluster("1x4xA100-80G+1x4xV100-32G"), job)
    split = proportional_split(space)
    assert split is not None and split.subproblem.least == 1
    (pipeline,) = split.pipelines
    taken = {pool: sum(layers for one, layers in pipeline.stages if one == pool) for pool in (0, 1)}
    # 40 layers by 4 x 312 and 4 x 125 TFLOP/s: 28.6 and 11.4, before rounding to stages.
    assert taken[0] in (28, 29, 30) and taken[1] == 40 - taken[0]


def test_a_split_that_does_not_fit_is_none() -> None:
    job = Job(seq_len=1024, global_batch_size=8, dtype="fp16")
    space = UnevenSpace(load_model("llama-2-70b"), load_cluster("1x2xA100-40G+1x2xV100-16G"), job)
    assert proportional_split(space) is None
