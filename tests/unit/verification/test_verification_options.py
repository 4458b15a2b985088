"""The checker judges the options of the software in a plan file: a changed one is found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.targets.small_plans import LLAMA, MIXTRAL, small_plan

from shardwise.plans import Plan, PlanQuestion, plan_document
from shardwise.plans.documents import document_hash
from shardwise.strategy import NEWEST_MEGATRON_LM, Profile, target_of
from shardwise_verify import check_document

MEGATRON = target_of("megatron-lm-0.19")


def plan_with(
    options: Mapping[str, str], strategy: str, target: str | None = MEGATRON.name, config: Any = LLAMA
) -> Plan:
    """The plan of a strategy with these options."""
    profile: Profile = MEGATRON.with_options(NEWEST_MEGATRON_LM, options)
    plan = small_plan(config, strategy, profile=profile)
    return replace(plan, certificate=None, question=PlanQuestion(target=target, options=options))


def failed(document: dict[str, Any]) -> set[str]:
    """The names of the checks that fail."""
    document["hash"] = document_hash(document)
    return {check.name for check in check_document(document).checks if not check.ok and not check.is_open}


ALL = {"tp_comm_overlap": "on", "grad_reduce_dtype": "bf16", "moment_dtype": "bf16"}
SPLIT = "tp=2,dp=4,sequence_parallel=yes,zero_stage=1"


@pytest.mark.parametrize("target", [MEGATRON.name, None])
def test_a_plan_with_options_is_checked(target: str | None) -> None:
    document = plan_document(plan_with(ALL, SPLIT, target))
    assert document["best"]["strategy"]["options"] == ALL  # type: ignore[index]
    assert failed(document) == set()


def test_options_that_do_not_act_are_not_claimed() -> None:
    plan = plan_with(ALL, "tp=1,dp=8,zero_stage=1")
    assert plan.options == {"grad_reduce_dtype": "bf16", "moment_dtype": "bf16"}
    document = plan_document(plan)
    assert failed(document) == set()
    document["best"]["strategy"]["options"] = ALL  # type: ignore[index]
    assert failed(document) == {"options of the strategy"}


@pytest.mark.parametrize(
    ("place", "option", "value", "checks"),
    [
        # The profile keeps what follows from the other value.
        ("job", "grad_reduce_dtype", "fp32", {"options", "options of the strategy"}),
        ("job", "tp_comm_overlap", "off", {"options", "options of the strategy"}),
        ("job", "moment_dtype", "fp32", {"options", "options of the strategy"}),
        ("job", "frobnicate", "on", {"options"}),
        ("best", "tp_comm_overlap", "off", {"options of the strategy"}),
        ("best", "frobnicate", "on", {"options of the strategy"}),
        ("question", "grad_reduce_dtype", "fp32", {"options"}),
    ],
)
def test_a_changed_option_is_found(place: str, option: str, value: str, checks: set[str]) -> None:
    document: Any = plan_document(plan_with(ALL, SPLIT))
    places = {
        "job": document["job"]["profile"],
        "best": document["best"]["strategy"],
        "question": document["question"],
    }
    places[place]["options"][option] = value
    assert failed(document) == checks


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tensor_overlap", 0.9),
        ("needs_sequence_parallel", False),
        ("reduce_in_fp32", True),
        ("moment_bytes", 4.0),
    ],
)
def test_a_profile_without_what_follows_from_an_option_is_found(field: str, value: object) -> None:
    document: Any = plan_document(plan_with(ALL, SPLIT))
    document["job"]["profile"][field] = value
    assert "options" in failed(document)


@pytest.mark.parametrize(
    ("strategy", "excluded"),
    [
        ("ep=4,dp=8,zero_stage=1", False),
        ("ep=4,pp=2,vpp=2,dp=4,zero_stage=1", False),
        ("ep=4,pp=2,dp=4,zero_stage=1", True),  # no virtual stages
        ("ep=1,pp=2,dp=4,zero_stage=1", False),  # nothing to overlap
        ("ep=4,dp=8,zero_stage=1,recompute=full,recompute_layers=8", True),
        ("ep=4,dp=8,zero_stage=1,recompute=selective,recompute_modules=moe_act", False),
        ("ep=4,dp=8,zero_stage=1,recompute=selective,recompute_modules=core_attn+moe", True),
    ],
)
def test_limits_of_overlapped_expert_communication(strategy: str, excluded: bool) -> None:
    """The checker and the planner exclude the same."""
    plan = plan_with({"ep_overlap": "on"}, strategy, config=MIXTRAL)
    assert ("target" in failed(dict(plan_document(plan)))) == excluded
    broken = MEGATRON.for_job(plan.model, plan.job).broken_limit(plan.best.strategy)
    assert (broken is not None) == excluded


def test_limits_of_options_hold() -> None:
    """Moments in 16 bits are of the distributed optimizer alone."""
    options = {"moment_dtype": "bf16"}
    assert failed(dict(plan_document(plan_with(options, "dp=8,zero_stage=1")))) == set()
    assert failed(dict(plan_document(plan_with(options, "dp=8,zero_stage=0")))) == {"target"}
    assert failed(dict(plan_document(plan_with({}, "dp=8,zero_stage=0")))) == set()


@pytest.mark.parametrize(
    ("value", "config", "strategy", "excluded"),
    [
        ("modules", MIXTRAL, "ep=4,dp=8,zero_stage=1", False),
        ("modules", MIXTRAL, "ep=4,dp=8,zero_stage=1,recompute=full,recompute_layers=8", True),
        ("modules", MIXTRAL, "ep=4,dp=8,zero_stage=1,recompute=selective,recompute_modules=moe", True),
        ("modules", LLAMA, "dp=8,zero_stage=1", True),  # no router
        ("full_iteration", LLAMA, "dp=8,zero_stage=1", False),
        ("full_iteration", LLAMA, "dp=8,zero_stage=1,offload=optimizer", True),
        ("full_iteration", MIXTRAL, "ep=4,dp=8,zero_stage=1", True),  # dispatch waits for counts
    ],
)
def test_limits_of_cuda_graphs(value: str, config: Any, strategy: str, excluded: bool) -> None:
    """The checker and the planner exclude the same."""
    plan = plan_with({"cuda_graph": value}, strategy, config=config)
    assert ("target" in failed(dict(plan_document(plan)))) == excluded
    broken = MEGATRON.for_job(plan.model, plan.job).broken_limit(plan.best.strategy)
    assert (broken is not None) == excluded


def test_cuda_graphs_take_the_host_out_of_a_step() -> None:
    """Of an expert model, `modules` leaves what experts wait for; `full_iteration` leaves nothing."""
    steps, waits = [], []
    for value in ("none", "modules", "full_iteration"):
        plan = plan_with({"cuda_graph": value}, "ep=4,dp=8,zero_stage=1", target=None, config=MIXTRAL)
        assert not failed(dict(plan_document(plan)))
        steps.append(plan.best.step_time_s)
        waits.append(plan.best.breakdown["host_waits"])
    assert waits[0] > waits[1] > waits[2] == 0.0
    assert steps[0] > steps[1] > steps[2]
    # A phase waits max(dispatch - computation, 0); graphs take the 8.449e-05 s of each operator away.
    own = MEGATRON.own_profile
    assert MEGATRON.with_options(own, {"cuda_graph": "modules"}).expert_dispatch_s == own.expert_dispatch_s
