"""The answer to a question about a mixed cluster: the best uneven plan, or the best uniform strategy if that
is faster."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.cluster import pools_of
from shardwise.errors import Infeasible
from shardwise.plans import PROVEN_GAP, UNEVEN_SPACE, Answer, Certificate, MixedFigures, Result, idle_in
from shardwise.search.answer import all_devices_s, answered, figures_of, plan, searched
from shardwise.search.bnb.solver import Progress
from shardwise.search.clock import SearchClock
from shardwise.search.cluster_parts import MOST_POOLS, Searched
from shardwise.search.hetero.branch_and_bound import UnevenOutcome, UnevenPlan, search_uneven
from shardwise.search.hetero.result import uneven_result
from shardwise.search.hetero.space import UnevenLimits, UnevenSpace
from shardwise.search.question import Question
from shardwise.search.targets import plan_for, without_target
from shardwise.strategy import Target

EXACT_DEVICES = 16
"""Devices up to which a cluster is searched until the optimum is proven; on larger ones the search ends at
`UNEVEN_GAP`."""

UNEVEN_GAP = 0.02


@dataclass(frozen=True, slots=True)
class UnevenSearchResult:
    """The best uneven plan (None: there is none, or uneven plans are not searched), and a lower bound of
    those searched."""

    result: Result | None
    lower_bound_s: float


def plan_mixed_cluster(
    question: Question, *, target: Target | None = None, progress: Progress | None = None
) -> Answer:
    """The best plan of a mixed cluster: the best uneven plan if it is faster than every uniform strategy on
    any part of the cluster, else the best of these. With `target`, only plans that the target runs.

    Half of a budget is for uniform strategies. Raises Infeasible where neither fits, and the errors of
    `plan_for`.
    """
    if target is not None and not target.runs_mixed_pool_stages:
        question = replace(question, mixed_stage_rows=1)
    why = question.why_uniform or _refusal_by(target, question)
    if why is not None:
        return _with_reason(_uniform(question, target, SearchClock(question.budget_s), progress), why)
    with SearchClock(question.budget_s).handling_interrupts() as clock:
        return _plan_mixed(question, target, clock, progress)


def _refusal_by(target: Target | None, question: Question) -> str | None:
    """Why the target runs no uneven plan of this question; None where it does."""
    if target is None or question.job.dtype in target.uneven_dtypes:
        return None
    known = (
        f"uneven plans in {', '.join(target.uneven_dtypes)} only"
        if target.uneven_dtypes
        else "no uneven plans"
    )
    return f"{target.command} runs {known}: use --target any to search them"


def _uniform(
    question: Question, target: Target | None, clock: SearchClock, progress: Progress | None
) -> Answer:
    """The best uniform strategy on any part of the cluster."""
    if target is None:
        return plan(without_target(question), progress=progress, clock=clock)
    return plan_for(target, question, plan, progress=progress, clock=clock)


def _plan_mixed(
    question: Question, target: Target | None, clock: SearchClock, progress: Progress | None
) -> Answer:
    question.problem()
    half = clock.with_budget(None if question.budget_s is None else question.budget_s / 2.0)
    if target is not None:
        return _of_target(question, target, half, clock, progress)
    uniform = without_target(question)
    found = searched(uniform, half, progress)
    if clock.is_interrupted:
        return answered(uniform, found, clock, progress)
    uneven, why, gap = _faster(question, _figures(question, found), clock, progress)
    if uneven is None:
        return _with_reason(answered(uniform, found, clock, progress), why, gap)
    is_idle = uneven.idle.devices > 0
    return replace(
        uneven,
        parts=found.parts,
        pruned_parts=found.pruned,
        unexplored_parts=found.unexplored,
        all_devices_step_time_s=(
            all_devices_s(uniform, found, clock, progress) if is_idle else uneven.best.step_time_s
        ),
    )


def plan_uneven(
    question: Question, target: Target, of_any: Answer, *, progress: Progress | None = None
) -> Answer:
    """The best uneven plan that the target runs, compared with the uniform strategies of `of_any`, the answer
    for any software: those of the target are not searched.

    Infeasible where no uneven plan is faster than these.
    """
    if not target.runs_mixed_pool_stages:
        question = replace(question, mixed_stage_rows=1)
    with SearchClock(question.budget_s).handling_interrupts() as clock:
        uneven, why, _ = _faster(question, of_any.mixed or _figures(question, None), clock, progress)
    if uneven is None:
        raise Infeasible(why, reasons={})
    return replace(
        uneven,
        parts=of_any.parts,
        pruned_parts=of_any.pruned_parts,
        unexplored_parts=of_any.unexplored_parts,
        all_devices_step_time_s=(
            of_any.all_devices_step_time_s if uneven.idle.devices else uneven.best.step_time_s
        ),
    )


def _figures(question: Question, found: Searched | None) -> MixedFigures:
    """The uniform step times that uneven plans are compared with; None where no uniform strategy fits."""
    figures = None if found is None else figures_of(question, found)
    if figures is not None:
        return figures
    return MixedFigures(uniform_step_time_s=None, fastest_class_step_time_s=None, fastest_class=None, idle=())


def _of_target(
    question: Question, target: Target, half: SearchClock, clock: SearchClock, progress: Progress | None
) -> Answer:
    """The same among plans that the target runs; runners-up are found together with the best."""
    try:
        answer = _uniform(question, target, half, progress)
    except Infeasible:
        uneven, _, _ = _faster(question, _figures(question, None), clock, progress)
        if uneven is None:
            raise
        return uneven
    if clock.is_interrupted or answer.mixed is None:
        return answer
    uneven, why, gap = _faster(question, answer.mixed, clock, progress)
    if uneven is None:
        return _with_reason(answer, why, gap)
    return replace(
        uneven,
        parts=answer.parts,
        pruned_parts=answer.pruned_parts,
        unexplored_parts=answer.unexplored_parts,
        all_devices_step_time_s=(
            answer.all_devices_step_time_s if uneven.idle.devices else uneven.best.step_time_s
        ),
    )


def _faster(
    question: Question, figures: MixedFigures, clock: SearchClock, progress: Progress | None
) -> tuple[Answer | None, str, float]:
    """The best uneven plan that is faster than uniform strategies. If there is none: None, the reason, and by
    which share an uneven plan may still be faster."""
    space, gap = _space_of(question), _default_gap(question)
    cutoff_s = float("inf") if figures.uniform_step_time_s is None else figures.uniform_step_time_s
    outcome = search_uneven(
        space, clock=clock, cutoff_s=cutoff_s, gap=gap, workers=question.workers, progress=progress
    )
    if outcome.plan is None:
        return None, *_why_uniform(outcome, cutoff_s)
    answer = _answer(space, outcome.plan, outcome, figures)
    idle = answer.idle.devices
    if question.use_all and idle:
        left = (cutoff_s - outcome.lower_bound_s) / cutoff_s if cutoff_s < float("inf") else 1.0
        return None, f"the fastest uneven plan leaves {idle} of the devices idle", left
    return replace(answer, is_interrupted=clock.is_interrupted), "", 0.0


def _space_of(question: Question) -> UnevenSpace:
    limits = UnevenLimits(stage_dp=question.stage_dp, mixed_stage_rows=question.mixed_stage_rows)
    return UnevenSpace(question.model, question.cluster, question.job, limits)


def _default_gap(question: Question) -> float:
    return 0.0 if question.cluster.devices <= EXACT_DEVICES else UNEVEN_GAP


def best_uneven(
    question: Question, cutoff_s: float = float("inf"), gap: float | None = None
) -> UnevenSearchResult:
    """The best uneven plan for the question that takes less than `cutoff_s`, to within the share `gap` (None:
    the default gap of the cluster)."""
    is_many = len(pools_of(question.cluster)) > MOST_POOLS
    if question.why_uniform is not None or question.cluster.links or is_many:
        return UnevenSearchResult(result=None, lower_bound_s=float("inf"))
    space = _space_of(question)
    gap = _default_gap(question) if gap is None else gap
    outcome = search_uneven(space, cutoff_s=cutoff_s, gap=gap, workers=question.workers)
    result = None if outcome.plan is None else uneven_result(space, outcome.plan)
    return UnevenSearchResult(result=result, lower_bound_s=outcome.lower_bound_s)


def _with_reason(answer: Answer, why: str, gap: float = 0.0) -> Answer:
    if answer.mixed is None:
        return answer
    return replace(answer, mixed=replace(answer.mixed, why_uniform=why, uneven_gap=gap))


def _why_uniform(outcome: UnevenOutcome, cutoff_s: float) -> tuple[str, float]:
    """The reason after a search that found nothing faster, and the gap that is left."""
    left = (cutoff_s - outcome.lower_bound_s) / cutoff_s
    if left <= PROVEN_GAP:
        return "no uneven plan is faster", 0.0
    return f"no faster uneven plan was found; none is faster by more than {left * 100:.1f} %", left


def _answer(space: UnevenSpace, best: UnevenPlan, outcome: UnevenOutcome, mixed: MixedFigures) -> Answer:
    result = uneven_result(space, best)
    stages = result.layout.stages
    used = {one.device_class for stage in stages for one in (stage.parts or (stage,))}
    idle = tuple(pool.name for pool in space.pools if pool.name not in used)
    ranks = [rank for stage in stages for rank in stage.rank_numbers]
    return Answer(
        best=result,
        runners_up=(),
        certificate=replace(_certificate(outcome, result), priced_as=space.cluster.priced_as),
        mixed=replace(mixed, idle=idle),
        idle=idle_in(space.cluster, ranks),
    )


def _certificate(outcome: UnevenOutcome, result: Result) -> Certificate:
    best_s = result.step_time_s
    return Certificate(
        space=UNEVEN_SPACE,
        enumerated=outcome.pruned + outcome.searched,
        unexplored=outcome.unexplored,
        rejected={},
        cut_by_bound=outcome.pruned,
        simulated=outcome.searched,
        best_s=best_s,
        lower_bound_s=outcome.lower_bound_s,
        gap=(best_s - outcome.lower_bound_s) / best_s,
        search_s=outcome.search_s,
        search_cpu_s=outcome.search_cpu_s,
    )
