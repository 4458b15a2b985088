"""The file of an uneven plan: pipelines that differ, with the model, the cluster and the job.

It is a schema of its own, self-contained, with a hash over its content. A reader can predict the plan again.
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass

from shardwise.cluster import Cluster, cluster_record
from shardwise.errors import InternalError
from shardwise.inputs import Fields, dumps, read_bytes, read_mapping, short_repr
from shardwise.model import Model, active_parameters, parameters
from shardwise.plans.atomic_write import Files, write_file
from shardwise.plans.plan_file import (
    MAX_PLAN_BYTES,
    MAX_PLAN_NODES,
    UNEVEN_PLAN_SCHEMA,
    certificate_document,
    check_ledger,
    document_hash,
    layout_document,
    plain_mapping,
    read_certificate,
    read_cluster,
    read_job,
    read_layout,
    read_model,
    read_parts,
    read_peak_memory,
    read_target,
    verify,
)
from shardwise.plans.record import (
    SHORTEST_STEP_S,
    Certificate,
    MixedFigures,
    TraceChoice,
    UnevenResult,
    check_for_trace,
    read_for_trace,
)
from shardwise.strategy import RECOMPUTES, Job

VERSION = 1
SCHEDULES_OF_UNEVEN = ("1f1b",)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenFile:
    """An uneven plan of `model` on `cluster`, its certificate, and the step times that it is compared with.
    `for_trace` is set if it was chosen for a trace of events. `target` is the software that it was planned
    for, None for any."""

    model: Model
    cluster: Cluster
    job: Job
    best: UnevenResult
    certificate: Certificate
    mixed: MixedFigures
    for_trace: TraceChoice | None = None
    target: str | None = None

    @property
    def priced_as(self) -> tuple[str, ...]:
        """How the cluster or its events were approximated; empty if they were estimated as given."""
        return self.certificate.priced_as


_SCHEMA_LINE = re.compile(
    rb'\s*(\{\s*)?"?schema"?\s*:\s*"?' + re.escape(UNEVEN_PLAN_SCHEMA.encode()) + rb"\b"
)


def is_uneven_plan(path: str) -> bool:
    """Whether the file at `path` begins with the schema of an uneven plan."""
    return _SCHEMA_LINE.match(read_bytes(os.fspath(path), max_bytes=MAX_PLAN_BYTES)) is not None


def write_uneven_plan(path: str, plan: UnevenFile, *, files: Files | None = None) -> str:
    """Writes `plan` to `path` atomically; returns the plan hash."""
    check_ledger(plan.certificate)
    document = uneven_plan_document(plan)
    write_file(path, dumps(document, file=path).encode(), files=files)
    return str(document["hash"])


def uneven_plan_document(plan: UnevenFile) -> dict[str, object]:
    """The plan file as plain values, including the hash."""
    document = plain_mapping(
        {
            "schema": UNEVEN_PLAN_SCHEMA,
            "version": VERSION,
            "hash": "",
            **({} if plan.target is None else {"target": plan.target}),
            "model": {
                "name": plan.model.name,
                "parameters": parameters(plan.model),
                "active_parameters": active_parameters(plan.model),
                "config": dict(plan.model.config),
            },
            "job": asdict(plan.job),
            "best": _result_document(plan.best),
            "compared": {
                "uniform_step_time_s": plan.mixed.uniform_step_time_s,
                "fastest_class_step_time_s": plan.mixed.fastest_class_step_time_s,
                "fastest_class": plan.mixed.fastest_class,
            },
            "certificate": certificate_document(plan.certificate),
            "cluster": cluster_record(plan.cluster),
        }
    )
    if plan.for_trace is not None:
        document |= plain_mapping({"for_trace": asdict(plan.for_trace)})
    document["hash"] = document_hash(document)
    return document


def _result_document(best: UnevenResult) -> dict[str, object]:
    return {
        "layout": layout_document(best.layout),
        "schedule": SCHEDULES_OF_UNEVEN[0],
        "micro_batch_size": best.micro_batch_size,
        "microbatches": list(best.microbatches),
        "pipeline_s": list(best.pipeline_s),
        "recompute": [list(stages) for stages in best.recompute],
        "pools": list(best.pools),
        "is_alike": best.is_alike,
        "step_time_s": best.step_time_s,
        "band_s": list(best.band_s),
        "tokens_per_s_per_device": best.tokens_per_s_per_device,
        "mfu": best.mfu,
        "mfu_full_attention": best.mfu_full_attention,
        "peak_memory_bytes": asdict(best.peak_memory),
        "breakdown": dict(best.breakdown),
        "tightest_rank": best.tightest_rank,
        "idle_devices": best.idle_devices,
        "evaluator": best.evaluator,
    }


def read_uneven_plan(path: str) -> UnevenFile:
    """The plan in the file at `path`. Raises ConfigError if it is not an uneven plan, has a newer version,
    was altered or is incomplete."""
    path = os.fspath(path)
    document = read_mapping(path, max_bytes=MAX_PLAN_BYTES, max_nodes=MAX_PLAN_NODES)
    verify(document, path, schema=UNEVEN_PLAN_SCHEMA, version=VERSION, what="an uneven plan")
    fields = Fields(document, file=path)
    for name in ("schema", "version", "hash"):
        fields.any(name)
    certificate = read_certificate(fields.mapping("certificate"))
    plan = UnevenFile(
        model=read_model(fields.mapping("model")),
        cluster=read_cluster(fields, path),
        job=read_job(fields.mapping("job")),
        best=_result(fields.mapping("best")),
        certificate=certificate,
        mixed=_compared(fields.mapping("compared")),
        for_trace=(
            read_for_trace(fields.mapping("for_trace"), certificate.priced_as)
            if fields.has("for_trace")
            else None
        ),
        target=read_target(fields),
    )
    fields.finish()
    check_for_trace(plan.for_trace, plan.cluster, fields.file)
    try:
        check_ledger(plan.certificate)
    except InternalError as error:
        raise fields.error("certificate", str(error)) from None
    return plan


def _compared(fields: Fields) -> MixedFigures:
    figures = MixedFigures(
        uniform_step_time_s=_time_or_none(fields, "uniform_step_time_s"),
        fastest_class_step_time_s=_time_or_none(fields, "fastest_class_step_time_s"),
        fastest_class=fields.text("fastest_class") if fields.has("fastest_class") else None,
        idle=(),
    )
    fields.finish()
    return figures


def _time_or_none(fields: Fields, name: str) -> float | None:
    return fields.number(name) if fields.has(name) else None


def _result(fields: Fields) -> UnevenResult:
    fields.choice("schedule", SCHEDULES_OF_UNEVEN)
    layout = read_layout(fields.mapping("layout"))
    stages = [len(pipeline.stages) for pipeline in layout.pipelines]
    low, high = _numbers(fields, "band_s", 2)
    result = UnevenResult(
        layout=layout,
        micro_batch_size=fields.integer("micro_batch_size", low=1),
        microbatches=tuple(int(one) for one in _numbers(fields, "microbatches", len(stages), integer_low=1)),
        pipeline_s=tuple(_numbers(fields, "pipeline_s", len(stages))),
        recompute=_recompute(fields, stages),
        pools=tuple(str(name) for name in fields.sequence("pools", low=1, high=64)),
        is_alike=fields.boolean("is_alike"),
        step_time_s=fields.number("step_time_s", low=SHORTEST_STEP_S),
        band_s=(low, high),
        tokens_per_s_per_device=fields.number("tokens_per_s_per_device"),
        mfu=fields.number("mfu"),
        mfu_full_attention=fields.number("mfu_full_attention"),
        peak_memory=read_peak_memory(fields.mapping("peak_memory_bytes")),
        breakdown=read_parts(fields.mapping("breakdown")),
        tightest_rank=fields.integer("tightest_rank"),
        idle_devices=fields.integer("idle_devices"),
        evaluator=fields.text("evaluator"),
    )
    fields.finish()
    return result


def _numbers(fields: Fields, name: str, count: int, integer_low: int | None = None) -> list[float]:
    """`count` numbers of at least 0; whole numbers of at least `integer_low` if that is given."""
    found = fields.sequence(name, low=count, high=count)
    for value in found:
        is_number = isinstance(value, int if integer_low is not None else int | float)
        if not is_number or isinstance(value, bool) or not float(str(value)) >= (integer_low or 0.0):
            raise fields.error(name, "has an invalid value", found=short_repr(value), allowed="numbers")
    return [float(str(value)) for value in found]


def _recompute(fields: Fields, stages: list[int]) -> tuple[tuple[str, ...], ...]:
    """The recomputation of each stage of each pipeline."""
    rows = fields.sequence("recompute", low=len(stages), high=len(stages))
    for row, count in zip(rows, stages, strict=True):
        if not isinstance(row, list) or len(row) != count or any(one not in RECOMPUTES for one in row):
            raise fields.error(
                "recompute", "does not give one kind of recomputation for each stage", found=short_repr(row),
                allowed=", ".join(RECOMPUTES),
            )  # fmt: skip
    return tuple(tuple(str(one) for one in row) for row in rows if isinstance(row, list))
