"""The parts of a result sum to the whole: seconds to the step, bytes to the device, layers to the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.property.cost_samples import CASES, Case, problem_of, sampled

from shardwise.cost import Problem
from shardwise.plans import Result
from shardwise.search.result import result_of
from shardwise.search.step_times import step_times_s
from shardwise.strategy import SCHEDULES


def rows_of_every_schedule(schedule: Any, each: int) -> list[int]:
    return [int(row) for code in np.unique(schedule) for row in np.flatnonzero(schedule == code)[:each]]


def check_seconds(result: Result) -> None:
    assert sum(result.breakdown.values()) == pytest.approx(result.step_time_s, rel=1e-12)
    assert min(result.breakdown.values()) >= -1e-12 * result.step_time_s, result.breakdown
    assert result.band_s[0] < result.step_time_s < result.band_s[1]


def check_bytes(result: Result) -> None:
    peak = result.peak_memory
    assert sum(result.memory.values()) == pytest.approx(peak.device, rel=1e-12)
    outside = sum(result.memory[name] for name in ("communicators", "context"))
    assert peak.reserved == pytest.approx(peak.device - outside, rel=1e-12)
    assert peak.allocated == pytest.approx(peak.reserved - result.memory["fragmentation"], rel=1e-12)
    assert min(result.memory.values()) >= 0.0


def check_layout(problem: Problem, result: Result) -> None:
    stages = result.layout.pipelines[0].stages
    assert sum(sum(stage.layers) for stage in stages) == problem.model.layers
    assert sum(stage.devices for stage in stages) == problem.cluster.devices
    tokens = problem.job.global_batch_size * problem.job.seq_len
    assert result.tokens_per_s_per_device is not None
    assert result.mfu is not None and result.mfu_full_attention is not None
    found = result.tokens_per_s_per_device * problem.cluster.devices * result.step_time_s
    assert found == pytest.approx(tokens, rel=1e-12)
    assert 0.0 < result.mfu <= result.mfu_full_attention <= 1.0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_are_the_whole(case: Case, full: bool) -> None:
    problem = problem_of(case)
    table = sampled(problem, 400, seed=300 + CASES.index(case))
    times_s = step_times_s(problem, table)
    for row in rows_of_every_schedule(table.schedule, 40 if full else 3):
        result = result_of(problem, table[row])
        assert result.step_time_s == pytest.approx(times_s[row], rel=1e-12)
        check_seconds(result)
        check_bytes(result)
        check_layout(problem, result)


def test_results_of_every_schedule_are_checked() -> None:
    seen = {
        int(code)
        for index, case in enumerate(CASES)
        for code in sampled(problem_of(case), 400, seed=300 + index).schedule
    }
    assert len(seen) == len(SCHEDULES)
