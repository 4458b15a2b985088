"""An option of the software that is left open: the answer is the better of both values, and the certificate
counts the candidates of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tests.unit.targets.small_plans import LLAMA, MIXTRAL

from shardwise.cluster import load_cluster
from shardwise.model import Model, model_from_config
from shardwise.plans import Answer, Plan, PlanQuestion, plan_document, plan_of
from shardwise.search import Question, SearchClock, default_job, over_open_options, plan, plan_for
from shardwise.strategy import target_of
from shardwise_verify import check_document
from shardwise_verify.verdict import hash_of

TARGET = target_of("megatron-lm-0.19")
OPTION = "ep_overlap"
CLUSTER = load_cluster("2x4xA100-80G")
EXPERTS = model_from_config(
    {**MIXTRAL, "hidden_size": 4096, "intermediate_size": 8192, "num_local_experts": 16}, name="experts"
)

QUESTIONS: Mapping[str, Mapping[str, Any]] = {
    "free": {},
    "a pipeline": {"pp": 2},
    "full recomputation, which excludes the overlap": {"recompute": "full"},
    "one expert-parallel rank, where it does not act": {"ep": 1},
    "one chunk in a pipeline, which excludes it": {"pp": 2, "vpp": 1},
}


def question(model: Model, value: str | None, fixed: Mapping[str, Any]) -> Question:
    """The question with this value of the option; with None it is left open."""
    job = default_job(model, CLUSTER, seq_len=1024, global_batch_size=16)
    profile = TARGET.profile_for(job, CLUSTER.vendors.values())
    if value is not None:
        profile = TARGET.with_options(profile, {OPTION: value})
    return Question(
        model=model, cluster=CLUSTER, job=replace(job, profile=profile), fixed=fixed, top=2, use_all=True,
        open_options=(OPTION,) if value is None else (),
    )  # fmt: skip


def answered(asked: Question) -> Answer:
    return over_open_options(TARGET, asked, plan_for(TARGET, asked, plan), SearchClock(None))


@cache
def answers(name: str) -> tuple[Answer, Answer, Answer]:
    """The answers with the option open, off and on."""
    of_open, off, on = (answered(question(EXPERTS, value, QUESTIONS[name])) for value in (None, "off", "on"))
    return of_open, off, on


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_answer_is_the_better_of_both(name: str) -> None:
    of_open, off, on = answers(name)
    assert of_open.best.step_time_s == min(off.best.step_time_s, on.best.step_time_s)
    is_on = of_open.job is not None and of_open.job.profile.options.get(OPTION) == "on"
    assert is_on == (on.best.step_time_s < off.best.step_time_s)


def test_the_overlap_pays_where_it_is_possible_and_only_there() -> None:
    gains = {}
    for name in QUESTIONS:
        of_open, off, _ = answers(name)
        gains[name] = off.best.step_time_s / of_open.best.step_time_s
    assert [name for name, gain in gains.items() if gain > 1.01] == ["free", "a pipeline"]


@pytest.mark.parametrize("name", QUESTIONS)
def test_certificates_count_the_candidates_of_both(name: str) -> None:
    """Those of `off` are the whole space. Those of `on` are the others: with ep above 1, without full
    recomputation, and with one pipeline rank or several chunks."""
    of_open, off, _ = answers(name)
    own = of_open.certificate
    every = [
        replace(own, options={OPTION: "on" if of_open.job != question(EXPERTS, None, {}).job else "off"})
    ]
    every += own.other_options
    counted = {"off": 0, "on": 0}
    for one in every:
        counted[one.options[OPTION]] += one.enumerated
    assert counted["off"] == off.certificate.enumerated
    excluded = {"recompute": "full"}, {"ep": 1}, {"pp": 2, "vpp": 1}
    assert (counted["on"] > 0) == (QUESTIONS[name] not in excluded)
    assert own.counted == sum(counted.values())
    assert own.is_proven and all(one.lower_bound_s >= own.best_s * (1 - 1e-12) for one in own.other_options)


def test_dense_models_have_no_such_option() -> None:
    model = model_from_config(LLAMA, name="dense")
    asked = question(model, None, {"pp": 2})
    found = answered(asked)
    assert found.certificate.other_options == () and found.job is None


@cache
def found() -> Plan:
    answer = answers("a pipeline")[0]
    assert answer.job is not None
    asked = PlanQuestion(target=TARGET.name, fixed={"pp": 2}, use_all=True)
    return plan_of(answer, model=EXPERTS, cluster=CLUSTER, job=answer.job, question=asked)


def failing(document: Mapping[str, Any]) -> set[str]:
    checks = check_document({**document, "hash": hash_of(document)}).checks
    return {check.name for check in checks if not check.ok}


def changed(**values: Any) -> dict[str, Any]:
    """The document with these values in the certificate about the other option."""
    document: dict[str, Any] = plan_document(found())
    (other,) = document["certificate"]["other_options"]
    certificate = {**document["certificate"], "other_options": [{**other, **values}]}
    return {**document, "certificate": certificate}


def test_the_checker_proves_both() -> None:
    names = {check.name for check in check_document(plan_document(found())).checks if check.ok}
    assert {"optimal", "optimal with ep_overlap off", "space with ep_overlap off"} <= names
    assert failing(plan_document(found())) == set()


@pytest.mark.parametrize(
    ("values", "check"),
    [
        ({"lower_bound_s": 1e3}, "optimal with ep_overlap off"),  # some take less
        ({"lower_bound_s": 1e-9}, "optimal with ep_overlap off"),  # says nothing about the best
        ({"enumerated": 5}, "space with ep_overlap off"),
        ({"simulated": 10**6}, "ledger with ep_overlap off"),
        ({"rejected": {}}, "rejected by target with ep_overlap off"),
    ],
)
def test_a_wrong_certificate_about_the_other_value_is_noticed(values: dict[str, Any], check: str) -> None:
    assert check in failing(changed(**values))
