"""Arrangements that could run instead: the same shape of pipelines on other nodes, or other shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from shardwise.cluster import NodeGroups, NodeState
from shardwise.replan.arrangement import Arrangement, at_width, pipeline_order, together
from shardwise.replan.prices import Prices
from shardwise.replan.situation import Situation
from shardwise.replan.steps import Steps
from shardwise.strategy import Strategy, cells

IsWorth = Callable[[Strategy, float], bool]
"""Whether a shape that takes no less than so many seconds per step can be better than what is known."""

Rank = tuple[float, ...]
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
        for chosen in (*_groups(names, situation), *_without_worst(names, situation.states)):
            found[tuple(sorted(chosen, key=lambda name: _rank(name, situation.states)))] = None
            found[in_groups(chosen, situation, lambda name: _rank(name, situation.states))] = None
    return [names for names in found if names]


def in_groups(names: Iterable[str], situation: Situation, rank: Callable[[str], Rank]) -> tuple[str, ...]:
    """The nodes by rank, those together that the cluster has together."""
    places = situation.groups.ordered([_number(name) for name in names], lambda place: rank(f"n{place}"))
    return tuple(f"n{place}" for place in places)


def _rank(name: str, states: Mapping[str, NodeState]) -> Rank:
    """Alike nodes together, better ones first, as they are numbered."""
    state = states[name]
    return state.pool, -state.speed, -state.network, -state.inside, state.latency_s, int(name[1:])


def _groups(names: Sequence[str], situation: Situation) -> Iterator[list[str]]:
    yield list(names)
    pools = sorted({situation.states[name].pool for name in names})
    if len(pools) > 1:
        for pool in pools:
            yield [name for name in names if situation.states[name].pool == pool]
    for between in situation.between:
        yield [name for name in names if name not in between.first]
        yield [name for name in names if name not in between.second]
    if situation.noticed:
        yield [name for name in names if name not in situation.noticed]


def _without_worst(names: Sequence[str], states: Mapping[str, NodeState]) -> Iterator[list[str]]:
    for figure in ("speed", "network"):
        values = sorted({float(getattr(states[name], figure)) for name in names})
        for least in _few(values[1:]):
            yield [name for name in names if getattr(states[name], figure) >= least]


def _few(values: Sequence[float]) -> list[float]:
    """At most `THRESHOLDS` of the values, spread over all."""
    if len(values) <= THRESHOLDS:
        return list(values)
    return [values[(index * (len(values) - 1)) // (THRESHOLDS - 1)] for index in range(THRESHOLDS)]


def widths(shape: Strategy, nodes: int, prices: Prices, devices_per_node: int) -> list[int]:
    """Numbers of pipelines of a shape that fill whole nodes of `nodes`: as many as there are, and the most
    that have equal shares."""
    size = shape.tp * shape.cp * shape.pp
    step = together(shape)
    while step * size % devices_per_node:
        step += together(shape)
    most = min(nodes * devices_per_node // size, prices.microbatches(shape)) // step * step
    if most < 1:
        return []
    even = next((dp for dp in range(most, 0, -step) if prices.microbatches(shape) % dp == 0), most)
    return sorted({most, even}, reverse=True)


def arranged(
    shape: Strategy,
    nodes: Sequence[str],
    situation: Situation,
    steps: Steps,
    running: Arrangement | None,
    is_worth: IsWorth,
) -> Iterator[Arrangement]:
    """The shape on the first of these nodes, as wide as it goes, with the shares by which it is fastest.
    Nodes keep what they hold of `running` where they can. Widths whose time cannot be worth it are left
    out."""
    prices = steps.prices
    devices = prices.devices_of(nodes[0])
    size = shape.tp * shape.cp * shape.pp
    for dp in widths(shape, len(nodes), prices, devices):
        strategy = at_width(shape, dp)
        nominal_s = steps.nominal_s(strategy, {situation.states[name].pool for name in nodes})
        if nominal_s is None or not is_worth(shape, nominal_s):
            continue
        for slots in placings(strategy, nodes[: dp * size // devices], devices, situation.groups):
            kept = slots if running is None else _kept(strategy, slots, situation, running, devices)
            found = steps.balanced(strategy, kept, situation)
            if found is not None:
                yield found


def placings(
    strategy: Strategy, nodes: Sequence[str], devices: int, groups: NodeGroups
) -> tuple[tuple[str, ...], ...]:
    """Slots for the nodes: `placed`; and as they stand where the cluster has tiers between nodes, since only
    so do groups of them stay together under any order of axes."""
    slots = placed(strategy, nodes, devices)
    return (slots, tuple(nodes)) if groups.are_told and slots != tuple(nodes) else (slots,)


def placed(strategy: Strategy, nodes: Sequence[str], devices: int) -> tuple[str, ...]:
    """Alike nodes in the same pipelines."""
    slots = [""] * len(nodes)
    for slot, name in zip(pipeline_order(strategy, devices), nodes, strict=True):
        slots[slot] = name
    return tuple(slots)


def _kept(
    strategy: Strategy, slots: tuple[str, ...], situation: Situation, running: Arrangement, devices: int
) -> tuple[str, ...]:
    """The same nodes, those in the same state and group exchanged so that as many as can be stay at their
    part of the model."""
    if devices * len(running.slots) != _ranks(running.strategy):
        return slots
    wanted = _parts(strategy, devices)
    had = dict(zip(running.slots, _parts(running.strategy, devices), strict=True))
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
            same = by_part.get(wanted[slot])
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
def _parts(strategy: Strategy, devices: int) -> list[tuple[object, ...]]:
    """What each slot holds: pipeline ranks, told with all that cuts the model into stages."""
    laid = cells(strategy, devices)
    held: list[set[int]] = [set() for _ in range(_ranks(strategy) // devices)]
    for place in range(strategy.pp):
        for slot in set(laid[:, place].reshape(-1).tolist()):
            held[slot].add(place)
    cut = (
        strategy.tp, strategy.pp, strategy.vpp, strategy.schedule, strategy.first_stage_layers,
        strategy.last_stage_layers,
    )  # fmt: skip
    return [(tuple(sorted(places)), *cut) for places in held]


def all_choices(
    shapes: Iterable[Strategy],
    situation: Situation,
    steps: Steps,
    running: Arrangement | None,
    is_worth: IsWorth,
) -> Iterator[Arrangement]:
    """Every shape on every set of nodes, as far as it can be worth it."""
    sets = node_sets(situation, steps.prices)
    for shape in shapes:
        for names in sets:
            yield from arranged(shape, names, situation, steps, running, is_worth)
