"""Of equally fast strategies, the search returns the first in canonical text order, in every mode."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest

from shardwise import search
from shardwise.cluster import load_cluster
from shardwise.model import load_model, model_from_config
from shardwise.plans import plan_document, plan_of
from shardwise.search.bnb import incumbent
from shardwise.search.bnb.incumbent import Fastest, Goal, Smallest, Tradeoff
from shardwise.search.hetero import branch_and_bound
from shardwise.search.hetero.space import PipelineShape
from shardwise.strategy import Strategy, StrategyTable, complete
from shardwise.ties import PROVEN_TIE
from shardwise_verify.memory import PARTS, Memory

ROUTED: dict[str, Any] = {
    "layers": 4, "hidden": 2048, "ffn": 8192, "heads": 32, "kv_heads": 2, "vocab": 32000, "seq_len": 2048,
    "tied": False, "bias": False, "gated": True, "experts": 16, "top_k": 1, "expert_ffn": 1024,
}  # fmt: skip

FIXED = {"offload": "none", "cp": 1, "pp": 1, "param_shard": 1, "grad_shard": 1}

QUESTIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "experts over tp or ep": ("tiny", "2x4xL40S", FIXED),
    "best of equals": ("tiny", "1x8xB200", FIXED),
    "rounding tells them apart": ("mixtral-8x7b", "2x8xH100-SXM", {**FIXED, "cp": 4}),
}
"""Model, cluster, fixed fields: in all of them several of the best take the same time. In the last one two
kinds take 0.299612893636638 and 0.29961289363663796 s, which are equal except for rounding.
"""


def question_of(name: str) -> search.Question:
    config, cluster_text, fixed = QUESTIONS[name]
    model = model_from_config(ROUTED, name="tiny") if config == "tiny" else load_model(config)
    cluster = load_cluster(cluster_text)
    job = search.default_job(model, cluster, seq_len=128, global_batch_size=4)
    return search.Question(model=model, cluster=cluster, job=job, space="default", fixed=fixed, top=5)


def document_of(question: search.Question) -> dict[str, Any]:
    """The plan file of the answer."""
    answer = search.plan(question)
    plan = plan_of(answer, model=question.model, cluster=question.cluster, job=question.job)
    return plan_document(plan)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUESTIONS)
def test_enumeration_and_search_give_the_same_plan(name: str) -> None:
    question = question_of(name)
    found, every = document_of(question), document_of(replace(question, exhaustive=True))
    assert found["certificate"]["simulated"] < every["certificate"]["simulated"]
    assert found["hash"] == every["hash"]
    times = [found["best"]["step_time_s"], *(one["step_time_s"] for one in found["runners_up"])]
    assert any(abs(a - b) <= PROVEN_TIE * a for a, b in pairwise(times)), "no longer a question with ties"


def test_any_number_of_workers_gives_the_same_plan() -> None:
    question = question_of("best of equals")
    assert document_of(question)["hash"] == document_of(replace(question, workers=2))["hash"]


@pytest.mark.slow
def test_a_frontier_is_the_same_by_enumeration() -> None:
    question = replace(question_of("rounding tells them apart"), frontier=True)
    found, every = search.plan(question).frontier, search.plan(replace(question, exhaustive=True)).frontier
    assert found is not None and every is not None
    assert found.points == every.points


@pytest.mark.slow
def test_a_mutant_that_prefers_the_first_candidate_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StrategyTable, "text_order", lambda table: np.arange(len(table)))
    question = question_of("rounding tells them apart")
    assert document_of(question)["hash"] != document_of(replace(question, exhaustive=True))["hash"]


def strategies() -> list[Strategy]:
    """Four kinds on eight devices, in text order."""
    texts = ({"tp": 1, "micro_batch_size": 1}, {"tp": 1, "micro_batch_size": 2}, {"tp": 2}, {"tp": 4})
    return [complete(text, devices=8, layers=8, experts=None, global_batch_size=16) for text in texts]


def found_by(goal: Goal, order: tuple[int, ...], times: list[float], nbytes: list[float]) -> list[int]:
    """The strategies that are found when they are offered one by one in this order."""
    every = strategies()
    for place in order:
        row = StrategyTable.of([every[place]])
        goal.offer(row, np.array([times[place]]), np.array([nbytes[place]]))
    return [every.index(one.table[0]) for one in goal.incumbents]


LESS = 1.0 - 0.9 * PROVEN_TIE
"""A factor within the tolerance: the difference does not count."""


@pytest.mark.parametrize(
    ("goal", "times", "nbytes", "found"),
    [
        # The first two are of one kind, and the first of them stays; then by time, equal times by text.
        (Fastest(3), [1.0, LESS, LESS, 0.9], [5.0, 5.0, 5.0, 5.0], [3, 0, 2]),
        (Fastest(1), [1.0, LESS, LESS, 1.0], [5.0, 5.0, 5.0, 5.0], [0]),
        # Fewest bytes; of equals the fastest, of equals the first.
        (Smallest(), [1.0, LESS, 1.0, 0.5], [5.0, 5.0 * LESS, 5.0, 6.0], [0]),
        (Smallest(), [1.0, 0.9, 1.0, 0.5], [5.0 * LESS, 5.0, 5.0, 6.0], [1]),
        # The first two are one point, though each is better than the other by rounding; the third takes as
        # long and more bytes, the fourth is faster with most bytes.
        (Tradeoff(), [1.0, LESS, LESS, 0.5], [5.0 * LESS, 5.0, 6.0, 7.0], [3, 0]),
    ],
)
def test_the_order_of_candidates_does_not_change_the_plan(
    goal: Goal, times: list[float], nbytes: list[float], found: list[int]
) -> None:
    for order in permutations(range(4)):
        assert found_by(goal.copy(), order, times, nbytes) == found, order


def test_a_bound_prunes_slower_candidates_and_not_equal_ones() -> None:
    goal, smallest, tradeoff = Fastest(1), Smallest(), Tradeoff()
    for each in (goal, smallest, tradeoff):
        each.offer(StrategyTable.of(strategies()[:1]), np.array([1.0]), np.array([5.0]))
    seconds, nbytes = np.array([0.9, 1.0, 1.0 + 1e-11, 1.0]), np.array([5.0, 5.0, 5.0, 5.0 + 1e-10])
    assert goal.may_improve(seconds, nbytes).tolist() == [True, True, False, True]
    assert smallest.may_improve(seconds, nbytes).tolist() == [True, True, False, False]
    assert tradeoff.may_improve(seconds, nbytes).tolist() == [True, True, False, False]


def test_a_mutant_whose_bounds_prune_equals_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incumbent, "PRUNE_FACTOR", 1.0 - 1e-15)
    goal = Fastest(1)
    goal.offer(StrategyTable.of(strategies()[:1]), np.array([1.0]), np.array([5.0]))
    assert not goal.may_improve(np.array([1.0])).any()


def test_text_order_is_by_fields() -> None:
    """Numbers by value, not by digits; names in the order of their lists."""
    every = [
        complete(text, devices=64, layers=8, experts=None, global_batch_size=64)
        for text in ({"tp": 16}, {"tp": 2, "recompute": "selective"}, {"tp": 2}, {"tp": 8, "pp": 2})
    ]
    assert StrategyTable.of(every).text_order().tolist() == [2, 1, 3, 0]


EQUAL_RANKS: tuple[tuple[str, dict[str, Any], int, int], ...] = (
    (
        "1x3xA100-40G+2x2xA100-40G",
        {"layers": 11, "hidden": 256, "ffn": 1024, "heads": 4, "gated": True},
        48,
        2,
    ),
    ("4x1xV100-32G+1x2xV100-32G", {"layers": 14, "hidden": 512, "ffn": 2048, "heads": 8}, 32, 1),
)
"""Clusters with two pools of one class, models, batches, most stages on two pools: devices of both pools are
the fullest, with bytes that differ by rounding.
"""


@pytest.mark.slow
@pytest.mark.parametrize(("cluster_text", "config", "batch", "mixed_stage_rows"), EQUAL_RANKS)
def test_planner_and_checker_name_the_lowest_of_equally_full_ranks(
    cluster_text: str, config: dict[str, Any], batch: int, mixed_stage_rows: int
) -> None:
    model = model_from_config({**config, "vocab": 50257, "seq_len": 2048, "tied": True}, name="tiny")
    cluster = load_cluster(cluster_text, inter_node="400Gb/s")
    job = search.default_job(model, cluster, seq_len=1024, global_batch_size=batch)
    question = search.Question(
        model=model, cluster=cluster, job=job, space="default", mixed_stage_rows=mixed_stage_rows
    )
    answer = search.plan_mixed_cluster(question)
    assert not answer.best.is_uniform
    again = search.predicted_result(search.RecordCostModel(model, cluster, job), answer.best, batch)
    assert again is not None
    assert answer.best.tightest_rank == again.tightest_rank == 0


def test_the_tightest_of_equal_ranks_is_the_lowest() -> None:
    """In the first row the first rank equals the second but for rounding. In the second row the third rank
    has the maximum by more than that.
    """
    most = [np.array([4.0 - 1e-9, 1.0]), np.array([4.0, 1.0]), np.array([2.0, 3.0])]
    parts = [{name: nbytes if name == "parameters" else 0.0 * nbytes for name in PARTS} for nbytes in most]
    memory = Memory(parts=tuple(parts), of_ranks=tuple(most), host_bytes=most[0])
    assert memory.device_bytes.tolist() == [4.0, 3.0]
    for row, (rank, nbytes) in enumerate([(0, 4.0 - 1e-9), (2, 3.0)]):
        found, named = memory.tightest(row)
        assert (found, named["parameters"]) == (rank, nbytes)


@pytest.mark.parametrize(
    ("each_s", "microbatches"),
    [
        ((0.1 + 0.2, 0.3), [3, 4]),  # 1.2 s both, but for rounding: the first does less
        ((0.3, 0.1 + 0.2), [3, 4]),  # fails where the exact maximum counts, which is the second
        ((0.3, 0.4), [4, 3]),  # 1.2 and 1.6 s
    ],
)
def test_of_equally_slow_pipelines_the_first_does_less(
    each_s: tuple[float, float], microbatches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pipelines of 4 micro-batches each, one more than needed."""
    monkeypatch.setattr(
        branch_and_bound, "pipeline_s", lambda _, kinds, stages, count: count * each_s[kinds[0]]
    )
    options: Any = None
    pipelines = [(PipelineShape((kind,), (1,)), ((0, 8),), 4) for kind in (0, 1)]
    trimmed = branch_and_bound._trimmed(options, pipelines, 7)
    assert [one.microbatches for one in trimmed] == microbatches
    assert [one.kinds for one in trimmed] == [(0,), (1,)]
