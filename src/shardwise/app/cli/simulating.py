"""The command `simulate`: the timeline of one step of a plan, as a Gantt chart in the terminal and as a
trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from shardwise.app.cli import words
from shardwise.app.cli.card import priced_as_lines
from shardwise.app.cli.division import PIPELINES, division_text, stage_texts
from shardwise.app.cli.output import Line, Output, columns
from shardwise.app.cli.tables import table
from shardwise.app.web import page_of, page_suffix_checked, timeline_page_document
from shardwise.errors import ConfigError
from shardwise.inputs import printable
from shardwise.plans import Plan, check_output_path, plan_hash, read_plan, write_file
from shardwise.questions import target_name
from shardwise.search import PipelineTimeline, computing_s, plan_timelines, plan_trace
from shardwise.sim import GANTT_LABELS, gantt, write_trace
from shardwise.strategy import ANY

VERSION = 1
ACTION_COLUMNS = 3
"""Fewest columns of an action in a chart: a letter and two digits."""

MAX_OPERATORS = 8
"""Most operators that are shown, those with the longest times."""


def simulated(path: str, *, trace: str | None, plot: str | None, target: str | None, is_json: bool) -> Output:
    """The answer of `simulate` for the plan file at `path`, whose durations are estimated again; writes
    `trace`, and the page `plot`.

    ConfigError for a file that is no plan, or that this version of shardwise estimates otherwise, and for a
    plan of another target than `target`, where one is named.
    """
    name = target_name(target)
    if trace is not None:
        check_output_path("--trace", trace, inputs=(path,))
    if plot is not None:
        check_output_path("--plot", page_suffix_checked(plot, key="--plot"), inputs=(path,))
    plan = read_plan(path)
    if name not in (None, plan.target or ANY):
        raise ConfigError(
            "is not the target of the plan", file=printable(path), key="--target", found=name,
            allowed=plan.target or ANY,
        )  # fmt: skip
    try:
        pipelines = plan_timelines(plan)
    except ConfigError as error:
        raise error.within(file=printable(path)) from None
    if trace is not None:
        write_trace(plan_trace(plan, pipelines), trace)
    notes = [f"wrote {trace}; open it at https://ui.perfetto.dev"] if trace is not None else []
    if plot is not None:
        title = f"{plan.name} on {plan.cluster.name}"
        write_file(plot, page_of(title, timeline_page_document(plan, pipelines)))
        notes.append(f"wrote {plot}")
    if is_json:
        return Output(document=_document(plan, pipelines, trace), notes=notes)
    return Output(lines=list(_lines(plan, pipelines)), notes=notes)


def _lines(plan: Plan, pipelines: Sequence[PipelineTimeline]) -> Iterator[Line]:
    """A chart for each group of identical pipelines, that with most micro-batches first, and the slowest
    operators of a graph."""
    yield ((f"{plan.name} on {plan.cluster.name}", "title"),)
    facts = [*division_text(plan).split(" · "), f"step {words.seconds(plan.step_time_s)}"]
    if (bubble_s := plan.breakdown.get("pipeline_bubble", 0.0)) > 0.0:
        share = words.percent(bubble_s / plan.step_time_s)
        facts.append(f"pipeline bubble {words.seconds(bubble_s)}, {share}")
    for line in words.wrapped(facts, " · ", columns()):
        yield ((line, "dim"),)
    yield from priced_as_lines(plan.priced_as)
    identical: dict[tuple[int, tuple[str, ...]], list[PipelineTimeline]] = {}
    of_plan = zip(plan.best.layout.pipelines, pipelines, strict=True)
    for pipeline, timeline in sorted(of_plan, key=lambda one: -one[0].microbatches):
        key = pipeline.microbatches, tuple(stage_texts(pipeline.stages))
        identical.setdefault(key, []).append(timeline)
    for (count, stages), those in list(identical.items())[:PIPELINES]:
        yield ()
        names = (f"{len(those)} × {words.counted(count, 'micro-batch')}: {stages[0]}", *stages[1:])
        for at, line in enumerate(words.wrapped(names, " → ", columns() - 4)):
            yield ((f"  → {line}" if at else line, "value"),)
        first = those[0]
        yield from _chart(first)
        ends = f"ends after {words.seconds(first.timeline.makespan_s)}"
        yield ((f"{ends}; then {_after(first)}", "dim"),)
    if len(identical) > PIPELINES:
        yield ((f"{len(identical) - PIPELINES} more kinds of pipelines", "dim"),)
    if pipelines[0].estimates:
        yield ()
        yield from _operator_lines(plan, pipelines[0])


def _chart(pipeline: PipelineTimeline) -> Iterator[Line]:
    """The Gantt chart of a pipeline, and its legend."""
    timeline = pipeline.timeline
    width = columns() - GANTT_LABELS - len(str(timeline.graph.ranks.max()))
    *rows, legend = gantt(timeline, width=width, narrowest=ACTION_COLUMNS).rstrip("\n").split("\n")
    for line in (*rows, *words.wrapped(legend.split("  "), "  ", columns())):
        yield ((line, ""),)


def _after(pipeline: PipelineTimeline) -> str:
    """The work after the last action, with its time."""
    time = words.seconds(pipeline.end_s)
    if pipeline.estimates:
        return f"gradients, norm, optimizer and host, on each stage: at most {time}"
    return f"gradient norm, optimizer and host: {time}"


def _operator_lines(plan: Plan, pipeline: PipelineTimeline) -> list[Line]:
    """The operators with the longest times, summed over repetitions and stages."""
    blocks = [block.name for block in plan.graph.blocks for _ in range(block.repeat)]
    spent: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for stage in pipeline.estimates:
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


def _document(plan: Plan, pipelines: Sequence[PipelineTimeline], trace: str | None) -> dict[str, object]:
    """`simulate --json`: `timeline_s` is the makespan of the slowest pipeline, `busy_s` the compute time of a
    rank in it. A rank is the first of its stage."""
    return {
        "schema": "shardwise.timeline",
        "version": VERSION,
        "plan_hash": plan_hash(plan),
        "step_time_s": plan.step_time_s,
        "timeline_s": max(pipeline.timeline.makespan_s for pipeline in pipelines),
        "evaluator": plan.best.evaluator,
        "schedule": plan.best.layout.schedule,
        "microbatches": plan.microbatches,
        "ranks": [
            {
                "rank": ranks[0],
                "pipeline": place,
                "busy_s": busy,
                "idle_s": one.timeline.makespan_s - busy,
            }
            for place, one in enumerate(pipelines)
            for stage, (ranks, busy) in enumerate(zip(one.ranks, computing_s(one), strict=True))
        ],
        "trace": trace,
        "priced_as": list(plan.priced_as),
    }
