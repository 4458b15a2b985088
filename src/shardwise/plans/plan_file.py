"""The plan file: written atomically, verified when read (schema, version and hash first, then every key).

The documents (`plan_document`, `result_document`, ...) are records as plain values, shared by plan files and
JSON answers (docs/reference/formats.md). `verify` and `document_hash` also serve the other kinds of plan
files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from math import isclose
from typing import Any, cast, get_args

from shardwise.cluster import Cluster, cluster_from_record, cluster_record
from shardwise.errors import ConfigError, InternalError
from shardwise.inputs import Fields, dumps, read_mapping, short_repr
from shardwise.model import Model, active_parameters, model_from_config, parameters
from shardwise.plans.atomic_write import Files, write_file
from shardwise.plans.record import (
    OBJECTIVES,
    SCHEMA,
    SHORTEST_STEP_S,
    VERSION,
    Certificate,
    Layout,
    PeakMemory,
    Pipeline,
    Plan,
    Result,
    RunnerUp,
    Stage,
    StagePart,
    Value,
    check_for_trace,
    read_for_trace,
)
from shardwise.schedule import Schedule, from_text, to_text
from shardwise.strategy import (
    ALIASES,
    CP_KINDS,
    FIELDS,
    OFFLOADS,
    RECOMPUTES,
    SCHEDULES,
    Job,
    Optimizer,
    Strategy,
    is_value,
    profile_from_record,
    target_names,
)

# Documents

EFFORT = ("rejected", "cut_by_bound", "simulated", "search_s", "search_cpu_s")
"""Keys of a certificate about the effort of the search, which the plan hash leaves out."""

PROVENANCE = frozenset(("assumptions", "provenance", "sources"))
"""Keys in the cluster and the job, at any depth, whose values are text about the sources of figures; the plan
hash leaves them out."""


def result_document(result: Result) -> dict[str, object]:
    """`best` of a plan file: seconds, bytes, tokens/s."""
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
    """`layers` is the total number of decoder layers, `chunks` the number in each chunk. Only mixed-pool
    stages have `parts`."""
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
    """The certificate with lists instead of tuples. `priced_as` is present only if it is not empty; then
    nothing is proven, and the gap is null."""
    document: dict[str, object] = {
        **asdict(certificate),
        "fixed": dict(certificate.fixed),
        "axes": {name: list(values) for name, values in certificate.axes.items()},
        "rejected": dict(certificate.rejected),
    }
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


def plan_document(plan: Plan) -> dict[str, object]:
    """The plan file as plain values, including the hash."""
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
    """`sha256:...` over the canonical JSON of a plan document without its hash, search effort and provenance
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


# Verification of files

UNEVEN_PLAN_SCHEMA = "shardwise.uneven-plan"
GRAPH_PLAN_SCHEMA = "shardwise.graph-plan"

MAX_PLAN_BYTES = 8 << 20
"""Largest size of a plan file in bytes. It contains the schedule and the cluster, so it may be larger than
other inputs."""

MAX_PLAN_NODES = 1_000_000
"""Largest number of values in a plan file."""

_KINDS = {
    SCHEMA: "a uniform strategy",
    UNEVEN_PLAN_SCHEMA: "an uneven plan",
    GRAPH_PLAN_SCHEMA: "an operator graph",
}
"""What the plan files of each schema describe, for commands that take one kind only."""


def verify(document: Mapping[str, object], path: str, *, schema: str, version: int, what: str) -> None:
    """Raises ConfigError if the document at `path` does not have this schema (named `what` in the message),
    is newer than `version`, or has changed since it was written."""
    fields = Fields(document, file=path)
    if document.get("schema") != schema:
        kind = _KINDS.get(str(document.get("schema")))
        raise fields.error(
            "schema",
            f"is not {what}" if kind is None else f"is that of {kind}, which is not supported here",
            found=short_repr(document.get("schema")),
            allowed=schema,
        )
    found = fields.integer("version", low=1, high=10**9)
    if found > version:
        raise fields.error(
            "version",
            f"is a newer plan format than this shardwise reads ({schema} {found})",
            found=str(found),
            allowed=f"up to {version}",
        )
    stated = fields.any("hash")
    try:
        actual = document_hash(document)
    except ValueError as error:
        raise fields.error("hash", f"cannot be computed: {error}") from None
    if stated != actual:
        raise fields.error(
            "hash", "does not match the content: the file was changed", found=short_repr(stated)
        )


# Plan files


def write_plan(path: str, plan: Plan, *, files: Files | None = None) -> str:
    """Writes `plan` to `path` atomically; returns the plan hash.

    Raises ConfigError if the path cannot be written (then nothing changed), InternalError for an inconsistent
    plan.
    """
    check_ledger(plan.certificate)
    document = plan_document(plan)
    write_file(path, dumps(document, file=path).encode(), files=files)
    return str(document["hash"])


def read_plan(path: str) -> Plan:
    """The plan in the file at `path`. Raises ConfigError if it is not a plan file, has a newer version, was
    altered or is incomplete."""
    path = os.fspath(path)
    document = read_mapping(path, max_bytes=MAX_PLAN_BYTES, max_nodes=MAX_PLAN_NODES)
    verify(document, path, schema=SCHEMA, version=VERSION, what="a plan file")
    return _plan(Fields(document, file=path), path)


def check_ledger(certificate: Certificate) -> None:
    """Raises InternalError unless every enumerated candidate is rejected, pruned or simulated exactly
    once."""
    accounted = sum(certificate.rejected.values()) + certificate.cut_by_bound + certificate.simulated
    if accounted != certificate.enumerated:
        raise InternalError(f"{certificate.enumerated} candidates enumerated, {accounted} accounted for")


def _plan(fields: Fields, path: str) -> Plan:
    for name in ("schema", "version", "hash"):
        fields.any(name)
    certificate = read_certificate(fields.mapping("certificate"))
    plan = Plan(
        objective=fields.choice("objective", OBJECTIVES),
        model=read_model(fields.mapping("model")),
        job=read_job(fields.mapping("job")),
        best=_result(fields.mapping("best")),
        runners_up=tuple(_runner_up(item) for item in fields.mappings("runners_up")),
        certificate=certificate,
        schedule=_schedule(fields.mapping("schedule")),
        cluster=read_cluster(fields, path),
        for_trace=(
            read_for_trace(fields.mapping("for_trace"), certificate.priced_as)
            if "for_trace" in fields.names
            else None
        ),
        target=read_target(fields),
    )
    fields.finish()
    _check_consistent(plan, fields)
    return plan


def read_target(fields: Fields) -> str | None:
    """The target of a plan; None if the file names none."""
    return fields.choice("target", target_names()) if fields.has("target") else None


def read_model(fields: Fields) -> Model:
    """The model of a plan file, from its configuration. Raises ConfigError if its parameters are not those in
    the file."""
    config, name = fields.any("config"), fields.text("name")
    if not isinstance(config, Mapping):
        raise fields.error(
            "config", "is not a mapping", found=short_repr(config), allowed="a model's configuration"
        )
    try:
        model = model_from_config(config, name=name)
    except ConfigError as error:
        raise error.within(file=fields.file, key="model.config") from None
    for key, count in (("parameters", parameters(model)), ("active_parameters", active_parameters(model))):
        if fields.integer(key) != count:
            raise fields.error(
                key, "is not what the config has", found=short_repr(fields.any(key)), allowed=str(count)
            )
    fields.finish()
    return model


def read_cluster(fields: Fields, path: str) -> Cluster:
    """The cluster of a plan file."""
    record = fields.any("cluster")
    if not isinstance(record, Mapping):
        raise fields.error(
            "cluster", "is not a mapping", found=short_repr(record), allowed="a cluster record"
        )
    try:
        return cluster_from_record(record)
    except ConfigError as error:
        raise error.within(file=path, key="cluster") from None


def read_job(fields: Fields) -> Job:
    """The job of a plan file."""
    optimizer: Any = fields.choice("optimizer", get_args(Optimizer))
    job = Job(
        seq_len=fields.integer("seq_len", low=1, high=1e9),
        global_batch_size=fields.integer("global_batch_size", low=1, high=1e9),
        dtype=fields.text("dtype"),
        optimizer=optimizer,
        memory_margin=fields.number("memory_margin", low=0.0, high=1.0),
        expert_imbalance=fields.number("expert_imbalance", low=1.0, high=1e6),
        seed=fields.integer("seed"),
        profile=profile_from_record(fields.mapping("profile")),
    )
    fields.finish()
    return job


def _strategy(fields: Fields) -> Strategy:
    # `choice` checks each text against the values of its Literal type.
    cp_kind: Any = fields.choice("cp_kind", CP_KINDS)
    schedule: Any = fields.choice("schedule", SCHEDULES)
    recompute: Any = fields.choice("recompute", RECOMPUTES)
    offload: Any = fields.choice("offload", OFFLOADS)
    strategy = Strategy(
        tp=fields.integer("tp", low=1),
        pp=fields.integer("pp", low=1),
        vpp=fields.integer("vpp", low=1),
        cp=fields.integer("cp", low=1),
        cp_kind=cp_kind,
        ep=fields.integer("ep", low=1),
        etp=fields.integer("etp", low=1),
        dp=fields.integer("dp", low=1),
        param_shard=fields.integer("param_shard", low=1),
        grad_shard=fields.integer("grad_shard", low=1),
        optim_shard=fields.integer("optim_shard", low=1),
        micro_batch_size=fields.integer("micro_batch_size", low=1),
        schedule=schedule,
        sequence_parallel=fields.boolean("sequence_parallel"),
        recompute=recompute,
        recompute_layers=fields.integer("recompute_layers"),
        offload=offload,
        axis_order=fields.text("axis_order"),
        first_stage_layers=fields.integer("first_stage_layers"),
        last_stage_layers=fields.integer("last_stage_layers"),
    )
    fields.finish()
    return strategy


def _result(fields: Fields) -> Result:
    memory = fields.mapping("memory")
    tightest_rank = memory.integer("tightest_rank")
    band = fields.sequence("band_s", low=2, high=2)
    if not all(isinstance(edge, int | float) and not isinstance(edge, bool) for edge in band):
        raise fields.error(
            "band_s", "is not a pair of numbers", found=short_repr(band), allowed="[low, high]"
        )
    result = Result(
        strategy=_strategy(fields.mapping("strategy")),
        layout=read_layout(fields.mapping("layout")),
        step_time_s=fields.number("step_time_s", low=SHORTEST_STEP_S),
        band_s=(float(str(band[0])), float(str(band[1]))),
        tokens_per_s_per_device=fields.number("tokens_per_s_per_device"),
        mfu=fields.number("mfu"),
        mfu_full_attention=fields.number("mfu_full_attention"),
        peak_memory=read_peak_memory(fields.mapping("peak_memory_bytes")),
        breakdown=read_parts(fields.mapping("breakdown")),
        memory=read_parts(memory, excluded=("tightest_rank",)),
        tightest_rank=tightest_rank,
        evaluator=fields.text("evaluator"),
    )
    fields.finish()
    return result


def read_parts(fields: Fields, excluded: tuple[str, ...] = ()) -> dict[str, float]:
    """Named numbers; their names are those of the cost model."""
    return {name: fields.number(name, low=-1e30) for name in fields.names if name not in excluded}


def read_peak_memory(fields: Fields) -> PeakMemory:
    """The peak memory of a result."""
    peak = PeakMemory(
        allocated=fields.number("allocated"),
        reserved=fields.number("reserved"),
        device=fields.number("device"),
        capacity=fields.number("capacity"),
    )
    fields.finish()
    return peak


def read_layout(fields: Fields) -> Layout:
    """The layout of a result."""
    pipelines = []
    for pipeline in fields.mappings("pipelines", low=1):
        pipelines.append(
            Pipeline(stages=tuple(_stage(stage) for stage in pipeline.mappings("stages", low=1)))
        )
        pipeline.finish()
    fields.finish()
    return Layout(pipelines=tuple(pipelines))


def _stage(fields: Fields) -> Stage:
    chunks = _integers(fields, "chunks")
    if fields.integer("layers") != sum(chunks):
        raise fields.error("layers", "is not the sum of the chunks", found=short_repr(fields.any("layers")))
    stage = Stage(
        devices=fields.integer("devices", low=1),
        ranks=fields.text("ranks", max_length=1_000_000),
        device_class=fields.text("device_class"),
        tp=fields.integer("tp", low=1),
        dp=fields.integer("dp", low=1),
        layers=chunks,
        share=fields.number("share", high=1.0),
        parts=tuple(map(_stage_part, fields.mappings("parts", low=2, high=2))) if fields.has("parts") else (),
    )
    fields.finish()
    return stage


def _stage_part(fields: Fields) -> StagePart:
    part = StagePart(
        ranks=fields.text("ranks", max_length=1_000_000),
        device_class=fields.text("device_class"),
        tp=fields.integer("tp", low=1),
        rows=fields.integer("rows", low=1),
    )
    fields.finish()
    return part


def _integers(fields: Fields, name: str) -> tuple[int, ...]:
    values = fields.sequence(name, low=1, high=1_000_000)
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise fields.error(
                name, "is not a list of counts", found=short_repr(value), allowed="whole numbers"
            )
    return tuple(int(str(value)) for value in values)


def _runner_up(fields: Fields) -> RunnerUp:
    runner_up = RunnerUp(
        strategy=_strategy(fields.mapping("strategy")),
        step_time_s=fields.number("step_time_s"),
        device_bytes=fields.number("device_bytes"),
    )
    fields.finish()
    return runner_up


def read_certificate(fields: Fields) -> Certificate:
    """The certificate of a plan file."""
    rejected = fields.mapping("rejected")
    priced_as = _lines(fields, "priced_as") if fields.has("priced_as") else ()
    best_s, lower_bound_s = fields.number("best_s"), fields.number("lower_bound_s")
    if priced_as and fields.has("gap"):
        raise fields.error(
            "gap",
            "must be null: nothing is proven",
            found=short_repr(fields.any("gap")),
            allowed="null",
        )
    fixed, axes = fields.mapping("fixed", default={}), fields.mapping("axes", default={})
    certificate = Certificate(
        space=fields.text("space"),
        fixed={name: _field_value(fixed, name, fixed.any(name)) for name in fixed.names},
        axes={
            name: tuple(_field_value(axes, name, value) for value in axes.sequence(name, low=1))
            for name in axes.names
        },
        enumerated=fields.integer("enumerated", high=1e30),
        unexplored=fields.integer("unexplored", high=1e30, default=0),
        rejected={name: rejected.integer(name, high=1e30) for name in rejected.names},
        cut_by_bound=fields.integer("cut_by_bound", high=1e30),
        simulated=fields.integer("simulated", high=1e30),
        best_s=best_s,
        lower_bound_s=lower_bound_s,
        gap=_gap(best_s, lower_bound_s) if priced_as else fields.number("gap", low=-1.0),
        search_s=fields.number("search_s"),
        search_cpu_s=fields.number("search_cpu_s"),
        priced_as=priced_as,
    )
    fields.finish()
    for name, values in certificate.axes.items():
        if len(set(values)) < len(values):
            raise axes.error(
                name, "has a value twice", found=short_repr(list(values)), allowed="each value once"
            )
    return certificate


def _gap(best_s: float, lower_bound_s: float) -> float:
    """The gap of an approximated cluster, which the file does not contain."""
    return (best_s - lower_bound_s) / best_s if best_s else 0.0


def _lines(fields: Fields, name: str) -> tuple[str, ...]:
    """At least one text of one line each."""
    lines = fields.sequence(name, low=1, high=64)
    for line in lines:
        if not isinstance(line, str) or not line.isprintable() or not line:
            raise fields.error(name, "has an entry that is not one line of text", found=short_repr(line))
    return tuple(map(str, lines))


def _field_value(fields: Fields, name: str, value: object) -> Value:
    """A value of the strategy field `name`."""
    if name not in FIELDS and name not in ALIASES:
        raise fields.error(name, "is not a field of a strategy", allowed=", ".join((*FIELDS, *ALIASES)))
    if not is_value(name, value):
        raise fields.error(name, "is not a value of this field", found=short_repr(value))
    return cast(Value, value)


def _schedule(fields: Fields) -> Schedule:
    name = fields.choice("name", SCHEDULES)
    microbatches = fields.integer("microbatches", low=1, high=1e7)
    stage_rank = _integers(fields, "stage_rank")
    rows = fields.sequence("ranks", low=1)
    fields.finish()
    for row in rows:
        if not isinstance(row, str) or "\n" in row:
            raise fields.error("ranks", "has a row that is not a line of text", found=short_repr(row))
    header = f"schedule={name} microbatches={microbatches} stage_rank={','.join(map(str, stage_rank))}"
    try:
        schedule = from_text("\n".join((header, *map(str, rows))))
    except ConfigError as error:
        where = f"{error.key}: " if error.key else ""
        raise fields.error(
            "ranks", f"{where}{error.message}", found=error.found, allowed=error.allowed
        ) from None
    if max(stage_rank) >= len(rows):
        raise fields.error("stage_rank", "names a rank without actions", found=str(max(stage_rank)))
    return schedule


def _check_consistent(plan: Plan, fields: Fields) -> None:
    """Raises ConfigError if the parts of the plan contradict each other."""
    check_for_trace(plan.for_trace, plan.cluster, fields.file)
    try:
        check_ledger(plan.certificate)
    except InternalError as error:
        raise fields.error("certificate", str(error)) from None
    named, planned = plan.schedule.name, plan.best.strategy.schedule
    if named != planned:
        raise ConfigError(
            "is not the strategy's", file=fields.file, key="schedule.name", found=named, allowed=planned
        )
    best, batch = plan.best.strategy, plan.job.global_batch_size
    if plan.schedule.microbatches * best.dp * best.micro_batch_size != batch:
        raise ConfigError(
            "are not those of the job and the strategy", file=fields.file, key="schedule.microbatches",
            found=str(plan.schedule.microbatches), allowed=f"{batch} / dp / micro_batch_size",
        )  # fmt: skip
    best_s = plan.certificate.best_s
    if not isclose(best_s, plan.best.step_time_s, rel_tol=1e-9):
        raise ConfigError(
            "is not the step time of the best", file=fields.file, key="certificate.best_s", found=repr(best_s)
        )
