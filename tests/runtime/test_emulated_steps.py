"""How `make accuracy` times steps that several ranks run at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

from benchmarks import emulated_steps
from tests.runtime.memory_tracker import fake_ranks
from tests.unit.app.test_cli_calibrate import written
from torch import distributed

from shardwise.accuracy import TierCurve
from shardwise.accuracy.calibration import LinkCurve
from shardwise.app.cli.measuring import LinkResult, MeasuredMachine
from shardwise.cluster import load_cluster
from shardwise.inputs import dumps_yaml
from shardwise.runtime import WorkerPool
from shardwise.runtime.private import process_groups
from shardwise.strategy import TimeFactors, read_calibration

READINGS = ((10.0, 14.0), (20.0, 26.0))
"""Each rank's clock before and after the step."""


def _timed(report: Any) -> float:
    readings = iter(READINGS[distributed.get_rank()])
    clock = SimpleNamespace(perf_counter=lambda: next(readings))
    with mock.patch.object(emulated_steps, "time", clock):
        return emulated_steps.slowest_s(lambda: None)


def test_a_step_takes_the_time_of_the_slowest_rank() -> None:
    """4 and 6 s; a mutant without the maximum over ranks would return 4 on the first."""
    with WorkerPool(2) as team:
        assert team.run(2, _timed) == [6.0, 6.0]


def _numbered(done: list[str], name: str) -> Callable[[], Callable[[], object]]:
    """Makes a plan whose steps record its name and their number, from 1."""

    def made() -> Callable[[], object]:
        done.append(f"{name} made")
        steps = itertools.count(1)
        return lambda: done.append(f"{name}{next(steps)}")

    return made


def test_calibration_rounds_alternate_with_all_plans() -> None:
    """Two plans in two rounds, with five repetitions of two measurements spread between them, two or three at
    a time. The second step of a plan is timed: a mutant that makes plans once, or times the first step, is
    caught."""
    done: list[str] = []
    measurements = [lambda: done.append("piece 0"), lambda: done.append("piece 1")]
    spent = iter([1.0, 2.0, 3.0, 4.0])

    def timed(step: Callable[[], object]) -> float:
        done.append("timed")
        step()
        return next(spent)

    with mock.patch.object(emulated_steps, "slowest_s", timed), fake_ranks(0, 1):
        times = emulated_steps._interleaved([_numbered(done, "a"), _numbered(done, "b")], 2, measurements)
    assert times == [[1.0, 3.0], [2.0, 4.0]]
    turns = [["a made", "a1", "timed", "a2"], ["b made", "b1", "timed", "b2"]] * 2
    assert [word for word in done if "piece" not in word] == [word for turn in turns for word in turn]
    assert done[4:6] == ["piece 0", "piece 1"] and done[10:13] == ["piece 0", "piece 1", "piece 0"]
    assert done.count("piece 0") == done.count("piece 1") == 5


def test_the_groups_of_a_plan_end_with_its_round() -> None:
    """Groups made before it stay; a mutant that ends no group, or all groups, is caught."""

    def made() -> Callable[[], object]:
        distributed.new_group([0])
        return lambda: 0

    with fake_ranks(0, 1):
        remaining_group = distributed.new_group([0])
        emulated_steps._second_s(made)
        assert process_groups() == {remaining_group}


def test_slices_are_those_of_their_numbers() -> None:
    taken: list[int] = []
    for measurement in emulated_steps._measurements(
        cast(Any, SimpleNamespace(measurements=3, measure=taken.append))
    ):
        measurement()
    assert taken == [0, 1, 2]


def test_a_round_has_the_steps_of_small_plans_twice_and_all_else_once() -> None:
    """Two small plans, then kernels, then three groups of links; a mutant that measures kernels twice, or
    steps once, is caught."""
    taken: list[str] = []
    machine = SimpleNamespace(
        measurements=3, measure=lambda measurement: taken.append(f"machine {measurement}")
    )
    links = SimpleNamespace(measurements=3, measure=lambda measurement: taken.append(f"links {measurement}"))
    for measurement in emulated_steps._round(cast(Any, machine), cast(Any, links)):
        measurement()
    assert taken[:4] == ["machine 0", "machine 1"] * 2
    assert taken[4:] == ["machine 2", "links 0", "links 1", "links 2"]


def test_a_calibration_between_plans_measures_current_kernels_and_links(tmp_path: Path) -> None:
    """Kernels and software come from `rounds`, links from `links`; a mutant that keeps either from the
    previous calibration is caught."""
    known = read_calibration(written(tmp_path))
    assert known.profile is not None
    (device,) = known.devices.values()
    faster = TimeFactors(kernels=0.5).of_device(device)
    profile = replace(known.profile, pointwise_passes=9.0, data_overlap=0.0)
    machine = MeasuredMachine(faster, profile, {"steps": {"seconds": 3.0}}, (1.0, 2.0))
    (tier,) = load_cluster("2x1xcpu").tiers
    curve = LinkCurve(latency_s=0.125, startup_s=0.0, bytes_per_s=tier.bytes_per_s / 2, lockstep_s=0.25)
    between = LinkResult([TierCurve(tier=tier, curve=curve)], 0.75, {"links of Ethernet": {"message": 0.5}})
    rounds = SimpleNamespace(found=lambda given: machine if given is device else None)
    links = SimpleNamespace(found=lambda: between)
    found = emulated_steps._calibrated(cast(Any, rounds), cast(Any, links), known)
    assert found["small_s"] == 3.0
    file = tmp_path / "meanwhile.yaml"
    file.write_text(dumps_yaml(found["calibration"]))
    reported = read_calibration(str(file))
    assert reported.devices["cpu"].peak_flop_per_s == faster.peak_flop_per_s
    reached = reported.devices["cpu"].efficiency.scale_out
    assert (reached.fraction, reached.lockstep_s) == (0.5, 0.25)
    assert reported.devices["cpu"].scale_out_latency_s == 0.125
    assert reported.profile is not None and reported.profile.pointwise_passes == 9.0
    assert reported.profile.data_overlap == 0.75
