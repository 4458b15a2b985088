"""Pipeline schedules as data: generate, validate, lower, print and parse them; count activations in
flight."""

from shardwise.schedule.action import KINDS, Action, ActionKind, Schedule, Table
from shardwise.schedule.generate import generate
from shardwise.schedule.legality import (
    NAMES,
    SPLIT_NAMES,
    illegal_codes,
    in_flight,
    legal_mask,
    peak_in_flight,
    pending_weights,
    stage_of,
    stage_ranks,
)
from shardwise.schedule.lower import Communication, CommunicationKind, lower
from shardwise.schedule.reroute import PipelineStage, RelativeDurations, Rerouted, reroute
from shardwise.schedule.text import MAX_ACTIONS, from_text, to_text

__all__ = [
    "KINDS",
    "MAX_ACTIONS",
    "NAMES",
    "SPLIT_NAMES",
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
    "generate",
    "illegal_codes",
    "in_flight",
    "legal_mask",
    "lower",
    "peak_in_flight",
    "pending_weights",
    "reroute",
    "stage_of",
    "stage_ranks",
    "to_text",
]
