"""The checker's view of a recommended plan: its optimum, what is given up, and the tolerance."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

import shardwise as sw
from shardwise_verify import check_document
from shardwise_verify.verdict import hash_of


@pytest.fixture(scope="module")
def plan() -> sw.Plan:
    """A plan that gives up 0.13 % for a named ZeRO stage: the optimum shards over 8 of 16 ranks."""
    found = sw.plan(
        "llama-3.1-8b", cluster="2x8xH100-SXM", seq_len=8192, global_batch_size=128, target="torchtitan",
        fix={"pp": 1, "tp": 1},
    )  # fmt: skip
    assert found.optimum is not None and found.strategy.optim_shard == 16
    assert found.optimum.strategy.optim_shard == 8 and 1e-5 < found.given_up < 1e-2
    return found


def failed(plan: sw.Plan) -> set[str]:
    return {check.name for check in sw.check(plan).failed}


def test_a_recommended_plan_and_the_proof_of_its_optimum_hold(plan: sw.Plan) -> None:
    assert failed(plan) == set()


def test_a_wrong_time_of_the_optimum_is_noticed(plan: sw.Plan) -> None:
    assert plan.optimum is not None and plan.certificate is not None
    seconds = plan.optimum.step_time_s * 0.999
    certificate = replace(plan.certificate, best_s=seconds, lower_bound_s=seconds)
    wrong = replace(plan, optimum=replace(plan.optimum, step_time_s=seconds), certificate=certificate)
    assert "optimum" in failed(wrong)


def test_an_optimum_that_is_not_the_fastest_is_noticed(plan: sw.Plan) -> None:
    """The recommended strategy itself is named as the optimum: the proof finds the faster one."""
    assert plan.certificate is not None
    seconds = plan.step_time_s
    certificate = replace(plan.certificate, best_s=seconds, lower_bound_s=seconds)
    assert "optimal" in failed(replace(plan, optimum=None, certificate=certificate, runners_up=()))


def test_a_wrong_probability_of_the_optimum_is_noticed(plan: sw.Plan) -> None:
    assert plan.optimum is not None and plan.optimum.fits_probability is not None
    optimum = replace(plan.optimum, fits_probability=plan.optimum.fits_probability - 1e-6)
    assert failed(replace(plan, optimum=optimum)) == {"optimum fits"}


def test_a_wrong_band_of_memory_is_noticed(plan: sw.Plan) -> None:
    low, high = plan.memory_band
    for changed, check in (
        (replace(plan.best, memory_band_bytes=(low * (1.0 - 1e-6), high)), "memory band low"),
        (replace(plan.best, memory_band_bytes=(low, high * (1.0 + 1e-6))), "memory band high"),
        (replace(plan.best, fits_probability=plan.fits_probability - 1e-6), "fits probability"),
    ):
        assert failed(replace(plan, best=changed)) == {check}


def test_a_band_without_the_errors_that_it_comes_from_is_noticed(plan: sw.Plan) -> None:
    """A file has all three or, before they were known, none."""
    document = sw.check(plan)
    assert {"memory band low", "memory band high", "fits probability"} <= {
        one.name for one in document.checks
    }
    content: dict[str, Any] = copy.deepcopy(plan.to_dict())
    del content["job"]["profile"]["peak_errors"]
    content["hash"] = hash_of(content)
    assert [one.name for one in check_document(content).checks if not one.ok] == ["memory band"]
    for name in ("memory_band_bytes", "fits_probability"):
        del content["best"][name]
    content["hash"] = hash_of(content)
    assert all(one.ok or one.is_open for one in check_document(content).checks)


def test_a_plan_beyond_its_tolerance_is_noticed(plan: sw.Plan) -> None:
    assert failed(replace(plan, question=replace(plan.question, tolerance=1e-5))) == {"tolerance"}
