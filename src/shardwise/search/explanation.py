"""Why a plan is what it is: `why_not` and `what_if`, and what `best_alternatives.explained` builds on.

`changes_of` lists every change of one field of a strategy, with the other fields that must change with it.
Degrees change in pairs, since their product is the number of devices. Sharding degrees, micro-batch size,
stages and recomputed layers follow if they must. `axes_of` and `binding_of` give the cost of these
alternatives and the bottleneck. `changed_question` reads a changed cluster or job, such as
`inter_node_bandwidth=2x,seq_len=16384`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import gcd, lcm
from typing import Any

import numpy as np

from shardwise.cluster import Cluster, Device, Node, Tier, multiplied, resized
from shardwise.cost import Problem, find_recipe, peaks_of
from shardwise.errors import ConfigError, Infeasible
from shardwise.inputs import short_repr, unknown
from shardwise.model import NO_MODULES
from shardwise.notebook import panel, table
from shardwise.plans import UNEVEN_SPACE, Answer, Plan, Result, Value
from shardwise.search.answer import plan
from shardwise.search.bnb.ledger import LedgerEntry
from shardwise.search.bnb.solver import Progress
from shardwise.search.clock import SearchClock
from shardwise.search.cluster_parts import is_mixed
from shardwise.search.hetero.answer import plan_mixed_cluster
from shardwise.search.question import Question
from shardwise.search.recommended import recommended
from shardwise.search.space import Space, divisors
from shardwise.search.step_times import step_times_s
from shardwise.search.targets import restricted_to, searched_limits, within_limits, without_target
from shardwise.strategy import (
    AXES,
    CP_KINDS,
    FIELDS,
    HOST_MEMORY,
    MEMORY,
    OFFLOADS,
    ORDERS,
    RECOMPUTES,
    RULES,
    SCHEDULES,
    TARGET_LIMIT,
    Strategy,
    StrategyTable,
    canonical_orders,
    code_of,
    even_ends,
    first_broken,
    largest_stage,
    most_stages,
    target_of,
    value_of,
)
from shardwise.ties import first_largest, first_least
from shardwise.units import format_bytes, format_seconds, parse_quantity

SELECTIVE = RECOMPUTES.index("selective")

SHARDS = ("param_shard", "grad_shard", "optim_shard")


# Changes of one field


def changes_of(question: Question, best: Strategy, field: str) -> Iterator[Strategy]:
    """Candidates of the question whose `field` has another value than in `best`. They cover all values that a
    change of `best` can reach; some values occur more than once."""
    changes_by = _CHANGES_BY_FIELD.get(field, _degree_changes)
    seen = {best}
    for changed in changes_by(question, best, field):
        if changed not in seen and getattr(changed, field) != getattr(best, field):
            seen.add(changed)
            if is_candidate(question, changed):
                yield changed


def is_candidate(question: Question, strategy: Strategy) -> bool:
    """Whether the question's space, with its fixed fields and axes, contains this strategy."""
    values = {name: getattr(strategy, name) for name in FIELDS}
    if any(values[name] != value for name, value in question.fixed.items() if name in values):
        return False
    if any(values[name] not in allowed for name, allowed in question.axes.items()):
        return False
    options = question.candidates().recompute_options
    pairs = zip(options["recompute"].tolist(), options["recompute_modules"].tolist(), strict=True)
    if tuple(code_of(name, values[name]) for name in options) not in set(pairs):
        return False
    space = replace(question, fixed={**question.fixed, **values}, axes={}).candidates()
    return bool(space.count_below_grids(space.grids(space.degrees())).sum())


def _degree_changes(question: Question, best: Strategy, field: str) -> Iterator[Strategy]:
    """Another degree, compensated by one other degree."""
    devices = question.cluster.devices
    for value in divisors(devices):
        for other in AXES:
            rest = devices
            for axis in AXES:
                if axis != other:
                    rest, left = divmod(rest, value if axis == field else getattr(best, axis))
                    if left:
                        break
            else:
                if other != field:
                    yield _repaired(question, best, **{field: value, other: rest})


def _expert_changes(question: Question, best: Strategy, field: str) -> Iterator[Strategy]:
    if question.model.experts is None:
        return
    width = best.tp * best.cp * best.dp
    other = "ep" if field == "etp" else "etp"
    for value in divisors(width):
        for other_value in dict.fromkeys((getattr(best, other), 1)):
            yield _changed(best, {field: value, other: other_value})


def _shard_changes(question: Question, best: Strategy, field: str) -> Iterator[Strategy]:
    """Another sharding degree; the degrees that must divide it or be a multiple of it follow."""
    place = SHARDS.index(field)
    for value in divisors(best.dp * best.cp):
        degrees = {field: value}
        for name in SHARDS[:place]:
            degrees[name] = gcd(getattr(best, name), value)
        for name in SHARDS[place + 1 :]:
            degrees[name] = lcm(getattr(best, name), value)
        yield _changed(best, degrees)


def _batch_changes(question: Question, best: Strategy, field: str) -> Iterator[Strategy]:
    for size in divisors(max(question.job.global_batch_size // best.dp, 1)):
        yield replace(best, micro_batch_size=size)


def _schedule_changes(question: Question, best: Strategy, field: str) -> Iterator[Strategy]:
    """Other schedules with all numbers of chunks per rank."""
    variants = _unrestricted_space(question).variants(best.pp)
    for code, vpp in zip(variants.schedule.tolist(), variants.vpp.tolist(), strict=True):
        yield _repaired(question, best, schedule=SCHEDULES[code], vpp=vpp)


def _split_changes(question: Question, best: Strategy, field: str) -> Iterator[Strategy]:
    """Another first or last stage; with two stages, the other stage takes the remaining layers."""
    splits = _unrestricted_space(question).splits(best.pp * best.vpp)
    other = "last_stage_layers" if field == "first_stage_layers" else "first_stage_layers"
    for value, other_value in zip(splits[field].tolist(), splits[other].tolist(), strict=True):
        if best.pp * best.vpp == 2 or other_value == getattr(best, other):
            yield _with_layers(question, _changed(best, {field: value, other: other_value}))


def _recompute_changes(question: Question, best: Strategy, field: str) -> Iterator[Strategy]:
    most = _most_layers(question, best)
    for recompute in RECOMPUTES:
        for layers in range(1, most + 1) if recompute == "full" else (0,):
            for modules in _module_sets(question) if recompute == "selective" else (NO_MODULES,):
                yield _changed(
                    best,
                    {"recompute": recompute, "recompute_modules": modules, "recompute_layers": layers},
                )


def _module_sets(question: Question) -> list[str]:
    """The sets of modules that selective recomputation has in the question's space."""
    options = question.candidates().recompute_options
    codes = options["recompute_modules"][options["recompute"] == SELECTIVE].tolist()
    return [str(value_of("recompute_modules", code)) for code in codes]


def _named_changes(values: tuple[Any, ...]) -> Callable[[Question, Strategy, str], Iterator[Strategy]]:
    def changes(question: Question, best: Strategy, field: str) -> Iterator[Strategy]:
        for value in values:
            yield _changed(best, {field: value})

    return changes


def _order_changes(question: Question, best: Strategy, field: str) -> Iterator[Strategy]:
    for code in canonical_orders({axis: getattr(best, axis) for axis in AXES}):
        yield replace(best, axis_order=ORDERS[code])


def _recomputed_layer_changes(question: Question, best: Strategy, field: str) -> Iterator[Strategy]:
    if best.recompute == "full":
        yield from _recompute_changes(question, best, field)


_CHANGES_BY_FIELD: dict[str, Callable[[Question, Strategy, str], Iterator[Strategy]]] = {
    "ep": _expert_changes,
    "etp": _expert_changes,
    "vpp": _schedule_changes,
    "schedule": _schedule_changes,
    "cp_kind": _named_changes(CP_KINDS),
    "sequence_parallel": _named_changes((False, True)),
    "offload": _named_changes(OFFLOADS),
    "axis_order": _order_changes,
    "micro_batch_size": _batch_changes,
    "recompute": _recompute_changes,
    "recompute_modules": _recompute_changes,
    "recompute_layers": _recomputed_layer_changes,
    "first_stage_layers": _split_changes,
    "last_stage_layers": _split_changes,
    **dict.fromkeys(SHARDS, _shard_changes),
}
"""How each field changes; degrees that are not listed change in pairs."""


def _repaired(question: Question, best: Strategy, **changes: Any) -> Strategy:
    """`best` with other degrees or another schedule, and all dependent fields as close to `best` as they can
    be."""
    s = _changed(best, changes)
    most = most_stages(question.model.layers, code_of("schedule", s.schedule))
    if s.pp == 1 or (s.vpp > 1 and s.pp * s.vpp > most):
        s = replace(s, schedule="1f1b", vpp=1)
    if s.pp * s.vpp != best.pp * best.vpp:
        first, last = (int(end) for end in even_ends(question.model.layers, s.pp * s.vpp))
        s = replace(s, first_stage_layers=first, last_stage_layers=last)
    before, ranks = best.dp * best.cp, s.dp * s.cp
    shards = {name: getattr(best, name) for name in SHARDS}
    s = _changed(s, {name: ranks if n == before else gcd(n, ranks) for name, n in shards.items()})
    each, left = divmod(question.job.global_batch_size, s.dp)
    s = replace(s, micro_batch_size=1 if left else gcd(s.micro_batch_size, each))
    s = replace(s, sequence_parallel=s.tp > 1 and (s.sequence_parallel or best.tp == 1))
    if s.cp == 1:
        s = replace(s, cp_kind="ring")
    if question.model.experts is not None:
        s = _with_experts(best, s)
    return _with_layers(question, _with_order(s))


def _with_layers(question: Question, s: Strategy) -> Strategy:
    """The strategy with at most as many recomputed layers as its largest stage has."""
    return replace(s, recompute_layers=min(s.recompute_layers, _most_layers(question, s)))


def _most_layers(question: Question, s: Strategy) -> int:
    return int(largest_stage(question.model.layers, s.pp * s.vpp, s.first_stage_layers, s.last_stage_layers))


def _with_experts(best: Strategy, s: Strategy) -> Strategy:
    """The same expert degrees if the ranks allow it; etp stays equal to tp if it was."""
    width, etp = s.tp * s.cp * s.dp, s.tp if best.etp == best.tp else best.etp
    if width % (etp * s.ep):
        etp = 1
    return replace(s, etp=etp, ep=gcd(s.ep, width // etp))


def _with_order(s: Strategy) -> Strategy:
    """The same order of the axes larger than 1, in its canonical spelling."""
    sizes = {axis: getattr(s, axis) for axis in AXES}

    def larger(order: str) -> list[str]:
        return [axis for axis in order.split("-") if sizes[axis] > 1]

    same = (ORDERS[code] for code in canonical_orders(sizes) if larger(ORDERS[code]) == larger(s.axis_order))
    return replace(s, axis_order=next(same))


def _changed(s: Strategy, values: dict[str, Any]) -> Strategy:
    return replace(s, **values)


def _unrestricted_space(question: Question) -> Space:
    """The space without fixed fields and axes."""
    return replace(question, fixed={}, axes={}).candidates()


# Alternatives and the bottleneck


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The best strategy with another `value` of a field, as `why_not` finds it; where there is none, a change
    of the plan's strategy in which other fields change only if they must.

    `reason` is why that is not possible (the code of a rule, `target`, `memory` or `host_memory`), None for
    the best strategy. `lacking_bytes` is the missing memory on the device or the host. `slower` is its step
    time over that of the plan, minus 1; None if a rule or the target excludes it. `fits_probability` is that
    of `Result`, None where it was not predicted.
    """

    value: Value
    strategy: Strategy
    reason: str | None
    lacking_bytes: float
    slower: float | None
    device_bytes: float | None
    fits_probability: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A field with its value in the best strategy and its alternatives: possible ones first, by step time."""

    field: str
    value: Value
    alternatives: tuple[Alternative, ...]

    @property
    def nearest(self) -> Alternative | None:
        """The fastest alternative that is possible."""
        first = self.alternatives[0] if self.alternatives else None
        return first if first is not None and first.reason is None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What limits the step time. `resource` is `memory` or `host_memory` if some change of one field is
    faster but does not fit; `lacking` is the one of these that lacks the fewest bytes. Otherwise it is
    `time`, most of which is spent on `largest_part`."""

    resource: str
    free_bytes: float
    usable_bytes: float
    largest_part: str
    largest_part_s: float
    lacking: Alternative | None
    lacking_field: str | None


def axes_of(question: Question, problem: Problem, best: Result) -> tuple[Axis, ...]:
    """Every field of a strategy with its alternatives, one for each other value. Sets of modules are left out
    where the space names none."""
    names_modules = any(question.candidates().recompute_options["recompute_modules"])
    listed = (field for field in FIELDS if field != "recompute_modules" or names_modules)
    return tuple(
        _axis(question, problem, best, field, list(changes_of(question, best.strategy, field)))
        for field in listed
    )


def binding_of(problem: Problem, best: Result, axes: tuple[Axis, ...]) -> Binding:
    """The bottleneck of the best strategy."""
    lacking = [
        (alternative.lacking_bytes, axis.field, alternative)
        for axis in axes
        for alternative in axis.alternatives
        if alternative.reason in (MEMORY, HOST_MEMORY)
        and alternative.slower is not None
        and alternative.slower < 0.0
    ]
    least = lacking[int(first_least([item[0] for item in lacking]))] if lacking else None
    part = list(best.breakdown)[int(first_largest(list(best.breakdown.values())))]
    return Binding(
        resource="time" if least is None else str(least[2].reason),
        free_bytes=problem.usable_bytes - best.peak_memory.device,
        usable_bytes=problem.usable_bytes,
        largest_part=part,
        largest_part_s=best.breakdown[part],
        lacking=None if least is None else least[2],
        lacking_field=None if least is None else least[1],
    )


def _axis(question: Question, problem: Problem, best: Result, field: str, changed: list[Strategy]) -> Axis:
    """The best alternative for each value among `changed` strategies."""
    found: dict[Value, Alternative] = {}
    for alternative in _evaluated(question, problem, best, field, changed) if changed else []:
        before = found.get(alternative.value)
        if before is None or rank(alternative) < rank(before):
            found[alternative.value] = alternative
    return Axis(
        field=field,
        value=getattr(best.strategy, field),
        alternatives=tuple(sorted(found.values(), key=rank)),
    )


def rank(alternative: Alternative) -> tuple[int, float]:
    """Sort key: possible alternatives by time, then those that do not fit by missing bytes, then illegal
    ones."""
    if alternative.reason is None:
        return 0, alternative.slower or 0.0
    return (2, 0.0) if alternative.slower is None else (1, alternative.lacking_bytes)


def _evaluated(
    question: Question, problem: Problem, best: Result, field: str, changed: list[Strategy]
) -> list[Alternative]:
    table = StrategyTable.of(changed)
    broken = first_broken(table, problem.limits, RULES)
    excluded = np.zeros(len(table), dtype=bool)
    for limit in question.limits:
        excluded |= limit.excluded(table)
    evaluated = [
        Alternative(
            value=getattr(changed[row], field), strategy=changed[row],
            reason=RULES[broken[row]].code if broken[row] >= 0 else TARGET_LIMIT,
            lacking_bytes=0.0, slower=None, device_bytes=None,
        )
        for row in np.flatnonzero((broken >= 0) | excluded).tolist()
    ]  # fmt: skip
    legal = np.flatnonzero((broken < 0) & ~excluded)
    if not len(legal):
        return evaluated
    bounds, times_s = peaks_of(problem, table.take(legal)), step_times_s(problem, table.take(legal))
    for place, row in enumerate(legal.tolist()):
        device_bytes = float(bounds.device_bytes[place])
        device_lacks = device_bytes - problem.usable_bytes
        host_lacks = float(bounds.host_bytes[place]) - problem.host_bytes_per_device
        reason = MEMORY if device_lacks > 0.0 else HOST_MEMORY if host_lacks > 0.0 else None
        evaluated.append(
            Alternative(
                value=getattr(changed[row], field), strategy=changed[row], reason=reason,
                lacking_bytes=max(device_lacks if reason == MEMORY else host_lacks, 0.0),
                slower=float(times_s[place]) / best.step_time_s - 1.0, device_bytes=device_bytes,
            )
        )  # fmt: skip
    return evaluated


# Changed questions

_FACTOR = re.compile(r"([0-9]{1,9}(?:\.[0-9]{0,9})?)x")
_LARGEST_FACTOR = 1e6
_LARGEST_COUNT = 10_000_000


def changed_question(question: Question, text: str, *, key: str = "--what-if") -> Question:
    """The question with the changes in `text`: `name=2x` multiplies a value, `name=quantity` sets it.

    Names are the keys of CHANGES. Raises ConfigError, located at `key`, for an unknown or repeated name, for
    a value that is neither a factor nor a quantity of that kind, and for a value that the cluster cannot
    have.
    """
    changed, names = question, set[str]()
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in pair.partition("="))
        if name not in CHANGES:
            raise unknown("is not known", name, CHANGES, key=key)
        where = f"{key}.{name}"
        if not equals or not value:
            raise ConfigError("needs a value", key=where, allowed="a factor such as 2x, or a quantity")
        if name in names:
            raise ConfigError("is given twice", key=where)
        names.add(name)
        try:
            changed = CHANGES[name](changed, value)
        except ConfigError as error:
            raise ConfigError(error.message, key=where, found=error.found, allowed=error.allowed) from None
    if not names:
        raise ConfigError("names no change", key=key, found=short_repr(text), allowed=", ".join(CHANGES))
    return changed


def _ratio(value: str, unit: str, now: float) -> float:
    """The factor by which a value that is `now` changes."""
    match = _FACTOR.fullmatch(value)
    try:
        ratio = float(match[1]) if match else parse_quantity(value, unit) / now
    except ConfigError as error:
        raise ConfigError(
            error.message, found=error.found, allowed=f"a factor such as 2x, or {error.allowed}"
        ) from None
    if not 1.0 / _LARGEST_FACTOR <= ratio <= _LARGEST_FACTOR:
        raise ConfigError(
            "is out of range",
            found=short_repr(value),
            allowed=f"1/{_LARGEST_FACTOR:g} to {_LARGEST_FACTOR:g} times",
        )
    return ratio


def _count(value: str, now: int) -> int:
    """A whole number, or a multiple of the present number `now`."""
    match = _FACTOR.fullmatch(value)
    number = float(match[1]) * now if match else float(value) if re.fullmatch(r"[0-9]{1,9}", value) else 0.0
    if not number.is_integer() or not 1 <= number <= _LARGEST_COUNT:
        allowed = f"1 to {_LARGEST_COUNT}, or a factor that gives a whole number"
        raise ConfigError("is not a whole number in range", found=short_repr(value), allowed=allowed)
    return int(number)


def _inter_node(question: Question, value: str) -> Question:
    cluster = question.cluster
    if not any(tier.is_network for tier in cluster.tiers):
        raise ConfigError("the cluster has no network between nodes", found=cluster.name)
    ratio = _ratio(value, "B/s", cluster.nodes[0].nic_bytes_per_s)
    return _with_cluster(question, _retiered(_with_nodes(cluster, lambda node: replace(
        node, nic_bytes_per_s=node.nic_bytes_per_s * ratio
    )), ratio, is_network=True))  # fmt: skip


def _intra_node(question: Question, value: str) -> Question:
    cluster = question.cluster
    inside = [tier for tier in cluster.tiers if not tier.is_network]
    if not inside:
        raise ConfigError("the cluster has no fabric inside nodes", found=cluster.name)
    ratio = _ratio(value, "B/s", inside[0].bytes_per_s)

    def faster(node: Node) -> Node:
        given = node.scale_up_bytes_per_s
        return node if given is None else replace(node, scale_up_bytes_per_s=given * ratio)

    devices = _with_devices(
        cluster, lambda device: replace(device, scale_up_bytes_per_s=device.scale_up_bytes_per_s * ratio)
    )
    return _with_cluster(question, _retiered(_with_nodes(devices, faster), ratio, is_network=False))


def _memory(question: Question, value: str) -> Question:
    ratio = _ratio(value, "B", min(device.memory_bytes for device in question.cluster.classes.values()))
    return _with_cluster(question, _with_devices(
        question.cluster, lambda device: replace(device, memory_bytes=round(device.memory_bytes * ratio))
    ))  # fmt: skip


def _flops(question: Question, value: str) -> Question:
    dtype = find_recipe(question.job.dtype).matmul
    now = min(device.peak_flop_per_s[dtype] for device in question.cluster.classes.values())
    ratio = _ratio(value, "FLOP/s", now)
    return _with_cluster(question, _with_devices(question.cluster, lambda device: replace(
        device, peak_flop_per_s={name: peak * ratio for name, peak in device.peak_flop_per_s.items()}
    )))  # fmt: skip


def _host_memory(question: Question, value: str) -> Question:
    cluster = question.cluster
    ratio = _ratio(value, "B", min(node.host_memory_bytes for node in cluster.nodes))
    return _with_cluster(question, _with_nodes(
        cluster, lambda node: replace(node, host_memory_bytes=node.host_memory_bytes * ratio)
    ))  # fmt: skip


def _devices(question: Question, value: str) -> Question:
    return _with_cluster(question, resized(question.cluster, _count(value, question.cluster.devices)))


def _nodes(question: Question, value: str) -> Question:
    cluster = question.cluster
    count = _count(value, len(cluster.nodes))
    if count % len(cluster.nodes) == 0:
        factor = count // len(cluster.nodes)
        return question if factor == 1 else _with_cluster(question, multiplied(cluster, factor))
    first_nodes = cluster.nodes[:count]
    more = (count - len(first_nodes)) * cluster.nodes[-1].devices
    return _with_cluster(question, resized(cluster, sum(node.devices for node in first_nodes) + more))


def _seq_len(question: Question, value: str) -> Question:
    job = question.job
    return replace(question, job=job.with_seq_len(_count(value, job.seq_len)))


def _batch(question: Question, value: str) -> Question:
    size = _count(value, question.job.global_batch_size)
    return replace(question, job=replace(question.job, global_batch_size=size))


CHANGES: Mapping[str, Callable[[Question, str], Question]] = {
    "inter_node_bandwidth": _inter_node,
    "intra_node_bandwidth": _intra_node,
    "memory": _memory,
    "flops": _flops,
    "devices": _devices,
    "nodes": _nodes,
    "seq_len": _seq_len,
    "global_batch_size": _batch,
    "host_memory": _host_memory,
}
"""The values that can be changed. Quantities apply to a network card (inter_node_bandwidth), to a device
(intra_node_bandwidth, memory, flops: dense peak in the job's dtype) and to the host of a node (host_memory).
On a mixed cluster the quantity applies to the smallest value, and the others keep their proportion."""


def _with_cluster(question: Question, cluster: Cluster) -> Question:
    return replace(question, cluster=cluster)


def _with_devices(cluster: Cluster, change: Callable[[Device], Device]) -> Cluster:
    return replace(cluster, classes={name: change(device) for name, device in cluster.classes.items()})


def _with_nodes(cluster: Cluster, change: Callable[[Node], Node]) -> Cluster:
    """Changes the nodes; nodes that share one record still share one."""
    changed: dict[int, Node] = {}
    for node in cluster.nodes:
        if id(node) not in changed:
            changed[id(node)] = change(node)
    return replace(cluster, nodes=tuple(changed[id(node)] for node in cluster.nodes))


def _retiered(cluster: Cluster, ratio: float, *, is_network: bool) -> Cluster:
    """Multiplies the bandwidth of the tiers of one kind by `ratio`. Tiers replace a link graph, if the
    cluster has one."""

    def faster(tier: Tier) -> Tier:
        return replace(
            tier, bytes_per_s=tier.bytes_per_s * ratio, flow_bytes_per_s=tier.flow_bytes_per_s * ratio
        )

    tiers = tuple(faster(tier) if tier.is_network == is_network else tier for tier in cluster.tiers)
    return replace(cluster, tiers=tiers, links=(), is_without_links=cluster.has_links_as_tiers)


# Explanations


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """What more of a resource brings: `change` as `what_if` reads it, the step time in seconds of the optimum
    then, and the `gain`, the share by which a sequence takes less time than in the optimum of the plan's
    question."""

    resource: str
    change: str
    step_time_s: float
    gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The outcomes of all candidates, the best plan with another value of each field, and what binds.

    `unexplored` counts the candidates left out if the search ended early, `unsearched` the values of fields
    for which no time was left; `is_interrupted`: the user ended it. `agrees`: the search found the step time
    of the optimum again. `relaxed` is what more of each resource brings, most first.
    """

    best: Result
    entries: tuple[LedgerEntry, ...]
    totals: Mapping[str, int]
    unexplored: int
    is_interrupted: bool
    agrees: bool
    axes: tuple[Axis, ...]
    binding: Binding
    relaxed: tuple[Relaxation, ...] = ()
    unsearched: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ResultDifference:
    """Two results, term by term."""

    before: Result
    after: Result

    @property
    def has_strategies(self) -> bool:
        """Whether both are uniform strategies."""
        return self.before.fields is not None and self.after.fields is not None

    @property
    def has_equal_terms(self) -> bool:
        """Whether both are estimated in the same terms, so that these can be compared one by one."""
        return not set(self.before.breakdown).isdisjoint(self.after.breakdown)

    @property
    def fields(self) -> dict[str, tuple[Value, Value]]:
        """Fields of the strategy that differ: their values before and after; none if a plan is uneven."""
        if not self.has_strategies:
            return {}
        pairs = {
            name: (getattr(self.before.strategy, name), getattr(self.after.strategy, name)) for name in FIELDS
        }
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    @property
    def breakdown_s(self) -> dict[str, float]:
        """Additional seconds of each part; they sum to the difference of the step times."""
        return _more(self.before.breakdown, self.after.breakdown)

    @property
    def memory_bytes(self) -> dict[str, float]:
        """Additional bytes of each part, each on the tightest rank of its own strategy; they sum to the
        difference."""
        return _more(self.before.memory, self.after.memory)

    def rows(self) -> list[dict[str, object]]:
        """A row for a data frame for each term of the step time, in seconds, and of memory, in bytes: before,
        after and the difference."""
        before, after = self.before, self.after
        return [
            {
                "term": name,
                "unit": unit,
                "before": first.get(name),
                "after": second.get(name),
                "more": more[name],
            }
            for unit, first, second, more in (
                ("s", before.breakdown, after.breakdown, self.breakdown_s),
                ("B", before.memory, after.memory, self.memory_bytes),
            )
            for name in more
        ]

    def __repr__(self) -> str:
        before, after = self.before, self.after
        fields = ", ".join(f"{name} {old} to {new}" for name, (old, new) in self.fields.items())
        return (
            f"<{type(self).__name__}: {format_seconds(before.step_time_s)} to "
            f"{format_seconds(after.step_time_s)} a step, {format_bytes(before.peak_memory.device)} to "
            f"{format_bytes(after.peak_memory.device)}{f'; {fields}' if fields else ''}>"
        )

    def _repr_html_(self) -> str:
        rows = [
            [str(row["term"]).replace("_", " "), *map(text, (row["before"], row["after"], row["more"]))]
            for row in self.rows()
            for text in [_seconds_text if row["unit"] == "s" else _bytes_text]
            if row["more"]
        ]
        return panel(repr(self)[1:-1], table(("term", "before", "after", "difference"), rows))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanComparison(ResultDifference):
    """The plan's result compared with the answer to another question."""

    question: Question
    answer: Answer


def _seconds_text(value: object) -> str:
    return format_seconds(value) if isinstance(value, float) else ""


def _bytes_text(value: object) -> str:
    return format_bytes(value) if isinstance(value, float) else ""


def _more(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: after.get(name, 0.0) - before.get(name, 0.0) for name in dict.fromkeys((*before, *after))}


def question_of(plan: Plan, *, workers: int = 1, budget_s: float | None = None) -> Question:
    """The question that a plan answers, on the devices that it uses. The certificate of a uniform strategy
    has the restrictions of its target too."""
    has_restrictions = plan.certificate is not None and plan.certificate.space != UNEVEN_SPACE
    restrictions = plan.certificate if plan.certificate is not None and has_restrictions else plan.question
    return Question(
        model=plan.model,
        cluster=plan.cluster,
        job=plan.job,
        space=restrictions.space,
        fixed=restrictions.fixed,
        axes=restrictions.axes,
        stage_dp=plan.question.stage_dp,
        mixed_stage_rows=plan.question.mixed_stage_rows,
        objective="memory" if plan.objective == "memory" else "time",
        top=len(plan.runners_up),
        workers=workers,
        budget_s=budget_s,
        limits=() if plan.target is None else searched_limits(plan.target, plan.model, plan.job),
        has_empty_ends=plan.certificate is not None and plan.certificate.empty_ends,
        has_own_set=plan.certificate is not None and plan.certificate.own_set,
    )


def _requested(plan: Plan, *, workers: int, budget_s: float | None) -> Question:
    """The question of a plan, on the requested cluster where it is known: then with its objective, and with
    the restrictions of its target on that cluster."""
    used, wanted = question_of(plan, workers=workers, budget_s=budget_s), plan.question
    if wanted.cluster is None:
        return used
    whole = replace(
        used, cluster=wanted.cluster, objective=wanted.objective, use_all=wanted.use_all, space=wanted.space,
        fixed=wanted.fixed, axes=wanted.axes,
    )  # fmt: skip
    return without_target(whole) if wanted.target is None else restricted_to(target_of(wanted.target), whole)


def why_not(
    of: Plan,
    pinned: Mapping[str, Value],
    *,
    workers: int = 1,
    budget_s: float | None = None,
    progress: Progress | None = None,
) -> PlanComparison:
    """The best uniform strategy with some fields pinned, compared with the given plan. Pinned values override
    the values that the plan's question fixed. Raises Infeasible, with reason counts, if nothing with these
    values fits."""
    requested = _requested(of, workers=workers, budget_s=budget_s)
    axes = {name: values for name, values in requested.axes.items() if name not in pinned}
    return _compared(of, replace(requested, fixed={**requested.fixed, **pinned}, axes=axes, top=0), progress)


def what_if(
    of: Plan,
    changes: str,
    *,
    workers: int = 1,
    budget_s: float | None = None,
    progress: Progress | None = None,
) -> PlanComparison:
    """The best plan on a changed cluster or for a changed job, compared with the given plan: see
    `changed_question`."""
    requested = replace(_requested(of, workers=workers, budget_s=budget_s), top=0)
    return _compared(of, changed_question(requested, changes), progress)


def _compared(of: Plan, question: Question, progress: Progress | None) -> PlanComparison:
    is_pinned = bool(question.fixed or question.axes)
    target = None if of.target is None else target_of(of.target)
    try:
        if is_mixed(question.cluster) and question.objective == "time" and not is_pinned:
            answer = plan_mixed_cluster(question, target=target, progress=progress)
        elif target is not None:
            runs = target.for_job(question.model, question.job)
            answer = within_limits(runs, question, partial(plan, progress=progress))
        else:
            answer = plan(question, progress=progress)
    except Infeasible as error:
        raise Infeasible(error.message, reasons=error.reasons) from None
    answer = recommended(answer, question, target, of.question.tolerance, SearchClock(question.budget_s))
    used = question if answer.cluster is None else replace(question, cluster=answer.cluster)
    return PlanComparison(before=of.best, after=answer.best, question=used, answer=answer)
