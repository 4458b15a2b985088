"""Re-routing: training continues without lost nodes, whose micro-batches go to peers in other pipelines
(ReCycle).

If the node of a stage of a pipeline is lost, the same stage of other pipelines does its work.
`schedule.reroute` finds the order, with as many micro-batches in flight as memory allows. Gradients are
reduced over the remaining replicas of a stage; each micro-batch is in exactly one of their sums. States that
are sharded over replicas are sharded over the remaining ones, and must fit there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from shardwise.cluster import NodeState
from shardwise.replanning.arrangement import NO_NODE, Arrangement, Bools, Floats, dp_multiple, with_dp
from shardwise.replanning.pipeline_costs import Prices
from shardwise.replanning.situation import Situation
from shardwise.schedule import PipelineStage, RelativeDurations, Rerouted, generate, peak_in_flight, reroute
from shardwise.search import pipelines_s, worst_durations
from shardwise.sim import Durations, rerouted_s
from shardwise.strategy import Strategy, node_slots

ACTIONS = 20_000
"""Largest number of actions of the pipelines that take part in re-routing; further pipelines are not
changed."""

MORE_PER_STAGE = 2
"""Largest number of micro-batches per stage that a rank may have in flight in addition to those of its
schedule."""

SPLIT = ("zb_h1", "zb_h2")
"""Schedules with separate weight gradients that can be re-routed."""


def without_gone(running: Arrangement, situation: Situation, prices: Prices) -> Arrangement | None:
    """The running arrangement without lost nodes and without nodes that have nothing left to do. None if no
    node is lost, or if re-routing is not possible: with one stage, several chunks per rank, experts shared by
    pipelines, or a stage that is lost in all pipelines."""
    strategy = running.strategy
    if all(name == NO_NODE or name in situation.states for name in running.slots):
        return None
    if strategy.pp == 1 or strategy.vpp > 1 or dp_multiple(strategy) > 1:
        return None
    stage_slots = node_slots(strategy, prices.devices_of(next(iter(running.nodes))))
    is_there = np.array([name in situation.states for name in running.slots])
    is_whole = is_there[stage_slots].all(axis=2)
    if not is_whole.any(axis=0).all():
        return None
    used = np.unique(stage_slots[is_whole])
    slots = tuple(name if slot in used else NO_NODE for slot, name in enumerate(running.slots))
    return replace(running, slots=slots)


class Rerouting:
    """Cached step times of arrangements with lost nodes."""

    def __init__(self, prices: Prices) -> None:
        self._prices = prices
        self._known: dict[tuple[object, ...], float | None] = {}

    def step_s(self, arrangement: Arrangement, situation: Situation) -> float | None:
        """Seconds per step; None if another node is gone, or if the rest does not fit."""
        runs = situation.states_of(arrangement.nodes, self._prices.node_bytes_per_s)
        if runs is None:
            return None
        gone = tuple(slot for slot, name in enumerate(arrangement.slots) if name == NO_NODE)
        key = arrangement.strategy, gone, runs, arrangement.microbatches
        if key not in self._known:
            states = [state for state, number in runs for _ in range(number)]
            self._known[key] = self._step_s(arrangement, gone, states)
        return self._known[key]

    def _step_s(
        self, arrangement: Arrangement, gone: Sequence[int], states: Sequence[NodeState]
    ) -> float | None:
        strategy, distinct = arrangement.strategy, sorted(set(states))
        per_node = {self._prices.pools[state.pool].node.devices for state in distinct}
        if len(per_node) > 1:
            return None
        stage_slots = node_slots(strategy, per_node.pop())
        is_gone = np.isin(np.arange(len(arrangement.slots)), gone)
        is_lost: Bools = np.asarray(is_gone[stage_slots].any(axis=2))
        widths = sorted({strategy.dp, *(~is_lost).sum(axis=0).tolist()})
        alike = [self._of_width(strategy, int(width), distinct) for width in widths]
        if any(one is None for one in alike):
            return None
        every = [(one, state) for one in alike if one is not None for state in distinct]
        figures = [self._prices.figures(one, state) for one, state in every]
        known = [one for one in figures if one is not None]
        if len(known) < len(every):
            return None
        kinds = np.zeros(len(arrangement.slots), dtype=np.int64)
        kinds[~is_gone] = [distinct.index(state) for state in states]
        own = known[-len(distinct) :]
        # Replicas of a stage may be fewer than others: the slowest number of them decides.
        pipelines = worst_durations(strategy, own, kinds[stage_slots], joined=known)
        extra_in_flight = np.min([self._prices.extra_in_flight(one, state) for one, state in every], axis=0)
        drained = _drained(
            arrangement,
            pipelines,
            is_lost,
            across_s=max(self._prices.across_s(strategy, state) for state in distinct),
            extra_in_flight=tuple(np.minimum(extra_in_flight, MORE_PER_STAGE * strategy.pp).tolist()),
        )
        return None if drained is None else drained + max(one.end_s for one in known)

    def _of_width(self, strategy: Strategy, width: int, states: Sequence[NodeState]) -> Strategy | None:
        """The strategy whose sharded states are divided over `width` replicas. If these do not fill whole
        nodes, the next smaller number that does and shards no more."""
        requested = with_dp(strategy, width)
        devices = self._prices.pools[states[0].pool].node.devices
        for fewer in range(width, 0, -1):
            one = with_dp(strategy, fewer)
            is_whole = one.tp * one.cp * one.pp * one.dp % devices == 0
            if (
                is_whole
                and one.optim_shard <= requested.optim_shard
                and one.param_shard <= requested.param_shard
            ):
                return one
        return None


def _drained(
    arrangement: Arrangement,
    durations: Durations,
    is_lost: Bools,
    *,
    across_s: float,
    extra_in_flight: tuple[int, ...],
) -> float | None:
    """Seconds until all pipelines end: those that take part in re-routing together, the others as before.
    None if the schedule table would be too long."""
    strategy, shares = arrangement.strategy, arrangement.microbatches
    broken = np.flatnonzero(is_lost.any(axis=1)).tolist()
    whole = np.flatnonzero(~is_lost.any(axis=1)).tolist()
    actions = (3 if strategy.schedule in SPLIT else 2) * strategy.pp * max(max(shares), 1)
    most = max(ACTIONS // actions - len(broken), 0)
    if whole and not most:
        return None
    alone_s: Floats = np.zeros(0)
    if whole:
        alone_s = pipelines_s(strategy, durations, np.array(whole), np.array([shares[one] for one in whole]))
        # Pipelines that end first have most spare time.
        whole = [whole[place] for place in np.argsort(alone_s, kind="stable")]
    part = sorted([*broken, *whole[:most]])
    lost = tuple(
        (part.index(one), stage) for one in broken for stage in np.flatnonzero(is_lost[one]).tolist()
    )
    if is_lost[part].all(axis=0).any():
        return None
    table = _table(strategy, tuple(shares[one] for one in part), lost, extra_in_flight)
    joint_s = rerouted_s(table, durations.rows(np.array(part, dtype=np.int64)), across_s)
    others_s = np.sort(alone_s)[most:]
    return max(joint_s, float(others_s.max(initial=0.0)))


@lru_cache(maxsize=256)
def _table(
    strategy: Strategy,
    shares: tuple[int, ...],
    lost: tuple[PipelineStage, ...],
    extra_in_flight: tuple[int, ...],
) -> Rerouted:
    """The re-routed schedule. Every rank may have the micro-batches of its schedule in flight, and
    `extra_in_flight` more. A backward counts twice a forward; with separate weight gradients all three
    actions count the same."""
    is_split = strategy.schedule in SPLIT
    plain = generate(strategy.schedule, pp=strategy.pp, microbatches=max(*shares, 1), vpp=1)
    ones = (1.0,) * strategy.pp
    relative_durations = RelativeDurations(
        forward=ones, backward=ones if is_split else (2.0,) * strategy.pp, weight=ones, is_split=is_split
    )
    max_in_flight = [peak + more for peak, more in zip(peak_in_flight(plain), extra_in_flight, strict=True)]
    return reroute(
        shares, strategy.pp, lost, max_in_flight=max_in_flight, relative_durations=relative_durations
    )
