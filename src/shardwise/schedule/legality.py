"""Legal combinations of schedule, pp, micro-batches and vpp; the rank of each stage; and activations in
flight.

Functions work on numbers or on integer columns. `in_flight` is the closed form of `peak_in_flight`, which
counts the table of a schedule; `full_moment` has one moment of those of `live_counts`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwise.inputs import unknown
from shardwise.schedule.action import BACKWARD_INPUT, FORWARD, Table

Ints = NDArray[np.int64]
Column = Ints | int
Number = TypeVar("Number", int, Ints)

NAMES: tuple[str, ...] = ("1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v", "dualpipe_v")
"""Schedules in the order of their codes."""

CODE_OF_NAME: dict[str, int] = {name: code for code, name in enumerate(NAMES)}
SPLIT_NAMES: frozenset[str] = frozenset({"zb_h1", "zb_h2", "zb_v", "dualpipe_v"})
"""Schedules with split backward passes: the input gradient first, the weight gradient later."""

V_NAMES: frozenset[str] = frozenset({"zb_v", "dualpipe_v"})
"""V-shaped schedules: rank r has stages r and 2 pp - 1 - r. In all others rank r has r, pp + r, 2 pp + r,
..."""

REASONS: tuple[str, ...] = (
    "schedule_not_positive",
    "schedule_vpp",
    "schedule_needs_pipeline",
    "schedule_microbatches_divisible",
    "schedule_microbatches_minimum",
)
"""Reasons why a combination is illegal; the first in this order that applies counts."""

_NO_LIMIT = 1 << 30
"""Larger than any vpp."""


class _Rule(NamedTuple):
    """Requirements of a schedule: bounds of vpp and pp; `microbatches` at least `microbatches_per_pp *
    pp`; `whole_groups`: micro-batches divisible by pp."""

    least_vpp: int = 1
    most_vpp: int = 1
    least_pp: int = 2
    microbatches_per_pp: int = 0
    whole_groups: bool = False


_RULES: dict[str, _Rule] = {
    "1f1b": _Rule(least_pp=1),
    "gpipe": _Rule(least_pp=1),
    "interleaved_1f1b": _Rule(least_vpp=2, most_vpp=_NO_LIMIT, whole_groups=True),
    "zb_h1": _Rule(),
    "zb_h2": _Rule(),
    "zb_v": _Rule(least_vpp=2, most_vpp=2, microbatches_per_pp=2),
    "dualpipe_v": _Rule(least_vpp=2, most_vpp=2, microbatches_per_pp=2),
}
_BY_CODE = np.array([_RULES[name] for name in NAMES], dtype=np.int64).T


def code_of(name: str) -> int:
    """The code of schedule `name`: its index in `NAMES`. Raises ConfigError for an unknown name."""
    if name not in CODE_OF_NAME:
        raise unknown("is not a known schedule", name, NAMES, key="schedule")
    return CODE_OF_NAME[name]


def illegal_codes(code: Column, pp: Column, microbatches: Column, vpp: Column) -> NDArray[np.int8]:
    """Per row 0 where the schedule is legal, else 1 + the index in `REASONS` of the first reason that
    applies.

    `code` is the index in `NAMES`; all arguments are integers or integer columns that broadcast together.
    """
    least_vpp, most_vpp, least_pp, per_pp, whole_groups = (rule[code] for rule in _BY_CODE)
    broken = (
        np.less(np.minimum(np.minimum(pp, microbatches), vpp), 1),
        np.less(vpp, least_vpp) | np.greater(vpp, most_vpp),
        np.less(pp, least_pp),
        np.not_equal(whole_groups * np.remainder(microbatches, np.maximum(pp, 1)), 0),
        np.less(microbatches, per_pp * pp),
    )
    found: NDArray[np.int8] = np.zeros((), dtype=np.int8)
    for reason in range(len(broken), 0, -1):
        found = np.where(broken[reason - 1], np.int8(reason), found)
    return found


def legal_mask(code: Column, pp: Column, microbatches: Column, vpp: Column) -> NDArray[np.bool_]:
    """Per row whether the schedule is legal; columns as in `illegal_codes`."""
    return np.equal(illegal_codes(code, pp, microbatches, vpp), 0)


def illegal_reason(name: str, pp: int, microbatches: int, vpp: int) -> str | None:
    """The first of `REASONS` that applies to schedule `name` with these numbers, or None where it is legal.

    Raises ConfigError for an unknown name.
    """
    found = int(illegal_codes(code_of(name), pp, microbatches, vpp))
    return REASONS[found - 1] if found else None


def stage_of(name: str, pp: Number, rank: Number, chunk: Number) -> Number:
    """The stage that is chunk `chunk` (from 0) of `rank`; ints or columns."""
    if name in V_NAMES:
        return rank + chunk * (2 * pp - 1 - 2 * rank)
    return rank + chunk * pp


def rank_of_stage(name: str, pp: Number, stage: Number) -> Number:
    """The rank of `stage`; ints or columns."""
    if name in V_NAMES:
        return stage + (stage // pp) * (2 * pp - 1 - 2 * stage)
    return stage % pp


def stage_ranks(name: str, pp: int, vpp: int) -> tuple[int, ...]:
    """The rank of every stage, stage 0 first; shape (pp * vpp,)."""
    return tuple(rank_of_stage(name, pp, stage) for stage in range(pp * vpp))


Floats = NDArray[np.float64]


def peak_activations(schedule: Table, per_stage: ArrayLike) -> Floats:
    """Peak saved activations of each rank, where one micro-batch on stage s saves `per_stage[s]` (any unit).

    A forward allocates the amount; the B or W of the same stage and micro-batch frees it (an I frees
    nothing). `per_stage` has shape (stages,), or (stages, n) for n cases at once; the result (ranks,) or
    (ranks, n).
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
    """Per rank, the most (stage, micro-batch) pairs whose F is done and whose B or W is not."""
    return tuple(int(peak) for peak in peak_activations(schedule, np.ones(schedule.stages)))


class _InFlightLimit(NamedTuple):
    """In-flight limit of a rank with unlimited micro-batches: per_pp * pp + per_stage * pp * vpp -
    less_per_rank * rank + more."""

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

_IS_CHUNKED = np.array([name == "interleaved_1f1b" for name in NAMES])
_IS_V = np.array([name in V_NAMES for name in NAMES])
_WARMUP_PER_RANK = np.array([{"zb_h1": 1, "zb_h2": 2}.get(name, 0) for name in NAMES], dtype=np.int64)


def in_flight(code: Column, pp: Column, microbatches: Column, vpp: Column, rank: Column) -> Ints:
    """Closed form of `peak_in_flight` for legal schedules, on integers or integer columns that broadcast
    together.

    `code` is the index in `NAMES`. Exact for every legal combination, meaningless for others; never increases
    with `rank`. With p = pp, m = microbatches, v = vpp, r = rank it is the smaller of m v and: 1f1b p - r;
    gpipe no limit; interleaved_1f1b 2 (p - 1 - r) + (v - 1) p + 1 = (v + 1) p - 2 r - 1; zb_h1 p; zb_h2 2 p -
    1; zb_v 2 p; dualpipe_v 2 p + 1.
    """
    per_pp, per_stage, less_per_rank, more = (column[code] for column in _IN_FLIGHT_BY_CODE)
    unlimited = (per_pp + per_stage * vpp) * pp - less_per_rank * rank + more
    return np.asarray(np.minimum(np.multiply(microbatches, vpp), unlimited), dtype=np.int64)


class FullMoment(NamedTuple):
    """Pairs of a stage and a micro-batch on a rank at a moment when most are in flight: all between F and B
    (or I), at least `each` of these on every stage of the rank, and those that wait for their W."""

    flying: Ints
    each: Ints
    waiting: Ints


def full_moment(code: Column, pp: Column, microbatches: Column, vpp: Column, rank: Column) -> FullMoment:
    """A moment of legal schedules at which a rank has most pairs in flight, in closed form, on integers or
    integer columns that broadcast together. `live_counts` has all moments.

    `code` is the index in `NAMES`. With p = pp and r = rank: the zero-bubble schedules without chunks have
    k (p - 1 - r) + 1 pairs in flight, with k = 1 (zb_h1) or 2 (zb_h2), and all others wait; the V-shaped ones
    have at least r + 1 on each stage; interleaved_1f1b has the smaller of p and 2 (p - 1 - r) + 1.
    """
    whole = in_flight(code, pp, microbatches, vpp, rank)
    per_rank, later = _WARMUP_PER_RANK[code], np.subtract(pp, 1) - rank
    flying = np.where(per_rank > 0, np.minimum(whole, per_rank * later + 1), whole)
    each = np.where(_IS_CHUNKED[code], np.minimum(pp, 2 * later + 1), flying)
    each = np.where(_IS_V[code], np.add(rank, 1), each)
    return FullMoment(flying, each, whole - flying)
