"""How a plan divides the work, as text: `division` in a few words, `layout_lines` with all stages.

Only `division` distinguishes kinds of plans: what a uniform strategy, an uneven plan and the plan of an
operator graph say of themselves. Pipelines and stages are shown in one way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

from shardwise import search
from shardwise.app.cli import words
from shardwise.app.cli.output import LABEL, Line, columns, row
from shardwise.cluster import Cluster
from shardwise.graph import OpGraph
from shardwise.model import Model
from shardwise.plans import Plan, PlanKind, Result, Stage
from shardwise.strategy import Job

PIPELINES = 12
"""Most groups of identical pipelines that are shown."""

Division = tuple[str, str, list[str]]
"""How the work is divided: its label on a card, the degrees or their like, and the other choices."""


def division(result: Result) -> Division:
    """How the layout of `result` divides the work."""
    return _DIVISIONS[result.kind](result)


def _of_strategy(result: Result) -> Division:
    layers = sum(sum(stage.layers) for stage in result.layout.stages)
    batch = words.microbatches_text(result.micro_batch_size, result.microbatches[0])
    choices = words.choice_texts(result.strategy, layers)
    return "strategy", words.degrees_text(result.strategy), [batch, *choices]


def _of_pipelines(result: Result) -> Division:
    count = len(result.layout.pipelines)
    many = words.counted(count, "data-parallel pipeline") if count > 1 else "one pipeline"
    has_replicas = count > 1 or any(stage.parts for stage in result.layout.stages)
    sharded = ["ZeRO-1 over the replicas of a stage"] if has_replicas else []
    batch = words.microbatches_text(result.micro_batch_size, sum(result.microbatches))
    return "plan", f"uneven: {many}", [batch, result.layout.schedule, *sharded]


def _of_operators(result: Result) -> Division:
    operators = result.layout.operators
    mesh = "mesh " + "x".join(map(str, () if operators is None else operators.ranks))
    stages = len(result.layout.stages)
    if stages == 1:
        return "plan", mesh, []
    batch = words.microbatches_text(result.micro_batch_size, sum(result.microbatches))
    return "plan", f"{stages} stages of {mesh}", [batch, result.layout.schedule]


_DIVISIONS: Mapping[PlanKind, Callable[[Result], Division]] = {
    "uniform": _of_strategy,
    "uneven": _of_pipelines,
    "graph": _of_operators,
}


def division_text(plan: Plan) -> str:
    """How a plan divides the work, in one line."""
    _, head, details = division(plan.best)
    return " · ".join((head, *details[:3]))


def layout_lines(result: Result, network: Model | OpGraph, cluster: Cluster, job: Job) -> Iterator[Line]:
    """How the layout divides the work, with its pipelines and stages."""
    yield from plan_lines(result)
    if isinstance(network, Model) and result.pools:
        yield from _spread(search.spread_stages(search.UnevenSpace(network, cluster, job), result))


def plan_lines(result: Result) -> Iterator[Line]:
    """The division, and every group of identical pipelines: their number, micro-batches, and stages in
    order."""
    label, head, details = division(result)
    yield row(label, (head, "value"))
    yield from words.wrapped_rows("", details)
    total = sum(result.microbatches)
    # The degrees of a strategy are those of all stages.
    groups = identical_pipelines(result, is_brief=label == "strategy")
    label, indent = "layout", "" if len(groups) == 1 and len(result.layout.pipelines) == 1 else "  "
    for number, share, described in groups[:PIPELINES]:
        if indent:
            many = f"{number} × {words.counted(share, 'micro-batch')}"
            part = words.percent(number * share / total)
            yield row(label, (many, "value"), (f"   {part} of the batch", "dim"))
            label = ""
        for at, line in enumerate(words.wrapped(described, " → ", columns() - LABEL - 4)):
            yield row(label, (f"{indent}{'→ ' if at else ''}{line}", ""))
            label = ""
    if len(groups) > PIPELINES:
        yield row("", (f"{len(groups) - PIPELINES} more kinds of pipelines", "dim"))


def _spread(spread: Mapping[str, Sequence[int]]) -> Iterator[Line]:
    """Spread stages: nodes that hold fewer stages of a pipeline than fit, and replicas of these."""
    for name, stage_counts in spread.items():
        many = " or ".join(str(count) for count in stage_counts)
        stages = "stage" if stage_counts == (1,) else "stages"
        yield row("", (f"{name}: {many} {stages} of a pipeline per node, the rest are replicas", "dim"))


def identical_pipelines(result: Result, *, is_brief: bool) -> list[tuple[int, int, list[str]]]:
    """Groups of pipelines with equal stages and micro-batches: number of pipelines, micro-batches of each,
    stages as text."""
    described = [
        (pipeline.microbatches, tuple(stage_texts(pipeline.stages, is_brief=is_brief)))
        for pipeline in result.layout.pipelines
    ]
    ordered = sorted(described, key=lambda one: (-one[0], one[1]))
    return [(len(list(same)), key[0], list(key[1])) for key, same in groupby(ordered)]


def stage_texts(stages: Sequence[Stage], *, is_brief: bool = False) -> Iterator[str]:
    """`4 × [2 V100-16G, tp 2, 6 layers]` for consecutive equal stages; without degrees and recomputation if
    it `is_brief`."""
    keys = [
        (f"{stage.devices} {stage.device_class}", _layers_text(stage), "none")
        if is_brief
        else (_devices_text(stage), _layers_text(stage), stage.recompute)
        for stage in stages
    ]
    for (devices, layers, mode), run in groupby(keys):
        number = len(list(run))
        parts = [devices, layers]
        parts += [f"recompute {mode}"] if mode != "none" else []
        yield f"{number} × [{', '.join(parts)}]" if number > 1 else f"[{', '.join(parts)}]"


def _devices_text(stage: Stage) -> str:
    """`2 V100-16G, tp 2`; of a mixed-pool stage `4 A100-80G tp 4, 3 rows | 1 V100-16G, 1 row`."""
    if stage.parts:
        return " | ".join(
            f"{part.tp} {part.device_class}{f' tp {part.tp}' if part.tp > 1 else ''}, "
            + words.counted(part.rows, "row")
            for part in stage.parts
        )
    parts = [f"{stage.devices} {stage.device_class}"]
    parts += [f"tp {stage.tp}"] if stage.tp > 1 else []
    parts += [f"dp {stage.dp}"] if stage.dp > 1 else []
    return ", ".join(parts)


def _layers_text(stage: Stage) -> str:
    """`6 layers`, `6 layers (3+3)` in chunks, or `4 blocks` of a graph."""
    chunks = f" ({'+'.join(map(str, stage.layers))})" if len(stage.layers) > 1 else ""
    noun = "layer" if stage.operators is None else "block"
    return f"{words.counted(sum(stage.layers), noun)}{chunks}"
