"""Scalars and columns have the same costs: a row alone costs the same as in a table, at any index."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.property.cost_samples import CASES, Case, problem_of, sampled

from shardwise.cost import (
    MEMORY_PARTS,
    Problem,
    StageTimes,
    bind,
    costs_of_all_stages,
    costs_of_peak_stages,
    peaks_of,
    rank_bytes,
    stage_times,
    step_end,
)
from shardwise.cost.times import StepEnd
from shardwise.search.step_times import step_times_s
from shardwise.strategy import StrategyTable

Prices = dict[str, NDArray[np.float64]]


def costs_by_name(problem: Problem, table: StrategyTable) -> Prices:
    """All costs of a table, by name; the last axis is its rows."""
    costs = costs_of_all_stages(problem, table)
    times, end = stage_times(problem, table, costs), step_end(problem, table, costs)
    memory, peaks = rank_bytes(problem, table, costs), peaks_of(problem, table)
    stages = table.pp * table.vpp
    shape = times.forward_s.shape
    is_stage = np.arange(shape[0])[:, None] < stages
    found = {f"times.{f.name}": getattr(times, f.name) for f in fields(StageTimes) if f.name != "ends"}
    found |= {f"ends.{f.name}": getattr(times.ends, f.name) for f in fields(times.ends)}
    found = {name: np.where(is_stage, np.broadcast_to(values, shape), 0.0) for name, values in found.items()}
    # Tables have as many moments as their longest row needs: the parts at the fullest one.
    fullest = memory.device.argmax(axis=0), np.arange(len(stages))
    found |= {f"memory.{name}": getattr(memory, name)[fullest] for name in MEMORY_PARTS}
    found |= {f"end.{f.name}": np.asarray(getattr(end, f.name)) for f in fields(StepEnd)}
    found |= {f"peaks.{f.name}": getattr(peaks, f.name) for f in fields(peaks)}
    found["step_s"] = step_times_s(problem, table)
    return found


def mismatches(
    problem: Problem, table: StrategyTable, rows: Any, rtol: float = 1e-12
) -> list[tuple[str, int]]:
    """Names and rows of differences between `rows` evaluated one by one and within the whole table."""
    together = costs_by_name(problem, table)
    differing = []
    for row in rows:
        alone = costs_by_name(problem, table.take([row]))
        for name, values in together.items():
            expected = values[..., row]
            found = alone[name][..., 0]
            if not np.allclose(
                found, expected[: found.size] if found.ndim else expected, rtol=rtol, atol=0.0
            ):
                differing.append((name, int(row)))
    return differing


@pytest.fixture(scope="module", params=CASES, ids=str)
def sample(request: pytest.FixtureRequest) -> tuple[Problem, StrategyTable]:
    case: Case = request.param
    problem = problem_of(case)
    return problem, sampled(problem, 400, seed=100 + CASES.index(case))


def test_a_row_costs_the_same_alone_and_in_a_table(sample: Any, full: bool) -> None:
    problem, table = sample
    rows = range(len(table)) if full else range(0, len(table), 46)
    assert mismatches(problem, table, rows) == []


def test_the_comparison_sees_a_part_in_a_billion(sample: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, table = sample
    exact = step_times_s

    def drifting(problem: Problem, table: StrategyTable) -> NDArray[np.float64]:
        return exact(problem, table) * (1.0 + 1e-9 * (len(table) > 1))

    monkeypatch.setitem(globals(), "step_times_s", drifting)
    assert mismatches(problem, table, [0]) == [("step_s", 0)]


def test_the_order_of_rows_changes_nothing(sample: Any) -> None:
    problem, table = sample
    order = np.random.default_rng(7).permutation(len(table))
    plain, permuted = costs_by_name(problem, table), costs_by_name(problem, table.take(order))
    for name, values in plain.items():
        np.testing.assert_array_equal(permuted[name], values[..., order], err_msg=name)


def test_rows_that_are_repeated_cost_the_same(sample: Any) -> None:
    problem, table = sample
    few = table.take(slice(0, 50))
    plain, doubled = costs_by_name(problem, few), costs_by_name(problem, StrategyTable.joined([few, few]))
    for name, values in plain.items():
        np.testing.assert_array_equal(doubled[name], np.concatenate([values, values], axis=-1), err_msg=name)


def test_the_stages_that_decide_the_peak_are_among_all_stages(sample: Any) -> None:
    """The ranks that decide the peak are a subset of all ranks, with the same costs."""
    problem, table = sample
    some, every = costs_of_peak_stages(problem, table), costs_of_all_stages(problem, table)
    few, all_ = rank_bytes(problem, table, some).device, rank_bytes(problem, table, every).device
    assert few.shape[0] <= all_.shape[0]
    equal = np.isclose(few[:, None, :], all_[None, :, :], rtol=1e-13).any(axis=1)
    assert equal.all()


def test_names_of_devices_and_tiers_do_not_matter(sample: Any) -> None:
    problem, table = sample
    cluster = problem.cluster
    renamed = replace(
        cluster,
        name="other",
        classes={f"x-{name}": replace(device, name=f"x-{name}") for name, device in cluster.classes.items()},
        nodes=tuple(replace(node, name="n", device_class=f"x-{node.device_class}") for node in cluster.nodes),
        tiers=tuple(replace(tier, name=f"x-{tier.name}") for tier in cluster.tiers),
    )
    other = bind(replace(problem.model, name="other"), renamed, problem.job)
    np.testing.assert_array_equal(step_times_s(other, table), step_times_s(problem, table))
    np.testing.assert_array_equal(peaks_of(other, table).device_bytes, peaks_of(problem, table).device_bytes)


def test_the_order_of_nodes_does_not_matter() -> None:
    problem = problem_of(CASES[-1])
    table = sampled(problem, 200, seed=3)
    cluster = problem.cluster
    turned = replace(cluster, nodes=tuple(reversed(cluster.nodes)))
    other = bind(problem.model, turned, problem.job)
    np.testing.assert_array_equal(step_times_s(other, table), step_times_s(problem, table))
