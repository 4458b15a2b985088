"""Decisions with measured links: the best plan on the links as they are, among those that the target runs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from shardwise.cluster import NodeState, link_graph, load_cluster, pools_of, rounded_down, uniform_cluster
from shardwise.model import model_from_config
from shardwise.plans import Plan
from shardwise.replanning import KEEP, Costs, LinkAwarePlanner
from shardwise.replanning.planner import MIGRATE
from shardwise.search import Question, plan, plan_of_strategy
from shardwise.strategy import Job, target_of

TARGET = target_of("shardwise")
MODEL = {"layers": 4, "hidden": 256, "ffn": 1024, "heads": 4, "vocab": 512, "seq_len": 128}
COSTS = Costs(regroup_s=2.0, restart_s=2.0)
LONG_S = 1e6


@cache
def running() -> Plan:
    """The best plan on two hosts with fast cards."""
    cluster = load_cluster("2x1xcpu", inter_node="640Mb/s")
    model = model_from_config(MODEL, name="small")
    job = Job(seq_len=128, global_batch_size=16, dtype="fp32")
    answer = plan(Question(model=model, cluster=cluster, job=job, axes=TARGET.axes))
    return plan_of_strategy(model, cluster, job, answer.best.strategy)


def rates(share: float) -> dict[str, float]:
    links = [link for link in link_graph(running().cluster) if {link.source[0], link.target[0]} == {"n", "s"}]
    assert len(links) == 4
    return {link.name: share * link.capacity.at(0.0) for link in links}


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.02, 0.1, 0.4])
def test_the_decision_is_the_best_on_the_links_as_they_are(share: float) -> None:
    """The search on a cluster with these links finds nothing faster over a long horizon."""
    now = running()
    found = LinkAwarePlanner(now, TARGET).decide(
        now.best.strategy, rates(share), costs=COSTS, horizon_s=LONG_S
    )
    state = NodeState(pool=0, network=rounded_down(share))
    there = uniform_cluster(now.cluster, pools_of(now.cluster)[0], 2, state)
    best = plan(Question(model=now.model, cluster=there, job=now.job, axes=TARGET.axes, use_all=True)).best
    assert found.decision == MIGRATE
    assert found.step_s == pytest.approx(best.step_time_s, rel=1e-9)
    assert found.keep_step_s == pytest.approx(
        plan_of_strategy(now.model, there, now.job, now.best.strategy).best.step_time_s, rel=1e-9
    )


def test_the_plan_is_kept_without_a_change_or_with_little_time() -> None:
    present, strategy = LinkAwarePlanner(running(), TARGET), running().best.strategy
    assert present.decide(strategy, {}, costs=COSTS, horizon_s=LONG_S).decision == KEEP
    assert present.decide(strategy, rates(0.1), costs=COSTS, horizon_s=1.0).decision == KEEP


@pytest.mark.slow
def test_decisions_contain_only_plans_that_the_target_runs() -> None:
    """A target without pipelines: the same change of the links gives another decision."""
    narrow = replace(TARGET, axes={**TARGET.axes, "pp": (1,)})
    strategy = running().best.strategy
    free, bound = (
        LinkAwarePlanner(running(), target)
        .decide(strategy, rates(0.1), costs=COSTS, horizon_s=LONG_S)
        .arrangement.strategy
        for target in (TARGET, narrow)
    )
    assert free.pp == 2 and bound.pp == 1
