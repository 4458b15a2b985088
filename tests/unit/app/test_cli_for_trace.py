"""`plan --events`: a plan for a trace, as a card, as JSON and as a file for other commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from shardwise.cluster import EventTrace, NodeJoined, NodeLost, events_text
from shardwise.errors import ConfigError
from shardwise.inputs import read_mapping
from shardwise.plans import read_plan
from shardwise.plans.documents import document_hash

SCHEMAS = Path(__file__).parents[3] / "docs" / "reference" / "schemas"
JOB = ("opt-350m", "--cluster", "3x2xT4", "--seq-len", "512", "--global-batch-size", "24")


def checked(document: Any, name: str) -> Any:
    jsonschema.Draft202012Validator(json.loads((SCHEMAS / f"{name}.json").read_text())).validate(document)
    return document


@pytest.fixture
def trace(tmp_path: Path) -> str:
    events = (NodeLost(time_s=100.0, node="n1"), NodeJoined(time_s=2200.0, node="n1"))
    path = tmp_path / "trace.jsonl"
    path.write_text(events_text(EventTrace(nodes=3, events=events)))
    return str(path)


@pytest.mark.slow
def test_the_answer_follows_the_policy_and_its_plan_is_replayed(run: Any, trace: str, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.yaml")
    nodes = {}
    for policy in ("now", "worst"):
        ran = run("plan", *JOB, "--events", trace, "--policy", policy, "--save", path, "--json")
        document = checked(json.loads(ran.out), "plan-answer")
        found = document["for_trace"]
        assert ran.code == 0 and found["policy"] == policy
        (own,) = [one for one in found["policies"] if one["name"] == policy]
        assert own["strategy"] == document["best"]["strategy"] and own["nodes"] == found["nodes"]
        nodes[policy] = found["nodes"]
        saved = checked(read_mapping(path), "plan")
        assert saved["for_trace"]["nodes"] == found["nodes"]
        assert document["plan_hash"] == saved["hash"] == document_hash(saved)
        assert run("check", path).code == 0
    assert sorted(nodes["now"]) == ["n0", "n1", "n2"] and sorted(nodes["worst"]) == ["n0", "n2"]
    # The plan is on the nodes that it names: without n1 it continues unchanged.
    decision = json.loads(run("replan", path, *JOB[1:3], "--events", "lost n1", "--json").out)
    assert decision["decision"] == "keep" and decision["plan"]["nodes"] == nodes["worst"]


@pytest.mark.slow
def test_the_card_has_all_policies(run: Any, trace: str) -> None:
    ran = run("plan", *JOB, "--events", trace)
    assert ran.code == 0 and ran.err == ""
    for text in (
        "now",
        "expected",
        "worst",
        "cannot run",
        "1 node of 3 left idle",
        "2 distinct situations",
    ):
        assert text in ran.out
    words = run("plan", *JOB, "--events", "lost n1", "--policy", "worst")
    assert words.code == 0 and "1 distinct situation" in words.out


def test_contradicting_options_are_a_one_line_error_and_write_nothing(
    run: Any, trace: str, tmp_path: Path
) -> None:
    out = tmp_path / "out.yaml"
    other = tmp_path / "other.jsonl"
    other.write_text(events_text(EventTrace(nodes=5, events=())))
    for argv in (
        ("--events", trace, "--policy", "lucky"),
        ("--policy", "now"),
        ("--events", str(tmp_path / "none.jsonl")),
        ("--events", str(other)),
        ("--events", "lost n7"),
        ("--events", ""),
        ("--events", trace, "--objective", "memory"),
        ("--events", trace, "--frontier"),
        ("--events", trace, "--exhaustive"),
        ("--events", trace, "--budget", "1s"),
        ("--events", trace, "--top", "9"),
        ("--events", trace, "--use-all"),
        ("--events", trace, "--restart", "1h"),
        ("--events", trace, "--jitter", "0.1"),
        ("--events", trace, "--save", trace),
    ):
        ran = run("plan", *JOB, "--save", str(out), *argv)
        assert ran.code == 2 and ran.out == "" and len(ran.err.splitlines()) == 1, argv
        assert not out.exists()
    gone = run("plan", *JOB, "--events", "lost n0; lost n1; lost n2", "--save", str(out))
    assert gone.code == 3 and "nothing fits" in gone.err and not out.exists()


@pytest.mark.slow
def test_parts_of_a_plan_for_a_trace_that_our_runtime_does_not_run_are_reported(run: Any) -> None:
    job = ("gpt2", "--cluster", "2x2xcpu", "--seq-len", "64", "--global-batch-size", "8", "--dtype", "fp32")
    for fix, expected in (("pp=2,schedule=1f1b", []), ("pp=2,schedule=zb_h1,offload=both", ["offload=both"])):
        command_line = ("plan", *job, "--fix", fix, "--events", "slow n1 0.5", "--json")
        by_itself = run(*command_line)
        assert by_itself.code == (3 if expected else 0)
        assert (
            not expected or "nothing fits at any time of the trace that shardwise train runs" in by_itself.err
        )
        ran = run(*command_line, "--target", "any")
        found = json.loads(ran.out)["not_run"]
        assert [one.partition(" (")[0] for one in found] == expected
        assert ("does not run this plan" in ran.err) == bool(expected)


@pytest.mark.slow
def test_a_plan_file_with_another_trace_record_is_refused(run: Any, trace: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    assert run("plan", *JOB, "--events", trace, "--policy", "worst", "--save", str(path)).code == 0
    for key, value, expected in (
        ("nodes", ["n0", "n0"], "names a node twice"),
        ("nodes", ["n0"], "for_trace.nodes"),
        ("nodes", ["n0", "x"], "is not a list of nodes"),
        ("policy", "lucky", "is not one of the choices"),
        ("gap", 2.0, "is not a number in range"),
        ("gap", None, "does not go with the policy worst"),
        ("policy", "decision", "does not go with the policy decision"),
    ):
        document: Any = read_mapping(str(path))
        document["for_trace"][key] = value
        document["hash"] = document_hash(document)
        other = tmp_path / "other.yaml"
        other.write_text(json.dumps(document))
        with pytest.raises(ConfigError) as caught:
            read_plan(str(other))
        assert expected in str(caught.value)
