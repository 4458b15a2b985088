"""The proportional split of a mixed cluster: a baseline plan as one would make it by hand.

All devices work in proportion to their speed, the peak of the matmul dtype. *By batch*, every pool trains by
itself in pipelines of equal stages, and micro-batches are divided among the pools. *By layers*, identical
pipelines go through all pools, in the order of the cluster or the reverse, and layers are divided among the
stages. Of all micro-batch sizes, tensor parallel degrees and numbers of stages, the fastest plan by the cost
model of uneven plans is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import gcd

from shardwise.search.hetero.branch_and_bound import UnevenPipeline, UnevenPlan
from shardwise.search.hetero.pipeline_search import StagePlacement, pipeline_s
from shardwise.search.hetero.space import UnevenSpace, UnevenSubproblem
from shardwise.search.hetero.stage_costs import StageCostModel, StageOptions
from shardwise.ties import is_less

StageList = tuple[StagePlacement, ...]
NO_KIND = 0


def proportional_split(space: UnevenSpace) -> UnevenPlan | None:
    """The fastest proportional split on all pools; None where none fits."""
    space = UnevenSpace(space.model, space.cluster, space.job, replace(space.limits, mixed_stage_rows=1))
    pricing = StageCostModel(space)
    pools = range(len(space.pools))
    speeds = [pricing.single_pool_problem(pool).matmul_flop_per_s for pool in pools]
    found: UnevenPlan | None = None
    for size in space.micro_batch_sizes:
        for plan in (*_by_layers(space, pricing, speeds, size), *_by_batch(space, pricing, speeds, size)):
            if is_less(plan.time_s, float("inf") if found is None else found.time_s):
                found = plan
    return found


def largest_remainders(total: int, weights: Sequence[float]) -> list[int]:
    """`total` in whole parts in proportion to the weights, by largest remainders."""
    exact = [total * weight / sum(weights) for weight in weights]
    parts = [int(one) for one in exact]
    order = sorted(range(len(weights)), key=lambda place: (parts[place] - exact[place], place))
    for place in order[: total - sum(parts)]:
        parts[place] += 1
    return parts


def _by_layers(
    space: UnevenSpace, pricing: StageCostModel, speeds: Sequence[float], size: int
) -> Iterator[UnevenPlan]:
    """Identical pipelines through all pools."""
    pools = tuple(range(len(space.pools)))
    devices = [pool.devices for pool in space.pools]
    microbatches = space.job.global_batch_size // size
    for number in (n for n in range(1, min(gcd(*devices), microbatches) + 1) if gcd(*devices) % n == 0):
        subproblem = UnevenSubproblem(
            pools=pools, micro_batch_size=size, least=number, most=number, is_alike=number > 1
        )
        options = pricing.options(subproblem)
        unspread_kinds = [[kind for kind, one in enumerate(some) if one is None] for some in options.spread]
        for kinds in product(*unspread_kinds):
            sizes = [space.kinds(pool, size)[kind].tp for pool, kind in zip(pools, kinds, strict=True)]
            if any(count // number % tp for count, tp in zip(devices, sizes, strict=True)):
                continue
            runs = [
                (pool, count // number // tp) for pool, count, tp in zip(pools, devices, sizes, strict=True)
            ]
            if sum(run for _, run in runs) > options.most_stages:
                continue
            for order in (runs, runs[::-1]):
                places = [pool for pool, run in order for _ in range(run)]
                layers = largest_remainders(options.layers, [speeds[pool] * sizes[pool] for pool in places])
                stages = tuple(zip(places, layers, strict=True))
                shares = largest_remainders(microbatches, [1.0] * number)
                if min(layers) > 0:
                    yield _plan(options, subproblem, [(kinds, stages, share) for share in shares])


def _by_batch(
    space: UnevenSpace, pricing: StageCostModel, speeds: Sequence[float], size: int
) -> Iterator[UnevenPlan]:
    """Pipelines on one pool each. A pool's micro-batches are divided evenly among its pipelines, which have
    the stages with which the pool alone is fastest."""
    pools = tuple(range(len(space.pools)))
    microbatches = space.job.global_batch_size // size
    powers = [speed * pool.devices for speed, pool in zip(speeds, space.pools, strict=True)]
    shares = largest_remainders(microbatches, powers)
    pipelines: list[tuple[tuple[int, ...], StageList, int]] = []
    for pool, share in zip(pools, shares, strict=True):
        own = _fastest_on_pool(space, pricing, pool, size, share)
        if own is None:
            return
        kinds = tuple(own[0] if place == pool else NO_KIND for place in pools)
        stages = tuple((pool, layers) for _, layers in own[1])
        pipelines += [(kinds, stages, one) for one in largest_remainders(share, [1.0] * own[2])]
    number = len(pipelines)
    subproblem = UnevenSubproblem(pools=pools, micro_batch_size=size, least=number, most=number)
    yield _plan(pricing.options(subproblem), subproblem, pipelines)


def _fastest_on_pool(
    space: UnevenSpace, pricing: StageCostModel, pool: int, size: int, share: int
) -> tuple[int, StageList, int] | None:
    """Kind, stages and number of the pipelines in which the pool alone does its share fastest."""
    best_s, found = float("inf"), None
    devices = space.pools[pool].devices
    for at, kind in enumerate(space.kinds(pool, size)):
        for stages in range(1, space.most_stages + 1):
            number = devices // (kind.tp * stages)
            if kind.dp > 1 or space.spread(pool, kind) is not None or not 1 <= number <= share:
                continue
            options = pricing.options(
                UnevenSubproblem(pools=(pool,), micro_batch_size=size, least=number, most=number)
            )
            layout = tuple((0, layers) for layers in largest_remainders(options.layers, [1.0] * stages))
            time_s = pipeline_s(options, (at,), layout, -(-share // number))
            if is_less(time_s, best_s):
                best_s, found = time_s, (at, layout, number)
    return found


def _plan(
    options: StageOptions,
    subproblem: UnevenSubproblem,
    pipelines: Sequence[tuple[tuple[int, ...], StageList, int]],
) -> UnevenPlan:
    """The plan of these pipelines (kinds, stages and micro-batches of each), with its times."""
    times = {one: pipeline_s(options, *one) for one in set(pipelines)}
    predicted = tuple(
        UnevenPipeline(kinds=kinds, stages=stages, microbatches=share, time_s=times[kinds, stages, share])
        for kinds, stages, share in pipelines
    )
    return UnevenPlan(subproblem=subproblem, pipelines=predicted, time_s=max(times.values()))
