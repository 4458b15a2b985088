"""Recovery time of a run after the death of a worker (`kill -9`); needs Linux and PyTorch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS, EVERY, DIES_AT = 12, 3, 6
"""Steps of the run, steps between checkpoints, and the step after which a worker dies."""

PLAN = (
    "plan", "examples/tiny.yaml", "--cluster", "1x2xcpu", "--fix", "dp=2", "--seq-len", "64",
    "--global-batch-size", "8", "--dtype", "fp32",
)  # fmt: skip

TIMEOUT_S = 120.0
"""Seconds after which a run without progress fails."""


def figures() -> dict[str, float]:
    """`seconds` from the death of a rank to the end of the third step after the last finished one.

    So a step that finishes in the meantime does not count. RuntimeError where the run did not restart."""
    with tempfile.TemporaryDirectory() as folder:
        plan, log, messages = (Path(folder) / name for name in ("plan.yaml", "steps.jsonl", "messages.txt"))
        shardwise = [sys.executable, "-m", "shardwise"]
        subprocess.run([*shardwise, *PLAN, "--save", str(plan)], check=True, capture_output=True)
        train = [
            "train", str(plan), "--steps", str(STEPS), "--checkpoint", f"{folder}/checkpoints",
            "--checkpoint-every", str(EVERY), "--log", str(log),
        ]  # fmt: skip
        with messages.open("wb") as output:
            run = subprocess.Popen([*shardwise, *train], stdout=subprocess.DEVNULL, stderr=output)
        try:
            _wait_for(run, log, DIES_AT)
            done = _steps(log)[-1]
            os.kill(_workers_of(run.pid)[-1], signal.SIGKILL)
            died_s = time.perf_counter()
            _wait_for(run, log, done + EVERY)
            seconds = time.perf_counter() - died_s
            if run.wait(timeout=TIMEOUT_S) or "all start again" not in messages.read_text():
                raise RuntimeError(f"the run ended with exit code {run.returncode}: {messages.read_text()}")
        finally:
            run.kill()
    return {"seconds": seconds}


def _wait_for(run: subprocess.Popen[bytes], log: Path, step: int) -> None:
    """Waits until the log's last line is of this step or a later one."""
    end_s = time.perf_counter() + TIMEOUT_S
    while not (steps := _steps(log)) or steps[-1] < step:
        if run.poll() is not None or time.perf_counter() > end_s:
            raise RuntimeError(f"step {step} was not reached")
        time.sleep(0.01)


def _steps(log: Path) -> list[int]:
    """The steps of the complete lines of the log."""
    text = log.read_text() if log.exists() else ""
    return [int(json.loads(line)["step"]) for line in text.splitlines(keepends=True) if line[-1:] == "\n"]


def _workers_of(pid: int) -> list[int]:
    """Process ids of the ranks of a run, in order: the children of its fork server."""
    servers = [
        child for child in _children(pid) if b"forkserver" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    return [worker for server in servers for worker in _children(server)]


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
