"""Checkpoints of graph plans: a resumed run equals the uninterrupted one bit by bit under the same plan, and
to tolerance under any other plan of the graph. Foreign checkpoints are refused; a killed run resumes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.property.layout_instances import chain, mlp
from tests.runtime.captured_equality import graph_of
from tests.runtime.graph_modules import data_of, module_of
from tests.runtime.graph_plans import (
    alone,
    by_rules,
    plan_with,
    sampled,
    sampled_in_stages,
    staged_by_rules,
)
from tests.runtime.graph_recompute import (
    BEFORE,
    LOADING_MUTANTS,
    SAVING_MUTANTS,
    CheckpointedRun,
    loads,
    narrow,
    saves,
    whole_losses,
)
from tests.runtime.plans import make_plan
from tests.runtime.test_runtime_checkpoint import check_survives, undisturbed
from tests.runtime.test_runtime_graphs import TOLERANCE
from tests.runtime.test_runtime_manifest import committed
from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata

from shardwise.errors import ConfigError
from shardwise.graph import OpGraph, OpNode, scaled
from shardwise.plans import Plan
from shardwise.runtime import AsyncCheckpoint, WorkerPool, graph_module, load, parallelize, resumable
from shardwise.runtime.checkpoint import folder_of
from shardwise.runtime.graphs.placements import boxes_of_range, extents
from shardwise.runtime.network import graph_hash
from shardwise.runtime.workers import Report

CHAIN = chain(8, 6, 12, 5)
UNEVEN = chain(12, 7, 11, 5)


def data(op: OpNode) -> Sequence[str]:
    return ("split b",)


def columns(op: OpNode) -> Sequence[str]:
    return ("split f", "split g", "split v")


@cache
def layouts(graph: str) -> list[Plan]:
    """Any rule, placement, storage and use on 1, 2 and 4 processes, also in stages."""
    of = {"chain": CHAIN, "uneven": UNEVEN}[graph]
    return [
        alone(of),
        *sampled(of, (2,), range(5)),
        *sampled(of, (2, 2), range(3)),
        *sampled_in_stages(of, (1,), (2,), 2, range(2)),
        *sampled_in_stages(of, (2,), (3,), 4, range(3)),
        *sampled_in_stages(of, (1,), (1, 2, 4), 2, range(1)),
    ]


def with_optimizer(plan: Plan, optimizer: Any) -> Plan:
    return replace(plan, job=replace(plan.job, optimizer=optimizer))


def run_all(
    team: WorkerPool,
    work: Callable[..., list[CheckpointedRun]],
    cases: Sequence[tuple[Plan, str]],
    *more: Any,
) -> list[list[CheckpointedRun]]:
    """Results of `work` on each rank in each case; cases with the same number of ranks run together."""
    found: dict[int, list[CheckpointedRun]] = {}
    for ranks in sorted({plan.devices for plan, _ in cases}):
        own = [number for number, (plan, _) in enumerate(cases) if plan.devices == ranks]
        message = team.run(ranks, work, [cases[number] for number in own], *more)
        found |= dict(zip(own, map(list, zip(*message, strict=True)), strict=True))
    return [found[number] for number in range(len(cases))]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("graph", ["chain", "uneven"])
def test_a_run_resumes_under_any_other_layout(
    team: WorkerPool, tmp_path: Path, graph: str, optimizer: str, full: bool
) -> None:
    """Every parameter and state is loaded bit by bit on every rank, and the losses equal those of one
    process."""
    plans = [with_optimizer(plan, optimizer) for plan in layouts(graph)]
    pairs = [(before, after) for before in plans for after in plans if before is not after]
    pairs = pairs if full else random.Random(graph + optimizer).sample(pairs, 2)
    whole = whole_losses(plans[0])
    roots = [str(tmp_path / str(number)) for number in range(len(pairs))]
    saved = run_all(team, saves, [(pair[0], root) for pair, root in zip(pairs, roots, strict=True)])
    loaded = run_all(team, loads, [(pair[1], root) for pair, root in zip(pairs, roots, strict=True)])
    for before, after in zip(saved, loaded, strict=True):
        assert before[0].losses == pytest.approx(whole, rel=TOLERANCE)
        assert after[0].losses == pytest.approx(whole[BEFORE:], rel=TOLERANCE)
        assert all(rank.tensors == before[0].tensors for rank in (*before, *after))
        assert len(before[0].tensors) == (14 if optimizer == "sgd" else 21)  # 7 parameters and their states


def test_a_run_resumes_bit_by_bit_under_the_same_plan(team: WorkerPool, tmp_path: Path, full: bool) -> None:
    plans = [*layouts("uneven")[1 :: 2 if full else 3], *map(narrow, layouts("chain")[1 : 5 if full else 3])]
    cases = [(plan, str(tmp_path / str(number))) for number, plan in enumerate(plans)]
    for saved, loaded in zip(run_all(team, saves, cases), run_all(team, loads, cases), strict=True):
        assert loaded[0].losses == saved[0].losses[BEFORE:]


def test_a_bf16_run_resumes_under_another_layout(team: WorkerPool, tmp_path: Path, full: bool) -> None:
    """Weights are saved in fp32, whatever the compute dtype."""
    plans = [narrow(plan) for plan in layouts("uneven")]
    pairs = random.Random(0).sample([(one, other) for one in plans for other in plans], 4 if full else 2)
    roots = [str(tmp_path / str(number)) for number in range(len(pairs))]
    saved = run_all(team, saves, [(pair[0], root) for pair, root in zip(pairs, roots, strict=True)])
    loaded = run_all(team, loads, [(pair[1], root) for pair, root in zip(pairs, roots, strict=True)])
    for before, after in zip(saved, loaded, strict=True):
        assert all(rank.tensors == before[0].tensors for rank in after)
        assert {dtype for dtype, _ in before[0].tensors.values()} == {"torch.float32"}
        assert after[0].losses == pytest.approx(before[0].losses[BEFORE:], rel=0.01)


def test_a_checkpoint_has_every_element_once(team: WorkerPool, tmp_path: Path, full: bool) -> None:
    """Replicas along an axis are written by one rank, state shards as boxes of the whole tensor."""
    plans = layouts("uneven")[1 :: 1 if full else 2]
    cases = [(plan, str(tmp_path / str(number))) for number, plan in enumerate(plans)]
    run_all(team, saves, cases)
    names = ["w_up", "b_up", "w_down", *(f"middle.{n}.{of}" for n in range(2) for of in ("scale", "mix"))]
    boxes = 0
    for _, root in cases:
        stored = FileSystemReader(folder_of(root, BEFORE)).read_metadata().state_dict_metadata
        tensors = {name: one for name, one in stored.items() if isinstance(one, TensorStorageMetadata)}
        states = ("step", "exp_avg", "exp_avg_sq")
        assert set(tensors) == set(stored) == {
            *(f"model.{name}" for name in names),
            *(f"optimizer.{name}.{state}" for name in names for state in states),
        }  # fmt: skip
        for one in tensors.values():
            assert prod(one.size) == sum(prod(chunk.sizes) for chunk in one.chunks)
        boxes = max(boxes, *(len(one.chunks) for one in tensors.values()))
    assert boxes > 4  # the shards of four ranks do not end at rows


@pytest.mark.parametrize(
    "sizes", [(), (1,), (7,), (3, 4), (2, 3, 5), (1, 1, 4), (4, 1, 2), (2, 1, 3, 2), (3, 0)]
)
def test_boxes_of_a_run_are_its_elements_in_their_order(sizes: tuple[int, ...]) -> None:
    """Compared with counting the elements from first to stop, for every run there is."""
    whole = torch.arange(prod(sizes)).reshape(sizes)
    for first in range(prod(sizes) + 1):
        for stop in range(first, prod(sizes) + 1):
            boxes = list(boxes_of_range(sizes, first, stop))
            found = [whole[tuple(slice(*ends) for ends in box)].flatten() for box in boxes]
            assert torch.cat([torch.empty(0, dtype=torch.long), *found]).tolist() == list(range(first, stop))
            assert all(prod(extents(box)) for box in boxes)
            assert len(boxes) <= max(1, 2 * len(sizes) - 1)


EVEN = chain(8, 6, 12, 4)
HALVED = list(sampled(EVEN, (2,), range(4)))
"""Two processes with halves of the sharded tensors, and state shards of the others."""


def furthest(found: Sequence[Sequence[CheckpointedRun]]) -> float:
    """The largest error of a loss, over all ranks and cases."""
    whole = whole_losses(HALVED[0])
    return max(
        abs(loss / right - 1.0)
        for case in found
        for rank in case
        for loss, right in zip(rank.losses, whole[BEFORE:], strict=True)
    )


Cases = Sequence[tuple[Plan, str]]


@pytest.fixture(scope="module")
def halved(_team_of_session: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """Plans, and a folder with a checkpoint of each."""
    cases = [(plan, str(tmp_path_factory.mktemp("halved"))) for plan in HALVED]
    run_all(_team_of_session, saves, cases)
    return cases


def test_a_saved_state_is_loaded_unchanged(team: WorkerPool, halved: Cases) -> None:
    assert furthest(run_all(team, loads, halved)) < TOLERANCE


@pytest.mark.parametrize("mutant", LOADING_MUTANTS)
def test_a_broken_load_is_caught(team: WorkerPool, halved: Cases, mutant: str) -> None:
    assert furthest(run_all(team, loads, halved, mutant)) > 100 * TOLERANCE


@pytest.mark.parametrize("mutant", SAVING_MUTANTS)
def test_a_broken_save_is_caught(team: WorkerPool, tmp_path: Path, mutant: str) -> None:
    cases = [(plan, str(tmp_path / str(number))) for number, plan in enumerate(HALVED)]
    run_all(team, saves, cases, mutant)
    assert furthest(run_all(team, loads, cases)) > 100 * TOLERANCE


def test_parts_that_do_not_make_up_the_whole_are_no_checkpoint(team: WorkerPool, tmp_path: Path) -> None:
    """Where halves differ in size, a chunk at another rank's place is noticed when it is written."""
    plan = plan_with(UNEVEN, (2,), by_rules(UNEVEN, (2,), columns))
    with pytest.raises(ConfigError, match="cannot be written: failed to validate global plan"):
        team.run(2, saves, [(plan, str(tmp_path))], "a rank writes where another should")


def test_a_run_survives_a_killed_rank_with_the_same_losses(team: WorkerPool, tmp_path: Path) -> None:
    """A rank dies in the backward pass, another while a checkpoint is committed: at most one interval is
    repeated, and every loss is that of the undisturbed run, bit by bit."""
    plan = next(sampled(CHAIN, (2,), [3]))
    check_survives(plan, tmp_path, undisturbed(team, plan), [(1, 3, "backward"), (0, 6, "committing")])


def test_a_run_in_stages_survives_a_killed_rank(team: WorkerPool, tmp_path: Path) -> None:
    plan = staged_by_rules(CHAIN, (1,), (2,), 4, data)
    check_survives(plan, tmp_path, undisturbed(team, plan), [(1, 4, "writing"), (0, 6, "optimizer")])


def saved_once(report: Report, plan: Plan, root: str) -> None:
    job = parallelize(graph_module(plan.graph, seed=0), plan)
    AsyncCheckpoint(job, root, step=0, data="random").wait()


def test_the_checkpoint_of_another_run_is_refused_by_name(team: WorkerPool, tmp_path: Path) -> None:
    plan = plan_with(CHAIN, (2,), by_rules(CHAIN, (2,), data))
    team.run(2, saved_once, plan, str(tmp_path / "graph"))
    root = str(tmp_path / "graph")
    assert resumable(staged_by_rules(replace(CHAIN, name="other"), (1,), (2,), 4, data), root)[1].step == 0
    for other, named in (
        (alone(chain(8, 6, 14, 5)), "graph: differs from the plan"),
        (alone(CHAIN, optimizer="sgd"), "optimizer: differs from the plan; found adamw"),
        (alone(scaled(CHAIN, 16)), "global_batch_size: differs from the plan; found 8; allowed: 16"),
        (make_plan("dp=2"), "is a checkpoint of another kind of plan; found the plan of an operator graph"),
    ):
        with pytest.raises(ConfigError, match=named):
            resumable(other, root)
    committed(tmp_path / "model", 2, make_plan("dp=2"))
    with pytest.raises(ConfigError, match="another kind of plan; found a plan of a model"):
        resumable(plan, str(tmp_path / "model"))


def test_a_graph_is_identified_by_its_computation() -> None:
    """Whatever its batch size, its name and the costs in its file."""

    def changed(graph: OpGraph, **changes: Any) -> OpGraph:
        first, *others = graph.blocks
        op, *remaining = first.operators
        return replace(
            graph, blocks=(replace(first, operators=(replace(op, **changes), *remaining)), *others)
        )

    known = graph_hash(CHAIN)
    assert known.startswith("sha256:")
    same = (
        replace(CHAIN, name="x", source="y"),
        scaled(CHAIN, 32),
        changed(CHAIN, flop=1e6),
        changed(CHAIN, whole=("b",)),
    )
    assert {graph_hash(graph) for graph in same} == {known}
    others = (
        mlp(8, 6, 12, 5),
        chain(8, 6, 12, 7),
        chain(8, 6, 12, 5, norm="rms_norm"),
        replace(CHAIN, growth={}),
        replace(CHAIN, blocks=(CHAIN.blocks[0], replace(CHAIN.blocks[1], repeat=3), *CHAIN.blocks[2:])),
        changed(
            CHAIN,
            parameters=tuple(
                replace(each, name=f"{each.name}2") for each in CHAIN.blocks[0].operators[0].parameters
            ),
        ),
    )
    assert len({known, *map(graph_hash, others)}) == 1 + len(others)


def own_module(report: Report, plan: Plan, root: str, seed: int, first: int) -> tuple[float, ...]:
    """A user's module that is saved after step 2, or resumes there."""
    job = parallelize(module_of("perceptron", seed), plan, data_of("perceptron", 0))
    if first:
        folder, manifest = resumable(plan, root)
        load(job, folder)
        assert manifest.step == first
    losses = []
    for step in range(first, 4):
        losses.append(job.step(data_of("perceptron", step)).loss)
        if step + 1 == 2:
            AsyncCheckpoint(job, root, step=2, data="mine").wait()
    return tuple(losses)


def test_a_custom_module_is_saved_and_resumed(team: WorkerPool, tmp_path: Path) -> None:
    """In fp64; captured; resumed under another layout, in stages."""
    graph, root = graph_of("perceptron"), str(tmp_path)
    first = next(sampled(graph, (2,), [1]))
    second = next(sampled_in_stages(graph, (1,), (2,), 2, [2]))
    whole = team.run(2, own_module, first, root, 1, 0)[0]
    for plan, exact in ((first, 0.0), (second, 1e-9)):
        found = team.run(2, own_module, plan, root, 7, 2)[0]
        assert found == pytest.approx(whole[2:], rel=exact, abs=0.0)


def test_a_saved_graph_names_itself(team: WorkerPool, tmp_path: Path) -> None:
    plan = plan_with(CHAIN, (2,), by_rules(CHAIN, (2,), data))
    team.run(2, saved_once, plan, str(tmp_path))
    document = json.loads((tmp_path / "step-00000000" / "manifest.json").read_text())
    assert document["version"] == 4 and document["model"] is None and document["seq_len"] is None
    assert document["graph"] == graph_hash(replace(CHAIN, name="by another name"))
