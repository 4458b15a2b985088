"""What `simulate` answers for the plan of an operator graph: actions, and the operators that take most."""

from __future__ import annotations

from collections import defaultdict

from shardwise.app.cli import words
from shardwise.app.cli.output import Line, Output
from shardwise.app.cli.proof import priced_as_lines
from shardwise.app.cli.tables import table
from shardwise.app.cli.timeline import CHART_COLUMNS, VERSION, busy_s
from shardwise.errors import ConfigError
from shardwise.inputs import printable
from shardwise.plan import GraphPlan, plan_hash, read_graph_plan
from shardwise.search import GraphTimeline, graph_timeline, graph_trace
from shardwise.sim import gantt, write_trace

MAX_OPERATORS = 8
"""So many operators are shown, those that take most of a step."""


def simulated_graph(path: str, *, trace: str | None, is_json: bool) -> Output:
    """The step of the graph plan at `path`, priced again; writes the trace where one is named.

    Raises ConfigError for a file that is no such plan, or whose step time is not what this version finds.
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
    """The operators that take most of a step, in all repetitions and stages together."""
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
    return table(("takes most, with its traffic", "forward", "backward"), rows, left=1)


def _graph_document(plan: GraphPlan, found: GraphTimeline, trace: str | None) -> dict[str, object]:
    """As of other plans; a rank stands for the devices of a stage."""
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
