"""The recommended strategy: of those within a tolerance of the optimum, the one that is preferred.

Preferences are tried in order: no offload, a named ZeRO stage, no context parallelism, even stages, at least
0.9 likely to fit, fewer of tp, cp, pp, vpp and ep above 1. Each restricts the space further if the best of
what is left stays within the tolerance; else it is dropped. The recommended strategy is the fastest of what
is left, so the tolerance is spent only where a preference asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

from shardwise.cost import peaks_of
from shardwise.plans import Answer, Optimum, Value
from shardwise.search.answer import search
from shardwise.search.bnb.incumbent import PRUNE_FACTOR, Fastest
from shardwise.search.clock import SearchClock
from shardwise.search.question import Question
from shardwise.search.result import result_of
from shardwise.search.targets import parts_within, restricted_to, restricted_with
from shardwise.strategy import ALIASES, Strategy, StrategyTable, Target, even_ends, shards_of
from shardwise.ties import first_best

FEWER = ("tp", "cp", "pp", "vpp", "ep")
"""Fields of which as few as possible are above 1."""

Preference = Callable[[Question], Iterator[Question]]
"""Parts of the space of a question that have what is preferred."""

SHARDS = ("param_shard", "grad_shard", "optim_shard", *ALIASES)


@dataclass(frozen=True, slots=True)
class FoundStrategy:
    """A strategy with its step time in seconds, and the question that it was found for."""

    strategy: Strategy
    step_time_s: float
    question: Question


def recommended(
    answer: Answer, question: Question, target: Target | None, tolerance: float, clock: SearchClock
) -> Answer:
    """`answer` with the recommended strategy as its best, and its optimum in `optimum`.

    `answer` is the best of the strategies that `target` runs (None: any). The recommended one is looked for
    on the part of the cluster that the answer uses, and is at most `tolerance` slower. Answers with another
    objective than time and those that are no uniform strategy stay as they are; so does an answer of a search
    that was ended early.
    """
    best = answer.best
    if not tolerance or question.objective != "time" or best.fields is None or clock.is_over:
        return answer
    used = replace(
        question, cluster=answer.cluster or question.cluster, use_all=True, exhaustive=False, top=0
    )
    if target is not None:
        target = target.for_job(question.model, question.job)
        used = restricted_to(target, used)
    preferences = [
        _no_offload, _named_zero_stage, _no_context_parallelism, _even_stages, _likely_to_fit,
    ]  # fmt: skip
    if {*SHARDS} & {*question.fixed, *question.axes}:
        preferences.remove(_named_zero_stage)
    search_of = _Search(target, best.step_time_s * (1.0 + tolerance) * PRUNE_FACTOR, clock)
    found = search_of.preferred(preferences, FoundStrategy(best.fields, best.step_time_s, used))
    if found.strategy == best.fields:
        return answer
    result = result_of(used.problem(), found.strategy)
    others = [one for one in (best, *answer.runners_up) if one.fields != found.strategy]
    return replace(
        answer,
        best=result,
        runners_up=tuple(others[: question.top]),
        optimum=Optimum(
            strategy=best.fields,
            step_time_s=best.step_time_s,
            fits_probability=best.fits_probability,
        ),
    )


@dataclass(frozen=True, slots=True)
class _Search:
    """Searches for strategies that `target` runs and that take less than `below_s`."""

    target: Target | None
    below_s: float
    clock: SearchClock

    def preferred(self, preferences: Sequence[Preference], optimum: FoundStrategy) -> FoundStrategy:
        """The preferred strategy within the tolerance."""
        found = [optimum]
        for preference in preferences:
            found = self._narrowed(found, preference) or found
        return self._fewest_axes(found)

    def _narrowed(self, found: Sequence[FoundStrategy], preference: Preference) -> list[FoundStrategy]:
        """The best of each part of the questions' spaces that the preference leaves, where there is one."""
        parts = [(one, part) for one in found for part in preference(one.question)]
        bests = [
            replace(one, question=part) if _has(part, one.strategy) else self._best(part)
            for one, part in parts
        ]
        return [best for best in bests if best is not None]

    def _fewest_axes(self, found: list[FoundStrategy]) -> FoundStrategy:
        """The fastest strategy of those with the fewest axes above 1."""
        fastest = _fastest(found)
        for count in range(sum(getattr(fastest.strategy, name) > 1 for name in FEWER)):
            fewer = self._narrowed(found, partial(_with_axes, count))
            if fewer:
                return _fastest(fewer)
        return fastest

    def _best(self, question: Question) -> FoundStrategy | None:
        """The fastest strategy of the question that the target runs; None where none takes less than
        `below_s`, or time is over."""
        if self.clock.is_over or not any(question.candidates().degrees()):
            return None
        goal = Fastest(1, below_s=self.below_s)
        outcome = search(question, question.problem(), goal, clock=self.clock)
        if not outcome.found:
            return None
        one = outcome.found[0]
        strategy = one.table[0]
        if self.target is None or self.target.broken_limit(strategy) is None:
            return FoundStrategy(strategy, one.time_s, question)
        parts = map(self._best, parts_within(self.target, question, strategy))
        found = [part for part in parts if part is not None]
        return _fastest(found) if found else None


def _fastest(found: Sequence[FoundStrategy]) -> FoundStrategy:
    return first_best(found, lambda one: (-one.step_time_s,))


def _has(part: Question, strategy: Strategy) -> bool:
    """Whether the best strategy of a question is in this part of it, and so the best of the part."""
    shards = shards_of(part.fixed, strategy.dp * strategy.cp)
    if any(getattr(strategy, name) != degree for name, degree in shards.items()):
        return False
    if not all(getattr(strategy, name) in values for name, values in part.axes.items()):
        return False
    if part.has_even_stages:
        ends = even_ends(part.model.layers, strategy.pp * strategy.vpp)
        if (strategy.first_stage_layers, strategy.last_stage_layers) != ends:
            return False
    problem = part.problem()
    return bool(peaks_of(problem, StrategyTable.of([strategy])).device_bytes[0] <= problem.usable_bytes)


# Preferences: the parts of a question's space that they leave


def _no_offload(question: Question) -> Iterator[Question]:
    yield from _with(question, offload="none")


def _named_zero_stage(question: Question) -> Iterator[Question]:
    """ZeRO-0 to ZeRO-3, over all data-parallel ranks."""
    for stage in range(4):
        yield replace(question, fixed={**question.fixed, "zero_stage": stage})


def _no_context_parallelism(question: Question) -> Iterator[Question]:
    yield from _with(question, cp=1)


def _even_stages(question: Question) -> Iterator[Question]:
    yield replace(question, has_even_stages=True)


def _likely_to_fit(question: Question) -> Iterator[Question]:
    """Strategies whose band of memory ends within the device: a capacity below that of the device."""
    capacity = question.problem().capacity_bytes
    margin = 1.0 - question.job.profile.peak_errors.likely_bytes(capacity) / capacity
    if margin < 1.0:
        margin = max(margin, question.job.memory_margin)
        yield replace(question, job=replace(question.job, memory_margin=margin))


def _with_axes(count: int, question: Question) -> Iterator[Question]:
    """Parts in which `count` of FEWER may be above 1. Parts that are contained in those of fewer axes are
    left out: only a pipeline has virtual stages, and only models with experts distribute them."""
    free = [name for name in FEWER if question.axes.get(name) != (1,)]
    if question.model.experts is None:
        free = [name for name in free if name != "ep"]
    for names in combinations(free, count):
        if "vpp" in names and "pp" not in names:
            continue
        yield from _with(question, **{name: 1 for name in FEWER if name not in names})


def _with(question: Question, **values: Value) -> Iterator[Question]:
    part = restricted_with(question, {name: (value,) for name, value in values.items()})
    if part is not None:
        yield part
