"""`--lora` from the command line to the plan file, the checker and the exports; what is refused and how."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from tests.unit.app.conftest import Run

SCHEMAS = Path(__file__).parents[3] / "docs/reference/schemas"

JOB = ("--cluster", "1x8xH100-SXM", "--seq-len", "4096", "--global-batch-size", "16")
SHARDED = ("--strategy", "zero_stage=3,micro_batch_size=1")


def test_a_plan_of_adapters_is_saved_checked_and_exported(run: Run, tmp_path: Path) -> None:
    file, folder = str(tmp_path / "plan.yaml"), str(tmp_path / "run")
    asked = (*JOB, *SHARDED, "--lora", "r=16,targets=q_proj+v_proj", "--target", "fsdp2", "--save", file)
    ran = run("evaluate", "llama-3.1-8b", *asked)
    assert ran.code == 0, ran.err
    # 32 layers x 16 (4096 + 4096 + 4096 + 1024) = 6,815,744.
    assert "LoRA rank 16 on q v: 6.82 million trained of 8.04 billion" in ran.out
    assert "--lora r=16,targets=q_proj+v_proj" in ran.out  # in the next command
    assert run("check", file).code == 0
    assert run("export", file, "--to", "fsdp2", "--out", folder).code == 0
    config = json.loads((tmp_path / "run" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["target_modules"]) == ("LORA", 16, ["q_proj", "v_proj"])
    for target in ("megatron-lm", "torchtitan", "transformers-5", "megatron-fsdp"):
        refused = run("export", file, "--to", target, "--out", str(tmp_path / target))
        assert refused.code == 2 and "found 'LoRA'; allowed: models without it" in refused.err
    ran = run("replan", file, "--cluster", "1x8xH100-SXM", "--events", "slow n0 0.5")
    assert ran.code == 2 and "model.config.lora: is not supported after events" in ran.err
    # The file of the export is read too.
    again = run("evaluate", "llama-3.1-8b", *JOB, *SHARDED, "--lora", folder, "--target", "fsdp2")
    assert again.code == 0 and "6.82 million trained" in again.out


def test_the_answer_says_what_is_trained(run: Run) -> None:
    ran = run("evaluate", "llama-3.1-8b", *JOB, *SHARDED, "--lora", "16", "--json")
    document = json.loads(ran.out)
    jsonschema.Draft202012Validator(json.loads((SCHEMAS / "evaluation.json").read_text())).validate(document)
    assert document["model"]["lora"] == {
        "r": 16, "target_modules": ["q_proj", "v_proj"], "trained_parameters": 6_815_744,
    }  # fmt: skip
    assert document["model"]["parameters"] == 8_030_261_248 + 6_815_744
    plain = run("evaluate", "gpt2", *JOB[:2], "--seq-len", "512", *JOB[4:], "--strategy", "dp=8", "--json")
    assert "lora" not in json.loads(plain.out)["model"]


def test_a_plan_names_targets_without_adapters(run: Run) -> None:
    ran = run("plan", "gpt2", *JOB[:2], "--seq-len", "512", *JOB[4:], "--lora", "8")
    assert ran.code == 0, ran.err
    lines = [line.split() for line in ran.out.splitlines()]
    # TorchTitan and Transformers do not run the family at all.
    assert [line[0] for line in lines if line[-1:] == ["LoRA"]] == ["megatron-lm-0.19", "megatron-fsdp-0.19"]


@pytest.mark.parametrize(
    ("model", "adapters", "words"),
    [
        ("llama-3.1-8b", "0", "--lora.r: is no rank; found 0"),
        ("llama-3.1-8b", "x", "--lora: is not understood; found 'x'"),
        ("llama-3.1-8b", "r=8,targets=foo", "--lora.target_modules: is not a known module; found 'foo'"),
        ("llama-3.1-8b", "none.json", "none.json: cannot be read"),
        ("mixtral-8x7b", "r=8,targets=up_proj", "--lora.target_modules: is a module of experts"),
        ("deepseek-v3", "8", "--lora: is not supported with multi-token prediction"),
    ],
)
def test_what_is_no_adapter_is_one_line(run: Run, model: str, adapters: str, words: str) -> None:
    ran = run("evaluate", model, *JOB, *SHARDED, "--lora", adapters)
    assert ran.code == 2 and ran.out == ""
    assert ran.err.startswith(f"shardwise: error: {words}") and ran.err.count("\n") == 1


def test_files_of_adapters(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "adapter_config.json"
    file.write_text('{"peft_type": "LORA", "r": 8, "modules_to_save": ["lm_head"]}')
    ran = run("evaluate", "llama-3.1-8b", *JOB, *SHARDED, "--lora", str(tmp_path))
    assert ran.code == 2 and f"{file}: modules_to_save: is not supported" in ran.err
    ran = run("evaluate", str(file), *JOB, *SHARDED)
    assert ran.code == 2 and "its model, with this file as --lora" in ran.err
    ran = run("frontier", "graph:mlp", "--cluster", "8xH100-SXM", "--global-batch-size", "64", "--lora", "8")
    assert ran.code == 2 and "--lora: is for models, not for operator graphs" in ran.err
