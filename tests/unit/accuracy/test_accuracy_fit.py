"""The fit of numbers to measured times: steps by hand, derivatives one number at a time, and known numbers
recovered from their times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from tests.unit.accuracy.runs import (
    Floats,
    measured_runs,
    numbers_by_hand,
    published,
    some,
    times_under,
    validated,
)
from tests.unit.accuracy.tables import rows_of

from shardwise.accuracy.case import Case, cases_of
from shardwise.accuracy.fit import (
    DERIVATIVE_STEP,
    INITIAL_VALUES,
    MAX_LOG_CHANGE,
    RANGES,
    SHRINKAGE,
    SMALLEST_RESIDUAL,
    SOURCE_WEIGHTS,
    Fit,
    Linear,
    MeasuredRun,
    Numbers,
    chosen_strategies,
    chosen_strategy,
    clip_to_range,
    field_of,
    fit_loss,
    fitted,
    gauss_newton_step,
    initial_value,
    linearised,
    names_of,
    platforms_of,
    predicted_log_s,
    problem_with,
    range_of,
    shrinkage_of,
    source_weights,
    with_log_changes,
)
from shardwise.cost import Problem
from shardwise.search import StepFigures, step_figures_of
from shardwise.strategy import StrategyTable

HOST = "software * host_step_s"
"""A number without relatives, at its default of 5 ms, so that shrinkage does not change it."""


def step(
    numbers: Numbers,
    slopes: Sequence[Sequence[float]],
    target: Sequence[float],
    weights: Sequence[float] = (),
) -> list[float]:
    """The step of numbers whose predictions have no error now."""
    linear = Linear(tuple(numbers.fitted()), np.zeros(len(target)), np.array(slopes, float))
    found = gauss_newton_step(linear, np.array(target), np.array(weights or np.ones(len(target))), numbers)
    return [float(log_change) for log_change in found]


def test_an_outlier_does_not_dominate() -> None:
    numbers = numbers_by_hand(software_all__host_step_s=5e-3)
    # Four runs need 0.1, one needs 3. A large residual counts only by its size, so it pulls with 0.01 at any
    # distance: 4 (0.1 - m) + 0.01 - 0.0015 m = 0.
    assert SMALLEST_RESIDUAL == 0.01 and SHRINKAGE == 0.003
    for outlier in (0.2, 3.0, 30.0):
        (log_change,) = step(numbers, [[1.0]] * 5, [0.1] * 4 + [outlier])
        assert log_change == pytest.approx(0.41 / 4.0015, rel=1e-6)
    # Least squares would go to (0.4 + 0.2) / 5 and further.


def test_residuals_below_the_smallest_count_as_squares() -> None:
    numbers = numbers_by_hand(software_all__host_step_s=5e-3)
    # Both runs stay within 0.01 of the step: (0.000 - m) + (0.008 - m) - 0.0015 m = 0, near their mean.
    assert step(numbers, [[1.0]] * 2, [0.0, 0.008]) == [pytest.approx(0.008 / 2.0015)]


def test_the_heavier_run_decides() -> None:
    numbers = numbers_by_hand(software_all__host_step_s=5e-3)
    # The run at 0 weighs 3, the one at 0.2 pulls with 0.01: -3 m + 0.01 - 0.0015 m = 0.
    assert step(numbers, [[1.0]] * 2, [0.2, 0.0], [1.0, 3.0]) == [pytest.approx(0.01 / 3.0015, rel=1e-6)]
    assert step(numbers, [[1.0]] * 2, [0.2, 0.0], [3.0, 1.0]) == [
        pytest.approx((0.6 - 0.01) / 3.0015, rel=1e-6)
    ]


def test_slopes_turn_a_distance_into_a_log_change() -> None:
    numbers = numbers_by_hand(software_all__host_step_s=5e-3)
    # Time follows the number with slope -0.5: 0.5 (0.1 + 0.5 m) + 0.0015 m = 0.
    assert step(numbers, [[-0.5]], [0.1]) == [pytest.approx(-0.05 / 0.2515)]


def test_no_number_relies_on_a_change_beyond_the_bounds_of_another() -> None:
    numbers = numbers_by_hand(
        ampere__matmul_of_peak_fraction=RANGES["fraction"][1], software_all__host_step_s=5e-3
    )
    # The first run needs 0.2 from both together, the second needs the host unchanged. The peak would do it
    # all but is at its bound, so the host decides alone: pulled up by 0.01, down by 2 m and 0.0015 m.
    peak, host = step(numbers, [[1.0, 1.0], [0.0, 1.0]], [0.2, 0.0], [1.0, 2.0])
    assert peak == 0.0
    assert host == pytest.approx(0.01 / 2.0015, rel=1e-6)
    # The peak is free to decrease.
    peak, host = step(numbers, [[1.0, 1.0], [0.0, 1.0]], [-0.2, 0.0], [1.0, 2.0])
    assert peak == pytest.approx(-0.2, rel=0.1) and host == pytest.approx(0.0, abs=1e-3)


def test_no_number_changes_beyond_the_trust_region() -> None:
    numbers = numbers_by_hand(software_all__host_step_s=5e-3)
    assert step(numbers, [[1.0]], [3.0]) == [MAX_LOG_CHANGE]
    assert step(numbers, [[1.0]], [-3.0]) == [-MAX_LOG_CHANGE]


def test_without_runs_similar_numbers_decide() -> None:
    for began in (0.6, 0.4):
        numbers = numbers_by_hand(
            ampere__matmul_of_peak_fraction=0.5,
            volta__matmul_of_peak_fraction=began,
            software_all__host_step_s=8e-3,
        )
        # A run of Ampere confirms its number. No run has Volta: it becomes the mean of Ampere and the default
        # 0.65, from any initial value. Given that, Ampere is pulled up by half of its distance to 0.65:
        # -m - 0.003 (m + ln 0.5 / 0.65) / 2 = 0. The host cost becomes the default one.
        ampere, volta, host = step(numbers, [[1.0, 0.0, 0.0]], [0.0])
        assert ampere == pytest.approx(SHRINKAGE / 2 * math.log(0.65 / 0.5) / (1 + SHRINKAGE / 2))
        mean = (math.log(0.5) + ampere + math.log(0.65)) / 2
        assert math.log(began) + volta == pytest.approx(mean)
        assert host == -MAX_LOG_CHANGE > math.log(5.0 / 8.0)


def test_a_run_outweighs_similar_numbers() -> None:
    numbers = numbers_by_hand(ampere__matmul_of_peak_fraction=0.5, volta__matmul_of_peak_fraction=0.6)
    ampere, volta = step(numbers, [[1.0, 0.0], [0.0, 1.0]], [0.0, -0.1])
    # Volta's run needs -0.1; the mean of Ampere, Volta and the default 0.65 pulls it up.
    mean = (math.log(0.5) + ampere + math.log(0.6) + volta + math.log(0.65)) / 3
    assert volta == pytest.approx(-0.1 - SHRINKAGE * (math.log(0.6) + volta - mean))
    assert 0.0 < volta + 0.1 < 1e-3


def test_similar_numbers_shrink_towards_their_mean_and_the_initial_value() -> None:
    numbers = numbers_by_hand(
        ampere__matmul_of_peak_fraction=0.4, volta__matmul_of_peak_fraction=0.5,
        all__launch_s=1e-5, software_all__dispatch_s=7e-5, software_fsdp__dispatch_s=14e-5,
    )  # fmt: skip
    names = list(numbers.fitted())
    curves, slopes = shrinkage_of(numbers, names)
    # 0.4, 0.5 and 0.65 each from their mean, twice the default 5 us from theirs, and the default 70 us
    # counted twice with its double.
    mean = math.log(0.4 * 0.5 * 0.65) / 3
    two = math.log(2.0)
    expected = [math.log(0.4) - mean, math.log(0.5) - mean, two / 2, -two / 3, 2 * two / 3]
    assert slopes.tolist() == pytest.approx(expected, abs=1e-12)
    assert shrinkage_of(numbers, names[::-1])[1].tolist() == pytest.approx(expected[::-1], abs=1e-12)

    def shrinkage(logs: Floats) -> float:
        """Half the squared distances of relatives from their mean, computed directly."""
        families = (
            [*logs[:2], math.log(0.65)],
            [logs[2], math.log(5e-6)],
            [*logs[3:], math.log(7e-5)],
        )
        return sum(float(np.var(family)) * len(family) / 2 for family in families)

    logs = np.log(list(numbers.fitted().values()))
    log_changes = np.array([0.1, -0.2, 0.3, 0.05, -0.1])
    change = shrinkage(logs + log_changes) - shrinkage(logs)
    assert change == pytest.approx(log_changes @ slopes + log_changes @ curves @ log_changes / 2, abs=1e-12)


def test_numbers_that_are_not_fitted_do_not_shrink_others() -> None:
    numbers = numbers_by_hand(ampere__matmul_of_peak_fraction=0.4, volta__matmul_of_peak_fraction=0.8)
    assumed = replace(numbers.devices[1], source="assumed: a guess")
    alone = Numbers((numbers.devices[0], assumed), ())
    assert shrinkage_of(alone, list(alone.fitted()))[1].tolist() == pytest.approx([math.log(0.4 / 0.65) / 2])
    both = shrinkage_of(numbers, list(numbers.fitted()))[1]
    assert both[0] == pytest.approx(math.log(0.4) - math.log(0.4 * 0.8 * 0.65) / 3)


@pytest.mark.parametrize(
    ("name", "raw", "clipped"),
    [
        ("devices ampere,ada matmul.peak_fraction", 1.4, 0.98),
        ("devices ampere,ada matmul.peak_fraction", 0.01, 0.05),
        ("devices * matmul.fp4_fraction", 1.4, 1.4),
        ("devices * matmul.fp4_fraction", 1.6, 1.5),
        ("devices * matmul.fp4_fraction", 0.1, 0.2),
        ("devices * grouped_matmul.fraction", 1.2, 1.0),
        ("software fsdp shard_overlap", 2.0, 1.0),
        ("software fsdp shard_overlap", 0.0, 0.02),
        ("software oneflow pointwise_passes", 9.0, 6.0),
        ("software oneflow pointwise_passes", 0.1, 0.5),
        ("devices * scale_out.startup_s", 3.0, 3.0),
        ("devices * launch_s", 1e-7, 1e-7),
    ],
)
def test_numbers_are_clipped_to_their_ranges(name: str, raw: float, clipped: float) -> None:
    assert clip_to_range(name, raw) == clipped


def test_log_changes_are_factors_clipped_to_ranges() -> None:
    numbers = numbers_by_hand(ampere__matmul_of_peak_fraction=0.9, all__launch_s=1e-5)
    names = tuple(numbers.fitted())
    assert with_log_changes(numbers, names, np.log([0.5, 3.0])).fitted() == {
        names[0]: pytest.approx(0.45),
        names[1]: pytest.approx(3e-5),
    }
    assert with_log_changes(numbers, names[:1], np.log([2.0])).fitted() == {names[0]: 0.98, names[1]: 1e-5}


def test_every_fitted_number_starts_at_an_initial_value_within_its_range() -> None:
    names = list(Numbers.shipped().fitted())
    for name in names:
        low, high = range_of(name)
        assert low <= initial_value(name) <= high, name
        assert low <= Numbers.shipped().fitted()[name] <= high, name
    used = {end for name in names for end in INITIAL_VALUES if field_of(name).endswith(end)}
    assert used == set(INITIAL_VALUES)
    scratch = Numbers.shipped().from_scratch().fitted()
    assert (
        scratch["devices volta matmul.peak_fraction"] == scratch["devices tpu matmul.peak_fraction"] == 0.65
    )
    assert scratch["software fsdp shard_overlap"] == 0.5 and scratch["devices * launch_s"] == 5e-6
    assert scratch["software * dispatch_s"] == 7e-5 and scratch["software * expert_dispatch_s"] == 2e-3
    # Assumed numbers stay.
    fixed_numbers = [number for number in Numbers.shipped().all if not number.is_fitted]
    assert fixed_numbers == [
        number for number in Numbers.shipped().from_scratch().all if not number.is_fitted
    ]


def test_a_source_counts_as_the_root_of_its_rows() -> None:
    groups = ["korthi"] * 4 + ["mine"] + ["vtrain-mn"] * 9 + ["vtrain-sn"] * 16 + ["simumax"] * 4
    cases, _ = cases_of(rows_of(*({"id": f"{group}-{n:03}"} for n, group in enumerate(groups))))
    weights = source_weights([MeasuredRun(case=case, strategy=0, measured_s=1.0) for case in cases])
    # 1 / sqrt 4, 1, 3 / sqrt 9, 0.4 / sqrt 16, 0.4 / sqrt 4.
    assert dict(SOURCE_WEIGHTS) == {"vtrain-mn": 3.0, "vtrain-sn": 0.4, "simumax": 0.4}
    assert weights.tolist() == pytest.approx([0.5] * 4 + [1.0] + [1.0] * 9 + [0.1] * 16 + [0.2] * 4)
    by_source = [weights[[g == group for g in groups]].sum() for group in dict.fromkeys(groups)]
    assert by_source == pytest.approx([2.0, 1.0, 9.0, 1.6, 0.8])


def kinds() -> list[Case]:
    """Published rows that depend on different numbers: a dense pipeline across nodes without a fused kernel,
    a mixture of experts, FSDP, early software on V100, a pipeline of T4, JAX on TPU, fp8 on B200.
    """
    return [
        *some(1, "vtrain-mn", where=lambda row: (row.pp or 1) > 1 and (row.tp or 1) > 1),
        *some(2, "mbridge", where=lambda row: row.experts is not None),
        *some(2, "foundry"),
        *some(2, "dlperf-gpt"),
        *some(1, "amp-hom"),
        *some(1, "tpu"),
        *some(1, "simumax"),
    ]


@pytest.mark.slow
def test_slopes_are_those_of_predictions_one_number_at_a_time() -> None:
    """The fit predicts a table whose rows differ in one number each; here every number is changed
    separately.
    """
    numbers = Numbers.shipped()
    cases = kinds()
    runs = measured_runs(cases, numbers)
    linear = linearised(runs, numbers)
    base = predicted_log_s(runs, numbers)
    assert linear.names == tuple(numbers.fitted())
    assert linear.log_s == pytest.approx(base, abs=1e-12)
    for place, name in enumerate(linear.names):
        changed = numbers.with_values({name: numbers.fitted()[name] * math.exp(DERIVATIVE_STEP)})
        slopes = (predicted_log_s(runs, changed) - base) / DERIVATIVE_STEP
        assert linear.slopes[:, place] == pytest.approx(slopes, abs=1e-9), name
    # Every platform depends on some numbers of its own, and not on most others.
    log_changes = {case.row.group: {linear.names[i] for i in np.flatnonzero(row)}
             for case, row in zip(cases, linear.slopes, strict=True)}  # fmt: skip
    assert "devices * grouped_matmul.fraction" in log_changes["mbridge"]
    assert "software fsdp shard_overlap" in log_changes["foundry"]
    assert "devices volta matmul.peak_fraction" in log_changes["dlperf-gpt"]
    assert "software deepspeed-2022 pointwise_passes" in log_changes["amp-hom"]
    assert "devices ampere,ada matmul.peak_fraction" in log_changes["vtrain-mn"]
    assert all(len(names) < len(linear.names) / 2 for names in log_changes.values())
    assert not any("flash" in name for name in log_changes["vtrain-mn"] | log_changes["dlperf-gpt"])
    own = set(names_of(platforms_of(cases[:1])[0][0], numbers))
    assert log_changes["vtrain-mn"] < own


def test_a_slope_of_a_faster_device_is_negative_and_at_most_one() -> None:
    numbers = Numbers.shipped()
    linear = linearised(measured_runs(some(3, "vtrain-mn"), numbers), numbers)
    slopes = linear.slopes[:, linear.names.index("devices ampere,ada matmul.peak_fraction")]
    assert (slopes < -0.3).all() and (slopes >= -1.0).all()


@pytest.mark.slow
def test_predictions_are_those_of_validate() -> None:
    """With the shipped numbers inserted again: for rows with one strategy the same prediction, for rows with
    a choice the same choice.
    """
    by_id = {one.row.id: one for one in validated().judged}
    numbers = Numbers.shipped()
    cases = [*kinds(), *published("korthi"), *some(4, "nemo")]
    runs = measured_runs(cases, numbers)
    seconds = np.exp(predicted_log_s(runs, numbers))
    several = 0
    for run, time_s in zip(runs, seconds, strict=True):
        expected = by_id[run.case.row.id]
        assert time_s == pytest.approx(expected.predicted_s, rel=1e-12)
        assert run.measured_s == expected.measured_s
        assert run.case.strategies[run.strategy] == expected.strategy
        several += len(run.case.strategies) > 1
    assert 4 <= several < len(cases)
    # Other numbers give another prediction.
    assert (np.exp(predicted_log_s(runs, numbers.from_scratch())) != seconds).all()


def test_overlap_that_was_switched_off_stays_off() -> None:
    numbers = Numbers.shipped()
    fsdp = {"framework": "llm-foundry", "tp": "1", "pp": "1", "dp": "16", "schedule": ""}
    first, second = cases_of(rows_of(fsdp, {**fsdp, "notes": "comm overlap off"}))[0]
    assert problem_with(first, numbers).profile == first.problem.profile
    assert problem_with(second, numbers).profile == second.problem.profile
    assert problem_with(second, numbers).profile.data_overlap == 0.0 < first.problem.profile.data_overlap


def test_unstated_fields_of_a_source_are_chosen_under_the_fitted_numbers() -> None:
    (case,) = cases_of(rows_of({"gpu": "A100-30GB", "recompute": "", "micro_batch": ""}))[0]
    numbers = Numbers.shipped()
    slow_memory = numbers.with_values({"devices * memory.fraction": 0.02, "devices * launch_s": 1e-9})
    slow_launch = numbers.with_values({"devices * launch_s": 1e-2})
    assert chosen_strategy(case, slow_memory) != chosen_strategy(case, slow_launch)
    assert case.strategies[chosen_strategy(case, slow_launch)].micro_batch_size > 1


TRUE = {
    "devices ampere,ada matmul.peak_fraction": 0.5,
    "devices tpu matmul.peak_fraction": 0.8,
    "devices tpu,gaudi,cdna2,cdna3,cdna4,trainium,ascend,cpu attention.flash-2.forward_fraction": 0.3,
    "software megatron-2022 pointwise_passes": 1.4,
}
"""Numbers that differ from the initial values of a fit."""


@pytest.mark.slow
def test_known_numbers_are_recovered_from_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit from scratch with two outliers; two sources and two kinds of devices."""
    scratch = Numbers.shipped().from_scratch()
    true = scratch.with_values(TRUE)
    assert set(TRUE) <= set(scratch.fitted())
    cases = published("korthi", "tpu")
    times_s = times_under(cases, true)
    start = np.abs(times_under(cases, scratch) / times_s - 1)
    assert start.max() > 0.1 and start.mean() > 0.05
    measured_s = times_s.copy()
    measured_s[3], measured_s[15] = 2 * times_s[3], times_s[15] / 2
    found = fitted(cases, measured_s.tolist(), scratch, rounds=1)
    assert np.abs(np.exp(found.linear.log_s) / times_s - 1).max() < 0.01
    assert np.exp(found.linear.log_s) == pytest.approx(np.exp(predicted_log_s(found.runs, found.numbers)))
    values = found.numbers.fitted()
    for name in list(TRUE)[:2]:
        assert values[name] == pytest.approx(TRUE[name], rel=0.03), name
    # Neither source has experts, nor do their relatives: that number keeps its initial value.
    assert values["software * expert_dispatch_s"] == pytest.approx(initial_value("expert_dispatch_s"))
    # Plain least squares would give way to the two outliers.
    monkeypatch.setattr("shardwise.accuracy.fit.SMALLEST_RESIDUAL", 100.0)
    squares = fitted(cases, measured_s.tolist(), scratch, rounds=1)
    assert np.abs(np.exp(squares.linear.log_s) / times_s - 1).max() > 0.03


def test_the_last_step_counts() -> None:
    scratch = Numbers.shipped().from_scratch()
    cases = published("tpu")[:6]
    times_s = times_under(cases, scratch.with_values(TRUE)).tolist()

    def error(steps: int) -> float:
        found = fitted(cases, times_s, scratch, rounds=1, steps=steps)
        return float(np.abs(found.linear.log_s - np.log(times_s)).mean())

    assert error(0) > 0.05
    assert error(1) < 0.5 * error(0)


@pytest.mark.slow
def test_a_step_that_makes_it_worse_is_rejected() -> None:
    """Every fit is at least as good as its start, even with derivatives that hold nowhere."""
    scratch = Numbers.shipped().from_scratch()
    cases = published("tpu")[:6]
    rng = np.random.default_rng(1)
    measured_s = times_under(cases, scratch) * rng.lognormal(0.0, 1.5, len(cases))
    costs = []
    for steps in range(4):
        found = fitted(cases, measured_s.tolist(), scratch, rounds=1, steps=steps)
        weights = source_weights(found.runs)
        costs.append(fit_loss(found.linear, np.log(measured_s), weights, found.numbers))
    assert costs == sorted(costs, reverse=True) and costs[0] > costs[-1]


def test_runs_are_evaluated_some_at_a_time_and_equal_ones_once(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = Numbers.shipped()
    runs = measured_runs(some(5, "korthi"), numbers)
    whole, log_s = linearised(runs, numbers), predicted_log_s(runs, numbers)
    chosen = chosen_strategies([run.case for run in runs], numbers)
    monkeypatch.setattr("shardwise.accuracy.fit.RUNS_AT_A_TIME", 2)
    tables: list[int] = []

    def counted(problems: Sequence[Problem], given: Sequence[StrategyTable]) -> list[StepFigures]:
        tables.append(len(given))
        return step_figures_of(problems, given)

    monkeypatch.setattr("shardwise.accuracy.fit.step_figures_of", counted)
    again = linearised([*runs, *runs], numbers)
    assert tables == [2, 2, 1]
    for half in (slice(0, 5), slice(5, 10)):
        assert again.log_s[half] == pytest.approx(whole.log_s, rel=1e-12)
        assert again.slopes[half] == pytest.approx(whole.slopes, rel=1e-9, abs=1e-12)
    assert predicted_log_s([*runs, *runs], numbers) == pytest.approx([*log_s, *log_s], rel=1e-12)
    assert chosen_strategies([run.case for run in [*runs, *runs]], numbers) == [*chosen, *chosen]


def test_a_fit_without_time_ends_with_the_numbers_that_it_has() -> None:
    cases = some(4, "korthi")
    start = Numbers.shipped()
    times_s = [2.0 * time_s for time_s in times_under(cases, start)]
    asked: list[str] = []

    def fit_of(steps_in_time: int) -> Fit:
        given = iter([True] * steps_in_time)
        asked.clear()
        return fitted(
            cases, times_s, start, rounds=2, steps=2, has_time=lambda: next(given, False),
            progress=asked.append,
        )  # fmt: skip

    none = fit_of(0)
    assert none.is_cut and none.numbers == start
    assert asked == ["round 1 of 2, strategies", "round 1 of 2, derivatives"]
    one = fit_of(1)
    assert one.is_cut and asked[2:] == ["round 1 of 2, step 1"]
    before, after = (np.abs(fit.linear.log_s - np.log(times_s)).mean() for fit in (none, one))
    assert after < before
    assert not fit_of(9).is_cut and asked[-1] == "round 2 of 2, step 2"
