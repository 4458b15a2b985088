"""Decisions among uniform arrangements and uneven plans: keep, patch or migrate (`MixedPlanner`).

A patch of an uneven plan leaves pipelines on their nodes. It keeps all complete pipelines with the best
shares, or with the best layers and shares; the latter may include pipelines that lost some of their stages. A
migration goes to the best uneven plan on the present nodes, or to the best uniform arrangement. Decisions
have no side effects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from shardwise.cluster import Cluster
from shardwise.errors import Infeasible
from shardwise.plans import Answer
from shardwise.replanning.arrangement import Arrangement
from shardwise.replanning.pipeline_costs import Prices
from shardwise.replanning.planner import (
    ALTERNATIVES,
    KEEP,
    MIGRATE,
    PATCH,
    RESTARTS,
    Decision,
    Planner,
)
from shardwise.replanning.situation import Situation
from shardwise.replanning.transition import NO_TRANSITION, Costs, Holdings, Transition
from shardwise.replanning.uneven import (
    PlansPerDecision,
    UnevenArrangement,
    UnevenPlanSource,
    UnevenStepTimes,
)
from shardwise.ties import is_less, least_first

AnyArrangement = Arrangement | UnevenArrangement


@dataclass(frozen=True, slots=True)
class _Option:
    """An option with its step time and its transition."""

    decision: str
    arrangement: AnyArrangement
    step_s: float
    transition: Transition


class _Side(Protocol):
    """What differs between uniform and uneven arrangements. Arguments are of the kind of the side."""

    def step_s(self, one: Any, situation: Situation) -> float | None:
        """Seconds per step; None if it cannot run."""

    def holdings(self, one: Any) -> Holdings:
        """The state shards."""

    def swapped(self, one: Any, first: str, second: str) -> AnyArrangement | None:
        """The arrangement with two of its nodes swapped; None if they cannot be."""

    def without_idle_nodes(self, one: Any) -> AnyArrangement:
        """The arrangement on the nodes that it uses."""

    def as_uniform(self, one: Any) -> Arrangement | None:
        """The arrangement from which uniform ones are searched."""

    def fills_nodes(self, one: Any) -> bool:
        """Whether no device of its nodes is idle."""

    def in_place(
        self, one: Any, situation: Situation, *, has_all: bool
    ) -> Iterator[tuple[str, AnyArrangement]]:
        """Keep, if its nodes still hold their state (`has_all`), and patches, as far as the uniform planner
        does not consider them."""

    def answer_on(self, one: Any, cluster: Cluster, space: str) -> Answer:
        """The arrangement alone as an answer, estimated on its nodes without events."""


class MixedPlanner:
    """Decides for one model, cluster and job, and caches estimates and searches.

    It considers uneven plans if the cluster has several pools, or if an uneven plan is running.
    """

    def __init__(self, uniform: Planner, uneven: UnevenStepTimes, plans: UnevenPlanSource | None) -> None:
        """If `plans` is None, no uneven plan is searched."""
        self.uniform, self.uneven, self._plans = uniform, uneven, plans

    def _side(self, one: AnyArrangement) -> _Side:
        """Who predicts and changes the arrangement."""
        return self.uneven if isinstance(one, UnevenArrangement) else self.uniform

    @property
    def prices(self) -> Prices:
        """Costs of uniform strategies, with the model, cluster and job."""
        return self.uniform.steps.prices

    @property
    def costs(self) -> Costs:
        """Fixed costs of transitions, in addition to transfers."""
        return self.uniform.transitions.costs

    def step_s(self, one: AnyArrangement, situation: Situation) -> float | None:
        """Seconds per step; None if a node is gone or the arrangement does not fit any more."""
        return self._side(one).step_s(one, situation)

    def started(self, one: AnyArrangement, situation: Situation) -> Transition:
        """The transition that starts it from a checkpoint."""
        return self._changed(None, one, situation, frozenset(), frozenset(), is_patch=False)

    def swapped(self, one: AnyArrangement, first: str, second: str) -> AnyArrangement | None:
        """The arrangement with two of its nodes swapped; None for an uneven plan if they are of different
        pools."""
        return self._side(one).swapped(one, first, second)

    def without_idle_nodes(self, one: AnyArrangement) -> AnyArrangement:
        """The arrangement on only those nodes that it uses."""
        return self._side(one).without_idle_nodes(one)

    def answer_on(self, one: AnyArrangement, cluster: Cluster, space: str) -> Answer:
        """The arrangement alone as the answer to a question in `space`, estimated on its nodes (`cluster`)
        without events."""
        return self._side(one).answer_on(one, cluster, space)

    def keep(
        self, running: AnyArrangement, situation: Situation, *, horizon_s: float
    ) -> Decision[AnyArrangement] | None:
        """The decision to keep the running plan, without alternatives; None if it cannot run."""
        step_s = self.step_s(running, situation)
        if step_s is None:
            return None
        return _best_decision([_Option(KEEP, running, step_s, NO_TRANSITION)], step_s, horizon_s)

    def replan(
        self,
        running: AnyArrangement | None,
        situation: Situation,
        *,
        horizon_s: float,
        saved: frozenset[str] = frozenset(),
        returned: frozenset[str] = frozenset(),
    ) -> Decision[AnyArrangement]:
        """The best decision over the horizon, as in `Planner.replan`. Raises Infeasible if nothing can
        run."""
        before = None if running is None else self.without_idle_nodes(running)
        start = None if before is None else self._side(before).as_uniform(before)
        uniform: Decision[Arrangement] | None = None
        try:
            uniform = self.uniform.replan(
                start, situation, horizon_s=horizon_s, saved=saved, returned=returned
            )
        except Infeasible:
            if before is start and len(self.prices.pools) == 1:
                raise
        if uniform is not None and before is start and len(self.prices.pools) == 1:
            return uniform

        def changed(one: AnyArrangement, *, is_patch: bool = False) -> Transition:
            left = situation.connected_to(one.nodes) - returned
            return self._changed(before, one, situation, left, saved, is_patch=is_patch)

        has_all = before is not None and returned.isdisjoint(before.nodes)
        keep_s = None if before is None or not has_all else self.step_s(before, situation)
        options = [] if before is None else list(self._in_place(before, situation, changed, has_all=has_all))
        if uniform is not None:
            change = uniform.transition if before is start else changed(uniform.arrangement)
            options.append(_Option(uniform.decision, uniform.arrangement, uniform.step_s, change))
        stage_dp = max(self.uniform.allowed_space.stage_dp, 1 if before is None else before.stage_dp)
        cutoff_s = min((one.step_s for one in options), default=float("inf"))
        options += self._migrations(situation, stage_dp, cutoff_s, changed)
        if not options:
            raise Infeasible(f"nothing fits on the {len(situation.states)} nodes that remain", reasons={})
        if keep_s is None:
            horizon_s = max(horizon_s, RESTARTS * self.costs.restart_s)
        chosen = _best_decision(options, keep_s, horizon_s)
        if uniform is None:
            return chosen
        return replace(
            chosen,
            considered=len(options) - 1 + uniform.considered,
            alternatives=tuple(dict.fromkeys((*uniform.alternatives, *chosen.alternatives))),
            rerouted=uniform.rerouted,
        )

    def _in_place(
        self,
        running: AnyArrangement,
        situation: Situation,
        changed: Callable[..., Transition],
        *,
        has_all: bool,
    ) -> Iterator[_Option]:
        """Keep, and the allowed patches, as far as the uniform planner does not consider them."""
        side = self._side(running)
        for decision, one in side.in_place(running, situation, has_all=has_all):
            step_s = side.step_s(one, situation)
            if step_s is None:
                continue
            if decision == KEEP:
                yield _Option(KEEP, one, step_s, NO_TRANSITION)
            elif self._uses_enough(one, situation):
                yield _Option(PATCH, one, step_s, changed(one, is_patch=True))

    def _uses_enough(self, one: AnyArrangement, situation: Situation) -> bool:
        allowed = self.uniform.allowed_space
        is_whole = not allowed.use_all or self._side(one).fills_nodes(one)
        return is_whole and allowed.uses_enough(one.nodes, situation)

    def _migrations(
        self,
        situation: Situation,
        stage_dp: int,
        cutoff_s: float,
        changed: Callable[[UnevenArrangement], Transition],
    ) -> Iterator[_Option]:
        """Migrations to uneven plans, predicted on the nodes that they use."""
        for found in self._plans.on(situation, stage_dp, cutoff_s) if self._plans is not None else ():
            predicted = self.uneven.predicted(found, situation)
            if predicted is not None and self._uses_enough(predicted, situation):
                yield _Option(MIGRATE, predicted, predicted.result.step_time_s, changed(predicted))

    def _changed(
        self,
        before: AnyArrangement | None,
        after: AnyArrangement,
        situation: Situation,
        left: frozenset[str],
        saved: frozenset[str],
        *,
        is_patch: bool,
    ) -> Transition:
        if before == after and left.issuperset(after.nodes):
            return NO_TRANSITION
        held = None if before is None else self._side(before).holdings(before)
        return self.uniform.transitions.between_holdings(
            held, self._side(after).holdings(after), situation, left, saved, is_patch=is_patch
        )


def mixed_planner_of(
    uniform: Planner, plans: Callable[[UnevenStepTimes], UnevenPlanSource] = PlansPerDecision
) -> MixedPlanner:
    """A planner for uniform arrangements and uneven plans in the space of `uniform`. `plans` creates the
    source of uneven plans, which is not used if that space excludes them."""
    steps = UnevenStepTimes(uniform.steps.prices)
    has_uneven = uniform.allowed_space.has_uneven_in(uniform.steps.prices.job.dtype)
    return MixedPlanner(uniform, steps, plans(steps) if has_uneven else None)


def _best_decision(
    choices: list[_Option], keep_step_s: float | None, horizon_s: float
) -> Decision[AnyArrangement]:
    """The option with most steps over the horizon; of equal ones the first."""
    every: list[Decision[AnyArrangement]] = [
        Decision(
            decision=one.decision,
            arrangement=one.arrangement,
            step_s=one.step_s,
            keep_step_s=keep_step_s,
            transition=one.transition,
            horizon_s=horizon_s,
            considered=len(choices),
        )
        for one in choices
    ]
    best = every[0]
    for decision in every[1:]:
        if is_less(best.steps, decision.steps):
            best = decision
    fastest = least_first([one.step_s for one in choices])[:ALTERNATIVES]
    return replace(best, alternatives=tuple(choices[place].arrangement for place in fastest))
