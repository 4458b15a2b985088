"""Targets of data-parallel ranks: the capability file, which the search uses, the export, and the same limits
in plain code agree on what is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pytest
from tests.targets.replica_plans import WITHIN, Question, questions, replica_plans

from shardwise.errors import ConfigError
from shardwise.plans import Plan
from shardwise.strategy import Target, target_of
from shardwise.targets import EXPORTERS

PLANS, QUESTIONS = 60, 2500

pytestmark = pytest.mark.slow


def _is_exported(target: str, plan: Plan) -> bool:
    try:
        return bool(EXPORTERS[target].files(plan))
    except ConfigError:
        return False


def _disagreements(target: Target, asked: list[Question]) -> Iterator[Question]:
    """Strategies that the capability file allows and the plain code does not, or the other way round."""
    is_within = WITHIN[target.name]
    for one in asked:
        is_refused = any(target.for_job(one.model, one.job).refusals(one.strategy))
        if is_refused == is_within(one.strategy, one.model, one.job):
            yield one


@pytest.mark.parametrize("name", WITHIN)
def test_the_capability_file_has_exactly_the_limits_of_the_target(name: str) -> None:
    asked = list(islice(questions(name, seed=7), QUESTIONS))
    target = target_of(name)
    assert list(_disagreements(target, asked)) == []
    # A broken twin: without any one of the limits they no longer agree.
    for limit in (one for one in target.limits if one.families != ("phi3",)):
        broken = replace(target, limits=tuple(one for one in target.limits if one is not limit))
        assert any(_disagreements(broken, asked)), limit


@pytest.mark.parametrize("name", WITHIN)
def test_exactly_the_plans_within_the_limits_are_exported(name: str) -> None:
    plans = replica_plans(name, PLANS, seed=8, is_free=True) + replica_plans(name, PLANS // 6, seed=9)
    for plan in plans:
        is_within = WITHIN[name](plan.best.strategy, plan.model, plan.job)
        assert _is_exported(name, plan) == is_within, plan.best.strategy
