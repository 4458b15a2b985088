"""The document of a report (schema `shardwise.report`): the plans with everything that their page shows.

Keys of a plan have the names and units of `shardwise plan --json`; `timeline` is that of `timeline.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import zip_longest

from shardwise.accuracy import Comparison, stage_label
from shardwise.app.web import sentences
from shardwise.app.web.timeline import measured_document, timeline_document
from shardwise.cluster import Cluster
from shardwise.model import active_parameters, adapters_text, parameters
from shardwise.plans import (
    Plan,
    StrategyFrontier,
    certificate_document,
    optimum_document,
    plan_hash,
    result_document,
    target_document,
    usd_per_billion_tokens,
)
from shardwise.search import PipelineTimeline, StageMemory, plan_timelines, stage_memory_of, step_parts_of
from shardwise.strategy import ANY, job_record, strategy_record

SCHEMA = "shardwise.report"
VERSION = 1


def report_document(
    plans: Sequence[Plan],
    names: Sequence[str] = (),
    frontiers: Sequence[StrategyFrontier | None] = (),
) -> dict[str, object]:
    """The document of a report of one plan, or of two that are compared: seconds, bytes, tokens per second.

    `names` are the plan files, where there are any, `frontiers` the frontiers of their questions (default:
    that of the plan's own answer). Raises ConfigError for a plan that this version estimates otherwise.
    """
    of_plans = zip_longest(plans, names[: len(plans)], frontiers[: len(plans)])
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "plans": [_plan(plan, name or "", frontier) for plan, name, frontier in of_plans],
    }


def measured_report_document(plan: Plan, name: str, measured: str, found: Comparison) -> dict[str, object]:
    """The document of a report of a plan and its measured step in the file `measured`: `measured` of the
    plan has the step time, the relative error, a row of each stage, and the actions of the ranks."""
    document = _plan(plan, name, None)
    document["measured"] = {
        "file": measured,
        "step_time_s": found.measured_s,
        "error": found.error,
        "disorder": found.order_violation,
        "stages": [
            {
                "name": stage_label(place, found.places),
                "predicted": asdict(predicted_times),
                "measured": asdict(measured_times),
            }
            for place, predicted_times, measured_times in zip(
                found.places, found.predicted, found.measured, strict=True
            )
        ],
        "pipeline": measured_document(plan, found),
    }
    return {"schema": SCHEMA, "version": VERSION, "plans": [document]}


def _plan(plan: Plan, file: str, frontier: StrategyFrontier | None) -> dict[str, object]:
    if frontier is None and plan.answer is not None:
        frontier = plan.answer.frontier
    is_long = plan.best.fields is not None and plan.schedule is None
    return {
        "file": file,
        "plan_hash": None if is_long else plan_hash(plan),
        "kind": plan.kind,
        "model": _model(plan),
        "cluster": _cluster(plan.cluster),
        "job": job_record(plan.job),
        "objective": plan.objective,
        "target": plan.target or ANY,
        "tolerance": plan.question.tolerance,
        "best": {
            **result_document(plan.best, plan.options),
            "usd_per_billion_tokens": (
                None
                if plan.best.tokens_per_s_per_device is None
                else usd_per_billion_tokens(plan.cluster, plan.job, plan.step_time_s)
            ),
        },
        "step_parts": step_parts_of(plan).to_dict(),
        "usable_share": 1.0 - plan.job.memory_margin,
        "memory_by_stage": _memory(plan),
        "optimum": None if plan.optimum is None else optimum_document(plan),
        "targets": [target_document(one) for one in plan.targets],
        "runners_up": [
            {
                "strategy": strategy_record(one.strategy),
                "step_time_s": one.step_time_s,
                "device_bytes": one.device_bytes,
            }
            for one in plan.runners_up
        ],
        "idle": asdict(plan.idle),
        "mixed": None if plan.mixed is None else asdict(plan.mixed),
        "certificate": None if plan.certificate is None else certificate_document(plan.certificate),
        "frontier": None if frontier is None else frontier_points(frontier),
        "timeline": None if is_long else timeline_document(plan, plan_timelines(plan)),
        "texts": sentences.texts(plan, file, frontier),
    }


def _model(plan: Plan) -> dict[str, object]:
    if plan.best.has_operators:
        return {"name": plan.name, "parameters": None, "active_parameters": None, "notes": []}
    return {
        "name": plan.model.name,
        "parameters": parameters(plan.model),
        "active_parameters": active_parameters(plan.model),
        "notes": [*filter(None, [adapters_text(plan.model)]), *plan.model.notes],
    }


def _cluster(cluster: Cluster) -> dict[str, object]:
    """The cluster with its nodes in the order of ranks, equal neighbours as one entry, and its tiers."""
    runs: list[dict[str, object]] = []
    counts: list[int] = []
    for node in cluster.nodes:
        entry = {"device_class": node.device_class, "devices": node.devices, "speed": node.speed}
        if runs and runs[-1] == entry:
            counts[-1] += 1
        else:
            runs.append(entry)
            counts.append(1)
    return {
        "name": cluster.name,
        "devices": cluster.devices,
        "nodes": [{**entry, "nodes": count} for entry, count in zip(runs, counts, strict=True)],
        "classes": list(cluster.classes),
        "tiers": [
            {
                "name": tier.name,
                "span": tier.span,
                "bytes_per_s": tier.bytes_per_s,
                "is_network": tier.is_network,
            }
            for tier in cluster.tiers
        ],
        "assumptions": list(cluster.assumptions),
    }


def _memory(plan: Plan) -> list[dict[str, object]]:
    """The parts of memory of a rank of each stage at its peak, with the band of the peak. Equal stages of
    several pipelines are one entry."""
    errors, several = plan.job.profile.peak_errors, len(plan.best.layout.pipelines) > 1
    equal: dict[tuple[object, ...], list[StageMemory]] = {}
    for one in stage_memory_of(plan):
        key = (one.stage, one.capacity_bytes, *one.parts.items())
        equal.setdefault(key, []).append(one)
    found: list[dict[str, object]] = []
    for first, *others in equal.values():
        device_bytes = sum(first.parts.values())
        of = f" of {len(others) + 1} pipelines" if others else f" of pipeline {first.pipeline}"
        found.append(
            {
                "name": f"stage {first.stage}{of if several else ''}",
                "parts": dict(first.parts),
                "device_bytes": device_bytes,
                "capacity_bytes": first.capacity_bytes,
                "band_bytes": list(errors.band_bytes(device_bytes)),
                "fits_probability": errors.fits_probability(device_bytes, first.capacity_bytes),
            }
        )
    return found


def frontier_points(frontier: StrategyFrontier) -> list[dict[str, object]]:
    """The points of a frontier of step time and memory, fastest first."""
    return [
        {
            "strategy": strategy_record(point.strategy),
            "step_time_s": point.step_time_s,
            "device_bytes": point.device_bytes,
        }
        for point in frontier.points
    ]


def timeline_page_document(plan: Plan, pipelines: Sequence[PipelineTimeline]) -> dict[str, object]:
    """The document of a page with the timeline of a step alone."""
    found = timeline_document(plan, pipelines)
    return {
        "schema": "shardwise.timeline-page",
        "version": VERSION,
        "title": f"{plan.name} on {plan.cluster.name}",
        "subtitle": sentences.division_line(plan),
        "plan_hash": plan_hash(plan),
        "best": {"step_time_s": plan.step_time_s},
        "timeline": found,
    }
