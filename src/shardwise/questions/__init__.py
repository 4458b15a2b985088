"""From arguments to answers: what a question is about, its space and target, and the plan or frontier that
answers it. The Python interface and the command line ask through this package.

Decisions after events, checks and reviews are imported when they are first used: planning needs none of them.
"""

from typing import TYPE_CHECKING

from shardwise.questions.arguments import (
    MAX_COUNT,
    MIXED_POOL_STAGES,
    Progress,
    fields,
    flag,
    optional_text,
    seconds,
    text,
)
from shardwise.questions.explaining import PlanExplanation, explained, what_if, why_not
from shardwise.questions.exporting import ExportedPlan, exported, files_for
from shardwise.questions.frontiers import (
    FrontierAnswer,
    FrontierArguments,
    FrontierSource,
    GraphSource,
    StrategySource,
    frontier_of,
    point_document,
)
from shardwise.questions.planning import SearchArguments, evaluated, planned
from shardwise.questions.request import DTYPES, OPTIMIZERS, OWN_TARGET, JobArguments, Request, request_of
from shardwise.questions.spaces import counted_space, counted_uneven, require_candidates, space_choice
from shardwise.questions.sweeps import Sweep, row_of, swept
from shardwise.questions.trace_plans import planned_for_trace

if TYPE_CHECKING:
    from shardwise.questions.after_events import Replanned, cluster_after, replanned
    from shardwise.questions.checking import CheckedPlan, checked_plan, checked_record
    from shardwise.questions.reviewing import Review, ReviewArguments, ReviewChange, reviewed

__all__ = [
    "DTYPES",
    "MAX_COUNT",
    "MIXED_POOL_STAGES",
    "OPTIMIZERS",
    "OWN_TARGET",
    "CheckedPlan",
    "ExportedPlan",
    "FrontierAnswer",
    "FrontierArguments",
    "FrontierSource",
    "GraphSource",
    "JobArguments",
    "PlanExplanation",
    "Progress",
    "Replanned",
    "Request",
    "Review",
    "ReviewArguments",
    "ReviewChange",
    "SearchArguments",
    "StrategySource",
    "Sweep",
    "checked_plan",
    "checked_record",
    "cluster_after",
    "counted_space",
    "counted_uneven",
    "evaluated",
    "explained",
    "exported",
    "fields",
    "files_for",
    "flag",
    "frontier_of",
    "optional_text",
    "planned",
    "planned_for_trace",
    "point_document",
    "replanned",
    "request_of",
    "require_candidates",
    "reviewed",
    "row_of",
    "seconds",
    "space_choice",
    "swept",
    "text",
    "what_if",
    "why_not",
]

_LATE = {
    "after_events": ("Replanned", "cluster_after", "replanned"),
    "checking": ("CheckedPlan", "checked_plan", "checked_record"),
    "reviewing": ("Review", "ReviewArguments", "ReviewChange", "reviewed"),
}


def __getattr__(name: str) -> object:
    for module, names in _LATE.items():
        if name in names:
            from importlib import import_module

            return getattr(import_module(f"shardwise.questions.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
