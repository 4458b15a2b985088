"""Strategies on a set of nodes that one plan for a whole trace may be, and what none on it exceeds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from shardwise.cluster import NodeState, NodeView, uniform_cluster
from shardwise.errors import Infeasible
from shardwise.replan.arrangement import Arrangement, Floats
from shardwise.replan.choices import slot_orders
from shardwise.replan.mixed import AnyArrangement
from shardwise.replan.node_sets import SituationTimes
from shardwise.replan.situation import Situation
from shardwise.replan.steps import StepTimes
from shardwise.replan.within import AllowedSpace
from shardwise.search import BranchAndBound, Fastest, Question, parts_within, restricted_to
from shardwise.strategy import Strategy

STRATEGIES_PER_SEARCH = 16
"""Of every search the best strategies of so many kinds, which differ in a degree, the schedule or
recomputation."""

STATES = 3
"""States of a set of nodes, beside the nominal one, in which it is searched: those that last longest."""

States = tuple[NodeState, ...]
"""The best state that a node of each pool of a set is in."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What may run on nodes, and the steps/s that it makes at most in each situation."""

    arrangement: AnyArrangement
    limits: Floats


@dataclass(frozen=True, slots=True)
class NodeSetCandidates:
    """The candidates on a set of nodes, and the steps/s that none of their kind exceeds in each situation."""

    candidates: tuple[Candidate, ...]
    limits: Floats


@dataclass(frozen=True, slots=True)
class _SearchResult:
    """The seconds of a step that no strategy of a search takes less than, and the best strategies."""

    least_s: float
    strategies: tuple[Strategy, ...]


_NOTHING = _SearchResult(np.inf, ())


def _best(question: Question) -> _SearchResult:
    found = (
        BranchAndBound(question.problem(), question.candidates(), Fastest(STRATEGIES_PER_SEARCH)).run().found
    )
    return _SearchResult(found[0].time_s, tuple(each.table[0] for each in found)) if found else _NOTHING


class TraceSearches:
    """Searches on alike nodes in one state, each made once. A strategy on nodes in several states is no
    faster than on alike nodes in the best of them, pool by pool: every stage takes what its slowest node
    takes."""

    def __init__(self, steps: StepTimes, allowed_space: AllowedSpace) -> None:
        self._steps, self._allowed_space = steps, allowed_space
        view = NodeView(steps.prices.cluster)
        self._pool_of, self._groups = view.pool_of, view.groups
        self._found: dict[tuple[int, NodeState], _SearchResult] = {}

    def on(self, names: tuple[str, ...], situations: SituationTimes) -> NodeSetCandidates:
        """What may run on these nodes, all of them; nothing where nothing fits."""
        size = len(names)
        each = [self._states(names, situation) for situation, _ in situations]
        seconds: dict[NodeState, float] = {}
        for states, (_, duration_s) in zip(each, situations, strict=True):
            for state in states or ():
                seconds[state] = seconds.get(state, 0.0) + duration_s
        nominal = tuple(NodeState(pool=pool) for pool in sorted({self._pool_of[name] for name in names}))
        longest = sorted(seconds, key=lambda state: -seconds[state])[:STATES]
        searched = {state: self._search(size, state) for state in dict.fromkeys((*nominal, *longest))}
        best = {state: found.least_s for state, found in searched.items()}

        def rate(states: States | None) -> float:
            if states is None:
                return 0.0
            return 1.0 / max(best.get(state, best[NodeState(pool=state.pool)]) for state in states)

        strategies = dict.fromkeys(strategy for found in searched.values() for strategy in found.strategies)
        there = np.array([states is not None for states in each], dtype=np.float64)
        return NodeSetCandidates(
            tuple(self._candidates(strategies, names, there)), np.array([rate(states) for states in each])
        )

    def _states(self, names: tuple[str, ...], situation: Situation) -> States | None:
        """The best state of each pool's nodes; None where one of them is gone."""
        runs = situation.states_of(names, self._steps.prices.node_bytes_per_s)
        if runs is None:
            return None
        best: dict[int, NodeState] = {}
        for state, _ in runs:
            other = best.get(state.pool, state)
            best[state.pool] = NodeState(
                pool=state.pool,
                speed=max(state.speed, other.speed),
                network=max(state.network, other.network),
                inside=max(state.inside, other.inside),
                latency_s=min(state.latency_s, other.latency_s),
                inter_site_share=max(state.inter_site_share, other.inter_site_share),
                inter_site_latency_s=min(state.inter_site_latency_s, other.inter_site_latency_s),
                site_tiers=max(state.site_tiers, other.site_tiers),
            )
        return tuple(best[pool] for pool in sorted(best))

    def _search(self, size: int, state: NodeState) -> _SearchResult:
        key = size, state
        if key not in self._found:
            prices = self._steps.prices
            question = Question(
                model=prices.model,
                cluster=uniform_cluster(prices.cluster, prices.pools[state.pool], size, state),
                job=prices.job,
                space=self._allowed_space.space,
                fixed=self._allowed_space.fixed,
                axes=self._allowed_space.axes,
                use_all=True,
            )
            self._found[key] = self._of(question)
        return self._found[key]

    def _of(self, question: Question) -> _SearchResult:
        """The best strategies of `question` that the target carries out; where all of them are beyond one of
        its limits, of the parts that the limit leaves."""
        target = self._allowed_space.target
        if target is None:
            return _best(question)
        target = target.for_job(question.model, question.job)
        try:
            restricted = restricted_to(target, question)
        except Infeasible:
            return _NOTHING
        whole = _best(restricted)
        runnable = tuple(each for each in whole.strategies if target.broken_limit(each) is None)
        if runnable or not whole.strategies:
            return _SearchResult(whole.least_s, runnable)
        parts = [self._of(part) for part in parts_within(target, restricted, whole.strategies[0])]
        return _SearchResult(
            min((part.least_s for part in parts), default=np.inf),
            tuple(strategy for part in parts for strategy in part.strategies),
        )

    def _candidates(
        self, strategies: Iterable[Strategy], names: tuple[str, ...], there: Floats
    ) -> Iterable[Candidate]:
        """Equal shares for all pipelines: that is what a plan file holds."""
        prices = self._steps.prices
        pools = {self._pool_of[name] for name in names}
        for strategy in strategies:
            least_s = self._steps.nominal_s(strategy, pools)
            if least_s is None:
                continue
            shares = (prices.microbatches(strategy) // strategy.dp,) * strategy.dp
            for slots in slot_orders(strategy, names, prices.devices_of(names[0]), self._groups):
                arrangement = Arrangement(strategy=strategy, slots=slots, microbatches=shares)
                yield Candidate(arrangement, there / least_s)
