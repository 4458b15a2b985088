"""The explanation of a plan: `explained`.

Each alternative to a value of a field is the best plan with another value, found as `why_not` finds it. What
binds is seen from what more of each resource brings, found as `what_if` finds it. All searches share one
budget.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, isclose

from shardwise.errors import ConfigError, Infeasible
from shardwise.plans import Plan, Value
from shardwise.search.answer import goal_of, search
from shardwise.search.bnb.ledger import ledger_entries, ledger_totals
from shardwise.search.bnb.solver import Progress
from shardwise.search.clock import SearchClock
from shardwise.search.explanation import (
    Alternative,
    Axis,
    Explanation,
    PlanComparison,
    Relaxation,
    axes_of,
    binding_of,
    question_of,
    rank,
    what_if,
    why_not,
)
from shardwise.search.infeasibility import host_memory
from shardwise.ties import TIE

MAIN_FIELDS = (
    "tp", "pp", "cp", "dp", "ep", "micro_batch_size", "schedule", "recompute", "offload", "sequence_parallel",
)  # fmt: skip
"""The fields whose other values are searched unless every value is: choices that people ask about."""

HOST = "host memory"

RESOURCES = {
    "device memory": "memory=1.1x",
    HOST: "host_memory=1.1x",
    "computation": "flops=1.1x",
    "links inside nodes": "intra_node_bandwidth=1.1x",
    "links between nodes": "inter_node_bandwidth=1.1x",
}
"""Resources of which a step may need more, with 10 % more of each as `what_if` reads it."""

MORE = 1.1
"""The factor by which each resource is relaxed."""

MOST_BATCH = 2
"""Largest factor of the batch that is tried."""


def explained(
    of: Plan,
    *,
    every_value: bool = False,
    workers: int = 1,
    budget_s: float | None = None,
    progress: Progress | None = None,
) -> Explanation:
    """The outcomes of the candidates of the plan, the best plan with other values of MAIN_FIELDS, those next
    to the plan's (`every_value`: all values of all fields), and what more of each resource brings."""
    question = question_of(of, workers=workers, budget_s=budget_s)
    problem = question.problem()
    further = _FurtherSearches(of, workers, budget_s, progress)
    with SearchClock(budget_s).handling_interrupts() as clock:
        outcome = search(question, problem, goal_of(question), clock=clock, progress=progress)
    further.is_interrupted = outcome.is_interrupted
    alone = axes_of(question, problem, of.best)
    agrees = bool(outcome.found) and isclose(outcome.found[0].time_s, of.optimum_s, rel_tol=TIE)
    relaxed = further.relaxed(agrees) if of.objective == "time" else ()
    axes = tuple(further.searched(axis, every_value=every_value) for axis in alone)
    return Explanation(
        best=of.best,
        entries=ledger_entries(outcome.ledger),
        totals=ledger_totals(outcome.ledger),
        unexplored=outcome.unexplored,
        is_interrupted=further.is_interrupted,
        agrees=agrees,
        axes=axes,
        binding=binding_of(problem, of.best, alone),
        relaxed=relaxed,
        unsearched=further.unsearched,
    )


@dataclass(slots=True)
class _FurtherSearches:
    """Searches of changed questions of a plan, until the budget of `budget_s` seconds is spent or the user
    interrupts; `unsearched` counts those that were left out."""

    of: Plan
    workers: int
    budget_s: float | None
    progress: Progress | None
    is_interrupted: bool = False
    unsearched: int = 0
    began_s: float = field(default_factory=time.perf_counter)

    def searched(self, axis: Axis, *, every_value: bool) -> Axis:
        """The axis with the best plans with its other values. Values that are not searched are left out."""
        found = [self._alternative(axis.field, alone) for alone in _tried(axis, every_value=every_value)]
        alternatives = [one for one in found if one is not None]
        return replace(axis, alternatives=tuple(sorted(alternatives, key=rank)))

    def relaxed(self, agrees: bool) -> tuple[Relaxation, ...]:
        """What more of each resource brings to the optimum, most first. If it `agrees`, the optimum of the
        plan is that of its question on the devices that it uses."""
        fastest = replace(self.of, question=replace(self.of.question, tolerance=0.0))
        batch, optimum_s = self.of.job.global_batch_size, self.of.optimum_s
        if not agrees or self.of.question.cluster is not None:
            base = self._what_if(fastest, f"global_batch_size={batch}")
            if base is None:
                return ()
            optimum_s = base.after.step_time_s
        found = []
        for resource, change in self._resources():
            compared = self._what_if(fastest, change)
            if compared is not None:
                time_s, rows = compared.after.step_time_s, compared.question.job.global_batch_size
                gain = 1.0 - time_s / rows * batch / optimum_s
                found.append(Relaxation(resource=resource, change=change, step_time_s=time_s, gain=gain))
        return tuple(sorted(found, key=lambda one: -one.gain))

    def _resources(self) -> Iterator[tuple[str, str]]:
        """Each resource, and more of it: the next larger batch is one that the degrees of the plan divide."""
        of = self.of
        uses_host = host_memory(of.model, of.cluster, of.job, of.strategy)[0] > 0.0
        yield from ((name, change) for name, change in RESOURCES.items() if uses_host or name != HOST)
        strategy, batch = of.strategy, of.job.global_batch_size
        unit = strategy.dp * strategy.micro_batch_size * strategy.pp
        larger = unit * ceil(MORE * batch / unit)
        if larger <= MOST_BATCH * batch:
            yield "batch", f"global_batch_size={larger}"

    def _alternative(self, name: str, alone: Alternative) -> Alternative | None:
        """The best plan with a value of the field, else the reason of the change `alone`; None if time was
        over before it was found."""
        try:
            compared = self._why_not({name: alone.value})
        except (ConfigError, Infeasible):
            return alone if alone.reason is not None else None
        if compared is None or compared.after.fields is None:
            return None
        after = compared.after
        return Alternative(
            value=alone.value,
            strategy=compared.after.strategy,
            reason=None,
            lacking_bytes=0.0,
            slower=after.step_time_s / self.of.step_time_s - 1.0,
            device_bytes=after.peak_memory.device,
            fits_probability=after.fits_probability,
        )

    def _why_not(self, pinned: Mapping[str, Value]) -> PlanComparison | None:
        return self._in_time(
            lambda budget_s: why_not(
                self.of, pinned, workers=self.workers, budget_s=budget_s, progress=self.progress
            )
        )

    def _what_if(self, of: Plan, change: str) -> PlanComparison | None:
        """None also where the cluster lacks the resource, and where nothing fits then."""
        try:
            return self._in_time(
                lambda budget_s: what_if(
                    of, change, workers=self.workers, budget_s=budget_s, progress=self.progress
                )
            )
        except (ConfigError, Infeasible):
            return None

    def _in_time(self, ask: Callable[[float | None], PlanComparison]) -> PlanComparison | None:
        """The answer of `ask`, a search and that of the recommended plan, each within half of the time that
        is left; None where that is too little."""
        began_s = time.perf_counter()
        left_s = None if self.budget_s is None else self.budget_s - (began_s - self.began_s)
        if self.is_interrupted or (left_s is not None and left_s <= 0.0):
            self.unsearched += 1
            return None
        each_s = None if left_s is None else left_s / 2.0
        try:
            compared = ask(each_s)
        except KeyboardInterrupt:
            self.is_interrupted = True
        except Infeasible:
            if each_s is None or time.perf_counter() - began_s < each_s:
                raise
        else:
            answer = compared.answer
            self.is_interrupted = answer.is_interrupted
            if not (answer.is_interrupted or answer.certificate.unexplored or answer.unexplored_parts):
                return compared
        self.unsearched += 1
        return None


def _tried(axis: Axis, *, every_value: bool) -> list[Alternative]:
    """The changes of a field whose values are searched: of numbers those next to the plan's."""
    alone = axis.alternatives
    if every_value:
        return list(alone)
    if axis.field not in MAIN_FIELDS:
        return []
    if isinstance(axis.value, int) and not isinstance(axis.value, bool):
        by_value = {int(one.value): one for one in alone}
        below = [value for value in by_value if value < axis.value]
        above = [value for value in by_value if value > axis.value]
        return [by_value[value] for value in (*sorted(below)[-1:], *sorted(above)[:1])]
    return list(alone)
