"""What to do when a cluster changes: keep the plan, patch it or move to another, and what that costs."""

from shardwise.replan.arrangement import Arrangement
from shardwise.replan.decide import KEEP, MOVE, PATCH, Decision, Planner, planner_of
from shardwise.replan.prices import Prices
from shardwise.replan.running import running_on
from shardwise.replan.situation import Situation, situation_of
from shardwise.replan.steps import Steps
from shardwise.replan.transition import Costs, Transition

__all__ = [
    "KEEP",
    "MOVE",
    "PATCH",
    "Arrangement",
    "Costs",
    "Decision",
    "Planner",
    "Prices",
    "Situation",
    "Steps",
    "Transition",
    "planner_of",
    "running_on",
    "situation_of",
]
