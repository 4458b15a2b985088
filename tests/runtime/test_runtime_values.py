"""A model that is sharded before its memory is allocated equals, bit by bit, one that is sharded afterwards.
Ranks allocate only the weights that they hold, except for blocks with sharded states."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from math import prod
from unittest.mock import patch

import pytest
import torch
from tests.property.layout_instances import chain
from tests.runtime.graph_plans import sampled, sampled_in_stages
from tests.runtime.plans import make_plan
from tests.runtime.uneven_plans import make_uneven
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.plans import Plan
from shardwise.runtime import (
    WorkerPool,
    devices,
    graph_module,
    network_of,
    parallelize,
    reference_module,
    uneven,
    uniform,
)
from shardwise.runtime.distribute import divided
from shardwise.runtime.gradients import local
from shardwise.runtime.graphs import GraphTrainingJob
from shardwise.runtime.graphs.parameters import ShardedParameter
from shardwise.runtime.initialization import initialise
from shardwise.runtime.job import TrainingJob
from shardwise.runtime.regions import Region
from shardwise.runtime.uneven import UnevenTrainingJob
from shardwise.runtime.uniform import UniformTrainingJob
from shardwise.runtime.workers import Report

SEED = 3


def first_corner(value: Tensor, region: Region) -> Tensor:
    """Replaces `_part` by a mutant that forgets where the shard begins."""
    places = tuple(slice(0, stop - start) for start, stop in region[: value.dim()])
    return value[places]


def local_weights(job: TrainingJob) -> list[Tensor]:
    """The weights that a rank computes with."""
    if isinstance(job, GraphTrainingJob):
        return [param.weight for param in job.store.values()]
    assert isinstance(job, UniformTrainingJob | UnevenTrainingJob)
    return [local(parameter) for parameter in job.parameters]


def local_tensors(job: TrainingJob) -> list[Tensor]:
    """All values of a rank: its weights, and those that it owns."""
    owned: list[Tensor] = []
    if isinstance(job, UnevenTrainingJob):
        owned = [own for own, _ in job.owned.parameters]
    if isinstance(job, GraphTrainingJob):
        owned = [param.owned for param in job.store.values()]
    return [each.detach() for each in (*local_weights(job), *owned)]


def whole_module(plan: Plan) -> nn.Module:
    if plan.kind == "graph":
        return graph_module(plan.graph, seed=SEED)
    whole = reference_module(plan.model)
    initialise(whole, seed=SEED, layers=plan.model.layers)
    return whole


def filled(
    report: Report, plan: Plan, part: Callable[[Tensor, Region], Tensor] | None
) -> tuple[bool, int, int]:
    """Whether a rank has the same values both ways, the number of elements that it holds, and the number that
    it allocated."""
    made: list[int] = []

    def placed(tensor: Tensor, device_type: str) -> Tensor:
        there = torch.full_like(tensor, torch.nan, device=device_type)
        made.append(local(there).numel())
        return there

    expected = local_tensors(parallelize(whole_module(plan), plan))
    network = network_of(plan)
    with patch.object(devices, "placed", placed), patch("shardwise.runtime.graphs.job.placed", placed):
        job = divided(network.module(), plan)
    with ExitStack() as stack:
        for module in (uniform, uneven) if part else ():
            stack.enter_context(patch.object(module, "part_of", part))
        job.fill(network.values(seed=SEED, weights=None))
    found = local_tensors(job)
    is_same = len(found) == len(expected) and all(map(torch.equal, found, expected))
    return is_same, sum(each.numel() for each in local_weights(job)), sum(made)


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


CHAIN = chain(8, 6, 12, 5)
CHUNKS = ShardedParameter.chunks


def at_the_first_corner(param: ShardedParameter, own: Tensor) -> dict[tuple[int, ...], Tensor]:
    """Replaces `chunks` by a mutant that forgets where a chunk begins."""
    return {(0,) * box.dim(): box for box in CHUNKS(param, own).values()}


def filled_graphs(report: Report, plans: list[Plan], is_broken: bool) -> list[bool]:
    """For each plan, whether a rank has the same values both ways."""
    chunks = at_the_first_corner if is_broken else CHUNKS
    with patch.object(ShardedParameter, "chunks", chunks):
        return [filled(report, plan, None)[0] for plan in plans]


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_graph_has_the_initial_values_of_the_whole_one(team: WorkerPool, is_broken: bool) -> None:
    """Any storage of parameters and states, in fp32 and in bf16, and in stages."""
    plans = list(sampled(CHAIN, (4,), range(4)))
    plans += [replace(plan, job=replace(plan.job, dtype="bf16")) for plan in plans]
    plans += sampled_in_stages(CHAIN, (2,), (2,), 2, range(2))
    found = team.run(4, filled_graphs, plans, is_broken)
    assert all(map(all, found)) is not is_broken


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
