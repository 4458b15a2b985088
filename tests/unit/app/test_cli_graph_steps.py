"""`simulate` and `compare` with the plan of an operator graph: cards, documents, traces, errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from tests.unit.accuracy.test_compare_graph import measured_like, staged_plans, whole_plans
from tests.unit.app.conftest import Run

from shardwise.accuracy import PARTS
from shardwise.app.cli.comparing import PART_LABELS
from shardwise.plans import plan_hash, read_plan, write_plan
from shardwise.sim import BLOCKS, read_trace, write_trace

DOCS = Path(__file__).parents[3] / "docs"


def validated(text: str, name: str) -> dict[str, object]:
    document: dict[str, object] = json.loads(text)
    jsonschema.validate(document, json.loads((DOCS / "reference" / "schemas" / f"{name}.json").read_text()))
    return document


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of a whole graph and of one with stages, with traces that take twice the predicted time."""
    monkeypatch.chdir(tmp_path)
    for name, plan in (
        ("whole", whole_plans()[0]),
        ("other", whole_plans()[1]),
        ("staged", staged_plans()[0]),
    ):
        write_plan(f"{name}.yaml", plan)
        read = read_plan(f"{name}.yaml")
        write_trace(measured_like(read, slower=2e6), f"{name}.json")  # of seconds: files are in nanoseconds
    trace = read_trace("staged.json")
    names = {"2B0": "2F1", "2F1": "2B0"}
    swapped = [
        replace(one, name=names.get(one.name, one.name)) if one.rank == 5 else one for one in trace.spans
    ]
    write_trace(replace(trace, spans=tuple(swapped)), "swapped.json")


@pytest.mark.slow
def test_simulate_draws_a_step_and_writes_its_trace(run: Run, files: None) -> None:
    for name, stages in (("whole", 1), ("staged", 3)):
        plan = read_plan(f"{name}.yaml")
        ran = run("simulate", f"{name}.yaml", "--trace", "t.json")
        assert ran.code == 0 and "graph:chain on" in ran.out and "slowest operators" in ran.out
        assert len([line for line in ran.out.splitlines() if line.startswith("rank ")]) == stages
        trace = read_trace("t.json")
        firsts = [stage.rank_numbers[0] for stage in plan.best.layout.stages]
        assert {one.rank for one in trace.spans} == set(firsts) and len(firsts) == stages
        assert any(one.track == BLOCKS and one.name == "F0 first" for one in trace.spans)
        document = validated(run("simulate", f"{name}.yaml", "--json").out, "timeline")
        assert document["plan_hash"] == plan_hash(plan)
        assert document["step_time_s"] == plan.step_time_s and document["microbatches"] == plan.microbatches


def test_the_card_of_a_whole_graph(run: Run, files: None) -> None:
    ran = run("compare", "whole.yaml", "whole.json")
    assert (ran.code, ran.err) == (0, "")
    assert "graph:chain on" in ran.out and "every rank ran its actions as planned" in ran.out
    assert "forward compute" in ran.out and "largest differences" in ran.out
    assert "stage 0" in ran.out and "by part" in ran.out


def test_the_document_has_parts_and_operators(run: Run, files: None) -> None:
    ran = run("compare", "staged.yaml", "staged.json", "--json", "--trace", "both.json")
    document = validated(ran.out, "comparison")
    assert ran.code == 0 and document["in_order"]
    assert document["error"] == pytest.approx(1 / 2e6 - 1)
    parts = document["parts"]
    assert isinstance(parts, list) and [each["stage"] for each in parts] == [0, 1, 2]
    for each in parts:
        assert sum(each["predicted"].values()) == pytest.approx(document["predicted_s"])
        assert sum(each["measured"].values()) == pytest.approx(document["measured_s"])
    operators = document["operators"]
    assert isinstance(operators, list)
    differences = [abs(each["predicted_s"] - each["measured_s"]) for each in operators]
    assert differences == sorted(differences, reverse=True) and len(differences) > 8
    named = [
        event["args"]["name"] for event in json.loads(Path("both.json").read_text())["traceEvents"]
        if event["name"] == "process_name"
    ]  # fmt: skip
    assert named[:2] == ["predicted: stage 0", "measured: rank 0"]


def test_parts_are_those_of_the_docs_and_of_the_schema() -> None:
    """In their order."""
    section = (DOCS / "concepts" / "graph-plans.md").read_text().partition("## Predicted and measured")[2]
    places = [section.index(f"`{PART_LABELS[part]}`") for part in PARTS]
    assert places == sorted(places)
    schema = json.loads((DOCS / "reference" / "schemas" / "comparison.json").read_text())
    assert schema["$defs"]["parts"]["required"] == list(PARTS) == list(PART_LABELS)


def test_a_violated_order_is_exit_code_4(run: Run, files: None) -> None:
    ran = run("compare", "staged.yaml", "swapped.json")
    assert ran.code == 4
    assert ran.err == "shardwise: error: swapped.json: rank 5 ran 2F1 as action 2, where the plan has 2B0\n"


def test_the_trace_of_another_plan_is_refused_by_its_hash(run: Run, files: None) -> None:
    """Ranks and actions equal those of the plan."""
    ran = run("compare", "whole.yaml", "other.json")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("shardwise: error: other.json: plan_hash: is a trace of another plan;")
    assert ran.err.count("\n") == 1


def test_a_plan_of_another_version_is_refused_by_its_step_time(run: Run, files: None) -> None:
    plan = read_plan("whole.yaml")
    slower = {name: 2.0 * seconds for name, seconds in plan.breakdown.items()}
    best = replace(plan.best, step_time_s=2.0 * plan.step_time_s, breakdown=slower)
    write_plan("old.yaml", replace(plan, best=best))
    for ran in (run("simulate", "old.yaml"), run("compare", "old.yaml", "whole.json")):
        assert (ran.code, ran.out) == (2, "") and ran.err.count("\n") == 1
        assert "old.yaml: best.step_time_s: is not what this version of shardwise predicts" in ran.err


def test_the_plan_is_not_written_over(run: Run, files: None) -> None:
    before = Path("whole.yaml").read_bytes()
    for words in (("simulate", "whole.yaml"), ("compare", "whole.yaml", "whole.json")):
        ran = run(*words, "--trace", "whole.yaml")
        assert ran.code == 2 and "--trace" in ran.err
    assert Path("whole.yaml").read_bytes() == before
