"""The command `explain`: where time and memory go, what binds, what other choices cost, and the candidates.

`explanation_lines` shows what more of each resource brings, the best plan with another value of each field,
and the outcomes of all candidates. `comparison_lines` is the answer of `--why-not` and `--what-if`: the plan
and the best plan of a changed question, term by term.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from shardwise import api
from shardwise.app.cli import documents, words
from shardwise.app.cli.activity import progress
from shardwise.app.cli.card import NOT_AS_GIVEN, breakdown_lines, priced_as_lines
from shardwise.app.cli.differing import changed_lines, step_lines, term_lines
from shardwise.app.cli.division import division_text, layout_lines
from shardwise.app.cli.output import LABEL, Form, Line, Output, TableRow, columns, row
from shardwise.app.cli.overlap import answer_parts, parts_table, step_parts_or_none
from shardwise.errors import ConfigError
from shardwise.inputs import printable
from shardwise.interrupts import INTERRUPTED
from shardwise.plans import Plan
from shardwise.questions import Progress, fields
from shardwise.search import (
    Alternative,
    Explanation,
    LedgerEntry,
    PlanComparison,
    PlanOverview,
    Relaxation,
)
from shardwise.strategy import HOST_MEMORY, MEMORY, Strategy

MAX_STAGES = 16
"""Most stages that are shown, those that compute longest."""

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

LEAST_GAIN = 5e-5
"""Smallest relative gain that is shown as one."""


def explanation_lines(
    plan: Plan, overview: PlanOverview, explanation: Explanation | None, *, is_verbose: bool = False
) -> list[Line]:
    """The answer of `explain`; `explanation` has the candidates of a uniform strategy, and `is_verbose`
    shows all of them."""
    step = f"step {words.seconds(plan.step_time_s)}"
    facts = words.shortened(f"{step} · {division_text(plan)}", columns() - 1)
    lines: list[Line] = [
        ((f" {plan.name} on {plan.cluster.name}", "title"),),
        ((f" {facts}", "dim"),),
        (("─" * columns(), "dim"),),
        *breakdown_lines(plan.best, is_verbose=is_verbose),
        (),
        *parts_table(step_parts_or_none(plan)),
        (),
        *_stages(overview),
    ]
    if explanation is None:
        rest = [*_others(plan, overview, with_runners_up=True), (), *_limit(plan, overview)]
        return [*lines, *rest, *priced_as_lines(plan.priced_as), ()]
    return [
        *lines,
        (),
        *_binding(explanation, plan),
        *_alternatives(explanation, plan),
        *_others(plan, overview, with_runners_up=is_verbose),
        (),
        *_totals(explanation, is_verbose=is_verbose),
        *priced_as_lines(plan.priced_as),
        *(((), *_blocks(explanation, plan.strategy)) if is_verbose else ()),
        (),
    ]


def _stages(overview: PlanOverview) -> Iterator[Line]:
    """Stages with the time in which they compute and wait; the busiest first where there are many."""
    ordered = sorted(overview.stages, key=lambda stage: -stage.busy_s)
    shown = overview.stages if len(overview.stages) <= MAX_STAGES else ordered[:MAX_STAGES]
    yield TableRow([(f" {'stage':<24}{'layers':>8}{'computes':>13}{'waits':>13}", "label")])
    for stage in shown:
        several = f"{stage.pipeline}." if overview.stages[-1].pipeline else ""
        name = f"{several}{stage.stage}  {stage.devices:,} {stage.device_class}"
        waits = f"{words.percent(stage.idle_s / (stage.busy_s + stage.idle_s)):>8}"
        text = (
            f" {name:<24}{stage.layers:>8,}{words.seconds(stage.busy_s):>13}{words.seconds(stage.idle_s):>13}"
        )
        yield TableRow([(text, ""), (waits, "dim")])
    if len(overview.stages) > len(shown):
        yield ((f" {len(overview.stages) - len(shown):,} stages that compute less", "dim"),)


def _others(plan: Plan, overview: PlanOverview, *, with_runners_up: bool) -> Iterator[Line]:
    """Other ways to train the same, with how much slower they are; the fastest runner-up of each kind too
    where they are requested."""
    fastest = {
        group: one for group, one in reversed([*zip(plan.runner_up_groups, plan.runners_up, strict=True)])
    }
    rows: list[tuple[str, float, float | None, bool]] = [
        (words.degrees_text(one.strategy), one.step_time_s, one.device_bytes, True)
        for one in plan.runners_up
        if with_runners_up and one in fastest.values()
    ]
    rows += [(one.name, one.step_time_s, one.device_bytes, one.fits) for one in overview.baselines]
    if not rows:
        return
    yield ()
    yield TableRow([(f" {'other plans':<{_HEAD}}{'step time':>11}{'slower':>10}{'memory':>11}", "label")])
    for name, time_s, nbytes, fits in rows:
        memory = "" if nbytes is None else words.memory(nbytes)
        slower = words.slower_text(time_s / plan.step_time_s - 1.0)
        head = f" {words.shortened(name, _HEAD - 1):<{_HEAD}}{words.seconds(time_s):>11}{slower:>10}"
        yield TableRow([(f"{head}{memory:>11}", ""), ("" if fits else "  too large", "warn")])


def _limit(plan: Plan, overview: PlanOverview) -> Iterator[Line]:
    """The busiest stage, the largest part of the step, and the free memory."""
    part = max(plan.breakdown, key=lambda name: plan.breakdown[name])
    free = f"{words.gib(overview.free_bytes)} of {words.gib(overview.usable_bytes)} usable GiB are free"
    largest = f"{words.term_text(part)} takes {words.seconds(plan.breakdown[part])} of the step"
    stage = f"stage {overview.busiest.stage}"
    yield from words.span_rows("what binds", (stage, "value"), (f"   {free};", ""), (f" {largest}", ""))


def outcome_text(outcome: str) -> str:
    """An outcome as text."""
    return OUTCOME_TEXTS.get(outcome, f"rejected, {words.reason_text(outcome)}")


def _totals(explanation: Explanation, *, is_verbose: bool) -> Iterator[Line]:
    """Candidates per outcome, the coarsest level first; in a sentence unless it `is_verbose`."""
    total = sum(explanation.totals.values()) + explanation.unexplored
    yield row("candidates", (f"{total:,}", "value"))
    if not is_verbose:
        outcomes = dict(explanation.totals)
        texts = _outcome_texts(outcomes, total)
        texts += [f"unexplored {explanation.unexplored:,}"] if explanation.unexplored else []
        yield from words.text_rows("", f"{'; '.join(texts)} (--verbose)")
        return
    counts = {outcome_text(outcome): count for outcome, count in explanation.totals.items()}
    if explanation.unexplored:
        counts["unexplored"] = explanation.unexplored
    wide = max(len(f"{count:,}") for count in counts.values())
    for text, count in counts.items():
        lines = textwrap.wrap(text, columns() - LABEL - wide - 10)
        for place, line in enumerate(lines):
            number = "" if place else f"{count:>{wide},}{words.percent(count / total):>8}"
            yield row("", (f"{number:<{wide + 8}}  {line}", ""))


def _blocks(explanation: Explanation, best: Strategy) -> Iterator[Line]:
    """The largest ledger entries and that of the best, each with its outcomes; the others share a line."""
    entries = explanation.entries
    best_entries = [block for block in entries if _contains(block, best)]
    shown = [*(block for block in entries[: MAX_ENTRIES - 1] if block not in best_entries), *best_entries]
    yield ((f" {'tp':>3}{'cp':>5}{'pp':>5}{'dp':>6}{'candidates':>17}   outcomes", "label"),)
    for block in sorted(shown, key=entries.index):
        fixed = f" {block.tp:>3}{block.cp:>5}{block.pp:>5}{block.dp:>6}{block.candidates:>17,}   "
        mark = "the best; " if block in best_entries else ""
        text = mark + _outcome_summary(block.outcomes, block.candidates)
        for index, part in enumerate(textwrap.wrap(text, columns() - len(fixed))):
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
        fixed = f" {words.counted(len(folded), 'other grid'):<18}{count:>18,}   "
        for index, part in enumerate(
            textwrap.wrap(_outcome_summary(folded_outcomes, count), columns() - len(fixed))
        ):
            yield ((fixed if index == 0 else " " * len(fixed), ""), (part, "dim"))


def _contains(block: LedgerEntry, best: Strategy) -> bool:
    return (block.tp, block.cp, block.pp, block.dp) == (best.tp, best.cp, best.pp, best.dp)


def _outcome_summary(outcomes: Mapping[str, int], total: int) -> str:
    return "; ".join(_outcome_texts(outcomes, total))


def _outcome_texts(outcomes: Mapping[str, int], total: int) -> list[str]:
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
            name = OUTCOME_TEXTS[most].removeprefix("pruned ") if group else words.reason_text(most)
            share = words.percent(sum(counts.values()) / total)
            texts.append(f"{verb} {share}, {'most ' if len(counts) > 1 else ''}{name}")
    if outcomes.get("simulated"):
        texts.append(f"evaluated {outcomes['simulated']:,}")
    return texts


_HEAD = 34
"""Columns of what a row of `explain` is about."""


def _alternatives(explanation: Explanation, plan: Plan) -> Iterator[Line]:
    """The best plan with each other value that was searched, fastest first, and why values have none. Values
    with the same plan share a row."""
    groups: dict[Strategy, list[tuple[str, Alternative]]] = {}
    excluded: dict[str, list[str]] = {}
    for axis in explanation.axes:
        for one in axis.alternatives:
            label = f"{axis.field} {words.value_text(one.value)}"
            if one.reason is None:
                groups.setdefault(one.strategy, []).append((label, one))
            else:
                excluded.setdefault(_excluded(one.reason), []).append(label)
    if groups:
        yield ()
        head = f" {'the best plan with':<{_HEAD}}{'step time':>11}{'slower':>10}{'memory':>11}{'fits':>6}"
        yield TableRow([(head, "label")])
    for strategy, members in sorted(groups.items(), key=lambda item: item[1][0][1].slower or 0.0):
        yield from _alternative(strategy, [label for label, _ in members], members[0][1], plan)
    for reason, labels in excluded.items():
        for place, text in enumerate(textwrap.wrap(f"{', '.join(labels)}: {reason}", columns() - 6)):
            yield ((f" {'    ' if place else ''}{text}", "dim"),)
    if explanation.unsearched:
        many = words.counted(explanation.unsearched, "search")
        yield ((f" {many} left out: no time was left", "warn"),)
    if groups:
        yield ((" --why-not and --what-if compare such a plan term by term", "dim"),)


def _alternative(strategy: Strategy, labels: Sequence[str], one: Alternative, plan: Plan) -> Iterator[Line]:
    """The row of a plan with these values, and what differs from the plan."""
    first, *more = words.wrapped(labels, ", ", _HEAD - 2)
    slower = one.slower or 0.0
    fits = "" if one.fits_probability is None else f"{one.fits_probability:.2f}"
    time_s = words.seconds(plan.step_time_s * (1.0 + slower))
    figures = (
        f"{time_s:>11}{words.slower_text(slower):>10}{words.memory(one.device_bytes or 0.0):>11}{fits:>6}"
    )
    yield TableRow([(f" {first:<{_HEAD}}", "value"), (figures, "")])
    for text in more:
        yield TableRow([(f" {text}", "value")])
    texts = [words.degrees_text(strategy)]
    texts += words.difference_texts(strategy, plan.strategy, plan.model.layers)
    for text in words.wrapped(texts, " · ", columns() - 5):
        yield ((f"     {text}", "dim"),)


def _excluded(reason: str) -> str:
    """Why there is no plan with a value."""
    return {MEMORY: "nothing fits", HOST_MEMORY: "nothing fits the host"}.get(
        reason, words.reason_text(reason)
    )


def _binding(explanation: Explanation, plan: Plan) -> Iterator[Line]:
    """What binds: what more of each resource brings, and the free memory."""
    binding = explanation.binding
    free = f"{words.gib(binding.free_bytes)} of {words.gib(binding.usable_bytes)} usable GiB are free"
    part = words.term_text(binding.largest_part)
    takes = f"{part} takes {words.seconds(binding.largest_part_s)} of the step"
    helpful = [one for one in explanation.relaxed if one.gain >= LEAST_GAIN]
    binds = " and ".join(one.resource for one in helpful[:2]) or binding.resource.replace("_", " ")
    yield from words.span_rows("what binds", (binds, "value"), (f"   {free};", ""), (f" {takes}", ""))
    for place, one in enumerate(explanation.relaxed):
        gain = f"{words.percent(max(one.gain, 0.0), 2)} faster" if one.gain >= LEAST_GAIN else "nothing"
        style = "" if one.gain >= LEAST_GAIN else "dim"
        text = f"{one.resource:<20}{gain:>13}"
        yield from words.span_rows(
            "" if place else "10 % more", (text, style), (f"  {_change(plan, one)}", "dim")
        )
    lacking = binding.lacking
    if lacking is not None and lacking.slower is not None and not explanation.relaxed:
        text = (
            f"{binding.lacking_field}={words.value_text(lacking.value)} would be "
            f"{-lacking.slower * 100:.3g} % faster but is {words.gib(lacking.lacking_bytes)} GiB too large"
        )
        yield from words.text_rows("", text, "dim")


def _change(plan: Plan, one: Relaxation) -> str:
    """The change as `--what-if` reads it; of the batch also how much larger it is."""
    name, _, value = one.change.partition("=")
    if not value.isdecimal():
        return one.change
    more = int(value) / plan.job.global_batch_size - 1.0
    return f"{name}={value} ({more * 100:+.0f} %)"


# --why-not and --what-if


def comparison_lines(plan: Plan, comparison: PlanComparison, *, kind: str, requested: str) -> list[Line]:
    """The answer of `explain --why-not` and `--what-if`."""
    names = ("the plan", requested if len(requested) <= 18 else "fixed" if kind == "why_not" else "changed")
    title = f" {plan.name} on {comparison.question.cluster.name}"
    return [
        ((title, "title"), (f"  {'with' if kind == 'why_not' else 'if'} {requested}", "value")),
        (("─" * columns(), "dim"),),
        *_strategies(plan, comparison),
        (),
        *term_lines(comparison, names),
        *step_lines(step_parts_or_none(plan), answer_parts(comparison), names),
        (),
        *_proof(comparison),
        (),
    ]


def _strategies(plan: Plan, comparison: PlanComparison) -> Iterator[Line]:
    question = comparison.question
    for label, result, cluster, job in (
        ("before", comparison.before, plan.cluster, plan.job),
        ("after", comparison.after, question.cluster, question.job),
    ):
        yield ((f" {label}", "label"),)
        yield from layout_lines(result, plan.model, cluster, job)
    yield from changed_lines(comparison)


def _proof(comparison: PlanComparison) -> Iterator[Line]:
    certificate = comparison.answer.certificate
    why = NOT_AS_GIVEN if certificate.priced_as else f"gap {words.percent(certificate.gap, 2)}"
    verdict = ("optimal", "good") if comparison.answer.is_proven else (f"not proven: {why}", "warn")
    among = f" among {certificate.enumerated:,} candidates of this question"
    yield from words.span_rows("proof", verdict, (among, ""))
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
    is_verbose: bool = False,
) -> Output:
    """The answer of `explain` about the plan file at `path`.

    ConfigError for a file that is no plan and for changes that cannot be made; Infeasible where no strategy
    of the changed question fits.
    """
    if why_not is not None and what_if is not None:
        raise ConfigError("cannot be combined with --what-if", key="--why-not", allowed="one of the two")
    pinned = None if why_not is None else fields("--why-not", why_not)
    if pinned == {}:
        raise ConfigError("names no field", key="--why-not", found=repr(why_not), allowed="name=value,...")
    plan = api.load(path)
    with progress() as show:
        if pinned is not None:
            comparison = api.explain(plan, pinned, workers=workers, budget=budget_s, progress=show)
        elif what_if is not None:
            comparison = api.what_if(plan, what_if, workers=workers, budget=budget_s, progress=show)
        else:
            form = Form.of(is_json=is_json, is_verbose=is_verbose)
            return _overview(plan, path, workers=workers, budget_s=budget_s, form=form, progress=show)
    notes, code = _explain_exit_status(comparison.answer.is_interrupted)
    kind, requested = ("why_not", why_not) if why_not is not None else ("what_if", what_if)
    if is_json:
        document = documents.comparison(plan, comparison, kind=kind, requested=str(requested))
        return Output(document=document, notes=notes, code=code)
    lines = comparison_lines(plan, comparison, kind=kind, requested=str(requested))
    return Output(lines=lines, notes=notes, code=code)


def _overview(
    plan: Plan, path: str, *, workers: int, budget_s: float | None, form: Form, progress: Progress | None
) -> Output:
    """Where the time and memory of the plan go, what limits it, and the outcomes of all candidates of a
    uniform strategy."""
    try:
        found = api.explain(
            plan, every_value=form.is_verbose, workers=workers, budget=budget_s, progress=progress
        )
    except ConfigError as error:
        raise error.within(file=printable(path)) from None
    overview, explanation = found.overview, found.candidates
    notes, code = _explain_exit_status(explanation is not None and explanation.is_interrupted)
    if form.is_json:
        document = documents.explanation(plan, overview, explanation)
        return Output(document=document, notes=notes, code=code)
    is_claimed = plan.certificate is not None
    if is_claimed and explanation is not None and not explanation.agrees and not explanation.unexplored:
        notes.append("shardwise: the search now finds another best strategy than that of the plan")
    return Output(
        lines=explanation_lines(plan, overview, explanation, is_verbose=form.is_verbose),
        notes=notes,
        code=code,
    )


def _explain_exit_status(is_interrupted: bool) -> tuple[list[str], int]:
    """A note where the search was interrupted, and the exit code."""
    if is_interrupted:
        return ["shardwise: interrupted; this is what was found so far"], INTERRUPTED
    return [], 0
