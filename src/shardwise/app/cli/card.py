"""The answer card: one screen that says what to run, how fast it is, why, and how sure that is."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from shardwise.app.cli import words
from shardwise.app.cli.output import LABEL, WIDTH, Line, row
from shardwise.app.cli.proof import frontier_table, priced_as_lines, proof_lines
from shardwise.cluster import Cluster
from shardwise.model import Model, active_parameters, parameters
from shardwise.plan import Answer, Goodput, Result, UnevenResult, usd_per_billion_tokens
from shardwise.strategy import Job
from shardwise.units import format_count, format_seconds

_HALF = 47
_BAR = 14


def answer_card(
    answer: Answer,
    *,
    model: Model,
    cluster: Cluster,
    job: Job,
    of_devices: int | None = None,
    target: str | None = None,
    goodput: Goodput | None = None,
    next_commands: Sequence[str] = (),
) -> list[Line]:
    """The card of `plan` on the `cluster` it uses, a part of `of_devices` devices; `target` is the software
    that was named, `goodput` the best result's, where it is told."""
    return [
        *result_card(answer.best, model=model, cluster=cluster, job=job, target=target),
        *_mixed_comparison(answer),
        *_goodput(goodput, cluster),
        *_runners_up(answer, model.layers),
        *frontier_table(answer, model.layers),
        *proof_lines(answer, cluster, of_devices),
        *assumption_lines(cluster, job, answer.best.evaluator, answer.certificate.space),
        *next_lines(next_commands),
    ]


def evaluation_card(
    result: Result, *, model: Model, cluster: Cluster, job: Job, next_commands: Sequence[str] = ()
) -> list[Line]:
    """The card of `evaluate`: the same without runners-up and proof."""
    return [
        *result_card(result, model=model, cluster=cluster, job=job),
        *priced_as_lines(cluster.priced_as),
        *assumption_lines(cluster, job, result.evaluator),
        *next_lines(next_commands),
    ]


def result_card(
    result: Result, *, model: Model, cluster: Cluster, job: Job, target: str | None = None
) -> list[Line]:
    """What one strategy is and what it costs; `target` is the software that was named."""
    return [
        *question_lines(model, cluster, job),
        *([] if target is None else [row("target", (target, "value"))]),
        *_layout(result, job, model.layers),
        (),
        *figures(result, cluster, job),
        (),
        *_breakdowns(result),
    ]


def question_lines(model: Model, cluster: Cluster, job: Job) -> Iterator[Line]:
    """What is asked: model, cluster, batch."""
    """What was asked: the head of every card."""
    tokens = job.seq_len * job.global_batch_size
    total, active = parameters(model), active_parameters(model)
    size = f"{format_count(total)} parameters" + (
        f", {format_count(active)} active" if active != total else ""
    )
    yield (("", ""),)
    yield ((f" {model.name}", "title"), (" on ", "dim"), (cluster.name, "title"))
    facts = (
        size,
        words.counted(cluster.devices, "device"),
        f"{job.global_batch_size:,} × {job.seq_len:,} = {format_count(tokens)} tokens a step",
        job.dtype,
        job.optimizer,
    )
    for line in words.wrapped(facts, " · ", WIDTH - 1):
        yield ((f" {line}", "dim"),)
    yield (("─" * WIDTH, "dim"),)


def _layout(result: Result, job: Job, layers: int) -> Iterator[Line]:
    strategy = result.strategy
    details = words.detail_texts(strategy, job, layers)
    yield row("strategy", (words.degrees_text(strategy), "value"))
    for line in words.wrapped(details, " · ", WIDTH - LABEL):
        yield row("", (line, ""))
    texts = words.stages_text(result.layout)
    parts = [part for text in texts for part in textwrap.wrap(text, WIDTH - LABEL)]
    for index, part in enumerate(parts):
        yield row("layout" if index == 0 else "", (part, ""))


def figures(result: Result | UnevenResult, cluster: Cluster, job: Job) -> Iterator[Line]:
    """Step time, throughput, utilisation, memory, cost."""
    low, high = result.band_s
    band = f"   80 % band {words.seconds(low)} to {words.seconds(high)}"
    yield row("step time", (words.seconds(result.step_time_s), "value"), (band, "dim"))
    total = format_count(round(words.tokens_per_s(result, cluster.devices)))
    yield row(
        "throughput",
        (f"{result.tokens_per_s_per_device:,.0f} tokens/s per device", "value"),
        (f"   {total} tokens/s in all", "dim"),
    )
    yield row(
        "MFU",
        (words.percent(result.mfu), "value"),
        (f"   {words.percent(result.mfu_full_attention)} counting attention in full", "dim"),
    )
    yield _memory_line(result)
    cost = usd_per_billion_tokens(cluster, job, result.step_time_s)
    if cost is not None:
        yield row("cost", (f"${cost:,.2f} per billion tokens", "value"))


def _memory_line(result: Result | UnevenResult) -> Line:
    peak = result.peak_memory
    fraction = peak.device / peak.capacity
    filled = words.bar(fraction, _BAR)
    return row(
        "peak memory",
        (f"{words.memory(peak.device).removesuffix(' GiB')} of {words.memory(peak.capacity)}", "value"),
        (f"   {words.percent(fraction, 0)} ", "dim"),
        (filled, "memory"),
        ("░" * (_BAR - len(filled)), "dim"),
        (f" on rank {result.tightest_rank}, the tightest", "dim"),
    )


def _breakdowns(result: Result) -> Iterator[Line]:
    """Two columns of bars: where the time goes, and where the memory goes."""
    largest = max(result.memory.values())
    left = list(_bars(result.breakdown, words.seconds, "time"))
    right = list(_bars(result.memory, lambda nbytes: words.memory(nbytes, largest), "memory"))
    titles = ("where the time goes", f"where the memory goes (rank {result.tightest_rank})")
    yield ((f" {titles[0]:<{_HALF + 3}}", "label"), (titles[1], "label"))
    empty: Line = ((" " * _HALF, ""),)
    for time_part, memory_part in zip_longest(left, right, fillvalue=empty):
        yield ((" ", ""), *time_part, ("   ", ""), *memory_part)


def _bars(parts: Mapping[str, float], text_of: object, style: str) -> Iterator[Line]:
    """A line of `_HALF` columns for each part above a thousandth of the whole, largest first."""
    whole = sum(parts.values()) or 1.0
    largest = max(parts.values(), default=0.0) or 1.0
    for name, value in sorted(parts.items(), key=lambda item: -item[1]):
        if abs(value) < whole * 1e-3:
            continue
        label = words.shortened(name.replace("_", " "), 21)
        amount = text_of(value) if callable(text_of) else ""
        yield (
            (f"{label:<21} ", ""),
            (f"{words.bar(value / largest, 8):<8}", style),
            (f"{amount:>10}", ""),
            (f"{words.percent(value / whole, 0):>6} ", "dim"),
        )


def _mixed_comparison(answer: Answer) -> Iterator[Line]:
    """On a mixed cluster: against the fastest class alone and the best uniform strategy, and what is idle."""
    mixed = answer.mixed
    if mixed is None:
        return
    best_s = answer.best.step_time_s
    yield ()
    if mixed.idle:
        text = f"{', '.join(mixed.idle)} left idle: no strategy that uses all devices alike is faster"
        yield row("mixed", (text, "warn"))
    elif mixed.fastest_class_step_time_s is None and answer.parts:
        yield row("mixed", ("fits on no class alone", "value"))
    alone_s = mixed.fastest_class_step_time_s
    if alone_s is not None and not mixed.idle:
        text = f"{alone_s / best_s:.2f} × as fast as {mixed.fastest_class} alone"
        yield row("mixed", (text, "value"), (f"   {words.seconds(alone_s)}", "dim"))
    if mixed.why_uniform is not None:
        yield row("", (mixed.why_uniform, "dim"))


def _goodput(goodput: Goodput | None, cluster: Cluster) -> Iterator[Line]:
    """What is left of the throughput over days, and what takes the rest."""
    if goodput is None:
        return
    inputs, lost = goodput.inputs, goodput.lost
    total = format_count(round(goodput.tokens_per_s_per_device * cluster.devices))
    yield ()
    yield row(
        "goodput",
        (words.percent(goodput.fraction), "value"),
        (f"   of a long run is progress: {total} tokens/s in all", "dim"),
    )
    texts = (
        f"failures take {words.percent(lost['failures'])}: "
        f"{format_seconds(goodput.lost_per_failure_s)} every {format_seconds(goodput.system_mtbf_s)}, "
        f"a device fails every {words.hours(inputs.device_mtbf_s)}",
        f"checkpoints take {words.percent(lost['checkpoints'])}: {format_seconds(inputs.checkpoint_stall_s)} "
        f"every {format_seconds(goodput.checkpoint_interval_s)}"
        f"{'' if inputs.checkpoint_interval_s else ', the optimum'}",
        f"jitter takes {words.percent(lost['jitter'])}: {words.percent(inputs.jitter, 2)} a node, "
        f"the slowest of {words.counted(len(cluster.nodes), 'node')}",
    )
    for text in texts:
        yield row("", (text, "dim"))


def _runners_up(answer: Answer, layers: int) -> Iterator[Line]:
    if not answer.runners_up:
        return
    best = answer.best
    yield ()
    yield (
        (f" {'runners-up':<27}{'step time':>12}{'slower':>9}{'memory':>11}{'MFU':>9}  what differs", "label"),
    )
    for place, result in enumerate(answer.runners_up, start=2):
        slower = result.step_time_s / best.step_time_s - 1.0
        fixed = (
            f" {place:>2}  {words.degrees_text(result.strategy):<23}{words.seconds(result.step_time_s):>12}"
            f"{f'{slower * 100:+.1f} %':>9}{words.memory(result.peak_memory.device):>11}"
            f"{words.percent(result.mfu):>9}  "
        )
        difference = words.difference_text(result.strategy, best.strategy, layers)
        differs = textwrap.wrap(difference, WIDTH - len(fixed)) or [""]
        yield ((fixed, ""), (differs[0], "dim"))
        for more in differs[1:]:
            yield ((" " * len(fixed), ""), (more, "dim"))


_FITTED = "fitted to published runs (shardwise validate)"
_CORE = (
    "space 'core' leaves out context and expert parallelism, offload, split backwards and uneven stages; "
    "--space default has them"
)


def assumption_lines(cluster: Cluster, job: Job, evaluator: str, space: str = "") -> Iterator[Line]:
    """What every time and byte rests on."""
    uncalibrated = [name for name, device in cluster.classes.items() if not device.efficiency.is_calibrated]
    profile = (
        f"efficiency of {', '.join(uncalibrated)} from datasheets and relatives: no measured run was fitted"
    )
    measured = [
        f"kernels of {name} measured on {'; '.join(machines)}"
        for name, device in cluster.classes.items()
        if (machines := device.efficiency.measured_on)
    ]
    texts = [
        f"{job.dtype}, {job.optimizer}, {words.percent(job.memory_margin, 0)} of device memory kept free",
        *cluster.assumptions,
        *measured,
        *([profile] if uncalibrated else [f"{'all else' if measured else 'efficiency'} {_FITTED}"]),
        *([_CORE] if space == "core" else []),
        f"evaluated by {evaluator}",
    ]
    yield ()
    for index, text in enumerate(texts):
        for line in textwrap.wrap(text, WIDTH - LABEL - 1):
            yield row("assumptions" if index == 0 else "", (line, "dim"))
            index = 1


def next_lines(commands: Sequence[str]) -> Iterator[Line]:
    """Commands that continue from here."""
    """Commands that continue from here."""
    if commands:
        yield ()
    for index, text in enumerate(commands):
        yield row("next" if index == 0 else "", (text, "code"))
    yield ()
