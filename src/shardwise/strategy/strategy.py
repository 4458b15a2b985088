"""`Strategy`, one candidate of the search space, and `StrategyTable`, many strategies as integer columns.

In a table, fields with named values (schedule, recompute, ...) hold the index into `FIELD_VALUES`;
`axis_order` holds the index into `ORDERS`; booleans are 0 or 1. A table has the same attribute names as a
strategy.

The module also places layers and ranks: `even_ends`, `layer_counts`, `stage_starts` (decoder layers on
stages), `axis_strides`, `rank_grid`, `node_slots` (ranks by pipeline, pipeline rank and node).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from itertools import permutations
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from shardwise.model import MODULE_SETS, NO_MODULES
from shardwise.schedule import NAMES, stage_of

CP_KINDS = ("ring", "all_to_all")
SCHEDULES = NAMES
RECOMPUTES = ("none", "selective", "full")
OFFLOADS = ("none", "optimizer", "activations", "both")
AXES = ("tp", "cp", "dp", "pp")

CpKind = Literal["ring", "all_to_all"]
Schedule = Literal["1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v", "dualpipe_v"]
Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer", "activations", "both"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One candidate of the search space; every field is a choice, none is derived from the model.

    `axis_order` lists the mesh axes from the fastest varying rank to the slowest, joined by `-`.
    `recompute_layers` is the number of layers per stage under full recomputation (0 unless `recompute` is
    full). `recompute_modules` are the named modules (`model.MODULES`) that selective recomputation repeats,
    joined by `+`; empty for the own set of our runtime, and unless recompute is selective.
    `first_stage_layers` and `last_stage_layers` are decoder layers on the first and the last of the
    `pp * vpp` stages; the other stages share the remaining layers evenly, later stages taking the remainder.
    """

    tp: int
    pp: int
    vpp: int
    cp: int
    cp_kind: CpKind
    ep: int
    etp: int
    dp: int
    param_shard: int
    grad_shard: int
    optim_shard: int
    micro_batch_size: int
    schedule: Schedule
    sequence_parallel: bool
    recompute: Recompute
    recompute_modules: str = NO_MODULES
    recompute_layers: int
    offload: Offload
    axis_order: str
    first_stage_layers: int
    last_stage_layers: int


FIELDS: tuple[str, ...] = tuple(field.name for field in fields(Strategy))


Column = NDArray[np.int64]

ORDERS: tuple[str, ...] = tuple("-".join(order) for order in permutations(AXES))
"""Every axis order, fastest axis first; ORDERS[0] is the default."""

FIELD_VALUES: Mapping[str, tuple[str, ...]] = {
    "cp_kind": CP_KINDS,
    "schedule": SCHEDULES,
    "recompute": RECOMPUTES,
    "recompute_modules": MODULE_SETS,
    "offload": OFFLOADS,
    "axis_order": ORDERS,
}
"""Values of the fields with named values."""

_CODES = {field: {name: code for code, name in enumerate(names)} for field, names in FIELD_VALUES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class StrategyTable:
    """Columns of equal length, one row per strategy."""

    tp: Column
    pp: Column
    vpp: Column
    cp: Column
    cp_kind: Column
    ep: Column
    etp: Column
    dp: Column
    param_shard: Column
    grad_shard: Column
    optim_shard: Column
    micro_batch_size: Column
    schedule: Column
    sequence_parallel: Column
    recompute: Column
    recompute_modules: Column
    recompute_layers: Column
    offload: Column
    axis_order: Column
    first_stage_layers: Column
    last_stage_layers: Column

    @staticmethod
    def of(strategies: Sequence[Strategy]) -> StrategyTable:
        """One row per strategy, in order."""
        columns = {}
        for name in FIELDS:
            values = [getattr(row, name) for row in strategies]
            codes = _CODES.get(name)
            columns[name] = np.array(
                values if codes is None else [codes[value] for value in values], np.int64
            )
        return StrategyTable(**columns)

    @staticmethod
    def joined(tables: Sequence[StrategyTable]) -> StrategyTable:
        """The rows of all tables, one after another."""
        return StrategyTable(
            **{name: np.concatenate([getattr(table, name) for table in tables]) for name in FIELDS}
        )

    def __len__(self) -> int:
        return len(self.tp)

    def __getitem__(self, row: int) -> Strategy:
        """Row `row` as one strategy."""
        values: dict[str, Any] = {name: value_of(name, int(getattr(self, name)[row])) for name in FIELDS}
        return Strategy(**values)

    def __iter__(self) -> Iterator[Strategy]:
        return (self[row] for row in range(len(self)))

    def take(self, rows: Any) -> StrategyTable:
        """The rows at these indices, or under this mask."""
        return StrategyTable(**{name: getattr(self, name)[rows] for name in FIELDS})

    def text_order(self) -> NDArray[np.intp]:
        """Row indices in canonical text order: by the fields in the order of FIELDS; smaller numbers, and
        names that come earlier in FIELD_VALUES, first."""
        return np.lexsort([getattr(self, name) for name in reversed(FIELDS)])

    def replaced(self, **columns: Any) -> StrategyTable:
        """The same rows with some columns changed (a scalar fills its column)."""
        every = {name: getattr(self, name) for name in FIELDS}
        for name, column in columns.items():
            every[name] = np.broadcast_to(np.asarray(column, dtype=np.int64), (len(self),))
        return StrategyTable(**every)


def strategy_record(strategy: Strategy) -> dict[str, Any]:
    """The fields of a strategy as plain values; `recompute_modules` only where it names some."""
    record = asdict(strategy)
    if not strategy.recompute_modules:
        del record["recompute_modules"]
    return record


def code_of(field: str, value: object) -> int:
    """The integer code of `value` in column `field`. Raises ValueError for a name that the field does not
    have."""
    if field in FIELD_VALUES:
        return FIELD_VALUES[field].index(cast(str, value))
    return int(cast(int, value))


def value_of(field: str, code: int) -> int | str | bool:
    """The value of an integer code of column `field`."""
    if field in FIELD_VALUES:
        return FIELD_VALUES[field][code]
    return bool(code) if field == "sequence_parallel" else code


def canonical_orders(sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Indices of `ORDERS`, one for each order of the axes larger than 1, the default first.

    Orders that differ only in the position of an axis of size 1 are equal; the first of them in `ORDERS`
    represents them.
    """
    seen: dict[tuple[str, ...], int] = {}
    for index, order in enumerate(ORDERS):
        seen.setdefault(tuple(axis for axis in order.split("-") if sizes[axis] > 1), index)
    return tuple(seen.values())


def axis_strides(table: Any) -> dict[str, Any]:
    """Distance in ranks between neighbours along each axis, as columns: the product of the axes that vary
    faster.

    Accepts a table (columns) or anything with its attributes (`axis_order` as an index).
    """
    position = POSITIONS[table.axis_order]
    strides: dict[str, Any] = {}
    for a, axis in enumerate(AXES):
        stride: Any = 1
        for b, other in enumerate(AXES):
            if other != axis:
                faster = position[..., b] < position[..., a]
                stride = stride * np.where(faster, getattr(table, other), 1)
        strides[axis] = stride
    return strides


def _positions(orders: Iterable[str]) -> Column:
    return np.array([[order.split("-").index(axis) for axis in AXES] for order in orders], dtype=np.int64)


POSITIONS: Column = _positions(ORDERS)
"""POSITIONS[order, axis]: the position of each of AXES in the order, 0 the fastest."""


IS_V = np.array([name in ("zb_v", "dualpipe_v") for name in SCHEDULES])


def even_ends(layers: Any, stages: Any) -> tuple[Any, Any]:
    """Layers of the first and last stage of the even split (docs/reference/space.md): as even as possible;
    the ends are the first to take fewer layers."""
    base = layers // stages
    rest = layers - base * stages
    first = np.where(stages == 1, layers, base)
    last = np.where(stages == 1, layers, np.where(stages == 2, layers - base, base + (rest == stages - 1)))
    return first, last


def largest_stage(layers: Any, stages: Any, first: Any, last: Any) -> Any:
    """The largest number of layers on one stage."""
    middle = np.maximum(stages - 2, 1)
    between = np.where(stages > 2, -(-(layers - first - last) // middle), 0)
    return np.maximum(np.maximum(first, last), between)


def stage_starts(layers: Any, stages: Any, first: Any, last: Any, stage: Any) -> Any:
    """Index of the first decoder layer of `stage`, from 0 to `stages` (where it is `layers`).

    The stages between the ends share the remaining layers evenly; the later ones take the remainder.
    """
    middle = np.maximum(stages - 2, 1)
    rest = layers - first - last
    each = rest // middle
    extra = rest - each * middle
    inner = stage - 1
    start = first + inner * each + np.maximum(inner - (middle - extra), 0)
    start = np.where(stage >= stages - 1, np.where(stages == 1, 0, layers - last), start)
    return np.where(stage <= 0, 0, np.where(stage >= stages, layers, start))


def layer_counts(layers: int, stages: int, first: int, last: int) -> tuple[int, ...]:
    """Decoder layers on each stage, in order; they sum to `layers`."""
    starts = stage_starts(layers, stages, first, last, np.arange(stages + 1))
    return tuple(int(count) for count in np.diff(starts))


def stages_of_rank(schedule: int, pp: int, vpp: int, rank: int) -> tuple[int, ...]:
    """The stages of pipeline rank `rank`, in order of its chunks."""
    return tuple(stage_of(SCHEDULES[schedule], pp, rank, chunk) for chunk in range(vpp))


Ints = NDArray[np.int64]


def rank_grid(strategy: Strategy) -> Ints:
    """Global ranks, shape (dp, pp, cp, tp)."""
    strides: dict[str, Any] = axis_strides(StrategyTable.of([strategy]))

    def along(axis: str) -> Ints:
        return np.arange(getattr(strategy, axis), dtype=np.int64) * int(np.ravel(strides[axis])[0])

    dp, pp = along("dp")[:, None, None, None], along("pp")[None, :, None, None]
    grid: Ints = dp + pp + along("cp")[:, None] + along("tp")
    return grid


@lru_cache(maxsize=4096)
def node_slots(strategy: Strategy, devices_per_node: int) -> Ints:
    """Nodes of every pipeline and pipeline rank: shape (dp, pp, nodes per pipeline rank). Read-only."""
    slots = rank_grid(strategy).reshape(strategy.dp, strategy.pp, -1) // devices_per_node
    # Ranks on one node count once: 8 ranks on a node of 8 devices are one entry, not eight.
    distinct = np.sort(slots, axis=2)
    each = 1 + int((np.diff(distinct, axis=2) > 0).sum(axis=2).max(initial=0))
    step = max(distinct.shape[2] // each, 1)
    if distinct.shape[2] % each == 0 and (distinct == np.repeat(distinct[:, :, ::step], step, axis=2)).all():
        distinct = distinct[:, :, ::step]
    distinct.setflags(write=False)
    return distinct
