"""Worker processes apart from the training that they do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tests.runtime.plans import make_plan
from torch import distributed

from shardwise.plans import Plan, write_plan
from shardwise.runtime import TrainOptions, WorkerPool, train
from shardwise.runtime.profiling import StepTrace
from shardwise.runtime.timing import Stopwatch


def takes_interrupts(report: object) -> bool:
    return signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_an_interrupt_is_handled_by_the_process_that_started_the_ranks(team: WorkerPool) -> None:
    """A terminal's Ctrl-C goes to all processes. Ranks block it, and so does the fork server that they are
    forked from, which imports for seconds and would print a traceback."""
    assert team.run(2, takes_interrupts) == [False, False]


def is_reachable(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port)).close()
    except ConnectionRefusedError:
        return False
    return True


def test_the_store_of_a_machine_listens_on_its_loopback_address_alone() -> None:
    """A socket on 127.0.0.1 refuses connections to 127.0.0.2, which Linux routes to this machine too; one on
    all interfaces, as PyTorch opens it, takes them."""
    with WorkerPool(1) as pool:
        port = pool._store.port
        assert is_reachable("127.0.0.1", port) and not is_reachable("127.0.0.2", port)
    everywhere = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert is_reachable("127.0.0.2", everywhere.port)


@pytest.mark.parametrize("level", [None, "1"])
def test_the_profiler_prints_nothing_between_reports_of_steps(level: str | None, tmp_path: Path) -> None:
    """Unless the user sets the log level: PyTorch 2.13 then prints a line for each start and stop."""
    write_plan(str(tmp_path / "p.yaml"), make_plan("dp=1"))
    words = [sys.executable, "-m", "shardwise", "train", "p.yaml", "--steps", "1", "--trace", "m.json"]
    environment = {key: value for key, value in os.environ.items() if key != "KINETO_LOG_LEVEL"}
    if level is not None:
        environment["KINETO_LOG_LEVEL"] = level
    ran = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert ("profiler_start" in ran.stderr) is (level is not None)


def in_order(report: object, plan: Plan) -> list[str]:
    """The order of clock, device and trace calls in two steps, the second of which is traced."""
    done: list[str] = []
    started = Stopwatch.started

    def begin(**of: Any) -> Stopwatch:
        done.append("clock begins")
        return started(**of)

    def read(stopwatch: Stopwatch) -> tuple[float, None]:
        done.append("clock is read")
        return 1.0, None

    @contextmanager
    def traced(rank: int) -> Iterator[StepTrace]:
        done.append("trace begins")
        yield StepTrace()
        done.append("trace is read")

    training = sys.modules[train.__module__]  # the package has the function by the module's name
    with (
        patch.object(training, "synchronize_device", lambda cluster: done.append("device is done")),
        patch.object(training, "traced", traced),
        patch.object(Stopwatch, "started", begin),
        patch.object(Stopwatch, "read", read),
    ):
        train(lambda record: None, plan, TrainOptions(steps=2, is_traced=True))
    return done


def test_the_clock_is_read_when_the_device_is_done_and_before_a_trace_is(team: WorkerPool) -> None:
    step = ["clock begins", "device is done", "clock is read"]
    assert team.run(1, in_order, make_plan("dp=1")) == [[*step, "trace begins", *step, "trace is read"]]


def test_tests_of_a_file_run_on_one_worker(request: pytest.FixtureRequest) -> None:
    group = request.node.get_closest_marker("xdist_group")
    assert group.args == ("test_runtime_workers",)
