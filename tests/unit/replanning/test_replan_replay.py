"""Replays: epochs and totals by hand, and on random traces no policy makes more steps than the oracle."""

from __future__ import annotations

import gc
import random
from functools import partial
from typing import Any

import pytest
from tests.unit.replanning.conftest import Job, job, trace_at_random

from shardwise.cluster import EventTrace, NodeJoined, NodeLost, Notice, Slowdown
from shardwise.cluster.events import ClusterEvent
from shardwise.errors import Infeasible
from shardwise.replanning import (
    Costs,
    PlansBySize,
    Prices,
    Replay,
    best_interval_s,
    mixed_planner_of,
    planner_of,
    replay,
    trace_replay,
)
from shardwise.replanning.situation import epochs_of
from shardwise.replanning.trace_replay import (
    EpochChoice,
    PolicyRun,
    adaptive,
    best_of,
    fixed,
    oracle,
    run_of,
)
from shardwise.replanning.transition import Transitions

SMALL = ("opt-350m", "4x2xT4", 32)
HOUR_S = 3600.0


def replayed(given: Job, trace: EventTrace, **costs: float) -> Replay:
    given.planner.transitions = Transitions(given.planner.steps.prices, Costs(**costs))
    try:
        return replay(given.mixed, trace, end_s=trace.end_s + 600.0)
    finally:
        given.planner.transitions = Transitions(given.planner.steps.prices, Costs())


@pytest.mark.slow
def test_no_policy_makes_more_steps_than_the_oracle(pytestconfig: pytest.Config) -> None:
    given = job(*SMALL)
    rng = random.Random(11)
    changed = 0
    for _ in range(300 if pytestconfig.getoption("--full") else 12):
        trace = trace_at_random(given.cluster, rng, 6.0)
        found = replayed(
            given, trace, regroup_s=rng.choice([0.0, 10.0, 60.0]), restart_s=rng.choice([60.0, 300.0]),
            checkpoint_interval_s=rng.choice([0.0, 60.0, 1200.0]),
        )  # fmt: skip
        oracle = found.run("oracle").total_steps
        for run in found.runs:
            assert run.total_steps <= oracle * (1.0 + 1e-9), run.name
        adaptive = found.run("adaptive")
        changed += adaptive.changes
        assert found.run("expected").total_steps >= found.run("static").total_steps * (1.0 - 1e-12)
    assert changed > 50


@pytest.mark.slow
def test_adapting_may_make_fewer_steps_than_staying() -> None:
    """A node is slow for 15 s after a quiet hour. The adaptive policy expects another hour of it, takes 10 s
    to give it fewer micro-batches, and 10 s more to return them.
    """
    given = job(*SMALL)
    events = (Slowdown(time_s=3600.0, where="n1", speed=0.5), Slowdown(time_s=3615.0, where="n1", speed=1.0))
    found = replayed(given, EventTrace(nodes=4, events=events))
    static, adaptive = found.run("static"), found.run("adaptive")
    assert adaptive.changes == 2
    assert adaptive.total_steps < static.total_steps


@pytest.mark.slow
def test_the_same_trace_gives_the_same_replay() -> None:
    given = job(*SMALL)
    trace = trace_at_random(given.cluster, random.Random(3), 4.0)
    first = replayed(given, trace)
    fresh = planner_of(Prices(given.model, given.cluster, given.job), Costs())
    again = replay(mixed_planner_of(fresh, PlansBySize), trace, end_s=trace.end_s + 600.0)
    assert [run.choices for run in first.runs] == [run.choices for run in again.runs]
    assert [run.steps for run in first.runs] == [run.steps for run in again.runs]


def test_epochs_end_where_something_changes() -> None:
    given = job(*SMALL)
    events: tuple[ClusterEvent, ...] = (
        NodeLost(time_s=0.0, node="n3"),
        Slowdown(time_s=10.0, where="n1", speed=1.0),  # it had its full speed before
        Notice(time_s=20.0, node="n2", lost_at_s=140.0),
        NodeLost(time_s=140.0, node="n2"),
        NodeJoined(time_s=140.0, node="n3"),
        NodeLost(time_s=500.0, node="n0"),
    )
    epochs = epochs_of(EventTrace(nodes=4, events=events), given.view, 400.0)
    assert [(one.start_s, one.end_s) for one in epochs] == [(0.0, 20.0), (20.0, 140.0), (140.0, 400.0)]
    assert [list(one.situation.states) for one in epochs] == [
        ["n0", "n1", "n2"], ["n0", "n1", "n2"], ["n0", "n1", "n3"],
    ]  # fmt: skip
    assert epochs[2].lost == epochs[2].saved == frozenset({"n2"})


@pytest.mark.slow
def test_totals_are_the_sums_over_the_choices() -> None:
    given = job(*SMALL)
    running, _ = given.best()
    events = (NodeLost(time_s=100.0, node="n3"), NodeJoined(time_s=300.0, node="n3"))
    epochs = epochs_of(EventTrace(nodes=4, events=events), given.view, 1000.0)
    laid = [(4.0, 0.0), (None, 0.0), (2.0, 50.0)]
    choices = [
        EpochChoice(
            decision="keep", arrangement=None if step is None else running, step_s=step, change_s=change
        )
        for step, change in laid
    ]
    run = run_of("by hand", epochs, choices)
    # 100 s at 4 s; nothing for 200 s; 700 s less 50 s at 2 s: 25 + 0 + 325. Of 1000 s, 100 + 650 were useful.
    assert run.steps == (25.0, 0.0, 325.0)
    assert run.goodput == pytest.approx(0.75)


@pytest.mark.slow
def test_a_fixed_plan_waits_for_its_nodes_and_reads_its_checkpoint() -> None:
    given = job(*SMALL)
    running, step_s = given.best()
    events = (NodeLost(time_s=100.0, node="n3"), NodeJoined(time_s=300.0, node="n3"))
    epochs = epochs_of(EventTrace(nodes=4, events=events), given.view, 1000.0)
    choices = fixed(given.mixed, epochs, running)
    assert [one.decision for one in choices] == ["keep", "wait", "keep"]
    reading = given.planner.transitions.between(None, running, epochs[2].situation)
    assert choices[2].change_s == pytest.approx(reading.seconds + 300.0)
    assert choices[0].step_s == pytest.approx(step_s)


def test_checkpoints_are_as_far_apart_as_losses_suggest() -> None:
    # Two losses in 3600 s (one node of the second had notice, so it counts among the two): sqrt(2 *
    # 6.3 s * 1800 s) = 150.6 s.
    events: tuple[ClusterEvent, ...] = (
        NodeLost(time_s=10.0, node="n0"),
        Notice(time_s=20.0, node="n1", lost_at_s=30.0),
        NodeLost(time_s=30.0, node="n1"),
        NodeLost(time_s=40.0, node="n2"),
    )
    trace = EventTrace(nodes=4, events=events)
    assert best_interval_s(trace, 3600.0) == pytest.approx(150.6, abs=0.05)
    assert best_interval_s(EventTrace(nodes=4, events=()), 3600.0) is None


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ([(0.1 + 0.2, 7.0), (0.3, 7.0), (0.2, 9.0)], 0),
        ([(0.3, 7.0), (0.1 + 0.2, 7.0), (0.2, 9.0)], 0),  # 0.1 + 0.2 is more than 0.3 by rounding
        ([(0.3, 7.0), (0.1 + 0.2, 8.0), (0.2, 9.0)], 1),  # equal rates: the second value decides
        ([(0.1 + 0.2, 7.0), (0.3, 8.0), (0.2, 9.0)], 1),
    ],
)
def test_of_equal_arrangements_a_policy_takes_the_first(scores: list[tuple[float, float]], best: int) -> None:
    """The second and the last case fail with `max`: it returns the larger rate, whatever the difference."""
    given = iter(scores)
    none: Any = None

    def score(run: PolicyRun) -> tuple[float, ...]:
        return next(given)

    every: list[Any] = ["first", "second", "third"]
    assert best_of(none, [], every, score) == every[best]


def test_epochs_with_equal_situations_share_one() -> None:
    given = job(*SMALL)
    events: tuple[ClusterEvent, ...] = tuple(
        event
        for start_s in (100.0, 300.0, 500.0)
        for event in (NodeLost(time_s=start_s, node="n3"), NodeJoined(time_s=start_s + 100.0, node="n3"))
    )
    epochs = epochs_of(EventTrace(nodes=4, events=events), given.view, 1000.0)
    assert len(epochs) == 7
    assert len({id(one.situation) for one in epochs}) == 2


@pytest.mark.slow
def test_a_replay_ends_where_it_has_no_time() -> None:
    """It is the replay of so much of the trace, for all policies; the first decision is always made."""
    given = job(*SMALL)
    trace = trace_at_random(given.cluster, random.Random(3), 6.0)
    epochs = epochs_of(trace, given.view, trace.end_s)
    assert len(epochs) > 4
    running, _ = given.best()
    for decisions in (0, 3):
        time_left, seen = iter([True] * decisions), list[str]()
        cut = replay(
            given.mixed, trace, end_s=trace.end_s, start=running, has_time=partial(next, time_left, False),
            progress=seen.append,
        )  # fmt: skip
        end_s = epochs[decisions].end_s
        assert (cut.length_s, cut.requested_s, cut.is_whole) == (end_s, trace.end_s, False)
        whole = replay(given.mixed, trace, end_s=end_s, start=running)
        assert whole.is_whole
        assert [run.steps for run in cut.runs] == [run.steps for run in whole.runs]
        assert cut.working_share == whole.working_share
        assert seen == ["decisions at 0 % of the trace", "policy robust", "policy expected", "policy oracle"]


def test_nothing_fits_as_far_as_there_was_time() -> None:
    given = job(*SMALL)
    events: tuple[ClusterEvent, ...] = (*(NodeLost(time_s=0.0, node=f"n{index}") for index in range(4)),
              NodeJoined(time_s=50.0, node="n0"), NodeJoined(time_s=80.0, node="n1"))  # fmt: skip
    trace = EventTrace(nodes=4, events=events)
    with pytest.raises(Infeasible, match="nothing fits in the first 50 s of the trace; there was no time"):
        replay(given.mixed, trace, end_s=100.0, has_time=lambda: False)


@pytest.mark.slow
def test_the_oracle_keeps_only_paths_that_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """600 epochs with 25 labels or more each: 15,000 labels. All paths are one but for the last epochs."""
    given = job(*SMALL)
    events: tuple[ClusterEvent, ...] = tuple(
        event
        for index in range(300)
        for event in (
            NodeLost(time_s=1000.0 * index + 300.0, node=f"n{index % 4}"),
            NodeJoined(time_s=1000.0 * index + 900.0, node=f"n{index % 4}"),
        )
    )
    trace = EventTrace(nodes=4, events=events)
    epochs = epochs_of(trace, given.view, trace.end_s)
    assert len(epochs) == 600
    considered: list[Any] = []
    adaptive(given.mixed, epochs, HOUR_S, considered)
    every = list(dict.fromkeys(one for some in considered for one in some))
    kept: list[int] = []
    traced = trace_replay._traced

    def counted(*given: Any) -> list[EpochChoice]:
        kept.append(sum(type(one) is trace_replay._Label for one in gc.get_objects()))
        return traced(*given)

    monkeypatch.setattr(trace_replay, "_traced", counted)
    choices = oracle(epochs, considered, every[:24], given.mixed)
    assert len(choices) == 600
    assert 600 <= kept[0] < 1500
