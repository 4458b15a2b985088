"""What options of the software change in bytes and seconds, by hand; the planner, its costs of single stages
and the checker agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.checker_records import figures_of
from tests.unit.cost.hand_made import cluster, end_of, exposed, problem, table, with_software

from shardwise.cost import Problem, StageShape, peaks_of, stage_bytes, stage_costs, stage_kinds_of
from shardwise.search.result import result_of
from shardwise_verify.estimate import StrategyEstimate, estimate_strategy

MOMENTS_IN_BF16 = {"moment_bytes": 2.0, "master_bytes": 2.0}


def one_node(**software: Any) -> Problem:
    """The brick model, 840 weights, on a node of four ideal devices."""
    return with_software(exposed(problem(on=cluster(1))), **software)


def checked(given: Problem, text: str) -> StrategyEstimate:
    """The estimate of the checker."""
    return estimate_strategy(figures_of(given.model, given.cluster, given.job), table(given, text)[0])


@pytest.mark.parametrize(
    ("software", "gradients", "optimizer"),
    [
        ({}, 4, 12),  # fp32 gradients; master weight 4, moments 4 + 4
        ({"reduce_in_fp32": False}, 2, 12),
        (MOMENTS_IN_BF16, 4, 6),  # the 16 bits that a weight lacks, moments 2 + 2
        ({"reduce_in_fp32": False, **MOMENTS_IN_BF16}, 2, 6),
    ],
)
@pytest.mark.parametrize(("text", "shards"), [("dp=4,zero_stage=0", 1), ("dp=4,zero_stage=1", 4)])
def test_bytes_per_weight(
    software: dict[str, Any], gradients: int, optimizer: int, text: str, shards: int
) -> None:
    given = one_node(**software)
    own = result_of(given, table(given, text)[0])
    assert own.memory["gradients"] == pytest.approx(840 * gradients)
    assert own.memory["optimizer"] == pytest.approx(840 * optimizer / shards)
    found = checked(given, text)
    assert found.memory == pytest.approx(dict(own.memory))
    assert found.step_time_s == pytest.approx(own.step_time_s)


def test_moments_on_the_host() -> None:
    """Of 310 weights of a stage with an end: 4 B of moments, 2 B of remainders, 2 B that return."""
    given = one_node(**MOMENTS_IN_BF16)
    text = "pp=4,offload=optimizer"
    assert peaks_of(given, table(given, text)).host_bytes[0] == pytest.approx(310 * 8)
    assert checked(given, text).host_bytes == pytest.approx(310 * 8)


@pytest.mark.parametrize(
    ("software", "nbytes"),
    [
        ({}, 30),  # gradient 4, master weight 2 * 4, moments 2 * 8, the compute copy written 2
        ({"reduce_in_fp32": False}, 28),
        (
            MOMENTS_IN_BF16,
            20,
        ),  # gradient 4, remainder 2 * 2, moments 2 * 4, the compute copy read and written
    ],
)
def test_traffic_of_an_update(software: dict[str, Any], nbytes: int) -> None:
    """840 weights at 1000 B/s."""
    given = one_node(**software)
    assert end_of(given, "dp=4").optimizer_s[0] == pytest.approx(840 * nbytes / 1000)
    assert checked(given, "dp=4").breakdown["optimizer"] == pytest.approx(840 * nbytes / 1000)


@pytest.mark.parametrize("is_parallel", ["yes", "no"])
@pytest.mark.parametrize("needs_sequence_parallel", [True, False])
def test_overlap_only_with_sequences_in_parallel(needs_sequence_parallel: bool, is_parallel: str) -> None:
    """A micro-batch communicates for 2 s in each of four bricks, forward and backward, 1 s in the head and
    1 s in the embedding, which has no matmul. Of four micro-batches, 0.2 * (8 * 2 + 1) s each overlap."""
    text = f"tp=2,dp=2,sequence_parallel={is_parallel}"
    given = one_node(tensor_overlap=0.2, needs_sequence_parallel=needs_sequence_parallel)
    overlaps = is_parallel == "yes" or not needs_sequence_parallel
    expected_s = 4 * 18.0 - (4 * 3.4 if overlaps else 0.0)
    found = result_of(given, table(given, text)[0])
    assert found.breakdown["tensor_communication"] == pytest.approx(expected_s)
    assert checked(given, text).breakdown["tensor_communication"] == pytest.approx(expected_s)


@pytest.mark.parametrize(
    "software",
    [
        {"tensor_overlap": 0.2, "needs_sequence_parallel": True},
        {"reduce_in_fp32": False},
        MOMENTS_IN_BF16,
    ],
)
def test_single_stages_cost_the_same(software: dict[str, Any]) -> None:
    """A pipeline of one stage with tp 2: the parts of an uneven plan are priced as a uniform strategy."""
    given = one_node(**software)
    text = "tp=2,dp=2,sequence_parallel=yes,zero_stage=1"
    own = result_of(given, table(given, text)[0])
    kinds = stage_kinds_of(given, [(2, 1)], 1)
    one = np.ones((1, 1))
    shape = StageShape(layers=4 * one.astype(int), in_flight=one, is_first=one, is_last=one, replicas=(2,))
    price = stage_costs(kinds, shape)
    step_s = 4 * (price.forward_s + price.backward_s[0]).sum() + price.reduce_s[0].sum()
    assert step_s + price.gather_s.sum() + price.end_s.max() == pytest.approx(own.step_time_s)
    assert stage_bytes(kinds, shape).device[0].max() == pytest.approx(own.peak_memory.device)
