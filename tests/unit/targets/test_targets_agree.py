"""Megatron-LM's capability file, which the search uses, the export, and the same limits in plain code agree
on what is allowed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.targets.random_plans import is_within_target, random_plans

from shardwise.errors import ConfigError
from shardwise.plans import Plan
from shardwise.strategy import Strategy, Target, target_of
from shardwise.targets.megatron_lm import megatron_lm_flags

PLANS = 240


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return random_plans(PLANS, seed=7, is_free=True)


def _refused_fields(target: Target, plan: Plan) -> set[str]:
    """Fields by which the capability file refuses a plan."""
    refusals = target.for_job(plan.model, plan.job).refusals(plan.best.strategy)
    return {refusal.key for refusal in refusals}


def _is_exported(plan: Plan) -> bool:
    try:
        return bool(megatron_lm_flags(plan))
    except ConfigError:
        return False


def _is_known_order(plan: Plan) -> bool:
    """Whether the order of ranks is one of Megatron-LM's, by the axes with several ranks. The search writes
    each such order in one way.
    """
    strategy = plan.best.strategy
    orders = [
        [axis for axis in order.split("-") if getattr(strategy, axis) > 1]
        for order in (strategy.axis_order, "tp-cp-dp-pp", "tp-cp-pp-dp")
    ]
    return orders[0] in orders[1:]


def _disagreements(target: Target, plans: list[Plan]) -> list[tuple[set[str], Strategy]]:
    found = []
    for plan in plans:
        refused = _refused_fields(target, plan)
        if refused == {"axis_order"} and _is_known_order(plan):
            continue
        is_within = is_within_target(plan.best.strategy, plan.model, plan.job)
        if not bool(refused) == (not is_within) == (not _is_exported(plan)):
            found.append((refused, plan.best.strategy))
    return found


@pytest.mark.slow
def test_exactly_the_strategies_of_the_search_are_exported(plans: list[Plan]) -> None:
    assert _disagreements(target_of("megatron-lm-0.19"), plans) == []


@pytest.mark.slow
def test_the_samples_have_exported_and_refused_strategies(plans: list[Plan]) -> None:
    exported = sum(map(_is_exported, plans))
    assert PLANS // 5 < exported < PLANS * 4 // 5
    target = target_of("megatron-lm-0.19")
    fields = set().union(*(_refused_fields(target, plan) for plan in plans))
    assert fields >= {
        "axis_order",
        "schedule",
        "param_shard",
        "grad_shard",
        "recompute",
        "offload",
        "optim_shard",
    }


@pytest.mark.slow
def test_a_capability_file_without_a_limit_or_a_field_is_noticed(plans: list[Plan]) -> None:
    target = target_of("megatron-lm-0.19")
    for limit in target.limits:
        broken = replace(target, limits=tuple(one for one in target.limits if one is not limit))
        assert _disagreements(broken, plans), limit
    for name in set(target.axes) - {"param_shard"}:  # where it is above 1, so is grad_shard
        broken = replace(
            target, axes={field: values for field, values in target.axes.items() if field != name}
        )
        assert _disagreements(broken, plans), name
