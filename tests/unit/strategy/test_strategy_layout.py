"""Placement of layers and ranks: stages by hand, axis orders, strides."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from tests.property.search_space_reference import SpaceTwin

from shardwise.strategy import (
    AXES,
    ORDERS,
    StrategyTable,
    axis_strides,
    canonical_orders,
    complete,
    even_ends,
    largest_stage,
    layer_counts,
    stages_of_rank,
)


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [
        (7, 1, (7,)),
        (7, 2, (3, 4)),
        (8, 2, (4, 4)),
        (7, 3, (2, 3, 2)),  # base 2, rest 1: the stage in the middle gets it
        (8, 3, (2, 3, 3)),  # rest = n - 1: the last one gets a layer too
        (9, 3, (3, 3, 3)),
        (10, 4, (2, 3, 3, 2)),
        (11, 4, (2, 3, 3, 3)),
        (13, 5, (2, 3, 3, 3, 2)),
        (12, 5, (2, 2, 3, 3, 2)),  # 8 over three stages: later stages get the remainder
        (3, 4, (0, 1, 1, 1)),
        (2, 5, (0, 0, 1, 1, 0)),
    ],
)
def test_even_splits(layers: int, stages: int, counts: tuple[int, ...]) -> None:
    first, last = (int(end) for end in even_ends(layers, stages))
    assert layer_counts(layers, stages, first, last) == counts


@pytest.mark.parametrize(
    ("layers", "stages", "ends", "counts"),
    [
        (8, 2, (0, 8), (0, 8)),
        (8, 2, (7, 1), (7, 1)),
        (8, 3, (0, 0), (0, 8, 0)),
        (10, 4, (1, 2), (1, 3, 4, 2)),
        (10, 5, (2, 1), (2, 2, 2, 3, 1)),
        (10, 5, (0, 0), (0, 3, 3, 4, 0)),
    ],
)
def test_uneven_ends(layers: int, stages: int, ends: tuple[int, int], counts: tuple[int, ...]) -> None:
    assert layer_counts(layers, stages, *ends) == counts
    assert largest_stage(layers, stages, *ends) == max(counts)


@pytest.mark.parametrize("layers", range(1, 25))
def test_stages_equal_those_of_the_twin(layers: int) -> None:
    """Closed forms compared with assigning layers one by one, for every split of up to 8 stages."""
    twin = SpaceTwin(core=False, devices=1, layers=layers, moe=False, batch=1)
    for stages in range(1, 9):
        for first, last in twin.ends(stages):
            counts = twin.layers_of_stages(stages, first, last)
            assert layer_counts(layers, stages, first, last) == tuple(counts)
            assert sum(counts) == layers
            assert largest_stage(layers, stages, first, last) == max(counts)


@pytest.mark.parametrize(
    ("schedule", "pp", "vpp", "rank", "stages"),
    [
        (0, 4, 1, 2, (2,)),
        (2, 4, 3, 1, (1, 5, 9)),  # round robin
        (5, 4, 2, 0, (0, 7)),  # back and forth
        (6, 4, 2, 3, (3, 4)),
    ],
)
def test_stages_of_a_rank(schedule: int, pp: int, vpp: int, rank: int, stages: tuple[int, ...]) -> None:
    assert stages_of_rank(schedule, pp, vpp, rank) == stages


def test_orders_start_with_the_default() -> None:
    assert ORDERS[0] == "tp-cp-dp-pp"
    assert len(set(ORDERS)) == 24


@pytest.mark.parametrize(
    ("sizes", "orders"),
    [
        ({"tp": 1, "cp": 1, "dp": 1, "pp": 1}, ["tp-cp-dp-pp"]),
        ({"tp": 1, "cp": 1, "dp": 4, "pp": 1}, ["tp-cp-dp-pp"]),
        ({"tp": 8, "cp": 1, "dp": 8, "pp": 1}, ["tp-cp-dp-pp", "cp-dp-tp-pp"]),
        ({"tp": 2, "cp": 2, "dp": 1, "pp": 1}, ["tp-cp-dp-pp", "cp-tp-dp-pp"]),
    ],
)
def test_canonical_orders(sizes: dict[str, int], orders: list[str]) -> None:
    assert [ORDERS[index] for index in canonical_orders(sizes)] == orders


@pytest.mark.parametrize("larger", range(5))
def test_there_are_as_many_orders_as_permutations(larger: int) -> None:
    for chosen in permutations(AXES, larger):
        sizes = {axis: 2 if axis in chosen else 1 for axis in AXES}
        assert len(canonical_orders(sizes)) == [1, 1, 2, 6, 24][larger]


@pytest.mark.parametrize(
    ("order", "strides"),
    [
        ("tp-cp-dp-pp", {"tp": 1, "cp": 2, "dp": 6, "pp": 30}),  # 2, 2 * 3, 2 * 3 * 5
        ("pp-dp-cp-tp", {"pp": 1, "dp": 7, "cp": 35, "tp": 105}),
        ("dp-tp-pp-cp", {"dp": 1, "tp": 5, "pp": 10, "cp": 70}),
    ],
)
def test_strides(order: str, strides: dict[str, int]) -> None:
    """tp 2, cp 3, dp 5, pp 7: the stride of an axis is the product of those before it."""
    fields = {"tp": 2, "cp": 3, "dp": 5, "pp": 7, "axis_order": order}
    strategy = complete(fields, devices=210, layers=7, experts=None, global_batch_size=5)
    found = axis_strides(StrategyTable.of([strategy]))
    assert {axis: int(np.asarray(stride).ravel()[0]) for axis, stride in found.items()} == strides


def test_tables_hold_strategies() -> None:
    rows = [
        complete(fields, devices=12, layers=7, experts=None, global_batch_size=12)
        for fields in (
            {"tp": 2, "offload": "both"},
            {"pp": 3, "schedule": "zb_h2"},
            {"axis_order": "pp-dp-cp-tp"},
        )
    ]
    table = StrategyTable.of(rows)
    assert list(table) == rows
    assert list(StrategyTable.joined([table, table.take([2, 0])])) == [*rows, rows[2], rows[0]]
    assert [row.tp for row in table.replaced(tp=4)] == [4, 4, 4]
    assert table.take(np.array([False, True, False]))[0] == rows[1]
