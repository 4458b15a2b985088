"""Overrides for Megatron-Bridge 0.6.2 are fields of its classes, with values of their types, and mean what
Megatron-LM 0.19.2 reads in the flags of the same plan."""

from __future__ import annotations

import ast
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.targets.dataclass_fields import allows, fields_of
from tests.targets.megatron import INSTALLED, ROOT, environment, request_of
from tests.targets.random_plans import plan_of_text, random_plans

from shardwise.plans import Plan
from shardwise.targets import EXPORTERS
from shardwise.targets.megatron_lm_read_back import Reading, read_by_megatron_lm

pytestmark = pytest.mark.xdist_group("megatron-lm")

BRIDGE = ROOT / ".cache" / "megatron-bridge"
SEED, PLANS = 62, 50

CORE, TRAINING = "megatron/core/", "megatron/training/config/"
OWN = "megatron/bridge/training/"

CLASSES: dict[str, list[tuple[str, str]]] = {
    "model": [
        ("megatron/bridge/models/gpt_provider.py", "GPTModelProvider"),
        (f"{CORE}transformer/transformer_config.py", "TransformerConfig"),
        (f"{CORE}model_parallel_config.py", "ModelParallelConfig"),
    ],
    "ddp": [(f"{CORE}distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig")],
    "optimizer": [(f"{CORE}optimizer/optimizer_config.py", "OptimizerConfig")],
    "train": [(f"{TRAINING}training_config.py", "TrainingConfig")],
    "dist": [(f"{TRAINING}common_config.py", "DistributedInitConfig")],
    "checkpoint": [(f"{TRAINING}training_config.py", "CheckpointConfig")],
    "dataset": [(f"{OWN}config.py", "GPTDatasetConfig")],
    "tokenizer": [(f"{OWN}tokenizers/config.py", "TokenizerConfig")],
    "": [(f"{OWN}config.py", "ConfigContainer")],
}
"""The classes of each part of a recipe, where a field of an earlier one replaces that of a later one."""


def read(line: str) -> tuple[str, Any]:
    """An override as its path and its value. Words without quotes are text."""
    path, _, text = line.partition("=")
    if text.startswith("[") and not text[1:2].isdigit():
        return path, text.strip("[]").split(",")
    if text.startswith("{"):
        return path, yaml.safe_load(text.replace(":", ": "))
    try:
        return path, json.loads(text)
    except ValueError:
        return path, text


def overrides_of(plan: Plan, target: str = "megatron-lm-0.19") -> dict[str, Any]:
    """The overrides in the exported file."""
    words = shlex.split(EXPORTERS[target].files(plan)["megatron-bridge.txt"], comments=True)
    found = dict(map(read, words))
    assert len(found) == len(words), "no field is overridden twice"
    return found


def source(name: str) -> Path:
    folder = BRIDGE if name.startswith("megatron/bridge/") else INSTALLED
    assert (folder / "megatron").is_dir(), f"{folder} is missing: run these tests by `make test-targets`"
    return folder / name


@pytest.fixture(scope="module")
def fields() -> dict[str, ast.expr]:
    """The annotation of every field of a recipe, by its path."""
    found: dict[str, ast.expr] = {}
    for part, classes in CLASSES.items():
        for name, class_name in classes:
            for field, annotation in fields_of(source(name), class_name).items():
                found.setdefault(f"{part}.{field}" if part else field, annotation)
    return found


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    """Plans whose models a recipe can build, with others among them."""
    return random_plans(PLANS, seed=SEED)


@pytest.fixture(scope="module")
def readings(plans: list[Plan]) -> list[Reading]:
    return read_by_megatron_lm([request_of(plan) for plan in plans], environment=environment())


@pytest.mark.parametrize("target", ["megatron-lm-0.19", "megatron-fsdp-0.19"])
def test_every_override_is_a_field_with_a_value_of_its_type(fields: dict[str, ast.expr], target: str) -> None:
    for plan in random_plans(PLANS, seed=SEED, target=target):
        for path, value in overrides_of(plan, target).items():
            assert path in fields, path
            if isinstance(value, dict):
                assert set(value) == {"_target_", "_call_"} and value["_call_"] is False, path
            else:
                assert allows(fields[path], value), (path, value, ast.unparse(fields[path]))


def test_overrides_mean_what_megatron_lm_reads_in_the_flags(
    plans: list[Plan], readings: list[Reading]
) -> None:
    """Values of the model are compared with Megatron-LM's TransformerConfig, all others with its arguments of
    the same name; its layout is an object, which `test_megatron_lm` reads."""
    compared: set[str] = set()
    written = 0
    for plan, reading in zip(plans, readings, strict=True):
        overrides = overrides_of(plan)
        written += bool(overrides)
        config, arguments = reading.config, reading.arguments
        for path, value in overrides.items():
            part, _, name = path.rpartition(".")
            if path in ("mixed_precision", "comm_overlap", "model.pipeline_model_parallel_layout"):
                continue
            if path in DEFAULTED and value is None:
                assert name != "expert_tensor_parallel_size" or plan.model.experts is None
                continue
            if part == "model" and name in config:
                meant = config[name]
            elif name in OTHER_NAMES:
                meant = OTHER_NAMES[name](arguments)
            elif name in arguments:
                meant = arguments[name]
            else:
                assert path in UNKNOWN, path
                continue
            assert same(value, meant), (path, value, meant, str(plan.best.strategy))
            compared.add(path)
        mixed = {"bf16": "bf16_mixed", "fp16": None, "fp32": None}[plan.job.dtype] if overrides else "none"
        assert overrides.get("mixed_precision", "none") == mixed
        layout = overrides.get("model.pipeline_model_parallel_layout")
        flags = {flag: words for flag, *words in map(str.split, args_of(plan))}
        given = flags.get("--pipeline-model-parallel-layout")
        assert not overrides or layout == (None if given is None else shlex.split(given[0])[0])
    assert written > PLANS * 2 // 3 and len(compared) > 60


def args_of(plan: Plan) -> list[str]:
    text = EXPORTERS["megatron-lm-0.19"].files(plan)["megatron-lm.args"]
    return [line for line in text.splitlines() if line.startswith("--")]


OTHER_NAMES: dict[str, Any] = {
    "grad_reduce_in_fp32": lambda read: (
        read["accumulate_allreduce_grads_in_fp32"] or read["params_dtype"] == "torch.float32"
    ),
    "vocab_size": lambda read: read["padded_vocab_size"],
    "share_embeddings_and_output_weights": lambda read: not read["untie_embeddings_and_output_weights"],
    "rope_scaling": lambda read: read["use_rope_scaling"],
    "optimizer_offload_fraction": lambda read: (
        read["optimizer_offload_fraction"] * bool(read["optimizer_cpu_offload"])
    ),
}
"""Fields that Megatron-LM's arguments have under other names."""

DEFAULTED = (
    "model.expert_tensor_parallel_size",
    "model.recompute_modules",
    "model.offload_modules",
    "model.autocast_dtype",
)
"""Fields that Megatron-Core sets itself where they are null: without experts, recomputation or offload, and
from `params_dtype`."""

UNKNOWN = ("model.should_pad_vocab", "tokenizer.use_tokenizer_vocab_size")
"""Fields of Megatron-Bridge alone."""


def same(value: object, read: object) -> bool:
    """Whether a value is what Megatron-LM has, where dtypes and functions are names."""
    if isinstance(value, str) and isinstance(read, str) and read.startswith("torch."):
        return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(value) == read[6:]
    if isinstance(value, dict):
        return str(value["_target_"]).rpartition(".")[2] == str(read).rpartition(".")[2]
    return value == read


def test_a_wrong_override_is_noticed(fields: dict[str, ast.expr]) -> None:
    plan = plan_of_text("llama-2-7b", "tp=2,pp=2,dp=2")
    assert "model.tensor_parallel_size" not in fields
    assert not allows(fields["model.tensor_model_parallel_size"], "2")
    assert not allows(fields["model.sequence_parallel"], 1)
    assert not allows(fields["model.position_embedding_type"], "none")
    assert not same(overrides_of(plan)["model.tensor_model_parallel_size"], 4)


def test_yaml_has_the_arguments_that_megatron_lm_reads(plans: list[Plan], readings: list[Reading]) -> None:
    for plan, reading in zip(plans, readings, strict=True):
        values = yaml.safe_load(EXPORTERS["megatron-lm-0.19"].files(plan)["megatron-lm.yaml"])
        assert len(values) == len(args_of(plan))
        for name, value in values.items():
            meant = reading.arguments[name]
            if name in ("moe_layer_freq", "window_attn_skip_freq"):
                value = eval(value, {})  # noqa: S307 - a pattern such as [0]*3+[1]*5
            if name == "window_size":
                value = [int(part) for part in value.split(",")]
            if name == "attention_backend":
                meant = str(meant).rpartition(".")[2]
            if name == "cp_comm_type":
                (meant,) = meant
            if name == "pipeline_model_parallel_layout":
                continue
            assert value == meant or (isinstance(meant, tuple) and value == list(meant)), (name, value, meant)
