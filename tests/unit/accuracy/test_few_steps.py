"""The fit of a few numbers to one to twenty measured steps, against arithmetic by hand and direct refits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.accuracy.tables import file_of, text_of

from shardwise.accuracy import StepSample, fit_steps, samples_of_rows
from shardwise.accuracy.calibration.few_steps import (
    MOST_STEPS,
    STEP_SPREAD,
    STRENGTHS,
    WORKLOAD_SPREAD,
    covariance,
    left_out_errors,
    posterior,
    prior,
)
from shardwise.cluster import Device
from shardwise.errors import ConfigError
from shardwise.search import predicted
from shardwise.strategy import Profile, TimeFactors

SLOPES = np.array([[0.8, 0.1, 0.05, 0.05]])


def test_one_step_by_hand() -> None:
    """Variance of a step: 0.01 (common) + 0.0225 * (0.64 + 0.01 + 0.0025 + 0.0025) = 0.0247375 of the parts,
    0.0225 of the workload and 0.0064 of the step: 0.0536375 in all. An excess of 0.1 has the weight
    0.1 / 0.0536375 = 1.864367; kernels take (0.01 + 0.0225 * 0.8) of it, links in a node (0.01 + 0.0225 *
    0.1), the workload 0.0225."""
    found = posterior(np.array([0.1]), SLOPES, np.ones((1, 1)), 1.0)
    assert found.parts == pytest.approx([0.0522023, 0.0228385, 0.0207411, 0.0207411], rel=1e-5)
    assert found.workloads == pytest.approx([0.0419483], rel=1e-5)
    # The machine takes 0.0247375 / 0.0536375 = 46.1 % of the excess, its workload 41.9 %, the step the rest.
    assert float(SLOPES[0] @ found.parts) == pytest.approx(0.0461198, rel=1e-5)


def test_no_strength_changes_nothing() -> None:
    found = posterior(np.array([0.1]), SLOPES, np.ones((1, 1)), 0.0)
    assert not found.parts.any() and not found.workloads.any()


def excess(values: list[float], workloads: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps with these excesses and workloads, and slopes that are the same for steps of one place."""
    rng = np.random.default_rng(7)
    slopes = rng.dirichlet([4.0, 1.0, 1.0, 1.0], len(values))
    return np.array(values), slopes, np.eye(max(workloads) + 1)[workloads]


def test_left_out_errors_are_those_of_fits_without_the_step() -> None:
    values, slopes, shared = excess([0.3, 0.1, -0.2, 0.15, 0.4], [0, 0, 1, 1, 2])
    for strength in STRENGTHS:
        found = left_out_errors(values, slopes, shared, strength)
        for place in range(len(values)):
            others = np.arange(len(values)) != place
            fit = posterior(values[others], slopes[others], shared[others], strength)
            explained = slopes[place] @ fit.parts + shared[place] @ fit.workloads
            assert found[place] == pytest.approx(np.expm1(explained - values[place]), rel=1e-9)


def test_the_covariance_is_the_prior_seen_through_the_slopes() -> None:
    """Sampled: 200,000 machines with factors of the prior, a workload's factor, and noise."""
    rng = np.random.default_rng(3)
    _, slopes, shared = excess([0.0, 0.0, 0.0], [0, 0, 1])
    parts = rng.multivariate_normal(np.zeros(4), prior(), 200_000)
    own = rng.normal(0.0, WORKLOAD_SPREAD, (200_000, 2))
    steps = parts @ slopes.T + own @ shared.T + rng.normal(0.0, STEP_SPREAD, (200_000, 3))
    assert np.cov(steps.T) == pytest.approx(covariance(slopes, shared, 1.0), rel=0.03, abs=3e-4)


def rows_of_runs(tmp_path: Path, *changes: dict[str, str]) -> list[StepSample]:
    samples, faults = samples_of_rows(file_of(tmp_path, text_of(*changes)))
    assert faults == []
    return samples


PLANS = [{"tp": tp, "dp": dp} for tp, dp in (("1", "8"), ("2", "4"), ("4", "2"), ("8", "1"))]


def machine(sample: StepSample) -> tuple[Device, Profile]:
    return sample.problem.device, sample.problem.profile


def slower(sample: StepSample, factors: TimeFactors) -> StepSample:
    """The sample with the time that it takes exactly with these factors."""
    device, profile = machine(sample)
    other = sample.on(factors.of_device(device), factors.of_software(profile))
    return replace(sample, seconds=predicted(other.problem, other.strategy).step_time_s)


def test_equal_factors_are_a_factor_on_the_step(tmp_path: Path) -> None:
    for sample in rows_of_runs(tmp_path, *PLANS):
        plain = predicted(sample.problem, sample.strategy).step_time_s
        found = slower(sample, TimeFactors(kernels=1.2, node_links=1.2, network=1.2, host=1.2)).seconds
        # Latencies of links are those of data sheets and stay.
        assert found == pytest.approx(1.2 * plain, rel=5e-3)


def test_steps_of_a_slow_machine_find_it_and_predict_the_others(tmp_path: Path) -> None:
    true = TimeFactors(kernels=1.25, node_links=1.1, network=1.3, host=1.0)
    samples = [slower(sample, true) for sample in rows_of_runs(tmp_path, *PLANS)]
    found = fit_steps(samples[:3])
    assert found.strength == 1.0 and found.left_out is not None
    assert found.left_out < 0.5 * found.before and found.after < found.left_out
    factor = found.workloads[0].time_factor
    device, profile = machine(samples[3])
    device, profile = found.factors.of_device(device), found.factors.of_software(profile)
    other = samples[3].on(device, profile)
    error = predicted(other.problem, other.strategy).step_time_s * factor / samples[3].seconds - 1.0
    assert abs(error) < 0.03
    # The error of the one that was left out was that of the machine.
    plain = predicted(samples[3].problem, samples[3].strategy).step_time_s / samples[3].seconds - 1.0
    assert plain < -0.15


@given(st.lists(st.tuples(st.floats(-0.7, 0.7), st.integers(0, 2)), min_size=2, max_size=MOST_STEPS))
def test_left_out_steps_are_never_predicted_worse_than_without_the_fit(
    steps: list[tuple[float, int]],
) -> None:
    values, slopes, shared = excess([value for value, _ in steps], [place for _, place in steps])
    best = min(float(np.abs(left_out_errors(values, slopes, shared, one)).mean()) for one in STRENGTHS)
    assert best <= float(np.abs(np.expm1(-values)).mean()) * (1.0 + 1e-12)


def test_steps_that_contradict_each_other_change_nothing(tmp_path: Path) -> None:
    """The same plan, once 30 % above and once 30 % below its prediction: either is the wrong one for the
    other."""
    first, second = rows_of_runs(tmp_path, {"id": "a-1"}, {"id": "a-2"})
    plain = predicted(first.problem, first.strategy).step_time_s
    found = fit_steps([replace(first, seconds=1.3 * plain), replace(second, seconds=plain / 1.3)])
    assert (found.strength, found.workloads) == (0.0, ())
    assert found.factors == TimeFactors(kernels=1.0, node_links=1.0, network=1.0, host=1.0)
    assert found.after == found.before == pytest.approx((1.3 - 1 + 1 - 1 / 1.3) / 2, rel=1e-9)


def test_factors_never_exceed_the_peaks(tmp_path: Path) -> None:
    """A step in a tenth of the predicted time: kernels become as fast as their peaks, and no faster."""
    (sample,) = rows_of_runs(tmp_path, {})
    device, _ = machine(sample)
    found = TimeFactors(kernels=0.1, node_links=0.1, network=0.1).of_device(device).efficiency
    assert found.matmul.peak_fraction == found.memory.fraction == 1.0
    assert found.scale_up.fraction == found.scale_out.fraction == 1.0
    fit = fit_steps([replace(sample, seconds=sample.seconds / 10.0)])
    assert fit.after < fit.before


def test_one_machine_at_a_time(tmp_path: Path) -> None:
    samples = rows_of_runs(tmp_path, {}, {"gpu": "H100"}, {"framework": "PyTorch FSDP", "zero_stage": "3"})
    for pair, words in (
        ((samples[0], samples[1]), "device classes"),
        ((samples[0], samples[2]), "kinds of software"),
        ((), "1 to 20"),
        ((samples[0],) * (MOST_STEPS + 1), "1 to 20"),
    ):
        with pytest.raises(ConfigError, match=words):
            fit_steps(pair)
