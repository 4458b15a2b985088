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
from shardwise.questions.frontiers import (
    Frontier,
    FrontierArguments,
    FrontierQuery,
    FrontierSource,
    GraphSource,
    StrategySource,
    found_frontier,
    frontier_of,
    point_document,
)
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
    "Frontier",
    "FrontierArguments",
    "FrontierQuery",
    "FrontierSource",
    "GraphSource",
    "JobArguments",
    "Progress",
    "Request",
    "SearchArguments",
    "StrategySource",
    "budget_s",
    "checked_plan",
    "counted_space",
    "counted_uneven",
    "evaluated",
    "fields",
    "found_frontier",
    "frontier_of",
    "not_run",
    "plan_question",
    "planned",
    "point_document",
    "request_of",
    "requested_target",
    "require_candidates",
    "require_job",
    "space_choice",
    "text",
    "workers",
]
