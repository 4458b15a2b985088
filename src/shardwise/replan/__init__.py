"""What to do when a cluster changes: keep the plan, patch it or move to another, and what that costs."""

from shardwise.replan.arrangement import Arrangement
from shardwise.replan.decide import KEEP, MOVE, PATCH, Change, Decision, Planner, planner_of
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
from shardwise.replan.uneven import UnevenArrangement, UnevenDecision, replan_uneven, uneven_running_on

__all__ = [
    "KEEP",
    "MOVE",
    "PATCH",
    "POLICIES",
    "WAIT",
    "Arrangement",
    "Change",
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
    "UnevenArrangement",
    "UnevenDecision",
    "Within",
    "best_interval_s",
    "picks_for_trace",
    "planner_of",
    "replan_uneven",
    "replay",
    "running_on",
    "situation_of",
    "uneven_running_on",
]
