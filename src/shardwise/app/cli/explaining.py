"""The command `explain`: why candidates were pruned, the cost of alternatives, and the bottleneck.

`explanation_lines` shows the outcomes of all candidates, the best alternative of each field, and the
bottleneck. `comparison_lines` is the answer of `--why-not` and `--what-if`: the plan and the best plan of a
changed question, term by term.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from shardwise import search
from shardwise.app.cli import documents, words
from shardwise.app.cli.card import NOT_AS_GIVEN, priced_as_lines
from shardwise.app.cli.output import INTERRUPTED, LABEL, WIDTH, Line, Output, progress, row
from shardwise.errors import ConfigError
from shardwise.plans import Plan, Result, read_plan
from shardwise.search import Alternative, Axis, Binding, Explanation, LedgerEntry, PlanComparison
from shardwise.strategy import HOST_MEMORY, MEMORY, Strategy, parse_fields

MAX_ENTRIES = 12
"""Most ledger entries that are shown; the others share a line."""

OUTCOME_TEXTS: Mapping[str, str] = {
    "cut_degrees": "pruned at degrees",
    "cut_micro_batch": "pruned at micro-batch size",
    "cut_kept": "pruned at recompute and offload",
    "cut_family": "pruned at schedule family",
    "cut_sharded": "pruned at sharding",
    "cut_schedule": "pruned at schedule",
    "cut_split": "pruned at stage split",
    "cut_layers": "pruned at recomputed layers",
    "cut_states": "pruned at optimizer sharding",
    "simulated": "evaluated",
}
"""Outcome codes as text: the level of the search tree at which the lower bound pruned a node."""

_NAME = 20
"""Columns of the names of fields."""


def explanation_lines(plan: Plan, explanation: Explanation) -> list[Line]:
    """The answer of `explain`."""
    return [
        ((f" {plan.model.name} on {plan.cluster.name}", "title"),),
        ((f" {_facts(plan)}", "dim"),),
        (("─" * WIDTH, "dim"),),
        *_totals(explanation),
        *priced_as_lines(plan.priced_as),
        (),
        *_blocks(explanation, plan.best.strategy),
        (),
        *_axes(explanation, plan.best.strategy),
        (),
        *_binding(explanation.binding),
        (),
    ]


def _facts(plan: Plan) -> str:
    texts = [words.degrees_text(plan.best.strategy), *words.detail_texts(
        plan.best.strategy, plan.job, plan.model.layers
    )[:3], f"step {words.seconds(plan.best.step_time_s)}"]  # fmt: skip
    return words.shortened(" · ".join(texts), WIDTH - 1)


def outcome_text(outcome: str) -> str:
    """An outcome as text; a rule keeps its code."""
    return OUTCOME_TEXTS.get(outcome, f"rejected by {outcome}")


def _totals(explanation: Explanation) -> Iterator[Line]:
    """Candidates per outcome, the coarsest level first."""
    total = sum(explanation.totals.values()) + explanation.unexplored
    yield row("candidates", (f"{total:,}", "value"))
    outcomes = {outcome_text(outcome): count for outcome, count in explanation.totals.items()}
    if explanation.unexplored:
        outcomes["unexplored"] = explanation.unexplored
    for text, count in outcomes.items():
        share = count / total
        yield row("", (f"{text:<36}{count:>26,}", ""), (f"{words.percent(share):>9}  ", "dim"),
                  (words.bar(share, 14), "time"))  # fmt: skip


def _blocks(explanation: Explanation, best: Strategy) -> Iterator[Line]:
    """The largest ledger entries and that of the best, each with its outcomes; the others share a line."""
    entries = explanation.entries
    best_entries = [block for block in entries if _contains(block, best)]
    shown = [*(block for block in entries[: MAX_ENTRIES - 1] if block not in best_entries), *best_entries]
    yield ((f" {'tp':>4}{'cp':>6}{'pp':>6}{'dp':>6}{'candidates':>22}   outcomes", "label"),)
    for block in sorted(shown, key=entries.index):
        fixed = f" {block.tp:>4}{block.cp:>6}{block.pp:>6}{block.dp:>6}{block.candidates:>22,}   "
        mark = "the best; " if block in best_entries else ""
        text = mark + _outcome_summary(block.outcomes, block.candidates)
        for index, part in enumerate(textwrap.wrap(text, WIDTH - len(fixed))):
            yield (
                (fixed if index == 0 else " " * len(fixed), ""),
                (part, "good" if mark and not index else "dim"),
            )
    folded = [block for block in entries if block not in shown]
    if folded:
        count = sum(block.candidates for block in folded)
        folded_outcomes: dict[str, int] = {}
        for block in folded:
            for outcome, number in block.outcomes.items():
                folded_outcomes[outcome] = folded_outcomes.get(outcome, 0) + number
        fixed = f" {words.counted(len(folded), 'other grid'):<22}{count:>22,}   "
        for index, part in enumerate(
            textwrap.wrap(_outcome_summary(folded_outcomes, count), WIDTH - len(fixed))
        ):
            yield ((fixed if index == 0 else " " * len(fixed), ""), (part, "dim"))


def _contains(block: LedgerEntry, best: Strategy) -> bool:
    return (block.tp, block.cp, block.pp, block.dp) == (best.tp, best.cp, best.pp, best.dp)


def _outcome_summary(outcomes: Mapping[str, int], total: int) -> str:
    """Shares that were pruned and rejected, with the most frequent level and rule; the number evaluated."""
    texts = []
    for verb, group in (("pruned", "cut_"), ("rejected", "")):
        counts = {
            outcome: n
            for outcome, n in outcomes.items()
            if (outcome in OUTCOME_TEXTS) == bool(group) and outcome != "simulated"
        }
        if counts:
            most = max(counts, key=lambda outcome: counts[outcome])
            name = OUTCOME_TEXTS[most].removeprefix("pruned ") if group else f"by {most}"
            share = words.percent(sum(counts.values()) / total)
            texts.append(f"{verb} {share}, {'most ' if len(counts) > 1 else ''}{name}")
    if outcomes.get("simulated"):
        texts.append(f"evaluated {outcomes['simulated']:,}")
    return "; ".join(texts)


def _axes(explanation: Explanation, best: Strategy) -> Iterator[Line]:
    """Each field: its value, the best alternative with its cost, and the constraints that exclude others."""
    yield (
        (
            f" {'field':<{_NAME}}{'best':<17}nearest alternative and its cost; why others are excluded",
            "label",
        ),
    )
    for axis in explanation.axes:
        fixed = f" {axis.field:<{_NAME}}{words.value_text(axis.value):<17}"
        text = _axis_text(axis, best)
        for index, part in enumerate(textwrap.wrap(text, WIDTH - len(fixed)) or [""]):
            yield (
                (fixed if index == 0 else " " * len(fixed), ""),
                (part, "dim" if not axis.alternatives else ""),
            )


def _axis_text(axis: Axis, best: Strategy) -> str:
    if not axis.alternatives:
        return "no other value with the other fields unchanged"
    texts = [_nearest(axis.nearest, best, axis.field)] if axis.nearest is not None else []
    excluded: dict[str, list[Alternative]] = {}
    for alternative in axis.alternatives:
        if alternative.reason is not None:
            excluded.setdefault(alternative.reason, []).append(alternative)
    return "; ".join((*texts, *(_exclusion(reason, group) for reason, group in excluded.items())))


def _nearest(nearest: Alternative, best: Strategy, field: str) -> str:
    other_changes = words.changed_fields(nearest.strategy, best, but=field)
    slower = nearest.slower or 0.0
    cost = (
        "as fast"
        if abs(slower) < 5e-7
        else f"{abs(slower) * 100:.3g} % {'slower' if slower > 0 else 'faster'}"
    )
    return f"{words.value_text(nearest.value)}{f' with {other_changes}' if other_changes else ''}: {cost}"


def _exclusion(reason: str, group: list[Alternative]) -> str:
    values = [words.value_text(alternative.value) for alternative in group]
    shown = ", ".join(values[:4]) + (f" and {len(values) - 4} more" if len(values) > 4 else "")
    if reason in (MEMORY, HOST_MEMORY):
        least = min(alternative.lacking_bytes for alternative in group)
        at_least = "at least " if len(group) > 1 else ""
        return f"{shown}: {reason} short by {at_least}{words.gib(least)} GiB"
    return f"{shown}: {reason}"


def _binding(binding: Binding) -> Iterator[Line]:
    """The bottleneck: memory where a faster strategy does not fit, else the largest term of the step time."""
    free = f"{words.gib(binding.free_bytes)} of {words.gib(binding.usable_bytes)} usable GiB are free"
    part = (
        f"{words.term_text(binding.largest_part)} takes {words.seconds(binding.largest_part_s)} of the step"
    )
    yield row("bottleneck", (binding.resource.replace("_", " "), "value"), (f"   {free}; {part}", ""))
    lacking = binding.lacking
    if lacking is not None and lacking.slower is not None:
        text = (
            f"{binding.lacking_field}={words.value_text(lacking.value)} would be "
            f"{-lacking.slower * 100:.3g} % faster but is {words.gib(lacking.lacking_bytes)} GiB too large"
        )
        for part in textwrap.wrap(text, WIDTH - LABEL):
            yield row("", (part, "dim"))


# --why-not and --what-if

_COLUMNS = f"{'':<24}"


def comparison_lines(plan: Plan, comparison: PlanComparison, *, kind: str, requested: str) -> list[Line]:
    """The answer of `explain --why-not` and `--what-if`."""
    before, after = comparison.before, comparison.after
    names = ("the plan", requested if len(requested) <= 24 else "fixed" if kind == "why_not" else "changed")
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
    """Terms of step time, then of memory: before, after and difference, the largest difference first."""
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
            label = words.term_text(name)
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


# The command


def explained(
    path: str,
    *,
    why_not: str | None,
    what_if: str | None,
    workers: int,
    budget_s: float | None,
    is_json: bool,
) -> Output:
    """The answer of `explain` about the plan file at `path`.

    ConfigError for a file that is no plan and for changes that cannot be made; Infeasible where no strategy
    of the changed question fits.
    """
    if why_not is not None and what_if is not None:
        raise ConfigError("cannot be combined with --what-if", key="--why-not", allowed="one of the two")
    pinned = None if why_not is None else parse_fields(why_not, key="--why-not")
    if pinned == {}:
        raise ConfigError("names no field", key="--why-not", found=repr(why_not), allowed="name=value,...")
    plan = read_plan(path)
    with progress() as show:
        if pinned is not None:
            comparison = search.why_not(plan, pinned, workers=workers, budget_s=budget_s, progress=show)
        elif what_if is not None:
            comparison = search.what_if(plan, what_if, workers=workers, budget_s=budget_s, progress=show)
        else:
            explanation = search.explained(plan, workers=workers, budget_s=budget_s, progress=show)
            notes, code = _explain_exit_status(explanation.is_interrupted)
            if is_json:
                return Output(document=documents.explanation(plan, explanation), notes=notes, code=code)
            if not explanation.agrees and not explanation.unexplored:
                notes.append("shardwise: the search now finds another best strategy than that of the plan")
            return Output(lines=explanation_lines(plan, explanation), notes=notes, code=code)
    notes, code = _explain_exit_status(comparison.answer.is_interrupted)
    kind, requested = ("why_not", why_not) if pinned is not None else ("what_if", what_if)
    if is_json:
        document = documents.comparison(plan, comparison, kind=kind, requested=str(requested))
        return Output(document=document, notes=notes, code=code)
    lines = comparison_lines(plan, comparison, kind=kind, requested=str(requested))
    return Output(lines=lines, notes=notes, code=code)


def _explain_exit_status(is_interrupted: bool) -> tuple[list[str], int]:
    """A note where the search was interrupted, and the exit code."""
    if is_interrupted:
        return ["shardwise: interrupted; this is what was found so far"], INTERRUPTED
    return [], 0
