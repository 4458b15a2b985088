"""The recipe for Ray of docs/how-to/python-api.md, on a real local Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.test_documented_python import QUESTIONS, recipe

import shardwise as sw

ray = pytest.importorskip("ray")


def test_a_sweep_runs_on_ray_and_resumes(tmp_path: Path) -> None:
    space: dict[str, Any] = {}
    exec(recipe("sweep_on_ray"), space)  # noqa: S102 - a block of our own page
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        found = space["sweep_on_ray"](QUESTIONS, tmp_path / "sweep.jsonl")
        infeasible = {"model": "llama-3.1-70b", "cluster": "1xV100-16G", "seq_len": 8, "global_batch_size": 1}
        more = space["sweep_on_ray"]([*QUESTIONS, infeasible], tmp_path / "sweep.jsonl")
        with pytest.raises(sw.ConfigError) as caught:
            space["sweep_on_ray"]([{**QUESTIONS[0], "seq_len": "x"}], None)
    finally:
        ray.shutdown()
    assert list(found) == list(more)[:2] and "infeasible" in more[2]
    assert [row["plan_hash"] for row in found] == [row["plan_hash"] for row in sw.sweep(QUESTIONS, out=None)]
    assert len((tmp_path / "sweep.jsonl").read_text().splitlines()) == 3
    assert caught.value.key == "questions[0].seq_len"
