"""`replan`: a plan and events in, a decision out; errors take one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from shardwise import search
from shardwise.plans import plan_of, read_plan, write_plan

SCHEMA = Path(__file__).parents[3] / "docs" / "reference" / "schemas" / "replan.json"
CLUSTER = "4x2xT4"


@pytest.fixture
def saved(run: Any, tmp_path: Path) -> str:
    """A plan file."""
    path = str(tmp_path / "plan.yaml")
    made = run(
        "plan", "opt-350m", "--cluster", CLUSTER, "--seq-len", "512", "--global-batch-size", "32",
        "--top", "0", "--save", path,
    )  # fmt: skip
    assert made.code == 0
    return path


@pytest.mark.slow
def test_decisions_follow_the_events(run: Any, saved: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"schema": "shardwise.events", "version": 1, "nodes": 4}\n'
        '{"time_s": 1.0, "kind": "lost", "node": "n2"}\n{"time_s": 2.0, "ki'
    )
    for events, decisions, expected in (
        ("slow n1 1", {"keep"}, ""),
        ("lost n1", {"patch", "move"}, ""),
        (str(trace), {"patch", "move"}, "line 3 is incomplete and is dropped"),
    ):
        ran = run("replan", saved, "--cluster", CLUSTER, "--events", events, "--json")
        assert ran.code == 0 and expected in ran.err
        document = json.loads(ran.out)
        jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(document)
        assert document["decision"] in decisions
        card = run("replan", saved, "--cluster", CLUSTER, "--events", events)
        assert card.code == 0 and document["decision"] in card.out


@pytest.mark.slow
def test_a_patch_has_the_given_costs(run: Any, saved: str) -> None:
    argv = ("replan", saved, "--cluster", CLUSTER, "--events", "lost n3", "--json")
    cheap = json.loads(run(*argv, "--regroup", "0s", "--restart", "0s", "--checkpoint-interval", "0s").out)
    dear = json.loads(run(*argv, "--regroup", "1h", "--restart", "1h", "--checkpoint-interval", "2h").out)
    assert cheap["transition"]["seconds"] == pytest.approx(cheap["transition"]["moving_s"])
    lost_s = dear["transition"]["lost_work_s"]
    assert lost_s in (0.0, 3600.0)
    assert dear["transition"]["seconds"] == pytest.approx(3600.0 + dear["transition"]["moving_s"] + lost_s)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["lost n1; joined n1", "joined n1"])
def test_a_node_that_comes_back_fetches_what_it_needs(run: Any, saved: str, words: str) -> None:
    """The plan runs on n1, which left and came back: its state is gone."""
    ran = run("replan", saved, "--cluster", CLUSTER, "--events", words, "--json")
    found = json.loads(ran.out)
    assert found["decision"] != "keep" and found["keep_step_time_s"] is None
    assert found["transition"]["seconds"] > 10.0


@pytest.mark.slow
def test_a_raised_horizon_is_reported(run: Any, saved: str) -> None:
    """Ten restarts of 60 s are 600 s, of 6 s 60 s; a plan that continues unchanged is decided for the
    requested horizon.
    """
    lost = ("replan", saved, "--cluster", CLUSTER, "--events", "lost n1", "--horizon", "2min")
    found = json.loads(run(*lost, "--json").out)
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(found)
    assert (found["horizon_s"], found["used_horizon_s"]) == (120.0, 600.0)
    reason = "2 min requested; 10 min used, since the plan cannot continue and a restart alone takes 1 min"
    assert found["horizon_reason"] == reason
    left_s = 600.0 - found["transition"]["seconds"]
    assert found["steps"] == pytest.approx(max(left_s, 0.0) / found["step_time_s"])
    card = " ".join(run(*lost).out.split())
    assert f"horizon {reason}" in card and "in 10 min" in card
    for argv in ((*lost, "--restart", "6s"), (*lost[:5], "slow n1 0.5", *lost[6:])):
        honoured = json.loads(run(*argv, "--json").out)
        assert (honoured["horizon_s"], honoured["used_horizon_s"]) == (120.0, 120.0)
        assert honoured["horizon_reason"] is None
        card = run(*argv).out
        assert "requested" not in card


@pytest.mark.slow
def test_an_uneven_plan_reports_a_raised_horizon(run: Any, tmp_path: Path) -> None:
    path, cluster = str(tmp_path / "plan.yaml"), "1x2xA100-40G+1x2xV100-16G"
    job = ("opt-350m", "--cluster", cluster, "--seq-len", "2048", "--global-batch-size", "64")
    assert run("plan", "--target=any", *job, "--save", path).code == 0
    lost = ("replan", path, "--cluster", cluster, "--events", "lost n1", "--horizon", "2min", "--json")
    found = json.loads(run(*lost).out)
    assert (found["horizon_s"], found["used_horizon_s"]) == (120.0, 600.0)
    assert "2 min requested; 10 min used" in found["horizon_reason"]


@pytest.mark.slow
def test_rerouting_is_a_named_choice(run: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.yaml")
    fix = "tp=1,pp=2,schedule=1f1b,zero_stage=0,micro_batch_size=1"
    argv = (
        "plan",
        "--target=any",
        "opt-350m",
        "--cluster",
        CLUSTER,
        "--seq-len",
        "512",
        "--global-batch-size",
        "64",
    )
    assert run(*argv, "--top", "0", "--fix", fix, "--save", path).code == 0
    command_line = ("replan", path, "--cluster", CLUSTER, "--events", "lost n1")
    document = json.loads(run(*command_line, "--json").out)
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(document)
    assert document["rerouted"]["step_time_s"] > 0.0 and document["rerouted"]["transition_s"] == 10.0
    assert document["steps"] > document["rerouted"]["steps"] and not document["plan"]["is_rerouted"]
    card = run(*command_line)
    assert card.code == 0 and "re-routed" in card.out and "per step instead" in card.out
    assert json.loads(run(*command_line[:-1], "slow n1 0.5", "--json").out)["rerouted"] is None


@pytest.mark.slow
def test_a_node_that_a_dead_link_cuts_off_is_named(run: Any, saved: str) -> None:
    ran = run("replan", saved, "--cluster", CLUSTER, "--events", "link n1>s1g0 0B/s", "--json")
    assert ran.code == 0 and "unreachable: n1" in ran.err
    assert "n1" not in json.loads(ran.out)["plan"]["nodes"]


def cut(tmp_path: Path) -> str:
    """A trace in which two sites cannot communicate."""
    path = tmp_path / "cut.jsonl"
    path.write_text(
        '{"schema": "shardwise.events", "version": 1, "nodes": 4, '
        '"sites": {"a": ["n0", "n1"], "b": ["n2", "n3"]}}\n'
        '{"time_s": 0, "kind": "sites", "sites": ["a", "b"], "bytes_per_s": 0}\n'
    )
    return str(path)


@pytest.mark.slow
def test_sites_that_are_cut_off_work_alone(run: Any, saved: str, tmp_path: Path) -> None:
    trace = cut(tmp_path)
    found = json.loads(run("replan", saved, "--cluster", CLUSTER, "--events", trace, "--json").out)
    assert found["keep_step_time_s"] is None
    assert set(found["plan"]["nodes"]) in ({"n0", "n1"}, {"n2", "n3"})
    for command in ("plan", "replay"):
        job = ("opt-350m", "--cluster", CLUSTER, "--seq-len", "512", "--global-batch-size", "32")
        more = ("--length", "1h") if command == "replay" else ()
        ran = run(command, *job, "--events", trace, "--json", *more)
        assert ran.code == 0, ran.err


@pytest.mark.slow
def test_devices_are_those_that_the_plan_was_made_for(run: Any, saved: str, tmp_path: Path) -> None:
    """The devices may have been measured: a plan for devices of half the speed keeps its own step time."""
    plan = read_plan(saved)
    device = plan.cluster.classes["T4"]
    slow = replace(device, peak_flop_per_s={key: 0.5 * own for key, own in device.peak_flop_per_s.items()})
    question = search.Question(
        model=plan.model, cluster=replace(plan.cluster, classes={"T4": slow}), job=plan.job, top=0
    )
    answer = search.plan(question)
    path = str(tmp_path / "slow.yaml")
    write_plan(path, plan_of(answer, model=plan.model, cluster=question.cluster, job=plan.job))
    ran = run("replan", path, "--cluster", CLUSTER, "--events", "slow n1 1", "--json")
    found = json.loads(ran.out)
    assert found["keep_step_time_s"] == pytest.approx(answer.best.step_time_s, rel=1e-9)
    assert found["keep_step_time_s"] > 1.2 * plan.best.step_time_s


@pytest.mark.slow
def test_a_strategy_on_nodes_of_two_sizes_is_refused(run: Any, tmp_path: Path) -> None:
    path, cluster = str(tmp_path / "u.yaml"), "2x4xA100-80G+1x8xA100-40G"
    job = ("--seq-len", "512", "--global-batch-size", "512", "--fix", "dp=16", "--top", "0")
    assert run("plan", "--target=any", "opt-350m", "--cluster", cluster, *job, "--save", path).code == 0
    for argv in (("replan", path), ("replay", path, "--length", "1h")):
        ran = run(*argv, "--cluster", cluster, "--events", "slow n0 1")
        assert ran.code == 2 and ran.err.count("\n") == 1 and "nodes of several sizes" in ran.err


@pytest.mark.slow
def test_bad_input_is_a_one_line_error(run: Any, saved: str, tmp_path: Path) -> None:
    head = '{"schema": "shardwise.events", "version": 1, "nodes": 4}\n'
    lost = '{"time_s": 5.0, "kind": "lost", "node": "n1"}\n'
    traces = {
        "unsorted": head + lost + '{"time_s": 1.0, "kind": "lost", "node": "n2"}\n',
        "twice": head + lost + lost,
        "joined": head + '{"time_s": 5.0, "kind": "joined", "node": "n1"}\n',
        "link": head + '{"time_s": 5.0, "kind": "link", "link": "n1>n2", "bytes_per_s": 1e9}\n',
        "negative": head + '{"time_s": 5.0, "kind": "link", "link": "n1>s1g0", "bytes_per_s": -1}\n',
        "torn": head + '{"time_s": 5.0, "ki\n' + lost,
        "other": head.replace("4}", "5}") + lost,
        "digit": head + '{"time_s": 5.0, "kind": "lost", "node": "n\u00b2"}\n',
        "where": head + '{"time_s": 5.0, "kind": "slow", "where": "d\u00b2", "speed": 0.5}\n',
        "sites": head.replace("4}", '4, "sites": {"a": ["n0", "n1"], "b": ["n1"]}}') + lost,
    }
    for name, text in traces.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    bad: list[tuple[str, ...]] = [("--events", str(tmp_path / f"{name}.jsonl")) for name in traces]
    bad += [
        ("--events", text)
        for text in ("lost n9", "explode n1", "", "slow n1 fast", "lost n1; lost n1", "lost n\u00b2")
    ]
    bad += [("--events", "lost n1", "--horizon", "soon"), ("--events", str(tmp_path / "none.jsonl"))]
    for argv in bad:
        ran = run("replan", saved, "--cluster", CLUSTER, *argv)
        assert ran.code == 2 and ran.out == "" and len(ran.err.splitlines()) == 1, argv
    other = run("replan", saved, "--cluster", "4x2xA100-40G", "--events", "lost n1")
    assert other.code == 2 and "is not of this cluster" in other.err
    slower = run("replan", saved, "--cluster", CLUSTER, "--inter-node", "40Gb/s", "--events", "lost n1")
    assert (
        slower.code == 2
        and "other nodes, nic_bytes_per_s " in slower.err
        and " instead of 5000000000.0" in slower.err
    )
    unknown = run("replan", saved, "--cluster", CLUSTER, "--events", str(tmp_path / "link.jsonl"))
    assert "has no link n1>n2 (event 1)" in unknown.err


def test_nothing_that_fits_is_infeasible(run: Any, saved: str) -> None:
    ran = run("replan", saved, "--cluster", CLUSTER, "--events", "lost n0; lost n1; lost n2; lost n3")
    assert ran.code == 3 and "nothing fits on the 0 nodes" in ran.err
