"""`launch --with torchrun`, for real: the process becomes torchrun, and that trains as the plan says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from tests.property.layout_instances import mlp
from tests.runtime.graph_plans import by_rules, plan_with
from tests.runtime.plans import make_plan

from shardwise.app.cli import main
from shardwise.plan import write_graph_plan, write_plan

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


def test_torchrun_goes_on_under_the_plan_of_a_graph(tmp_path: Path) -> None:
    """From a checkpoint of a run without it, in whose log it writes on."""
    graph, log = mlp(8, 6, 12, 5), tmp_path / "steps.jsonl"
    plan = str(tmp_path / "p.yaml")
    write_graph_plan(plan, plan_with(graph, (2,), by_rules(graph, (2,), lambda op: ("split b",))))
    common = ["--checkpoint", str(tmp_path / "ck"), "--log", str(log)]
    assert main(["train", plan, "--steps", "2", *common]) == 0
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", "shardwise", "launch", plan, "--with", "torchrun", "--"]
    ran = subprocess.run(
        [*command, *common, "--steps", "4", "--resume"],
        env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 2, 3, 4]
    assert ran.stdout.count("trained") == 1 and "step 4/4" in ran.stderr
