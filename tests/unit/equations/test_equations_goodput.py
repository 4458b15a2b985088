"""Failures, checkpoints and jitter: by hand, compared with simulated runs, and at the ends of their
ranges.
"""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from shardwise.equations import goodput

HOUR_S = 3600.0


def test_failures_add_up_over_devices() -> None:
    # 54 d * 24 * 16,384 / 419 = 50,677.0 h per device: 54 d / 419 = 3.09 h on all of them.
    device_s = 54 * 24 * HOUR_S * 16384 / 419
    assert device_s / HOUR_S == pytest.approx(50_677.0, abs=0.05)
    assert goodput.system_mtbf_s(device_s, 16384) == pytest.approx(54 * 24 * HOUR_S / 419)


def test_share_of_checkpoints() -> None:
    assert goodput.checkpoint_fraction(90.0, 10.0) == 0.1  # 10 of each 100 s
    assert goodput.checkpoint_fraction(90.0, 0.0) == 0.0


def test_half_a_checkpoint_interval_is_repeated() -> None:
    assert goodput.lost_per_failure_s(90.0, 10.0, 600.0) == 650.0  # (90 + 10) / 2 + 600


def left(interval_s: float, stall_s: float, mtbf_s: float) -> float:
    """The fraction of time that checkpoints and failures leave, without restarts."""
    working = 1.0 - goodput.checkpoint_fraction(interval_s, stall_s)
    return float(working * goodput.surviving_fraction(interval_s, stall_s, 0.0, mtbf_s))


def test_the_optimal_interval_loses_least() -> None:
    assert goodput.optimal_interval_s(2.0, 10_000.0) == 200.0  # sqrt(2 * 2 * 10,000)
    assert goodput.optimal_interval_s(8.0, 10_000.0) == 400.0  # four times the stall, twice the interval
    best = left(200.0, 2.0, 10_000.0)
    assert best > left(180.0, 2.0, 10_000.0) and best > left(220.0, 2.0, 10_000.0)


def simulated_fraction(interval_s: float, stall_s: float, restart_s: float, mtbf_s: float) -> float:
    """Useful time divided by wall time, in 20,000 segments with random failures."""
    random_ = random.Random(4)
    segment_s = interval_s + stall_s
    wall_s, until_failure_s = 0.0, random_.expovariate(1.0 / mtbf_s)
    for _ in range(20_000):
        needed_s = segment_s
        while until_failure_s < needed_s:
            wall_s += until_failure_s
            until_failure_s = random_.expovariate(1.0 / mtbf_s)
            needed_s = restart_s + segment_s
        wall_s += needed_s
        until_failure_s -= needed_s
    return 20_000 * segment_s / wall_s


@pytest.mark.parametrize(
    ("interval_s", "stall_s", "restart_s", "mtbf_s"),
    [(90.0, 10.0, 20.0, 1000.0), (300.0, 20.0, 60.0, 400.0), (50.0, 5.0, 0.0, 100.0)],
)
def test_what_failures_leave_in_a_simulated_run(
    interval_s: float, stall_s: float, restart_s: float, mtbf_s: float
) -> None:
    expected = simulated_fraction(interval_s, stall_s, restart_s, mtbf_s)
    found = goodput.surviving_fraction(interval_s, stall_s, restart_s, mtbf_s)
    assert found == pytest.approx(expected, rel=0.02)


def test_what_failures_leave_by_hand() -> None:
    # x = 1, r = ln 2: 1 / (2 (e - 1)).
    found = goodput.surviving_fraction(90.0, 10.0, 100.0 * math.log(2.0), 100.0)
    assert found == pytest.approx(0.5 / (math.e - 1.0), rel=1e-14)
    # x = 2, no restart: 2 / (e^2 - 1).
    assert goodput.surviving_fraction(190.0, 10.0, 0.0, 100.0) == pytest.approx(
        2.0 / (math.e**2 - 1.0), rel=1e-14
    )


def test_rare_failures_take_their_loss_times_their_rate() -> None:
    # 1 - ((90 + 10) / 2 + 600) / 1e9 up to squares of 1e-6.
    lost = 1.0 - goodput.surviving_fraction(90.0, 10.0, 600.0, 1e9)
    assert lost == pytest.approx(goodput.lost_per_failure_s(90.0, 10.0, 600.0) / 1e9, rel=1e-4)


def test_a_cluster_that_always_fails_has_zero_goodput_without_overflow() -> None:
    assert goodput.surviving_fraction(3600.0, 6.0, 600.0, 0.01) == 0.0
    columns = goodput.surviving_fraction(3600.0, 6.0, 600.0, np.array([0.01, 1e3, 1e5, 1e9]))
    assert np.all(np.diff(columns) > 0.0) and columns[-1] < 1.0


def test_the_slowest_of_many_nodes() -> None:
    assert goodput.slowest_node_slowdown(1, 0.05) == 1.0  # nothing to wait for
    # e^8 nodes: sqrt(2 * 8) = 4 deviations.
    assert goodput.slowest_node_slowdown(math.exp(8.0), 0.01) == pytest.approx(1.04, rel=1e-15)
    assert goodput.slowest_node_slowdown(2048, 0.0) == 1.0


@pytest.mark.parametrize("nodes", [2, 16, 256, 2048])
def test_the_slowdown_is_an_upper_bound_and_close_for_many_nodes(nodes: int) -> None:
    times = np.random.default_rng(1).normal(1.0, 0.01, size=(2000, nodes))
    slowest = times.max(axis=1).mean() - 1.0
    bound = goodput.slowest_node_slowdown(nodes, 0.01) - 1.0
    # The mean of 2,000 maxima is off by no more than 0.01 / sqrt(2000) = 2.2e-4 at one deviation.
    assert slowest <= bound + 5e-4
    assert nodes < 256 or slowest > 0.8 * bound
