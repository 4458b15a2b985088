"""Every stage that a block's pipelines may have, priced: by site, kind, place, layers.

Arrays have shape (kinds, places, ends, layers): `place` counts stages from the last (1) to the first,
`ends` is 1 for a pipeline's first stage, `layers` runs from 0, which no stage has. What depends on how many
stages of the pipeline lie together in a node has an axis of `seats` behind that of kinds. What does not fit
takes forever. Of the ways to recompute, each stage has the fastest that fits: none is slower in any other
respect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cluster import Tier
from shardwise.cost import (
    Kinds,
    Problem,
    Seat,
    StagePrice,
    StageShape,
    kinds_of,
    seated_prices,
    stage_bytes,
    stage_price,
)
from shardwise.search.uneven.braids import Part, hops_of_braids, price_of_braids
from shardwise.search.uneven.hops import Hops, hops_of_pool, seats_of_pool
from shardwise.search.uneven.space import (
    Block,
    Braid,
    Kind,
    Site,
    Spread,
    UnevenSpace,
    devices_of,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Stages on one site: seconds of a forward and a backward; of gathering, reducing and the end of the
    step, for each of its `seats`; the recomputation that was chosen (index in RECOMPUTES, -1 where nothing
    fits); bytes per device, of a braid those of the part (0 or 1, 0 of others) whose devices are
    `fullest`."""

    kinds: tuple[Kind | Braid, ...]
    seats: tuple[Seat, ...]
    forward_s: Floats
    backward_s: Floats
    gather_s: Floats
    reduce_s: Floats
    end_s: Floats
    recompute: Ints
    allocated_bytes: Floats
    device_bytes: Floats
    fullest: Ints

    @property
    def work_s(self) -> Floats:
        """One microbatch forth and back."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The stages of a block, one `Stages` for each of its `sites` (by place in its `pools`, which are the
    first of them), how those of each kind are `spread`, and their hops, the same both ways. Alike pipelines
    fill whole `units` of devices.

    Where the block has a range of numbers of pipelines, seconds are the least of any of them.
    """

    pools: tuple[int, ...]
    devices: tuple[int, ...]
    units: tuple[int, ...]
    sites: tuple[Site, ...]
    stages: tuple[Stages, ...]
    spread: tuple[tuple[Spread | None, ...], ...]
    hops: tuple[Hops, ...]
    layers: int
    most_stages: int
    microbatches: int

    @property
    def available(self) -> tuple[int, ...]:
        """Units of each pool that there are."""
        return tuple(count // unit for count, unit in zip(self.devices, self.units, strict=True))

    @property
    def unspread(self) -> tuple[tuple[Ints, Ints], ...]:
        """By site the kinds that are not spread, each of which is followed by the same ones that are; and for
        each kind its place among these."""
        found = [np.flatnonzero([one is None for one in some]) for some in self.spread]
        return tuple(
            (kinds, np.searchsorted(kinds, np.arange(len(some)), side="right") - 1)
            for kinds, some in zip(found, self.spread, strict=True)
        )

    @property
    def takes(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """By site and kind, the devices of each pool that a stage takes."""

        def taken(site: Site, kind: Kind | Braid) -> tuple[int, ...]:
            of = dict(zip(site, devices_of(kind), strict=True))
            return tuple(of.get(pool, 0) for pool in range(len(self.pools)))

        sites = zip(self.sites, self.stages, strict=True)
        return tuple(tuple(taken(site, kind) for kind in stages.kinds) for site, stages in sites)


class Pricing:
    """Prices of the blocks of one space; what blocks share is priced once."""

    def __init__(self, space: UnevenSpace) -> None:
        self._space = space
        self._problem = lru_cache(maxsize=None)(space.problem)
        self._kinds = lru_cache(maxsize=None)(self._kinds_of)
        self._inside: dict[tuple[int, int, tuple[Tier, ...]], Kinds] = {}
        self._prices = lru_cache(maxsize=512)(self._prices_of)
        self._braids = lru_cache(maxsize=24)(self._braids_of)
        self._hops = lru_cache(maxsize=None)(self._hops_of)
        self._spread = lru_cache(maxsize=None)(self._spread_of)
        self._rate = lru_cache(maxsize=None)(self._rate_of)

    def options(self, block: Block) -> Options:
        """The stages of the block's pipelines."""
        space = self._space
        pairs = space.pairs(block)
        braids = [self._braids(block, pair) for pair in pairs]
        places = tuple((place,) for place in range(len(block.pools)))
        return Options(
            pools=block.pools,
            devices=tuple(space.pools[pool].devices for pool in block.pools),
            units=tuple(1 if block.is_alike else space.unit(pool) for pool in block.pools),
            sites=(*places, *(tuple(block.pools.index(pool) for pool in pair) for pair in pairs)),
            stages=(*(self._prices(block, pool) for pool in block.pools), *(stages for stages, _ in braids)),
            spread=(
                *(self._spread(pool, block.micro_batch_size) for pool in block.pools),
                *((None,) * len(stages.kinds) for stages, _ in braids),
            ),
            hops=(
                *(self._hops(pool, block.pools, block.micro_batch_size) for pool in block.pools),
                *(hops for _, hops in braids),
            ),
            layers=space.model.layers,
            most_stages=space.most_stages,
            microbatches=space.job.global_batch_size // block.micro_batch_size,
        )

    def _telling(self, block: Block, own: int) -> list[int]:
        """Numbers of pipelines among which every figure of the block is least: replicas that fill the tiers
        inside a node, in each of two groups, make the outer ones pay more the more they are, and the rest
        falls with their number. One pipeline whose stages have no more than one replica, their `own`, has
        nothing to gather or to reduce, which no number undercuts: it and the most tell all."""
        inner = max(self._space.pools[pool].node.devices for pool in block.pools)
        few = range(block.least, min(block.most, 2 * inner) + 1)
        return sorted({block.least, block.most, *(few if block.least * own > 1 else ())})

    def soon_s(self, block: Block) -> float:
        """Seconds that the devices of the block's pools take at least, whatever stages they are: as `least_s`
        of the block on all pools, whose stages do no less and fit no worse."""
        space = self._space
        whole = space.widest(tuple(range(len(space.pools))), block.micro_batch_size)
        rate = sum(self._rate(whole, pool) * space.pools[pool].devices for pool in block.pools)
        batches = space.job.global_batch_size // block.micro_batch_size
        return batches * space.model.layers / rate if rate else float("inf")

    def least_s(self, block: Block, options: Options) -> float:
        """Seconds that every plan of the block takes at least: all devices that its pipelines can have work
        all the time, each on the layers that it is best at."""
        space, rate = self._space, 0.0
        for pool, devices in zip(block.pools, options.devices, strict=True):
            largest = max(tp * dp for tp, dp in space.degrees(pool, block.micro_batch_size))
            rate += self._rate(block, pool) * min(devices, block.most * options.most_stages * largest)
        around_s = min(float((stages.end_s[:, :, 1:, :, 1:]).min()) for stages in options.stages)
        if rate == 0.0:
            return float("inf")
        return options.microbatches * options.layers / rate + around_s

    def _rate_of(self, block: Block, pool: int) -> float:
        """Layers of microbatches per second and device of a pool, at best; a braid's by its part of the
        rows."""
        stages = self._prices(block, pool)
        rates = [_rates(stages, np.array([devices_of(kind)[0] for kind in stages.kinds]))]
        for pair in (pair for pair in self._space.pairs(block) if pool in pair):
            stages, _ = self._braids(block, pair)
            part = pair.index(pool)
            braids = [kind for kind in stages.kinds if isinstance(kind, Braid)]
            sizes = np.array([braid.tp[part] for braid in braids])
            shares = np.array([braid.rows[part] for braid in braids]) / block.micro_batch_size
            rates.append(_rates(stages, sizes / shares))
        return max(rates)

    def alone(self, pool: int) -> Problem:
        """The problem of training on the pool alone."""
        return self._problem(pool, (pool,), False)

    def _kinds_of(self, pool: int, union: tuple[int, ...], size: int, is_alike: bool = False) -> Kinds:
        """What stages do by themselves depends on the tiers inside their nodes alone."""
        problem = self._problem(pool, union, is_alike)
        inside = pool, size, problem.tiers[:-1]
        if inside not in self._inside:
            self._inside[inside] = kinds_of(problem, self._space.degrees(pool, size), size)
        return self._inside[inside].among(problem)

    def _prices_of(self, block: Block, pool: int) -> Stages:
        """The least for any of the block's numbers of pipelines. Where these are on several pools and not
        alike, replicas of a stage meet on the outermost tier: some of them are on another pool, so in another
        node."""
        size = block.micro_batch_size
        kinds = self._kinds(pool, block.pools, size, block.is_alike)
        groups = 1 if block.is_alike or len(block.pools) == 1 else 2
        replicas, seats = self._telling(block, self._space.limits.rows), self._seats(pool, size)
        shape, at = self._timed(replicas, groups)
        prices = seated_prices(kinds, shape, seats)
        allocated, device = stage_bytes(kinds, self._shape(replicas, groups))
        fits = device <= kinds.problem.usable_bytes
        return self._fastest(
            self._space.kinds(pool, size),
            self._of(pool, size),
            seats,
            prices,
            at,
            (allocated, device),
            fits,
            0,
        )

    def _of(self, pool: int, size: int) -> list[int]:
        """Of the pool's kinds, which of its degrees they have: by these stages are priced."""
        degrees = self._space.degrees(pool, size)
        return [degrees.index((kind.tp, kind.dp)) for kind in self._space.kinds(pool, size)]

    def _seats(self, pool: int, size: int) -> tuple[Seat, ...]:
        space = self._space
        sizes = [tp * dp for tp, dp in space.degrees(pool, size)]
        is_tied = space.model.tied_embeddings
        return seats_of_pool(space.pools[pool].node.devices, sizes, space.most_stages, is_tied)

    def _braids_of(self, block: Block, pair: Site) -> tuple[Stages, Hops]:
        """Both parts of a braid are replicas of its stage: there are twice as many as pipelines."""
        size, found = block.micro_batch_size, []
        shape = self._shape([2 * number for number in self._telling(block, 2)], 2)
        braids = self._space.braids(pair, size)
        hops_s = []
        for rows in range(1, size):
            one, other = (
                self._part(block, pool, of, shape) for pool, of in zip(pair, (rows, size - rows), strict=True)
            )
            some = tuple(braid for braid in braids if braid.rows[0] == rows)
            price, fits, fullest = price_of_braids(one, other)
            every = range(len(some))
            at, bytes_ = np.arange(price.forward_s.shape[-2]), (price.allocated_bytes, price.device_bytes)
            found.append(self._fastest(some, every, (Seat(),), [price], at, bytes_, fits, fullest))
            hops_s.append(hops_of_braids(one, other))
        names = [field.name for field in fields(Stages) if field.name not in ("kinds", "seats")]
        whole = {name: np.concatenate([getattr(stages, name) for stages in found]) for name in names}
        stages = self._space.most_stages
        hop_s = np.tile(np.concatenate(hops_s)[:, None, None], (1, stages + 1, stages + 1))
        seats = np.zeros((2, *hop_s.shape), dtype=np.int64)
        return Stages(kinds=braids, seats=(Seat(),), **whole), Hops(hop_s, hop_s, seats)

    def _part(self, block: Block, pool: int, rows: int, shape: StageShape) -> Part:
        """The pool's part in braids, with so many rows, by tp."""
        kinds = self._kinds(pool, block.pools, rows)
        alone = [index for index, (_, dp) in enumerate(self._space.degrees(pool, rows)) if dp == 1]
        devices = self._space.pools[pool].node.devices
        return Part.of(kinds, stage_price(kinds, shape), alone, devices)

    def _shape(self, replicas: Sequence[int], groups: int) -> StageShape:
        """Every stage by its place, whether it is the first, and its layers."""
        place, first, count = (axis.reshape(-1, 1) for axis in np.indices(self._axes))
        return StageShape(
            layers=count, held=place, is_first=1.0 * first, is_last=1.0 * (place == 1),
            replicas=replicas, groups=groups,
        )  # fmt: skip

    def _timed(self, replicas: Sequence[int], groups: int) -> tuple[StageShape, Ints]:
        """Every stage that takes another time than others; and which of them each of `_shape` is."""
        last, first, count = (axis.reshape(-1, 1) for axis in np.indices((2, *self._axes[1:])))
        shape = StageShape(
            layers=count, held=1, is_first=1.0 * first, is_last=1.0 * last,
            replicas=replicas, groups=groups,
        )  # fmt: skip
        is_last = 1 * (np.arange(self._axes[0]) == 1)
        return shape, np.arange(len(last)).reshape(2, -1)[is_last].ravel()

    @property
    def _axes(self) -> tuple[int, int, int]:
        return self._space.most_stages + 1, 2, self._space.model.layers + 1

    def _fastest(
        self,
        kinds: tuple[Kind | Braid, ...],
        of: Sequence[int],
        seats: tuple[Seat, ...],
        prices: Sequence[StagePrice],
        at: Ints,
        bytes_: tuple[Any, Any],
        fits: Any,
        fullest: Any,
    ) -> Stages:
        place, _, count = (axis.reshape(-1, 1) for axis in np.indices(self._axes))
        is_one = (place >= 1) & (count >= 1)
        return _fastest(kinds, of, seats, prices, at, bytes_, fits & is_one, fullest, self._axes)

    def _hops_of(self, pool: int, union: tuple[int, ...], size: int) -> Hops:
        own, across = self._kinds(pool, (pool,), size), self._kinds(pool, union, size)
        sizes = [tp * dp for tp, dp in self._space.degrees(pool, size)]
        together = [kind.together for kind in self._space.kinds(pool, size)]
        kinds = list(zip(self._of(pool, size), together, strict=True))
        devices, seats = self._space.pools[pool].node.devices, self._seats(pool, size)
        return hops_of_pool(own, across, sizes, kinds, devices, self._space.most_stages, seats)

    def _spread_of(self, pool: int, size: int) -> tuple[Spread | None, ...]:
        return tuple(self._space.spread(pool, kind) for kind in self._space.kinds(pool, size))


def _rates(stages: Stages, devices: Floats) -> float:
    """Layers of microbatches per second and device, at best, where a stage of each kind has so many
    devices."""
    layers = np.arange(stages.work_s.shape[-1])
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = layers / (stages.work_s * devices[:, None, None, None])
    return float(np.max(np.where(layers > 0, rates, 0.0)))


def _fastest(
    kinds: tuple[Kind | Braid, ...],
    of: Sequence[int],
    seats: tuple[Seat, ...],
    prices: Sequence[StagePrice],
    at: Ints,
    bytes_: tuple[Any, Any],
    fits: Any,
    fullest: Any,
    shape: tuple[int, ...],
) -> Stages:
    """Of each stage, and of each number of pipelines, the fastest recomputation that fits; and of these the
    least seconds. The recomputation itself and the bytes are those of the first number of pipelines. There is
    a price for each seat, whose rows `at` are those of the stages; `of` has the column of each kind in it."""
    price = prices[0]
    backward_s = np.where(fits, price.backward_s[:, :, at], np.inf)
    chosen = np.argmin(backward_s, axis=0)
    numbers, _, columns = np.ogrid[tuple(map(slice, chosen.shape))]

    def picked(values: Any) -> Any:
        full = np.broadcast_to(values, (*backward_s.shape[:2], *values.shape[2:]))
        return full[chosen, numbers, at[:, None], columns]

    def first(values: Any) -> Any:
        full = np.broadcast_to(values, backward_s.shape)[:, 0]
        return arranged(np.choose(chosen[0], list(full)))

    def arranged(values: Any) -> Any:
        full = np.broadcast_to(values, backward_s.shape[2:])
        found = np.moveaxis(full.reshape(*shape, -1), -1, 0)
        return found if list(of) == list(range(len(found))) else found[list(of)]

    def seated(values: Sequence[Any]) -> Floats:
        return np.stack([arranged(some) for some in values], axis=1)

    backward = arranged(backward_s.min(axis=(0, 1)))
    allocated, device = bytes_
    return Stages(
        kinds=kinds,
        seats=seats,
        forward_s=arranged(price.forward_s[at]),
        backward_s=backward,
        gather_s=seated([one.gather_s.min(axis=0)[at] for one in prices]),
        reduce_s=seated([picked(one.reduce_s).min(axis=0) for one in prices]),
        end_s=seated([one.end_s.min(axis=0)[at] for one in prices]),
        recompute=np.where(np.isinf(backward), -1, arranged(chosen[0])),
        allocated_bytes=first(allocated),
        device_bytes=first(device),
        fullest=first(fullest).astype(np.int64),
    )
