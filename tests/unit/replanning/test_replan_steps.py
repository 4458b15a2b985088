"""Step times of arrangements: as the search predicts them where nothing changed, and by hand elsewhere."""

from __future__ import annotations

import pytest
from tests.unit.replanning.conftest import job

from shardwise.cluster import NodeLost, Slowdown, rounded_down
from shardwise.replanning.arrangement import with_dp
from shardwise.replanning.step_times import even_shares, fastest_shares
from shardwise.search import Question, plan
from shardwise.strategy import Strategy, complete, node_slots

SMALL = ("opt-350m", "4x2xT4", 32)


def strategy_of(**fields: int) -> Strategy:
    """A strategy of eight devices with micro-batches of one sequence."""
    given = {"micro_batch_size": 1, **fields}
    return complete(given, devices=8, layers=24, experts=None, global_batch_size=32)


@pytest.mark.slow
def test_an_unchanged_plan_has_the_step_time_of_the_search() -> None:
    given = job(*SMALL)
    answer = plan(Question(model=given.model, cluster=given.cluster, job=given.job, top=12))
    slots = tuple(f"n{index}" for index in range(4))
    schedules = set()
    for result in (answer.best, *answer.runners_up):
        found = given.planner.steps.balanced(result.strategy, slots, given.situation())
        assert found is not None
        step_s = given.planner.steps.step_s(found, given.situation())
        assert step_s == pytest.approx(result.step_time_s, rel=1e-11)
        schedules.add(result.strategy.schedule)
    assert len(schedules) > 1


def test_a_slow_node_takes_fewer_microbatches_and_less_time_than_equal_shares() -> None:
    given = job(*SMALL)
    strategy = strategy_of(dp=8)
    slots = tuple(f"n{index}" for index in range(4))
    steps = given.planner.steps
    even = steps.balanced(strategy, slots, given.situation())
    slow = given.situation([Slowdown(time_s=0.0, where="n2", speed=0.5)])
    shared = steps.balanced(strategy, slots, slow)
    assert even is not None and shared is not None
    # 32 micro-batches on 8 pipelines, two at half speed: r each and r / 2 with 6 r + 2 r / 2 = 32 is r =
    # 4.57; so none does more than 5, the slow ones do 2 (as long as 4), and the remaining ones do 4.
    assert even.microbatches == (4,) * 8
    assert shared.microbatches == (5, 5, 5, 5, 2, 2, 4, 4)
    even_s, shared_s = steps.step_s(even, slow), steps.step_s(shared, slow)
    assert even_s is not None and shared_s is not None and shared_s < even_s


def test_a_pipeline_is_as_slow_as_its_slowest_node() -> None:
    """One node at half its speed makes the step at least 1.1 times and at most about twice as long."""
    given = job(*SMALL)
    strategy = strategy_of(pp=8)
    slots = tuple(f"n{index}" for index in range(4))
    steps = given.planner.steps
    even = steps.balanced(strategy, slots, given.situation())
    assert even is not None
    nominal_s = steps.step_s(even, given.situation())
    slow_s = steps.step_s(even, given.situation([Slowdown(time_s=0.0, where="n1", speed=0.5)]))
    assert nominal_s is not None and slow_s is not None
    assert nominal_s * 1.1 < slow_s < nominal_s / rounded_down(0.5)


@pytest.mark.slow
def test_nothing_runs_on_a_node_that_is_gone() -> None:
    given = job(*SMALL)
    arrangement, _ = given.best()
    assert given.planner.steps.step_s(arrangement, given.situation([NodeLost(time_s=0.0, node="n1")])) is None


def test_another_width_keeps_the_sharding_over_all_ranks() -> None:
    strategy = strategy_of(dp=8, zero_stage=3)
    wider = with_dp(strategy, 6)
    assert (wider.param_shard, wider.grad_shard, wider.optim_shard, wider.dp) == (6, 6, 6, 6)
    some = strategy_of(dp=8, optim_shard=4)
    assert with_dp(some, 6).optim_shard == 2


def test_cells_follow_the_order_of_axes() -> None:
    # dp varies faster than pp: pipeline 0 has ranks 0 and 4 of 8, so slots 0 and 2 of nodes of two.
    strategy = strategy_of(pp=2, dp=4)
    assert strategy.axis_order == "tp-cp-dp-pp"
    assert node_slots(strategy, 2)[:, :, 0].tolist() == [[0, 2], [0, 2], [1, 3], [1, 3]]


def test_shares_of_micro_batches_end_at_the_same_time() -> None:
    # Two pipelines of 2 s and one of 1 s per micro-batch, 12 of them: 3, 3, 6 all end after 6 s.
    assert fastest_shares([2.0, 2.0, 1.0], [2.0, 2.0, 1.0], 12, 1, 1) == [3, 3, 6]
    # In pairs: 2, 4, 6 or 4, 2, 6 end after 8 s; 2, 2, 8 do too.
    pairs = fastest_shares([4.0, 4.0, 2.0], [2.0, 2.0, 1.0], 12, 2, 2)
    assert pairs is not None and sum(pairs) == 12 and all(share % 2 == 0 for share in pairs)
    assert max(pairs[0] * 2, pairs[1] * 2, pairs[2]) == 8
    assert fastest_shares([1.0, 1.0], [1.0, 1.0], 1, 1, 1) is None
    assert even_shares(3, 7, 1, 1) == [3, 2, 2]
    assert even_shares(3, 7, 2, 2) is None
    assert even_shares(3, 7, 1, 3) is None
