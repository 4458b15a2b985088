"""What a rank has at once, counted from its schedule: `live_counts`.

A pair of a stage and a micro-batch is *in flight* from its F to its B (or I), and *waits* from its I to its
W. A stage whose gradients are reduced once per step has them whole (*unreduced*) from its first B (or W)
until after its last one.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shardwise.schedule.action import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Columns
from shardwise.schedule.generate import generate
from shardwise.schedule.legality import NAMES

Ints = NDArray[np.int64]

IN_FLIGHT, WAITING, UNREDUCED = 0, 1, 2
"""Indices of the second axis of `live_counts`."""

SETTLED = 4
"""Micro-batches per pipeline rank from which on both ends of a split schedule's rows stay the same."""


def live_microbatches(code: Ints, pp: Ints, microbatches: Ints) -> Ints:
    """The fewest micro-batches for which a schedule has the same `live_counts`, on integer columns; `code` is
    the index in `NAMES`.
    """
    enough = np.where(_NEEDS_ALL[code], microbatches, SETTLED * pp)
    return np.asarray(np.minimum(microbatches, enough), dtype=np.int64)


_NEEDS_ALL = np.array([name == "gpipe" for name in NAMES])


@lru_cache(maxsize=1 << 12)
def live_counts(
    name: str, pp: int, microbatches: int, vpp: int, *, reduces_once: bool = False
) -> tuple[Ints, ...]:
    """Per rank, the pairs in flight and the pairs that wait, by chunk, at moments of a legal schedule.

    Each array has shape (moments, 2, vpp) and has every moment of the schedule that no other one exceeds in
    all counts. With `reduces_once` the shape is (moments, 3, vpp), with 1 where the gradients of a chunk are
    unreduced; other moments of the schedule may be there too.
    """
    if reduces_once:
        return tuple(_with_gradients(name, pp, rank, microbatches, vpp) for rank in range(pp))
    if name == "gpipe":
        return (np.array([[[microbatches], [0]]]),) * pp
    if name == "1f1b":
        return tuple(np.array([[[min(microbatches, pp - rank)], [0]]]) for rank in range(pp))
    if name == "interleaved_1f1b":
        return tuple(_interleaved(pp, rank, microbatches, vpp) for rank in range(pp))
    return _counted(name, pp, min(microbatches, SETTLED * pp), vpp)


def _interleaved(pp: int, rank: int, microbatches: int, vpp: int) -> Ints:
    """The moments after each F of the steady state, one period of it. All F and all B are done in rounds of
    pp micro-batches per chunk, those of B from the last chunk on."""
    total, period = microbatches * vpp, pp * vpp
    warmup = min(2 * (pp - 1 - rank) + (vpp - 1) * pp, total)
    backwards = np.arange(max(min(total - warmup, period), 1), dtype=np.int64)
    forwards = np.minimum(warmup + 1 + backwards, total)
    starts = pp * np.arange(vpp, dtype=np.int64)
    done, undone = (
        pp * (count // period)[:, None] + np.clip((count % period)[:, None] - starts, 0, pp)
        for count in (forwards, backwards)
    )
    found = np.zeros((len(backwards), 2, vpp), dtype=np.int64)
    found[:, IN_FLIGHT] = done - undone[:, ::-1]
    return np.unique(found, axis=0)


def _counted(name: str, pp: int, microbatches: int, vpp: int) -> tuple[Ints, ...]:
    """The moments of a schedule's table, action by action."""
    schedule = generate(name, pp=pp, microbatches=microbatches, vpp=vpp)
    stage, kind, _, offsets = schedule.columns
    chunk = (stage >= pp).astype(np.int64)
    change = np.zeros((len(stage), 2, vpp), dtype=np.int64)
    for code, counts in (
        (FORWARD, (1, 0)),
        (BACKWARD, (-1, 0)),
        (BACKWARD_INPUT, (-1, 1)),
        (BACKWARD_WEIGHT, (0, -1)),
    ):
        (rows,) = np.nonzero(kind == code)
        change[rows, IN_FLIGHT, chunk[rows]] = counts[IN_FLIGHT]
        change[rows, WAITING, chunk[rows]] = counts[WAITING]
    return tuple(_moments(change[start:stop]) for start, stop in pairwise(offsets.tolist()))


def _with_gradients(name: str, pp: int, rank: int, microbatches: int, vpp: int) -> Ints:
    """The moments after each action of a rank, before a chunk's gradients are reduced."""
    if name in ("gpipe", "1f1b"):
        live = microbatches if name == "gpipe" else min(microbatches, pp - rank)
        # The next F follows a B only where not all micro-batches are in flight.
        found = [[[live], [0], [1]]] if live < microbatches else [[[live], [0], [0]], [[live - 1], [0], [1]]]
        return np.array(found)
    few = min(microbatches, SETTLED * pp)
    if name == "interleaved_1f1b" and few == SETTLED * pp:
        # In a long steady state the last period has all that earlier moments have, and all gradients.
        settled = _interleaved(pp, rank, few, vpp)
        return np.concatenate([settled, np.ones((len(settled), 1, vpp), dtype=np.int64)], axis=1)
    stage, kind, _, offsets = _table(name, pp, few, vpp)
    own = slice(offsets[rank], offsets[rank + 1])
    kinds = kind[own]
    is_own = np.arange(vpp) == stage[own, None] // pp
    flying, waiting, reduced = (
        is_own * np.select([kinds == code for code in codes], changes, 0)[:, None]
        for codes, changes in (
            ((FORWARD, BACKWARD, BACKWARD_INPUT), (1, -1, -1)),
            ((BACKWARD_INPUT, BACKWARD_WEIGHT), (1, -1)),
            ((BACKWARD, BACKWARD_WEIGHT), (1, 1)),
        )
    )
    done = reduced.cumsum(axis=0)
    is_unreduced = (done > 0) & (done - reduced < few)
    counts = np.stack([flying.cumsum(axis=0), waiting.cumsum(axis=0), is_unreduced], axis=1)
    less = np.all(counts[:-1] <= counts[1:], axis=(1, 2))  # a moment before one that has as much of all
    return np.unique(counts[~np.append(less, False)], axis=0)


@lru_cache(maxsize=16)
def _table(name: str, pp: int, microbatches: int, vpp: int) -> Columns:
    """The columns of a schedule's table."""
    return generate(name, pp=pp, microbatches=microbatches, vpp=vpp).columns


def _moments(change: Ints) -> Ints:
    counts = np.unique(np.cumsum(change, axis=0), axis=0)
    return counts[undominated(counts.reshape(len(counts), -1))]


def undominated(measures: NDArray[np.float64] | Ints) -> NDArray[np.bool_]:
    """The rows of `measures` that no other row equals or exceeds in every column; the first of equal rows
    remains."""
    at_least = np.all(measures[:, None] >= measures[None], axis=2)
    earlier = np.triu(np.ones((len(measures),) * 2, dtype=bool), 1)
    exceeded: NDArray[np.bool_] = (at_least & (~at_least.T | earlier)).any(axis=0)
    return ~exceeded
