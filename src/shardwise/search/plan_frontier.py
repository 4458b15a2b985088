"""The frontier of step time and memory of the question that a plan answers: `plan_frontier`."""

from __future__ import annotations

from dataclasses import replace

from shardwise.plans import Plan, StrategyFrontier
from shardwise.search.answer import plan
from shardwise.search.bnb.solver import Progress
from shardwise.search.explanation import question_of


def plan_frontier(
    of: Plan, *, workers: int = 1, budget_s: float | None = None, progress: Progress | None = None
) -> StrategyFrontier | None:
    """The Pareto frontier of the question of a plan of one strategy, on the devices that the plan uses; that
    of its own answer where it has one. None where the budget ended before a point was found.

    Raises ConfigError for the plan of an operator graph, and for one whose stages are not alike.
    """
    if of.answer is not None and of.answer.frontier is not None:
        return of.answer.frontier
    of.require_kind("uniform", key="--frontier")
    question = question_of(of, workers=workers, budget_s=budget_s)
    wanted = replace(question, objective="time", use_all=True, frontier=True, top=0)
    return plan(wanted, progress=progress).frontier
