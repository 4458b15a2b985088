"""Two separate implementations of one cost model, the planner's and the checker's, agree to rounding."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.checker_records import figures_of, layers_of
from tests.property.cost_samples import CASES, Case, problem_of
from tests.property.search_space_reference import SpaceTwin
from tests.property.software import SOFTWARE, random_software
from tests.sampling import sample_of

from shardwise.cluster import Cluster
from shardwise.cost import Problem, bind, costs_of_all_stages, host_bytes, rank_bytes
from shardwise.model import MODULE_SETS, modules_of_layers, names_of
from shardwise.model import active_parameters as planned_active_parameters
from shardwise.model import parameters as planned_parameters
from shardwise.plans import Result
from shardwise.plans.documents import layout_document
from shardwise.schedule import generate
from shardwise.search import evaluate as planned_result
from shardwise.search.step_times import step_times_s
from shardwise.strategy import Strategy, StrategyTable
from shardwise_verify.estimate import (
    Evaluation,
    estimate_strategy,
    evaluate,
    mfu,
    tokens_per_s_per_device,
)
from shardwise_verify.problem import Figures, active_parameters, parameters
from shardwise_verify.reading import record
from shardwise_verify.records import LayoutRecord
from shardwise_verify.rules import first_broken
from shardwise_verify.schedules import table_of
from shardwise_verify.stages import layout_of
from shardwise_verify.strategy_rows import families, rows_of

TOLERANCE = 1e-9
ROWS, FEW_ROWS, RESULTS = 120, 30, 6
ALL_ROWS, ALL_RESULTS = 4000, 200


def figures_for(problem: Problem, cluster: Cluster | None = None) -> Figures:
    return figures_of(problem.model, cluster or problem.cluster, problem.job)


def legal_strategies(
    problem: Problem, count: int, seed: int, module_sets: tuple[str, ...] = ("",)
) -> list[Strategy]:
    """`count` legal strategies of the default space, each choice at random; equal seeds give equal
    strategies. Selective recomputation is of one of `module_sets`.
    """
    rng, figures, found = random.Random(seed), figures_for(problem), list[Strategy]()
    twin = SpaceTwin(
        core=False,
        devices=problem.cluster.devices,
        layers=problem.model.layers,
        moe=problem.model.experts is not None,
        batch=problem.job.global_batch_size,
        module_sets=module_sets,
    )
    while len(found) < count:
        sampled = [twin.random_candidate(rng) for _ in range(count)]
        broken = first_broken(rows_of(sampled), figures)
        found += [strategy for strategy, code in zip(sampled, broken, strict=True) if not code]
    return found[:count]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_times_and_bytes_under_named_modules(case: Case, full: bool) -> None:
    """Rows with every set of modules that the model's layers have."""
    problem = problem_of(case)
    own = modules_of_layers(kind.operators for kind in problem.model.kinds)
    sets = tuple(one for one in MODULE_SETS[1:] if set(names_of(one)) <= set(own))
    rows = legal_strategies(problem, ALL_ROWS if full else 2 * ROWS, seed=29, module_sets=sets)
    assert len({row.recompute_modules for row in rows}) >= min(len(sets), 8)
    assert_same_columns(problem, rows)


def ample(cluster: Cluster) -> Cluster:
    """The cluster with so much memory that everything fits, at the same speeds."""
    classes = {name: replace(device, memory_bytes=1 << 55) for name, device in cluster.classes.items()}
    nodes = tuple(replace(node, host_memory_bytes=1e30) for node in cluster.nodes)
    return replace(cluster, classes=classes, nodes=nodes)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_times_and_bytes_of_many_rows(case: Case, full: bool) -> None:
    problem = problem_of(case)
    assert_same_columns(problem, legal_strategies(problem, ALL_ROWS if full else ROWS, seed=23))


def assert_same_columns(problem: Problem, strategies: list[Strategy]) -> None:
    """Times and bytes of all rows, by both."""
    assert_equal_to_rounding(
        evaluate(figures_for(problem), rows_of(strategies)), planned(problem, strategies)
    )


def planned(problem: Problem, strategies: list[Strategy]) -> Evaluation:
    """Times and bytes of all rows, by the planner."""
    table = StrategyTable.of(strategies)
    costs = costs_of_all_stages(problem, table)
    device_bytes = rank_bytes(problem, table, costs).device.max(axis=0)
    return Evaluation(step_times_s(problem, table), device_bytes, host_bytes(problem, table, costs))


def assert_equal_to_rounding(found: Evaluation, expected: Evaluation) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE)


UNDER_SOFTWARE = (
    Case(model="tiny-dense", cluster="3x4xH100-SXM", batch=36, seq_len=1536, dtype="mxfp8"),
    Case(model="tiny-experts", cluster="2x6xB200", batch=24, seq_len=1536, dtype="nvfp4"),
    Case(model="deepseek-v2", cluster="2x8xA100-80G", batch=32),
)
"""Dense and routed, with windows and latent attention; groups that fill parts of nodes; casts."""


@pytest.mark.parametrize("software", SOFTWARE)
@pytest.mark.parametrize("case", UNDER_SOFTWARE, ids=str)
def test_both_agree_on_all_software(case: Case, software: str, full: bool) -> None:
    problem = problem_of(replace(case, software=software))
    assert_same_columns(problem, legal_strategies(problem, ALL_ROWS if full else FEW_ROWS, seed=23))
    cluster = ample(problem.cluster)
    for strategy in legal_strategies(problem, ALL_RESULTS if full else 2, seed=26):
        result = planned_result(problem.model, cluster, problem.job, strategy)
        _assert_same_estimates(figures_for(problem, cluster), strategy, result)


CHANGES: dict[str, dict[str, Any]] = {
    "attention": {"attention": ()},
    "tensor": {"tensor_overlap": 0.01},
    "tensor backward": {"tensor_backward_overlap": 0.01},
    "context": {"context_overlap": 0.89},
    "expert": {"expert_overlap": 0.01},
    "data": {"data_overlap": 0.99},
    "states": {"state_overlap": 0.99},
    "shard": {"shard_overlap": 0.89},
    "pipeline": {"pipeline_overlap": 0.99},
    "passes": {"pointwise_passes": 1.11},
    "kernels": {"dispatch_s": 1e-4},
    "experts' kernels": {"expert_dispatch_s": 1e-2},
    "actions": {"host_action_s": 2.1e-5},
    "steps": {"host_step_s": 5.1e-3},
    "gradients": {"reduce_in_fp32": False},
    "early stop": {"recompute_stops_early": True},
    "no dropout": {"applies_dropout": False},
    "buffers": {"buffers_all_microbatches": True},
    "gathered inputs": {"keeps_gathered_inputs": True},
    "blocks": {"reduces_by_block": True},
}


@pytest.fixture(scope="module")
def compared() -> tuple[Problem, list[Strategy], Evaluation]:
    """A problem, some strategies and the planner's estimates of them."""
    problem = problem_of(UNDER_SOFTWARE[1])
    strategies = legal_strategies(problem, 120, seed=27)
    return problem, strategies, planned(problem, strategies)


@pytest.mark.xdist_group("compared")  # by one worker, which runs the planner once
@pytest.mark.parametrize("change", [None, *CHANGES])
def test_the_comparison_sees_every_part_of_software(
    change: str | None, compared: tuple[Problem, list[Strategy], Evaluation]
) -> None:
    """One evaluator is run with software that differs in one field, and in none."""
    problem, strategies, expected = compared
    other = replace(problem.job, profile=replace(problem.profile, **CHANGES[change] if change else {}))
    found = evaluate(figures_of(problem.model, problem.cluster, other), rows_of(strategies))
    if change is None:
        assert_equal_to_rounding(found, expected)
        return
    with pytest.raises(AssertionError):
        assert_equal_to_rounding(found, expected)


@pytest.mark.parametrize("seed", sample_of(range(24), range(12)))
def test_both_evaluators_agree_on_random_software(seed: int, full: bool) -> None:
    rng = random.Random(seed)
    case = UNDER_SOFTWARE[seed % 2]
    problem = problem_of(case)
    job = replace(problem.job, profile=random_software(rng), dtype=rng.choice(("bf16", "fp8", "fp32")))
    problem = bind(problem.model, problem.cluster, job)
    assert_same_columns(problem, legal_strategies(problem, ROWS if full else FEW_ROWS, seed=seed))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_figure_of_a_result(case: Case, full: bool) -> None:
    problem = problem_of(case)
    cluster = ample(problem.cluster)
    figures = figures_for(problem, cluster)
    for strategy in legal_strategies(problem, ALL_RESULTS if full else RESULTS, seed=24):
        result = planned_result(problem.model, cluster, problem.job, strategy)
        _assert_same_estimates(figures, strategy, result)
        ((_, family),) = families(rows_of([strategy]), problem.job.global_batch_size)
        layout = layout_of(
            family,
            problem.model.layers,
            figures.cluster,
            problem.job.global_batch_size,
            result.step_time_s,
        )
        assert layout == record(LayoutRecord, layout_document(result.layout))


def _assert_same_estimates(figures: Figures, strategy: Strategy, result: Result) -> None:
    own = estimate_strategy(figures, strategy)
    step_s, device = result.step_time_s, result.peak_memory.device
    assert own.step_time_s == pytest.approx(step_s, rel=TOLERANCE)
    assert own.breakdown == pytest.approx(dict(result.breakdown), rel=TOLERANCE, abs=TOLERANCE * step_s)
    assert own.memory == pytest.approx(dict(result.memory), rel=TOLERANCE, abs=TOLERANCE * device)
    assert own.device_bytes == pytest.approx(device, rel=TOLERANCE)
    assert own.tightest_rank == result.tightest_rank
    assert mfu(figures, step_s) == pytest.approx(result.mfu, rel=TOLERANCE)
    full_mfu = mfu(figures, step_s, full_attention=True)
    assert full_mfu == pytest.approx(result.mfu_full_attention, rel=TOLERANCE)
    tokens = tokens_per_s_per_device(figures, step_s)
    assert tokens == pytest.approx(result.tokens_per_s_per_device, rel=TOLERANCE)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_counts_of_elements(case: Case) -> None:
    model = problem_of(case).model
    layers = layers_of(model)
    assert parameters(layers) == planned_parameters(model)
    assert active_parameters(layers) == planned_active_parameters(model)


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_columns_and_numbers_give_the_same_estimate(case: Case) -> None:
    """The vectorised evaluation of a row among others is its evaluation alone."""
    problem = problem_of(case)
    figures, strategies = figures_for(problem), legal_strategies(problem, 40, seed=25)
    together = evaluate(figures, rows_of(strategies))
    alone = [estimate_strategy(figures, strategy).step_time_s for strategy in strategies]
    np.testing.assert_allclose(together.step_time_s, alone, rtol=1e-12)


@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "zb_h1", "zb_h2", "interleaved_1f1b", "zb_v", "dualpipe_v"]
)
def test_tables_are_those_of_the_generator(name: str) -> None:
    problem = problem_of(CASES[0])
    base = legal_strategies(problem, 1, seed=1)[0]
    vpps = {"interleaved_1f1b": (2, 3, 5), "zb_v": (2,), "dualpipe_v": (2,)}.get(name, (1,))
    for pp in (2, 3, 4, 5, 8):
        for vpp in vpps:
            for times in (2, 3, 5):
                extra = 0 if name == "interleaved_1f1b" else 1
                strategy = replace(
                    base,
                    pp=pp,
                    vpp=vpp,
                    dp=1,
                    micro_batch_size=1,
                    schedule=name,  # type: ignore[arg-type]
                )
                m = pp * times + extra
                ((_, family),) = families(rows_of([strategy]), m)
                own = [[f"{stage}{kind}{number}" for stage, kind, number in row] for row in table_of(family)]
                theirs = generate(strategy.schedule, pp=pp, microbatches=m, vpp=vpp)
                assert own == [[str(action) for action in row] for row in theirs.ranks]
                ranks = tuple(family.rank_of(stage) for stage in range(family.stages))
                assert ranks == theirs.stage_rank
