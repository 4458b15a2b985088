"""How `make accuracy` times what several ranks do at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from benchmarks import emulated_steps
from torch import distributed

from shardwise.runtime import Team

pytestmark = pytest.mark.xdist_group("runtime")

READINGS = ((10.0, 14.0), (20.0, 26.0))
"""Of each rank's clock, before and after."""


def _timed(report: Any) -> float:
    readings = iter(READINGS[distributed.get_rank()])
    clock = SimpleNamespace(perf_counter=lambda: next(readings))
    with mock.patch.object(emulated_steps, "time", clock):
        return emulated_steps.slowest_s(lambda: None)


def test_a_step_takes_what_the_slowest_rank_takes() -> None:
    """Of 4 and 6 s; a twin without the maximum over ranks would tell 4 on the first."""
    with Team(2) as team:
        assert team.run(2, _timed) == [6.0, 6.0]


def test_small_steps_are_taken_between_all_plans_and_only_the_first_turn_warms_up() -> None:
    done: list[str] = []
    small = SimpleNamespace(plans=[None] * 3, take=lambda number: done.append(f"small {number}"))
    spent = iter([9.0, 9.0, 1.0, 2.0, 3.0, 4.0])
    steps = [lambda: done.append("a"), lambda: done.append("b")]
    with mock.patch.object(emulated_steps, "slowest_s", lambda step: step() or next(spent)):
        times = emulated_steps._in_turns(steps, 2, cast(Any, small))
    assert times == [[1.0, 3.0], [2.0, 4.0]]  # the nines warm up
    assert done[:6] == ["a", "a", "small 0", "b", "b", "small 1"] and done[8] == "small 2"
    assert done.count("small 0") == 2 and len(done) == 18
