"""`replay`: policies through a trace, as a card, JSON, a picture and a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from shardwise.cluster import EventTrace, NodeJoined, NodeLost, events_text

SCHEMA = Path(__file__).parents[3] / "docs" / "schemas" / "replay.json"
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


def test_json_has_every_policy_asked_for(run: Any, trace: str) -> None:
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


def test_pictures_and_pages_are_written(run: Any, trace: str, tmp_path: Path) -> None:
    for name, start in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.html", b"<!doctype html>")):
        path = tmp_path / name
        ran = run("replay", *JOB, "--events", trace, "--plot", str(path))
        assert ran.code == 0 and "wrote" in ran.err and "adaptive" in ran.out
        assert path.read_bytes().startswith(start)
    page = (tmp_path / "a.html").read_text()
    assert "<td>oracle</td>" in page and "<td>move</td>" in page
    # Beside every curve what it reaches, as curves may hide each other; marks by the kind of change.
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn.count("goodput") == 5 and "move (adaptive)" in drawn
    assert "<script" not in page and "src=" not in page and "default-src 'none'" in page


def test_a_plan_file_is_what_runs_at_first(run: Any, trace: str, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.yaml")
    run("plan", *JOB, "--fix", "tp=2", "--top", "0", "--save", path)
    argv = ("replay", path, "--cluster", CLUSTER, "--events", trace, "--json", "--policy", "static")
    (static,) = json.loads(run(*argv).out)["policies"]
    assert static["decisions"][0]["strategy"]["tp"] == 2
    for option, value in (("--seq-len", "1024"), ("--global-batch-size", "64"), ("--dtype", "fp16")):
        ran = run(*argv, option, value)
        assert ran.code == 2 and f"{option}: is for a model: a plan file has its own" in ran.err
    assert [one["decision"] for one in static["decisions"]] == ["keep", "wait", "keep", "wait"][
        : len(static["decisions"])
    ]


def test_nodes_behind_a_dead_link_are_named(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    dead = '{"time_s": 60.0, "kind": "link", "link": "n1>s1g0", "bytes_per_s": 0.0}\n'
    path.write_text('{"schema": "shardwise.events", "version": 1, "nodes": 4}\n' + dead)
    for command in (("replay", *JOB, "--length", "1h"), ("plan", *JOB)):
        ran = run(*command, "--events", str(path), "--json")
        assert ran.code == 0 and ran.err == "shardwise: unreachable for some time: n1\n"


def test_bad_input_is_one_line_and_writes_nothing(run: Any, trace: str, tmp_path: Path) -> None:
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
    assert run("replay", *JOB, "--events", trace, "--plot", "a.gif").code == 2
