"""`plan --target` for other software: its profile, its limits, and its name in every answer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from shardwise.plans import Plan, read_plan, write_plan
from shardwise.strategy import NEWEST_MEGATRON_LM, newest_target, target_of

if TYPE_CHECKING:
    from tests.unit.app.conftest import Run

ROOT = Path(__file__).parents[3]
MEGATRON = "megatron-lm-0.19"
DENSE = ("llama-3.1-8b", "--cluster", "1x8xA100-80G", "--seq-len", "4096", "--global-batch-size", "32")
EXPERTS = ("mixtral-8x7b", "--cluster", "2x8xA100-80G", "--seq-len", "4096", "--global-batch-size", "32")


def validated(text: str, name: str) -> Any:
    document = json.loads(text)
    schema = json.loads((ROOT / "docs" / "reference" / "schemas" / f"{name}.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    return document


@pytest.mark.slow
def test_a_target_without_a_version_means_the_newest(run: Run) -> None:
    assert newest_target("megatron-lm") == MEGATRON
    assert newest_target("megatron") == "megatron" and newest_target("any") == "any"
    named, newest = (
        run("plan", *DENSE, "--target", name, "--json").out for name in (MEGATRON, "megatron-lm")
    )
    first, second = validated(named, "plan-answer"), validated(newest, "plan-answer")
    assert first["target"] == second["target"] == MEGATRON
    assert first["plan_hash"] == second["plan_hash"]
    recommended = validated(run("plan", *DENSE, "--json").out, "plan-answer")
    (row,) = (row for row in recommended["targets"] if row["target"] == recommended["target"])
    assert row["step_time_s"] == recommended["optimum"]["step_time_s"]
    assert recommended["targets"][0]["target"] == MEGATRON
    assert recommended["targets"][-1] == {**recommended["targets"][-1], "target": "any", "over_any": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize("command_line", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_a_plan_is_one_that_the_target_runs_and_its_file_names_it(
    run: Run, tmp_path: Path, command_line: tuple[str, ...]
) -> None:
    path = tmp_path / "plan.yaml"
    ran = run("plan", *command_line, "--target", MEGATRON, "--save", str(path))
    assert ran.code == 0 and f"target        {MEGATRON}" in ran.out
    assert "shardwise train" not in ran.err  # not the requested profile
    plan = read_plan(str(path))
    assert plan.target == MEGATRON
    own = target_of(MEGATRON).profile_for(plan.job, ("NVIDIA",))
    found = {name: plan.job.profile.options.get(name, "off") for name in target_of(MEGATRON).searched_options}
    assert plan.job.profile == target_of(MEGATRON).with_options(own, found)
    assert plan.job.profile.name == NEWEST_MEGATRON_LM.name  # not our own runtime
    target = target_of(MEGATRON).for_job(plan.model, plan.job)
    assert list(target.refusals(plan.best.strategy)) == []
    assert plan.proof.rejected["target"] > 0
    checked = run("check", str(path))
    assert checked.code == 0 and "ok     rejected by target" in checked.out
    explained = json.loads(run("explain", str(path), "--json").out)
    assert explained["totals"]["target"] == plan.proof.rejected["target"]


def with_target(plan: Plan, target: str | None) -> Plan:
    return replace(plan, question=replace(plan.question, target=target))


def test_a_plan_file_of_a_target_that_cannot_run_it_is_refused(run: Run, tmp_path: Path) -> None:
    """Without the target the same file claims too much: candidates that its target excludes are legal."""
    path = tmp_path / "plan.yaml"
    run("plan", *DENSE, "--target", MEGATRON, "--save", str(path))
    plan = read_plan(str(path))
    for target in (None, "shardwise"):
        write_plan(str(path), with_target(plan, target))
        ran = run("check", str(path))
        assert ran.code == 4 and "rejected by target" in ran.err


def test_a_target_that_is_not_known_is_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    run("plan", *DENSE, "--target", MEGATRON, "--save", str(path))
    write_plan(str(path), with_target(read_plan(str(path)), "megatron-lm-9.9"))
    ran = run("check", str(path))
    assert ran.code == 2 and "target" in ran.err and "megatron-lm-9.9" in ran.err


@pytest.mark.slow
def test_named_modules_are_recomputed_by_targets_that_have_them(run: Run, tmp_path: Path) -> None:
    """They imply selective recomputation, which Megatron-LM has of named modules; the answer is proven."""
    path = tmp_path / "plan.yaml"
    ran = run(
        "plan", *DENSE, "--target", MEGATRON, "--fix", "recompute_modules=mlp+core_attn", "--save", str(path)
    )
    assert ran.code == 0 and "recompute core_attn + mlp" in ran.out
    assert read_plan(str(path)).best.strategy.recompute == "selective"
    assert run("check", str(path)).code == 0
    selective = run("plan", *DENSE, "--target", MEGATRON, "--fix", "recompute=selective")
    assert selective.code == 0 and "recompute mlp" in selective.out
    evaluated = run("evaluate", *DENSE, "--target", MEGATRON, "--strategy", "dp=8,recompute=selective")
    assert evaluated.code == 3 and "recompute=selective without recompute_modules" in evaluated.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "modules", "named"),
    [
        (MEGATRON, "attention", "'attention'"),
        (MEGATRON, "mla_up_proj", "mla_up_proj"),
        (MEGATRON, "mlp+moe", "moe"),
        ("torchtitan-0.3", "mlp", "mlp"),
        ("any", "moe_act", "moe_act"),
    ],
)
def test_other_modules_are_refused_by_name(run: Run, target: str, modules: str, named: str) -> None:
    """Unknown ones, those that no layer of the model has, and all where the target has none."""
    ran = run("plan", *DENSE, "--target", target, "--fix", f"recompute_modules={modules}")
    assert ran.code == 2 and "recompute_modules" in ran.err and named in ran.err


@pytest.mark.slow
def test_a_plan_with_other_modules_is_not_the_proven_one(run: Run, tmp_path: Path) -> None:
    """A file whose modules were changed, with a hash of the changed file."""
    path = tmp_path / "plan.yaml"
    run("plan", *DENSE, "--target", MEGATRON, "--fix", "recompute_modules=mlp", "--save", str(path))
    plan = read_plan(str(path))
    changed = replace(plan.best.strategy, recompute_modules="core_attn")
    write_plan(str(path), replace(plan, best=replace(plan.best, fields=changed)))
    assert run("check", str(path)).code == 4


@pytest.mark.slow
def test_plans_for_a_target_are_ones_that_it_runs(run: Run) -> None:
    for fixed in ("schedule=zb_v", "param_shard=2", "offload=activations"):
        ran = run("plan", *DENSE, "--target", MEGATRON, "--fix", fixed)
        assert ran.code == 2 and "is not run by Megatron-LM 0.19" in ran.err
    ran = run("plan", *EXPERTS, "--target", MEGATRON, "--fix", "tp=2,sequence_parallel=false")
    assert ran.code == 3 and "no strategy of this space is run by the target" in ran.err
    muon = run("plan", *DENSE, "--target", MEGATRON, "--optimizer", "muon")
    assert muon.code == 2 and "Megatron-LM 0.19 runs no plan of this job" in muon.err
    bloom = run("plan", "bloom-176b", *DENSE[1:], "--target", MEGATRON)
    assert bloom.code == 2 and "model family bloom" in bloom.err


@pytest.mark.slow
def test_a_mixed_cluster_is_planned_uniform_for_a_target_without_uneven_plans(run: Run) -> None:
    command_line = ("llama-3.1-8b", "--cluster", "1x8xA100-80G+1x8xH100-SXM", *DENSE[3:])
    answer = validated(run("plan", *command_line, "--target", MEGATRON, "--json").out, "plan-answer")
    assert answer["best"]["strategy"] is not None and answer["target"] == MEGATRON
