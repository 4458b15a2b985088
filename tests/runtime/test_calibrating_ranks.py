"""The ranks that measure for `calibrate`: those of a launcher, or processes started for it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import distributed

from shardwise.accuracy import AttentionSample, MatmulSample, MemorySample, calibration_plans, eager_profile
from shardwise.app.cli import calibrating
from shardwise.app.cli.main import main
from shardwise.app.cli.measuring import KernelMeasurement, Ranks, StepMeasurement, cluster_here, ranks_of
from shardwise.cluster import load_cluster
from shardwise.errors import ConfigError
from shardwise.measure import KernelTimes, group_timer
from shardwise.measure.kernels import BatchTimer
from shardwise.runtime.workers import HOST, WorkerPool


def seen(report: Any, factor: int) -> tuple[int, int, int]:
    """A sum over the process group of this call, the size of the group, and the process id."""
    total = torch.tensor(float(factor))
    distributed.all_reduce(total)
    return int(total), distributed.get_world_size(), os.getpid()


def test_without_a_launcher_processes_are_started() -> None:
    with ranks_of(load_cluster("1x2xcpu")) as ranks:
        run_separately = ranks.run_separately(seen, 5)
        assert [found[:2] for found in run_separately] == [(5, 1), (5, 1)]
        assert len({os.getpid(), *(pid for _, _, pid in run_separately)}) == 3
        assert [pid for *_, pid in ranks.run_separately(seen, 5)] == [
            pid for *_, pid in run_separately
        ]  # the same processes in each call
        assert [found[:2] for found in ranks.run_in_group(seen, 5)] == [(10, 2), (10, 2)]
        assert ranks.gathered("this one") == ["this one"]
        assert ranks.rank == 0 and list(ranks.speeds) == [1.0, 1.0]


def _threads(report: Any) -> int:
    return torch.get_num_threads()


def test_threads_are_those_of_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two processes on six cores have three threads each; under a launcher, the number it was started
    with."""
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    with WorkerPool(2) as team:
        assert team.run(2, _threads) == [3, 3]
    requested: list[int] = []

    def measured(*_: object, links: bool, threads: int) -> None:
        requested.append(threads)

    monkeypatch.setattr(calibrating, "_measured_here", measured)
    words = ["calibrate", "--out", str(tmp_path / "c.yaml"), "--cluster"]
    assert [main([*words, f"1x{ranks}xcpu"]) for ranks in (2, 1, 8)] == [0, 0, 0]
    assert main([*words, "1x2xcpu", "--threads", "5"]) == 0
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert main([*words, "1x2xcpu"]) == 0
    assert requested == [3, 6, 1, 5, 4]


LAUNCHED = """
from shardwise.app.cli import calibrating
from shardwise.app.cli.measuring import cluster_here, ranks_of
from shardwise.cluster import load_cluster
from tests.runtime.test_calibrating_ranks import seen
if __name__ == "__main__":
    with ranks_of(load_cluster("1x2xcpu")) as ranks:
        apart = ranks.run_separately(seen, 5 + ranks.rank)
        together = ranks.run_in_group(seen, 5)
        groups = [[found[:2] for found in each] for each in (apart, together)]
        print(ranks.rank, *groups, ranks.gathered(ranks.rank))
"""


def test_ranks_of_a_launcher_measure_apart_and_together(tmp_path: Path) -> None:
    """Each rank measures in its own process and group, and all results are gathered; then both measure in one
    group."""
    script = tmp_path / "launched.py"
    script.write_text(LAUNCHED)
    reported = launched([str(script)])
    assert [message.strip() for _, message, _ in reported] == [
        f"{rank} [[5, 1], [6, 1]] [[10, 2], [10, 2]] [0, 1]" for rank in range(2)
    ]


def launched(words: list[str], **variables: str) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of Python with these arguments, as each of two ranks of a launcher."""
    with socket.create_server((HOST, 0)) as free:
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": HOST, "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
    environment = os.environ | common | variables | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, *words], env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    reported = [each.communicate(timeout=120) for each in ranks]
    return [(each.returncode, out, err) for each, (out, err) in zip(ranks, reported, strict=True)]


def test_nodes_of_a_launched_cluster_are_the_hosts(tmp_path: Path) -> None:
    """Two hosts with one process each are two nodes, not one node of two, whose links would be those inside a
    node."""
    words = ["-m", "shardwise", "calibrate", "--links", "--cluster", "1x2xcpu", "--out", str(tmp_path / "c")]
    for code, out, err in launched(words, LOCAL_WORLD_SIZE="1"):
        assert (code, out) == (2, "")
        assert "--cluster: has other nodes than the launched processes; found nodes of 2 devices" in err
        assert err.rstrip().endswith("allowed: nodes of 1, 1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("started", "local", "cluster"),
    [("4", None, "1x4xcpu"), ("4", "4", "1x4xcpu"), ("4", "2", "2x2xcpu"), ("2", "1", "2x1xcpu")],
)
def test_hosts_are_known_by_their_own_numbers_of_processes(
    monkeypatch: pytest.MonkeyPatch, started: str, local: str | None, cluster: str
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", started)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert cluster_here("cpu") == cluster


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}, "--cluster: is required where hosts have unequal"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE: is not set as torchrun sets it; found 'two'"),
        ({}, "WORLD_SIZE: is not set as torchrun sets it; found ''"),
    ],
)
def test_a_launcher_that_does_not_name_its_hosts_is_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        cluster_here("cpu")
    assert str(caught.value).startswith(message)


def test_a_port_in_use_is_a_one_line_error(tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as taken:
        place = f"{HOST}:{taken.getsockname()[1]}"
        environment = {
            "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": HOST,
            "MASTER_PORT": str(taken.getsockname()[1]), "TORCHELASTIC_RUN_ID": "none",
        }  # fmt: skip
        ran = subprocess.run(
            [sys.executable, "-m", "shardwise", "calibrate", "--out", str(tmp_path / "c.yaml")],
            env=os.environ | environment, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (2, "")
    message = [
        line for line in ran.stderr.splitlines() if not line.startswith("[W")
    ]  # PyTorch's own warnings
    assert message == [
        f"shardwise: error: MASTER_ADDR and MASTER_PORT: is in use by another program; found {place};"
        " allowed: a free port of the first host"
    ]


def kills_one(report: Any) -> None:
    """The kernel's out-of-memory killer."""
    if distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.barrier()


def test_a_killed_rank_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrating, "_kernels", lambda device, ranks, threads: ranks.run_in_group(kills_one))
    assert main(["calibrate", "--out", str(tmp_path / "c.yaml"), "--cluster", "1x2xcpu"]) == 1
    assert capsys.readouterr().err == (
        "shardwise: error: rank 1 was ended by signal 9 during measurement; nothing was written\n"
    )
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True)
class ScriptedRanks:
    """Ranks with scripted results: for each call in order, the seconds of steps on every rank."""

    speeds: list[float]
    found: Iterator[list[list[float]]]
    rank: int = 0

    def run_separately(self, *_: object) -> list[list[float]]:
        return next(self.found)

    run_in_group = run_separately

    def gathered(self, value: Any) -> list[Any]:
        return [value]


def small_steps(speeds: list[float], *found: list[list[float]]) -> StepMeasurement:
    plans = calibration_plans(load_cluster("1x1xcpu"), eager_profile())[:2]
    return StepMeasurement(ScriptedRanks(speeds, iter(found)), plans, threads=1)


def test_steps_are_those_of_their_plan_and_rank_and_medians_count() -> None:
    steps = small_steps(
        [1.0, 1.0],
        [[1.0, 2.0], [10.0, 20.0]],  # of the first plan, on either rank
        [[5.0, 5.0], [7.0, 7.0]],  # of the second
        [[90.0, 2.0], [20.0, 20.0]],  # of the first again: 1, 2, 2, 90 and 10, 20, 20, 20
    )
    for number in (0, 1, 0):
        steps.measure(number)
    assert steps.medians(0) == [2.0, 5.0] and steps.medians(1) == [20.0, 7.0]


def test_a_step_takes_the_time_of_the_slowest_device_of_speed_one() -> None:
    """Per round, the slower of the two full-speed ranks counts: 4, 5 and 3 s, with the median 4. Each rank's
    own median is 3 s. The third rank has half the speed and does not count."""
    of_ranks = [[1.0, 5.0, 3.0], [4.0, 2.0, 3.0], [8.0, 8.0, 8.0]]
    steps = small_steps([1.0, 1.0, 0.5], of_ranks, [[6.0]] * 3)
    steps.measure(0)
    steps.measure(1)
    assert steps.slowest() == [4.0, 6.0]


class Alternating:
    """Three ranks with steps of 2 s, except that the first and the second alternately take 3 s. Kernel times
    are those of a device with 10 GFLOP/s and 4 GB/s; the second rank is half as fast."""

    rank, speeds = 0, (1.0, 1.0, 1.0)

    def run_separately(self, *_: object) -> list[list[float]]:
        return [[2.0, 3.0], [3.0, 2.0], [2.0, 2.0]]

    def run_in_group(self, *_: object) -> list[Any]:
        return [asdict(self.kernels(slower)) for slower in (1.0, 2.0, 1.0)]

    @staticmethod
    def kernels(slower: float) -> KernelTimes:
        sides = (64, 256, 1024)
        attentions = [(512, False), (128, False), (512, True), (128, True)]
        return KernelTimes(
            matmuls=tuple(
                MatmulSample(m=m, n=n, k=k, seconds=slower * (1e-4 + 2e-10 * m * n * k))
                for m in sides
                for n in sides
                for k in sides
            ),
            passes=tuple(
                MemorySample(nbytes=nbytes, seconds=slower * (1e-4 + nbytes / 4e9))
                for nbytes in (3e3, 1e5, 1e8)
            ),
            attentions=tuple(
                AttentionSample(seq_len=length, work_flop=1e9, is_backward=is_backward, seconds=slower * 0.2)
                for length, is_backward in attentions
            ),
            bf16_ratio=2.0,
        )


def test_a_calibration_takes_the_slowest_steps_and_median_kernels() -> None:
    """In each round some rank takes 3 s, though no rank's median exceeds 2.5 s; the median rank is one of the
    first two."""
    rounds = KernelMeasurement(cast(Ranks, Alternating()), threads=1)
    for measurement in range(rounds.measurements):
        rounds.measure(measurement)
    found = rounds.found(load_cluster("1x1xcpu").classes["cpu"])
    assert rounds.steps.medians(rounds.steps.median_rank()) == [2.5] * len(rounds.steps.plans)
    assert found.steps_s == (3.0,) * len(rounds.steps.plans)
    assert cast(Any, found.measured)["steps"]["seconds"] == 3.0 * len(rounds.steps.plans)


def test_the_middle_one_of_the_devices_of_speed_one_counts() -> None:
    """Full-speed ranks take 3, 1 and 2 s, so the last one is the median. Among all five ranks, with two of
    half speed that take 9 and 8 s, the first would be."""
    of_ranks = [[3.0], [9.0], [1.0], [8.0], [2.0]]
    steps = small_steps([1.0, 0.5, 1.0, 0.5, 1.0], of_ranks, [[0.0]] * 5)
    steps.measure(0)
    steps.measure(1)
    assert steps.median_rank() == 4
    with pytest.raises(ConfigError, match="no device of speed 1"):  # before anything is measured
        small_steps([0.5] * 5)


def test_batches_begin_when_all_are_ready() -> None:
    """Warm-up, one call and three batches: five barriers, each before the clock is read."""
    message: list[str] = []

    def now() -> float:
        message.append("now")
        return float(len(message))

    BatchTimer(batches=3, batch_s=1e-9, now=now, ready=lambda: message.append("ready")).seconds(lambda: None)
    assert message == ["ready", "now", "now"] * 5


def test_batches_of_a_group_begin_together() -> None:
    """Three barriers: warm-up, one call, one batch. A timer of a single process waits for nobody."""
    with mock.patch.object(distributed, "barrier") as barrier:
        group_timer(batches=1).seconds(lambda: None)
        assert barrier.call_count == 3
        BatchTimer(batches=1).seconds(lambda: None)
        assert barrier.call_count == 3
