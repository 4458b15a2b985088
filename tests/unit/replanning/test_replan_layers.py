"""Patches that move layers between stages: away from slow nodes, at the cost of their bytes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.unit.replanning.conftest import Job, job

from shardwise.cluster import NodeLost, Slowdown
from shardwise.replanning import Arrangement
from shardwise.replanning.candidates import with_layers_shifted
from shardwise.strategy import Strategy, complete, layer_counts

HOUR_S = 3600.0


def strategy(devices: int, **fields: int | str) -> Strategy:
    return complete(
        {"micro_batch_size": 1, "schedule": "1f1b", **fields},
        devices=devices, layers=24, experts=None, global_batch_size=32,
    )  # fmt: skip


def running(given: Job, **fields: int | str) -> Arrangement:
    nodes = tuple(given.situation().states)
    found = given.planner.steps.balanced(strategy(2 * len(nodes), **fields), nodes, given.situation())
    assert found is not None
    return found


def counts(arrangement: Arrangement) -> tuple[int, ...]:
    one = arrangement.strategy
    return layer_counts(24, one.pp, one.first_stage_layers, one.last_stage_layers)


@pytest.mark.slow
def test_a_slow_stage_gives_layers_away_as_a_patch() -> None:
    """The first of two stages is on a node at half speed."""
    given = job("opt-350m", "2x2xT4", 32)
    before = running(given, pp=2, tp=2)
    assert counts(before) == (12, 12)
    slow = given.situation([Slowdown(time_s=0.0, where="n0", speed=0.5)])
    found = given.planner.patch(before, slow, horizon_s=6 * HOUR_S)
    assert found.decision == "patch" and found.arrangement.shape == before.shape
    on_slow = counts(found.arrangement)[found.arrangement.slots.index("n0")]
    assert sum(counts(found.arrangement)) == 24 and on_slow < 12
    # The best of all splits, by the same step times.
    every = [
        given.planner.steps.balanced(
            replace(before.strategy, first_stage_layers=one, last_stage_layers=24 - one),
            found.arrangement.slots,
            slow,
        )
        for one in range(1, 24)
    ]
    times = [given.planner.steps.step_s(one, slow) for one in every if one is not None]
    assert found.step_s == pytest.approx(min(one for one in times if one is not None), rel=1e-12)
    assert found.keep_step_s is not None and found.step_s < 0.9 * found.keep_step_s


def test_bytes_sent_are_those_of_the_shifted_layers() -> None:
    """One layer goes from n0 to n1, tp 2: each rank fetches half of its weights and states."""
    given = job("opt-350m", "2x2xT4", 32)
    before = running(given, pp=2, tp=2)
    after = replace(before, strategy=replace(before.strategy, first_stage_layers=11, last_stage_layers=13))
    slow = given.situation([Slowdown(time_s=0.0, where="n0", speed=0.5)])
    change = given.planner.transitions.between(before, after, slow)
    layer = next(kind for kind in given.model.kinds)
    weights = sum(weight.parameters for operator in layer.operators for weight in operator.weights)
    # fp16 weights, fp32 master weights and two moments: 2 + 12 bytes each; a node has both tensor ranks.
    into = {name: nbytes for name, nbytes in change.bytes_per_link.items() if name.endswith(">n1")}
    assert sum(into.values()) == pytest.approx(weights * 14.0)
    assert change.seconds > 10.0 and change.lost_s == 0.0


@pytest.mark.slow
def test_a_slow_stage_in_the_middle_is_swapped_with_an_end() -> None:
    given = job("opt-350m", "4x2xT4", 32)
    before = running(given, pp=4, tp=2)
    slow = given.situation([Slowdown(time_s=0.0, where="n1", speed=0.3)])
    found = given.planner.patch(before, slow, horizon_s=24 * HOUR_S)
    assert found.decision == "patch"
    place = found.arrangement.slots.index("n1")
    assert counts(found.arrangement)[place] == min(counts(found.arrangement))
    assert place in (0, 3)


def test_identical_nodes_keep_their_layers() -> None:
    given = job("opt-350m", "4x2xT4", 32)
    before = running(given, pp=4, tp=2)
    assert not list(with_layers_shifted(before, given.situation(), given.planner.steps))
    lost = given.situation([NodeLost(time_s=0.0, node="n3")])
    assert not list(with_layers_shifted(before, lost, given.planner.steps))


@pytest.mark.slow
def test_every_intermediate_arrangement_is_faster_and_complete() -> None:
    given = job("opt-350m", "4x2xT4", 32)
    rng = random.Random(61)
    for _ in range(6):
        before = running(
            given, **rng.choice([{"pp": 2, "tp": 2, "dp": 2}, {"pp": 4, "tp": 2}, {"pp": 4, "dp": 2}])
        )
        slow = given.situation(
            Slowdown(time_s=0.0, where=f"n{node}", speed=rng.uniform(0.2, 1.0)) for node in range(4)
        )
        for found in with_layers_shifted(before, slow, given.planner.steps):
            assert sum(counts(found)) == 24 and min(counts(found)) >= 1
            assert sorted(found.slots) == ["n0", "n1", "n2", "n3"] and sum(found.microbatches) == 32
            assert found.shape == before.shape
