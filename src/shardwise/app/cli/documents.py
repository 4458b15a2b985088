"""The JSON answers of `plan`, `evaluate`, `explain` and `space`, each with its `schema` and `version`
(docs/reference/formats.md; JSON Schemas in docs/reference/schemas)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from shardwise.app.cli.request import Request
from shardwise.cluster import Cluster
from shardwise.model import Model, active_parameters, parameters
from shardwise.plans import (
    Answer,
    Goodput,
    MixedFigures,
    Plan,
    Result,
    StrategyFrontier,
    UnevenAnswer,
    UnevenFile,
    certificate_document,
    document_hash,
    layout_document,
    plan_document,
    plan_hash,
    result_document,
    usd_per_billion_tokens,
)
from shardwise.search import Explanation, PlanComparison
from shardwise.strategy import ANY, Job
from shardwise.verification import PipelineCount, SpaceCount

VERSION = 1


def plan_answer(
    plan: Plan, answer: Answer, goodput: Goodput | None = None, *, not_run: Sequence[str] | None = None
) -> dict[str, object]:
    """`plan --json`; `goodput` is that of the best result, where it is shown; `not_run` lists the parts of
    the best strategy that `shardwise train` does not support, None where it does not run on the devices."""
    return {
        "schema": "shardwise.plan-answer",
        "version": VERSION,
        "plan_hash": document_hash(plan_document(plan)),
        **question_document(plan.model, plan.cluster, plan.job),
        "objective": plan.objective,
        "target": plan.target or ANY,
        "best": _result_with_cost(answer.best, plan.cluster, plan.job, answer.mixed),
        "runners_up": [
            _result_with_cost(result, plan.cluster, plan.job, answer.mixed) for result in answer.runners_up
        ],
        "devices_used": plan.cluster.devices,
        **_parts(answer),
        "frontier": None if answer.frontier is None else _points(answer.frontier, answer.best),
        "frontier_certificate": (
            None if answer.frontier is None else certificate_document(answer.frontier.certificate)
        ),
        "goodput": None if goodput is None else asdict(goodput),
        "not_run": None if not_run is None else list(not_run),
        "is_proven": answer.is_proven,
        "priced_as": list(plan.priced_as),
        "uneven_gap": None if answer.mixed is None or plan.priced_as else answer.mixed.uneven_gap,
        "is_interrupted": answer.is_interrupted,
        "certificate": certificate_document(answer.certificate),
    }


def _parts(answer: Answer | UnevenAnswer) -> dict[str, object]:
    """Idle devices, the step time of all devices, and the parts of the cluster that were searched."""
    return {
        "idle": asdict(answer.idle),
        "all_devices_step_time_s": answer.all_devices_step_time_s,
        "parts": [asdict(part) for part in answer.parts],
        "pruned_parts": answer.pruned_parts,
        "unexplored_parts": answer.unexplored_parts,
    }


def uneven_answer(
    plan: UnevenFile,
    answer: UnevenAnswer,
    request: Request,
    goodput: Goodput | None = None,
    *,
    not_run: Sequence[str] | None,
) -> dict[str, object]:
    """`plan --json` where the best plan is uneven: the same keys; `best` has `uneven` and no `strategy`."""
    best = answer.best
    return {
        "schema": "shardwise.plan-answer",
        "version": VERSION,
        "plan_hash": plan_hash(plan),
        **question_document(request.model, request.cluster, request.job),
        "objective": "time",
        "target": plan.target or ANY,
        "best": _uneven_result(answer, request),
        "runners_up": [],
        "devices_used": request.cluster.devices - best.idle_devices,
        **_parts(answer),
        "frontier": None,
        "frontier_certificate": None,
        "goodput": None if goodput is None else asdict(goodput),
        "not_run": None if not_run is None else list(not_run),
        "is_proven": answer.is_proven,
        "priced_as": list(plan.priced_as),
        "uneven_gap": None if plan.priced_as else answer.certificate.gap,
        "is_interrupted": answer.is_interrupted,
        "certificate": certificate_document(answer.certificate),
    }


def _uneven_result(answer: UnevenAnswer, request: Request) -> dict[str, object]:
    best, mixed = answer.best, answer.mixed
    peak = best.peak_memory
    idle = f"left idle: {best.idle_devices} devices" if best.idle_devices else "all devices are used"
    return {
        "strategy": None,
        "layout": layout_document(best.layout),
        "uneven": {
            "micro_batch_size": best.micro_batch_size,
            "schedule": "1f1b",
            "microbatches": list(best.microbatches),
            "pipeline_s": list(best.pipeline_s),
            "recompute": [list(stages) for stages in best.recompute],
        },
        "step_time_s": best.step_time_s,
        "band_s": list(best.band_s),
        "tokens_per_s_per_device": best.tokens_per_s_per_device,
        "mfu": best.mfu,
        "mfu_full_attention": best.mfu_full_attention,
        "peak_memory_bytes": asdict(peak),
        "breakdown": dict(best.breakdown),
        "memory": {
            "allocated": peak.allocated,
            "fragmentation": peak.reserved - peak.allocated,
            "context_and_communicators": peak.device - peak.reserved,
            "tightest_rank": best.tightest_rank,
        },
        "evaluator": best.evaluator,
        "usd_per_billion_tokens": usd_per_billion_tokens(request.cluster, request.job, best.step_time_s),
        "uniform_step_time_s": mixed.uniform_step_time_s,
        "fastest_class_step_time_s": mixed.fastest_class_step_time_s,
        "why": idle,
    }


def _points(frontier: StrategyFrontier, best: Result) -> list[dict[str, object]]:
    """The points of a frontier of step time and memory, fastest first."""
    return [
        {
            "strategy": asdict(point.strategy),
            "step_time_s": point.step_time_s,
            "peak_memory_bytes": {"device": point.device_bytes, "capacity": best.peak_memory.capacity},
        }
        for point in frontier.points
    ]


def evaluation(request: Request, result: Result) -> dict[str, object]:
    """`evaluate --json`."""
    return {
        "schema": "shardwise.evaluation",
        "version": VERSION,
        **question_document(request.model, request.cluster, request.job),
        "result": _result_with_cost(result, request.cluster, request.job),
    }


def explanation(plan: Plan, found: Explanation) -> dict[str, object]:
    """`explain --json`."""
    binding = asdict(found.binding)
    return {
        **_explained(plan, "tree"),
        "priced_as": list(plan.priced_as),
        "candidates": sum(found.totals.values()) + found.unexplored,
        "unexplored": found.unexplored,
        "totals": dict(found.totals),
        "blocks": [
            {**asdict(block), "fates": dict(block.outcomes), "candidates": block.candidates}
            for block in found.entries
        ],
        "axes": [asdict(axis) for axis in found.axes],
        "binding": binding,
        "agrees": found.agrees,
    }


def comparison(plan: Plan, found: PlanComparison, *, kind: str, requested: str) -> dict[str, object]:
    """`explain --why-not --json` and `explain --what-if --json`."""
    question = found.question
    return {
        **_explained(plan, kind),
        "requested": requested,
        "asked": requested,
        "priced_as": list(found.answer.certificate.priced_as),
        "cluster": question_document(question.model, question.cluster, question.job)["cluster"],
        "job": asdict(question.job),
        "result": _result_with_cost(found.after, question.cluster, question.job),
        "certificate": certificate_document(found.answer.certificate),
        "difference": {
            "step_time_s": found.after.step_time_s - found.before.step_time_s,
            "device_bytes": found.after.peak_memory.device - found.before.peak_memory.device,
            "breakdown": found.breakdown_s,
            "memory": found.memory_bytes,
            "fields": {name: list(pair) for name, pair in found.fields.items()},
        },
    }


def _explained(plan: Plan, kind: str) -> dict[str, object]:
    return {
        "schema": "shardwise.explanation",
        "version": VERSION,
        "kind": kind,
        "plan_hash": document_hash(plan_document(plan)),
        "best": _result_with_cost(plan.best, plan.cluster, plan.job),
    }


def space(name: str, size: SpaceCount, request: Request, uneven: PipelineCount | None) -> dict[str, object]:
    """`space --json`: every axis with its values as text; `uneven` has those of uneven plans, where `plan`
    searches them."""
    return {
        "schema": "shardwise.space",
        "version": VERSION,
        **question_document(request.model, request.cluster, request.job),
        "space": name,
        "count": size.count,
        "axes": {axis: list(values) for axis, values in size.axes.items()},
        "uneven": None
        if uneven is None
        else {
            "pipelines": uneven.count,
            "axes": {axis: list(values) for axis, values in uneven.axes.items()},
        },
    }


def question_document(model: Model, cluster: Cluster, job: Job) -> dict[str, object]:
    """`model`, `cluster`, `job` and `priced_as` of every answer."""
    return {
        "model": {
            "name": model.name,
            "parameters": parameters(model),
            "active_parameters": active_parameters(model),
        },
        "cluster": {
            "name": cluster.name,
            "devices": cluster.devices,
            "nodes": len(cluster.nodes),
            "classes": list(cluster.classes),
            "assumptions": list(cluster.assumptions),
        },
        "job": asdict(job),
        "priced_as": list(cluster.priced_as),
    }


def _result_with_cost(
    result: Result, cluster: Cluster, job: Job, mixed: MixedFigures | None = None
) -> dict[str, object]:
    """A result with its cost, and the figures of mixed clusters."""
    document: dict[str, object] = result_document(result)
    document["usd_per_billion_tokens"] = usd_per_billion_tokens(cluster, job, result.step_time_s)
    document |= _mixed_cluster_figures(cluster, mixed)
    return document


def _why_one_strategy(cluster: Cluster) -> str:
    if cluster.is_uniform:
        return "the cluster is not mixed"
    return "one uniform strategy for all devices: uneven plans are searched for by time"


def _mixed_cluster_figures(cluster: Cluster, mixed: MixedFigures | None) -> Mapping[str, object]:
    if mixed is None:
        return {
            "uniform_step_time_s": None,
            "fastest_class_step_time_s": None,
            "why": _why_one_strategy(cluster),
        }
    idle = f"left idle: {', '.join(mixed.idle)}" if mixed.idle else "all devices are used"
    idle += f"; {mixed.why_uniform}" if mixed.why_uniform else ""
    return {
        "uniform_step_time_s": mixed.uniform_step_time_s,
        "fastest_class_step_time_s": mixed.fastest_class_step_time_s,
        "why": idle,
    }
