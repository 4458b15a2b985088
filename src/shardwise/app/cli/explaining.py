"""The command `explain`: why candidates were pruned, the cost of alternatives, and the bottleneck.

`explanation_lines` shows the outcomes of all candidates, the best alternative of each field, and the
bottleneck. `comparison_lines` is the answer of `--why-not` and `--what-if`: the plan and the best plan of a
changed question, term by term.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from shardwise import api
from shardwise.app.cli import documents, words
from shardwise.app.cli.card import NOT_AS_GIVEN, breakdown_lines, priced_as_lines
from shardwise.app.cli.differing import changed_lines, term_lines
from shardwise.app.cli.division import division_text, layout_lines
from shardwise.app.cli.output import INTERRUPTED, LABEL, WIDTH, Line, Output, progress, row
from shardwise.errors import ConfigError
from shardwise.inputs import printable
from shardwise.plans import Plan
from shardwise.questions import Progress, fields
from shardwise.search import (
    Alternative,
    Axis,
    Binding,
    Explanation,
    LedgerEntry,
    PlanComparison,
    PlanOverview,
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

_NAME = 20
"""Columns of the names of fields."""


def explanation_lines(plan: Plan, overview: PlanOverview, explanation: Explanation | None) -> list[Line]:
    """The answer of `explain`; `explanation` has the candidates of a uniform strategy."""
    step = f"step {words.seconds(plan.step_time_s)}"
    facts = words.shortened(f"{division_text(plan)} · {step}", WIDTH - 1)
    lines: list[Line] = [
        ((f" {plan.name} on {plan.cluster.name}", "title"),),
        ((f" {facts}", "dim"),),
        (("─" * WIDTH, "dim"),),
        *breakdown_lines(plan.best),
        (),
        *_stages(overview),
        *_alternatives(plan, overview),
        (),
    ]
    if explanation is None:
        return [*lines, *_limit(plan, overview), *priced_as_lines(plan.priced_as), ()]
    return [
        *lines,
        *_totals(explanation),
        *priced_as_lines(plan.priced_as),
        (),
        *_blocks(explanation, plan.strategy),
        (),
        *_axes(explanation, plan.strategy),
        (),
        *_binding(explanation.binding),
        (),
    ]


def _stages(overview: PlanOverview) -> Iterator[Line]:
    """Stages with the time in which they compute and wait; the busiest first where there are many."""
    ordered = sorted(overview.stages, key=lambda stage: -stage.busy_s)
    shown = overview.stages if len(overview.stages) <= MAX_STAGES else ordered[:MAX_STAGES]
    yield ((f" {'stage':<26}{'layers':>8}{'computes':>14}{'waits':>14}", "label"),)
    for stage in shown:
        several = f"{stage.pipeline}." if overview.stages[-1].pipeline else ""
        name = f"{several}{stage.stage}  {stage.devices:,} {stage.device_class}"
        waits = f"{words.percent(stage.idle_s / (stage.busy_s + stage.idle_s)):>9}"
        text = (
            f" {name:<26}{stage.layers:>8,}{words.seconds(stage.busy_s):>14}{words.seconds(stage.idle_s):>14}"
        )
        yield ((text, ""), (waits, "dim"))
    if len(overview.stages) > len(shown):
        yield ((f" {len(overview.stages) - len(shown):,} stages that compute less", "dim"),)


def _alternatives(plan: Plan, overview: PlanOverview) -> Iterator[Line]:
    """Runners-up and other ways to train the same, with how much slower they are."""
    rows: list[tuple[str, float, float | None, bool]] = [
        (words.degrees_text(one.strategy), one.step_time_s, one.device_bytes, True) for one in plan.runners_up
    ]
    rows += [(one.name, one.step_time_s, one.device_bytes, one.fits) for one in overview.baselines]
    if not rows:
        return
    yield ()
    yield ((f" {'other plans':<38}{'step time':>12}{'slower':>10}{'memory':>12}", "label"),)
    for name, time_s, nbytes, fits in rows:
        slower = f"{(time_s / plan.step_time_s - 1.0) * 100:+.1f} %"
        memory = "" if nbytes is None else words.memory(nbytes)
        line = f" {words.shortened(name, 37):<38}{words.seconds(time_s):>12}{slower:>10}{memory:>12}"
        yield ((line, ""), ("" if fits else "  does not fit", "warn"))


def _limit(plan: Plan, overview: PlanOverview) -> Iterator[Line]:
    """The busiest stage, the largest part of the step, and the free memory."""
    part = max(plan.breakdown, key=lambda name: plan.breakdown[name])
    free = f"{words.gib(overview.free_bytes)} of {words.gib(overview.usable_bytes)} usable GiB are free"
    largest = f"{words.term_text(part)} takes {words.seconds(plan.breakdown[part])} of the step"
    yield row("bottleneck", (f"stage {overview.busiest.stage}", "value"), (f"   {free}; {largest}", ""))


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
                  (words.bar(share, 12), "time"))  # fmt: skip


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


def comparison_lines(plan: Plan, comparison: PlanComparison, *, kind: str, requested: str) -> list[Line]:
    """The answer of `explain --why-not` and `--what-if`."""
    names = ("the plan", requested if len(requested) <= 24 else "fixed" if kind == "why_not" else "changed")
    title = f" {plan.name} on {comparison.question.cluster.name}"
    return [
        ((title, "title"), (f"  {'with' if kind == 'why_not' else 'if'} {requested}", "value")),
        (("─" * WIDTH, "dim"),),
        *_strategies(plan, comparison),
        (),
        *term_lines(comparison, names),
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
            return _overview(plan, path, workers=workers, budget_s=budget_s, is_json=is_json, progress=show)
    notes, code = _explain_exit_status(comparison.answer.is_interrupted)
    kind, requested = ("why_not", why_not) if why_not is not None else ("what_if", what_if)
    if is_json:
        document = documents.comparison(plan, comparison, kind=kind, requested=str(requested))
        return Output(document=document, notes=notes, code=code)
    lines = comparison_lines(plan, comparison, kind=kind, requested=str(requested))
    return Output(lines=lines, notes=notes, code=code)


def _overview(
    plan: Plan, path: str, *, workers: int, budget_s: float | None, is_json: bool, progress: Progress | None
) -> Output:
    """Where the time and memory of the plan go, what limits it, and the outcomes of all candidates of a
    uniform strategy."""
    try:
        found = api.explain(plan, workers=workers, budget=budget_s, progress=progress)
    except ConfigError as error:
        raise error.within(file=printable(path)) from None
    overview, explanation = found.overview, found.candidates
    notes, code = _explain_exit_status(explanation is not None and explanation.is_interrupted)
    if is_json:
        document = documents.explanation(plan, overview, explanation)
        return Output(document=document, notes=notes, code=code)
    is_claimed = plan.certificate is not None
    if is_claimed and explanation is not None and not explanation.agrees and not explanation.unexplored:
        notes.append("shardwise: the search now finds another best strategy than that of the plan")
    return Output(lines=explanation_lines(plan, overview, explanation), notes=notes, code=code)


def _explain_exit_status(is_interrupted: bool) -> tuple[list[str], int]:
    """A note where the search was interrupted, and the exit code."""
    if is_interrupted:
        return ["shardwise: interrupted; this is what was found so far"], INTERRUPTED
    return [], 0
