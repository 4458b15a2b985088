"""Replays and plans for traces on mixed clusters, where policies can choose uneven plans."""

from __future__ import annotations

import random
from functools import cache

import pytest
from tests.unit.replanning.conftest import trace_at_random

from shardwise.cluster import (
    Cluster,
    Conditions,
    EventTrace,
    NodeJoined,
    NodeLost,
    NodeView,
    Slowdown,
    cluster_of_nodes,
    current_cluster,
    load_cluster,
)
from shardwise.model import Model, model_from_config
from shardwise.replanning import (
    AllowedSpace,
    Arrangement,
    Costs,
    PlansBySize,
    Prices,
    Replay,
    mixed_planner_of,
    picks_for_trace,
    planner_of,
    replay,
)
from shardwise.replanning.mixed_planner import MixedPlanner
from shardwise.replanning.situation import Situation, situation_of
from shardwise.replanning.trace_replay import WAIT
from shardwise.replanning.transition import Transitions
from shardwise.replanning.uneven import UnevenArrangement, rounded
from shardwise.search import Question, best_uneven
from shardwise.search.hetero import predict_record
from shardwise.strategy import Job

HOUR_S = 3600.0
ANY = AllowedSpace(space="default", fixed={}, axes={})


class Mixed:
    """A small model on two or three nodes of several pools, which keeps its estimates and searches."""

    def __init__(self, cluster: str) -> None:
        config = {
            "model_type": "gpt2", "n_embd": 1024, "n_layer": 4, "n_head": 8, "n_positions": 512,
            "vocab_size": 1000,
        }  # fmt: skip
        self.model: Model = model_from_config(config, name="small")
        self.cluster: Cluster = load_cluster(cluster, inter_node="200Gb/s")
        self.job = Job(seq_len=512, global_batch_size=24, dtype="fp16")
        uniform = planner_of(Prices(self.model, self.cluster, self.job), Costs())
        self.planner: MixedPlanner = mixed_planner_of(uniform, PlansBySize)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"n{index}" for index in range(len(self.cluster.nodes)))

    def best(self) -> UnevenArrangement:
        found = best_uneven(Question(model=self.model, cluster=self.cluster, job=self.job)).result
        assert found is not None
        return self.planner.uneven.without_idle_nodes(UnevenArrangement(result=found, nodes=self.names))

    def situation(self, *events: Slowdown | NodeLost | NodeJoined) -> Situation:
        conditions = Conditions.at_start(EventTrace(nodes=len(self.names), events=()))
        for event in events:
            conditions = conditions.after(event)
        return situation_of(NodeView(self.cluster), conditions)

    def replayed(self, trace: EventTrace, start: UnevenArrangement | None, **costs: float) -> Replay:
        uniform = self.planner.uniform
        uniform.transitions = Transitions(uniform.steps.prices, Costs(**costs))
        try:
            return replay(self.planner, trace, end_s=trace.end_s + 600.0, start=start)
        finally:
            uniform.transitions = Transitions(uniform.steps.prices, Costs())


@cache
def mixed(cluster: str = "2x1xT4+1x1xRTX3090") -> Mixed:
    return Mixed(cluster)


@pytest.mark.slow
def test_no_policy_makes_more_steps_than_the_oracle_where_plans_are_uneven(
    pytestconfig: pytest.Config,
) -> None:
    given, rng, uneven = mixed(), random.Random(17), 0
    start = given.best()
    for _ in range(60 if pytestconfig.getoption("--full") else 5):
        trace = trace_at_random(given.cluster, rng, 3.0)
        found = given.replayed(
            trace, start, regroup_s=rng.choice([0.0, 10.0, 60.0]), restart_s=rng.choice([60.0, 300.0]),
            checkpoint_interval_s=rng.choice([0.0, 60.0, 1200.0]),
        )  # fmt: skip
        oracle = found.run("oracle").total_steps
        for run in found.runs:
            assert run.total_steps <= oracle * (1.0 + 1e-9), run.name
        uneven += sum(isinstance(one.arrangement, UnevenArrangement) for one in found.run("adaptive").choices)
    assert uneven > 10


@pytest.mark.slow
def test_a_migration_without_its_cost_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that patches beats an oracle in which every uneven plan costs a restart."""
    given = mixed()
    monkeypatch.setattr(UnevenArrangement, "shape", property(lambda one: one.layout_key))
    events = tuple(
        Slowdown(time_s=600.0 * place, where="n2", speed=0.3 if place % 2 else 1.0) for place in range(1, 9)
    )
    found = given.replayed(EventTrace(nodes=3, events=events), given.best(), regroup_s=1.0, restart_s=500.0)
    assert found.run("adaptive").changes > 0
    assert found.run("adaptive").total_steps > found.run("oracle").total_steps


@pytest.mark.slow
def test_an_uneven_plan_waits_for_its_nodes_and_reads_its_checkpoint() -> None:
    given = mixed()
    start = given.best()
    node = start.nodes[0]
    events = (NodeLost(time_s=1000.0, node=node), NodeJoined(time_s=2000.0, node=node))
    found = given.replayed(EventTrace(nodes=3, events=events), start, checkpoint_interval_s=100.0)
    static = found.run("static")
    assert [one.decision for one in static.choices] == ["keep", WAIT, "keep"]
    reading = given.planner.started(start, given.situation())
    # Half of a checkpoint interval is repeated.
    assert static.choices[2].change_s == pytest.approx(reading.seconds + 50.0)
    step_s = start.result.step_time_s
    assert static.steps[0] == pytest.approx(1000.0 / step_s) and static.steps[1] == 0.0
    assert static.steps[2] == pytest.approx((600.0 - static.choices[2].change_s) / step_s)


@pytest.mark.slow
def test_the_loss_of_an_idle_node_does_not_stop_the_plan() -> None:
    """The plan of a file names all nodes that it was made for; a node without stages may leave."""
    given = mixed()
    best = given.best()
    own = given.planner.uneven.part(best, [0], best.nodes)
    idle = [name for name in given.names if name not in own.nodes]
    start = UnevenArrangement(result=own.result, nodes=(*own.nodes, *idle))
    lost = NodeLost(time_s=1000.0, node=idle[0])
    assert given.planner.step_s(start, given.situation(lost)) is None  # without a change it would wait
    found = given.replayed(EventTrace(nodes=3, events=(lost,)), start)
    assert [one.decision for one in found.run("static").choices] == ["keep", "keep"]


@pytest.mark.slow
def test_the_same_trace_gives_the_same_replay_of_an_uneven_plan() -> None:
    trace = trace_at_random(mixed().cluster, random.Random(4), 1.0)
    first = mixed().replayed(trace, mixed().best())
    fresh = Mixed("2x1xT4+1x1xRTX3090")
    again = fresh.replayed(trace, fresh.best())
    assert [run.choices for run in first.runs] == [run.choices for run in again.runs]


@pytest.mark.slow
def test_a_uniform_plan_moves_to_an_uneven_one_that_is_faster() -> None:
    given = mixed()
    situation = given.situation()
    uniform = given.planner.uniform.replan(None, situation, horizon_s=HOUR_S)
    uneven = given.best()
    assert uneven.result.step_time_s < 0.9 * uniform.step_s
    found = given.planner.replan(uniform.arrangement, situation, horizon_s=24 * HOUR_S)
    assert found.decision == "move" and isinstance(found.arrangement, UnevenArrangement)
    assert found.step_s == pytest.approx(uneven.result.step_time_s, rel=0.02)
    assert found.keep_step_s == pytest.approx(uniform.step_s) and found.steps > found.keep_steps
    # Where there is no time for it, nothing changes.
    assert given.planner.replan(uniform.arrangement, situation, horizon_s=10.0).decision == "keep"


@pytest.mark.slow
def test_a_patch_leaves_out_pipelines_on_slow_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pipeline does at least one micro-batch: with n0 at 0.3 of its speed all wait for it, and without
    it two of the three are faster. The mutant, for which no node is slow, keeps the plan.
    """
    given, event = mixed(), Slowdown(time_s=0.0, where="n0", speed=0.3)
    start, situation = given.best(), given.situation(event)
    assert len(start.result.layout.pipelines) == 3
    monkeypatch.setattr(given.planner.uniform.transitions, "costs", Costs(regroup_s=1.0, restart_s=500.0))
    found = given.planner.replan(start, situation, horizon_s=600.0)
    assert found.decision == "patch" and found.arrangement.nodes == ("n1", "n2")
    assert found.keep_step_s is not None and found.step_s < 0.5 * found.keep_step_s
    monkeypatch.setattr("shardwise.replanning.uneven.is_nominal", lambda state: True)
    assert given.planner.replan(start, situation, horizon_s=600.0).decision == "keep"


def test_identical_nodes_are_swapped_with_all_their_stages() -> None:
    given = mixed()
    start = given.best()
    other = given.planner.swapped(start, "n0", "n1")
    assert isinstance(other, UnevenArrangement) and other.nodes == start.nodes
    assert given.planner.swapped(start, "n0", "n2") is None  # of another pool
    moved, stages = given.planner.uneven.stage_nodes(other), given.planner.uneven.stage_nodes(start)
    there = {"n0": "n1", "n1": "n0", "n2": "n2"}
    assert moved == [[there[name] for name in names] for names in stages] != stages
    slow = [given.situation(Slowdown(time_s=0.0, where=name, speed=0.5)) for name in ("n0", "n1")]
    times = [[given.planner.step_s(one, each) for each in slow] for one in (start, other)]
    assert times[1] == pytest.approx(times[0][::-1], rel=1e-12)


@pytest.mark.slow
def test_the_report_equals_the_record() -> None:
    """After a slowdown all figures are those of the plan as it runs, on the nodes that it uses."""
    given = mixed()
    situation = given.situation(Slowdown(time_s=0.0, where="n1", speed=0.5))
    found = given.planner.replan(given.best(), situation, horizon_s=HOUR_S)
    assert isinstance(found.arrangement, UnevenArrangement)
    result, nodes = found.arrangement.result, found.arrangement.nodes
    states = {name: situation.states[name] for name in nodes}
    again = predict_record(given.model, current_cluster(given.cluster, states), given.job, result)
    assert not again.faults and result.pipeline_s == again.pipeline_s
    assert sum(result.breakdown.values()) == pytest.approx(found.step_s, rel=1e-12)
    assert result.peak_memory.device == again.device_bytes
    cluster = cluster_of_nodes(given.cluster, [int(name[1:]) for name in nodes])
    tokens = given.job.global_batch_size * given.job.seq_len
    assert result.tokens_per_s_per_device == pytest.approx(tokens / found.step_s / cluster.devices)


def steps_of(
    given: Mixed, arrangement: Arrangement | UnevenArrangement, epochs: list[tuple[Situation, float]]
) -> float:
    """Predicted from the record, situation by situation."""
    total = 0.0
    for situation, length_s in epochs:
        if not set(arrangement.nodes) <= set(situation.states):
            continue
        if isinstance(arrangement, Arrangement):
            step_s = given.planner.uniform.steps.step_s(arrangement, situation)
        else:
            predicted = given.planner.uneven.predicted(arrangement, situation)
            step_s = None if predicted is None else predicted.result.step_time_s
        total += 0.0 if step_s is None else length_s / step_s
    return total


@pytest.mark.slow
def test_a_plan_for_a_trace_is_uneven_where_that_makes_more_steps() -> None:
    """n0 is slow for most of the trace: the plan that is best now does not make the most steps."""
    given = mixed()
    slow = Slowdown(time_s=100.0, where="n0", speed=0.3)
    trace = EventTrace(nodes=3, events=(slow, Slowdown(time_s=3000.0, where="n0", speed=0.3)))
    found = picks_for_trace(given.planner, trace, ANY)
    assert {one.policy for one in found.uniform} == {"now", "expected", "worst"}
    whole, after = given.situation(), given.situation(slow)
    epochs = [(whole, 100.0), (after, found.length_s - 100.0)]
    for pick, uniform in zip(found.picks, found.uniform, strict=True):
        assert isinstance(pick.arrangement, UnevenArrangement) and pick.policy == uniform.policy
        assert pick.steps == pytest.approx(steps_of(given, pick.arrangement, epochs), rel=1e-9)
    now, expected = found.pick("now"), found.pick("expected")
    assert now.now_step_s == pytest.approx(given.best().result.step_time_s, rel=0.02)
    assert expected.steps > now.steps and expected.steps > max(one.steps for one in found.uniform)
    # The best uneven plan of every instant makes no more steps than the bound.
    best_s = [given.planner.replan(None, each, horizon_s=1e9).step_s for each in (whole, after)]
    most = sum(length_s / step_s for (_, length_s), step_s in zip(epochs, best_s, strict=True))
    assert expected.steps <= most * (1.0 + 1e-9)
    assert most <= expected.steps / (1.0 - expected.gap) * (1.0 + 1e-9)


@pytest.mark.slow
def test_fields_that_only_strategies_have_leave_uneven_plans_out() -> None:
    trace = EventTrace(nodes=3, events=(NodeLost(time_s=50.0, node="n0"),))
    found = picks_for_trace(mixed().planner, trace, AllowedSpace(space="core", fixed={}, axes={}))
    assert not found.uniform
    assert all(isinstance(one.arrangement, Arrangement) for one in found.picks)


def test_few_numbers_of_nodes_are_searched() -> None:
    # Every second of 8 and more, every fourth of 16 and more, every eighth of 32 and more.
    assert [rounded(count) for count in (1, 7, 8, 9, 15, 16, 19, 31, 33, 47)] == [
        1, 7, 8, 8, 14, 16, 16, 28, 32, 40,
    ]  # fmt: skip
    assert len({rounded(count) for count in range(1, 65)}) == 20
