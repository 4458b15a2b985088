"""Which part of the cluster to use: objectives for which devices may stay idle (docs/space.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from shardwise.cluster import part_of, part_sizes
from shardwise.errors import ConfigError, Infeasible
from shardwise.plan import Part, usd_per_step
from shardwise.search.clock import Clock
from shardwise.search.drive import Outcome
from shardwise.search.goals import Fastest, Goal
from shardwise.search.question import Question
from shardwise.units import format_seconds

SearchFor = Callable[[Question, Goal], Outcome]


@dataclass(frozen=True, slots=True)
class Searched:
    """The question on the cluster that is used, its outcome, and the parts of the cluster that were
    compared."""

    question: Question
    outcome: Outcome
    parts: tuple[Part, ...] = ()


def best_part(question: Question, clock: Clock, search_for: SearchFor) -> Searched:
    """The part of the cluster on which the objective is best, searched for runners-up too.

    `devices`: the smallest part on which something fits. `cost`: the least time x price of the part's nodes;
    of equals the smallest. `time`: the least time; of equals the largest. Raises ConfigError for costs
    without prices, Infeasible where time is over before anything was found.
    """
    if question.objective == "memory":
        raise ConfigError("does not go with the objective memory", key="allow_idle", allowed="objective time")
    if question.objective == "cost" and question.cluster.price_usd_per_hour is None:
        raise ConfigError(
            "needs the price of every node", key="objective", found="cost",
            allowed="a cluster file with `price: 25USD/h` for each entry of `nodes`",
        )  # fmt: skip
    comparison = _Comparison(question, clock, search_for)
    comparison.run()
    return comparison.searched()


class _Comparison:
    """The parts, one after another; each only has to beat the best before it."""

    def __init__(self, question: Question, clock: Clock, search_for: SearchFor) -> None:
        self._question, self._clock, self._search_for = question, clock, search_for
        self._parts: list[Part] = []
        self._best: tuple[Question, Outcome] | None = None
        self._last: tuple[Question, Outcome] | None = None

    def run(self) -> None:
        sizes = part_sizes(self._question.cluster)
        for devices in reversed(sizes) if self._question.objective == "time" else sizes:
            asked = replace(self._question, cluster=part_of(self._question.cluster, devices))
            if self._clock.is_interrupted or (self._clock.is_over and self._parts):
                self._add(asked, None)
                continue
            outcome = self._search_for(asked, self._goal(asked))
            self._add(asked, outcome)
            if outcome.found:
                self._best = asked, outcome
                if self._question.objective == "devices":
                    return

    def searched(self) -> Searched:
        """The outcome on the best part, with runners-up where there is time for them."""
        if self._best is None:
            return self._without_answer()
        asked, outcome = self._best
        if self._question.objective != "devices" and not self._clock.is_over:
            again = self._search_for(asked, Fastest(asked.top + 1))
            outcome = again if again.found else outcome
        return Searched(asked, outcome, tuple(self._parts))

    def _without_answer(self) -> Searched:
        if self._clock.is_interrupted:
            raise KeyboardInterrupt
        unfinished = sum(not part.is_complete for part in self._parts)
        if unfinished or self._last is None:
            raise Infeasible(
                f"nothing that fits was found within the budget of "
                f"{format_seconds(self._question.budget_s or 0.0)}; {unfinished} of {len(self._parts)} "
                "parts of the cluster are unexplored",
                reasons={},
            )
        # All of them are without an answer: the whole cluster says why.
        return Searched(*self._last, tuple(self._parts))

    def _goal(self, asked: Question) -> Fastest:
        """The fastest, if it beats the best before it."""
        if self._question.objective == "devices":
            return Fastest(asked.top + 1)
        goal = Fastest(1)
        if self._best is not None:
            question, outcome = self._best
            goal.threshold_s = outcome.found[0].time_s * _usd(question) / _usd(asked)
        return goal

    def _add(self, asked: Question, outcome: Outcome | None) -> None:
        cluster = asked.cluster
        best_s = outcome.found[0].time_s if outcome is not None and outcome.found else None
        if outcome is not None and cluster.devices == self._question.cluster.devices:
            self._last = asked, outcome
        self._parts.append(
            Part(
                devices=cluster.devices,
                nodes=len(cluster.nodes),
                step_time_s=best_s,
                usd_per_step=None if best_s is None else usd_per_step(cluster, best_s),
                is_complete=outcome is not None and outcome.unexplored == 0,
            )
        )


def _usd(question: Question) -> float:
    """What an hour costs, where cost is the objective; else every part is worth the same."""
    price = question.cluster.price_usd_per_hour
    return price if question.objective == "cost" and price else 1.0
