"""The answer card of an uneven plan: which devices form which stages, their layers and shares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from shardwise import search
from shardwise.app.cli import words
from shardwise.app.cli.card import figures, next_lines, question_lines
from shardwise.app.cli.output import LABEL, WIDTH, Line, row
from shardwise.app.cli.proof import NOT_AS_GIVEN, idle_lines, priced_as_lines
from shardwise.cluster import Cluster
from shardwise.model import Model
from shardwise.plan import PROVEN_GAP, Stage, UnevenAnswer, UnevenResult
from shardwise.strategy import Job
from shardwise.units import format_seconds

PIPELINES = 12
"""Groups of alike pipelines that are drawn, at most."""


def uneven_card(
    answer: UnevenAnswer, *, model: Model, cluster: Cluster, job: Job, next_commands: Sequence[str] = ()
) -> list[Line]:
    """The card of `plan` where the best plan of a mixed cluster is uneven."""
    return [
        *question_lines(model, cluster, job),
        *plan_lines(answer.best),
        *_spread(search.spread_stages(search.UnevenSpace(model, cluster, job), answer.best)),
        (),
        *figures(answer.best, cluster, job),
        (),
        *_uneven_comparison(answer, cluster),
        (),
        *_proof(answer),
        (),
        *_assumptions(cluster, job, answer.best),
        *next_lines(next_commands),
    ]


def plan_lines(result: UnevenResult) -> Iterator[Line]:
    """Every group of alike pipelines: how many, what they do, and their stages in order."""
    count = len(result.layout.pipelines)
    total = sum(result.microbatches)
    many = f"{words.counted(count, 'pipeline')} side by side" if count > 1 else "one pipeline"
    yield row("plan", (f"uneven: {many}", "value"))
    each = f"micro-batch {result.micro_batch_size} × {total:,}"
    has_replicas = count > 1 or any(stage.parts for stage in result.layout.pipelines[0].stages)
    texts = [each, "1f1b", *(["ZeRO-1 over the replicas of a stage"] if has_replicas else [])]
    yield row("", (" · ".join(texts), ""))
    groups = identical_pipelines(result)
    for index, (number, share, described) in enumerate(groups[:PIPELINES]):
        head = f"{number} × {words.counted(share, 'microbatch').replace('microbatchs', 'microbatches')}"
        part = words.percent(number * share / total)
        lines = words.wrapped(described, " → ", WIDTH - LABEL - 4)
        yield row("layout" if index == 0 else "", (head, "value"), (f"   {part} of the batch", "dim"))
        for at, line in enumerate(lines):
            yield row("", (f"  {'→ ' if at else ''}{line}", ""))
    if len(groups) > PIPELINES:
        yield row("", (f"{len(groups) - PIPELINES} more kinds of pipelines", "dim"))


def _spread(spread: Mapping[str, Sequence[int]]) -> Iterator[Line]:
    """Where a node has few stages of a pipeline, though more would fit, and is full of their replicas."""
    for name, stage_counts in spread.items():
        many = " or ".join(str(count) for count in stage_counts)
        stages = "stage" if stage_counts == (1,) else "stages"
        yield row("", (f"a node of {name} has {many} {stages} of a pipeline, and replicas of it", "dim"))


def identical_pipelines(result: UnevenResult) -> list[tuple[int, int, list[str]]]:
    """Pipelines with equal stages and microbatches: how many, their microbatches, and their stages as
    text."""
    described = [
        (microbatches, tuple(stage_texts(pipeline.stages, recompute)))
        for microbatches, pipeline, recompute in zip(
            result.microbatches, result.layout.pipelines, result.recompute, strict=True
        )
    ]
    ordered = sorted(described, key=lambda one: (-one[0], one[1]))
    return [(len(list(same)), key[0], list(key[1])) for key, same in groupby(ordered)]


def stage_texts(stages: Sequence[Stage], recompute: Sequence[str]) -> Iterator[str]:
    """`4 × [2 V100-16G, tp 2, 6 layers]` for stages that follow each other alike."""
    keys = [
        (_devices_text(stage), stage.layers[0], mode) for stage, mode in zip(stages, recompute, strict=True)
    ]
    for (devices, layers, mode), run in groupby(keys):
        number = len(list(run))
        parts = [devices, words.counted(layers, "layer")]
        parts += [f"recompute {mode}"] if mode != "none" else []
        yield f"{number} × [{', '.join(parts)}]" if number > 1 else f"[{', '.join(parts)}]"


def _devices_text(stage: Stage) -> str:
    """`2 V100-16G, tp 2`; of a stage on two pools `4 A100-80G tp 4, 3 rows | 1 V100-16G, 1 row`."""
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


def _uneven_comparison(answer: UnevenAnswer, cluster: Cluster) -> Iterator[Line]:
    """Against the best uniform strategy and the fastest class alone; what is idle."""
    best_s, mixed = answer.best.step_time_s, answer.mixed
    comparisons = (
        (mixed.uniform_step_time_s, "the best uniform strategy", "no uniform strategy fits"),
        (mixed.fastest_class_step_time_s, f"{mixed.fastest_class} alone", "the model fits on no class alone"),
    )
    is_whole = all(part.is_complete for part in answer.parts) and not answer.unexplored_parts
    for index, (time_s, name, never) in enumerate(comparisons):
        label = "gain" if index == 0 else ""
        if time_s is None:
            yield row(label, (never if is_whole else "no uniform strategy was found", "value"))
        else:
            text = f"{time_s / best_s:.2f} × as fast as {name}"
            yield row(label, (text, "value"), (f"   {words.seconds(time_s)}", "dim"))
    if answer.best.idle_devices:
        yield from idle_lines(answer, cluster.devices)
    else:
        yield row("", (f"all {cluster.devices} devices work", "dim"))
    if not is_whole:
        yield row("", ("uniform strategies were not searched to the end", "warn"))


def _proof(answer: UnevenAnswer) -> Iterator[Line]:
    certificate = answer.certificate
    gap = certificate.gap
    if certificate.priced_as:
        yield row("proof", (f"not proven: {NOT_AS_GIVEN}", "warn"))
    elif gap <= PROVEN_GAP:
        yield row(
            "proof", ("optimal", "good"), (" among all uneven plans (docs/concepts/mixed-clusters.md)", "")
        )
    else:
        text = f"within {words.percent(gap, 2)} of the best uneven plan"
        yield row("proof", (text, "warn"), ("   (docs/concepts/mixed-clusters.md)", "dim"))
    total = certificate.enumerated + certificate.unexplored
    counts = f"{total:,} choices of pools, micro-batch and number of pipelines: "
    counts += f"{certificate.cut_by_bound:,} cut by the bound, {certificate.simulated:,} laid out"
    counts += f", {certificate.unexplored:,} unexplored" if certificate.unexplored else ""
    yield row("", (counts, ""))
    yield row(
        "",
        (f"lower bound {words.seconds(certificate.lower_bound_s)}, found in ", ""),
        (format_seconds(certificate.search_s), ""),
        (f" ({format_seconds(certificate.search_cpu_s)} of CPU)", "dim"),
    )
    yield from priced_as_lines(certificate.priced_as)


def _assumptions(cluster: Cluster, job: Job, result: UnevenResult) -> Iterator[Line]:
    texts = [
        f"{job.dtype}, {job.optimizer}, {words.percent(job.memory_margin, 0)} of device memory kept free",
        *cluster.assumptions,
        f"evaluated by {result.evaluator}",
    ]
    for index, text in enumerate(texts):
        for line in words.wrapped(text.split(" "), " ", WIDTH - LABEL - 1):
            yield row("assumptions" if index == 0 else "", (line, "dim"))
            index = 1
