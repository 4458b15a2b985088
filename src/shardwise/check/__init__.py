"""The independent checker: counts and judges by code of its own, from records alone."""

from shardwise.check.count import SpaceCount, count_space
from shardwise.check.count_pipelines import PipelineCount, PoolSize, count_pipelines
from shardwise.check.finding import (
    EFFORT,
    OF_A_TRACE,
    ONLY_A_SUM,
    THE_QUESTION,
    Check,
    NotJudged,
    fit_check,
    not_judged,
    number_check,
    of_what_was_priced,
    parts_check,
    priced_as_check,
    value_check,
)
from shardwise.check.optimal import PROOF_BUDGET_S
from shardwise.check.verdict import Verdict, check_file

__all__ = [
    "EFFORT",
    "OF_A_TRACE",
    "ONLY_A_SUM",
    "PROOF_BUDGET_S",
    "THE_QUESTION",
    "Check",
    "NotJudged",
    "PipelineCount",
    "PoolSize",
    "SpaceCount",
    "Verdict",
    "check_file",
    "count_pipelines",
    "count_space",
    "fit_check",
    "not_judged",
    "number_check",
    "of_what_was_priced",
    "parts_check",
    "priced_as_check",
    "value_check",
]
