"""The child processes of these tests, with TorchTitan and stand-ins for GPU software on their path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.plans import Plan
from shardwise.targets.torchtitan import torchtitan_files
from shardwise.targets.torchtitan_read_back import TITAN_READER, titan_request

ROOT = Path(__file__).resolve().parents[2]
TITAN_INSTALLED = ROOT / ".cache" / "torchtitan"
TITAN_SHIMS = Path(__file__).with_name("shims") / "torchtitan"


def titan_environment() -> dict[str, str]:
    """The environment of a child process that can import TorchTitan."""
    if not (TITAN_INSTALLED / "torchtitan").is_dir():
        raise AssertionError(
            f"TorchTitan is not in {TITAN_INSTALLED}: run these tests by `make test-targets`"
        )
    path = os.pathsep.join(map(str, (TITAN_SHIMS, TITAN_INSTALLED, ROOT / "src")))
    return {**os.environ, "PYTHONPATH": path}


def read_by_torchtitan(
    plans: Sequence[Plan], files: Sequence[Mapping[str, str]] | None = None
) -> list[dict[str, Any]]:
    """TorchTitan's answers to the files of all plans (by default those that are exported), from one child."""
    texts = [torchtitan_files(plan) for plan in plans] if files is None else files
    requests = [titan_request(plan, own) for plan, own in zip(plans, texts, strict=True)]
    return TITAN_READER.answers(requests, environment=titan_environment())


def logits_of_torchtitan(
    plans: Sequence[Plan], files: Sequence[Mapping[str, str]]
) -> list[Mapping[str, Any]]:
    """The answers of `titan_logits` for the models of all plans, from one child."""
    lines = [
        json.dumps({**titan_request(plan, own), "model": dict(plan.model.config)})
        for plan, own in zip(plans, files, strict=True)
    ]
    path = titan_environment()
    done = subprocess.run(
        [sys.executable, "-m", "tests.targets.titan_logits"],
        input="\n".join(lines) + "\n", capture_output=True, text=True, check=False,
        env={**path, "PYTHONPATH": os.pathsep.join((path["PYTHONPATH"], str(ROOT)))},
    )  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode or len(answers) != len(lines):
        raise AssertionError(f"{len(answers)} of {len(lines)} answers: {done.stderr[-6000:]}")
    return answers
