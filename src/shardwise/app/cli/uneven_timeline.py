"""What `simulate` answers for an uneven plan: each pipeline's own step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardwise import search
from shardwise.app.cli import words
from shardwise.app.cli.output import Line, Output
from shardwise.app.cli.proof import priced_as_lines
from shardwise.app.cli.timeline import CHART_COLUMNS, VERSION, busy_s
from shardwise.app.cli.uneven_card import PIPELINES, stage_texts
from shardwise.errors import ConfigError
from shardwise.plan import UnevenFile, read_uneven_plan, uneven_plan_document
from shardwise.schedule import generate
from shardwise.sim import Arrow, Span, Timeline, Trace, gantt, simulate, task_graph, trace_of, write_trace

_FIRST_RANK = re.compile("[-,]")
"""What parts the first rank of a stage from the others: 0-3, or 0,4-7 of one on two pools."""


@dataclass(frozen=True, slots=True)
class _Pipeline:
    """One pipeline: its stages as text, the first rank of each, its microbatches, its timeline, and what
    comes behind."""

    stages: tuple[str, ...]
    ranks: tuple[int, ...]
    microbatches: int
    timeline: Timeline
    end_s: float


def simulated_uneven(path: str, *, trace: str | None, is_json: bool) -> Output:
    """The step of the uneven plan at `path`, all pipelines side by side; writes the trace where one is named.

    Raises ConfigError for a file that is no such plan, or tells of devices, layers or microbatches that do
    not add up.
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
    """All in one, a stage by its first rank."""
    spans: list[Span] = []
    arrows: list[Arrow] = []
    for pipeline in pipelines:
        own = trace_of(pipeline.timeline)
        arrows += [Arrow(one.source + len(spans), one.target + len(spans)) for one in own.arrows]
        spans += [replace(span, rank=pipeline.ranks[span.rank]) for span in own.spans]
    return Trace(spans=tuple(spans), arrows=tuple(arrows))


def _uneven_lines(plan: UnevenFile, pipelines: Sequence[_Pipeline]) -> Iterator[Line]:
    """A chart for each kind of pipeline, the one with most microbatches first."""
    best = plan.best
    facts = (
        words.counted(len(pipelines), "pipeline"), "1f1b",
        f"micro-batch {best.micro_batch_size} × {sum(best.microbatches):,}",
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
        many = words.counted(count, "microbatch").replace("microbatchs", "microbatches")
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
    """As of other plans; a rank is the first of a stage, and its pipeline is told."""
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
