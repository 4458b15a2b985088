"""`launch --with torchrun`, for real: the process becomes torchrun, and that trains as the plan says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from tests.runtime.plans import make_plan

from shardwise.app.cli import main
from shardwise.plan import write_plan

pytestmark = pytest.mark.xdist_group("runtime")


def test_torchrun_trains_as_launched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, log, trace = str(tmp_path / "p.yaml"), tmp_path / "steps.jsonl", str(tmp_path / "measured.json")
    write_plan(plan, make_plan("tp=2"))
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", "shardwise", "launch", plan, "--with", "torchrun"]
    ran = subprocess.run(
        [*command, "--", "--steps", "2", "--log", str(log), "--trace", trace],
        env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 2]
    assert ran.stdout.count("trained") == 1 and "step 2/2" in ran.stderr
    assert main(["compare", plan, trace]) == 0  # has the actions of both ranks
    assert "every rank ran its actions as planned" in capsys.readouterr().out
