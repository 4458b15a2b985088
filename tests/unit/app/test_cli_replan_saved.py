"""`replan --save`: the decision is a plan file that can be checked, trained and replanned like others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.recorded.files import PLANS

from shardwise.inputs import read_mapping
from shardwise.plans import DECISION, PlanQuestion, read_plan, write_plan
from shardwise.replanning import allowed_space
from shardwise.strategy import Target, target_of

SCHEMAS = Path(__file__).parents[3] / "docs" / "reference" / "schemas"
CLUSTER = "8x1xT4"
JOB = ("opt-350m", "--cluster", CLUSTER, "--seq-len", "512", "--global-batch-size", "64")
MIXED = "1x2xA100-40G+1x2xV100-16G"


@pytest.fixture
def saved(run: Any, tmp_path: Path) -> str:
    """A plan file."""
    path = str(tmp_path / "plan.yaml")
    fix = "tp=1,pp=2,dp=4,schedule=1f1b"
    assert run("plan", "--target=any", *JOB, "--top", "0", "--fix", fix, "--save", path).code == 0
    return path


def decided(run: Any, path: str, cluster: str, events: str, *more: str) -> dict[str, Any]:
    ran = run("replan", path, "--cluster", cluster, "--events", events, "--json", *more)
    assert ran.code == 0, ran.err
    assert "--save" not in more or f"wrote {more[-1]} (sha256:" in ran.err
    found: dict[str, Any] = json.loads(ran.out)
    if "--save" in more:
        schema = json.loads((SCHEMAS / "plan.json").read_text())
        jsonschema.Draft202012Validator(schema).validate(read_mapping(more[-1]))
    return found


@pytest.mark.slow
def test_the_saved_file_has_the_decision(run: Any, saved: str, tmp_path: Path) -> None:
    """The decision is on the nodes that it names, and continues from there."""
    path = str(tmp_path / "decided.yaml")
    found = decided(run, saved, CLUSTER, "lost n1", "--save", path)
    plan = read_plan(path)
    assert plan.for_trace is not None and plan.for_trace.policy == DECISION
    assert list(plan.for_trace.nodes) == found["plan"]["nodes"] and "n1" not in found["plan"]["nodes"]
    assert plan.for_trace.now_step_time_s == found["step_time_s"] == pytest.approx(plan.best.step_time_s)
    assert (plan.for_trace.length_s, plan.for_trace.steps) == (found["used_horizon_s"], found["steps"])
    strategy = found["plan"]["strategy"]
    assert all(getattr(plan.best.strategy, name) == value for name, value in strategy.items())
    assert plan.cluster.devices == len(found["plan"]["nodes"]) and plan.job == read_plan(saved).job
    assert run("check", path).code == 0
    again = decided(run, path, CLUSTER, "slow n1 0.5", "--horizon", "1s")
    assert again["decision"] == "keep" and again["plan"]["nodes"] == found["plan"]["nodes"]


@pytest.mark.slow
def test_an_unchanged_plan_is_saved_as_it_is(run: Any, saved: str, tmp_path: Path) -> None:
    """In one second no change pays. The plan is slower than its file says, since a node is slow: the file
    describes the nodes as the cluster has them.
    """
    path = str(tmp_path / "decided.yaml")
    found = decided(run, saved, CLUSTER, "slow n3 0.5", "--horizon", "1s", "--save", path)
    before, after = read_plan(saved), read_plan(path)
    assert found["decision"] == "keep" and after.best == before.best
    assert after.for_trace is not None and after.for_trace.worst_step_time_s == found["step_time_s"]
    assert found["step_time_s"] > after.best.step_time_s


@pytest.mark.slow
def test_shares_that_a_file_cannot_represent_are_not_chosen(run: Any, saved: str, tmp_path: Path) -> None:
    """For 45 seconds, a smaller share for the pipeline of a slow node is best, and nothing else pays."""
    command_line = (saved, CLUSTER, "slow n1 0.5", "--horizon", "45s")
    free = decided(run, *command_line)
    assert free["decision"] == "patch" and len(set(free["plan"]["microbatches"])) > 1
    found = decided(run, *command_line, "--save", str(tmp_path / "decided.yaml"))
    assert found["decision"] == "keep" and set(found["plan"]["microbatches"]) == {4}


@pytest.mark.slow
def test_an_uneven_plan_is_saved_too(run: Any, tmp_path: Path) -> None:
    first, path = str(tmp_path / "plan.yaml"), str(tmp_path / "decided.yaml")
    job = ("opt-350m", "--cluster", MIXED, "--seq-len", "2048", "--global-batch-size", "64")
    assert run("plan", "--target=any", *job, "--save", first).code == 0
    found = decided(run, first, MIXED, "slow n1 0.8", "--save", path)
    plan = read_plan(path)
    assert plan.for_trace is not None and list(plan.for_trace.nodes) == found["plan"]["nodes"]
    assert list(plan.best.microbatches) == found["plan"]["microbatches"]
    assert run("check", path).code == 0
    assert decided(run, path, MIXED, "slow n1 0.8")["decision"] == "keep"


@pytest.mark.slow
def test_on_devices_of_our_runtime_the_saved_plan_is_one_that_it_runs(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On clusters of processes a plan file is for `shardwise train`. If that supported only micro-batches of
    one sample, the shapes of the decision would be limited to these.
    """
    first, path = str(tmp_path / "plan.yaml"), str(tmp_path / "decided.yaml")
    cluster = "4x1xcpu"
    job = ("gpt2", "--cluster", cluster, "--seq-len", "64", "--global-batch-size", "12", "--dtype", "fp32")
    fix = "dp=2,pp=2,micro_batch_size=2"
    assert run("plan", *job, "--fix", fix, "--top", "0", "--save", first).code == 0
    saved_plan = read_plan(first)
    write_plan(first, replace(saved_plan, question=replace(saved_plan.question, fixed={"tp": 1})))
    decided(run, first, cluster, "lost n3", "--save", path)
    own = target_of("shardwise")
    strategy = read_plan(path).best.strategy
    assert strategy.micro_batch_size > 1 and not any(own.refusals(strategy))
    ones = replace(own, axes={**own.axes, "micro_batch_size": (1,)})
    monkeypatch.setattr(allowed_space, "target_of", lambda name: ones)
    decided(run, first, cluster, "lost n3", "--save", path)
    assert read_plan(path).best.strategy.micro_batch_size == 1
    # Results that no degrees can express are refused where they are found.
    assert strategy.pp > 1
    monkeypatch.setattr(allowed_space, "target_of", lambda name: own)
    refusals = Target.refusals
    monkeypatch.setattr(
        Target, "refusals", lambda self, one: iter(["pp"]) if one.pp > 1 else refusals(self, one)
    )
    decided(run, first, cluster, "lost n3", "--save", path)
    assert read_plan(path).best.strategy.pp == 1


def test_inputs_are_not_lost(run: Any, saved: str) -> None:
    before = Path(saved).read_bytes()
    ran = run("replan", saved, "--cluster", CLUSTER, "--events", "lost n1", "--save", saved)
    assert ran.code == 2 and "--save" in ran.err and ran.err.count("\n") == 1
    assert Path(saved).read_bytes() == before


def test_nothing_is_written_where_nothing_runs(run: Any, saved: str, tmp_path: Path) -> None:
    path = tmp_path / "decided.yaml"
    ran = run(
        "replan", saved, "--cluster", CLUSTER, "--events", "; ".join(f"lost n{node}" for node in range(8)),
        "--save", str(path),
    )  # fmt: skip
    assert ran.code == 3 and not path.exists()


@pytest.mark.slow
@pytest.mark.parametrize("events", ["slow d0 1.0", "slow n0 0.5; slow n0 1.0"])
def test_events_that_change_nothing_are_answered_by_keep(run: Any, tmp_path: Path, events: str) -> None:
    """gpt2-xl on 6 nodes of 2 RTX4090: `slow d0 1.0` was once answered by a migration."""
    path, cluster = str(tmp_path / "plan.yaml"), ("6x2xRTX4090", "--inter-node", "25Gb/s")
    job = ("gpt2-xl", "--cluster", *cluster, "--seq-len", "1024", "--global-batch-size", "16")
    assert run("plan", "--target=any", *job, "--use-all", "--top", "0", "--save", path).code == 0
    ran = run("replan", path, "--cluster", *cluster, "--events", events, "--json")
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    assert document["decision"] == "keep" and document["gain_s_per_step"] == 0.0
    assert document["idle"] == {"devices": 0, "nodes": 0, "ranks": ""}
    # The counterpart: an event that slows a node is considered.
    slower = run("replan", path, "--cluster", *cluster, "--events", "slow n0 0.5", "--json")
    assert json.loads(slower.out)["step_time_s"] != document["step_time_s"]


@pytest.mark.slow
@pytest.mark.parametrize("fix", ["schedule=gpipe", "recompute=full", "tp=2"])
def test_a_new_plan_has_the_restrictions_of_the_old_one(run: Any, tmp_path: Path, fix: str) -> None:
    first, path = str(tmp_path / "plan.yaml"), str(tmp_path / "decided.yaml")
    cluster = "4x2xV100-32G"
    job = ("opt-350m", "--cluster", cluster, "--seq-len", "512", "--global-batch-size", "16")
    command_line = ("--fix", f"{fix},pp=2", "--space", "core", "--use-all", "--top", "0")
    assert run("plan", "--target=any", *job, *command_line, "--save", first).code == 0
    decided(run, first, cluster, "lost n3; lost n2", "--save", path)
    name, _, value = fix.partition("=")
    strategy = read_plan(path).best.strategy
    assert str(getattr(strategy, name)) == value and strategy.pp == 2 and strategy.cp == 1
    # The counterpart: without its question, the same plan is replaced by a faster one.
    old = read_plan(first)
    write_plan(first, replace(old, question=PlanQuestion()))
    decided(run, first, cluster, "lost n3; lost n2", "--save", path)
    free = read_plan(path).best
    assert free.step_time_s < read_plan(first).best.step_time_s * 3
    assert str(getattr(free.strategy, name)) != value or free.strategy.pp != 2


@pytest.mark.slow
def test_nodes_that_are_not_used_are_idle_and_those_that_are_gone_are_not(run: Any, tmp_path: Path) -> None:
    """2 of 3 nodes run a plan that needs an even number of them; the third is idle, or gone."""
    path, cluster = str(tmp_path / "plan.yaml"), "3x2xV100-32G"
    job = ("opt-350m", "--cluster", cluster, "--seq-len", "512", "--global-batch-size", "16")
    assert run("plan", "--target=any", *job, "--fix", "tp=2,pp=2", "--save", path).code == 0
    for events, idle in (("slow n1 0.5", 2), ("lost n2", 0)):
        document = decided(run, path, cluster, events)
        assert document["idle"]["devices"] == idle, events
        assert document["idle"]["nodes"] == idle // 2
    # A node that is used in part is named, with advice.
    small = ("gpt2", "--cluster", "1x8xV100-32G", "--seq-len", "64", "--global-batch-size", "7")
    assert run("plan", "--target=any", *small, "--fix", "dp=7", "--save", path).code == 0
    ran = run("replan", path, "--cluster", "1x8xV100-32G", "--events", "slow n0 0.5")
    assert ran.code == 2 and "plan with --use-all for whole nodes" in ran.err


@pytest.mark.slow
def test_the_error_names_the_restriction_that_leaves_no_plan(run: Any, tmp_path: Path) -> None:
    path, cluster = str(tmp_path / "plan.yaml"), "2x2xV100-32G"
    job = ("opt-350m", "--cluster", cluster, "--seq-len", "512", "--global-batch-size", "16")
    assert run("plan", "--target=any", *job, "--fix", "tp=2,pp=2", "--save", path).code == 0
    ran = run("replan", path, "--cluster", cluster, "--events", "lost n1")
    assert ran.code == 3 and "the plan's question allows only tp=2, pp=2" in ran.err


@pytest.mark.slow
def test_a_plan_for_megatron_lm_is_replanned_to_one_that_it_runs(run: Any, tmp_path: Path) -> None:
    """The decided plan has the question of the old one, so the next decision obeys it too."""
    first, path, again = (str(tmp_path / name) for name in ("plan.yaml", "decided.yaml", "again.yaml"))
    cluster = "4x2xV100-32G"
    job = ("gpt2-xl", "--cluster", cluster, "--seq-len", "512", "--global-batch-size", "16")
    options = ("--target", "megatron-lm", "--fix", "sequence_parallel=false", "--use-all", "--top", "0")
    assert run("plan", "--target=any", *job, *options, "--save", first).code == 0
    found = decided(run, first, cluster, "lost n3", "--save", path)
    assert len(found["plan"]["nodes"]) == 3
    before, after = read_plan(first), read_plan(path)
    assert after.target == "megatron-lm-0.19"
    # four nodes were requested, of which three are left
    assert before.question.cluster is None and after.cluster != before.cluster
    assert after.question == replace(before.question, events="events in words", cluster=before.cluster)
    assert run("export", path, "--to", "megatron-lm", "--out", str(tmp_path / "run")).code == 0
    assert run("check", path).code == 0
    decided(run, path, cluster, "lost n2; lost n3", "--save", again)
    assert run("export", again, "--to", "megatron-lm", "--out", str(tmp_path / "again")).code == 0
    # The counterpart: without its target, the best plan is one that Megatron-LM does not run.
    write_plan(first, replace(before, question=replace(before.question, target=None)))
    decided(run, first, cluster, "lost n3", "--save", path)
    assert any(target_of("megatron-lm-0.19").refusals(read_plan(path).strategy))


@pytest.mark.slow
def test_a_plan_for_a_trace_is_replanned_within_its_question(run: Any, tmp_path: Path) -> None:
    first, path = str(tmp_path / "plan.yaml"), str(tmp_path / "decided.yaml")
    cluster = "4x2xV100-32G"
    job = ("opt-350m", "--cluster", cluster, "--seq-len", "512", "--global-batch-size", "16")
    fix = ("--fix", "schedule=gpipe,pp=2", "--space", "core")
    assert run("plan", *job, *fix, "--events", "slow n3 0.9", "--save", first).code == 0
    chosen = read_plan(first).for_trace
    assert chosen is not None
    events = f"lost {chosen.nodes[0]}"
    decided(run, first, cluster, events, "--save", path)
    strategy = read_plan(path).strategy
    assert (strategy.schedule, strategy.pp) == ("gpipe", 2)
    write_plan(first, replace(read_plan(first), question=PlanQuestion()))
    decided(run, first, cluster, events, "--save", path)
    free = read_plan(path).strategy
    assert (free.schedule, free.pp) != ("gpipe", 2)


@pytest.mark.parametrize("command", ["replan", "replay"])
def test_plans_of_operator_graphs_are_refused_in_one_line(run: Any, command: str) -> None:
    path = str(PLANS / "graph.yaml")
    ran = run(command, path, "--cluster", "1x4xV100-32G", "--events", "slow n0 0.5")
    assert ran.code == 2 and ran.err.count("\n") == 1
    assert "PLAN: is not supported for the plan of an operator graph" in ran.err
    assert "allowed: a plan of one strategy or an uneven plan" in ran.err


@pytest.mark.slow
def test_a_replay_starts_from_an_uneven_plan_of_version_1(run: Any) -> None:
    path = PLANS / "uneven.yaml"
    cluster = read_plan(str(path)).cluster.name
    options = ("--events", "slow n0 0.9", "--length", "1h", "--policy", "static", "--json")
    ran = run("replay", str(path), "--cluster", cluster, *options)
    assert ran.code == 0, ran.err
    (policy,) = json.loads(ran.out)["policies"]
    assert [one["strategy"] for one in policy["decisions"]] == [None]


def test_a_target_that_does_not_run_on_the_cluster_is_named(run: Any, saved: str) -> None:
    plan = read_plan(saved)
    write_plan(saved, replace(plan, question=replace(plan.question, target="megatron-lm-0.19")))
    ran = run("replan", saved, "--cluster", "8x1xcpu", "--events", "lost n1")
    assert ran.code == 2 and "--cluster: is not a cluster on which Megatron-LM 0.19 runs" in ran.err
