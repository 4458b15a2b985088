"""`events generate` and `events convert`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

from shardwise.cluster import load_events

SCHEMA = Path(__file__).parents[3] / "docs" / "reference" / "schemas" / "events-answer.json"
GENERATE = ("events", "generate", "preemption", "--cluster", "4x8xA100-80G", "--length", "48h", "--seed", "7")


def test_the_same_seed_writes_the_same_trace(run: Any, tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    for file in files:
        ran = run(*GENERATE, "--out", file)
        assert ran.code == 0 and "wrote" in ran.err and "events" in ran.out
    assert Path(files[0]).read_bytes() == Path(files[1]).read_bytes()
    trace, note = load_events(files[0])
    assert trace.nodes == 4 and trace.events and note is None


def test_without_out_the_trace_is_on_stdout(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    run(*GENERATE, "--out", str(file))
    assert run(*GENERATE).out == file.read_text()


def test_json_has_the_counts_of_a_trace(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "spot.csv"
    path.write_text("0,add,a\n5000,remove,a\n4000,add,b\n")
    for argv in (GENERATE, ("events", "convert", str(path))):
        document = json.loads(run(*argv, "--json").out)
        jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(document)
    assert document["events"] == 3 and document["kinds"] == {"joined": 2, "lost": 1}
    assert document["dropped"] == document["told"] != []


def test_bad_input_is_a_one_line_error_and_writes_nothing(run: Any, tmp_path: Path) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text("1,add,a\nx,add,b\n")
    out = tmp_path / "out.jsonl"
    for argv in (
        ("events", "convert", str(bad)),
        ("events", "convert", str(tmp_path / "none.csv")),
        ("events", "convert", str(bad), "--per-node", "0"),
        ("events", "generate", "quakes", "--cluster", "4xT4"),
        ("events", "generate", "bursty", "--cluster", "4xNOPE"),
        ("events", "generate", "bursty", "--cluster", "4xT4", "--length", "-1h"),
        ("events", "generate", "bursty", "--cluster", "4xT4", "--seed", "x"),
    ):
        ran = run(*argv, "--out", str(out))
        assert ran.code == 2 and ran.out == "" and len(ran.err.splitlines()) == 1
        assert not out.exists()
