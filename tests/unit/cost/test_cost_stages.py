"""Placement of layers, embedding and head: stages, ranks and kinds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.unit.cost.hand_made import brick_model, cluster, problem, table

from shardwise.cost import Problem
from shardwise.cost.problem import Patterns
from shardwise.cost.stages import Places, all_places, first_places

PATTERN = (1, 0, 0, 0, 1, 0, 0, 0)
"""Two of eight layers are of another kind."""


def given() -> Problem:
    return problem(brick_model(PATTERN), cluster(1))


def listed(column: Any) -> list[Any]:
    """The values of the only row."""
    return list(np.asarray(column)[..., 0].tolist())


def placed(text: str) -> Places:
    p = given()
    return all_places(p, table(p, text))


def test_layers_of_each_kind_before_each_layer() -> None:
    before = [[0, 0, 1, 2, 3, 3, 4, 5, 6], [0, 1, 1, 1, 1, 2, 2, 2, 2]]
    assert given().patterns.before.tolist() == [before]


def test_rows_have_layers_of_their_own_decoders() -> None:
    one, other = Patterns.of([PATTERN], 2), Patterns.of([(0, 1)], 2)
    patterns = Patterns.joined([one, other, one], [1, 2, 1])
    assert patterns.layers.tolist() == [8, 2, 2, 8]
    assert [patterns.count(kind).tolist() for kind in (0, 1)] == [[6, 1, 1, 6], [2, 1, 1, 2]]
    start, end = np.array([[0, 0, 1, 4]]), np.array([[4, 1, 2, 8]])
    assert patterns.between(start, end).tolist() == [[[3, 1, 0, 3]], [[1, 0, 1, 1]]]
    assert patterns.taken([1, 3]).between(start[:, [1, 3]], end[:, [1, 3]]).tolist() == [[[1, 3]], [[0, 1]]]
    assert Patterns.joined([one, one], [1, 2]).layers == 8


def test_one_stage_holds_everything() -> None:
    places = placed("pp=1")
    assert listed(places.layers) == [[6], [2]]
    assert [listed(end) for end in (places.has_embedding, places.has_head)] == [[1.0], [1.0]]


def test_a_pipeline_with_uneven_ends() -> None:
    # 1 layer first, 2 last; the 5 between go to two stages, the later gets 3. Layers: 1 | 00 | 010 | 00.
    places = placed("pp=4,first_stage_layers=1,last_stage_layers=2")
    assert listed(places.stage) == [0, 1, 2, 3]
    assert listed(places.rank) == [0, 1, 2, 3]
    assert listed(places.layers) == [[0, 2, 2, 2], [1, 0, 1, 0]]
    assert listed(places.has_embedding) == [1.0, 0.0, 0.0, 0.0]
    assert listed(places.has_head) == [0.0, 0.0, 0.0, 1.0]


def test_interleaved_stages_are_placed_round_robin() -> None:
    # Layers 10 | 00 | 10 | 00 on ranks 0, 1, 0, 1.
    places = placed("pp=2,vpp=2")
    assert listed(places.rank) == [0, 1, 0, 1]
    assert listed(places.layers) == [[1, 2, 1, 2], [1, 0, 1, 0]]


@pytest.mark.parametrize("schedule", ["zb_v", "dualpipe_v"])
def test_a_v_schedule_folds_back(schedule: str) -> None:
    # Layers 10 | 00 | 10 | 00 on ranks 0, 1, 1, 0.
    places = placed(f"pp=2,schedule={schedule}")
    assert listed(places.rank) == [0, 1, 1, 0]
    assert listed(places.has_head) == [0.0, 0.0, 0.0, 1.0]


def test_rows_with_fewer_stages_repeat_their_first() -> None:
    p = given()
    texts = ("pp=4", "pp=1", "pp=2,vpp=2", "pp=2")
    together = all_places(p, table(p, *texts))
    assert together.stage.shape == (4, 4)
    assert together.stage[:, 1].tolist() == [0, 0, 0, 0]
    assert together.stage[:, 3].tolist() == [0, 1, 0, 0]
    for row, text in enumerate(texts):
        alone = placed(text)
        stages = alone.stage.shape[0]
        for name in ("layers", "rank", "has_embedding", "has_head"):
            assert getattr(together, name)[..., :stages, row].tolist() == listed(getattr(alone, name))


def test_rows_of_different_stage_counts_share_a_table() -> None:
    p = problem(brick_model(PATTERN), cluster(3), batch=12)
    texts = ("pp=3", "pp=4", "pp=2", "pp=3,first_stage_layers=1")
    together = all_places(p, table(p, *texts))
    for row, text in enumerate(texts):
        alone = all_places(p, table(p, text))
        stages = alone.stage.shape[0]
        for name in ("layers", "rank", "has_embedding", "has_head"):
            columns = getattr(together, name)[..., row]
            assert columns[..., :stages].tolist() == listed(getattr(alone, name))
            assert (columns[..., stages:] == columns[..., :1]).all()


def test_the_first_places_are_the_first_stages() -> None:
    p = given()
    rows = table(p, "pp=4", "pp=2,vpp=2", "pp=2,schedule=zb_v", "pp=1", "pp=4,first_stage_layers=0")
    every, first = all_places(p, rows), first_places(p, rows)
    for name in ("stage", "rank", "layers", "has_embedding", "has_head"):
        assert getattr(first, name).tolist() == getattr(every, name)[..., :1, :].tolist()
