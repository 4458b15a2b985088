"""Plans as plain values: the documents of plan files, which JSON answers share (docs/reference/formats.md).

`plan_document` is a whole plan file of version 2. `document_hash` and `plan_hash` identify a plan.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Mapping
from dataclasses import asdict
from functools import lru_cache

from shardwise.cluster import cluster_record
from shardwise.graph import OpGraph, graph_text, layout_record
from shardwise.inputs import parse_mapping
from shardwise.model import Model, active_parameters, parameters
from shardwise.plans.plan import Plan, PlanQuestion, RunnerUp
from shardwise.plans.record import Certificate, Layout, Result, Stage, TargetBest
from shardwise.plans.resolved_layers import layers_document
from shardwise.schedule import Schedule, to_text
from shardwise.strategy import ANY, job_record, strategy_record

SCHEMA = "shardwise.plan"
VERSION = 2

EFFORT = ("rejected", "cut_by_bound", "simulated", "search_s", "search_cpu_s")
"""Keys of a certificate about the effort of the search, which the plan hash leaves out."""

PROVENANCE = frozenset(("assumptions", "provenance", "sources"))
"""Keys in the clusters and the job, at any depth, whose values are text about the sources of figures; the
plan hash leaves them out."""


def result_document(result: Result, options: Mapping[str, str] | None = None) -> dict[str, object]:
    """`best` of a plan file: seconds, bytes, tokens/s. `strategy` is null if the stages are not alike; else
    it has the `options` of the software that act on it, where there are any."""
    added = {"options": dict(options)} if options else {}
    return {
        "strategy": None if result.fields is None else {**strategy_record(result.fields), **added},
        "layout": layout_document(result.layout),
        "step_time_s": result.step_time_s,
        "band_s": list(result.band_s),
        "tokens_per_s_per_device": result.tokens_per_s_per_device,
        "mfu": result.mfu,
        "mfu_full_attention": result.mfu_full_attention,
        "peak_memory_bytes": asdict(result.peak_memory),
        "memory_band_bytes": list(result.memory_band_bytes),
        "fits_probability": result.fits_probability,
        "breakdown": dict(result.breakdown),
        "memory": {**result.memory, "tightest_rank": result.tightest_rank},
        "evaluator": result.evaluator,
        **({"pools": list(result.pools), "is_alike": result.is_alike} if result.pools else {}),
    }


def layout_document(layout: Layout) -> dict[str, object]:
    """`layout` of a result: pipelines with their stages in order; `mesh` is that of each stage of an operator
    graph."""
    operators = layout.operators
    return {
        "schedule": layout.schedule,
        **({} if operators is None else {"mesh": list(operators.ranks)}),
        "pipelines": [
            {
                "micro_batch_size": pipeline.micro_batch_size,
                "microbatches": pipeline.microbatches,
                "rows": pipeline.rows,
                "makespan_s": pipeline.makespan_s,
                "stages": [_stage_document(stage) for stage in pipeline.stages],
            }
            for pipeline in layout.pipelines
        ],
    }


def _stage_document(stage: Stage) -> dict[str, object]:
    """`layers` is the total number of decoder layers (or blocks of a graph), `chunks` the number in each
    chunk. Only mixed-pool stages have `parts`, only those of operator graphs `operators`."""
    document: dict[str, object] = {
        "devices": stage.devices,
        "ranks": stage.ranks,
        "device_class": stage.device_class,
        "tp": stage.tp,
        "cp": stage.cp,
        "dp": stage.dp,
        "layers": sum(stage.layers),
        "chunks": list(stage.layers),
        "share": stage.share,
        "recompute": stage.recompute,
    }
    if stage.parts:
        document["parts"] = [asdict(part) for part in stage.parts]
    if stage.operators is not None:
        document["operators"] = layout_record(stage.operators)
    return document


def certificate_document(certificate: Certificate) -> dict[str, object]:
    """The certificate with lists instead of tuples. `empty_ends`, `own_set`, `options`, `other_options` and
    `priced_as` are present only if they say something. With `priced_as` nothing is proven, and the gap is
    null."""
    document: dict[str, object] = {
        **asdict(certificate),
        "fixed": dict(certificate.fixed),
        "axes": {name: list(values) for name, values in certificate.axes.items()},
        "rejected": dict(certificate.rejected),
    }
    document["other_options"] = [certificate_document(one) for one in certificate.other_options]
    for name in ("empty_ends", "own_set", "options", "other_options"):
        if not document[name]:
            del document[name]
    lines = document.pop("priced_as")
    return {**document, "gap": None, "priced_as": lines} if lines else document


def schedule_document(schedule: Schedule) -> dict[str, object]:
    """The schedule table; each rank's actions are one line of text: `0F0 [0F1 0B0]*3 0B3`."""
    return {
        "name": schedule.name,
        "microbatches": schedule.microbatches,
        "stage_rank": list(schedule.stage_rank),
        "ranks": to_text(schedule).split("\n")[1:],
    }


def question_document(question: PlanQuestion) -> dict[str, object]:
    """What was asked; the target is a key of the plan. `cluster` is present only if the plan is on a part of
    it."""
    document: dict[str, object] = {
        "objective": question.objective,
        "space": question.space,
        "fixed": dict(question.fixed),
        "axes": {name: list(values) for name, values in question.axes.items()},
        "use_all": question.use_all,
        "stage_dp": question.stage_dp,
        "mixed_stage_rows": question.mixed_stage_rows,
        "epsilon": question.epsilon,
        "events": question.events,
        **({"tolerance": question.tolerance} if question.tolerance else {}),
        **({"options": dict(question.options)} if question.options else {}),
    }
    if question.cluster is not None:
        document["cluster"] = cluster_record(question.cluster)
    return document


def plan_document(plan: Plan) -> dict[str, object]:
    """The plan file as plain values, including the hash."""
    document: dict[str, object] = {
        "schema": SCHEMA,
        "version": VERSION,
        "hash": "",
        "target": plan.target or ANY,
        "question": question_document(plan.question),
        **_network_document(plan.network),
        "job": job_record(plan.job),
        "best": result_document(plan.best, plan.options),
        "idle": asdict(plan.idle),
        "cluster": cluster_record(plan.cluster),
    }
    if plan.certificate is not None:
        document["certificate"] = certificate_document(plan.certificate)
    if plan.optimum is not None:
        document["optimum"] = optimum_document(plan)
    if plan.targets:
        document["targets"] = [target_document(one) for one in plan.targets]
    if plan.runners_up:
        document["runners_up"] = [_runner_up_document(runner_up) for runner_up in plan.runners_up]
    if plan.epsilon is not None:
        document["epsilon"] = plan.epsilon
    if plan.mixed is not None:
        document["mixed"] = asdict(plan.mixed)
    if plan.kind == "uniform":
        document["schedule"] = schedule_document(plan.schedules[0])
    if plan.for_trace is not None:
        document["for_trace"] = asdict(plan.for_trace)
    document = plain_mapping(document)
    document["hash"] = document_hash(document)
    return document


def optimum_document(plan: Plan) -> dict[str, object]:
    """`optimum`: the fastest strategy of the target, and by how much the recommended one is slower."""
    strategy = plan.best.fields if plan.optimum is None else plan.optimum.strategy
    return {
        "strategy": None if strategy is None else strategy_record(strategy),
        "step_time_s": plan.optimum_s,
        "given_up": plan.given_up,
        **({} if plan.optimum_fits is None else {"fits_probability": plan.optimum_fits}),
    }


def target_document(one: TargetBest) -> dict[str, object]:
    """An entry of `targets`: the best strategy of a target, or the reason why there is none."""
    if one.reason is not None:
        return {"target": one.target, "reason": one.reason}
    return {
        "target": one.target,
        "step_time_s": one.step_time_s,
        "over_any": one.over_any,
        "strategy": None if one.strategy is None else strategy_record(one.strategy),
    }


def plan_hash(plan: Plan) -> str:
    """`sha256:...` over the plan without the effort of its search."""
    return str(plan_document(plan)["hash"])


def _network_document(network: Model | OpGraph) -> dict[str, object]:
    if isinstance(network, OpGraph):
        return {"graph": _graph_document(graph_text(network))}
    return {
        "model": {
            "name": network.name,
            "family": network.family,
            "parameters": parameters(network),
            "active_parameters": active_parameters(network),
            "config": dict(network.config),
            "layers": layers_document(network),
        }
    }


@lru_cache(maxsize=2)
def _graph_document(text: str) -> dict[str, object]:
    """A graph as plain values, shared by the plans of a frontier; read-only."""
    return parse_mapping(text)


def _runner_up_document(runner_up: RunnerUp) -> dict[str, object]:
    return {
        "strategy": strategy_record(runner_up.strategy),
        "step_time_s": runner_up.step_time_s,
        "device_bytes": runner_up.device_bytes,
    }


def document_hash(document: Mapping[str, object]) -> str:
    """`sha256:...` over the canonical JSON of a plan document without its hash, search effort and provenance
    text."""
    body = {key: value for key, value in document.items() if key != "hash"}
    certificate = body.get("certificate")
    if isinstance(certificate, Mapping):
        body["certificate"] = _without(certificate, EFFORT)
    for key in ("cluster", "job"):
        body[key] = _without(body.get(key), PROVENANCE)
    if "question" in body:
        body["question"] = _without(body["question"], PROVENANCE)
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return "sha256:" + hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _without(value: object, keys: Container[str]) -> object:
    """The value without these keys at any depth."""
    if isinstance(value, Mapping):
        return {key: _without(item, keys) for key, item in value.items() if key not in keys}
    if isinstance(value, list):
        return [_without(item, keys) for item in value]
    return value


def plain_mapping(mapping: Mapping[str, object]) -> dict[str, object]:
    """`mapping` with lists instead of tuples and Python numbers instead of numpy numbers, at any depth."""
    return {key: _plain(value) for key, value in mapping.items()}


def _plain(value: object) -> object:
    """`value` with lists instead of tuples and Python numbers instead of numpy numbers, so that files and
    hashes see one form."""
    if isinstance(value, str) or value is None:
        return str(value) if isinstance(value, str) else None
    if isinstance(value, Mapping):
        return plain_mapping(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    item = getattr(value, "item", None)
    return item() if callable(item) else value
