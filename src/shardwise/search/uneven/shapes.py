"""Every pipeline for which there are devices, but for its layout, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import lcm

import numpy as np
from numpy.typing import NDArray

from shardwise.search.uneven.space import Spread

Ints = NDArray[np.int64]
Tuple = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """A pipeline but for its layout: the kind of its stages on each site, and how many there are."""

    kinds: Tuple
    counts: Tuple


@dataclass(frozen=True, slots=True)
class Shapes:
    """Pipelines but for their layouts: `kinds` and `counts` of stages, of shape (pipelines, sites); and how
    many `alike` ones fill whole units, where stages are spread the nodes of each group of them, with the
    units of each pool that these take together (`devices`, of shape (pipelines, pools))."""

    kinds: Ints
    counts: Ints
    devices: Ints
    alike: Ints

    def at(self, place: int) -> Shape:
        """One of them."""
        return Shape(tuple(self.kinds[place].tolist()), tuple(self.counts[place].tolist()))


@lru_cache(maxsize=256)
def shapes_of(
    takes: tuple[tuple[Tuple, ...], ...],
    spread: tuple[tuple[Spread | None, ...], ...],
    devices: Tuple,
    units: Tuple,
    most_stages: int,
    most_sites: int,
) -> Shapes:
    """Every pipeline on at most so many sites for which there are devices, short ones first; `takes` has the
    devices of each pool that a stage takes, by site and kind, `spread` how stages lie where fewer of them are
    together than could be."""
    unit, available = np.array(units), np.array(devices) // np.array(units)
    stage = [np.array(some) for some in takes]
    empty = np.empty((0, len(takes)), dtype=np.int64)
    found = [Shapes(empty, empty, np.empty((0, len(devices)), dtype=np.int64), np.empty(0, dtype=np.int64))]
    for counts in _counts(takes, devices, most_stages):
        used = [site for site, count in enumerate(counts) if count]
        if len(used) > most_sites:
            continue
        some = [_differing(spread[site], counts[site]) for site in used]
        of_used = np.indices([len(kinds) for kinds, _ in some]).reshape(len(used), -1)
        sets = np.stack([alike[at] for (_, alike), at in zip(some, of_used, strict=True)])
        of_used = np.stack([kinds[at] for (kinds, _), at in zip(some, of_used, strict=True)])
        taken = sum(counts[site] * stage[site][kinds] for site, kinds in zip(used, of_used, strict=True))
        alike = np.lcm.reduce([*sets, *(unit // np.gcd(unit, taken)).T])
        together = alike[:, None] * taken // unit
        fits = (together <= available).all(axis=1)
        kinds = np.zeros((int(fits.sum()), len(takes)), dtype=np.int64)
        kinds[:, used] = of_used[:, fits].T
        found.append(Shapes(kinds, np.tile(counts, (len(kinds), 1)), together[fits], alike[fits]))
    return Shapes(
        *(
            np.concatenate([getattr(some, name) for some in found])
            for name in ("kinds", "counts", "devices", "alike")
        )
    )


def families_of(spread: tuple[tuple[Spread | None, ...], ...], shapes: Shapes) -> Ints:
    """Numbers of the pipelines that differ in how their stages are spread alone, the same for all of them; -1
    for one that none is like."""
    # Of each kind the one before it that is not spread.
    whole = [
        np.maximum.accumulate([kind * (one is None) for kind, one in enumerate(some)]) for some in spread
    ]
    kinds = np.stack([of[shapes.kinds[:, site]] for site, of in enumerate(whole)], axis=1)
    told = np.concatenate([kinds, shapes.counts], axis=1)
    _, family, sizes = np.unique(told, axis=0, return_inverse=True, return_counts=True)
    found: Ints = np.where(sizes[family.ravel()] > 1, family.ravel(), -1)
    return found


def filling(spread: Sequence[Sequence[Spread | None]], shape: Shape) -> int:
    """How many alike pipelines fill the nodes of each of their groups of stages that are spread."""
    of = [(some[kind], count) for some, kind, count in zip(spread, shape.kinds, shape.counts, strict=True)]
    return lcm(*(one.alike(count) for one, count in of if count and one is not None and one.is_other(count)))


def _differing(spread: Sequence[Spread | None], stages: int) -> tuple[Ints, Ints]:
    """The kinds as which so many stages of a site lie otherwise than as any other, and how many alike
    pipelines fill the nodes of each of their groups."""
    kinds = [kind for kind, one in enumerate(spread) if one is None or one.is_other(stages)]
    of = [spread[kind] for kind in kinds]
    return np.array(kinds), np.array([1 if one is None else one.alike(stages) for one in of])


def _counts(takes: Sequence[Sequence[Tuple]], devices: Tuple, most_stages: int) -> list[Tuple]:
    """How many stages of each site a pipeline may have, short pipelines first; of the sites that are pairs of
    pools it has stages on one at most. A kind of each site takes the least of every pool."""
    most = [
        min(most_stages, *(there // need for there, need in zip(devices, some[0], strict=True) if need))
        for some in takes
    ]
    pools, pairs = len(devices), len(takes) - len(devices)
    found = []
    for alone in product(*(range(count + 1) for count in most[:pools])):
        left = most_stages - sum(alone)
        if left < 0:
            continue
        found.append((*alone, *(0,) * pairs))
        for pair in range(pairs):
            behind = (0,) * (pairs - pair - 1)
            braids = range(1, min(left, most[pools + pair]) + 1)
            found += [(*alone, *(0,) * pair, count, *behind) for count in braids]
    return sorted((one for one in found if sum(one)), key=lambda counts: (sum(counts), counts))
