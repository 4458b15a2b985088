"""Runs a command, ends it by a signal at a random moment, and judges what is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.kill.commands import Command

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129, signal.SIGKILL: -signal.SIGKILL}
"""Exit codes of an interrupted command."""

MARK = "SHARDWISE_TEST_MARK"
"""Environment variable by which processes of a command are recognised."""

ERRORS = "stderr"
"""File with the errors of a command."""

ENDS_S = 30.0
"""Within this time a command ends after a signal."""

ORPHANS_S = 15.0
"""Within this time all of its processes do: a fork server that still imports PyTorch ends afterwards, which
takes seconds on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One command that was ended by `signal` to its process or to its group, after `delay_s`; and the faults
    that were found."""

    command: str
    signal: signal.Signals
    is_group: bool
    delay_s: float
    code: int
    faults: tuple[str, ...]


def duration_s(command: Command, inputs: Path, folder: Path) -> float:
    """Seconds that the command takes undisturbed; AssertionError where it fails."""
    start = time.monotonic()
    process = _start(command, inputs, folder, "undisturbed")
    assert process.wait(300) in (0, 4), f"{command.name}: {_errors(folder)}"
    command.judge(folder)
    return time.monotonic() - start


def kill(command: Command, inputs: Path, folder: Path, random: Random, longest_s: float) -> Kill:
    """Ends the command at a random moment of the `longest_s` that it takes."""
    chosen, is_group = random.choice(SIGNALS), random.random() < 0.3
    delay_s = random.uniform(0.0, longest_s)
    mark = uuid.uuid4().hex
    process = _start(command, inputs, folder, mark)
    try:
        process.wait(delay_s)
    except subprocess.TimeoutExpired:
        (os.killpg if is_group else os.kill)(process.pid, chosen)
    is_deaf = False
    try:
        process.wait(ENDS_S)
    except subprocess.TimeoutExpired:
        is_deaf = True
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    faults = [*_faults(process.returncode, chosen, _errors(folder)), *_left(folder, chosen, mark)]
    if is_deaf:
        faults.append(f"lives {ENDS_S:.0f} s after the signal")
    try:
        command.judge(folder)
    except Exception as error:  # noqa: BLE001 - whatever a reader raises, the file is not complete
        faults.append(f"{type(error).__name__}: {error}")
    return Kill(
        command=command.name, signal=chosen, is_group=is_group, delay_s=delay_s, code=process.returncode,
        faults=tuple(faults),
    )  # fmt: skip


def _start(command: Command, inputs: Path, folder: Path, mark: str) -> subprocess.Popen[bytes]:
    """Starts the command in `folder`, which becomes a copy of `inputs`, in a session of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(inputs, folder)
    # Into a file: a process that lives on would keep a pipe open.
    with (folder / ERRORS).open("w") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "shardwise", *command.arguments], cwd=folder,
            env={**os.environ, MARK: mark}, stdout=subprocess.DEVNULL, stderr=errors,
            start_new_session=True, preexec_fn=_as_in_the_foreground,
        )  # fmt: skip


def _errors(folder: Path) -> str:
    return (folder / ERRORS).read_text("utf-8", "replace")


def _as_in_the_foreground() -> None:
    """Handle signals as a command does that a shell starts: jobs in the background ignore some."""
    for one in SIGNALS[1:]:
        signal.signal(one, signal.SIG_DFL)


def _faults(code: int, chosen: signal.Signals, errors: str) -> Iterator[str]:
    # The signal may come before the interpreter handles it, or after the command has ended.
    if code not in (0, 4, CODES[chosen], -chosen):
        yield f"exit code {code} after {chosen.name}"
    lines = errors.strip().splitlines()
    if any("Traceback" in line for line in lines):
        yield f"stderr: {errors[-1500:]}"


def _left(folder: Path, chosen: signal.Signals, mark: str) -> Iterator[str]:
    """Temporary files where the command could remove them, and processes that live on."""
    temporary = [str(path.relative_to(folder)) for path in folder.rglob(".*.tmp")]
    if temporary and chosen is not signal.SIGKILL:
        yield f"temporary files {temporary}"
    end = time.monotonic() + ORPHANS_S
    while alive := list(processes(mark)):
        if time.monotonic() > end:
            yield f"processes live on: {[_command_line(pid) for pid in alive]}"
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.05)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return str(pid)


def processes(mark: str) -> Iterator[int]:
    """Processes whose environment has the mark."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name)
            except OSError:  # it has ended, or belongs to somebody else
                continue
