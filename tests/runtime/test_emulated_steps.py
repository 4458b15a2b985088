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


def _timed(report: Any, speeds: list[float]) -> tuple[float, float]:
    rank = distributed.get_rank()
    readings = iter(2 * READINGS[rank])
    clock = SimpleNamespace(perf_counter=lambda: next(readings))
    with mock.patch.object(emulated_steps, "time", clock):
        return emulated_steps.slowest_s(lambda: None), emulated_steps.mean_pace_s(speeds[rank])


@pytest.mark.parametrize(
    ("speeds", "pace_s"),
    [
        ([1.0, 1.0], 5.0),  # of 4 and 6 s
        ([1.0, 0.5], 3.5),  # 6 s of a device of half the speed are 3 of one of speed 1, beside 4
    ],
)
def test_a_step_takes_what_the_slowest_rank_takes_and_the_pace_is_that_of_all(
    speeds: list[float], pace_s: float
) -> None:
    with Team(2) as team:
        assert team.run(2, _timed, speeds) == [(6.0, pace_s), (6.0, pace_s)]
