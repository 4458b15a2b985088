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
from shardwise.model import Model, load_model, model_from_config, parameters
from shardwise.plans import Plan
from shardwise.strategy import Strategy, complete, target_of
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
    [
        (target, name)
        for target in (MEGATRON_LM, MEGATRON_FSDP)
        for name in ("megatron-lm.args", "megatron-lm.sh", "megatron-lm.yaml", "megatron-bridge.txt")
    ],
)
def test_flags_of_an_export_read_back(target: str, name: str) -> None:
    for plan in random_plans(40, seed=7, target=target):
        text = EXPORTERS[target].files(plan)[name]
        if "There are no overrides" in text:
            continue
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


@pytest.mark.parametrize(
    ("flags", "recompute", "modules"),
    [
        ("", "none", ""),
        ("--recompute-activations", "selective", "core_attn"),
        ("--recompute-granularity selective", "selective", "core_attn"),
        ("--recompute-granularity selective --recompute-modules mlp core_attn", "selective", "core_attn+mlp"),
        ("--recompute-granularity selective --recompute-modules moe mlp", "selective", "mlp"),
        ("--recompute-granularity selective --recompute-modules moe", "none", ""),
    ],
)
def test_recomputed_modules_of_flags(flags: str, recompute: str, modules: str) -> None:
    """`core_attn` is Megatron-LM's default. A module that no layer has does nothing, which a finding says."""
    run = read(MEGATRON_LM, f"--micro-batch-size 1 --seq-length 1024 {flags}", 8, model=small())
    strategy = strategy_of(run, 8)
    assert (strategy.recompute, strategy.recompute_modules) == (recompute, modules)
    ignored = {one.field for one in run.findings if one.code == "ignored_key"}
    assert ("--recompute-modules" in ignored) == ("moe" in flags)


@pytest.mark.parametrize(("extra", "is_said"), [("", True), ("--transformer-impl local", False)])
def test_norms_that_transformer_engine_fuses_are_said(extra: str, is_said: bool) -> None:
    text = f"--recompute-granularity selective --recompute-modules layernorm mlp {extra}"
    run = read(MEGATRON_LM, f"--micro-batch-size 1 --seq-length 1024 {text}", 8, model=small())
    said = [one.code for one in run.findings if one.field == "--recompute-modules"]
    assert said == (["approximated"] if is_said else [])


def test_an_unknown_module_is_refused_by_name() -> None:
    text = "--micro-batch-size 1 --seq-length 1024 --recompute-granularity selective --recompute-modules attn"
    with pytest.raises(ConfigError) as caught:
        read(MEGATRON_LM, text, 8, model=small())
    assert caught.value.key == "--recompute-modules" and "attn" in str(caught.value.found)


def test_arguments_of_a_log_read_back() -> None:
    """Every argument as Megatron-LM prints it: the name, dots up to column 48, the value as in Python."""
    for plan in random_plans(8, seed=8):
        lines = []
        for flag, *values in megatron_lm_flags(plan):
            name = flag.removeprefix("--").replace("-", "_")
            value = " ".join(values) if values else "True"
            value = f"['{value}']" if name == "cp_comm_type" else value
            lines.append(f"  {name} {'.' * (48 - len(name))} {value}")
        # A log has all arguments, also those that Megatron-LM derives.
        lines += [f"  encoder_num_layers {'.' * 30} {plan.model.layers}", f"  mtp_num_layers {'.' * 34} None"]
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


@pytest.mark.parametrize(
    ("flags", "ends"),
    [
        # LLAMA has 10 layers: with both ends 12 places, one for each of 4 x 3 stages, three for each of 4.
        ("{e} {l} --num-virtual-stages-per-pipeline-rank 3", (4, 3, 0, 0)),
        ("{e} {l} --num-layers-per-virtual-pipeline-stage 1", (4, 3, 0, 0)),
        ("{e} {l}", (4, 1, 2, 2)),
        # 11 places on 11 ranks
        ("{e}", (11, 1, 0, 1)),
        ("{l}", (11, 1, 1, 0)),
    ],
)
def test_ends_that_count_as_layers(flags: str, ends: tuple[int, ...]) -> None:
    own = {"e": "--account-for-embedding-in-pipeline-split", "l": "--account-for-loss-in-pipeline-split"}
    text = f"--micro-batch-size 1 --seq-length 1024 --pipeline-model-parallel-size {ends[0]} "
    run = read(MEGATRON_LM, text + flags.format(**own), ends[0], model=small())
    names = ("pp", "vpp", "first_stage_layers", "last_stage_layers")
    assert tuple(run.fields.get(name, 1) for name in names) == ends
    assert [one.code for one in run.findings if one.severity == "error"] == []


def test_ends_that_do_not_divide_are_said() -> None:
    text = "--micro-batch-size 1 --seq-length 1024 --pipeline-model-parallel-size 4 "
    run = read(MEGATRON_LM, text + "--account-for-loss-in-pipeline-split", 4, model=small())
    assert "layers_lost" in [one.code for one in run.findings]  # 11 places on 4 ranks


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


SHAPE = """--num-layers 4 --hidden-size 256 --num-attention-heads 4 --padded-vocab-size 512 --seq-length 1024
--max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 8 --swiglu --normalization RMSNorm
--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights"""

PRECISE = "--use-precision-aware-optimizer --use-distributed-optimizer"
FSDP = "--use-megatron-fsdp --use-distributed-optimizer --data-parallel-sharding-strategy optim"


@pytest.mark.parametrize(
    ("target", "flags", "options", "profile"),
    [
        (MEGATRON_LM, "--bf16", {"tp_comm_overlap": "off", "grad_reduce_dtype": "fp32"}, {}),
        (MEGATRON_LM, "--bf16 --tp-comm-overlap --grad-reduce-in-bf16",
         {"tp_comm_overlap": "on", "grad_reduce_dtype": "bf16"}, {}),
        (MEGATRON_LM, f"--bf16 {PRECISE} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
         {"tp_comm_overlap": "off", "grad_reduce_dtype": "fp32", "moment_dtype": "bf16"},
         {"moment_bytes": 2.0, "master_bytes": 2.0}),
        (MEGATRON_LM, "--bf16 --fp8-format hybrid --fp8-recipe mxfp8 --fp8-param-gather",
         {"tp_comm_overlap": "off", "grad_reduce_dtype": "fp32", "fp8_param_gather": "on"}, {}),
        (MEGATRON_LM, "--bf16 --cuda-graph-impl local --cuda-graph-scope full_iteration",
         {"tp_comm_overlap": "off", "cuda_graph": "full_iteration", "grad_reduce_dtype": "fp32"}, {}),
        (MEGATRON_LM, "--bf16 --cuda-graph-impl full_iteration",
         {"tp_comm_overlap": "off", "cuda_graph": "full_iteration", "grad_reduce_dtype": "fp32"}, {}),
        (MEGATRON_LM,
         "--bf16 --cuda-graph-impl transformer_engine --cuda-graph-scope attn moe_router moe_preprocess",
         {"tp_comm_overlap": "off", "cuda_graph": "modules", "grad_reduce_dtype": "fp32"}, {}),
        (MEGATRON_LM,
         "--bf16 --cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router moe_preprocess",
         {"tp_comm_overlap": "off", "cuda_graph": "modules", "grad_reduce_dtype": "fp32"}, {}),
        # Graphs of attention alone are no value of the option.
        (MEGATRON_LM, "--bf16 --cuda-graph-impl transformer_engine --cuda-graph-scope attn",
         {"tp_comm_overlap": "off", "grad_reduce_dtype": "fp32"}, {}),
        # Without a format of 8 bits there are no such weights.
        (MEGATRON_LM, "--bf16 --fp8-param-gather", {"tp_comm_overlap": "off", "grad_reduce_dtype": "fp32"},
         {}),
        # (4 + 1) / 2 bytes a moment; no option has these values.
        (MEGATRON_LM, f"--bf16 {PRECISE} --exp-avg-sq-dtype fp8",
         {"tp_comm_overlap": "off", "grad_reduce_dtype": "fp32"},
         {"moment_bytes": 2.5, "master_bytes": 2.0}),
        # Without the optimizer that has them, dtypes of moments change nothing; nor do they on the host.
        (MEGATRON_LM, "--bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
         {"tp_comm_overlap": "off", "grad_reduce_dtype": "fp32"}, {}),
        (MEGATRON_LM, f"--bf16 {PRECISE} --optimizer-cpu-offload",
         {"tp_comm_overlap": "off", "grad_reduce_dtype": "fp32"}, {}),
        # Gradients of fp16 weights are reduced in fp16 unless they are accumulated in fp32.
        (MEGATRON_LM, "--fp16", {"tp_comm_overlap": "off"}, {"reduce_in_fp32": False}),
        (MEGATRON_LM, "--fp16 --accumulate-allreduce-grads-in-fp32", {"tp_comm_overlap": "off"}, {}),
        (MEGATRON_FSDP, f"--bf16 {FSDP} --megatron-fsdp-main-grads-dtype bf16",
         {"tp_comm_overlap": "off", "grad_reduce_dtype": "bf16"}, {}),
        (MEGATRON_FSDP, f"--bf16 {FSDP} {PRECISE} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
         {"tp_comm_overlap": "off", "grad_reduce_dtype": "fp32", "moment_dtype": "bf16"},
         {"moment_bytes": 2.0, "master_bytes": 4.0}),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value)[:30],
)  # fmt: skip
def test_options_of_megatron_lm(
    target: str, flags: str, options: dict[str, str], profile: dict[str, Any]
) -> None:
    run = read(target, f"{SHAPE} --overlap-grad-reduce {flags}", 8)
    assert (run.options, run.profile) == (options, profile)


MOVING = "--fine-grained-activation-offloading --offload-modules"


@pytest.mark.parametrize(
    ("flags", "options", "profile", "fault"),
    [
        (f"{MOVING} core_attn", "core_attn", None, None),
        (f"{MOVING} attn_proj core_attn qkv_linear", "qkv_linear+core_attn+attn_proj", None, None),
        # A dense layer has no such norm and no experts; the rest is moved.
        (f"{MOVING} core_attn mlp_norm moe_act", "core_attn", None, "ignored_key"),
        (f"{MOVING} attn_proj", None, "attn_proj", "refused"),
        (f"{MOVING} core_attn --recompute-granularity full --recompute-method uniform"
         " --recompute-num-layers 1", None, None, "ignored_key"),
        ("--offload-modules core_attn", None, None, "ignored_key"),
        (f"{MOVING} core_attn --min-offloaded-tensor-size 1", "core_attn", None, "approximated"),
    ],
    ids=lambda value: None if value is None else str(value)[-40:],
)  # fmt: skip
def test_modules_on_the_host(flags: str, options: str | None, profile: str | None, fault: str | None) -> None:
    """An option where the software has this set; else the profile has what is moved."""
    run = read(MEGATRON_LM, f"{SHAPE} --bf16 --overlap-grad-reduce --tp-comm-overlap {flags}", 8)
    assert run.options.get("offload_modules") == options
    assert run.profile.get("offload_modules") == profile
    found = {one.code for one in run.findings if "offload" in one.field}
    assert found == ({fault} if fault else set()) and run.fields["offload"] == "none"


def test_an_unknown_module_on_the_host_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as caught:
        read(MEGATRON_LM, f"{SHAPE} --bf16 {MOVING} attention", 8)
    assert caught.value.key == "--offload-modules" and "moe_act" in str(caught.value.allowed)


def test_options_of_other_software() -> None:
    titan = {"training": {}, "compile": {"enable": True, "enable_async_tensor_parallel": True},
             "optimizer": {"implementation": "fused_opt_states_bf16"}}  # fmt: skip
    model = model_from_config(LLAMA, name="small")
    run = read(TORCHTITAN, json.dumps({**titan, "parallelism": {}}), 8, model=model)
    assert run.options == {"tp_comm_overlap": "on", "moment_dtype": "bf16"}
    states = {"stage": 2}
    batch = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    for added, options in (
        ({}, {}),
        ({"communication_data_type": "fp32"}, {}),
        ({"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}},
         {"grad_reduce_dtype": "fp32"}),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, {}),
    ):  # fmt: skip
        text = json.dumps({**batch, "zero_optimization": states, **added})
        run = read(DEEPSPEED, text, 8, model=model)
        assert run.options == options
        # Accumulated in fp32, and reduced in bf16.
        assert run.profile == ({"accumulates_in_fp32": True} if added == NARROW else {})
    for comment, reduced in (("", {"grad_reduce_dtype": "bf16"}), ("# reduce_dtype=torch.float32\n", {})):
        text = f"{comment}{ACCELERATE}distributed_type: FSDP\nmixed_precision: bf16\n"
        run = read(FSDP2, text, 8, model=model, seq_len=64, global_batch_size=8)
        assert run.options == reduced
    run = read(FSDP2, text.replace("FSDP", "MULTI_GPU"), 8, model=model, seq_len=64, global_batch_size=8)
    assert run.options == {}


NARROW = {"data_types": {"grad_accum_dtype": "fp32"}}


@pytest.mark.parametrize("target", [MEGATRON_LM, TORCHTITAN])
def test_options_of_an_export_read_back(target: str) -> None:
    options = {"tp_comm_overlap": "on", "moment_dtype": "bf16"}
    software = target_of(target)
    profile = software.with_options(software.own_profile, options)
    plan = small_plan(LLAMA, "tp=2,dp=4,sequence_parallel=yes,zero_stage=1", profile=profile)
    if target == TORCHTITAN:
        plan = small_plan(LLAMA, "tp=2,dp=4,sequence_parallel=yes,zero_stage=3", profile=profile)
    text = next(text for name, text in EXPORTERS[target].files(plan).items() if not name.endswith(".csv"))
    assert options.items() <= read(target, text, 8, model=plan.model).options.items()


@pytest.mark.parametrize(
    ("policy", "recompute"),
    [
        (None, "none"),
        ({"preserve_rng_state": True, "debug": False}, "full"),
        ({"preserve_rng_state": True, "force_recompute_mm_shapes_by_fqns": ["moe.router.gate"]}, "selective"),
        ({"preserve_rng_state": True, "memory_budget": 0.5}, "selective"),
        ({"mode": "none"}, "none"),
    ],
)
def test_policies_of_recomputation(policy: dict[str, Any] | None, recompute: str) -> None:
    """TorchTitan's JSON has the fields of a policy, and not its name."""
    text = json.dumps({"training": {}, "parallelism": {}, "activation_checkpoint": policy})
    run = read(TORCHTITAN, text, 8, model=small(), seq_len=2048, global_batch_size=64)
    assert run.fields["recompute"] == recompute
    assert ("approximated" in {one.code for one in run.findings}) == (recompute == "selective")


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


TORCHRUN = "torchrun --nnodes 2 --nproc-per-node 8 train.py $A"
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
        (f"{TORCHRUN} {MEGATRON} {SIZES}", "--nnodes * --nproc-per-node", "16 devices"),
        (f"{MEGATRON} --multi-latent-attention", "--multi-latent-attention", "--model M"),
        ('{"train_batch_size": 8}', "--model", "--model M"),
        ("hello", None, "Megatron-LM"),
        (f"{ACCELERATE}distributed_type: TP", "distributed_type", "DEEPSPEED"),
        (
            f"{ACCELERATE}distributed_type: DEEPSPEED\ndeepspeed_config: {{deepspeed_config_file: ds.json}}",
            "deepspeed_config.deepspeed_config_file", "shardwise review of that file",
        ),
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


TRANSFORMERS = "transformers-5"


def test_a_distributed_config_reads_back() -> None:
    """Its model and its sequence too; the Trainer's arguments are supplied."""
    for plan in replica_plans(TRANSFORMERS, 30, seed=7):
        text, strategy = EXPORTERS[TRANSFORMERS].files(plan)["distributed_config.py"], plan.best.strategy
        (first, *_) = [target for target, one in IMPORTERS.items() if one.is_own(text)]
        fields = {"micro_batch_size": strategy.micro_batch_size, "recompute": strategy.recompute}
        run = read(
            first, text, plan.cluster.devices, global_batch_size=plan.job.global_batch_size,
            fields={**fields, "etp": strategy.etp},
        )  # fmt: skip
        assert run.target == TRANSFORMERS and run.dtype == plan.job.dtype
        assert run.seq_len == plan.job.seq_len and parameters(run.model) == parameters(plan.model)
        assert differing(strategy_of(run, plan.cluster.devices), plan) == {}
        assert [one.code for one in run.findings] == []


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ("tp_size=3, fsdp_size=2", "tp_size * fsdp_size * dp_replicate_size"),
        ("pp_size=2, fsdp_size=4", "pp_size"),
        ("tp_size=N", "tp_size"),
        ("tp_size='two'", "tp_size"),
        ("8", "DistributedConfig"),
        ("tp_size=8", "--model"),
        ("tp_size=(", "DistributedConfig"),
    ],
)
def test_a_distributed_config_that_cannot_be_used_is_refused(arguments: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(TRANSFORMERS, f"config = DistributedConfig({arguments})", 8, seq_len=64, global_batch_size=8)
    assert caught.value.key == key


NESTED = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
mixed_precision: bf16
num_machines: 1
num_processes: 8
deepspeed_config:
  gradient_accumulation_steps: 2
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: true
  zero_stages: 2
  zero_stage: 3
"""


def test_accelerate_with_deepspeed_is_a_run_of_deepspeed() -> None:
    """2 accumulated micro-batches on 8 ranks of a batch of 64 sequences have 4 each."""
    run = read(FSDP2, NESTED, 8, model=small_plan(LLAMA, "dp=8").model, seq_len=1024, global_batch_size=64)
    strategy = strategy_of(run, 8)
    assert run.target == DEEPSPEED and run.dtype == "bf16"
    assert (strategy.dp, strategy.param_shard, strategy.offload) == (8, 8, "optimizer")
    assert strategy.micro_batch_size == 4
    assert run.names["optim_shard"] == "deepspeed_config.zero_stage"
    (finding,) = (one for one in run.findings if one.code == "ignored_key")
    assert finding.field == "deepspeed_config.zero_stages"


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
        EXPORTERS[TRANSFORMERS].files(replicas)["distributed_config.py"],
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


RECIPE = """
def llama3_8b_pretrain_config():
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("org/model").to_megatron_provider(load_weights=False)
    cfg.model.tensor_model_parallel_size = 2  # within a node
    cfg.model.pipeline_model_parallel_size = 2
    cfg.model.virtual_pipeline_model_parallel_size = None
    cfg.model.context_parallel_size = 2
    cfg.model.sequence_parallel = True
    cfg.model.seq_length = 1024
    cfg.train.global_batch_size = 32
    cfg.train.micro_batch_size = 1
    cfg.mixed_precision = bf16_with_fp8_current_scaling_mixed()
    return cfg
"""

NEMO = """
trainer: {precision: bf16-mixed, num_nodes: 2}
model:
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 2
  context_parallel_size: 2
  sequence_parallel: true
  encoder_seq_length: 1024
  global_batch_size: 32
  micro_batch_size: 1
  activations_checkpoint_granularity: full
  activations_checkpoint_method: block
  activations_checkpoint_num_layers: 2
"""


@pytest.mark.parametrize(
    ("text", "dtype", "recompute"), [(RECIPE, "fp8-current", "none"), (NEMO, "bf16", "full")]
)
def test_recipes_in_python_and_yaml_are_read(text: str, dtype: str, recompute: str) -> None:
    """16 devices / (2 * 2 * 2) are 2 replicas; states of a recipe are sharded over 2 * 2 ranks."""
    model = small_plan(LLAMA, "dp=8").model
    run = read(MEGATRON_LM, text, 16, model=model)
    found = strategy_of(run, 16)
    assert (found.tp, found.pp, found.cp, found.dp, found.vpp) == (2, 2, 2, 2, 1)
    assert (found.optim_shard, found.sequence_parallel, found.recompute) == (4, True, recompute)
    assert found.recompute_layers == (2 if recompute == "full" else 0)
    assert (run.dtype, run.seq_len, run.global_batch_size) == (dtype, 1024, 32)


def test_overrides_that_are_no_shell_text_are_refused() -> None:
    with pytest.raises(ConfigError, match="is no shell text"):
        read(MEGATRON_LM, "model.tensor_model_parallel_size=2 'model.x=1", 8)
    with pytest.raises(ConfigError, match="is no YAML"):
        read(MEGATRON_LM, "model:\n  tensor_model_parallel_size: 2\n a: [", 8)


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("--bf16", "bf16"),
        ("--fp16", "fp16"),
        ("", "fp32"),
        ("--bf16 --fp8-format hybrid", "fp8"),
        ("--bf16 --fp8-format e4m3 --fp8-recipe tensorwise", "fp8-current"),
        ("--bf16 --fp8-format hybrid --fp8-recipe blockwise", "fp8-block"),
        ("--bf16 --fp8-format hybrid --fp8-recipe mxfp8", "mxfp8"),
        ("--bf16 --fp4-format e2m1", "nvfp4"),
    ],
)
def test_number_formats_of_megatron_lm(flags: str, dtype: str) -> None:
    assert read(MEGATRON_LM, f"{SHAPE} {flags}", 8).dtype == dtype


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_unknown_recipes_of_megatron_lm_are_refused(kind: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(MEGATRON_LM, f"{SHAPE} --bf16 --{kind}-format hybrid --{kind}-recipe custom", 8)
    assert (error.value.key, error.value.found) == (f"--{kind}-recipe", "custom")
