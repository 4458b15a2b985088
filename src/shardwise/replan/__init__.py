"""What to do when a cluster changes: keep the plan, patch it or move to another, and what that costs."""

from shardwise.replan.arrangement import Arrangement
from shardwise.replan.decide import KEEP, MIGRATE, PATCH, Decision, DecisionOutcome, Planner, planner_of
from shardwise.replan.for_trace import TracePick, TracePicks, picks_for_trace
from shardwise.replan.mixed import AnyArrangement, MixedPlanner, mixed_planner_of
from shardwise.replan.policies import WAIT, EpochChoice, PolicyRun
from shardwise.replan.present import LinkAwarePlanner
from shardwise.replan.prices import Prices
from shardwise.replan.replaying import POLICIES, Replay, best_interval_s, replay
from shardwise.replan.running import running_on, with_devices_of
from shardwise.replan.situation import Situation, situation_of
from shardwise.replan.steps import StepTimes
from shardwise.replan.transition import Costs, Transition
from shardwise.replan.uneven import UnevenArrangement, UnevenStepTimes, uneven_running_on
from shardwise.replan.uneven_plans import PlansBySize, PlansPerDecision
from shardwise.replan.within import ANY, AllowedSpace, allowed_space_of

__all__ = [
    "ANY",
    "KEEP",
    "MIGRATE",
    "PATCH",
    "POLICIES",
    "WAIT",
    "AllowedSpace",
    "AnyArrangement",
    "Arrangement",
    "Costs",
    "Decision",
    "DecisionOutcome",
    "EpochChoice",
    "LinkAwarePlanner",
    "MixedPlanner",
    "Planner",
    "PlansBySize",
    "PlansPerDecision",
    "PolicyRun",
    "Prices",
    "Replay",
    "Situation",
    "StepTimes",
    "TracePick",
    "TracePicks",
    "Transition",
    "UnevenArrangement",
    "UnevenStepTimes",
    "allowed_space_of",
    "best_interval_s",
    "mixed_planner_of",
    "picks_for_trace",
    "planner_of",
    "replay",
    "running_on",
    "situation_of",
    "uneven_running_on",
    "with_devices_of",
]
