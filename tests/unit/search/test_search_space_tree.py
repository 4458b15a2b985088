"""The tree of the space: order of its options, expansion of tables, and the two modes of the search."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.property.search_instances import instance
from tests.property.search_space_reference import SpaceTwin, keeps

from shardwise.search import plan
from shardwise.search.space import Space, expanded
from shardwise.strategy import SCHEDULES, Column, StrategyTable, largest_stage
from shardwise.ties import PROVEN_TIE

MANY = np.array([64])
"""Micro-batches, more than limited schedules have in flight."""


def space(**changes: Any) -> Space:
    plain: dict[str, Any] = {
        "name": "default", "devices": 12, "layers": 7, "experts": False, "global_batch_size": 12, "fixed": {},
    }  # fmt: skip
    return Space(**{**plain, **changes})


def test_defaults_come_first() -> None:
    """Of candidates with equal costs the first is the answer: the one with the most default values."""
    tree = space()
    assert tree.variants(3).schedule[0] == 0
    assert [int(end[0]) for end in tree.splits(3).values()] == [2, 2]
    assert [int(end[0]) for end in tree.splits(2).values()] == [3, 4]
    assert [int(degree[0]) for degree in tree.shards(6).values()] == [1, 1, 1]
    assert int(tree.recomputes[0]) == 0
    assert int(tree.offloads[0]) == 0


def test_a_family_is_bounded_as_its_schedule_with_most_in_flight() -> None:
    for family in space().variants(2).families.values():
        one = family.representative(2)
        assert (one.fewest_in_flight(2, MANY) * one.vpp >= family.fewest_in_flight(2, MANY)).all()
        assert one.vpp[0] == family.vpp.min()
        if SCHEDULES.index("zb_h1") in family.schedule:
            assert SCHEDULES[int(one.schedule[0])] == "zb_h2"


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("core", [False, True])
@pytest.mark.parametrize(("devices", "layers", "batch"), [(1, 1, 1), (4, 3, 2), (6, 2, 3), (3, 6, 5)])
def test_the_tree_has_every_candidate_once(
    core: bool, moe: bool, devices: int, layers: int, batch: int
) -> None:
    tree = space(
        name="core" if core else "default",
        devices=devices,
        layers=layers,
        experts=moe,
        global_batch_size=batch,
    )
    twin = SpaceTwin(core=core, devices=devices, layers=layers, moe=moe, batch=batch)
    rows = list(leaves(tree))
    assert len(rows) == len(set(rows))
    assert set(rows) == set(twin.candidates())


@pytest.mark.parametrize(
    "fixed",
    [
        {"tp": 2},
        {"zero_stage": 2},
        {"dp_replicate": 2},
        {"dp_shard": 2, "zero_stage": 1},
        {"recompute_layers": 2},
    ],
)
def test_fixed_fields_prune_the_tree(fixed: dict[str, int]) -> None:
    twin = SpaceTwin(core=False, devices=4, layers=3, moe=False, batch=4)
    rows = set(leaves(space(devices=4, layers=3, global_batch_size=4, fixed=fixed)))
    assert rows == {strategy for strategy in twin.candidates() if keeps(strategy, fixed)}


def leaves(tree: Space) -> StrategyTable:
    """All levels of the tree expanded, one below the other."""

    def variants(pp: int) -> dict[str, Column]:
        found = tree.variants(pp)
        return {"schedule": found.schedule, "vpp": found.vpp}

    def layers(recompute: int, largest: int) -> dict[str, Column]:
        return {"recompute_layers": tree.recompute_layers(recompute, largest)}

    table = tree.grids(tree.degrees())
    _, table = expanded(table, [table.dp], tree.micro_batch_sizes)
    _, table = expanded(table, [table.pp], variants)
    _, table = expanded(table, [table.pp * table.vpp], tree.splits)
    _, table = expanded(table, [0 * table.tp], lambda _: {"recompute": tree.recomputes})
    ends = (table.first_stage_layers, table.last_stage_layers)
    largest = largest_stage(tree.layers, table.pp * table.vpp, *ends)
    _, table = expanded(table, [table.recompute, largest], layers)
    _, table = expanded(table, [table.dp * table.cp], tree.shards)
    _, table = expanded(table, [0 * table.tp], lambda _: {"offload": tree.offloads})
    assert int(tree.count_below_grids(tree.grids(tree.degrees())).sum()) == len(table)
    return table


def test_expansion_keeps_the_order_of_parents_and_options() -> None:
    tree = space(devices=2)
    table = tree.grids(tree.degrees())
    options = {1: np.array([10, 20]), 2: np.array([30])}
    parent, rows = expanded(table, [table.dp], lambda dp: {"micro_batch_size": options[dp]})
    expected = [(p, int(size)) for p, dp in enumerate(table.dp) for size in options[int(dp)]]
    assert list(zip(parent.tolist(), rows.micro_batch_size.tolist(), strict=True)) == expected
    assert rows.tp.tolist() == [int(table.tp[p]) for p, _ in expected]


@pytest.mark.parametrize("seed", [4, 10, 16, 3])
def test_exhaustive_answers_are_the_same(seed: int) -> None:
    """Through the public interface: equal times, equal parts of the ledger, and nothing pruned."""
    question = replace(instance(seed).question, top=4, use_all=True)
    bounded, whole = plan(question), plan(replace(question, exhaustive=True))
    times_s = [[r.step_time_s for r in (answer.best, *answer.runners_up)] for answer in (bounded, whole)]
    assert times_s[0] == pytest.approx(times_s[1], rel=1e-12)
    certificate = whole.certificate
    assert certificate.cut_by_bound == 0
    assert certificate.enumerated == bounded.certificate.enumerated
    assert certificate.enumerated == sum(certificate.rejected.values()) + certificate.simulated
    assert bounded.certificate.gap == 0.0
    assert bounded.certificate.lower_bound_s == bounded.certificate.best_s == bounded.best.step_time_s


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, 16])
def test_runners_up_differ_in_kind(seed: int) -> None:
    answer = plan(replace(instance(seed).question, top=8))
    results = (answer.best, *answer.runners_up)
    kinds = {
        (s.tp, s.cp, s.pp, s.dp, s.ep, s.etp, s.schedule, s.recompute) for s in (r.strategy for r in results)
    }
    assert len(kinds) == len(results)
    times = [r.step_time_s for r in results]
    assert times == pytest.approx(sorted(times), rel=PROVEN_TIE)  # equal but for rounding: in text order
