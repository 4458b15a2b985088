"""Where the replicas of uneven pipelines communicate: on the outermost tier, unless the pipelines are
identical.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwise.cluster import load_cluster
from shardwise.model import load_model
from shardwise.search import UnevenSpace
from shardwise.search.hetero.space import UnevenSubproblem
from shardwise.search.hetero.stage_costs import StageCostModel
from shardwise.search.hetero.subproblem import subproblem_search
from shardwise.strategy import Job


@pytest.fixture(scope="module")
def pricing() -> StageCostModel:
    job = Job(seq_len=512, global_batch_size=16, dtype="fp16")
    cluster = load_cluster("1x4xA100-40G+1x4xV100-16G", inter_node="1Gb/s")
    return StageCostModel(UnevenSpace(load_model("gpt2"), cluster, job))


MIXED = UnevenSubproblem(pools=(0, 1), micro_batch_size=1, least=2, most=2)


def test_replicas_of_unlike_pipelines_reduce_between_the_pools(pricing: StageCostModel) -> None:
    mixed = pricing.options(MIXED).stages[0].reduce_s[0, 0, 2, 0, 6]
    alike = pricing.options(replace(MIXED, is_alike=True)).stages[0].reduce_s[0, 0, 2, 0, 6]
    # Six layers of 7.1 M parameters: 4 bytes each, of which each of two replicas sends half, at 0.125 GB/s.
    assert mixed > 0.9 * 6 * 7.1e6 * 4 / 2 / 0.125e9 - 0.05
    assert alike < mixed / 50


def test_replicas_of_identical_pipelines_reduce_as_on_their_pool_alone(pricing: StageCostModel) -> None:
    alike = pricing.options(replace(MIXED, is_alike=True)).stages[0]
    alone = pricing.options(replace(MIXED, pools=(0,))).stages[0]
    # Stages of 1 and 2 devices, two of which the pool can have.
    np.testing.assert_allclose(alike.reduce_s[:2, 0, 2:, 0, 1:], alone.reduce_s[:2, 0, 2:, 0, 1:], rtol=1e-12)
    np.testing.assert_allclose(alike.gather_s[:2, 0, 2:, 0, 1:], alone.gather_s[:2, 0, 2:, 0, 1:], rtol=1e-12)


def test_identical_pipelines_have_the_same_stages_and_nearly_the_same_shares(pricing: StageCostModel) -> None:
    subproblem = replace(MIXED, least=3, most=3, is_alike=True)
    found = subproblem_search(pricing.options(subproblem), subproblem, 100).within(1e3)
    assert found is not None
    ((laid, count),) = found
    assert count == 3 and laid.microbatches == 6  # 16 by three: the last pipeline does four


@pytest.mark.parametrize("pools", [(0,), (0, 1)])
@pytest.mark.parametrize("least", [1, 2])
def test_bounds_of_a_range_are_the_minimum_over_its_values(
    pricing: StageCostModel, pools: tuple[int, ...], least: int
) -> None:
    """Each number is estimated separately; without one of them the bounds would be higher."""
    subproblem = replace(MIXED, pools=pools, least=least, most=6)
    every = [
        pricing.options(replace(subproblem, least=number, most=number)).stages[0]
        for number in range(least, 7)
    ]
    found = pricing.options(subproblem).stages[0]
    for name in ("forward_s", "backward_s", "gather_s", "reduce_s", "end_s"):
        expected = np.min([getattr(stages, name) for stages in every], axis=0)
        np.testing.assert_array_equal(getattr(found, name), expected, err_msg=name)
        if name in ("reduce_s", "end_s"):
            assert np.max([getattr(stages, name) for stages in every]) > np.max(expected)
