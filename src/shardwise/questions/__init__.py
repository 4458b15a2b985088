"""From arguments to answers: what a question is about, its space and target, and the plan or frontier that
answers it. The Python interface and the command line ask through this package."""

from shardwise.questions.arguments import (
    MAX_COUNT,
    MIXED_POOL_STAGES,
    Progress,
    budget_s,
    fields,
    text,
    workers,
)
from shardwise.questions.checking import CheckedPlan, checked_plan
from shardwise.questions.planning import SearchArguments, evaluated, plan_question, planned
from shardwise.questions.request import DTYPES, OPTIMIZERS, OWN_TARGET, JobArguments, Request, request_of
from shardwise.questions.spaces import counted_space, counted_uneven, require_candidates, space_choice
from shardwise.questions.targets import not_run, requested_target, require_job

__all__ = [
    "DTYPES",
    "MAX_COUNT",
    "MIXED_POOL_STAGES",
    "OPTIMIZERS",
    "OWN_TARGET",
    "CheckedPlan",
    "JobArguments",
    "Progress",
    "Request",
    "SearchArguments",
    "budget_s",
    "checked_plan",
    "counted_space",
    "counted_uneven",
    "evaluated",
    "fields",
    "not_run",
    "plan_question",
    "planned",
    "request_of",
    "requested_target",
    "require_candidates",
    "require_job",
    "space_choice",
    "text",
    "workers",
]
