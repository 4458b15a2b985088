"""Parts of the step on cards, in tables and in JSON answers of plans of every kind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.uneven_plans import make_uneven
from tests.unit.app.conftest import Run

from shardwise.app.cli import overlap
from shardwise.app.cli.output import Line
from shardwise.plans import MECHANISMS, CommunicationTime, StepParts

QUESTION = ("gpt2", "--cluster", "1x4xA100-80G", "--seq-len", "1024", "--global-batch-size", "8")
PIPELINE = "pp=2,dp=2,zero_stage=1,micro_batch_size=1"

NONE = CommunicationTime(total_s=0.0, hidden_s=0.0)

PARTS = StepParts(
    pipeline=0,
    stage=1,
    rank=12,
    computation_s=2.0,
    slowdown_s=0.125,
    bubble_s=0.25,
    host_s=0.0625,
    communication={
        **dict.fromkeys(MECHANISMS, NONE),
        "tensor": CommunicationTime(total_s=0.5, hidden_s=0.0),
        "gradient_reduction": CommunicationTime(total_s=1.0, hidden_s=0.75),
        "pipeline": CommunicationTime(total_s=0.001, hidden_s=0.001),
    },
)


def text_of(lines: Any) -> list[str]:
    def plain(line: Line) -> str:
        return "".join(text for text, _ in line).rstrip()

    return [plain(line) for line in lines]


def test_the_card_by_hand() -> None:
    """2 + 1.501 - 0.751 + 0.3125 = 3.0625 s; messages of 1 ms are less than a thousandth of it."""
    assert PARTS.step_time_s == pytest.approx(3.0625)
    assert text_of(overlap.parts_lines(PARTS)) == [
        "",
        " rank 12       computation + communication - overlap + idle",
        "               2.000 s     + 1.501 s       - 751 ms  + 312.5 ms",
        " communication gradient reduction 1.000 s (750 ms hidden) · tensor 500 ms",
    ]
    assert text_of(overlap.parts_lines(None)) == []


def test_the_table_by_hand() -> None:
    rows = {line[1:27].strip(): line[27:].split() for line in text_of(overlap.parts_table(PARTS))}
    assert rows["gradient reduction"] == ["1.000", "s", "750", "ms", "250", "ms"]
    assert rows["pipeline messages"] == ["1", "ms", "1", "ms", "0", "ms"]
    assert rows["communication"] == ["1.501", "s", "751", "ms", "750", "ms"]
    assert rows["computation"][:4] == ["2.000", "s", "125", "ms"]
    assert rows["waits for other ranks"] == ["250", "ms"] and rows["waits for the host"] == ["62.5", "ms"]
    assert rows["step time"][:2] == ["3.062", "s"]
    assert "context" not in rows


def parts_in(document: dict[str, Any]) -> dict[str, Any]:
    """The parts of a result, whose combination is its step time."""
    parts: dict[str, Any] = document["step_parts"]
    combined_s = parts["computation_s"] + parts["communication_s"] - parts["overlap_s"] + parts["idle_s"]
    assert combined_s == pytest.approx(document["step_time_s"], rel=1e-9)
    assert tuple(parts["communication"]) == MECHANISMS
    for name in ("total_s", "hidden_s"):
        whole_s = sum(one[name] for one in parts["communication"].values())
        assert whole_s == pytest.approx(parts["communication_s" if name == "total_s" else "overlap_s"])
    return parts


def test_answers_about_a_strategy(run: Run, tmp_path: Path) -> None:
    path, other = str(tmp_path / "plan.yaml"), str(tmp_path / "other.yaml")
    words = ("evaluate", *QUESTION, "--strategy")
    ran = run(*words, PIPELINE, "--save", path)
    assert ran.code == 0 and "computation + communication - overlap" in ran.out
    parts = parts_in(json.loads(run(*words, PIPELINE, "--json").out)["result"])
    assert parts["communication"]["pipeline"]["total_s"] > 0.0 < parts["bubble_s"]
    assert run(*words, "dp=4", "--save", other).code == 0
    both = json.loads(run("compare", path, other, "--json").out)
    assert parts_in(both["best"]) == parts
    assert parts_in(both["other"])["communication"]["pipeline"]["total_s"] == 0.0
    assert " critical rank " in run("compare", path, other).out


def test_older_files_have_them_too(run: Run) -> None:
    """A plan file of version 1 is estimated again."""
    recorded = Path(__file__).parents[2] / "recorded" / "plans"
    found = [path for path in sorted(recorded.iterdir()) if path.suffix in (".yaml", ".json")]
    assert found
    answered = 0
    for path in found[:6]:
        ran = run("compare", str(path), str(path), "--json")
        assert ran.code == 0, path
        answered += json.loads(ran.out)["best"]["step_parts"] is not None
    assert answered


def test_a_plan_that_cannot_be_estimated_has_none() -> None:
    plan = make_uneven("8 l2 l2")
    assert overlap.step_parts_or_none(plan) is not None
    other = replace(plan, best=replace(plan.best, layout=make_uneven("8 l2 l2 l2").best.layout))
    assert overlap.step_parts_or_none(other) is None
