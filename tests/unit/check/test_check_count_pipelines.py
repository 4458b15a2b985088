"""The number of pipelines of uneven plans, against all of them listed."""

from __future__ import annotations

from itertools import product

import pytest

from shardwise.check import PoolSize, count_pipelines

TWO = (PoolSize(name="a", devices=4, node_devices=4), PoolSize(name="b", devices=2, node_devices=1))
THREE = (*TWO, PoolSize(name="c", devices=3, node_devices=1))


def listed(layers: int, pools: tuple[PoolSize, ...], degrees: list[tuple[int, ...]]) -> int:
    """Every sequence of stages, one by one, with one tensor parallelism for each pool that it uses."""
    found = set()
    for count in range(1, layers + 1):
        for where in product(range(len(pools)), repeat=count):
            for sizes in product(range(1, layers + 1), repeat=count):
                if sum(sizes) != layers:
                    continue
                for ways in product("nsf", repeat=count):
                    for kinds in product(*degrees):
                        taken = [where.count(at) * tp for at, tp in enumerate(kinds)]
                        if all(n <= pool.devices for n, pool in zip(taken, pools, strict=True)):
                            used = tuple(tp if at in where else 0 for at, tp in enumerate(kinds))
                            found.add((where, sizes, ways, used))
    return len(found)


@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize(("pools", "degrees"), [(TWO, [(1, 2, 4), (1,)]), (THREE, [(1, 2, 4), (1,), (1,)])])
def test_the_count_is_that_of_the_list(
    layers: int, pools: tuple[PoolSize, ...], degrees: list[tuple[int, ...]]
) -> None:
    found = count_pipelines(layers=layers, pools=pools, splits=(8, 16), kv_heads=8, global_batch_size=4)
    assert found.count == listed(layers, pools, degrees)


def test_tensor_parallelism_divides_what_it_splits() -> None:
    # Heads of 6 leave 1 and 2; two kv heads are divided or copied.
    found = count_pipelines(layers=1, pools=TWO[:1], splits=(6,), kv_heads=2, global_batch_size=1)
    assert found.axes["tp on a"] == ("1", "2") and found.count == 2 * 3
