"""The command `compare`: its card, document and trace, and its errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from tests.runtime.plans import make_plan
from tests.runtime.uneven_plans import make_uneven
from tests.unit.accuracy.test_compare import PIPELINE, measured_like, measured_unevenly, renamed
from tests.unit.app.conftest import Run

from shardwise.plans import write_plan
from shardwise.sim import COMMUNICATION, Span, read_trace, write_trace

SCHEMA = Path(__file__).parents[3] / "docs" / "reference" / "schemas" / "comparison.json"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan, a trace of it, and a trace with an order violation, in the working folder."""
    monkeypatch.chdir(tmp_path)
    plan = make_plan(PIPELINE)
    write_plan("p.yaml", plan)
    trace = measured_like(plan, slower=2.0)
    write_trace(trace, "m.json")
    write_trace(renamed(trace, 3, {"1B0": "1F1", "1F1": "1B0"}), "swapped.json")


def test_a_trace_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    trace = measured_like(make_plan(PIPELINE))
    path = tmp_path / "m.json"
    write_trace(trace, path)
    assert trace.plan_hash is not None and read_trace(path).plan_hash == trace.plan_hash
    read = sorted(read_trace(path).spans, key=lambda span: (span.rank, span.start_s))
    for found, written in zip(
        read, sorted(trace.spans, key=lambda span: (span.rank, span.start_s)), strict=True
    ):
        assert (found.rank, found.track, found.name) == (written.rank, written.track, written.name)
        assert (found.start_s, found.finish_s) == pytest.approx(
            (written.start_s, written.finish_s), abs=2e-9, rel=0
        )


def test_the_card(run: Run, files: None) -> None:
    ran = run("compare", "p.yaml", "m.json")
    assert (ran.code, ran.err) == (0, "")
    assert "(-50.0%)" in ran.out and "every rank ran its actions as planned" in ran.out
    rows = [line.split() for line in ran.out.splitlines() if line.startswith("stage")]
    assert [row[:3] for row in rows] == [
        ["stage", stage, part] for stage in "01" for part in ("forward", "backward", "waiting", "after")
    ]
    assert {row[-1] for row in rows} <= {"0.50", "-"}


def test_the_card_shows_copies_to_the_host_where_there_are_some(run: Run, files: None) -> None:
    assert "in copies to the host" not in run("compare", "p.yaml", "m.json").out
    plan = make_plan("tp=2,pp=2,micro_batch_size=4,offload=activations")
    write_plan("o.yaml", plan)
    trace = measured_like(plan)
    copied = [Span(rank, COMMUNICATION, "from host", 7.0, 7.25) for rank in range(4)]
    write_trace(replace(trace, spans=(*trace.spans, *copied)), "om.json")
    (line,) = [line for line in run("compare", "o.yaml", "om.json").out.splitlines() if "copies" in line]
    assert line.split("host")[1].split()[2:4] == ["250", "ms"]


def test_the_document_and_the_trace(run: Run, files: None) -> None:
    ran = run("compare", "p.yaml", "m.json", "--trace", "both.json", "--json")
    document = json.loads(ran.out)
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    assert ran.code == 0 and document["error"] == pytest.approx(-0.5)
    assert document["in_order"] and document["trace"] == "both.json"
    events = json.loads(Path("both.json").read_text())["traceEvents"]
    named = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert named[:2] == ["predicted: stage 0", "measured: rank 0"]


def test_a_trace_for_perfetto_alone_is_refused_with_the_option_to_use(run: Run, files: None) -> None:
    write_trace(read_trace("m.json"), "m.pftrace")
    ran = run("compare", "p.yaml", "m.pftrace")
    assert (ran.code, len(ran.err.splitlines())) == (2, 1)
    assert "m.pftrace: is in Perfetto's native format, which is not read; allowed: a JSON trace" in ran.err


def test_a_log_of_steps_is_refused_by_its_kind(run: Run, files: None) -> None:
    line = '{"step": 1, "loss": 4.0, "step_time_s": 0.5}\n'
    for lines in (1, 3):
        Path("steps.jsonl").write_text(line * lines)
        ran = run("compare", "p.yaml", "steps.jsonl")
        assert (ran.code, len(ran.err.splitlines())) == (2, 1)
        assert "steps.jsonl: is a step log, not a trace; allowed: a JSON trace" in ran.err


def test_an_uneven_plan_is_compared_pipeline_by_pipeline(run: Run, files: None) -> None:
    plan = make_uneven("5 tp2l1 l3 + 3 l4")
    write_plan("u.yaml", plan)
    write_trace(measured_unevenly(plan, slower=2.0), "um.json")
    ran = run("compare", "u.yaml", "um.json")
    assert (ran.code, ran.err) == (0, "")
    assert (
        "2 data-parallel pipelines" in ran.out and "(-50.0%)" in ran.out and "pipeline 0, stage 1" in ran.out
    )
    document = json.loads(run("compare", "u.yaml", "um.json", "--json").out)
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    assert [(one["pipeline"], one["stage"]) for one in document["stages"]] == [(0, 0), (0, 1), (1, 0)]
    assert document["predicted_collectives_s"] is None


def test_the_trace_of_another_plan_is_refused_by_its_hash(run: Run, files: None) -> None:
    """Stages, ranks and actions equal those of the plan."""
    write_plan("dp.yaml", make_plan("dp=2,pp=2,micro_batch_size=2"))
    ran = run("compare", "dp.yaml", "m.json")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("shardwise: error: m.json: plan_hash: is a trace of another plan;")
    assert ran.err.count("sha256:") == 2 and ran.err.count("\n") == 1


def test_a_trace_that_names_no_plan_is_compared_with_a_note(run: Run, files: None) -> None:
    write_trace(replace(measured_like(make_plan(PIPELINE)), plan_hash=None), "old.json")
    ran = run("compare", "p.yaml", "old.json")
    assert ran.code == 0 and "every rank ran its actions as planned" in ran.out
    assert ran.err == "old.json does not name its plan; ranks and actions match this plan\n"
    Path("foreign.json").write_text(
        json.dumps({**json.loads(Path("old.json").read_text()), "otherData": {"version": "2"}})
    )
    assert "does not name its plan" in run("compare", "p.yaml", "foreign.json").err


def test_a_violated_order_is_exit_code_4(run: Run, files: None) -> None:
    ran = run("compare", "p.yaml", "swapped.json", "--json")
    assert ran.code == 4
    assert not json.loads(ran.out)["in_order"]
    assert ran.err == ("shardwise: error: swapped.json: rank 3 ran 1F1 as action 2, where the plan has 1B0\n")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "traceEvents"),
        ('{"traceEvents": []}', "traceEvents"),
        ('{"traceEvents": [{"ph": "M", "pid": 1}]}', "has no spans"),
        ('{"traceEvents": [{"ph": "X", "pid": 1, "cat": "compute", "name": "0F0", "ts": -1, "dur": 1}]}',
         "ts"),
        ('{"traceEvents": [{"ph": "X", "pid": 1, "cat": "compute", "name": "0F0", "ts": 1}]}', "dur"),
        ('{"traceEvents": [{"ph": "X", "pid": 1, "cat": "compute", "name": "0F0", "ts": 1, "dur": 1}]}',
         "of another plan"),
        ("[1, 2", "json"),
    ],
)  # fmt: skip
def test_a_file_without_a_trace_of_the_plan_is_refused_in_one_line(
    run: Run, files: None, content: str, words: str
) -> None:
    Path("x.json").write_text(content)
    ran = run("compare", "p.yaml", "x.json")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1 and words in ran.err and "x.json" in ran.err


def test_inputs_are_not_written_over(run: Run, files: None) -> None:
    before = Path("m.json").read_bytes()
    ran = run("compare", "p.yaml", "m.json", "--trace", "m.json")
    assert ran.code == 2 and "--trace" in ran.err
    assert Path("m.json").read_bytes() == before
