"""The command `replay`: tokens, goodput and decisions of several policies through a trace of events."""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate

from shardwise.app.cli import words
from shardwise.app.cli.activity import progress
from shardwise.app.cli.card import priced_as_lines
from shardwise.app.cli.output import Line, Output, TableRow, row
from shardwise.app.cli.replanning import described, unreachable_lines
from shardwise.app.cli.request import JobOptions, choice, load_request
from shardwise.app.plot import ReplayPlot, TokenCurve, check_plot_file, write_replay_plot
from shardwise.cluster import Cluster, EventTrace
from shardwise.errors import ConfigError
from shardwise.model import Model
from shardwise.plans import PlanQuestion, check_output_path, is_plan_file, read_plan
from shardwise.questions import SearchArguments, cluster_after, request_and_target, running_by
from shardwise.replanning import (
    ANY_SPACE,
    KEEP,
    POLICIES,
    WAIT,
    AllowedSpace,
    AnyArrangement,
    Costs,
    EpochChoice,
    PlansBySize,
    PolicyRun,
    Prices,
    Replay,
    allowed_by,
    allowed_space_of,
    arrangement_of,
    best_interval_s,
    mixed_planner_of,
    planner_of,
    replay,
    trace_for,
)
from shardwise.strategy import Job
from shardwise.units import format_count, format_seconds

SCHEMA, VERSION = "shardwise.replay", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """The options of `replay` other than those of the job; times in seconds, None where they were left
    out."""

    events: str
    policies: str
    length_s: float | None
    regroup_s: float
    restart_s: float
    checkpoint_interval_s: float | None
    plot: str | None
    target: str | None = None
    budget_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """Model, cluster, job, and the plan that runs at the start (None where the planner chooses it)."""

    model: Model
    cluster: Cluster
    job: Job
    start: AnyArrangement | None = None
    allowed_space: AllowedSpace = ANY_SPACE


def replayed(options: JobOptions, replay_options: ReplayOptions, *, is_json: bool) -> Output:
    """The answer of `replay`. ConfigError for options that do not match, Infeasible where no plan runs at any
    time."""
    began_s = time.monotonic()
    policies = _policies(replay_options.policies)
    if replay_options.plot is not None:
        check_plot_file(replay_options.plot, key="--plot")
        check_output_path(
            "--plot",
            replay_options.plot,
            inputs=(options.model, options.cluster or options.model, replay_options.events),
        )
    subject = _subject(options, replay_options.target)
    given = trace_for(replay_options.events, subject.cluster)
    trace, notes, priced_as = given.trace, given.notes, (*subject.cluster.priced_as, *given.priced_as)
    end_s = replay_options.length_s if replay_options.length_s is not None else trace.end_s
    if end_s <= 0.0:
        raise ConfigError("has no length", key="--length", found=f"{end_s:g} s", allowed="--length 24h")
    if replay_options.budget_s is None:
        _refuse_long(trace, end_s)
    interval_s = replay_options.checkpoint_interval_s
    if interval_s is None:
        interval_s = best_interval_s(trace, end_s) or Costs().checkpoint_interval_s
    costs = Costs(
        regroup_s=replay_options.regroup_s,
        restart_s=replay_options.restart_s,
        checkpoint_interval_s=interval_s,
    )
    prices = Prices(subject.model, subject.cluster, subject.job)
    uniform = planner_of(prices, costs, allowed_space=subject.allowed_space)
    planner = mixed_planner_of(uniform, PlansBySize)
    with progress() as show:
        found = replay(
            planner, trace, end_s=end_s, start=subject.start, policies=policies,
            has_time=_has_time(began_s, replay_options.budget_s), progress=show,
        )  # fmt: skip
    cut_off = {name for epoch in found.epochs for name in epoch.situation.unreachable}
    notes = (*notes, *unreachable_lines("unreachable for some time", cut_off))
    if replay_options.plot is not None:
        write_replay_plot(replay_options.plot, _plot(found, subject, trace))
        notes = (*notes, f"wrote {replay_options.plot}")
    if is_json:
        return Output(document={**_document(found, costs), "priced_as": list(priced_as)}, notes=notes)
    return Output(lines=[*_card(found, costs), *priced_as_lines(priced_as)], notes=notes)


MAX_EVENTS = 100_000
"""Most events of a replay without `--budget`: some minutes."""


def _refuse_long(trace: EventTrace, end_s: float) -> None:
    """ConfigError where a replay to `end_s` has more than MAX_EVENTS events."""
    events = bisect_left(trace.events, end_s, key=lambda event: event.time_s)
    if events > MAX_EVENTS:
        until_s = trace.events[MAX_EVENTS].time_s
        raise ConfigError(
            "has too many events for a whole replay", key="--events", found=f"{events:,}",
            allowed=f"at most {MAX_EVENTS:,}, as with --length {max(int(until_s), 1)}s; "
            "--budget 60s replays as much of the beginning as it can",
        )  # fmt: skip


DECISION_SHARE = 0.4
"""Share of the rest of a budget for the decisions of the adaptive policy; the other policies run through the
epochs that it reached, and the oracle takes the longest of them."""


def _has_time(began_s: float, budget_s: float | None) -> Callable[[], bool]:
    """Whether the adaptive policy has time for one more decision, in a command that began at `began_s`."""
    if budget_s is None:
        return lambda: True
    now_s = time.monotonic()
    until_s = now_s + max(began_s + budget_s - now_s, 0.0) * DECISION_SHARE
    return lambda: time.monotonic() < until_s


def _policies(text: str) -> tuple[str, ...]:
    names = [choice("--policy", name.strip(), (*POLICIES, "all")) for name in text.split(",")]
    return POLICIES if "all" in names else tuple(names)


def _subject(options: JobOptions, target: str | None) -> _Subject:
    """The subject: a plan file, which has its job, or a model, which needs the options of the job. Their
    changes are those that `target` runs; by default that of the plan, and for a model the recommended one."""
    if os.path.isfile(options.model) and is_plan_file(options.model):
        job_arguments = {
            "--seq-len": options.seq_len,
            "--global-batch-size": options.global_batch_size,
            "--dtype": options.dtype,
            "--optimizer": options.optimizer if options.optimizer != "adamw" else None,
            "--memory-margin": options.memory_margin if options.memory_margin != "0.05" else None,
        }
        for key, value in job_arguments.items():
            if value:
                raise ConfigError("applies to models; a plan file has its own", key=key, found=str(value))
        plan = read_plan(options.model)
        plan.require_kind("uniform", "uneven", key="PLAN")
        plan = running_by(plan, target, options.software)
        cluster = cluster_after(plan, options.cluster or None, inter_node=options.inter_node)
        return _Subject(
            model=plan.model,
            cluster=cluster,
            job=plan.job,
            start=arrangement_of(plan, cluster),
            allowed_space=allowed_space_of(plan),
        )
    for key, value, allowed in (
        ("--cluster", options.cluster, "a cluster"),
        ("--global-batch-size", options.global_batch_size, "1 or more"),
    ):
        if not value:
            raise ConfigError("is missing; it is required for a model", key=key, allowed=allowed)
    request, software = request_and_target(
        load_request(options), SearchArguments(target=target), has_uneven=True
    )
    question = PlanQuestion(target=None if software is None else software.name)
    return _Subject(
        model=request.model,
        cluster=request.cluster,
        job=request.job,
        allowed_space=allowed_by(question, request.model, request.job),
    )


def _changes(found: Replay, run: PolicyRun) -> Iterator[tuple[int, EpochChoice]]:
    """Decisions with their epochs: the first one, changes, and the starts of waiting."""
    for place, one in enumerate(run.choices):
        starts_waiting = one.decision == WAIT and (place == 0 or run.choices[place - 1].decision != WAIT)
        if place == 0 or starts_waiting or one.decision not in (KEEP, WAIT) or (one.change_s > 0.0):
            yield place, one


def _document(found: Replay, costs: Costs) -> dict[str, object]:
    """`replay --json`."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "length_s": found.length_s,
        **({} if found.is_whole else {"requested_s": found.requested_s}),
        "epochs": len(found.epochs),
        "costs": asdict(costs),
        "policies": [
            {
                "name": run.name,
                "tokens": found.tokens(run),
                "goodput": found.goodput(run),
                "moves": run.changes,
                "decisions": [
                    {
                        "time_s": found.epochs[place].start_s,
                        "decision": one.decision,
                        "step_time_s": one.step_s,
                        "transition_s": one.change_s,
                        "nodes": len(one.arrangement.nodes) if one.arrangement else 0,
                        **({"strategy": None} if one.arrangement is None else one.arrangement.document),
                    }
                    for place, one in _changes(found, run)
                ],
            }
            for run in found.runs
        ],
    }


def _share(found: Replay, run: PolicyRun) -> str:
    oracle = [one for one in found.runs if one.name == "oracle"]
    if not oracle or found.tokens(oracle[0]) == 0.0:
        return ""
    return f"{100.0 * found.tokens(run) / found.tokens(oracle[0]):.1f} %"


def _card(found: Replay, costs: Costs) -> Iterator[Line]:
    nodes = [len(epoch.situation.states) for epoch in found.epochs]
    whole = "" if found.is_whole else f" of {format_seconds(found.requested_s)}, within --budget,"
    yield row(
        "trace", (format_seconds(found.length_s), "value"),
        (f"{whole} in {words.counted(len(found.epochs), 'epoch')}", ""),
        (f" · {min(nodes):,} to {max(nodes):,} nodes", ""),
    )  # fmt: skip
    saved = f"every {format_seconds(costs.checkpoint_interval_s)}, leaving {found.working_share * 100:.0f} %"
    yield row("checkpoints", (saved if found.working_share < 1.0 else "not counted", ""))
    yield ()
    yield TableRow(
        row("policy", (f"{'tokens':>10}  {'of oracle':>9}  {'goodput':>8}  {'changes':>8}", "label"))
    )
    for run in found.runs:
        figures = (
            f"{format_count(found.tokens(run)):>10}  {_share(found, run):>9}  "
            f"{found.goodput(run) * 100:>6.1f} %  {run.changes:>8,}"
        )
        yield TableRow(row(run.name, (figures, "value" if run.name == "adaptive" else "")))


def _by_kind(found: Replay, run: PolicyRun) -> dict[str, tuple[float, ...]]:
    """Start times in seconds of each kind of change; the first plan is no change."""
    times_s: dict[str, list[float]] = {}
    for place, one in _changes(found, run):
        if place > 0 and one.decision != KEEP:
            times_s.setdefault(one.decision, []).append(found.epochs[place].start_s)
    return {kind: tuple(times_s[kind]) for kind in sorted(times_s)}


def _plot(found: Replay, subject: _Subject, trace: EventTrace) -> ReplayPlot:
    borders = (0.0, *(epoch.end_s for epoch in found.epochs))
    scale = found.tokens_per_step * found.working_share
    adaptive = next((run for run in found.runs if run.name == "adaptive"), found.runs[0])
    return ReplayPlot(
        title=f"{subject.model.name} on {subject.cluster.name}",
        subtitle=f"tokens over {format_seconds(borders[-1])} · {trace.source or 'events'}"[:140],
        curves=tuple(
            TokenCurve(
                name=run.name,
                times_s=borders,
                tokens=tuple(accumulate((steps * scale for steps in run.steps), initial=0.0)),
                figures=f"goodput {found.goodput(run) * 100:.1f} %",
                changes_s=_by_kind(found, run),
            )
            for run in found.runs
        ),
        times_s=borders[:-1],
        nodes=tuple(len(epoch.situation.states) for epoch in found.epochs),
        end_s=borders[-1],
        policies=tuple(
            (
                run.name,
                format_count(found.tokens(run)),
                _share(found, run),
                f"{found.goodput(run) * 100:.1f} %",
                f"{run.changes:,}",
            )
            for run in found.runs
        ),
        decisions=tuple(_decision_rows(found, adaptive)),
    )


MAX_ROWS = 5000
"""Most decisions that the page lists."""


def _decision_rows(found: Replay, run: PolicyRun) -> Sequence[tuple[str, ...]]:
    rows = []
    for place, one in list(_changes(found, run))[:MAX_ROWS]:
        text = "" if one.arrangement is None else described(one.arrangement)[0]
        rows.append(
            (
                format_seconds(found.epochs[place].start_s),
                one.decision,
                str(len(found.epochs[place].situation.states)),
                text,
                "" if one.step_s is None else format_seconds(one.step_s),
                format_seconds(one.change_s),
            )
        )
    return rows
