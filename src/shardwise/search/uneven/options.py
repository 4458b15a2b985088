"""Every stage that a block's pipelines may have, priced: by pool, kind, place, layers.

Arrays have shape (kinds, places, ends, layers): `place` counts stages from the last (1) to the first,
`ends` is 1 for a pipeline's first stage, `layers` runs from 0, which no stage has. What does not fit takes
forever. Of the ways to recompute, each stage has the fastest that fits: none is slower in any other respect.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cluster import Tier
from shardwise.cost import Kinds, Problem, StagePrice, StageShape, kinds_of, stage_price
from shardwise.search.uneven.hops import Hops, hops_of_pool
from shardwise.search.uneven.space import Block, Kind, UnevenSpace

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Stages on one pool: seconds of a forward and a backward, of gathering, reducing and the end of the
    step; the recomputation that was chosen (index in RECOMPUTES, -1 where nothing fits); bytes per device."""

    kinds: tuple[Kind, ...]
    forward_s: Floats
    backward_s: Floats
    gather_s: Floats
    reduce_s: Floats
    end_s: Floats
    recompute: Ints
    allocated_bytes: Floats
    device_bytes: Floats

    @property
    def work_s(self) -> Floats:
        """One microbatch forth and back."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The stages of a block, one `Stages` per pool of its union, and their hops, the same both ways. Alike
    pipelines fill whole `units` of devices.

    Where the block has a range of numbers of pipelines, every figure is the least of any of them.
    """

    pools: tuple[int, ...]
    devices: tuple[int, ...]
    units: tuple[int, ...]
    stages: tuple[Stages, ...]
    hops: tuple[Hops, ...]
    layers: int
    most_stages: int
    microbatches: int

    @property
    def available(self) -> tuple[int, ...]:
        """Units of each pool that there are."""
        return tuple(count // unit for count, unit in zip(self.devices, self.units, strict=True))


class Pricing:
    """Prices of the blocks of one space; what blocks share is priced once."""

    def __init__(self, space: UnevenSpace) -> None:
        self._space = space
        self._problem = lru_cache(maxsize=None)(space.problem)
        self._kinds = lru_cache(maxsize=None)(self._kinds_of)
        self._inside: dict[tuple[int, int, tuple[Tier, ...]], Kinds] = {}
        self._prices = lru_cache(maxsize=512)(self._prices_of)
        self._hops = lru_cache(maxsize=None)(self._hops_of)

    def options(self, block: Block) -> Options:
        """The stages of the block's pipelines."""
        space = self._space
        stages = tuple(self._prices(block, pool) for pool in block.pools)
        return Options(
            pools=block.pools,
            devices=tuple(space.pools[pool].devices for pool in block.pools),
            units=tuple(1 if block.is_alike else space.unit(pool) for pool in block.pools),
            stages=stages,
            hops=tuple(self._hops(pool, block.pools, block.micro_batch_size) for pool in block.pools),
            layers=space.model.layers,
            most_stages=space.most_stages,
            microbatches=space.job.global_batch_size // block.micro_batch_size,
        )

    def _telling(self, block: Block) -> list[int]:
        """Numbers of pipelines among which every figure of the block is least: replicas that fill the tiers
        inside a node, in each of two groups, make the outer ones pay more the more they are, and the rest
        falls with their number."""
        inner = max(self._space.pools[pool].node.devices for pool in block.pools)
        few = range(block.least, min(block.most, 2 * inner) + 1)
        return sorted({block.least, *few, block.most})

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
        rate = 0.0
        for pool, stages, devices in zip(block.pools, options.stages, options.devices, strict=True):
            largest = max(tp * dp for tp, dp in stages.kinds)
            rate += self._rate(block, pool) * min(devices, block.most * options.most_stages * largest)
        around_s = min(float((stages.end_s[:, 1:, :, 1:]).min()) for stages in options.stages)
        if rate == 0.0:
            return float("inf")
        return options.microbatches * options.layers / rate + around_s

    def _rate(self, block: Block, pool: int) -> float:
        """Layers of microbatches per second and device of a pool, at best."""
        stages = self._prices(block, pool)
        sizes = np.array([tp * dp for tp, dp in stages.kinds])
        layers = np.arange(stages.work_s.shape[-1])
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(
                np.max(np.where(layers > 0, layers / (stages.work_s * sizes[:, None, None, None]), 0.0))
            )

    def alone(self, pool: int) -> Problem:
        """The problem of training on the pool alone."""
        return self._problem(pool, (pool,), False)

    def _kinds_of(self, pool: int, union: tuple[int, ...], size: int, is_alike: bool = False) -> Kinds:
        """What stages do by themselves depends on the tiers inside their nodes alone."""
        problem = self._problem(pool, union, is_alike)
        inside = pool, size, problem.tiers[:-1]
        if inside not in self._inside:
            self._inside[inside] = kinds_of(problem, self._space.kinds(pool, size), size)
        return self._inside[inside].among(problem)

    def _prices_of(self, block: Block, pool: int) -> Stages:
        """The least for any of the block's numbers of pipelines. Where these are on several pools and not
        alike, replicas of a stage meet on the outermost tier: some of them are on another pool, so in another
        node."""
        size = block.micro_batch_size
        kinds = self._kinds(pool, block.pools, size, block.is_alike)
        places, layers = self._space.most_stages, self._space.model.layers
        place, first, count = (axis.reshape(-1, 1) for axis in np.indices((places + 1, 2, layers + 1)))
        shape = StageShape(
            layers=count, held=place, is_first=1.0 * first, is_last=1.0 * (place == 1),
            replicas=self._telling(block), groups=1 if block.is_alike or len(block.pools) == 1 else 2,
        )  # fmt: skip
        price = stage_price(kinds, shape)
        is_stage = (place >= 1) & (count >= 1)
        return _fastest(
            kinds.problem, self._space.kinds(pool, size), price, is_stage, (places + 1, 2, layers + 1)
        )

    def _hops_of(self, pool: int, union: tuple[int, ...], size: int) -> Hops:
        own, across = self._kinds(pool, (pool,), size), self._kinds(pool, union, size)
        sizes = [tp * dp for tp, dp in self._space.kinds(pool, size)]
        devices = self._space.pools[pool].node.devices
        return hops_of_pool(own, across, sizes, devices, self._space.most_stages)


def _fastest(
    problem: Problem, kinds: tuple[Kind, ...], price: StagePrice, is_stage: Any, shape: tuple[int, ...]
) -> Stages:
    """Of each stage, and of each number of pipelines, the fastest recomputation that fits; and of these the
    least figures. The recomputation itself is that of the first number of pipelines."""
    fits = (price.device_bytes <= problem.usable_bytes) & is_stage
    backward_s = np.where(fits, price.backward_s, np.inf)
    chosen = np.argmin(backward_s, axis=0)[None]

    def picked(values: Any) -> Floats:
        full = np.broadcast_to(values, backward_s.shape)
        return least(np.take_along_axis(full, chosen, axis=0)[0])

    def least(values: Any) -> Floats:
        full: Floats = arranged(np.broadcast_to(values, backward_s.shape[1:]).min(axis=0))
        return full

    def arranged(values: Any) -> Any:
        full = np.broadcast_to(values, backward_s.shape[2:])
        return np.ascontiguousarray(np.moveaxis(full.reshape(*shape, len(kinds)), -1, 0))

    backward = picked(backward_s)
    return Stages(
        kinds=kinds,
        forward_s=arranged(price.forward_s),
        backward_s=backward,
        gather_s=least(price.gather_s),
        reduce_s=picked(price.reduce_s),
        end_s=least(price.end_s),
        recompute=np.where(np.isinf(backward), -1, arranged(chosen[0, 0])),
        allocated_bytes=picked(price.allocated_bytes),
        device_bytes=picked(price.device_bytes),
    )
