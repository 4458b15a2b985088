"""What `simulate` answers: the timeline of one step of a plan, drawn in the terminal and as a trace file."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwise import search
from shardwise.app.cli import words
from shardwise.app.cli.output import Line, Output
from shardwise.app.cli.proof import priced_as_lines
from shardwise.app.cli.request import check_output_path
from shardwise.errors import ConfigError
from shardwise.plan import Plan, document_hash, is_graph_plan, is_uneven_plan, plan_document, read_plan
from shardwise.sim import (
    COMPUTE,
    Timeline,
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


def simulated(path: str, *, trace: str | None, is_json: bool) -> Output:
    """The step of the plan file at `path`, its durations computed again; writes the trace where one is named.

    Raises ConfigError for a file that is no plan, or whose schedule is not that of its strategy.
    """
    if trace is not None:
        check_output_path("--trace", trace, inputs=(path,))
    if is_graph_plan(path):
        from shardwise.app.cli.graph_timeline import simulated_graph

        return simulated_graph(path, trace=trace, is_json=is_json)
    if is_uneven_plan(path):
        from shardwise.app.cli.uneven_timeline import simulated_uneven

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
    """One step of `plan`: a pipeline's ranks, each of which stands for the devices of its stage."""
    schedule, durations = search.step_durations(plan.model, plan.cluster, plan.job, plan.best.strategy)
    if schedule != plan.schedule:
        raise ConfigError("is not the schedule of the strategy", file=path, key="schedule")
    return simulate(task_graph(plan.schedule, durations))


def _activation_bytes(plan: Plan, timeline: Timeline) -> list[tuple[Floats, Floats]]:
    """Activations that each rank holds, over time."""
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
    """`timeline_s` is the pipeline's part of the step, `busy_s` what a rank computes in it."""
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
    """Seconds that each of so many ranks computes."""
    graph = timeline.graph
    lengths = timeline.finish_s - timeline.start_s
    is_compute = np.array([stream == COMPUTE for stream in graph.streams])
    return [float(lengths[is_compute & (graph.ranks == rank)].sum()) for rank in range(ranks)]
