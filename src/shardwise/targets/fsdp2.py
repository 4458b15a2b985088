"""Export of a uniform plan to FSDP2 by Accelerate 1.15: `accelerate.yaml`, and its comparison with what
Accelerate's launcher reads in it (`fsdp2_reader`).

The file has what Accelerate reads from files: processes, precision, sharding, recomputation. The rest of the
plan is a commented block, because the training script sets it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from shardwise.launch import Program, start_lines
from shardwise.plans import Plan
from shardwise.targets.child_process import Reader
from shardwise.targets.hugging_face import (
    TRAINING,
    adapter_files,
    batch_lines,
    check_replicas,
    layer_classes,
    micro_batches,
    model_lines,
    processes_per_node,
)
from shardwise.targets.read_back import ReadBack, compared, rejected
from shardwise.targets.writing import head_lines, path_in

TARGET = "fsdp2"

FILE = "accelerate.yaml"

PRECISIONS = {"bf16": "bf16", "fp32": "no"}
"""Our dtypes and the values of `mixed_precision`."""

RING = "alltoall"
"""PyTorch's name of a ring: each rank sends its keys and values to the next."""

READER = Reader(
    module="shardwise.targets.fsdp2_reader",
    software="Accelerate",
    install="pip install accelerate==1.15.*, with PyTorch",
)


def fsdp2_files(plan: Plan) -> dict[str, str]:
    """The text of `accelerate.yaml`, by its name. Raises ConfigError, with the key of the plan file, for a
    value that cannot be exported."""
    target = check_replicas(plan, TARGET)
    own = yaml.safe_dump(_settings(plan, processes_per_node(plan, target)), sort_keys=False)
    lines = [*(f"# {line}".rstrip() for line in (*head_lines(plan, target), "", *_notes(plan))), "", own]
    return {FILE: "\n".join(lines), **adapter_files(plan, target)}


def _settings(plan: Plan, per_node: int) -> dict[str, Any]:
    """The values that Accelerate reads, by their keys."""
    strategy = plan.best.strategy
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": PRECISIONS[plan.job.dtype],
        "num_machines": plan.cluster.devices // per_node,
        "num_processes": plan.cluster.devices,
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": True,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": ",".join(layer_classes(plan.model)),
            "fsdp_activation_checkpointing": strategy.recompute == "full",
            "fsdp_offload_params": False,
        },
        "parallelism_config": {
            "parallelism_config_dp_replicate_size": strategy.dp * strategy.cp // strategy.optim_shard,
            "parallelism_config_dp_shard_size": max(strategy.optim_shard // strategy.cp, 1),
            "parallelism_config_tp_size": strategy.tp,
            "parallelism_config_cp_size": strategy.cp,
            **({"parallelism_config_cp_comm_strategy": RING} if strategy.cp > 1 else {}),
        },
    }


def accelerate_settings(plan: Plan) -> dict[str, str]:
    """The keys of the plan's strategy with their values, also where it cannot be exported."""
    own = _settings(plan, plan.cluster.nodes[0].devices)
    fsdp = ("fsdp_reshard_after_forward", "fsdp_activation_checkpointing", "fsdp_offload_params")
    values: dict[str, object] = {f"fsdp_config.{name}": own["fsdp_config"][name] for name in fsdp}
    values["fsdp_config.fsdp_reshard_after_forward"] = plan.best.strategy.param_shard > 1
    values |= {f"parallelism_config.{name}": value for name, value in own["parallelism_config"].items()}
    values["micro-batch size in the script"] = plan.best.strategy.micro_batch_size
    values["gradient accumulation in the script"] = micro_batches(plan)
    return {name: f": {str(value).lower()}" for name, value in values.items()}


def _notes(plan: Plan) -> Iterator[str]:
    """The values that the script sets, and how the run is started."""
    yield "Accelerate does not read these values of the plan: set them in the training script."
    yield from model_lines(plan)
    yield from batch_lines(plan)
    if micro_batches(plan) > 1:
        yield "- gradients stay sharded between micro-batches: Accelerator(gradient_accumulation_plugin="
        yield f"    GradientAccumulationPlugin(num_steps={micro_batches(plan)}, sync_each_batch=True))"
    if plan.job.dtype != "fp32" and plan.job.profile.reduce_in_fp32:
        yield "- gradients are reduced in fp32: Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin("
        yield "    mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16,"
        yield "    reduce_dtype=torch.float32)))"
    elif plan.job.dtype != "fp32":
        yield f"- gradients are reduced in {plan.job.dtype}, Accelerate's default: the script sets no policy"
    if plan.best.strategy.cp > 1:
        yield "- each step divides the sequence: with accelerator.maybe_context_parallel(buffers=[input_ids,"
        yield "    shift_labels, position_ids], buffer_seq_dims=[1, 1, 1]): ..., with no attention mask,"
        yield "    because the ring is causal over the whole sequence"
    if plan.best.strategy.tp > 1:
        yield '- from_pretrained(..., tp_plan="auto", device_mesh=accelerator.torch_device_mesh)'
    yield "Data, learning rate and number of steps are not part of a plan."
    yield ""
    yield from start_lines(plan, Program(words=(TRAINING,), accelerate=FILE))


def program(plan: Plan, folder: str, script: str) -> Program:
    """How Accelerate starts a training script with the file in `folder`."""
    return Program(words=(script,), accelerate=path_in(folder, FILE))


def read_files_back(
    plan: Plan, files: Mapping[str, str], *, environment: Mapping[str, str] | None = None
) -> ReadBack:
    """Compare `plan` with what Accelerate's launcher reads in its file. Raises as `Reader.answers`."""
    (answer,) = READER.answers([{"file": files[FILE]}], environment=environment)
    return read_back(plan, answer)


def read_back(plan: Plan, answer: Mapping[str, Any]) -> ReadBack:
    """Compare the values of `plan` in the file with an answer of the reader."""
    if "error" in answer:
        return rejected(answer["error"])
    return compared(_of_plan(plan), _of_answer(plan, answer))


def _of_plan(plan: Plan) -> dict[str, object]:
    strategy = plan.best.strategy
    fields = (
        "tp", "cp", "pp", "dp", "param_shard", "grad_shard", "optim_shard", "recompute", "recompute_layers",
        "offload",
    )  # fmt: skip
    return {
        "job.dtype": plan.job.dtype,
        "devices": plan.cluster.devices,
        "nodes": len(plan.cluster.nodes),
        **{f"strategy.{name}": getattr(strategy, name) for name in fields},
        "layer class": layer_classes(plan.model),
        "context parallelism": RING if strategy.cp > 1 else None,
        "keys that Accelerate ignores": [],
        "FSDP version": 2,
        "Ulysses ranks": 1,
        **({} if _has_policy(plan) else {"dtype of reduced gradients": "torch.bfloat16"}),
    }


def _has_policy(plan: Plan) -> bool:
    """Whether the script passes a policy of mixed precision, or needs none."""
    return plan.job.dtype == "fp32" or plan.job.profile.reduce_in_fp32


def _of_answer(plan: Plan, answer: Mapping[str, Any]) -> dict[str, object]:
    read, fsdp, sizes = answer["arguments"], answer["fsdp"], answer["sizes"]
    dtypes = {value: name for name, value in PRECISIONS.items()}
    states = sizes["dp_shard_size"] * sizes["cp_size"]
    shards = states if fsdp["reshard_after_forward"] is True else 1
    is_full = fsdp["activation_checkpointing"]
    offloads = {(False, False): "none", (False, True): "activations", (True, False): "parameters"}
    offload = offloads.get((answer["offloads"], fsdp["activation_checkpointing_offload"]), "both")
    devices = read["num_processes"]
    return {
        "job.dtype": dtypes.get(read["mixed_precision"], read["mixed_precision"]),
        "devices": devices,
        "nodes": read["num_machines"],
        "strategy.tp": sizes["tp_size"],
        "strategy.cp": sizes["cp_size"],
        # Ranks that no axis has: Accelerate ignores a size of pipeline parallelism.
        "strategy.pp": devices / sizes["total_size"],
        "strategy.dp": sizes["dp_replicate_size"] * sizes["dp_shard_size"],
        "strategy.param_shard": shards,
        "strategy.grad_shard": states,
        "strategy.optim_shard": states,
        "strategy.recompute": "full" if is_full else "none",
        "strategy.recompute_layers": plan.model.layers if is_full else 0,
        "strategy.offload": offload,
        "layer class": fsdp["transformer_cls_names_to_wrap"],
        "context parallelism": answer["ring"],
        "keys that Accelerate ignores": answer["ignored"],
        "FSDP version": fsdp["fsdp_version"] if read["use_fsdp"] else 0,
        "Ulysses ranks": sizes["sp_size"],
        **({} if _has_policy(plan) else {"dtype of reduced gradients": answer["reduces"]}),
    }
