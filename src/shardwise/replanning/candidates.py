"""Arrangements that could run instead: the same shape of pipelines on other nodes, or other shapes.

Layers moved between the stages of what runs, where its nodes are not alike any more.

A strategy says how many layers its first and its last stage have, and those between share the rest evenly.
Both ends are changed by a few layers at a time while that makes steps shorter; as a slow stage in the middle
can only be relieved with all of the middle, it may also change places with the first or the last one.

The space that a plan's question allows, for plans that follow it on other nodes.

Shapes of pipelines worth considering: what the search finds best on clusters of several sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from shardwise.cluster import Cluster, NodeGroups, NodeState, uniform_cluster
from shardwise.plans import Plan, UnevenFile, Value
from shardwise.replanning.arrangement import Arrangement, dp_multiple, pipeline_order, with_dp
from shardwise.replanning.pipeline_costs import Prices
from shardwise.replanning.situation import Situation
from shardwise.replanning.step_times import StepTimes
from shardwise.search import BranchAndBound, Fastest, Question, WorkLimit
from shardwise.strategy import FIELDS, Strategy, Target, layer_counts, node_slots

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


STRIDES = (4, 2, 1)
"""Layers by which an end is changed: the largest that helps first."""


def with_layers_shifted(base: Arrangement, situation: Situation, steps: StepTimes) -> Iterator[Arrangement]:
    """Every arrangement on the way to the fastest layers that is faster than those before it, `base` as it
    lies and with its slowest stage at either end. None where all of its nodes are alike, where it has one
    stage, or several chunks on a rank."""
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
            step_s, found = min(tried, key=lambda one: one[0], default=(best_s, best))
            if step_s < best_s:
                best, best_s = found, step_s
                yield best
                break
        else:
            return


def _near(strategy: Strategy, layers: int, stride: int) -> Iterator[Strategy]:
    """The strategy with `stride` layers more or less on one of its ends."""
    counts = layer_counts(layers, strategy.pp, strategy.first_stage_layers, strategy.last_stage_layers)
    between_ends = ((1, -1), (-1, 1))
    for first, last in between_ends if strategy.pp == 2 else ((1, 0), (-1, 0), (0, 1), (0, -1)):
        ends = counts[0] + first * stride, counts[-1] + last * stride
        middle = layers - sum(ends)
        if min(ends) >= 1 and (middle >= strategy.pp - 2):
            yield replace(strategy, first_stage_layers=ends[0], last_stage_layers=ends[1])


def _with_ends_swapped(base: Arrangement, situation: Situation, steps: StepTimes) -> Iterator[Arrangement]:
    """With the stage that has the slowest node in the place of the first stage, and of the last."""
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


OF_REPLICAS = frozenset(("dp", "param_shard", "grad_shard", "optim_shard", "dp_replicate", "dp_shard"))
"""Fields that follow from the number of replicas, which changes with the nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedSpace:
    """The space that strategies are of, as `Question` has it, and the replicas that a stage of an uneven plan
    has at most; `target` is to carry plans out (None: whatever can)."""

    space: str = "default"
    fixed: Mapping[str, Value] = field(default_factory=dict)
    axes: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    stage_dp: int = 1
    target: Target | None = None

    def has_uneven_in(self, dtype: str) -> bool:
        """Whether uneven plans are searched for too: they have neither fields nor axes."""
        is_run = self.target is None or dtype in self.target.uneven_dtypes
        return is_run and self.space == "default" and not self.fixed and not self.axes

    @property
    def text(self) -> str:
        """What it holds fields to, as a person reads it; nothing where it allows everything."""
        texts = [f"the space {self.space}"] if self.space != "default" else []
        texts += [f"{name}={value}" for name, value in self.fixed.items()]
        texts += [f"{name} of {', '.join(map(str, values))}" for name, values in self.axes.items()]
        return ", ".join(texts)

    def allows(self, strategy: Strategy) -> bool:
        """Whether the strategy has the values that the question allows."""
        values = {**{name: (value,) for name, value in self.fixed.items()}, **self.axes}
        return all(getattr(strategy, name) in allowed for name, allowed in values.items() if name in FIELDS)


ANY = AllowedSpace()
"""Everything that the planner knows."""


def allowed_space_of(plan: Plan | UnevenFile) -> AllowedSpace:
    """What the question of a plan allows on any nodes: its space, fixed fields and axes, but for those that
    follow from the number of replicas. A plan that was chosen for events names its strategy and no
    question."""
    if not isinstance(plan, Plan) or plan.for_trace is not None:
        return AllowedSpace()
    proof = plan.certificate
    return AllowedSpace(
        space=proof.space,
        fixed={name: value for name, value in proof.fixed.items() if name not in OF_REPLICAS},
        axes={name: values for name, values in proof.axes.items() if name not in OF_REPLICAS},
    )


Axes = Mapping[str, tuple[Value, ...]]

RUNNERS_UP = 5
"""Of every size the best strategy and so many more, each of which differs in a degree, the schedule or
recomputation."""

MICRO_BATCH_DIVISORS = (1, 2, 4)
"""Parts of a shape's micro-batch size with which another search begins."""

MAX_PARTS = 48
"""Parts of the space that a search looks at, at most. Where links are slow and far it would take minutes to
prove what is best; what it has found by then is good, and is weighed against keeping like any other."""

POWERS, FACTORS = 4, (3, 5, 7)
"""Numbers of nodes that are searched for a situation: so many powers of two, and one that is one of these
factors times a power of two."""


def sizes_below(nodes: int) -> tuple[int, ...]:
    """Numbers of nodes whose devices divide batches well, the largest powers of two up to `nodes`; and of
    those that leave a factor of 3, 5 or 7 to the stages of a pipeline the largest: fewer nodes are idle."""
    sizes = [1 << exponent for exponent in range(nodes.bit_length())][-POWERS:]
    others = [factor << (nodes // factor).bit_length() - 1 for factor in FACTORS if factor <= nodes]
    return tuple(sorted({*sizes, *([max(others)] if others else [])}))


def _intersected(allowed: Axes, also: Axes) -> dict[str, tuple[Value, ...]]:
    """The values of `also` that are allowed too."""
    return {
        name: tuple(value for value in values if value in allowed.get(name, values))
        for name, values in also.items()
    }


class ShapeSearch:
    """Shapes of pipelines for one model and job, by pool and size; each size is searched once.

    They are searched for on nodes as the cluster has them, or as they are in the state `present`, in the
    space that `allowed_space` allows; of that, with only these values along `axes`.
    """

    def __init__(
        self,
        prices: Prices,
        runners_up: int = RUNNERS_UP,
        *,
        present: NodeState | None = None,
        axes: Mapping[str, tuple[Value, ...]] | None = None,
        allowed_space: AllowedSpace = ANY,
    ) -> None:
        self._prices = prices
        self._runners_up = runners_up
        self._present = present
        self._space, self._fixed = allowed_space.space, allowed_space.fixed
        self._axes = {**allowed_space.axes, **_intersected(allowed_space.axes, axes or {})}
        self._found: dict[tuple[int, int], tuple[Strategy, ...]] = {}

    def of_sizes(self, pool: int, sizes: Iterable[int]) -> list[Strategy]:
        """All distinct shapes that are best on any of so many nodes of the pool."""
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
        """Shapes that lie on whole nodes, of the best strategies on all devices of a cluster; none where
        nothing fits. Those that are best on other numbers of nodes, `near`, are where the search begins."""
        question = Question(
            model=self._prices.model,
            cluster=cluster,
            job=self._prices.job,
            space=self._space,
            fixed=self._fixed,
            axes=self._axes,
        )
        begin = [one for shape in near for one in _smaller(shape, cluster.devices)]
        goal = Fastest(1 + self._runners_up)
        search = BranchAndBound(
            question.problem(), question.candidates(), goal, warm_start=begin, clock=WorkLimit(MAX_PARTS)
        )
        outcome = search.run()
        shapes = [with_dp(found.table[0], 1) for found in outcome.found]
        return tuple(dict.fromkeys(_ordered(shape) for shape in shapes))


def _ordered(shape: Strategy) -> Strategy:
    """One order of axes for all shapes that need none: a pipeline alone has no data-parallel axis."""
    if shape.pp == 1:
        return replace(shape, axis_order="tp-cp-dp-pp")
    return shape


def _smaller(shape: Strategy, devices: int) -> Iterator[Strategy]:
    """The shape on so many devices, with its micro-batches and with smaller ones, which fit where states are
    divided among fewer devices."""
    width, rest = divmod(devices, shape.tp * shape.cp * shape.pp)
    for size in (
        shape.micro_batch_size // part for part in MICRO_BATCH_DIVISORS if shape.micro_batch_size % part == 0
    ):
        if not rest:
            yield with_dp(replace(shape, micro_batch_size=size), width)
