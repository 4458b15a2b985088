"""The JSON answers of `plan`, `evaluate`, `explain`, `review` and `space`, each with `schema` and `version`
(docs/reference/formats.md; JSON Schemas in docs/reference/schemas)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from shardwise.app.cli.overlap import answer_parts, step_parts_or_none
from shardwise.cluster import Cluster
from shardwise.graph import OpGraph
from shardwise.model import Model, active_parameters, parameters, trained_parameters
from shardwise.plans import (
    UNEVEN_SPACE,
    Answer,
    Goodput,
    Plan,
    Result,
    StepParts,
    StrategyFrontier,
    WholeRun,
    certificate_document,
    optimum_document,
    plan_hash,
    result_document,
    target_document,
    usd_per_billion_tokens,
)
from shardwise.questions import Request, Review
from shardwise.search import (
    Explanation,
    PlanComparison,
    PlanOverview,
    ResultDifference,
    host_memory,
    memory_by_stage,
)
from shardwise.strategy import ANY, Job, acting_options, job_record, strategy_record
from shardwise_verify import PipelineCount, SpaceCount

VERSION = 1


def plan_answer(
    plan: Plan,
    answer: Answer,
    goodput: Goodput | None = None,
    whole_run: WholeRun | None = None,
    *,
    not_run: Sequence[str] | None = None,
    run_by: Sequence[str] | None = None,
) -> dict[str, object]:
    """`plan --json`; `goodput` is that of the best result, where it is shown; `not_run` lists the parts of
    the best plan that `shardwise train` does not support, None where it does not run on the devices; `run_by`
    lists the targets that run a plan without a target.
    `best.strategy` is null if the best plan is uneven."""
    uneven_gap = None if answer.mixed is None else answer.mixed.uneven_gap
    if answer.certificate.space == UNEVEN_SPACE:
        uneven_gap = answer.certificate.gap
    return {
        "schema": "shardwise.plan-answer",
        "version": VERSION,
        "plan_hash": plan_hash(plan),
        **question_document(plan.model, plan.cluster, plan.job),
        "objective": plan.objective,
        "target": plan.target or ANY,
        "targets": [target_document(one) for one in plan.targets],
        "optimum": optimum_document(plan),
        "best": _best_with_cost(plan, answer),
        "runners_up": [
            {
                **_result_with_cost(result, plan.network, plan.cluster, plan.job, plan.target, answer),
                "group": group,
            }
            for result, group in zip(answer.runners_up, plan.runner_up_groups, strict=True)
        ],
        "devices_used": plan.devices,
        **_parts(answer),
        "frontier": None if answer.frontier is None else _points(answer.frontier, answer.best),
        "frontier_certificate": (
            None if answer.frontier is None else certificate_document(answer.frontier.certificate)
        ),
        "goodput": None if goodput is None else asdict(goodput),
        **whole_run_key(whole_run),
        "not_run": None if not_run is None else list(not_run),
        "run_by": None if run_by is None else list(run_by),
        "is_proven": answer.is_proven,
        "priced_as": list(plan.priced_as),
        "uneven_gap": None if plan.priced_as else uneven_gap,
        "is_interrupted": answer.is_interrupted,
        "certificate": certificate_document(answer.certificate),
    }


def _parts(answer: Answer) -> dict[str, object]:
    """Idle devices, the step time of all devices, and the parts of the cluster that were searched."""
    return {
        "idle": asdict(answer.idle),
        "all_devices_step_time_s": answer.all_devices_step_time_s,
        "parts": [asdict(part) for part in answer.parts],
        "pruned_parts": answer.pruned_parts,
        "unexplored_parts": answer.unexplored_parts,
    }


def _points(frontier: StrategyFrontier, best: Result) -> list[dict[str, object]]:
    """The points of a frontier of step time and memory, fastest first."""
    return [
        {
            "strategy": strategy_record(point.strategy),
            "step_time_s": point.step_time_s,
            "peak_memory_bytes": {"device": point.device_bytes, "capacity": best.peak_memory.capacity},
        }
        for point in frontier.points
    ]


def whole_run_key(run: WholeRun | None) -> dict[str, object]:
    """The key `whole_run` of an answer; none where no length of a run was requested."""
    return {} if run is None else {"whole_run": run.to_dict()}


def evaluation(plan: Plan, whole_run: WholeRun | None = None) -> dict[str, object]:
    """`evaluate --json`; with the `whole_run` where its length is requested."""
    by_stage = memory_by_stage(plan.model, plan.cluster, plan.job, plan.best.strategy)
    return {
        "schema": "shardwise.evaluation",
        "version": VERSION,
        **question_document(plan.model, plan.cluster, plan.job),
        "result": {**_best_with_cost(plan), "memory_by_stage": by_stage},
        **whole_run_key(whole_run),
    }


def explanation(plan: Plan, overview: PlanOverview, found: Explanation | None) -> dict[str, object]:
    """`explain --json`; `found` has the candidates of a uniform strategy."""
    document = {
        **_explained(plan, "layout" if found is None else "tree"),
        "priced_as": list(plan.priced_as),
        "stages": [asdict(stage) for stage in overview.stages],
        "baselines": [asdict(one) for one in overview.baselines],
        "usable_bytes": overview.usable_bytes,
        "free_bytes": overview.free_bytes,
    }
    if found is None:
        return document
    return {
        **document,
        "candidates": sum(found.totals.values()) + found.unexplored,
        "unexplored": found.unexplored,
        "totals": dict(found.totals),
        "blocks": [
            {**asdict(block), "fates": dict(block.outcomes), "candidates": block.candidates}
            for block in found.entries
        ],
        "axes": [asdict(axis) for axis in found.axes],
        "binding": asdict(found.binding),
        "relaxed": [asdict(one) for one in found.relaxed],
        "unsearched": found.unsearched,
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
        "job": job_record(question.job),
        "result": {
            **_result_with_cost(found.after, question.model, question.cluster, question.job, plan.target),
            "step_parts": _parts_document(answer_parts(found)),
        },
        "certificate": certificate_document(found.answer.certificate),
        "difference": _difference(found),
    }


def review(found: Review) -> dict[str, object]:
    """`review --json`."""
    question = found.request
    return {
        "schema": "shardwise.review",
        "version": VERSION,
        **question_document(question.model, question.cluster, question.job),
        **found.to_dict(),
    }


def plan_comparison(plan: Plan, other: Plan) -> dict[str, object]:
    """`compare --json` of two plans."""
    return {
        "schema": "shardwise.plan-comparison",
        "version": VERSION,
        "plan_hash": plan_hash(plan),
        "other_hash": plan_hash(other),
        "best": _best_with_cost(plan),
        "other": _best_with_cost(other),
        "difference": _difference(ResultDifference(before=plan.best, after=other.best)),
    }


def _difference(found: ResultDifference) -> dict[str, object]:
    """The second result minus the first."""
    return {
        "step_time_s": found.after.step_time_s - found.before.step_time_s,
        "device_bytes": found.after.peak_memory.device - found.before.peak_memory.device,
        "breakdown": found.breakdown_s,
        "memory": found.memory_bytes,
        "fields": {name: list(pair) for name, pair in found.fields.items()},
    }


def _explained(plan: Plan, kind: str) -> dict[str, object]:
    return {
        "schema": "shardwise.explanation",
        "version": VERSION,
        "kind": kind,
        "plan_hash": plan_hash(plan),
        "best": _best_with_cost(plan),
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


def _choices_of(model: Model) -> dict[str, object]:
    """`images` of a model with a vision tower, `frozen` of one with frozen parts, `lora` of one with
    adapters."""
    found: dict[str, object] = {}
    if model.patches:
        found["images"] = {"patches": model.patches, "tokens": model.image_tokens}
    trained = trained_parameters(model)
    if model.frozen:
        found["frozen"] = {"parts": list(model.frozen), "trained_parameters": trained}
    if model.lora is not None:
        names = list(model.lora.target_modules)
        found["lora"] = {"r": model.lora.r, "target_modules": names, "trained_parameters": trained}
    return found


def question_document(model: Model, cluster: Cluster, job: Job) -> dict[str, object]:
    """`model`, `cluster`, `job` and `priced_as` of every answer."""
    return {
        "model": {
            "name": model.name,
            "parameters": parameters(model),
            "active_parameters": active_parameters(model),
            "notes": list(model.notes),
            **_choices_of(model),
        },
        "cluster": {
            "name": cluster.name,
            "devices": cluster.devices,
            "nodes": len(cluster.nodes),
            "classes": list(cluster.classes),
            "assumptions": list(cluster.assumptions),
        },
        "job": job_record(job),
        "priced_as": list(cluster.priced_as),
    }


def _best_with_cost(plan: Plan, answer: Answer | None = None) -> dict[str, object]:
    """The best result of a plan, as `_result_with_cost`, with the parts of its step."""
    result = _result_with_cost(plan.best, plan.network, plan.cluster, plan.job, plan.target, answer)
    return {**result, "step_parts": _parts_document(step_parts_or_none(plan))}


def _parts_document(parts: StepParts | None) -> dict[str, object] | None:
    return None if parts is None else parts.to_dict()


def _result_with_cost(
    result: Result,
    network: Model | OpGraph,
    cluster: Cluster,
    job: Job,
    target: str | None,
    answer: Answer | None = None,
) -> dict[str, object]:
    """A result for a target, with its memory on the host and its cost; with the step times that plans of
    mixed clusters are compared with, and what stays idle, if it is one of an answer."""
    mixed = None if answer is None else answer.mixed
    return {
        **result_document(result, acting_options(target, job.profile, result.fields)),
        "host_memory_bytes": _host_memory(result, network, cluster, job),
        "usd_per_billion_tokens": usd_per_billion_tokens(cluster, job, result.step_time_s),
        "uniform_step_time_s": None if mixed is None else mixed.uniform_step_time_s,
        "fastest_class_step_time_s": None if mixed is None else mixed.fastest_class_step_time_s,
        "why": _why(cluster, answer),
    }


def _host_memory(
    result: Result, network: Model | OpGraph, cluster: Cluster, job: Job
) -> dict[str, float] | None:
    """Bytes of a rank on its host, and those that the host has for it; null where stages are not alike."""
    if result.fields is None or not isinstance(network, Model):
        return None
    used, capacity = host_memory(network, cluster, job, result.fields)
    return {"used": used, "capacity": capacity}


def _why(cluster: Cluster, answer: Answer | None) -> str:
    """Why the plan is uniform or uneven, and what stays idle."""
    if answer is None or answer.mixed is None:
        if cluster.is_uniform:
            return "the cluster is not mixed"
        return "one uniform strategy for all devices: uneven plans are searched for by time"
    left = ", ".join(answer.mixed.idle) or (f"{answer.idle.devices} devices" if answer.idle.devices else "")
    text = f"left idle: {left}" if left else "all devices are used"
    return f"{text}; {answer.mixed.why_uniform}" if answer.mixed.why_uniform else text
