"""Two answers side by side: the strategy, time and memory term by term, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwise.app.cli import words
from shardwise.app.cli.output import WIDTH, Line, row
from shardwise.app.cli.proof import NOT_AS_GIVEN, priced_as_lines
from shardwise.plan import Plan, Result
from shardwise.search import PlanComparison

_COLUMNS = f"{'':<24}"


def comparison_lines(plan: Plan, comparison: PlanComparison, *, kind: str, requested: str) -> list[Line]:
    """The answer of `explain --why-not` and `--what-if`."""
    before, after = comparison.before, comparison.after
    names = ("the plan", requested if len(requested) <= 24 else "pinned" if kind == "why_not" else "changed")
    question = comparison.question
    title = f" {plan.model.name} on {question.cluster.name}"
    return [
        ((title, "title"), (f"  {'with' if kind == 'why_not' else 'if'} {requested}", "value")),
        (("─" * WIDTH, "dim"),),
        *_strategies(plan, comparison, names),
        (),
        *_terms(before, after, comparison, names),
        (),
        *_proof(comparison),
        (),
    ]


def _strategies(plan: Plan, comparison: PlanComparison, names: tuple[str, str]) -> Iterator[Line]:
    before, after = comparison.before, comparison.after
    for label, result, job in (("plan", before, plan.job), ("instead", after, comparison.question.job)):
        yield row(label, (words.degrees_text(result.strategy), "value"))
        details = words.detail_texts(result.strategy, job, plan.model.layers)
        for line in words.wrapped(details, " · ", WIDTH - 15):
            yield row("", (line, ""))
    changed = [
        f"{name} {words.value_text(old)} → {words.value_text(new)}"
        for name, (old, new) in comparison.fields.items()
    ]
    for index, line in enumerate(words.wrapped(changed or ["nothing"], " · ", WIDTH - 15)):
        yield row("changes" if index == 0 else "", (line, "dim"))


def _terms(
    before: Result, after: Result, comparison: PlanComparison, names: tuple[str, str]
) -> Iterator[Line]:
    """Time, then memory: what each term was, is, and the difference, the largest first."""
    yield ((f" {'time':<24}{names[0]:>16}{names[1]:>26}{'difference':>16}", "label"),)
    yield from _rows(
        before.breakdown, after.breakdown, comparison.breakdown_s, words.seconds, 1e-4 * before.step_time_s
    )
    slower = after.step_time_s / before.step_time_s - 1.0
    yield _row("step time", before.step_time_s, after.step_time_s, words.seconds, "value",
               f"  {slower * 100:+.2f} %")  # fmt: skip
    yield ()
    yield ((f" {'memory':<24}{names[0]:>16}{names[1]:>26}{'difference':>16}", "label"),)
    yield from _rows(
        before.memory, after.memory, comparison.memory_bytes, _gib, 1e-3 * before.peak_memory.device
    )
    yield _row("peak memory", before.peak_memory.device, after.peak_memory.device, _gib, "value")


def _gib(nbytes: float) -> str:
    return f"{words.gib(nbytes)} GiB"


def _rows(
    before: Mapping[str, float],
    after: Mapping[str, float],
    more: Mapping[str, float],
    text_of: object,
    least: float,
) -> Iterator[Line]:
    for name in sorted(more, key=lambda name: -abs(more[name])):
        if abs(more[name]) >= least:
            label = name.replace("_", " ")
            yield _row(label, before.get(name, 0.0), after.get(name, 0.0), text_of, "")
    same = [name for name in more if abs(more[name]) < least]
    if same:
        sums = (sum(before.get(name, 0.0) for name in same), sum(after.get(name, 0.0) for name in same))
        yield _row(f"{words.counted(len(same), 'other term')}", *sums, text_of, "dim")


def _row(label: str, old: float, new: float, text_of: object, style: str, end: str = "") -> Line:
    if not callable(text_of):
        raise TypeError("text_of is a function")
    difference = ("+" if new >= old else "-") + text_of(abs(new - old))
    return ((f" {label:<24}{text_of(old):>16}{text_of(new):>26}{difference:>16}{end}", style),)


def _proof(comparison: PlanComparison) -> Iterator[Line]:
    certificate = comparison.answer.certificate
    why = NOT_AS_GIVEN if certificate.priced_as else f"gap {words.percent(certificate.gap, 2)}"
    verdict = ("optimal", "good") if comparison.answer.is_proven else (f"not proven: {why}", "warn")
    yield row("proof", verdict, (f" among {certificate.enumerated:,} candidates of this question", ""))
    yield from priced_as_lines(certificate.priced_as)
