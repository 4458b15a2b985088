"""Launched processes meet before they begin: an error on one rank ends all, and is reported in one line."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.plans import make_plan
from tests.runtime.test_runtime_checkpoint import children
from tests.runtime.test_runtime_manifest import saved_plan

from shardwise.app.cli.launched import launched_rank_of, report_on_rank_0
from shardwise.app.cli.main import main
from shardwise.errors import ConfigError
from shardwise.plans import write_plan
from shardwise.runtime import Rendezvous
from shardwise.runtime.workers import HOST


def free_port() -> str:
    with socket.create_server((HOST, 0)) as server:
        return str(server.getsockname()[1])


def variables(rank: str, ranks: str, port: str) -> dict[str, str]:
    return {
        "RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_ADDR": HOST, "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "none",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"RANK": "5"}, "RANK: is not a number in range; found '5'; allowed: 0 to 1"),
        ({"RANK": "abc"}, "RANK: is not a number in range; found 'abc'"),
        ({"RANK": "-1"}, "RANK: is not a number in range"),
        ({"RANK": None}, "RANK: is not set, although torchrun started this process (TORCHELASTIC_RUN_ID"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE: is not set"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE: is not a number in range; found '0'; allowed: 1 or more"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR: is not set"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT: is not a number in range"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK: is not a number in range"),
    ],
)
def test_invalid_environment_variables_are_a_one_line_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: Mapping[str, str | None],
    named: str,
) -> None:
    for name, text in {**variables("1", "2", "29500"), **changes}.items():
        if text is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, text)
    assert main(["train", saved_plan(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"shardwise: error: {named}") and error.count("\n") == 1
    with pytest.raises(ConfigError):
        launched_rank_of(os.environ)


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_options_that_are_wrong_are_reported_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str, lines: int
) -> None:
    for name, text in variables(rank, "2", "29500").items():
        monkeypatch.setenv(name, text)
    assert main(["train", "p.yaml", "--steps", "0"]) == 2
    assert capsys.readouterr().err.count("\n") == lines
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    with pytest.raises(ConfigError), report_on_rank_0():
        raise ConfigError("is wrong")


def together(monkeypatch: pytest.MonkeyPatch, *works: Callable[[Rendezvous], Any]) -> list[Any]:
    """The results of each rank's work, which run as threads of this process."""
    monkeypatch.setenv("MASTER_ADDR", HOST)
    monkeypatch.setenv("MASTER_PORT", free_port())
    found: list[Any] = [None] * len(works)
    meetings = []  # rank 0's keeps the store as long as it is there

    def take_part(rank: int) -> None:
        rendezvous = Rendezvous(rank, len(works), timeout_s=60.0)
        meetings.append(rendezvous)
        found[rank] = works[rank](rendezvous)

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def reports_errors(*rounds: ConfigError | None) -> Callable[[Rendezvous], list[str]]:
    return lambda rendezvous: [str(rendezvous.agree_on_error(refusal)) for refusal in rounds]


def test_all_ranks_receive_the_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, other = ConfigError("is wrong", key="--data", found="x"), ConfigError("is wrong too")
    found = together(
        monkeypatch,
        reports_errors(None, None, other),
        reports_errors(None, wrong, wrong),
        reports_errors(None, other, wrong),
    )
    host = socket.gethostname()
    for message in found:
        assert message == ["None", f"rank 1 on {host}: --data: is wrong; found x", "is wrong too"]


def test_the_lowest_rank_that_is_alive_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    lives = Rendezvous.is_reporter
    assert together(monkeypatch, lives, lives, lives) == [True, False, False]
    assert together(monkeypatch, lambda _: None, lives, lives) == [None, True, False]

    def posts(rendezvous: Rendezvous) -> None:
        rendezvous.report_error(ConfigError("is wrong"))
        rendezvous.end(is_reporter=False)

    def reads_error(rendezvous: Rendezvous) -> str:
        while rendezvous.reported_error() is None:
            time.sleep(0.05)
        rendezvous.end(is_reporter=True)
        return str(rendezvous.reported_error())

    assert together(monkeypatch, reads_error, posts)[0] == f"rank 1 on {socket.gethostname()}: is wrong"


def test_a_missing_rank_is_waited_for_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", HOST)
    for rank in (0, 1):
        monkeypatch.setenv("MASTER_PORT", free_port())
        start_s = time.monotonic()
        with pytest.raises(ConfigError, match="MASTER_PORT: rendezvous of the processes failed"):
            Rendezvous(rank, 2, timeout_s=1.0)
        assert time.monotonic() - start_s < 30.0


def test_a_file_missing_on_one_rank_ends_both_with_one_line(tmp_path: Path) -> None:
    """Two ranks in separate folders, only one of which has the data; nothing is written."""
    plan, port = saved_plan(tmp_path), free_port()
    running = []
    for rank in "01":
        (tmp_path / rank).mkdir()
        command = [sys.executable, "-m", "shardwise", "train", plan, "--data", "t.bin", "--checkpoint", "ck"]
        if rank == "0":
            np.zeros(1000, dtype="<u2").tofile(tmp_path / rank / "t.bin")
        running.append(
            subprocess.Popen(
                command,
                cwd=tmp_path / rank,
                env={**os.environ, **variables(rank, "2", port)},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    of_rank_1 = running[1].communicate(timeout=120)[1]
    running[0].send_signal(signal.SIGTERM)  # as a launcher does when it has seen rank 1 end
    message = [running[0].communicate(timeout=120)[1], of_rank_1]
    assert [process.returncode for process in running] == [2, 2]
    lines = [[line for line in text.splitlines() if line.startswith("shardwise")] for text in message]
    assert lines[0] == [
        f"shardwise: error: rank 1 on {socket.gethostname()}: t.bin: cannot be read:"
        " no such file or directory"
    ]
    assert lines[1] == []
    assert os.listdir(tmp_path / "0") == ["t.bin"] and os.listdir(tmp_path / "1") == []


def test_where_rank_0_is_killed_another_reports_how_to_resume(tmp_path: Path) -> None:
    plan, root = str(tmp_path / "p.yaml"), tmp_path / "ck"
    write_plan(plan, make_plan("dp=2"))
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", "shardwise", "launch", plan, "--with", "torchrun", "--"]
    with open(tmp_path / "said", "w") as message:
        run = subprocess.Popen(
            [*command, "--steps", "100000", "--checkpoint", str(root), "--checkpoint-every", "5"],
            env={**os.environ, "PATH": path}, stderr=message,
        )  # fmt: skip
    while not (root / "step-00000005" / "manifest.json").exists():
        assert run.poll() is None
        time.sleep(0.1)
    (rank_0,) = (
        child for child in children(run.pid) if b"\0RANK=0\0" in Path(f"/proc/{child}/environ").read_bytes()
    )
    os.kill(rank_0, signal.SIGKILL)
    assert run.wait(timeout=120) == 1
    text = (tmp_path / "said").read_text()
    assert text.count("shardwise: error: ") == 1
    line = next(line for line in text.splitlines() if "to resume" in line)
    assert line.startswith(f"  to resume from the last checkpoint: shardwise launch {plan} --with torchrun ")
    assert line.endswith("--resume")
