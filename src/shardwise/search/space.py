"""The search space as a tree of choices (`Space`), and spaces that users define (`SpaceChoice`,
`read_space`).

The levels are: grids of degrees, micro-batch sizes, kinds of recomputation and offload, sharding degrees of
parameters and gradients, schedules, stage splits, recomputed layers, sharding degrees of optimizer states.
Each level adds the values of some fields to the rows of the level above. The number of candidates below a row
is computed without listing them. `Variants` are schedules with their virtual stages; a family of schedules is
bounded together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import Split, distinct_rows, known_split
from shardwise.errors import ConfigError
from shardwise.inputs import Fields, read_mapping, short_repr
from shardwise.plans import Value
from shardwise.schedule import full_moment, illegal_codes, in_flight
from shardwise.strategy import (
    ALIASES,
    CP_KINDS,
    FIELD_VALUES,
    FIELDS,
    INTERLEAVED,
    OFFLOADS,
    RECOMPUTES,
    SCHEDULES,
    Column,
    Limit,
    StrategyTable,
    canonical_orders,
    code_of,
    even_ends,
    is_value,
    largest_stage,
    most_stages,
    shards_of,
)

# Schedules

FAMILIES = np.array(
    [
        ("1f1b", "gpipe", "interleaved_1f1b", "zb_h", "v").index(name)
        for name in (
            {"zb_h1": "zb_h", "zb_h2": "zb_h", "zb_v": "v", "dualpipe_v": "v"}.get(name, name)
            for name in SCHEDULES
        )
    ]
)
"""Index of the family of each schedule; bounds of one family have the same terms."""

MANY_PER_RANK = 4
"""Micro-batches per rank that exceed the in-flight micro-batches of every schedule that limits them."""


@dataclass(frozen=True, slots=True)
class Variants:
    """Schedules with their virtual stages that a pipeline of `pp` ranks can have, as columns."""

    schedule: Column
    vpp: Column

    def __len__(self) -> int:
        return len(self.vpp)

    def take(self, rows: Any) -> Variants:
        """The variants at these rows."""
        return Variants(self.schedule[rows], self.vpp[rows])

    @property
    def families(self) -> dict[int, Variants]:
        """Variants by the index of their family."""
        each = FAMILIES[self.schedule]
        return {family: self.take(each == family) for family in np.unique(each).tolist()}

    def representative(self, pp: int) -> Variants:
        """The one variant that bounds the step times of a family from below. No member has more micro-batches
        in flight, so none does more forwards before its first backward; none has fewer virtual stages."""
        in_flight_count = in_flight(self.schedule, pp, MANY_PER_RANK * pp, self.vpp, 0)
        most = int(np.argmax(in_flight_count))
        return Variants(self.schedule[most : most + 1], self.vpp.min(keepdims=True))

    def fewest_in_flight(self, pp: int, microbatches: NDArray[np.int64]) -> NDArray[np.float64]:
        """Fewest micro-batches in flight over all variants, on every stage of each rank; shape (pp, rows)."""
        rank, schedule, m = np.arange(pp)[:, None, None], self.schedule[:, None], microbatches[None]
        in_flight_count = full_moment(schedule, pp, m, self.vpp[:, None], rank).each
        return np.asarray(in_flight_count.min(axis=1), dtype=np.float64)


# The space

Degrees = tuple[int, int, int, int]
"""tp, cp, dp, pp."""

Options = Mapping[str, Sequence[int] | Column]
"""Values of some fields: equally long columns, one entry per option."""

SPACES = ("core", "default")
NONE, SELECTIVE, FULL = (RECOMPUTES.index(name) for name in ("none", "selective", "full"))


@lru_cache(maxsize=1 << 14)
def divisors(n: int) -> tuple[int, ...]:
    """All divisors of n >= 1, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return tuple(dict.fromkeys((*small, *(n // d for d in reversed(small)))))


@dataclass(frozen=True)
class Space:
    """A named space (docs/reference/space.md) on `devices` devices.

    `fixed` restricts fields to one value and may use the aliases of sharding degrees; `axes` restricts fields
    to several values. Choices that exceed one of `limits` (of a target, for the model) are listed as shapes
    and counted as candidates, but not listed as grids or sharding options: the search rejects them. With
    `has_even_stages` stages are split evenly. With `has_empty_ends` interleaved pipelines may have two stages
    more than layers.
    """

    name: str
    devices: int
    layers: int
    experts: bool
    global_batch_size: int
    fixed: Mapping[str, Any]
    axes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    limits: tuple[Limit, ...] = ()
    has_even_stages: bool = False
    has_empty_ends: bool = False
    has_own_set: bool = False

    @property
    def declared(self) -> dict[str, Any]:
        """The constructor arguments of the space, which its parts share."""
        return {f.name: getattr(self, f.name) for f in fields(Space)}

    @property
    def is_core(self) -> bool:
        """Whether this is the named space `core`."""
        return self.name == "core"

    @cached_property
    def _codes(self) -> dict[str, NDArray[np.int64]]:
        """The allowed codes of each restricted field."""
        allowed = {name: {code_of(name, value) for value in values} for name, values in self.axes.items()}
        for name, value in self.fixed.items():
            if name in FIELDS:
                allowed[name] = allowed.get(name, {code_of(name, value)}) & {code_of(name, value)}
        return {name: np.array(sorted(codes), dtype=np.int64) for name, codes in allowed.items()}

    def _allowed(self, options: Options) -> dict[str, Column]:
        """The options whose values are all allowed."""
        columns = {name: np.asarray(values, dtype=np.int64) for name, values in options.items()}
        keep = np.ones(len(next(iter(columns.values()))), dtype=bool)
        for name, values in columns.items():
            if name in self._codes:
                keep &= np.isin(values, self._codes[name])
        return {name: values[keep] for name, values in columns.items()}

    def allowed(self, name: str, degrees: Iterable[int]) -> list[int]:
        """Those of `degrees` that the field `name` allows."""
        allowed = self._codes.get(name)
        return [degree for degree in degrees if allowed is None or degree in allowed]

    def _degrees(self, name: str, of: int) -> list[int]:
        """The allowed divisors of `of`."""
        return self.allowed(name, divisors(of))

    def degrees(self) -> list[Degrees]:
        """Every (tp, cp, dp, pp) whose product is the number of devices."""
        return [
            (tp, cp, dp, self.devices // (tp * cp * dp))
            for tp in self._degrees("tp", self.devices)
            for cp in ([1] if self.is_core else self._degrees("cp", self.devices // tp))
            for dp in self._degrees("dp", self.devices // (tp * cp))
        ]

    def grids(self, degrees: Sequence[Degrees]) -> StrategyTable:
        """Every grid with these degrees: the first level. Fields of later levels have their plain values."""
        return self.with_orders(self.shapes(degrees))[1]

    def shapes(self, degrees: Sequence[Degrees]) -> StrategyTable:
        """Grids with these degrees without their axis orders; each row represents `count_orders` grids."""
        rows = [self._shapes_of(*each) for each in degrees]
        every = np.concatenate([np.zeros((0, len(_SHAPE_FIELDS)), dtype=np.int64), *rows])
        columns = self._allowed({name: every[:, i] for i, name in enumerate(_SHAPE_FIELDS)})
        return self.plain(self._restrict_shapes(columns))

    def _restrict_shapes(self, columns: Mapping[str, Column]) -> Mapping[str, Column]:
        """The shapes that a part of the space has; a subclass may restrict them."""
        return columns

    def _shapes_of(self, tp: int, cp: int, dp: int, pp: int) -> NDArray[np.int64]:
        """All shapes with these degrees, one row each, in the order of `_SHAPE_FIELDS`."""
        kinds = range(len(CP_KINDS)) if cp > 1 else (0,)
        rest = np.array(list(product(kinds, (1, 0) if tp > 1 else (0,))), dtype=np.int64)
        experts = np.array(self._expert_grids(tp, cp, dp), dtype=np.int64).reshape(-1, 2)
        rows = np.concatenate(
            [np.repeat(experts, len(rest), axis=0), np.tile(rest, (len(experts), 1))], axis=1
        )
        return np.concatenate([np.broadcast_to(np.array([tp, cp, dp, pp]), (len(rows), 4)), rows], axis=1)

    @cached_property
    def _orders(self) -> dict[tuple[bool, ...], Column]:
        return {}

    def orders(self, tp: int, cp: int, dp: int, pp: int) -> dict[str, Column]:
        """Axis orders of grids with these degrees, the default order first."""
        key = (tp > 1, cp > 1, dp > 1, pp > 1)
        if key not in self._orders:
            codes = (0,) if self.is_core else canonical_orders({"tp": tp, "cp": cp, "dp": dp, "pp": pp})
            self._orders[key] = self._allowed({"axis_order": codes})["axis_order"]
        return {"axis_order": self._orders[key]}

    def with_orders(self, table: StrategyTable) -> tuple[NDArray[np.intp], StrategyTable]:
        """The row that each result comes from, and every row with each of its axis orders within the
        limits."""
        row, table = expanded(table, [table.tp, table.cp, table.dp, table.pp], self.orders)
        if not self._limits_of("grid", "order") or not len(table):
            return row, table
        within = np.flatnonzero(~self._beyond(table, "grid", "order"))
        return row[within], table.take(within)

    def _limits_of(self, *levels: str) -> list[Limit]:
        return [limit for limit in self.limits if limit.level in levels]

    def _beyond(self, table: Any, *levels: str) -> NDArray[np.bool_]:
        """Whether each row exceeds some limit of these levels."""
        found = np.zeros(len(table.dp), dtype=bool)
        for limit in self._limits_of(*levels):
            found |= limit.excluded(table)
        return found

    def _expert_grids(self, tp: int, cp: int, dp: int) -> list[tuple[int, int]]:
        if not self.experts:
            return [(1, 1)]
        if self.is_core:
            return [(tp, 1)]
        ranks = tp * cp * dp
        return [(etp, ep) for etp in self._degrees("etp", ranks) for ep in self._degrees("ep", ranks // etp)]

    def plain(self, columns: Mapping[str, Column]) -> StrategyTable:
        """A table of grids whose other fields have plain values: even split, nothing recomputed, sharded or
        offloaded."""
        one = np.ones(len(columns["tp"]), dtype=np.int64)
        first, last = even_ends(self.layers, np.asarray(columns["pp"]))
        ones = ("vpp", "param_shard", "grad_shard", "optim_shard", "micro_batch_size")
        zeros = ("axis_order", "schedule", "recompute", "recompute_modules", "recompute_layers", "offload")
        plain = dict.fromkeys(ones, one) | dict.fromkeys(zeros, 0 * one)
        ends = {"first_stage_layers": first.astype(np.int64), "last_stage_layers": last.astype(np.int64)}
        return StrategyTable(**plain, **ends, **columns)

    def micro_batch_sizes(self, dp: int) -> dict[str, Column]:
        """Micro-batch sizes with `dp` replicas."""
        sizes = divisors(self.global_batch_size // dp) if self.global_batch_size % dp == 0 else (1,)
        return self._allowed({"micro_batch_size": sizes})

    @cached_property
    def _variants(self) -> dict[int, Variants]:
        return {}

    def variants(self, pp: int) -> Variants:
        """Schedules and virtual stages of a pipeline of `pp` ranks, legal or not."""
        if pp not in self._variants:
            names = {name: code for code, name in enumerate(SCHEDULES)}
            pairs = [(names["1f1b"], 1)]
            if pp > 1:
                pairs += [(names["gpipe"], 1)]
                most = self.layers if not self.has_empty_ends else most_stages(self.layers, INTERLEAVED)
                pairs += [(INTERLEAVED, vpp) for vpp in range(2, most // pp + 1)]
            if pp > 1 and not self.is_core:
                pairs += [
                    (names["zb_h1"], 1),
                    (names["zb_h2"], 1),
                    (names["zb_v"], 2),
                    (names["dualpipe_v"], 2),
                ]
            columns = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
            self._variants[pp] = Variants(**self._allowed({"schedule": columns[0], "vpp": columns[1]}))
        return self._variants[pp]

    def legal_variants(self, pp: int, microbatches: int) -> Variants:
        """The variants that are legal with this number of micro-batches."""
        key = (pp, microbatches)
        if key not in self._legal_variants:
            variants = self.variants(pp)
            illegal = illegal_codes(variants.schedule, pp, microbatches, variants.vpp) > 0
            enough = pp * variants.vpp <= most_stages(self.layers, variants.schedule)
            self._legal_variants[key] = variants.take(~illegal & enough)
        return self._legal_variants[key]

    @cached_property
    def _legal_variants(self) -> dict[tuple[int, int], Variants]:
        return {}

    @cached_property
    def _splits(self) -> dict[int, dict[str, Column]]:
        return {}

    def splits(self, stages: int) -> dict[str, Column]:
        """Layers of the first and the last stage, the even split first."""
        if stages in self._splits:
            return self._splits[stages]
        options = self._split_options(stages)
        if _length(options) > LARGE:
            large = [each for each, found in self._splits.items() if _length(found) > LARGE]
            for each in large[: len(large) + 1 - MOST_LARGE]:
                del self._splits[each]
        self._splits[stages] = options
        return options

    def _split_options(self, stages: int) -> dict[str, Column]:
        e1, e2 = (int(end) for end in even_ends(self.layers, stages))
        if stages == 1 or self.is_core or self.has_even_stages:
            firsts, lasts = np.array([e1]), np.array([e2])
        elif stages == 2:
            firsts = np.array(sorted(range(self.layers + 1), key=lambda first: (abs(first - e1), first)))
            lasts = self.layers - firsts
        else:
            firsts, lasts = (
                grid.ravel()
                for grid in np.meshgrid(np.arange(e1, -1, -1), np.arange(e2, -1, -1), indexing="ij")
            )
        return self._allowed({"first_stage_layers": firsts, "last_stage_layers": lasts})

    @cached_property
    def _ranges(self) -> dict[int, Split]:
        return {}

    def split_range(self, stages: int) -> Split:
        """Bounds over every split into `stages` stages (single numbers): fewest layers of the first, last and
        middle stages, and most layers of the largest stage."""
        if stages not in self._ranges:
            split = self.splits(stages)
            first, last = split["first_stage_layers"], split["last_stage_layers"]
            each = known_split(self.layers, stages, first, last)
            self._ranges[stages] = Split(
                first=int(each.first.min(initial=self.layers)),
                last=int(each.last.min(initial=self.layers)),
                between=int(each.between.min(initial=self.layers)),
                largest=int(each.largest.max(initial=1)),
            )
        return self._ranges[stages]

    def range_of_all(self, stages: NDArray[np.int64]) -> Split:
        """The same bounds over pipelines with any of these numbers of stages."""
        each = [self.split_range(n) for n in np.unique(stages).tolist()]
        if len(each) == 1:
            return each[0]
        return Split(
            first=min(split.first for split in each), last=min(split.last for split in each), between=0,
            largest=max(split.largest for split in each),
        )  # fmt: skip

    @cached_property
    def recompute_options(self) -> dict[str, Column]:
        """Kinds of recomputation with their named modules, as codes. Where the space names modules,
        selective recomputation is that of the named sets, with `has_own_set` also the own set of our runtime;
        else it is that."""
        sets = self._codes.get("recompute_modules", np.zeros(1, dtype=np.int64)).tolist()
        selective = sets if self.has_own_set else [code for code in sets if code] or sets
        pairs = [(NONE, 0), *((SELECTIVE, code) for code in selective), (FULL, 0)]
        columns = np.array(pairs, dtype=np.int64).T
        return self._allowed({"recompute": columns[0], "recompute_modules": columns[1]})

    @property
    def recomputes(self) -> Column:
        """The kind of recomputation of each of `recompute_options`, as codes."""
        return self.recompute_options["recompute"]

    @cached_property
    def offloads(self) -> Column:
        """Kinds of offload, as codes."""
        return self._allowed({"offload": [0] if self.is_core else range(len(OFFLOADS))})["offload"]

    @cached_property
    def _recompute_layers(self) -> dict[tuple[int, int], Column]:
        return {}

    def recompute_layers(self, recompute: int, largest: int) -> Column:
        """Numbers of recomputed layers of each stage, if the largest stage has `largest` layers."""
        if recompute == FULL and not self.is_core:
            return self._full_layers[: int(np.searchsorted(self._full_layers, largest, side="right"))]
        key = (recompute, largest)
        if key not in self._recompute_layers:
            counts = [0] if recompute != FULL else [largest]
            self._recompute_layers[key] = self._allowed({"recompute_layers": counts})["recompute_layers"]
        return self._recompute_layers[key]

    @cached_property
    def _full_layers(self) -> Column:
        """All numbers of recomputed layers with full recomputation, ascending."""
        return self._allowed({"recompute_layers": range(1, self.layers + 1)})["recompute_layers"]

    @cached_property
    def _shards(self) -> dict[int, dict[str, Column]]:
        return {}

    def shards(self, ranks: int) -> dict[str, Column]:
        """Sharding degrees over `ranks` = dp * cp within the limits, unsharded first."""
        if ranks not in self._shards:
            options = self._shard_options(ranks)
            one = np.ones(_length(options), dtype=np.int64)
            within = ~self._beyond(SimpleNamespace(**options, dp=ranks * one, cp=one), "shards")
            self._shards[ranks] = {name: column[within] for name, column in options.items()}
        return self._shards[ranks]

    def _shard_options(self, ranks: int) -> dict[str, Column]:
        columns = _sharding_chains(ranks, is_core=self.is_core)
        required, names = self._aliased(ranks), ("param_shard", "grad_shard", "optim_shard")
        keep = np.full(columns.shape[1], required is not None)
        for name, column in zip(names, columns, strict=True):
            if required is not None and name in required:
                keep &= column == required[name]
        return self._allowed(dict(zip(names, columns[:, keep], strict=True)))

    def _aliased(self, ranks: int) -> dict[str, int] | None:
        """Degrees that the fixed aliases require over `ranks`; None if they are not possible."""
        try:
            return shards_of(self.fixed, ranks)
        except ConfigError:
            return None

    @cached_property
    def _param_grad_shards(self) -> dict[int, dict[str, Column]]:
        return {}

    def param_grad_shards(self, ranks: int) -> dict[str, Column]:
        """Distinct sharding degrees of parameters and gradients. For each pair, `optim_shard` is the least
        common multiple of its degrees of optimizer states, and `states` is the number of these."""
        if ranks not in self._param_grad_shards:
            shards = self.shards(ranks)
            pairs = np.stack([shards["param_shard"], shards["grad_shard"]])
            each, of_each, times = np.unique(pairs, axis=1, return_inverse=True, return_counts=True)
            common = np.ones(each.shape[1], dtype=np.int64)
            np.lcm.at(common, of_each.ravel(), shards["optim_shard"])
            self._param_grad_shards[ranks] = {
                "param_shard": each[0], "grad_shard": each[1], "optim_shard": common, "states": times,
            }  # fmt: skip
        return self._param_grad_shards[ranks]

    def states(self, ranks: int, param_shard: int, grad_shard: int) -> dict[str, Column]:
        """Sharding degrees of optimizer states for one pair of degrees of parameters and gradients, the
        largest first."""
        shards = self.shards(ranks)
        same = (shards["param_shard"] == param_shard) & (shards["grad_shard"] == grad_shard)
        return {"optim_shard": shards["optim_shard"][same][::-1]}

    # Number of candidates below a choice

    def count_orders(self, table: StrategyTable) -> NDArray[np.int64]:
        """Number of axis orders of each grid."""
        keys = [table.tp, table.cp, table.dp, table.pp]
        rows, of_row = distinct_rows(keys)
        each = [_length(self.orders(*(int(key[row]) for key in keys))) for row in rows]
        return np.array(each, dtype=np.int64)[of_row]

    def count_shards(self, ranks: Any) -> NDArray[np.int64]:
        """Number of sharding options within the limits over each of `ranks` (a column)."""
        return _each(ranks, lambda n: _length(self.shards(n)))

    def count_all_shards(self, ranks: Any) -> NDArray[np.int64]:
        """Number of sharding options over each of `ranks` (a column), within the limits or not."""
        return (
            _each(ranks, lambda n: _length(self._shard_options(n)))
            if self.limits
            else self.count_shards(ranks)
        )

    def count_micro_batches(self, dp: Any) -> NDArray[np.int64]:
        """Number of micro-batch sizes for each dp (a column)."""
        return _each(dp, lambda n: _length(self.micro_batch_sizes(n)))

    def count_below_grids(self, table: StrategyTable) -> NDArray[np.int64]:
        """Number of candidates below each grid, legal or not, within the limits or not."""
        pipelines = _each(
            table.pp,
            lambda pp: sum(self.count_variants(self.variants(pp), pp, int(kind)) for kind in self.recomputes),
        )
        states = self.count_all_shards(table.dp * table.cp) * len(self.offloads)
        return pipelines * states * self.count_micro_batches(table.dp)

    @cached_property
    def _split_counts(self) -> dict[tuple[int, int], int]:
        return {}

    def count_splits(self, stages: int, recompute: int) -> int:
        """Number of stage splits, each multiplied by its numbers of recomputed layers."""
        key = (stages, recompute)
        if key not in self._split_counts:
            self._split_counts[key] = sum(
                count * len(self.recompute_layers(recompute, most))
                for most, count in self._largest_of_splits(stages)
            )
        return self._split_counts[key]

    @cached_property
    def _largest(self) -> dict[int, list[tuple[int, int]]]:
        return {}

    def _largest_of_splits(self, stages: int) -> list[tuple[int, int]]:
        """The layers of the largest stage, and how many splits have so many."""
        if stages not in self._largest:
            split = self.splits(stages)
            first, last = split["first_stage_layers"], split["last_stage_layers"]
            counts = np.bincount(np.atleast_1d(largest_stage(self.layers, stages, first, last)))
            most = np.flatnonzero(counts)
            self._largest[stages] = list(zip(most.tolist(), counts[most].tolist(), strict=True))
        return self._largest[stages]

    def count_variants(self, variants: Variants, pp: int, recompute: int) -> int:
        """Number of splits and recomputed layers below several schedules."""
        return sum(self.count_splits(pp * vpp, recompute) for vpp in variants.vpp.tolist())

    @cached_property
    def _legal(self) -> dict[tuple[int, int, int, int | None], int]:
        return {}

    def count_legal(self, pp: int, microbatches: int, recompute: int, family: int | None = None) -> int:
        """Number of legal schedules (of one of `FAMILIES`), with their splits and recomputed layers."""
        key = (pp, microbatches, recompute, family)
        if key not in self._legal:
            legal = self.legal_variants(pp, microbatches)
            if family is not None:
                legal = legal.take(FAMILIES[legal.schedule] == family)
            self._legal[key] = self.count_variants(legal, pp, recompute)
        return self._legal[key]


LARGE, MOST_LARGE = 1 << 16, 4
"""Splits of a number of stages that are many, and how many such lists are kept: a megabyte or more each."""

_SHAPE_FIELDS = ("tp", "cp", "dp", "pp", "etp", "ep", "cp_kind", "sequence_parallel")


def _each(values: Any, count: Callable[[int], int]) -> NDArray[np.int64]:
    """`count` of every value of a column, called once per distinct value."""
    each, inverse = np.unique(np.asarray(values), return_inverse=True)
    return np.array([count(int(value)) for value in each], dtype=np.int64)[inverse.ravel()]


@lru_cache(maxsize=4096)
def _sharding_chains(ranks: int, *, is_core: bool) -> NDArray[np.int64]:
    """Sharding degrees of parameters, gradients and optimizer states over `ranks`, each of which divides the
    next, unsharded first: three read-only rows. In the space `core` those of the ZeRO stages. Searches of
    similar questions, such as those of `explain`, share them."""
    if is_core:
        chains = dict.fromkeys([(1, 1, 1), (1, 1, ranks), (1, ranks, ranks), (ranks, ranks, ranks)])
    else:
        chains = dict.fromkeys((p, g, o) for o in divisors(ranks) for g in divisors(o) for p in divisors(g))
    columns = np.array(list(chains), dtype=np.int64).reshape(-1, 3).T
    columns.setflags(write=False)
    return columns


def _length(options: Mapping[str, Column]) -> int:
    return len(next(iter(options.values())))


def expanded(
    table: StrategyTable, keys: Sequence[Any], options_of: Callable[..., Mapping[str, Column]]
) -> tuple[NDArray[np.intp], StrategyTable]:
    """Every row of `table` with every option that `options_of(*key)` returns for its key, in order.

    Returns the parent row of each new row, and the new rows. Options that are not fields are left out.
    """
    if not len(table):
        return np.zeros(0, dtype=np.intp), table
    rows, inverse = distinct_rows([np.asarray(key) for key in keys])
    each = [options_of(*(int(key[row]) for key in keys)) for row in rows]
    lengths = np.array([_length(options) for options in each])
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    repeats = lengths[inverse]
    parent = np.repeat(np.arange(len(table)), repeats)
    position = np.arange(len(parent)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    index = starts[inverse[parent]] + position
    names = [name for name in each[0] if name in FIELDS]
    columns = {name: np.concatenate([options[name] for options in each])[index] for name in names}
    return parent, table.take(parent).replaced(**columns)


# Spaces that users define

BASES = ("default", "core")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceChoice:
    """The candidates of the space `base` whose fields have one of the values in `axes`. `file` is the file
    that defines them; None for a named space."""

    base: str = "default"
    axes: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    file: str | None = None


def read_space(path: str) -> SpaceChoice:
    """Reads a space from the file at `path`: `base: default|core` and `axes: {tp: [1, 2, 4], offload:
    [none]}`.

    Raises ConfigError, located by file and key path, for an axis that is not a field of a strategy, for an
    axis without values, and for values that the field cannot have in any space or that occur twice.
    """
    fields = Fields(read_mapping(path), file=path)
    base = fields.choice("base", BASES, default="default")
    listed = fields.mapping("axes", default={})
    for name in listed.names:
        if name in ALIASES:
            raise listed.error(
                name, "stands for several fields", allowed="param_shard, grad_shard, optim_shard"
            )
    axes = {name: _values(listed, name) for name in FIELDS if name in listed.names}
    listed.finish(allowed=FIELDS)
    fields.finish()
    return SpaceChoice(base=base, axes=axes, file=fields.file)


def _values(fields: Fields, name: str) -> tuple[Value, ...]:
    found: list[Value] = []
    for index, value in enumerate(fields.sequence(name, low=1)):
        key = f"{fields.key}.{name}[{index}]"
        if not isinstance(value, int | str) or not is_value(name, value):
            raise ConfigError(
                "is not a value of this field",
                file=fields.file,
                key=key,
                found=short_repr(value),
                allowed=_allowed(name),
            )
        if value in found:
            raise ConfigError("is given twice", file=fields.file, key=key, found=short_repr(value))
        found.append(value)
    return tuple(found)


def _allowed(name: str) -> str:
    if name == "sequence_parallel":
        return "true, false"
    if name in FIELD_VALUES:
        return ", ".join(FIELD_VALUES[name])
    return f"whole numbers of at least {0 if name.endswith('_layers') else 1}"
