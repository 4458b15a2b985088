"""Lower bounds of the time of subproblems by hand, for a stack of bricks without embedding and head, so that
all stages are equal.

A brick is 1.1 s forward, 1.2 s for the input gradient and 1.0 s for the weight gradient; a hop between stages
is one second; there are eight micro-batches on four stages. Expected values are the longest of a few paths,
without the end of the step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.unit.cost.hand_made import (
    brick_model,
    cluster,
    end_of,
    exposed,
    problem,
    table,
    with_efficiency,
    with_software,
)

from shardwise.cost import (
    Problem,
    Split,
    end_s,
    grids_of,
    known_split,
    layer_counts_of,
    lower_bound_bytes,
    lower_bound_s,
    peaks_of,
    subproblem_of,
)
from shardwise.cost.bounds.subproblem import traffic_of
from shardwise.search.step_times import step_times_s


def stack(layers: int = 4, **efficiency: Any) -> Problem:
    """A stack of bricks on four devices, eight samples."""
    model = brick_model((0,) * layers, embedding=(), head=())
    return exposed(problem(model, cluster(1, of=with_efficiency(**efficiency))))


def path_s(p: Problem, text: str, split: Split | None = None) -> float:
    """The lower bound of the strategy `text` (or of any with the given splits), without the end of
    the step.
    """
    rows, one = table(p, text), np.arange(1)
    own = known_split(p.model.layers, rows.pp * rows.vpp, rows.first_stage_layers, rows.last_stage_layers)
    grids = grids_of(p, rows)
    block, totals = subproblem_of(p, rows, own if split is None else split), grids.totals_at(one)
    traffic = traffic_of(p, grids, one, rows.param_shard, rows.grad_shard)
    return float(
        (lower_bound_s(p, block, layer_counts_of(block), totals, traffic) - end_s(p, block, totals))[0]
    )


def evaluated_s(p: Problem, text: str) -> float:
    return float(step_times_s(p, table(p, text))[0] - end_of(p, text).total_s[0])


@pytest.mark.parametrize(
    ("layers", "text", "expected"),
    [
        # All stages and hops, 13.2 + 6; rank 0 has four micro-batches between its first backward and its last
        # forward, 4 * 3.3; the last micro-batch passes three stages and hops each way, 3 * 5.3.
        (4, "pp=4", 19.2 + 13.2 + 15.9),
        # Rank 3 waits for three stages in both directions and works 8 * 3.3: exact.
        (4, "pp=4,schedule=gpipe", 15.9 + 26.4),
        # Rank 0 gets its first gradient after 4.4 + 3.6 + 6, when it has done four forwards: four whole
        # micro-batches and four backwards of 2.2 remain.
        (4, "pp=4,schedule=zb_h1", 14.0 + 13.2 + 8.8),
        # Up to seven may be in flight.
        (4, "pp=4,schedule=zb_h2", 14.0 + 3.3 + 15.4),
        # Eight stages and fourteen hops, 40.4; rank 3 does both of its chunks four times, and the last
        # three times between its first backward and its last forward: exact.
        (8, "pp=4,vpp=2", 40.4 + 11 * 3.3),
        # Rank 3 waits for three forwards and hops.
        (8, "pp=4,schedule=zb_v", 6.3 + 8 * 6.6),
        (8, "pp=4,schedule=dualpipe_v", 6.3 + 8 * 6.6),
        # Two samples per rank.
        (4, "dp=4,zero_stage=1", 26.4),
        # A layer gathers 110 * 2 B over four ranks in each pass, 1.65 s, and reduces 3.3 s.
        (4, "dp=4,zero_stage=3", 2 * 4 * (3.3 + 6.6)),
        # Over two ranks, two layers per stage: 2.2 s, 2.2 s and 4.4 s; all stages and hops, two micro-batches
        # of rank 0, and the last stage with its hops: exact.
        (4, "pp=2,zero_stage=3", 32.8 + 2 * 15.4 + 17.4),
    ],
)
def test_the_longest_path(layers: int, text: str, expected: float) -> None:
    p = stack(layers)
    assert path_s(p, text) == pytest.approx(expected, rel=1e-12)
    assert expected <= evaluated_s(p, text) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("layers", "text", "expected"),
    [
        # As above: 4 s + 6, 4 s and 3 (s + 2) with s = 3.4, 4.4, and 7.7 for one of two layers.
        (4, "pp=4,recompute=selective", 11 * 3.4 + 12.0),
        (4, "pp=4,recompute=full", 11 * 4.4 + 12.0),
        (8, "pp=4,recompute_layers=1", 11 * 7.7 + 12.0),
        # 8 s + 14 and 11 s.
        (8, "pp=4,vpp=2,recompute=full", 19 * 4.4 + 14.0),
        (8, "pp=4,vpp=2,recompute=selective", 19 * 3.4 + 14.0),
        # A layer's 300 B take 6 s each way, which overlap with 1.1 s and 1.2 s: 3.3 + 4.9 + 4.8.
        (8, "pp=4,offload=activations", 11 * 26.0 + 12.0),
        (8, "pp=4,vpp=2,offload=activations", 19 * 13.0 + 14.0),
        # With full recomputation a layer saves 100 B, 2 s: 3.3 + 1.1 + 0.9 + 0.8.
        (8, "pp=4,offload=activations,recompute=full", 11 * 12.2 + 12.0),
        (8, "pp=4,vpp=2,offload=activations,recompute=full", 19 * 6.1 + 14.0),
    ],
)
def test_recomputation_and_offload_on_the_longest_path(layers: int, text: str, expected: float) -> None:
    p = stack(layers)
    assert path_s(p, text) == pytest.approx(expected, rel=1e-12)
    assert expected <= evaluated_s(p, text) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # 0.1 s for each action: 4 * 3.5 + 6, 4 * 3.5, 3 * 5.5.
        ("pp=4", 20.0 + 14.0 + 16.5),
        # 4 * 1.2 + 3 forward, 3 * 1.3 + 3 backward; 4 * 3.5, and 4 * 2.3.
        ("pp=4,schedule=zb_h1", 7.8 + 6.9 + 14.0 + 9.2),
    ],
)
def test_host_cost_on_the_longest_path(text: str, expected: float) -> None:
    p = with_software(stack(), host_action_s=0.1)
    assert path_s(p, text) == pytest.approx(expected, rel=1e-12)
    assert expected <= evaluated_s(p, text) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("layers", "text", "expected"),
    [
        # The split is open: two rounds of all stages and hops.
        (4, "pp=4", 2 * 19.2),
        # Stages that shrink by 7/8 balance waiting and working.
        (4, "pp=4,schedule=gpipe", 13.2 / (1 - 0.875**4)),
    ],
)
def test_any_split_of_layers_by_recomputation_and_offload(layers: int, text: str, expected: float) -> None:
    p = stack(layers)
    nothing = Split(*(np.array([n]) for n in (0, 0, 0, layers)))
    assert path_s(p, text, nothing) == pytest.approx(expected, rel=1e-12)
    assert expected <= path_s(p, text)


@pytest.mark.parametrize("text", ["pp=2", "pp=4", "pp=2,vpp=2", "dp=4,zero_stage=2", "pp=2,recompute=full"])
def test_bytes_of_a_known_split_are_exact(text: str) -> None:
    p = stack(8, fragmentation_ratio=0.5, context_bytes=100.0)
    rows, one = table(p, text), np.arange(1)
    split = known_split(8, rows.pp * rows.vpp, rows.first_stage_layers, rows.last_stage_layers)
    block, totals = subproblem_of(p, rows, split), grids_of(p, rows).totals_at(one)
    found = lower_bound_bytes(p, block, layer_counts_of(block), totals)
    np.testing.assert_allclose(found, peaks_of(p, rows).device_bytes, rtol=1e-12)
