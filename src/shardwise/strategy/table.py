"""Many strategies at once: the fields of `Strategy`, each a column of integers.

Fields with names (schedule, recompute, ...) hold the index into their tuple in `strategy.strategy`;
`axis_order` the index into `ORDERS`; booleans 0 or 1. Functions that price one strategy price a table: same
attribute names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from shardwise.strategy.strategy import (
    AXES,
    CP_KINDS,
    FIELDS,
    OFFLOADS,
    RECOMPUTES,
    SCHEDULES,
    Strategy,
)

Column = NDArray[np.int64]

ORDERS: tuple[str, ...] = tuple("-".join(order) for order in permutations(AXES))
"""Every axis order, fastest axis first; ORDERS[0] is the default."""

FIELD_VALUES: Mapping[str, tuple[str, ...]] = {
    "cp_kind": CP_KINDS,
    "schedule": SCHEDULES,
    "recompute": RECOMPUTES,
    "offload": OFFLOADS,
    "axis_order": ORDERS,
}
"""The values of the fields that have names."""

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
        """The rows in canonical text order: by the fields in the order of FIELDS, the smaller number or the
        name that its list has earlier first."""
        return np.lexsort([getattr(self, name) for name in reversed(FIELDS)])

    def replaced(self, **columns: Any) -> StrategyTable:
        """The same rows with some columns changed (a scalar fills its column)."""
        every = {name: getattr(self, name) for name in FIELDS}
        for name, column in columns.items():
            every[name] = np.broadcast_to(np.asarray(column, dtype=np.int64), (len(self),))
        return StrategyTable(**every)


def code_of(field: str, value: object) -> int:
    """The integer that stands for `value` in column `field`. ValueError for a name the field does not
    have."""
    if field in FIELD_VALUES:
        return FIELD_VALUES[field].index(cast(str, value))
    return int(cast(int, value))


def value_of(field: str, code: int) -> int | str | bool:
    """What the integer of column `field` stands for."""
    if field in FIELD_VALUES:
        return FIELD_VALUES[field][code]
    return bool(code) if field == "sequence_parallel" else code


def canonical_orders(sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Indices of `ORDERS`, one for each order of the axes larger than 1, the default first.

    Orders that differ only in where an axis of size 1 stands are one; the first of them in `ORDERS`
    represents it.
    """
    seen: dict[tuple[str, ...], int] = {}
    for index, order in enumerate(ORDERS):
        seen.setdefault(tuple(axis for axis in order.split("-") if sizes[axis] > 1), index)
    return tuple(seen.values())


def axis_strides(table: Any) -> dict[str, Any]:
    """Distance in ranks between neighbours along each axis, as columns: the product of the axes that vary
    faster.

    Works on a table (columns) or on anything with its attributes (`axis_order` as an index).
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
"""POSITIONS[order, axis]: the place of each of AXES in the order, 0 the fastest."""
