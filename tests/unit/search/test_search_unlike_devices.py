"""Strategies on unequal nodes: equal nodes give the plain estimate, and each stage depends on its
own node.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from shardwise.cluster import load_cluster
from shardwise.cost import Problem, StageEnds, bind
from shardwise.model import load_model
from shardwise.search import PipelineFigures, default_job, step_figures_over, worst_durations
from shardwise.search.step_times import step_figures
from shardwise.sim import Durations
from shardwise.strategy import Strategy, StrategyTable, complete


@cache
def problem(device: str, speed: float = 1.0) -> Problem:
    cluster = load_cluster(f"4x2x{device}", inter_node="10Gb/s")
    cluster = replace(cluster, nodes=tuple(replace(node, speed=speed) for node in cluster.nodes))
    model = load_model("opt-350m")
    return bind(model, cluster, default_job(model, cluster, seq_len=512, global_batch_size=32, dtype="fp16"))


def strategy(**fields: int | str) -> Strategy:
    return complete(
        {"micro_batch_size": 1, **fields}, devices=8, layers=24, experts=None, global_batch_size=32
    )


ALL = [
    strategy(dp=8), strategy(dp=4, tp=2), strategy(pp=4, dp=2), strategy(pp=2, tp=2, dp=2), strategy(pp=8),
    strategy(pp=4, dp=2, first_stage_layers=9, last_stage_layers=3), strategy(pp=4, tp=2, schedule="gpipe"),
    strategy(pp=4, dp=2, vpp=2, schedule="interleaved_1f1b"),
]  # fmt: skip


@pytest.mark.parametrize("device", ["T4", "V100-16G"])
def test_identical_nodes_have_the_plain_cost(device: str) -> None:
    table, mine = StrategyTable.of(ALL), problem(device)
    plain = step_figures(mine, table)
    for problems, nodes in (([mine], (0, 0, 0, 0)), ([mine, mine], (0, 1, 1, 0))):
        placed = step_figures_over(problems, table, nodes)
        np.testing.assert_allclose(placed.step_time_s, plain.step_time_s, rtol=1e-11)
        np.testing.assert_array_equal(placed.device_bytes, plain.device_bytes)


def test_replicas_on_a_slow_node_take_the_time_of_slow_nodes_only() -> None:
    """The reduction of all replicas overlaps with the backward of the slow ones, which ends last."""
    table, kinds = StrategyTable.of(ALL[:2]), [problem("V100-16G"), problem("V100-16G", 0.5)]
    fast, slow = (step_figures(kind, table).step_time_s for kind in kinds)
    assert (fast < slow).all()
    for nodes in ((0, 0, 0, 1), (1, 0, 0, 0)):
        np.testing.assert_allclose(step_figures_over(kinds, table, nodes).step_time_s, slow, rtol=1e-12)


def test_gathers_and_reductions_have_the_slowest_rate_and_overlap_with_own_passes() -> None:
    def figures(
        gathering_s: float, reduction_s: float, forward_s: float, backward_s: float
    ) -> PipelineFigures:
        ends = StageEnds(
            np.array([gathering_s]), np.array([reduction_s]), np.array([forward_s]), np.array([backward_s]),
            layers=np.array([2]), overlap=0.5,
        )  # fmt: skip
        durations = Durations.of(stages=1, forward_s=forward_s, backward_s=backward_s)
        return PipelineFigures(durations=durations, ends=ends, end_s=0.0, device_bytes=0.0, host_bytes=0.0)

    kinds = [figures(4.0, 10.0, 6.0, 4.0), figures(6.0, 8.0, 1.0, 20.0)]
    pipelines = np.array([[[0]], [[1]]])
    found = worst_durations(strategy(dp=8), kinds, pipelines)
    # Gathering takes 6 s, of which 3 may overlap in the second of two buckets: 6 - min(3, 6) / 2, and
    # 6 - min(3, 1) / 2. Reduction takes 10 s, of which 5 may: 10 - min(5, 4) / 2, and 10 - min(5, 20) / 2.
    assert found.gather_s.tolist() == [[4.5], [5.5]]
    assert found.reduce_s.tolist() == [[8.0], [7.5]]
    joined = worst_durations(strategy(dp=8), kinds[:1], pipelines[:1], joined=kinds)
    assert (joined.gather_s.tolist(), joined.reduce_s.tolist()) == ([[4.5]], [[8.0]])


def test_unequal_nodes_take_a_time_between_those_of_their_kinds() -> None:
    """No less than with the faster kind only, and no more than with the slower kind only."""
    table, kinds = StrategyTable.of(ALL), [problem("V100-16G"), problem("T4")]
    fast, slow = (step_figures(kind, table).step_time_s for kind in kinds)
    assert (fast < slow).all()
    for nodes in ((0, 0, 0, 1), (1, 0, 0, 0), (0, 1, 0, 1)):
        placed = step_figures_over(kinds, table, nodes).step_time_s
        assert (fast <= placed * (1 + 1e-12)).all()
        assert (placed <= slow * (1 + 1e-12)).all()
        assert (placed[:3] > fast[:3]).all()


def test_fewer_layers_on_a_slow_node_shorten_the_step() -> None:
    """The last of four stages is on the slow node: layers moved to the first stage make the step shorter, and
    with the slow node first they make it longer.
    """
    table = StrategyTable.of(
        [strategy(pp=4, dp=2, first_stage_layers=first, last_stage_layers=12 - first) for first in (4, 6, 9)]
    )
    kinds = [problem("V100-16G"), problem("T4")]
    last_slow = step_figures_over(kinds, table, (0, 0, 0, 1)).step_time_s
    first_slow = step_figures_over(kinds, table, (1, 0, 0, 0)).step_time_s
    assert last_slow[0] > last_slow[1] > last_slow[2]
    assert first_slow[0] < first_slow[1] < first_slow[2]


def test_memory_is_that_of_the_smallest_device_kind() -> None:
    table, kinds = StrategyTable.of(ALL), [problem("V100-16G"), problem("T4")]
    smallest = min(kinds, key=lambda kind: kind.usable_bytes)
    placed = step_figures_over(kinds, table, (0, 1, 0, 0))
    np.testing.assert_array_equal(placed.device_bytes, step_figures(smallest, table).device_bytes)
