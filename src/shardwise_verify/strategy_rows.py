"""Strategies as columns: one numpy array per field, so that one formula estimates one strategy or a
million."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise_verify.records import AXES, FIELDS

Column = Any
"""One number per row, shape (rows,); a plain number stands for the same value in every row."""

Index = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyRows:
    """The fields of many strategies, each of shape (rows,): whole numbers, flags, and named values as
    text."""

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

    def __len__(self) -> int:
        return len(self.tp)

    def take(self, index: Any) -> StrategyRows:
        """These rows, in this order."""
        return StrategyRows(**{name: getattr(self, name)[index] for name in FIELDS})

    def microbatches(self, global_batch_size: int) -> Column:
        """m: micro-batches of a replica in a step."""
        return global_batch_size // (self.dp * self.micro_batch_size)


def rows_of(strategies: Sequence[object]) -> StrategyRows:
    """The strategies, records with FIELDS, as columns, in order."""
    return StrategyRows(
        **{name: np.array([getattr(strategy, name) for strategy in strategies]) for name in FIELDS}
    )


NO_ROWS = StrategyRows(**{name: np.empty(0) for name in FIELDS})


def strides(rows: StrategyRows) -> dict[str, Column]:
    """Distance in ranks between neighbours along each of AXES: the product of the degrees of faster axes."""
    found = {axis: np.ones(len(rows), dtype=np.int64) for axis in AXES}
    for order in np.unique(rows.axis_order):
        at = rows.axis_order == order
        stride = np.ones(int(at.sum()), dtype=np.int64)
        for axis in str(order).split("-"):
            found[axis][at] = stride
            stride = stride * getattr(rows, axis)[at]
    return found


TIE = 1e-9
"""Relative difference up to which values equal the largest."""


def first_largest(values: Any) -> Any:
    """Index, along the first axis, of the first value that equals the largest."""
    array = np.asarray(values, dtype=np.float64)
    largest = array.max(axis=0)
    return ((array == largest) | (array >= largest - TIE * np.abs(largest))).argmax(axis=0)


def distinct(columns: Sequence[Column]) -> tuple[Index, Index]:
    """(`first`, `of`): rows with equal values in all columns are merged. `of[row]` is its index in
    `first`; `first[index]` is a row with these values."""
    of = np.zeros(len(columns[0]), dtype=np.intp)
    first = of[:1]
    for column in columns:
        values, codes = np.unique(column, return_inverse=True)
        _, first, of = np.unique(of * len(values) + codes, return_index=True, return_inverse=True)
    return first, of


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """How stages lie on the ranks of a pipeline of `pp` ranks with `vpp` chunks each under a schedule."""

    schedule: str
    pp: int
    vpp: int

    @property
    def stages(self) -> int:
        return self.pp * self.vpp

    @property
    def is_v(self) -> bool:
        """Whether the second chunk of a rank runs back through the pipeline (a V)."""
        return self.schedule in ("zb_v", "dualpipe_v")

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are separate actions."""
        return self.schedule in ("zb_h1", "zb_h2", "zb_v", "dualpipe_v")

    @property
    def ends_apart(self) -> bool:
        """Whether the first and the last stage are on different ranks."""
        return self.pp > 1 and not self.is_v


@dataclass(frozen=True, kw_only=True)
class Family(Chunks):
    """Rows with the same schedule table: one schedule, pp, vpp and number of micro-batches."""

    microbatches: int
    rows: StrategyRows

    def rank_of(self, stage: int) -> int:
        """The pipeline rank of `stage`."""
        return min(stage, 2 * self.pp - 1 - stage) if self.is_v else stage % self.pp

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a pipeline rank, chunk by chunk."""
        return tuple(stage for stage in range(self.stages) if self.rank_of(stage) == rank)

    def slices(self, length: int) -> Iterator[tuple[slice, Family]]:
        """The family in parts of at most `length` rows, each with its slice."""
        for start in range(0, len(self.rows), length):
            part = slice(start, start + length)
            yield part, replace(self, rows=self.rows.take(part))


def families(rows: StrategyRows, global_batch_size: int) -> Iterator[tuple[Index, Family]]:
    """The rows grouped by table: each family with the indices of its rows."""
    microbatches = rows.microbatches(global_batch_size)
    first, of = distinct((rows.schedule, rows.pp, rows.vpp, microbatches))
    for number, row in enumerate(first):
        places = np.flatnonzero(of == number)
        yield (
            places,
            Family(
                schedule=str(rows.schedule[row]),
                pp=int(rows.pp[row]),
                vpp=int(rows.vpp[row]),
                microbatches=int(microbatches[row]),
                rows=rows.take(places),
            ),
        )
