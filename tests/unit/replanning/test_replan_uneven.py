"""Decisions for uneven plans: never worse than no change, and a plan wherever one exists."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache, cached_property
from itertools import combinations, product

import pytest
from tests.property.uneven_reference import least_s

from shardwise.cluster import (
    Cluster,
    Conditions,
    EventTrace,
    NodeLost,
    NodeView,
    Notice,
    Slowdown,
    cluster_of_nodes,
    current_cluster,
    load_cluster,
    pools_of,
)
from shardwise.cluster.events import ClusterEvent
from shardwise.errors import Infeasible
from shardwise.model import model_from_config
from shardwise.plans import Layout, Pipeline, Stage
from shardwise.replanning import (
    AnyArrangement,
    Arrangement,
    Costs,
    Decision,
    Prices,
    mixed_planner_of,
    planner_of,
)
from shardwise.replanning.situation import Situation, situation_of
from shardwise.replanning.transition import unit_elements
from shardwise.replanning.uneven import UnevenArrangement
from shardwise.search import Question, UnevenSpace, best_uneven
from shardwise.search.hetero import predict_record
from shardwise.strategy import RECOMPUTES, Job

HOUR_S = 3600.0
MIXED = "1x2xT4+3x1xRTX3090"
PAIR = "1x1xV100-32G+1x1xV100-16G"


class Mixed:
    """A small model on a mixed cluster, with its best uneven plan."""

    def __init__(self, cluster: str, margin: float, layers: int) -> None:
        config = {
            "model_type": "gpt2", "n_embd": 1024, "n_layer": layers, "n_head": 8, "n_positions": 512,
            "vocab_size": 1000,
        }  # fmt: skip
        whole = load_cluster(cluster, inter_node="200Gb/s")
        # Without offload, so that little memory is too little.
        nodes = tuple(replace(node, host_memory_bytes=1e8) for node in whole.nodes)
        self.cluster = replace(whole, nodes=nodes)
        self.model = model_from_config(config, name="small")
        self.job = Job(seq_len=512, global_batch_size=12, dtype="fp16", memory_margin=margin)
        self.planner = mixed_planner_of(planner_of(Prices(self.model, self.cluster, self.job), Costs()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"n{index}" for index in range(len(self.cluster.nodes)))

    @cached_property
    def running(self) -> UnevenArrangement:
        result = best_uneven(self.question()).result
        assert result is not None
        return UnevenArrangement(result=result, nodes=self.names)

    def question(self) -> Question:
        return Question(model=self.model, cluster=self.cluster, job=self.job)

    def replan(
        self,
        running: UnevenArrangement,
        *events: ClusterEvent,
        saved: tuple[str, ...] = (),
        horizon_s: float = HOUR_S,
    ) -> Decision[AnyArrangement]:
        situation = self.situation(*events)
        return self.planner.replan(running, situation, horizon_s=horizon_s, saved=frozenset(saved))

    def situation(self, *events: ClusterEvent) -> Situation:
        conditions = Conditions.at_start(EventTrace(nodes=len(self.names), events=()))
        for event in events:
            conditions = conditions.after(event)
        return situation_of(NodeView(self.cluster), conditions)


@cache
def mixed(cluster: str, margin: float = 0.05, layers: int = 3) -> Mixed:
    return Mixed(cluster, margin, layers)


def pipeline_over(
    given: Mixed, cluster: Cluster, layers: tuple[int, ...], *, size: int = 1, ways: tuple[str, ...] = ()
) -> UnevenArrangement:
    """One pipeline with a stage on every node of `cluster`, each of one device."""
    result = mixed(PAIR).running.result  # the rest of it does not matter
    names = {replace(pool.node, name=""): pool.name for pool in pools_of(cluster)}
    pools = tuple(names[replace(node, name="")] for node in cluster.nodes)
    stages = tuple(
        Stage(
            devices=1, ranks=f"{rank}", device_class=pool, tp=1, dp=1, layers=(count,), share=1.0,
            recompute=way,
        )
        for rank, (pool, count, way) in enumerate(
            zip(pools, layers, ways or ("none",) * len(layers), strict=True)
        )
    )  # fmt: skip
    batch = given.job.global_batch_size
    pipeline = Pipeline(
        stages=stages, micro_batch_size=size, microbatches=batch // size, rows=batch, makespan_s=1.0
    )
    result = replace(result, layout=Layout(pipelines=(pipeline,)), pools=pools, is_alike=False)
    return UnevenArrangement(result=result, nodes=given.names)


def layers_of(arrangement: UnevenArrangement) -> tuple[int, ...]:
    """Layers of the stages of all pipelines."""
    pipelines = arrangement.result.layout.pipelines
    return tuple(sum(stage.layers) for pipeline in pipelines for stage in pipeline.stages)


@pytest.mark.slow
def test_keeping_a_plan_costs_its_own_step_time() -> None:
    for cluster in (PAIR, MIXED):
        given = mixed(cluster)
        running = given.running
        found = given.replan(running)
        assert found.decision == "keep" and found.transition.seconds == 0.0
        assert found.step_s == pytest.approx(running.result.step_time_s, rel=1e-12)


@pytest.mark.slow
def test_no_decision_makes_fewer_steps_than_keeping() -> None:
    given, rng, seen = mixed(MIXED), random.Random(3), set()
    running = given.running
    for _ in range(6):
        slow = rng.sample(given.names, rng.randint(1, 3))
        events = [Slowdown(time_s=0.0, where=name, speed=rng.uniform(0.1, 1.0)) for name in slow]
        found = given.replan(running, *events, horizon_s=rng.choice([30.0, 90.0, HOUR_S]))
        seen.add(found.decision)
        assert found.steps >= found.keep_steps
        assert found.keep_step_s is not None
        assert found.keep_step_s >= running.result.step_time_s * (1 - 1e-12)
        if isinstance(found.arrangement, UnevenArrangement):
            assert sum(found.arrangement.result.microbatches) == sum(running.result.microbatches) or (
                found.decision == "move"
            )
    assert len(seen) > 1


def test_states_of_a_lost_replica_are_fetched_or_read() -> None:
    """Two pipelines of one stage on a node each: both have all weights and half of the optimizer states. When
    one is lost, its half is lost too, and everything is read from the last checkpoint. With notice, its
    half was saved, and only that is read.
    """
    given = mixed(PAIR)
    running = given.running
    assert [len(pipeline.stages) for pipeline in running.result.layout.pipelines] == [1, 1]
    elements = unit_elements(given.model)[-1]
    planner = given.planner.uniform
    states = planner.transitions._state_bytes * elements
    weights = planner.transitions._weight_bytes * elements
    lost = given.replan(running, NodeLost(time_s=0.0, node="n1"))
    assert sum(lost.transition.bytes_per_link.values()) == pytest.approx(weights + states)
    assert lost.transition.lost_s == planner.transitions.costs.checkpoint_interval_s / 2.0
    events = (Notice(time_s=0.0, node="n1", lost_at_s=1.0), NodeLost(time_s=1.0, node="n1"))
    noticed = given.replan(running, *events, saved=("n1",))
    assert sum(noticed.transition.bytes_per_link.values()) == pytest.approx(states / 2.0)
    assert noticed.transition.lost_s == 0.0
    assert noticed.arrangement.nodes == ("n0",) and noticed.keep_step_s is None


@pytest.mark.slow
def test_layers_leave_a_node_that_is_slow() -> None:
    """A pipeline over two nodes of one device each, one of which becomes slow: the fastest split of all
    layers, and all weights and states of each moved layer.
    """
    given = mixed(PAIR, layers=8)
    running = pipeline_over(given, given.cluster, (4, 4))
    event = Slowdown(time_s=0.0, where="n0", speed=0.25)
    found = given.replan(running, event, horizon_s=90.0)
    assert found.decision == "patch" and isinstance(found.arrangement, UnevenArrangement)
    chosen = layers_of(found.arrangement)
    nodes = current_cluster(given.cluster, given.situation(event).states)
    times_s = {}
    for first in range(1, 8):
        pipeline = pipeline_over(given, nodes, (first, 8 - first)).result
        times_s[first] = predict_record(given.model, nodes, given.job, pipeline).pipeline_s[0]
    assert found.keep_step_s == pytest.approx(times_s[4], rel=1e-12)
    fastest = min(times_s, key=lambda first: times_s[first])
    assert chosen == (fastest, 8 - fastest) and fastest < 4
    assert found.step_s == pytest.approx(times_s[fastest], rel=1e-12)
    planner = given.planner.uniform
    moved = unit_elements(given.model)[5] - unit_elements(given.model)[1 + fastest]
    each = planner.transitions._weight_bytes + planner.transitions._state_bytes
    sent = {link: nbytes for link, nbytes in found.transition.bytes_per_link.items() if nbytes}
    assert sent == {"n0>s0g0": pytest.approx(moved * each), "s0g0>n1": pytest.approx(moved * each)}
    rate = given.cluster.nodes[0].nics * given.cluster.nodes[0].nic_bytes_per_s
    costs = planner.transitions.costs
    assert found.transition.transfer_s == pytest.approx(moved * each / rate, rel=1e-6)
    assert found.transition.seconds == pytest.approx(found.transition.transfer_s + costs.regroup_s)
    # Where there is no time for that, nothing changes.
    assert given.replan(running, event, horizon_s=10.0).decision == "keep"


@pytest.mark.slow
def test_the_remaining_stages_take_the_layers_of_lost_ones() -> None:
    """A pipeline over three nodes loses the one in the middle, with its layers: everything is read from a
    checkpoint, but processes need not restart.
    """
    given = mixed("2x1xV100-32G+1x1xV100-16G", 0.9, layers=8)
    running = pipeline_over(given, given.cluster, (3, 3, 2), size=4)
    event = NodeLost(time_s=0.0, node="n1")
    found = given.replan(running, event)
    assert found.decision == "patch" and isinstance(found.arrangement, UnevenArrangement)
    assert found.arrangement.nodes == ("n0", "n2") and found.keep_step_s is None
    nodes = current_cluster(given.cluster, given.situation(event).states)
    times_s = {}
    for first, ways in product(range(1, 8), product(RECOMPUTES, repeat=2)):
        pipeline = pipeline_over(given, nodes, (first, 8 - first), size=4, ways=ways).result
        again = predict_record(given.model, nodes, given.job, pipeline)
        if again.device_bytes <= again.usable_bytes:
            times_s[first, ways] = again.pipeline_s[0]
    (first, _), least_s = min(times_s.items(), key=lambda one: one[1])
    assert layers_of(found.arrangement) == (first, 8 - first)
    assert found.step_s == pytest.approx(least_s, rel=1e-12)
    costs = given.planner.costs
    assert found.transition.lost_s == costs.checkpoint_interval_s / 2.0
    moved_s = found.transition.transfer_s
    assert found.transition.seconds == pytest.approx(moved_s + costs.regroup_s + found.transition.lost_s)


@pytest.mark.slow
def test_a_feasible_plan_is_found_after_any_loss_of_nodes(full: bool) -> None:
    """All sets of up to three lost nodes, and of all but one. A plan that is found is valid by its record
    alone; where none is, the uneven twin finds none on the remaining nodes either.
    """
    given = mixed("2x2xT4+10x1xV100-16G" if full else "1x2xT4+3x1xV100-16G", 0.92)
    running, infeasible = given.running, 0
    sizes = {1, 2, 3, len(given.names) - 1}
    for lost in (set(some) for size in sizes for some in combinations(given.names, size)):
        left = [place for place, name in enumerate(given.names) if name not in lost]
        part = cluster_of_nodes(given.cluster, left)
        try:
            found = given.replan(running, *(NodeLost(time_s=0.0, node=name) for name in sorted(lost)))
        except Infeasible:
            infeasible += 1
            assert least_s(UnevenSpace(given.model, part, given.job)) == float("inf"), lost
            continue
        assert not lost.intersection(found.arrangement.nodes) and found.steps > 0.0
        if isinstance(found.arrangement, Arrangement):
            continue
        used = cluster_of_nodes(given.cluster, [int(name[1:]) for name in found.arrangement.nodes])
        again = predict_record(given.model, used, given.job, found.arrangement.result)
        assert not again.faults and again.device_bytes <= again.usable_bytes, lost
        assert max(again.pipeline_s) == pytest.approx(found.step_s, rel=1e-12)
    assert infeasible
