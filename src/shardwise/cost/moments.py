"""Moments of a step at which a rank can have its peak of memory, as columns over rows of a table.

`moments_of` counts, from the table of each row's schedule, the layers whose activations of some micro-batch
are saved on a rank at once, and those that wait for a weight gradient (`Moments`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.problem import Pattern, Problem, distinct_rows
from shardwise.schedule import IN_FLIGHT, UNREDUCED, WAITING, live_counts, live_microbatches, undominated
from shardwise.strategy import IS_V, SCHEDULES, stage_starts

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Moments:
    """Layers with activations at each moment, times their micro-batches; and what the rank has throughout.

    Columns have shape (moments, rows), those by kind of layer (kinds, moments, rows); rows with fewer moments
    repeat their first. `low` and `high` are layers in flight on stages between the ends, which have equally
    many layers or one more. `first` and `last` are micro-batches in flight on the first and on the last
    stage. `waits` are layers that wait for a weight gradient, `waits_first` and `waits_last` micro-batches of
    the first and of the last stage that do. `rank_layers`, `rank_has_embedding` and `rank_has_head` are those
    of all stages of `rank`, each of which has at most `most_layers`. `unreduced_layers`,
    `unreduced_embedding` and `unreduced_head` are those of its stages with whole gradients, in software that
    reduces a stage's gradients once per step; else 0.

    Per row: layers of the first and last stage by kind (none on the last stage where it is the first), and
    the layers of a `low` stage.
    """

    rank: Any
    low: Any
    high: Any
    first: Any
    last: Any
    waits: Any
    waits_first: Any
    waits_last: Any
    rank_layers: Any
    rank_has_embedding: Any
    rank_has_head: Any
    most_layers: Any
    unreduced_layers: Any
    unreduced_embedding: Any
    unreduced_head: Any
    first_layers: Any
    last_layers: Any
    low_layers: Any

    @property
    def layers(self) -> Any:
        """Layers in flight by kind, times their micro-batches."""
        ends = self.first_layers[:, None] * self.first + self.last_layers[:, None] * self.last
        return self.low + self.high + ends

    def taken(self, rows: Any) -> Moments:
        """The moments of these rows."""
        return Moments(*(getattr(self, f.name)[..., rows] for f in fields(Moments)))


def moments_of(problem: Problem, table: Any, *, of_every_rank: bool) -> Moments:
    """The moments of each row that can have its peak of memory; of every rank, else of any."""
    patterns = problem.patterns
    microbatches = problem.job.global_batch_size // (table.dp * table.micro_batch_size)
    live = live_microbatches(table.schedule, table.pp, microbatches)
    names = ("schedule", "pp", "vpp", "first_stage_layers", "last_stage_layers")
    columns = [*(getattr(table, name) for name in names), live]
    rows, inverse = distinct_rows([*columns, *patterns.columns])
    kinds = patterns.before.shape[1]
    of_row = np.broadcast_to(patterns.of_row, live.shape)[rows]
    keys = np.array([column[rows] for column in columns]).T.tolist()
    found = [
        _moments_of_row(
            *key,
            kinds=kinds,
            pattern=patterns.patterns[decoder],
            of_every_rank=of_every_rank,
            reduces_once=problem.profile.whole_in_pipelines,
        )
        for key, decoder in zip(keys, of_row.tolist(), strict=True)
    ]
    ends = np.array([each for _, each in found], dtype=np.float64).T
    whole, by_kind = np.split(_padded([one for one, _ in found]), [10])
    rank, first, last, waits_first, waits_last, has_embedding, has_head, most_layers, *unreduced = whole
    low, high, waits, rank_layers, unreduced_layers = np.split(by_kind, 5)
    return Moments(
        rank=rank, low=low, high=high, first=first, last=last, waits=waits,
        waits_first=waits_first, waits_last=waits_last,
        rank_layers=rank_layers, rank_has_embedding=has_embedding, rank_has_head=has_head,
        most_layers=most_layers, unreduced_layers=unreduced_layers,
        unreduced_embedding=unreduced[0], unreduced_head=unreduced[1],
        first_layers=ends[:kinds], last_layers=ends[kinds:-1], low_layers=ends[-1],
    ).taken(inverse)  # fmt: skip


def _padded(rows: Sequence[Ints]) -> NDArray[np.float64]:
    """The columns of all rows in one array (columns, moments, rows); short ones repeat their first moment."""
    width = max(one.shape[1] for one in rows)
    found = np.empty((len(rows[0]), width, len(rows)))
    for row, one in enumerate(rows):
        found[:, : one.shape[1], row] = one
        found[:, one.shape[1] :, row] = one[:, :1]
    return found


@lru_cache(maxsize=1 << 14)
def _moments_of_row(
    schedule: int,
    pp: int,
    vpp: int,
    first_layers: int,
    last_layers: int,
    microbatches: int,
    *,
    kinds: int,
    pattern: Pattern,
    of_every_rank: bool,
    reduces_once: bool,
) -> tuple[Ints, list[int]]:
    """The columns of one row (columns, moments), in the order of `_measures`; and its row of ends."""
    stages = pp * vpp
    starts = stage_starts(len(pattern), stages, first_layers, last_layers, np.arange(stages + 1))
    layers = np.diff(_layers_before(pattern, kinds)[starts], axis=0)
    between = layers[1:-1].sum(axis=1)
    low = int(between.min()) if len(between) else 0
    counts = _joined_counts(schedule, pp, microbatches, vpp, reduces_once=reduces_once and pp > 1)
    every = np.unique(_measures(counts, layers, low), axis=0)
    if of_every_rank:
        parts = np.split(every, np.flatnonzero(np.diff(every[:, 0])) + 1)
        every = np.concatenate([one[undominated(one)] for one in parts])
    else:
        every = every[_best(every)]
    return every.T, [*layers[0].tolist(), *(layers[-1] * (stages > 1)).tolist(), low]


@lru_cache(maxsize=64)
def _layers_before(pattern: Pattern, kinds: int) -> Ints:
    """Layers of each kind before each layer of a decoder, and of all of it: (layers + 1, kinds)."""
    is_kind = np.array(pattern, dtype=np.int64)[:, None] == np.arange(kinds)
    return np.concatenate([np.zeros((1, kinds), dtype=np.int64), is_kind.cumsum(axis=0)])


@dataclass(frozen=True, slots=True)
class _Counts:
    """The `live_counts` of all ranks, in one row per moment: its rank (moments,); per chunk (moments, vpp)
    the chunk's stage, its micro-batches in flight, those that wait, and whether its gradients are
    unreduced."""

    rank: Ints
    stage: Ints
    flying: Ints
    waiting: Ints
    unreduced: Ints


@lru_cache(maxsize=1 << 12)
def _joined_counts(schedule: int, pp: int, microbatches: int, vpp: int, *, reduces_once: bool) -> _Counts:
    found = live_counts(SCHEDULES[schedule], pp, microbatches, vpp, reduces_once=reduces_once)
    counts = np.concatenate(found)
    rank = np.repeat(np.arange(pp), [len(one) for one in found])
    stages = [rank, 2 * pp - 1 - rank] if IS_V[schedule] else [rank + pp * chunk for chunk in range(vpp)]
    flying, waiting = counts[:, IN_FLIGHT], counts[:, WAITING]
    unreduced = counts[:, UNREDUCED] if counts.shape[1] > UNREDUCED else 0 * flying
    return _Counts(rank, np.stack(stages, axis=1), flying, waiting, unreduced)


def _best(measures: Ints) -> NDArray[np.intp]:
    """Indices of the rows that no other exceeds; the rank does not count."""
    return np.flatnonzero(undominated(measures[:, 1:]))


def _measures(counts: _Counts, layers: Ints, low: int) -> Ints:
    """The columns of all moments, (moments, columns): `rank`, `first`, `last`, `waits_first`, `waits_last`,
    whether the rank has the embedding and the head, `most_layers`, `unreduced_embedding`, `unreduced_head`;
    and by kind `low`, `high`, `waits`, `rank_layers`, `unreduced_layers`."""
    flying, waiting, unreduced = counts.flying, counts.waiting, counts.unreduced
    of_chunk = layers[counts.stage]
    sizes = of_chunk.sum(axis=2)
    is_first, is_last = counts.stage == 0, counts.stage == len(layers) - 1
    is_between = ~is_first & ~is_last
    is_high = is_between & (sizes > low)
    columns = [
        counts.rank,
        (flying * is_first).sum(axis=1),
        (flying * is_last).sum(axis=1),
        (waiting * is_first).sum(axis=1),
        (waiting * is_last).sum(axis=1),
        is_first.any(axis=1),
        is_last.any(axis=1),
        sizes.max(axis=1),
        (unreduced * is_first).sum(axis=1),
        (unreduced * is_last).sum(axis=1),
    ]
    by_kind = [
        _layers_times(flying * (is_between & ~is_high), of_chunk),
        _layers_times(flying * is_high, of_chunk),
        _layers_times(waiting, of_chunk),
        of_chunk.sum(axis=1),
        _layers_times(unreduced, of_chunk),
    ]
    return np.concatenate([np.stack(columns, axis=1), *by_kind], axis=1)


def _layers_times(microbatches: Ints, layers: Ints) -> Ints:
    """Layers by kind times the micro-batches of their chunk, over all chunks: (moments, kinds)."""
    return np.asarray((microbatches[:, :, None] * layers).sum(axis=1))
