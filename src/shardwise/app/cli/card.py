"""The answer card: one screen that says what to run, how fast it is, why, and how sure that is."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from shardwise.app.cli import words
from shardwise.app.cli.output import WIDTH, Line, Span
from shardwise.cluster import Cluster
from shardwise.model import Model, active_parameters, parameters
from shardwise.plan import Answer, Certificate, Goodput, Result, usd_per_billion_tokens
from shardwise.strategy import Job
from shardwise.units import format_count, format_seconds

PROVEN_GAP = 1e-12
_LABEL = 15
_HALF = 47
_BAR = 14


def answer_card(
    answer: Answer,
    *,
    model: Model,
    cluster: Cluster,
    job: Job,
    goodput: Goodput | None = None,
    next_commands: Sequence[str] = (),
) -> list[Line]:
    """The card of `plan`; `goodput` is the best result's, where it is told."""
    return [
        *result_card(answer.best, model=model, cluster=cluster, job=job),
        *_goodput(goodput, cluster),
        *_runners_up(answer, model.layers),
        *_proof(answer.certificate),
        *_assumptions(cluster, job, answer.best, answer.certificate.space),
        *_next(next_commands),
    ]


def evaluation_card(
    result: Result, *, model: Model, cluster: Cluster, job: Job, next_commands: Sequence[str] = ()
) -> list[Line]:
    """The card of `evaluate`: the same without runners-up and proof."""
    return [
        *result_card(result, model=model, cluster=cluster, job=job),
        *_assumptions(cluster, job, result),
        *_next(next_commands),
    ]


def result_card(result: Result, *, model: Model, cluster: Cluster, job: Job) -> list[Line]:
    """What one strategy is and what it costs."""
    return [
        *_question(model, cluster, job),
        *_layout(result, job, model.layers),
        (),
        *_figures(result, cluster, job),
        (),
        *_breakdowns(result),
    ]


def _question(model: Model, cluster: Cluster, job: Job) -> Iterator[Line]:
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
    yield _row("strategy", (words.degrees_text(strategy), "value"))
    for line in words.wrapped(details, " · ", WIDTH - _LABEL):
        yield _row("", (line, ""))
    texts = words.stages_text(result.layout)
    parts = [part for text in texts for part in textwrap.wrap(text, WIDTH - _LABEL)]
    for index, part in enumerate(parts):
        yield _row("layout" if index == 0 else "", (part, ""))


def _figures(result: Result, cluster: Cluster, job: Job) -> Iterator[Line]:
    low, high = result.band_s
    band = f"   80 % band {words.seconds(low)} to {words.seconds(high)}"
    yield _row("step time", (words.seconds(result.step_time_s), "value"), (band, "dim"))
    total = format_count(round(words.tokens_per_s(result, cluster.devices)))
    yield _row(
        "throughput",
        (f"{result.tokens_per_s_per_device:,.0f} tokens/s per device", "value"),
        (f"   {total} tokens/s in all", "dim"),
    )
    yield _row(
        "MFU",
        (words.percent(result.mfu), "value"),
        (f"   {words.percent(result.mfu_full_attention)} counting attention in full", "dim"),
    )
    yield _memory_line(result)
    cost = usd_per_billion_tokens(cluster, job, result.step_time_s)
    if cost is not None:
        yield _row("cost", (f"${cost:,.2f} per billion tokens", "value"))


def _memory_line(result: Result) -> Line:
    peak = result.peak_memory
    fraction = peak.device / peak.capacity
    filled = words.bar(fraction, _BAR)
    return _row(
        "peak memory",
        (f"{words.gib(peak.device)} of {words.gib(peak.capacity)} GiB", "value"),
        (f"   {words.percent(fraction, 0)} ", "dim"),
        (filled, "memory"),
        ("░" * (_BAR - len(filled)), "dim"),
        (f" on rank {result.tightest_rank}, the tightest", "dim"),
    )


def _breakdowns(result: Result) -> Iterator[Line]:
    """Two columns of bars: where the time goes, and where the memory goes."""
    left = list(_bars(result.breakdown, words.seconds, "time"))
    right = list(_bars(result.memory, lambda nbytes: f"{words.gib(nbytes)} GiB", "memory"))
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


def _goodput(goodput: Goodput | None, cluster: Cluster) -> Iterator[Line]:
    """What is left of the throughput over days, and what takes the rest."""
    if goodput is None:
        return
    inputs, lost = goodput.inputs, goodput.lost
    total = format_count(round(goodput.tokens_per_s_per_device * cluster.devices))
    yield ()
    yield _row(
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
        yield _row("", (text, "dim"))


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
            f"{f'{slower * 100:+.1f} %':>9}{words.gib(result.peak_memory.device) + ' GiB':>11}"
            f"{words.percent(result.mfu):>9}  "
        )
        difference = words.difference_text(result.strategy, best.strategy, layers)
        differs = textwrap.wrap(difference, WIDTH - len(fixed)) or [""]
        yield ((fixed, ""), (differs[0], "dim"))
        for more in differs[1:]:
            yield ((" " * len(fixed), ""), (more, "dim"))


def _proof(certificate: Certificate) -> Iterator[Line]:
    """Candidates, why the others fell, bound, gap, time."""
    is_proven = certificate.gap <= PROVEN_GAP
    rejected = sum(certificate.rejected.values())
    yield ()
    verdict = ("optimal", "good") if is_proven else ("not proven", "warn")
    yield _row(
        "proof",
        verdict,
        (f" among {certificate.enumerated:,} candidates of the space '{certificate.space}'", ""),
    )
    yield _row(
        "",
        (
            f"{rejected:,} rejected · {certificate.cut_by_bound:,} cut by the bound · "
            f"{certificate.simulated:,} evaluated",
            "",
        ),
    )
    counts = sorted(certificate.rejected.items(), key=lambda item: (-item[1], item[0]))
    reasons = [f"{reason} {count:,}" for reason, count in counts if count]
    for index, line in enumerate(words.wrapped(reasons, " · ", WIDTH - _LABEL - 12)):
        yield _row("", ("rejected by " if index == 0 else " " * 12, "dim"), (line, "dim"))
    gap = "0" if is_proven else words.percent(certificate.gap, 2)
    yield _row(
        "",
        (f"lower bound {words.seconds(certificate.lower_bound_s)}, gap {gap}, found in ", ""),
        (format_seconds(certificate.search_s), ""),
        (f" ({format_seconds(certificate.search_cpu_s)} of CPU)", "dim"),
    )


_CORE = (
    "space 'core' leaves out context and expert parallelism, offload, split backwards and uneven stages; "
    "--space default has them"
)


def _assumptions(cluster: Cluster, job: Job, result: Result, space: str = "") -> Iterator[Line]:
    uncalibrated = [name for name, device in cluster.classes.items() if not device.efficiency.is_calibrated]
    profile = (
        f"efficiency of {', '.join(uncalibrated)} from datasheets and published fits, not calibrated here"
    )
    texts = [
        f"{job.dtype}, {job.optimizer}, {words.percent(job.memory_margin, 0)} of device memory kept free",
        *cluster.assumptions,
        *([profile] if uncalibrated else ["efficiency calibrated by measurement"]),
        *([_CORE] if space == "core" else []),
        f"evaluated by {result.evaluator}",
    ]
    yield ()
    for index, text in enumerate(texts):
        for line in textwrap.wrap(text, WIDTH - _LABEL - 1):
            yield _row("assumptions" if index == 0 else "", (line, "dim"))
            index = 1


def _next(commands: Sequence[str]) -> Iterator[Line]:
    if commands:
        yield ()
    for index, text in enumerate(commands):
        yield _row("next" if index == 0 else "", (text, "code"))
    yield ()


def _row(label: str, *spans: Span) -> Line:
    return ((f" {label:<{_LABEL - 1}}", "label"), *spans)
