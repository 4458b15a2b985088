"""From the arguments of `plan` and `evaluate` to a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from shardwise import search
from shardwise.errors import ConfigError, Infeasible
from shardwise.plans import OBJECTIVES, Answer, Plan, PlanQuestion, plan_of, schedule_of
from shardwise.questions import arguments
from shardwise.questions.arguments import MIXED_POOL_STAGES, Progress
from shardwise.questions.request import JobArguments, request_of
from shardwise.questions.spaces import require_candidates, space_choice
from shardwise.questions.targets import requested_target, require_job
from shardwise.strategy import Target, complete


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchArguments:
    """The arguments of `plan` about the search, as given."""

    objective: object = "time"
    space: object = "default"
    fix: object = None
    target: object = None
    use_all: object = False
    top: object = 3
    frontier: object = False
    exhaustive: object = False
    stage_dp: object = 1
    mixed_pool_stages: object = 1
    workers: object = 1
    budget: object = None


def planned(given: JobArguments, wanted: SearchArguments, *, progress: Progress | None = None) -> Plan:
    """The best plan among those that the target runs, with the whole answer of the search.

    Raises ConfigError for the first argument that cannot be used, Infeasible where nothing fits. An
    interrupted search answers with the incumbent.
    """
    unbound = search_options(wanted)
    chosen = space_choice(wanted.space)
    request = request_of(given)
    target = requested_target(wanted.target, request)
    if target is not None:
        require_job(target, request)
        request = request.for_target(target)
    question = search.Question(
        model=request.model,
        cluster=request.cluster,
        job=request.job,
        space=chosen.base,
        axes=chosen.axes,
        **unbound,
    )
    if not question.uses_parts:
        require_candidates(chosen, question.fixed, request)
    by_pools = question.objective == "time" and search.is_mixed(request.cluster)
    _check_uneven_options(question, target, by_pools=by_pools)
    try:
        answer = _search(question, target, by_pools=by_pools, progress=progress)
    except Infeasible:
        require_candidates(chosen, question.fixed, request)
        raise
    return plan_of(
        replace(answer, whole=request.cluster),
        model=request.model,
        cluster=answer.cluster or request.cluster,
        job=request.job,
        question=plan_question(question, target),
    )


def search_options(wanted: SearchArguments) -> dict[str, Any]:
    """The arguments about the search as fields of the question, checked."""
    return {
        "objective": arguments.choice("--objective", wanted.objective, OBJECTIVES),
        "fixed": arguments.fields("--fix", wanted.fix),
        "use_all": arguments.flag("--use-all", wanted.use_all),
        "top": arguments.count("--top", wanted.top, low=0, high=1000),
        "frontier": arguments.flag("--frontier", wanted.frontier),
        "exhaustive": arguments.flag("--exhaustive", wanted.exhaustive),
        "stage_dp": arguments.stage_dp("--stage-dp", wanted.stage_dp),
        "mixed_stage_rows": arguments.count(MIXED_POOL_STAGES, wanted.mixed_pool_stages, low=1, high=8),
        "workers": arguments.workers(wanted.workers),
        "budget_s": arguments.budget_s(wanted.budget),
    }


def _search(
    question: search.Question, target: Target | None, *, by_pools: bool, progress: Progress | None
) -> Answer:
    """The answer of the planner among the plans that the target runs."""
    if by_pools:
        return search.plan_mixed_cluster(question, target=target, progress=progress)
    if target is not None:
        return search.plan_for(target, question, search.plan, progress=progress)
    return search.plan(question, progress=progress)


def _check_uneven_options(question: search.Question, target: Target | None, *, by_pools: bool) -> None:
    """ConfigError where options of uneven plans do not apply, or allow stages that the target does not
    run."""
    rows = question.mixed_stage_rows
    for key, value in (("--stage-dp", question.stage_dp), (MIXED_POOL_STAGES, rows)):
        if value > 1 and not by_pools:
            raise ConfigError(
                "applies to uneven plans only: objective time, clusters of two to four pools",
                key=key, found=str(value), allowed="1",
            )  # fmt: skip
    if rows > 1 and target is not None and not target.runs_mixed_pool_stages:
        raise ConfigError(
            f"{target.command} runs no mixed-pool stages",
            key=MIXED_POOL_STAGES, found=str(rows), allowed="1, or --target any",
        )  # fmt: skip


def plan_question(question: search.Question, target: Target | None) -> PlanQuestion:
    """The question as a plan holds it."""
    return PlanQuestion(
        objective=question.objective,
        space=question.space,
        fixed=question.fixed,
        axes=question.axes,
        target=None if target is None else target.name,
        use_all=question.use_all or question.exhaustive,
        stage_dp=question.stage_dp,
        mixed_stage_rows=question.mixed_stage_rows,
    )


def evaluated(given: JobArguments, strategy: object) -> Plan:
    """The plan of one given strategy, without a certificate: nothing was searched.

    Raises ConfigError for the first argument that cannot be used, Infeasible with the reason where the
    strategy is illegal or does not fit.
    """
    fields = arguments.fields("--strategy", strategy)
    request = request_of(given)
    experts = request.model.experts
    chosen = complete(
        fields,
        devices=request.cluster.devices,
        layers=request.model.layers,
        experts=None if experts is None else experts.experts,
        global_batch_size=request.job.global_batch_size,
    )
    best = search.evaluate(request.model, request.cluster, request.job, chosen)
    return Plan(
        network=request.model, cluster=request.cluster, job=request.job, best=best, schedule=schedule_of(best)
    )
