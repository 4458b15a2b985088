"""What pinned the optimum: what every change of one field would cost, and what stands in its way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.cost import Problem, peaks_of
from shardwise.plan import Result, Value
from shardwise.search.changes import changes_of
from shardwise.search.evaluate import step_times_s
from shardwise.search.question import Question
from shardwise.strategy import (
    FIELDS,
    HOST_MEMORY,
    MEMORY,
    RULES,
    TARGET_LIMIT,
    Strategy,
    StrategyTable,
    first_broken,
)
from shardwise.ties import first_largest, first_least


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The best strategy with another `value` of a field, other fields changed no more than they must be.

    `reason` is why it cannot be had (a rule's code, `target`, `memory`, `host_memory`), None where it can;
    then it lacks `lacking_bytes` on the device or the host. `slower` is its step time over the best's,
    minus 1; None where a rule forbids it.
    """

    value: Value
    strategy: Strategy
    reason: str | None
    lacking_bytes: float
    slower: float | None
    device_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A field with its value in the best strategy and its alternatives: those that can be had first, by
    time."""

    field: str
    value: Value
    alternatives: tuple[Alternative, ...]

    @property
    def nearest(self) -> Alternative | None:
        """The fastest alternative that can be had."""
        first = self.alternatives[0] if self.alternatives else None
        return first if first is not None and first.reason is None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What stands in the way of a shorter step: `memory`, where some change of one field would be faster and
    does not fit (`lacking` is the one of them that lacks least), else `time`, spent most on
    `largest_part`."""

    resource: str
    free_bytes: float
    usable_bytes: float
    largest_part: str
    largest_part_s: float
    lacking: Alternative | None
    lacking_field: str | None


def axes_of(question: Question, problem: Problem, best: Result) -> tuple[Axis, ...]:
    """Every field of a strategy with its alternatives, one for each other value."""
    return tuple(_axis(question, problem, best, field) for field in FIELDS)


def binding_of(problem: Problem, best: Result, axes: tuple[Axis, ...]) -> Binding:
    """The resource that pinned the best strategy."""
    lacking = [
        (alternative.lacking_bytes, axis.field, alternative)
        for axis in axes
        for alternative in axis.alternatives
        if alternative.reason in (MEMORY, HOST_MEMORY)
        and alternative.slower is not None
        and alternative.slower < 0.0
    ]
    least = lacking[int(first_least([item[0] for item in lacking]))] if lacking else None
    part = list(best.breakdown)[int(first_largest(list(best.breakdown.values())))]
    return Binding(
        resource="time" if least is None else str(least[2].reason),
        free_bytes=problem.usable_bytes - best.peak_memory.device,
        usable_bytes=problem.usable_bytes,
        largest_part=part,
        largest_part_s=best.breakdown[part],
        lacking=None if least is None else least[2],
        lacking_field=None if least is None else least[1],
    )


def _axis(question: Question, problem: Problem, best: Result, field: str) -> Axis:
    found: dict[Value, Alternative] = {}
    changed = list(changes_of(question, best.strategy, field))
    for alternative in _evaluated(question, problem, best, field, changed) if changed else []:
        known = found.get(alternative.value)
        if known is None or _rank(alternative) < _rank(known):
            found[alternative.value] = alternative
    return Axis(
        field=field,
        value=getattr(best.strategy, field),
        alternatives=tuple(sorted(found.values(), key=_rank)),
    )


def _rank(alternative: Alternative) -> tuple[int, float]:
    """What can be had before what does not fit (by what is lacking) before what is illegal."""
    if alternative.reason is None:
        return 0, alternative.slower or 0.0
    return (2, 0.0) if alternative.slower is None else (1, alternative.lacking_bytes)


def _evaluated(
    question: Question, problem: Problem, best: Result, field: str, changed: list[Strategy]
) -> list[Alternative]:
    table = StrategyTable.of(changed)
    broken = first_broken(table, problem.limits, RULES)
    excluded = np.zeros(len(table), dtype=bool)
    for limit in question.limits:
        excluded |= limit.excluded(table)
    evaluated = [
        Alternative(
            value=getattr(changed[row], field), strategy=changed[row],
            reason=RULES[broken[row]].code if broken[row] >= 0 else TARGET_LIMIT,
            lacking_bytes=0.0, slower=None, device_bytes=None,
        )
        for row in np.flatnonzero((broken >= 0) | excluded).tolist()
    ]  # fmt: skip
    legal = np.flatnonzero((broken < 0) & ~excluded)
    if not len(legal):
        return evaluated
    bounds, times_s = peaks_of(problem, table.take(legal)), step_times_s(problem, table.take(legal))
    for place, row in enumerate(legal.tolist()):
        device_bytes = float(bounds.device_bytes[place])
        device_lacks = device_bytes - problem.usable_bytes
        host_lacks = float(bounds.host_bytes[place]) - problem.host_bytes_per_device
        reason = MEMORY if device_lacks > 0.0 else HOST_MEMORY if host_lacks > 0.0 else None
        evaluated.append(
            Alternative(
                value=getattr(changed[row], field), strategy=changed[row], reason=reason,
                lacking_bytes=max(device_lacks if reason == MEMORY else host_lacks, 0.0),
                slower=float(times_s[place]) / best.step_time_s - 1.0, device_bytes=device_bytes,
            )
        )  # fmt: skip
    return evaluated
