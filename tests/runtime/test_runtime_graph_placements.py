"""Shards of a dim have every element once, in any unit; redistribute steps are those of the cost model."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from shardwise.cluster import load_cluster, mesh_of
from shardwise.cost.collectives import collective_model_of
from shardwise.cost.layouts.redistribute import redistributions_of
from shardwise.cost.problem import machine_of
from shardwise.runtime.graphs.placements import MeshPlacements, shard_range, value_placements
from shardwise.runtime.graphs.redistribute import redistribute_path
from shardwise.strategy import PROFILES


def test_parts_have_each_element_once() -> None:
    for start, length, count, unit in product((0, 48), range(13), range(1, 5), range(1, 6)):
        parts = [shard_range(start, start + length, count, index, unit) for index in range(count)]
        assert parts[0][0] == start and parts[-1][1] == start + length
        assert all(one[1] == other[0] for one, other in pairwise(parts))


def test_units_stay_whole_unless_another_axis_splits_them() -> None:
    # 96 elements in units of 32: two shards have 2 units and 1. If another axis first halves them to 48,
    # which is 1.5 units, two shards have 24 each.
    assert [shard_range(0, 96, 2, index, 32) for index in (0, 1)] == [(0, 64), (64, 96)]
    assert [shard_range(48, 96, 2, index, 32) for index in (0, 1)] == [(48, 72), (72, 96)]


ALONE = {"cut", "pad", "first_only"}
"""Redistribute steps without communication."""


@pytest.mark.parametrize("ranks", [(4,), (2, 4), (2, 2, 2)])
def test_redistribution_steps_with_communication_are_those_with_a_cost(ranks: tuple[int, ...]) -> None:
    cluster = load_cluster("8x8xH100-SXM")
    machine = machine_of(cluster, "bf16", "adamw", PROFILES["megatron-2024"])
    table = redistributions_of(collective_model_of(machine), mesh_of(cluster, ranks), (8, 16), 2.0)
    placements = [value_placements(placement) for placement in table.table.named]
    for (i, start), (j, end) in product(enumerate(placements), repeat=2):
        is_alone = {step.kind for step in redistribute_path((8, 16), ranks, start, end)} <= ALONE
        assert (table.seconds[i, j] == 0.0) == is_alone, (start, end)


def test_parts_in_other_units_with_the_same_elements_need_no_communication() -> None:
    """8 elements in two shards of 4, in pairs or one by one. In units of 8 the first rank has all of them."""

    def split(unit: int) -> MeshPlacements:
        return MeshPlacements((0,), (unit,))

    assert redistribute_path((8,), (2,), split(2), split(1)) == ()
    assert [step.kind for step in redistribute_path((8,), (2,), split(8), split(1))] == ["exchange"]
