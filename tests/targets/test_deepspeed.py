"""DeepSpeed 0.19 reads exported files: its configuration agrees with the plan."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.targets.folders import environment_with
from tests.targets.mapping_mutants import mapping_mutants
from tests.targets.random_plans import plan_of_text
from tests.targets.replica_plans import FAMILIES, replica_plans

from shardwise.errors import ConfigError
from shardwise.plans import Plan
from shardwise.strategy import target_of
from shardwise.targets.deepspeed import (
    FILE,
    READER,
    TARGET,
    deepspeed_files,
    read_back,
    read_files_back,
)
from shardwise.targets.hugging_face import NOTES

pytestmark = pytest.mark.xdist_group("deepspeed")

PLANS = 50


def read(requests: list[tuple[dict[str, Any], int]]) -> list[dict[str, Any]]:
    """What DeepSpeed reads in each file, on as many devices."""
    texts = [{"file": json.dumps(settings), "world_size": world} for settings, world in requests]
    return READER.answers(texts, environment=environment_with("deepspeed"))


def settings_of(plan: Plan) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(deepspeed_files(plan)[FILE])
    return settings


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return replica_plans(TARGET, PLANS, seed=2)


def test_plans_are_of_every_family_and_use_every_value_of_the_target(plans: list[Plan]) -> None:
    strategies = [plan.best.strategy for plan in plans]
    assert {plan.model.name for plan in plans} == set(FAMILIES[TARGET])
    assert {(one.param_shard > 1) + (one.grad_shard > 1) for one in strategies} == {0, 1, 2}
    for name in ("recompute", "offload", "micro_batch_size"):
        assert len({getattr(one, name) for one in strategies}) == 2, name
    assert {plan.job.dtype for plan in plans} == {"bf16", "fp16", "fp32"}
    assert {plan.job.optimizer for plan in plans} == {"adamw", "sgd"}
    target = target_of(TARGET)
    for plan in plans:
        assert list(target.for_job(plan.model, plan.job).refusals(plan.best.strategy)) == []


def test_deepspeed_reads_the_plan_back(plans: list[Plan]) -> None:
    answers = read([(settings_of(plan), plan.cluster.devices) for plan in plans])
    for plan, answer in zip(plans, answers, strict=True):
        assert read_back(plan, answer).differences == (), plan.best.strategy


def test_a_smaller_world_is_noticed(plans: list[Plan]) -> None:
    (answer,) = read([(settings_of(plans[0]), plans[0].cluster.devices // 2)])
    assert "Check batch related parameters" in answer["error"]


WORDS = {"AdamW": "SGD", "SGD": "AdamW", "cpu": "nvme", "fp32": "bf16", "bf16": "fp32", "fp16": "bf16"}

NOT_READ_BACK = {("zero_optimization", "offload_optimizer", "pin_memory")}
"""Values whose change the comparison need not notice: no field of a plan has them."""


def test_a_broken_file_is_noticed(plans: list[Plan]) -> None:
    """One changed value, or one misspelled key, at a time."""
    cases = [
        (plan, path, changed)
        for plan in plans[: 2 * len(FAMILIES[TARGET])]
        for path, changed in mapping_mutants(settings_of(plan), WORDS)
    ]
    answers = read([(changed, plan.cluster.devices) for plan, _, changed in cases])
    unnoticed = {
        path
        for (plan, path, _), answer in zip(cases, answers, strict=True)
        if not read_back(plan, answer).differences
    }
    assert unnoticed == NOT_READ_BACK
    assert sum("error" not in answer for answer in answers) > len(cases) // 3


def test_deepspeed_ignores_the_texts_of_the_file(plans: list[Plan]) -> None:
    """The configuration is the same without them."""
    for plan in plans[:3]:
        settings = settings_of(plan)
        bare = {name: value for name, value in settings.items() if name != NOTES}
        both, without = read([(settings, plan.cluster.devices), (bare, plan.cluster.devices)])
        assert both["ignored"] == [NOTES] and without["ignored"] == []
        assert {**both, "ignored": []} == without


ACCEPTED: dict[str, Any] = {
    "an unknown key": {"zero_optimisation": {"stage": 3}},
    "stages of a pipeline": {"pipeline": {"stages": 4}},
    "an unknown key of activation checkpointing": {"activation_checkpointing": {"frob": True}},
    "gradients in fp32 without ZeRO": {
        "zero_optimization": {"stage": 0}, "data_types": {"grad_accum_dtype": "fp32"},
    },
}  # fmt: skip
"""Files that DeepSpeed reads without an error, though they do something else than they say, or cannot run."""

REFUSED: dict[str, dict[str, Any]] = {
    "MiCS": {"zero_optimization": {"stage": 3, "mics_shard_size": 4}},
    "an unknown key of ZeRO": {"zero_optimization": {"stage": 3, "shard_size": 4}},
    "a batch that is no product": {"train_batch_size": 63},
}

TRAPS = {
    # Plans that such a file would be for, and the field that the export names.
    "stages of a pipeline": ("pp=4,dp=2,zero_stage=1", "pp"),
    "gradients in fp32 without ZeRO": ("dp=8,zero_stage=0", "optim_shard"),
    "MiCS": ("dp=8,param_shard=4,grad_shard=4,optim_shard=4", "optim_shard"),
    "tensor parallelism": ("tp=2,dp=4,zero_stage=1", "tp"),
}


def test_traps_of_deepspeed_are_refused_by_the_export() -> None:
    legal = plan_of_text("llama-2-7b", "dp=8,zero_stage=3")
    own = settings_of(legal)
    accepted = read([({**own, **changes}, 8) for changes in ACCEPTED.values()])
    for name, answer in zip(ACCEPTED, accepted, strict=True):
        assert "error" not in answer, name
    refused = read([({**own, **changes}, 8) for changes in REFUSED.values()])
    for name, answer in zip(REFUSED, refused, strict=True):
        assert "error" in answer, name
    # The reader finds an ignored key.
    assert accepted[0]["ignored"] == [NOTES, "zero_optimisation"]
    for name, (text, field) in TRAPS.items():
        with pytest.raises(ConfigError) as error:
            deepspeed_files(plan_of_text("llama-2-7b", text))
        assert error.value.key == f"best.strategy.{field}", name


def test_without_deepspeed_the_error_says_what_to_install() -> None:
    plan = plan_of_text("llama-2-7b", "dp=8,zero_stage=3")
    with pytest.raises(ConfigError, match=r"cannot be imported.*pip install deepspeed==0.19") as refused:
        read_files_back(plan, deepspeed_files(plan), environment=environment_with("megatron"))
    assert refused.value.key == "--validate"


def test_the_command_reads_its_own_files_back() -> None:
    plan = plan_of_text("llama-3.1-8b", "dp=8,zero_stage=2,offload=optimizer")
    found = read_files_back(plan, deepspeed_files(plan), environment=environment_with("deepspeed"))
    assert found.differences == () and found.values == 17
