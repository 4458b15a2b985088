"""A whole run by hand: tokens, steps and days; failures, money and energy; and what is not known."""

from __future__ import annotations

from dataclasses import replace
from math import exp, inf

import pytest

from shardwise.cluster import Cluster, at_price, load_cluster
from shardwise.errors import ConfigError
from shardwise.plans import Plan, Reliability, RunLength, WholeRun, whole_run_of
from shardwise.plans.whole_run import whole_run

CLUSTER = load_cluster("4x8xH100-SXM")
NEVER = Reliability(device_mtbf_s=1e40, checkpoint_interval_s=1e12, checkpoint_stall_s=1e-3, jitter=0.0)
"""No failure, no checkpoint that counts, no jitter: goodput 1."""


def run(length: RunLength, reliability: Reliability = NEVER, *, cluster: Cluster = CLUSTER) -> WholeRun:
    """Steps of 8 s with 2,000 tokens."""
    return whole_run(
        length, reliability, cluster=cluster, step_time_s=8.0, tokens_per_step=2000.0, band_s=(6.0, 12.0)
    )


def test_tokens_become_whole_steps() -> None:
    """10,001 tokens are 6 steps of 2,000: 48 s, 12,000 trained tokens."""
    found = run(RunLength(tokens=10_001.0))
    assert (found.steps, found.tokens) == (6, 12_000.0)
    assert found.computing_s == 48.0
    assert found.wall_s == pytest.approx(48.0, rel=1e-12)
    assert found.wall_band_s == pytest.approx((36.0, 72.0), rel=1e-12)  # 6 / 8 and 12 / 8 of it
    assert run(RunLength(tokens=10_000.0)).steps == 5


def test_money_and_energy_by_hand() -> None:
    """32 devices for 45,000 steps of 8 s: 100 h, 3,200 device hours. At $2.5 an hour: $8,000. At 700 W each:
    22.4 kW for 100 h are 2,240 kWh = 8.064 GJ; at 1.5 kW each 4,800 kWh.
    """
    cluster = at_price(CLUSTER, 2.5)
    found = run(RunLength(steps=45_000), cluster=cluster)
    assert found.days == pytest.approx(100 / 24)
    assert found.device_hours == pytest.approx(3_200.0)
    assert found.usd_per_hour == 80.0
    assert found.usd == pytest.approx(8_000.0)
    assert found.energy_j == pytest.approx(8.064e9)
    assert found.energy_kwh == pytest.approx(2_240.0)
    assert found.prices == ("price of H100-SXM: $2.5 an hour (given)",)
    assert "700 W, rated (NVIDIA H100 Tensor Core GPU data sheet, 2023)" in found.powers[0]
    given = run(RunLength(steps=45_000, power_w=1500.0), cluster=cluster)
    assert given.energy_kwh == pytest.approx(4_800.0)
    assert given.powers == ("power of a device: 1,500 W (given)",)


def test_failures_and_checkpoints_lengthen_the_run_and_cost_money() -> None:
    """32 devices with 3.2e6 s each: a failure every 1e5 s. 90 s of work, then 10 s of checkpoint; 200 s from
    a failure to the next step. 9 tenths of (x / (exp(2e-3) (exp(x) - 1)), x = 1e-3) of the time are progress.
    """
    rare = Reliability(
        device_mtbf_s=3.2e6, checkpoint_interval_s=90.0, checkpoint_stall_s=10.0, restart_s=200.0, jitter=0.0
    )
    fraction = 0.9 * 1e-3 / (exp(2e-3) * (exp(1e-3) - 1.0))
    found, ideal = run(RunLength(steps=1000), rare), run(RunLength(steps=1000))
    assert found.goodput.fraction == pytest.approx(fraction, rel=1e-12)
    assert found.computing_s == ideal.computing_s == 8000.0
    assert found.wall_s == pytest.approx(8000.0 / fraction, rel=1e-12)
    assert found.usd is not None and ideal.usd is not None
    assert found.usd / ideal.usd == pytest.approx(1.0 / fraction, rel=1e-9)


def test_days_say_how_many_tokens() -> None:
    """One day has 86,400 s: 10,800 steps of 8 s; of goodput 0.5, half as many."""
    found = run(RunLength(wall_s=86_400.0 * (1.0 + 1e-12)))
    assert (found.steps, found.tokens) == (10_800, 21_600_000.0)
    half = Reliability(
        device_mtbf_s=1e40, checkpoint_interval_s=8.0, checkpoint_stall_s=8.0, jitter=0.0, restart_s=0.0
    )
    assert run(RunLength(wall_s=86_400.0 * (1.0 + 1e-12)), half).steps == 5_400
    with pytest.raises(ConfigError, match="less than one step"):
        run(RunLength(wall_s=7.9))


def test_the_same_run_in_tokens_steps_and_days() -> None:
    tokens = run(RunLength(tokens=3e8), Reliability())
    assert run(RunLength(steps=tokens.steps), Reliability()) == tokens
    assert run(RunLength(wall_s=tokens.wall_s * (1 + 1e-12)), Reliability()) == tokens


def test_what_is_not_known_is_not_guessed() -> None:
    unpriced = replace(CLUSTER, nodes=tuple(replace(node, price_usd_per_hour=None) for node in CLUSTER.nodes))
    found = run(RunLength(steps=10), cluster=unpriced)
    assert (found.usd, found.usd_per_hour, found.prices) == (None, None, ())
    mixed = run(RunLength(steps=10), cluster=load_cluster("2x4xTPU-v5e"))
    assert mixed.energy_j is None and mixed.powers == ("power of TPU-v5e: not known; --power gives it",)
    graph = whole_run(RunLength(steps=10), NEVER, cluster=CLUSTER, step_time_s=8.0, tokens_per_step=None)
    assert (graph.tokens, graph.wall_band_s) == (None, None)
    with pytest.raises(ConfigError, match="is not known of samples"):
        whole_run(RunLength(tokens=1e9), NEVER, cluster=CLUSTER, step_time_s=8.0, tokens_per_step=None)


def test_two_classes_have_their_own_power() -> None:
    """`two-classes`: power of each class times its devices."""
    cluster = load_cluster("two-classes")
    found = run(RunLength(steps=450), cluster=cluster)  # 1 h
    counts = {
        name: sum(node.devices for node in cluster.nodes if node.device_class == name)
        for name in cluster.classes
    }
    watts = {"A100-80G": 400.0, "A100-40G": 400.0, "H100-SXM": 700.0, "V100-32G": 300.0}
    expected = sum(watts[cluster.classes[name].name] * count for name, count in counts.items())
    assert found.energy_kwh == pytest.approx(expected / 1e3) and len(found.powers) == len(counts) == 2


def test_devices_that_fail_before_every_step_are_refused() -> None:
    often = Reliability(device_mtbf_s=3600.0, restart_s=86400.0 * 30)
    with pytest.raises(ConfigError, match="leaves no progress"):
        run(RunLength(steps=1), often, cluster=load_cluster("2048x8xH100-SXM"))


def test_a_plan_has_its_whole_run(plan: Plan) -> None:
    """The method takes texts; the function of records gives the same."""
    found = plan.whole_run(tokens="1.5B", checkpoint_interval="30min", power="1.2kW", jitter=0.0)
    tokens = plan.job.seq_len * plan.job.global_batch_size
    assert found.steps == -(-1_500_000_000 // tokens)
    same = whole_run_of(
        plan, RunLength(tokens=1.5e9, power_w=1200.0), Reliability(checkpoint_interval_s=1800.0, jitter=0.0)
    )
    assert found == same
    assert found.wall_band_s is not None and found.wall_band_s[0] < found.wall_s < found.wall_band_s[1]
    document = found.to_dict()
    assert document["days"] == found.days and document["energy_kwh"] == found.energy_kwh


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "tokens"),
        ({"tokens": "15T", "steps": 5}, "cannot be combined"),
        ({"tokens": "15Q"}, "is no number of tokens"),
        ({"tokens": "-1"}, "is no number of tokens"),
        ({"tokens": 0.5}, "is not a number in range"),
        ({"tokens": inf}, "is not a number in range"),
        ({"steps": 0}, "is not a whole number in range"),
        ({"days": 0}, "is not a number in range"),
        ({"steps": 5, "power": "5"}, "has no unit"),
        ({"steps": 5, "mtbf": "1s"}, "is not a time in range"),
    ],
)
def test_arguments_that_cannot_be_used(plan: Plan, arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        plan.whole_run(**arguments)  # type: ignore[arg-type]
