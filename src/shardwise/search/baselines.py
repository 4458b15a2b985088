"""Uniform strategies on a mixed cluster: on each union of its pools, at the pace of the slowest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from shardwise.cluster import Cluster, Pool, cluster_of_pools, pools_of
from shardwise.plan import Answer, MixedFigures, Part, usd_per_step
from shardwise.search.answer import plan, search
from shardwise.search.drive import Outcome, Progress
from shardwise.search.goals import Fastest
from shardwise.search.parts import Clock
from shardwise.search.question import Question

MOST_POOLS = 4
"""Pools of a cluster that is planned pool by pool, at most: 15 unions of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """The best uniform step time over all unions of whole pools, with the union; and the least that one pool
    alone takes. None where nothing fits. `parts` are the unions as they were searched."""

    uniform_s: float | None
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
    """The best uniform strategies of the question's space on the unions of pools of its cluster."""
    cluster = question.cluster
    best_s: float | None = None
    alone_s: float | None = None
    best, alone = pools_of(cluster), None
    parts: list[Part] = []
    for union in unions_of(pools_of(cluster)):
        asked = replace(question, cluster=cluster_of_pools(cluster, union))
        goal = Fastest(1)
        if len(union) > 1 and best_s is not None:
            goal.threshold_s = best_s
        outcome = search(asked, asked.problem(), goal, budget_s=clock.left_s, progress=progress)
        parts.append(_part(asked, outcome))
        if not outcome.found:
            continue
        time_s = outcome.found[0].time_s
        if best_s is None or time_s < best_s:
            best_s, best = time_s, union
        if len(union) == 1 and (alone_s is None or time_s < alone_s):
            alone_s, alone = time_s, union[0].name
    return Baselines(
        uniform_s=best_s,
        union=best,
        fastest_alone_s=alone_s,
        fastest_alone=alone,
        parts=tuple(parts),
    )


def _part(asked: Question, outcome: Outcome) -> Part:
    best_s = outcome.found[0].time_s if outcome.found else None
    return Part(
        devices=asked.cluster.devices,
        nodes=len(asked.cluster.nodes),
        step_time_s=best_s,
        usd_per_step=None if best_s is None else usd_per_step(asked.cluster, best_s),
        is_complete=outcome.unexplored == 0,
    )


def plan_mixed(question: Question, *, progress: Progress | None = None) -> Answer:
    """The best uniform strategy on any union of the pools of a mixed cluster, with runners-up on the same
    union; what is compared is in its `mixed`. Raises what `plan` raises on the whole cluster where nothing
    fits on any union."""
    question.problem()
    clock = Clock(question.budget_s)
    found = baselines_of(question, clock, progress)
    left_s = None if clock.left_s is None else max(clock.left_s, 1e-3)
    used = cluster_of_pools(question.cluster, found.union)
    answer = plan(replace(question, cluster=used, budget_s=left_s), progress=progress)
    idle = tuple(pool.name for pool in pools_of(question.cluster) if pool not in found.union)
    figures = MixedFigures(
        uniform_step_time_s=answer.best.step_time_s,
        fastest_class_step_time_s=found.fastest_alone_s,
        fastest_class=found.fastest_alone,
        idle=idle,
    )
    return replace(answer, mixed=figures, parts=found.parts)
