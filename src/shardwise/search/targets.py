"""Plans that a target can run: `plan_for` searches the part of the space within the limits of the target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from shardwise.cluster import Parts
from shardwise.cost import has_fused_attention
from shardwise.errors import ConfigError, Infeasible
from shardwise.model import Model
from shardwise.plans import Answer, Value, usd_per_step
from shardwise.search.bnb.solver import Progress
from shardwise.search.cluster_parts import listed_parts
from shardwise.search.question import Question
from shardwise.search.space import divisors
from shardwise.strategy import Job, Limit, Strategy, Target, target_of

Planner = Callable[..., Answer]


def plan_for(
    target: Target, question: Question, planner: Planner, *, progress: Progress | None = None
) -> Answer:
    """The answer of `planner` (`plan`) to `question` among the strategies that `target` runs.

    The space is restricted to the values that the target supports, and the search rejects candidates beyond
    limits that one of its levels can check. If the best strategy exceeds another limit, the subspaces within
    that limit are searched one by one. The certificate is that of the subspace with the best answer;
    runners-up are of the same subspace and within the limits. Raises ConfigError if a fixed field has a value
    that the target does not support, Infeasible if nothing is left.
    """
    target = target.for_job(question.model, question.job)
    return _within_limits(target, restricted_to(target, question), partial(planner, progress=progress))


def restricted_to(target: Target, question: Question) -> Question:
    """The question restricted to the field values that `target` supports. Raises ConfigError if a fixed field
    has another value, Infeasible if nothing is left."""
    target = target.for_job(question.model, question.job)
    if not has_fused_attention(question.cluster, question.job.profile):
        target = replace(target, axes={**target.axes, **target.unfused_axes})
    for name, value in question.fixed.items():
        if name in target.axes and value not in target.axes[name]:
            raise ConfigError(
                f"is not run by {target.command}", key=f"fix.{name}", found=str(value),
                allowed=f"{', '.join(map(str, target.axes[name]))}, or --target any",
            )  # fmt: skip
    named = {*question.fixed, *question.axes}
    requested = restricted_with(question, target.axes_for(question.cluster.classes, named))
    if requested is None:
        raise _target_infeasible(target)
    return replace(requested, limits=_with_levels(target))


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
    for axes in limit.allowed_subspaces(_degrees(question)):
        part = restricted_with(question, axes)
        if part is not None and (part.uses_parts or any(part.candidates().degrees())):
            yield part


def _degrees(question: Question) -> tuple[int, ...]:
    """Every degree that a strategy can have on the parts of the cluster that may be used."""
    if not question.uses_parts:
        return divisors(question.cluster.devices)
    counts = listed_parts(question, Parts(question.cluster)).device_counts
    return tuple(sorted({degree for count in counts for degree in divisors(count)}))


def _within_limits(target: Target, question: Question, planner: Callable[[Question], Answer]) -> Answer:
    answer = planner(question)
    if target.broken_limit(answer.best.strategy) is None:
        remaining = (one for one in answer.runners_up if target.broken_limit(one.strategy) is None)
        return replace(answer, runners_up=tuple(remaining))
    best: Answer | None = None
    for part in parts_within(target, question, answer.best.strategy):
        try:
            found = _within_limits(target, part, planner)
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
