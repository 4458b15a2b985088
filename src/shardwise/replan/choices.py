"""Arrangements that could run instead: the same shape of pipelines on other nodes, or other shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from shardwise.cluster import NodeGroups, NodeState
from shardwise.replan.arrangement import Arrangement, dp_multiple, pipeline_order, with_dp
from shardwise.replan.prices import Prices
from shardwise.replan.situation import Situation
from shardwise.replan.steps import StepTimes
from shardwise.strategy import Strategy, node_slots

MayImprove = Callable[[Strategy, float], bool]
"""Whether a shape that takes no less than so many seconds per step can be better than what is known."""

SortKey = tuple[float, ...]
"""Better nodes have a lower one."""

THRESHOLDS = 3
"""Sets of nodes without the slowest ones that are looked at, by speed and by bandwidth."""


def node_sets(situation: Situation, prices: Prices) -> list[tuple[str, ...]]:
    """Nodes that may work together: of one size, all of them; those of one pool, of one site; and those that
    are left without the slowest, or without the worst connected. Best first within each; and where the
    cluster has tiers between nodes, its groups one after the other."""
    by_size: dict[int, list[str]] = {}
    for name in situation.states:
        by_size.setdefault(prices.devices_of(name), []).append(name)
    found: dict[tuple[str, ...], None] = {}
    for names in by_size.values():
        for chosen in (*_node_groups(names, situation), *_without_worst(names, situation.states)):
            found[tuple(sorted(chosen, key=lambda name: _sort_key(name, situation.states)))] = None
            found[in_groups(chosen, situation, lambda name: _sort_key(name, situation.states))] = None
    return [names for names in found if names]


def in_groups(
    names: Iterable[str], situation: Situation, sort_key: Callable[[str], SortKey]
) -> tuple[str, ...]:
    """The nodes by rank, those together that the cluster has together."""
    places = situation.groups.ordered([_number(name) for name in names], lambda place: sort_key(f"n{place}"))
    return tuple(f"n{place}" for place in places)


def _sort_key(name: str, states: Mapping[str, NodeState]) -> SortKey:
    """Alike nodes together, better ones first, as they are numbered."""
    state = states[name]
    return state.pool, -state.speed, -state.network, -state.inside, state.latency_s, int(name[1:])


def _node_groups(names: Sequence[str], situation: Situation) -> Iterator[list[str]]:
    yield list(names)
    pools = sorted({situation.states[name].pool for name in names})
    if len(pools) > 1:
        for pool in pools:
            yield [name for name in names if situation.states[name].pool == pool]
    for inter_site in situation.inter_site:
        yield [name for name in names if name not in inter_site.first]
        yield [name for name in names if name not in inter_site.second]
    if situation.noticed:
        yield [name for name in names if name not in situation.noticed]


def _without_worst(names: Sequence[str], states: Mapping[str, NodeState]) -> Iterator[list[str]]:
    for figure in ("speed", "network"):
        values = sorted({float(getattr(states[name], figure)) for name in names})
        for least in _sampled(values[1:]):
            yield [name for name in names if getattr(states[name], figure) >= least]


def _sampled(values: Sequence[float]) -> list[float]:
    """At most `THRESHOLDS` of the values, spread over all."""
    if len(values) <= THRESHOLDS:
        return list(values)
    return [values[(index * (len(values) - 1)) // (THRESHOLDS - 1)] for index in range(THRESHOLDS)]


def widths(shape: Strategy, nodes: int, prices: Prices, devices_per_node: int) -> list[int]:
    """Numbers of pipelines of a shape that fill whole nodes of `nodes`: as many as there are, and the most
    that have equal shares."""
    size = shape.tp * shape.cp * shape.pp
    step = dp_multiple(shape)
    while step * size % devices_per_node:
        step += dp_multiple(shape)
    most = min(nodes * devices_per_node // size, prices.microbatches(shape)) // step * step
    if most < 1:
        return []
    even = next((dp for dp in range(most, 0, -step) if prices.microbatches(shape) % dp == 0), most)
    return sorted({most, even}, reverse=True)


def arrangements_of(
    shape: Strategy,
    nodes: Sequence[str],
    situation: Situation,
    steps: StepTimes,
    running: Arrangement | None,
    may_improve: MayImprove,
) -> Iterator[Arrangement]:
    """The shape on the first of these nodes, as wide as it goes, with the shares by which it is fastest.
    Nodes keep what they hold of `running` where they can. Widths whose time cannot be worth it are left
    out."""
    prices = steps.prices
    devices = prices.devices_of(nodes[0])
    size = shape.tp * shape.cp * shape.pp
    for dp in widths(shape, len(nodes), prices, devices):
        strategy = with_dp(shape, dp)
        nominal_s = steps.nominal_s(strategy, {situation.states[name].pool for name in nodes})
        if nominal_s is None or not may_improve(shape, nominal_s):
            continue
        for slots in slot_orders(strategy, nodes[: dp * size // devices], devices, situation.groups):
            reused = (
                slots if running is None else _with_reused_nodes(strategy, slots, situation, running, devices)
            )
            found = steps.balanced(strategy, reused, situation)
            if found is not None:
                yield found


def slot_orders(
    strategy: Strategy, nodes: Sequence[str], devices: int, groups: NodeGroups
) -> tuple[tuple[str, ...], ...]:
    """Slots for the nodes: `placed`; and as they stand where the cluster has tiers between nodes, since only
    so do groups of them stay together under any order of axes."""
    slots = placed(strategy, nodes, devices)
    return (slots, tuple(nodes)) if groups.has_any and slots != tuple(nodes) else (slots,)


def placed(strategy: Strategy, nodes: Sequence[str], devices: int) -> tuple[str, ...]:
    """Alike nodes in the same pipelines."""
    slots = [""] * len(nodes)
    for slot, name in zip(pipeline_order(strategy, devices), nodes, strict=True):
        slots[slot] = name
    return tuple(slots)


def _with_reused_nodes(
    strategy: Strategy, slots: tuple[str, ...], situation: Situation, running: Arrangement, devices: int
) -> tuple[str, ...]:
    """The same nodes, those in the same state and group exchanged so that as many as can be stay at their
    part of the model."""
    if devices * len(running.slots) != _ranks(running.strategy):
        return slots
    required = _slot_contents(strategy, devices)
    had = dict(zip(running.slots, _slot_contents(running.strategy, devices), strict=True))
    order = {name: place for place, name in enumerate(running.slots)}
    groups: dict[object, list[int]] = {}
    for slot, name in enumerate(slots):
        alike = situation.states[name], situation.groups.of(_number(name))
        groups.setdefault(alike, []).append(slot)
    result = list(slots)
    for places in groups.values():
        free = sorted((slots[slot] for slot in places), key=_number)
        by_part: dict[object, list[str]] = {}
        for name in sorted(free, key=lambda one: order.get(one, len(order))):
            by_part.setdefault(had.get(name), []).append(name)
        taken: set[str] = set()
        left = []
        for slot in places:
            same = by_part.get(required[slot])
            if same:
                result[slot] = same.pop(0)
                taken.add(result[slot])
            else:
                left.append(slot)
        rest = (name for name in free if name not in taken)
        for slot in left:
            result[slot] = next(rest)
    return tuple(result)


def _ranks(strategy: Strategy) -> int:
    return strategy.tp * strategy.cp * strategy.pp * strategy.dp


def _number(name: str) -> int:
    return int(name[1:])


@lru_cache(maxsize=1024)
def _slot_contents(strategy: Strategy, devices: int) -> list[tuple[object, ...]]:
    """What each slot holds: pipeline ranks, told with all that cuts the model into stages."""
    stage_slots = node_slots(strategy, devices)
    stages_by_slot: list[set[int]] = [set() for _ in range(_ranks(strategy) // devices)]
    for place in range(strategy.pp):
        for slot in set(stage_slots[:, place].reshape(-1).tolist()):
            stages_by_slot[slot].add(place)
    cut = (
        strategy.tp, strategy.pp, strategy.vpp, strategy.schedule, strategy.first_stage_layers,
        strategy.last_stage_layers,
    )  # fmt: skip
    return [(tuple(sorted(places)), *cut) for places in stages_by_slot]


def all_choices(
    shapes: Iterable[Strategy],
    situation: Situation,
    steps: StepTimes,
    running: Arrangement | None,
    may_improve: MayImprove,
) -> Iterator[Arrangement]:
    """Every shape on every set of nodes, as far as it can be worth it."""
    sets = node_sets(situation, steps.prices)
    for shape in shapes:
        for names in sets:
            yield from arrangements_of(shape, names, situation, steps, running, may_improve)
