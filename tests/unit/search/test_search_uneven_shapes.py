"""Pipeline shapes for given devices, and items that can matter for shares, compared with plain
implementations.
"""

from __future__ import annotations

import random
from itertools import product
from math import gcd, lcm

import numpy as np
import pytest

from shardwise.search.hetero.knapsack import Items, KnapsackDual, best_set, non_dominated
from shardwise.search.hetero.space import StageSpread, UnevenSubproblem, shapes_of, spread_set_size

TAKES = (((1, 0), (1, 0), (2, 0), (4, 0)), ((0, 1), (0, 2)), ((1, 1), (1, 2), (2, 1)))
"""Two pools, and a pair of them; the first has nodes of four devices, and each stage of one device may be on
another node.
"""

SPREAD = ((None, StageSpread(1, 4), None, None), (None, None), (None, None, None))


@pytest.mark.parametrize("most_sites", [1, 2, 3])
@pytest.mark.parametrize("units", [(1, 1), (4, 2)])
def test_shapes_are_all_pipelines_for_which_there_are_devices(
    units: tuple[int, int], most_sites: int
) -> None:
    devices, stages = (8, 4), 3
    expected = {}
    for counts in product(range(stages + 1), repeat=3):
        if not 0 < sum(counts) <= stages or sum(count > 0 for count in counts) > most_sites:
            continue
        for kinds in product(*(range(len(of)) if n else (0,) for n, of in zip(counts, TAKES, strict=True))):
            taken = [
                sum(
                    n * TAKES[site][kind][pool]
                    for site, (n, kind) in enumerate(zip(counts, kinds, strict=True))
                )
                for pool in range(2)
            ]
            # This many identical pipelines fill whole units of both pools.
            set_size = lcm(*(unit // gcd(unit, one) for unit, one in zip(units, taken, strict=True)))
            if counts[0] and kinds[0] == 1:
                # A single stage is not spread in any case; with more stages, four pipelines fill a node with
                # each.
                if counts[0] == 1:
                    continue
                set_size = lcm(set_size, 4)
            if all(set_size * one <= there for one, there in zip(taken, devices, strict=True)):
                expected[counts, kinds] = (
                    [set_size * one // unit for one, unit in zip(taken, units, strict=True)],
                    set_size,
                )
    shapes = shapes_of(TAKES, SPREAD, devices, units, stages, most_sites)
    found = {
        (shapes.at(place).counts, shapes.at(place).kinds): (
            shapes.devices[place].tolist(),
            int(shapes.set_size[place]),
        )
        for place in range(len(shapes.set_size))
    }
    assert found == expected and len(shapes.set_size) == len(expected) > 5
    assert ((2, 0, 0), (1, 0, 0)) in found
    for place in range(len(shapes.set_size)):
        is_spread = shapes.counts[place, 0] > 1 and shapes.kinds[place, 0] == 1
        assert spread_set_size(SPREAD, shapes.at(place)) == (4 if is_spread else 1)


def test_too_few_devices_have_no_pipeline() -> None:
    shapes = shapes_of((((4,),),), ((None,),), (3,), (1,), 2, 1)
    assert shapes.kinds.shape == shapes.counts.shape == (0, 1) and shapes.devices.shape == (0, 1)


def test_items_that_no_other_dominates_are_kept() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        rows = [
            (rng.randint(0, 3), rng.randint(1, 3), rng.randint(0, 4), rng.randint(1, 2)) for _ in range(12)
        ]
        items = Items(*(np.array(column) for column in (
            [row[:2] for row in rows], [row[2] for row in rows], [row[3] for row in rows]
        )))  # fmt: skip

        def undercut(one: int, rows: list[tuple[int, int, int, int]] = rows) -> bool:
            a, b, does, pipelines = rows[one]
            others = [
                (x <= a and y <= b and z >= does and p == pipelines)
                and ((x, y, z) != (a, b, does) or place < one)
                for place, (x, y, z, p) in enumerate(rows)
            ]
            return any(others)

        expected = {place for place, row in enumerate(rows) if row[2] and not undercut(place)}
        assert set(non_dominated(items).tolist()) == expected, seed
    assert not len(
        non_dominated(Items(np.ones((2, 1), dtype=int), np.zeros(2, dtype=int), np.ones(2, dtype=int)))
    )


@pytest.mark.parametrize("seed", range(40))
def test_critical_items_are_needed_and_one_microbatch_less_is_not_critical(seed: int) -> None:
    rng = np.random.default_rng(seed)
    devices = (8, 4) if seed % 2 else (6, 4, 3)
    taken = np.stack([rng.integers(0, count + 1, 12) for count in devices], axis=1)
    taken = taken[taken.any(axis=1)]
    does, wanted = rng.integers(0, 9, len(taken)), int(rng.integers(4, 30))
    dual = KnapsackDual(devices, taken)
    places, enough = dual.critical(does, wanted * (1.0 - 1e-9))
    most = int(sum(devices))
    found = best_set(devices, Items(taken, does, np.ones_like(does)), 1, most, wanted)
    if found is not None:
        assert len(places)
    # At these multipliers no item below the necessary number is critical.
    fewer = does.copy()
    fewer[places] = np.ceil(enough).astype(np.int64) - 1
    assert not len(dual.critical(fewer, wanted * (1.0 - 1e-9))[0])
    assert (np.ceil(enough) <= does[places]).all()


def test_a_range_is_halved_at_its_geometric_mean() -> None:
    for least in range(1, 30):
        for most in range(least + 1, 400, 7):
            one, two = UnevenSubproblem(pools=(0,), micro_batch_size=1, least=least, most=most).halves()
            assert (one.least, two.most, one.most + 1) == (least, most, two.least)
            assert one.most**2 <= least * most < two.least**2
