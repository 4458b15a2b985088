"""A plan whose first stage has only the embedding and whose last has only the head: the search finds it where
the target runs it, and the checker accepts it only with what the certificate says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.unit.targets.small_plans import LLAMA

from shardwise.cluster import load_cluster
from shardwise.errors import Infeasible
from shardwise.model import model_from_config
from shardwise.plans import Plan, PlanQuestion, plan_document, plan_of, read_plan, write_plan
from shardwise.search import Question, default_job, plan, plan_for
from shardwise.search.explanation import question_of
from shardwise.strategy import target_of
from shardwise_verify import Verdict, check_document
from shardwise_verify.verdict import hash_of

MEGATRON_LM = target_of("megatron-lm-0.19")
MODEL = model_from_config({**LLAMA, "vocab_size": 65536, "num_hidden_layers": 6}, name="small")
CLUSTER = load_cluster("1x4xH100-SXM")
FIXED: Mapping[str, Any] = {"pp": 4, "schedule": "interleaved_1f1b", "micro_batch_size": 1}


def asked(has_empty_ends: bool) -> Plan:
    """The best plan of two or more chunks for six layers on four ranks."""
    job = default_job(MODEL, CLUSTER, seq_len=1024, global_batch_size=16)
    job = replace(job, profile=MEGATRON_LM.profile_for(job, CLUSTER.vendors.values()))
    question = Question(model=MODEL, cluster=CLUSTER, job=job, fixed=FIXED, use_all=True)
    answer = plan_for(replace(MEGATRON_LM, has_empty_ends=has_empty_ends), question, plan)
    of_plan = PlanQuestion(target=MEGATRON_LM.name, fixed=FIXED, use_all=True)
    return plan_of(answer, model=MODEL, cluster=CLUSTER, job=job, question=of_plan)


@cache
def found() -> Plan:
    return asked(has_empty_ends=True)


def verdict_of(document: Mapping[str, Any]) -> Verdict:
    return check_document({**document, "hash": hash_of(document)})


def failing(document: Mapping[str, Any]) -> set[str]:
    return {check.name for check in verdict_of(document).checks if not check.ok}


def test_the_best_plan_has_eight_stages_for_six_layers() -> None:
    best = found().best.strategy
    assert (best.pp, best.vpp, best.first_stage_layers, best.last_stage_layers) == (4, 2, 0, 0)


def test_without_empty_ends_there_is_none() -> None:
    """8 stages, the fewest with two chunks on 4 ranks, are more than 6 layers."""
    with pytest.raises(Infeasible):
        asked(has_empty_ends=False)


def test_the_checker_proves_it_and_the_file_reads_back(tmp_path: Path) -> None:
    assert failing(plan_document(found())) == set()
    write_plan(str(tmp_path / "plan.yaml"), found())
    read = read_plan(tmp_path / "plan.yaml")
    assert read == found()
    assert question_of(read).has_empty_ends


def test_a_certificate_of_the_space_without_them_does_not_have_the_plan() -> None:
    document: Mapping[str, Any] = plan_document(found())
    certificate = {name: value for name, value in document["certificate"].items() if name != "empty_ends"}
    assert failing({**document, "certificate": certificate}) >= {"strategy", "space"}


def test_a_target_without_them_is_not_searched_with_them() -> None:
    document = plan_document(found())
    assert "target" in failing({**document, "target": "torchtitan-0.3"})
