"""How many pipelines the space of uneven plans has: by combinations, not by listing them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
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
) -> PipelineCount:
    """All pipelines for which there are devices. `splits` are what tensor parallelism has to divide: heads,
    widths and the sequence; key and value heads it divides, or is a multiple of. Up to `stage_dp` replicas
    share the rows of any micro-batch that is a multiple of them."""
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
    most = min(MOST_STAGES, layers)
    total = 0
    for counts in product(range(most + 1), repeat=len(pools)):
        stages = sum(counts)
        if not 1 <= stages <= most:
            continue
        orders = factorial(stages) // prod(factorial(count) for count in counts)
        kinds = prod(
            sum(
                count * tp * dp <= pool.devices and pool.node_devices % (tp * dp) == 0
                for tp in some
                for dp in replicas
            )
            for pool, some, count in zip(pools, degrees, counts, strict=True)
            if count
        )
        total += orders * kinds * comb(layers - 1, stages - 1) * len(WAYS_TO_RECOMPUTE) ** stages
    batch = global_batch_size
    axes = {
        "pools": tuple(pool.name for pool in pools),
        "micro_batch_size": tuple(str(size) for size in range(1, batch + 1) if batch % size == 0),
        "stages of a pipeline": tuple(str(count) for count in range(1, most + 1)),
        **{f"tp on {pool.name}": tuple(map(str, some)) for pool, some in zip(pools, degrees, strict=True)},
        **({"dp of a stage": tuple(map(str, replicas))} if stage_dp > 1 else {}),
        "layers of a stage": (f"1 to {layers}, {layers} in all",),
        "recompute of a stage": WAYS_TO_RECOMPUTE,
        "pipelines": (f"1 to {min(sum(pool.devices for pool in pools), batch)}",),
        "microbatches of one": (f"1 or more, {batch} sequences in all",),
    }
    return PipelineCount(axes=axes, count=total)
