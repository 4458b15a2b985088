"""Exact curves of step time against memory over the strategies of a transformer, on parts of a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, inf
from typing import Any

from shardwise.cluster import Cluster
from shardwise.cost import Problem
from shardwise.errors import Infeasible
from shardwise.plans import Answer, Idle, Value, usd_per_step
from shardwise.search.answer import certificate_of, frontier_points, search
from shardwise.search.bnb.incumbent import Fastest, Smallest, Tradeoff
from shardwise.search.bnb.solver import Progress, SearchResult
from shardwise.search.curve_parts import PartChoice
from shardwise.search.curves import Curve, Point, Reference
from shardwise.search.infeasibility import infeasible
from shardwise.search.question import Question
from shardwise.search.result import EVALUATOR, result_of
from shardwise.strategy import Strategy
from shardwise.ties import ROUNDING

REFERENCE_FIELDS: Mapping[str, Mapping[str, Value]] = {
    "data parallel": {"tp": 1, "pp": 1, "zero_stage": 0},
    "Megatron": {"zero_stage": 0},
}
"""Fixed fields of the baseline strategies of the space core. Megatron's are tensor, pipeline and data
parallelism without sharding (Narayanan et al. 2021, arXiv 2104.04473)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyCurve(Curve[Strategy]):
    """A curve with the question that it answers on its part of the cluster, and the outcome of the search."""

    question: Question
    outcome: SearchResult


class StrategyCurves:
    """Returns the exact Pareto frontier of time and memory over the space of `question`, on any part of its
    cluster. It ignores the objective, runners-up, budget and frontier of the question."""

    evaluator = EVALUATOR

    def __init__(self, question: Question) -> None:
        self.choice = PartChoice(question.cluster, question.use_all)
        self._question = replace(question, objective="time", top=0, frontier=False, budget_s=None)

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
        problem = question.problem()
        outcome = search(question, problem, Tradeoff(), progress=progress)
        return StrategyCurve(
            part=part,
            points=_points(question, problem, outcome),
            epsilon=0.0,
            search_s=outcome.search_s,
            search_cpu_s=outcome.search_cpu_s,
            question=question,
            outcome=outcome,
        )

    def references(self, part: Cluster) -> tuple[Reference[Strategy], ...]:
        """The fastest strategy of each baseline that fits; if none fits, the one of least memory."""
        if part.devices == 1:
            return ()
        question = replace(self._question_for(part), space="core", axes={}, exhaustive=False)
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
        question = self._question_for(curve.part)
        return next(iter(_smallest(question, question.problem())), None)

    def _question_for(self, part: Cluster) -> Question:
        return replace(self._question, cluster=part)


def _references(name: str, question: Question) -> Iterator[Reference[Strategy]]:
    """The reference of one baseline; none if none of its strategies is legal."""
    problem = question.problem()
    outcome = search(question, problem, Fastest(1))
    fits = bool(outcome.found)
    points = _points(question, problem, outcome) if fits else _smallest(question, problem)
    yield from (Reference(name=name, point=point, fits=fits) for point in points)


def _smallest(question: Question, problem: Problem) -> tuple[Point[Strategy], ...]:
    """The legal strategy of least memory, whether it fits or not; none if none is legal."""
    boundless = replace(problem, capacity_bytes=inf)
    outcome = search(replace(question, exhaustive=False), boundless, Smallest())
    return _points(question, boundless, outcome)


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
        for found in (frontier_points(problem, outcome) if outcome.found else ())
    )


def answer_at(curve: StrategyCurve, place: int) -> tuple[Question, Answer]:
    """The point at index `place` of a curve as the answer to its own question: the fastest strategy within a
    memory limit, which is expressed by the memory margin.

    `cut_by_bound` in the certificate counts the candidates that are dominated by a point of the curve.
    """
    point, question = curve.points[place], curve.question
    if place:
        larger = curve.points[place - 1].memory_bytes
        margin = margin_between(point.memory_bytes, larger, question.problem().capacity_bytes)
        question = replace(question, job=replace(question.job, memory_margin=margin))
    outcome = replace(curve.outcome, lower_bound_s=point.time_s)
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
