"""`plan --events`: one plan for a whole trace of events, by policy: now, expected or worst."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from shardwise.app.cli import card, documents, words
from shardwise.app.cli.card import priced_as_lines
from shardwise.app.cli.output import Line, Output, TableRow, row
from shardwise.app.cli.planning import question_arguments, train_warnings
from shardwise.app.cli.replanning import described, unreachable_lines
from shardwise.app.cli.request import JobOptions, LongRun, PlanOptions, job_arguments
from shardwise.errors import ConfigError
from shardwise.launch import not_run
from shardwise.plans import PROVEN_GAP, TraceChoice, check_output_path, write_plan
from shardwise.questions import JobArguments, Request, SearchArguments, planned_for_trace
from shardwise.replanning import TracePick, TracePicks, on_nodes
from shardwise.units import format_seconds


def is_requested(events: str | None, policy: str | None, run: LongRun) -> bool:
    """Whether a plan for a trace is requested. ConfigError for options that need a trace, or exclude one."""
    if events is None and policy is not None:
        raise ConfigError("requires --events", key="--policy", allowed="with --events TRACE")
    if events is not None and run.length is not None:
        raise ConfigError(
            "cannot be combined with --events", key="--tokens, --steps, --days", allowed="one of the two"
        )
    if events is not None and run.is_requested:
        raise ConfigError(
            "cannot be combined with --events",
            key="--mtbf, --checkpoint-interval, --checkpoint-stall, --restart, --jitter",
            allowed="one of the two",
        )
    return events is not None


def planned(
    options: JobOptions,
    plan_options: PlanOptions,
    events: str,
    policy: str | None,
    *,
    save: str | None,
    is_json: bool,
) -> Output:
    """The answer of `plan --events`; writes the plan file where `save` names one. Infeasible where no plan
    runs at any time or, for policy `now`, at the start."""
    if save is not None:
        check_output_path("--save", save, inputs=(options.model, options.cluster, events))
    wanted = SearchArguments(
        objective=plan_options.objective,
        space=plan_options.space,
        fix=plan_options.fix,
        target=plan_options.target,
        use_all=plan_options.use_all,
        top=plan_options.top,
        frontier=plan_options.frontier,
        exhaustive=plan_options.exhaustive,
        stage_dp=plan_options.stage_dp,
        mixed_pool_stages=plan_options.mixed_stage_rows,
        budget=plan_options.budget_s,
    )
    job = JobArguments(**job_arguments(options))
    made = planned_for_trace(job, wanted, events=events, policy=policy)
    plan, picks, given, request, found = made.plan, made.picks, made.given, made.request, made.choice
    written = None if save is None else write_plan(save, plan)
    unsupported = not_run(plan)
    document = documents.plan_answer(plan, made.answer, not_run=unsupported)
    # The gap is that of the trace, not that of this plan alone.
    is_proven = found.gap is not None and found.gap <= PROVEN_GAP
    document |= {"is_proven": is_proven, "uneven_gap": None}
    lines = card.result_card(
        plan.best, model=plan.model, cluster=plan.cluster, job=plan.job, options=plan.options
    )
    notes = [*given.notes, *unreachable_lines("unreachable for some time", picks.unreachable)]
    notes += train_warnings(unsupported, plan.cluster, save)
    notes += [] if save is None else [f"wrote {save} ({written})"]
    if is_json:
        return Output(document={**document, "for_trace": _document(picks, found)}, notes=notes)
    priced_as = (*plan.cluster.priced_as, *given.priced_as)
    return Output(lines=[*lines, *_card(picks, found, request, options, save, priced_as)], notes=notes)


def _document(picks: TracePicks, found: TraceChoice) -> dict[str, object]:
    """`for_trace` of the answer: that of the plan file, and the pick of each policy."""
    return {
        **asdict(found),
        "nodes": list(found.nodes),
        "policies": [_pick_document(pick, found) for pick in picks.picks],
        "uniform": [_pick_document(pick, found) for pick in picks.uniform] or None,
    }


def _pick_document(pick: TracePick, found: TraceChoice) -> dict[str, object]:
    return {
        "name": pick.policy,
        **pick.arrangement.document,
        "nodes": list(pick.arrangement.nodes),
        "now_step_time_s": pick.now_step_s,
        "worst_step_time_s": pick.worst_step_s,
        "steps": pick.steps,
        "gap": None if found.gap is None else pick.gap,
    }


def _card(
    picks: TracePicks,
    found: TraceChoice,
    request: Request,
    options: JobOptions,
    save: str | None,
    priced_as: Sequence[str],
) -> Iterator[Line]:
    """A table of the picks of all policies, and of the uniform pick where an uneven one is better."""
    yield ()
    length = f"{format_seconds(picks.length_s)} · {words.counted(picks.situations, 'distinct situation')}"
    yield row("trace", (length, ""))
    head = f"{'now':>11}  {'slowest':>11}  {'steps':>13}  {'nodes':>6}  {'gap':>7}"
    yield TableRow(row("policy", (head, "label")))
    for pick in picks.picks:
        yield _pick_line(pick.policy, pick, found, is_chosen=pick.policy == found.policy)
    for pick in picks.uniform:
        if pick.policy == found.policy:
            yield _pick_line("uniform", pick, found, is_chosen=False)
    idle = len(request.cluster.nodes) - len(found.nodes)
    if idle:
        yield row("", (f"{words.counted(idle, 'node')} of {len(request.cluster.nodes):,} left idle", "warn"))
    kind = "any plan" if picks.uniform else "any uniform strategy"
    yield row("", (f"{picks.considered:,} arrangements evaluated; gap: how much higher the score", "dim"))
    yield row("", (f"of {kind} on the searched sets of nodes can be at most", "dim"))
    yield from priced_as_lines(priced_as)
    evaluator = "max-plus, in every situation of the trace"
    yield from card.assumption_lines(on_nodes(found, request.cluster), request.job, evaluator)
    question = " ".join(question_arguments(options))
    file = save or "plan.yaml"
    following = [] if save else [f"shardwise plan {question} --events TRACE --save plan.yaml"]
    replay_command = f"shardwise replay {file} --cluster {options.cluster} --events TRACE"
    yield from card.next_lines([*following, replay_command])


def _pick_line(name: str, pick: TracePick, found: TraceChoice, *, is_chosen: bool) -> Line:
    gap = "-" if found.gap is None else f"{pick.gap * 100:.1f} %"
    figures = (
        f"{_time(pick.now_step_s):>11}  {_time(pick.worst_step_s):>11}  {pick.steps:>13,.0f}  "
        f"{len(pick.arrangement.nodes):>6,}  {gap:>7}"
    )
    text = f"   {described(pick.arrangement)[0]}"
    return TableRow(row(name, (figures, "value" if is_chosen else ""), (text, "dim")))


def _time(step_s: float | None) -> str:
    return "cannot run" if step_s is None else words.seconds(step_s)
