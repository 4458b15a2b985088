"""Uneven plans worth moving to: the best on nodes as they are, or on so many as the cluster has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from shardwise.cluster import Cluster, Node, NodeState, Tier, cluster_of_nodes, node_runs
from shardwise.replan.choices import in_groups
from shardwise.replan.situation import Situation
from shardwise.replan.uneven import UnevenArrangement, UnevenStepTimes
from shardwise.search import UNEVEN_GAP, Question, UnevenSearchResult, best_uneven

DIGITS = 4
"""Numbers of nodes that are searched have so many steps between a power of two and the next."""

Alike = tuple[tuple[tuple[Node, int], ...], tuple[Tier, ...]]
"""What makes two parts of a cluster the same: their nodes but for names, and their tiers."""


class UnevenPlanSource(Protocol):
    """Where uneven plans to move to come from."""

    def on(self, situation: Situation, rows: int, cutoff_s: float) -> Iterator[UnevenArrangement]:
        """Plans on nodes that are there, with up to `rows` replicas in a stage; those that take `cutoff_s` or
        more may be left out."""


class PlansPerDecision:
    """The best plan on all nodes that are there, as they are: a search for each decision."""

    def __init__(self, steps: UnevenStepTimes) -> None:
        self._steps = steps

    def on(self, situation: Situation, rows: int, cutoff_s: float) -> Iterator[UnevenArrangement]:
        """The one that takes less than `cutoff_s`, to within the gap that a search is allowed; none where
        there is none, or none is looked for."""
        names = tuple(situation.states)
        cluster = self._steps.present(names, situation)
        if cluster is None:
            return
        found = best_uneven(_question(self._steps, cluster, rows), cutoff_s)
        if found.result is not None:
            yield self._steps.without_idle_nodes(UnevenArrangement(result=found.result, nodes=names))


class PlansBySize:
    """The best plans on so many nodes of each pool as the cluster has them, each searched once, laid on the
    best of the nodes that are there: for decisions by the thousand."""

    def __init__(self, steps: UnevenStepTimes) -> None:
        self._steps = steps
        self._found: dict[tuple[Alike, int], UnevenSearchResult] = {}

    def on(self, situation: Situation, rows: int, cutoff_s: float) -> Iterator[UnevenArrangement]:
        """On all nodes, and on those that nothing slows; where their nodes are not as the cluster has them,
        with the shares, and with the layers too, by which they end soonest."""
        for names in self._sets(situation):
            result = self.found(names, rows).result
            if result is None:
                continue
            arrangement = self._steps.without_idle_nodes(UnevenArrangement(result=result, nodes=names))
            if all(is_nominal(situation.states[name]) for name in arrangement.nodes):
                yield arrangement
                continue
            for one in (
                self._steps.with_best_shares(arrangement, situation),
                self._steps.with_best_layers(arrangement, situation),
            ):
                if one is not None:
                    yield one

    def found(self, names: tuple[str, ...], rows: int) -> UnevenSearchResult:
        """What the search finds on these nodes, in the order of the cluster, as the cluster has them."""
        prices = self._steps.prices
        part = cluster_of_nodes(prices.cluster, [int(name[1:]) for name in names])
        alike = tuple(node_runs(tuple(replace(node, name="") for node in part.nodes))), part.tiers
        if (alike, rows) not in self._found:
            question = _question(self._steps, part, rows)
            self._found[alike, rows] = best_uneven(question, gap=UNEVEN_GAP)
        return self._found[alike, rows]

    def _sets(self, situation: Situation) -> Iterator[tuple[str, ...]]:
        states = situation.states
        whole = [name for name, state in states.items() if is_nominal(state)]
        chosen = [self._rounded(some, situation) for some in (list(states), whole) if some]
        yield from dict.fromkeys(chosen)

    def _rounded(self, names: Sequence[str], situation: Situation) -> tuple[str, ...]:
        """So many of each pool that there are few numbers of them, the best first."""
        by_pool: dict[int, list[str]] = {}
        for name in names:
            by_pool.setdefault(situation.states[name].pool, []).append(name)
        selected: list[str] = []
        for pool in sorted(by_pool):
            ordered = in_groups(by_pool[pool], situation, lambda name: _sort_key(name, situation))
            selected += ordered[: rounded(len(ordered))]
        return tuple(sorted(selected, key=lambda name: int(name[1:])))


def is_nominal(state: NodeState) -> bool:
    """Whether nothing slows the node."""
    return state == NodeState(pool=state.pool)


def _sort_key(name: str, situation: Situation) -> tuple[float, ...]:
    state = situation.states[name]
    return -state.speed, -state.network, int(name[1:])


def rounded(count: int) -> int:
    """The largest number up to `count` that is searched: of 8 and more every second, of 16 every fourth, and
    so on."""
    step = max((1 << count.bit_length()) // (2 * DIGITS), 1)
    return count // step * step


def _question(steps: UnevenStepTimes, cluster: Cluster, rows: int) -> Question:
    prices = steps.prices
    return Question(model=prices.model, cluster=cluster, job=prices.job, stage_dp=rows)
