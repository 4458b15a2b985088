"""The independent checker: counts and judges by code of its own, from records alone."""

from shardwise.check.count import SpaceCount, count_space
from shardwise.check.count_pipelines import PipelineCount, PoolSize, count_pipelines
from shardwise.check.finding import (
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
from shardwise.check.optimal import PROOF_BUDGET_S
from shardwise.check.verdict import Verdict, check_file

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
