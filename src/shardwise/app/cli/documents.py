"""The JSON answers, each with its `schema` and `version` (docs/formats.md has their JSON Schemas)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from shardwise.app.cli.request import Request
from shardwise.check import SpaceCount
from shardwise.cluster import Cluster
from shardwise.model import Model, active_parameters, parameters
from shardwise.plan import (
    Answer,
    Frontier,
    Goodput,
    MixedFigures,
    Plan,
    Result,
    certificate_document,
    document_hash,
    plan_document,
    result_document,
    usd_per_billion_tokens,
)
from shardwise.search import Comparison, Explanation
from shardwise.strategy import Job

VERSION = 1


def plan_answer(plan: Plan, answer: Answer, goodput: Goodput | None = None) -> dict[str, object]:
    """`plan --json`; `goodput` is the best result's, where it is told."""
    return {
        "schema": "shardwise.plan-answer",
        "version": VERSION,
        "plan_hash": document_hash(plan_document(plan)),
        **question_document(plan.model, plan.cluster, plan.job),
        "objective": plan.objective,
        "best": _priced(answer.best, plan.cluster, plan.job, answer.mixed),
        "runners_up": [_priced(result, plan.cluster, plan.job, answer.mixed) for result in answer.runners_up],
        "devices_used": plan.cluster.devices,
        "parts": [asdict(part) for part in answer.parts],
        "frontier": None if answer.frontier is None else _points(answer.frontier, answer.best),
        "frontier_certificate": (
            None if answer.frontier is None else certificate_document(answer.frontier.certificate)
        ),
        "goodput": None if goodput is None else asdict(goodput),
        "is_proven": answer.is_proven,
        "is_interrupted": answer.is_interrupted,
        "certificate": certificate_document(answer.certificate),
    }


def _points(frontier: Frontier, best: Result) -> list[dict[str, object]]:
    """Points of time against memory, fastest first, each in brief."""
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
        "result": _priced(result, request.cluster, request.job),
    }


def explanation(plan: Plan, found: Explanation) -> dict[str, object]:
    """`explain --json`."""
    binding = asdict(found.binding)
    return {
        **_explained(plan, "tree"),
        "candidates": sum(found.totals.values()) + found.unexplored,
        "unexplored": found.unexplored,
        "totals": dict(found.totals),
        "blocks": [{**asdict(block), "candidates": block.candidates} for block in found.blocks],
        "axes": [asdict(axis) for axis in found.axes],
        "binding": binding,
        "agrees": found.agrees,
    }


def comparison(plan: Plan, found: Comparison, *, kind: str, asked: str) -> dict[str, object]:
    """`explain --why-not --json` and `explain --what-if --json`."""
    question = found.question
    return {
        **_explained(plan, kind),
        "asked": asked,
        "cluster": question_document(question.model, question.cluster, question.job)["cluster"],
        "job": asdict(question.job),
        "result": _priced(found.after, question.cluster, question.job),
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
        "best": _priced(plan.best, plan.cluster, plan.job),
    }


def space(name: str, size: SpaceCount, request: Request) -> dict[str, object]:
    """`space --json`: every axis with its values as text."""
    return {
        "schema": "shardwise.space",
        "version": VERSION,
        **question_document(request.model, request.cluster, request.job),
        "space": name,
        "count": size.count,
        "axes": {axis: list(values) for axis, values in size.axes.items()},
    }


def question_document(model: Model, cluster: Cluster, job: Job) -> dict[str, object]:
    """`model`, `cluster` and `job` of every answer."""
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
    }


def _priced(
    result: Result, cluster: Cluster, job: Job, mixed: MixedFigures | None = None
) -> dict[str, object]:
    """A result with what it costs, and the figures that only mixed clusters have."""
    document: dict[str, object] = result_document(result)
    document["usd_per_billion_tokens"] = usd_per_billion_tokens(cluster, job, result.step_time_s)
    document |= _mixed_cluster_figures(cluster, mixed)
    return document


def _mixed_cluster_figures(cluster: Cluster, mixed: MixedFigures | None) -> Mapping[str, object]:
    if mixed is None:
        why = "the cluster is not mixed" if cluster.is_uniform else "only one uniform strategy is priced"
        return {"uniform_step_time_s": None, "fastest_class_step_time_s": None, "why": why}
    idle = f"left idle: {', '.join(mixed.idle)}" if mixed.idle else "all devices are used"
    return {
        "uniform_step_time_s": mixed.uniform_step_time_s,
        "fastest_class_step_time_s": mixed.fastest_class_step_time_s,
        "why": idle,
    }
