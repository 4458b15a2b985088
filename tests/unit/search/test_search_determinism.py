"""The same question has the same answer, byte for byte except for the measured times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from tests.property.search_instances import instance

from shardwise.errors import Infeasible
from shardwise.plans import Answer
from shardwise.search import Question, plan

COMMAND = (
    "plan", "mixtral-8x7b", "--cluster", "2x4xH200", "--seq-len", "2048", "--global-batch-size", "24",
    "--space", "core", "--json",
)  # fmt: skip


def timeless(question: Question) -> Answer | tuple[str, dict[str, int], tuple[str, ...]]:
    """The answer or the refusal, without its search times."""
    try:
        answer = plan(question)
    except Infeasible as error:
        return error.message, error.reasons, error.relaxations
    return replace(answer, certificate=replace(answer.certificate, search_s=0.0, search_cpu_s=0.0))


@pytest.mark.parametrize("seed", range(2, 26, 2))
def test_two_runs_are_equal(seed: int) -> None:
    question = instance(seed).question
    assert timeless(question) == timeless(question)


@pytest.mark.parametrize("seed", [3, 9])
def test_two_runs_of_the_whole_space_are_equal(seed: int) -> None:
    question = instance(seed).question
    assert timeless(question) == timeless(question)


def document(hash_seed: str) -> str:
    """The JSON of a plan from a separate process, without its search times."""
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", *COMMAND],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    certificate = found["certificate"]
    for one in (certificate, *certificate.get("other_options", ())):
        for name in ("search_s", "search_cpu_s"):
            del one[name]
    return json.dumps(found)


@pytest.mark.slow
def test_the_json_does_not_depend_on_the_hash_seed() -> None:
    first, second, third = (document(seed) for seed in ("0", "1", "4711"))
    assert first == second == third
