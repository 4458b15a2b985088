"""Export of a uniform plan to DeepSpeed 0.19: `deepspeed.json`, and its comparison with what DeepSpeed reads
in it (`deepspeed_reader`).

JSON has no comments: the head of the file, and the values that the training script sets, are the texts of the
key `shardwise`, which DeepSpeed ignores.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from shardwise.launch import Program, start_lines
from shardwise.plans import Plan
from shardwise.strategy import Strategy
from shardwise.targets.child_process import Reader
from shardwise.targets.hugging_face import (
    NOTES,
    TRAINING,
    adapter_files,
    check_replicas,
    micro_batches,
    model_lines,
    processes_per_node,
)
from shardwise.targets.read_back import ReadBack, compared, rejected
from shardwise.targets.writing import head_lines, path_in

TARGET = "deepspeed-0.19"

FILE = "deepspeed.json"

OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD"}
"""Our optimizers and DeepSpeed's types."""

READER = Reader(
    module="shardwise.targets.deepspeed_reader",
    software="DeepSpeed",
    install="pip install deepspeed==0.19.*, with PyTorch",
)


def deepspeed_files(plan: Plan) -> dict[str, str]:
    """The text of `deepspeed.json`, by its name. Raises ConfigError, with the key of the plan file, for a
    value that cannot be exported."""
    target = check_replicas(plan, TARGET)
    processes_per_node(plan, target)
    notes = [*head_lines(plan, target), *_notes(plan)]
    own = json.dumps({NOTES: notes, **_settings(plan)}, indent=2) + "\n"
    return {FILE: own, **adapter_files(plan, target)}


def zero_stage(strategy: Strategy) -> int:
    """The ZeRO stage of a plan whose states are sharded over all data-parallel ranks; stage 1 of one rank."""
    return 1 + (strategy.grad_shard > 1) + (strategy.param_shard > 1)


def gradient_dtype(plan: Plan) -> str:
    """The dtype in which gradients are accumulated and reduced."""
    return "fp32" if plan.job.profile.reduce_in_fp32 else plan.job.dtype


def overlaps(plan: Plan) -> bool:
    """Whether the predicted step time assumes that states are communicated during computation."""
    profile = plan.job.profile
    return (profile.shard_overlap if zero_stage(plan.best.strategy) == 3 else profile.state_overlap) > 0


def bucket_sizes(plan: Plan) -> dict[str, int]:
    """The sizes in elements that the predicted memory assumes, by their keys; 0 where it assumes none."""
    profile = plan.job.profile
    return {
        "reduce_bucket_size": int(profile.bucket_elements),
        "stage3_max_live_parameters": int(profile.gathered_elements),
        "sub_group_size": int(profile.update_elements),
    }


def _settings(plan: Plan) -> dict[str, Any]:
    """The values that DeepSpeed reads, by their keys."""
    job, strategy = plan.job, plan.best.strategy
    zero: dict[str, Any] = {"stage": zero_stage(strategy), "overlap_comm": overlaps(plan)}
    zero |= {name: size for name, size in bucket_sizes(plan).items() if size}
    if strategy.offload == "optimizer":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_batch_size": job.global_batch_size,
        "train_micro_batch_size_per_gpu": strategy.micro_batch_size,
        "gradient_accumulation_steps": micro_batches(plan),
        "bf16": {"enabled": job.dtype == "bf16"},
        "fp16": {"enabled": job.dtype == "fp16"},
        "data_types": {"grad_accum_dtype": gradient_dtype(plan)},
        "communication_data_type": gradient_dtype(plan),
        "zero_optimization": zero,
        "optimizer": {"type": OPTIMIZERS[job.optimizer]},
        # SGD is not among the optimizers that DeepSpeed tests with ZeRO.
        "zero_allow_untested_optimizer": job.optimizer == "sgd",
    }


def zero_settings(plan: Plan) -> dict[str, str]:
    """The keys of the plan's strategy with their values, also where it cannot be exported."""
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    own = _settings(plan)
    zero = {f"zero_optimization.{name}": value for name, value in own["zero_optimization"].items()}
    zero["zero_optimization.stage"] = zero_stage(plan.best.strategy) - (plan.best.strategy.optim_shard == 1)
    script = {"gradient checkpointing in the script": plan.best.strategy.recompute}
    values = {**{name: own[name] for name in names}, **zero, **script}
    return {name: f"= {json.dumps(value)}" for name, value in values.items()}


def _notes(plan: Plan) -> Iterator[str]:
    """The values that the script sets, and how the run is started."""
    yield "DeepSpeed ignores this key. It does not read these values: set them in the training script."
    yield from model_lines(plan)
    if plan.best.strategy.recompute == "full":
        yield "- model.gradient_checkpointing_enable(): every layer is recomputed"
    yield "Data, optimizer.params (learning rate) and number of steps are not part of a plan."
    yield from start_lines(plan, _program(TRAINING, path_in(".", FILE)))


def program(plan: Plan, folder: str, script: str) -> Program:
    """How a training script starts with the file in `folder`."""
    return _program(script, path_in(folder, FILE))


def _program(script: str, path: str) -> Program:
    """With the arguments of `deepspeed.add_config_arguments`."""
    return Program(words=("--", script, "--deepspeed", "--deepspeed_config", path))


def read_files_back(
    plan: Plan, files: Mapping[str, str], *, environment: Mapping[str, str] | None = None
) -> ReadBack:
    """Compare `plan` with what DeepSpeed reads in its file. Raises as `Reader.answers`."""
    (answer,) = READER.answers([reader_request(plan, files)], environment=environment)
    return read_back(plan, answer)


def reader_request(plan: Plan, files: Mapping[str, str]) -> dict[str, Any]:
    """The request for DeepSpeed to read the file of `plan`."""
    return {"file": files[FILE], "world_size": plan.cluster.devices}


def read_back(plan: Plan, answer: Mapping[str, Any]) -> ReadBack:
    """Compare the values of `plan` in the file with an answer of the reader."""
    if "error" in answer:
        return rejected(answer["error"])
    assumed = {name for name, size in bucket_sizes(plan).items() if size}
    return compared(_of_plan(plan), _of_answer(answer, assumed))


def _of_plan(plan: Plan) -> dict[str, object]:
    job, strategy = plan.job, plan.best.strategy
    fields = ("tp", "pp", "dp", "param_shard", "grad_shard", "optim_shard", "micro_batch_size", "offload")
    return {
        "job.dtype": job.dtype,
        "job.optimizer": job.optimizer,
        "job.global_batch_size": job.global_batch_size,
        "micro-batches": micro_batches(plan),
        **{f"strategy.{name}": getattr(strategy, name) for name in fields},
        "dtype of accumulated gradients": gradient_dtype(plan),
        "dtype of reduced gradients": gradient_dtype(plan),
        "communication during computation": overlaps(plan),
        "untested optimizers": job.optimizer == "sgd",
        **{name: size for name, size in bucket_sizes(plan).items() if size},
        "keys that DeepSpeed ignores": [NOTES],
    }


_DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}


def _of_answer(answer: Mapping[str, Any], sizes: Collection[str]) -> dict[str, object]:
    """The same values in an answer of the reader, with these `sizes`."""
    read, zero = answer["config"], answer["zero"]
    stage, world = zero["stage"], read["world_size"]
    names = {value.lower(): name for name, value in OPTIMIZERS.items()}
    dtypes = {(True, False): "bf16", (False, True): "fp16", (False, False): "fp32"}
    offloads = {(None, None): "none", ("cpu", None): "optimizer"}
    parameters, states = zero["offload_param"] or {}, zero["offload_optimizer"] or {}
    offloaded = (states.get("device"), parameters.get("device"))
    # Partitions of ZeRO++ leave other sharding degrees than the stage says.
    is_plain = zero["zero_hpz_partition_size"] == 1
    optimizer = str(read["optimizer_name"])
    return {
        "job.dtype": dtypes[answer["bf16"], answer["fp16"]],
        "job.optimizer": names.get(optimizer.lower(), optimizer),
        "job.global_batch_size": read["train_batch_size"],
        "micro-batches": read["gradient_accumulation_steps"],
        "strategy.tp": max(answer["tensor_parallel"], 1),
        # DeepSpeed ignores a number of stages: only a PipelineModule of the script has stages.
        "strategy.pp": 1,
        "strategy.dp": world,
        "strategy.param_shard": world if stage == 3 and is_plain else 1,
        "strategy.grad_shard": world if stage >= 2 else 1,
        "strategy.optim_shard": world if stage >= 1 else 1,
        "strategy.micro_batch_size": read["train_micro_batch_size_per_gpu"],
        "strategy.offload": offloads.get(offloaded, f"{offloaded}"),
        "dtype of accumulated gradients": read["grad_accum_dtype"],
        "dtype of reduced gradients": _DTYPES.get(str(read["communication_data_type"])),
        "communication during computation": zero["overlap_comm"],
        "untested optimizers": read["zero_allow_untested_optimizer"],
        **{name: zero[name.removeprefix("stage3_")] for name in sizes},
        "keys that DeepSpeed ignores": answer["ignored"],
    }
