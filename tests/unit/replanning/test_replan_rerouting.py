"""Re-routing around lost nodes: its step time, its transfers, and where it is impossible."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import pytest
from tests.unit.replanning.conftest import Job, job, tight_job

from shardwise.cluster import NodeLost, NodeState, Slowdown
from shardwise.replanning import Arrangement, Costs, planner_of
from shardwise.replanning.arrangement import NO_NODE, with_dp
from shardwise.replanning.rerouting import without_gone
from shardwise.replanning.transition import NO_TRANSITION, holdings_of
from shardwise.strategy import Strategy, complete, node_slots

HOUR_S = 3600.0
FLAT = ("opt-350m", "8x1xT4", 64)


def arranged(given: Job, **fields: int | str | bool) -> Arrangement:
    """A strategy on all nodes, in their order."""
    batch = given.job.global_batch_size
    strategy = complete(
        {"micro_batch_size": 1, "schedule": "1f1b", **fields},
        devices=given.cluster.devices, layers=24, experts=None, global_batch_size=batch,
    )  # fmt: skip
    slots = tuple(f"n{index}" for index in range(len(given.cluster.nodes)))
    return Arrangement(strategy=strategy, slots=slots, microbatches=(batch // strategy.dp,) * strategy.dp)


def without(given: Job, *lost: str) -> list[NodeLost]:
    return [NodeLost(time_s=0.0, node=name) for name in lost]


def perfect_s(given: Job, arrangement: Arrangement) -> float:
    """A lower bound: no stage ends before all its remaining ranks, never idle, could end it."""
    strategy: Strategy = arrangement.strategy
    figures = given.planner.steps.prices.figures(strategy, NodeState(pool=0))
    assert figures is not None
    times = figures.durations
    is_split = strategy.schedule.startswith("zb")
    back_s = times.backward_input_s + times.backward_weight_s if is_split else times.backward_s
    each_s = (times.forward_s + back_s)[0]
    gone = np.array([name == NO_NODE for name in arrangement.slots])
    left = (~gone[node_slots(strategy, 1)].any(axis=2)).sum(axis=0)
    return float((sum(arrangement.microbatches) * each_s / left).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [{"pp": 4}, {"pp": 2}, {"pp": 4, "schedule": "zb_h1"}, {"pp": 2, "zero_stage": 1}],
)
def test_rerouting_is_a_named_choice_and_no_better_than_perfect(fields: dict[str, int | str]) -> None:
    given = job(*FLAT)
    running = arranged(given, **fields)
    whole_s = given.planner.steps.step_s(running, given.situation())
    assert whole_s is not None
    rng = random.Random(1)
    for _ in range(6):
        lost = rng.sample(running.slots, rng.randint(1, 2))
        situation = given.situation(without(given, *lost))
        arrangement = without_gone(running, situation, given.planner.steps.prices)
        found = given.planner.replan(running, situation, horizon_s=HOUR_S)
        if arrangement is None:
            assert found.rerouted is None
            continue
        assert found.rerouted is not None and found.rerouted.arrangement == arrangement
        assert set(arrangement.slots) - {NO_NODE} == set(running.slots) - set(lost)
        assert max(whole_s, perfect_s(given, arrangement)) <= found.rerouted.step_s * (1.0 + 1e-12)
        assert found.steps >= found.rerouted.steps * (1.0 - 1e-9)


def test_rerouting_is_chosen_where_it_is_best() -> None:
    """One stage of one of two pipelines is lost. Without that pipeline the other would do everything; with
    re-routing, three quarters of it still help. Nothing is transferred: its peer has the same state.
    """
    given = job(*FLAT)
    running = arranged(given, pp=4)
    found = given.planner.patch(running, given.situation(without(given, "n1")), horizon_s=HOUR_S)
    assert found.decision == "patch" and found.arrangement.is_rerouted
    assert found.arrangement.nodes == tuple(name for name in running.slots if name != "n1")
    assert found.transition.bytes_per_link == {} and found.transition.seconds == 10.0
    # It continues like this, and the next loss leaves more work per rank.
    situation = given.situation(without(given, "n1", "n6"))
    again = without_gone(found.arrangement, situation, given.planner.steps.prices)
    assert again is not None and again.slots.count(NO_NODE) == 2
    # A target that cannot carry it out gets it reported, not chosen.
    able = planner_of(given.planner.steps.prices, Costs(), can_run=lambda one: not one.is_rerouted)
    other = able.patch(running, given.situation(without(given, "n1")), horizon_s=HOUR_S)
    assert other.rerouted is not None and other.rerouted.arrangement == found.arrangement
    assert not other.arrangement.is_rerouted and other.steps < found.steps
    unchanged = given.planner.patch(
        found.arrangement, given.situation(without(given, "n1")), horizon_s=HOUR_S
    )
    assert (
        unchanged.decision == "keep" and unchanged.transition == NO_TRANSITION and unchanged.rerouted is None
    )


def test_slow_nodes_lengthen_a_rerouted_step() -> None:
    given = job(*FLAT)
    running = arranged(given, pp=4)
    rerouted = without_gone(running, given.situation(without(given, "n1")), given.planner.steps.prices)
    assert rerouted is not None
    events = without(given, "n1")
    times = [
        given.planner.steps.step_s(
            rerouted, given.situation([*events, Slowdown(time_s=0.0, where=node, speed=0.5)])
        )
        for node in ("n1", "n5", "n3")
    ]
    plain_s = given.planner.steps.step_s(rerouted, given.situation(events))
    assert plain_s is not None
    slower = [one > plain_s for one in times if one is not None]
    # n1 is gone, so its speed does not matter.
    assert slower == [False, True, True]
    assert given.planner.steps.step_s(rerouted, given.situation(without(given, "n1", "n2"))) is None


def covered(state_shards: Sequence[Sequence[object]], nodes: set[str], units: int) -> None:
    """These nodes together have the shares of every unit from 0 to 1."""
    for unit in range(units):
        rows = [row for row in state_shards if row[0].first <= unit < row[0].last]  # type: ignore[attr-defined]
        assert len(rows) == 1
        ends = [(state_shard.low, state_shard.high) for state_shard in rows[0]]  # type: ignore[attr-defined]
        assert ends[0][0] == 0.0 and ends[-1][1] == pytest.approx(1.0)
        assert all(a[1] == pytest.approx(b[0]) for a, b in pairwise(ends))
        assert all(set(state_shard.nodes) <= nodes and state_shard.nodes for state_shard in rows[0])  # type: ignore[attr-defined]


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_the_remaining_peers_hold_all_weights_and_states(zero_stage: int) -> None:
    given = job(*FLAT)
    running = arranged(given, pp=2, zero_stage=zero_stage)
    situation = given.situation(without(given, "n1", "n4"))
    rerouted = without_gone(running, situation, given.planner.steps.prices)
    assert rerouted is not None
    held = holdings_of(rerouted, 24, 1)
    for state_shards in (held.weights, held.states):
        covered(state_shards, set(rerouted.nodes), 26)
    change = given.planner.transitions.between(running, rerouted, situation)
    # Shards that only a lost node had come from the checkpoint, and half of 10 minutes is repeated.
    assert change.lost_s == (300.0 if zero_stage else 0.0)
    assert (sum(change.bytes_per_link.values()) > 0.0) == (zero_stage > 0)


def test_impossible_rerouting_is_no_choice() -> None:
    given = job(*FLAT)
    prices = given.planner.steps.prices
    after = given.situation(without(given, "n1"))
    assert without_gone(arranged(given, pp=4), given.situation(), prices) is None
    assert without_gone(arranged(given, pp=1), after, prices) is None
    assert without_gone(arranged(given, pp=8), after, prices) is None
    assert without_gone(arranged(given, pp=4, vpp=2, schedule="interleaved_1f1b"), after, prices) is None
    both = given.situation(without(given, "n1", "n5"))
    running = arranged(given, pp=4)
    stages = node_slots(running.strategy, 1)[:, :, 0]
    same = [f"n{slot}" for slot in stages[:, 1]]
    assert without_gone(running, given.situation(without(given, *same)), prices) is None
    assert (without_gone(running, both, prices) is None) == (set(same) == {"n1", "n5"})


def test_states_of_more_than_a_share_must_fit() -> None:
    """ZeRO-1 over two replicas fits; if one has to store all states of its stage, it does not."""
    roomy = tight_job(4096 << 20)
    running = arranged(roomy, pp=6, zero_stage=1)
    needs = [
        roomy.planner.steps.prices.figures(with_dp(running.strategy, width), NodeState(pool=0))
        for width in (2, 1)
    ]
    both, alone = (one.device_bytes for one in needs if one is not None)
    assert both < alone
    events = without(roomy, "n3")
    for capacity, fits in ((alone * 1.01, True), ((alone + both) / 2.0, False)):
        given = tight_job(int(capacity / 0.95))
        found = without_gone(running, given.situation(events), given.planner.steps.prices)
        assert found is not None
        assert (given.planner.steps.step_s(found, given.situation(events)) is not None) == fits
        assert list(accumulate(running.microbatches))[-1] == 24
