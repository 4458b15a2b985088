"""Candidates of a decision: the running pipeline shape on other nodes, other layers, or other shapes.

`all_choices` lists arrangements of given shapes on sets of nodes. `with_layers_shifted` is a local search
over the layers of the first and last stage, for nodes that are no longer equal. The middle stages have even
layers, so a slow middle stage may also be swapped with the first or last one. `ShapeSearch` finds the best
shapes on several cluster sizes by branch and bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from shardwise.cluster import Cluster, NodeGroups, NodeState, uniform_cluster
from shardwise.replanning.allowed_space import ANY_SPACE, AllowedSpace, BestStrategies
from shardwise.replanning.arrangement import Arrangement, dp_multiple, pipeline_order, pipelines_of, with_dp
from shardwise.replanning.pipeline_costs import Prices
from shardwise.replanning.situation import Situation
from shardwise.replanning.step_times import StepTimes
from shardwise.search import BranchAndBound, Fastest, Question, WorkLimit
from shardwise.strategy import Strategy, layer_counts, node_slots
from shardwise.ties import first_least, is_less

MayImprove = Callable[[Strategy, float], bool]
"""Whether a shape whose step takes at least this many seconds can improve on the best decision so far."""

SortKey = tuple[float, ...]
"""Sort key of nodes; better nodes have a lower one."""

THRESHOLDS = 3
"""Largest number of thresholds, of speed and of bandwidth, below which nodes are left out."""


def node_sets(situation: Situation, prices: Prices) -> list[tuple[str, ...]]:
    """Sets of nodes of one size that may train together: all, those of one pool, those of one site, those
    without notice, and those without the slowest or the worst connected nodes. Better nodes come first. If
    the cluster has tiers between nodes, each set occurs a second time with its groups in sequence."""
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
    """The nodes in rank order, where nodes of one group of the cluster are consecutive."""
    places = situation.groups.ordered([_number(name) for name in names], lambda place: sort_key(f"n{place}"))
    return tuple(f"n{place}" for place in places)


def _sort_key(name: str, states: Mapping[str, NodeState]) -> SortKey:
    """Equal nodes are consecutive, better ones first, then by number."""
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
    """At most `THRESHOLDS` of the values, spread evenly."""
    if len(values) <= THRESHOLDS:
        return list(values)
    return [values[(index * (len(values) - 1)) // (THRESHOLDS - 1)] for index in range(THRESHOLDS)]


def widths(shape: Strategy, nodes: int, prices: Prices, devices_per_node: int) -> list[int]:
    """Numbers of pipelines of a shape that fill whole nodes: the largest on `nodes` nodes, and the largest
    with equal shares."""
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
    """The shape on the first of these nodes, with as many pipelines as fit and the fastest shares. Nodes keep
    their state of `running` if possible. Leaves out numbers of pipelines whose step time cannot improve the
    decision."""
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
    """Orders of the nodes in slots: `placed`; and if the cluster has tiers between nodes, also the given
    order, which keeps groups together under any order of axes."""
    slots = placed(strategy, nodes, devices)
    return (slots, tuple(nodes)) if groups.has_any and slots != tuple(nodes) else (slots,)


def placed(strategy: Strategy, nodes: Sequence[str], devices: int) -> tuple[str, ...]:
    """The nodes in slots such that equal nodes share pipelines."""
    slots = [""] * len(nodes)
    for slot, name in zip(pipeline_order(strategy, devices), nodes, strict=True):
        slots[slot] = name
    return tuple(slots)


def _with_reused_nodes(
    strategy: Strategy, slots: tuple[str, ...], situation: Situation, running: Arrangement, devices: int
) -> tuple[str, ...]:
    """The same nodes, swapped within equal state and group so that as many as possible keep their part of the
    model."""
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
    """The content of each slot: its pipeline ranks, with all fields that define the stages."""
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
    """Every shape on every set of nodes, without those that cannot improve the decision."""
    sets = node_sets(situation, steps.prices)
    for shape in shapes:
        for names in sets:
            yield from arrangements_of(shape, names, situation, steps, running, may_improve)


# Local search over layers

STRIDES = (4, 2, 1)
"""Numbers of layers by which an end stage changes; the first one that helps is used."""


def with_layers_shifted(base: Arrangement, situation: Situation, steps: StepTimes) -> Iterator[Arrangement]:
    """The improving steps of a local search over the layers of the end stages. It starts from `base`, and
    from `base` with its slowest stage swapped to either end. Nothing if all nodes are equal, with one stage,
    or with several chunks per rank."""
    strategy = base.strategy
    if strategy.pp == 1 or strategy.vpp > 1 or base.is_rerouted:
        return
    states = [situation.states.get(name) for name in base.slots]
    if len(set(states)) == 1 or None in states:
        return
    for start in (base, *_with_ends_swapped(base, situation, steps)):
        yield from _hill_climb(start, situation, steps)


def _hill_climb(start: Arrangement, situation: Situation, steps: StepTimes) -> Iterator[Arrangement]:
    best, best_s = start, steps.step_s(start, situation)
    if best_s is None:
        return
    yield start
    layers = steps.prices.model.layers
    while True:
        for stride in STRIDES:
            tried = [
                (step_s, found)
                for strategy in _near(best.strategy, layers, stride)
                if (found := steps.balanced(strategy, best.slots, situation)) is not None
                and (step_s := steps.step_s(found, situation)) is not None
            ]
            if not tried:
                continue
            step_s, found = tried[int(first_least([step_s for step_s, _ in tried]))]
            if is_less(step_s, best_s):
                best, best_s = found, step_s
                yield best
                break
        else:
            return


def _near(strategy: Strategy, layers: int, stride: int) -> Iterator[Strategy]:
    """Strategies with `stride` layers more or fewer on an end stage."""
    counts = layer_counts(layers, strategy.pp, strategy.first_stage_layers, strategy.last_stage_layers)
    between_ends = ((1, -1), (-1, 1))
    for first, last in between_ends if strategy.pp == 2 else ((1, 0), (-1, 0), (0, 1), (0, -1)):
        ends = counts[0] + first * stride, counts[-1] + last * stride
        middle = layers - sum(ends)
        if min(ends) >= 1 and (middle >= strategy.pp - 2):
            yield replace(strategy, first_stage_layers=ends[0], last_stage_layers=ends[1])


def _with_ends_swapped(base: Arrangement, situation: Situation, steps: StepTimes) -> Iterator[Arrangement]:
    """`base` with the stage of the slowest node in the place of the first and of the last stage."""
    strategy = base.strategy
    devices = steps.prices.devices_of(base.slots[0])
    stage_slots = node_slots(strategy, devices)
    if len(np.unique(stage_slots)) != stage_slots.size:
        return  # stages that share nodes
    speeds = [situation.states[name].speed for name in base.slots]
    slowest = int(np.argmin(np.array(speeds)[stage_slots].min(axis=(0, 2))))
    for end in (0, strategy.pp - 1):
        if slowest != end:
            slots = list(base.slots)
            for one, other in zip(stage_slots[:, slowest].ravel(), stage_slots[:, end].ravel(), strict=True):
                slots[one], slots[other] = slots[other], slots[one]
            found = steps.balanced(strategy, tuple(slots), situation)
            if found is not None:
                yield found


# Search of shapes

RUNNERS_UP = 5
"""Number of runners-up of each size, in addition to the best strategy. Each differs in a degree, the schedule
or recomputation."""

MICRO_BATCH_DIVISORS = (1, 2, 4)
"""Divisors of a shape's micro-batch size that give the warm start of another search."""

MAX_PARTS = 48
"""Largest number of parts of the space in one search (its work limit). A complete proof would take minutes if
links between nodes are slow; the incumbent is good by then, and is compared with keeping like any other."""

POWERS, FACTORS = 4, (3, 5, 7)
"""Numbers of nodes searched for a situation: how many of the largest powers of two, and the odd factors of
which one multiple of a power of two is added."""


def sizes_below(nodes: int) -> tuple[int, ...]:
    """Numbers of nodes up to `nodes` whose devices divide batches well: the largest powers of two, and the
    largest power of two times 3, 5 or 7, which leaves fewer nodes idle."""
    sizes = [1 << exponent for exponent in range(nodes.bit_length())][-POWERS:]
    others = [factor << (nodes // factor).bit_length() - 1 for factor in FACTORS if factor <= nodes]
    return tuple(sorted({*sizes, *([max(others)] if others else [])}))


class ShapeSearch:
    """Best pipeline shapes for one model and job, by pool and number of nodes; each size is searched once.

    The nodes are nominal, or in the state `present`. A shape has two pipelines, whatever runs.
    """

    def __init__(
        self,
        prices: Prices,
        runners_up: int = RUNNERS_UP,
        *,
        present: NodeState | None = None,
        allowed_space: AllowedSpace = ANY_SPACE,
    ) -> None:
        self._prices = prices
        self._runners_up = runners_up
        self._present = present
        self._allowed_space = allowed_space
        self._found: dict[tuple[int, int], tuple[Strategy, ...]] = {}

    def of_sizes(self, pool: int, sizes: Iterable[int]) -> list[Strategy]:
        """All distinct shapes that are best on any of these numbers of nodes of the pool."""
        every = list(sizes)
        near: tuple[Strategy, ...] = ()
        for nodes in sorted(every, reverse=True):
            near = self._of_size(pool, nodes, near) or near
        return list(dict.fromkeys(shape for nodes in every for shape in self._found[pool, nodes]))

    def _of_size(self, pool: int, nodes: int, near: Sequence[Strategy]) -> tuple[Strategy, ...]:
        key = pool, nodes
        if key not in self._found:
            state = NodeState(pool=pool) if self._present is None else replace(self._present, pool=pool)
            cluster = uniform_cluster(self._prices.cluster, self._prices.pools[pool], nodes, state)
            self._found[key] = self._best(cluster, near)
        return self._found[key]

    def _best(self, cluster: Cluster, near: Sequence[Strategy]) -> tuple[Strategy, ...]:
        """Shapes of the best strategies on all devices of a cluster; none if nothing fits. `near`, the best
        shapes on other numbers of nodes, are the warm start."""
        begin = [one for shape in near for one in _smaller(shape, cluster.devices)]

        def search(question: Question) -> BestStrategies:
            goal = Fastest(1 + self._runners_up)
            outcome = BranchAndBound(
                question.problem(), question.candidates(), goal, warm_start=begin, clock=WorkLimit(MAX_PARTS)
            ).run()
            strategies = tuple(found.table[0] for found in outcome.found)
            return BestStrategies(least_s=outcome.lower_bound_s, strategies=strategies)

        prices = self._prices
        found = self._allowed_space.best_on(prices.model, cluster, prices.job, search)
        return tuple(dict.fromkeys(_ordered(pipelines_of(one)) for one in found.strategies))


def _ordered(shape: Strategy) -> Strategy:
    """One axis order for all shapes without pipeline stages: a single pipeline has no data-parallel axis."""
    if shape.pp == 1:
        return replace(shape, axis_order="tp-cp-dp-pp")
    return shape


def _smaller(shape: Strategy, devices: int) -> Iterator[Strategy]:
    """The shape on `devices` devices, with its micro-batch size and smaller ones, which fit if states are
    sharded over fewer devices."""
    width, rest = divmod(devices, shape.tp * shape.cp * shape.pp)
    for size in (
        shape.micro_batch_size // part for part in MICRO_BATCH_DIVISORS if shape.micro_batch_size % part == 0
    ):
        if not rest:
            yield with_dp(replace(shape, micro_batch_size=size), width)
