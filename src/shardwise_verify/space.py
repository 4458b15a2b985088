"""The search space, counted by the checker's own code from docs/reference/space.md: by sums of products,
never row by row.

`count_space` counts the candidates of a declared space; `SpaceDefinition` has the rows of the table.
`count_pipelines` counts the pipelines of uneven plans by combinatorics, without listing them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import combinations, permutations, product
from math import comb, factorial, isqrt, lcm, prod

import numpy as np

from shardwise_verify.modules import is_set
from shardwise_verify.reading import InputError
from shardwise_verify.records import (
    AXES,
    CP_KINDS,
    FIELDS,
    OFFLOADS,
    RECOMPUTES,
    SCHEDULES,
    Value,
)
from shardwise_verify.targets import NO_TARGET_LIMITS, TargetLimits

SPACES = ("core", "default")
PIPELINE_FIELDS = ("schedule", "vpp")
LAYER_FIELDS = (
    "first_stage_layers",
    "last_stage_layers",
    "recompute",
    "recompute_modules",
    "recompute_layers",
)
WORDS = (*CP_KINDS, *SCHEDULES, *RECOMPUTES, *OFFLOADS)
ALIASES = ("zero_stage", "dp_replicate", "dp_shard")

NOTES: Mapping[str, str] = {
    "tp": "tp * cp * pp * dp = devices",
    "pp": "tp * cp * pp * dp = devices",
    "cp": "tp * cp * pp * dp = devices",
    "dp": "tp * cp * pp * dp = devices",
    "vpp": "1; 2 for zb_v and dualpipe_v; 2 to layers / pp for interleaved_1f1b",
    "cp_kind": "a choice where cp > 1",
    "ep": "etp * ep divides tp * cp * dp",
    "etp": "etp * ep divides tp * cp * dp",
    "param_shard": "param_shard | grad_shard | optim_shard | dp * cp",
    "grad_shard": "param_shard | grad_shard | optim_shard | dp * cp",
    "optim_shard": "param_shard | grad_shard | optim_shard | dp * cp",
    "micro_batch_size": "divides global batch / dp; 1 where dp does not divide the global batch",
    "schedule": "1f1b where pp = 1",
    "sequence_parallel": "a choice where tp > 1",
    "recompute": "a choice everywhere",
    "recompute_modules": "none, unless named; then a choice where recompute is selective",
    "recompute_layers": "0; 1 to the largest number of layers on a stage where recompute is full",
    "offload": "a choice everywhere",
    "axis_order": "orders of the axes larger than 1",
    "first_stage_layers": "0 to the even share; 0 to all layers where there are two stages",
    "last_stage_layers": "0 to the even share; the remaining layers where there are two stages",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceCount:
    """The number of candidates of a space, and the values of its fields.

    `axes` maps each field of a strategy to all values that occur in some candidate, as text, in order;
    `recompute_modules` only where some candidate names modules.
    `notes` has one line per field: what its values depend on.
    """

    count: int
    axes: Mapping[str, tuple[str, ...]]
    notes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Choices:
    """The joint choices of some fields: their number, and the values that each field takes."""

    count: int
    values: Mapping[str, frozenset[Value]]


def count_space(
    *,
    model_layers: int,
    experts: int | None,
    devices: int,
    global_batch_size: int,
    space: str,
    fixed: Mapping[str, object],
    axes: Mapping[str, Collection[object]] | None = None,
    empty_ends: bool = False,
    own_set: bool = False,
) -> SpaceCount:
    """Exact number of candidates of `space` (`core` or `default`) on exactly `devices` devices.

    `experts` is None for a dense model. `fixed` restricts the space to candidates with these values of
    strategy fields or of the aliases `zero_stage`, `dp_replicate`, `dp_shard` (docs/reference/space.md);
    `axes` restricts fields to one of several values. With `empty_ends` (of a target) interleaved pipelines
    have up to two stages more than layers. With `own_set` selective recomputation also has the own set of
    our runtime where `axes` names modules. Raises InputError for an unknown space, an unknown field, or a
    size below 1.
    """
    axes = {} if axes is None else axes
    _require_known(space, fixed, axes)
    for name, size in {
        "model_layers": model_layers,
        "devices": devices,
        "global_batch_size": global_batch_size,
    }.items():
        if size < 1:
            raise InputError("size out of range", key=name, found=str(size), allowed="1 or more")
    rows = SpaceDefinition(
        layers=model_layers,
        is_moe=experts is not None,
        devices=devices,
        batch=global_batch_size,
        is_core=space == "core",
        fixed=fixed,
        axes=axes,
        empty_ends=empty_ends,
        own_set=own_set,
    )
    count, values = rows.total()
    if values["recompute_modules"] == {""}:
        del values["recompute_modules"]
    occurring = {
        name: tuple(_text(value) for value in sorted(found, key=_place)) for name, found in values.items()
    }
    return SpaceCount(count=count, axes=occurring, notes=NOTES)


def _require_known(space: str, fixed: Mapping[str, object], axes: Mapping[str, object]) -> None:
    if space not in SPACES:
        raise InputError("unknown space", key="space", found=space, allowed=", ".join(SPACES))
    for name in fixed:
        if name not in FIELDS and name not in ALIASES:
            raise InputError(
                "unknown strategy field", key="fixed", found=name, allowed=", ".join(FIELDS + ALIASES)
            )
    for name in axes:
        if name not in FIELDS:
            raise InputError("unknown strategy field", key="axes", found=name, allowed=", ".join(FIELDS))


@dataclass(frozen=True, kw_only=True)
class SpaceDefinition:
    """The rows of the table in docs/reference/space.md, each as a method from the degrees that it depends on
    to its choices.

    Given (tp, cp, pp, dp), the rows are independent of each other, except 7, 8 and 9, which `pipelines`
    combines. So the number of candidates with these degrees is the product of the numbers of the rows.
    Candidates that `target_limits` exclude are counted too.
    """

    layers: int
    is_moe: bool
    devices: int
    batch: int
    is_core: bool
    fixed: Mapping[str, object]
    axes: Mapping[str, Collection[object]] = field(default_factory=dict)
    target_limits: TargetLimits = NO_TARGET_LIMITS
    empty_ends: bool = False
    own_set: bool = False

    def total(self) -> tuple[int, dict[str, set[Value]]]:
        """Sum over the degrees of the product of the rows, and the values that occur in some candidate."""
        memo: dict[tuple[Callable[..., Choices], tuple[int, ...]], Choices] = {}
        values: dict[str, set[Value]] = {name: set() for name in FIELDS}
        count = 0
        occurring: set[tuple[Callable[..., Choices], tuple[int, ...]]] = set()
        for tp, cp, pp, dp in self.degrees():
            keys = (
                (self.cp_kinds, (cp,)),
                (self.expert_degrees, (tp if self.is_core else tp * cp * dp,)),
                (self.axis_orders, (tp > 1, cp > 1, dp > 1, pp > 1)),
                (self.sequence_parallels, (tp,)),
                (self.micro_batch_sizes, (dp,)),
                (self.pipelines, (pp,)),
                (self.shards, (dp * cp,)),
                (self.offloads, ()),
            )
            for method, arguments in keys:
                if (method, arguments) not in memo:
                    memo[method, arguments] = method(*arguments)
            number = prod(memo[key].count for key in keys)
            if number:
                count += number
                occurring.update(keys)
                for axis, degree in zip(AXES, (tp, cp, dp, pp), strict=True):
                    values[axis].add(degree)
        for key in occurring:
            for name, found in memo[key].values.items():
                values[name] |= found
        return count, values

    def allows(self, **values: Value) -> bool:
        """Whether the fixed fields and the axes allow these values."""
        return all(
            (name not in self.fixed or self.fixed[name] == value)
            and (name not in self.axes or value in self.axes[name])
            for name, value in values.items()
        )

    def choices(self, names: tuple[str, ...], rows: Iterable[tuple[Value, ...]]) -> Choices:
        """The rows that the fixed fields and the axes allow."""
        allowed_rows = [row for row in rows if self.allows(**dict(zip(names, row, strict=True)))]
        columns = zip(*allowed_rows, strict=True) if allowed_rows else ((),) * len(names)
        return Choices(
            len(allowed_rows), {name: frozenset(column) for name, column in zip(names, columns, strict=True)}
        )

    def degrees(self) -> Iterator[tuple[int, int, int, int]]:
        """Row 1: every allowed (tp, cp, pp, dp) with product `devices`."""
        for tp in divisors(self.devices):
            for cp in (1,) if self.is_core else divisors(self.devices // tp):
                for pp in divisors(self.devices // (tp * cp)):
                    dp = self.devices // (tp * cp * pp)
                    if self.allows(tp=tp, cp=cp, pp=pp, dp=dp):
                        yield tp, cp, pp, dp

    def cp_kinds(self, cp: int) -> Choices:
        """Row 2."""
        return self.choices(("cp_kind",), [(kind,) for kind in (CP_KINDS if cp > 1 else CP_KINDS[:1])])

    def expert_degrees(self, width: int) -> Choices:
        """Row 3; `width` is tp * cp * dp (tp in core)."""
        if not self.is_moe:
            rows = [(1, 1)]
        elif self.is_core:
            rows = [(width, 1)]
        else:
            rows = [(etp, ep) for etp in divisors(width) for ep in divisors(width // etp)]
        return self.choices(("etp", "ep"), rows)

    def axis_orders(self, *is_split: bool) -> Choices:
        """Row 4; `is_split` says which of AXES are larger than 1."""
        split = [axis for axis, larger in zip(AXES, is_split, strict=True) if larger]
        orders: dict[tuple[str, ...], str] = {}
        for order in permutations(AXES):
            orders.setdefault(tuple(axis for axis in order if axis in split), "-".join(order))
        allowed_rows = list(orders.values())[:1] if self.is_core else orders.values()
        return self.choices(("axis_order",), [(order,) for order in allowed_rows])

    def sequence_parallels(self, tp: int) -> Choices:
        """Row 5."""
        return self.choices(("sequence_parallel",), [(False,), (True,)] if tp > 1 else [(False,)])

    def micro_batch_sizes(self, dp: int) -> Choices:
        """Row 6."""
        sizes = divisors(self.batch // dp) if self.batch % dp == 0 else (1,)
        return self.choices(("micro_batch_size",), [(size,) for size in sizes])

    def offloads(self) -> Choices:
        """Row 11."""
        return self.choices(("offload",), [(kind,) for kind in (OFFLOADS[:1] if self.is_core else OFFLOADS)])

    def shards(self, ranks: int) -> Choices:
        """Row 10; `ranks` is dp * cp (dp in core, where cp is 1)."""
        names = ("param_shard", "grad_shard", "optim_shard")
        aliased = self.aliased_shards(ranks)
        if self.is_core:
            stages = {(1, 1, 1), (1, 1, ranks), (1, ranks, ranks), (ranks, ranks, ranks)}
            return self.choices(names, stages & aliased if aliased is not None else stages)
        if aliased is not None:
            return self.choices(names, aliased)
        count = 0
        values: tuple[set[Value], set[Value], set[Value]] = (set(), set(), set())
        for optim in (d for d in divisors(ranks) if self.allows(optim_shard=d)):
            for grad in (d for d in divisors(optim) if self.allows(grad_shard=d)):
                params = [d for d in divisors(grad) if self.allows(param_shard=d)]
                count += len(params)
                for found, new in zip(
                    values, (params, [grad] * len(params), [optim] * len(params)), strict=True
                ):
                    found.update(new)
        return Choices(count, dict(zip(names, map(frozenset, values), strict=True)))

    def aliased_shards(self, ranks: int) -> set[tuple[int, int, int]] | None:
        """Row 10 under `zero_stage` (default 3), `dp_shard` and `dp_replicate`; None where none is fixed."""
        if not any(alias in self.fixed for alias in ALIASES):
            return None
        stage = self.fixed.get("zero_stage", 3)
        shard, replicate = self.fixed.get("dp_shard"), self.fixed.get("dp_replicate")
        degrees = divisors(ranks) if shard is not None or replicate is not None else (ranks,)
        return {
            chain
            for d in degrees
            if shard in (None, d) and replicate in (None, ranks // d)
            for number, chain in enumerate([(1, 1, 1), (1, 1, d), (1, d, d), (d, d, d)])
            if number == stage
        }

    def pipelines(self, pp: int) -> Choices:
        """Rows 7, 8 and 9: schedules with the same number of stages have the same choices of layers and
        recompute."""
        by_stages: dict[int, list[tuple[str, int]]] = {}
        for schedule, vpp in self.schedules(pp):
            if self.allows(schedule=schedule, vpp=vpp):
                by_stages.setdefault(pp * vpp, []).append((schedule, vpp))
        count, values = 0, {name: set[Value]() for name in PIPELINE_FIELDS + LAYER_FIELDS}
        for stages, allowed_rows in by_stages.items():
            layers = self.stage_layers(stages)
            if layers.count:
                count += len(allowed_rows) * layers.count
                values["schedule"].update(schedule for schedule, _ in allowed_rows)
                values["vpp"].update(vpp for _, vpp in allowed_rows)
                for name, found in layers.values.items():
                    values[name] |= found
        return Choices(count, {name: frozenset(found) for name, found in values.items()})

    def schedules(self, pp: int) -> list[tuple[str, int]]:
        """Row 7."""
        if pp == 1:
            return [("1f1b", 1)]
        pairs = [("1f1b", 1), ("gpipe", 1)]
        most = self.layers + (2 if self.empty_ends else 0)
        pairs += [("interleaved_1f1b", vpp) for vpp in range(2, most // pp + 1)]
        return pairs if self.is_core else [*pairs, ("zb_h1", 1), ("zb_h2", 1), ("zb_v", 2), ("dualpipe_v", 2)]

    def stage_layers(self, stages: int) -> Choices:
        """Rows 8 and 9 for `stages` = pp * vpp.

        From three stages on, the first and the last never exceed the fullest stage between them. So the
        largest number of layers on a stage depends only on first + last: pairs are counted by their sum.
        """
        layers, (even_first, even_last) = self.layers, self.even_ends(stages)
        if stages == 1 or self.is_core:
            return self.recomputed([(even_first, even_last)], stages)
        if stages == 2:
            return self.recomputed([(first, layers - first) for first in range(layers + 1)], stages)
        firsts = [first for first in range(even_first + 1) if self.allows(first_stage_layers=first)]
        lasts = [last for last in range(even_last + 1) if self.allows(last_stage_layers=last)]
        if not firsts or not lasts:
            return Choices(0, {})
        pairs_of_sum = np.convolve(np.bincount(firsts), np.bincount(lasts))
        count = sum(
            int(pairs) * self.recompute_count(_ceil_div(layers - ends, stages - 2))
            for ends, pairs in enumerate(pairs_of_sum)
            if pairs
        )
        # Smaller ends leave more layers between them and more choices of recompute: every value that occurs
        # at all occurs with the smallest other end.
        seen = [(first, lasts[0]) for first in firsts] + [(firsts[0], last) for last in lasts]
        return Choices(count, self.recomputed(seen, stages).values)

    def recomputed(self, ends: list[tuple[int, int]], stages: int) -> Choices:
        """Rows 8 and 9 over the listed (first, last)."""
        allowed_rows = [
            (first, last, self.largest(first, last, stages))
            for first, last in ends
            if self.allows(first_stage_layers=first, last_stage_layers=last)
            and self.recompute_count(self.largest(first, last, stages))
        ]
        if not allowed_rows:
            return Choices(0, {})
        firsts, lasts, fullest = zip(*allowed_rows, strict=True)
        # In `default` a fuller stage has every choice of a less full one; `core` has one pair of ends.
        values = {
            "first_stage_layers": frozenset(firsts),
            "last_stage_layers": frozenset(lasts),
            **self.recomputes(max(fullest)).values,
        }
        return Choices(sum(map(self.recompute_count, fullest)), values)

    def even_ends(self, stages: int) -> tuple[int, int]:
        """(E1, E2): the layers of the first and of the last stage of an even split."""
        base, rest = divmod(self.layers, stages)
        if stages == 1:
            return self.layers, self.layers
        return base, base + (rest == stages - 1)

    def largest(self, first: int, last: int, stages: int) -> int:
        """M: the largest number of layers on a stage."""
        if stages <= 2:
            return max(first, last)
        return max(first, last, _ceil_div(self.layers - first - last, stages - 2))

    def recomputes(self, largest: int) -> Choices:
        """Row 9 where the fullest stage has `largest` layers."""
        full = (largest,) if self.is_core else range(1, largest + 1)
        rows: list[tuple[Value, ...]] = [("none", "", 0), *(("full", "", number) for number in full)]
        found = self.choices(
            ("recompute", "recompute_modules", "recompute_layers"),
            [*rows, *(("selective", modules, 0) for modules in self.module_sets)],
        )
        return found

    @cached_property
    def module_sets(self) -> tuple[str, ...]:
        """The sets of modules of selective recomputation: those that the fixed fields and the axes name; the
        empty set, which stands for the own set of our runtime, where they name none or with `own_set`."""
        given = self.axes.get("recompute_modules", ("",))
        if "recompute_modules" in self.fixed:
            fixed = self.fixed["recompute_modules"]
            given = (fixed,) if "recompute_modules" not in self.axes or fixed in given else ()
        known = tuple(str(modules) for modules in given if is_set(str(modules)))
        return known if self.own_set else tuple(modules for modules in known if modules) or known

    def recompute_count(self, largest: int) -> int:
        """The number of choices of `recomputes`."""
        if self.is_core or "recompute_layers" in self.fixed or "recompute_layers" in self.axes:
            return self.recomputes(largest).count
        return sum(
            number
            for recompute, number in (("none", 1), ("selective", len(self.module_sets)), ("full", largest))
            if self.allows(recompute=recompute)
            and (recompute == "selective" or self.allows(recompute_modules=""))
        )


def chains_of(space: SpaceDefinition, ranks: int) -> dict[tuple[int, int], list[int]]:
    """Row 10 of the space: for each (param_shard, grad_shard) the allowed optim_shard, without those that
    the target excludes."""
    chains = space.aliased_shards(ranks)
    if space.is_core:
        stages = {(1, 1, 1), (1, 1, ranks), (1, ranks, ranks), (ranks, ranks, ranks)}
        chains = stages if chains is None else stages & chains
    if chains is None:
        chains = {
            (param, grad, optim)
            for optim in divisors(ranks)
            for grad in divisors(optim)
            for param in divisors(grad)
        }
    found: dict[tuple[int, int], list[int]] = {}
    for param, grad, optim in sorted(chains):
        is_excluded = space.target_limits.excludes_shards(ranks, (param, grad, optim))
        if not is_excluded and space.allows(param_shard=param, grad_shard=grad, optim_shard=optim):
            found.setdefault((param, grad), []).append(optim)
    return found


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """The positive divisors of `number`, ascending."""
    low = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return tuple(low + [number // d for d in reversed(low) if d * d != number])


def _ceil_div(number: int, parts: int) -> int:
    return -(-number // parts)


def _place(value: Value) -> tuple[int, str]:
    """Sort key: numbers by size, named values in the order of WORDS."""
    if isinstance(value, int):
        return value, ""
    return (WORDS.index(value), "") if value in WORDS else (len(WORDS), value)


def _text(value: Value) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


RECOMPUTE_CHOICES = ("none", "selective", "full")
MAX_STAGES = 8
"""Largest number of stages of a pipeline of an uneven plan; a limit of the space, as in the planner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """A pool of equal nodes: all of its devices, and those of a node."""

    name: str
    devices: int
    node_devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCount:
    """Number of pipelines, and the axes with their values as text.

    A pipeline is a sequence of stages with layers and recomputation; for each pool the tensor parallelism and
    the replicas of its stages; and the number of its stages per node.
    """

    axes: Mapping[str, tuple[str, ...]]
    count: int


def count_pipelines(
    *,
    layers: int,
    pools: Sequence[PoolSize],
    splits: Sequence[int],
    kv_heads: int,
    global_batch_size: int,
    stage_dp: int = 1,
    mixed_stage_rows: int = 1,
) -> PipelineCount:
    """All pipelines for which there are devices. For spread stages, the devices must suffice for the set of
    identical pipelines that fills the nodes of each stage or group of stages.

    `splits` are the sizes that tensor parallelism must divide: heads, widths and the sequence. It divides the
    key and value heads, or is a multiple of them. Up to `stage_dp` replicas share the rows of a micro-batch
    whose size is a multiple of their number. Mixed-pool stages, of one kind per pipeline, split the rows of a
    micro-batch of up to `mixed_stage_rows` in any way.
    """
    degrees = [
        [
            tp
            for tp in (1 << power for power in range(pool.node_devices.bit_length()))
            if pool.node_devices % tp == 0
            and all(size % tp == 0 for size in splits)
            and (kv_heads % tp == 0 or tp % kv_heads == 0)
        ]
        for pool in pools
    ]
    replicas = [
        dp
        for dp in (1 << power for power in range(stage_dp.bit_length()))
        if dp <= stage_dp and global_batch_size % dp == 0
    ]
    batch, most = global_batch_size, min(MAX_STAGES, layers)
    splits_of_rows = sum(size - 1 for size in range(2, mixed_stage_rows + 1) if batch % size == 0)
    every = range(len(pools))
    kinds = [
        [_pool_stage_kinds(pool, some, replicas, count, most) for count in range(most + 1)]
        for pool, some in zip(pools, degrees, strict=True)
    ]
    total = 0
    for counts in product(range(most + 1), repeat=len(pools)):
        kind_counts = [
            (0, _kinds(pools, kinds, counts)),
            *(
                (
                    mixed_stages,
                    splits_of_rows
                    * _kinds_with_mixed_stages(pools, kinds, degrees, counts, pair, mixed_stages),
                )
                for pair in combinations(every, 2)
                for mixed_stages in range(1, most - sum(counts) + 1)
                if splits_of_rows
            ),
        ]
        for mixed_stages, number in kind_counts:
            stages = sum(counts) + mixed_stages
            if 1 <= stages <= most:
                orders = factorial(stages) // (
                    factorial(mixed_stages) * prod(factorial(count) for count in counts)
                )
                total += orders * number * comb(layers - 1, stages - 1) * len(RECOMPUTE_CHOICES) ** stages
    axes = {
        "pools": tuple(pool.name for pool in pools),
        "micro_batch_size": tuple(str(size) for size in range(1, batch + 1) if batch % size == 0),
        "stages of a pipeline": tuple(str(count) for count in range(1, most + 1)),
        **{f"tp on {pool.name}": tuple(map(str, some)) for pool, some in zip(pools, degrees, strict=True)},
        "stages in a node": tuple(
            str(1 << power) for power in range(most.bit_length()) if _divides_node(pools, 1 << power)
        ),
        **({"dp of a stage": tuple(map(str, replicas))} if stage_dp > 1 else {}),
        **({"rows split over two": _splits(batch, mixed_stage_rows)} if mixed_stage_rows > 1 else {}),
        "layers of a stage": (f"1 to {layers}, {layers} in all",),
        "recompute of a stage": RECOMPUTE_CHOICES,
        "pipelines": (f"1 to {min(sum(pool.devices for pool in pools), batch)}",),
        "microbatches of one": (f"1 or more, {batch} sequences in all",),
    }
    return PipelineCount(axes=axes, count=total)


def _divides_node(pools: Sequence[PoolSize], stages: int) -> bool:
    """Whether this many stages of a pipeline fill a node of some pool evenly."""
    return any(pool.node_devices % stages == 0 for pool in pools)


PoolStageKinds = Mapping[tuple[int, int], int]
"""Number of kinds of a pipeline's stages on one pool, by the devices of a stage and by the set size: how
many identical pipelines fill the nodes of spread stages (1 where the stages are not spread)."""


def _pool_stage_kinds(
    pool: PoolSize, degrees: Sequence[int], replicas: Sequence[int], count: int, most: int
) -> PoolStageKinds:
    """The kinds for this number of stages: each tp and dp, with every power of two of stages per node that
    gives a placement of its own."""
    found: Counter[tuple[int, int]] = Counter()
    for size in (tp * dp for tp in degrees for dp in replicas):
        if pool.node_devices % size:
            continue
        powers = [1 << power for power in range(most.bit_length())]
        fitting = [
            stages_per_node for stages_per_node in powers if pool.node_devices % (stages_per_node * size) == 0
        ]
        found[size, 1] += 1
        for stages_per_node in fitting[:-1]:
            # Twice as many stages per node give another placement only where the pipeline has that many
            # stages.
            if 2 * stages_per_node <= count:
                smallest = stages_per_node if count % stages_per_node == 0 else count & -count
                found[size, pool.node_devices // (smallest * size)] += 1
    return found


def _kinds(
    pools: Sequence[PoolSize],
    kinds: Sequence[Sequence[PoolStageKinds]],
    counts: Sequence[int],
    extra_devices: Sequence[int] = (),
) -> int:
    """Combinations of kinds for these numbers of stages on each pool, where a pipeline needs
    `extra_devices` more of each."""
    used = [(at, kinds[at][count]) for at, count in enumerate(counts) if count]
    more = extra_devices or (0,) * len(pools)
    total = 0
    for chosen in product(*(some for _, some in used)):
        own = {at: counts[at] * size for (at, _), (size, _) in zip(used, chosen, strict=True)}
        identical = lcm(*(set_size for _, set_size in chosen))
        if all(
            identical * (own.get(at, 0) + mixed_devices) <= pool.devices
            for at, (pool, mixed_devices) in enumerate(zip(pools, more, strict=True))
        ):
            total += prod(some[kind] for (_, some), kind in zip(used, chosen, strict=True))
    return total


def _kinds_with_mixed_stages(
    pools: Sequence[PoolSize],
    kinds: Sequence[Sequence[PoolStageKinds]],
    degrees: Sequence[Sequence[int]],
    counts: Sequence[int],
    pair: tuple[int, int],
    mixed_stages: int,
) -> int:
    """The same with mixed-pool stages on a pair of pools, any tp on either; the split of rows is not
    counted."""
    total = 0
    for one in degrees[pair[0]]:
        for other in degrees[pair[1]]:
            extra_devices = [
                mixed_stages * {pair[0]: one, pair[1]: other}.get(at, 0) for at in range(len(pools))
            ]
            total += _kinds(pools, kinds, counts, extra_devices)
    return total


def _splits(batch: int, mixed_stage_rows: int) -> tuple[str, ...]:
    """Every way to split the rows of a micro-batch whose size divides the batch."""
    sizes = [size for size in range(2, mixed_stage_rows + 1) if batch % size == 0]
    return tuple(f"{rows}+{size - rows}" for size in sizes for rows in range(1, size)) or ("none",)
