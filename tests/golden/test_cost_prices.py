"""The cost model gives the recorded estimates; `python tests/golden/record.py` records new ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.golden.record import GOLDEN, costs_of, problem_of

from shardwise.strategy import CP_KINDS, OFFLOADS, RECOMPUTES, SCHEDULES, parse_fields

QUESTIONS: list[dict[str, Any]] = json.loads(GOLDEN.read_text(encoding="utf-8"))

RTOL, ATOL = 1e-9, 1e-13
"""Relative tolerance, and absolute: a bubble of 0 s may have the rounding error of a step of some seconds."""


def differences(found: Any, expected: Any, path: str = "") -> Iterator[str]:
    """Where two estimates differ by more than a part in a billion, or have different names."""
    if isinstance(expected, dict):
        if found.keys() != expected.keys():
            yield f"{path}: {sorted(found.keys() ^ expected.keys())}"
        for name in expected.keys() & found.keys():
            yield from differences(found[name], expected[name], f"{path}.{name}")
    elif found != pytest.approx(expected, rel=RTOL, abs=ATOL):
        yield f"{path}: {found} instead of {expected}"


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question["name"])
def test_costs_are_those_recorded(question: dict[str, Any]) -> None:
    problem = problem_of(question)
    changed = {
        text: list(differences(costs_of(problem, text), costs)) for text, costs in question["prices"].items()
    }
    assert {text: what for text, what in changed.items() if what} == {}


def test_a_difference_of_1e_8_is_detected() -> None:
    costs = next(iter(QUESTIONS[0]["prices"].values()))
    other = json.loads(json.dumps(costs))
    other["memory"]["parameters"] *= 1.0 + 1e-8
    assert len(list(differences(other, costs))) == 1
    del other["breakdown"]["matmul"]
    assert len(list(differences(other, costs))) == 2


def test_the_recorded_strategies_take_every_choice() -> None:
    listed = [parse_fields(text) for question in QUESTIONS for text in question["prices"]]
    assert len(listed) >= 40
    for name, values in (("schedule", SCHEDULES), ("recompute", RECOMPUTES), ("offload", OFFLOADS)):
        assert {fields[name] for fields in listed} == set(values)
    assert {fields["cp_kind"] for fields in listed} == set(CP_KINDS)
    assert {question["job"]["optimizer"] for question in QUESTIONS} == {"adamw", "adafactor", "sgd", "muon"}
    assert {int(fields["pp"]) == 1 for fields in listed} == {True, False}
    for name in ("tp", "cp", "pp", "dp", "ep", "etp", "vpp", "param_shard", "micro_batch_size"):
        assert max(int(fields[name]) for fields in listed) > 1
