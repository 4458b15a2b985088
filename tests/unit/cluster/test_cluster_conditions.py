"""Conditions of a cluster after events, node by node, compared with shares by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.cluster import (
    Conditions,
    EventTrace,
    LinkChange,
    NodeJoined,
    NodeLost,
    NodeState,
    NodeView,
    Notice,
    Slowdown,
    link_graph,
    load_cluster,
    rounded_down,
    uniform_cluster,
)
from shardwise.replanning.situation import situation_of

CLUSTER = load_cluster("4x8xH100-SXM")
VIEW = NodeView(CLUSTER)
START = Conditions.at_start(EventTrace(nodes=4, events=()))


def nominal(name: str) -> float:
    return next(link.capacity.at(0.0) for link in link_graph(CLUSTER) if link.name == name)


def test_at_the_start_every_node_is_as_the_cluster_has_it() -> None:
    assert VIEW.states(START) == {f"n{index}": NodeState(pool=0) for index in range(4)}


def test_absent_nodes_are_not_there_until_they_join() -> None:
    start = Conditions.at_start(EventTrace(nodes=4, events=(), absent=frozenset({"n2"})))
    assert list(VIEW.states(start)) == ["n0", "n1", "n3"]
    assert "n2" in VIEW.states(start.after(NodeJoined(time_s=1.0, node="n2")))


def test_a_lost_node_is_gone_and_its_notice_with_it() -> None:
    after_notice = START.after(Notice(time_s=0.0, node="n1", lost_at_s=120.0))
    assert after_notice.noticed == {"n1"}
    assert list(VIEW.states(after_notice)) == ["n0", "n1", "n2", "n3"]
    lost = after_notice.after(NodeLost(time_s=120.0, node="n1"))
    assert (lost.noticed, list(VIEW.states(lost))) == (frozenset(), ["n0", "n2", "n3"])


def test_a_node_is_as_slow_as_its_slowest_device() -> None:
    # d8 to d15 are on n1. At 0.7 and 0.5 the node is at 0.5; 1.02**-36 = 0.4902 <= 0.5 < 1.02**-35 = 0.50003,
    # so a half is rounded down to 0.4902.
    slow = START.after(Slowdown(time_s=0.0, where="d8", speed=0.7))
    slow = slow.after(Slowdown(time_s=0.0, where="d15", speed=0.5))
    assert VIEW.states(slow)["n1"].speed == pytest.approx(1.02**-36)
    assert VIEW.states(slow)["n2"].speed == 1.0
    # The planned cluster is never better than the real one.
    fast = START.after(Slowdown(time_s=0.0, where="n3", speed=2.0))
    assert VIEW.states(fast)["n3"].speed == 1.0
    well = slow.after(Slowdown(time_s=1.0, where="d15", speed=1.0))
    assert VIEW.states(well)["n1"].speed == rounded_down(0.7)


def test_devices_of_a_slow_node_are_slower_still() -> None:
    slow = START.after(Slowdown(time_s=0.0, where="n3", speed=0.5))
    slow = slow.after(Slowdown(time_s=0.0, where="d24", speed=0.5))
    assert VIEW.states(slow)["n3"].speed == rounded_down(0.25)


def test_a_node_has_the_worse_of_its_two_directions() -> None:
    name = next(link.name for link in link_graph(CLUSTER) if link.name.startswith("n1>s"))
    back = ">".join(reversed(name.split(">")))
    changed = START.after(LinkChange(time_s=0.0, link=name, bytes_per_s=nominal(name) * 0.8))
    changed = changed.after(LinkChange(time_s=0.0, link=back, bytes_per_s=nominal(back) * 0.4))
    states = VIEW.states(changed)
    assert states["n1"].network == rounded_down(0.4)
    assert states["n0"] == NodeState(pool=0)
    faster = START.after(LinkChange(time_s=0.0, link=name, bytes_per_s=nominal(name) * 3.0))
    assert VIEW.states(faster)["n1"].network == 1.0


def test_links_inside_a_node_and_between_nodes_are_distinguished() -> None:
    name = next(link.name for link in link_graph(CLUSTER) if link.name.startswith("d0>u"))
    changed = START.after(LinkChange(time_s=0.0, link=name, bytes_per_s=nominal(name) * 0.5))
    assert VIEW.states(changed)["n0"] == NodeState(pool=0, inside=rounded_down(0.5))


def test_a_node_whose_link_stands_still_is_unreachable() -> None:
    name = next(link.name for link in link_graph(CLUSTER) if link.name.startswith("n1>s"))
    down = START.after(LinkChange(time_s=0.0, link=name, bytes_per_s=0.0))
    assert list(VIEW.states(down)) == ["n0", "n2", "n3"]
    assert situation_of(VIEW, down).unreachable == {"n1"}


def test_added_latency_starts_from_that_of_the_tier() -> None:
    # The tier's latency is divided over the path: more on one link is more in total.
    name = next(link.name for link in link_graph(CLUSTER) if link.name.startswith("n1>s"))
    own_s = next(link.latency_s for link in link_graph(CLUSTER) if link.name == name)
    changed = START.after(LinkChange(time_s=0.0, link=name, latency_s=own_s + 1e-3))
    assert VIEW.states(changed)["n1"].latency_s == pytest.approx(CLUSTER.tiers[-1].latency_s + 1e-3)


def test_a_cluster_of_equal_nodes_is_the_cluster_itself() -> None:
    same = uniform_cluster(CLUSTER, VIEW.pools[0], 4, NodeState(pool=0))
    assert same.tiers == CLUSTER.tiers
    assert same.devices == CLUSTER.devices


def test_states_scale_the_tier_that_they_are_about() -> None:
    state = NodeState(pool=0, speed=0.5, network=0.25, inside=0.5, latency_s=1.0)
    changed = uniform_cluster(CLUSTER, VIEW.pools[0], 4, state)
    inner, outer = changed.tiers[0], changed.tiers[-1]
    assert inner.bytes_per_s == CLUSTER.tiers[0].bytes_per_s * 0.5
    assert outer.bytes_per_s == CLUSTER.tiers[-1].bytes_per_s * 0.25
    assert (inner.latency_s, outer.latency_s) == (CLUSTER.tiers[0].latency_s, 1.0)
    assert changed.nodes[0].speed == 0.5


@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.99, 0.999999])
def test_rounding_down_loses_at_most_two_percent(share: float) -> None:
    assert share / 1.02 - 1e-12 <= rounded_down(share) <= share * (1 + 1e-9)
    assert rounded_down(rounded_down(share)) == rounded_down(share)


RACKS = """
nodes: [{count: 4, device: A100-80G, devices: 8}]
tiers:
  - {name: NVLink 3, span: node, bandwidth: 300GB/s, latency: 1.9us}
  - {name: rack, span: 16, bandwidth: 25GB/s, latency: 4us, network: true}
  - {name: spine, bandwidth: 12GB/s, latency: 6us, network: true}
"""


def test_links_between_switches_concern_the_nodes_below_them(tmp_path: Path) -> None:
    (tmp_path / "racks.yaml").write_text(RACKS)
    racks = load_cluster(str(tmp_path / "racks.yaml"))
    view = NodeView(racks)
    start = Conditions.at_start(EventTrace(nodes=len(racks.nodes), events=()))
    link = next(link for link in link_graph(racks) if link.source.startswith("s") and link.target[0] == "s")
    halved = LinkChange(time_s=0.0, link=link.name, bytes_per_s=link.capacity.at(0.0) / 2)
    slower = {name for name, state in view.states(start.after(halved)).items() if state.network < 1.0}
    assert slower == {"n0", "n1"}
