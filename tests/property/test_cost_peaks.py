"""Peak memory from few ranks is exactly the maximum over all ranks; and the samples include every choice."""

from __future__ import annotations

import numpy as np
import pytest
from tests.property.cost_samples import CASES, Case, problem_of, sampled

from shardwise.cost import costs_of_all_stages, host_bytes, peaks_of, rank_bytes
from shardwise.strategy import OFFLOADS, RECOMPUTES, SCHEDULES


@pytest.mark.parametrize("case", CASES, ids=str)
def test_memory_is_the_maximum_over_all_ranks(case: Case, full: bool) -> None:
    problem = problem_of(case)
    table = sampled(problem, 20_000 if full else 2_000, seed=CASES.index(case))
    found = peaks_of(problem, table)
    for start in range(0, len(table), 500):
        rows = slice(start, start + 500)
        part = table.take(rows)
        everywhere = costs_of_all_stages(problem, part)
        device = rank_bytes(problem, part, everywhere).device.max(axis=0)
        np.testing.assert_allclose(found.device_bytes[rows], device, rtol=1e-12)
        np.testing.assert_allclose(found.host_bytes[rows], host_bytes(problem, part, everywhere), rtol=1e-12)


def test_the_samples_include_every_choice() -> None:
    seen: dict[str, set[int]] = {}
    names = ("schedule", "recompute", "offload", "cp_kind", "sequence_parallel", "axis_order")
    for index, case in enumerate(CASES):
        table = sampled(problem_of(case), 400, seed=index)
        for name in names:
            seen.setdefault(name, set()).update(getattr(table, name).tolist())
    assert len(seen["schedule"]) == len(SCHEDULES)
    assert len(seen["recompute"]) == len(RECOMPUTES)
    assert len(seen["offload"]) == len(OFFLOADS)
    assert seen["cp_kind"] == seen["sequence_parallel"] == {0, 1}
    assert len(seen["axis_order"]) > 12
