"""Estimates scale with the cluster: twice the speed takes half the time, and faster links never
take longer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.property.cost_samples import (
    CASES,
    Case,
    problem_of,
    sampled,
    with_links,
    with_speed,
    without_fixed_costs,
)

from shardwise.cluster import Cluster
from shardwise.cost import Problem, bind, peaks_of
from shardwise.search.step_times import step_times_s
from shardwise.strategy import OFFLOADS, StrategyTable


@pytest.fixture(scope="module", params=CASES, ids=str)
def sample(request: pytest.FixtureRequest, full: bool) -> tuple[Problem, StrategyTable]:
    case: Case = request.param
    problem = problem_of(case)
    return problem, sampled(problem, 3000 if full else 200, seed=200 + CASES.index(case))


def on(problem: Problem, cluster: Cluster) -> Problem:
    return bind(problem.model, cluster, problem.job)


def test_twice_as_fast_takes_half_the_time(sample: Any) -> None:
    problem, table = sample
    slow = without_fixed_costs(problem)
    fast = on(slow, with_links(with_speed(slow.cluster, 2.0), 2.0))
    np.testing.assert_allclose(step_times_s(fast, table), step_times_s(slow, table) / 2.0, rtol=1e-12)
    np.testing.assert_array_equal(peaks_of(fast, table).device_bytes, peaks_of(slow, table).device_bytes)


def hides_one_thing(table: StrategyTable) -> Any:
    """Rows without sharded gradients or offloaded activations, which could overlap with the same computation
    as the ring.
    """
    return (table.grad_shard == 1) & (table.offload < OFFLOADS.index("activations"))


def test_fixed_costs_are_not_halved(sample: Any) -> None:
    problem, table = sample
    rows = table.take(hides_one_thing(table))
    fast = on(problem, with_links(with_speed(problem.cluster, 2.0), 2.0))
    assert (step_times_s(fast, rows) > step_times_s(problem, rows) / 2.0 * (1 + 1e-12)).all()


@pytest.mark.parametrize("factor", [1.01, 3.0])
def test_faster_links_never_take_longer(sample: Any, factor: float) -> None:
    problem, table = sample
    before = step_times_s(problem, table)
    assert (
        step_times_s(on(problem, with_links(problem.cluster, factor)), table) <= before * (1 + 1e-12)
    ).all()


def test_improving_one_tier_makes_no_step_longer(sample: Any) -> None:
    problem, table = sample
    before, cluster = step_times_s(problem, table), problem.cluster
    for t, tier in enumerate(cluster.tiers):
        wider = replace(tier, bytes_per_s=2 * tier.bytes_per_s, flow_bytes_per_s=2 * tier.flow_bytes_per_s)
        nearer = replace(tier, latency_s=tier.latency_s / 2)
        for changed in (wider, nearer):
            tiers = (*cluster.tiers[:t], changed, *cluster.tiers[t + 1 :])
            after = step_times_s(on(problem, replace(cluster, tiers=tiers)), table)
            assert (after <= before * (1 + 1e-12)).all()
            assert (after < before).any()


def test_a_faster_host_link_helps_what_is_offloaded(sample: Any) -> None:
    problem, table = sample
    nodes = tuple(
        replace(node, host_link_bytes_per_s=2 * node.host_link_bytes_per_s) for node in problem.cluster.nodes
    )
    before = step_times_s(problem, table)
    after = step_times_s(on(problem, replace(problem.cluster, nodes=nodes)), table)
    assert (after <= before * (1 + 1e-12)).all()
    stays = table.offload == OFFLOADS.index("none")
    np.testing.assert_array_equal(after[stays], before[stays])
    assert (after[table.offload == OFFLOADS.index("optimizer")] < before[table.offload == 1]).all()


def test_shorter_packed_samples_never_take_longer(sample: Any) -> None:
    """Samples as long as the sequence change nothing, to the last digit; memory depends on none of them.

    Rings, sharded states and offloaded activations may overlap with the same attention, so that less of it
    hides less of each: up to 3 % of a step.
    """
    problem, table = sample[0], sample[1].take(slice(0, 60))
    length, last = problem.job.seq_len, step_times_s(problem, table)
    peaks, hides_one = peaks_of(problem, table).device_bytes, hides_one_thing(table) & (table.cp == 1)
    for sample_len in (length, length // 2, 64, 1):
        packed = bind(problem.model, problem.cluster, replace(problem.job, mean_sample_len=sample_len))
        times = step_times_s(packed, table)
        if sample_len == length:
            np.testing.assert_array_equal(times, last)
        assert (times <= last * np.where(hides_one, 1 + 1e-12, 1.03)).all()
        np.testing.assert_array_equal(peaks_of(packed, table).device_bytes, peaks)
        last = times


def test_a_larger_batch_takes_longer(sample: Any) -> None:
    problem, table = sample
    double = replace(problem.job, global_batch_size=2 * problem.job.global_batch_size)
    after = step_times_s(bind(problem.model, problem.cluster, double), table)
    assert (after > step_times_s(problem, table)).all()


def test_one_slow_node_slows_all(sample: Any) -> None:
    problem, table = sample
    rows = table.take(hides_one_thing(table))
    nodes = (replace(problem.cluster.nodes[0], speed=0.5), *problem.cluster.nodes[1:])
    after = step_times_s(on(problem, replace(problem.cluster, nodes=nodes)), rows)
    assert (after > step_times_s(problem, rows)).all()


def test_without_any_overlap_nothing_is_faster(sample: Any) -> None:
    problem, table = sample
    exposed = replace(problem.job, profile=problem.profile.without_overlap())
    shown = bind(problem.model, problem.cluster, exposed)
    assert (step_times_s(shown, table) >= step_times_s(problem, table) * (1 - 1e-12)).all()
