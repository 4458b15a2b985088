"""Answer cards: one screen with the plan, its step time and memory, the proof and the assumptions.

`answer_card` is that of `plan`, `evaluation_card` that of `evaluate`. `proof_lines` shows the certificate:
candidates, reasons for rejection, lower bound and optimality gap. `frontier_table` shows the Pareto frontier
of step time and memory.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest

from shardwise.app.cli import words
from shardwise.app.cli.division import layout_lines
from shardwise.app.cli.output import LABEL, WIDTH, Line, row
from shardwise.cluster import Cluster
from shardwise.model import Model, active_parameters, parameters
from shardwise.plans import (
    PROVEN_GAP,
    UNEVEN_SPACE,
    Answer,
    Certificate,
    Goodput,
    Idle,
    Result,
    usd_per_billion_tokens,
    usd_per_step,
)
from shardwise.strategy import ANY, Job
from shardwise.units import format_count, format_seconds

NOT_AS_GIVEN = "the input is approximated"
"""Why nothing is proven where the input has approximations (key `priced_as`)."""

FRONTIER_LINES = 12
"""Most points of a frontier that a card shows."""


# Proof and frontier


def proof_lines(answer: Answer, cluster: Cluster, of_devices: int | None) -> Iterator[Line]:
    """Outcomes of candidates, lower bound, optimality gap and search time; `of_devices` are the devices of
    the whole cluster where the answer uses a part of it."""
    certificate = answer.certificate
    rejected = sum(certificate.rejected.values())
    yield ()
    yield from _objective(answer, cluster, of_devices)
    yield from _verdicts(answer)
    yield from words.wrapped_rows("", _restrictions(certificate))
    counts = f"{rejected:,} rejected · " if rejected else ""
    counts += f"{certificate.cut_by_bound:,} pruned by the bound · "
    unexplored = f" · {certificate.unexplored:,} unexplored" if certificate.unexplored else ""
    yield row("", (f"{counts}{certificate.simulated:,} evaluated{unexplored}", ""))
    yield from _reasons(certificate.rejected)
    yield from _parts(answer)
    gap = "0" if certificate.gap <= PROVEN_GAP else words.percent(certificate.gap, 2)
    bound = "of the approximation" if certificate.priced_as else f"gap {gap}"
    yield row(
        "",
        (f"lower bound {words.seconds(certificate.lower_bound_s)}, {bound}, found in ", ""),
        (format_seconds(certificate.search_s), ""),
        (f" ({format_seconds(certificate.search_cpu_s)} of CPU)", "dim"),
    )
    yield from priced_as_lines(certificate.priced_as)


def priced_as_lines(texts: Iterable[str]) -> Iterator[Line]:
    """Approximations of the input in the cost model."""
    for text in texts:
        for index, line in enumerate(textwrap.wrap(text, WIDTH - LABEL - 1)):
            yield row("" if index else "approximation", (line, "warn"))


def _objective(answer: Answer, cluster: Cluster, of_devices: int | None) -> Iterator[Line]:
    """The objective where it is not step time, and the devices that stay idle."""
    devices = of_devices or cluster.devices
    if answer.objective != "time":
        usd = usd_per_step(cluster, answer.best.step_time_s)
        texts = {
            "memory": "least memory",
            "devices": "fewest devices",
            "cost": f"least cost, ${usd or 0.0:,.4f} per step",
        }
        used = f" on {cluster.devices:,} of {devices:,} devices" if answer.parts else ""
        yield row("objective", (texts[answer.objective] + used, "value"))
    yield from idle_lines(answer, devices)


def _parts(answer: Answer) -> Iterator[Line]:
    """Other parts of the cluster: searched, and pruned by their quick bound."""
    others = len(answer.parts) - 1 + answer.pruned_parts
    if answer.parts and others:
        text = f"{words.counted(others, 'other part')} of the cluster: "
        yield row("", (f"{text}{len(answer.parts) - 1:,} searched · {answer.pruned_parts:,} pruned", ""))


def idle_lines(answer: Answer, devices: int) -> Iterator[Line]:
    """Devices that stay idle, and the step time of all devices; nothing where all are used."""
    idle, all_s = answer.idle, answer.all_devices_step_time_s
    if not idle.devices:
        return
    yield idle_line(idle, devices)
    if all_s is None:
        is_over = answer.is_interrupted or bool(answer.unexplored_parts)
        why = "all devices: not searched" if is_over else "no strategy on all devices fits"
        yield row("", (why, ""))
    else:
        yield all_devices_line(all_s, answer.best.step_time_s)


def idle_line(idle: Idle, devices: int) -> Line:
    """The idle ones of `devices` devices."""
    whole = f", {words.counted(idle.nodes, 'whole node')}" if idle.nodes else ""
    text = f"{idle.devices:,} of {devices:,} devices{whole}"
    return row("idle", (text, "warn"), (f"   ranks {words.shortened(idle.ranks, 40)}", "dim"))


def all_devices_line(all_s: float, best_s: float) -> Line:
    """The step time of all devices compared with that of the best part."""
    more = words.percent(all_s / best_s - 1.0)
    return row("", (f"all devices take {words.seconds(all_s)} (+{more}); --use-all plans for them", ""))


def _verdicts(answer: Answer) -> Iterator[Line]:
    """The proof for the space and, where uneven plans were searched too, the gap that is left among them."""
    left = 0.0 if answer.mixed is None else answer.mixed.uneven_gap
    yield _verdict(answer, is_proven=answer.is_proven or (left > PROVEN_GAP and answer.certificate.is_proven))
    if left > PROVEN_GAP:
        yield row("", (f"not proven among uneven plans: gap {words.percent(left, 2)}", "warn"))


def _verdict(answer: Answer, *, is_proven: bool) -> Line:
    certificate = answer.certificate
    space = f"of the space '{certificate.space}'"
    if certificate.space == UNEVEN_SPACE:
        space = "of uneven plans (docs/concepts/mixed-clusters.md)"
    if is_proven:
        optimum = answer.optimum
        at = "" if optimum is None else f" at {words.seconds(optimum.step_time_s)}"
        text = f"{at} among {certificate.enumerated:,} candidates {space}"
        return row("proof", ("optimal", "good"), (text, ""))
    if certificate.priced_as:
        return row("proof", (f"not proven: {NOT_AS_GIVEN}", "warn"))
    reasons = []
    if answer.objective == "memory" and certificate.unexplored:
        reasons.append(f"{certificate.unexplored:,} candidates are unexplored")
    elif certificate.gap > PROVEN_GAP:
        reasons.append(f"gap {words.percent(certificate.gap, 2)}")
    unfinished = sum(not part.is_complete for part in answer.parts) + answer.unexplored_parts
    if unfinished:
        reasons.append(f"search of {words.counted(unfinished, 'part')} of the cluster incomplete")
    why = ", ".join(reasons)
    total = certificate.enumerated + certificate.unexplored
    return row(
        "proof",
        (f"not proven: {why}", "warn"),
        (f"   {certificate.enumerated:,} of {total:,} candidates {space} decided", ""),
    )


def _restrictions(certificate: Certificate) -> list[str]:
    """Values to which the question restricts the space."""
    texts = [f"{name} {' '.join(map(words.value_text, values))}" for name, values in certificate.axes.items()]
    texts += [f"{name} {words.value_text(value)}" for name, value in certificate.fixed.items()]
    return [f"only {texts[0]}", *texts[1:]] if texts else []


def _reasons(rejected: Mapping[str, int]) -> Iterator[Line]:
    counts = sorted(rejected.items(), key=lambda item: (-item[1], item[0]))
    reasons = [f"{reason} {count:,}" for reason, count in counts if count]
    for index, line in enumerate(words.wrapped(reasons, " · ", WIDTH - LABEL - 12)):
        yield row("", ("rejected by " if index == 0 else " " * 12, "dim"), (line, "dim"))


def frontier_table(answer: Answer, layers: int) -> Iterator[Line]:
    """The frontier of step time and memory: at most FRONTIER_LINES points at even distances, with the fastest
    and the smallest."""
    frontier = answer.frontier
    if frontier is None:
        return
    points, certificate = frontier.points, frontier.certificate
    places = spaced_indices(len(points), FRONTIER_LINES)
    shown = (
        f"{len(places)} of {len(points):,} points" if len(places) < len(points) else f"{len(points):,} points"
    )
    state = "incomplete" if certificate.unexplored else "approximated" if certificate.priced_as else "exact"
    yield ()
    yield (
        (f" {'time against memory':<27}{'step time':>12}{'slower':>9}{'memory':>11}  ", "label"),
        (f"{shown}, {state}, in {format_seconds(certificate.search_s)}", "dim"),
    )
    for place in places:
        point = points[place]
        slower = point.step_time_s / points[0].step_time_s - 1.0
        degrees = words.degrees_text(point.strategy).replace(" · ", " ")
        fixed = (
            f"  {degrees:<25}{words.seconds(point.step_time_s):>12}"
            f"{f'{slower * 100:+.1f} %':>9}{words.memory(point.device_bytes):>11}  "
        )
        differs = words.difference_text(point.strategy, answer.best.strategy, layers)
        yield ((fixed, ""), (words.shortened(differs, WIDTH - len(fixed)), "dim"))


def spaced_indices(count: int, most: int) -> list[int]:
    """At most `most` of `count` indices at even distances, with the first and the last."""
    if count <= most:
        return list(range(count))
    return [round(index * (count - 1) / (most - 1)) for index in range(most)]


# Cards

_HALF = 48
"""Columns of each of the two breakdowns, which stand next to each other."""

_TERM = 22
"""Columns of the name of a term in a breakdown."""

_BAR = 14
"""Columns of the bar of peak memory."""


def answer_card(
    answer: Answer,
    *,
    model: Model,
    cluster: Cluster,
    job: Job,
    tolerance: float = 0.0,
    of_devices: int | None = None,
    target: str | None = None,
    goodput: Goodput | None = None,
    next_commands: Sequence[str] = (),
) -> list[Line]:
    """The card of `plan` on `cluster`, the part that the plan uses of `of_devices` devices; `target` is the
    target of the plan, `tolerance` that of the question, `goodput` that of the best result where it is
    shown."""
    return [
        *question_lines(model, cluster, job),
        *_targets(answer, target),
        *result_lines(answer.best, model, cluster, job, target=target, given_up=_given_up(answer, tolerance)),
        *_comparison(answer),
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
    """The card of `evaluate`: without runners-up and proof."""
    return [
        *result_card(result, model=model, cluster=cluster, job=job),
        *priced_as_lines(cluster.priced_as),
        *assumption_lines(cluster, job, result.evaluator),
        *next_lines(next_commands),
    ]


def result_card(
    result: Result, *, model: Model, cluster: Cluster, job: Job, target: str | None = None
) -> list[Line]:
    """One strategy with its step time and memory; `target` is the requested target."""
    return [
        *question_lines(model, cluster, job),
        *result_lines(result, model, cluster, job, target=target),
    ]


def result_lines(
    result: Result,
    model: Model,
    cluster: Cluster,
    job: Job,
    *,
    target: str | None = None,
    given_up: Iterable[Line] = (),
) -> list[Line]:
    """The same without the question; `given_up` compares it with the optimum."""
    return [
        *([] if target is None else [row("target", (target, "value"))]),
        *layout_lines(result, model, cluster, job),
        (),
        *given_up,
        *figures(result, cluster, job),
        (),
        *breakdown_lines(result),
    ]


def _targets(answer: Answer, target: str | None) -> Iterator[Line]:
    """The best plan of each target, and how far each is from the best of any."""
    if not answer.targets:
        return
    yield ((f" {'targets':<27}{'step time':>12}{'to any':>9}  the fastest strategy of each", "label"),)
    for one in answer.targets:
        is_chosen = one.target == (target or ANY)
        name = f" {'→' if is_chosen else ' '} {one.target:<24}"
        if one.step_time_s is None:
            yield ((name, ""), (f"{'-':>12}{'':>9}  {words.shortened(one.reason or '', WIDTH - 50)}", "dim"))
            continue
        over = "" if one.over_any is None else f"{one.over_any * 100:+.1f} %"
        division = "uneven" if one.strategy is None else words.degrees_text(one.strategy)
        fixed = f"{words.seconds(one.step_time_s):>12}{over:>9}  "
        if one.strategy is not None and (sharding := words.sharding_text(one.strategy)):
            division += f" · {sharding}"
        style = "value" if is_chosen else ""
        yield ((name, style), (fixed, style), (words.shortened(division, WIDTH - 50), style or "dim"))
    yield ()


def _given_up(answer: Answer, tolerance: float) -> Iterator[Line]:
    """What the recommended strategy gives up to the optimum."""
    optimum = answer.optimum
    if optimum is None:
        return
    slower = words.percent(answer.best.step_time_s / optimum.step_time_s - 1.0, 2)
    text = f"{slower} slower than the optimum, {words.seconds(optimum.step_time_s)}"
    why = f"   simpler, within --tolerance {tolerance:g}"
    yield row("recommended", (text, "value"), (why, "dim"))


def question_lines(model: Model, cluster: Cluster, job: Job) -> Iterator[Line]:
    """The head of every card: model, cluster, batch, dtype, optimizer."""
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


def figures(result: Result, cluster: Cluster, job: Job) -> Iterator[Line]:
    """Step time, throughput, utilisation, memory, cost."""
    low, high = result.band_s
    band = f"   80 % band {words.seconds(low)} to {words.seconds(high)}"
    yield row("step time", (words.seconds(result.step_time_s), "value"), (band, "dim"))
    if result.tokens_per_s_per_device is not None:
        total = format_count(round(words.tokens_per_s(result, cluster.devices)))
        yield row(
            "throughput",
            (f"{result.tokens_per_s_per_device:,.0f} tokens/s per device", "value"),
            (f"   {total} tokens/s in all", "dim"),
        )
    if result.mfu is not None and result.mfu_full_attention is not None:
        yield row(
            "MFU",
            (words.percent(result.mfu), "value"),
            (f"   {words.percent(result.mfu_full_attention)} counting attention in full", "dim"),
        )
    yield _memory_line(result)
    cost = usd_per_billion_tokens(cluster, job, result.step_time_s)
    if cost is not None:
        yield row("cost", (f"${cost:,.2f} per billion tokens", "value"))


def _memory_line(result: Result) -> Line:
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


def breakdown_lines(result: Result) -> Iterator[Line]:
    """Two columns of bars: terms of the step time, and of the peak memory."""
    largest = max(result.memory.values())
    left = list(_bars(result.breakdown, words.seconds, "time"))
    right = list(_bars(result.memory, lambda nbytes: words.memory(nbytes, largest), "memory"))
    titles = ("where the time goes", f"where the memory goes (rank {result.tightest_rank})")
    yield ((f" {titles[0]:<{_HALF + 3}}", "label"), (titles[1], "label"))
    empty: Line = ((" " * _HALF, ""),)
    for time_part, memory_part in zip_longest(left, right, fillvalue=empty):
        yield ((" ", ""), *time_part, ("   ", ""), *memory_part)


def _bars(parts: Mapping[str, float], text_of: object, style: str) -> Iterator[Line]:
    """A line of `_HALF` columns for each term above a thousandth of the total, largest first."""
    whole = sum(parts.values()) or 1.0
    largest = max(parts.values(), default=0.0) or 1.0
    for name, value in sorted(parts.items(), key=lambda item: -item[1]):
        if abs(value) < whole * 1e-3:
            continue
        label = words.shortened(words.term_text(name), _TERM)
        amount = text_of(value) if callable(text_of) else ""
        yield (
            (f"{label:<{_TERM}} ", ""),
            (f"{words.bar(value / largest, 8):<8}", style),
            (f"{amount:>10}", ""),
            (f"{words.percent(value / whole, 0):>6} ", "dim"),
        )


def _comparison(answer: Answer) -> Iterator[Line]:
    """On a mixed cluster: the speed-up over the best uniform strategy, if the plan is another one, and over
    the fastest class alone; what stays idle."""
    mixed, best_s = answer.mixed, answer.best.step_time_s
    if mixed is None:
        return
    yield ()
    is_whole = all(part.is_complete for part in answer.parts) and not answer.unexplored_parts
    texts: list[tuple[str, float | None]] = []
    if mixed.uniform_step_time_s != best_s:
        texts.append(("the best uniform strategy", mixed.uniform_step_time_s))
    if not mixed.idle or mixed.uniform_step_time_s != best_s:
        texts.append((f"{mixed.fastest_class or 'any device class'} alone", mixed.fastest_class_step_time_s))
    label = "gain"
    for name, time_s in texts:
        if time_s is not None:
            text = f"{time_s / best_s:.2f} × as fast as {name}"
            yield row(label, (text, "value"), (f"   {words.seconds(time_s)}", "dim"))
        elif is_whole:
            yield row(label, (f"{name}: does not fit", "value"))
        label = ""
    if mixed.idle:
        yield row(label, (f"{', '.join(mixed.idle)} left idle", "warn"))
        label = ""
    if not is_whole:
        yield row(label, ("the search of uniform strategies is incomplete", "warn"))
        label = ""
    if mixed.why_uniform is not None:
        yield row(label, (mixed.why_uniform, "dim"))


def _goodput(goodput: Goodput | None, cluster: Cluster) -> Iterator[Line]:
    """Goodput, and the shares of time lost to failures, checkpoints and jitter."""
    if goodput is None:
        return
    inputs, lost = goodput.inputs, goodput.lost
    total = format_count(round((goodput.tokens_per_s_per_device or 0.0) * cluster.devices))
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
        (f" {'runners-up':<27}{'step time':>12}{'slower':>9}{'memory':>11}{'MFU':>9}  differences", "label"),
    )
    for place, result in enumerate(answer.runners_up, start=2):
        slower = result.step_time_s / best.step_time_s - 1.0
        fixed = (
            f" {place:>2}  {words.degrees_text(result.strategy):<23}{words.seconds(result.step_time_s):>12}"
            f"{f'{slower * 100:+.1f} %':>9}{words.memory(result.peak_memory.device):>11}"
            f"{words.percent(result.mfu or 0.0):>9}  "
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
    """Assumptions of the estimate: dtype, links, efficiency and its source."""
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
    """Commands that continue from the answer."""
    if commands:
        yield ()
    for index, text in enumerate(commands):
        yield row("next" if index == 0 else "", (text, "code"))
    yield ()
