"""Plans for a trace: by brute force over few strategies, and by hand where the policies must differ."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations, pairwise, permutations

import pytest
from tests.unit.replanning.conftest import Job, job

from shardwise.cluster import (
    EventTrace,
    LinkChange,
    NodeJoined,
    NodeLost,
    Slowdown,
    cluster_of_nodes,
    link_graph,
)
from shardwise.cluster.events import ClusterEvent
from shardwise.errors import Infeasible
from shardwise.replanning import (
    AllowedSpace,
    AnyArrangement,
    Arrangement,
    TracePicks,
    picks_for_trace,
    trace_plan,
)
from shardwise.replanning.trace_plan import length_of
from shardwise.strategy import Strategy, Target, complete, target_of
from shardwise.strategy.target import Condition, Limit, Product

SMALL = ("opt-350m", "3x2xT4", 24)
FEW: Mapping[str, int | str | bool] = {
    "tp": 1, "vpp": 1, "schedule": "1f1b", "recompute": "none", "sequence_parallel": False,
    "micro_batch_size": 1, "param_shard": 1, "grad_shard": 1,
}  # fmt: skip


def picked(given: Job, *events: ClusterEvent, fixed: Mapping[str, int | str | bool] = FEW) -> TracePicks:
    trace = EventTrace(nodes=len(given.cluster.nodes), events=events)
    return picks_for_trace(given.mixed, trace, AllowedSpace(space="core", fixed=fixed, axes={}))


def few_strategies(given: Job) -> Iterator[Arrangement]:
    """All strategies that `FEW` allows, on every set of nodes in every order."""
    names = [f"n{index}" for index in range(len(given.cluster.nodes))]
    for size in range(1, len(names) + 1):
        for pp in (1, 2, 3, 4, 6):
            dp, rest = divmod(2 * size, pp)
            if rest or 24 % dp:
                continue
            for zero_stage in (0, 1):
                fields = {**FEW, "pp": pp, "zero_stage": zero_stage if dp > 1 else 0}
                del fields["param_shard"], fields["grad_shard"]
                strategy = complete(fields, devices=2 * size, layers=24, experts=None, global_batch_size=24)
                for chosen in combinations(names, size):
                    for slots in permutations(chosen):
                        yield Arrangement(strategy=strategy, slots=slots, microbatches=(24 // dp,) * dp)


def scores(given: Job, arrangement: AnyArrangement, events: tuple[ClusterEvent, ...]) -> dict[str, float]:
    """The scores of the policies, summed instant by instant."""
    trace = EventTrace(nodes=3, events=events)
    times = [0.0, *sorted({event.time_s for event in events}), length_of(trace)]
    rates, steps = [], 0.0
    for start_s, end_s in pairwise(times):
        step_s = given.mixed.step_s(
            arrangement, given.situation(event for event in events if event.time_s <= start_s)
        )
        rates.append(0.0 if step_s is None else 1.0 / step_s)
        steps += rates[-1] * (end_s - start_s)
    return {"now": rates[0], "expected": steps, "worst": min(rates)}


def random_events(given: Job, rng: random.Random) -> tuple[ClusterEvent, ...]:
    """Changes of links and devices; no node leaves, so no state is read again."""
    links = [link for link in link_graph(given.cluster) if link.name.startswith("n") and ">s" in link.name]
    now, events = 0.0, list[ClusterEvent]()
    for _ in range(rng.randint(1, 4)):
        now += rng.uniform(10.0, 1000.0)
        if rng.random() < 0.5:
            events.append(Slowdown(time_s=now, where=f"n{rng.randrange(3)}", speed=rng.uniform(0.2, 1.0)))
        else:
            link = rng.choice(links)
            rate = link.capacity.at(0.0) * rng.choice([1.0, 0.3, 0.03])
            events.append(LinkChange(time_s=now, link=link.name, bytes_per_s=rate))
    return tuple(events)


@pytest.mark.slow
def test_picks_are_those_of_brute_force(pytestconfig: pytest.Config) -> None:
    given = job(*SMALL)
    rng = random.Random(5)
    every = list(few_strategies(given))
    differing = 0
    for _ in range(100 if pytestconfig.getoption("--full") else 6):
        events = random_events(given, rng)
        found = picked(given, *events)
        counted = [scores(given, one, events) for one in every]
        for pick in found.picks:
            best = max(one[pick.policy] for one in counted)
            mine = scores(given, pick.arrangement, events)[pick.policy]
            assert mine == pytest.approx(best, rel=1e-9), (pick.policy, events)
            assert best <= mine / (1.0 - pick.gap) * (1.0 + 1e-9)
        differing += len({pick.arrangement for pick in found.picks}) > 1
    assert differing >= 1


@pytest.mark.slow
def test_a_trace_without_events_is_the_best_plan_with_no_gap() -> None:
    given = job(*SMALL)
    best, step_s = given.best()
    found = picks_for_trace(
        given.mixed, EventTrace(nodes=3, events=()), AllowedSpace(space="default", fixed={}, axes={})
    )
    assert {pick.policy for pick in found.picks} == {"now", "expected", "worst"}
    for pick in found.picks:
        assert pick.now_step_s == pick.worst_step_s == pytest.approx(step_s, rel=1e-9)
        assert pick.gap == pytest.approx(0.0, abs=1e-9)
        assert len(pick.arrangement.nodes) == len(best.nodes)


@pytest.mark.slow
def test_policies_differ_where_a_node_is_often_gone() -> None:
    # n1 is present for 100 s of 2,400 s: now, all three nodes are best; in expectation and in the worst case,
    # two are.
    given = job("opt-350m", "3x2xT4", 48)
    events = (NodeLost(time_s=100.0, node="n1"), NodeJoined(time_s=2200.0, node="n1"))
    found = picked(given, *events, fixed={})
    assert found.length_s == pytest.approx(2200.0 + 2200.0 / 2)
    assert set(found.pick("now").arrangement.nodes) == {"n0", "n1", "n2"}
    for policy in ("expected", "worst"):
        assert set(found.pick(policy).arrangement.nodes) == {"n0", "n2"}
    assert found.pick("now").worst_step_s is None and found.pick("worst").worst_step_s is not None
    assert found.pick("expected").steps > found.pick("now").steps


def test_bounds_hold_for_policies_that_replan() -> None:
    """Even the best strategy of every instant makes no more steps on these nodes than the bound."""
    given = job(*SMALL)
    events = (Slowdown(time_s=50.0, where="n0", speed=0.3), Slowdown(time_s=500.0, where="n0", speed=1.0))
    found = picked(given, *events)
    every = list(few_strategies(given))
    three = [one for one in every if len(one.slots) == 3]
    for pick in found.picks:
        most = max(scores(given, one, events)[pick.policy] for one in three)
        mine = scores(given, pick.arrangement, events)[pick.policy]
        assert most <= mine / (1.0 - pick.gap) * (1.0 + 1e-9)


def test_nothing_at_first_is_infeasible_now_only() -> None:
    given = job(*SMALL)
    events: tuple[ClusterEvent, ...] = tuple(
        kind(time_s=time_s, node=f"n{index}")
        for kind, time_s in ((NodeLost, 0.0), (NodeJoined, 6000.0))
        for index in range(3)
    )
    found = picked(given, *events)
    assert len(found.pick("expected").arrangement.nodes) == 3
    with pytest.raises(Infeasible, match="at first"):
        found.pick("now")
    with pytest.raises(Infeasible, match="at any time"):
        picked(given, *events[:3])


def test_a_part_of_a_cluster_is_its_nodes() -> None:
    cluster = job(*SMALL).cluster
    assert cluster_of_nodes(cluster, [2, 0, 1]) is cluster
    part = cluster_of_nodes(cluster, [2, 0])
    assert len(part.nodes) == 2 and part.devices == 4 and part.tiers[-1].span == 4


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [16, 1])
def test_policies_that_a_target_does_not_carry_out_are_not_picked(
    monkeypatch: pytest.MonkeyPatch, kinds: int
) -> None:
    """With a forbidden field, and with a forbidden combination, where other plans exist and where none does;
    the mutant that skips the check of answers is caught.
    """
    given, own = job(*SMALL), target_of("shardwise")
    monkeypatch.setattr(trace_plan, "STRATEGIES_PER_SEARCH", kinds)

    def strategies(target: Target | None) -> set[Strategy]:
        allowed_space = AllowedSpace(space="core", fixed={}, axes={}, target=target)
        found = picks_for_trace(given.mixed, EventTrace(nodes=3, events=()), allowed_space)
        return {one.arrangement.strategy for one in found.picks if isinstance(one.arrangement, Arrangement)}

    (free,) = strategies(None)
    assert free.dp == 4 and free.micro_batch_size == 6
    single = replace(own, axes={"micro_batch_size": (1,)}, limits=())
    assert {one.micro_batch_size for one in strategies(single)} == {1}
    over_two = Condition(left=Product(fields=("dp",)), above=2)
    always = Condition(left=Product(fields=("recompute",)), values=("none", "selective", "full"))
    limit = Limit(field="dp", where=(over_two, always), allowed="at most 2")
    assert limit.level is None  # the search itself does not check it
    limited = replace(own, axes={}, default_axes={}, limits=(limit,))
    assert {one.dp for one in strategies(limited)} == {2}
    monkeypatch.setattr(Target, "broken_limit", lambda target, strategy: None)
    assert strategies(limited) == {free}
