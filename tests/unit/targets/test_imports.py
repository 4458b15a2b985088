"""Imports of configuration files: what `export` wrote reads back as the plan's strategy; files of users."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.targets.random_plans import random_plans
from tests.targets.replica_plans import replica_plans
from tests.targets.titan_plans import random_titan_plans
from tests.unit.targets.small_plans import LLAMA, MIXTRAL, small_plan

from shardwise.errors import ConfigError
from shardwise.model import Model, load_model, model_from_config
from shardwise.plans import Plan
from shardwise.strategy import Strategy, complete
from shardwise.targets import EXPORTERS, IMPORTERS, ImportedRun, Supplied, imported_run
from shardwise.targets.imports.megatron_lm_text import flag_values, layout_counts, log_values
from shardwise.targets.megatron_lm import effective_order, megatron_lm_flags

MEGATRON_FSDP = "megatron-fsdp-0.19"
MEGATRON_LM, TORCHTITAN, DEEPSPEED, FSDP2 = "megatron-lm-0.19", "torchtitan-0.3", "deepspeed-0.19", "fsdp2"


def read(target: str, text: str, devices: int, **supplied: Any) -> ImportedRun:
    assert [name for name, one in IMPORTERS.items() if one.is_own(text)] == [target]
    return IMPORTERS[target].read(text, devices=devices, supplied=Supplied(**supplied))


def strategy_of(run: ImportedRun, devices: int) -> Strategy:
    experts = run.model.experts
    return complete(
        run.fields, devices=devices, layers=run.model.layers,
        experts=None if experts is None else experts.experts, global_batch_size=run.global_batch_size,
    )  # fmt: skip


def ranked(strategy: Strategy) -> Strategy:
    """The same without what has no effect: the place of axes of one rank."""
    return replace(strategy, axis_order="-".join(effective_order(strategy, strategy.axis_order)))


def differing(found: Strategy, plan: Plan) -> dict[str, tuple[object, object]]:
    ours, theirs = asdict(ranked(found)), asdict(ranked(plan.best.strategy))
    return {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]}


@pytest.mark.parametrize(
    ("target", "name"),
    [(MEGATRON_LM, "megatron-lm.args"), (MEGATRON_LM, "megatron-lm.sh"), (MEGATRON_FSDP, "megatron-lm.args")],
)
def test_flags_of_an_export_read_back(target: str, name: str) -> None:
    for plan in random_plans(40, seed=7, target=target):
        text = EXPORTERS[target].files(plan)[name]
        run = read(target, text, plan.cluster.devices)
        assert differing(strategy_of(run, plan.cluster.devices), plan) == {}
        job = plan.job
        assert (run.seq_len, run.global_batch_size, run.dtype, run.optimizer) == (
            job.seq_len, job.global_batch_size, job.dtype, job.optimizer,
        )  # fmt: skip
        assert [one.code for one in run.findings if one.severity == "error"] == []
        read_model, model = run.model, plan.model
        assert (read_model.layers, read_model.hidden, read_model.vocab, read_model.heads) == (
            model.layers, model.hidden, model.vocab, model.heads,
        )  # fmt: skip


def test_arguments_of_a_log_read_back() -> None:
    """Every argument as Megatron-LM prints it: the name, dots up to column 48, the value as in Python."""
    for plan in random_plans(8, seed=8):
        lines = []
        for flag, *values in megatron_lm_flags(plan):
            name = flag.removeprefix("--").replace("-", "_")
            value = " ".join(values) if values else "True"
            value = f"['{value}']" if name == "cp_comm_type" else value
            lines.append(f"  {name} {'.' * (48 - len(name))} {value}")
        block = "\n".join(lines)
        text = f"[rank0] start\n---- arguments ----\n{block}\n---- end of arguments ----\ndone"
        run = read(MEGATRON_LM, text, plan.cluster.devices)
        assert differing(strategy_of(run, plan.cluster.devices), plan) == {}


def test_a_module_of_torchtitan_reads_back() -> None:
    """Schedules that PyTorch has no name for are in a CSV next to the module, and are approximated."""
    for plan in random_titan_plans(40, seed=7):
        text = EXPORTERS[TORCHTITAN].files(plan)["torchtitan_0_3.py"]
        run = read(TORCHTITAN, text, plan.cluster.devices, model=plan.model)
        found = differing(strategy_of(run, plan.cluster.devices), plan)
        if "schedule.csv" in EXPORTERS[TORCHTITAN].files(plan):
            assert set(found) <= {"schedule"} and "approximated" in {one.code for one in run.findings}
        else:
            assert found == {}
        assert (run.seq_len, run.global_batch_size, run.dtype) == (
            plan.job.seq_len, plan.job.global_batch_size, plan.job.dtype,
        )  # fmt: skip


@pytest.mark.parametrize(("target", "name"), [(DEEPSPEED, "deepspeed.json"), (FSDP2, "accelerate.yaml")])
def test_files_for_training_scripts_read_back(target: str, name: str) -> None:
    """The model, the sequence length and what the script sets are supplied."""
    for plan in replica_plans(target, 30, seed=7):
        strategy = plan.best.strategy
        fields = {"micro_batch_size": strategy.micro_batch_size, "recompute": strategy.recompute}
        fields |= {"etp": strategy.etp}
        run = read(
            target, EXPORTERS[target].files(plan)[name], plan.cluster.devices, model=plan.model,
            seq_len=plan.job.seq_len, global_batch_size=plan.job.global_batch_size, fields=fields,
        )  # fmt: skip
        assert differing(strategy_of(run, plan.cluster.devices), plan) == {}
        assert [one.code for one in run.findings] == []


# Text


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("Et|(t|)*2L", (1, 1, 1, 0)),
        ("Et*3|(tt|)*2,t,mL", (3, 2, 2, 1)),
        ("E|t*10|(t|t*2|)*2L", (0, 10, 1, 2, 1, 2, 0)),
    ],
)
def test_layouts(text: str, counts: tuple[int, ...]) -> None:
    assert layout_counts(text, "--pipeline-model-parallel-layout") == counts


@pytest.mark.parametrize("text", ["Etx|tL", "E(t|)*99999(t|)*99999t*99999L", "E(t|L"])
def test_a_text_that_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--pipeline-model-parallel-layout"):
        layout_counts(text, "--pipeline-model-parallel-layout")


def test_variables_of_a_script_are_replaced() -> None:
    script = """#!/bin/bash
TP=4
export PP="2"   
ARGS=(
  --num-layers 8   # layers
  --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size=$PP
  --micro-batch-size ${MBS:-2})
torchrun --nproc-per-node 8 pretrain_gpt.py "${ARGS[@]}" \\
   --bf16 --micro-batch-size 3 && echo done
"""
    found, repeated = flag_values(script.replace("   \n", "\n"))
    expected = {
        "num_layers": 8, "tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2,
        "micro_batch_size": 3, "bf16": True,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert repeated == ["--micro-batch-size"]


def test_values_of_a_log() -> None:
    text = """2026-01-01 using world size: 8
------------------------ arguments ------------------------
  bf16 ............................................ True
  cp_comm_type .................................... ['a2a']
  lr .............................................. 0.0003
  num_experts ..................................... None
  pipeline_model_parallel_layout .................. Et|tL
-------------------- end of arguments ---------------------
  lr .............................................. 7
"""
    assert log_values(text) == {
        "bf16": True, "cp_comm_type": ["a2a"], "lr": 0.0003, "num_experts": None,
        "pipeline_model_parallel_layout": "Et|tL",
    }  # fmt: skip


# Files that people have


def small(config: dict[str, Any] = LLAMA) -> Model:
    return model_from_config(config, name="small")


def test_a_json_and_a_toml_of_torchtitan() -> None:
    """8 devices: 2 replicas of 2 shards with tp 2; 64 sequences; the default policy reshards without a
    pipeline."""
    values: dict[str, Any] = {
        "model_spec": {"name": "llama3", "flavor": "8B"},
        "training": {"local_batch_size": 4, "global_batch_size": 64, "seq_len": 4096,
                     "mixed_precision_param": "bfloat16"},
        "parallelism": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": -1,
                        "tensor_parallel_degree": 2, "fsdp_reshard_after_forward": "default"},
        "activation_checkpoint": None,
        "compile": {"enable": True},
    }  # fmt: skip
    run = read(TORCHTITAN, json.dumps(values), 8)
    found = strategy_of(run, 8)
    assert run.model.name == load_model("llama-3.1-8b").name
    assert (found.tp, found.dp, found.param_shard, found.optim_shard) == (2, 4, 2, 2)
    assert (found.micro_batch_size, found.recompute, run.global_batch_size) == (4, "none", 64)
    toml = """
[model]
name = "llama3"
flavor = "70B"
[training]
batch_size = 8
seq_len = 8192
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
compile = false
[experimental]
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "1F1B"
[activation_checkpoint]
mode = "full"
"""
    run = read(TORCHTITAN, toml, 64)
    found = strategy_of(run, 64)
    # 64 / (8 x 4) = 2 data-parallel ranks with 8 sequences each; gradients stay sharded, parameters do not.
    assert (found.pp, found.dp, run.global_batch_size) == (4, 2, 16)
    assert (found.param_shard, found.grad_shard, found.optim_shard) == (1, 2, 2)
    # 82 effective layers on 4 stages: 21, 21, 20, 20; the first and the last have one less.
    assert (found.first_stage_layers, found.last_stage_layers, found.recompute) == (20, 19, "full")
    assert run.profile["pointwise_passes"] > 1.0


def test_a_yaml_of_fsdp_1() -> None:
    text = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 16
fsdp_config:
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_activation_checkpointing: true
"""
    run = read(FSDP2, text, 16, model=small(), seq_len=1024, global_batch_size=32)
    found = strategy_of(run, 16)
    assert (found.dp, found.param_shard, found.optim_shard, found.recompute) == (16, 8, 8, "full")
    assert {one.code for one in run.findings} == {"old_version", "assumed"}


MEGATRON = "--micro-batch-size 1"
SIZES = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --vocab-size 512 --seq-length 64"
ACCELERATE = "compute_environment: LOCAL_MACHINE\n"


@pytest.mark.parametrize(
    ("text", "key", "allowed"),
    [
        (f"{MEGATRON} --num-layers 8", "--hidden-size", "--model M"),
        (f"{MEGATRON} --num-layers 8 --hidden-size $H", "hidden_size", "its value"),
        (f"{MEGATRON} {SIZES} --tensor-model-parallel-size 3", "--tensor-model-parallel-size", "8 devices"),
        (f"{MEGATRON} {SIZES} --optimizer lion", "--optimizer", "adam"),
        (f"{MEGATRON} {SIZES} --nnodes 2 --nproc-per-node 8", "--nnodes * --nproc-per-node", "16 devices"),
        (f"{MEGATRON} --multi-latent-attention", "--multi-latent-attention", "--model M"),
        ('{"train_batch_size": 8}', "--model", "--model M"),
        ("hello", None, "Megatron-LM"),
        (f"{ACCELERATE}distributed_type: DEEPSPEED", "distributed_type", "its JSON"),
        (f"{ACCELERATE}distributed_type: FSDP\nnum_processes: 4", "num_processes", "4 devices"),
        ("[training\n[parallelism]", None, None),
    ],
)  # fmt: skip
def test_errors_say_what_to_do(tmp_path: Path, text: str, key: str | None, allowed: str | None) -> None:
    file = tmp_path / "file.txt"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        imported_run(str(file), devices=8, supplied=Supplied())
    error = caught.value
    assert error.key == key and error.file == str(file) and "\n" not in str(error)
    assert allowed is None or allowed in str(error.allowed)


def test_two_values_for_the_same_are_refused() -> None:
    plan = small_plan(MIXTRAL, "ep=4")
    text = EXPORTERS[MEGATRON_LM].files(plan)["megatron-lm.args"]
    with pytest.raises(ConfigError, match="--seq-len"):
        read(MEGATRON_LM, text, 8, seq_len=2048)
    assert read(MEGATRON_LM, text, 8, seq_len=1024).seq_len == 1024


def broken(random: Random, text: str) -> str:
    """The text with a few words deleted, repeated, replaced or cut."""
    mark = random.choice((" ", "\n"))
    parts = text.split(mark)
    for _ in range(random.randint(1, 4)):
        place = random.randrange(len(parts))
        cut = random.randint(0, len(parts[place]))
        parts[place : place + 1] = random.choice(
            ([], [parts[place]] * 2, [random.choice(ODD)], [parts[place][:cut] + random.choice(ODD)])
        )
        parts = parts or [""]
    return mark.join(parts)


ODD = (
    "null", "true", "-1", "[]", "{}", '"x"', "1e9", "99999999999", "[[1]]", "'", "$X", "(((", "t*5", "--",
    "=", "3abc", "auto", ": :", "Et|L",
)  # fmt: skip


def test_broken_files_are_errors_of_users() -> None:
    """Of 1,200 broken files each one is read, or refused with a ConfigError."""
    plan = small_plan(LLAMA, "tp=2,pp=2,zero_stage=1,recompute=full")
    replicas = small_plan(LLAMA, "dp=8,zero_stage=3")
    texts = [
        EXPORTERS[MEGATRON_LM].files(plan)["megatron-lm.args"],
        EXPORTERS[TORCHTITAN].files(small_plan(LLAMA, "pp=2,zero_stage=2"))["torchtitan_0_3.py"],
        EXPORTERS[DEEPSPEED].files(replicas)["deepspeed.json"],
        EXPORTERS[FSDP2].files(replicas)["accelerate.yaml"],
        "[training]\nlocal_batch_size = 8\n[parallelism]\npipeline_parallel_degree = 2\n",
    ]
    random, outcomes = Random(3), Counter[str]()
    for number in range(1200):
        text = broken(random, texts[number % len(texts)])
        for importer in [one for one in IMPORTERS.values() if one.is_own(text)][:1]:
            supplied = Supplied(model=plan.model, seq_len=1024, global_batch_size=32)
            try:
                importer.read(text, devices=8, supplied=supplied)
                outcomes["read"] += 1
            except ConfigError:
                outcomes["refused"] += 1
    assert outcomes["read"] > 200 and outcomes["refused"] > 200
