"""Pipeline schedules as data: generate, validate, lower, print and parse them; count activations in
flight."""

from shardwise.schedule.action import KINDS, Action, ActionKind, Schedule, Table
from shardwise.schedule.generate import generate
from shardwise.schedule.legality import (
    NAMES,
    SPLIT_NAMES,
    full_moment,
    illegal_codes,
    in_flight,
    legal_mask,
    peak_in_flight,
    stage_of,
    stage_ranks,
)
from shardwise.schedule.live import (
    IN_FLIGHT,
    UNREDUCED,
    WAITING,
    live_counts,
    live_microbatches,
    undominated,
)
from shardwise.schedule.lower import Communication, CommunicationKind, lower
from shardwise.schedule.reroute import PipelineStage, RelativeDurations, Rerouted, reroute
from shardwise.schedule.text import MAX_ACTIONS, from_text, to_text

__all__ = [
    "IN_FLIGHT",
    "KINDS",
    "MAX_ACTIONS",
    "NAMES",
    "SPLIT_NAMES",
    "UNREDUCED",
    "WAITING",
    "Action",
    "ActionKind",
    "Communication",
    "CommunicationKind",
    "PipelineStage",
    "RelativeDurations",
    "Rerouted",
    "Schedule",
    "Table",
    "from_text",
    "full_moment",
    "generate",
    "illegal_codes",
    "in_flight",
    "legal_mask",
    "live_counts",
    "live_microbatches",
    "lower",
    "peak_in_flight",
    "reroute",
    "stage_of",
    "stage_ranks",
    "to_text",
    "undominated",
]
