"""The child processes of these tests, with Megatron-LM and stand-ins for GPU software on their path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.plans import Plan
from shardwise.targets.megatron_lm import megatron_lm_flags
from shardwise.targets.megatron_lm_read_back import ReaderRequest, reader_request

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = ROOT / ".cache" / "megatron"
SHIMS = Path(__file__).with_name("shims")


def environment() -> dict[str, str]:
    """The environment of a child process that can import Megatron-LM."""
    if not (INSTALLED / "megatron").is_dir():
        raise AssertionError(f"Megatron-LM is not in {INSTALLED}: run these tests by `make test-targets`")
    path = os.pathsep.join(map(str, (SHIMS, INSTALLED, ROOT / "src", ROOT)))
    return {**os.environ, "PYTHONPATH": path}


def request_of(plan: Plan) -> ReaderRequest:
    """The flags of a plan, for its number of devices."""
    return reader_request(plan, megatron_lm_flags(plan))


def built_by_megatron_lm(requests: Sequence[ReaderRequest]) -> list[Mapping[str, Any]]:
    """The answers of the model builder to all requests, in one child process."""
    lines = [json.dumps({"flags": request.flags, "world_size": request.world_size}) for request in requests]
    done = subprocess.run(
        [sys.executable, "-m", "tests.targets.model_builder"],
        input="\n".join(lines) + "\n", capture_output=True, text=True, check=False, env=environment(),
    )  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode or len(answers) != len(lines):
        raise AssertionError(f"{len(answers)} of {len(lines)} answers: {done.stderr[-6000:]}")
    return answers
