"""The independent checker of plan files (`check_file`): it recomputes every figure of a plan with its own
code and proves that no candidate is better. It shares records and data with the planner, but no formula."""

from shardwise.verification.checks import (
    REASON_EFFORT,
    REASON_QUESTION,
    REASON_SUM,
    REASON_TRACE,
    Check,
    UncheckedKey,
    fit_check,
    number_check,
    open_if_priced_as,
    parts_check,
    priced_as_check,
    unchecked,
    value_check,
)
from shardwise.verification.proof import PROOF_BUDGET_S
from shardwise.verification.space import PipelineCount, PoolSize, SpaceCount, count_pipelines, count_space
from shardwise.verification.verdict import Verdict, check_file

__all__ = [
    "PROOF_BUDGET_S",
    "REASON_EFFORT",
    "REASON_QUESTION",
    "REASON_SUM",
    "REASON_TRACE",
    "Check",
    "PipelineCount",
    "PoolSize",
    "SpaceCount",
    "UncheckedKey",
    "Verdict",
    "check_file",
    "count_pipelines",
    "count_space",
    "fit_check",
    "number_check",
    "open_if_priced_as",
    "parts_check",
    "priced_as_check",
    "unchecked",
    "value_check",
]
