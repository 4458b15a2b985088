"""How many pipelines the space of uneven plans has: by combinations, not by listing them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import comb, factorial, lcm, prod

RECOMPUTE_CHOICES = ("none", "selective", "full")
MAX_STAGES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """A pool of alike nodes: all of its devices, and those of a node."""

    name: str
    devices: int
    node_devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCount:
    """Axes with their values as text, and the number of pipelines: stages in order with their layers and
    recomputation, and for each pool the tensor parallelism and the replicas of its stages, and how many of
    them lie together in a node."""

    axes: Mapping[str, tuple[str, ...]]
    count: int


def count_pipelines(
    *,
    layers: int,
    pools: Sequence[PoolSize],
    splits: Sequence[int],
    kv_heads: int,
    global_batch_size: int,
    stage_dp: int = 1,
    mixed_stage_rows: int = 1,
) -> PipelineCount:
    """All pipelines for which there are devices; where stages are spread over nodes, for as many alike ones
    as fill the nodes of each stage, or of each group of stages.

    `splits` are what tensor parallelism has to divide: heads, widths and the sequence; key and value heads it
    divides, or is a multiple of. Up to `stage_dp` replicas share the rows of any micro-batch that is a
    multiple of them. A pipeline's stages on two pools, which are of one kind, split the rows of any
    micro-batch of up to `mixed_stage_rows` in any way.
    """
    degrees = [
        [
            tp
            for tp in (1 << power for power in range(pool.node_devices.bit_length()))
            if pool.node_devices % tp == 0
            and all(size % tp == 0 for size in splits)
            and (kv_heads % tp == 0 or tp % kv_heads == 0)
        ]
        for pool in pools
    ]
    replicas = [
        dp
        for dp in (1 << power for power in range(stage_dp.bit_length()))
        if dp <= stage_dp and global_batch_size % dp == 0
    ]
    batch, most = global_batch_size, min(MAX_STAGES, layers)
    splits_of_rows = sum(size - 1 for size in range(2, mixed_stage_rows + 1) if batch % size == 0)
    every = range(len(pools))
    kinds = [
        [_pool_stage_kinds(pool, some, replicas, count, most) for count in range(most + 1)]
        for pool, some in zip(pools, degrees, strict=True)
    ]
    total = 0
    for counts in product(range(most + 1), repeat=len(pools)):
        kind_counts = [
            (0, _kinds(pools, kinds, counts)),
            *(
                (
                    mixed_stages,
                    splits_of_rows
                    * _kinds_with_mixed_stages(pools, kinds, degrees, counts, pair, mixed_stages),
                )
                for pair in combinations(every, 2)
                for mixed_stages in range(1, most - sum(counts) + 1)
                if splits_of_rows
            ),
        ]
        for mixed_stages, number in kind_counts:
            stages = sum(counts) + mixed_stages
            if 1 <= stages <= most:
                orders = factorial(stages) // (
                    factorial(mixed_stages) * prod(factorial(count) for count in counts)
                )
                total += orders * number * comb(layers - 1, stages - 1) * len(RECOMPUTE_CHOICES) ** stages
    axes = {
        "pools": tuple(pool.name for pool in pools),
        "micro_batch_size": tuple(str(size) for size in range(1, batch + 1) if batch % size == 0),
        "stages of a pipeline": tuple(str(count) for count in range(1, most + 1)),
        **{f"tp on {pool.name}": tuple(map(str, some)) for pool, some in zip(pools, degrees, strict=True)},
        "stages in a node": tuple(
            str(1 << power) for power in range(most.bit_length()) if _divides_node(pools, 1 << power)
        ),
        **({"dp of a stage": tuple(map(str, replicas))} if stage_dp > 1 else {}),
        **({"rows split over two": _splits(batch, mixed_stage_rows)} if mixed_stage_rows > 1 else {}),
        "layers of a stage": (f"1 to {layers}, {layers} in all",),
        "recompute of a stage": RECOMPUTE_CHOICES,
        "pipelines": (f"1 to {min(sum(pool.devices for pool in pools), batch)}",),
        "microbatches of one": (f"1 or more, {batch} sequences in all",),
    }
    return PipelineCount(axes=axes, count=total)


def _divides_node(pools: Sequence[PoolSize], stages: int) -> bool:
    """Whether so many stages of a pipeline fill a node of any pool evenly."""
    return any(pool.node_devices % stages == 0 for pool in pools)


PoolStageKinds = Mapping[tuple[int, int], int]
"""Of the stages of a pipeline on a pool the kinds by the devices of a stage, and by how many alike pipelines
fill the nodes that their stages are spread over (1 where they are not)."""


def _pool_stage_kinds(
    pool: PoolSize, degrees: Sequence[int], replicas: Sequence[int], count: int, most: int
) -> PoolStageKinds:
    """The kinds of so many stages: each tp and dp, with any power of two of stages together in a node with
    which they lie otherwise than with another."""
    found: Counter[tuple[int, int]] = Counter()
    for size in (tp * dp for tp in degrees for dp in replicas):
        if pool.node_devices % size:
            continue
        powers = [1 << power for power in range(most.bit_length())]
        fitting = [
            stages_per_node for stages_per_node in powers if pool.node_devices % (stages_per_node * size) == 0
        ]
        found[size, 1] += 1
        for stages_per_node in fitting[:-1]:
            # With twice as many together, the last ones would be: they lie otherwise where there are so many.
            if 2 * stages_per_node <= count:
                smallest = stages_per_node if count % stages_per_node == 0 else count & -count
                found[size, pool.node_devices // (smallest * size)] += 1
    return found


def _kinds(
    pools: Sequence[PoolSize],
    kinds: Sequence[Sequence[PoolStageKinds]],
    counts: Sequence[int],
    extra_devices: Sequence[int] = (),
) -> int:
    """Ways for so many stages on each pool, of whose devices a pipeline takes so many more
    (`extra_devices`)."""
    used = [(at, kinds[at][count]) for at, count in enumerate(counts) if count]
    more = extra_devices or (0,) * len(pools)
    total = 0
    for chosen in product(*(some for _, some in used)):
        own = {at: counts[at] * size for (at, _), (size, _) in zip(used, chosen, strict=True)}
        identical = lcm(*(set_size for _, set_size in chosen))
        if all(
            identical * (own.get(at, 0) + mixed_devices) <= pool.devices
            for at, (pool, mixed_devices) in enumerate(zip(pools, more, strict=True))
        ):
            total += prod(some[kind] for (_, some), kind in zip(used, chosen, strict=True))
    return total


def _kinds_with_mixed_stages(
    pools: Sequence[PoolSize],
    kinds: Sequence[Sequence[PoolStageKinds]],
    degrees: Sequence[Sequence[int]],
    counts: Sequence[int],
    pair: tuple[int, int],
    mixed_stages: int,
) -> int:
    """The same with so many stages on a pair of pools beside them, any tp on either; rows are not split."""
    total = 0
    for one in degrees[pair[0]]:
        for other in degrees[pair[1]]:
            extra_devices = [
                mixed_stages * {pair[0]: one, pair[1]: other}.get(at, 0) for at in range(len(pools))
            ]
            total += _kinds(pools, kinds, counts, extra_devices)
    return total


def _splits(batch: int, mixed_stage_rows: int) -> tuple[str, ...]:
    """Every way to split the rows of a micro-batch that divides the batch."""
    sizes = [size for size in range(2, mixed_stage_rows + 1) if batch % size == 0]
    return tuple(f"{rows}+{size - rows}" for size in sizes for rows in range(1, size)) or ("none",)
