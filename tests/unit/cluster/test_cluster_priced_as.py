"""Approximations of a cluster and its events: one line for each, none where the cluster is as given."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwise.cluster import (
    Cluster,
    Conditions,
    DeviceLost,
    EventTrace,
    NodeJoined,
    NodeLost,
    NodeView,
    Slowdown,
    check_events,
    cluster_from_record,
    cluster_record,
    events_from_text,
    events_of_nodes,
    events_text,
    load_cluster,
    part_of,
)
from shardwise.cluster.event_file import parse_events
from shardwise.errors import ConfigError, InternalError

LINE = (
    "links are priced as 3 tiers: 100 GB/s within 2 devices, 6.25 GB/s within 4 devices, 62.5 MB/s between "
    "all 8; nothing is proven of the links themselves"
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
        for pair in ((f"d{first}", f"n{node}"), (f"d{first}", f"d{second}"), (f"d{second}", f"n{node}")):
            lines.append(f"  - {{from: {pair[0]}, to: {pair[1]}, bandwidth: 100GB/s, latency: 2us}}")
    for switch, nodes in uplinks.items():
        lines += [f"  - {{from: n{node}, to: {switch}, bandwidth: 100Gb/s, latency: 5us}}" for node in nodes]
        lines.append(f"  - {{from: {switch}, to: core, bandwidth: 2Gb/s, latency: 5us}}")
    path = f"{tmp_path}/racks.yaml"
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return load_cluster(path)


@pytest.mark.parametrize("uplinks", [{"ra": (0, 1), "rb": (2, 3)}, {"ra": (0, 2), "rb": (1, 3)}])
def test_links_state_the_tiers_that_approximate_them(
    tmp_path: object, uplinks: dict[str, tuple[int, ...]]
) -> None:
    """Two devices share the 100 Gb/s of their node, 12.5 GB/s; four share the 2 Gb/s of their rack, 250 MB/s.
    The order of the nodes in the file makes no difference."""
    cluster = racks(tmp_path, uplinks)
    assert cluster.priced_as == (LINE,)
    moved = uplinks["ra"] != (0, 1)
    assert any("are n0, n2, n1, n3 of the file" in line for line in cluster.assumptions) is moved


def test_links_without_groups_state_that_the_order_matters(tmp_path: object) -> None:
    cluster = racks(tmp_path, {"ra": (0, 1, 2), "rb": (3,)})
    assert "as 2 tiers" in cluster.priced_as[0]
    assert "the order of nodes in the file matters" in cluster.priced_as[0]


def test_a_part_of_a_cluster_of_links_states_them_too(tmp_path: object) -> None:
    """A part has no links any more, and its tiers are an approximation all the same, in a plan file
    as well.
    """
    whole = racks(tmp_path, {"ra": (0, 1), "rb": (2, 3)})
    part = part_of(whole, 4)
    assert not part.links and "6.25 GB/s between all 4" in part.priced_as[0]
    for cluster in (whole, part):
        assert cluster_from_record(cluster_record(cluster)) == cluster
    assert part_of(whole, 1).priced_as[0].startswith("links are priced as tiers; ")


@pytest.mark.parametrize("name", ["4x2xT4", "spot-mix", "fast-slow-racks"])
def test_a_cluster_of_tiers_needs_no_approximation(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.priced_as == () and part_of(cluster, 1).priced_as == ()
    assert "is_without_links" not in cluster_record(cluster)


# --- events ----------------------------------------------------------------------------------------------

PAIRS = load_cluster("3x2xT4")
PROVEN = "; nothing is proven of the devices themselves"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("slow d0 0.5", "d0 is taken for its node n0: all 2 devices of it run at 0.5"),
        # 0.5 x 0.8 on d2, 0.5 on d3: both count as 0.4.
        ("slow n1 0.5; slow d2 0.8", "d2 is taken for its node n1: all 2 devices of it run at 0.4"),
        ("slow d5 0.9; slow d4 0.5", "d4, d5 are taken for their node n2: all 2 devices of it run at 0.5"),
        ("lost d1", "d1 is taken for its node n0: all 2 devices of it count as lost"),
        (
            "slow d4 0.5; lost d1",
            "d1 is taken for its node n0: all 2 devices of it count as lost; "
            "d4 is taken for its node n2: all 2 devices of it run at 0.5",
        ),
        ("slow d0 1.5", "d0 is taken for its node n0: all 2 devices of it run at 1"),
        ("slow n0 1.5", "n0 runs no faster than the cluster has it"),
    ],
)
def test_a_device_approximated_by_its_node_is_named(words: str, line: str) -> None:
    assert events_of_nodes(events_from_text(words, 3), PAIRS).priced_as == (line + PROVEN,)


@pytest.mark.parametrize(
    "words",
    [
        "slow n0 0.5",
        "lost n0",
        "slow d0 1.0",
        "slow d0 0.5; slow d0 1.0",
        "slow d0 0.5; slow d1 0.5",  # all devices of the node equally: that is the node
        "slow d0 0.5; lost n0",
        "notice n1",
        "link n0>s1g0 6.25GB/s",  # no approximation
    ],
)
def test_events_of_whole_nodes_and_void_ones_need_no_approximation(words: str) -> None:
    assert events_of_nodes(events_from_text(words, 3), PAIRS).priced_as == ()


@pytest.mark.parametrize("words", ["slow d1 0.5", "lost d1"])
def test_a_device_that_is_all_of_its_node_is_its_node(words: str) -> None:
    single = load_cluster("3x1xT4")
    found = events_of_nodes(events_from_text(words, 3), single)
    assert found.priced_as == ()
    assert words != "lost d1" or found.trace.events == (NodeLost(time_s=0.0, node="n1"),)


def test_many_approximated_devices_are_reported_in_one_line() -> None:
    many = load_cluster("9x2xT4")
    words = "; ".join(f"slow d{2 * node} 0.5" for node in range(9))
    (line,) = events_of_nodes(events_from_text(words, 9), many).priced_as
    assert "node n2:" in line and "node n3:" not in line and "6 more nodes alike" in line


@pytest.mark.parametrize("words", ["link n0>s1g0 1GB/s", "latency n0>s1g0 2ms"])
def test_approximated_changes_of_links_are_reported_in_one_line(words: str) -> None:
    (line,) = events_of_nodes(events_from_text(f"{words}; slow n0 0.5", 3), PAIRS).priced_as
    assert line.startswith("n0>s1g0 changes: ") and line.endswith("nothing is proven of the links themselves")


def test_approximated_changes_between_sites_are_reported_in_one_line() -> None:
    head = (
        '{"schema": "shardwise.events", "version": 1, "nodes": 3, "sites": {"a": ["n0"], "b": ["n1"]}}\n'
        '{"time_s": 1, "kind": "sites", "sites": ["a", "b"], "bytes_per_s": 1e9}\n'
    )
    (line,) = events_of_nodes(parse_events(head)[0], PAIRS).priced_as
    assert line.startswith("a and b changes: ")


def test_the_loss_of_a_device_is_the_loss_of_its_node() -> None:
    """Each node is lost once, and comes back as new with all of its devices."""
    given = EventTrace(
        nodes=3,
        events=(
            DeviceLost(time_s=1.0, device="d1"),
            DeviceLost(time_s=2.0, device="d0"),
            Slowdown(time_s=2.0, where="d0", speed=0.5),
            NodeLost(time_s=3.0, node="n0"),
            NodeJoined(time_s=4.0, node="n0"),
            DeviceLost(time_s=5.0, device="d0"),
        ),
    )
    found = events_of_nodes(given, PAIRS)
    assert found.trace.events == (
        NodeLost(time_s=1.0, node="n0"),
        Slowdown(time_s=2.0, where="d0", speed=0.5),
        NodeJoined(time_s=4.0, node="n0"),
        Slowdown(time_s=4.0, where="d0", speed=1.0),
        NodeLost(time_s=5.0, node="n0"),
    )
    assert found.priced_as == (
        f"d1, d0 are taken for their node n0: all 2 devices of it count as lost{PROVEN}",
    )


def test_a_node_that_joins_has_devices_as_new() -> None:
    trace = events_of_nodes(events_from_text("slow d0 0.5; lost n0; joined n0", 3), PAIRS).trace
    conditions = Conditions.at_start(trace)
    for event in trace.events:
        conditions = conditions.after(event)
    states = NodeView(PAIRS).states(conditions)
    assert states["n0"] == states["n1"]


def test_a_lost_device_is_read_from_words_and_files() -> None:
    trace = events_from_text("lost d5", 3)
    assert trace.events == (DeviceLost(time_s=0.0, device="d5"),) and trace.absent == frozenset()
    assert '{"time_s": 0.0, "kind": "lost", "device": "d5"}' in events_text(trace)
    assert parse_events(events_text(trace))[0].events == trace.events
    check_events(trace, PAIRS)


@pytest.mark.parametrize(
    ("words", "check", "message"),
    [
        ("lost d6", check_events, "is not a device of the cluster"),
        ("lost n0; lost d1", events_of_nodes, "loses d1, whose node n0 is absent"),
    ],
)
def test_a_device_that_cannot_be_lost_is_named(
    words: str, check: Callable[[EventTrace, Cluster], object], message: str
) -> None:
    trace = events_from_text(words, 3)
    with pytest.raises(ConfigError, match=message):
        check(trace, PAIRS)


def test_a_node_that_lost_no_device_does_not_join() -> None:
    """The node of a device is known only with the cluster: then the invalid event is found."""
    head = '{"schema": "shardwise.events", "version": 1, "nodes": 3}\n'
    lost = '{"time_s": 1, "kind": "lost", "device": "d1"}\n'
    for node, is_invalid in (("n0", False), ("n2", True)):
        trace, _ = parse_events(f'{head}{lost}{{"time_s": 2, "kind": "joined", "node": "{node}"}}\n')
        if is_invalid:
            with pytest.raises(ConfigError, match="joins n2, which is already present"):
                events_of_nodes(trace, PAIRS)
        else:
            assert events_of_nodes(trace, PAIRS).trace.events[-1] == NodeJoined(time_s=2.0, node="n0")


@pytest.mark.parametrize("device", ["n1", "d01", "dx"])
def test_a_file_names_devices_by_their_numbers(device: str) -> None:
    head = '{"schema": "shardwise.events", "version": 1, "nodes": 3}\n'
    with pytest.raises(ConfigError, match="which is not a device d0, d1"):
        parse_events(f'{head}{{"time_s": 1, "kind": "lost", "device": "{device}"}}\n')


def test_conditions_refuse_the_loss_of_a_single_device() -> None:
    trace = events_from_text("lost d1", 3)
    with pytest.raises(InternalError):
        Conditions.at_start(trace).after(trace.events[0])
