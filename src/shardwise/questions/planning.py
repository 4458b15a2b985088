"""From the arguments of `plan` and `evaluate` to a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from shardwise.questions.targets import is_table_of_targets, request_for
from shardwise.strategy import Strategy, Target, complete, require_modules
from shardwise.ties import is_less


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchArguments:
    """The arguments of `plan` about the search, as given."""

    objective: object = "time"
    space: object = "default"
    fix: object = None
    target: object = None
    use_all: object = False
    top: object = 8
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
    request, asker = request_of(given, wanted.target), _Asker.of(wanted, given.set, progress)
    if is_table_of_targets(wanted.target, request):
        chosen = _chosen(request, asker)
    else:
        request, target = request_for(wanted.target, request)
        chosen = _Chosen(request, target, *asker.ask(target, request))
    return _plan_of(chosen, asker)


def request_and_target(
    request: Request, wanted: SearchArguments, *, has_uneven: bool, progress: Progress | None = None
) -> tuple[Request, Target | None]:
    """The request with the software profile of its target, and the target: the one that is named, else that
    of the plan that `planned` recommends, without uneven plans unless `has_uneven`. Where no target has a
    plan, it is `any`."""
    if not is_table_of_targets(wanted.target, request):
        return request_for(wanted.target, request)
    asker = replace(_Asker.of(replace(wanted, top=0), request.options, progress), has_uneven=has_uneven)
    try:
        best = _best_of_targets(request, asker)[0]
    except Infeasible:
        return request.for_any_target(), None
    if best.is_interrupted:
        raise KeyboardInterrupt
    return best.request, best.target


_SHARES = len(targets_in_order()) + 3
"""Shares of the budget: one for each target, our own runtime, no target, and the recommended one in full."""


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

    options: Mapping[str, Any]
    space: search.SpaceChoice
    tolerance: float
    progress: Progress | None
    has_uneven: bool

    @classmethod
    def of(cls, wanted: SearchArguments, options_set: object, progress: Progress | None) -> _Asker:
        """Raises ConfigError for the first argument that cannot be used. Uneven plans have no frontier, and
        not all of them are evaluated."""
        tolerance = arguments.number("--tolerance", wanted.tolerance, low=0.0, high=1.0)
        options, space = search_options(wanted, options_set), space_choice(wanted.space)
        has_uneven = not (options["frontier"] or options["exhaustive"])
        return cls(options, space, tolerance, progress, has_uneven)

    def ask(
        self,
        target: Target | None,
        request: Request,
        *,
        share: int = 1,
        is_row: bool = False,
        of_any: Answer | None = None,
    ) -> tuple[search.Question, Answer]:
        """The question for a target (None: any) and its answer, within the budget over `share`. As a row of a
        table it is not exhaustive, and has no frontier and no runners-up. With the answer `of_any` software,
        the answer is an uneven plan that is faster than its uniform strategies.

        Raises ConfigError where the arguments contradict each other or the target, Infeasible where nothing
        fits.
        """
        question = search.Question(
            model=request.model,
            cluster=request.cluster,
            job=request.job,
            space=self.space.base,
            axes=self.space.axes,
            open_options=request.open_options(target),
            **self.options,
        )
        if is_row:
            uses_all = question.use_all or (question.exhaustive and question.objective in ("time", "memory"))
            question = replace(question, frontier=False, exhaustive=False, top=0, use_all=uses_all)
        if question.budget_s is not None:
            question = replace(question, budget_s=question.budget_s / share)
        if not question.uses_parts:
            require_candidates(self.space, question.fixed, request)
        by_pools = self.has_uneven and question.objective == "time" and search.is_mixed(request.cluster)
        _check_uneven_options(question, target, by_pools=by_pools)
        try:
            if of_any is not None and target is not None:
                answer = search.plan_uneven(question, target, of_any, progress=self.progress)
            else:
                answer = _search(question, target, by_pools=by_pools, progress=self.progress)
        except Infeasible:
            require_candidates(self.space, question.fixed, request)
            raise
        if answer.mixed is not None and answer.mixed.why_uniform is None and not by_pools:
            answer = replace(answer, mixed=replace(answer.mixed, why_uniform=question.why_uniform))
        return replace(question, job=answer.job or question.job), replace(answer, whole=request.cluster)

    def with_runners_up(self, row: TargetAnswer) -> tuple[search.Question, Answer]:
        """A row of a table with its runners-up, searched on the part of the cluster that the row uses."""
        row_question, answer = row.found
        question = replace(row_question, top=self.options["top"])
        if not question.top or question.objective == "memory":
            return question, answer
        used = replace(question, cluster=answer.cluster or question.cluster, use_all=True, objective="time")
        found = _search(used, row.target, by_pools=False, progress=self.progress)
        return replace(question, job=found.job or question.job), replace(
            answer,
            best=found.best,
            runners_up=found.runners_up,
            certificate=found.certificate,
            job=found.job,
            is_interrupted=found.is_interrupted,
        )


def _chosen(request: Request, asker: _Asker) -> _Chosen:
    """The answer for the recommended target, with its runners-up; on a mixed cluster the uneven plan, which
    has none, where it is faster by more than the tolerance."""
    best, found, of_any = _best_of_targets(request, asker)
    is_interrupted = any(one.is_interrupted for one in (of_any, *found))
    if not (is_interrupted or best.is_uneven):
        best = _in_full(best, asker)
    question, answer = best.found
    answer = replace(answer, is_interrupted=answer.is_interrupted or is_interrupted)
    return _Chosen(best.request, best.target, question, answer, table_of(found, of_any))


def _in_full(row: TargetAnswer, asker: _Asker) -> TargetAnswer:
    """A row of the table with all that was requested; the row itself where time was over, or the user
    interrupted, before something as good was found."""
    try:
        if asker.options["frontier"] or asker.options["exhaustive"]:
            question, answer = asker.ask(row.target, row.request, share=_SHARES)
        else:
            question, answer = asker.with_runners_up(row)
    except KeyboardInterrupt:
        return replace(row, answer=replace(row.found[1], is_interrupted=True))
    except Infeasible:
        return row
    whole = replace(row, question=question, answer=answer)
    if not is_less(row.value, whole.value):
        return whole
    return replace(row, answer=replace(row.found[1], is_interrupted=answer.is_interrupted))


def _best_of_targets(
    request: Request, asker: _Asker
) -> tuple[TargetAnswer, list[TargetAnswer], TargetAnswer]:
    """The answer of the recommended target, those of all targets, and that without a target. Infeasible where
    nothing fits."""
    without = request.for_any_target()
    of_any = TargetAnswer(None, without, *asker.ask(None, without, share=_SHARES, is_row=True))

    def ask(target: Target | None, of: Request) -> tuple[search.Question, Answer]:
        is_own = target is not None and target.name == OWN_TARGET
        uneven = of_any.answer if is_own and of_any.is_uneven else None
        return asker.ask(target, of, share=_SHARES, is_row=True, of_any=uneven)

    found = [] if of_any.is_interrupted else answers_of_targets(request, of_any, ask)
    best = recommended_target(found) or of_any
    if of_any.is_uneven:
        own = next((one for one in found if one.is_own and one.answer is not None), None)
        uneven = own if own is not None and own.is_uneven else of_any
        if is_less(uneven.value * (1.0 + asker.tolerance), best.value) or best is of_any:
            best = uneven
    return best, found, of_any


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
        job=question.job,
        question=replace(plan_question(question, target, chosen.request), tolerance=tolerance),
    )


def search_options(wanted: SearchArguments, options: object) -> dict[str, Any]:
    """The arguments about the search as fields of the question, checked. `options` of the software may name
    modules to recompute."""
    return {
        "objective": arguments.choice("--objective", wanted.objective, OBJECTIVES),
        "fixed": arguments.fields_and_modules("--fix", wanted.fix, options),
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
    clock = search.SearchClock(question.budget_s)
    with clock.handling_interrupts():
        if by_pools:
            answer = search.plan_mixed_cluster(question, target=target, progress=progress)
        elif target is not None:
            answer = search.plan_for(target, question, search.plan, progress=progress, clock=clock)
        else:
            answer = search.plan(search.without_target(question), progress=progress, clock=clock)
        return search.over_open_options(target, question, answer, clock)


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


def plan_question(question: search.Question, target: Target | None, request: Request) -> PlanQuestion:
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
        options=request.options,
    )


def evaluated(given: JobArguments, strategy: object, target: object = None) -> Plan:
    """The plan of one given strategy, without a certificate: nothing was searched.

    `target` is the software that must run it (None: any).

    Raises ConfigError for the first argument that cannot be used, Infeasible with the reason where the
    strategy is illegal, does not fit, or is not run by the target.
    """
    fields = arguments.fields_and_modules("--strategy", strategy, given.set)
    request = request_of(given, target)
    require_modules(request.model, str(fields.get("recompute_modules", "")), "strategy.recompute_modules")
    request, software = (request.for_any_target(), None) if target is None else request_for(target, request)
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
        question=PlanQuestion(target=None if software is None else software.name, options=request.options),
        schedule=schedule_of(best),
    )


def _require_run(target: Target, strategy: Strategy) -> None:
    """Infeasible where the target does not run the strategy, with the fields that it does not support."""
    refused = [str(refusal) for refusal in target.refusals(strategy)]
    if refused:
        raise Infeasible(f"target: {target.command} does not run {'; '.join(refused)}", reasons={"target": 1})
