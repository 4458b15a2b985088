"""Graph plans in stages: losses, norms, gradients and parameters equal those of one process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.property.layout_instances import chain, skips_after_the_first, without_first_weights
from tests.reference.one_layout.pipeline import actions_of
from tests.runtime.captured_equality import captured_differences, graph_of, plain
from tests.runtime.graph_equality import MAX_NORM, Run, batches, differences, run_of, single_process
from tests.runtime.graph_plans import (
    alone,
    in_stages,
    on_staged_frontier,
    plan_with,
    sampled_in_stages,
    staged_by_rules,
)
from tests.runtime.graph_stages import STAGE_MUTANTS
from tests.runtime.jobs import of_graph
from tests.runtime.test_runtime_graph_bf16 import GRADIENT, LOSS, gradients_off, loss_off
from tests.runtime.test_runtime_graph_captured import IN_FP32
from tests.runtime.test_runtime_graph_captured import TOLERANCE as IN_FP64
from tests.runtime.test_runtime_graphs import TOLERANCE
from tests.sampling import sample_of
from torch import distributed

from shardwise.app.cli.main import main
from shardwise.errors import ConfigError
from shardwise.graph import OpNode, graph_text, loss_weight
from shardwise.plans import Plan, read_plan
from shardwise.runtime import WorkerPool, check_runnable, graph_module, parallelize
from shardwise.runtime.profiling import NORM, OPTIMIZER, traced
from shardwise.runtime.workers import Report
from shardwise.sim import COMPUTE

STEPS = 2
"""Parameters after the second step show the optimizer states."""

CHAIN = chain(8, 6, 12, 5)
UNEVEN = chain(12, 7, 11, 5)

CHAINS = {"chain": CHAIN, "uneven": UNEVEN}
GRAPHS = {**CHAINS, "skips": skips_after_the_first(8, 6, 12, 5)}


def whole(op: OpNode) -> Sequence[str]:
    return ()


def data(op: OpNode) -> Sequence[str]:
    return ("split b",)


def columns(op: OpNode) -> Sequence[str]:
    return ("split f", "split g", "split v")


@cache
def expected(graph: str, optimizer: str = "adamw") -> Run:
    return single_process(alone(GRAPHS[graph], optimizer=optimizer), seed=1, steps=STEPS)  # type: ignore[arg-type]


def differ(team: WorkerPool, plans: Sequence[Plan], graph: str, broken: str | None = None) -> list[float]:
    """The largest difference of any rank, for each plan; all have the same number of devices."""
    for plan in plans:
        check_runnable(plan)
    cases = [(plan, expected(graph, plans[0].job.optimizer), 1, broken) for plan in plans]
    ranks = team.run(plans[0].devices, differences, cases)
    return [max(of) for of in zip(*ranks, strict=True)]


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_two_stages_of_a_process_each_train_as_one_process_does(team: WorkerPool, microbatches: int) -> None:
    plans = [staged_by_rules(CHAIN, (1,), (cut,), microbatches, whole) for cut in (1, 2, 3, 4)]
    assert max(differ(team, plans, "chain")) < TOLERANCE


@pytest.mark.parametrize("graph", CHAINS)
@pytest.mark.parametrize(
    ("ranks", "cuts"), [((1,), (1, 2, 3, 4)), ((2,), (2,)), ((2,), (1, 3)), ((3,), (3,)), ((2, 2), (3,))]
)
def test_any_layouts_of_stages_train_as_one_process_does(
    team: WorkerPool, ranks: tuple[int, ...], cuts: tuple[int, ...], graph: str, full: bool
) -> None:
    """Any rule, placement, storage and use, with or without recomputation; stages (1, 2, 3, 4) have one block
    each."""
    plans = [
        plan
        for microbatches in (2, 4)
        for plan in sampled_in_stages(GRAPHS[graph], ranks, cuts, microbatches, range(12 if full else 1))
    ]
    assert max(differ(team, plans, graph)) < TOLERANCE


@pytest.mark.parametrize(("ranks", "cuts"), [((2,), (1,)), ((2,), (4,)), ((2,), (1, 4))])
def test_stages_with_skip_tensors_train_as_one_process_does(
    team: WorkerPool, ranks: tuple[int, ...], cuts: tuple[int, ...], full: bool
) -> None:
    """A tensor that crosses the first cut is a skip tensor after it."""
    plans = list(sampled_in_stages(GRAPHS["skips"], ranks, cuts, 2, range(8 if full else 2)))
    assert max(differ(team, plans, "skips")) < TOLERANCE


def test_sgd_trains_in_stages_as_one_process_does(team: WorkerPool) -> None:
    plan = staged_by_rules(CHAIN, (2,), (2,), 4, data)
    plan = replace(plan, job=replace(plan.job, optimizer="sgd"))
    assert max(differ(team, [plan], "chain")) < TOLERANCE


def test_fewer_micro_batches_than_stages_train_too(team: WorkerPool) -> None:
    assert max(differ(team, [staged_by_rules(CHAIN, (1,), (1, 2, 4), 2, whole)], "chain")) < TOLERANCE


@pytest.mark.parametrize("mutant", STAGE_MUTANTS)
def test_a_broken_mechanism_is_caught(team: WorkerPool, mutant: str) -> None:
    plans = list(sampled_in_stages(CHAIN, (2,), (2,), 4, range(4)))
    assert max(differ(team, plans, "chain", broken=mutant)) > 100 * TOLERANCE


def _local_sizes(report: Report, plan: Plan) -> tuple[dict[str, int], list[str]]:
    """Elements of this rank's parameters, and the passes of a step by its profile."""
    job = of_graph(parallelize(graph_module(plan.graph, seed=0), plan))
    with traced(distributed.get_rank()) as trace:
        job.step(batches(plan.graph, 0))
    passes = [
        span.name for span in trace.spans if span.track == COMPUTE and span.name not in (NORM, OPTIMIZER)
    ]
    return {name: local_sizes.weight.numel() for name, local_sizes in job.store.items()}, passes


def test_a_rank_holds_its_stage_and_runs_the_predicted_passes(team: WorkerPool) -> None:
    """6 x 12 + 12 elements at first, 12 + 12 x 12 in each middle block, 12 x 5 in the head; two ranks of a
    stage have halves of column-split matrices."""
    plan = staged_by_rules(CHAIN, (2,), (1, 3), 4, columns)
    found = team.run(6, _local_sizes, plan)
    local_sizes: list[dict[str, int]] = [
        {"w_up": 36, "b_up": 6},
        {"middle.0.scale": 6, "middle.0.mix": 72, "middle.1.scale": 6, "middle.1.mix": 72},
        {"w_down": 30},
    ]
    for rank, (elements, passes) in enumerate(found):
        stage = rank // 2
        assert elements == local_sizes[stage]
        assert passes == [f"{stage}{kind}{number}" for kind, number in actions_of(stage, 3, 4)]


def _bf16_run(report: Report, plan: Plan) -> Run:
    return run_of(
        of_graph(parallelize(graph_module(plan.graph, seed=1), plan, max_norm=MAX_NORM)), plan.graph, 1
    )


@pytest.mark.parametrize(("ranks", "cuts"), [((1,), (2,)), ((2,), (1, 3))])
def test_stages_in_bf16_train_as_one_process_does_in_fp32(
    team: WorkerPool, ranks: tuple[int, ...], cuts: tuple[int, ...]
) -> None:
    for plan in sampled_in_stages(CHAIN, ranks, cuts, 4, range(4)):
        narrow = replace(plan, job=replace(plan.job, dtype="bf16"))
        for found in team.run(plan.devices, _bf16_run, narrow):
            assert loss_off(found, expected("chain")) < LOSS
            assert gradients_off(found, expected("chain")) < GRADIENT
            assert {each.dtype for each in found.gradients.values()} == {torch.float32}


CUTS: Mapping[str, tuple[int, ...]] = {
    "perceptron": (2,), "vgg": (1,), "readers": (2,), "translator": (2,), "llama": (2,), "vision": (2,),
    "uneven": (3,), "towers": (1,), "numbers": (1,), "cells": (1,),
}  # fmt: skip
"""Modules, and the blocks before which they are cut."""

FEW = ("vgg", "readers")
"""Modules that are run without `--full`."""


def worst(team: WorkerPool, name: str, plans: Sequence[Plan]) -> float:
    for plan in plans:
        check_runnable(plan)
    return max(
        max(of) for of in team.run(plans[0].devices, captured_differences, name, list(plans), plain(name), 1)
    )


@pytest.mark.parametrize("name", sample_of(list(CUTS), FEW))
def test_captured_modules_train_in_stages_as_in_one_process(team: WorkerPool, name: str, full: bool) -> None:
    """In fp64, in two stages of two processes, under any layout."""
    assert loss_weight(graph_of(name), 2) == 0.5
    plans = list(sampled_in_stages(graph_of(name), (2,), CUTS[name], 2, range(8 if full else 2)))
    assert worst(team, name, plans) < IN_FP32.get(name, IN_FP64)


@pytest.mark.parametrize("name", sample_of(["vgg", "readers", "translator"], ["vgg", "readers"]))
def test_points_of_the_staged_frontier_train(team: WorkerPool, name: str, full: bool) -> None:
    plans = on_staged_frontier(graph_of(name), 4, 2, 2, 2 if full else 1)
    assert worst(team, name, plans) < IN_FP64


def test_operators_that_need_the_whole_batch_are_refused_by_name() -> None:
    normed = chain(8, 6, 12, 5, norm="batch_norm")
    plan = staged_by_rules(normed, (1,), (2,), 2, whole)
    with pytest.raises(ConfigError, match="batch_norm operator norm computes across samples"):
        check_runnable(plan)
    check_runnable(staged_by_rules(normed, (1,), (2,), 1, whole))


def test_a_batch_norm_of_the_whole_batch_trains_in_stages(team: WorkerPool) -> None:
    normed = chain(8, 6, 12, 5, norm="batch_norm")
    right = single_process(alone(normed), seed=1, steps=STEPS)
    plans = list(sampled_in_stages(normed, (2,), (2,), 1, range(4)))
    assert max(map(max, team.run(4, differences, [(plan, right, 1, None) for plan in plans]))) < TOLERANCE


def _of_whole_numbers(report: Report, plan: Plan) -> None:
    job = parallelize(graph_module(plan.graph, seed=0), plan)
    job.step({name: tensor.long() for name, tensor in batches(plan.graph, 0).items()})


def test_integers_do_not_cross_a_stage_boundary(team: WorkerPool) -> None:
    """A first stage without parameters that turns integers into other integers."""
    plan = staged_by_rules(without_first_weights(CHAIN), (1,), (1,), 2, whole)
    with pytest.raises(ConfigError, match="sends integers to the next stage"):
        team.run(2, _of_whole_numbers, plan)


def test_a_parameter_of_two_stages_is_refused_by_name() -> None:
    graph = graph_of("transformer")
    plan = plan_with(graph, (1,), alone(graph).operators)
    with pytest.raises(ConfigError, match=r"embedding\.weight in several stages"):
        check_runnable(in_stages(plan, (1,), 1))


def test_the_documented_command_lines_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Computes a staged frontier, then trains a point of it: the loss falls, and the log has a line for each
    step."""
    graph, points, log = tmp_path / "chain.yaml", tmp_path / "points", tmp_path / "steps.jsonl"
    graph.write_text(graph_text(CHAIN))
    question = ["--cluster", "1x2xcpu", "--stages", "2", "--microbatches", "4"]
    question += ["--global-batch-size", "8", "--dtype", "fp32", "--save", str(points)]
    assert main(["frontier", str(graph), *question]) == 0
    (name, *_) = [name for name in json.loads((points / "frontier.json").read_text())["plans"] if name]
    assert read_plan(str(points / name)).stages == 2
    capsys.readouterr()
    assert main(["train", str(points / name), "--steps", "40", "--lr", "0.03", "--log", str(log)]) == 0
    shown = capsys.readouterr()
    assert "trained" in shown.out and "predicted" in shown.out
    losses = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
    assert len(losses) == 40
    assert sum(losses[-4:]) < sum(losses[:4]) - 0.2  # the same four batches


def test_train_refuses_operators_that_need_the_whole_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, points = tmp_path / "chain.yaml", tmp_path / "points"
    graph.write_text(graph_text(chain(8, 6, 12, 5, norm="batch_norm")))
    question = ["--cluster", "1x2xcpu", "--stages", "2", "--microbatches", "4"]
    question += ["--global-batch-size", "8", "--dtype", "fp32", "--save", str(points)]
    assert main(["frontier", str(graph), *question]) == 0
    (name, *_) = [name for name in json.loads((points / "frontier.json").read_text())["plans"] if name]
    capsys.readouterr()
    assert main(["train", str(points / name)]) == 2
    assert "batch_norm operator norm computes across samples" in capsys.readouterr().err
