"""`check` accepts every plan that `plan` and `frontier` save.

The environment variable PLANS=1000 sets the number of plans, in one process (docs/contributing/testing.md).
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from tests.property.saved_plans import KINDS

from shardwise.app.cli.main import main
from shardwise.plans import read_plan, write_plan
from shardwise.questions import checked_plan

PLANS = int(os.environ.get("PLANS", "15"))
"""Least number of plans."""

PLAN_KINDS = ("uniform", "uneven", "graph")
"""Kinds of plan files; each is at least a fifteenth of the plans."""

POINTS = 2
"""Points of a frontier that are checked, from the first on; all are checked alike."""

ANSWERED, INFEASIBLE = 0, 3


@pytest.mark.slow
def test_every_saved_plan_is_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved: Counter[str] = Counter()
    seed = 0
    while sum(saved.values()) < PLANS or min(saved[kind] for kind in PLAN_KINDS) < PLANS // 15:
        kind = list(KINDS)[seed % len(KINDS)]
        folder = tmp_path / str(seed)
        folder.mkdir()
        command = KINDS[kind](random.Random(seed), folder)
        target = folder / ("points" if command[0] == "frontier" else "plan.yaml")
        stderr = StringIO()
        with redirect_stdout(StringIO()), redirect_stderr(stderr):
            code = main([*command, "--save", str(target)])
        assert code in (ANSWERED, INFEASIBLE), (command, stderr.getvalue())
        for path in sorted(target.glob("*.yaml"))[:POINTS] if target.is_dir() else [target]:
            if path.exists():
                assert checked_plan(str(path), 60.0).failed == (), command
                saved[read_plan(path).kind] += 1
        seed += 1
    with capsys.disabled():
        if "PLANS" in os.environ:
            sys.stdout.write(f"\n{sum(saved.values())} plans of {seed} questions accepted: {dict(saved)}\n")


@pytest.mark.slow
def test_a_plan_that_names_another_rank_is_refused(tmp_path: Path) -> None:
    """The plan names the last of all ranks, which are equally full, as the tightest."""
    config = {"layers": 14, "hidden": 512, "ffn": 2048, "heads": 8, "vocab": 50257, "seq_len": 2048}
    (tmp_path / "model.json").write_text(json.dumps({**config, "tied": True}))
    command = ["plan", str(tmp_path / "model.json"), "--cluster", "4x1xV100-32G+1x2xV100-32G"]
    command += ["--inter-node", "400Gb/s", "--seq-len", "1024", "--target", "any"]
    saved = str(tmp_path / "plan.yaml")
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        assert main([*command, "--global-batch-size", "32", "--save", saved]) == ANSWERED
    assert not checked_plan(saved, 60.0).failed
    plan = read_plan(saved)
    write_plan(saved, replace(plan, best=replace(plan.best, tightest_rank=5)))
    wrong = checked_plan(saved, 60.0).failed
    found = [(check.name, float(check.found), float(check.expected)) for check in wrong]
    assert found == [("tightest rank", 5, 0)]
