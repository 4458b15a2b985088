"""Options of the software that a question leaves open: the answer is the best over their values.

A value that is not the default one counts only for strategies on which it acts: the others run as with the
default. Each value has a search of its own, which must beat the best so far. So it prunes most of its space,
and its certificate says that nothing in it is faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile

from shardwise.plans import PROVEN_GAP, Answer, Certificate
from shardwise.search.answer import certificate_of, search
from shardwise.search.bnb.incumbent import Fastest
from shardwise.search.clock import SearchClock
from shardwise.search.question import Question
from shardwise.search.result import result_of
from shardwise.search.targets import degrees_of, parts_within, restricted_to, restricted_with, without_target
from shardwise.strategy import Job, OptionValue, Target, target_of_options


def over_open_options(
    target: Target | None, question: Question, answer: Answer, clock: SearchClock
) -> Answer:
    """The best of `answer`, that of the question's own job, and of the answers with other values of its open
    options, on the devices that `answer` uses. Its certificate has one for each other value. Without a target
    (None: any) the options are the newest Megatron-LM's, without their limits.

    Only step times are compared: for other objectives, and where a frontier or every candidate is requested,
    the answer stays as it is.
    """
    is_plain = question.objective == "time" and not (question.frontier or question.exhaustive)
    if not is_plain or answer.best.fields is None or not _open_options(question):
        return answer
    used = replace(question, cluster=answer.cluster or question.cluster, use_all=True)
    used = without_target(used) if target is None else used
    best, best_job, others = answer, question.job, list[Certificate]()
    for job, part in _other_parts(target, used):
        found, counted = _faster(target, part, best.best.step_time_s, clock)
        others += [replace(one, options=_values(target, used, job)) for one in counted]
        if found is not None:
            others.append(replace(best.certificate, options=_values(target, used, best_job)))
            best, best_job = found, job
    return replace(
        answer,
        best=best.best,
        runners_up=best.runners_up,
        certificate=replace(best.certificate, other_options=tuple(others)),
        job=best_job,
        is_interrupted=answer.is_interrupted or clock.is_interrupted,
    )


def _open_options(question: Question) -> tuple[str, ...]:
    """The open options; those that are searched act on experts alone."""
    return () if question.model.experts is None else question.open_options


def _values(target: Target | None, question: Question, job: Job) -> dict[str, str]:
    """The values that the open options of the question have in a job."""
    of, vendors = target or target_of_options(None), question.cluster.vendors.values()
    return {name: of.value_of(name, job, vendors) for name in _open_options(question)}


def _other_parts(target: Target | None, question: Question) -> Iterator[tuple[Job, Question]]:
    """Jobs with another value of one open option, each with the question about the strategies on which it
    acts, in disjoint parts."""
    of = target or target_of_options(None)
    for name, own in _values(target, question, question.job).items():
        for value in of.values_for(name, question.job, question.cluster.vendors.values()):
            if value == own:
                continue
            job = replace(question.job, profile=of.with_options(question.job.profile, {name: value}))
            with_value = replace(question, job=job)
            if target is not None:
                yield from ((job, part) for part in _acting_parts(target, with_value, name, value))
                continue
            for part in _acted_on([with_value], of.options[name][value], degrees_of(question)):
                yield job, part


def _acting_parts(target: Target, question: Question, name: str, value: str) -> Iterator[Question]:
    """The question restricted to strategies on which this value of an option acts, in disjoint parts that are
    within its limits."""
    option = target.options[name][value]
    without = replace(target, options={})
    applied = target.for_job(question.model, question.job)
    known = without.for_job(question.model, question.job).limits
    degrees = degrees_of(question)
    parts = _acted_on([restricted_to(target, question)], option, degrees)
    for limit in applied.limits:
        if limit.level is None and limit not in known:
            spaces = list(limit.allowed_subspaces(degrees, question.model.layers))
            parts = [
                part for one in parts for axes in spaces if (part := restricted_with(one, axes)) is not None
            ]
    yield from (part for part in parts if any(part.candidates().degrees()))


def _acted_on(parts: list[Question], option: OptionValue, degrees: tuple[int, ...]) -> list[Question]:
    """The parts restricted to strategies on which a value of an option acts."""
    for condition in option.acts_on:
        axes = condition.inside(degrees)
        parts = [part for one in parts if (part := restricted_with(one, axes)) is not None]
    return [part for part in parts if any(part.candidates().degrees())]


def _faster(
    target: Target | None, question: Question, below_s: float, clock: SearchClock
) -> tuple[Answer | None, list[Certificate]]:
    """The best strategy of the question that the target runs, if it takes less than `below_s`; and the
    certificates of searches that found nothing."""
    problem = question.problem()
    goal = Fastest(question.top + 1, below_s=below_s * (1.0 - PROVEN_GAP))
    outcome = search(question, problem, goal, clock=clock)
    if not outcome.found:
        return None, [certificate_of(question, outcome, below_s)]
    strategy = outcome.found[0].table[0]
    sized = None if target is None else target.for_job(question.model, question.job)
    if sized is not None and sized.broken_limit(strategy) is not None:
        best, counted = None, list[Certificate]()
        for part in parts_within(sized, question, strategy):
            found, more = _faster(target, part, below_s if best is None else best.best.step_time_s, clock)
            counted += more
            if found is not None:
                counted += [] if best is None else [best.certificate]
                best = found
        return best, counted
    results = [result_of(problem, one.table[0]) for one in outcome.found]
    within = takewhile(lambda one: sized is None or sized.broken_limit(one.strategy) is None, results[1:])
    certificate = certificate_of(question, outcome, results[0].step_time_s)
    return Answer(best=results[0], runners_up=tuple(within), certificate=certificate), []
