"""The plan file: written atomically, verified when read (schema, version and hash first, then every key).

`read_plan` reads plans of every kind, and files of version 1 (`version_1`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from math import isclose
from typing import Any, cast, get_args

from shardwise.cluster import Cluster, cluster_from_record, mesh_of
from shardwise.errors import ConfigError, InternalError
from shardwise.graph import GraphLayout, OpGraph, layout_from_record, parse_graph, staged_from_record
from shardwise.inputs import Fields, dumps, read_bytes, read_mapping, short_repr
from shardwise.model import (
    MODULE_SETS,
    NO_MODULES,
    Model,
    active_parameters,
    model_from_config,
    parameters,
)
from shardwise.plans.atomic_write import Files, write_file
from shardwise.plans.documents import SCHEMA, VERSION, document_hash, plain_mapping, plan_document
from shardwise.plans.plan import Plan, PlanQuestion, RunnerUp
from shardwise.plans.record import (
    OBJECTIVES,
    SHORTEST_STEP_S,
    Certificate,
    Idle,
    Layout,
    MixedFigures,
    Optimum,
    PeakMemory,
    Pipeline,
    Result,
    Stage,
    StagePart,
    TargetBest,
    Value,
    check_for_trace,
    read_for_trace,
)
from shardwise.plans.resolved_layers import layers_document
from shardwise.plans.version_1 import SCHEMAS_OF_VERSION_1, from_version_1
from shardwise.schedule import Schedule, from_text
from shardwise.strategy import (
    ALIASES,
    ANY,
    CP_KINDS,
    FIELDS,
    OFFLOADS,
    RECOMPUTES,
    SCHEDULES,
    Job,
    Optimizer,
    Strategy,
    is_value,
    option_values,
    profile_from_record,
    target_names,
)
from shardwise.ties import TIE

MAX_PLAN_BYTES = 8 << 20
"""Largest size of a plan file in bytes. It contains the schedule and the cluster, so it may be larger than
other inputs."""

MAX_PLAN_NODES = 1_000_000
"""Largest number of values in a plan file."""

SCHEDULES_OF_STAGES = ("1f1b",)
"""Schedules of the stages of an operator graph: those with one stage per pipeline rank."""

MAX_PIPELINES = 1_000_000


def verified(document: Mapping[str, object], path: str) -> Mapping[str, object]:
    """The document of a plan file at `path`, of the newest version. Raises ConfigError if it is no plan file,
    is of a newer version, or has changed since it was written."""
    fields = Fields(document, file=path)
    schema = document.get("schema")
    if schema not in (SCHEMA, *SCHEMAS_OF_VERSION_1):
        raise fields.error("schema", "is not a plan file", found=short_repr(schema), allowed=SCHEMA)
    version, newest = fields.integer("version", low=1, high=10**9), VERSION if schema == SCHEMA else 1
    if version > newest:
        raise fields.error(
            "version", f"is a newer plan format than this shardwise reads ({schema} {version})",
            found=str(version), allowed=f"up to {newest}",
        )  # fmt: skip
    stated = fields.any("hash")
    try:
        actual = document_hash(document)
    except ValueError as error:
        raise fields.error("hash", f"cannot be computed: {error}") from None
    if stated != actual:
        raise fields.error(
            "hash", "does not match the content: the file was changed", found=short_repr(stated)
        )
    return document if version == VERSION else from_version_1(document, path)


# Plan files


def write_plan(path: str, plan: Plan, *, files: Files | None = None) -> str:
    """Writes `plan` to `path` atomically; returns the plan hash.

    Raises ConfigError if the path cannot be written (then nothing changed), InternalError for an inconsistent
    plan.
    """
    if plan.certificate is not None:
        check_ledger(plan.certificate)
    document = plan_document(plan)
    write_file(path, dumps(document, file=path).encode(), files=files)
    return str(document["hash"])


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan in the file at `path`, of any kind. Raises ConfigError if it is not a plan file, has a newer
    version, was altered or is incomplete."""
    path = os.fspath(path)
    document = read_mapping(path, max_bytes=MAX_PLAN_BYTES, max_nodes=MAX_PLAN_NODES)
    return _plan(Fields(verified(document, path), file=path), path)


_SCHEMA_LINE = re.compile(rb'\s*(\{\s*)?"?schema"?\s*:\s*"?(\S+?)["\s,]')


def is_plan_file(path: str | os.PathLike[str]) -> bool:
    """Whether the file at `path` begins with the schema of a plan, of any version. Raises ConfigError if it
    cannot be read."""
    found = _SCHEMA_LINE.match(read_bytes(os.fspath(path), max_bytes=MAX_PLAN_BYTES)[:4096])
    return found is not None and found[2].decode(errors="replace") in (SCHEMA, *SCHEMAS_OF_VERSION_1)


def check_ledger(certificate: Certificate) -> None:
    """Raises InternalError unless every enumerated candidate is rejected, pruned or simulated exactly
    once."""
    accounted = sum(certificate.rejected.values()) + certificate.cut_by_bound + certificate.simulated
    if accounted != certificate.enumerated:
        raise InternalError(f"{certificate.enumerated} candidates enumerated, {accounted} accounted for")


def _plan(fields: Fields, path: str) -> Plan:
    for name in ("schema", "version", "hash"):
        fields.any(name)
    certificate = _certificate(fields.mapping("certificate")) if fields.has("certificate") else None
    network, cluster, job = _network(fields), _cluster(fields, path), _job(fields.mapping("job"))
    target = fields.choice("target", (ANY, *target_names()))
    plan = Plan(
        network=network,
        cluster=cluster,
        job=job,
        question=_question(fields.mapping("question"), None if target == ANY else target, path),
        best=_result(fields.mapping("best"), network, cluster, job),
        schedule=_schedule(fields.mapping("schedule")) if fields.has("schedule") else None,
        runners_up=tuple(map(_runner_up, fields.mappings("runners_up", default=()))),
        certificate=certificate,
        epsilon=fields.number("epsilon", high=1e6) if fields.has("epsilon") else None,
        idle=_idle(fields.mapping("idle")),
        mixed=_mixed_figures(fields.mapping("mixed")) if fields.has("mixed") else None,
        for_trace=(
            read_for_trace(fields.mapping("for_trace"), () if certificate is None else certificate.priced_as)
            if fields.has("for_trace")
            else None
        ),
        optimum=_optimum(fields.mapping("optimum")) if fields.has("optimum") else None,
        targets=tuple(map(_target_best, fields.mappings("targets", default=()))),
    )
    fields.finish()
    _check_consistent(plan, fields)
    return plan


def _optimum(fields: Fields) -> Optimum:
    found = Optimum(
        strategy=_strategy(fields.mapping("strategy")),
        step_time_s=fields.number("step_time_s", low=SHORTEST_STEP_S),
        fits_probability=_probability(fields) if fields.has("fits_probability") else None,
    )
    fields.number("given_up", low=-1.0)  # computed from the step times
    fields.finish()
    return found


def _target_best(fields: Fields) -> TargetBest:
    target = fields.choice("target", (ANY, *target_names()))
    if fields.has("reason"):
        found = TargetBest(target=target, reason=fields.text("reason", max_length=1000))
    else:
        found = TargetBest(
            target=target,
            strategy=_strategy(fields.mapping("strategy")) if fields.has("strategy") else None,
            step_time_s=fields.number("step_time_s", low=SHORTEST_STEP_S),
            over_any=fields.number("over_any", low=-1.0),
        )
    fields.finish()
    return found


def _question(fields: Fields, target: str | None, path: str) -> PlanQuestion:
    fixed, axes = fields.mapping("fixed"), fields.mapping("axes")
    question = PlanQuestion(
        objective=fields.choice("objective", OBJECTIVES),
        space=fields.text("space"),
        fixed=_fixed(fixed),
        axes=_axes(axes),
        target=target,
        use_all=fields.boolean("use_all"),
        stage_dp=fields.integer("stage_dp", low=1, high=1e9),
        mixed_stage_rows=fields.integer("mixed_stage_rows", low=1, high=1e9),
        epsilon=fields.number("epsilon", high=1e6),
        events=fields.text("events", max_length=10_000) if fields.has("events") else None,
        tolerance=fields.number("tolerance", low=0.0, high=1.0) if fields.has("tolerance") else 0.0,
        options=_options(fields),
        cluster=_cluster(fields, path, key="question.cluster") if fields.has("cluster") else None,
    )
    fields.finish()
    return question


def _options(fields: Fields) -> dict[str, str]:
    """Options of the software with their values; none where the key is missing."""
    options, known = fields.mapping("options", default={}), option_values()
    found: dict[str, str] = {}
    for name in options.names:
        if name not in known:
            raise options.unknown(name, name, known, "is not an option of any target")
        found[name] = options.choice(name, known[name])
    return found


def _fixed(fields: Fields) -> dict[str, Value]:
    return {name: _field_value(fields, name, fields.any(name)) for name in fields.names}


def _axes(fields: Fields) -> dict[str, tuple[Value, ...]]:
    """Values of each restricted field, each once."""
    axes = {
        name: tuple(_field_value(fields, name, value) for value in fields.sequence(name, low=1))
        for name in fields.names
    }
    for name, values in axes.items():
        if len(set(values)) < len(values):
            raise fields.error(
                name, "has a value twice", found=short_repr(list(values)), allowed="each value once"
            )
    return axes


def _network(fields: Fields) -> Model | OpGraph:
    """The model or the operator graph."""
    if not fields.has("graph"):
        return _model(fields.mapping("model"))
    record = fields.any("graph")
    if not isinstance(record, Mapping):
        raise fields.error("graph", "is not a mapping", found=short_repr(record))
    try:
        return parse_graph(record)
    except ConfigError as error:
        raise error.within(file=fields.file, key="graph") from None


def _model(fields: Fields) -> Model:
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
    if fields.text("family") != model.family:
        raise fields.error(
            "family", "is not that of the config", found=fields.text("family"), allowed=model.family
        )
    if fields.any("layers") != plain_mapping(layers_document(model)):
        raise fields.error("layers", "are not those of the config", found="other operators or sizes")
    fields.finish()
    return model


def _cluster(fields: Fields, path: str, key: str = "cluster") -> Cluster:
    """The cluster of a plan file at `key`, below `fields`."""
    record = fields.any("cluster")
    if not isinstance(record, Mapping):
        raise fields.error(
            "cluster", "is not a mapping", found=short_repr(record), allowed="a cluster record"
        )
    try:
        return cluster_from_record(record, key=key)
    except ConfigError as error:
        raise error.within(file=path) from None


def _job(fields: Fields) -> Job:
    """The job of a plan file."""
    optimizer: Any = fields.choice("optimizer", get_args(Optimizer))
    seq_len, sample = fields.integer("seq_len", low=1, high=1e9), "mean_sample_len"
    job = Job(
        seq_len=seq_len,
        mean_sample_len=fields.integer(sample, low=1, high=seq_len) if fields.has(sample) else None,
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
    modules = (
        fields.choice("recompute_modules", MODULE_SETS[1:]) if fields.has("recompute_modules") else NO_MODULES
    )
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
        recompute_modules=modules,
        recompute_layers=fields.integer("recompute_layers"),
        offload=offload,
        axis_order=fields.text("axis_order"),
        first_stage_layers=fields.integer("first_stage_layers"),
        last_stage_layers=fields.integer("last_stage_layers"),
    )
    fields.finish()
    return strategy


def _result(fields: Fields, network: Model | OpGraph, cluster: Cluster, job: Job) -> Result:
    peak, errors = _peak_memory(fields.mapping("peak_memory_bytes")), job.profile.peak_errors
    memory = fields.mapping("memory")
    tightest_rank = memory.integer("tightest_rank")
    strategy = fields.mapping("strategy") if fields.has("strategy") else None
    if strategy is not None:
        _options(strategy)  # they follow from the job; `check` compares them
    result = Result(
        fields=None if strategy is None else _strategy(strategy),
        layout=_layout(fields.mapping("layout"), network, cluster),
        step_time_s=fields.number("step_time_s", low=SHORTEST_STEP_S),
        band_s=_band(fields, "band_s"),
        tokens_per_s_per_device=_number_or_none(fields, "tokens_per_s_per_device"),
        mfu=_number_or_none(fields, "mfu"),
        mfu_full_attention=_number_or_none(fields, "mfu_full_attention"),
        peak_memory=peak,
        memory_band_bytes=_band(fields, "memory_band_bytes")
        if fields.has("memory_band_bytes")
        else errors.band_bytes(peak.device),  # older files do not have it
        fits_probability=_probability(fields)
        if fields.has("fits_probability")
        else errors.fits_probability(peak.device, peak.capacity),
        breakdown=_parts(fields.mapping("breakdown")),
        memory=_parts(memory, excluded=("tightest_rank",)),
        tightest_rank=tightest_rank,
        evaluator=fields.text("evaluator"),
        pools=tuple(str(name) for name in fields.sequence("pools", low=1, high=64))
        if fields.has("pools")
        else (),
        is_alike=fields.boolean("is_alike", default=False),
    )
    fields.finish()
    return result


def _band(fields: Fields, name: str) -> tuple[float, float]:
    band = fields.sequence(name, low=2, high=2)
    if not all(isinstance(edge, int | float) and not isinstance(edge, bool) for edge in band):
        raise fields.error(name, "is not a pair of numbers", found=short_repr(band), allowed="[low, high]")
    return float(str(band[0])), float(str(band[1]))


def _probability(fields: Fields) -> float:
    return fields.number("fits_probability", high=1.0)


def _number_or_none(fields: Fields, name: str) -> float | None:
    return fields.number(name) if fields.has(name) else None


def _parts(fields: Fields, excluded: tuple[str, ...] = ()) -> dict[str, float]:
    """Named numbers; their names are those of the cost model."""
    return {name: fields.number(name, low=-1e30) for name in fields.names if name not in excluded}


def _peak_memory(fields: Fields) -> PeakMemory:
    """The peak memory of a result."""
    peak = PeakMemory(
        allocated=fields.number("allocated"),
        reserved=fields.number("reserved"),
        device=fields.number("device"),
        capacity=fields.number("capacity"),
    )
    fields.finish()
    return peak


def _layout(fields: Fields, network: Model | OpGraph, cluster: Cluster) -> Layout:
    """The layout of a result; that of an operator graph has a mesh, and operators in each stage."""
    schedule = fields.choice("schedule", SCHEDULES)
    pipelines = fields.mappings("pipelines", low=1, high=1 if isinstance(network, OpGraph) else MAX_PIPELINES)
    stages = [pipeline.mappings("stages", low=1) for pipeline in pipelines]
    operators: Sequence[GraphLayout | None] = [None] * sum(map(len, stages))
    if isinstance(network, OpGraph):
        operators = _operators(
            fields, network, cluster, pipelines[0].integer("microbatches", low=1), stages[0]
        )
    laid = iter(operators)
    layout = Layout(
        schedule=schedule,
        pipelines=tuple(
            _pipeline(pipeline, tuple(_stage(stage, next(laid)) for stage in own))
            for pipeline, own in zip(pipelines, stages, strict=True)
        ),
    )
    fields.finish()
    return layout


def _pipeline(fields: Fields, stages: tuple[Stage, ...]) -> Pipeline:
    pipeline = Pipeline(
        stages=stages,
        micro_batch_size=fields.integer("micro_batch_size", low=1, high=1e9),
        microbatches=fields.integer("microbatches", low=1, high=1e9),
        rows=fields.integer("rows", low=1, high=1e9),
        makespan_s=fields.number("makespan_s", low=SHORTEST_STEP_S),
    )
    fields.finish()
    return pipeline


def _operators(
    fields: Fields, graph: OpGraph, cluster: Cluster, microbatches: int, stages: Sequence[Fields]
) -> Sequence[GraphLayout]:
    """The layout of the operators of each stage, on equal meshes that together use all devices."""
    sizes = fields.sequence("mesh", low=1, high=3)
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise fields.error(
                "mesh", "is not a list of sizes", found=short_repr(size), allowed="whole numbers"
            )
    try:
        mesh = mesh_of(cluster, tuple(int(str(size)) for size in sizes))
    except ConfigError as error:
        raise fields.error("mesh", error.message, found=error.found, allowed=error.allowed) from None
    if len(stages) * mesh.devices != cluster.devices:
        allowed = f"sizes whose product is {cluster.devices // len(stages)}"
        raise fields.error("mesh", "does not use all devices", found=mesh.name, allowed=allowed)
    records = [stage.any("operators") for stage in stages]
    for stage, record in zip(stages, records, strict=True):
        if not isinstance(record, Mapping):
            raise stage.error("operators", "is not a mapping", found=short_repr(record))
    key = "best.layout"
    if len(records) == 1:
        return [layout_from_record(records[0], graph, mesh.ranks, file=fields.file, key=key)]
    whole = {"schedule": fields.any("schedule"), "microbatches": microbatches, "stages": records}
    return staged_from_record(whole, graph, mesh.ranks, SCHEDULES_OF_STAGES, file=fields.file, key=key).stages


def _stage(fields: Fields, operators: GraphLayout | None) -> Stage:
    chunks = _integers(fields, "chunks")
    if fields.integer("layers") != sum(chunks):
        raise fields.error("layers", "is not the sum of the chunks", found=short_repr(fields.any("layers")))
    if operators is not None and sum(chunks) != len(operators.blocks):
        raise fields.error(
            "layers",
            "is not the number of blocks",
            found=str(sum(chunks)),
            allowed=str(len(operators.blocks)),
        )
    stage = Stage(
        devices=fields.integer("devices", low=1),
        ranks=fields.text("ranks", max_length=1_000_000),
        device_class=fields.text("device_class"),
        tp=fields.integer("tp", low=1),
        cp=fields.integer("cp", low=1),
        dp=fields.integer("dp", low=1),
        layers=chunks,
        share=fields.number("share", high=1.0),
        parts=tuple(map(_stage_part, fields.mappings("parts", low=2, high=2))) if fields.has("parts") else (),
        recompute=fields.choice("recompute", RECOMPUTES),
        operators=operators,
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


def _certificate(fields: Fields) -> Certificate:
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
    others = fields.mappings("other_options") if fields.has("other_options") else ()
    certificate = Certificate(
        space=fields.text("space"),
        fixed=_fixed(fixed),
        axes=_axes(axes),
        empty_ends=fields.boolean("empty_ends", default=False),
        own_set=fields.boolean("own_set", default=False),
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
        options=_options(fields),
        other_options=tuple(map(_certificate, others)),
    )
    fields.finish()
    return certificate


def _idle(fields: Fields) -> Idle:
    idle = Idle(
        devices=fields.integer("devices", high=1e9),
        nodes=fields.integer("nodes", high=1e9),
        ranks=fields.text("ranks", max_length=1_000_000) if fields.any("ranks") else "",
    )
    fields.finish()
    return idle


def _mixed_figures(fields: Fields) -> MixedFigures:
    figures = MixedFigures(
        uniform_step_time_s=_number_or_none(fields, "uniform_step_time_s"),
        fastest_class_step_time_s=_number_or_none(fields, "fastest_class_step_time_s"),
        fastest_class=fields.text("fastest_class") if fields.has("fastest_class") else None,
        idle=tuple(str(name) for name in fields.sequence("idle", high=64)),
        why_uniform=fields.text("why_uniform", max_length=10_000) if fields.has("why_uniform") else None,
        uneven_gap=fields.number("uneven_gap"),
    )
    fields.finish()
    return figures


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
        raise fields.unknown(name, name, (*FIELDS, *ALIASES), "is not a field of a strategy")
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
    _check_requested(plan, fields)
    best, certificate = plan.best, plan.certificate
    for name, parts, total in (
        ()
        if plan.kind != "graph"
        else (
            ("breakdown", best.breakdown, best.step_time_s),
            ("memory", best.memory, best.peak_memory.device),
        )
    ):
        if not isclose(sum(parts.values()), total, rel_tol=TIE):
            raise ConfigError(
                "does not sum to its total", file=fields.file, key=f"best.{name}",
                found=repr(sum(parts.values())), allowed=repr(total),
            )  # fmt: skip
    if certificate is not None:
        try:
            check_ledger(certificate)
        except InternalError as error:
            raise fields.error("certificate", str(error)) from None
        if not isclose(certificate.best_s, plan.optimum_s, rel_tol=TIE):
            raise ConfigError(
                "is not the step time of the optimum", file=fields.file, key="certificate.best_s",
                found=repr(certificate.best_s),
            )  # fmt: skip
    if plan.kind == "graph":
        return
    batch = plan.job.global_batch_size
    if sum(pipeline.rows for pipeline in best.layout.pipelines) != batch:
        raise ConfigError(
            "do not sum to the batch", file=fields.file, key="best.layout.pipelines.rows",
            found=str(sum(pipeline.rows for pipeline in best.layout.pipelines)), allowed=str(batch),
        )  # fmt: skip
    if plan.kind == "uniform":
        _check_schedule(plan, fields)


def _check_requested(plan: Plan, fields: Fields) -> None:
    """Raises ConfigError if the plan's cluster is not a part of the requested one, with the idle devices."""
    whole = plan.question.cluster
    if whole is None:
        return
    unlike = [name for name, device in plan.cluster.classes.items() if whole.classes.get(name) != device]
    if unlike:
        raise ConfigError(
            "does not have the plan's devices", file=fields.file, key="question.cluster",
            found=", ".join(whole.classes), allowed=", ".join(unlike),
        )  # fmt: skip
    if plan.devices + plan.idle.devices != whole.devices:
        raise ConfigError(
            "does not have the used and the idle devices", file=fields.file, key="question.cluster",
            found=f"{whole.devices} devices", allowed=f"{plan.devices} used and {plan.idle.devices} idle",
        )  # fmt: skip


def _check_schedule(plan: Plan, fields: Fields) -> None:
    """Raises ConfigError unless the table is of the strategy's schedule and micro-batches."""
    best, batch, schedule = plan.strategy, plan.job.global_batch_size, plan.schedule
    if schedule is None:
        raise fields.error("schedule", "is missing", found="nothing", allowed="the table of actions")
    if schedule.name != best.schedule:
        raise ConfigError(
            "is not the strategy's", file=fields.file, key="schedule.name", found=schedule.name,
            allowed=best.schedule,
        )  # fmt: skip
    if schedule.microbatches * best.dp * best.micro_batch_size != batch:
        raise ConfigError(
            "are not those of the job and the strategy", file=fields.file, key="schedule.microbatches",
            found=str(schedule.microbatches), allowed=f"{batch} / dp / micro_batch_size",
        )  # fmt: skip
