"""Where layers lie: the stages of a pipeline with what they and their ranks hold, as columns.

A place is one stage of one row. Arrays have shape (places, rows): all stages of a table whose rows have
equally many, or for bounds only those stages that no other exceeds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from shardwise.cost.distinct import distinct_rows
from shardwise.cost.patterns import Patterns
from shardwise.cost.problem import Problem
from shardwise.schedule import SPLIT_NAMES
from shardwise.strategy import IS_V, SCHEDULES, stage_starts

SPLIT_FIELDS = ("pp", "vpp", "schedule", "first_stage_layers", "last_stage_layers")
"""The fields on which the places of layers depend."""

IS_SPLIT = np.array([name in SPLIT_NAMES for name in SCHEDULES])
"""Per schedule whether it gives weight gradients actions of their own."""


@dataclass(frozen=True, slots=True)
class Places:
    """Per place: its stage and pipeline rank; layers by kind on the stage and on its rank; the ends that the
    stage and the rank hold (0 or 1).

    Layer counts have shape (kinds, places, rows).
    """

    stage: Any
    rank: Any
    layers: Any
    rank_layers: Any
    has_embedding: Any
    has_head: Any
    rank_has_embedding: Any
    rank_has_head: Any

    def take(self, rows: Any) -> Places:
        """The places of the rows at these indices."""
        return Places(**{f.name: getattr(self, f.name)[..., rows] for f in fields(Places)})


def all_places(problem: Problem, table: Any) -> Places:
    """Every stage of every row in order, padded to the largest number of stages."""
    return _by_size(problem, table, _stages)


def _stages(patterns: Patterns, table: Any) -> Places:
    """Every stage of every row; places beyond a row's stages repeat its first."""
    pp, stages = table.pp, table.pp * table.vpp
    index = np.arange(int(stages.max()))[:, None]
    stage = np.where(index < stages, index, 0)
    split = (patterns.layers, stages, table.first_stage_layers, table.last_stage_layers)
    layers = patterns.between(stage_starts(*split, stage), stage_starts(*split, stage + 1))
    rank = np.where(IS_V[table.schedule], np.minimum(stage, 2 * pp - 1 - stage), stage % pp)
    together = (rank[:, None] == rank[None, :]) & (index < stages)[:, None]
    return Places(
        stage=stage,
        rank=rank,
        layers=layers,
        rank_layers=np.einsum("tsn,ktn->ksn", together.astype(np.int64), layers),
        has_embedding=(stage == 0) * 1.0,
        has_head=(stage == stages - 1) * 1.0,
        rank_has_embedding=(rank == 0) * 1.0,
        rank_has_head=(rank == np.where(IS_V[table.schedule], 0, pp - 1)) * 1.0,
    )


def peak_places(problem: Problem, table: Any) -> Places:
    """Of each row, the places that no other place exceeds in every respect, padded to a common number.

    Without split backward passes, activations in flight never grow with the rank, and a place is exceeded by
    one on a lower (or the same) rank whose stage and rank hold at least as much of everything. With them, all
    ranks have equally many in flight, of which more wait for their W on later ranks; a place is exceeded by
    one on a higher (or the same) rank. What those that are left need at most, the row needs at most.
    """
    return _by_size(problem, table, _peaks)


def _peaks(patterns: Patterns, table: Any) -> Places:
    return _undominated(_stages(patterns, table), np.where(IS_SPLIT[table.schedule], 1, -1))


def _by_size(problem: Problem, table: Any, places_of: Callable[[Patterns, Any], Places]) -> Places:
    """`places_of` the distinct splits among the rows, those with about as many stages together, in one padded
    array."""
    patterns = problem.patterns
    rows, inverse = distinct_rows([*(getattr(table, name) for name in SPLIT_FIELDS), *patterns.columns])
    few, patterns = table.take(rows), patterns.taken(rows)
    size = np.ceil(np.log2(few.pp * few.vpp)).astype(np.int64)
    groups: list[tuple[Any, Places]] = []
    for same in np.unique(size):
        index = np.flatnonzero(size == same)
        groups.append((index, places_of(patterns.taken(index), few.take(index))))
    width = max(places.stage.shape[0] for _, places in groups)
    return _padded(groups, width, len(rows)).take(inverse)


def _undominated(places: Places, by_rank: Any) -> Places:
    """Moves the places that are not exceeded to the front and cuts to the largest number of them.

    `by_rank` is 1 in rows where a higher rank needs no less, -1 where a lower one. Of equal places the first
    counts. Rows with fewer repeat their first.
    """
    ends = [
        places.has_head,
        places.has_embedding,
        places.rank_has_head,
        places.rank_has_embedding,
        by_rank * places.rank,
    ]
    measures = np.concatenate([places.layers, places.rank_layers, np.stack(ends).astype(np.int64)])
    at_least = np.all(measures[:, :, None] >= measures[:, None, :], axis=0)
    earlier = np.arange(at_least.shape[0])[:, None] < np.arange(at_least.shape[0])[None, :]
    exceeded = (at_least & (~np.swapaxes(at_least, 0, 1) | earlier[:, :, None])).any(axis=0)
    width = (~exceeded).sum(axis=0).max()
    front = np.argsort(exceeded, axis=0, kind="stable")[:width]
    chosen = np.where(np.take_along_axis(exceeded, front, axis=0), front[:1], front)
    return Places(**{f.name: _along_places(getattr(places, f.name), chosen) for f in fields(Places)})


def _along_places(values: Any, chosen: Any) -> Any:
    if values.ndim == 3:
        return np.stack([np.take_along_axis(kind, chosen, axis=0) for kind in values])
    return np.take_along_axis(values, chosen, axis=0)


def _padded(groups: list[tuple[Any, Places]], width: int, rows: int) -> Places:
    """All groups in one array, short ones repeating their place 0."""
    columns: dict[str, Any] = {}
    for f in fields(Places):
        sample = getattr(groups[0][1], f.name)
        full = np.empty((*sample.shape[:-2], width, rows), dtype=sample.dtype)
        for index, places in groups:
            values = getattr(places, f.name)
            have = values.shape[-2]
            full[..., :have, index] = values
            full[..., have:, index] = values[..., :1, :]
        columns[f.name] = full
    return Places(**columns)
