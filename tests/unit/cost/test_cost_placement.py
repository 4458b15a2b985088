"""Placement of layers in closed form, compared with a list of every stage."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.cost.hand_made import brick_model, cluster, exposed, problem, table

from shardwise.cost import known_split, layer_counts_of, subproblem_of
from shardwise.strategy import layer_counts

SHAPES = (
    "pp=3", "pp=4", "pp=2", "pp=1", "pp=6", "pp=2,vpp=2", "pp=2,vpp=3", "pp=3,vpp=2", "pp=4,vpp=2",
    "pp=2,schedule=zb_v", "pp=3,schedule=zb_v", "pp=4,schedule=dualpipe_v",
)  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layers", [8, 11, 13])
def test_layers_on_stages_and_ranks(shape: str, layers: int) -> None:
    p = exposed(problem(brick_model((0,) * layers), cluster(3), batch=24))
    plain = table(p, shape)
    pp, stages = int(plain.pp[0]), int(plain.pp[0] * plain.vpp[0])
    is_v = "_v" in shape
    firsts = [layers] if stages == 1 else range(layers // stages + 1)
    for first in firsts:
        for last in [layers - first] if stages == 2 else firsts:
            rows = plain.replaced(first_stage_layers=np.array([first]), last_stage_layers=np.array([last]))
            found = layer_counts_of(
                subproblem_of(p, rows, known_split(layers, stages, np.array([first]), np.array([last])))
            )
            counts = layer_counts(layers, stages, first, last)
            rank_of = [2 * pp - 1 - s if is_v and s >= pp else s % pp for s in range(stages)]
            on = [sum(n for n, rank in zip(counts, rank_of, strict=True) if rank == r) for r in range(pp)]
            between = range(1, stages - 1)
            full = [max([counts[s] for s in between if rank_of[s] == r], default=0) for r in range(pp)]
            if pp == 1:
                assert found.on_first[0] == layers
                continue
            assert (found.on_first[0], found.on_last[0]) == (on[0], on[-1])
            assert found.least[0] == min((counts[s] for s in between), default=0)
            if pp > 2:
                assert (found.on_second[0], found.on_third[0]) == (on[1], on[-2])
                assert (found.full_second[0], found.full_third[0]) == (full[1], full[-2])
            if stages > pp:
                assert is_v or found.full_first[0] == full[0]
