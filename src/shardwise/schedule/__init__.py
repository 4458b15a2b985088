"""Pipeline schedules as data: generate, validate, lower, print and parse them; count activations in
flight."""

from shardwise.schedule.action import KINDS, Action, ActionKind, Columns, Schedule, Table
from shardwise.schedule.generate import generate
from shardwise.schedule.legality import (
    NAMES,
    REASONS,
    SPLIT_NAMES,
    code_of,
    illegal_codes,
    illegal_reason,
    in_flight,
    legal_mask,
    peak_activations,
    peak_in_flight,
    peak_pending_weights,
    pending_weights,
    rank_of_stage,
    stage_of,
    stage_ranks,
)
from shardwise.schedule.lower import Communication, CommunicationKind, LoweredSchedule, lower
from shardwise.schedule.reroute import PipelineStage, RelativeDurations, Rerouted, reroute
from shardwise.schedule.text import MAX_ACTIONS, format_findings, format_grid, from_text, to_text
from shardwise.schedule.violations import DryRun, Finding, dry_run, findings, lowering_violations, violations

__all__ = [
    "KINDS",
    "MAX_ACTIONS",
    "NAMES",
    "REASONS",
    "SPLIT_NAMES",
    "Action",
    "ActionKind",
    "Columns",
    "Communication",
    "CommunicationKind",
    "DryRun",
    "Finding",
    "LoweredSchedule",
    "PipelineStage",
    "RelativeDurations",
    "Rerouted",
    "Schedule",
    "Table",
    "code_of",
    "dry_run",
    "findings",
    "format_findings",
    "format_grid",
    "from_text",
    "generate",
    "illegal_codes",
    "illegal_reason",
    "in_flight",
    "legal_mask",
    "lower",
    "lowering_violations",
    "peak_activations",
    "peak_in_flight",
    "peak_pending_weights",
    "pending_weights",
    "rank_of_stage",
    "reroute",
    "stage_of",
    "stage_ranks",
    "to_text",
    "violations",
]
