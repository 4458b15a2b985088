"""Event traces in the engine: transfers and work through changes, worked out by hand."""

from __future__ import annotations

import pytest

from shardwise.cluster import (
    DeviceLost,
    EventTrace,
    LinkChange,
    NodeJoined,
    NodeLost,
    Slowdown,
    generate_events,
    load_cluster,
    route,
)
from shardwise.cluster.events import ClusterEvent
from shardwise.sim import COMPUTE, Timeline, simulate
from shardwise.sim.engine import TaskGraphBuilder
from shardwise.sim.event_traces import links_over_time, speeds_over_time

CLUSTER = load_cluster("3x2xT4")
GB = 1e9


def transfer(nbytes: float, *events: ClusterEvent) -> Timeline:
    """A transfer from the first device of n0 to the first of n1."""
    builder = TaskGraphBuilder()
    links = links_over_time(CLUSTER, EventTrace(nodes=3, events=events))
    number = {link.name: builder.add_link(link.name, link.capacity) for link in links}
    builder.add_flow("transfer", nbytes, [number[name] for name in route(CLUSTER, 0, 2)])
    return simulate(builder.build())


def work(seconds: float, rank: int, *events: ClusterEvent, absent: frozenset[str] = frozenset()) -> float:
    """End time of a task on a device; its duration is for nominal speed."""
    builder = TaskGraphBuilder()
    trace = EventTrace(nodes=3, events=events, absent=absent)
    for device, speed in speeds_over_time(CLUSTER, trace).items():
        builder.set_speed(device, COMPUTE, speed)
    builder.add_task("work", seconds, rank=rank, stream=COMPUTE)
    return simulate(builder.build()).makespan_s


def narrowed(time_s: float, gb_per_s: float) -> LinkChange:
    name = next(name for name in route(CLUSTER, 0, 2) if name.startswith("n0>"))
    return LinkChange(time_s=time_s, link=name, bytes_per_s=gb_per_s * GB)


def test_a_transfer_half_at_one_rate_half_at_another() -> None:
    # At 1 GB/s for 2 s, then at 0.5 GB/s: 4 GB take 2 + 2 / 0.5 = 6 s.
    found = transfer(4 * GB, narrowed(0.0, 1.0), narrowed(2.0, 0.5))
    assert found.makespan_s == pytest.approx(6.0, rel=1e-12)
    # Down from 3 s to 10 s during the transfer: 2 GB by then 2.5, 1.5 GB left at 0.5 GB/s: 13 s.
    stood = transfer(4 * GB, narrowed(0.0, 1.0), narrowed(2.0, 0.5), narrowed(3.0, 0.0), narrowed(10.0, 0.5))
    assert stood.makespan_s == pytest.approx(13.0, rel=1e-12)


def test_changes_after_the_end_change_nothing() -> None:
    found = transfer(1 * GB, narrowed(0.0, 1.0), narrowed(2.0, 0.5))
    assert found.makespan_s == pytest.approx(1.0, rel=1e-12)


def test_a_slow_device_on_a_slow_node_is_slower_still() -> None:
    # 1 s at full speed, 1 s at a half, then at a quarter: 4 - 1 - 0.5 = 2.5 left take 10 s: 12 s.
    slow = (Slowdown(time_s=1.0, where="n1", speed=0.5), Slowdown(time_s=2.0, where="d2", speed=0.5))
    assert work(4.0, 2, *slow) == pytest.approx(12.0, rel=1e-12)
    # The other device of the node stays at half speed: 1 + 3 / 0.5 = 7 s; one of another node at its own: 4
    # s.
    assert work(4.0, 3, *slow) == pytest.approx(7.0, rel=1e-12)
    assert work(4.0, 0, *slow) == pytest.approx(4.0, rel=1e-12)


def test_an_absent_node_computes_nothing() -> None:
    away = (NodeLost(time_s=1.0, node="n2"), NodeJoined(time_s=5.0, node="n2"))
    assert work(3.0, 4, *away) == pytest.approx(7.0, rel=1e-12)
    joins = (NodeJoined(time_s=5.0, node="n2"),)
    assert work(3.0, 4, *joins, absent=frozenset({"n2"})) == pytest.approx(8.0, rel=1e-12)


def test_an_absent_node_neither_sends_nor_receives() -> None:
    """1 GB of 4 at 1 GB/s, 10 s absent, the other 3: 14 s; transfers of another node do not change."""
    away = (NodeLost(time_s=1.0, node="n1"), NodeJoined(time_s=11.0, node="n1"))
    assert transfer(4 * GB, narrowed(0.0, 1.0), *away).makespan_s == pytest.approx(14.0, rel=1e-12)
    other = (NodeLost(time_s=1.0, node="n2"), NodeJoined(time_s=11.0, node="n2"))
    assert transfer(4 * GB, narrowed(0.0, 1.0), *other).makespan_s == pytest.approx(4.0, rel=1e-12)


def test_a_node_that_joins_is_as_new() -> None:
    """At half speed for 2 s, absent for 2, and at its nominal speed again: 1 + 2 of 3 s by 6 s."""
    events = (
        Slowdown(time_s=0.0, where="n2", speed=0.5), NodeLost(time_s=2.0, node="n2"),
        NodeJoined(time_s=4.0, node="n2"),
    )  # fmt: skip
    assert work(3.0, 4, *events) == pytest.approx(6.0, rel=1e-12)


def test_a_lost_device_is_away_until_its_node_joins() -> None:
    """d2 of n1 is at half speed, lost at 1 s, and new at 4 s, when the node has left and come back."""
    events = (
        Slowdown(time_s=0.0, where="d2", speed=0.5), DeviceLost(time_s=1.0, device="d2"),
        NodeLost(time_s=3.0, node="n1"), NodeJoined(time_s=4.0, node="n1"),
    )  # fmt: skip
    # 0.5 of 3 s by 1 s, the other 2.5 from 4 s on: 6.5 s. d3 of the same node is absent for 1 s: 4.5 s.
    assert work(3.0, 2, *events) == pytest.approx(6.5, rel=1e-12)
    assert work(3.5, 3, *events) == pytest.approx(4.5, rel=1e-12)
    # 1 GB of 4 at 1 GB/s to d2, 3 s absent, the other 3: 7 s.
    assert transfer(4 * GB, narrowed(0.0, 1.0), *events).makespan_s == pytest.approx(7.0, rel=1e-12)


def test_the_same_trace_gives_the_same_hash() -> None:
    events = generate_events(CLUSTER, "bursty", length_s=86400.0, seed=5).events
    other = generate_events(CLUSTER, "bursty", length_s=86400.0, seed=6).events
    hashes = {transfer(1e13, *events).trace_hash for _ in range(3)}
    assert len(hashes) == 1
    assert transfer(1e13, *other).trace_hash not in hashes
