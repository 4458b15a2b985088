"""The capability file and the runtime agree: the runtime refuses by name whatever the file excludes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any
from unittest.mock import patch

import pytest
from tests.runtime.equality import divided, single_process
from tests.runtime.plans import make_plan

from shardwise.cost import RECIPES
from shardwise.errors import ConfigError, Infeasible
from shardwise.launch import own_target
from shardwise.model import Experts
from shardwise.plans import Plan
from shardwise.questions import OPTIMIZERS
from shardwise.runtime import WorkerPool, check_runnable
from shardwise.strategy import FIELD_VALUES
from shardwise.strategy.target import Condition, Limit

SAMPLED = 3
DEGREES = ((1, 1, 2, 2), (2, 1, 1, 2), (2, 1, 2, 1), (1, 2, 1, 2), (1, 2, 2, 1), (1, 1, 4, 1), (2, 2, 1, 1))
"""tp, cp, pp and dp of four ranks: two axes at a time, and four stages."""


def with_strategy(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, best=replace(plan.best, fields=replace(plan.best.strategy, **changes)))


def refused(plan: Plan) -> tuple[str | None, str | None]:
    """Key and allowed values of the refusal, without its advice on planning."""
    with pytest.raises(ConfigError) as caught:
        check_runnable(plan)
    key, allowed = caught.value.key, caught.value.allowed
    assert key is not None and allowed is not None
    if not key.startswith("best.strategy."):
        return key, allowed
    values, reported, _ = allowed.partition(", as in plans of `plan --target shardwise`")
    assert reported
    return key, values


def test_values_off_an_axis_are_refused() -> None:
    plan = make_plan("dp=4,zero_stage=1")
    check_runnable(plan)
    limited = replace(own_target(), axes={"offload": ("none",)})
    with patch("shardwise.launch.capability.own_target", lambda: limited):
        check_runnable(plan)
        for other in set(FIELD_VALUES["offload"]) - {"none"}:
            assert refused(with_strategy(plan, offload=other)) == ("best.strategy.offload", "none")


def test_values_planned_only_on_request_run() -> None:
    plan = make_plan("dp=4,zero_stage=1")
    assert own_target().default_axes
    for field, values in own_target().default_axes.items():
        for other in set(FIELD_VALUES[field]) - set(values):
            check_runnable(with_strategy(plan, **{field: other}))


def beyond(condition: Condition) -> dict[str, Any]:
    (field,) = condition.left.fields
    if condition.values:
        return {field: condition.values[-1]}
    if condition.below is not None:
        return {field: 2, condition.below.fields[0]: 4}
    return {field: 4}  # all four replicas


@pytest.mark.parametrize("limit", own_target().limits, ids=lambda limit: limit.allowed[:40])
def test_values_beyond_a_limit_are_refused_and_those_within_run(limit: Limit) -> None:
    plan = make_plan("dp=4,zero_stage=1")
    broken: dict[str, Any] = {}
    for condition in limit.where:
        broken |= beyond(condition)
    assert refused(with_strategy(plan, **broken)) == (f"best.strategy.{limit.field}", limit.allowed)
    for condition in limit.where:  # all conditions but one
        reduced = {name: value for name, value in broken.items() if name not in beyond(condition)}
        check_runnable(with_strategy(plan, **reduced))


def test_a_job_beyond_the_capability_file_is_refused() -> None:
    plan = make_plan("dp=4")
    for dtype in set(RECIPES) - set(own_target().dtypes):
        assert refused(replace(plan, job=replace(plan.job, dtype=dtype)))[0] == "job.dtype"
    for name in set(OPTIMIZERS) - set(own_target().optimizers):
        job = replace(plan.job, optimizer=name)  # type: ignore[arg-type]
        assert refused(replace(plan, job=job))[0] == "job.optimizer"
    assert refused(replace(plan, network=replace(plan.model, family="t5")))[0] == "model"


def test_parts_of_models_that_the_file_lacks_are_refused() -> None:
    plan = make_plan("dp=4")
    predicts = replace(plan.model, head_layers=1)
    assert refused(replace(plan, network=predicts)) == ("model", "models without it")
    (kind,) = plan.model.kinds
    capped = replace(
        plan.model, kinds=(replace(kind, experts=Experts(experts=4, top_k=2, capacity_factor=1.0)),)
    )
    assert refused(replace(plan, network=capped)) == ("model", "models without it")


@pytest.mark.parametrize("name", ["phi3", "gemma2", "gemma3", "gpt_oss"])
def test_scores_that_need_all_keys_are_refused_on_context_ranks(name: str) -> None:
    """A window of 6, soft-caps and sinks; where the sequence is as long as the window, soft-caps and sinks
    only."""
    plan = make_plan("cp=2", model=name)
    assert refused(plan) == ("best.strategy.cp", "1")
    short = make_plan("cp=2", model=name, seq_len=4)
    if name in ("gemma2", "gpt_oss"):
        assert refused(short) == ("best.strategy.cp", "1")
    else:
        check_runnable(short)


def sampled(draw: random.Random, model: str) -> str:
    """Any strategy of four ranks, as text; it may be illegal."""
    tp, cp, pp, dp = draw.choice(DEGREES)
    schedule = draw.choice(FIELD_VALUES["schedule"]) if pp > 1 else "1f1b"
    vpp = 2 if schedule in ("zb_v", "dualpipe_v", "interleaved_1f1b") else 1
    recompute = draw.choice(FIELD_VALUES["recompute"])
    states = draw.choice([degree for degree in (1, 2, 4) if (dp * cp) % degree == 0])
    fields = {
        "tp": tp, "cp": cp, "pp": pp, "dp": dp, "schedule": schedule, "vpp": vpp, "recompute": recompute,
        "recompute_layers": 1 if recompute == "full" else 0, "offload": draw.choice(FIELD_VALUES["offload"]),
        "cp_kind": draw.choice(FIELD_VALUES["cp_kind"]) if cp > 1 else "ring",
        "ep": draw.choice((1, 2)) if model == "mixtral" else 1, "optim_shard": states,
        "grad_shard": draw.choice((1, states)), "param_shard": 1, "micro_batch_size": draw.choice((1, 2)),
        "sequence_parallel": "true" if tp > 1 and draw.random() < 0.5 else "false",
    }  # fmt: skip
    return ",".join(f"{name}={value}" for name, value in fields.items())


def not_refused(model: str) -> Iterator[Plan]:
    """Legal plans that the file does not exclude, in a seeded order."""
    draw = random.Random(f"plans for {model}")
    while True:
        try:
            plan = make_plan(sampled(draw, model), model=model)
        except (ConfigError, Infeasible):
            continue
        if not list(own_target().refusals(plan.best.strategy)):
            yield plan


@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_plans_within_the_capability_file_run_and_equal_one_process(team: WorkerPool, model: str) -> None:
    plans = list(islice(not_refused(model), SAMPLED))
    right = single_process(plans[0], seed=0, steps=1)
    for plan in plans:
        found = team.run(plan.cluster.devices, divided, plan, right, 0, None)
        assert max(rank.largest for rank in found) < 2e-5, plan.best.strategy
