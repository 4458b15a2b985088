"""The capability file and the runtime agree: what the file rules out is refused by its name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.runtime.plans import make_plan

from shardwise.app.cli.request import DTYPES, OPTIMIZERS
from shardwise.errors import ConfigError
from shardwise.model import model_from_config
from shardwise.plan import Plan
from shardwise.runtime import check_runnable
from shardwise.runtime.capability import TARGET
from shardwise.strategy import NAMES
from shardwise.strategy.target import Condition, Limit


def with_strategy(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, best=replace(plan.best, strategy=replace(plan.best.strategy, **changes)))


def refused(plan: Plan) -> tuple[str | None, str | None]:
    """Key and allowed values of the refusal."""
    with pytest.raises(ConfigError) as caught:
        check_runnable(plan)
    return caught.value.key, caught.value.allowed


def test_values_off_an_axis_are_refused() -> None:
    plan = make_plan("dp=4,zero_stage=1")
    check_runnable(plan)
    assert TARGET.axes
    for field, values in TARGET.axes.items():
        for other in set(NAMES.get(field, (2, 4))) - set(values):
            key, _ = refused(with_strategy(plan, **{field: other}))
            assert key == f"best.strategy.{field}"


def beyond(condition: Condition) -> dict[str, Any]:
    if condition.values:
        return {condition.field: condition.values[-1]}
    if condition.below is not None:
        return {condition.field: condition.above + 1, condition.below: 4}
    return {condition.field: 4}  # all of the four replicas


@pytest.mark.parametrize("limit", TARGET.limits, ids=lambda limit: limit.allowed)
def test_what_is_beyond_a_limit_is_refused_and_what_is_just_within_is_not(limit: Limit) -> None:
    plan = make_plan("dp=4,zero_stage=1")
    broken: dict[str, Any] = {}
    for condition in limit.where:
        broken |= beyond(condition)
    assert refused(with_strategy(plan, **broken)) == (f"best.strategy.{limit.field}", limit.allowed)
    for condition in limit.where:  # one condition less
        kept = {name: value for name, value in broken.items() if name not in beyond(condition)}
        check_runnable(with_strategy(plan, **kept))


def test_what_a_job_asks_beyond_the_file_is_refused() -> None:
    plan = make_plan("dp=4")
    for dtype in set(DTYPES) - set(TARGET.dtypes):
        assert refused(replace(plan, job=replace(plan.job, dtype=dtype)))[0] == "job.dtype"
    for name in set(OPTIMIZERS) - set(TARGET.optimizers):
        job = replace(plan.job, optimizer=name)  # type: ignore[arg-type]
        assert refused(replace(plan, job=job))[0] == "job.optimizer"
    gemma = model_from_config(
        {"model_type": "gemma2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96,
         "max_position_embeddings": 64},
        name="gemma",
    )  # fmt: skip
    assert refused(replace(plan, model=gemma))[0] == "model"
