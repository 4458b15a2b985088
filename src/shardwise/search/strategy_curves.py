"""Exact curves of step time against memory over the strategies of a transformer, on parts of a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, inf
from typing import Any

import numpy as np

from shardwise.cluster import Cluster
from shardwise.cost import Problem
from shardwise.errors import Infeasible
from shardwise.pareto import non_dominated
from shardwise.plans import Answer, Idle, Value, usd_per_step
from shardwise.search.answer import certificate_of, frontier_points, joined, search
from shardwise.search.bnb.incumbent import Fastest, Smallest, Tradeoff
from shardwise.search.bnb.solver import Progress, SearchResult
from shardwise.search.curve_parts import PartChoice
from shardwise.search.curves import Curve, Point, Reference, smallest
from shardwise.search.infeasibility import infeasible
from shardwise.search.question import Question
from shardwise.search.result import EVALUATOR, result_of
from shardwise.search.targets import restricted_to, searches_within, without_target
from shardwise.strategy import Strategy, Target
from shardwise.ties import ROUNDING

REFERENCE_FIELDS: Mapping[str, Mapping[str, Value]] = {
    "data parallel": {"tp": 1, "pp": 1, "zero_stage": 0},
    "Megatron": {"zero_stage": 1},
}
"""Fixed fields of the baseline strategies of the space core. Megatron's are tensor, pipeline and data
parallelism (Narayanan et al. 2021, arXiv 2104.04473) with Megatron-LM's distributed optimizer, ZeRO-1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyCurve(Curve[Strategy]):
    """A curve with the `question` that it answers on its part of the cluster, and the `outcome` of its
    searches together. `origins` has the question about a subspace, and its search, that each point is from:
    there is more than one where a target has limits that the search does not check itself."""

    question: Question
    outcome: SearchResult
    origins: tuple[tuple[Question, SearchResult], ...]


class StrategyCurves:
    """Returns the exact Pareto frontier of time and memory over the strategies of the space of `question`
    that `target` (None: any) runs, on any part of its cluster. It ignores the objective, runners-up, budget
    and frontier of the question."""

    evaluator = EVALUATOR

    def __init__(self, question: Question, target: Target | None = None) -> None:
        self.choice = PartChoice(question.cluster, question.use_all)
        self._question = replace(question, objective="time", top=0, frontier=False, budget_s=None)
        self._target = None if target is None else target.for_job(question.model, question.job)

    @property
    def cluster(self) -> Cluster:
        return self._question.cluster

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.choice.sizes

    def idle_of(self, part: Cluster) -> Idle:
        return self.choice.idle_of(part)

    def parts(self, devices: int | None) -> tuple[Cluster, ...]:
        return self.choice.unions if devices is None else self.choice.of(devices)

    def require(self, sizes: Sequence[int] | None) -> None:
        for size in sizes or ():
            self.choice.of(size)

    def curve(
        self, part: Cluster, *, epsilon: float = 0.0, progress: Progress | None = None
    ) -> StrategyCurve:
        """The exact frontier on a part, whatever `epsilon` is."""
        question = self._question_for(part)

        def tradeoff(of: Question) -> SearchResult:
            return search(of, of.problem(), Tradeoff(), progress=progress)

        searches = searches_within(self._target, question, tradeoff)
        outcome = joined([found for _, found in searches])
        found = [(point, one) for one in searches for point in _points(question, question.problem(), one[1])]
        places = range(len(found))
        if len(searches) > 1 and found:
            figures = np.array([(point.time_s, point.memory_bytes) for point, _ in found])
            places = non_dominated(figures).tolist()
        return StrategyCurve(
            part=part,
            points=tuple(found[place][0] for place in places),
            epsilon=0.0,
            search_s=outcome.search_s,
            search_cpu_s=outcome.search_cpu_s,
            question=question,
            outcome=outcome,
            origins=tuple(found[place][1] for place in places),
        )

    def references(self, part: Cluster) -> tuple[Reference[Strategy], ...]:
        """The fastest strategy of each baseline that fits; if none fits, the one of least memory."""
        if part.devices == 1:
            return ()
        question = replace(self._question, cluster=part, space="core", axes={}, exhaustive=False)
        return tuple(
            reference
            for name, fixed in REFERENCE_FIELDS.items()
            for reference in _references(name, replace(question, fixed=fixed))
        )

    def nothing_fits(self, curve: Curve[Any]) -> Infeasible:
        question = self._question_for(curve.part)
        problem = question.problem()
        outcome = search(question, problem, Fastest(1))
        return infeasible(question, problem, outcome, search)

    def closest(self, curve: Curve[Any]) -> Point[Strategy] | None:
        searches = searches_within(self._target, self._question_for(curve.part), _smallest)
        points = [point for one, outcome in searches for point in _points(one, one.problem(), outcome)]
        return smallest(points) if points else None

    def _question_for(self, part: Cluster) -> Question:
        question = replace(self._question, cluster=part)
        return without_target(question) if self._target is None else restricted_to(self._target, question)


def _references(name: str, question: Question) -> Iterator[Reference[Strategy]]:
    """The reference of one baseline; none if none of its strategies is legal."""
    problem = question.problem()
    outcome = search(question, problem, Fastest(1))
    fits = bool(outcome.found)
    points = _points(question, problem, outcome if fits else _smallest(question))
    yield from (Reference(name=name, point=point, fits=fits) for point in points)


def _smallest(question: Question) -> SearchResult:
    """The search for the legal strategy of least memory, whether it fits or not."""
    boundless = replace(question.problem(), capacity_bytes=inf)
    return search(replace(question, exhaustive=False), boundless, Smallest())


def _points(question: Question, problem: Problem, outcome: SearchResult) -> tuple[Point[Strategy], ...]:
    """The points of a search."""
    return tuple(
        Point(
            time_s=found.step_time_s,
            memory_bytes=found.device_bytes,
            cost_usd=usd_per_step(question.cluster, found.step_time_s),
            part=question.cluster,
            layout=found.strategy,
        )
        for found in frontier_points(problem, outcome)
    )


def answer_at(curve: StrategyCurve, place: int) -> tuple[Question, Answer]:
    """The point at index `place` of a curve as the answer to its own question: the fastest strategy within a
    memory limit, which is expressed by the memory margin.

    `cut_by_bound` in the certificate counts the candidates that are dominated by a point of the curve.
    """
    point, (question, outcome) = curve.points[place], curve.origins[place]
    if place:
        larger = curve.points[place - 1].memory_bytes
        margin = margin_between(point.memory_bytes, larger, question.problem().capacity_bytes)
        question = replace(question, job=replace(question.job, memory_margin=margin))
    outcome = replace(outcome, lower_bound_s=point.time_s)
    certificate = certificate_of(question, outcome, point.time_s)
    best = result_of(question.problem(), point.layout, point.time_s)
    return question, Answer(best=best, runners_up=(), certificate=certificate, cluster=question.cluster)


def margin_between(nbytes: float, larger: float, capacity_bytes: float) -> float:
    """The margin with the fewest digits, at least two, with which `nbytes` fits and `larger` does not."""
    highest = 1.0 - nbytes * (1.0 + ROUNDING) / capacity_bytes
    lowest = 1.0 - larger * (1.0 - ROUNDING) / capacity_bytes
    for digits in range(2, 13):
        margin = floor(highest * 10.0**digits) / 10.0**digits
        if margin > lowest:
            return margin
    return 1.0 - (nbytes + larger) / 2.0 / capacity_bytes
