"""Answer cards: one screen with the plan, its step time and memory, the proof and the assumptions.

`answer_card` is that of `plan`, `evaluation_card` that of `evaluate`. `proof_lines` shows the certificate:
candidates, reasons for rejection, lower bound and optimality gap. `frontier_table` shows the Pareto frontier
of step time and memory.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from shardwise import search
from shardwise.app.cli import words
from shardwise.app.cli.alternatives import different_plans, how_sure, target_table
from shardwise.app.cli.division import division as division_of
from shardwise.app.cli.division import layout_lines
from shardwise.app.cli.output import LABEL, USUAL, Line, columns, row
from shardwise.app.cli.overlap import parts_lines
from shardwise.app.cli.whole_run import whole_run_lines
from shardwise.cluster import Cluster, implausible_mfu, price_lines
from shardwise.model import Model, active_parameters, adapters_text, parameters
from shardwise.plans import (
    PROVEN_GAP,
    UNEVEN_SPACE,
    Answer,
    Certificate,
    Goodput,
    Idle,
    Result,
    StepParts,
    WholeRun,
    usd_per_billion_tokens,
    usd_per_step,
)
from shardwise.strategy import ANY, LIKELY, Job, Strategy
from shardwise.units import format_count, format_seconds

NOT_AS_GIVEN = "the input is approximated"
"""Why nothing is proven where the input has approximations (key `priced_as`)."""

FRONTIER_LINES = 12
"""Most points of a frontier that a card shows."""

SMALL_TERM = 0.005
"""Smallest share of a term that a breakdown names; smaller ones share a line."""


# Proof and frontier


def proof_lines(answer: Answer, *, has_target: bool, is_verbose: bool) -> Iterator[Line]:
    """What is proven, in two lines; the outcomes of all candidates if it `is_verbose`. Without a target, the
    restrictions are those of the question, and are shown too."""
    certificate = answer.certificate
    yield ()
    yield from _verdicts(answer)
    gap = "0" if certificate.gap <= PROVEN_GAP else words.percent(certificate.gap, 2)
    bound = "of the approximation" if certificate.priced_as else f"gap {gap}"
    yield from words.span_rows(
        "",
        (f"lower bound {words.seconds(certificate.lower_bound_s)}, {bound}, found in ", ""),
        (format_seconds(certificate.search_s), ""),
        (f" ({format_seconds(certificate.search_cpu_s)} of CPU)", "dim"),
    )
    yield from words.wrapped_rows("", _restrictions(certificate, with_axes=is_verbose or not has_target))
    yield from _other_options(certificate, {} if answer.job is None else answer.job.profile.options)
    if is_verbose:
        yield from _outcomes(certificate)
        yield from _parts(answer)
    yield from priced_as_lines(certificate.priced_as)


def _outcomes(certificate: Certificate) -> Iterator[Line]:
    """The number of candidates of each outcome, and of each reason for rejection."""
    counts = [
        (certificate.cut_by_bound, "pruned by the bound"),
        (certificate.simulated, "evaluated"),
        (certificate.unexplored, "unexplored"),
        *((count, f"rejected, {words.reason_text(code)}") for code, count in certificate.rejected.items()),
    ]
    wide = max(len(f"{count:,}") for count, _ in counts)
    for count, text in sorted(counts, key=lambda one: -one[0]):
        lines = textwrap.wrap(text, columns() - LABEL - wide - 2) if count else []
        for place, line in enumerate(lines):
            yield row("", (f"{'' if place else f'{count:,}':>{wide}}  {line}", "dim"))


def priced_as_lines(texts: Iterable[str]) -> Iterator[Line]:
    """Approximations of the input in the cost model."""
    for text in texts:
        yield from words.text_rows("approximation", text, "warn")


def objective_lines(answer: Answer, cluster: Cluster, of_devices: int | None) -> Iterator[Line]:
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
    left = columns() - LABEL - len(text) - len("   ranks ")
    return row("idle", (text, "warn"), (f"   ranks {words.shortened(idle.ranks, max(left, 8))}", "dim"))


def all_devices_line(all_s: float, best_s: float) -> Line:
    """The step time of all devices compared with that of the best part."""
    more = words.percent(all_s / best_s - 1.0)
    return row("", (f"all devices take {words.seconds(all_s)} (+{more}); --use-all plans for them", ""))


def _verdicts(answer: Answer) -> Iterator[Line]:
    """The proof for the space and, where uneven plans were searched too, the gap that is left among them."""
    left = 0.0 if answer.mixed is None else answer.mixed.uneven_gap
    yield from _verdict(
        answer, is_proven=answer.is_proven or (left > PROVEN_GAP and answer.certificate.is_proven)
    )
    if left > PROVEN_GAP:
        yield row("", (f"not proven among uneven plans: gap {words.percent(left, 2)}", "warn"))


def _verdict(answer: Answer, *, is_proven: bool) -> Iterator[Line]:
    certificate = answer.certificate
    space = "uneven plans" if certificate.space == UNEVEN_SPACE else f"the space '{certificate.space}'"
    if is_proven:
        among = f" among {certificate.counted:,} candidates"
        yield from words.span_rows("proof", ("optimal", "good"), (among, ""), (f" of {space}", ""))
        return
    if certificate.priced_as:
        yield row("proof", (f"not proven: {NOT_AS_GIVEN}", "warn"))
        return
    reasons = []
    if answer.objective == "memory" and certificate.unexplored:
        reasons.append(f"{certificate.unexplored:,} candidates are unexplored")
    elif certificate.gap > PROVEN_GAP:
        reasons.append(f"gap {words.percent(certificate.gap, 2)}")
    unfinished = sum(not part.is_complete for part in answer.parts) + answer.unexplored_parts
    if unfinished:
        reasons.append(f"search of {words.counted(unfinished, 'part')} of the cluster incomplete")
    total = certificate.enumerated + certificate.unexplored
    decided = f"{certificate.enumerated:,} of {total:,} candidates of {space} decided"
    decided += f", {certificate.unexplored:,} unexplored" if certificate.unexplored else ""
    yield from words.text_rows("proof", f"not proven: {', '.join(reasons)}", "warn")
    yield from words.text_rows("", decided)


def _restrictions(certificate: Certificate, *, with_axes: bool) -> list[str]:
    """Values to which the question restricts the space; `with_axes` also those of the target."""
    axes = dict(certificate.axes) if with_axes else {}
    if certificate.own_set:
        axes.pop("recompute_modules", None)  # a choice more, no restriction
    texts = [f"{name} {' '.join(map(words.value_text, values))}" for name, values in axes.items()]
    texts += [f"{name} {words.value_text(value)}" for name, value in certificate.fixed.items()]
    return [f"only {texts[0]}", *texts[1:]] if texts else []


def _other_options(certificate: Certificate, chosen: Mapping[str, str]) -> Iterator[Line]:
    """The candidates with other values of options of the software than those that are chosen."""
    texts: dict[str, list[Certificate]] = {}
    for one in certificate.other_options:
        if any(chosen.get(name) != value for name, value in one.options.items()):
            texts.setdefault(", ".join(map(" ".join, one.options.items())), []).append(one)
    for name, own in texts.items():
        least_s, counted = min(one.lower_bound_s for one in own), sum(one.enumerated for one in own)
        yield row("", (f"with {name}: {counted:,} candidates, none below {words.seconds(least_s)}", ""))


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
        (f" {'time against memory':<21}{'step time':>11}{'slower':>10}{'memory':>10}  ", "label"),
        (f"{shown}, {state}", "dim"),
    )
    for place in places:
        point = points[place]
        slower = point.step_time_s / points[0].step_time_s - 1.0
        degrees = words.degrees_text(point.strategy).replace(" · ", " ")
        fixed = (
            f"  {words.shortened(degrees, 19):<20}{words.seconds(point.step_time_s):>11}"
            f"{words.slower_text(slower):>10}{words.memory(point.device_bytes):>10}  "
        )
        differs = words.short_difference_text(point.strategy, answer.best.strategy, layers)
        yield ((fixed, ""), (words.shortened(differs, columns() - len(fixed)), "dim"))


def spaced_indices(count: int, most: int) -> list[int]:
    """At most `most` of `count` indices at even distances, with the first and the last."""
    if count <= most:
        return list(range(count))
    return [round(index * (count - 1) / (most - 1)) for index in range(most)]


# Cards


_TERM, _AMOUNT, _PERCENT = 22, 10, 5
"""Columns of a term in a breakdown: its name, its seconds or bytes, and its share."""

_BAR, _SHORTEST_BAR = 14, 4
"""Columns of the bar of peak memory, and of the shortest bar that says something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a card shows besides the answer: the `target` of the plan with the settings that say it in the
    `target_words`, the `options` of its software, the commands that continue from it, and the `whole_run`
    where its length is requested. If it `is_verbose`, it shows all alternatives, small terms and counts.
    `parts` are those of a step, where they are shown."""

    target: str | None = None
    target_words: Sequence[str] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    next_commands: Sequence[str] = ()
    whole_run: WholeRun | None = None
    is_verbose: bool = False
    parts: StepParts | None = None


NOTHING_ELSE = Shown()


def answer_card(
    answer: Answer,
    *,
    model: Model,
    cluster: Cluster,
    job: Job,
    tolerance: float = 0.0,
    of_devices: int | None = None,
    run_by: Sequence[str] | None = None,
    goodput: Goodput | None = None,
    shown: Shown = NOTHING_ELSE,
) -> list[Line]:
    """The card of `plan` on `cluster`, the part that the plan uses of `of_devices` devices; `tolerance` is
    that of the question, `run_by` has the targets that run a plan without a target, `goodput` is that of the
    best result where it is shown."""
    best = answer.best
    return [
        *question_lines(model, cluster, job),
        *plan_lines(best, model, cluster, job, shown),
        *([] if run_by is None else words.text_rows("run by", *_run_by(run_by, bool(answer.targets)))),
        *objective_lines(answer, cluster, of_devices),
        (),
        *figures(best, model, cluster, job),
        *how_sure(answer, tolerance),
        *_comparison(answer),
        (),
        *breakdown_lines(best, is_verbose=shown.is_verbose),
        *parts_lines(shown.parts),
        *_goodput(goodput, cluster),
        *whole_run_lines(shown.whole_run),
        *target_table(answer, shown.target),
        *different_plans(answer, model.layers, is_verbose=shown.is_verbose),
        *frontier_table(answer, model.layers),
        *proof_lines(answer, has_target=shown.target is not None, is_verbose=shown.is_verbose),
        *assumption_lines(
            cluster, job, best.evaluator, answer.certificate.space, best.fields, is_verbose=shown.is_verbose
        ),
        *next_lines(shown.next_commands),
    ]


def evaluation_card(
    result: Result, *, model: Model, cluster: Cluster, job: Job, shown: Shown = NOTHING_ELSE
) -> list[Line]:
    """The card of `evaluate`: without alternatives and proof."""
    return [
        *question_lines(model, cluster, job),
        *plan_lines(result, model, cluster, job, shown),
        (),
        *figures(result, model, cluster, job),
        row("how sure", ("evaluated as given: no other strategy was searched", "value")),
        (),
        *breakdown_lines(result, is_verbose=shown.is_verbose),
        *parts_lines(shown.parts),
        *whole_run_lines(shown.whole_run),
        *priced_as_lines(cluster.priced_as),
        *assumption_lines(
            cluster, job, result.evaluator, strategy=result.fields, is_verbose=shown.is_verbose
        ),
        *next_lines(shown.next_commands),
    ]


def result_card(
    result: Result,
    *,
    model: Model,
    cluster: Cluster,
    job: Job,
    target: str | None = None,
    options: Mapping[str, str] | None = None,
) -> list[Line]:
    """One strategy with its step time and memory; `target` is the requested target, `options` are those of
    its software."""
    shown = Shown(target=target, options=options or {})
    return [
        *question_lines(model, cluster, job),
        *result_lines(result, model, cluster, job, shown),
    ]


def result_lines(
    result: Result, model: Model, cluster: Cluster, job: Job, shown: Shown = NOTHING_ELSE
) -> list[Line]:
    """The same without the question."""
    return [
        *plan_lines(result, model, cluster, job, shown),
        (),
        *figures(result, model, cluster, job),
        (),
        *breakdown_lines(result),
    ]


def plan_lines(result: Result, model: Model, cluster: Cluster, job: Job, shown: Shown) -> Iterator[Line]:
    """The plan in the words of its target, then as strategy and layout."""
    if shown.target is not None:
        yield row("target", (shown.target, "value"))
    yield from words.wrapped_rows("settings", shown.target_words, "code", separator="  ")
    # Settings such as --tp-comm-overlap say the option already.
    settings = " ".join(shown.target_words).replace("-", "_")
    named = " · ".join(f"{name} {value}" for name, value in shown.options.items() if name not in settings)
    if named:
        yield row("options", (named, "value"))
    yield from layout_lines(result, model, cluster, job)


def brief_line(best: Result, target: str | None, answer: Answer | None = None) -> Line:
    """The plan in one line, with what is proven where there is an `answer` of a search."""
    peak = best.peak_memory
    low, high = map(words.rounded_seconds, best.band_s)
    _, division, _ = division_of(best)
    fits = f"{best.fits_probability:.2f} likely to fit"
    texts = [
        f"{target or ANY}: {division}, micro-batch size {best.micro_batch_size}",
        f"{words.seconds(best.step_time_s)} a step ({low} to {high})",
        f"{words.gib(peak.device)} of {words.gib(peak.capacity)} GiB, {fits}",
    ]
    if answer is not None:
        over = 0.0 if answer.optimum is None else best.step_time_s / answer.optimum.step_time_s - 1.0
        proven = f"within {words.percent(over, 2)} of the optimum" if over else "optimal"
        gap = f"not proven: gap {words.percent(answer.certificate.gap, 2)}"
        texts.append(proven if answer.is_proven else gap)
    return (("; ".join(texts), ""),)


def _run_by(names: Sequence[str], has_table: bool) -> tuple[str, str]:
    if names:
        return ", ".join(names), "value"
    return "no target as it is" + (
        "" if has_table else "; without --target each has its own best plan"
    ), "warn"


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
        *filter(None, (size, adapters_text(model))),
        words.counted(cluster.devices, "device"),
        f"{job.global_batch_size:,} × {job.seq_len:,} = {format_count(tokens)} tokens a step",
        *packing_facts(job),
        job.dtype,
        job.optimizer,
    )
    for line in words.wrapped(facts, " · ", columns() - 1):
        yield ((f" {line}", "dim"),)
    for note in model.notes:
        for line in textwrap.wrap(note, columns() - 2):
            yield ((f" {line}", "warn"),)
    yield (("─" * columns(), "dim"),)


def packing_facts(job: Job) -> list[str]:
    """The length of packed samples, for the head of a card; empty where a sequence is one sample."""
    return [f"packed samples of {job.attention_len:,} tokens"] if job.is_packed else []


def figures(result: Result, model: Model, cluster: Cluster, job: Job) -> Iterator[Line]:
    """Step time, throughput, utilisation, cost, memory of the device and of the host."""
    low, high = map(words.rounded_seconds, result.band_s)
    band = f"   80 % band {low} to {high}"
    yield row("step time", (words.seconds(result.step_time_s), "value"), (band, "dim"))
    if result.tokens_per_s_per_device is not None:
        total = format_count(round(words.tokens_per_s(result, cluster.devices)))
        yield from words.span_rows(
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
    if warning := implausible_mfu(result.mfu, cluster.classes, job.dtype):
        yield row("", (warning, "warn"))
    cost = usd_per_billion_tokens(cluster, job, result.step_time_s)
    if cost is not None:
        yield row("cost", (f"${cost:,.2f} per billion tokens", "value"))
    yield from _memory_lines(result)
    if result.fields is not None:
        yield from _host_memory(*search.host_memory(model, cluster, job, result.fields))


def _memory_lines(result: Result) -> Iterator[Line]:
    peak = result.peak_memory
    fraction = peak.device / peak.capacity
    low, high = words.rounded_band(result.memory_band_bytes, peak.device)
    is_likely = result.fits_probability >= LIKELY
    spans = [
        (f"{words.memory(peak.device).removesuffix(' GiB')} of {words.memory(peak.capacity)}", "value"),
        (f" ({low} to {high};", "dim"),
        (f" {result.fits_probability:.2f} likely to fit", "dim" if is_likely else "warn"),
        (f")   {words.percent(fraction, 0)}", "dim"),
    ]
    end = f" rank {result.tightest_rank}"
    if LABEL + sum(len(text) for text, _ in spans) + 1 + _BAR + len(end) <= columns():
        filled = words.bar(fraction, _BAR)
        spans += [(" ", ""), (filled, "memory"), ("░" * (_BAR - len(filled)), "dim")]
    yield from words.span_rows("peak memory", *spans, (end, "dim"))


def _host_memory(used: float, has: float) -> Iterator[Line]:
    """Bytes of a rank on its host, and those that there are."""
    if used:
        yield row("host memory", (f"{words.gib(used)} of {words.gib(has)} GiB per rank", "value"))
    else:
        yield row("host memory", (f"nothing is offloaded; {words.gib(has)} GiB per rank", "dim"))


def breakdown_lines(result: Result, *, is_verbose: bool = False) -> Iterator[Line]:
    """Terms of the step time and of the peak memory: next to each other where the card is wide enough, and
    with bars where there is room for these too."""
    largest = max(result.memory.values())
    wide = columns()
    least = 1e-3 if is_verbose else SMALL_TERM
    is_double = wide >= USUAL
    half = (wide - 4) // 2 if is_double else wide - 1
    bar = min(half - _TERM - 1 - _AMOUNT - _PERCENT, 8 if is_double else 24)
    bar = bar if bar >= _SHORTEST_BAR else 0
    left = list(_bars(result.breakdown, words.seconds, "time", bar, least))
    right = list(_bars(result.memory, lambda nbytes: words.memory(nbytes, largest), "memory", bar, least))
    titles = ("where the time goes", f"where the memory goes (rank {result.tightest_rank})")
    if not is_double:
        yield ((f" {titles[0]}", "label"),)
        yield from left
        yield ((f" {titles[1]}", "label"),)
        yield from right
        return
    used = 1 + _TERM + 1 + bar + _AMOUNT + _PERCENT
    yield ((f" {titles[0]}".ljust(used + 3), "label"), (titles[1], "label"))
    empty: Line = ((" " * used, ""),)
    for time_part, memory_part in zip_longest(left, right, fillvalue=empty):
        yield (*time_part, ("  ", ""), *memory_part)


def _bars(
    parts: Mapping[str, float], text_of: Callable[[float], str], style: str, width: int, least: float
) -> Iterator[Line]:
    """A line for each term of at least `least` of the total, largest first, with a bar of `width` columns;
    the others share a line."""
    whole = sum(parts.values()) or 1.0
    largest = max(parts.values(), default=0.0) or 1.0
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    shown = [(words.term_text(name), value) for name, value in ordered if abs(value) >= whole * least]
    small = [value for _, value in ordered if 0.0 < abs(value) < whole * least]
    if small:
        shown.append((words.counted(len(small), "other term"), sum(small)))
    for name, value in shown:
        label = words.shortened(name, _TERM)
        yield (
            (f" {label:<{_TERM}} ", ""),
            (f"{words.bar(value / largest, width):<{width}}" if width else "", style),
            (f"{text_of(value):>{_AMOUNT}}", ""),
            (f"{words.percent(value / whole, 0):>{_PERCENT}}", "dim"),
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
    label = "gain" if texts else "pools"
    for name, time_s in texts:
        if time_s is not None:
            text = f"{time_s / best_s:.2f} × as fast as {name}"
            yield from words.span_rows(label, (text, "value"), (f"   {words.seconds(time_s)}", "dim"))
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
        yield from words.text_rows(label, mixed.why_uniform, "dim")


def _goodput(goodput: Goodput | None, cluster: Cluster) -> Iterator[Line]:
    """Goodput, and the shares of time lost to failures, checkpoints and jitter."""
    if goodput is None:
        return
    inputs, lost = goodput.inputs, goodput.lost
    total = format_count(round((goodput.tokens_per_s_per_device or 0.0) * cluster.devices))
    yield ()
    yield from words.span_rows(
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
        yield from words.text_rows("", text, "dim")


_CORE = (
    "space 'core' leaves out context and expert parallelism, offload, split backwards and uneven stages"
    " (--space default)"
)


_UNFUSED_NORMS = (
    "recompute layernorm is priced for norms of their own: Transformer Engine fuses them into the next"
    " product, so a rank needs more memory than predicted"
)


def assumption_lines(
    cluster: Cluster,
    job: Job,
    evaluator: str,
    space: str = "",
    strategy: Strategy | None = None,
    *,
    is_verbose: bool = False,
) -> Iterator[Line]:
    """The assumptions of the estimate as lines of a card."""
    yield ()
    texts = assumption_texts(cluster, job, evaluator, space, strategy, is_verbose=is_verbose)
    for index, text in enumerate(texts):
        yield from words.text_rows("" if index else "assumptions", text, "dim")


def assumption_texts(
    cluster: Cluster,
    job: Job,
    evaluator: str,
    space: str = "",
    strategy: Strategy | None = None,
    *,
    is_verbose: bool = True,
) -> list[str]:
    """Assumptions of the estimate with the option that changes each: links, prices, efficiency, software,
    and the modules that the `strategy` recomputes. If it `is_verbose` also those that rarely matter."""
    modules = set() if strategy is None else set(strategy.recompute_modules.split("+"))
    network = "--inter-node" if any(tier.is_network for tier in cluster.tiers) else "--cluster FILE"
    errors = job.profile.peak_errors
    of = "all software" if errors.is_shared else errors.kind
    band = f"band of peak memory from {errors.rows} runs of {words.counted(errors.sources, 'source')} of {of}"
    imbalance = f"the busiest expert has {job.expert_imbalance:g} times the mean (--expert-imbalance)"
    return [
        *(f"{text} ({network})" for text in cluster.assumptions),
        *_efficiency(cluster),
        f"software: {job.profile.name} (--software)",
        *_packing(cluster, job),
        f"{words.percent(job.memory_margin, 0)} of device memory kept free (--memory-margin)",
        *([imbalance] if strategy is not None and strategy.ep > 1 else []),
        *(f"{_short_price(text) if not is_verbose else text} (--price)" for text in price_lines(cluster)),
        *([_CORE] if space == "core" else []),
        *([_UNFUSED_NORMS] if "layernorm" in modules and "mla_up_proj" not in modules else []),
        *([f"{job.dtype} (--dtype), {job.optimizer} (--optimizer)", band] if is_verbose else []),
        *([f"evaluated by {evaluator}"] if is_verbose else []),
    ]


def _efficiency(cluster: Cluster) -> Iterator[str]:
    """Where the efficiency of the devices is from."""
    measured = {
        name: "; ".join(device.efficiency.measured_on)
        for name, device in cluster.classes.items()
        if device.efficiency.measured_on
    }
    uncalibrated = [name for name, device in cluster.classes.items() if not device.efficiency.is_calibrated]
    yield from (f"kernels of {name} measured on {machines}" for name, machines in measured.items())
    if uncalibrated:
        yield (
            f"matmul rate of {', '.join(uncalibrated)} from published measurements or data sheets, not"
            " fitted to training runs (--calibration)"
        )
    else:
        yield f"{'all else' if measured else 'efficiency'} fitted to published runs (--calibration)"


def _packing(cluster: Cluster, job: Job) -> list[str]:
    """What attention computes of packed samples."""
    if not job.is_packed:
        return []
    if search.masks_samples(cluster, job):
        return ["attention: scores of the whole sequence, masked between packed samples (--attention)"]
    return [f"attention: within samples of {job.attention_len:,} tokens (--mean-sample-len)"]


def _short_price(text: str) -> str:
    """A price without the address of its source."""
    head, address, _ = text.partition(", http")
    return f"{head})" if address else text


def next_lines(commands: Sequence[str]) -> Iterator[Line]:
    """Commands that continue from the answer; a long one is continued on the next line, as a shell reads
    it."""
    if commands:
        yield ()
    for index, text in enumerate(commands):
        lines = words.wrapped(_words_of(text), " ", columns() - LABEL - 4)
        for place, line in enumerate(lines):
            more = " \\" if place + 1 < len(lines) else ""
            yield row("" if index or place else "next", (f"{'  ' if place else ''}{line}{more}", "code"))
    yield ()


def _words_of(command: str) -> list[str]:
    """The words of a command; an option and its value are one."""
    found: list[str] = []
    for word in map(shlex.quote, shlex.split(command)):
        if found and found[-1].startswith("--") and " " not in found[-1] and not word.startswith("--"):
            found[-1] += f" {word}"
        else:
            found.append(word)
    return found
