"""The event engine on graphs small enough to work out by hand."""

from __future__ import annotations

import pytest

from shardwise.cluster import Capacity
from shardwise.errors import InternalError
from shardwise.schedule import generate
from shardwise.sim import COMPUTE, Durations, Timeline, activation_bytes, simulate, task_graph
from shardwise.sim.engine import FlowLink, Speed, TaskGraphBuilder, max_min_rates
from shardwise.sim.schedule_tasks import Transfers


def finishes(builder: TaskGraphBuilder) -> list[float]:
    return [float(time) for time in simulate(builder.build()).finish_s]


def test_a_stream_runs_its_tasks_in_order() -> None:
    # b was added before c, so c waits for it although it could start at 0: a 0-2, b 5-6 (after d, 0-5), c
    # 6-7.
    builder = TaskGraphBuilder()
    builder.add_task("a", 2, rank=0, stream=COMPUTE)
    d = builder.add_task("d", 5, rank=1, stream=COMPUTE)
    builder.add_task("b", 1, rank=0, stream=COMPUTE, after=[d])
    builder.add_task("c", 1, rank=0, stream=COMPUTE)
    timeline = simulate(builder.build())
    assert timeline.start_s.tolist() == [0, 0, 5, 6]
    assert timeline.finish_s.tolist() == [2, 5, 6, 7]
    assert timeline.makespan_s == 7
    assert timeline.events == 8  # four tasks start and end


def test_an_empty_graph_takes_no_time() -> None:
    assert simulate(TaskGraphBuilder().build()).makespan_s == 0.0


def test_one_flow_pays_latency_and_then_its_bytes() -> None:
    builder = TaskGraphBuilder()
    wide, narrow = builder.add_link("wide", 100.0), builder.add_link("narrow", 10.0)
    builder.add_flow("f", 50.0, [wide, narrow], latency_s=0.25)
    assert finishes(builder) == [5.25]  # 0.25 + 50 / 10


def test_a_flow_without_bytes_takes_its_latency() -> None:
    builder = TaskGraphBuilder()
    builder.add_flow("f", 0.0, [builder.add_link("l", 10.0)], latency_s=0.25)
    builder.add_flow("g", 0.0, [])
    assert finishes(builder) == [0.25, 0.0]


def test_two_flows_share_a_link_and_the_longer_one_speeds_up() -> None:
    # Both at 5 until f has moved its 10 at t = 2; g has 20 left, alone at 10: 4.
    builder = TaskGraphBuilder()
    link = builder.add_link("l", 10.0)
    builder.add_flow("f", 10.0, [link])
    builder.add_flow("g", 30.0, [link])
    timeline = simulate(builder.build(), record_rates=True)
    assert timeline.finish_s.tolist() == [2.0, 4.0]
    assert timeline.rates == ((0, 0.0, 5.0), (1, 0.0, 5.0), (1, 2.0, 10.0))
    assert timeline.events == 5  # two starts, two ends, one change of rate during a flow


def test_a_flow_joins_after_its_latency() -> None:
    # f alone at 10 until t = 1 (10 of 20 moved), then both at 5: f ends at 3, g (30) has 20 left: 3 + 2 = 5.
    builder = TaskGraphBuilder()
    link = builder.add_link("l", 10.0)
    builder.add_flow("f", 20.0, [link])
    builder.add_flow("g", 30.0, [link], latency_s=1.0)
    assert finishes(builder) == [3.0, 5.0]


def test_a_cap_leaves_bandwidth_to_others() -> None:
    # f at 2 for 5 s; g at 8 for 5 s (40 of 60), then alone at 10 for 2 s.
    builder = TaskGraphBuilder()
    link = builder.add_link("l", 10.0)
    builder.add_flow("f", 10.0, [link], cap_bytes_per_s=2.0)
    builder.add_flow("g", 60.0, [link])
    assert finishes(builder) == [5.0, 7.0]


def test_a_link_crossed_twice_carries_the_bytes_twice() -> None:
    # A ring that leaves a node and comes back over the same uplink: rate 10 / 2.
    builder = TaskGraphBuilder()
    up, down = builder.add_link("up", 10.0), builder.add_link("down", 100.0)
    builder.add_flow("ring", 20.0, [up, down, up])
    assert finishes(builder) == [4.0]


def test_capacity_changes_under_way() -> None:
    # 10/s to t = 2 (20 moved), 0 to t = 5, 4/s to t = 10 (20 moved), then 20/s for the last 40: 12.
    builder = TaskGraphBuilder()
    link = builder.add_link("l", Capacity((0.0, 2.0, 5.0, 10.0, 99.0), (10.0, 0.0, 4.0, 20.0, 1.0)))
    builder.add_flow("f", 80.0, [link])
    assert finishes(builder) == [12.0]


def test_a_link_that_slows_down_delays_flows_that_it_did_not_limit_before() -> None:
    # wide limits no flow until it falls to 6 at t = 1: f and g then share it at 3 each. f: 5 + 3 * 5 = 20 ->
    # 6; g: 5 of 20 by t = 1, 15 more at 3 -> 6.
    builder = TaskGraphBuilder()
    wide = builder.add_link("wide", Capacity((0.0, 1.0), (100.0, 6.0)))
    builder.add_flow("f", 20.0, [builder.add_link("a", 5.0), wide])
    builder.add_flow("g", 20.0, [builder.add_link("b", 5.0), wide])
    assert finishes(builder) == [6.0, 6.0]


def test_a_slower_neighbour_frees_bandwidth_that_it_cannot_use() -> None:
    # f and g share l (10) at 5 each. At t = 1 f's own link falls to 1: g gets 9. f 5 + 1 * 5 -> 6; g 5 + 9 *
    # 5 -> 6.
    builder = TaskGraphBuilder()
    link = builder.add_link("l", 10.0)
    own = builder.add_link("own", Capacity((0.0, 1.0), (50.0, 1.0)))
    builder.add_flow("f", 10.0, [link, own])
    builder.add_flow("g", 50.0, [link])
    assert finishes(builder) == [6.0, 6.0]


def test_a_device_slows_and_stands_still() -> None:
    # 10 s of work: 4 done by t = 4, half speed to t = 8 (2 more), still to t = 10, then double: 4 / 2 = 2 ->
    # 12.
    speed = Speed((0.0, 4.0, 8.0, 10.0), (1.0, 0.5, 0.0, 2.0))
    builder = TaskGraphBuilder()
    builder.set_speed(0, COMPUTE, speed)
    builder.add_task("a", 10.0, rank=0, stream=COMPUTE)
    builder.add_task("b", 2.0, rank=0, stream=COMPUTE)  # 12 -> 13, at double speed
    builder.add_task("other", 10.0, rank=1, stream=COMPUTE)
    assert finishes(builder) == [12.0, 13.0, 10.0]
    assert speed.finish_s(8.5, 0.0) == 8.5


def test_a_graph_that_never_ends_is_reported() -> None:
    dead = TaskGraphBuilder()
    dead.add_flow("f", 1.0, [dead.add_link("l", Capacity((0.0, 3.0), (0.1, 0.0)))])
    with pytest.raises(InternalError, match="never ends: 1 tasks are left, first f"):
        simulate(dead.build())
    stopped = TaskGraphBuilder()
    stopped.set_speed(0, COMPUTE, Speed((0.0, 1.0), (1.0, 0.0)))
    stopped.add_task("t", 2.0, rank=0, stream=COMPUTE)
    with pytest.raises(InternalError, match="never ends"):
        simulate(stopped.build())


def test_an_invalid_task_graph_is_refused() -> None:
    builder = TaskGraphBuilder()
    with pytest.raises(InternalError, match="does not exist yet"):
        builder.add_task("a", 1.0, after=[3])
    with pytest.raises(InternalError, match="seconds"):
        builder.add_task("a", float("nan"))
    with pytest.raises(InternalError, match="bytes"):
        builder.add_flow("f", -1.0, [])
    with pytest.raises(InternalError, match="neither a link nor a cap"):
        builder.add_flow("f", 1.0, [])
    with pytest.raises(InternalError, match="capacity"):
        builder.add_link("l", -1.0)


def test_max_min_rates_by_hand() -> None:
    # Link 0 (10) has flows 0, 1, 2; link 1 (2) has flow 2; link 2 (100) has flow 1. Flow 2 gets 2, the others
    # (10 - 2) / 2.
    routes = [((0, 1),), ((0, 1), (2, 1)), ((0, 1), (1, 1))]
    assert max_min_rates(routes, [10.0, 2.0, 100.0]) == [4.0, 4.0, 2.0]


def shared_step() -> Timeline:
    """Two ranks whose sends in both directions share one slow link."""
    durations = Durations.of(stages=2, forward_s=1, backward_s=1, hop_forward_s=0.5, hop_backward_s=0.5)
    transfers = Transfers(
        links=(FlowLink("shared", Capacity.constant(4.0)),),
        forward_bytes=[4.0],
        backward_bytes=[8.0],
        forward_routes=[[0]],
        backward_routes=[[0]],
    )
    return simulate(
        task_graph(generate("gpipe", pp=2, microbatches=2, vpp=1), durations, transfers=transfers)
    )


def test_hops_over_a_shared_link() -> None:
    # 0F0 0-1, 0F1 1-2. Send F0 on the link from 1.5 to 2.5, send F1 from 2.5 to 3.5: 1F0 2.5-3.5, 1F1
    # 3.5-4.5, 1B0 4.5-5.5, 1B1 5.5-6.5. B0 (8 bytes) on the link from 6.0, alone at 4 to 7.0 (4 left), then
    # shares with B1 at 2 each: B0 arrives at 9.0 (B1 has 4 left, at 4): B1 arrives at 10.0. 0B0 9-10, 0B1
    # 10-11.
    timeline = shared_step()
    times = dict(zip(timeline.graph.names, timeline.finish_s.tolist(), strict=True))
    assert times["1F0"] == 3.5
    assert times["1B1"] == 6.5
    assert times["0B0"] == 10.0
    assert timeline.makespan_s == 11.0


def test_equal_runs_have_equal_hashes() -> None:
    first, second = shared_step(), shared_step()
    assert first.trace_hash == second.trace_hash
    builder = TaskGraphBuilder()
    builder.add_task("a", 1.0)
    other = TaskGraphBuilder()
    other.add_task("a", 1.0000000000000002)
    assert simulate(builder.build()).trace_hash != simulate(other.build()).trace_hash


def test_activations_in_flight_follow_the_timeline() -> None:
    # Rank 0 of 1F1B with two micro-batches has one in flight from 0, two from 1; the first ends at 4, the
    # second at 6.
    # 0F0 0-1, 0F1 1-2, 1F0 1-2, 1B0 2-3, 0B0 3-4, 1F1 3-4, 1B1 4-5, 0B1 5-6.
    schedule = generate("1f1b", pp=2, microbatches=2, vpp=1)
    timeline = simulate(task_graph(schedule, Durations.of(stages=2, forward_s=1, backward_s=1)))
    (when, in_flight_at), (when_last, in_flight_last) = activation_bytes(schedule, timeline, [10.0, 7.0])
    assert when.tolist() == [0, 1, 4, 6]
    assert in_flight_at.tolist() == [10, 20, 10, 0]
    assert when_last.tolist() == [1, 3, 5]
    assert in_flight_last.tolist() == [7, 7, 0]
    other = generate("1f1b", pp=2, microbatches=3, vpp=1)
    with pytest.raises(InternalError, match="another schedule"):
        activation_bytes(other, timeline, [1.0, 1.0])
