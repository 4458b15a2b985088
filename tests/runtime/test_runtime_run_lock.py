"""One run at a time in a checkpoint folder: the lock, what it says, and that it ends with its process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.runtime.plans import make_plan

from shardwise.app.cli.main import main
from shardwise.errors import ConfigError
from shardwise.plans import write_plan
from shardwise.runtime import check_no_run, only_run
from shardwise.runtime.run_lock import LOCK_FILE

HOLDER = """
import sys
from shardwise.runtime import only_run
with only_run(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of `folder` until it is killed at the end."""
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_run_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        with pytest.raises(ConfigError, match="is in use by another run") as refused:
            check_no_run(str(tmp_path))
        assert f"process {process.pid} on" in str(refused.value)
        with pytest.raises(ConfigError, match="is in use"), only_run(str(tmp_path)):
            pass
    check_no_run(str(tmp_path))  # the lock of a killed process is none
    with only_run(str(tmp_path)):
        assert str(os.getpid()) in (tmp_path / LOCK_FILE).read_text()


def test_train_refuses_a_folder_in_use_before_it_looks_for_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, folder = tmp_path / "p.yaml", tmp_path / "run"
    write_plan(str(plan), make_plan("dp=1"))
    folder.mkdir()
    arguments = ["train", str(plan), "--steps", "1", "--checkpoint", str(folder)]
    with holder(folder) as process:
        for more in ([], ["--resume"]):
            assert main([*arguments, *more]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert "is in use by another run" in line and f"process {process.pid} on" in line
            assert sorted(os.listdir(folder)) == [LOCK_FILE]


def test_looking_for_a_run_writes_nothing(tmp_path: Path) -> None:
    check_no_run(str(tmp_path))
    check_no_run(str(tmp_path / "missing"))
    assert os.listdir(tmp_path) == []


def test_a_damaged_owner_is_still_a_lock(tmp_path: Path) -> None:
    with holder(tmp_path):
        (tmp_path / LOCK_FILE).write_text("{")
        with pytest.raises(ConfigError, match="a run"):
            check_no_run(str(tmp_path))
