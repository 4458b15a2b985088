"""The number of pipelines of uneven plans, against all of them listed."""

from __future__ import annotations

from itertools import product

import pytest

from shardwise.check import PoolSize, count_pipelines

TWO = (PoolSize(name="a", devices=4, node_devices=4), PoolSize(name="b", devices=2, node_devices=1))
THREE = (*TWO, PoolSize(name="c", devices=3, node_devices=1))
ALONE, ONE = ((1, 1), (2, 1), (4, 1)), ((1, 1),)


Kinds = list[tuple[tuple[int, int], ...]]
"""(tp, dp) of the stages of each pool."""


def listed(layers: int, pools: tuple[PoolSize, ...], degrees: Kinds) -> int:
    """Every sequence of stages, one by one, with one (tp, dp) for each pool that it uses."""
    found = set()
    for count in range(1, layers + 1):
        for where in product(range(len(pools)), repeat=count):
            for sizes in product(range(1, layers + 1), repeat=count):
                if sum(sizes) != layers:
                    continue
                for ways in product("nsf", repeat=count):
                    for kinds in product(*degrees):
                        taken = [where.count(at) * tp * dp for at, (tp, dp) in enumerate(kinds)]
                        if all(n <= pool.devices for n, pool in zip(taken, pools, strict=True)):
                            used = tuple(kind if at in where else None for at, kind in enumerate(kinds))
                            found.add((where, sizes, ways, used))
    return len(found)


@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize(
    ("pools", "stage_dp", "degrees"),
    [
        (TWO, 1, [ALONE, ONE]),
        (THREE, 1, [ALONE, ONE, ONE]),
        (TWO, 2, [(*ALONE, (1, 2), (2, 2)), ONE]),
        (TWO, 4, [(*ALONE, (1, 2), (2, 2), (1, 4)), ONE]),
    ],
)
def test_the_count_is_that_of_the_list(
    layers: int, pools: tuple[PoolSize, ...], stage_dp: int, degrees: Kinds
) -> None:
    found = count_pipelines(
        layers=layers, pools=pools, splits=(8, 16), kv_heads=8, global_batch_size=4, stage_dp=stage_dp
    )
    assert found.count == listed(layers, pools, degrees)


def test_replicas_divide_the_batch() -> None:
    # Of 1, 2 and 4 replicas only one divides a batch of 3: tp 1, 2, 4 on one stage, three ways to recompute.
    found = count_pipelines(layers=1, pools=TWO[:1], splits=(8,), kv_heads=8, global_batch_size=3, stage_dp=4)
    assert found.axes["dp of a stage"] == ("1",) and found.count == 3 * 3


def test_tensor_parallelism_divides_what_it_splits() -> None:
    # Heads of 6 leave 1 and 2; two kv heads are divided or copied.
    found = count_pipelines(layers=1, pools=TWO[:1], splits=(6,), kv_heads=2, global_batch_size=1)
    assert found.axes["tp on a"] == ("1", "2") and found.count == 2 * 3
