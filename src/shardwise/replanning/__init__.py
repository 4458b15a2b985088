"""Decisions when a cluster changes: keep the plan, patch it or migrate, with the cost of the transition."""

from shardwise.replanning.after_events import (
    DecisionAfter,
    GivenEvents,
    cluster_for,
    decide_after,
    on_nodes,
    plan_on,
    trace_for,
)
from shardwise.replanning.allowed_space import (
    ANY_SPACE,
    AllowedSpace,
    allowed_by,
    allowed_space_of,
)
from shardwise.replanning.arrangement import Arrangement
from shardwise.replanning.mixed_planner import AnyArrangement, mixed_planner_of
from shardwise.replanning.pipeline_costs import Prices
from shardwise.replanning.planner import KEEP, Decision, LinkAwarePlanner, Planner, planner_of
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
    "DecisionAfter",
    "EpochChoice",
    "GivenEvents",
    "LinkAwarePlanner",
    "Planner",
    "PlansBySize",
    "PolicyRun",
    "Prices",
    "Replay",
    "TracePick",
    "TracePicks",
    "allowed_by",
    "allowed_space_of",
    "arrangement_of",
    "best_interval_s",
    "cluster_for",
    "decide_after",
    "mixed_planner_of",
    "on_nodes",
    "picks_for_trace",
    "plan_on",
    "planner_of",
    "replay",
    "trace_for",
]
