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
    Goodput,
    Plan,
    Result,
    certificate_document,
    document_hash,
    plan_document,
    result_document,
    usd_per_billion_tokens,
)
from shardwise.strategy import Job

VERSION = 1


def plan_answer(plan: Plan, answer: Answer, goodput: Goodput | None = None) -> dict[str, object]:
    """`plan --json`; `goodput` is the best result's, where it is told."""
    return {
        "schema": "shardwise.plan-answer",
        "version": VERSION,
        "plan_hash": document_hash(plan_document(plan)),
        **_question(plan.model, plan.cluster, plan.job),
        "objective": plan.objective,
        "best": _priced(answer.best, plan.cluster, plan.job),
        "runners_up": [_priced(result, plan.cluster, plan.job) for result in answer.runners_up],
        "goodput": None if goodput is None else asdict(goodput),
        "certificate": certificate_document(answer.certificate),
    }


def evaluation(request: Request, result: Result) -> dict[str, object]:
    """`evaluate --json`."""
    return {
        "schema": "shardwise.evaluation",
        "version": VERSION,
        **_question(request.model, request.cluster, request.job),
        "result": _priced(result, request.cluster, request.job),
    }


def space(name: str, size: SpaceCount, request: Request) -> dict[str, object]:
    """`space --json`: every axis with its values as text."""
    return {
        "schema": "shardwise.space",
        "version": VERSION,
        **_question(request.model, request.cluster, request.job),
        "space": name,
        "count": size.count,
        "axes": {axis: list(values) for axis, values in size.axes.items()},
    }


def _question(model: Model, cluster: Cluster, job: Job) -> dict[str, object]:
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


def _priced(result: Result, cluster: Cluster, job: Job) -> dict[str, object]:
    """A result with what it costs, and the figures that only mixed clusters have."""
    document: dict[str, object] = result_document(result)
    document["usd_per_billion_tokens"] = usd_per_billion_tokens(cluster, job, result.step_time_s)
    document |= _mixed_cluster_figures(cluster)
    return document


def _mixed_cluster_figures(cluster: Cluster) -> Mapping[str, object]:
    why = "the cluster is not mixed" if cluster.is_uniform else "only uniform strategies are searched"
    return {"uniform_step_time_s": None, "fastest_class_step_time_s": None, "why": why}
