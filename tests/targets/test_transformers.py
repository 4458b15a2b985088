"""Transformers 5 reads exported files: sizes, arguments and the plans for its own model agree with the
plan."""

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
from shardwise.targets.transformers import (
    ARGUMENTS,
    CONFIG,
    READER,
    TARGET,
    read_back,
    read_files_back,
    reader_request,
    transformers_files,
)

pytestmark = pytest.mark.xdist_group("transformers")

PLANS = 50


def read(files: list[dict[str, str]]) -> list[dict[str, Any]]:
    requests = [reader_request(each) for each in files]
    return READER.answers(requests, environment=environment_with("accelerate"))


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return replica_plans(TARGET, PLANS, seed=2)


def test_plans_are_of_every_family_and_use_every_value_of_the_target(plans: list[Plan]) -> None:
    strategies = [plan.best.strategy for plan in plans]
    assert {plan.model.name for plan in plans} == set(FAMILIES[TARGET])
    for name in ("tp", "dp", "ep", "etp", "micro_batch_size"):
        assert max(getattr(one, name) for one in strategies) > 1, name
    assert any(1 < one.tp < one.ep for one in strategies)
    assert {one.recompute for one in strategies} == {"none", "full"}
    assert {one.param_shard == one.dp for one in strategies} == {True, False}
    assert {plan.job.dtype for plan in plans} == {"bf16", "fp32"}
    target = target_of(TARGET)
    for plan in plans:
        assert list(target.for_job(plan.model, plan.job).refusals(plan.best.strategy)) == []


def test_transformers_reads_the_plan_back(plans: list[Plan]) -> None:
    answers = read([transformers_files(plan) for plan in plans])
    for plan, answer in zip(plans, answers, strict=True):
        assert read_back(plan, answer).differences == (), plan.best.strategy


WORDS = {"adamw_torch": "sgd", "sgd": "adamw_torch"}


def test_broken_arguments_are_noticed(plans: list[Plan]) -> None:
    """One changed value, or one misspelled key, at a time."""
    cases = []
    for plan in plans[: len(FAMILIES[TARGET])]:
        files = transformers_files(plan)
        for path, changed in mapping_mutants(json.loads(files[ARGUMENTS]), WORDS):
            cases.append((plan, path, {**files, ARGUMENTS: json.dumps(changed)}))
    answers = read([files for _, _, files in cases])
    unnoticed = {
        path
        for (plan, path, _), answer in zip(cases, answers, strict=True)
        if not read_back(plan, answer).differences
    }
    assert unnoticed == set()


def test_broken_sizes_and_models_are_noticed(plans: list[Plan]) -> None:
    """One changed number at a time, in the text of the module."""
    cases = []
    for plan in plans[: 2 * len(FAMILIES[TARGET])]:
        files, strategy = transformers_files(plan), plan.best.strategy
        for old, new in (
            (f"tp_size={strategy.tp}", f"tp_size={2 * strategy.tp}"),
            (f"fsdp_size={strategy.param_shard}", f"fsdp_size={2 * strategy.param_shard}"),
            ("dp_replicate_size=", "dp_replicate_size=2 * "),
            ("fsdp_mixed_precision=", "fsdp_mixed_precision=not "),
            ("ep_size=", "ep_size=2 * "),
            ("'all_to_all'", "'all_reduce'"),
            (")\n\n#", "    fsdp_cpu_offload=True,\n)\n\n#"),
            (f"'num_hidden_layers': {plan.model.layers}", f"'num_hidden_layers': {plan.model.layers + 1}"),
            (f"'vocab_size': {plan.model.vocab}", f"'vocab_size': {plan.model.vocab + 64}"),
            ("sequence_length = ", "sequence_length = 1 + "),
            ('attn_implementation = "sdpa"', 'attn_implementation = "eager"'),
        ):
            if old in files[CONFIG]:
                cases.append((plan, old, {**files, CONFIG: files[CONFIG].replace(old, new)}))
    assert {old for _, old, _ in cases} >= {"ep_size=", "'all_to_all'", "sequence_length = "}
    answers = read([files for _, _, files in cases])
    unnoticed = {
        (old, str(plan.best.strategy))
        for (plan, old, _), answer in zip(cases, answers, strict=True)
        if not read_back(plan, answer).differences
    }
    assert unnoticed == set()


TRAPS = {
    # Sizes that Transformers takes or refuses, the plan that has them, and the field that the export names.
    "sequence parallelism, which is not wired up": (
        "enable_sequence_parallel=True", "tp=2,dp=4,zero_stage=3,sequence_parallel=true",
        "sequence_parallel", None,
    ),
    "pipeline parallelism with FSDP": (
        "pp_size=2", "pp=2,dp=4,zero_stage=3", "pp", "Combining FSDP with pipeline parallelism",
    ),
}  # fmt: skip


def test_traps_of_transformers_are_refused_by_the_export() -> None:
    legal = transformers_files(plan_of_text("llama-2-7b", "dp=8,zero_stage=3"))
    wrong = [
        {**legal, CONFIG: legal[CONFIG].replace(")\n\n#", f"    {size},\n)\n\n#")}
        for size, _, _, _ in TRAPS.values()
    ]
    for (name, (_, text, field, error)), answer in zip(TRAPS.items(), read(wrong), strict=True):
        assert (error or "") in answer.get("error", ""), name
        assert ("error" in answer) == (error is not None), name
        with pytest.raises(ConfigError) as refused:
            transformers_files(plan_of_text("llama-2-7b", text))
        assert refused.value.key == f"best.strategy.{field}", name


def test_models_of_the_catalogue_have_equally_many_parameters() -> None:
    named = ("llama-3.1-70b", "mixtral-8x7b", "qwen3-30b-a3b", "gemma-2-9b", "phi-3-medium", "mistral-7b")
    plans = [plan_of_text(name, "dp=8,zero_stage=3,recompute=full") for name in named]
    for plan in plans:
        found = read_files_back(plan, transformers_files(plan), environment=environment_with("accelerate"))
        assert found.differences == (), plan.model.name


def test_without_the_trainer_the_error_says_what_to_install() -> None:
    plan = plan_of_text("llama-2-7b", "dp=8,zero_stage=3")
    with pytest.raises(ConfigError, match=r"cannot be imported.*accelerate==1.15") as refused:
        read_files_back(plan, transformers_files(plan), environment=environment_with("megatron"))
    assert refused.value.key == "--validate"
