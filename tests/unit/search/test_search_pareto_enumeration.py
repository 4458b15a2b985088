"""Regions of a space that primal heuristics search first: they are part of the space, and contain the known
strategies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from shardwise.cluster import load_cluster
from shardwise.model import load_model
from shardwise.search import BranchAndBound, Fastest, Question
from shardwise.search.bnb import solver
from shardwise.search.bnb.branch import SubtreeSearch
from shardwise.search.bnb.heuristics import (
    NeighbourhoodSpace,
    RestrictedSpace,
    neighbourhood_space,
    restricted_space,
)
from shardwise.search.bnb.incumbent import Goal, Tradeoff
from shardwise.search.space import Degrees, Space
from shardwise.strategy import SCHEDULES, Job, Strategy, StrategyTable

BATCH = 48


def space(*, experts: bool = False, axes: Mapping[str, tuple[object, ...]] | None = None) -> Space:
    return Space("default", 12, 9, experts, BATCH, {}, axes or {})


def known(**changes: Any) -> StrategyTable:
    fields: dict[str, Any] = {
        "tp": 1, "pp": 1, "vpp": 1, "cp": 1, "cp_kind": "ring", "ep": 1, "etp": 1, "dp": 1, "param_shard": 1,
        "grad_shard": 1, "optim_shard": 1, "micro_batch_size": 1, "schedule": "1f1b",
        "sequence_parallel": False, "recompute": "none", "recompute_layers": 0, "offload": "none",
        "axis_order": "tp-cp-dp-pp", "first_stage_layers": 9, "last_stage_layers": 9,
    }  # fmt: skip
    return StrategyTable.of([Strategy(**(fields | changes))])


def degrees_of(table: StrategyTable) -> set[Degrees]:
    columns = (table.tp, table.cp, table.dp, table.pp)
    return set(zip(*(column.tolist() for column in columns), strict=True))


def choices(part: Space, devices: int) -> dict[str, set[tuple[int, ...]]]:
    """All options of a region, by level."""
    found: dict[str, set[tuple[int, ...]]] = {"grids": set(), "splits": set(), "layers": set()}
    table = part.grids(part.degrees())
    names = ("tp", "cp", "dp", "pp", "etp", "ep", "axis_order", "cp_kind", "sequence_parallel")
    found["grids"] = set(zip(*(getattr(table, name).tolist() for name in names), strict=True))
    found["kept"] = {(kind, offload) for kind in part.recomputes for offload in part.offloads}
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    found["sizes"] = {
        (dp, size) for dp in divisors for size in part.micro_batch_sizes(dp)["micro_batch_size"]
    }
    found["shards"] = {
        (ranks, *shards) for ranks in divisors for shards in zip(*part.shards(ranks).values(), strict=True)
    }
    found["schedules"] = {
        (pp, *pair)
        for pp in divisors
        for pair in zip(part.variants(pp).schedule.tolist(), part.variants(pp).vpp.tolist(), strict=True)
    }
    for stages in range(1, 10):
        found["splits"] |= {(stages, *ends) for ends in zip(*part.splits(stages).values(), strict=True)}
        found["layers"] |= {(stages, n) for n in part.recompute_layers(2, stages).tolist()}
    return found


CENTERS = known(
    tp=2, dp=2, pp=3, schedule="interleaved_1f1b", vpp=3, recompute="selective", offload="optimizer",
    first_stage_layers=1, last_stage_layers=1,
)  # fmt: skip


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("axes", [{}, {"vpp": (3,)}, {"micro_batch_size": (3,), "recompute": ("full",)}])
def test_a_heuristic_space_is_a_subset_of_the_space(
    experts: bool, axes: dict[str, tuple[object, ...]]
) -> None:
    whole = space(experts=experts, axes=axes)
    every = choices(whole, 12)
    for part in (restricted_space(whole), neighbourhood_space(whole, CENTERS)):
        for level, some in choices(part, 12).items():
            assert some <= every[level], level


def test_a_neighbourhood_holds_its_centers() -> None:
    part = neighbourhood_space(space(), CENTERS)
    assert (2, 1, 2, 3) in part.degrees()
    assert (3, SCHEDULES.index("interleaved_1f1b"), 3) in choices(part, 12)["schedules"]
    row = CENTERS[0]
    code = (CENTERS.recompute[0], CENTERS.offload[0])
    assert code in choices(part, 12)["kept"] and (row.recompute, row.offload) == ("selective", "optimizer")


def test_degrees_next_to_known_ones() -> None:
    """One prime factor moved from one of tp, cp, dp, pp = 2, 1, 2, 3 to another: tp 2 to cp, dp, pp; dp 2 to
    tp, cp, pp; pp 3 to tp, cp, dp.
    """
    neighbours = {
        (2, 1, 2, 3),
        (1, 2, 2, 3), (1, 1, 4, 3), (1, 1, 2, 6),
        (4, 1, 1, 3), (2, 2, 1, 3), (2, 1, 1, 6),
        (6, 1, 2, 1), (2, 3, 2, 1), (2, 1, 6, 1),
    }  # fmt: skip
    assert set(neighbourhood_space(space(), CENTERS).degrees()) == neighbours


def test_schedules_of_a_known_family() -> None:
    """Interleaved on 3 ranks: 9 // (3 vpp) layers per stage are 1 for vpp 2 and 3, so vpp 2 represents both
    unless 3 is known; a V has its own family.
    """
    for vpp, expected in ((3, [2, 3]), (2, [2])):
        centers = known(dp=4, pp=3, schedule="interleaved_1f1b", vpp=vpp)
        interleaved = neighbourhood_space(space(), centers).variants(3)
        assert {SCHEDULES[code] for code in interleaved.schedule} == {"interleaved_1f1b"}
        assert interleaved.vpp.tolist() == expected
    centers = known(pp=3, dp=4, schedule="zb_v", vpp=2)
    assert {SCHEDULES[code] for code in neighbourhood_space(space(), centers).variants(3).schedule} == {
        "zb_v",
        "dualpipe_v",
    }


def test_experts_next_to_known_ones() -> None:
    centers = known(dp=12, etp=1, ep=4)
    table = neighbourhood_space(space(experts=True), centers).grids([(1, 1, 12, 1)])
    pairs = set(zip(table.etp.tolist(), table.ep.tolist(), strict=True))
    # etp 1 or 2 (0.5 is none), ep 2 or 4 (8 does not divide 12).
    assert pairs == {(1, 2), (1, 4), (2, 2)}


def test_the_restricted_space_of_each_axis() -> None:
    restricted = restricted_space(space())
    table = restricted.grids(restricted.degrees())
    assert degrees_of(table) == degrees_of(space().grids(space().degrees()))
    assert set(table.axis_order.tolist()) == {0}
    assert (table.sequence_parallel[table.tp > 1] == 1).all()
    assert restricted.micro_batch_sizes(1)["micro_batch_size"].tolist() == [1, 2, 4, 8]
    ends = restricted.splits(3)
    assert np.unique(ends["first_stage_layers"]).tolist() == [3]
    assert ends["last_stage_layers"].tolist() == [3, 2, 1]


SMALL = Question(
    model=load_model("gpt2"),
    cluster=load_cluster("1x4xH100-SXM"),
    job=Job(seq_len=512, global_batch_size=4, dtype="bf16"),
    fixed={"recompute": "none", "offload": "none", "schedule": "1f1b", "zero_stage": 1, "cp": 1},
)
"""A space enlarged by axis orders: either tp 2 or dp 2 is the inner one."""


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[type[Space]]:
    """The classes of the regions that are searched."""
    parts: list[type[Space]] = []

    class Noted(SubtreeSearch):
        def __init__(self, problem: Any, part: Space, *others: Any, **options: Any) -> None:
            parts.append(type(part))
            super().__init__(problem, part, *others, **options)

    monkeypatch.setattr(solver, "SubtreeSearch", Noted)
    return parts


@pytest.mark.parametrize(
    ("goal", "name", "regions"),
    [
        (Fastest(2), "SMALL_SPACE", [RestrictedSpace, NeighbourhoodSpace, Space]),
        (Tradeoff(), "SMALL_SPACE_WITH_MEMORY", [RestrictedSpace, Space]),
    ],
)
def test_few_candidates_are_searched_at_once(
    goal: Goal,
    name: str,
    regions: list[type[Space]],
    searched: list[type[Space]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a limit one below the number of nodes, the search runs primal heuristics first and finds
    the same.
    """
    problem, space = SMALL.problem(), SMALL.candidates()
    once = BranchAndBound(problem, space, goal.copy()).run()
    assert {*searched} == {Space}
    for few, expected in ((once.enumerated, [Space]), (once.enumerated - 1, regions)):
        searched.clear()
        monkeypatch.setattr(solver, name, few)
        found = BranchAndBound(problem, space, goal.copy()).run().found
        assert list(dict.fromkeys(searched)) == expected
        first, second = ([(each.time_s, each.device_bytes) for each in some] for some in (once.found, found))
        np.testing.assert_allclose(first, second, rtol=1e-11)
