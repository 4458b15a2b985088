"""Multi-token prediction under a pipeline: Megatron-LM's last stage has a copy of the embedding."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.targets.megatron import built_by_megatron_lm, request_of
from tests.unit.targets.small_plans import LLAMA, small_plan

from shardwise.cost import Problem, bind, costs_of_all_stages
from shardwise.model import Model, model_from_config
from shardwise.strategy import StrategyTable

pytestmark = pytest.mark.xdist_group("megatron-lm")


@pytest.mark.parametrize("tied", [False, True])
def test_the_last_stage_has_a_copy_of_the_embedding(tied: bool) -> None:
    model = LLAMA | {"tie_word_embeddings": tied, "num_hidden_layers": 8}
    plans = [small_plan(model, text) for text in ("tp=2,dp=4", "tp=2,pp=2,dp=2")]
    requests = [request_of(plan) for plan in plans]
    requests = [replace(one, flags=(*one.flags, "--mtp-num-layers", "1")) for one in requests]
    alone, piped = (answer["parameters"] for answer in built_by_megatron_lm(requests))
    copied = sum(piped) - sum(alone)
    # A tensor rank's half of the vocabulary, and once more for a tied output projection.
    assert copied == (1 + tied) * 4096 * 512 / 2

    # A model with a prediction module; in others only tied weights are copied.
    built = replace(model_from_config(model), head_layers=1)
    problems = [bind(built, plan.cluster, plan.job) for plan in plans]
    tables = [StrategyTable.of([plan.best.strategy]) for plan in plans]
    ours = [_elements(*pair) for pair in zip(problems, tables, strict=True)]
    assert ours[1] - ours[0] == copied
    without = [bind(_plain(built), plan.cluster, plan.job) for plan in plans]
    ours = [_elements(*pair) for pair in zip(without, tables, strict=True)]
    assert ours[1] - ours[0] == tied * 4096 * 512 / 2


def _plain(model: Model) -> Model:
    return replace(model, head_layers=0)


def _elements(problem: Problem, table: StrategyTable) -> float:
    """Elements of the weights on the first tensor rank of every stage."""
    return float(costs_of_all_stages(problem, table).partition.stage.dense_weights.sum())
