"""`plan --mixed-pool-stages`: from the question to the file, its check, and the commands that refuse it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from shardwise.cluster import load_cluster
from shardwise.inputs import read_mapping
from shardwise.model import load_model
from shardwise.plans import Layout, Result, StagePart, plan_of, read_plan, write_plan
from shardwise.search import Question, plan_mixed_cluster
from shardwise.search.question import default_job

SCHEMAS = Path(__file__).parents[3] / "docs" / "reference" / "schemas"
CLUSTER = "1x2xRTX4090+2x1xA100-40G"
ABOUT = (
    "gpt2-xl", "--cluster", CLUSTER, "--inter-node", "200Gb/s", "--seq-len", "4096",
    "--global-batch-size", "8",
)  # fmt: skip
QUESTION = ("plan", "--target=any", *ABOUT, "--mixed-pool-stages", "4")
ON_CPU = (
    "plan", "examples/tiny.yaml", "--cluster", "examples/clusters/unequal.yaml", "--seq-len", "64",
    "--global-batch-size", "16", "--dtype", "fp32",
)  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of a plan with mixed-pool stages."""
    model, cluster = load_model("gpt2-xl"), load_cluster(CLUSTER, inter_node="200Gb/s")
    job = default_job(model, cluster, seq_len=4096, global_batch_size=8)
    found = plan_mixed_cluster(Question(model=model, cluster=cluster, job=job, mixed_stage_rows=4))
    assert not found.best.is_uniform
    plan = plan_of(found, model=model, cluster=cluster, job=job)
    path = str(tmp_path_factory.mktemp("plans") / "plan.yaml")
    write_plan(path, plan)
    return path


@pytest.mark.slow
def test_a_plan_with_mixed_pool_stages_is_faster_and_complete(run: Any) -> None:
    document = json.loads(run(*QUESTION, "--json").out)
    schema = json.loads((SCHEMAS / "plan-answer.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    best = document["best"]
    plain = json.loads(run(*QUESTION[:-2], "--json").out)["best"]
    assert best["step_time_s"] < 0.99 * plain["step_time_s"] and document["is_proven"]
    stages = [stage for pipeline in best["layout"]["pipelines"] for stage in pipeline["stages"]]
    for stage in stages:
        assert [part["rows"] for part in stage["parts"]] == [1, 3]
        assert sum(part["tp"] for part in stage["parts"]) == stage["devices"]
        assert stage["ranks"] == ",".join(part["ranks"] for part in stage["parts"])
    assert document["devices_used"] == 4
    card = run(*QUESTION).out
    assert "[1 RTX4090, 1 row | 1 A100-40G, 3 rows, 48 layers" in card
    assert "--mixed-pool-stages 4 --save plan.yaml" in card


def test_a_saved_plan_is_read_back_and_predicted_equally(run: Any, saved: str) -> None:
    plan = read_plan(saved)
    write_plan(saved, plan)
    assert read_plan(saved) == plan
    schema = json.loads((SCHEMAS / "plan.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(read_mapping(saved))
    verdict = json.loads(run("check", saved, "--json").out)
    assert [check["name"] for check in verdict["checks"] if not check["ok"]] == ["optimal"]


def test_the_timeline_shows_both_parts_of_a_stage_as_one(run: Any, saved: str) -> None:
    timeline = json.loads(run("simulate", saved, "--json").out)
    assert [rank["rank"] for rank in timeline["ranks"]] == [0, 1]  # first ranks of 0,2 and of 1,3
    assert timeline["timeline_s"] < timeline["step_time_s"]


def with_parts(best: Result, change: Callable[[StagePart, StagePart], Any], **more: Any) -> Result:
    """The plan with other parts for its first stage."""
    first, *others = best.layout.pipelines
    stage = replace(first.stages[0], parts=change(*first.stages[0].parts), **more)
    return replace(
        best, layout=Layout(pipelines=(replace(first, stages=(stage, *first.stages[1:])), *others))
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda best: with_parts(best, lambda a, b: (a, replace(b, rows=2))),
            "1 + 2 rows of a micro-batch of 4",
        ),
        (lambda best: with_parts(best, lambda a, b: (a, replace(b, ranks="3"))), "taken twice"),
        (lambda best: with_parts(best, lambda a, b: (a, replace(b, ranks="2-3"))), "ranks 2-3 are not 1"),
        (lambda best: with_parts(best, lambda a, b: (replace(a, tp=2), b)), "no stage has tp 2 on RTX4090"),
        (
            lambda best: with_parts(best, lambda a, b: (a, replace(b, device_class="RTX4090"))),
            "are not of two pools",
        ),
        (lambda best: with_parts(best, lambda a, b: (a, replace(b, device_class="T4"))), "a stage on T4"),
        (lambda best: with_parts(best, lambda a, b: (b, a), ranks="2,0"), "does not match its parts"),
        (lambda best: with_parts(best, lambda a, b: (a, b), dp=1), "does not match its parts"),
        (lambda best: replace(best, is_alike=True), "identical pipelines have no mixed-pool stages"),
    ],
)
def test_wrong_parts_are_detected(
    run: Any, saved: str, tmp_path: Path, change: Callable[[Result], Result], message: str
) -> None:
    plan, path = read_plan(saved), str(tmp_path / "plan.yaml")
    write_plan(path, replace(plan, best=change(plan.best)))
    checked = run("check", path, "--json")
    again = json.loads(checked.out)["computed_again"]
    predicted = next(one for one in again if one["name"] == "prediction")
    assert checked.code == 4 and not predicted["ok"] and message in predicted["found"]


def test_another_split_of_rows_is_predicted_otherwise(run: Any, saved: str, tmp_path: Path) -> None:
    """Both parts compute their rows: one row more does not fit on the smaller device."""
    plan, path = read_plan(saved), str(tmp_path / "plan.yaml")
    other = with_parts(plan.best, lambda a, b: (replace(a, rows=2), replace(b, rows=2)))
    write_plan(path, replace(plan, best=other))
    document = json.loads(run("check", path, "--json").out)
    assert {one["name"]: one["ok"] for one in document["checks"]}["layout"]
    assert [one["found"] for one in document["computed_again"]] == ["the plan does not fit"]


def test_a_plan_with_mixed_pool_stages_is_not_replanned(run: Any, saved: str) -> None:
    ran = run("replan", saved, "--cluster", CLUSTER, "--events", "lost n1")
    assert ran.code == 2 and ran.err.count("\n") == 1
    assert ran.err.startswith("shardwise: error: PLAN: has mixed-pool stages, which are not replanned")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((*QUESTION[:-1], "9"), "1 to 8"),
        (
            ("plan", "--target=any", "gpt2-xl", "--cluster", "1x4xA10G", *QUESTION[5:]),
            "applies to uneven plans only",
        ),
        ((*ON_CPU, "--mixed-pool-stages", "4"), "shardwise train runs no mixed-pool stages"),
    ],
)
def test_the_option_is_refused_where_it_has_no_effect(run: Any, argv: tuple[str, ...], message: str) -> None:
    ran = run(*argv)
    assert ran.code == 2 and "--mixed-pool-stages" in ran.err and message in ran.err
    assert ran.err.count("\n") == 1


def test_space_counts_mixed_pool_stages(run: Any) -> None:
    counts = [
        json.loads(run("space", *ABOUT, *more, "--json").out)["uneven"]
        for more in ((), ("--mixed-pool-stages", "4"))
    ]
    assert counts[1]["pipelines"] > counts[0]["pipelines"]
    assert counts[1]["axes"]["rows split over two"] == ["1+1", "1+3", "2+2", "3+1"]


def test_the_former_name_is_a_hidden_alias(run: Any) -> None:
    """`--braid` gives the same answer, is in no help, and is refused together with its option."""
    new, old = (
        json.loads(run("space", *ABOUT, name, "4", "--json").out)
        for name in ("--mixed-pool-stages", "--braid")
    )
    assert new == old and new["uneven"] != json.loads(run("space", *ABOUT, "--json").out)["uneven"]
    for command in ("plan", "space"):
        shown = run(command, "--help").out
        assert "--braid" not in shown and "--mixed-pool-stages" in shown
        both = run(command, *ABOUT, "--mixed-pool-stages", "2", "--braid", "4")
        assert both.code == 2 and both.err.startswith(
            "shardwise: error: --braid: is the same option; allowed:"
        )
        wrong = run(command, *ABOUT, "--braid", "9")
        assert wrong.code == 2 and "--braid: is not a whole number in range; found '9'" in wrong.err
