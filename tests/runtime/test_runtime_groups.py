"""The process groups of a job in addition to the default one. They should be few: each gloo group has three
threads, one of which wakes a hundred times a second."""

from __future__ import annotations

import pytest
import torch
from tests.runtime.memory_tracker import fake_ranks
from tests.runtime.plans import make_plan
from tests.runtime.uneven_plans import make_uneven
from torch import distributed
from torch.distributed import DeviceMesh

from shardwise.plans import Plan
from shardwise.runtime import parallelize, reference_module
from shardwise.runtime.mesh import group_among, mesh_of
from shardwise.runtime.private import process_groups


def groups_of(plan: Plan, rank: int) -> list[list[int]]:
    """The ranks of each group that a job makes on one of the plan's ranks, in order."""
    with fake_ranks(rank, plan.cluster.devices):
        parallelize(reference_module(plan.model), plan)
        return sorted(map(distributed.get_process_group_ranks, process_groups()))


@pytest.mark.parametrize(
    ("text", "model", "groups"),
    [
        ("dp=4", "llama", [[2]]),  # replicas are all ranks; the other axes have one rank
        ("tp=4", "llama", [[2]]),
        ("tp=2,dp=2", "llama", [[0, 2], [2], [2, 3]]),
        ("pp=2,tp=2", "llama", [[0, 2], [2], [2, 3]]),
        ("pp=2,dp=2", "gpt", [[0, 2], [0, 2], [2], [2, 3]]),  # a tied table has a group of its own
        ("pp=4", "gpt", [[2]]),  # ... of which this rank has neither
        ("cp=4,cp_kind=ring", "llama", [[0, 1, 2, 3], [2]]),  # keys do not wait for gradient reductions
        ("dp=4,ep=2", "mixtral", [[0, 2], [2], [2], [2, 3]]),  # experts have their own mesh
    ],
)
def test_axes_of_one_rank_share_a_group_and_all_ranks_are_the_default_one(
    text: str, model: str, groups: list[list[int]]
) -> None:
    """On the third of four ranks. `DeviceMesh` itself would make a group for each axis of one rank."""
    assert groups_of(make_plan(text, model=model), 2) == groups


@pytest.mark.parametrize(
    ("text", "rank", "groups"),
    [
        # PyTorch's pipeline stages request a group but use none; it is destroyed.
        ("8 l1 l3", 1, []),
        ("4 l4 + 4 l1 tp2l3", 3, [[2, 3]]),
        ("4 l4 + 4 l1 tp2l3", 0, []),
    ],
)
def test_a_rank_of_an_uneven_plan_is_grouped_with_its_peers_alone(
    text: str, rank: int, groups: list[list[int]]
) -> None:
    """Ranks that own the same regions would share a further group; fake ranks report none."""
    assert groups_of(make_uneven(text), rank) == groups


def test_the_row_of_a_rank_is_its_group() -> None:
    """Rows may have every rank, or leave ranks without a group."""
    with fake_ranks(2, 4):
        assert group_among([[0, 1, 2, 3]]) is distributed.group.WORLD
        found = group_among([[0, 1], [2, 3]])
        assert found is not None and distributed.get_process_group_ranks(found) == [2, 3]
        assert group_among([[0, 3]]) is None


def test_a_mesh_has_the_ranks_and_groups_that_pytorch_would_give_it() -> None:
    """Along every axis, also for ranks that are not in order."""
    ranks = torch.arange(8).reshape(2, 1, 2, 2).permute(3, 1, 0, 2)
    with fake_ranks(5, 8):
        own, theirs = mesh_of(ranks, ("a", "b", "c", "d"), "cpu"), DeviceMesh("cpu", ranks)
        assert torch.equal(own.mesh, theirs.mesh) and own.get_coordinate() == theirs.get_coordinate()
        found, expected = (
            [distributed.get_process_group_ranks(group) for group in mesh.get_all_groups()]
            for mesh in (own, theirs)
        )
        assert found == expected == [[4, 5], [5], [1, 5], [5, 7]]


def test_a_mesh_of_one_rank_needs_no_group_but_the_default_one() -> None:
    with fake_ranks(0, 1):
        mesh = mesh_of(torch.zeros((1, 1), dtype=torch.int64), ("a", "b"), "cpu")
        assert not process_groups()
        assert mesh["a"].get_group() is mesh["b"].get_group() is distributed.group.WORLD
