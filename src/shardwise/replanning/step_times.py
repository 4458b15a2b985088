"""Step times of arrangements in a situation, pipeline by pipeline (`StepTimes`).

A stage takes as long as on its slowest node, and a send as long as its slower end needs. Gathers and
reductions join all pipelines and run at the rate of the slowest. Identical pipelines are evaluated once,
by max-plus. `fastest_shares` distributes micro-batches so that the slowest pipeline ends as early as
possible.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np

from shardwise.cluster import NodeState
from shardwise.replanning.arrangement import Arrangement, Ints, microbatch_unit
from shardwise.replanning.pipeline_costs import Prices
from shardwise.replanning.rerouting import Rerouting
from shardwise.replanning.situation import Situation, StateRuns
from shardwise.search import pipelines_s, worst_durations
from shardwise.sim import Durations
from shardwise.strategy import Strategy, node_slots

# Shares of micro-batches


def even_shares(pipelines: int, total: int, unit: int, least: int) -> list[int] | None:
    """`total` micro-batches over identical pipelines, in multiples of `unit`, at least `least` each; None if
    that is not possible."""
    if total % unit:
        return None
    base, rest = divmod(total // unit, pipelines)
    if base * unit < least:
        return None
    return [(base + (place < rest)) * unit for place in range(pipelines)]


def fastest_shares(
    first_s: Sequence[float], each_s: Sequence[float], total: int, unit: int, least: int
) -> list[int] | None:
    """The shares of `total` micro-batches with which the last pipeline ends earliest; None if there are too
    few micro-batches. Pipelines take `first_s` for `least` micro-batches and `each_s` for every further
    one."""
    pipelines = len(first_s)
    if total % unit or pipelines * least > total:
        return None
    # Bisection over the end time; then single micro-batches go to the pipeline that ends first with them.
    low_s, high_s = min(first_s), max(first_s) + total * max(each_s)
    for _ in range(60):
        middle_s = (low_s + high_s) / 2.0
        if sum(_done(first_s, each_s, middle_s, unit, least)) <= total:
            low_s = middle_s
        else:
            high_s = middle_s
    done = _done(first_s, each_s, low_s, unit, least)
    if sum(done) > total:
        done = [least] * pipelines
    heap = [
        (first_s[place] + (done[place] + unit - least) * each_s[place], place) for place in range(pipelines)
    ]
    heapify(heap)
    for _ in range((total - sum(done)) // unit):
        ends_s, place = heap[0]
        done[place] += unit
        heapreplace(heap, (ends_s + unit * each_s[place], place))
    return done


def _done(first_s: Sequence[float], each_s: Sequence[float], by_s: float, unit: int, least: int) -> list[int]:
    return [
        least + max(int((by_s - first) / (each * unit)), 0) * unit if each > 0.0 else least
        for first, each in zip(first_s, each_s, strict=True)
    ]


# Step times

PROBE_ROUNDS = 4
"""Distance, in multiples of the number of stages, between the two numbers of micro-batches whose makespans
give a linear model."""


@dataclass(frozen=True, slots=True)
class _PipelineKinds:
    """The distinct pipelines of a strategy on nodes in given states (`durations`, one row each), and the kind
    of each pipeline. `end_s` are the seconds after the slowest pipeline."""

    durations: Durations
    kind_of: Ints
    end_s: float


class StepTimes:
    """Cached step times of arrangements."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self._times: dict[tuple[Strategy, StateRuns, tuple[int, ...]], float | None] = {}
        self._shares: dict[tuple[Strategy, StateRuns], tuple[int, ...] | None] = {}
        self._rerouting = Rerouting(prices)

    def step_s(self, arrangement: Arrangement, situation: Situation) -> float | None:
        """Seconds per step; None if a node is gone, or if the arrangement does not fit any more."""
        if arrangement.is_rerouted:
            return self._rerouting.step_s(arrangement, situation)
        states = self._states(arrangement.slots, situation)
        if states is None:
            return None
        key = arrangement.strategy, states, arrangement.microbatches
        if key not in self._times:
            self._times[key] = self._step_s(*key)
        return self._times[key]

    def balanced(
        self, strategy: Strategy, slots: tuple[str, ...], situation: Situation
    ) -> Arrangement | None:
        """The strategy on these nodes with the fastest shares; None if it cannot run."""
        states = self._states(slots, situation)
        if states is None:
            return None
        key = strategy, states
        if key not in self._shares:
            self._shares[key] = self._balanced(*key)
        shares = self._shares[key]
        return None if shares is None else Arrangement(strategy=strategy, slots=slots, microbatches=shares)

    def nominal_s(self, strategy: Strategy, pools: Iterable[int]) -> float | None:
        """Seconds per step on nominal nodes, of the best of these pools: a lower bound in every situation.
        None if the strategy never runs."""
        nodes = strategy.tp * strategy.cp * strategy.pp * strategy.dp
        found = [self._nominal_s(strategy, NodeState(pool=pool), nodes) for pool in pools]
        return min((one for one in found if one is not None), default=None)

    def _nominal_s(self, strategy: Strategy, state: NodeState, devices: int) -> float | None:
        states = ((state, devices // self.prices.pools[state.pool].node.devices),)
        key = strategy, states
        if key not in self._shares:
            self._shares[key] = self._balanced(*key)
        shares = self._shares[key]
        if shares is None:
            return None
        whole = strategy, states, shares
        if whole not in self._times:
            self._times[whole] = self._step_s(*whole)
        return self._times[whole]

    def _states(self, slots: tuple[str, ...], situation: Situation) -> StateRuns | None:
        return situation.states_of(slots, self.prices.node_bytes_per_s)

    def _step_s(self, strategy: Strategy, states: StateRuns, microbatches: tuple[int, ...]) -> float | None:
        kinds = self._kinds(strategy, states)
        if kinds is None:
            return None
        pairs = np.unique(np.stack([kinds.kind_of, np.array(microbatches, dtype=np.int64)]), axis=1)
        return float(pipelines_s(strategy, kinds.durations, pairs[0], pairs[1]).max()) + kinds.end_s

    def _balanced(self, strategy: Strategy, states: StateRuns) -> tuple[int, ...] | None:
        total = self.prices.microbatches(strategy)
        unit, least = microbatch_unit(strategy)
        if total < strategy.dp * least or (kinds := self._kinds(strategy, states)) is None:
            return None
        if kinds.durations.batch == 1:
            even = even_shares(strategy.dp, total, unit, least)
            return None if even is None else tuple(even)
        every = np.arange(kinds.durations.batch)
        lower = max(least, strategy.pp * unit)
        upper = lower + PROBE_ROUNDS * strategy.pp * unit
        low_s, high_s = (
            pipelines_s(strategy, kinds.durations, every, np.full(len(every), count))
            for count in (lower, upper)
        )
        each_s = (high_s - low_s) / (upper - lower)
        first_s = low_s - (lower - least) * each_s
        shares = fastest_shares(
            first_s[kinds.kind_of].tolist(), each_s[kinds.kind_of].tolist(), total, unit, least
        )
        return None if shares is None else tuple(shares)

    def _kinds(self, strategy: Strategy, states: StateRuns) -> _PipelineKinds | None:
        if len({self.prices.pools[state.pool].node.devices for state, _ in states}) > 1:
            return None  # ranks map to nodes of one size only
        distinct = sorted({state for state, _ in states})
        figures = [self.prices.figures(strategy, state) for state in distinct]
        if not all(figures):
            return None
        known = [one for one in figures if one is not None]
        if len(known) == 1:
            return _PipelineKinds(known[0].durations, np.zeros(strategy.dp, dtype=np.int64), known[0].end_s)
        slot_kinds = np.repeat([distinct.index(state) for state, _ in states], [run for _, run in states])
        stage_states = slot_kinds[node_slots(strategy, self.prices.pools[states[0][0].pool].node.devices)]
        rows, kind_of = np.unique(stage_states.reshape(strategy.dp, -1), axis=0, return_inverse=True)
        rows = rows.reshape(-1, *stage_states.shape[1:])
        return _PipelineKinds(
            durations=worst_durations(strategy, known, rows),
            kind_of=kind_of.reshape(-1),
            end_s=max(one.end_s for one in known),
        )
