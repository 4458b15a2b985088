"""The parts of a cluster that curves are searched on, and how their points are joined."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.cluster import Cluster, load_cluster, pools_of
from shardwise.errors import ConfigError
from shardwise.plans import Idle
from shardwise.search import Curve, PartChoice, Point, points_of

MIXED = "2x4xA100-80G+1x2xV100-32G"


def pools(part: Cluster) -> tuple[int, set[str]]:
    return part.devices, {pool.name for pool in pools_of(part)}


def test_a_mixed_cluster_has_every_union_of_its_pools_the_whole_last() -> None:
    cluster = load_cluster(MIXED)
    unions = PartChoice(cluster).unions
    assert list(map(pools, unions)) == [
        (8, {"A100-80G"}),
        (2, {"V100-32G"}),
        (10, {"A100-80G", "V100-32G"}),
    ]
    assert unions[-1] is cluster
    assert len(PartChoice(load_cluster("1x1xA100-80G+1x1xV100-32G+1x1xT4")).unions) == 7


def test_of_more_than_four_pools_each_alone_and_all_of_them() -> None:
    """Five pools: 5 + 1 curves, not the 31 of all unions."""
    cluster = load_cluster("1x1xA100-80G+1x1xV100-32G+1x1xT4+1x1xL4+1x1xA10G")
    assert [part.devices for part in PartChoice(cluster).unions] == [1, 1, 1, 1, 1, 5]


def test_idle_devices_are_those_outside_of_a_part() -> None:
    """Of ranks 0 to 3 and 4 to 7 (A100), 8 and 9 (V100)."""
    choice = PartChoice(load_cluster(MIXED))
    fast, slow, whole = choice.unions
    assert choice.idle_of(fast) == Idle(devices=2, nodes=1, ranks="8-9")
    assert choice.idle_of(slow) == Idle(devices=8, nodes=2, ranks="0-7")
    assert choice.idle_of(whole) == Idle()
    one_of_first, one_of_second = choice.of(1)
    assert choice.idle_of(one_of_first) == Idle(devices=9, nodes=2, ranks="1-9")
    assert choice.idle_of(one_of_second) == Idle(devices=9, nodes=2, ranks="0-7,9")


@pytest.mark.parametrize("text", ["2x4xA100-80G", MIXED])
def test_all_devices_are_one_part_if_identical_or_requested(text: str) -> None:
    cluster = load_cluster(text)
    choice = PartChoice(cluster, uses_all=text == MIXED)
    assert choice.unions == (cluster,)
    # Any number of devices of the first node, then whole nodes.
    assert choice.sizes == ((1, 2, 3, 4, 8, 10) if text == MIXED else (1, 2, 3, 4, 8))
    assert [pools(part) for part in choice.of(2)] == [(2, {"A100-80G"})]


@pytest.mark.parametrize("text", [MIXED, "1x2xV100-32G+2x4xA100-80G"])
def test_the_parts_of_a_device_count_do_not_depend_on_the_order_of_pools(text: str) -> None:
    """Of 2 x 4 and 1 x 2 devices: two devices of either pool, four and eight of the first, ten of both."""
    choice = PartChoice(load_cluster(text))
    expected = {
        1: [{"A100-80G"}, {"V100-32G"}],
        2: [{"A100-80G"}, {"V100-32G"}],
        4: [{"A100-80G"}],
        8: [{"A100-80G"}],
        10: [{"A100-80G", "V100-32G"}],
    }
    for devices, names in expected.items():
        found = choice.of(devices)
        assert all(part.devices == devices for part in found)
        assert sorted(sorted(pools(part)[1]) for part in found) == sorted(map(sorted, names))
    with pytest.raises(ConfigError, match="no part") as caught:
        choice.of(7)
    assert caught.value.allowed is not None and "10" in caught.value.allowed


def test_parts_that_differ_only_by_name_are_one() -> None:
    choice = PartChoice(load_cluster(MIXED))
    first = choice.of(8)
    assert len(first) == 1 and first[0].name.startswith("A100-80G of ")


def curve(part: Cluster, *points: tuple[float, float, float]) -> Curve[str]:
    """By hand: seconds, bytes, dollars."""
    return Curve(
        part=part,
        points=tuple(
            Point(time_s=time_s, memory_bytes=resident, cost_usd=usd, part=part, layout="")
            for time_s, resident, usd in points
        ),
        epsilon=0.0,
        search_s=0.0,
        search_cpu_s=0.0,
    )


def test_points_of_parts_are_joined_as_the_mode_compares_them() -> None:
    fast, slow, both = PartChoice(load_cluster("1x2xA100-80G+1x2xV100-32G")).unions
    curves = [
        curve(fast, (1.0, 8.0, 1.0), (4.0, 6.0, 4.0)),
        curve(slow, (3.0, 7.0, 1.5), (5.0, 9.0, 2.5)),
        curve(both, (2.0, 7.0, 3.0), (3.0, 5.0, 4.5)),
    ]

    def times(**given: bool) -> list[tuple[float, int]]:
        found = points_of(curves, weighs_cost=given.get("cost", False), any_part=given.get("any", False))
        return [(point.time_s, point.devices) for point in found]

    # Of all: 2 s, 7 dominates 3 s, 7; 3 s, 5 dominates 4 s, 6 and 5 s, 9.
    assert times(any=True) == [(1.0, 2), (2.0, 4), (3.0, 4)]
    # With cost, 3 s, 7 at 1.5 dollars stays: its dominator in time and memory costs more. So does 4 s, 6 at
    # 4.
    assert times(any=True, cost=True) == [(1.0, 2), (2.0, 4), (3.0, 4), (3.0, 2), (4.0, 2)]
    # Of each device count alone: of two devices 5 s, 9 is dominated; four keep both of theirs.
    assert times() == [(1.0, 2), (4.0, 2), (3.0, 2), (2.0, 4), (3.0, 4)]
    assert points_of([replace(curves[0], points=())], weighs_cost=True) == ()
