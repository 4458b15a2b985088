"""Pipeline schedules as data: generate, check, count, print, parse, lower."""

from shardwise.schedule.action import KINDS, Action, ActionKind, Columns, Schedule, Table
from shardwise.schedule.dry_run import DryRun, dry_run
from shardwise.schedule.generate import generate
from shardwise.schedule.grid import format_findings, format_grid
from shardwise.schedule.in_flight import (
    in_flight,
    peak_activations,
    peak_in_flight,
    peak_pending_weights,
    pending_weights,
)
from shardwise.schedule.legality import (
    NAMES,
    REASONS,
    SPLIT_NAMES,
    code_of,
    illegal_codes,
    illegal_reason,
    legal_mask,
    rank_of_stage,
    stage_of,
    stage_ranks,
)
from shardwise.schedule.lower import (
    Communication,
    CommunicationKind,
    LoweredSchedule,
    lower,
)
from shardwise.schedule.lowering_violations import lowering_violations
from shardwise.schedule.reroute import PipelineStage, RelativeDurations, Rerouted, reroute
from shardwise.schedule.text import MAX_ACTIONS, from_text, to_text
from shardwise.schedule.violations import Finding, findings, violations

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
