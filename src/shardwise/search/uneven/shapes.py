"""Every pipeline for which there are devices, but for its layout, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import lcm

import numpy as np
from numpy.typing import NDArray

from shardwise.search.uneven.space import StageSpread

Ints = NDArray[np.int64]
IntTuple = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """A pipeline but for its layout: the kind of its stages on each site, and how many there are."""

    kinds: IntTuple
    counts: IntTuple


@dataclass(frozen=True, slots=True)
class PipelineShapes:
    """Pipelines but for their layouts: `kinds` and `counts` of stages, of shape (pipelines, sites); and how
    many `set_size` ones fill whole units, where stages are spread the nodes of each group of them, with the
    units of each pool that these take together (`devices`, of shape (pipelines, pools))."""

    kinds: Ints
    counts: Ints
    devices: Ints
    set_size: Ints

    def at(self, place: int) -> PipelineShape:
        """One of them."""
        return PipelineShape(tuple(self.kinds[place].tolist()), tuple(self.counts[place].tolist()))


@lru_cache(maxsize=256)
def shapes_of(
    stage_devices: tuple[tuple[IntTuple, ...], ...],
    spread: tuple[tuple[StageSpread | None, ...], ...],
    devices: IntTuple,
    units: IntTuple,
    most_stages: int,
    most_sites: int,
) -> PipelineShapes:
    """Every pipeline on at most so many sites for which there are devices, short ones first; `stage_devices`
    has the devices of each pool that a stage takes, by site and kind, `spread` how stages lie where fewer of
    them are together than could be."""
    unit, available = np.array(units), np.array(devices) // np.array(units)
    stage = [np.array(some) for some in stage_devices]
    empty = np.empty((0, len(stage_devices)), dtype=np.int64)
    found = [
        PipelineShapes(empty, empty, np.empty((0, len(devices)), dtype=np.int64), np.empty(0, dtype=np.int64))
    ]
    for counts in _counts(stage_devices, devices, most_stages):
        used = [site for site, count in enumerate(counts) if count]
        if len(used) > most_sites:
            continue
        some = [_distinct_spreads(spread[site], counts[site]) for site in used]
        of_used = np.indices([len(kinds) for kinds, _ in some]).reshape(len(used), -1)
        sets = np.stack([set_size[at] for (_, set_size), at in zip(some, of_used, strict=True)])
        of_used = np.stack([kinds[at] for (kinds, _), at in zip(some, of_used, strict=True)])
        taken = sum(counts[site] * stage[site][kinds] for site, kinds in zip(used, of_used, strict=True))
        set_size = np.lcm.reduce([*sets, *(unit // np.gcd(unit, taken)).T])
        set_devices = set_size[:, None] * taken // unit
        fits = (set_devices <= available).all(axis=1)
        kinds = np.zeros((int(fits.sum()), len(stage_devices)), dtype=np.int64)
        kinds[:, used] = of_used[:, fits].T
        found.append(
            PipelineShapes(kinds, np.tile(counts, (len(kinds), 1)), set_devices[fits], set_size[fits])
        )
    return PipelineShapes(
        *(
            np.concatenate([getattr(some, name) for some in found])
            for name in ("kinds", "counts", "devices", "set_size")
        )
    )


def families_of(spread: tuple[tuple[StageSpread | None, ...], ...], shapes: PipelineShapes) -> Ints:
    """Numbers of the pipelines that differ in how their stages are spread alone, the same for all of them; -1
    for one that none is like."""
    # Of each kind the one before it that is not spread.
    whole = [
        np.maximum.accumulate([kind * (one is None) for kind, one in enumerate(some)]) for some in spread
    ]
    kinds = np.stack([of[shapes.kinds[:, site]] for site, of in enumerate(whole)], axis=1)
    keys = np.concatenate([kinds, shapes.counts], axis=1)
    _, family, sizes = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    found: Ints = np.where(sizes[family.ravel()] > 1, family.ravel(), -1)
    return found


def spread_set_size(spread: Sequence[Sequence[StageSpread | None]], shape: PipelineShape) -> int:
    """How many alike pipelines fill the nodes of each of their groups of stages that are spread."""
    of = [(some[kind], count) for some, kind, count in zip(spread, shape.kinds, shape.counts, strict=True)]
    return lcm(
        *(one.set_size(count) for one, count in of if count and one is not None and one.has_effect(count))
    )


def _distinct_spreads(spread: Sequence[StageSpread | None], stages: int) -> tuple[Ints, Ints]:
    """The kinds as which so many stages of a site lie otherwise than as any other, and how many alike
    pipelines fill the nodes of each of their groups."""
    kinds = [kind for kind, one in enumerate(spread) if one is None or one.has_effect(stages)]
    of = [spread[kind] for kind in kinds]
    return np.array(kinds), np.array([1 if one is None else one.set_size(stages) for one in of])


def _counts(
    stage_devices: Sequence[Sequence[IntTuple]], devices: IntTuple, most_stages: int
) -> list[IntTuple]:
    """How many stages of each site a pipeline may have, short pipelines first; of the sites that are pairs of
    pools it has stages on one at most. A kind of each site takes the least of every pool."""
    most = [
        min(most_stages, *(there // need for there, need in zip(devices, some[0], strict=True) if need))
        for some in stage_devices
    ]
    pools, pairs = len(devices), len(stage_devices) - len(devices)
    found = []
    for alone in product(*(range(count + 1) for count in most[:pools])):
        left = most_stages - sum(alone)
        if left < 0:
            continue
        found.append((*alone, *(0,) * pairs))
        for pair in range(pairs):
            after = (0,) * (pairs - pair - 1)
            mixed_pool_stages = range(1, min(left, most[pools + pair]) + 1)
            found += [(*alone, *(0,) * pair, count, *after) for count in mixed_pool_stages]
    return sorted((one for one in found if sum(one)), key=lambda counts: (sum(counts), counts))
