"""Worker processes apart from the training that they do."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
from tests.runtime.plans import make_plan
from torch import distributed

from shardwise.plans import Plan, write_plan
from shardwise.runtime import RankLost, TrainOptions, WorkerPool, train, workers
from shardwise.runtime.profiling import StepTrace
from shardwise.runtime.timing import Stopwatch


def takes_interrupts(report: object) -> bool:
    return signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_an_interrupt_is_handled_by_the_process_that_started_the_ranks(team: WorkerPool) -> None:
    """A terminal's Ctrl-C goes to all processes. Ranks block it, and so does the fork server that they are
    forked from, which imports for seconds and would print a traceback."""
    assert team.run(2, takes_interrupts) == [False, False]


def stops(report: Any, continues: bool) -> str:
    """Rank 1 stops itself; another process continues it, or none does."""
    if distributed.get_rank() == 1:
        if continues:
            process = os.getpid()
            until = f"until grep -q ') T' /proc/{process}/stat; do :; done; kill -CONT {process}"
            subprocess.Popen(["sh", "-c", until])
        os.kill(os.getpid(), signal.SIGSTOP)
    distributed.barrier()
    return "done"


def test_a_stopped_rank_is_lost_and_a_continued_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "CHECK_S", 0.01)
    monkeypatch.setattr(workers, "STOPPED_CHECKS", 3)
    with WorkerPool(2) as pool, pytest.raises(RankLost, match="rank 1 was stopped for 0 s") as lost:
        pool.run(2, stops, False)
    assert lost.value.rank == 1 and lost.value.was_ended
    monkeypatch.setattr(workers, "STOPPED_CHECKS", 10**6)
    with WorkerPool(2) as pool:
        assert pool.run(2, stops, True) == ["done", "done"]


def test_checks_that_find_a_rank_running_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped, running, stopped twice: with three checks in a row as the limit, the rank is not lost."""
    states = iter([True, False, True, True, True])
    monkeypatch.setattr(workers, "is_stopped", lambda pid: next(states))
    monkeypatch.setattr(workers, "STOPPED_CHECKS", 3)
    pool = WorkerPool(1)
    pool._workers.append((SimpleNamespace(pid=1), Mock()))
    counts: Counter[int] = Counter()
    for expected in (1, 0, 1, 2):
        counts = pool._stopped([0], counts)
        assert counts[0] == expected
    with pytest.raises(RankLost, match="rank 0 was stopped for 15 s"):  # 3 checks, 5 s each
        pool._stopped([0], counts)


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


STRANGERS = """
import socket
from shardwise.runtime import workers
GREETING = bytes([0]) + (0x3C85F7CE).to_bytes(4, "little")  # what a client of a TCPStore sends first
store = workers._loopback_store()
for number in range(20):
    with socket.create_connection((workers.HOST, store.port)) as stranger:
        stranger.sendall((b"GET / HTTP/1.1\\r\\n\\r\\n", GREETING + b"\\1" + b"\\xff" * 30, b"")[number % 3])
store.set("key", "value")
print(store.get("key").decode())
"""


@pytest.mark.parametrize("level", [None, "WARNING"])
def test_strangers_at_the_store_print_nothing(level: str | None) -> None:
    """Unless the user sets the log level: PyTorch 2.13 then prints a C++ stack for each of them."""
    environment = {key: value for key, value in os.environ.items() if key != "TORCH_CPP_LOG_LEVEL"}
    if level is not None:
        environment["TORCH_CPP_LOG_LEVEL"] = level
    words = [sys.executable, "-c", STRANGERS]
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == "value\n"
    assert ("TCPStore" in ran.stderr) is (level is not None)
    assert level is not None or ran.stderr == ""


ATTACK = """
import random, socket, sys
port, random, held = int(sys.argv[1]), random.Random(5), []
GREETING = bytes([0]) + (0x3C85F7CE).to_bytes(4, "little")
for number in range(2000):
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.settimeout(0.05)
        garbage = random.randbytes(random.randrange(1, 5000))
        text = (
            b"GET / HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\n\\r\\n",
            b"POST /keys HTTP/1.1\\r\\nContent-Length: 9999999999\\r\\n\\r\\n" + garbage,
            garbage,
            GREETING,
            GREETING + bytes([random.randrange(4, 256)]) + garbage,  # no query that reads or sets a key
            b"",
        )[number % 6]
        try:
            stranger.sendall(text)
            number % 6 < 2 and stranger.recv(100)
        except OSError:
            pass
    if number < 5:
        held.append(socket.create_connection(("127.0.0.1", port)))  # open until the end, and says nothing
    print(number, flush=True)
"""


ATTACKED_RUN = """
import subprocess, sys
from shardwise.app.cli.main import main
from shardwise.runtime import workers
open_store, attacks = workers._loopback_store, []

def attacked():
    store = open_store()
    words = [sys.executable, sys.argv[1], str(store.port)]
    attacks.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
    for number in range(30):
        assert attacks[0].stdout.readline() == f"{number}\\n"
    return store

if __name__ == "__main__":  # the ranks import this file too
    workers._loopback_store = attacked
    code = main(["train", *sys.argv[2:]])
    (attack,) = attacks
    attack.kill()
    attack.communicate()
    sys.exit(code)
"""


@pytest.mark.slow
def test_strangers_at_the_store_do_not_disturb_a_run(tmp_path: Path) -> None:
    """HTTP clients, garbage and silent connections, 30 before the first step and more during the run."""
    write_plan(str(tmp_path / "p.yaml"), make_plan("dp=2"))
    (tmp_path / "attack.py").write_text(ATTACK)
    (tmp_path / "run.py").write_text(ATTACKED_RUN)
    environment = {key: value for key, value in os.environ.items() if key != "TORCH_CPP_LOG_LEVEL"}
    losses, said = [], []
    for words in (["-m", "shardwise", "train"], ["run.py", "attack.py"]):
        ran = subprocess.run(
            [sys.executable, *words, "p.yaml", "--steps", "3", "--seed", "3", "--log", "log.jsonl"],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        said.append([line.partition(" · ")[0] for line in ran.stderr.splitlines()])
        lines = (tmp_path / "log.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert said[0] == said[1] == ["step 1/3", "step 2/3", "step 3/3"]
    assert losses[0] == losses[1] and len(losses[0]) == 3


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
