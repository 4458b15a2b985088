"""Accelerate 1.15 reads exported files: what its launcher passes to a script agrees with the plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.targets.folders import environment_with
from tests.targets.mapping_mutants import mapping_mutants
from tests.targets.random_plans import plan_of_text
from tests.targets.replica_plans import FAMILIES, replica_plans
from tests.unit.launch.stand_ins import free_port, install, run_nodes
from tests.unit.targets.small_plans import LLAMA, small_plan

from shardwise.app.cli import main
from shardwise.errors import ConfigError
from shardwise.plans import Plan, write_plan
from shardwise.strategy import target_of
from shardwise.targets.fsdp2 import FILE, READER, fsdp2_files, read_back, read_files_back

pytestmark = pytest.mark.xdist_group("accelerate")

PLANS = 50


def read(files: list[str]) -> list[dict[str, Any]]:
    return READER.answers([{"file": text} for text in files], environment=environment_with("accelerate"))


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return replica_plans("fsdp2", PLANS, seed=2)


def test_plans_are_of_every_family_and_use_every_value_of_the_target(plans: list[Plan]) -> None:
    strategies = [plan.best.strategy for plan in plans]
    assert {plan.model.name for plan in plans} == set(FAMILIES["fsdp2"])
    for name in ("tp", "cp", "dp", "etp", "micro_batch_size"):
        assert max(getattr(one, name) for one in strategies) > 1, name
    assert {one.recompute for one in strategies} == {"none", "full"}
    assert {one.param_shard == one.dp * one.cp for one in strategies} == {True, False}
    assert {plan.job.dtype for plan in plans} == {"bf16", "fp32"}
    target = target_of("fsdp2")
    for plan in plans:
        assert list(target.for_job(plan.model, plan.job).refusals(plan.best.strategy)) == []


def test_accelerate_reads_the_plan_back(plans: list[Plan]) -> None:
    answers = read([fsdp2_files(plan)[FILE] for plan in plans])
    for plan, answer in zip(plans, answers, strict=True):
        assert read_back(plan, answer).differences == (), plan.best.strategy


def test_accelerate_reduces_gradients_in_bf16_without_a_policy() -> None:
    """A plan that reduces in bf16 needs none; one in fp32 names the policy of the script."""
    target = target_of("fsdp2")
    narrow = target.with_options(target.own_profile, {"grad_reduce_dtype": "bf16"})
    plan = small_plan(LLAMA, "dp=8,zero_stage=3", profile=narrow)
    text = fsdp2_files(plan)[FILE]
    (answer,) = read([text])
    assert read_back(plan, answer).differences == () and "the script sets no policy" in text
    (difference,) = read_back(plan, {**answer, "reduces": "torch.float32"}).differences
    assert difference.field == "dtype of reduced gradients"


WORDS = {
    "alltoall": "allgather", "bf16": "fp16", "no": "bf16", "FSDP": "MULTI_GPU",
    "TRANSFORMER_BASED_WRAP": "NO_WRAP",
    "LlamaDecoderLayer": "LlamaMLP", "GPT2Block": "GPT2MLP", "MixtralDecoderLayer": "MixtralMLP",
    "MistralDecoderLayer": "MistralMLP", "Qwen2DecoderLayer": "Qwen2MLP", "Qwen3DecoderLayer": "Qwen3MLP",
    "Qwen3MoeDecoderLayer": "Qwen3MoeMLP",
}  # fmt: skip


def test_a_broken_file_is_noticed(plans: list[Plan]) -> None:
    """One changed value, or one misspelled key, at a time."""
    cases = [
        (plan, path, changed)
        for plan in plans[: len(FAMILIES["fsdp2"])]
        for path, changed in mapping_mutants(yaml.safe_load(fsdp2_files(plan)[FILE]), WORDS)
    ]
    answers = read([yaml.safe_dump(changed) for _, _, changed in cases])
    unnoticed = {
        path
        for (plan, path, _), answer in zip(cases, answers, strict=True)
        if not read_back(plan, answer).differences
    }
    assert unnoticed == set()
    assert sum("error" not in answer for answer in answers) > len(cases) // 3


TRAPS: dict[str, tuple[Mapping[str, Any], str, str]] = {
    # The sizes that Accelerate takes without an error, a plan that needs them, and the field that is refused.
    "pipeline parallelism": ({"pp_size": 2, "dp_shard_size": 4}, "pp=2,dp=4,zero_stage=3", "pp"),
    "expert parallelism": ({"ep_size": 2}, "dp=8,ep=2,zero_stage=3", "ep"),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAPS)
def test_keys_that_accelerate_ignores_are_refused_by_the_export(name: str) -> None:
    sizes, text, field = TRAPS[name]
    model = "mixtral-8x7b" if field == "ep" else "llama-2-7b"
    with pytest.raises(ConfigError) as refused:
        fsdp2_files(plan_of_text(model, text))
    assert refused.value.key == f"best.strategy.{field}"
    legal = plan_of_text(model, "dp=8,zero_stage=3")
    settings = yaml.safe_load(fsdp2_files(legal)[FILE])
    settings["parallelism_config"] |= {f"parallelism_config_{size}": value for size, value in sizes.items()}
    (answer,) = read([yaml.safe_dump(settings)])
    assert "error" not in answer
    found = {each.field for each in read_back(legal, answer).differences}
    assert "keys that Accelerate ignores" in found and ("strategy.pp" in found) == (field == "pp")


def test_without_accelerate_the_error_says_what_to_install() -> None:
    plan = plan_of_text("llama-2-7b", "dp=8,zero_stage=3")
    with pytest.raises(ConfigError, match=r"cannot be imported.*pip install accelerate==1.15") as refused:
        READER.answers([{"file": fsdp2_files(plan)[FILE]}], environment=environment_with("megatron"))
    assert refused.value.key == "--validate"


def test_the_command_reads_its_own_files_back() -> None:
    plan = plan_of_text(
        "llama-3.1-8b", "tp=2,dp=4,param_shard=2,grad_shard=2,optim_shard=2,sequence_parallel=false"
    )
    found = read_files_back(plan, fsdp2_files(plan), environment=environment_with("accelerate"))
    assert found.differences == () and found.values == 18


ACCELERATE = """\
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_module("accelerate.commands.launch", run_name="__main__")
"""
"""The command `accelerate launch`."""


@pytest.mark.parametrize("nodes", [1, 2])
def test_accelerate_starts_what_launch_prints(
    nodes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks, on one node or on two; words after the script are the script's."""
    plan, out = str(tmp_path / "p.yaml"), str(tmp_path / "it's $(x)")
    cluster = f"{nodes}x{2 // nodes}xH100-SXM"
    write_plan(plan, small_plan(LLAMA, "tp=1,dp=2,zero_stage=3", cluster=cluster))
    assert main(["export", plan, "--to", "fsdp2", "--out", out]) == 0
    capsys.readouterr()
    head = ["--head", "localhost", "--port", free_port()] if nodes > 1 else []
    launch = ["launch", plan, "--target", "fsdp2", "--with", "torchrun", "--files", out, *head]
    assert main([*launch, "--", "--num_processes", "7", "$(x) y"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    install(tmp_path, "accelerate", ACCELERATE)
    variables = environment_with("accelerate")
    path = f"{tmp_path}{os.pathsep}{variables['PATH']}"
    found = run_nodes(tmp_path, "train.py", lines, PATH=path, PYTHONPATH=variables["PYTHONPATH"])
    local = ("0", "1") if nodes == 1 else ("0", "0")
    words = ["--num_processes", "7", "$(x) y"]
    assert found == {rank: [local[rank], "2", *words] for rank in range(2)}
