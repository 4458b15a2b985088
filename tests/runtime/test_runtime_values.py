"""A model that is sharded before its memory is allocated equals, bit by bit, one that is sharded afterwards.
Ranks allocate only the weights that they hold, except for blocks with sharded states."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from unittest.mock import patch

import pytest
import torch
from tests.runtime.plans import make_plan
from tests.runtime.uneven_plans import make_uneven
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.plans import Plan
from shardwise.runtime import WorkerPool, devices, parallelize, reference_module, state_dict
from shardwise.runtime.gradients import local
from shardwise.runtime.graphs import GraphTrainingJob
from shardwise.runtime.initialization import initial_value, initialise
from shardwise.runtime.job import TrainingJob
from shardwise.runtime.parallelize import divided
from shardwise.runtime.regions import Region
from shardwise.runtime.uneven import UnevenTrainingJob
from shardwise.runtime.workers import Report

SEED = 3


def first_corner(value: Tensor, region: Region) -> Tensor:
    """Replaces `_part` by a mutant that forgets where the shard begins."""
    places = tuple(slice(0, stop - start) for start, stop in region[: value.dim()])
    return value[places]


def local_tensors(job: TrainingJob | UnevenTrainingJob) -> list[Tensor]:
    """All values of a rank: its weights, and those that it owns."""
    owned = [own for own, _ in job.owned.parameters] if isinstance(job, UnevenTrainingJob) else []
    return [local(parameter).detach() for parameter in (*job.parameters, *owned)]


def filled(
    report: Report, plan: Plan, part: Callable[[Tensor, Region], Tensor] | None
) -> tuple[bool, int, int]:
    """Whether a rank has the same values both ways, the number of elements that it holds, and the number that
    it allocated."""
    made: list[int] = []

    def placed(tensor: Tensor, device_type: str) -> Tensor:
        there = torch.empty_like(tensor, device=device_type)
        made.append(local(there).numel())
        return there

    whole = reference_module(plan.model)
    initialise(whole, seed=SEED, layers=plan.model.layers)
    job = parallelize(whole, plan)
    assert not isinstance(job, GraphTrainingJob)
    expected = local_tensors(job)
    with torch.device("meta"):
        module = reference_module(plan.model)
    with patch.object(devices, "_placed", placed):
        job = divided(module, plan)
    with patch.object(state_dict, "_part", part or state_dict._part):
        state_dict.fill_parameters(job, partial(initial_value, seed=SEED, layers=plan.model.layers))
    found = local_tensors(job)
    is_same = len(found) == len(expected) and all(map(torch.equal, found, expected))
    return is_same, sum(local(parameter).numel() for parameter in job.parameters), sum(made)


PLANS = [
    ("dp=2", "gpt", 2),
    ("dp=2,zero_stage=3", "llama", 2),
    ("tp=2,dp=2,zero_stage=1,micro_batch_size=4", "gpt", 4),
    ("pp=2,tp=2,schedule=1f1b", "gpt", 4),
    ("pp=2,schedule=zb_v,vpp=2,micro_batch_size=1", "gpt", 2),
    ("dp=4,ep=2,zero_stage=3", "mixtral", 4),
    ("tp=4,etp=2,micro_batch_size=4", "mixtral", 4),
]  # fmt: skip


@pytest.mark.parametrize(("text", "model", "ranks"), PLANS)
def test_a_sharded_model_has_the_initial_values_of_the_whole_one(
    team: WorkerPool, text: str, model: str, ranks: int
) -> None:
    plan = make_plan(text, model=model)
    whole = sum(prod(parameter.shape) for parameter in reference_module(plan.model).parameters())
    strategy = plan.best.strategy
    for is_same, elements, made in team.run(ranks, filled, plan, None):
        assert is_same
        assert (elements == whole) == (text == "dp=2")
        assert made == elements or (strategy.optim_shard > 1 and elements < made <= whole)


@pytest.mark.parametrize("text", ["5 tp2l4 + 3 l4", "8 tp2l1 l3"])
def test_an_uneven_model_has_the_initial_values_of_the_whole_one(team: WorkerPool, text: str) -> None:
    for is_same, elements, made in team.run(3, filled, make_uneven(text), None):
        assert is_same and made == elements


@pytest.mark.parametrize("plan", [make_plan(PLANS[2][0], model="gpt"), make_uneven("5 tp2l4 + 3 l4")])
def test_a_mutant_that_forgets_where_a_part_begins_is_caught(team: WorkerPool, plan: Plan) -> None:
    found = team.run(plan.cluster.devices, filled, plan, first_corner)
    assert not all(is_same for is_same, _, _ in found)


def _refused(report: Report, plan: Plan) -> str:
    with torch.device("meta"):
        module = reference_module(plan.model)
    with pytest.raises(ConfigError) as refused:
        parallelize(module, plan)
    return str(refused.value)


def test_a_module_without_values_is_refused(team: WorkerPool) -> None:
    (reported,) = set(team.run(2, _refused, make_plan("dp=2", model="gpt")))
    assert (
        reported
        == "module: is on the meta device; found parameters without values; allowed: initialized parameters"
    )
