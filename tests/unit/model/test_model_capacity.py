"""Dropless or capacity routing: the model file's choice affects the estimate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.cluster import load_cluster
from shardwise.errors import ConfigError
from shardwise.model import catalogue, model_from_config
from shardwise.search import default_job
from shardwise.search.answer import step_time_s
from shardwise.strategy import complete

DIMENSIONS: dict[str, Any] = {
    "layers": 4, "hidden": 1024, "ffn": 4096, "heads": 16, "vocab": 32000, "seq_len": 1024,
    "experts": 8, "top_k": 2,
}  # fmt: skip
MIXTRAL: dict[str, Any] = dict(catalogue()["mixtral-8x7b"].config)


@pytest.mark.parametrize("config", [DIMENSIONS, MIXTRAL], ids=["dimensions", "mixtral"])
def test_a_model_is_dropless_unless_it_names_a_capacity(config: dict[str, Any]) -> None:
    dropless = model_from_config(config)
    limited = model_from_config(config | {"expert_capacity_factor": 1.25})
    assert dropless.experts is not None and dropless.experts.capacity_factor is None
    assert limited.experts is not None and limited.experts.capacity_factor == 1.25
    assert model_from_config(limited.config) == limited


@pytest.mark.parametrize("value", [0, -1.0, "much", True])
def test_a_capacity_is_a_positive_number(value: object) -> None:
    with pytest.raises(ConfigError, match="expert_capacity_factor"):
        model_from_config(DIMENSIONS | {"expert_capacity_factor": value})


def test_a_capacity_without_experts_is_refused() -> None:
    dense = {key: value for key, value in DIMENSIONS.items() if key not in ("experts", "top_k")}
    with pytest.raises(ConfigError, match="expert_capacity_factor"):
        model_from_config(dense | {"expert_capacity_factor": 1.0})


def test_capacity_replaces_the_imbalance() -> None:
    cluster = load_cluster("8xH100-SXM")

    def seconds(capacity: float | None, imbalance: float) -> float:
        given = {} if capacity is None else {"expert_capacity_factor": capacity}
        model = model_from_config(DIMENSIONS | given)
        job = default_job(model, cluster, seq_len=1024, global_batch_size=64, expert_imbalance=imbalance)
        # Otherwise such a small model waits for the host, whatever its experts do.
        job = replace(job, profile=replace(job.profile, dispatch_s=0.0, expert_dispatch_s=0.0))
        strategy = complete({"ep": 8}, devices=8, layers=4, experts=8, global_batch_size=64)
        return step_time_s(model, cluster, job, strategy)

    # Every expert works on 1.5 times its even share, because of padding or of imbalance.
    assert seconds(1.5, 1.0) == seconds(1.5, 3.0) == seconds(None, 1.5)
    assert seconds(2.0, 1.0) > seconds(1.0, 1.0)
