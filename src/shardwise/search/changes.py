"""Every change of one field of a strategy, with what must change beside it so that it is a candidate again.

A degree takes another degree with it, since their product is the number of devices; shards, micro-batch,
stages and recomputed layers follow where the change leaves them no other way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import gcd, lcm
from typing import Any

from shardwise.search.question import Question
from shardwise.search.space import Space, divisors
from shardwise.strategy import (
    AXES,
    CP_KINDS,
    FIELDS,
    OFFLOADS,
    ORDERS,
    RECOMPUTES,
    SCHEDULES,
    Strategy,
    canonical_orders,
    even_ends,
    largest_stage,
)

SHARDS = ("param_shard", "grad_shard", "optim_shard")


def changes_of(question: Question, best: Strategy, field: str) -> Iterator[Strategy]:
    """Candidates of the question whose `field` has another value than in `best`, all values of the axis that
    can be had from `best` this way; some values more than once."""
    changes_by = _CHANGES_BY_FIELD.get(field, _degree_changes)
    seen = {best}
    for changed in changes_by(question, best, field):
        if changed not in seen and getattr(changed, field) != getattr(best, field):
            seen.add(changed)
            if is_candidate(question, changed):
                yield changed


def is_candidate(question: Question, strategy: Strategy) -> bool:
    """Whether the question's space, with what it fixes, has this strategy."""
    values = {name: getattr(strategy, name) for name in FIELDS}
    if any(values[name] != value for name, value in question.fixed.items() if name in values):
        return False
    if any(values[name] not in allowed for name, allowed in question.axes.items()):
        return False
    space = replace(question, fixed={**question.fixed, **values}, axes={}).candidates()
    return bool(space.count_below_grids(space.grids(space.degrees())).sum())


def _degree_changes(question: Question, best: Strategy, field: str) -> Iterator[Strategy]:
    """Another degree, made up for by one of the others."""
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
    """Another degree of sharding; those that must divide it or be divided by it follow."""
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
    """Other schedules with all their chunks per rank, or other chunks under the schedules that have them."""
    variants = _unrestricted_space(question).variants(best.pp)
    for code, vpp in zip(variants.schedule.tolist(), variants.vpp.tolist(), strict=True):
        yield _repaired(question, best, schedule=SCHEDULES[code], vpp=vpp)


def _split_changes(question: Question, best: Strategy, field: str) -> Iterator[Strategy]:
    """Another first or last stage; with two stages the other one has the rest."""
    splits = _unrestricted_space(question).splits(best.pp * best.vpp)
    other = "last_stage_layers" if field == "first_stage_layers" else "first_stage_layers"
    for value, other_value in zip(splits[field].tolist(), splits[other].tolist(), strict=True):
        if best.pp * best.vpp == 2 or other_value == getattr(best, other):
            yield _with_layers(question, _changed(best, {field: value, other: other_value}))


def _recompute_changes(question: Question, best: Strategy, field: str) -> Iterator[Strategy]:
    for recompute in RECOMPUTES:
        most = _most_layers(question, best)
        for layers in range(1, most + 1) if recompute == "full" else (0,):
            yield _changed(best, {"recompute": recompute, "recompute_layers": layers})


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
    "recompute_layers": _recomputed_layer_changes,
    "first_stage_layers": _split_changes,
    "last_stage_layers": _split_changes,
    **dict.fromkeys(SHARDS, _shard_changes),
}
"""How a field changes; degrees of the mesh change in pairs."""


def _repaired(question: Question, best: Strategy, **changes: Any) -> Strategy:
    """`best` with other degrees or another schedule, and all that follows from them as near as it can be."""
    s = _changed(best, changes)
    if s.pp == 1 or (s.vpp > 1 and s.pp * s.vpp > question.model.layers):
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
    """No more layers recomputed than there are on a stage."""
    return replace(s, recompute_layers=min(s.recompute_layers, _most_layers(question, s)))


def _most_layers(question: Question, s: Strategy) -> int:
    return int(largest_stage(question.model.layers, s.pp * s.vpp, s.first_stage_layers, s.last_stage_layers))


def _with_experts(best: Strategy, s: Strategy) -> Strategy:
    """Experts split as before where the ranks allow it; where etp was tp, it still is."""
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
    """The tree without what the question fixes."""
    return replace(question, fixed={}, axes={}).candidates()
