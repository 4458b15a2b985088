"""From arguments to answers: what a question is about, its space and target, and the plan or frontier that
answers it. The Python interface and the command line ask through this package.

Decisions after events, checks, imports and reviews are imported when they are first used: planning needs none
of them.
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
from shardwise.questions.plan_frontiers import frontier_of_plan
from shardwise.questions.planning import SearchArguments, evaluated, planned, request_and_target
from shardwise.questions.request import DTYPES, OPTIMIZERS, OWN_TARGET, JobArguments, Request, request_of
from shardwise.questions.spaces import counted_space, counted_uneven, require_candidates, space_choice
from shardwise.questions.sweeps import Sweep, row_of, swept
from shardwise.questions.target_table import targets_that_run
from shardwise.questions.targets import target_name
from shardwise.questions.trace_plans import planned_for_trace
from shardwise.questions.whole_runs import (
    RunArguments,
    RunOnPart,
    run_length,
    run_of_plan,
    runs_of_length,
)

if TYPE_CHECKING:
    from shardwise.questions.after_events import Replanned, cluster_after, replanned, running_by
    from shardwise.questions.checking import CheckedPlan, checked_plan, checked_record
    from shardwise.questions.importing import ImportedCluster, imported_cluster
    from shardwise.questions.reviewing import Review, ReviewArguments, ReviewChange, reviewed, run_of_file

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
    "ImportedCluster",
    "JobArguments",
    "PlanExplanation",
    "Progress",
    "Replanned",
    "Request",
    "Review",
    "ReviewArguments",
    "ReviewChange",
    "RunArguments",
    "RunOnPart",
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
    "frontier_of_plan",
    "imported_cluster",
    "optional_text",
    "planned",
    "planned_for_trace",
    "point_document",
    "replanned",
    "request_and_target",
    "request_of",
    "require_candidates",
    "reviewed",
    "row_of",
    "run_length",
    "run_of_file",
    "run_of_plan",
    "running_by",
    "runs_of_length",
    "seconds",
    "space_choice",
    "swept",
    "target_name",
    "targets_that_run",
    "text",
    "what_if",
    "why_not",
]

_LATE = {
    "after_events": ("Replanned", "cluster_after", "replanned", "running_by"),
    "checking": ("CheckedPlan", "checked_plan", "checked_record"),
    "importing": ("ImportedCluster", "imported_cluster"),
    "reviewing": ("Review", "ReviewArguments", "ReviewChange", "reviewed", "run_of_file"),
}


def __getattr__(name: str) -> object:
    for module, names in _LATE.items():
        if name in names:
            from importlib import import_module

            return getattr(import_module(f"shardwise.questions.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
