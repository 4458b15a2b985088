"""`replay`: policies run on a trace, as a card, JSON, a picture and a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from shardwise.cluster import EventTrace, NodeJoined, NodeLost, events_text

SCHEMA = Path(__file__).parents[3] / "docs" / "reference" / "schemas" / "replay.json"
CLUSTER = "4x2xT4"
JOB = ("opt-350m", "--cluster", CLUSTER, "--seq-len", "512", "--global-batch-size", "32")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    events = (
        NodeLost(time_s=1800.0, node="n2"),
        NodeJoined(time_s=5400.0, node="n2"),
        NodeLost(time_s=9000.0, node="n0"),
    )
    path = tmp_path / "trace.jsonl"
    path.write_text(events_text(EventTrace(nodes=4, events=events)))
    return str(path)


@pytest.mark.slow
def test_json_has_every_requested_policy(run: Any, trace: str) -> None:
    ran = run("replay", *JOB, "--events", trace, "--length", "4h", "--json")
    assert ran.code == 0
    document = json.loads(ran.out)
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(document)
    tokens = {one["name"]: one["tokens"] for one in document["policies"]}
    assert list(tokens) == ["static", "robust", "expected", "adaptive", "oracle"]
    assert tokens["static"] < tokens["adaptive"] <= tokens["oracle"]
    assert document["length_s"] == 4 * 3600.0 and document["epochs"] == 4
    some = run("replay", *JOB, "--events", trace, "--length", "4h", "--json", "--policy", "adaptive,static")
    assert [one["name"] for one in json.loads(some.out)["policies"]] == ["static", "adaptive"]
    every = run("replay", *JOB, "--events", trace, "--length", "4h", "--json", "--policy", "adaptive,all")
    assert json.loads(every.out) == document


@pytest.mark.slow
def test_pictures_and_pages_are_written(run: Any, trace: str, tmp_path: Path) -> None:
    for name, start in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.html", b"<!doctype html>")):
        path = tmp_path / name
        ran = run("replay", *JOB, "--events", trace, "--plot", str(path))
        assert ran.code == 0 and "wrote" in ran.err and "adaptive" in ran.out
        assert path.read_bytes().startswith(start)
    page = (tmp_path / "a.html").read_text()
    shown = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert [one["name"] for one in shown["curves"]] == [row[0] for row in shown["policies"]]
    assert "oracle" in {row[0] for row in shown["policies"]}
    assert "move" in {row[1] for row in shown["decisions"]}
    # Each curve has its final value as a label, as curves may hide each other; marks show the kind of change.
    chart = (tmp_path / "a.svg").read_text()
    assert chart.count("goodput") == 5 and "move (adaptive)" in chart
    assert page.count("<script") == 2 and "src=" not in page and "default-src 'none'" in page


@pytest.mark.slow
def test_a_replay_starts_with_the_plan_of_the_file(run: Any, trace: str, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.yaml")
    run("plan", "--target=any", *JOB, "--fix", "tp=2", "--top", "0", "--save", path)
    argv = ("replay", path, "--cluster", CLUSTER, "--events", trace, "--json", "--policy", "static")
    (static,) = json.loads(run(*argv).out)["policies"]
    assert static["decisions"][0]["strategy"]["tp"] == 2
    # The adaptive policy begins with it too, and makes no change that costs more time than the trace has.
    dear = json.loads(run(*argv[:-1], "adaptive", "--restart", "1d").out)["policies"][0]["decisions"][0]
    assert (dear["decision"], dear["strategy"]["tp"], dear["transition_s"]) == ("keep", 2, 0.0)
    model = json.loads(run("replay", *JOB, "--events", trace, "--json", "--policy", "adaptive").out)
    assert model["policies"][0]["decisions"][0]["strategy"]["tp"] != 2
    for option, value in (
        ("--seq-len", "1024"), ("--global-batch-size", "64"), ("--dtype", "fp16"), ("--optimizer", "sgd"),
        ("--memory-margin", "0.5"),
    ):  # fmt: skip
        ran = run(*argv, option, value)
        assert ran.code == 2 and f"{option}: applies to models; a plan file has its own" in ran.err
    assert [one["decision"] for one in static["decisions"]] == ["keep", "wait", "keep", "wait"][
        : len(static["decisions"])
    ]


@pytest.mark.slow
def test_nodes_that_a_dead_link_cuts_off_are_named(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    dead = '{"time_s": 60.0, "kind": "link", "link": "n1>s1g0", "bytes_per_s": 0.0}\n'
    path.write_text('{"schema": "shardwise.events", "version": 1, "nodes": 4}\n' + dead)
    for command in (("replay", *JOB, "--length", "1h"), ("plan", *JOB)):
        ran = run(*command, "--events", str(path), "--json")
        assert ran.code == 0 and ran.err == "shardwise: unreachable for some time: n1\n"


def test_bad_input_is_a_one_line_error_and_writes_nothing(run: Any, trace: str, tmp_path: Path) -> None:
    out = tmp_path / "out.png"
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"schema": "shardwise.events", "version": 1, "nodes": 4}\n')
    for argv in (
        ("replay", *JOB, "--events", str(tmp_path / "none.jsonl")),
        ("replay", *JOB, "--events", str(empty)),
        ("replay", *JOB, "--events", trace, "--policy", "lucky"),
        ("replay", *JOB, "--events", trace, "--length", "-1h"),
        ("replay", "opt-350m", "--cluster", CLUSTER, "--events", trace),
        ("replay", *JOB[:2], "3x2xT4", *JOB[3:], "--events", trace),
    ):
        ran = run(*argv, "--plot", str(out))
        assert ran.code == 2 and ran.out == "" and len(ran.err.splitlines()) == 1, argv
        assert not out.exists()
    for plot in ("a.gif", str(tmp_path / "none" / "a.png"), trace):
        ran = run("replay", *JOB, "--events", trace, "--plot", plot)
        assert ran.code == 2 and ran.out == "" and "--plot" in ran.err, plot


@pytest.mark.slow
def test_every_policy_loses_the_steps_of_a_lost_node(run: Any, tmp_path: Path) -> None:
    """On one node all policies are equal: they wait while it is gone and restart when it is back. They redo
    half of a checkpoint interval; nothing after a notice.
    """
    head = '{"schema": "shardwise.events", "version": 1, "nodes": 1}\n'
    notice = '{"time_s": 3500, "kind": "notice", "node": "n0", "lost_at_s": 3600}\n'
    events = '{"time_s": 3600, "kind": "lost", "node": "n0"}\n'
    events += '{"time_s": 7200, "kind": "joined", "node": "n0"}\n'
    argv = ("replay", JOB[0], "--cluster", "1x2xT4", *JOB[3:], "--length", "3h", "--json")
    tokens = []
    for number, text in enumerate((head + events, head + notice + events)):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(text)
        costs = ("--restart", "0s", "--regroup", "0s", "--checkpoint-interval", "10min")
        found = json.loads(run(*argv, "--events", str(path), *costs).out)["policies"]
        by_name = {one["name"]: one["tokens"] for one in found}
        assert by_name["static"] == pytest.approx(by_name["adaptive"], rel=1e-12)
        tokens.append(by_name["adaptive"])
    assert tokens[0] < tokens[1]


@pytest.mark.slow
def test_a_loss_after_the_end_costs_nothing(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    head = '{"schema": "shardwise.events", "version": 1, "nodes": 4}\n'
    path.write_text(head + '{"time_s": 3600, "kind": "lost", "node": "n1"}\n')
    found = json.loads(run("replay", *JOB, "--events", str(path), "--json").out)
    assert [one["goodput"] for one in found["policies"]] == [1.0] * 5


@pytest.mark.slow
def test_a_source_with_signs_of_formulas_is_drawn_as_it_is(run: Any, trace: str, tmp_path: Path) -> None:
    text = Path(trace).read_text()
    odd = tmp_path / "odd.jsonl"
    odd.write_text(text.replace('"nodes"', '"source": "$\\\\q{$", "nodes"', 1))
    ran = run("replay", *JOB, "--events", str(odd), "--plot", str(tmp_path / "a.png"))
    assert ran.code == 0 and (tmp_path / "a.png").exists()


@pytest.mark.slow
def test_a_plan_is_replayed_on_the_cluster_that_it_was_made_for(run: Any, tmp_path: Path) -> None:
    """Seven replicas on eight nodes: when n3 is lost, the idle node takes over."""
    plan = str(tmp_path / "plan.yaml")
    job = ("opt-350m", "--cluster", "8x1xV100-32G", "--seq-len", "1024", "--global-batch-size", "28")
    made = run("plan", *job, "--target", "any", "--fix", "dp=7,tp=1,pp=1,cp=1", "--save", plan)
    assert made.code == 0
    replayed = ("replay", plan, "--events", "lost n3", "--length", "4h", "--policy", "adaptive", "--json")
    whole, part = (json.loads(run(*replayed, *more).out) for more in ((), ("--cluster", "7x1xV100-32G")))
    nodes = [[one["nodes"] for one in found["policies"][0]["decisions"]] for found in (whole, part)]
    assert nodes[0][-1] == 7 and nodes[1][-1] < 7
    assert json.loads(run(*replayed, "--cluster", "8x1xV100-32G").out) == whole
    missing = run("replay", "opt-350m", "--events", "lost n3", "--global-batch-size", "28")
    assert missing.code == 2 and "--cluster: is missing; it is required for a model" in missing.err


def test_a_trace_with_too_many_events(run: Any, trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third event is at 9,000 s: a replay of 9,000 s has the two before it."""
    monkeypatch.setattr("shardwise.app.cli.replaying.MAX_EVENTS", 2)
    ran = run("replay", *JOB, "--target", "any", "--events", trace, "--length", "4h")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == (
        "shardwise: error: --events: has too many events for a whole replay; found 3; allowed: at most 2, as "
        "with --length 9000s; --budget 60s replays as much of the beginning as it can\n"
    )
    assert run("replay", *JOB, "--target", "any", "--events", trace, "--length", "9000s").code == 0


def test_a_replay_within_its_budget(run: Any, trace: str) -> None:
    """No time for more than the first decision: the first epoch lasts until 1,800 s of four hours."""
    argv = ("replay", *JOB, "--target", "any", "--events", trace, "--length", "4h", "--budget", "1ms")
    ran = run(*argv)
    assert ran.code == 0 and "30 min of 4 h, within --budget, in 1 epoch" in ran.out, ran.out
    document = json.loads(run(*argv, "--json").out)
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(document)
    assert (document["length_s"], document["requested_s"], document["epochs"]) == (1800.0, 14400.0, 1)
