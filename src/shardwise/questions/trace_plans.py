"""One plan for a whole trace of events, by policy: `planned_for_trace`."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.errors import ConfigError
from shardwise.plans import TRACE_POLICIES, Answer, Plan, PlanQuestion, TraceChoice
from shardwise.questions import arguments
from shardwise.questions.arguments import MIXED_POOL_STAGES
from shardwise.questions.planning import SearchArguments, request_and_target, search_options
from shardwise.questions.request import JobArguments, Request, request_of
from shardwise.questions.spaces import space_choice
from shardwise.replanning import (
    Costs,
    GivenEvents,
    Prices,
    TracePicks,
    allowed_by,
    best_interval_s,
    mixed_planner_of,
    picks_for_trace,
    plan_on,
    planner_of,
    trace_for,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePlan:
    """The plan that a policy picks for a trace of events (`choice`), its answer on the cluster without
    events, and the `picks` of all policies."""

    plan: Plan
    answer: Answer
    choice: TraceChoice
    picks: TracePicks
    given: GivenEvents
    request: Request


def planned_for_trace(
    given_job: JobArguments, wanted: SearchArguments, *, events: object, policy: object
) -> TracePlan:
    """The plan for a trace. Raises ConfigError for the first argument that cannot be used, Infeasible where
    no plan runs at any time or, for policy `now`, at the start."""
    options = search_options(wanted, given_job.set)
    for key, is_given in (
        ("--objective", options["objective"] != "time"),
        ("--frontier", options["frontier"]),
        ("--exhaustive", options["exhaustive"]),
        ("--budget", options["budget_s"] is not None),
        (MIXED_POOL_STAGES, options["mixed_stage_rows"] > 1),
        ("--use-all", options["use_all"]),
        ("--top", wanted.top != SearchArguments().top),
    ):
        if is_given:
            raise ConfigError("cannot be combined with --events", key=key, allowed="one of the two")
    name = arguments.choice("--policy", policy or "expected", TRACE_POLICIES)
    chosen = space_choice(wanted.space)
    request = request_of(given_job)
    given = trace_for(arguments.text("--events", events), request.cluster)
    request, target = request_and_target(request, wanted, has_uneven=True)
    question = PlanQuestion(
        space=chosen.base,
        fixed=options["fixed"],
        axes=chosen.axes,
        target=None if target is None else target.name,
        stage_dp=options["stage_dp"],
        events=given.source,
        options=request.options,
    )
    allowed = allowed_by(question, request.model, request.job)
    interval_s = best_interval_s(given.trace, given.trace.end_s) or Costs().checkpoint_interval_s
    prices = Prices(request.model, request.cluster, request.job)
    costs = Costs(checkpoint_interval_s=interval_s)
    planner = mixed_planner_of(planner_of(prices, costs, allowed_space=allowed))
    picks = picks_for_trace(planner, given.trace, allowed)
    is_proven = not (request.cluster.priced_as or given.priced_as)
    choice = _choice(picks, name, given, is_proven=is_proven)
    uniform = [pick.arrangement for pick in picks.uniform if pick.policy == name]
    plan, answer = plan_on(
        planner,
        picks.pick(name).arrangement,
        choice,
        question=question,
        priced_as=given.priced_as,
        uniform=uniform[0] if uniform else None,
    )
    return TracePlan(plan=plan, answer=answer, choice=choice, picks=picks, given=given, request=request)


def _choice(picks: TracePicks, policy: str, given: GivenEvents, *, is_proven: bool) -> TraceChoice:
    """The trace choice of the plan file; without a gap where the input is approximated. Infeasible where the
    policy picks no plan."""
    pick = picks.pick(policy)
    return TraceChoice(
        policy=policy,
        source=given.source,
        trace=given.sha256,
        nodes=pick.arrangement.nodes,
        length_s=picks.length_s,
        steps=pick.steps,
        now_step_time_s=pick.now_step_s,
        worst_step_time_s=pick.worst_step_s,
        situations=picks.situations,
        considered=picks.considered,
        gap=pick.gap if is_proven else None,
    )
