"""What to do when a cluster changes: keep the plan, patch it or move to another, and what that costs."""

from shardwise.replan.arrangement import Arrangement
from shardwise.replan.decide import KEEP, MOVE, PATCH, Decision, Planner, planner_of
from shardwise.replan.for_trace import TracePick, TracePicks, picks_for_trace
from shardwise.replan.policies import WAIT, Choice, Run
from shardwise.replan.present import Present
from shardwise.replan.prices import Prices
from shardwise.replan.replaying import POLICIES, Replay, best_interval_s, replay
from shardwise.replan.running import running_on
from shardwise.replan.situation import Situation, situation_of
from shardwise.replan.steps import Steps
from shardwise.replan.trace_searches import Within
from shardwise.replan.transition import Costs, Transition

__all__ = [
    "KEEP",
    "MOVE",
    "PATCH",
    "POLICIES",
    "WAIT",
    "Arrangement",
    "Choice",
    "Costs",
    "Decision",
    "Planner",
    "Present",
    "Prices",
    "Replay",
    "Run",
    "Situation",
    "Steps",
    "TracePick",
    "TracePicks",
    "Transition",
    "Within",
    "best_interval_s",
    "picks_for_trace",
    "planner_of",
    "replay",
    "running_on",
    "situation_of",
]
