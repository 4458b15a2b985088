"""For each target with an export: the capability file, which the search uses, the export, and the same limits
in plain code agree on what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from tests.targets.random_plans import is_within_target, random_plans
from tests.targets.titan_plans import is_within_titan, random_titan_plans

from shardwise.errors import ConfigError
from shardwise.model import Model
from shardwise.plans import Plan
from shardwise.strategy import Job, Strategy, Target, target_of
from shardwise.targets import EXPORTERS

PLANS = 320


@dataclass(frozen=True, slots=True)
class Exported:
    """A target; random plans, also beyond its limits; its limits in plain code; fields that some exceed."""

    name: str
    drawn: Callable[..., list[Plan]]
    is_within: Callable[[Strategy, Model, Job], bool]
    refused: frozenset[str]

    @property
    def target(self) -> Target:
        return target_of(self.name)


SHARED = frozenset(("axis_order", "grad_shard", "recompute", "offload", "optim_shard"))

TARGETS = (
    Exported("megatron-lm-0.19", random_plans, is_within_target, SHARED | {"schedule", "param_shard"}),
    Exported(
        "torchtitan-0.3", random_titan_plans, is_within_titan, SHARED | {"cp", "cp_kind", "tp", "pp", "etp"}
    ),
)


PARAMETERS = [
    pytest.param(one, id=one.name, marks=pytest.mark.xdist_group(f"plans of {one.name}")) for one in TARGETS
]


@pytest.fixture(scope="module", params=PARAMETERS)
def exported(request: pytest.FixtureRequest) -> Exported:
    found: Exported = request.param
    return found


@dataclass(frozen=True, slots=True)
class Sample:
    """A plan; whether it is within the target's limits in plain code, and whether it is exported."""

    plan: Plan
    is_within: bool
    is_exported: bool


@pytest.fixture(scope="module")
def plans(exported: Exported) -> list[Sample]:
    return [
        Sample(
            plan,
            exported.is_within(plan.best.strategy, plan.model, plan.job),
            _is_exported(exported.name, plan),
        )
        for plan in exported.drawn(PLANS, seed=7, is_free=True)
    ]


def _refused_fields(target: Target, plan: Plan) -> set[str]:
    """Fields by which the capability file refuses a plan."""
    refusals = target.for_job(plan.model, plan.job).refusals(plan.best.strategy)
    return {refusal.key for refusal in refusals}


def _is_exported(name: str, plan: Plan) -> bool:
    try:
        return bool(EXPORTERS[name].files(plan))
    except ConfigError:
        return False


def _is_known_order(target: Target, plan: Plan) -> bool:
    """Whether the order of ranks is one of the target's, by the axes with several ranks. The search writes
    each such order in one way.
    """
    strategy = plan.best.strategy
    found, *known = (
        [axis for axis in order.split("-") if getattr(strategy, axis) > 1]
        for order in (strategy.axis_order, *map(str, target.axes["axis_order"]))
    )
    return found in known


def _disagreements(
    exported: Exported, plans: list[Sample], target: Target
) -> list[tuple[set[str], Strategy]]:
    found = []
    for one in plans:
        plan, refused = one.plan, _refused_fields(target, one.plan)
        if refused == {"axis_order"} and _is_known_order(exported.target, plan):
            continue
        if not bool(refused) == (not one.is_within) == (not one.is_exported):
            found.append((refused, plan.best.strategy))
    return found


@pytest.mark.slow
def test_exactly_the_strategies_of_the_search_are_exported(exported: Exported, plans: list[Sample]) -> None:
    assert _disagreements(exported, plans, exported.target) == []


@pytest.mark.slow
def test_the_samples_have_exported_and_refused_strategies(exported: Exported, plans: list[Sample]) -> None:
    accepted = sum(one.is_exported for one in plans)
    assert PLANS // 5 < accepted < PLANS * 4 // 5
    fields = set().union(*(_refused_fields(exported.target, one.plan) for one in plans))
    assert fields >= exported.refused


@pytest.mark.slow
def test_a_capability_file_without_a_limit_or_a_field_is_noticed(
    exported: Exported, plans: list[Sample]
) -> None:
    target = exported.target
    for limit in target.limits:
        broken = replace(target, limits=tuple(one for one in target.limits if one is not limit))
        assert _disagreements(exported, plans, broken), limit
    for name in set(target.axes) - {"param_shard"}:  # where it is above 1, so is grad_shard
        broken = replace(
            target, axes={field: values for field, values in target.axes.items() if field != name}
        )
        assert _disagreements(exported, plans, broken), name
    sets = [one.plan.best.strategy.recompute_modules.split("+") for one in plans if one.is_within]
    for module in {name for names in sets for name in names if name}:
        fewer = tuple(name for name in target.modules if name != module)
        assert _disagreements(exported, plans, replace(target, modules=fewer)), module
