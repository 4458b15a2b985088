"""How many activations a rank holds at once, and how many wait for their W: from the table, and in closed
form on columns."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwise.schedule.action import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Table
from shardwise.schedule.legality import NAMES, SPLIT_NAMES, Column

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def peak_activations(schedule: Table, per_stage: ArrayLike) -> Floats:
    """The most that each rank holds at once, where one microbatch on stage s holds `per_stage[s]` (any unit).

    A forward takes the amount, the B or W of the same stage and microbatch gives it back (an I gives
    nothing back). `per_stage` has shape (stages,) or (stages, n) for n cases at once; the result (ranks,)
    or (ranks, n).
    """
    stage, kind, _, offsets = schedule.columns
    sign = np.where(kind == FORWARD, 1.0, np.where(kind == BACKWARD_INPUT, 0.0, -1.0))
    amount = np.asarray(per_stage, dtype=np.float64)[stage]
    change = amount * (sign if amount.ndim == 1 else sign[:, None])
    peaks = [
        np.max(np.cumsum(change[start:stop], axis=0), axis=0, initial=0.0)
        for start, stop in pairwise(offsets.tolist())
    ]
    return np.array(peaks)


def peak_in_flight(schedule: Table) -> tuple[int, ...]:
    """Per rank, the most (stage, microbatch) pairs whose F is done and whose B or W is not."""
    return tuple(int(peak) for peak in peak_activations(schedule, np.ones(schedule.stages)))


def peak_pending_weights(schedule: Table) -> tuple[int, ...]:
    """Per rank, the most (stage, microbatch) pairs whose I has begun and whose W is not done."""
    _, kind, _, offsets = schedule.columns
    change = np.where(kind == BACKWARD_INPUT, 1, np.where(kind == BACKWARD_WEIGHT, -1, 0))
    return tuple(
        int(np.max(np.cumsum(change[start:stop]), initial=0)) for start, stop in pairwise(offsets.tolist())
    )


class _InFlightLimit(NamedTuple):
    """How many a rank holds with unlimited microbatches: per pp, per pp * vpp, less per rank, and more."""

    per_pp: int = 0
    per_stage: int = 0
    less_per_rank: int = 0
    more: int = 0


_IN_FLIGHT_LIMITS: dict[str, _InFlightLimit] = {
    "1f1b": _InFlightLimit(per_pp=1, less_per_rank=1),
    "gpipe": _InFlightLimit(more=1 << 40),
    "interleaved_1f1b": _InFlightLimit(per_pp=1, per_stage=1, less_per_rank=2, more=-1),
    "zb_h1": _InFlightLimit(per_pp=1),
    "zb_h2": _InFlightLimit(per_pp=2, more=-1),
    "zb_v": _InFlightLimit(per_pp=2),
    "dualpipe_v": _InFlightLimit(per_pp=2, more=1),
}
_IN_FLIGHT_BY_CODE = np.array([_IN_FLIGHT_LIMITS[name] for name in NAMES], dtype=np.int64).T

_WAITING_PER_RANK: dict[str, int] = {"zb_h1": 1, "zb_h2": 2, "zb_v": 2, "dualpipe_v": 1}
_WAITS = np.array([name in SPLIT_NAMES for name in NAMES], dtype=np.int64)
_MORE_PER_RANK = np.array([_WAITING_PER_RANK.get(name, 0) for name in NAMES], dtype=np.int64)


def in_flight(code: Column, pp: Column, microbatches: Column, vpp: Column, rank: Column) -> Ints:
    """`peak_in_flight` of legal schedules in closed form, on integers or integer columns that broadcast
    together.

    `code` is the index in `NAMES`. Exact for every legal combination; never increases with `rank`. With p =
    pp, m = microbatches, v = vpp, r = rank it is the smaller of m v and: 1f1b p - r; gpipe no limit;
    interleaved_1f1b 2 (p - 1 - r) + (v - 1) p + 1 = (v + 1) p - 2 r - 1; zb_h1 p; zb_h2 2 p - 1; zb_v 2 p;
    dualpipe_v 2 p + 1. Meaningless where the combination is illegal.
    """
    per_pp, per_stage, less_per_rank, more = (column[code] for column in _IN_FLIGHT_BY_CODE)
    unlimited = (per_pp + per_stage * vpp) * pp - less_per_rank * rank + more
    return np.asarray(np.minimum(np.multiply(microbatches, vpp), unlimited), dtype=np.int64)


def pending_weights(code: Column, microbatches: Column, rank: Column) -> Ints:
    """`peak_pending_weights` of legal schedules in closed form, on integers or integer columns that broadcast
    together.

    `code` is the index in `NAMES`. Exact for every legal combination; never falls with `rank`, and never
    exceeds `in_flight`. With m = microbatches and r = rank it is the smaller of m and: zb_h1 and dualpipe_v
    r + 1; zb_h2 and zb_v 2 r + 1; 0 in all others, which have no W.
    """
    unlimited = _WAITS[code] + _MORE_PER_RANK[code] * rank
    return np.asarray(np.minimum(microbatches, unlimited), dtype=np.int64)
