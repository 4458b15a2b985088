"""`--target` and `--software` of `frontier`, `simulate`, `replan` and `replay`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import shardwise as sw
from shardwise.plans import read_plan
from shardwise.strategy import target_of

if TYPE_CHECKING:
    from tests.unit.app.conftest import Ran, Run

MEGATRON, DEEPSPEED = "megatron-lm-0.19", "deepspeed-0.19"
JOB = ("--seq-len", "1024", "--global-batch-size", "16")
QUESTION = ("gpt2", "--cluster", "2x2xA100-80G", *JOB)


def document(ran: Ran) -> Any:
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def refused(ran: Ran, *words: str) -> None:
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1 and all(word in ran.err for word in words), ran.err


@pytest.fixture(scope="module")
def for_megatron(tmp_path_factory: pytest.TempPathFactory) -> str:
    plan = sw.evaluate(
        "gpt2", cluster="2x2xA100-80G", seq_len=1024, global_batch_size=16, target=MEGATRON,
        strategy="zero_stage=1",
    )  # fmt: skip
    path = str(tmp_path_factory.mktemp("plans") / "plan.yaml")
    plan.save(path)
    return path


# frontier


@pytest.mark.parametrize("target", [None, MEGATRON, "any"])
def test_the_fastest_point_of_a_frontier_is_the_optimum_of_its_target(run: Run, target: str | None) -> None:
    named = () if target is None else ("--target", target)
    plan = document(run("plan", *QUESTION, "--space", "core", *named, "--top", "0", "--json"))
    found = document(run("frontier", *QUESTION, "--space", "core", *named, "--json"))
    assert found["target"] == plan["target"] == (target or DEEPSPEED)
    optimum = plan["optimum"] or plan["best"]
    assert found["points"][0]["time_s"] == pytest.approx(optimum["step_time_s"], rel=1e-12)
    assert found["points"][0]["layout"]["strategy"] == optimum["strategy"]


def test_every_point_of_a_frontier_is_run_by_its_target_and_priced_by_its_profile(
    run: Run, tmp_path: Path
) -> None:
    argv = ("frontier", *QUESTION, "--target", "deepspeed", "--save", str(tmp_path / "points"))
    assert f" target        {DEEPSPEED}" in run(*argv).out
    files = sorted((tmp_path / "points").glob("*.yaml"))
    plans = [read_plan(str(path)) for path in files]
    target = target_of(DEEPSPEED)
    assert len(plans) > 3
    for plan in plans:
        assert plan.target == DEEPSPEED and plan.job.profile.name == target.own_profile.name
        assert not list(target.for_job(plan.model, plan.job).refusals(plan.strategy))
    assert run("check", str(files[-1])).code == 0
    unlimited = document(run("frontier", *QUESTION, "--target", "any", "--json"))
    refusals = [
        list(target.for_job(plans[0].model, plans[0].job).refusals(sw.strategy.Strategy(**one)))
        for one in (point["layout"]["strategy"] for point in unlimited["points"])
    ]
    assert any(refusals)  # without the target there are points that it does not run


def test_software_replaces_the_profile_of_the_target_of_a_frontier(run: Run) -> None:
    argv = ("frontier", *QUESTION, "--space", "core", "--target", DEEPSPEED, "--json")
    own, old = document(run(*argv)), document(run(*argv, "--software", "megatron-2021"))
    assert own["target"] == old["target"] == DEEPSPEED
    assert own["job"]["profile"]["name"] == "deepspeed-0.19"
    assert old["job"]["profile"]["name"] == "megatron-2021"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("frontier", *QUESTION, "--target", "nothing"), ("--target", "'nothing'", MEGATRON)),
        (("frontier", *QUESTION, "--target", DEEPSPEED, "--fix", "cp=2"), ("fix.cp",)),
        (
            ("frontier", "graph:mlp", *QUESTION[1:3], "--global-batch-size", "64", "--target", DEEPSPEED),
            ("--target", "applies to transformers"),
        ),
        (("frontier", "gpt2", "--cluster", "1x2xTPU-v4", *JOB, "--target", MEGATRON), ("--target", MEGATRON)),
    ],
)  # fmt: skip
def test_a_target_that_does_not_apply_to_a_frontier_is_a_one_line_error(
    run: Run, argv: tuple[str, ...], words: tuple[str, ...]
) -> None:
    refused(run(*argv), *words)


# simulate


def test_simulate_refuses_another_target_than_that_of_the_plan(run: Run, for_megatron: str) -> None:
    for name in ("megatron-lm", MEGATRON):
        assert run("simulate", for_megatron, "--target", name).out == run("simulate", for_megatron).out
    refused(
        run("simulate", for_megatron, "--target", "deepspeed"), "--target", DEEPSPEED, f"allowed: {MEGATRON}"
    )
    refused(run("simulate", for_megatron, "--target", "any"), "--target", f"allowed: {MEGATRON}")
    refused(run("simulate", for_megatron, "--target", "megatron-ml"), "did you mean")


def test_a_plan_without_a_target_is_simulated_for_any(run: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.yaml")
    run("evaluate", *QUESTION, "--strategy", "tp=2,zero_stage=1", "--save", path)
    assert run("simulate", path, "--target", "any").code == 0
    refused(run("simulate", path, "--target", DEEPSPEED), DEEPSPEED, "allowed: any")


# replan and replay

LOST = ("--events", "lost n1")


def test_a_plan_is_replanned_for_its_own_target_unless_another_is_named(
    run: Run, for_megatron: str, tmp_path: Path
) -> None:
    def decided(*more: str) -> Any:
        saved = str(tmp_path / "next.yaml")
        ran = run("replan", for_megatron, *LOST, "--save", saved, *more)
        assert ran.code == 0, ran.err
        return read_plan(saved)

    own = decided()
    assert own.target == MEGATRON and own.job.profile.name == target_of(MEGATRON).own_profile.name
    free = decided("--target", "any")
    assert free.target is None and free.job.profile.name == target_of(MEGATRON).own_profile.name
    other = decided("--target", "deepspeed")
    assert other.target == DEEPSPEED and other.job.profile.name == target_of(DEEPSPEED).own_profile.name
    assert not list(target_of(DEEPSPEED).for_job(other.model, other.job).refusals(other.strategy))
    old = decided("--software", "megatron-2021")
    assert old.target == MEGATRON and old.job.profile.name == "megatron-2021"
    assert len({own.step_time_s, other.step_time_s, old.step_time_s}) == 3
    found = sw.replan(for_megatron, events="lost n1", target=DEEPSPEED, savable=True)
    assert found.plan.step_time_s == other.step_time_s


def test_a_target_that_does_not_run_the_plan_is_refused(run: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.yaml")
    run("evaluate", *QUESTION, "--strategy", "cp=2,cp_kind=ring", "--save", path)
    for command in ("replan", "replay"):
        ran = run(command, path, *LOST, "--target", DEEPSPEED)
        refused(ran, "--target", "does not run the plan", "cp=2", "any")


def test_a_replay_of_a_model_is_for_the_recommended_target(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    assert run("events", "generate", "preemption", "--cluster", "2x2xA100-80G", "--length", "6h",
               "--out", str(trace)).code == 0  # fmt: skip

    def adaptive(*more: str) -> list[Any]:
        argv = ("replay", *QUESTION, "--events", str(trace), "--policy", "adaptive", "--json", *more)
        return list(document(run(*argv))["policies"][0]["decisions"])

    default = document(run("plan", *QUESTION, "--top", "0", "--json"))
    assert default["target"] == DEEPSPEED
    first = adaptive()
    assert first == adaptive("--target", default["target"])
    assert first[0]["strategy"] == default["optimum"]["strategy"]
    for name in ("any", MEGATRON):
        assert adaptive("--target", name)[0]["step_time_s"] != first[0]["step_time_s"], name


def test_a_plan_for_a_trace_is_priced_by_the_profile_of_its_target(run: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.yaml")
    for named, expected in ((("--target", MEGATRON), MEGATRON), ((), DEEPSPEED)):
        assert run("plan", *QUESTION, *LOST, *named, "--save", path).code == 0
        plan = read_plan(path)
        assert plan.target == expected
        assert plan.job.profile.name == target_of(expected).own_profile.name
