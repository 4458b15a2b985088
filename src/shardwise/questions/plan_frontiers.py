"""The frontier of step time and memory of the question that a plan answers: `frontier_of_plan`."""

from __future__ import annotations

from shardwise.errors import Infeasible
from shardwise.plans import Plan, StrategyFrontier
from shardwise.questions import arguments
from shardwise.questions.arguments import Progress
from shardwise.search import plan_frontier


def frontier_of_plan(
    plan: Plan, *, workers: object = 1, budget: object = None, progress: Progress | None = None
) -> StrategyFrontier:
    """The frontier on the devices that the plan uses. Raises ConfigError for a plan that is not of one
    strategy, Infeasible where no point was found within the budget."""
    many, limit_s = arguments.workers(workers), arguments.budget_s(budget)
    found = plan_frontier(plan, workers=many, budget_s=limit_s, progress=progress)
    if found is None:
        raise Infeasible("no point of the frontier was found in time")
    return found
