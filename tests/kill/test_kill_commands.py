"""A few kills of every command; and faults that the judgement must find."""

from __future__ import annotations

import signal
from pathlib import Path
from random import Random

import pytest
from tests.kill import runner
from tests.kill.commands import Command, commands, write_inputs
from tests.kill.runner import duration_s, kill

KILLS = 3


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.mark.slow
@pytest.mark.xdist_group("kill")
@pytest.mark.parametrize("command", commands(), ids=lambda command: command.name)
def test_a_killed_command_leaves_complete_files_and_no_process(
    command: Command, inputs: Path, tmp_path: Path
) -> None:
    lasts = duration_s(command, inputs, tmp_path / "run")
    random = Random(command.name)
    kills = [kill(command, inputs, tmp_path / "run", random, lasts) for _ in range(KILLS)]
    assert [one for one in kills if one.faults] == []


TORN = "open('out.txt', 'w').write('x')"
ORPHAN = "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)"
DEAF = "import signal\nsignal.pause()"
LOUD = "raise RuntimeError"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "fault"),
    [(TORN, "AssertionError"), (ORPHAN, "live on: ['sleep 600"), (DEAF, "lives"), (LOUD, "Traceback")],
    ids=["torn", "orphan", "deaf", "loud"],
)
def test_a_planted_fault_is_found(
    program: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program in place of `shardwise`: one leaves half a file, one a process, one lives on after a signal,
    one ends by a traceback."""

    def judge(folder: Path) -> None:
        for path in folder.glob("out.txt"):
            assert path.read_text().endswith("end")

    (tmp_path / "inputs").mkdir()
    (tmp_path / "inputs" / "shardwise.py").write_text(program)
    # A process ignores this signal unless it handles it: only the deaf program is still there to receive it.
    monkeypatch.setattr(runner, "SIGNALS", (signal.SIGWINCH,))
    monkeypatch.setitem(runner.CODES, signal.SIGWINCH, 0)
    monkeypatch.setattr(runner, "ENDS_S", 0.1 if program is DEAF else 60.0)
    monkeypatch.setattr(runner, "ORPHANS_S", 0.1)
    found = kill(Command("planted", (), judge), tmp_path / "inputs", tmp_path / "run", Random(1), 0.1)
    assert any(fault in text for text in found.faults), found
