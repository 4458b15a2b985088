"""Plans that a target can run: `plan_for` searches the part of the space within the limits of the target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import takewhile

from shardwise.cluster import Parts
from shardwise.cost import has_fused_attention
from shardwise.errors import ConfigError, Infeasible
from shardwise.model import NO_MODULES, Model
from shardwise.plans import Answer, Value, usd_per_step
from shardwise.search.answer import frontier_of, search
from shardwise.search.bnb.incumbent import Tradeoff
from shardwise.search.bnb.solver import Progress, SearchResult
from shardwise.search.clock import SearchClock
from shardwise.search.cluster_parts import device_counts
from shardwise.search.question import Question
from shardwise.search.space import divisors
from shardwise.strategy import Job, Limit, Strategy, Target, target_of, target_of_options

Planner = Callable[..., Answer]


def plan_for(
    target: Target,
    question: Question,
    planner: Planner,
    *,
    progress: Progress | None = None,
    clock: SearchClock | None = None,
) -> Answer:
    """The answer of `planner` (`plan`) to `question` among the strategies that `target` runs.

    The space is restricted to the values that the target supports, and the search rejects candidates beyond
    limits that one of its levels can check. If the best strategy exceeds another limit, the subspaces within
    that limit are searched one by one. The certificate is that of the subspace with the best answer;
    runners-up are of the same subspace and within the limits; a requested frontier covers all subspaces.
    A given `clock` replaces the budget. Raises ConfigError if a fixed field has a value that the target does
    not support, Infeasible if nothing is left.
    """
    target = target.for_job(question.model, question.job)
    restricted, clock = restricted_to(target, question), clock or SearchClock(question.budget_s)
    with clock.handling_interrupts():
        without = replace(restricted, frontier=False)
        answer = within_limits(target, without, partial(planner, progress=progress, clock=clock))
        if not question.frontier or clock.is_interrupted:
            return answer
        used = replace(restricted, cluster=answer.cluster or question.cluster)
        searches = searches_within(target, used, partial(_tradeoff, clock=clock, progress=progress))
    return replace(answer, frontier=frontier_of(used, [outcome for _, outcome in searches]))


def _tradeoff(question: Question, *, clock: SearchClock, progress: Progress | None) -> SearchResult:
    return search(question, question.problem(), Tradeoff(), clock=clock, progress=progress)


def searches_within(
    target: Target | None, question: Question, ask: Callable[[Question], SearchResult]
) -> list[tuple[Question, SearchResult]]:
    """Searches of disjoint subspaces that together have all strategies of the question that `target` (None:
    any) runs: of the whole space if everything found is within the limits, else of the subspaces within the
    limit that is exceeded."""
    outcome = ask(question)
    if target is not None:
        for one in outcome.found:
            if target.broken_limit(one.table[0]) is not None:
                parts = parts_within(target, question, one.table[0])
                return [found for part in parts for found in searches_within(target, part, ask)]
    return [(question, outcome)]


def restricted_to(target: Target, question: Question) -> Question:
    """The question restricted to the field values that `target` supports. Raises ConfigError if a fixed field
    has another value, Infeasible if nothing is left."""
    target = target.for_job(question.model, question.job)
    if not has_fused_attention(question.cluster, question.job.profile):
        sets = (*target.module_sets, *target.unfused_module_sets)
        target = replace(target, axes={**target.axes, **target.unfused_axes}, module_sets=sets)
    for name, value in question.fixed.items():
        if name in target.axes and value not in target.axes[name]:
            raise ConfigError(
                f"is not run by {target.command}", key=f"fix.{name}", found=str(value),
                allowed=f"{', '.join(map(str, target.axes[name]))}, or --target any",
            )  # fmt: skip
    _check_modules(target, question)
    named = {*question.fixed, *question.axes}
    requested = restricted_with(question, target.axes_for(question.cluster.classes, named))
    if requested is None:
        raise _target_infeasible(target)
    return replace(
        requested, limits=_with_levels(target), has_empty_ends=target.has_empty_ends, has_own_set=False
    )


def without_target(question: Question) -> Question:
    """The question with all that some target runs: interleaved pipelines with empty ends, and, unless modules
    are requested, recomputation of those that the newest Megatron-LM names next to the own set of our
    runtime."""
    question = replace(question, has_empty_ends=True)
    if "recompute_modules" in {*question.fixed, *question.axes}:
        return question
    target = target_of_options(None).for_job(question.model, question.job)
    is_fused = has_fused_attention(question.cluster, question.job.profile)
    sets = target.module_sets if is_fused else (*target.module_sets, *target.unfused_module_sets)
    axes = {**question.axes, "recompute_modules": (NO_MODULES, *sets)} if sets else question.axes
    return replace(question, axes=axes, has_own_set=bool(sets))


def _check_modules(target: Target, question: Question) -> None:
    """Raises ConfigError for a fixed or allowed set of modules that the target does not recompute."""
    name = "recompute_modules"
    given = [(f"fix.{name}", question.fixed[name])] if name in question.fixed else []
    given += [(f"axes.{name}", value) for value in question.axes.get(name, ())]
    for key, value in given:
        refused = target.refused_modules("none", str(value))
        if refused is not None:
            raise ConfigError(
                f"is not recomputed by {target.command}",
                key=key,
                found=refused.found,
                allowed=refused.allowed,
            )


def searched_limits(name: str, model: Model, job: Job) -> tuple[Limit, ...]:
    """The limits of the target with this name, for a model and a job, that the search itself checks."""
    return _with_levels(target_of(name).for_job(model, job))


def _with_levels(target: Target) -> tuple[Limit, ...]:
    return tuple(limit for limit in target.limits if limit.level is not None)


def parts_within(target: Target, question: Question, strategy: Strategy) -> Iterator[Question]:
    """Questions about the subspaces within the limit of `target` that `strategy` exceeds; none if it is
    within all limits."""
    limit = target.broken_limit(strategy)
    if limit is None:
        return
    for axes in limit.allowed_subspaces(degrees_of(question), question.model.layers):
        part = restricted_with(question, axes)
        if part is not None and (part.uses_parts or any(part.candidates().degrees())):
            yield part


def degrees_of(question: Question) -> tuple[int, ...]:
    """Every degree that a strategy can have on the parts of the cluster that may be used."""
    if not question.uses_parts:
        return divisors(question.cluster.devices)
    counts = device_counts(question, Parts(question.cluster))
    return tuple(sorted({degree for count in counts for degree in divisors(count)}))


def within_limits(target: Target, question: Question, planner: Callable[[Question], Answer]) -> Answer:
    """The answer of `planner` within the limits of `target` (of the job), searched in subspaces where the
    best strategy exceeds one. Infeasible if nothing is left."""
    answer = planner(question)
    if target.broken_limit(answer.best.strategy) is None:
        # Those up to the first that the target does not run: after it another one may be missing.
        remaining = takewhile(lambda one: target.broken_limit(one.strategy) is None, answer.runners_up)
        return replace(answer, runners_up=tuple(remaining))
    best: Answer | None = None
    for part in parts_within(target, question, answer.best.strategy):
        try:
            found = within_limits(target, part, planner)
        except Infeasible:
            continue  # other subspaces may have an answer
        if best is None or objective_value(question, found) < objective_value(question, best):
            best = found
    if best is None:
        raise _target_infeasible(target)
    return best


def restricted_with(question: Question, axes: Mapping[str, tuple[Value, ...]]) -> Question | None:
    """The question with fields restricted to these values too; None if a field has no value left."""
    remaining = dict(question.axes)
    for name, values in axes.items():
        remaining[name] = tuple(value for value in remaining.get(name, values) if value in values)
        fixed = question.fixed.get(name)
        if not remaining[name] or (fixed is not None and fixed not in remaining[name]):
            return None
    return replace(question, axes=remaining)


def objective_value(question: Question, answer: Answer) -> tuple[float, float]:
    """The objective value, and the step time that breaks ties."""
    cluster, best = answer.cluster or question.cluster, answer.best
    if question.objective == "memory":
        return best.peak_memory.device, best.step_time_s
    if question.objective == "devices":
        return cluster.devices, best.step_time_s
    if question.objective == "cost":
        return usd_per_step(cluster, best.step_time_s) or 0.0, best.step_time_s
    return best.step_time_s, best.step_time_s


def _target_infeasible(target: Target) -> Infeasible:
    return Infeasible(
        f"no strategy of this space that fits is run by {target.command}; --target any has no limits",
        reasons={},
    )
