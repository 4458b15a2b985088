"""Stages on two pools at once: each part is priced by itself, and the slower of both tells.

The parts of a braid are two replicas of its layers that split the rows of every microbatch, in nodes of
different pools. So they meet, as all replicas of pipelines that differ, on the outermost tier, and whatever
they hand over leaves their nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import StageCosts, StageKinds, hop_s
from shardwise.ties import first_largest

Floats = NDArray[np.float64]

MEMORY_FIELDS = ("allocated_bytes", "device_bytes")
"""Of a price: what is told of one part, not of the slower one."""


@dataclass(frozen=True, slots=True)
class PoolPart:
    """One pool's part in stages, by tp (the last axis): their price, what a device may use, and what a hop
    over the outermost tier takes this end, all of the node's devices sending at once."""

    price: StageCosts
    usable_bytes: float
    hop_s: Floats

    @staticmethod
    def of(kinds: StageKinds, price: StageCosts, chosen: Sequence[int], devices: int) -> PoolPart:
        """The `chosen` of these kinds on nodes of so many `devices`."""
        count = len(np.atleast_1d(kinds.tp))

        def some(values: Any) -> Any:
            return np.broadcast_to(values, (*np.shape(values)[:-1], count))[..., list(chosen)]

        own = StageCosts(**{one.name: some(getattr(price, one.name)) for one in fields(StageCosts)})
        hops_s = np.asarray(hop_s(kinds, -1, np.full(count, devices)), dtype=np.float64)
        return PoolPart(own, kinds.problem.usable_bytes, hops_s[list(chosen)])


def _is_fuller(one: Any, other: Any) -> Any:
    """Whether the other part is fuller; of equals the first one counts."""
    return first_largest(np.stack(np.broadcast_arrays(one, other))) == 1


def mixed_pool_cost(one: PoolPart, other: PoolPart) -> tuple[StageCosts, Any, Any]:
    """Of every pair of tp, those of `other` first: what the slower part takes; whether both fit; and which
    part (0, 1) has the fuller devices, whose bytes are told."""
    price = {
        field.name: _all_pairs(np.maximum, getattr(one.price, field.name), getattr(other.price, field.name))
        for field in fields(StageCosts)
        if field.name not in MEMORY_FIELDS
    }
    fullest = _all_pairs(_is_fuller, *(part.price.device_bytes / part.usable_bytes for part in (one, other)))
    for name in MEMORY_FIELDS:
        mine, theirs = getattr(one.price, name)[..., None], getattr(other.price, name)[..., None, :]
        both = np.broadcast_arrays(mine, theirs)
        mine, theirs = (values.reshape(*values.shape[:-2], -1) for values in both)
        price[name] = np.where(fullest, theirs, mine)
    fits = _all_pairs(
        np.logical_and, *(part.price.device_bytes <= part.usable_bytes for part in (one, other))
    )
    return StageCosts(**price), fits, 1 * fullest


def mixed_pool_hops(one: PoolPart, other: PoolPart) -> Floats:
    """Seconds of a hop to or from a braid, by pairs of tp: what the slower part needs."""
    found: Floats = _all_pairs(np.maximum, one.hop_s, other.hop_s)
    return found


def _all_pairs(joined: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    """`joined` of every pair of the last axes, the pairs on one last axis."""
    both = joined(np.asarray(one)[..., :, None], np.asarray(other)[..., None, :])
    return both.reshape(*both.shape[:-2], -1)
