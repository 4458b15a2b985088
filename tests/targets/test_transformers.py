"""Transformers 5 reads exported files: sizes, arguments and the plans for its own model agree with the
plan."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.targets.folders import environment_with
from tests.targets.mapping_mutants import mapping_mutants
from tests.targets.random_plans import parameters_by_stage, plan_of_text
from tests.targets.replica_plans import FAMILIES, replica_plans

from shardwise.errors import ConfigError
from shardwise.plans import Plan
from shardwise.strategy import target_of
from shardwise.targets.child_process import Reader
from shardwise.targets.fsdp2 import fsdp2_files
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
    return replica_plans(TARGET, PLANS, seed=4)


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


SHARDED = Reader(module="tests.targets.sharded_model", software="Transformers", install="")


def held_by_the_first_rank(requests: list[tuple[str, int]]) -> list[int]:
    """The elements of all parameters on the first rank, for each text of a config and number of devices."""
    texts = [{"config": config, "world_size": devices} for config, devices in requests]
    return [each["parameters"] for each in SHARDED.answers(texts, environment=environment_with("accelerate"))]


def test_transformers_shards_as_many_parameters(plans: list[Plan]) -> None:
    """Equal to the cost model's; where a vocabulary does not divide, the first rank has one more row of the
    embedding, and of the head."""
    held = held_by_the_first_rank(
        [(transformers_files(plan)[CONFIG], plan.cluster.devices) for plan in plans]
    )
    exact = 0
    for plan, found in zip(plans, held, strict=True):
        (ours,) = parameters_by_stage(plan)
        is_divided = plan.model.vocab % (plan.best.strategy.tp * plan.best.strategy.param_shard) == 0
        assert 0 <= found - ours <= (0 if is_divided else 2 * plan.model.hidden), plan.best.strategy
        exact += found == ours
    assert exact > PLANS // 2


# Parameters by hand. Llama 3.1 8B, tp 2 x fsdp 4, 32 layers: q and o 4096 * 4096, k and v 1024 * 4096, MLP
# 3 * 4096 * 14336 are 218,103,808, over 8 ranks 27,262,976; two norms of 4096 over the 4 of fsdp 2,048;
# embedding and head 128,256 * 4096 over 8 each 65,667,072; the last norm 1,024. Mixtral 8x7B, fsdp 8, ep 2 (4
# replicas, of whose 4 experts each rank has one): q, o, k, v 41,943,040 over 8, the router 8 * 4096 over 8,
# two norms over 8, and an expert 3 * 4096 * 14336 whole: 181,408,768 a layer; embedding and head
# 32,000 * 4096 over 8 each.
BY_HAND = {
    "llama-3.1-8b": (
        "tp=2,dp=4,zero_stage=3,sequence_parallel=false", 32 * (27_262_976 + 2_048) + 2 * 65_667_072 + 1_024,
    ),
    "mixtral-8x7b": ("dp=8,ep=2,etp=1,zero_stage=3", 32 * 181_408_768 + 2 * 16_384_000 + 512),
}  # fmt: skip


def test_models_of_the_catalogue_have_the_parameters_worked_out_by_hand() -> None:
    plans = {name: plan_of_text(name, text) for name, (text, _) in BY_HAND.items()}
    held = held_by_the_first_rank([(transformers_files(plan)[CONFIG], 8) for plan in plans.values()])
    assert held == [number for _, number in BY_HAND.values()]
    assert [parameters_by_stage(plan) for plan in plans.values()] == [[number] for number in held]


def test_experts_that_do_not_divide_are_refused_because_some_ranks_hold_more() -> None:
    """FSDP2 shards 8 experts over 16 ranks as 8 x 1 and 8 x 0, not as halves."""
    whole = transformers_files(plan_of_text("mixtral-8x7b", "dp=8,zero_stage=3"))[CONFIG]
    eighth, uneven = held_by_the_first_rank([(whole, 8), (whole.replace("fsdp_size=8", "fsdp_size=16"), 16)])
    assert uneven > 0.95 * eighth
    plan = plan_of_text("mixtral-8x7b", "dp=16,zero_stage=3")
    for files, key in ((transformers_files, "dp"), (fsdp2_files, "param_shard")):
        with pytest.raises(ConfigError) as refused:
            files(plan)
        assert refused.value.key == f"best.strategy.{key}"


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
