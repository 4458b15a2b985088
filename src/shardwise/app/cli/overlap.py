"""Computation, communication, overlap and idle time of a step as text: in cards (`parts_lines`), as a table
(`parts_table`), and of two plans (`two_parts_lines`)."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.app.cli import words
from shardwise.app.cli.output import LABEL, Line, TableRow, columns, row
from shardwise.errors import ConfigError
from shardwise.plans import Plan, StepParts, plan_of
from shardwise.search import PlanComparison, step_parts_of

LABELS = {"pipeline": "pipeline messages"}
"""Labels of mechanisms whose key does not name the communication."""

SMALL = 1e-3
"""Share of the step below which a mechanism is not shown."""


def step_parts_or_none(plan: Plan) -> StepParts | None:
    """The parts of a step of the plan; None if this version cannot estimate it."""
    try:
        return step_parts_of(plan)
    except ConfigError:
        return None


def _label(mechanism: str) -> str:
    return LABELS.get(mechanism) or words.term_text(mechanism)


def parts_lines(parts: StepParts | None) -> Iterator[Line]:
    """The step time as a combination of its parts, and the communication that is more than SMALL."""
    if parts is None:
        return
    yield ()
    yield from _sum_lines(parts)
    shown = [
        f"{_label(name)} {words.seconds(one.total_s)}"
        + (f" ({words.seconds(one.hidden_s)} hidden)" if one.hidden_s > 0.0 else "")
        for name, one in sorted(parts.communication.items(), key=lambda item: -item[1].total_s)
        if one.total_s >= SMALL * parts.step_time_s
    ]
    yield from words.wrapped_rows("communication", shown, "dim")


def _sum_lines(parts: StepParts) -> Iterator[Line]:
    """Computation + communication - overlap + idle: the names over the times, or each with its own where the
    terminal is too narrow."""
    four = (parts.computation_s, parts.communication_s, parts.overlap_s, parts.idle_s)
    amounts = [words.seconds(seconds) for seconds in four]
    names = ("computation", "communication", "overlap", "idle")
    label = f"rank {parts.rank:,}"
    widths = [max(len(amount), len(name)) for amount, name in zip(amounts, names, strict=True)]
    if LABEL + sum(widths) + len(" + ") * 3 > columns():
        signs = ("", "+ ", "- ", "+ ")
        texts = [f"{sign}{name} {amount}" for sign, name, amount in zip(signs, names, amounts, strict=True)]
        yield from words.wrapped_rows(label, texts, "value", separator=" ")
        return
    for texts, style in ((list(names), "dim"), (amounts, "value")):
        first, second, third, fourth = (text.ljust(width) for text, width in zip(texts, widths, strict=True))
        yield row(label, (f"{first} + {second} - {third} + {fourth}".rstrip(), style))
        label = ""


def parts_table(parts: StepParts | None) -> Iterator[Line]:
    """The same with a row for each mechanism: all seconds, hidden and exposed ones."""
    if parts is None:
        return
    where = f"critical rank {parts.rank:,}"
    yield TableRow([(f" {where:<26}{'all':>14}{'hidden':>14}{'exposed':>14}", "label")])
    for name, one in parts.communication.items():
        if one.total_s > 0.0:
            cells = (one.total_s, one.hidden_s, one.exposed_s)
            numbers = "".join(f"{words.seconds(seconds):>14}" for seconds in cells)
            yield TableRow([(f" {_label(name):<26}{numbers}", "")])
    all_s, hidden_s = parts.communication_s, parts.overlap_s
    numbers = "".join(f"{words.seconds(seconds):>14}" for seconds in (all_s, hidden_s, all_s - hidden_s))
    yield TableRow([(f" {'communication':<26}{numbers}", "value")])
    slowed = f"   {words.seconds(parts.slowdown_s)} slower by overlap"
    for name, seconds, note in (
        ("computation", parts.computation_s, slowed if parts.slowdown_s else ""),
        ("waits for other ranks", parts.bubble_s, ""),
        ("waits for the host", parts.host_s, ""),
    ):
        yield TableRow([(f" {name:<26}{words.seconds(seconds):>14}", ""), (note, "dim")])
    formula = "   computation + exposed + waits"
    yield TableRow([(f" {'step time':<26}{words.seconds(parts.step_time_s):>14}", "value"), (formula, "dim")])


def answer_parts(comparison: PlanComparison) -> StepParts | None:
    """The parts of a step of the answer to another question."""
    question = comparison.question
    return step_parts_or_none(
        plan_of(comparison.answer, model=question.model, cluster=question.cluster, job=question.job)
    )


def two_parts_lines(before: StepParts | None, after: StepParts | None) -> Iterator[tuple[str, float, float]]:
    """Label and seconds of two plans: the four parts, and the communication that differs or is not small."""
    if before is None or after is None:
        return
    for name in ("computation", "communication", "overlap", "idle"):
        yield name, getattr(before, f"{name}_s"), getattr(after, f"{name}_s")
    least_s = SMALL * before.step_time_s
    for name, one in before.communication.items():
        other = after.communication[name]
        if max(one.total_s, other.total_s) >= least_s:
            yield f"  {_label(name)}", one.total_s, other.total_s
            yield "    hidden", one.hidden_s, other.hidden_s
