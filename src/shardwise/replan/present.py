"""Decisions while a plan runs on all nodes of its cluster, by what was measured of the links."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.cluster import Conditions, NodeView
from shardwise.plan import Plan
from shardwise.replan.arrangement import Arrangement
from shardwise.replan.decide import Decision, Planner
from shardwise.replan.holdings import sharded_holdings_of
from shardwise.replan.prices import Prices
from shardwise.replan.shapes import ShapeSearch
from shardwise.replan.situation import Situation, situation_of
from shardwise.replan.steps import StepTimes
from shardwise.replan.transition import Costs, Transition, Transitions
from shardwise.replan.within import allowed_space_of
from shardwise.strategy import Strategy, Target


class LinkAwarePlanner:
    """Decides for one plan's model, cluster and job. Shapes are searched for on the links as they are now.

    It changes to what `target` runs on the same ranks: all nodes in their order, microbatches in equal
    shares. State moves between steps, when weights are divided like states.
    """

    def __init__(self, plan: Plan, target: Target) -> None:
        self._prices = Prices(plan.model, plan.cluster, plan.job)
        self._steps = StepTimes(self._prices)
        self._view = NodeView(plan.cluster)
        self._allowed_space = allowed_space_of(plan)
        self._target = target.for_job(plan.model, plan.job)
        self._nodes = tuple(f"n{index}" for index in range(len(plan.cluster.nodes)))

    def decide(
        self, running: Strategy, rates: Mapping[str, float], *, costs: Costs, horizon_s: float
    ) -> Decision[Arrangement]:
        """What is best over the horizon, where `rates` are links with bandwidths (bytes/s) that are not as
        the cluster has them."""
        situation = self._situation(rates)
        requested = () if running.offload == "none" else ("offload",)
        axes = self._target.axes_for(self._prices.cluster.classes, requested)
        shapes = ShapeSearch(
            self._prices, present=situation.common, axes=axes, allowed_space=self._allowed_space
        )
        planner = Planner(self._steps, shapes, self._transitions(costs), self._can_run)
        return planner.replan(self._arranged(running), situation, horizon_s=horizon_s)

    def transition(
        self, running: Strategy, other: Strategy, rates: Mapping[str, float], costs: Costs
    ) -> Transition:
        """What it takes to go from one strategy to another."""
        ends = self._arranged(running), self._arranged(other)
        return self._transitions(costs).between(*ends, self._situation(rates))

    def _situation(self, rates: Mapping[str, float]) -> Situation:
        return situation_of(self._view, Conditions(present=frozenset(self._nodes), rates=rates))

    def _transitions(self, costs: Costs) -> Transitions:
        return Transitions(self._prices, costs, sharded_holdings_of)

    def _arranged(self, strategy: Strategy) -> Arrangement:
        each = self._prices.microbatches(strategy) // strategy.dp
        return Arrangement(strategy=strategy, slots=self._nodes, microbatches=(each,) * strategy.dp)

    def _can_run(self, arrangement: Arrangement) -> bool:
        return (
            arrangement.slots == self._nodes
            and len(set(arrangement.microbatches)) == 1
            and self._allowed_space.allows(arrangement.strategy)
            and not any(self._target.refusals(arrangement.strategy))
        )
