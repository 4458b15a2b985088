"""Goodput of a result: by hand, its parts, its defaults compared with published runs, and its limits."""

from __future__ import annotations

from dataclasses import replace
from math import log, sqrt

import pytest

from shardwise.cluster import load_cluster
from shardwise.plans import Plan, Reliability, goodput_of

CLUSTER = load_cluster("4x8xH100-SXM")
LARGE = load_cluster("2048x8xH100-SXM")


def test_parts_by_hand(plan: Plan) -> None:
    """32 devices with 3.2e7 s each: a failure every 1e6 s. That is rare enough for first order to hold to
    1e-6.
    """
    inputs = Reliability(
        device_mtbf_s=3.2e7, checkpoint_interval_s=90.0, checkpoint_stall_s=10.0, restart_s=200.0, jitter=0.01
    )
    found = goodput_of(plan.best, CLUSTER, inputs)
    assert found.system_mtbf_s == 1e6
    assert (found.checkpoint_interval_s, found.lost_per_failure_s) == (90.0, 250.0)  # (90 + 10) / 2 + 200
    assert found.lost["failures"] == pytest.approx(250e-6, rel=1e-3)
    assert found.lost["checkpoints"] == pytest.approx(0.1 * (1 - 250e-6), rel=1e-6)  # 10 of each 100 s
    # Four nodes: the slowest is sqrt(2 ln 4) deviations behind.
    slowdown = 1 + 0.01 * sqrt(2 * log(4))
    assert found.fraction == pytest.approx(0.9 * (1 - 250e-6) / slowdown, rel=1e-6)
    assert found.tokens_per_s_per_device == found.fraction * (plan.best.tokens_per_s_per_device or 0.0)
    assert found.inputs is inputs


@pytest.mark.parametrize("cluster", [CLUSTER, LARGE])
def test_progress_and_losses_are_the_whole(plan: Plan, cluster: object) -> None:
    found = goodput_of(plan.best, cluster, Reliability())  # type: ignore[arg-type]
    assert found.fraction + sum(found.lost.values()) == pytest.approx(1.0, abs=1e-15)
    assert all(part > 0.0 for part in found.lost.values())


def test_defaults_agree_with_published_runs(plan: Plan) -> None:
    """Llama 3 keeps more than 90 % on 16,384 H100; ByteRobust 97 % on 9,600 with faster restarts."""
    found = goodput_of(plan.best, LARGE, Reliability())
    assert found.system_mtbf_s == pytest.approx(54 * 86400 / 419)
    assert 0.90 < 1.0 - found.lost["failures"] - found.lost["checkpoints"] < 0.93
    # sqrt(2 * 6.3 s * 11,135 s) = 374.6 s.
    assert found.checkpoint_interval_s == pytest.approx(374.6, abs=0.1)
    fast = goodput_of(plan.best, load_cluster("1200x8xH100-SXM"), Reliability(restart_s=60.0))
    assert 0.96 < 1.0 - fast.lost["failures"] - fast.lost["checkpoints"] < 0.98


def test_the_optimum_is_no_worse_than_other_intervals(plan: Plan) -> None:
    best = goodput_of(plan.best, LARGE, Reliability())
    for factor in (0.5, 0.8, 1.25, 2.0):
        other = Reliability(checkpoint_interval_s=factor * best.checkpoint_interval_s)
        assert goodput_of(plan.best, LARGE, other).fraction < best.fraction


def test_checkpoints_fall_on_the_ends_of_steps(plan: Plan) -> None:
    slow = replace(plan.best, step_time_s=500.0)
    assert goodput_of(slow, LARGE, Reliability()).checkpoint_interval_s == 500.0
    assert goodput_of(slow, LARGE, Reliability(checkpoint_interval_s=60.0)).checkpoint_interval_s == 500.0
    assert goodput_of(slow, LARGE, Reliability(checkpoint_interval_s=600.0)).checkpoint_interval_s == 600.0


def test_devices_that_fail_all_the_time_leave_nothing(plan: Plan) -> None:
    found = goodput_of(plan.best, LARGE, Reliability(device_mtbf_s=3600.0, restart_s=86400.0))
    assert found.fraction == 0.0 and found.lost["failures"] == 1.0
