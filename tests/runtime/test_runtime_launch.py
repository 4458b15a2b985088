"""`launch --with torchrun` with a real torchrun: it replaces the process and trains as the plan says."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from tests.property.layout_instances import mlp
from tests.runtime.graph_plans import by_rules, plan_with
from tests.runtime.plans import make_plan
from tests.unit.launch.stand_ins import free_port, run_nodes
from tests.unit.targets.small_plans import LLAMA, small_plan

from shardwise.app.cli import main
from shardwise.app.cli.launched import TORCHRUN_VARIABLE
from shardwise.plans import write_plan


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


LEFT = """
import sys
from torch import distributed
from shardwise.app.cli import main
code = main(["train", "p.yaml", "--steps", "1"])
sys.exit(code or 10 * distributed.is_initialized())
"""


def test_a_launched_process_has_left_its_group_when_it_ends(tmp_path: Path) -> None:
    """A process that exits while gloo threads run may be aborted at exit, which a launcher sees as a
    failure."""
    write_plan(str(tmp_path / "p.yaml"), make_plan("dp=1"))
    port = free_port()
    place = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    ran = subprocess.run(
        [sys.executable, "-c", LEFT], cwd=tmp_path, env={**os.environ, **place, TORCHRUN_VARIABLE: "once"},
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


def test_torchrun_resumes_under_the_plan_of_a_graph(tmp_path: Path) -> None:
    """From a checkpoint of a run without torchrun, appending to its log."""
    graph, log = mlp(8, 6, 12, 5), tmp_path / "steps.jsonl"
    plan = str(tmp_path / "p.yaml")
    write_plan(plan, plan_with(graph, (2,), by_rules(graph, (2,), lambda op: ("split b",))))
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


def test_torchrun_starts_the_program_of_a_target_on_two_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nodes of two devices and of one: three ranks, each with the flags of the file and the words after `--`,
    of which `--log` is an abbreviation of options of torchrun.
    """
    plan, out = str(tmp_path / "p.yaml"), str(tmp_path / "it's $(x)")
    write_plan(plan, small_plan(LLAMA, "dp=3", cluster="1x2xH100-SXM+1x1xH100-SXM", global_batch_size=6))
    assert main(["export", plan, "--to", "megatron-lm", "--out", out]) == 0
    capsys.readouterr()
    launch = ["launch", plan, "--target", "megatron-lm", "--with", "torchrun", "--files", out]
    assert main([*launch, "--head", "localhost", "--port", free_port(), "--", "--log", "$(x) y"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    found = run_nodes(tmp_path, "pretrain_gpt.py", lines, PATH=path)
    flags = shlex.split((Path(out) / "megatron-lm.args").read_text(), comments=True)
    assert found == {
        rank: [local, "3", *flags, "--log", "$(x) y"] for rank, local in enumerate(("0", "1", "0"))
    }
