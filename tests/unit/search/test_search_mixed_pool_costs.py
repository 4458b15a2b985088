"""Costs of a mixed-pool stage by hand: its hops, its gradients, and the devices that it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.cluster import load_cluster
from shardwise.model import load_model
from shardwise.search import UnevenSpace
from shardwise.search.hetero import UnevenLimits
from shardwise.search.hetero.space import MixedPoolKind, UnevenSubproblem
from shardwise.search.hetero.stage_costs import StageCostModel, StageOptions
from shardwise.strategy import Job

SEQ_LEN, HIDDEN = 1024, 4096
NBYTES = 2.0 * SEQ_LEN * HIDDEN
"""Bytes of one row that a stage sends to the next one."""

SUBPROBLEM = UnevenSubproblem(pools=(0, 1), micro_batch_size=4, least=1, most=1)


@pytest.fixture(scope="module")
def options() -> StageOptions:
    return StageCostModel(space(4)).options(SUBPROBLEM)


def space(mixed_stage_rows: int) -> UnevenSpace:
    """Nodes of 8 A100-80G and of 4 V100-16G; four devices share a card of 10 Gb/s."""
    job = Job(seq_len=SEQ_LEN, global_batch_size=16, dtype="fp16")
    cluster = load_cluster("2x8xA100-80G+2x4xV100-16G", inter_node="10Gb/s")
    return UnevenSpace(
        load_model("llama-2-7b"), cluster, job, UnevenLimits(mixed_stage_rows=mixed_stage_rows)
    )


def place(options: StageOptions, tp: tuple[int, int], rows: tuple[int, int]) -> int:
    return options.stages[2].kinds.index(MixedPoolKind(tp, rows))


def test_a_mixed_pool_stage_takes_devices_of_both_pools_and_rows_of_every_microbatch(
    options: StageOptions,
) -> None:
    assert options.sites == ((0,), (1,), (0, 1))
    assert options.stage_devices[2][place(options, (4, 2), (3, 1))] == (4, 2)
    # 1, 2, 4, 8 of the eight devices by 1, 2, 4 of the four, by 1 + 3, 2 + 2, 3 + 1 rows.
    assert len(options.stages[2].kinds) == 4 * 3 * 3


def test_a_hop_waits_for_the_part_that_sends_longest(options: StageOptions) -> None:
    far_s = options.hops[2].far_s[:, 2, 1]
    # All devices of the part's node send at once, each 1 / tp of its rows, at about 0.7 of the bandwidth.
    for tp, rows in (((1, 1), (3, 1)), ((4, 1), (1, 3)), ((4, 2), (2, 2))):
        sent_s = max(rows[0] / tp[0], rows[1] / tp[1]) * NBYTES / (1.25e9 / 4)
        assert sent_s < far_s[place(options, tp, rows)] < 1.5 * sent_s
    assert (options.hops[2].near_s == options.hops[2].far_s).all()


def test_both_parts_are_replicas_that_reduce_between_the_pools(options: StageOptions) -> None:
    reduced_s = options.stages[2].reduce_s[:, 0, 2, 0, 2]
    assert (options.stages[0].reduce_s[:, 0, 2, 0, 2] == 0.0).all()
    # Two layers of 202 M parameters: 4 bytes each, of which each of two replicas sends half. Other devices of
    # the nodes send at once; less than a second overlaps with the backward. The part with tp 1 sends all of
    # it.
    sent_s = 2 * 202e6 * 4 / 2 / (1.25e9 / 4)
    for tp in ((1, 1), (4, 1), (4, 4)):
        found_s = reduced_s[place(options, tp, (3, 1))]
        assert sent_s / min(tp) - 1.0 < found_s < 1.5 * sent_s / min(tp)


def test_the_slower_part_decides_the_cost(options: StageOptions) -> None:
    plain = StageCostModel(space(1)).options(replace(SUBPROBLEM, micro_batch_size=2))
    fast_s, slow_s = (stages.forward_s[0, 2, 0, 2] for stages in plain.stages)
    forward_s = options.stages[2].forward_s[:, 2, 0, 2]
    # Two rows take the V100 longer than the A100; one row less makes it faster, one more slower.
    even_s = forward_s[place(options, (1, 1), (2, 2))]
    assert fast_s < slow_s == even_s
    assert forward_s[place(options, (1, 1), (3, 1))] < 0.7 * even_s
    assert 1.4 * even_s < forward_s[place(options, (1, 1), (1, 3))] < 1.6 * even_s


def test_identical_pipelines_and_other_microbatches_have_no_mixed_pool_stages() -> None:
    job = Job(seq_len=SEQ_LEN, global_batch_size=16, dtype="fp16")
    space = UnevenSpace(
        load_model("gpt2"), load_cluster("1x2xT4+1x2xL4"), job, UnevenLimits(mixed_stage_rows=4)
    )
    assert space.pairs(SUBPROBLEM) == ((0, 1),)
    for change in ({"is_alike": True}, {"micro_batch_size": 1}, {"micro_batch_size": 8}, {"pools": (0,)}):
        assert space.pairs(replace(SUBPROBLEM, **change)) == ()
