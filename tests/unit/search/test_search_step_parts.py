"""Computation, communication, overlap and idle time of steps that can be followed by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.unit.cost.hand_made import IDEAL, cluster, device, exposed, problem, table, with_software

from shardwise.cost import Problem, TableCosts, traffic_of
from shardwise.plans import MECHANISMS, StepParts
from shardwise.search import step_parts
from shardwise.search.result import result_of
from shardwise.search.step_parts import RankWork, TimedPipeline, uniform_parts
from shardwise.sim import Durations
from shardwise.sim.maxplus import Floats
from shardwise.strategy import StrategyTable


def parts_of(given: Problem, text: str) -> StepParts:
    return uniform_parts(given, table(given, text)[0])


def one_node(slowdown: float = 1.0) -> Problem:
    """The brick model on a node of four ideal devices."""
    return problem(on=cluster(1, of=device(replace(IDEAL, overlap_slowdown=slowdown))))


def seconds_of(parts: StepParts, name: str) -> tuple[float, float, float]:
    one = parts.communication[name]
    return one.total_s, one.hidden_s, one.exposed_s


# Communication inside of actions


def check_tensor(slowdown: float) -> None:
    """A micro-batch communicates for 2 s in each of four bricks, forward and backward, 1 s in the head and
    1 s in the embedding, which has no matmul: 18 s. Of four micro-batches, 0.2 * (8 * 2 + 1) s each are
    hidden: 13.6 of 72 s. Each hidden second slows computation down by `slowdown` - 1."""
    given = with_software(exposed(one_node(slowdown)), tensor_overlap=0.2)
    parts = parts_of(given, "tp=2,dp=2,sequence_parallel=yes")
    assert seconds_of(parts, "tensor") == pytest.approx((72.0, 13.6, 58.4))
    assert parts.slowdown_s == pytest.approx((slowdown - 1.0) * 13.6)
    # Gradients: 60 weights in a brick, 100 in each end, 440 * 4 B at 100 B/s among two, 2 * 1/2 times.
    assert seconds_of(parts, "gradient_reduction") == pytest.approx((17.6, 0.0, 17.6))
    # The gradients of four norms of 10 weights that both tensor ranks have: 160 B.
    assert seconds_of(parts, "tied_weights") == pytest.approx((1.6, 0.0, 1.6))
    # Bricks 0.5 s and 0.05 s of norm forward, 0.5 + 0.1 and 0.5 s backward: 1.65 s. The head takes 1 s per
    # phase and 1.2 / 2 + 0.8 / 2 for the loss, the embedding, whose rows are whole, 0.2 and 0.5 s. Norm of
    # 440 gradients: 3 passes of 4 B; the update moves 30 B of each, at 1000 B/s.
    work_s = 4 * (4 * 1.65 + 4.0 + 0.7)
    end_s = 440 * (3 * 4 + 30) / 1000
    assert parts.computation_s == pytest.approx(work_s + end_s + parts.slowdown_s)
    assert (parts.bubble_s, parts.host_s) == (0.0, 0.0)
    assert parts.step_time_s == pytest.approx(result_of(given, table(given, "tp=2,dp=2")[0]).step_time_s)


@pytest.mark.parametrize("slowdown", [1.0, 1.5])
def test_tensor_communication_by_hand(slowdown: float) -> None:
    check_tensor(slowdown)


def test_mutants_of_the_variants_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def same(given: Problem) -> Problem:
        return given

    for name in ("without_overlap", "without_slowdown"):
        with monkeypatch.context() as patched:
            patched.setattr(step_parts, name, same)
            with pytest.raises(AssertionError):
                check_tensor(1.5)


def test_communication_of_recomputation_counts() -> None:
    """Full recomputation repeats the forward pass of four bricks: 2 s of communication in each."""
    given = with_software(exposed(one_node()), tensor_overlap=0.2)
    text = "tp=2,dp=2,sequence_parallel=yes"
    plain, again = parts_of(given, text), parts_of(given, f"{text},recompute=full,recompute_layers=4")
    more = np.subtract(seconds_of(again, "tensor"), seconds_of(plain, "tensor"))
    # Of 2 s in each brick 0.4 are hidden by its matmul of 0.5 s.
    assert more.tolist() == pytest.approx([4 * 4 * 2.0, 4 * 4 * 0.4, 4 * 4 * 1.6])
    assert again.computation_s - plain.computation_s == pytest.approx(4 * 4 * 0.55)


def test_gathers_and_reductions_by_hand() -> None:
    """dp 4, ZeRO-1, 840 weights in 4 layers: the reduce-scatter of 3360 B takes 3/4 * 33.6 = 25.2 s, the
    gather of 1680 B 12.6 s. Of 4 buckets 3 overlap with the last backward of 14.1 s and with the first
    forward of 7.8 s."""
    parts = parts_of(one_node(), "dp=4,zero_stage=1")
    assert seconds_of(parts, "gradient_reduction") == pytest.approx((25.2, 10.575, 14.625))
    assert seconds_of(parts, "parameter_gathering") == pytest.approx((12.6, 5.85, 6.75))
    # Two micro-batches of 7.8 + 7.6 + 6.5 s; norm and update of 210 weights, 42 B each at 1000 B/s.
    assert parts.computation_s == pytest.approx(2 * 21.9 + 8.82)
    assert (parts.communication_s, parts.overlap_s) == pytest.approx((37.8, 16.425))
    assert parts.step_time_s == pytest.approx(52.62 + 37.8 - 16.425)


def test_sharded_parameters_by_hand() -> None:
    """ZeRO-3 on 4 devices gathers 1680 B twice and reduces 3360 B once in each of two micro-batches. A block
    hides as much as it computes: a brick (110 weights) gathers 1.65 s of which 1.1 and 1.2 are hidden, each
    end (200 weights) 3 s, of which the embedding hides 0.2 s forward, and the head 3.2 and 2.8 s at most.
    Reductions take 3.3 and 6 s; weight gradients hide 1 s, 0.5 s in the embedding and 2 s in the head."""
    parts = parts_of(one_node(), "dp=4,zero_stage=3")
    hidden_s = 2 * (4 * (1.1 + 1.2) + 0.2 + 3.0 + 2.8)
    assert seconds_of(parts, "parameter_gathering")[:2] == pytest.approx((2 * 2 * 12.6, hidden_s))
    assert seconds_of(parts, "gradient_reduction")[:2] == pytest.approx((2 * 25.2, 2 * (4 * 1.0 + 0.5 + 2.0)))


def test_offload_by_hand() -> None:
    """A brick saves 100 + 200 B, the ends nothing: 1,200 B of each of two micro-batches. At 50 B/s 24 s to
    the host and 24 s back, hidden by 7.8 and 7.6 s of computation."""
    given = exposed(one_node())
    parts = parts_of(given, "dp=4,offload=activations")
    assert seconds_of(parts, "offload")[:2] == pytest.approx((2 * 2 * 24.0, 2 * (7.8 + 7.6)))
    # An offloaded optimizer copies 4 B of gradient and 2 B of weight of each of 840 weights; what it moves on
    # the host is computation.
    parts = parts_of(given, "dp=4,offload=optimizer")
    assert seconds_of(parts, "offload") == pytest.approx((840 * 6 / 50, 0.0, 840 * 6 / 50))


def halved(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The broken twin of a mechanism has half of its seconds in the actions."""

    def broken(given: Problem, rows: StrategyTable, costs: TableCosts) -> dict[str, Any]:
        found = traffic_of(given, rows, costs)
        return {**found, name: 0.5 * found[name]}

    monkeypatch.setattr(step_parts, "traffic_of", broken)


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("tensor", test_communication_of_recomputation_counts),
        ("parameter_gathering", test_sharded_parameters_by_hand),
        ("gradient_reduction", test_sharded_parameters_by_hand),
        ("offload", test_offload_by_hand),
    ],
)
def test_a_mutant_with_half_of_a_mechanism_is_caught(
    monkeypatch: pytest.MonkeyPatch, name: str, check: Callable[[], None]
) -> None:
    check()
    halved(monkeypatch, name)
    with pytest.raises(AssertionError):
        check()


# Pipelines

UNBLOCKED = (np.zeros(2), np.zeros(2))


def two_ranks(blocked_s: tuple[Floats, Floats] = UNBLOCKED) -> TimedPipeline:
    """Rank 0: gather 0-1, 0F0 1-3, 0F1 3-5, 0B0 18-23, 0B1 25-30, reduction 30-31. Rank 1: gather 0-9, 1F0
    9-12, 1B0 12-16, 1F1 16-19, 1B1 19-23, reduction 23-33. Messages take 1 s forward, 2 s back."""
    durations = Durations.of(
        stages=2,
        forward_s=[2, 3],
        backward_s=[5, 4],
        gather_s=[1, 9],
        reduce_s=[1, 10],
        hop_forward_s=1,
        hop_backward_s=2,
    )
    return TimedPipeline("1f1b", 2, 1, durations, blocked_s)


def check_messages() -> None:
    # Messages of rank 0: 3-4 (during 0F1), 5-6, 16-18 and 23-25.
    work = two_ranks().work(0, 2)
    assert work == RankWork(
        actions_s=14, gathers_s=1, reductions_s=1, messages_s=1 + 2 + 2, sent_s=6, actions=4
    )
    # Of rank 1: 3-4 and 5-6 during its gather, 16-18 during 1F1, 23-25 during its reduction.
    work = two_ranks().work(1, 2)
    assert work == RankWork(actions_s=14, gathers_s=9, reductions_s=10, messages_s=0, sent_s=6, actions=4)
    # The last half second of each forward of stage 0 is its send: 2.5-4 (3-4 during 0F1) and 4.5-6.
    work = two_ranks((np.array([0.5, 0.0]), np.zeros(2))).work(0, 2)
    assert work == RankWork(
        actions_s=13, gathers_s=1, reductions_s=1, messages_s=0.5 + 1.5 + 2 + 2, sent_s=7, actions=4
    )


def test_messages_by_hand() -> None:
    check_messages()


def summed(several: Iterable[Floats]) -> float:
    """Seconds of intervals that are taken for disjoint."""
    return float(sum((one[:, 1] - one[:, 0]).sum() for one in several))


def test_a_mutant_that_adds_overlapping_intervals_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_parts, "union_s", summed)
    with pytest.raises(AssertionError):
        check_messages()


def test_a_pipeline_of_bricks_by_hand() -> None:
    """Two stages of two bricks on a node of four, two replicas; four micro-batches. A forward takes 2.4 and
    5.4 s, a backward 4.9 and 9.2 s: the embedding adds 0.2 and 0.5 s, the head 3.2 and 4.8 s. The second
    stage works 4 * 14.6 s; it waits for the first forward (2.4 s) and its message (1 s). While it works,
    three messages arrive and four leave; the last of these leaves after its last backward."""
    given = exposed(one_node())
    parts = parts_of(given, "pp=2,dp=2")
    assert (parts.stage, parts.rank) == (1, 2)
    total_s, hidden_s, exposed_s = seconds_of(parts, "pipeline")
    assert total_s == pytest.approx(8.0)
    # The last message is hidden by the reduction of 420 weights: 420 * 4 B * 2 * 1/2 / 100.
    assert (hidden_s, exposed_s) == pytest.approx((7.0, 1.0))
    assert seconds_of(parts, "gradient_reduction") == pytest.approx((16.8, 0.0, 16.8))
    # After the last backward (2.4 + 1 + 4 * 14.6) the first stage gets the message, and its last backward and
    # reduction take 1 + 4.9 + 16.8 s. The second stage is ready 1 + 4.9 s earlier.
    assert parts.bubble_s == pytest.approx(2.4 + 1.0 + 4.9)
    assert parts.step_time_s == pytest.approx(result_of(given, table(given, "pp=2,dp=2")[0]).step_time_s)


def test_long_steps_are_continued_from_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[str, int, int]] = [
        ("1f1b", 4, 1),
        ("interleaved_1f1b", 4, 2),
        ("zb_v", 4, 2),
        ("dualpipe_v", 4, 2),
    ]
    rng = np.random.default_rng(3)
    for schedule, pp, vpp in shapes:
        stages = pp * vpp
        forward_s, weight_s = rng.uniform(1.0, 1.2, (2, stages))
        durations = Durations.of(
            stages=stages,
            forward_s=forward_s,
            backward_s=2.0 * forward_s,
            backward_input_s=forward_s,
            backward_weight_s=weight_s,
            gather_s=0.3,
            reduce_s=0.4,
            hop_forward_s=0.2,
            hop_backward_s=0.2,
        )
        shape = TimedPipeline(schedule, pp, vpp, durations, (np.full(stages, 0.1), np.full(stages, 0.1)))
        busiest = max(range(pp), key=lambda rank: shape.work(rank, 64).actions_s)
        whole = shape.work(busiest, 192)
        with monkeypatch.context() as patched:
            patched.setattr(step_parts, "MOST_ACTIONS", 0)
            found = shape.work(busiest, 192)
        assert found.actions == whole.actions and found is not whole
        assert (found.actions_s, found.sent_s) == pytest.approx((whole.actions_s, whole.sent_s), rel=1e-9)
        # Of about 400 s; few exposed seconds depend on when the other ranks reach their steady state.
        assert found.busy_s == pytest.approx(whole.busy_s, rel=2e-3)


def test_every_mechanism_is_named() -> None:
    parts = parts_of(one_node(), "dp=4")
    assert tuple(parts.communication) == MECHANISMS
