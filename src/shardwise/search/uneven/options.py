"""Every stage that a block's pipelines may have, priced: by site, kind, place, layers.

Arrays have shape (kinds, places, ends, layers): `place` counts stages from the last (1) to the first, `ends`
is 1 for a pipeline's first stage, `layers` runs from 0, which no stage has. What depends on how many stages
of the pipeline lie together in a node has an axis of `node_slots` behind that of kinds. What does not fit
takes forever. Of the ways to recompute, each stage has the fastest that fits: none is slower in any other
respect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cluster import Tier
from shardwise.cost import (
    NodeSlot,
    Problem,
    StageCosts,
    StageKinds,
    StageShape,
    stage_bytes,
    stage_costs,
    stage_costs_by_slot,
    stage_kinds_of,
)
from shardwise.search.uneven.braids import PoolPart, mixed_pool_cost, mixed_pool_hops
from shardwise.search.uneven.hops import StageHops, hops_of_pool, node_slots_of_pool
from shardwise.search.uneven.space import (
    MixedPoolKind,
    Site,
    StageKind,
    StageSpread,
    UnevenSpace,
    UnevenSubproblem,
    devices_by_pool,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteCosts:
    """Stages on one site: seconds of a forward and a backward; of gathering, reducing and the end of the
    step, for each of its `node_slots`; the recomputation that was chosen (index in RECOMPUTES, -1 where
    nothing fits); bytes per device, of a braid those of the part (0 or 1, 0 of others) whose devices are
    `fullest`."""

    kinds: tuple[StageKind | MixedPoolKind, ...]
    node_slots: tuple[NodeSlot, ...]
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
class StageOptions:
    """The stages of a block, one `SiteCosts` for each of its `sites` (by place in its `pools`, which are the
    first of them), how those of each kind are `spread`, and their hops, the same both ways. Alike pipelines
    fill whole `units` of devices.

    Where the block has a range of numbers of pipelines, seconds are the least of any of them.
    """

    pools: tuple[int, ...]
    devices: tuple[int, ...]
    units: tuple[int, ...]
    sites: tuple[Site, ...]
    stages: tuple[SiteCosts, ...]
    spread: tuple[tuple[StageSpread | None, ...], ...]
    hops: tuple[StageHops, ...]
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
    def stage_devices(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """By site and kind, the devices of each pool that a stage takes."""

        def taken(site: Site, kind: StageKind | MixedPoolKind) -> tuple[int, ...]:
            of = dict(zip(site, devices_by_pool(kind), strict=True))
            return tuple(of.get(pool, 0) for pool in range(len(self.pools)))

        sites = zip(self.sites, self.stages, strict=True)
        return tuple(tuple(taken(site, kind) for kind in stages.kinds) for site, stages in sites)


class StageCostModel:
    """Prices of the blocks of one space; what blocks share is priced once."""

    def __init__(self, space: UnevenSpace) -> None:
        self._space = space
        self._problem = lru_cache(maxsize=None)(space.problem)
        self._kinds = lru_cache(maxsize=None)(self._kinds_of)
        self._inside: dict[tuple[int, int, tuple[Tier, ...]], StageKinds] = {}
        self._costs = lru_cache(maxsize=512)(self._costs_of)
        self._mixed_pool_costs = lru_cache(maxsize=24)(self._mixed_pool_costs_of)
        self._hops = lru_cache(maxsize=None)(self._hops_of)
        self._spread = lru_cache(maxsize=None)(self._spread_of)
        self._rate = lru_cache(maxsize=None)(self._rate_of)

    def options(self, subproblem: UnevenSubproblem) -> StageOptions:
        """The stages of the block's pipelines."""
        space = self._space
        pairs = space.pairs(subproblem)
        mixed_pool_stages = [self._mixed_pool_costs(subproblem, pair) for pair in pairs]
        places = tuple((place,) for place in range(len(subproblem.pools)))
        return StageOptions(
            pools=subproblem.pools,
            devices=tuple(space.pools[pool].devices for pool in subproblem.pools),
            units=tuple(1 if subproblem.is_alike else space.unit(pool) for pool in subproblem.pools),
            sites=(*places, *(tuple(subproblem.pools.index(pool) for pool in pair) for pair in pairs)),
            stages=(
                *(self._costs(subproblem, pool) for pool in subproblem.pools),
                *(stages for stages, _ in mixed_pool_stages),
            ),
            spread=(
                *(self._spread(pool, subproblem.micro_batch_size) for pool in subproblem.pools),
                *((None,) * len(stages.kinds) for stages, _ in mixed_pool_stages),
            ),
            hops=(
                *(
                    self._hops(pool, subproblem.pools, subproblem.micro_batch_size)
                    for pool in subproblem.pools
                ),
                *(hops for _, hops in mixed_pool_stages),
            ),
            layers=space.model.layers,
            most_stages=space.most_stages,
            microbatches=space.job.global_batch_size // subproblem.micro_batch_size,
        )

    def _extreme_pipeline_counts(self, subproblem: UnevenSubproblem, own: int) -> list[int]:
        """Numbers of pipelines among which every figure of the block is least: replicas that fill the tiers
        inside a node, in each of two groups, make the outer ones pay more the more they are, and the rest
        falls with their number. One pipeline whose stages have no more than one replica, their `own`, has
        nothing to gather or to reduce, which no number undercuts: it and the most tell all."""
        inner = max(self._space.pools[pool].node.devices for pool in subproblem.pools)
        few = range(subproblem.least, min(subproblem.most, 2 * inner) + 1)
        return sorted({subproblem.least, subproblem.most, *(few if subproblem.least * own > 1 else ())})

    def quick_bound_s(self, subproblem: UnevenSubproblem) -> float:
        """Seconds that the devices of the block's pools take at least, whatever stages they are: as
        `lower_bound_s` of the block on all pools, whose stages do no less and fit no worse."""
        space = self._space
        whole = space.widest(tuple(range(len(space.pools))), subproblem.micro_batch_size)
        rate = sum(self._rate(whole, pool) * space.pools[pool].devices for pool in subproblem.pools)
        batches = space.job.global_batch_size // subproblem.micro_batch_size
        return batches * space.model.layers / rate if rate else float("inf")

    def lower_bound_s(self, subproblem: UnevenSubproblem, options: StageOptions) -> float:
        """Seconds that every plan of the block takes at least: all devices that its pipelines can have work
        all the time, each on the layers that it is best at."""
        space, rate = self._space, 0.0
        for pool, devices in zip(subproblem.pools, options.devices, strict=True):
            largest = max(tp * dp for tp, dp in space.degrees(pool, subproblem.micro_batch_size))
            rate += self._rate(subproblem, pool) * min(
                devices, subproblem.most * options.most_stages * largest
            )
        overhead_s = min(float((stages.end_s[:, :, 1:, :, 1:]).min()) for stages in options.stages)
        if rate == 0.0:
            return float("inf")
        return options.microbatches * options.layers / rate + overhead_s

    def _rate_of(self, subproblem: UnevenSubproblem, pool: int) -> float:
        """Layers of microbatches per second and device of a pool, at best; a braid's by its part of the
        rows."""
        stages = self._costs(subproblem, pool)
        rates = [_best_rate(stages, np.array([devices_by_pool(kind)[0] for kind in stages.kinds]))]
        for pair in (pair for pair in self._space.pairs(subproblem) if pool in pair):
            stages, _ = self._mixed_pool_costs(subproblem, pair)
            part = pair.index(pool)
            mixed_pool_stages = [kind for kind in stages.kinds if isinstance(kind, MixedPoolKind)]
            sizes = np.array([mixed_stage.tp[part] for mixed_stage in mixed_pool_stages])
            shares = (
                np.array([mixed_stage.rows[part] for mixed_stage in mixed_pool_stages])
                / subproblem.micro_batch_size
            )
            rates.append(_best_rate(stages, sizes / shares))
        return max(rates)

    def single_pool_problem(self, pool: int) -> Problem:
        """The problem of training on the pool alone."""
        return self._problem(pool, (pool,), False)

    def _kinds_of(self, pool: int, union: tuple[int, ...], size: int, is_alike: bool = False) -> StageKinds:
        """What stages do by themselves depends on the tiers inside their nodes alone."""
        problem = self._problem(pool, union, is_alike)
        inside = pool, size, problem.tiers[:-1]
        if inside not in self._inside:
            self._inside[inside] = stage_kinds_of(problem, self._space.degrees(pool, size), size)
        return self._inside[inside].among(problem)

    def _costs_of(self, subproblem: UnevenSubproblem, pool: int) -> SiteCosts:
        """The least for any of the block's numbers of pipelines. Where these are on several pools and not
        alike, replicas of a stage meet on the outermost tier: some of them are on another pool, so in another
        node."""
        size = subproblem.micro_batch_size
        kinds = self._kinds(pool, subproblem.pools, size, subproblem.is_alike)
        groups = 1 if subproblem.is_alike or len(subproblem.pools) == 1 else 2
        replicas, node_slots = (
            self._extreme_pipeline_counts(subproblem, self._space.limits.stage_dp),
            self._node_slots(pool, size),
        )
        shape, at = self._timed_shape(replicas, groups)
        prices = stage_costs_by_slot(kinds, shape, node_slots)
        allocated, device = stage_bytes(kinds, self._shape(replicas, groups))
        fits = device <= kinds.problem.usable_bytes
        return self._fastest_recompute(
            self._space.kinds(pool, size),
            self._degree_indices(pool, size),
            node_slots,
            prices,
            at,
            (allocated, device),
            fits,
            0,
        )

    def _degree_indices(self, pool: int, size: int) -> list[int]:
        """Of the pool's kinds, which of its degrees they have: by these stages are priced."""
        degrees = self._space.degrees(pool, size)
        return [degrees.index((kind.tp, kind.dp)) for kind in self._space.kinds(pool, size)]

    def _node_slots(self, pool: int, size: int) -> tuple[NodeSlot, ...]:
        space = self._space
        sizes = [tp * dp for tp, dp in space.degrees(pool, size)]
        is_tied = space.model.tied_embeddings
        return node_slots_of_pool(space.pools[pool].node.devices, sizes, space.most_stages, is_tied)

    def _mixed_pool_costs_of(self, subproblem: UnevenSubproblem, pair: Site) -> tuple[SiteCosts, StageHops]:
        """Both parts of a braid are replicas of its stage: there are twice as many as pipelines."""
        size, found = subproblem.micro_batch_size, []
        shape = self._shape([2 * number for number in self._extreme_pipeline_counts(subproblem, 2)], 2)
        mixed_pool_stages = self._space.mixed_pool_stages(pair, size)
        hops_s = []
        for rows in range(1, size):
            one, other = (
                self._part(subproblem, pool, of, shape)
                for pool, of in zip(pair, (rows, size - rows), strict=True)
            )
            some = tuple(mixed_stage for mixed_stage in mixed_pool_stages if mixed_stage.rows[0] == rows)
            price, fits, fullest = mixed_pool_cost(one, other)
            every = range(len(some))
            at, bytes_ = np.arange(price.forward_s.shape[-2]), (price.allocated_bytes, price.device_bytes)
            found.append(
                self._fastest_recompute(some, every, (NodeSlot(),), [price], at, bytes_, fits, fullest)
            )
            hops_s.append(mixed_pool_hops(one, other))
        names = [field.name for field in fields(SiteCosts) if field.name not in ("kinds", "node_slots")]
        whole = {name: np.concatenate([getattr(stages, name) for stages in found]) for name in names}
        stages = self._space.most_stages
        hop_s = np.tile(np.concatenate(hops_s)[:, None, None], (1, stages + 1, stages + 1))
        node_slots = np.zeros((2, *hop_s.shape), dtype=np.int64)
        return SiteCosts(kinds=mixed_pool_stages, node_slots=(NodeSlot(),), **whole), StageHops(
            hop_s, hop_s, node_slots
        )

    def _part(self, subproblem: UnevenSubproblem, pool: int, rows: int, shape: StageShape) -> PoolPart:
        """The pool's part in braids, with so many rows, by tp."""
        kinds = self._kinds(pool, subproblem.pools, rows)
        alone = [index for index, (_, dp) in enumerate(self._space.degrees(pool, rows)) if dp == 1]
        devices = self._space.pools[pool].node.devices
        return PoolPart.of(kinds, stage_costs(kinds, shape), alone, devices)

    def _shape(self, replicas: Sequence[int], groups: int) -> StageShape:
        """Every stage by its place, whether it is the first, and its layers."""
        place, first, count = (axis.reshape(-1, 1) for axis in np.indices(self._axes))
        return StageShape(
            layers=count, in_flight=place, is_first=1.0 * first, is_last=1.0 * (place == 1),
            replicas=replicas, groups=groups,
        )  # fmt: skip

    def _timed_shape(self, replicas: Sequence[int], groups: int) -> tuple[StageShape, Ints]:
        """Every stage that takes another time than others; and which of them each of `_shape` is."""
        last, first, count = (axis.reshape(-1, 1) for axis in np.indices((2, *self._axes[1:])))
        shape = StageShape(
            layers=count, in_flight=1, is_first=1.0 * first, is_last=1.0 * last,
            replicas=replicas, groups=groups,
        )  # fmt: skip
        is_last = 1 * (np.arange(self._axes[0]) == 1)
        return shape, np.arange(len(last)).reshape(2, -1)[is_last].ravel()

    @property
    def _axes(self) -> tuple[int, int, int]:
        return self._space.most_stages + 1, 2, self._space.model.layers + 1

    def _fastest_recompute(
        self,
        kinds: tuple[StageKind | MixedPoolKind, ...],
        of: Sequence[int],
        node_slots: tuple[NodeSlot, ...],
        prices: Sequence[StageCosts],
        at: Ints,
        bytes_: tuple[Any, Any],
        fits: Any,
        fullest: Any,
    ) -> SiteCosts:
        place, _, count = (axis.reshape(-1, 1) for axis in np.indices(self._axes))
        is_one = (place >= 1) & (count >= 1)
        return _fastest_recompute(
            kinds, of, node_slots, prices, at, bytes_, fits & is_one, fullest, self._axes
        )

    def _hops_of(self, pool: int, union: tuple[int, ...], size: int) -> StageHops:
        own, across = self._kinds(pool, (pool,), size), self._kinds(pool, union, size)
        sizes = [tp * dp for tp, dp in self._space.degrees(pool, size)]
        stages_per_node = [kind.stages_per_node for kind in self._space.kinds(pool, size)]
        kinds = list(zip(self._degree_indices(pool, size), stages_per_node, strict=True))
        devices, node_slots = self._space.pools[pool].node.devices, self._node_slots(pool, size)
        return hops_of_pool(own, across, sizes, kinds, devices, self._space.most_stages, node_slots)

    def _spread_of(self, pool: int, size: int) -> tuple[StageSpread | None, ...]:
        return tuple(self._space.spread(pool, kind) for kind in self._space.kinds(pool, size))


def _best_rate(stages: SiteCosts, devices: Floats) -> float:
    """Layers of microbatches per second and device, at best, where a stage of each kind has so many
    devices."""
    layers = np.arange(stages.work_s.shape[-1])
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = layers / (stages.work_s * devices[:, None, None, None])
    return float(np.max(np.where(layers > 0, rates, 0.0)))


def _fastest_recompute(
    kinds: tuple[StageKind | MixedPoolKind, ...],
    of: Sequence[int],
    node_slots: tuple[NodeSlot, ...],
    prices: Sequence[StageCosts],
    at: Ints,
    bytes_: tuple[Any, Any],
    fits: Any,
    fullest: Any,
    shape: tuple[int, ...],
) -> SiteCosts:
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

    def by_node_slot(values: Sequence[Any]) -> Floats:
        return np.stack([arranged(some) for some in values], axis=1)

    backward = arranged(backward_s.min(axis=(0, 1)))
    allocated, device = bytes_
    return SiteCosts(
        kinds=kinds,
        node_slots=node_slots,
        forward_s=arranged(price.forward_s[at]),
        backward_s=backward,
        gather_s=by_node_slot([one.gather_s.min(axis=0)[at] for one in prices]),
        reduce_s=by_node_slot([picked(one.reduce_s).min(axis=0) for one in prices]),
        end_s=by_node_slot([one.end_s.min(axis=0)[at] for one in prices]),
        recompute=np.where(np.isinf(backward), -1, arranged(chosen[0])),
        allocated_bytes=first(allocated),
        device_bytes=first(device),
        fullest=first(fullest).astype(np.int64),
    )
