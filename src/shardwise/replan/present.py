"""Decisions while a plan runs on all nodes of its cluster, by what was measured of the links."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.cluster import Conditions, NodeView
from shardwise.plan import Plan
from shardwise.replan.arrangement import Arrangement
from shardwise.replan.decide import Decision, Planner
from shardwise.replan.prices import Prices
from shardwise.replan.shapes import Shapes
from shardwise.replan.situation import situation_of
from shardwise.replan.steps import Steps
from shardwise.replan.transition import Costs, Transitions
from shardwise.strategy import Strategy, Target


class Present:
    """Decides for one plan's model, cluster and job. Shapes are searched for on the links as they are now.

    It changes to what `target` runs on the same ranks: all nodes in their order, microbatches in equal
    shares.
    """

    def __init__(self, plan: Plan, target: Target) -> None:
        self._prices = Prices(plan.model, plan.cluster, plan.job)
        self._steps = Steps(self._prices)
        self._view = NodeView(plan.cluster)
        self._target = target
        self._nodes = tuple(f"n{index}" for index in range(len(plan.cluster.nodes)))

    def decide(
        self, running: Strategy, rates: Mapping[str, float], *, costs: Costs, horizon_s: float
    ) -> Decision:
        """What is best over the horizon, where `rates` are links with bandwidths (bytes/s) that are not as
        the cluster has them."""
        situation = situation_of(self._view, Conditions(present=frozenset(self._nodes), rates=rates))
        shapes = Shapes(self._prices, present=situation.common, axes=self._target.axes)
        transitions = Transitions(self._prices, costs)
        planner = Planner(self._steps, shapes, transitions, self._can_run)
        each = self._prices.microbatches(running) // running.dp
        arrangement = Arrangement(strategy=running, slots=self._nodes, microbatches=(each,) * running.dp)
        return planner.replan(arrangement, situation, horizon_s=horizon_s)

    def _can_run(self, arrangement: Arrangement) -> bool:
        return (
            arrangement.slots == self._nodes
            and len(set(arrangement.microbatches)) == 1
            and not any(self._target.refusals(arrangement.strategy))
        )
