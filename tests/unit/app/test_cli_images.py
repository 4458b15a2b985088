"""`--images` and `--freeze`: vision towers and frozen parts in commands, exports and Python."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.inputs import read_mapping
from shardwise.plans import read_plan

SCHEMAS = Path(__file__).parents[3] / "docs" / "reference" / "schemas"
MODEL = "qwen2.5-vl-7b"
JOB = ("--cluster", "1x8xA100-80G", "--seq-len", "4096", "--global-batch-size", "64")
SHARDED = ("--strategy", "dp=8,zero_stage=3,micro_batch_size=1")


@pytest.mark.slow
def test_a_plan_keeps_images_and_frozen_parts(run: Any, tmp_path: Path) -> None:
    file = str(tmp_path / "plan.yaml")
    ran = run("plan", MODEL, *JOB, "--images", "2@448", "--freeze", "vision", "--save", file)
    assert ran.code == 0, ran.err
    text = " ".join(ran.out.split())
    assert "vision frozen: 7.66 billion trained of 8.29 billion" in text
    assert "2 images a sequence, each of 1,024 patches that become 256 tokens" in text
    assert "megatron-lm-0.19 - does not run vision towers" in text
    assert "--images 2@448 --freeze vision" in text.replace("\\ ", "")
    plan = read_plan(file)
    assert plan.model.frozen == ("vision",) and plan.model.patches == 2048
    assert run("check", file).code == 0
    schema = json.loads((SCHEMAS / "plan.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(read_mapping(file))
    out = str(tmp_path / "run")
    assert run("export", file, "--to", "deepspeed-0.19", "--out", out).code == 0
    written = (tmp_path / "run" / "deepspeed.json").read_text()
    assert "AutoModelForImageTextToText" in written
    assert "frozen: model.visual without model.visual.merger: requires_grad_(False)" in written
    ran = run("train", file, "--steps", "1")
    assert ran.code == 2 and "vision towers" in ran.err
    ran = run("replan", file, "--cluster", "1x8xA100-80G", "--events", "slow n0 0.5")
    assert ran.code == 2 and "freeze" in ran.err and ran.err.count("\n") == 1


def test_json_has_images_and_frozen_parts(run: Any) -> None:
    given = ("--images", "1@448", "--freeze", "vision+language", "--json")
    ran = run("evaluate", MODEL, *JOB, *SHARDED, *given)
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    schema = json.loads((SCHEMAS / "evaluation.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(found)
    assert found["model"]["images"] == {"patches": 1024, "tokens": 256}
    # A norm of 1280, and products of 5120 x 5120 and 5120 x 3584 with biases.
    trained = 1280 + 5120 * 5120 + 5120 + 5120 * 3584 + 3584
    frozen = {"parts": ["vision", "language"], "trained_parameters": trained}
    assert found["model"]["frozen"] == frozen
    plain = json.loads(run("evaluate", MODEL, *JOB, *SHARDED, "--images", "0", "--json").out)
    assert "images" not in plain["model"] and plain["model"]["parameters"] == 7_615_616_512
    # The tower takes time and memory; frozen parts take less of both.
    whole = json.loads(run("evaluate", MODEL, *JOB, *SHARDED, "--images", "1@448", "--json").out)
    results = [one["result"] for one in (found, plain, whole)]
    for values in (
        [one["step_time_s"] for one in results],
        [one["peak_memory_bytes"]["device"] for one in results],
    ):
        assert values[0] < values[2] and values[1] < values[2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--images", "two"), "--images: is not understood"),
        (("--images", "-1"), "--images: is not understood"),
        (("--images", "1@0"), "--images.height: is not a whole number in range"),
        # 37 x 37 tokens of an image of 1,024 x 1,024 pixels.
        (("--images", "3"), "--images: become more tokens than a sequence has; found 4,107 tokens"),
        (("--freeze", "vision"), "--freeze: the model has no vision tower that is counted"),
        (("--images", "1", "--freeze", "visual"), "--freeze: is no part of a model"),
        (
            ("--images", "1", "--freeze", "vision", "--lora", "8"),
            "--freeze: cannot be combined with",
        ),
    ],
)
def test_wrong_values_are_one_line(run: Any, given: tuple[str, ...], message: str) -> None:
    ran = run("evaluate", MODEL, *JOB, *SHARDED, *given)
    assert ran.code == 2 and message in ran.err and ran.err.count("\n") == 1, ran.err


def test_models_without_a_tower_and_graphs_have_no_images(run: Any) -> None:
    ran = run("evaluate", "llama-3.1-8b", *JOB, *SHARDED, "--images", "1")
    assert ran.code == 2 and "vision_config: the model has no vision tower" in ran.err
    graph = ("frontier", "graph:mlp", "--cluster", "8xH100-SXM", "--global-batch-size", "64")
    ran = run(*graph, "--freeze", "language")
    assert ran.code == 2 and "--freeze: is for models" in ran.err


def test_adapters_of_the_export_are_not_in_the_tower(run: Any, tmp_path: Path) -> None:
    """PEFT adapts every module with a name, and excludes those whose whole name matches an expression."""
    file, out = str(tmp_path / "plan.yaml"), tmp_path / "run"
    given = ("evaluate", MODEL, *JOB, *SHARDED, "--images", "2@448", "--lora", "8")
    assert run(*given, "--target", "fsdp2", "--save", file).code == 0
    assert run("export", file, "--to", "fsdp2", "--out", str(out)).code == 0
    excluded = json.loads((out / "adapter_config.json").read_text())["exclude_modules"]
    assert re.fullmatch(excluded, "model.visual.blocks.0.attn.q_proj")
    assert re.fullmatch(excluded, "model.visual.merger.mlp.0")
    assert not re.fullmatch(excluded, "model.language_model.layers.0.self_attn.q_proj")


@pytest.mark.parametrize("target", ["fsdp2", "deepspeed-0.19"])
@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_software_shards_no_tower(run: Any, target: str, axis: str) -> None:
    given = ("plan", MODEL, *JOB, "--target", target, "--fix", f"{axis}=2")
    ran = run(*given, "--images", "2@448")
    assert ran.code == 2 and f"fix.{axis}: is not run by" in ran.err and ran.err.count("\n") == 1, ran.err


def test_python_takes_mappings_and_lists() -> None:
    asked: dict[str, Any] = {
        "cluster": "1x8xA100-80G", "seq_len": 4096, "global_batch_size": 64,
        "strategy": "dp=8,zero_stage=3,micro_batch_size=1",
    }  # fmt: skip
    first = sw.evaluate(MODEL, images="2@448x224", freeze="vision+projector", **asked)
    images = {"count": 2, "height": 448, "width": 224}
    second = sw.evaluate(MODEL, images=images, freeze=["projector", "vision"], **asked)
    assert first.step_time_s == second.step_time_s and first.model == second.model
    assert first.model.patches == 2 * 32 * 16
    with pytest.raises(ConfigError):
        sw.evaluate(MODEL, images=1.5, **asked)  # type: ignore[arg-type]
