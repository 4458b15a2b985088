"""What to do when a cluster changes: keep the plan, patch it or move to another, and what that costs."""

from shardwise.replan.arrangement import Arrangement
from shardwise.replan.decide import KEEP, MOVE, PATCH, Change, Decision, Planner, planner_of
from shardwise.replan.for_trace import TracePick, TracePicks, picks_for_trace
from shardwise.replan.mixed import AnyArrangement, MixedPlanner, mixed_planner_of
from shardwise.replan.policies import WAIT, Choice, Run
from shardwise.replan.present import Present
from shardwise.replan.prices import Prices
from shardwise.replan.replaying import POLICIES, Replay, best_interval_s, replay
from shardwise.replan.running import running_on, with_devices_of
from shardwise.replan.situation import Situation, situation_of
from shardwise.replan.steps import Steps
from shardwise.replan.transition import Costs, Transition
from shardwise.replan.uneven import UnevenArrangement, UnevenSteps, uneven_running_on
from shardwise.replan.uneven_plans import PlansBySize, PlansNow
from shardwise.replan.within import ANY, Within, within_of

__all__ = [
    "ANY",
    "KEEP",
    "MOVE",
    "PATCH",
    "POLICIES",
    "WAIT",
    "AnyArrangement",
    "Arrangement",
    "Change",
    "Choice",
    "Costs",
    "Decision",
    "MixedPlanner",
    "Planner",
    "PlansBySize",
    "PlansNow",
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
    "UnevenSteps",
    "Within",
    "best_interval_s",
    "mixed_planner_of",
    "picks_for_trace",
    "planner_of",
    "replay",
    "running_on",
    "situation_of",
    "uneven_running_on",
    "with_devices_of",
    "within_of",
]
