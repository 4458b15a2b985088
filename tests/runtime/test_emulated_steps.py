"""How `make accuracy` times what several ranks do at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from benchmarks import emulated_steps
from torch import distributed

from shardwise.runtime import Team

pytestmark = pytest.mark.xdist_group("runtime")

READINGS = ((10.0, 14.0), (20.0, 26.0))
"""Of each rank's clock, before and after."""


def _timed(report: Any, speeds: list[float]) -> float:
    rank = distributed.get_rank()
    readings = iter(READINGS[rank])
    clock = SimpleNamespace(perf_counter=lambda: next(readings))
    with mock.patch.object(emulated_steps, "time", clock):
        return emulated_steps._slowest_s(lambda: None, speeds[rank])


@pytest.mark.parametrize(
    ("speeds", "expected_s"),
    [
        ([1.0, 1.0], 6.0),  # of 4 and 6 s
        ([1.0, 0.5], 4.0),  # 6 s of a device of half the speed are 3 of one of speed 1
    ],
)
def test_the_slowest_rank_counts_at_its_own_speed(speeds: list[float], expected_s: float) -> None:
    with Team(2) as team:
        assert team.run(2, _timed, speeds) == [expected_s, expected_s]
