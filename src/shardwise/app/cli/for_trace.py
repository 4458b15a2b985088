"""What `plan --events` answers: one plan for a whole trace, best now, in expectation or in the worst case."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, replace

from shardwise import search
from shardwise.app.cli import card, documents, words
from shardwise.app.cli.answer import question_words, schedule_of
from shardwise.app.cli.output import Line, Output, row
from shardwise.app.cli.replanning import trace_for
from shardwise.app.cli.request import JobOptions, Request, Wanted, choice, load_request, writable
from shardwise.app.cli.spaces import space_choice
from shardwise.cluster import EventTrace, events_text, of_nodes
from shardwise.errors import ConfigError
from shardwise.plan import TRACE_POLICIES, Answer, ForTrace, Plan, plan_of, write_plan
from shardwise.replan import Costs, Prices, TracePicks, Within, best_interval_s, picks_for_trace, planner_of
from shardwise.strategy import Strategy, parse_fields
from shardwise.units import format_seconds


def is_asked(events: str | None, policy: str | None) -> bool:
    """Whether a plan for a trace is asked for. ConfigError for a policy without a trace."""
    if events is None and policy is not None:
        raise ConfigError("belongs to --events", key="--policy", allowed="--events TRACE beside it")
    return events is not None


def planned(
    options: JobOptions, wanted: Wanted, events: str, policy: str | None, *, save: str | None, is_json: bool
) -> Output:
    """The answer of `plan --events`; writes the plan file where `save` names one. Raises Infeasible where
    nothing runs at any time, or, for policy `now`, at first."""
    _check_wanted(wanted)
    policy = choice("--policy", policy or "expected", TRACE_POLICIES)
    fixed = parse_fields(wanted.fix, key="--fix")
    chosen = space_choice(wanted.space)
    if save is not None:
        writable("--save", save, inputs=(options.model, options.cluster, events))
    request = load_request(options)
    trace, told = trace_for(events, request.cluster)
    prices = Prices(request.model, request.cluster, request.job)
    interval_s = best_interval_s(trace, trace.end_s) or Costs().checkpoint_interval_s
    planner = planner_of(prices, Costs(checkpoint_interval_s=interval_s))
    picks = picks_for_trace(planner, trace, Within(space=chosen.base, fixed=fixed, axes=chosen.axes))
    plan, answer = _plan(picks, policy, trace, request, chosen.base)
    talk = list(told)
    if save is not None:
        talk.append(f"wrote {save} ({write_plan(save, plan)})")
    if is_json:
        document = documents.plan_answer(plan, answer)
        return Output(document={**document, "for_trace": _document(picks, plan)}, talk=talk)
    return Output(lines=list(_card(picks, plan, answer, request, save)), talk=talk)


def _check_wanted(wanted: Wanted) -> None:
    """What belongs to one cluster that stays as it is cannot be asked of a trace."""
    for option, is_asked in (
        ("--objective", wanted.objective != "time"),
        ("--frontier", wanted.frontier),
        ("--exhaustive", wanted.exhaustive),
        ("--target", wanted.target is not None),
        ("--budget", wanted.budget_s is not None),
    ):
        if is_asked:
            raise ConfigError("does not go with --events", key=option, allowed="one of the two")


def _plan(
    picks: TracePicks, policy: str, trace: EventTrace, request: Request, space: str
) -> tuple[Plan, Answer]:
    """The pick as a plan: priced on its nodes as the cluster has them, and proven for itself."""
    pick = picks.pick(policy)
    slots = pick.arrangement.slots
    cluster = of_nodes(request.cluster, [int(name[1:]) for name in slots])
    strategy = pick.arrangement.strategy
    question = search.Question(
        model=request.model, cluster=cluster, job=request.job, space=space, fixed=asdict(strategy), top=0
    )
    answer = search.plan(question)
    plan = plan_of(
        answer,
        model=request.model,
        cluster=cluster,
        job=request.job,
        schedule=schedule_of(strategy, request.job),
    )
    found = ForTrace(
        policy=policy,
        source=trace.source or "events",
        trace=f"sha256:{hashlib.sha256(events_text(trace).encode()).hexdigest()}",
        nodes=slots,
        length_s=picks.length_s,
        steps=pick.steps,
        now_step_time_s=pick.now_step_s,
        worst_step_time_s=pick.worst_step_s,
        situations=picks.situations,
        considered=picks.considered,
        gap=pick.gap,
    )
    return replace(plan, for_trace=found), answer


def _document(picks: TracePicks, plan: Plan) -> dict[str, object]:
    """`for_trace` of the plan file, and what each policy picks."""
    found = plan.for_trace
    return {
        **({} if found is None else {**asdict(found), "nodes": list(found.nodes)}),
        "policies": [
            {
                "name": pick.policy,
                "strategy": asdict(pick.arrangement.strategy),
                "nodes": list(pick.arrangement.slots),
                "now_step_time_s": pick.now_step_s,
                "worst_step_time_s": pick.worst_step_s,
                "steps": pick.steps,
                "gap": pick.gap,
            }
            for pick in picks.picks
        ],
    }


def _card(
    picks: TracePicks, plan: Plan, answer: Answer, request: Request, save: str | None
) -> Iterator[Line]:
    """The card of the plan on its nodes, and the policies side by side."""
    yield from card.result_card(answer.best, model=plan.model, cluster=plan.cluster, job=plan.job)
    yield ()
    length = f"{format_seconds(picks.length_s)} · {words.counted(picks.situations, 'distinct situation')}"
    yield row("trace", (length, ""))
    yield row("policy", (f"{'now':>11}  {'slowest':>11}  {'steps':>13}  {'nodes':>6}  {'gap':>7}", "label"))
    for pick in picks.picks:
        is_chosen = plan.for_trace is not None and pick.policy == plan.for_trace.policy
        figures = (
            f"{_time(pick.now_step_s):>11}  {_time(pick.worst_step_s):>11}  {pick.steps:>13,.0f}  "
            f"{len(pick.arrangement.slots):>6,}  {pick.gap * 100:>5.1f} %"
        )
        text = f"   {_brief(pick.arrangement.strategy)}"
        yield row(pick.policy, (figures, "value" if is_chosen else ""), (text, "dim"))
    idle = len(request.cluster.nodes) - len(plan.cluster.nodes)
    if idle:
        yield row("", (f"{words.counted(idle, 'node')} of {len(request.cluster.nodes):,} left idle", "warn"))
    yield row("", (f"{picks.considered:,} arrangements; gap: how much more any uniform strategy", "dim"))
    yield row("", ("on the sets of nodes looked at can make at most, of what the policy counts", "dim"))
    yield from card.assumption_lines(
        plan.cluster, plan.job, f"{answer.best.evaluator}, in every situation of the trace"
    )
    question = " ".join(question_words(request.options))
    file = save or "plan.yaml"
    following = [] if save else [f"shardwise plan {question} --events TRACE --save plan.yaml"]
    again = f"shardwise replay {file} --cluster {request.options.cluster} --events TRACE"
    yield from card.next_lines([*following, again])


def _time(step_s: float | None) -> str:
    return "stands still" if step_s is None else words.seconds(step_s)


def _brief(strategy: Strategy) -> str:
    return words.degrees_text(strategy)
