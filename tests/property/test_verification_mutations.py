"""The checker accepts every plan that the planner writes, and refuses every plan that was changed to claim
something else.

A mutant that the checker accepts must be true: the planner, given the strategies that it names, writes the
same plan. Such mutants exist: two axis orders on one tier cost the same; fp16 costs as much as bf16; a plan
may list fewer runners-up; software may overlap a collective that is not sent. They may only be at the places
of TRUE_ALL_THE_SAME. EFFORT records how an answer was found, and most of it is not part of a plan's hash.
"""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tests.property.plan_mutants import PARTS, mutants, with_hash

from shardwise import search
from shardwise.cluster import load_cluster
from shardwise.model import load_model, model_from_config
from shardwise.plans import Answer, Plan, PlanQuestion, plan_document, plan_of, read_plan
from shardwise.strategy import target_of
from shardwise_verify import InputError, Verdict, check_file

DENSE: dict[str, Any] = {
    "layers": 8, "hidden": 3072, "ffn": 12288, "heads": 24, "vocab": 50257, "seq_len": 2048,
}  # fmt: skip
ROUTED: dict[str, Any] = {
    "layers": 5, "hidden": 3072, "ffn": 12288, "heads": 24, "kv_heads": 4, "vocab": 32000, "seq_len": 2048,
    "experts": 8, "top_k": 2, "expert_ffn": 1024, "dense_layers": 1, "gated": True, "tied": False,
}  # fmt: skip

Question = tuple[Any, str, int, str, Any]
"""Model, cluster, batch, space, optimizer."""

QUESTIONS: dict[str, Question] = {
    "zb_v": (DENSE, "3x1xV100-16G", 12, "default", "adamw"),
    "experts": (ROUTED, "2x2xT4", 8, "default", "adamw"),
    "interleaved": ({**DENSE, "layers": 12}, "4x1xV100-16G", 12, "core", "sgd"),
    "tensor": ({**DENSE, "layers": 20}, "4x1xV100-16G", 12, "core", "adamw"),
    "split": ({**DENSE, "layers": 6}, "2x1xV100-16G", 8, "default", "adamw"),
    "one device": ("gpt2", "1xA100-80G", 8, "core", "muon"),
    "sharded": ("llama-3.1-8b", "8xH100-SXM", 32, "core", "adamw"),
    "mixed": ("gpt2-xl", "1x2xH100-SXM+1x2xA100-80G", 16, "core", "adafactor"),
    "dense for a target": (DENSE, "4x2xV100-16G", 8, "default", "adamw"),
    "experts for a target": (ROUTED, "2x2xT4", 8, "default", "adamw"),
}

TARGET = "megatron-lm-0.19"
"""Target of the last of these questions."""

SCHEDULES = {"experts": "zb_v", "interleaved": "interleaved_1f1b", "tensor": "1f1b", "split": "zb_h1"}
"""Schedules that some questions fix, so that the plans have pipelines of several kinds under any cost
figures.
"""

MUTANTS, ALL_MUTANTS = 80, 10_000

pytestmark = pytest.mark.xdist_group("plans to bend")  # by one worker, which plans once

EFFORT = {"search_s", "search_cpu_s"}
TRUE_ALL_THE_SAME = {
    "seed", "dtype", "memory_margin", "expert_imbalance", "axis_order", "runners_up", "profile",
}  # fmt: skip


def plan_for(name: str) -> Plan:
    """The planner's answer to a question as a plan."""
    config, cluster_text, batch, space, optimizer = QUESTIONS[name]
    fixed: dict[str, Any] = {"schedule": SCHEDULES[name]} if name in SCHEDULES else {}
    is_named = isinstance(config, str)
    model = load_model(config) if is_named else model_from_config(config, name="tiny")
    cluster = load_cluster(cluster_text)
    job = search.default_job(
        model,
        cluster,
        seq_len=1024 if is_named else config["seq_len"],
        global_batch_size=batch,
        optimizer=optimizer,
    )
    request = search.Question(
        model=model, cluster=cluster, job=job, space=space, fixed=fixed, use_all=True, top=3
    )
    if not name.endswith("for a target"):
        return _plan_of(search.plan(request), model=model, cluster=cluster, job=job)
    answer = search.plan_for(target_of(TARGET), request, search.plan)
    assert answer.certificate.rejected["target"] > 0
    return _plan_of(answer, model=model, cluster=cluster, job=job, target=TARGET)


def _plan_of(answer: Answer, *, target: str | None = None, **problem: Any) -> Plan:
    """The plan of an answer to the question that its certificate is about."""
    proof = answer.certificate
    question = PlanQuestion(space=proof.space, fixed=proof.fixed, axes=proof.axes, target=target)
    return plan_of(answer, question=question, **problem)


@pytest.fixture(scope="module")
def documents() -> dict[str, dict[str, Any]]:
    """Plans as the planner writes them, by name."""
    return {name: plan_document(plan_for(name)) for name in QUESTIONS}


def verdict_on(document: dict[str, Any], folder: Path) -> Verdict | None:
    """The verdict on a document as a file; None where it is refused as bad input."""
    path = folder / "plan.yaml"
    path.write_text(json.dumps(document))
    try:
        return check_file(str(path))
    except InputError:
        return None


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_plan_of_the_planner_holds(name: str, documents: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    verdict = verdict_on(documents[name], tmp_path)
    assert verdict is not None
    assert [check for check in verdict.checks if not check.ok] == []
    assert verdict.plan_hash == documents[name]["hash"]


def test_the_plans_have_pipelines_of_several_kinds(documents: dict[str, dict[str, Any]]) -> None:
    schedules = {document["schedule"]["name"] for document in documents.values()}
    assert set(SCHEDULES.values()) <= schedules and len(set(SCHEDULES.values())) == 4
    assert all(documents[name]["schedule"]["name"] == schedule for name, schedule in SCHEDULES.items())


@pytest.mark.slow
def test_mutants_are_refused(documents: dict[str, dict[str, Any]], tmp_path: Path, full: bool) -> None:
    rng = random.Random(11)
    count = (ALL_MUTANTS if full else MUTANTS) // len(QUESTIONS) + 1
    taken: Counter[str] = Counter()
    for document in documents.values():
        for path, mutant in islice(mutants(document, rng), count):
            if all(_equal_to_rounding(document[part], mutant[part]) for part in PARTS):
                continue  # another rounding of a part that is nothing
            verdict = verdict_on(mutant, tmp_path)
            if verdict is None or not verdict.ok or path[-1] in EFFORT:
                continue
            assert _is_true(read_plan(str(tmp_path / "plan.yaml"))), path
            taken["profile" if path[:2] == ("job", "profile") else _name(path)] += 1
    assert set(taken) <= TRUE_ALL_THE_SAME, taken
    assert taken.total() < 0.1 * count * len(documents)


def _name(path: tuple[str | int, ...]) -> str:
    return "runners_up" if path == ("runners_up",) else str(path[-1])


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("pointwise_passes", lambda value: value * (1 + 1e-6)),
        ("host_step_s", lambda value: value + 1e-7),
        ("dispatch_s", lambda value: value + 0.01),
        ("attention", lambda value: []),
        ("reduce_in_fp32", lambda value: not value),
        # The device's source of numbers decides which of the two counts.
        ("bands", lambda value: [value[0], value[1] + 1e-6]),
    ],
)
def test_a_plan_for_other_software_is_refused(
    documents: dict[str, dict[str, Any]], field: str, change: Any, tmp_path: Path
) -> None:
    found = set()
    for name in ("zb_v", "one device", "sharded"):
        document = copy.deepcopy(documents[name])
        profile = document["job"]["profile"]
        for part in ("warm_band", "cold_band") if field == "bands" else (field,):
            profile[part] = change(profile[part])
        verdict = verdict_on(with_hash(document), tmp_path)
        assert verdict is not None
        found.add(verdict.ok)
    # Old devices have no fused attention, whatever the software prefers.
    assert found == ({True, False} if field == "attention" else {False})


def _is_true(plan: Plan) -> bool:
    """Whether the planner's estimates of the plan's strategies are those of the plan."""
    results = [
        search.evaluate(plan.model, plan.cluster, plan.job, strategy)
        for strategy in (plan.best.strategy, *(runner_up.strategy for runner_up in plan.runners_up))
    ]
    answer = Answer(best=results[0], runners_up=tuple(results[1:]), certificate=plan.proof)
    rewritten = plan_document(_plan_of(answer, model=plan.model, cluster=plan.cluster, job=plan.job))
    written = plan_document(plan)
    return all(
        _equal_to_rounding(written[part], rewritten[part])
        for part in ("best", "runners_up", "schedule", "certificate")
    )


def _equal_to_rounding(a: Any, b: Any) -> bool:
    """Equal; numbers to 1e-9 of the larger, or to the rounding of a part that is nothing."""
    if isinstance(a, dict):
        return (
            isinstance(b, dict)
            and a.keys() == b.keys()
            and all(_equal_to_rounding(a[key], b[key]) for key in a)
        )
    if isinstance(a, list):
        return (
            isinstance(b, list)
            and len(a) == len(b)
            and all(_equal_to_rounding(x, y) for x, y in zip(a, b, strict=True))
        )
    if isinstance(a, float):
        return bool(abs(a - b) <= 1e-9 * max(abs(a), abs(b), 1e-3))
    return bool(a == b)


@pytest.mark.parametrize(("code", "number"), [("interleaved_microbatches", 1), ("v_microbatches", -7)])
def test_a_wrong_ledger_that_adds_up_is_refused(
    code: str, number: int, documents: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    document = json.loads(json.dumps(documents["zb_v"]))
    document["certificate"]["rejected"][code] += number
    document["certificate"]["cut_by_bound"] -= number
    verdict = verdict_on(with_hash(document), tmp_path)
    assert verdict is not None
    assert [check.name for check in verdict.checks if not check.ok] == [f"rejected by {code}"]


def test_a_bound_above_the_best_is_refused(documents: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Even if its gap follows from it."""
    document = json.loads(json.dumps(documents["sharded"]))
    certificate = document["certificate"]
    certificate["lower_bound_s"] = 1.5 * certificate["best_s"]
    certificate["gap"] = -0.5
    verdict = verdict_on(with_hash(document), tmp_path)
    assert verdict is not None
    assert [check.name for check in verdict.checks if not check.ok] == ["lower bound"]


@pytest.mark.parametrize("name", QUESTIONS)
def test_another_best_is_refused_however_consistent(
    name: str, documents: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """The second-best strategy in place of the best, with its own figures, schedule and certificate."""
    path = tmp_path / "plan.yaml"
    path.write_text(json.dumps(documents[name]))
    plan = read_plan(str(path))
    slower = [one for one in plan.runners_up if one.step_time_s > plan.best.step_time_s * (1 + 1e-9)]
    results = [search.evaluate(plan.model, plan.cluster, plan.job, one.strategy) for one in slower]
    best, *rest = results
    certificate = replace(plan.proof, best_s=best.step_time_s, lower_bound_s=best.step_time_s, gap=0.0)
    answer = Answer(best=best, runners_up=tuple(rest), certificate=certificate)
    claimed = _plan_of(answer, model=plan.model, cluster=plan.cluster, job=plan.job, target=plan.target)
    verdict = verdict_on(plan_document(claimed), tmp_path)
    assert verdict is not None
    (wrong,) = [check for check in verdict.checks if not check.ok]
    assert wrong.name == "optimal"
    # The first counterexample, which need not be the best.
    seconds = float(wrong.expected.split(" s, ")[0])
    assert plan.best.step_time_s * (1 - 1e-9) <= seconds < best.step_time_s


def test_a_proof_that_takes_too_long_is_open(documents: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Neither proven nor wrong."""
    path = tmp_path / "plan.yaml"
    path.write_text(json.dumps(documents["sharded"]))
    verdict = check_file(str(path), proof_budget_s=0.0)
    last = verdict.checks[-1]
    assert (last.name, last.ok, last.is_open) == ("optimal", False, True)
    assert last.expected == "not proven within 0 s"
    assert verdict.ok


def test_of_a_search_that_ended_early_its_bound_is_proven(
    documents: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """A bound below all candidates is accepted; one above the optimum is refused, even if it is below the
    plan's result.
    """
    path = tmp_path / "plan.yaml"
    path.write_text(json.dumps(documents["sharded"]))
    plan = read_plan(str(path))
    found = plan.runners_up[-1]
    best = search.evaluate(plan.model, plan.cluster, plan.job, found.strategy)
    least_s, best_s = plan.best.step_time_s, best.step_time_s
    assert best_s > least_s * 1.001
    for bound_s, ok in ((0.9 * least_s, True), ((least_s + best_s) / 2, False)):
        left = plan.proof.enumerated - plan.proof.cut_by_bound
        certificate = replace(
            plan.proof,
            enumerated=left,
            unexplored=plan.proof.cut_by_bound,
            cut_by_bound=0,
            best_s=best_s,
            lower_bound_s=bound_s,
            gap=(best_s - bound_s) / best_s,
        )
        answer = Answer(best=best, runners_up=(), certificate=certificate)
        claimed = _plan_of(answer, model=plan.model, cluster=plan.cluster, job=plan.job, target=plan.target)
        verdict = verdict_on(plan_document(claimed), tmp_path)
        assert verdict is not None
        assert [check.name for check in verdict.checks if not check.ok] == ([] if ok else ["optimal"])
        assert verdict.checks[-1].found == f"no step time below {bound_s!r} s"


@pytest.mark.parametrize("name", ["zb_v", "experts", "tensor"])
def test_a_runner_up_left_out_is_missed(
    name: str, documents: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """A list without its last entry is still true; without its first it is not."""
    document = json.loads(json.dumps(documents[name]))
    first, *others = document["runners_up"]
    verdict = verdict_on(with_hash({**document, "runners_up": [first, *others[:-1]]}), tmp_path)
    assert verdict is not None and verdict.ok
    verdict = verdict_on(with_hash({**document, "runners_up": others}), tmp_path)
    assert verdict is not None
    (wrong,) = [check for check in verdict.checks if not check.ok]
    assert wrong.name == "optimal"
    assert wrong.expected.startswith("a better runner-up: ")
