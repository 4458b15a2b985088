"""The command `simulate`: the timeline of one step of a plan, as a Gantt chart in the terminal and as a
trace.

`simulated_graph` adds the slowest operators of a graph plan; `simulated_uneven` has a chart per kind of
pipeline.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwise import search
from shardwise.app.cli import words
from shardwise.app.cli.card import PIPELINES, priced_as_lines, stage_texts
from shardwise.app.cli.output import Line, Output
from shardwise.app.cli.request import check_output_path
from shardwise.app.cli.tables import table
from shardwise.errors import ConfigError
from shardwise.inputs import printable
from shardwise.plans import (
    GraphPlan,
    Plan,
    UnevenFile,
    document_hash,
    is_graph_plan,
    is_uneven_plan,
    plan_document,
    plan_hash,
    read_graph_plan,
    read_plan,
    read_uneven_plan,
    uneven_plan_document,
)
from shardwise.schedule import generate
from shardwise.search import GraphTimeline, graph_timeline, graph_trace
from shardwise.sim import (
    COMPUTE,
    Arrow,
    Span,
    Timeline,
    Trace,
    activation_bytes,
    gantt,
    simulate,
    task_graph,
    trace_of,
    write_trace,
)

Floats = NDArray[np.float64]

VERSION = 1
CHART_COLUMNS = 82
"""Columns of a Gantt chart without its labels."""


def simulated(path: str, *, trace: str | None, is_json: bool) -> Output:
    """The answer of `simulate` for the plan file at `path`, whose durations are estimated again; writes
    `trace`.

    ConfigError for a file that is no plan, or whose schedule is not that of its strategy.
    """
    if trace is not None:
        check_output_path("--trace", trace, inputs=(path,))
    if is_graph_plan(path):
        return simulated_graph(path, trace=trace, is_json=is_json)
    if is_uneven_plan(path):
        return simulated_uneven(path, trace=trace, is_json=is_json)
    plan = read_plan(path)
    timeline = timeline_of(plan, path)
    if trace is not None:
        write_trace(trace_of(timeline, activations=_activation_bytes(plan, timeline)), trace)
    notes = [f"wrote {trace}; open it at https://ui.perfetto.dev"] if trace is not None else []
    if is_json:
        return Output(document=_document(plan, timeline, trace), notes=notes)
    return Output(lines=_lines(plan, timeline), notes=notes)


def timeline_of(plan: Plan, path: str) -> Timeline:
    """One step of `plan`: the ranks of a pipeline, each of which represents the devices of its stage."""
    schedule, durations = search.step_durations(plan.model, plan.cluster, plan.job, plan.best.strategy)
    if schedule != plan.schedule:
        raise ConfigError("is not the schedule of the strategy", file=path, key="schedule")
    return simulate(task_graph(plan.schedule, durations))


def _activation_bytes(plan: Plan, timeline: Timeline) -> list[tuple[Floats, Floats]]:
    """Bytes of saved activations of each rank over time."""
    nbytes = search.stage_activation_bytes(plan.model, plan.cluster, plan.job, plan.best.strategy)
    return activation_bytes(plan.schedule, timeline, nbytes)


def _lines(plan: Plan, timeline: Timeline) -> list[Line]:
    strategy = plan.best.strategy
    title = f"{plan.model.name} on {plan.cluster.name}"
    details = (
        words.degrees_text(strategy),
        words.schedule_text(strategy),
        words.batch_text(strategy, plan.job),
        f"step {words.seconds(plan.best.step_time_s)}",
    )
    chart = gantt(timeline, width=CHART_COLUMNS).rstrip("\n").split("\n")
    end_s = plan.best.step_time_s - timeline.makespan_s
    after = f"then gradient norm, optimizer and host: {words.seconds(end_s)}"
    return [
        ((title, "title"),),
        ((" · ".join(text for text in details if text), "dim"),),
        *priced_as_lines(plan.priced_as),
        (),
        *(((line, ""),) for line in chart),
        ((after, "dim"),),
    ]


def _document(plan: Plan, timeline: Timeline, trace: str | None) -> dict[str, object]:
    """`simulate --json`. `timeline_s` is the makespan of the pipeline, `busy_s` the compute time of a rank in
    it."""
    return {
        "schema": "shardwise.timeline",
        "version": VERSION,
        "plan_hash": document_hash(plan_document(plan)),
        "step_time_s": plan.best.step_time_s,
        "timeline_s": timeline.makespan_s,
        "evaluator": plan.best.evaluator,
        "schedule": plan.schedule.name,
        "microbatches": plan.schedule.microbatches,
        "ranks": [
            {"rank": rank, "busy_s": busy, "idle_s": timeline.makespan_s - busy}
            for rank, busy in enumerate(busy_s(timeline, plan.schedule.pp))
        ],
        "trace": trace,
        "priced_as": list(plan.priced_as),
    }


def busy_s(timeline: Timeline, ranks: int) -> list[float]:
    """Seconds of compute of each rank."""
    graph = timeline.graph
    lengths = timeline.finish_s - timeline.start_s
    is_compute = np.array([stream == COMPUTE for stream in graph.streams])
    return [float(lengths[is_compute & (graph.ranks == rank)].sum()) for rank in range(ranks)]


# Graph plans

MAX_OPERATORS = 8
"""Most operators that are shown, those with the longest times."""


def simulated_graph(path: str, *, trace: str | None, is_json: bool) -> Output:
    """The answer of `simulate` for the graph plan at `path`, estimated again; writes `trace`.

    ConfigError for a file that is no such plan, or whose step time differs from the estimate of this version.
    """
    plan = read_graph_plan(path)
    try:
        found = graph_timeline(plan)
    except ConfigError as error:
        raise error.within(file=printable(path)) from None
    if trace is not None:
        write_trace(graph_trace(plan.graph, found), trace)
    notes = [f"wrote {trace}; open it at https://ui.perfetto.dev"] if trace is not None else []
    if is_json:
        return Output(document=_graph_document(plan, found, trace), notes=notes)
    return Output(lines=_graph_lines(plan, found), notes=notes)


def _graph_lines(plan: GraphPlan, found: GraphTimeline) -> list[Line]:
    facts = [f"mesh {plan.mesh.name}"]
    if plan.stages > 1:
        several = f"{plan.microbatches:,} micro-batches"
        facts = [f"{plan.stages} stages of {facts[0]}", found.schedule.name, several]
    facts.append(f"step {words.seconds(plan.step_time_s)}")
    end_s = max(stage.end_s for stage in found.stages)
    after = f"then gradients, norm, optimizer and host, on each stage: at most {words.seconds(end_s)}"
    return [
        ((f"graph:{plan.graph.name} on {plan.cluster.name}", "title"),),
        ((" · ".join(facts), "dim"),),
        *priced_as_lines(plan.priced_as),
        (),
        *(((line, ""),) for line in gantt(found.timeline, width=CHART_COLUMNS).rstrip("\n").split("\n")),
        ((after, "dim"),),
        (),
        *_operator_lines(plan, found),
    ]


def _operator_lines(plan: GraphPlan, found: GraphTimeline) -> list[Line]:
    """The operators with the longest times, summed over repetitions and stages."""
    blocks = [block.name for block in plan.graph.blocks for _ in range(block.repeat)]
    spent: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for stage in found.stages:
        for charge in stage.charges:
            if charge.place is not None and charge.when != "step":
                block, operator = charge.place
                name = f"{blocks[block]}/{operator}"
                spent[name][charge.when] += plan.microbatches * charge.seconds
    most = sorted(spent.items(), key=lambda each: -sum(each[1].values()))
    rows = [
        (name, words.seconds(times["forward"]), words.seconds(times["backward"]))
        for name, times in most[:MAX_OPERATORS]
    ]
    return table(("slowest operators, with communication", "forward", "backward"), rows, left=1)


def _graph_document(plan: GraphPlan, found: GraphTimeline, trace: str | None) -> dict[str, object]:
    """`simulate --json` of a graph plan; a rank represents the devices of a stage."""
    timeline = found.timeline
    return {
        "schema": "shardwise.timeline",
        "version": VERSION,
        "plan_hash": plan_hash(plan),
        "step_time_s": plan.step_time_s,
        "timeline_s": timeline.makespan_s,
        "evaluator": "max-plus",
        "schedule": found.schedule.name,
        "microbatches": plan.microbatches,
        "ranks": [
            {"rank": rank, "busy_s": busy, "idle_s": timeline.makespan_s - busy}
            for rank, busy in enumerate(busy_s(timeline, plan.stages))
        ],
        "trace": trace,
        "priced_as": list(plan.priced_as),
    }


# Uneven plans

_FIRST_RANK = re.compile("[-,]")
"""Separators after the first rank of a stage: 0-3, or 0,4-7 of a mixed-pool stage."""


@dataclass(frozen=True, slots=True)
class _Pipeline:
    """One pipeline: its stages as text, the first rank of each, its micro-batches, its timeline, and the
    seconds after it (gradient norm, optimizer, host)."""

    stages: tuple[str, ...]
    ranks: tuple[int, ...]
    microbatches: int
    timeline: Timeline
    end_s: float


def simulated_uneven(path: str, *, trace: str | None, is_json: bool) -> Output:
    """The answer of `simulate` for the uneven plan at `path`, all pipelines in parallel; writes `trace`.

    ConfigError for a file that is no such plan, or whose devices, layers or micro-batches do not add up.
    """
    plan = read_uneven_plan(path)
    pipelines = _pipelines(plan, path)
    if trace is not None:
        write_trace(_trace(pipelines), trace)
    notes = [f"wrote {trace}; open it at https://ui.perfetto.dev"] if trace is not None else []
    if is_json:
        return Output(document=_uneven_document(plan, pipelines, trace), notes=notes)
    return Output(lines=list(_uneven_lines(plan, pipelines)), notes=notes)


def _pipelines(plan: UnevenFile, path: str) -> list[_Pipeline]:
    best = plan.best
    found = search.predict_record(plan.model, plan.cluster, plan.job, best)
    if found.faults:
        raise ConfigError("is not a plan of its cluster", file=path, key="best", found=found.faults[0])
    timelines: dict[tuple[int, int], Timeline] = {}
    pipelines = []
    for pipeline, recompute_modes, count, times in zip(
        best.layout.pipelines, best.recompute, best.microbatches, found.pipelines, strict=True
    ):
        key = id(times), count
        if key not in timelines:
            schedule = generate("1f1b", pp=len(pipeline.stages), microbatches=count, vpp=1)
            timelines[key] = simulate(task_graph(schedule, times.durations))
        ranks = tuple(int(_FIRST_RANK.split(stage.ranks)[0]) for stage in pipeline.stages)
        texts = tuple(stage_texts(pipeline.stages, recompute_modes))
        pipelines.append(_Pipeline(texts, ranks, count, timelines[key], times.end_s))
    return pipelines


def _trace(pipelines: Sequence[_Pipeline]) -> Trace:
    """One trace of all pipelines; a stage appears as its first rank."""
    spans: list[Span] = []
    arrows: list[Arrow] = []
    for pipeline in pipelines:
        own = trace_of(pipeline.timeline)
        arrows += [Arrow(one.source + len(spans), one.target + len(spans)) for one in own.arrows]
        spans += [replace(span, rank=pipeline.ranks[span.rank]) for span in own.spans]
    return Trace(spans=tuple(spans), arrows=tuple(arrows))


def _uneven_lines(plan: UnevenFile, pipelines: Sequence[_Pipeline]) -> Iterator[Line]:
    """A chart per group of identical pipelines, that with most micro-batches first."""
    best = plan.best
    facts = (
        words.counted(len(pipelines), "pipeline"), "1f1b",
        words.microbatches_text(best.micro_batch_size, sum(best.microbatches)),
        f"step {words.seconds(best.step_time_s)}",
    )  # fmt: skip
    yield ((f"{plan.model.name} on {plan.cluster.name}", "title"),)
    yield ((" · ".join(facts), "dim"),)
    yield from priced_as_lines(plan.priced_as)
    identical: dict[tuple[int, tuple[str, ...]], list[_Pipeline]] = {}
    for pipeline in sorted(pipelines, key=lambda one: -one.microbatches):
        identical.setdefault((pipeline.microbatches, pipeline.stages), []).append(pipeline)
    for (count, stages), those in list(identical.items())[:PIPELINES]:
        first = those[0]
        many = words.counted(count, "micro-batch")
        yield ()
        stage_names = (f"{len(those)} × {many}: {stages[0]}", *stages[1:])
        for at, line in enumerate(words.wrapped(stage_names, " → ", CHART_COLUMNS)):
            yield ((f"  → {line}" if at else line, "value"),)
        for line in gantt(first.timeline, width=CHART_COLUMNS).rstrip("\n").split("\n"):
            yield ((line, ""),)
        ends = f"ends after {words.seconds(first.timeline.makespan_s)}"
        yield ((f"{ends}; then gradient norm, optimizer and host: {words.seconds(first.end_s)}", "dim"),)
    if len(identical) > PIPELINES:
        yield ((f"{len(identical) - PIPELINES} more kinds of pipelines", "dim"),)


def _uneven_document(
    plan: UnevenFile, pipelines: Sequence[_Pipeline], trace: str | None
) -> dict[str, object]:
    """`simulate --json` of an uneven plan; a rank is the first of a stage and has its `pipeline`."""
    best = plan.best
    return {
        "schema": "shardwise.timeline",
        "version": VERSION,
        "plan_hash": uneven_plan_document(plan)["hash"],
        "step_time_s": best.step_time_s,
        "timeline_s": max(pipeline.timeline.makespan_s for pipeline in pipelines),
        "evaluator": best.evaluator,
        "schedule": "1f1b",
        "microbatches": sum(best.microbatches),
        "ranks": [
            {"rank": rank, "pipeline": place, "busy_s": busy, "idle_s": one.timeline.makespan_s - busy}
            for place, one in enumerate(pipelines)
            for rank, busy in zip(one.ranks, busy_s(one.timeline, len(one.ranks)), strict=True)
        ],
        "trace": trace,
        "priced_as": list(plan.priced_as),
    }
