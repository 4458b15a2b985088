"""Uniform strategies on a mixed cluster: on each union of its pools, at the pace of the slowest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from shardwise.cluster import Cluster, Pool, cluster_of_pools, pools_of
from shardwise.plan import Answer, MixedFigures, Part, usd_per_step
from shardwise.search.answer import answered, plan, search
from shardwise.search.clock import Clock
from shardwise.search.drive import Outcome, Progress
from shardwise.search.evaluate import step_times_s
from shardwise.search.goals import Fastest
from shardwise.search.parts import Searched
from shardwise.search.question import Question
from shardwise.strategy import StrategyTable, complete

MOST_POOLS = 4
"""Pools of a cluster that is planned pool by pool, at most: 15 unions of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """The union of whole pools with the best uniform step time, as it was searched (None where nothing was
    found); and the least that one pool alone takes. `parts` are all unions."""

    best: Searched | None
    union: tuple[Pool, ...]
    fastest_alone_s: float | None
    fastest_alone: str | None
    parts: tuple[Part, ...]


def is_mixed(cluster: Cluster) -> bool:
    """Whether the cluster is planned pool by pool: several pools, not too many, and tiers rather than links
    given one by one."""
    return not cluster.links and 1 < len(pools_of(cluster)) <= MOST_POOLS


def unions_of(pools: tuple[Pool, ...]) -> Iterator[tuple[Pool, ...]]:
    """Every union of pools, single ones first."""
    for size in range(1, len(pools) + 1):
        yield from combinations(pools, size)


def baselines_of(question: Question, clock: Clock, progress: Progress | None = None) -> Baselines:
    """The best uniform strategies of the question's space on the unions of pools of its cluster, each of
    which has to beat the ones before it. After an interrupt no further union is searched."""
    cluster = question.cluster
    best: Searched | None = None
    best_s, alone_s = float("inf"), float("inf")
    union, alone = pools_of(cluster), None
    parts: dict[tuple[Pool, ...], Part] = {}
    for pools in _fastest_first(question):
        asked = replace(question, cluster=cluster_of_pools(cluster, pools))
        if clock.is_interrupted:
            parts[pools] = _part(asked, None)
            continue
        goal = Fastest(1)
        goal.threshold_s = alone_s if len(pools) == 1 else best_s
        outcome = search(asked, asked.problem(), goal, clock=clock, progress=progress)
        parts[pools] = _part(asked, outcome)
        if not outcome.found:
            continue
        time_s = outcome.found[0].time_s
        if time_s < best_s:
            best_s, best, union = time_s, Searched(asked, outcome), pools
        if len(pools) == 1 and time_s < alone_s:
            alone_s, alone = time_s, pools[0].name
    return Baselines(
        best=best,
        union=union,
        fastest_alone_s=None if alone is None else alone_s,
        fastest_alone=alone,
        parts=tuple(parts[pools] for pools in unions_of(pools_of(cluster))),
    )


def _fastest_first(question: Question) -> list[tuple[Pool, ...]]:
    """The unions of pools, single ones first, and of these the one whose devices need least for the step,
    each by itself: what it is found to take cuts most of the others."""

    def key(pools: tuple[Pool, ...]) -> tuple[int, float]:
        return len(pools), _alone_s(question, pools) if len(pools) == 1 else 0.0

    return sorted(unions_of(pools_of(question.cluster)), key=key)


def _alone_s(question: Question, pools: tuple[Pool, ...]) -> float:
    """Seconds of a step on one device of the pools, over how many there are: whether it fits is not asked."""
    problem = replace(question, cluster=cluster_of_pools(question.cluster, pools)).problem()
    experts = None if question.model.experts is None else question.model.experts.experts
    plainest = complete(
        {},
        devices=1,
        layers=question.model.layers,
        experts=experts,
        global_batch_size=question.job.global_batch_size,
    )
    time_s = step_times_s(problem, StrategyTable.of([plainest]))[0]
    return float(time_s) / sum(pool.devices for pool in pools)


def _part(asked: Question, outcome: Outcome | None) -> Part:
    """What became of a part of the cluster; None where it was not searched."""
    best_s = outcome.found[0].time_s if outcome is not None and outcome.found else None
    return Part(
        devices=asked.cluster.devices,
        nodes=len(asked.cluster.nodes),
        step_time_s=best_s,
        usd_per_step=None if best_s is None else usd_per_step(asked.cluster, best_s),
        is_complete=outcome is not None and outcome.unexplored == 0,
    )


def plan_mixed(question: Question, *, progress: Progress | None = None, clock: Clock | None = None) -> Answer:
    """The best uniform strategy on any union of the pools of a mixed cluster, with runners-up on the same
    union; what is compared is in its `mixed`. Raises what `plan` raises on the whole cluster where nothing
    fits on any union. A `clock` counts instead of the budget."""
    question.problem()
    clock = clock or Clock(question.budget_s)
    with clock.listening():
        return answer_of(question, baselines_of(question, clock, progress), clock, progress)


def answer_of(question: Question, found: Baselines, clock: Clock, progress: Progress | None) -> Answer:
    """The best of the baselines as an answer, searched again for runners-up where there is time."""
    searched = found.best
    if searched is None:
        return plan(question, progress=progress, clock=clock)
    if not clock.is_interrupted:
        asked = searched.question
        again = search(asked, asked.problem(), Fastest(asked.top + 1), clock=clock, progress=progress)
        searched = Searched(asked, again) if again.found else searched
    answer = answered(searched, clock, progress)
    figures = figures_of(question, found)
    return replace(
        answer,
        mixed=replace(figures, uniform_step_time_s=answer.best.step_time_s),
        parts=found.parts,
    )


def figures_of(question: Question, found: Baselines) -> MixedFigures:
    """What other plans are held against."""
    best = None if found.best is None else found.best.outcome.found[0].time_s
    return MixedFigures(
        uniform_step_time_s=best,
        fastest_class_step_time_s=found.fastest_alone_s,
        fastest_class=found.fastest_alone,
        idle=tuple(pool.name for pool in pools_of(question.cluster) if pool not in found.union),
    )
