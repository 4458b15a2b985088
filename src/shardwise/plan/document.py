"""Records as plain values: the one shape that the plan file and the JSON answers share
(docs/reference/formats.md)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict

from shardwise.cluster import cluster_record
from shardwise.model import active_parameters, parameters
from shardwise.plan.plan import SCHEMA, VERSION, Plan, RunnerUp
from shardwise.plan.record import Certificate, Layout, Result, Stage
from shardwise.schedule import Schedule, to_text

EFFORT = ("rejected", "cut_by_bound", "simulated", "search_s", "search_cpu_s")
"""Keys of a certificate that say how the answer was found, not what it is; the plan hash leaves them out."""

PROVENANCE = frozenset(("assumptions", "provenance", "sources"))
"""Keys, anywhere in the cluster and the job, whose values are text about where figures come from; the plan
hash leaves them out."""


def result_document(result: Result) -> dict[str, object]:
    """`best` of contract: seconds, bytes, tokens/s; `layers` of a stage is its number of decoder layers."""
    return {
        "strategy": asdict(result.strategy),
        "layout": layout_document(result.layout),
        "step_time_s": result.step_time_s,
        "band_s": list(result.band_s),
        "tokens_per_s_per_device": result.tokens_per_s_per_device,
        "mfu": result.mfu,
        "mfu_full_attention": result.mfu_full_attention,
        "peak_memory_bytes": asdict(result.peak_memory),
        "breakdown": dict(result.breakdown),
        "memory": {**result.memory, "tightest_rank": result.tightest_rank},
        "evaluator": result.evaluator,
    }


def layout_document(layout: Layout) -> dict[str, object]:
    """`layout` of a result: pipelines with their stages in order."""
    return {
        "pipelines": [
            {"stages": [_stage_document(stage) for stage in pipeline.stages]} for pipeline in layout.pipelines
        ]
    }


def _stage_document(stage: Stage) -> dict[str, object]:
    """`layers` is the sum over the chunks, as scripts want it; `chunks` has one count each. Only stages on
    two pools have `parts`."""
    return {
        "devices": stage.devices,
        "ranks": stage.ranks,
        "device_class": stage.device_class,
        "tp": stage.tp,
        "dp": stage.dp,
        "layers": sum(stage.layers),
        "chunks": list(stage.layers),
        "share": stage.share,
        **({"parts": [asdict(part) for part in stage.parts]} if stage.parts else {}),
    }


def certificate_document(certificate: Certificate) -> dict[str, object]:
    """Lists for tuples: `axes` maps a field to the values that it may have. `priced_as` is there where it
    says something; then nothing is proven, and there is no gap."""
    document: dict[str, object] = {
        **asdict(certificate),
        "fixed": dict(certificate.fixed),
        "axes": {name: list(values) for name, values in certificate.axes.items()},
        "rejected": dict(certificate.rejected),
    }
    lines = document.pop("priced_as")
    return {**document, "gap": None, "priced_as": lines} if lines else document


def schedule_document(schedule: Schedule) -> dict[str, object]:
    """The table with each rank's actions as one line of the schedule's text form: `0F0 [0F1 0B0]*3 0B3`."""
    return {
        "name": schedule.name,
        "microbatches": schedule.microbatches,
        "stage_rank": list(schedule.stage_rank),
        "ranks": to_text(schedule).split("\n")[1:],
    }


def plan_document(plan: Plan) -> dict[str, object]:
    """The whole plan file as plain values, hash included."""
    document: dict[str, object] = {
        "schema": SCHEMA,
        "version": VERSION,
        "hash": "",
        "objective": plan.objective,
        **({} if plan.target is None else {"target": plan.target}),
        "model": {
            "name": plan.model.name,
            "parameters": parameters(plan.model),
            "active_parameters": active_parameters(plan.model),
            "config": dict(plan.model.config),
        },
        "job": asdict(plan.job),
        "best": result_document(plan.best),
        "runners_up": [_runner_up_document(runner_up) for runner_up in plan.runners_up],
        "certificate": certificate_document(plan.certificate),
        "schedule": schedule_document(plan.schedule),
        "cluster": cluster_record(plan.cluster),
    }
    if plan.for_trace is not None:
        document["for_trace"] = asdict(plan.for_trace)
    document = plain_mapping(document)
    document["hash"] = document_hash(document)
    return document


def _runner_up_document(runner_up: RunnerUp) -> dict[str, object]:
    return {
        "strategy": asdict(runner_up.strategy),
        "step_time_s": runner_up.step_time_s,
        "device_bytes": runner_up.device_bytes,
    }


def document_hash(document: Mapping[str, object]) -> str:
    """`sha256:...` over the canonical JSON of a plan document, without hash, timings, effort and provenance
    text."""
    body = {key: value for key, value in document.items() if key != "hash"}
    certificate = body.get("certificate")
    if isinstance(certificate, Mapping):
        body["certificate"] = {key: value for key, value in certificate.items() if key not in EFFORT}
    for key in ("cluster", "job"):
        body[key] = _without_provenance(body.get(key))
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return "sha256:" + hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _without_provenance(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _without_provenance(item) for key, item in value.items() if key not in PROVENANCE}
    if isinstance(value, list):
        return [_without_provenance(item) for item in value]
    return value


def plain_mapping(mapping: Mapping[str, object]) -> dict[str, object]:
    """`mapping` with lists for tuples and Python's own numbers for numpy's, at any depth."""
    return {key: _plain(value) for key, value in mapping.items()}


def _plain(value: object) -> object:
    """`value` with lists for tuples and Python's own numbers for numpy's, so that writing and hashing see one
    form."""
    if isinstance(value, str) or value is None:
        return str(value) if isinstance(value, str) else None
    if isinstance(value, Mapping):
        return plain_mapping(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    item = getattr(value, "item", None)
    return item() if callable(item) else value
