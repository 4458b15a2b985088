"""The checker judges whether a target supports a plan, also by families and by sizes of the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.targets.small_plans import GPT2, LLAMA, small_plan

from shardwise.plans import PlanQuestion, plan_document
from shardwise_verify import check_document

SHARDED = "param_shard=4,grad_shard=4,optim_shard=4,sequence_parallel=false"


@pytest.mark.parametrize(
    ("config", "strategy", "found"),
    [
        (LLAMA, f"tp=2,dp=4,{SHARDED}", None),
        (GPT2, f"tp=2,dp=4,{SHARDED}", "tp 2: 1: Transformers has no"),  # Llama has a plan, GPT-2 has none
        (LLAMA, f"tp=1,dp=8,{SHARDED},recompute=full,recompute_layers=10", None),  # all of its 10 layers
        (LLAMA, f"tp=1,dp=8,{SHARDED},recompute=full,recompute_layers=9", "recompute_layers 9"),
    ],
    ids=["tp", "tp of GPT-2", "all layers", "9 of 10 layers"],
)
def test_limits_about_families_and_sizes(config: dict[str, Any], strategy: str, found: str | None) -> None:
    plan = replace(small_plan(config, strategy), question=PlanQuestion(target="fsdp2"))
    verdict = check_document(plan_document(plan))
    (check,) = (each for each in verdict.checks if each.name == "target")
    assert check.ok == (found is None)
    assert (found or "a plan for fsdp2") in check.found
