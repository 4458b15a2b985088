"""The planner's cost model of vision towers and of frozen parts and the checker's agree, for all software."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.property.software import SOFTWARE
from tests.property.test_verification_evaluator import assert_same_columns, legal_strategies

import shardwise as sw
from shardwise.cluster import load_cluster
from shardwise.cost import Problem, bind
from shardwise.cost import layers as cost_layers
from shardwise.cost import operators as cost_operators
from shardwise.model import Model, model_from_config
from shardwise.questions import checked_plan
from shardwise.strategy import Job, StrategyTable

ROWS, FEW_ROWS, ALL_ROWS = 60, 8, 1000

CONFIG: dict[str, Any] = {
    "model_type": "qwen2_5_vl", "hidden_size": 384, "intermediate_size": 768, "num_hidden_layers": 6,
    "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 5000,
    "tie_word_embeddings": True, "images": {"count": 2, "height": 448, "width": 224},
    "vision_config": {
        "depth": 5, "hidden_size": 320, "intermediate_size": 800, "num_heads": 4, "out_hidden_size": 384,
        "patch_size": 14, "spatial_merge_size": 2, "window_size": 112, "fullatt_block_indexes": [2, 4],
    },
}  # fmt: skip
CHOICES: dict[str, dict[str, Any]] = {
    "all trained": {},
    "vision frozen": {"freeze": ["vision"]},
    "tower frozen": {"freeze": ["vision", "projector"]},
    "language frozen": {"freeze": ["language"]},
    "adapters": {"lora": {"r": 8}},
}


def model_of(choice: str) -> Model:
    return model_from_config({**CONFIG, **CHOICES[choice]}, name="vision")


def problem_of(choice: str, software: str = "plain") -> Problem:
    job = Job(seq_len=1536, global_batch_size=36, dtype="bf16", optimizer="adamw", profile=SOFTWARE[software])
    return bind(model_of(choice), load_cluster("3x4xH100-SXM"), job)


@pytest.mark.parametrize("choice", CHOICES)
def test_times_and_bytes_of_many_rows(choice: str, full: bool) -> None:
    problem = problem_of(choice)
    assert_same_columns(problem, legal_strategies(problem, ALL_ROWS if full else ROWS, seed=41))


@pytest.mark.parametrize("software", SOFTWARE, ids=lambda name: name[:40])
@pytest.mark.parametrize("choice", ["all trained", "vision frozen", "language frozen"])
def test_all_software(choice: str, software: str, full: bool) -> None:
    problem = problem_of(choice, software)
    assert_same_columns(problem, legal_strategies(problem, ALL_ROWS if full else FEW_ROWS, seed=43))


def _once(_operator: Any) -> int:
    return 1


def _never(_operator: Any) -> bool:
    return False


@pytest.mark.parametrize(
    ("name", "broken", "choice"),
    [("repeats_of", _once, "all trained"), ("is_forward_only", _never, "vision frozen")],
    ids=["repetitions", "no backward pass"],
)
def test_omissions_are_noticed(name: str, broken: Any, choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(choice)
    rows = legal_strategies(problem, ROWS, seed=41)
    for module in (cost_layers, cost_operators):
        monkeypatch.setattr(module, name, broken)
    with pytest.raises(AssertionError):
        assert_same_columns(problem, rows)


def test_patches_attend_within_their_image() -> None:
    """Attention over all patches of a micro-batch instead of those of each image takes longer."""
    model = model_of("all trained")
    wide = replace(
        model,
        embedding=tuple(
            replace(one, block=4 * one.block) if one.kind == "attention" and one.block else one
            for one in model.embedding
        ),
    )
    cluster = load_cluster("1xH100-SXM")
    job = Job(seq_len=1536, global_batch_size=4, dtype="bf16", profile=SOFTWARE["plain"])
    rows = StrategyTable.of(legal_strategies(bind(model, cluster, job), FEW_ROWS, seed=3))
    times = [cost_layers.compute_s(bind(each, cluster, job), rows) for each in (model, wide)]
    assert (times[0] < times[1]).all()


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES)
def test_the_checker_proves_their_plans(choice: str, tmp_path: Any) -> None:
    plan = sw.plan(model_of(choice), cluster="1x4xH100-SXM", seq_len=2048, global_batch_size=8, target="any")
    plan.save(tmp_path / "plan.yaml")
    checked = checked_plan(str(tmp_path / "plan.yaml"), 60.0)
    assert not checked.failed
    assert sw.load(tmp_path / "plan.yaml").model == plan.model
