"""Export of a uniform plan to Transformers 5: `distributed_config.py` with a `DistributedConfig` and the
model, `trainer_args.json` for its Trainer, and their comparison with what Transformers reads in them
(`transformers_reader`).

JSON has no comments: the name of the run in `trainer_args.json` says which plan the file belongs to.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pprint import pformat
from typing import Any

from shardwise.launch import Program, start_lines
from shardwise.model import parameters
from shardwise.plans import Plan, plan_hash
from shardwise.targets.child_process import Reader
from shardwise.targets.hugging_face import (
    TRAINING,
    attention,
    check_replicas,
    micro_batches,
    processes_per_node,
)
from shardwise.targets.read_back import ReadBack, compared, rejected
from shardwise.targets.writing import WRITTEN_BY, head_lines, on_python_path, path_in, refusal
from shardwise.units import format_seconds

TARGET = "transformers-5"

CONFIG, ARGUMENTS = "distributed_config.py", "trainer_args.json"
"""The files: sizes of axes and the model; arguments of the Trainer."""

OPTIMIZERS = {"adamw": "adamw_torch", "sgd": "sgd"}
"""Our optimizers and the names of the Trainer."""

READER = Reader(
    module="shardwise.targets.transformers_reader",
    software="Transformers",
    install="pip install transformers==5.* accelerate==1.15.*, with PyTorch",
)


def transformers_files(plan: Plan) -> dict[str, str]:
    """The texts of the files, by name. Raises ConfigError, with the key of the plan file, for a value that
    cannot be exported."""
    target = check_replicas(plan, TARGET)
    if plan.job.dtype != "fp32" and not plan.job.profile.reduce_in_fp32:
        raise refusal(target, "job.profile.reduce_in_fp32", False, "true: gradients are reduced in fp32")
    processes_per_node(plan, target)
    head = [f"# {line}".rstrip() for line in (*head_lines(plan, target), "", *_start(plan))]
    sizes = "".join(f"    {name}={value!r},\n" for name, value in _sizes(plan).items())
    config = (
        f"from transformers import DistributedConfig\n\ndistributed_config = DistributedConfig(\n{sizes})\n\n"
        "# AutoConfig.for_model(**model_config)\n"
        f"model_config = {pformat(dict(plan.model.config), width=100, sort_dicts=False)}\n\n"
        f'attn_implementation = "{attention(plan)}"\n\n'
        f"sequence_length = {plan.job.seq_len}\n"
    )
    settings = json.dumps({"run_name": _run_name(plan), **_arguments(plan)}, indent=2)
    return {CONFIG: "\n".join([*head, "", config]), ARGUMENTS: settings + "\n"}


def transformers_settings(plan: Plan) -> dict[str, str]:
    """The arguments of the plan's strategy with their values, also where it cannot be exported."""
    return {name: f"= {value}" for name, value in {**_sizes(plan), **_arguments(plan)}.items()
            if not isinstance(value, dict)}  # fmt: skip


def _start(plan: Plan) -> Iterator[str]:
    """How a script uses the files, and how the run is started."""
    yield "In the training script:"
    yield "    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32,"
    yield "        attn_implementation=attn_implementation, distributed_config=distributed_config)"
    yield "    (arguments,) = HfArgumentParser(TrainingArguments).parse_json_file(sys.argv[1])"
    yield "Data, learning rate and number of steps are not part of a plan."
    yield "With this file's folder on PYTHONPATH:"
    yield from start_lines(plan, _program(TRAINING, path_in(".", ARGUMENTS)))


def program(plan: Plan, folder: str, script: str) -> Program:
    """How a training script starts with the files in `folder`. ConfigError where Python cannot search it."""
    started = _program(script, path_in(folder, ARGUMENTS))
    return replace(started, setup=(on_python_path(folder),))


def _program(script: str, path: str) -> Program:
    return Program(words=("--", script, path))


def _run_name(plan: Plan) -> str:
    best = plan.best
    return (
        f"{WRITTEN_BY}, plan {plan_hash(plan)}; predicted step time {format_seconds(best.step_time_s)}"
        f" (profile {plan.job.profile.name})"
    )


def _sizes(plan: Plan) -> dict[str, object]:
    """The arguments of `DistributedConfig`."""
    strategy = plan.best.strategy
    experts = {"ep_size": strategy.ep, "ep_implementation": "all_to_all"} if strategy.ep > 1 else {}
    return {
        "tp_size": strategy.tp,
        "fsdp_size": strategy.param_shard,
        "dp_replicate_size": strategy.dp // strategy.param_shard,
        **experts,
        "fsdp_mixed_precision": plan.job.dtype == "bf16",
    }


def _arguments(plan: Plan) -> dict[str, Any]:
    """The arguments of the Trainer."""
    strategy = plan.best.strategy
    steps = micro_batches(plan)
    # Else gradients stay whole between micro-batches.
    sharded = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
    return {
        "per_device_train_batch_size": strategy.micro_batch_size,
        "gradient_accumulation_steps": steps,
        **(sharded if steps > 1 else {}),
        "bf16": plan.job.dtype == "bf16",
        "optim": OPTIMIZERS[plan.job.optimizer],
        "activation_checkpointing": strategy.recompute == "full",
    }


def read_files_back(
    plan: Plan, files: Mapping[str, str], *, environment: Mapping[str, str] | None = None
) -> ReadBack:
    """Compare `plan` with what Transformers reads in its files. Raises as `Reader.answers`."""
    (answer,) = READER.answers([reader_request(files)], environment=environment)
    return read_back(plan, answer)


def reader_request(files: Mapping[str, str]) -> dict[str, str]:
    """The request for Transformers to read the files."""
    return {"config": files[CONFIG], "arguments": files[ARGUMENTS]}


def read_back(plan: Plan, answer: Mapping[str, Any]) -> ReadBack:
    """Compare the values of `plan` in the files with an answer of the reader."""
    if "error" in answer:
        return rejected(answer["error"])
    return compared(_of_plan(plan), _of_answer(plan, answer))


def _of_plan(plan: Plan) -> dict[str, object]:
    job, strategy = plan.job, plan.best.strategy
    fields = (
        "tp", "pp", "ep", "dp", "param_shard", "micro_batch_size", "recompute", "recompute_layers", "offload",
    )  # fmt: skip
    return {
        "job.seq_len": job.seq_len,
        "job.global_batch_size": job.global_batch_size,
        "job.dtype": job.dtype,
        "job.optimizer": job.optimizer,
        "devices": plan.cluster.devices,
        **{f"strategy.{name}": getattr(strategy, name) for name in fields},
        "parameters": parameters(plan.model),
        "dtype of gathered parameters": job.dtype,
        "sharded layers": plan.model.layers,
        "tensor-parallel layers": plan.model.layers if strategy.tp > 1 else 0,
        "expert-parallel layers": sum(
            plan.model.kinds[kind].experts is not None for kind in plan.model.pattern
        )
        if strategy.ep > 1
        else 0,
        "exchange of tokens": "all_to_all" if strategy.ep > 1 else None,
        "gradients stay sharded": True,
        "attention": attention(plan),
        "the model has this attention": True,
    }


def _of_answer(plan: Plan, answer: Mapping[str, Any]) -> dict[str, object]:
    sizes, read = answer["sizes"], answer["arguments"]
    dp = sizes["fsdp_size"] * sizes["dp_replicate_size"]
    steps = read["gradient_accumulation_steps"]
    names = {value: name for name, value in OPTIMIZERS.items()}
    optimizer = str(read["optim"]).lower()
    is_full = read["activation_checkpointing"]
    return {
        "job.seq_len": answer["sequence_length"],
        "job.global_batch_size": read["per_device_train_batch_size"] * steps * dp,
        "job.dtype": "bf16" if read["bf16"] else "fp16" if read["fp16"] else "fp32",
        "job.optimizer": names.get(optimizer, optimizer),
        "devices": dp * sizes["tp_size"] * sizes["pp_size"],
        "strategy.tp": sizes["tp_size"],
        "strategy.pp": sizes["pp_size"],
        "strategy.ep": sizes["ep_size"],
        "strategy.dp": dp,
        "strategy.param_shard": sizes["fsdp_size"],
        "strategy.micro_batch_size": read["per_device_train_batch_size"],
        "strategy.recompute": "full" if is_full else "none",
        "strategy.recompute_layers": plan.model.layers if is_full else 0,
        "strategy.offload": "parameters" if sizes["fsdp_cpu_offload"] else "none",
        "parameters": answer["parameters"],
        "dtype of gathered parameters": "bf16" if sizes["fsdp_mixed_precision"] else "fp32",
        "sharded layers": answer["sharded_layers"],
        "tensor-parallel layers": answer["tensor_parallel_layers"],
        "expert-parallel layers": answer["expert_parallel_layers"],
        "exchange of tokens": sizes["ep_implementation"] if sizes["ep_size"] > 1 else None,
        "attention": answer["attention"],
        "the model has this attention": answer["supports_attention"],
        "gradients stay sharded": steps == 1 or answer["synchronizes_each_micro_batch"],
    }
