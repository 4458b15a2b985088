"""Strategies and figures for estimates that can be computed by hand."""

from __future__ import annotations

from typing import Any

from tests.checker_records import figures_of
from tests.unit.cost.hand_made import SOFTWARE, brick_model, cluster

from shardwise.cluster import Cluster
from shardwise.model import Model
from shardwise.strategy import Job, Strategy
from shardwise_verify.problem import Figures

PLAIN: dict[str, Any] = {
    "tp": 1, "pp": 1, "vpp": 1, "cp": 1, "cp_kind": "ring", "ep": 1, "etp": 1, "dp": 1, "param_shard": 1,
    "grad_shard": 1, "optim_shard": 1, "micro_batch_size": 1, "schedule": "1f1b", "sequence_parallel": False,
    "recompute": "none", "recompute_layers": 0, "offload": "none", "axis_order": "tp-cp-dp-pp",
    "first_stage_layers": 4, "last_stage_layers": 4,
}  # fmt: skip


def strategy(**fields: Any) -> Strategy:
    """Four layers on one stage, nothing split, except for `fields`."""
    return Strategy(**(PLAIN | fields))


def brick_figures(model: Model | None = None, on: Cluster | None = None, **job: Any) -> Figures:
    """The brick model on four ideal devices: sequences of five tokens, eight per step."""
    requested: dict[str, Any] = {
        "seq_len": 5,
        "global_batch_size": 8,
        "dtype": "bf16",
        "memory_margin": 0.0,
        "expert_imbalance": 1.0,
        "profile": SOFTWARE,
    }
    return figures_of(model or brick_model(), on or cluster(1), Job(**(requested | job)))
