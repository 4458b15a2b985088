"""How many pipelines the space of uneven plans has: by combinations, not by listing them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import comb, factorial, lcm, prod

WAYS_TO_RECOMPUTE = ("none", "selective", "full")
MOST_STAGES = 8


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
    braid: int = 1,
) -> PipelineCount:
    """All pipelines for which there are devices; where stages are spread over nodes, for as many alike ones
    as fill the nodes of each stage, or of each group of stages.

    `splits` are what tensor parallelism has to divide: heads, widths and the sequence; key and value heads it
    divides, or is a multiple of. Up to `stage_dp` replicas share the rows of any micro-batch that is a
    multiple of them. A pipeline's stages on two pools, which are of one kind, split the rows of any
    micro-batch of up to `braid` in any way.
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
    batch, most = global_batch_size, min(MOST_STAGES, layers)
    splits_of_rows = sum(size - 1 for size in range(2, braid + 1) if batch % size == 0)
    every = range(len(pools))
    kinds = [
        [_lying(pool, some, replicas, count, most) for count in range(most + 1)]
        for pool, some in zip(pools, degrees, strict=True)
    ]
    total = 0
    for counts in product(range(most + 1), repeat=len(pools)):
        ways = [
            (0, _kinds(pools, kinds, counts)),
            *(
                (braids, splits_of_rows * _kinds_beside(pools, kinds, degrees, counts, pair, braids))
                for pair in combinations(every, 2)
                for braids in range(1, most - sum(counts) + 1)
                if splits_of_rows
            ),
        ]
        for braids, number in ways:
            stages = sum(counts) + braids
            if 1 <= stages <= most:
                orders = factorial(stages) // (factorial(braids) * prod(factorial(count) for count in counts))
                total += orders * number * comb(layers - 1, stages - 1) * len(WAYS_TO_RECOMPUTE) ** stages
    axes = {
        "pools": tuple(pool.name for pool in pools),
        "micro_batch_size": tuple(str(size) for size in range(1, batch + 1) if batch % size == 0),
        "stages of a pipeline": tuple(str(count) for count in range(1, most + 1)),
        **{f"tp on {pool.name}": tuple(map(str, some)) for pool, some in zip(pools, degrees, strict=True)},
        "stages in a node": tuple(
            str(1 << power) for power in range(most.bit_length()) if _holds(pools, 1 << power)
        ),
        **({"dp of a stage": tuple(map(str, replicas))} if stage_dp > 1 else {}),
        **({"rows split over two": _splits(batch, braid)} if braid > 1 else {}),
        "layers of a stage": (f"1 to {layers}, {layers} in all",),
        "recompute of a stage": WAYS_TO_RECOMPUTE,
        "pipelines": (f"1 to {min(sum(pool.devices for pool in pools), batch)}",),
        "microbatches of one": (f"1 or more, {batch} sequences in all",),
    }
    return PipelineCount(axes=axes, count=total)


def _holds(pools: Sequence[PoolSize], stages: int) -> bool:
    """Whether so many stages of a pipeline fill a node of any pool evenly."""
    return any(pool.node_devices % stages == 0 for pool in pools)


Lying = Mapping[tuple[int, int], int]
"""Of the stages of a pipeline on a pool the kinds by the devices of a stage, and by how many alike pipelines
fill the nodes that their stages are spread over (1 where they are not)."""


def _lying(pool: PoolSize, degrees: Sequence[int], replicas: Sequence[int], count: int, most: int) -> Lying:
    """The kinds of so many stages: each tp and dp, with any power of two of stages together in a node with
    which they lie otherwise than with another."""
    found: Counter[tuple[int, int]] = Counter()
    for size in (tp * dp for tp in degrees for dp in replicas):
        if pool.node_devices % size:
            continue
        powers = [1 << power for power in range(most.bit_length())]
        fitting = [together for together in powers if pool.node_devices % (together * size) == 0]
        found[size, 1] += 1
        for together in fitting[:-1]:
            # With twice as many together, the last ones would be: they lie otherwise where there are so many.
            if 2 * together <= count:
                smallest = together if count % together == 0 else count & -count
                found[size, pool.node_devices // (smallest * size)] += 1
    return found


def _kinds(
    pools: Sequence[PoolSize],
    kinds: Sequence[Sequence[Lying]],
    counts: Sequence[int],
    taken: Sequence[int] = (),
) -> int:
    """Ways for so many stages on each pool, of whose devices a pipeline takes so many more (`taken`)."""
    used = [(at, kinds[at][count]) for at, count in enumerate(counts) if count]
    more = taken or (0,) * len(pools)
    total = 0
    for chosen in product(*(some for _, some in used)):
        own = {at: counts[at] * size for (at, _), (size, _) in zip(used, chosen, strict=True)}
        alike = lcm(*(filling for _, filling in chosen))
        if all(
            alike * (own.get(at, 0) + gone) <= pool.devices
            for at, (pool, gone) in enumerate(zip(pools, more, strict=True))
        ):
            total += prod(some[kind] for (_, some), kind in zip(used, chosen, strict=True))
    return total


def _kinds_beside(
    pools: Sequence[PoolSize],
    kinds: Sequence[Sequence[Lying]],
    degrees: Sequence[Sequence[int]],
    counts: Sequence[int],
    pair: tuple[int, int],
    braids: int,
) -> int:
    """The same with so many stages on a pair of pools beside them, any tp on either; rows are not split."""
    total = 0
    for one in degrees[pair[0]]:
        for other in degrees[pair[1]]:
            taken = [braids * {pair[0]: one, pair[1]: other}.get(at, 0) for at in range(len(pools))]
            total += _kinds(pools, kinds, counts, taken)
    return total


def _splits(batch: int, braid: int) -> tuple[str, ...]:
    """Every way to split the rows of a micro-batch that divides the batch."""
    sizes = [size for size in range(2, braid + 1) if batch % size == 0]
    return tuple(f"{rows}+{size - rows}" for size in sizes for rows in range(1, size)) or ("none",)
