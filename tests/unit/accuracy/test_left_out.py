"""Figures of runs that are left out: the shipped file, and its arithmetic on small cases."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.accuracy_page import PAGE, best_table, curve_table, group_table, rewritten
from benchmarks.left_out import (
    GROUPINGS,
    LeavingOut,
    LeftOut,
    Machine,
    corrected,
    curve_of,
    draws_of,
    is_warm_without,
    text_of,
)
from tests.unit.accuracy.runs import measured_runs, some

from shardwise.accuracy.calibration.few_steps import STEP_SPREAD, WORKLOAD_SPREAD, prior
from shardwise.accuracy.fit import Fit, Numbers, linearised
from shardwise.accuracy.left_out import LEFT_OUT, left_out_errors


def test_the_shipped_figures() -> None:
    found = left_out_errors()
    for kind in GROUPINGS:
        assert sum(group.rows for group in found.groups if group.kind == kind) == 831
    for group in found.groups:
        assert (group.tau is None) == (group.worst_regret is None) == (group.workloads == 0)
        assert group.fitted >= 0.0 and abs(group.bias) <= group.error + 1e-4
    # A measured step never makes other runs worse, in the mean over sources.
    assert {(point.kind, point.steps) for point in found.curve} == {
        (kind, steps) for kind in ("same model", "other models") for steps in (1, 2, 3)
    }
    assert all(point.after <= point.before for point in found.curve)
    record = json.loads(LEFT_OUT.read_text("utf-8"))
    assert text_of(record) == LEFT_OUT.read_text("utf-8")


def machine(excess: list[float], workloads: list[int]) -> Machine:
    slopes = np.tile([0.8, 0.1, 0.05, 0.05], (len(excess), 1))
    return Machine("a", np.array(excess), slopes, np.array(workloads))


def test_one_step_corrects_its_model_more_than_another() -> None:
    """Slopes as in test_few_steps: the machine's variance is 0.0247375, the workload's 0.0225, a step's
    0.0064. Of an excess of 0.1 a run of the same model is corrected by (0.0247375 + 0.0225) / 0.0536375, one
    of another model by 0.0247375 / 0.0536375."""
    of = machine([0.1, 0.1, 0.1], [0, 0, 1])
    found = corrected(of, np.array([0]), np.array([1, 2]))
    assert found == pytest.approx([-0.1 * (1 - 0.0472375 / 0.0536375), -0.1 * (1 - 0.0247375 / 0.0536375)])


def test_draws_are_of_one_model_or_predict_others() -> None:
    of = machine([0.1] * 6, [0, 0, 0, 1, 1, 2])
    for kind in ("same model", "other models"):
        draws = list(draws_of(of, 2, kind, np.random.default_rng(1)))
        assert draws
        for picked, rest in draws:
            assert not set(picked) & set(rest)
            shared = set(of.workloads[picked]) & set(of.workloads[rest])
            assert bool(shared) == (kind == "same model")


def test_the_curve_falls_on_machines_of_the_prior() -> None:
    """Machines that are drawn from the prior: more measured steps are never worse, by much."""
    rng = np.random.default_rng(5)
    machines = []
    for number in range(60):
        workloads = np.repeat([0, 1], 6)
        slopes = rng.dirichlet([8.0, 1.0, 1.0, 1.0], 12)
        parts = rng.multivariate_normal(np.zeros(4), prior())
        own = rng.normal(0.0, WORKLOAD_SPREAD, 2)
        excess = slopes @ parts + own[workloads] + rng.normal(0.0, STEP_SPREAD, 12)
        machines.append(Machine(f"{number}", excess, slopes, workloads))
    points = {(point.kind, point.steps): point for point in curve_of(machines)}
    assert points["same model", 1].after < 0.75 * points["same model", 1].before
    assert points["same model", 3].after < points["same model", 1].after
    assert points["other models", 1].after < points["other models", 1].before


def test_nothing_of_a_group_stays_in_the_numbers() -> None:
    """The times of the left-out runs do not matter: doubled, they are predicted the same."""
    cases = [*some(8, "korthi"), *some(12, "dlperf-gpt"), *some(12, "tpu")]
    numbers = Numbers.shipped()
    runs = measured_runs(cases, numbers)
    out = np.array([run.case.row.group == "tpu" for run in runs])

    def found(factor: float) -> LeftOut:
        changed = tuple(
            replace(run, measured_s=run.measured_s * factor) if is_out else run
            for run, is_out in zip(runs, out, strict=True)
        )
        return LeavingOut(Fit(numbers=numbers, runs=changed, linear=linear)).without(out)

    linear = linearised(runs, numbers)
    once, twice = found(1.0), found(2.0)
    assert once.numbers == twice.numbers
    assert once.log_error - np.log(2.0) == pytest.approx(twice.log_error)
    # Numbers that only these runs have moved to the mean of their relatives.
    shipped, left = numbers.fitted(), once.numbers.fitted()
    assert shipped["devices tpu matmul.peak_fraction"] != left["devices tpu matmul.peak_fraction"]
    # tpu has a device of its own.
    assert not is_warm_without(runs, out)[out].any()


def test_the_page_has_the_shipped_figures() -> None:
    """`python -m benchmarks.accuracy_page` writes them; other benchmarks have their own tables."""
    found = left_out_errors()
    tables = {
        "software and device": group_table(found, ("software", "device")),
        "source": group_table(found, ("source",)),
        "measured steps": curve_table(found),
        "best runs": best_table(),
    }
    page = PAGE.read_text("utf-8")
    assert rewritten(page, tables) == page
    # A figure that differs is written anew, and a table without a place is an error.
    assert rewritten(page.replace(tables["source"], "| other |\n| --- |"), tables) == page
    with pytest.raises(ValueError, match="nowhere"):
        rewritten(page, {"nowhere": "| a |"})
