"""Checks of a saved plan: the verdict of the independent checker, and what the planner computes again.

`shardwise_verify` checks plans of every kind from their document; a file of version 1 becomes one of version
2 first. What it does not re-derive of uneven plans and operator graphs, `computed_again` predicts again with
code of the planner, so these checks stand apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import shardwise_verify
from shardwise.cost import Training
from shardwise.errors import ConfigError
from shardwise.plans import Plan, plan_document, read_plan
from shardwise.search import RecordCostModel, estimate_of, predict_record, predicted_result
from shardwise_verify import (
    PROOF_BUDGET_S,
    Check,
    InputError,
    Verdict,
    fit_check,
    number_check,
    parts_check,
    value_check,
)

EVALUATOR = "max-plus, pipeline by pipeline"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPlan:
    """The independent verdict on a plan file, and the checks by which the planner computes it again."""

    verdict: Verdict
    computed_again: tuple[Check, ...]

    @property
    def checks(self) -> tuple[Check, ...]:
        """All checks of both."""
        return (*self.verdict.checks, *self.computed_again)

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that do not hold."""
        return tuple(check for check in self.checks if not check.ok and not check.is_open)


def checked_plan(path: str, proof_budget_s: float = PROOF_BUDGET_S) -> CheckedPlan:
    """The verdict of the checker and of the planner on the plan file at `path`. Raises ConfigError for a file
    that is no plan or was altered."""
    plan = read_plan(path)
    try:
        verdict = _verdict(path, plan, proof_budget_s)
    except InputError as error:
        raise ConfigError(
            error.message, file=path, key=error.key or None, found=error.found or None,
            allowed=error.allowed or None,
        ) from None  # fmt: skip
    return CheckedPlan(verdict=verdict, computed_again=tuple(computed_again(plan)))


def _verdict(path: str, plan: Plan, proof_budget_s: float) -> Verdict:
    """The verdict of the checker on the document of version 2; a file of version 1 keeps its own hash."""
    document: Mapping[str, object] = shardwise_verify.read_document(path)
    stated, version = shardwise_verify.checked_hash(document)
    if version == shardwise_verify.VERSION:
        return shardwise_verify.check_document(document, proof_budget_s=proof_budget_s)
    verdict = shardwise_verify.check_document(plan_document(plan), proof_budget_s=proof_budget_s)
    first = value_check("hash of version 1", stated, stated)
    return replace(verdict, plan_hash=stated, checks=(first, *verdict.checks))


# What the planner computes again


def computed_again(plan: Plan) -> Iterator[Check]:
    """Checks by the planner's own prediction; none for a uniform plan, which the checker re-derives."""
    if plan.kind == "graph":
        yield from _graph_checks(plan)
    elif plan.kind == "uneven":
        yield from _uneven_checks(plan)


def _graph_checks(plan: Plan) -> Iterator[Check]:
    """The prediction of the layout of an operator graph from the names in the file
    (docs/concepts/pareto-search.md)."""
    training = Training(dtype=plan.job.dtype, optimizer=plan.job.optimizer, profile=plan.job.profile)
    estimate = estimate_of(plan.graph, plan.cluster, training, plan.operators)
    yield number_check("step time", plan.step_time_s, estimate.time_s)
    yield parts_check("breakdown", plan.breakdown, estimate.seconds, estimate.time_s)
    yield number_check("device bytes", plan.best.peak_memory.device, estimate.memory_bytes)
    yield number_check("bytes at once", plan.best.peak_memory.allocated, estimate.at_once_bytes)
    yield parts_check("memory", plan.memory, estimate.nbytes, estimate.memory_bytes)


def _uneven_checks(plan: Plan) -> Iterator[Check]:
    """The prediction of an uneven plan stage by stage; only the costs of single stages share code with the
    search (docs/concepts/mixed-clusters.md)."""
    best = plan.best
    found = predict_record(plan.model, plan.cluster, plan.job, best)
    faults = "; ".join(found.faults[:3]) or "devices, layers and micro-batches add up"
    yield Check(
        name="space", ok=not found.faults, found=faults, expected="a plan of the space of uneven plans"
    )
    if found.faults:
        return
    for place, (time_s, predicted_s) in enumerate(zip(best.pipeline_s, found.pipeline_s, strict=True)):
        yield number_check(f"pipeline {place}", time_s, predicted_s)
    yield number_check("device bytes", best.peak_memory.device, found.device_bytes)
    yield fit_check("fits", found.device_bytes, found.usable_bytes)
    yield from _figure_checks(plan)


def _figure_checks(plan: Plan) -> Iterator[Check]:
    """Checks of the figures that follow from stage times and bytes; none for a plan that does not fit."""
    best, batch = plan.best, plan.job.global_batch_size
    predicted = predicted_result(RecordCostModel(plan.model, plan.cluster, plan.job), best, batch)
    if predicted is None:
        return
    for place, edge in enumerate(("low", "high")):
        yield number_check(f"band {edge}", best.band_s[place], predicted.band_s[place])
    for name in ("mfu", "mfu_full_attention", "tokens_per_s_per_device"):
        yield number_check(name, getattr(best, name) or 0.0, getattr(predicted, name) or 0.0)
    for name in ("allocated", "reserved", "capacity"):
        yield number_check(
            f"{name} bytes", getattr(best.peak_memory, name), getattr(predicted.peak_memory, name)
        )
    yield value_check("tightest rank", best.tightest_rank, predicted.tightest_rank)
    yield value_check("evaluator", best.evaluator, EVALUATOR)
    yield parts_check("breakdown", best.breakdown, predicted.breakdown, predicted.step_time_s)
