"""How many pipelines the space of uneven plans has: by combinations, not by listing them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import comb, factorial, prod

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
    recomputation, and for each pool the tensor parallelism and the replicas of its stages."""

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
    """All pipelines for which there are devices. `splits` are what tensor parallelism has to divide: heads,
    widths and the sequence; key and value heads it divides, or is a multiple of. Up to `stage_dp` replicas
    share the rows of any micro-batch that is a multiple of them. A pipeline's stages on two pools, which are
    of one kind, split the rows of any micro-batch of up to `braid` in any way."""
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
    total = 0
    for counts in product(range(most + 1), repeat=len(pools)):
        ways = [
            (0, _kinds(pools, degrees, replicas, counts)),
            *(
                (braids, splits_of_rows * _kinds_beside(pools, degrees, replicas, counts, pair, braids))
                for pair in combinations(every, 2)
                for braids in range(1, most - sum(counts) + 1)
                if splits_of_rows
            ),
        ]
        for braids, kinds in ways:
            stages = sum(counts) + braids
            if 1 <= stages <= most:
                orders = factorial(stages) // (factorial(braids) * prod(factorial(count) for count in counts))
                total += orders * kinds * comb(layers - 1, stages - 1) * len(WAYS_TO_RECOMPUTE) ** stages
    axes = {
        "pools": tuple(pool.name for pool in pools),
        "micro_batch_size": tuple(str(size) for size in range(1, batch + 1) if batch % size == 0),
        "stages of a pipeline": tuple(str(count) for count in range(1, most + 1)),
        **{f"tp on {pool.name}": tuple(map(str, some)) for pool, some in zip(pools, degrees, strict=True)},
        **({"dp of a stage": tuple(map(str, replicas))} if stage_dp > 1 else {}),
        **({"rows split over two": _splits(batch, braid)} if braid > 1 else {}),
        "layers of a stage": (f"1 to {layers}, {layers} in all",),
        "recompute of a stage": WAYS_TO_RECOMPUTE,
        "pipelines": (f"1 to {min(sum(pool.devices for pool in pools), batch)}",),
        "microbatches of one": (f"1 or more, {batch} sequences in all",),
    }
    return PipelineCount(axes=axes, count=total)


def _kinds(
    pools: Sequence[PoolSize],
    degrees: Sequence[Sequence[int]],
    replicas: Sequence[int],
    counts: Sequence[int],
    taken: Sequence[int] = (),
) -> int:
    """Kinds of so many stages on each pool, of whose devices so many are `taken`."""
    return prod(
        sum(
            count * tp * dp <= pool.devices - gone and pool.node_devices % (tp * dp) == 0
            for tp in some
            for dp in replicas
        )
        for pool, some, count, gone in zip(pools, degrees, counts, taken or (0,) * len(pools), strict=True)
        if count
    )


def _kinds_beside(
    pools: Sequence[PoolSize],
    degrees: Sequence[Sequence[int]],
    replicas: Sequence[int],
    counts: Sequence[int],
    pair: tuple[int, int],
    braids: int,
) -> int:
    """The same with so many stages on a pair of pools beside them, any tp on either; rows are not split."""
    total = 0
    for one in degrees[pair[0]]:
        for other in degrees[pair[1]]:
            taken = [braids * {pair[0]: one, pair[1]: other}.get(at, 0) for at in range(len(pools))]
            if all(gone <= pool.devices for gone, pool in zip(taken, pools, strict=True)):
                total += _kinds(pools, degrees, replicas, counts, taken)
    return total


def _splits(batch: int, braid: int) -> tuple[str, ...]:
    """Every way to split the rows of a micro-batch that divides the batch."""
    sizes = [size for size in range(2, braid + 1) if batch % size == 0]
    return tuple(f"{rows}+{size - rows}" for size in sizes for rows in range(1, size)) or ("none",)
