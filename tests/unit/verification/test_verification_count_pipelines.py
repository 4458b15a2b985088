"""The number of pipelines of uneven plans, compared with a list of all of them."""

from __future__ import annotations

from itertools import combinations, product
from math import lcm

import pytest

from shardwise_verify import PoolSize, count_pipelines

TWO = (PoolSize(name="a", devices=4, node_devices=4), PoolSize(name="b", devices=2, node_devices=1))
NODES = (PoolSize(name="a", devices=16, node_devices=4), PoolSize(name="b", devices=8, node_devices=2))
THREE = (*TWO, PoolSize(name="c", devices=3, node_devices=1))
ALONE, ONE = ((1, 1), (2, 1), (4, 1)), ((1, 1),)


Kinds = list[tuple[tuple[int, int], ...]]
"""(tp, dp) of the stages of each pool."""


def groups(stages: int, size: int, node: int, stages_per_node: int) -> tuple[int, ...]:
    """How many stages each node of a pipeline has, with at most `stages_per_node`, the last node first."""
    found = []
    while stages:
        fitting = [n for n in (1, 2, 4, 8) if n <= min(stages, stages_per_node) and node % (n * size) == 0]
        found.append(max(fitting))
        stages -= found[-1]
    return tuple(found)


def stage_placements(stages: int, size: int, node: int) -> dict[tuple[int, ...], int]:
    """Every placement of `stages` stages, with the number of identical pipelines that fill the nodes of each
    group: one for the densest placement, since other stages may share its nodes.
    """
    whole = groups(stages, size, node, 8)
    found = {groups(stages, size, node, stages_per_node): 1 for stages_per_node in (1, 2, 4, 8)}
    return {own: 1 if own == whole else lcm(*(node // (n * size) for n in own)) for own in found}


def feasible_placements(
    counts: list[int], kinds: tuple[tuple[int, int], ...], pools: tuple[PoolSize, ...], more: list[int]
) -> list[tuple[tuple[int, ...], ...]]:
    """Placements on each pool for which there are enough devices."""
    sizes = [tp * dp for tp, dp in kinds]
    ways: list[dict[tuple[int, ...], int]] = [
        stage_placements(n, size, pool.node_devices) if n else {(): 1}
        for n, size, pool in zip(counts, sizes, pools, strict=True)
    ]
    taken = [n * size + extra for n, size, extra in zip(counts, sizes, more, strict=True)]
    return [
        own
        for own in product(*ways)
        if all(
            lcm(*(placements[placed] for placements, placed in zip(ways, own, strict=True))) * n
            <= pool.devices
            for n, pool in zip(taken, pools, strict=True)
        )
    ]


def listed(layers: int, pools: tuple[PoolSize, ...], degrees: Kinds) -> int:
    """Every sequence of stages, one by one, with one (tp, dp) and one placement for each pool that
    it uses.
    """
    found = set()
    for count in range(1, layers + 1):
        for where in product(range(len(pools)), repeat=count):
            for sizes in product(range(1, layers + 1), repeat=count):
                if sum(sizes) != layers:
                    continue
                for ways in product("nsf", repeat=count):
                    for kinds in product(*degrees):
                        counts = [where.count(at) for at in range(len(pools))]
                        used = tuple(kind if at in where else None for at, kind in enumerate(kinds))
                        for own in feasible_placements(counts, kinds, pools, [0] * len(pools)):
                            found.add((where, sizes, ways, used, own))
    return len(found)


@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize(
    ("pools", "stage_dp", "degrees"),
    [
        (TWO, 1, [ALONE, ONE]),
        (NODES, 1, [ALONE, ALONE[:2]]),
        (NODES[:1], 2, [(*ALONE, (1, 2), (2, 2))]),
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


def listed_with_mixed_stages(
    layers: int, pools: tuple[PoolSize, ...], degrees: Kinds, rows: list[int]
) -> int:
    """The same with one or more mixed-pool stages: one tp for each of the two pools, and one split of one of
    these numbers of `rows`.
    """
    found = set()
    every = range(len(pools))
    for pair in combinations(every, 2):
        splits = [(size, one) for size in rows for one in range(1, size)]
        parts = [tps for tps in product(*([tp for tp, dp in degrees[at] if dp == 1] for at in pair))]
        for count in range(1, layers + 1):
            for where in product((*every, pair), repeat=count):
                for sizes in product(range(1, layers + 1), repeat=count):
                    if sum(sizes) != layers or pair not in where:
                        continue
                    for ways, kinds, tps, split in product(
                        product("nsf", repeat=count), product(*degrees), parts, splits
                    ):
                        counts = [where.count(at) for at in every]
                        more = [0] * len(pools)
                        for at, tp in zip(pair, tps, strict=True):
                            more[at] += where.count(pair) * tp
                        used = tuple(kind if at in where else None for at, kind in enumerate(kinds))
                        for own in feasible_placements(counts, kinds, pools, more):
                            found.add((where, sizes, ways, used, own, tps, split))
    return len(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "pools", "degrees"),
    [
        (1, TWO, [ALONE, ONE]),
        (3, TWO, [(*ALONE, (1, 2), (2, 2)), ONE]),
        (3, NODES, [ALONE, ALONE[:2]]),
        (2, THREE, [(*ALONE, (1, 2), (2, 2)), ONE, ONE]),
    ],
)
def test_the_count_with_rows_split_over_two_pools_is_that_of_the_list(
    layers: int, pools: tuple[PoolSize, ...], degrees: Kinds
) -> None:
    # Of up to 6 rows 2, 3 and 6 divide a batch of 6.
    stage_dp = max(dp for kinds in degrees for _, dp in kinds)
    found = count_pipelines(
        layers=layers,
        pools=pools,
        splits=(8, 16),
        kv_heads=8,
        global_batch_size=6,
        stage_dp=stage_dp,
        mixed_stage_rows=6,
    )
    plain = listed(layers, pools, degrees)
    assert found.count == plain + listed_with_mixed_stages(layers, pools, degrees, [2, 3, 6])
    assert found.axes["rows split over two"] == ("1+1", "1+2", "2+1", "1+5", "2+4", "3+3", "4+2", "5+1")


def test_replicas_divide_the_batch() -> None:
    # Of 1, 2 and 4 replicas only one divides a batch of 3: tp 1, 2, 4 on one stage, three kinds of
    # recomputation.
    found = count_pipelines(layers=1, pools=TWO[:1], splits=(8,), kv_heads=8, global_batch_size=3, stage_dp=4)
    assert found.axes["dp of a stage"] == ("1",) and found.count == 3 * 3


def test_tensor_parallelism_divides_the_split_sizes() -> None:
    # 6 heads allow 1 and 2; two kv heads are divided or copied.
    found = count_pipelines(layers=1, pools=TWO[:1], splits=(6,), kv_heads=2, global_batch_size=1)
    assert found.axes["tp on a"] == ("1", "2") and found.count == 2 * 3


def test_two_stages_share_a_node_or_have_their_own() -> None:
    # Two of one device each share a node or, with four pipelines, are on two nodes of four; two of two
    # devices likewise with two pipelines; two of four on two nodes. Two layers are split in one way and
    # recomputed in nine, or are one stage.
    found = count_pipelines(layers=2, pools=NODES[:1], splits=(8,), kv_heads=8, global_batch_size=4)
    assert found.axes["stages in a node"] == ("1", "2")
    assert found.count == (2 + 2 + 1) * 9 + 3 * 3
