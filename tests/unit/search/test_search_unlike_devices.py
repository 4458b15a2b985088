"""Strategies on unequal nodes: equal nodes give the plain estimate, and each stage depends on its
own node.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from shardwise.cluster import load_cluster
from shardwise.cost import Problem, bind
from shardwise.model import load_model
from shardwise.search import default_job, step_figures_over
from shardwise.search.step_times import step_figures
from shardwise.strategy import Strategy, StrategyTable, complete


@cache
def problem(device: str) -> Problem:
    cluster = load_cluster(f"4x2x{device}", inter_node="10Gb/s")
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


def test_unequal_nodes_take_a_time_between_those_of_their_kinds() -> None:
    """No less than with the faster kind only; and no more than with the slower kind only, except that
    gradients may be reduced faster with that: it has slower devices, not a slower network.
    """
    table, kinds = StrategyTable.of(ALL), [problem("V100-16G"), problem("T4")]
    fast, slow = (step_figures(kind, table).step_time_s for kind in kinds)
    assert (fast < slow).all()
    for nodes in ((0, 0, 0, 1), (1, 0, 0, 0), (0, 1, 0, 1)):
        placed = step_figures_over(kinds, table, nodes).step_time_s
        assert (fast <= placed * (1 + 1e-12)).all()
        alone = table.dp == 1
        assert alone.sum() == 2 and (placed <= slow * (1 + 1e-12))[alone].all()
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
