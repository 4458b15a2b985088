"""Nodes that a plan leaves idle are in its question: they may take over after events."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.plans import Plan

SEVEN = ("n0", "n1", "n2", "n4", "n5", "n6", "n7")


@cache
def on_seven_of_eight() -> Plan:
    """Seven replicas on eight nodes of one device: a batch of 28 is 7 x 4, and 8 does not divide it."""
    fields = {"dp": 7, "tp": 1, "pp": 1, "cp": 1}
    return sw.plan(
        "opt-350m", cluster="8x1xV100-32G", seq_len=1024, global_batch_size=28, fix=fields, target="any"
    )


def without_the_idle_node(plan: Plan) -> Plan:
    """The broken twin: as files were that had the used part of the cluster only."""
    return replace(plan, question=replace(plan.question, cluster=None))


def test_a_spare_node_takes_the_place_of_a_lost_one() -> None:
    plan = on_seven_of_eight()
    assert (plan.devices, plan.idle.ranks, plan.requested_cluster.devices) == (7, "7", 8)
    found = sw.replan(plan, events="lost n3")
    # n7 is like n3, so the same strategy runs as fast as before.
    assert found.outcome.arrangement.nodes == SEVEN and found.decision == "patch"
    assert found.step_time_s == pytest.approx(plan.step_time_s, rel=1e-12)
    assert found.cluster == plan.requested_cluster and found.idle.devices == 0  # n3 cannot be used
    broken = sw.replan(without_the_idle_node(plan), events="lost n3")
    # six nodes: 28 sequences are at best 5 and 4 on each, five micro-batches of one against four
    assert len(broken.outcome.arrangement.nodes) <= 6 and broken.step_time_s > 1.1 * plan.step_time_s


def test_the_decision_as_a_plan_has_the_whole_cluster_too(tmp_path: Path) -> None:
    first = str(tmp_path / "first.yaml")
    found = sw.replan(on_seven_of_eight(), events="lost n3", savable=True)
    assert found.plan.idle.ranks == "3" and found.plan.for_trace is not None
    assert found.plan.for_trace.nodes == SEVEN
    found.plan.save(first)
    assert sw.load(first).requested_cluster == on_seven_of_eight().requested_cluster
    assert sw.check(first).ok
    # n3 is back when n4 is lost: nodes keep their numbers in the whole cluster
    again = sw.replan(first, events="lost n4", savable=True)
    assert sorted(again.outcome.arrangement.nodes) == ["n0", "n1", "n2", "n3", "n5", "n6", "n7"]


def test_a_plan_on_all_nodes_has_no_other_cluster() -> None:
    plan = sw.plan(
        "opt-350m", cluster="2x1xV100-32G", seq_len=1024, global_batch_size=4, use_all=True, target="any"
    )
    assert plan.question.cluster is None and plan.requested_cluster == plan.cluster
    found = sw.replan(plan, events="slow n1 0.5", savable=True)
    assert found.cluster == plan.cluster


def test_another_cluster_may_still_be_named() -> None:
    plan = on_seven_of_eight()
    named = sw.replan(plan, cluster="7x1xV100-32G", events="lost n3")
    assert len(named.cluster.nodes) == 7 and len(named.outcome.arrangement.nodes) <= 6
    with pytest.raises(ConfigError, match="inter_node: needs cluster"):
        sw.replan(plan, events="lost n3", inter_node="100Gb/s")


def test_other_questions_are_about_the_whole_cluster() -> None:
    plan = on_seven_of_eight()
    assert plan.what_if(nodes="2x").question.cluster.name.endswith("16 devices of 8x1xV100-32G")
    fixed = {"dp": 4, "tp": 2}
    pinned = plan.explain(fixed)
    assert (pinned.after.strategy.dp, pinned.after.strategy.tp) == (4, 2)  # eight devices
    with pytest.raises(sw.Infeasible):
        without_the_idle_node(plan).explain(fixed)


def test_explanations_keep_the_objective_and_all_devices() -> None:
    plan = on_seven_of_eight()

    def with_question(**changes: Any) -> Plan:
        return replace(plan, question=replace(plan.question, fixed={}, **changes))

    # Fewer devices are slower and fewer: the objective decides which comes first.
    fewest = with_question(objective="devices").explain({"pp": 1}).question
    fastest = with_question().explain({"pp": 1}).question
    assert fewest.objective == "devices" and fewest.cluster.devices < fastest.cluster.devices
    assert with_question(use_all=True).explain({"pp": 1}).question.cluster.devices == 8
