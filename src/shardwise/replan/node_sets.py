"""Sets of nodes that one plan for a whole trace may be laid on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.cluster import NodeState
from shardwise.replan.choices import in_groups, node_sets
from shardwise.replan.epochs import Epoch
from shardwise.replan.prices import Prices
from shardwise.replan.situation import Situation

ALL_SIZES = 12
"""Up to so many nodes every number of them is looked at."""

SIZES = 8
"""Of more nodes those numbers that promise most, so many of them, and powers of two."""

SITUATIONS = 4
"""Situations whose own sets are looked at too: those that last longest, and the first."""

SituationTimes = Sequence[tuple[Situation, float]]
"""Distinct situations in the order in which they come first, each with the seconds that it holds in all."""


def situation_times(epochs: Sequence[Epoch]) -> SituationTimes:
    """The distinct situations of a trace."""
    found: dict[object, tuple[Situation, float]] = {}
    for epoch in epochs:
        first, seconds = found.get(epoch.situation.key, (epoch.situation, 0.0))
        found[epoch.situation.key] = first, seconds + epoch.length_s
    return list(found.values())


def sets_for_trace(situations: SituationTimes, prices: Prices) -> list[tuple[str, ...]]:
    """The nodes that serve best over the trace, so many of one size (and of one pool) as may be worth it; and
    the sets that a decision in one of its longest situations would look at."""
    service, pools = _service(situations), _pools(situations)
    groups: dict[tuple[object, ...], list[str]] = {}
    for name in service:
        groups.setdefault((prices.devices_of(name),), []).append(name)
        groups.setdefault((prices.devices_of(name), pools[name]), []).append(name)
    found: dict[frozenset[str], tuple[str, ...]] = {}

    def add(names: Sequence[str]) -> None:
        ordered = in_groups(
            names, situations[0][0], lambda name: (pools[name], -service[name], int(name[1:]))
        )
        found.setdefault(frozenset(ordered), ordered)

    longest = sorted(situations[1:], key=lambda one: -one[1])[:SITUATIONS]
    for situation, _ in (situations[0], *longest):
        for own in node_sets(situation, prices):
            add(own)
    for names in groups.values():
        best_first = sorted(names, key=lambda name: (-service[name], int(name[1:])))
        for size in _sizes(best_first, situations):
            add(best_first[:size])
    return list(found.values())


def uneven_sets_for_trace(situations: SituationTimes) -> list[tuple[str, ...]]:
    """Nodes of several pools, in the order of the cluster: all that are there at first and in the situations
    that last longest, those of them that nothing slows, and those that serve best over the trace."""
    longest = sorted(situations[1:], key=lambda one: -one[1])[:SITUATIONS]
    chosen: list[list[str]] = []
    for situation, _ in (situations[0], *longest):
        states = situation.states
        chosen.append(list(states))
        chosen.append([name for name, state in states.items() if state == NodeState(pool=state.pool)])
    service = _service(situations)
    thresholds = sorted(set(service.values()))
    for place in range(SITUATIONS + 1):
        least = thresholds[place * (len(thresholds) - 1) // SITUATIONS] if thresholds else 0.0
        chosen.append([name for name, served in service.items() if served >= least])
    pools = _pools(situations)
    return list(
        dict.fromkeys(
            tuple(sorted(names, key=lambda name: int(name[1:])))
            for names in chosen
            if len({pools[name] for name in names}) > 1
        )
    )


def _service(situations: SituationTimes) -> dict[str, float]:
    """Seconds that each node serves, those at which it is slow in part."""
    service: dict[str, float] = {}
    for situation, seconds in situations:
        for name, state in situation.states.items():
            service[name] = service.get(name, 0.0) + seconds * min(state.speed, 1.0) * state.network
    return service


def _pools(situations: SituationTimes) -> dict[str, int]:
    return {name: state.pool for situation, _ in situations for name, state in situation.states.items()}


def _sizes(best_first: Sequence[str], situations: SituationTimes) -> Iterator[int]:
    """Numbers of nodes: all where there are few, else those with most node-seconds in which all are there,
    powers of two, and as many as are there all the time."""
    count = len(best_first)
    if count <= ALL_SIZES:
        yield from range(1, count + 1)
        return
    place = {name: index for index, name in enumerate(best_first)}
    available_s = [0.0] * (count + 1)
    always = count
    for situation, seconds in situations:
        there = {place[name] for name in situation.states if name in place}
        first_gone = next((index for index in range(count) if index not in there), count)
        available_s[first_gone] += seconds
        always = min(always, first_gone)
    for size in range(count - 1, -1, -1):
        available_s[size] += available_s[size + 1]
    yield from sorted(range(1, count + 1), key=lambda size: -size * available_s[size])[:SIZES]
    yield from (1 << power for power in range(count.bit_length()) if 1 << power <= count)
    yield count
    if always:
        yield always
