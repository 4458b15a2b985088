"""How `make accuracy` times what several ranks do at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from benchmarks import emulated_steps
from tests.unit.app.test_cli_calibrate import written
from torch import distributed

from shardwise.accuracy import with_speed
from shardwise.app.cli.calibrating_rounds import Machine
from shardwise.inputs import written_yaml
from shardwise.runtime import Team
from shardwise.strategy import read_calibration

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


def test_rounds_of_a_calibration_are_between_all_plans_and_only_the_first_turn_warms_up() -> None:
    """Five rounds of two pieces behind six steps: one or two at a time."""
    done: list[str] = []
    rounds = SimpleNamespace(pieces=2, take=lambda piece: done.append(f"piece {piece}"))
    spent = iter([9.0, 9.0, 1.0, 2.0, 3.0, 4.0])
    steps = [lambda: done.append("a"), lambda: done.append("b")]
    with mock.patch.object(emulated_steps, "slowest_s", lambda step: step() or next(spent)):
        times = emulated_steps._in_turns(steps, 2, cast(Any, rounds))
    assert times == [[1.0, 3.0], [2.0, 4.0]]  # the nines warm up
    assert done[:5] == ["a", "a", "piece 0", "b", "b"] and done[5:7] == ["piece 1", "piece 0"]
    assert done.count("piece 0") == done.count("piece 1") == 5 and len(done) == 12 + 10


def test_a_calibration_between_plans_keeps_the_links_that_are_known(tmp_path: Path) -> None:
    """Kernels and software as `rounds` found them, and what `calibrate` found of links; twins that take
    either from the other are seen."""
    read = read_calibration(written(tmp_path))
    assert read.profile is not None
    known = replace(read, profile=replace(read.profile, data_overlap=0.8))
    (device,) = known.devices.values()
    faster = with_speed(device, 2.0)
    profile = replace(read.profile, pointwise_passes=9.0, data_overlap=0.0)
    machine = Machine(faster, profile, {"steps": {"seconds": 3.0}}, (1.0, 2.0))
    rounds = SimpleNamespace(found=lambda given: machine if given is device else None)
    found = emulated_steps._calibrated(cast(Any, rounds), known)
    assert found["small_s"] == 3.0
    file = tmp_path / "meanwhile.yaml"
    file.write_text(written_yaml(found["calibration"]))
    told = read_calibration(str(file))
    assert told.devices["cpu"].peak_flop_per_s == faster.peak_flop_per_s
    assert told.devices["cpu"].efficiency.scale_out == device.efficiency.scale_out
    assert told.profile is not None and told.profile.pointwise_passes == 9.0
    assert told.profile.data_overlap == 0.8
