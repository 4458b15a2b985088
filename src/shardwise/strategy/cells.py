"""Where the ranks of a strategy lie: by pipeline, pipeline rank and node."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.strategy.strategy import Strategy
from shardwise.strategy.table import StrategyTable, axis_strides

Ints = NDArray[np.int64]


def rank_grid(strategy: Strategy) -> Ints:
    """Global ranks of shape (dp, pp, cp, tp)."""
    strides: dict[str, Any] = axis_strides(StrategyTable.of([strategy]))

    def along(axis: str) -> Ints:
        return np.arange(getattr(strategy, axis), dtype=np.int64) * int(np.ravel(strides[axis])[0])

    dp, pp = along("dp")[:, None, None, None], along("pp")[None, :, None, None]
    grid: Ints = dp + pp + along("cp")[:, None] + along("tp")
    return grid


@lru_cache(maxsize=4096)
def node_slots(strategy: Strategy, devices_per_node: int) -> Ints:
    """Slots of every pipeline and pipeline rank: shape (dp, pp, slots that one such cell lies on)."""
    slots = rank_grid(strategy).reshape(strategy.dp, strategy.pp, -1) // devices_per_node
    # Neighbours on one slot are one: a cell of 8 devices on a node is one slot, not eight.
    distinct = np.sort(slots, axis=2)
    each = 1 + int((np.diff(distinct, axis=2) > 0).sum(axis=2).max(initial=0))
    step = max(distinct.shape[2] // each, 1)
    if distinct.shape[2] % each == 0 and (distinct == np.repeat(distinct[:, :, ::step], step, axis=2)).all():
        distinct = distinct[:, :, ::step]
    distinct.setflags(write=False)
    return distinct
