"""Shorthands, tiers, groups of ranks, links and records, with their arithmetic."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cluster import (
    Cluster,
    Tier,
    cluster_from_record,
    cluster_record,
    find_device,
    group_members,
    link_graph,
    load_cluster,
    multiplied,
    node_runs,
    part_of,
    route,
)
from shardwise.cluster.file import cluster_of_fields
from shardwise.errors import ConfigError
from shardwise.inputs import Fields, parse_mapping

EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "clusters").glob("*.yaml"))
(LINKS,) = [str(path) for path in EXAMPLES if path.name == "links.yaml"]
SHORTHANDS = [
    "8x8xH100", "12xH100", "1xcpu", "2x8xH100-NVL", "8x1xGH200", "20x4xGB200", "4x8xA100-80G+2x4xT4",
    "4x8xA100-80G+4x8xV100-16G", "3xH100", "2x3xA40",
]  # fmt: skip


def group_members_of(tiers: Sequence[Tier], ranks: Sequence[int]) -> tuple[int, ...]:
    """The largest number of `ranks` in one group of each tier, innermost first; for arbitrary groups."""
    last = len(tiers) - 1
    return tuple(
        len(ranks) if index == last else max(Counter(rank // tier.span for rank in ranks).values())
        for index, tier in enumerate(tiers)
    )


def of_yaml(text: str) -> Cluster:
    return cluster_of_fields(Fields(parse_mapping(text), file="c.yaml"))


def tiers_of(cluster: Cluster) -> list[tuple[str, int, float, float]]:
    return [(t.name, t.span, t.bytes_per_s / 1e9, t.flow_bytes_per_s / 1e9) for t in cluster.tiers]


@pytest.mark.parametrize(
    ("text", "tiers"),
    [
        # NVLink 4: 450 GB/s per direction; 8 cards of 400 Gb/s = 50 GB/s for 8 devices.
        ("8x8xH100", [("NVLink 4", 8, 450, 450), ("InfiniBand", 64, 50, 50)]),
        ("64xA100-80G", [("NVLink 3", 8, 300, 300), ("InfiniBand", 64, 25, 25)]),
        # One card of 100 Gb/s = 12.5 GB/s for 8 devices: 1.5625 each, 12.5 alone; for 4 devices 3.125 each.
        ("2x8xV100-16G", [("NVLink 2", 8, 150, 150), ("InfiniBand", 16, 1.5625, 12.5)]),
        ("2x4xV100-16G", [("NVLink 2", 4, 150, 150), ("InfiniBand", 8, 3.125, 12.5)]),
        # NVL72: 18 nodes of 4 are one domain. More devices fill equal parts of domains: two of 40, three of
        # 52 (156 has no larger part of whole nodes), four of 64; 19 and 21 nodes have no equal parts of more
        # than half a domain, and fill one.
        ("18x4xGB200", [("NVLink 5", 72, 900, 900)]),
        ("20x4xGB200", [("NVLink 5", 40, 900, 900), ("InfiniBand", 80, 50, 50)]),
        ("39x4xGB200", [("NVLink 5", 52, 900, 900), ("InfiniBand", 156, 50, 50)]),
        ("64x4xGB200", [("NVLink 5", 64, 900, 900), ("InfiniBand", 256, 50, 50)]),
        ("36x4xGB200", [("NVLink 5", 72, 900, 900), ("InfiniBand", 144, 50, 50)]),
        ("19x4xGB200", [("NVLink 5", 72, 900, 900), ("InfiniBand", 76, 50, 50)]),
        ("21x4xGB200", [("NVLink 5", 72, 900, 900), ("InfiniBand", 84, 50, 50)]),
        ("2x4xGB200", [("NVLink 5", 8, 900, 900)]),
        # Bridged pairs, then the host links, then the network.
        (
            "16xH100-NVL",
            [("NVLink 4 bridge", 2, 300, 300), ("host links", 8, 53, 53), ("InfiniBand", 16, 50, 50)],
        ),
        ("8x1xGH200", [("Slingshot", 8, 25, 25)]),
        ("1xcpu", [("shared memory", 1, 3, 3)]),
        ("3xH100", [("NVLink 4", 3, 450, 450)]),
        # The weakest figures; groups start at 8, 16, 24, 32, 36, whose greatest common divisor is 4.
        (
            "4x8xA100-80G+2x4xT4",
            [("NVLink 3 / PCIe 3.0 x16", 4, 12.5, 12.5), ("InfiniBand / Ethernet", 40, 1.5625, 6.25)],
        ),
        # A smaller last node does not change the span: groups start at multiples of 8 only.
        ("12xH100", [("NVLink 4", 8, 450, 450), ("InfiniBand", 12, 50, 50)]),
    ],
)  # fmt: skip
def test_tiers_of_shorthands(text: str, tiers: list[tuple[str, int, float, float]]) -> None:
    assert tiers_of(load_cluster(text)) == tiers


def test_a_shorthand_states_which_figures_are_defaults_and_which_were_given() -> None:
    cluster = load_cluster("8x8xH100", inter_node="4x200Gb/s")
    assert cluster.tiers[-1].bytes_per_s == 4 * 25e9 / 8 and cluster.tiers[-1].flow_bytes_per_s == 25e9
    assert cluster.assumptions == (
        "H100-SXM: NVLink 4: 450 GB/s per direction (default); network: 4 x 25 GB/s per node of 8 (given)",
    )
    assert "InfiniBand 400 Gb/s per device: 8 x 50 GB/s per node of 8 (default)" in str(
        load_cluster("8x8xH100").assumptions
    )


def test_counts_and_prices() -> None:
    cluster = load_cluster("12xH100")
    assert [(node.devices, node.nics, count) for node, count in node_runs(cluster.nodes)] == [
        (8, 8, 1),
        (4, 4, 1),
    ]
    assert not cluster.is_uniform and cluster.devices == 12
    assert cluster.price_usd_per_hour == pytest.approx(12 * 12.29)
    assert load_cluster("2x8xA800").price_usd_per_hour is None
    large = load_cluster("16384x8xH100")
    assert large.devices == 131_072 and large.is_uniform and len(node_runs(large.nodes)) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0x8xH100", "has no devices"), ("8x0xH100", "has no devices"), ("0xH100", "has no devices"),
        ("8x8xH10O", "did you mean H100-SXM"), ("8x8x8xH100", "not a known"), ("8xA100", "A100-40G or"),
        ("foo", "neither a cluster nor a file"), ("", "neither"), ("10000001xH100", "too many"),
        ("999999999999x999999999999xH100", "too many devices"), ("6000000xH100+6000000xH200", "too many"),
        ("8x8xH100+", "neither"), ("absent.yaml", "no such file"), ("٨x8xH100", "neither"),
        ("-1xH100", "neither"),
    ],
)  # fmt: skip
def test_malformed_clusters_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_cluster(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["abc", "0Gb/s", "-1Gb/s", "0x100Gb/s", "400", "1e30Gb/s", ""])
def test_malformed_networks_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="inter-node"):
        load_cluster("2x8xH100", inter_node=text)


# --- files -----------------------------------------------------------------------------------------------


def test_oversubscription_and_rails() -> None:
    pods = load_cluster(str(next(path for path in EXAMPLES if path.name == "two-pods.yaml")))
    # 8 cards of 50 GB/s for 8 devices; the spine carries half: 25. A single device has one of 8 rails.
    assert tiers_of(pods) == [("NVLink 4", 8, 450, 450), ("leaf", 128, 50, 50), ("spine", 256, 25, 50)]
    assert pods.price_usd_per_hour == 32 * 98
    one_rail = of_yaml(
        "nodes: [{device: H100, count: 2}]\n"
        "tiers: [{name: a, span: node, bandwidth: 450GB/s, latency: 2us}, {name: b, latency: 4us, rails: 1}]"
    )
    assert tiers_of(one_rail)[-1] == ("b", 16, 50, 400)
    with pytest.raises(ConfigError, match=r"rails: divides the bandwidth of network cards"):
        of_yaml(
            "nodes: [{device: H100, count: 2}]\n"
            "tiers: [{name: a, span: node, bandwidth: 450GB/s, latency: 2us, rails: 1}, "
            "{name: b, latency: 4us}]"
        )


def test_classes_take_figures_of_their_own_with_their_source() -> None:
    cluster = of_yaml(
        "classes: {mine: {device: A100-80G, memory: 70GiB, efficiency: {matmul: {peak_fraction: 0.5}}}}\n"
        "nodes: [{device: mine, count: 2, devices: 4, speed: 0.5, price: 7USD/h, host: {memory: 1GiB}}]"
    )
    mine, known = cluster.classes["mine"], find_device("A100-80G")
    assert mine.memory_bytes == 70 * 2**30 and mine.sources["memory_bytes"] == "given in c.yaml"
    assert mine.efficiency.matmul.peak_fraction == 0.5 and mine.efficiency.matmul.units == 108
    assert mine.efficiency.provenance["matmul.peak_fraction"] == "given in c.yaml"
    assert mine.peak_flop_per_s == known.peak_flop_per_s
    assert mine.sources["peak_flop_per_s"] == known.sources["peak_flop_per_s"]
    node = cluster.nodes[0]
    # The default is 8 cards for 8 devices, so 4 for 4.
    assert (node.devices, node.nics, node.speed, node.host_memory_bytes) == (4, 4, 0.5, 2**30)
    assert cluster.price_usd_per_hour == 14 and set(cluster.classes) == {"mine"}


def test_devices_without_a_switch_share_the_links_between_them() -> None:
    """V100: one, four and all of six links lead to others of two, four and eight. With A100 at 300 GB/s the
    weaker of both counts: 150 * 1/6 of 150.
    """
    assert load_cluster("4x8xV100-32G").tiers[0].part_shares == ((2, 1 / 6), (4, 4 / 6), (8, 1.0))
    assert load_cluster("4x8xV100-32G").tiers[1].part_shares == ()
    # A node of four has the links of four: no group has all six.
    assert load_cluster("2x4xV100-32G").tiers[0].part_shares == ((2, 1 / 6), (4, 4 / 6), (8, 1.0))
    assert load_cluster("2x8xA100-80G").tiers[0].part_shares == ()
    mixed = load_cluster("1x8xA100-80G+1x8xV100-32G").tiers[0]
    assert (mixed.bytes_per_s, mixed.part_shares) == (150e9, ((2, 1 / 6), (4, 4 / 6), (8, 1.0)))
    # 448 GB/s over seven links, so 64 GB/s between two: more than the 25 of two V100; 192 of four, more than
    # 100.
    mesh = load_cluster("1x8xMI300X+1x8xV100-32G").tiers[0]
    assert dict(mesh.part_shares)[2] == pytest.approx(25 / 150)
    assert dict(mesh.part_shares)[3] == pytest.approx(25 / 150)
    assert dict(mesh.part_shares)[4] == pytest.approx(100 / 150)
    assert dict(mesh.part_shares)[8] == 1.0
    # 64 of A100's 300 GB/s.
    assert dict(load_cluster("1x8xMI300X+1x8xA100-80G").tiers[0].part_shares)[2] == pytest.approx(64 / 300)


def test_links_of_a_class_of_its_own() -> None:
    cluster = of_yaml(
        "classes: {mine: {device: H100, scale_up: {links: {'2': 1, '4': 3}}}}\n"
        "nodes: [{device: mine, devices: 4, count: 2}]"
    )
    assert cluster.classes["mine"].scale_up_links == ((2, 1), (4, 3))
    assert cluster.classes["mine"].sources["scale_up_links"] == "given in c.yaml"
    assert cluster.tiers[0].part_shares == ((2, 1 / 3), (4, 1.0))
    # One node with its own fabric: the network that several of them would need has no such links.
    node = part_of(cluster, 4)
    slower = replace(node, tiers=(replace(node.tiers[0], latency_s=1.0),))
    assert [tier.part_shares for tier in multiplied(slower, 3).tiers] == [((2, 1 / 3), (4, 1.0)), ()]


def test_a_ring_over_given_links() -> None:
    links = load_cluster(str(next(path for path in EXAMPLES if path.name == "links.yaml")))
    # 3 GB/s within a machine. The ring 0-1-2-3 crosses the lan once per direction: 1 Gb/s = 0.125 GB/s.
    assert tiers_of(links) == [("node", 2, 3, 3), ("cluster", 4, 0.125, 0.125)]
    assert links.tiers[1].latency_s == pytest.approx(5e-6 + 50e-6 + 50e-6 + 5e-6)
    assert route(links, 0, 3) == ("d0>n0", "n0>lan", "lan>n1", "n1>d3")
    assert route(links, 1, 0) == ("d1>d0",)


NODES = "nodes: [{device: H100, count: 2}]\n"


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("name: x", "nodes", "missing"), ("nodes: []", "nodes", "list of 1"), ("nodes: 3", "nodes", "list"),
        ("nodes: [{count: 2}]", "nodes[0].device", "missing"),
        ("nodes: [{device: H10O}]", "nodes[0].device", "did you mean"),
        ("nodes: [{device: A100}]", "nodes[0].device", "ambiguous"),
        ("nodes: [{device: H100, cuont: 2}]", "nodes[0].cuont", "did you mean count"),
        ("nodes: [{device: H100, count: 0}]", "nodes[0].count", "from 1"),
        ("nodes: [{device: H100, count: -1}]", "nodes[0].count", "from 1"),
        ("nodes: [{device: H100, count: 1e7}]", "nodes[0]", "too many devices"),
        ("nodes: [{device: H100, devices: 0}]", "nodes[0].devices", "from 1"),
        ("nodes: [{device: H100, speed: 0}]", "nodes[0].speed", "from 0.001"),
        ("nodes: [{device: H100, nics: {bandwidth: 400gb/s}}]", "nodes[0].nics.bandwidth", "not a bandwidth"),
        ("nodes: [{device: H100, nics: {cuont: 1}}]", "nodes[0].nics.cuont", "did you mean count"),
        ("nodes: [{device: mine}]\nclasses: {main: {device: H100}}", "nodes[0].device", "did you mean main"),
        ("classes: {m: {device: X9}}\n" + NODES, "classes.m.device", "not a known device"),
        ("classes: {m: {device: H100, memroy: 1GB}}\n" + NODES, "classes.m.memroy", "did you mean memory"),
        ("classes: {m: {device: H100, peak: {bf17: 1TFLOP/s}}}\n" + NODES, "classes.m.peak.bf17", "bf16"),
        ("classes: {m: {device: H100, peak: {}}}\n" + NODES, "classes.m.peak", "no dtype"),
        (
            "classes: {m: {device: H100, efficiency: {matmul: {peak_fraction: 1.01}}}}\n" + NODES,
            "classes.m.efficiency.matmul.peak_fraction",
            "not a number in range",
        ),
        (
            "classes: {m: {device: H100, scale_up: {links: {'1': 2}}}}\n" + NODES,
            "classes.m.scale_up.links.1", "2 or more",
        ),
        (
            "classes: {m: {device: H100, scale_up: {links: {'4': 2}}}}\n" + NODES,
            "classes.m.scale_up.links", "those of 2 devices",
        ),
        (
            "classes: {m: {device: H100, scale_up: {links: {}}}}\n" + NODES,
            "classes.m.scale_up.links", "those of 2 devices",
        ),
        (
            "classes: {m: {device: H100, scale_up: {links: {'2': 0}}}}\n" + NODES,
            "classes.m.scale_up.links.2", "from 1",

        ),
        (
            "classes: {m: {device: H100, scale_up: {links: {'2': 3, '4': 2}}}}\n" + NODES,
            "classes.m.scale_up.links", "fewer in larger groups",
        ),
        (NODES + "teirs: []", "teirs", "did you mean tiers"), (NODES + "tiers: []", "tiers", "list of 1"),
        (NODES + "tiers: [{name: a, bandwidth: 1GB/s}]", "tiers[0].latency", "missing"),
        (NODES + "tiers: [{name: a, span: 9, bandwidth: 1GB/s, latency: 1us}]", "tiers[0].span", "16, all"),
        (NODES + "tiers: [{name: a, span: rack, bandwidth: 1GB/s, latency: 1us}]", "tiers[0].span", "number"),
        (
            NODES + "tiers: [{name: a, span: 8, bandwidth: 1GB/s, latency: 1us},"
            " {name: b, span: 8, latency: 1us}, {name: c, latency: 1us}]", "tiers[1].span", "not larger",
        ),
        (
            NODES + "tiers: [{name: a, span: 4, bandwidth: 1GB/s, latency: 1us},"
            " {name: b, span: 6, latency: 1us}, {name: c, latency: 1us}]", "tiers[1].span", "cuts groups",
        ),
        (
            NODES + "tiers: [{name: a, bandwidth: 1GB/s, latency: 1us, oversubscription: 0.5}]",
            "tiers[0].oversubscription", "from 1",
        ),
        (NODES + "links: [{from: d0, to: d99, bandwidth: 1GB/s, latency: 1us}]", "links[0].to", "not a vert"),
        (NODES + "links: [{from: d0, to: d1, bandwidth: 1GB/s, latency: 1us}]", "links", "no route"),
        (NODES + "tiers: [{name: a}]\nlinks: [{}]", "tiers", "not both"),
    ],
)  # fmt: skip
def test_errors_name_the_key(text: str, key: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        of_yaml(text)
    error = caught.value
    assert (error.file, error.key) == ("c.yaml", key)
    assert message in str(error) and "\n" not in str(error)


# --- groups of ranks -------------------------------------------------------------------------------------


def test_members_of_mesh_axes_in_nodes_of_8() -> None:
    tiers = load_cluster("8x8xH100").tiers
    # tp 8 at stride 1: all 8 in a node. dp 8 at stride 8: one per node. dp 16 at stride 4: 2 per node.
    inside, everywhere = group_members(tiers, [1, 8, 4, 1, 3, 2], [8, 8, 16, 64, 8, 6])
    # Stride 3 does not divide 8: only 1 is certain. 6 at stride 2: 4 fit, but 6 has equal parts of 2 only.
    assert inside.tolist() == [8, 1, 2, 8, 1, 2]
    assert everywhere.tolist() == [8, 8, 16, 64, 8, 6]


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
def test_columns_agree_with_explicit_groups(stride: int, size: int, node: int, pod: int, more: int) -> None:
    """Where tiers divide the groups evenly, both ways of counting agree; elsewhere columns are not larger."""
    devices = stride * size * more
    spans = [span for span in (node, node * pod) if span < devices] + [devices]
    tiers = [
        Tier(name=str(span), span=span, bytes_per_s=1.0, flow_bytes_per_s=1.0, latency_s=0.0)
        for span in dict.fromkeys(spans)
    ]
    columns = [int(column) for column in group_members(tiers, stride, size)]
    groups = [
        group_members_of(tiers, [block * stride * size + offset + stride * index for index in range(size)])
        for block in range(more)
        for offset in range(stride)
    ]
    for level, tier in enumerate(tiers):
        counts = {group[level] for group in groups}
        assert columns[level] <= max(counts)
        if tier.span % stride == 0 and gcd(size, tier.span // stride) in (size, tier.span // stride):
            assert counts == {columns[level]}
    assert columns == sorted(columns) and columns[-1] == size


# --- links and records -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [*SHORTHANDS, *map(str, EXAMPLES)])
def test_routes_are_chains_of_links_of_the_graph(text: str) -> None:
    cluster = load_cluster(text)
    links = {link.name: link for link in link_graph(cluster)}
    assert len(links) == len(link_graph(cluster))
    for source in range(0, cluster.devices, 5):
        for target in range(0, cluster.devices, 7):
            vertex = f"d{source}"
            for name in route(cluster, source, target):
                assert links[name].source == vertex
                vertex = links[name].target
            assert vertex == f"d{target}"


def test_links_of_two_nodes_share_their_cards() -> None:
    cluster = load_cluster("2x8xV100-16G")
    links = {link.name: link for link in link_graph(cluster)}
    assert route(cluster, 0, 7) == ("d0>u0", "u0>d7")
    assert route(cluster, 1, 8) == ("d1>n0", "n0>s1g0", "s1g0>n1", "n1>d8")
    # Up and down, 16 devices to a switch and a node, 2 nodes to the network: 2 * (16 + 16 + 2).
    assert len(links) == 68
    assert links["d0>u0"].capacity.at(0.0) == 150e9
    assert links["n0>s1g0"].capacity.at(0.0) == 12.5e9
    for tier, route_links in zip(cluster.tiers, (route(cluster, 0, 7), route(cluster, 1, 8)), strict=True):
        assert sum(links[name].latency_s for name in route_links) == pytest.approx(tier.latency_s)
        assert min(links[name].capacity.at(0.0) for name in route_links) == tier.flow_bytes_per_s


def test_a_spine_carries_the_oversubscribed_bandwidth() -> None:
    pods = load_cluster(str(next(path for path in EXAMPLES if path.name == "two-pods.yaml")))
    links = {link.name: link for link in link_graph(pods)}
    # 128 devices of a pod at 25 GB/s each.
    assert links["s1g0>s2g0"].capacity.at(0.0) == 128 * 25e9
    assert route(pods, 0, 255)[2:4] == ("s1g0>s2g0", "s2g0>s1g1")


def test_a_mixed_cluster_keeps_the_bandwidth_of_each_node() -> None:
    cluster = load_cluster("4x8xA100-80G+2x4xT4")
    links = {link.name: link for link in link_graph(cluster)}
    assert route(cluster, 0, 7) == ("d0>u0", "u0>d7")
    assert links["d0>u0"].capacity.at(0.0) == 300e9 and links["d39>u5"].capacity.at(0.0) == 12.5e9
    assert links["n0>s1g0"].capacity.at(0.0) == 200e9 and links["n5>s1g0"].capacity.at(0.0) == 6.25e9


def test_ranks_outside_of_the_cluster_are_refused() -> None:
    for source, target in ((0, 8), (-1, 0)):
        with pytest.raises(ConfigError, match="not a rank"):
            route(load_cluster("8xH100"), source, target)


@pytest.mark.parametrize("text", [*SHORTHANDS, *map(str, EXAMPLES), "16384x8xH100"])
def test_records_round_trip(text: str) -> None:
    cluster = load_cluster(text)
    written = json.dumps(cluster_record(cluster))
    assert cluster_from_record(json.loads(written)) == cluster
    assert len(written) < 20_000


def test_a_record_that_lost_a_field_or_grew_one_is_refused() -> None:
    record = cluster_record(load_cluster("8xH100"))
    for change, message in (
        ({"tiers": []}, "cluster.tiers"), ({"extra": 1}, "cluster.extra"), ({"nodes": []}, "cluster.nodes"),
        ({"nodes": [{**record["nodes"][0], "device_class": "x"}]}, "cluster.nodes[0].device_class"),
        ({"nodes": [{**record["nodes"][0], "count": 2}]}, "cluster.tiers: do not span"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            cluster_from_record({**record, **change}, file="p.json")
        assert str(caught.value).startswith(f"p.json: {message}")


def test_records_of_links() -> None:
    cluster = load_cluster("2x8xV100-32G")
    record = json.loads(json.dumps(cluster_record(cluster)))
    assert record["tiers"][0]["part_shares"] == [[2, 1 / 6], [4, 4 / 6], [8, 1.0]]
    # A record from before switches were a field has switches everywhere.
    for part in (*record["tiers"], *record["classes"].values()):
        part.pop("part_shares", None), part.pop("scale_up_links", None)
    old = cluster_from_record(record)
    assert old.tiers[0].part_shares == () and old.classes["V100-32G"].scale_up_links == ()
    for bad, message in (
        ([[4, 1.0], [2, 0.5]], "not ascending"), ([[2, 0.5], [2, 0.5]], "not ascending"), ([2], "members"),
        ([[2]], "figure"), ([[2, -1.0]], "figure"), ([["2", 0.5]], "members"), (3, "not a list"),
    ):  # fmt: skip
        tier = {**record["tiers"][0], "part_shares": bad}
        with pytest.raises(ConfigError, match=message):
            cluster_from_record({**record, "tiers": [tier, record["tiers"][1]]})


RATES = ("_bytes_per_s", "_flop_per_s", "bytes_per_s")
"""Endings of the names of rates."""


def numbers_below(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all numbers of a record, and of its peaks."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from numbers_below(item, (*path, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from numbers_below(item, (*path, index))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


@pytest.mark.parametrize("text", ["2x4xMI300X", LINKS, "1x2xA100-80G+1x2xT4"])
def test_every_figure_of_a_record_has_a_range(text: str) -> None:
    """Nothing is negative or infinite, and no rate is zero."""
    record = json.loads(json.dumps(cluster_record(load_cluster(text))))
    paths = list(numbers_below(record))
    assert len(paths) > 60
    for path in paths:
        is_rate = any(str(name).endswith(RATES) or name == "peak_flop_per_s" for name in path[-2:])
        for bad in (-1, 1e300, *((0,) if is_rate else ())):
            changed = json.loads(json.dumps(record))
            parent = changed
            for step in path[:-1]:
                parent = parent[step]
            parent[path[-1]] = bad
            with pytest.raises(ConfigError) as caught:
                cluster_from_record(changed, file="p.json")
            assert str(caught.value).startswith("p.json: cluster."), path


def test_links_change_at_ascending_instants() -> None:
    record = json.loads(json.dumps(cluster_record(load_cluster(LINKS))))
    link = record["links"][0]
    for capacity, message in (
        ({"times_s": [1.0], "bytes_per_s": [1e9]}, "times_s: is not ascending"),
        ({"times_s": [0.0, 2.0, 2.0], "bytes_per_s": [1e9] * 3}, "times_s: is not ascending"),
        ({"times_s": [0.0, 2.0], "bytes_per_s": [1e9]}, "bytes_per_s: needs one rate per time"),
        ({"times_s": [0.0], "bytes_per_s": [0.0]}, "bytes_per_s.0: is not a number in range"),
    ):
        changed = {**record, "links": [{**link, "capacity": capacity}, *record["links"][1:]]}
        with pytest.raises(ConfigError, match=message):
            cluster_from_record(changed)
    constant = {"times_s": [0.0, 2.0], "bytes_per_s": [1e9, 2e9]}
    remaining = cluster_from_record(
        {**record, "links": [{**link, "capacity": constant}, *record["links"][1:]]}
    )
    assert remaining.links[0].capacity.at(3.0) == 2e9


def test_a_record_of_too_many_devices_is_refused_before_they_are_listed() -> None:
    record = cluster_record(load_cluster("8xH100"))
    nodes = [{**record["nodes"][0], "count": 10_000_000}]
    with pytest.raises(
        ConfigError, match="is too many devices; found 80,000,000; allowed: at most 10,000,000"
    ):
        cluster_from_record({**record, "nodes": nodes})
