"""Arguments of the Hugging Face Trainer: alone, with the other file of the run, and planted faults."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from tests.targets.replica_plans import replica_plans
from tests.unit.targets.small_plans import LLAMA, small_plan
from tests.unit.targets.test_imports import broken, differing, strategy_of

from shardwise.errors import ConfigError
from shardwise.model import model_from_config, parameters
from shardwise.strategy import PROFILES
from shardwise.targets import EXPORTERS, ImportedRun, Supplied, imported_run

MODEL = model_from_config(LLAMA, name="small")

FSDP: dict[str, Any] = {
    "output_dir": "out", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "bf16": True,
    "fsdp": True, "fsdp_config": {"version": 2, "activation_checkpointing": True}, "max_length": 1024,
    "packing": True, "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
}  # fmt: skip

ZERO: dict[str, Any] = {
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": "auto"},
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
}  # fmt: skip

WITH_ZERO: dict[str, Any] = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "bf16": True, "max_length": 1024,
    "packing": True, "gradient_checkpointing": True, "deepspeed": ZERO, "optim": "adamw_torch_fused",
}  # fmt: skip


def run_of(tmp_path: Path, values: dict[str, Any], other: str | None = None, **given: Any) -> ImportedRun:
    """The run of the arguments, or of another file with them, on 8 devices."""
    arguments = tmp_path / "trainer_args.json"
    arguments.write_text(json.dumps(values))
    supplied = Supplied(**{"model": MODEL, **given})
    if other is None:
        return imported_run(str(arguments), devices=8, supplied=supplied)
    file = tmp_path / "other"
    file.write_text(other)
    return imported_run(str(file), devices=8, supplied=supplied, trainer=str(arguments))


def found_in(run: ImportedRun) -> set[tuple[str, str]]:
    return {(one.code, one.field) for one in run.findings}


def test_fsdp_of_the_arguments(tmp_path: Path) -> None:
    """2 sequences x 4 micro-batches x 8 ranks are 64 sequences."""
    run = run_of(tmp_path, FSDP)
    found = strategy_of(run, 8)
    assert (run.target, run.global_batch_size, run.seq_len, run.dtype) == ("fsdp2", 64, 1024, "bf16")
    assert (found.dp, found.micro_batch_size, found.param_shard, found.recompute) == (8, 2, 8, "full")
    assert run.findings == ()
    assert run.names["global_batch_size"] == "gradient_accumulation_steps"
    assert run.renamed("micro-batch size in the script") == "per_device_train_batch_size"
    assert run.renamed("fsdp_config.fsdp_reshard_after_forward") == "fsdp_config.reshard_after_forward"


def test_the_same_in_yaml_with_older_names(tmp_path: Path) -> None:
    """A text of `fsdp`, prefixed keys, and the size of tensor parallelism: 4 replicas of 2 x 3 sequences."""
    file = tmp_path / "args.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "optim": "sgd",
                "fsdp": "shard_grad_op auto_wrap", "fsdp_config": {"fsdp_use_orig_params": True},
                "parallelism_config": {"tp_size": 2, "dp_shard_size": 4}, "torch_compile": True,
            }
        )
    )  # fmt: skip
    run = imported_run(str(file), devices=8, supplied=Supplied(model=MODEL, seq_len=512))
    found = strategy_of(run, 8)
    assert (found.tp, found.dp, found.param_shard, found.grad_shard) == (2, 4, 1, 4)
    assert (run.global_batch_size, run.dtype, run.optimizer) == (24, "fp32", "sgd")
    assert run.profile["eager_modules"] is False
    assert run.profile["pointwise_passes"] == PROFILES["torchtitan-0.3"].pointwise_passes < 2.0
    assert found_in(run) == {
        ("ignored_key", "fsdp_config.use_orig_params"), ("assumed", "parallelism_config"),
        ("approximated", "torch_compile"), ("whole_gradients", "gradient_accumulation_steps"),
    }  # fmt: skip


def test_deepspeed_of_the_arguments(tmp_path: Path) -> None:
    """`auto` values are those of the arguments; the configuration may be a file of its own."""
    (tmp_path / "ds.json").write_text(json.dumps(ZERO))
    for config in (ZERO, "ds.json"):
        run = run_of(tmp_path, {**WITH_ZERO, "deepspeed": config})
        found = strategy_of(run, 8)
        assert (run.target, run.global_batch_size, run.dtype) == ("deepspeed-0.19", 64, "bf16")
        assert (found.micro_batch_size, found.recompute, found.offload) == (2, "full", "optimizer")
        assert (found.param_shard, found.grad_shard, run.seq_len) == (1, 8, 1024)
        assert run.findings == ()
        assert run.names["optim_shard"] == "deepspeed.zero_optimization.stage"
    with pytest.raises(ConfigError, match="missing"):
        run_of(tmp_path, {**WITH_ZERO, "deepspeed": "missing.json"})


def test_what_export_writes_for_transformers_reads_back(tmp_path: Path) -> None:
    """With the DistributedConfig nothing has to be supplied but what neither file has: `etp`."""
    for plan in replica_plans("transformers-5", 20, seed=11):
        names = ("distributed_config.py", "trainer_args.json")
        for name in names:
            (tmp_path / name).write_text(EXPORTERS["transformers-5"].files(plan)[name])
        config, arguments = (str(tmp_path / name) for name in names)
        supplied = Supplied(fields={"etp": plan.best.strategy.etp})
        devices = plan.cluster.devices
        run = imported_run(config, devices=devices, supplied=supplied, trainer=arguments)
        assert differing(strategy_of(run, devices), plan) == {} and run.findings == ()
        assert run.global_batch_size == plan.job.global_batch_size
        assert (run.dtype, run.optimizer) == (plan.job.dtype, plan.job.optimizer)


def test_an_accelerate_yaml_with_the_arguments(tmp_path: Path) -> None:
    """The file of FSDP2 has what shards the run, the arguments all else: no field is supplied."""
    plan = small_plan(LLAMA, "dp=8,zero_stage=3,micro_batch_size=2,recompute=full")
    text = EXPORTERS["fsdp2"].files(plan)["accelerate.yaml"]
    own = {name: value for name, value in FSDP.items() if not name.startswith("fsdp")}
    run = run_of(tmp_path, {**own, "gradient_accumulation_steps": 2}, text)
    assert differing(strategy_of(run, 8), plan) == {} and run.global_batch_size == 32
    assert run.findings == () and run.names["recompute"] == "fsdp_config.fsdp_activation_checkpointing"
    assert run.renamed("fsdp_config.fsdp_version") == "fsdp_config.fsdp_version"
    nested = "distributed_type: DEEPSPEED\ncompute_environment: X\ndeepspeed_config: {zero_stage: 3}\n"
    run = run_of(tmp_path, own, nested)
    found = strategy_of(run, 8)
    assert (run.target, run.global_batch_size) == ("deepspeed-0.19", 64)
    assert (found.micro_batch_size, found.param_shard) == (2, 8)


def test_a_deepspeed_json_with_the_arguments(tmp_path: Path) -> None:
    own = {name: value for name, value in WITH_ZERO.items() if name != "deepspeed"}
    run = run_of(tmp_path, own, json.dumps(ZERO))
    assert strategy_of(run, 8) == strategy_of(run_of(tmp_path, WITH_ZERO), 8) and run.findings == ()
    with pytest.raises(ConfigError, match="fsdp: shards the run too"):
        run_of(tmp_path, {**own, "fsdp": True}, json.dumps(ZERO))


PLANTED: dict[str, tuple[dict[str, Any], dict[str, Any], str, str, str]] = {
    # what: clean arguments, what is planted, code, argument, a part of the text
    "fsdp off": (FSDP, {"fsdp": None}, "ignored_key", "fsdp_config", "fsdp is off"),
    "unknown key": (
        FSDP, {"fsdp_config": {"sharding_strategy": "FULL_SHARD"}}, "ignored_key",
        "fsdp_config.sharding_strategy", "does not read",
    ),
    "key of version 1": (
        FSDP, {"fsdp_config": {"forward_prefetch": True}}, "ignored_key", "fsdp_config.forward_prefetch",
        "for FSDP 2",
    ),
    "hybrid": (FSDP, {"fsdp": "hybrid_shard"}, "refused", "fsdp", "FSDP 1 alone"),
    "word": (FSDP, {"fsdp": "full_shards"}, "refused", "fsdp", "full_shards"),
    "twice": (
        FSDP, {"activation_checkpointing": True}, "refused", "activation_checkpointing", "that of fsdp_config"
    ),
    "repeated gather": (
        FSDP, {"activation_checkpointing": True, "fsdp_config": {}}, "repeated_gather",
        "activation_checkpointing", "gathers weights once more",
    ),
    "accumulation": (
        FSDP, {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}}, "refused",
        "accelerator_config.gradient_accumulation_kwargs.num_steps", "gradient_accumulation_steps",
    ),
    "both dtypes": (FSDP, {"fp16": True}, "refused", "bf16", "with fp16"),
    "names": (
        WITH_ZERO, {"activation_checkpointing": False}, "ignored_key", "gradient_checkpointing", "counts"
    ),
    "kwargs": (
        FSDP, {"gradient_checkpointing_kwargs": {"use_reentrant": False}}, "ignored_key",
        "gradient_checkpointing_kwargs", "is off",
    ),
    "every second layer": (
        WITH_ZERO, {"gradient_checkpointing_kwargs": {"every_n_layers": 2}}, "approximated",
        "gradient_checkpointing_kwargs.every_n_layers", "every layer",
    ),
    "optimizer": (FSDP, {"optim": "adamw_8bit"}, "approximated", "optim", "moments in fp32"),
    "smaller batch": (
        FSDP, {"auto_find_batch_size": True}, "approximated", "auto_find_batch_size", "smaller",
    ),
    "padding": (FSDP, {"packing": False}, "assumed", "packing", "largest length"),
    "removed": (FSDP, {"sharded_ddp": "simple"}, "removed_key", "sharded_ddp", "refuses"),
    "zero batch": (
        WITH_ZERO, {"deepspeed": {**ZERO, "train_micro_batch_size_per_gpu": 4}}, "refused",
        "deepspeed.train_micro_batch_size_per_gpu", "4 is not per_device_train_batch_size = 2",
    ),
    # 8 devices x 2 sequences x 4 micro-batches
    "zero whole batch": (
        WITH_ZERO, {"deepspeed": {**ZERO, "train_batch_size": 32}}, "refused", "deepspeed.train_batch_size",
        "= 64",
    ),
    "zero dtype": (
        WITH_ZERO, {"deepspeed": {**ZERO, "bf16": {"enabled": False}}}, "refused", "deepspeed.bf16.enabled",
        "bf16 of the Trainer",
    ),
    "zero key": (
        WITH_ZERO, {"deepspeed": {**ZERO, "zero_optimisation": {}}}, "ignored_key",
        "deepspeed.zero_optimisation", "does not look",
    ),
    "both": (WITH_ZERO, {"fsdp": True}, "ignored_key", "fsdp", "starts DeepSpeed"),
}  # fmt: skip


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_fault_is_found(tmp_path: Path, what: str) -> None:
    clean, planted, code, field, text = PLANTED[what]
    assert found_in(run_of(tmp_path, clean)) == set()
    run = run_of(tmp_path, {**clean, **planted})
    (found,) = [one for one in run.findings if (one.code, one.field) == (code, field)]
    assert text in found.text


def test_gradients_that_stay_whole(tmp_path: Path) -> None:
    """2 bytes a parameter with Accelerate's policy of bf16, 4 in fp32: 64.2 and 128.5 MiB. With one
    micro-batch nothing stays."""
    (found,) = run_of(tmp_path, {**FSDP, "accelerator_config": {}}).findings
    count = parameters(MODEL)
    assert (found.code, found.field) == ("whole_gradients", "gradient_accumulation_steps")
    assert f"{2 * count / 2**20:.1f} MiB on each rank" in found.text
    (found,) = run_of(tmp_path, {**FSDP, "accelerator_config": {}, "bf16": False}).findings
    assert f"{4 * count / 2**20:.0f} MiB on each rank" in found.text
    one = {**FSDP, "accelerator_config": {}, "gradient_accumulation_steps": 1}
    assert found_in(run_of(tmp_path, one)) == set()


def test_replicas_of_a_distributed_config_shard_gradients(tmp_path: Path) -> None:
    """Only the all-reduce between replicas waits for the last micro-batch (trainer.py:
    _defer_fsdp_gradient_reduction)."""
    arguments = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "bf16": True}
    for sizes, expected in (
        ("fsdp_size=8", {"whole_gradients"}),
        ("fsdp_size=4, dp_replicate_size=2", set()),
    ):
        text = f"config = DistributedConfig({sizes}, fsdp_mixed_precision=True)"
        run = run_of(tmp_path, arguments, text, seq_len=512)
        assert {one.code for one in run.findings} == expected and run.global_batch_size == 16


def test_arguments_alone_have_whole_states(tmp_path: Path) -> None:
    run = run_of(tmp_path, {"gradient_checkpointing": True}, seq_len=512)
    assert strategy_of(run, 8).optim_shard == 1 and run.global_batch_size == 64
    assert found_in(run) == {("assumed", "per_device_train_batch_size"), ("assumed", "fsdp")}


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config.split_batches"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size"),
        ({"parallelism_config": {"tp_size": 3}}, "parallelism_config.tp_size"),
        ({"fsdp_config": 3}, "fsdp_config"),
        ({"max_length": None}, "--seq-len"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(tmp_path: Path, values: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_of(tmp_path, {**FSDP, **values})
    assert key in (caught.value.key, caught.value.allowed) or key in str(caught.value)
    assert caught.value.file == str(tmp_path / "trainer_args.json")


def test_broken_arguments_are_errors_of_users(tmp_path: Path) -> None:
    random, outcomes = Random(5), Counter[str]()
    texts = [json.dumps(FSDP), yaml.safe_dump(WITH_ZERO)]
    for number in range(400):
        file = tmp_path / "args.json"
        file.write_text(broken(random, texts[number % 2]))
        try:
            imported_run(str(file), devices=8, supplied=Supplied(model=MODEL, seq_len=1024))
            outcomes["read"] += 1
        except ConfigError:
            outcomes["refused"] += 1
    assert outcomes["read"] > 10 and outcomes["refused"] > 20
