"""From the arguments of `plan` and `evaluate` to a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shardwise import search
from shardwise.errors import ConfigError, Infeasible
from shardwise.plans import OBJECTIVES, Answer, Plan, PlanQuestion, TargetBest, plan_of, schedule_of
from shardwise.questions import arguments
from shardwise.questions.arguments import MIXED_POOL_STAGES, Progress
from shardwise.questions.request import OWN_TARGET, JobArguments, Request, request_of
from shardwise.questions.spaces import require_candidates, space_choice
from shardwise.questions.target_table import (
    TargetAnswer,
    answers_of_targets,
    recommended_target,
    table_of,
    targets_in_order,
)
from shardwise.questions.targets import requested_target, require_job
from shardwise.strategy import Strategy, Target, complete, target_of
from shardwise.ties import is_less


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
    tolerance: object = 0.01


def planned(given: JobArguments, wanted: SearchArguments, *, progress: Progress | None = None) -> Plan:
    """The best plan among those that the target runs, with the whole answer of the search.

    Raises ConfigError for the first argument that cannot be used, Infeasible where nothing fits. An
    interrupted search answers with the incumbent.
    """
    request, asker = request_of(given), _Asker.of(wanted, progress)
    if asker.is_table_of_targets(request):
        chosen = _chosen(request, asker)
    else:
        target = requested_target(wanted.target, request)
        if target is not None:
            require_job(target, request)
            request = request.for_target(target)
        chosen = _Chosen(request, target, *asker.ask(target, request))
    return _plan_of(chosen, asker)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """A question with its answer, and the best of each target where no target was named."""

    request: Request
    target: Target | None
    question: search.Question
    answer: Answer
    targets: tuple[TargetBest, ...] = ()


@dataclass(frozen=True, slots=True)
class _Asker:
    """The options of the search, to ask the same question for one or several targets."""

    wanted: SearchArguments
    options: Mapping[str, Any]
    space: search.SpaceChoice
    tolerance: float
    progress: Progress | None

    @classmethod
    def of(cls, wanted: SearchArguments, progress: Progress | None) -> _Asker:
        """Raises ConfigError for the first argument that cannot be used."""
        tolerance = arguments.number("--tolerance", wanted.tolerance, low=0.0, high=1.0)
        return cls(wanted, search_options(wanted), space_choice(wanted.space), tolerance, progress)

    def is_table_of_targets(self, request: Request) -> bool:
        """Whether the best target is to be found: none is named, and our own runtime is not the default."""
        own = target_of(OWN_TARGET)
        return self.wanted.target is None and not own.knows_devices(request.cluster.classes)

    def ask(self, target: Target | None, request: Request, share: int = 1) -> tuple[search.Question, Answer]:
        """The question for a target (None: any) and its answer. As one of `share` rows of a table it has this
        part of the budget, is not exhaustive, and has no frontier.

        Raises ConfigError where the arguments contradict each other or the target, Infeasible where nothing
        fits.
        """
        question = search.Question(
            model=request.model,
            cluster=request.cluster,
            job=request.job,
            space=self.space.base,
            axes=self.space.axes,
            **self.options,
        )
        if share > 1:
            uses_all = question.use_all or (question.exhaustive and question.objective in ("time", "memory"))
            question = replace(question, frontier=False, exhaustive=False, use_all=uses_all)
            if question.budget_s is not None:
                question = replace(question, budget_s=question.budget_s / share)
        if not question.uses_parts:
            require_candidates(self.space, question.fixed, request)
        by_pools = question.objective == "time" and search.is_mixed(request.cluster)
        _check_uneven_options(question, target, by_pools=by_pools)
        try:
            answer = _search(question, target, by_pools=by_pools, progress=self.progress)
        except Infeasible:
            require_candidates(self.space, question.fixed, request)
            raise
        return question, replace(answer, whole=request.cluster)


def _chosen(request: Request, asker: _Asker) -> _Chosen:
    """The answer for the recommended target; on a mixed cluster the uneven plan where it is faster by more
    than the tolerance."""
    share = len(targets_in_order()) + 2
    of_any = TargetAnswer(None, request, *asker.ask(None, request, share))
    ask = partial(asker.ask, share=share)
    found = [] if of_any.is_interrupted else answers_of_targets(request, of_any, ask)
    best = recommended_target(found) or of_any
    if of_any.is_uneven:
        own = next((one for one in found if one.is_own and one.answer is not None), None)
        uneven = own if own is not None and own.is_uneven else of_any
        if is_less(uneven.value * (1.0 + asker.tolerance), best.value) or best is of_any:
            best = uneven
    question, answer = best.found
    is_interrupted = any(one.is_interrupted for one in (of_any, *found))
    if not is_interrupted and (asker.options["frontier"] or asker.options["exhaustive"]):
        question, answer = asker.ask(best.target, best.request)
    answer = replace(answer, is_interrupted=answer.is_interrupted or is_interrupted)
    return _Chosen(best.request, best.target, question, answer, table_of(found, of_any))


def _plan_of(chosen: _Chosen, asker: _Asker) -> Plan:
    """The plan with the recommended strategy of the chosen target."""
    question, target = chosen.question, chosen.target
    tolerance = 0.0 if target is None else asker.tolerance
    with search.SearchClock(question.budget_s).handling_interrupts() as clock:
        answer = search.recommended(chosen.answer, question, target, tolerance, clock)
    return plan_of(
        replace(answer, targets=chosen.targets),
        model=chosen.request.model,
        cluster=answer.cluster or chosen.request.cluster,
        job=chosen.request.job,
        question=replace(plan_question(question, target), tolerance=tolerance),
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


def evaluated(given: JobArguments, strategy: object, target: object = None) -> Plan:
    """The plan of one given strategy, without a certificate: nothing was searched.

    `target` is the software that must run it (None: any).

    Raises ConfigError for the first argument that cannot be used, Infeasible with the reason where the
    strategy is illegal, does not fit, or is not run by the target.
    """
    fields = arguments.fields("--strategy", strategy)
    request = request_of(given)
    software = None if target is None else requested_target(target, request)
    if software is not None:
        require_job(software, request)
        request = request.for_target(software)
    experts = request.model.experts
    chosen = complete(
        fields,
        devices=request.cluster.devices,
        layers=request.model.layers,
        experts=None if experts is None else experts.experts,
        global_batch_size=request.job.global_batch_size,
    )
    if software is not None:
        _require_run(software.for_job(request.model, request.job), chosen)
    best = search.evaluate(request.model, request.cluster, request.job, chosen)
    return Plan(
        network=request.model,
        cluster=request.cluster,
        job=request.job,
        best=best,
        question=PlanQuestion(target=None if software is None else software.name),
        schedule=schedule_of(best),
    )


def _require_run(target: Target, strategy: Strategy) -> None:
    """Infeasible where the target does not run the strategy, with the fields that it does not support."""
    refused = [str(refusal) for refusal in target.refusals(strategy)]
    if refused:
        raise Infeasible(f"target: {target.command} does not run {'; '.join(refused)}", reasons={"target": 1})
