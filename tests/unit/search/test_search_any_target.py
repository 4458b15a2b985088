"""Without a target nothing that Megatron-LM runs is left out: its best plan is never the faster one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
from tests.property.search_instances import Instance
from tests.unit.targets.small_plans import LLAMA, MIXTRAL

import shardwise as sw
from shardwise.cluster import load_cluster
from shardwise.model import model_from_config
from shardwise.plans import Plan, plan_document
from shardwise.search import Question, default_job, plan, without_target
from shardwise.strategy import strategy_record
from shardwise_verify import check_document
from shardwise_verify.space import count_space
from shardwise_verify.verdict import hash_of

DENSE = {**LLAMA, "num_hidden_layers": 14, "hidden_size": 4096, "intermediate_size": 11008}
EXPERTS = {**MIXTRAL, "hidden_size": 4096, "intermediate_size": 8192, "num_local_experts": 16}

QUESTIONS: Mapping[str, dict[str, Any]] = {
    "named modules": {"model": DENSE, "cluster": "2x4xA100-40G", "fix": {"recompute": "selective"}},
    "empty ends": {"model": DENSE, "cluster": "2x4xA100-80G", "fix": {"pp": 8, "vpp": 2}},
    "overlap of experts": {"model": EXPERTS, "cluster": "2x4xA100-80G"},
    "tensor parallelism": {"model": DENSE, "cluster": "1x8xH100-SXM", "fix": {"tp": 8}},
}  # fmt: skip


SMALL = {**MIXTRAL, "num_hidden_layers": 3, "num_local_experts": 4}

ANY, OWN = "any", "megatron-lm-0.19"


@cache
def planned(name: str, target: str) -> Plan:
    return sw.plan(**QUESTIONS[name], seq_len=2048, global_batch_size=16, target=target, tolerance=0.0)


@pytest.mark.parametrize("name", QUESTIONS)
def test_megatron_lm_is_never_faster(name: str) -> None:
    assert planned(name, ANY).optimum_s <= planned(name, OWN).optimum_s * (1 + 1e-12)


def test_each_question_needs_what_it_is_about() -> None:
    """Their answers for Megatron-LM have it, so a search without it would be noticed above."""
    best = {name: planned(name, OWN) for name in QUESTIONS}
    modules = best["named modules"].strategy
    assert modules is not None and modules.recompute_modules
    ends = best["empty ends"].strategy
    assert ends is not None and ends.pp * ends.vpp == DENSE["num_hidden_layers"] + 2
    assert best["overlap of experts"].options["ep_overlap"] == "on"
    assert best["tensor parallelism"].options["tp_comm_overlap"] == "on"


@pytest.mark.parametrize("name", QUESTIONS)
def test_evaluate_without_a_target_gives_the_same_time(name: str) -> None:
    plan = planned(name, ANY)
    searched = {key: value for key, value in plan.options.items() if key == "ep_overlap"}
    own = {key: value for key, value in QUESTIONS[name].items() if key != "fix"}
    again = sw.evaluate(
        **own,
        seq_len=2048,
        global_batch_size=16,
        strategy=strategy_record(plan.strategy),
        set=searched or None,
    )
    assert again.step_time_s == plan.step_time_s


def failing(document: Mapping[str, Any]) -> set[str]:
    checks = check_document({**document, "hash": hash_of(document)}).checks
    return {check.name for check in checks if not check.ok}


def test_the_checker_proves_every_search() -> None:
    document = plan_document(planned("overlap of experts", ANY))
    names = {check.name for check in check_document(document).checks if check.ok}
    assert {"optimal", "optimal with ep_overlap off"} <= names
    assert failing(document) == set()


def test_without_the_own_set_the_space_is_smaller() -> None:
    document: dict[str, Any] = plan_document(planned("tensor parallelism", ANY))
    assert failing(document) == set() and document["certificate"]["own_set"]
    certificate = {name: value for name, value in document["certificate"].items() if name != "own_set"}
    assert "space" in failing({**document, "certificate": certificate})


def test_the_space_has_every_set_of_modules_and_the_own_set() -> None:
    """As listed one by one, and as the checker counts it: selective recomputation of nothing named, of `moe`,
    ...; and interleaved pipelines of four stages of three layers."""
    model, cluster = model_from_config(SMALL, name="small"), load_cluster("1x4xA100-40G")
    job = default_job(model, cluster, seq_len=256, global_batch_size=4)
    question = without_target(Question(model=model, cluster=cluster, job=job, use_all=True))
    listed = Instance(seed=0, question=question).candidates()
    selective = {one.recompute_modules for one in listed if one.recompute == "selective"}
    assert {"", "moe", "moe_act"} <= selective
    assert max(one.pp * one.vpp for one in listed if one.schedule == "interleaved_1f1b") == 4
    counted = count_space(
        model_layers=3, experts=4, devices=4, global_batch_size=4, space="default", fixed={},
        axes=question.axes, empty_ends=True, own_set=True,
    )  # fmt: skip
    assert plan(question).certificate.counted == len(listed) == counted.count
