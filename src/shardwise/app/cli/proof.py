"""The part of the card that says what is proven: candidates, reasons, bound, gap; and time against memory."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping

from shardwise.app.cli import words
from shardwise.app.cli.output import LABEL, WIDTH, Line, row
from shardwise.cluster import Cluster
from shardwise.plan import PROVEN_GAP, Answer, Certificate, Idle, UnevenAnswer, usd_per_step
from shardwise.units import format_seconds

NOT_AS_GIVEN = "priced as something else"
"""Why nothing is proven where there are lines of `priced_as`."""

FRONTIER_LINES = 12
"""Points of a frontier that are shown, at most."""


def proof_lines(answer: Answer, cluster: Cluster, of_devices: int | None) -> Iterator[Line]:
    """Candidates, why the others fell, bound, gap, time; what they are of where that is not the cluster."""
    certificate = answer.certificate
    rejected = sum(certificate.rejected.values())
    yield ()
    yield from _objective(answer, cluster, of_devices)
    yield from _verdicts(answer)
    for line in words.wrapped(_restrictions(certificate), " · ", WIDTH - LABEL):
        yield row("", (line, ""))
    counts = f"{rejected:,} rejected · {certificate.cut_by_bound:,} cut by the bound · "
    unexplored = f" · {certificate.unexplored:,} unexplored" if certificate.unexplored else ""
    yield row("", (f"{counts}{certificate.simulated:,} evaluated{unexplored}", ""))
    yield from _reasons(certificate.rejected)
    yield from _parts(answer)
    gap = "0" if certificate.gap <= PROVEN_GAP else words.percent(certificate.gap, 2)
    bound = "as priced" if certificate.priced_as else f"gap {gap}"
    yield row(
        "",
        (f"lower bound {words.seconds(certificate.lower_bound_s)}, {bound}, found in ", ""),
        (format_seconds(certificate.search_s), ""),
        (f" ({format_seconds(certificate.search_cpu_s)} of CPU)", "dim"),
    )
    yield from priced_as_lines(certificate.priced_as)


def priced_as_lines(texts: Iterable[str]) -> Iterator[Line]:
    """What was priced in the place of what was given."""
    for text in texts:
        for index, line in enumerate(textwrap.wrap(text, WIDTH - LABEL - 1)):
            yield row("" if index else "priced as", (line, "warn"))


def _objective(answer: Answer, cluster: Cluster, of_devices: int | None) -> Iterator[Line]:
    """What the answer is best in, where that is not time; and the devices that it leaves idle."""
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
    """How many other parts of the cluster were compared."""
    others = len(answer.parts) - 1 + answer.pruned_parts
    if answer.parts and others:
        text = f"{words.counted(others, 'other part')} of the cluster: "
        yield row("", (f"{text}{len(answer.parts) - 1:,} searched · {answer.pruned_parts:,} pruned", ""))


def idle_lines(answer: Answer | UnevenAnswer, devices: int) -> Iterator[Line]:
    """Which devices stay idle, and what all of them would take; nothing where all are used."""
    idle, all_s = answer.idle, answer.all_devices_step_time_s
    if not idle.devices:
        return
    yield idle_line(idle, devices)
    if all_s is None:
        is_over = answer.is_interrupted or bool(answer.unexplored_parts)
        why = "what all devices take was not searched" if is_over else "nothing that fits uses all devices"
        yield row("", (why, ""))
    else:
        yield all_devices_line(all_s, answer.best.step_time_s)


def idle_line(idle: Idle, devices: int) -> Line:
    """Which of so many devices stay idle."""
    whole = f", {words.counted(idle.nodes, 'whole node')}" if idle.nodes else ""
    text = f"{idle.devices:,} of {devices:,} devices{whole}"
    return row("idle", (text, "warn"), (f"   ranks {words.shortened(idle.ranks, 40)}", "dim"))


def all_devices_line(all_s: float, best_s: float) -> Line:
    """What all devices take, compared with the best of their parts."""
    more = words.percent(all_s / best_s - 1.0)
    return row("", (f"all devices take {words.seconds(all_s)} (+{more}); --use-all plans for them", ""))


def _verdicts(answer: Answer) -> Iterator[Line]:
    """What is proven of the space, and where uneven plans were looked for too, what is not of them."""
    left = 0.0 if answer.mixed is None else answer.mixed.uneven_gap
    yield _verdict(answer, is_proven=answer.is_proven or (left > PROVEN_GAP and answer.certificate.is_proven))
    if left > PROVEN_GAP:
        yield row("", (f"not proven among uneven plans: gap {words.percent(left, 2)}", "warn"))


def _verdict(answer: Answer, *, is_proven: bool) -> Line:
    certificate = answer.certificate
    space = f"of the space '{certificate.space}'"
    if is_proven:
        return row(
            "proof", ("optimal", "good"), (f" among {certificate.enumerated:,} candidates {space}", "")
        )
    if certificate.priced_as:
        return row("proof", (f"not proven: {NOT_AS_GIVEN}", "warn"))
    reasons = []
    if answer.objective == "memory" and certificate.unexplored:
        reasons.append(f"{certificate.unexplored:,} candidates are unexplored")
    elif certificate.gap > PROVEN_GAP:
        reasons.append(f"gap {words.percent(certificate.gap, 2)}")
    unfinished = sum(not part.is_complete for part in answer.parts) + answer.unexplored_parts
    if unfinished:
        reasons.append(f"{words.counted(unfinished, 'part')} of the cluster not searched to the end")
    why = ", ".join(reasons)
    total = certificate.enumerated + certificate.unexplored
    return row(
        "proof",
        (f"not proven: {why}", "warn"),
        (f"   {certificate.enumerated:,} of {total:,} candidates {space} decided", ""),
    )


def _restrictions(certificate: Certificate) -> list[str]:
    """What the question left of the space."""
    texts = [f"{name} {' '.join(map(words.value_text, values))}" for name, values in certificate.axes.items()]
    texts += [f"{name} {words.value_text(value)}" for name, value in certificate.fixed.items()]
    return [f"only {texts[0]}", *texts[1:]] if texts else []


def _reasons(rejected: Mapping[str, int]) -> Iterator[Line]:
    counts = sorted(rejected.items(), key=lambda item: (-item[1], item[0]))
    reasons = [f"{reason} {count:,}" for reason, count in counts if count]
    for index, line in enumerate(words.wrapped(reasons, " · ", WIDTH - LABEL - 12)):
        yield row("", ("rejected by " if index == 0 else " " * 12, "dim"), (line, "dim"))


def frontier_table(answer: Answer, layers: int) -> Iterator[Line]:
    """Time against memory: at most FRONTIER_LINES points, evenly chosen, the fastest and the smallest
    included."""
    frontier = answer.frontier
    if frontier is None:
        return
    points, certificate = frontier.points, frontier.certificate
    places = spaced_indices(len(points), FRONTIER_LINES)
    shown = (
        f"{len(places)} of {len(points):,} points" if len(places) < len(points) else f"{len(points):,} points"
    )
    state = "unfinished" if certificate.unexplored else "as priced" if certificate.priced_as else "exact"
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
    """At most `most` of `count` places, evenly apart, the first and the last included."""
    if count <= most:
        return list(range(count))
    return [round(index * (count - 1) / (most - 1)) for index in range(most)]
