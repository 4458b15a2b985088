"""What a cluster and its events are priced as where that is not what was given: one line each, or none."""

from __future__ import annotations

import pytest

from shardwise.cluster import Cluster, cluster_from_record, cluster_record, load_cluster, part_of

LINE = (
    "links are priced as 2 tiers: 100 GB/s within 2 devices, {outer} between all 8; the order of nodes in "
    "the file matters; nothing is proven of the links themselves"
)


def racks(tmp_path: object, uplinks: dict[str, tuple[int, ...]]) -> Cluster:
    """Four nodes of two T4 in two racks: 100 Gb/s to the switch of the rack, 2 Gb/s between racks."""
    lines = [
        "name: racks",
        "nodes:",
        "  - {device: T4, count: 4, devices: 2}",
        "switches: [ra, rb, core]",
        "links:",
    ]
    for node in range(4):
        first, second = 2 * node, 2 * node + 1
        for ends in ((f"d{first}", f"n{node}"), (f"d{first}", f"d{second}"), (f"d{second}", f"n{node}")):
            lines.append(f"  - {{from: {ends[0]}, to: {ends[1]}, bandwidth: 100GB/s, latency: 2us}}")
    for switch, nodes in uplinks.items():
        lines += [f"  - {{from: n{node}, to: {switch}, bandwidth: 100Gb/s, latency: 5us}}" for node in nodes]
        lines.append(f"  - {{from: {switch}, to: core, bandwidth: 2Gb/s, latency: 5us}}")
    path = f"{tmp_path}/racks.yaml"
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return load_cluster(path)


@pytest.mark.parametrize(
    ("uplinks", "outer"),
    [
        # The ring over d0 to d7 leaves each rack once: the 2 Gb/s, 250 MB/s, carry one hop each way.
        ({"ra": (0, 1), "rb": (2, 3)}, "250 MB/s"),
        # Every second node is of the other rack: four hops between racks, two each way.
        ({"ra": (0, 2), "rb": (1, 3)}, "125 MB/s"),
    ],
)
def test_links_say_which_tiers_they_are_priced_as(
    tmp_path: object, uplinks: dict[str, tuple[int, ...]], outer: str
) -> None:
    assert racks(tmp_path, uplinks).priced_as == (LINE.format(outer=outer),)


def test_a_part_of_a_cluster_of_links_says_so_too(tmp_path: object) -> None:
    """A part has no links any more, and its tiers stand for them all the same, in a plan file as well."""
    whole = racks(tmp_path, {"ra": (0, 1), "rb": (2, 3)})
    part = part_of(whole, 4)
    assert not part.links and "250 MB/s between all 4" in part.priced_as[0]
    for cluster in (whole, part):
        assert cluster_from_record(cluster_record(cluster)) == cluster
    assert part_of(whole, 1).priced_as[0].startswith("links are priced as tiers; ")


@pytest.mark.parametrize("name", ["4x2xT4", "spot-mix", "fast-slow-racks"])
def test_a_cluster_of_tiers_is_priced_as_it_is(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.priced_as == () and part_of(cluster, 1).priced_as == ()
    assert "is_without_links" not in cluster_record(cluster)
