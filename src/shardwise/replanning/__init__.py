"""Decisions when a cluster changes: keep the plan, patch it or migrate, with the cost of the transition."""

from shardwise.replanning.allowed_space import (
    ANY_SPACE,
    AllowedSpace,
    allowed_by,
    allowed_space_of,
    question_after,
)
from shardwise.replanning.arrangement import Arrangement, with_devices_of
from shardwise.replanning.mixed_planner import AnyArrangement, MixedPlanner, mixed_planner_of
from shardwise.replanning.pipeline_costs import Prices
from shardwise.replanning.planner import KEEP, Decision, LinkAwarePlanner, Planner, planner_of
from shardwise.replanning.situation import Situation, situation_of
from shardwise.replanning.trace_plan import TracePick, TracePicks, picks_for_trace
from shardwise.replanning.trace_replay import (
    POLICIES,
    WAIT,
    EpochChoice,
    PolicyRun,
    Replay,
    best_interval_s,
    replay,
)
from shardwise.replanning.transition import Costs
from shardwise.replanning.uneven import PlansBySize, arrangement_of

__all__ = [
    "ANY_SPACE",
    "KEEP",
    "POLICIES",
    "WAIT",
    "AllowedSpace",
    "AnyArrangement",
    "Arrangement",
    "Costs",
    "Decision",
    "EpochChoice",
    "LinkAwarePlanner",
    "MixedPlanner",
    "Planner",
    "PlansBySize",
    "PolicyRun",
    "Prices",
    "Replay",
    "Situation",
    "TracePick",
    "TracePicks",
    "allowed_by",
    "allowed_space_of",
    "arrangement_of",
    "best_interval_s",
    "mixed_planner_of",
    "picks_for_trace",
    "planner_of",
    "question_after",
    "replay",
    "situation_of",
    "with_devices_of",
]
