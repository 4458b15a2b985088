"""Groups of nodes by their links: the same tiers and plans in any order of the nodes, and maximum flows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.cluster import Capacity, Cluster, Link, route
from shardwise.cluster.file import cluster_of_fields
from shardwise.cluster.link_groups import outgoing_bytes_per_s
from shardwise.inputs import Fields


def racks(order: Sequence[int], *, up: Sequence[str] = ("2Gb/s", "2Gb/s")) -> Cluster:
    """Four nodes of two T4 on 100 Gb/s, the first two in rack ra and the others in rb, listed in `order`."""
    links: list[dict[str, object]] = []
    for at, node in enumerate(order):
        first, second = f"d{2 * at}", f"d{2 * at + 1}"
        for a, b in ((first, f"n{at}"), (second, f"n{at}"), (first, second)):
            links.append({"from": a, "to": b, "bandwidth": "100GB/s", "latency": "2us"})
        rack = "ra" if node < 2 else "rb"
        links.append({"from": f"n{at}", "to": rack, "bandwidth": "100Gb/s", "latency": "5us"})
    for rack, rate in zip(("ra", "rb"), up, strict=True):
        links.append({"from": rack, "to": "core", "bandwidth": rate, "latency": "5us"})
    nodes = [{"device": "T4", "count": len(order), "devices": 2}]
    return cluster_of_fields(
        Fields({"name": "racks", "nodes": nodes, "switches": ["ra", "rb", "core"], "links": links})
    )


@pytest.mark.parametrize("order", [*permutations(range(4))])
def test_two_racks_are_three_tiers_in_any_order(order: Sequence[int]) -> None:
    """Two devices share 100 Gb/s = 12.5 GB/s of a node; four share 2 Gb/s = 0.25 GB/s of a rack. One alone
    has all. Latency is that of the longest route: d0 n0 ra core rb n2 d4 is 2 + 5 + 5 + 5 + 5 + 2 us."""
    found = [
        (tier.span, tier.bytes_per_s, tier.flow_bytes_per_s, tier.is_network) for tier in racks(order).tiers
    ]
    assert found == [(2, 100e9, 100e9, False), (4, 6.25e9, 12.5e9, True), (8, 62.5e6, 250e6, True)]
    assert [tier.latency_s for tier in racks(order).tiers] == pytest.approx([2e-6, 14e-6, 24e-6])


def test_links_follow_their_nodes_to_their_new_places() -> None:
    """Listed 0, 2, 1, 3: the second node of the file, of rack rb, becomes n2 with d4 and d5."""
    cluster = racks((0, 2, 1, 3))
    assert route(cluster, 0, 2) == ("d0>n0", "n0>ra", "ra>n1", "n1>d2")
    assert route(cluster, 0, 4) == ("d0>n0", "n0>ra", "ra>core", "core>rb", "rb>n2", "n2>d4")
    assert cluster.assumptions == (
        "nodes in the order of their links: n0, n1, ... are n0, n2, n1, n3 of the file, devices as well",
    )
    assert racks((0, 1, 2, 3)).assumptions == ()


def test_the_plan_is_the_same_in_any_order() -> None:
    """Two tiers of rings had 0.889 and 1.125 s."""
    question = {"seq_len": 512, "global_batch_size": 32, "target": "any", "top": 0}
    times = [
        sw.plan("opt-350m", cluster=racks(order), **question).best.step_time_s  # type: ignore[arg-type]
        for order in ((0, 1, 2, 3), (0, 2, 1, 3))
    ]
    assert times[0] == times[1] < 0.6


def test_a_slower_rack_sets_the_rate_of_both() -> None:
    """1 Gb/s = 125 MB/s for four devices, and alone."""
    tier = racks((0, 2, 1, 3), up=("1Gb/s", "2Gb/s")).tiers[-1]
    assert (tier.bytes_per_s, tier.flow_bytes_per_s) == (31.25e6, 125e6)


def link(source: str, target: str, rate: float) -> Link:
    capacity = Capacity.constant(rate)
    return Link(name=f"{source}>{target}", source=source, target=target, capacity=capacity, latency_s=0.0)


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 9)).filter(lambda e: e[0] != e[1]),
        max_size=14, unique_by=lambda each: each[:2],
    ),
    st.sets(st.integers(0, 5), min_size=1, max_size=2),
)  # fmt: skip
def test_the_flow_is_the_least_cut(edges: list[tuple[int, int, int]], sources: set[int]) -> None:
    """Oracle: the least capacity out of any set of vertices with all sources and no target, by trying all."""
    targets = {min(set(range(6)) - sources)}
    others = set(range(6)) - sources - targets
    least = min(
        sum(rate for a, b, rate in edges if a in inside and b not in inside)
        for size in range(len(others) + 1)
        for chosen in combinations(sorted(others), size)
        for inside in [sources | set(chosen)]
    )
    links = [link(f"v{a}", f"v{b}", float(rate)) for a, b, rate in edges]
    flow = outgoing_bytes_per_s(links, [f"v{v}" for v in sources], {f"v{v}" for v in targets})
    assert flow == pytest.approx(least)
