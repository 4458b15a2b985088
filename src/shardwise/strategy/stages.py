"""How decoder layers are laid out over the stages of a pipeline, and where stages lie."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwise.schedule import stage_of
from shardwise.strategy.strategy import SCHEDULES

IS_V = np.array([name in ("zb_v", "dualpipe_v") for name in SCHEDULES])


def even_ends(layers: Any, stages: Any) -> tuple[Any, Any]:
    """First and last stage of the even split (docs/reference/space.md): as even as can be, the ends first to
    take less."""
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

    The stages between the ends share what is left evenly; the later ones take the remainder.
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
    """The stages that pipeline rank `rank` holds, in order of its chunks."""
    return tuple(stage_of(SCHEDULES[schedule], pp, rank, chunk) for chunk in range(vpp))
