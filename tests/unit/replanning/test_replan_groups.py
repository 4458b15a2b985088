"""Nodes in another order, from several racks and sites: tiers are used only where the cluster has them."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from tests.unit.replanning.conftest import Job

from shardwise.cluster import (
    Cluster,
    Conditions,
    EventTrace,
    LinkChange,
    NodeGroups,
    Slowdown,
    load_cluster,
    rounded_down,
)
from shardwise.replanning.arrangement import Arrangement
from shardwise.replanning.situation import Situation, situation_of
from shardwise.search import Question
from shardwise.search.step_times import step_times_s
from shardwise.strategy import Strategy, StrategyTable, complete

RACKS = """
nodes: [{count: 4, device: T4, devices: 2}]
tiers:
  - {name: PCIe, span: node, bandwidth: 12GB/s, latency: 5us}
  - {name: rack, span: 4, bandwidth: 5GB/s, latency: 10us, network: true}
  - {name: WAN, bandwidth: 0.5GB/s, latency: 5ms, network: true}
"""
"""Two racks of two nodes: n0 and n1, n2 and n3."""

SITES = {"east": ("n0", "n1"), "west": ("n2", "n3")}
NATURAL = ("n0", "n1", "n2", "n3")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Job:
    path = tmp_path_factory.mktemp("racks") / "racks.yaml"
    Path(path).write_text(RACKS)
    return Job("opt-350m", load_cluster(str(path)), 32, 512)


def strategies() -> list[Strategy]:
    every: list[dict[str, object]] = [
        {"dp": 8},
        {"dp": 4, "pp": 2, "schedule": "1f1b"},
        {"dp": 2, "pp": 4, "schedule": "1f1b"},
        {"pp": 8, "schedule": "1f1b"},
        {"tp": 2, "dp": 4, "axis_order": "tp-cp-dp-pp"},
    ]
    return [
        complete({"micro_batch_size": 1, **fields}, devices=8, layers=24, experts=None, global_batch_size=32)
        for fields in every
    ]


def step_time_s(given: Job, cluster: Cluster, strategy: Strategy) -> float:
    """Seconds of a step by the search's cost model."""
    problem = Question(model=given.model, cluster=cluster, job=given.job).problem()
    return float(step_times_s(problem, StrategyTable.of([strategy]))[0])


def step_s(given: Job, strategy: Strategy, slots: tuple[str, ...], situation: Situation) -> float:
    shares = (32 // strategy.dp,) * strategy.dp
    found = given.planner.steps.step_s(
        Arrangement(strategy=strategy, slots=slots, microbatches=shares), situation
    )
    assert found is not None
    return found


def without_racks(cluster: Cluster) -> Cluster:
    return replace(cluster, tiers=tuple(tier for tier in cluster.tiers if tier.name != "rack"))


def test_an_order_that_splits_racks_is_predicted_without_them(given: Job) -> None:
    """All 24 orders of the nodes: in 8 of them each rack's two nodes are consecutive (2 orders of racks, 2
    orders within each: 2 * 2 * 2); in the others only the tier within nodes holds.
    """
    situation, with_racks, slower = given.situation(), 0, 0
    for strategy in strategies():
        whole_s, parted_s = (
            step_time_s(given, given.cluster, strategy),
            step_time_s(given, without_racks(given.cluster), strategy),
        )
        slower += parted_s > 1.01 * whole_s
        for slots in permutations(NATURAL):
            has_racks = {slots[0], slots[1]} in ({"n0", "n1"}, {"n2", "n3"})
            with_racks += has_racks
            expected_s = whole_s if has_racks else parted_s
            assert step_s(given, strategy, slots, situation) == pytest.approx(expected_s, rel=1e-11)
    assert with_racks == 8 * len(strategies())
    assert any(
        step_time_s(given, given.cluster, one) < step_time_s(given, without_racks(given.cluster), one)
        for one in strategies()
    )


def test_racks_that_are_ignored_are_noticed(given: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant takes any consecutive nodes for a rack."""
    monkeypatch.setattr(NodeGroups, "changed_spans", lambda self, places, like: ())
    with pytest.raises(AssertionError):
        test_an_order_that_splits_racks_is_predicted_without_them(given)


@pytest.mark.slow
def test_a_replacement_plan_has_the_step_time_of_its_cluster(given: Job) -> None:
    """Whichever node is slow, and by how much: the step time of a decision is no less than that of its
    strategy on a cluster with its nodes in the decision's order.
    """
    running, _ = given.best()
    decisions = set()
    for name in NATURAL:
        for speed in (0.3, 0.9):
            situation = given.situation([Slowdown(time_s=0.0, where=name, speed=speed)])
            found = given.planner.replan(running, situation, horizon_s=24 * 3600.0)
            decisions.add(found.decision)
            strategy, slots = found.arrangement.strategy, found.arrangement.slots
            if len(slots) < 4:
                continue
            has_racks = {slots[0], slots[1]} in ({"n0", "n1"}, {"n2", "n3"})
            cluster = given.cluster if has_racks else without_racks(given.cluster)
            # Nothing slow, equal shares: no slower than the same with a slow node and any shares.
            most = max(found.arrangement.microbatches) * strategy.dp / sum(found.arrangement.microbatches)
            assert found.step_s * most >= step_time_s(given, cluster, strategy) * (1.0 - 1e-9)
    assert decisions - {"keep"}


@pytest.mark.slow
def test_a_decision_for_racks_that_do_not_exist_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same mutant decides for an order that takes longer than it predicts."""
    monkeypatch.setattr(NodeGroups, "changed_spans", lambda self, places, like: ())
    (tmp_path / "racks.yaml").write_text(RACKS)
    own = Job("opt-350m", load_cluster(str(tmp_path / "racks.yaml")), 32, 512)
    with pytest.raises(AssertionError):
        test_a_replacement_plan_has_the_step_time_of_its_cluster(own)


def sites(given: Job, bytes_per_s: float, latency_s: float = 0.0) -> Situation:
    trace = EventTrace(nodes=4, events=(), sites=SITES)
    change = LinkChange(time_s=0.0, sites=("east", "west"), bytes_per_s=bytes_per_s, latency_s=latency_s)
    return situation_of(given.view, Conditions.at_start(trace).after(change), trace.sites)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
def test_a_slow_link_between_sites_slows_only_the_tier_between_them(given: Job, share: float) -> None:
    """The WAN carries 0.5 GB/s for each device, 2 GB/s for the four devices of a site. A share of the link
    between the sites acts as a WAN with that share, and leaves racks unchanged.
    """
    rack_tier, wan = given.cluster.tiers[-2:]
    cards = 2 * wan.bytes_per_s / given.planner.steps.prices.node_bytes_per_s[0]
    # Shares of the cards are rounded down to powers of 1.02; the WAN's own bandwidth is the limit.
    left = min(rounded_down(share * cards) / cards, 1.0)
    slower = replace(wan, bytes_per_s=wan.bytes_per_s * left, flow_bytes_per_s=wan.flow_bytes_per_s * left)
    cluster = replace(given.cluster, tiers=(*given.cluster.tiers[:-1], slower))
    assert cluster.tiers[-2] == rack_tier
    situation = sites(given, share * 4 * wan.bytes_per_s)
    for strategy in strategies():
        expected_s = step_time_s(given, cluster, strategy)
        assert step_s(given, strategy, NATURAL, situation) == pytest.approx(expected_s, rel=1e-11)


def test_a_mutant_that_slows_racks_with_the_link_between_sites_is_noticed(
    given: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NodeGroups, "separate_tiers", lambda self, first, second: 0)
    with pytest.raises(AssertionError):
        test_a_slow_link_between_sites_slows_only_the_tier_between_them(given, 0.1)


def test_transfers_between_sites_take_the_link_between_them(given: Job) -> None:
    """A pipeline of two stages moves from the east to the west: every weight crosses."""
    strategy = complete(
        {"micro_batch_size": 1, "tp": 2, "dp": 2}, devices=4, layers=24, experts=None, global_batch_size=32
    )
    east, west = (
        Arrangement(strategy=strategy, slots=slots, microbatches=(16, 16)) for slots in SITES.values()
    )
    transitions = given.planner.transitions
    fast, slow = (transitions.between(east, west, sites(given, rate)) for rate in (1e12, 1e6))
    crossing = sum(size for link, size in slow.bytes_per_link.items() if link.startswith(("n0>", "n1>")))
    assert crossing > 0.0 and fast.transfer_s < slow.transfer_s
    assert slow.transfer_s == pytest.approx(crossing / 1e6)
