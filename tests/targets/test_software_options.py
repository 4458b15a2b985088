"""Options of the software in exported files: the software reads them back, and each lost one is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from tests.targets.folders import environment_with
from tests.targets.megatron import environment
from tests.targets.titan import titan_environment
from tests.unit.targets.small_plans import LLAMA, MIXTRAL, small_plan

from shardwise.plans import Plan, PlanQuestion
from shardwise.strategy import Job, target_of
from shardwise.targets import EXPORTERS
from shardwise.targets.megatron_lm import megatron_lm_flags
from shardwise.targets.megatron_lm_read_back import read_by_megatron_lm, reader_request

pytestmark = pytest.mark.xdist_group("megatron-lm files")

ENVIRONMENTS: Mapping[str, Callable[[], dict[str, str]]] = {
    "megatron-lm-0.19": environment,
    "megatron-fsdp-0.19": environment,
    "torchtitan-0.3": titan_environment,
    "fsdp2": lambda: environment_with("accelerate"),
    "deepspeed-0.19": lambda: environment_with("deepspeed"),
}
"""The environment of the child process that reads the files of each target."""

SPLIT = "tp=2,dp=4,sequence_parallel=yes"

CASES = [
    ("megatron-lm-0.19", f"{SPLIT},zero_stage=1", {"tp_comm_overlap": "on"}),
    ("megatron-lm-0.19", f"{SPLIT},zero_stage=1", {"tp_comm_overlap": "off"}),
    ("megatron-lm-0.19", "tp=1,dp=8,zero_stage=1", {"tp_comm_overlap": "on"}),  # which acts on nothing
    ("megatron-lm-0.19", "tp=2,dp=4,sequence_parallel=no,zero_stage=1", {"tp_comm_overlap": "on"}),
    ("megatron-lm-0.19", "pp=2,dp=4,zero_stage=0", {"grad_reduce_dtype": "bf16"}),
    ("megatron-lm-0.19", "pp=2,dp=4,zero_stage=1", {"moment_dtype": "bf16"}),
    ("megatron-lm-0.19", "tp=2,pp=4,sequence_parallel=yes", {"moment_dtype": "bf16"}),  # one replica
    (
        "megatron-lm-0.19",
        f"{SPLIT},optim_shard=2",
        {"tp_comm_overlap": "on", "grad_reduce_dtype": "bf16", "moment_dtype": "bf16"},
    ),
    ("megatron-lm-0.19", "ep=4,dp=8,zero_stage=1", {"ep_overlap": "on"}),
    ("megatron-lm-0.19", "ep=4,pp=2,vpp=2,dp=4,zero_stage=1", {"ep_overlap": "on"}),
    ("megatron-lm-0.19", "ep=1,etp=1,dp=8,zero_stage=1", {"ep_overlap": "on"}),  # which acts on nothing
    ("megatron-lm-0.19", f"{SPLIT},zero_stage=1", {"offload_modules": "core_attn"}),
    (
        "megatron-lm-0.19",
        "pp=2,vpp=5,dp=4,zero_stage=1",
        {"offload_modules": "qkv_linear+core_attn+attn_proj"},
    ),
    (
        "megatron-lm-0.19",
        "ep=4,dp=8,zero_stage=1,recompute=selective,recompute_modules=moe_act",
        {"offload_modules": "mlp_norm+expert_fc1+moe_act"},
    ),
    ("megatron-fsdp-0.19", "dp=8,zero_stage=3", {"grad_reduce_dtype": "bf16", "moment_dtype": "bf16"}),
    ("torchtitan-0.3", f"{SPLIT},zero_stage=3", {"tp_comm_overlap": "on"}),
    ("torchtitan-0.3", "dp=8,zero_stage=3,sequence_parallel=no", {"moment_dtype": "bf16"}),
    (
        "torchtitan-0.3",
        f"{SPLIT},zero_stage=3,recompute=full,recompute_layers=4",
        {"tp_comm_overlap": "on", "moment_dtype": "bf16"},
    ),
    ("fsdp2", "dp=8,zero_stage=3,sequence_parallel=no", {"grad_reduce_dtype": "bf16"}),
    ("deepspeed-0.19", "dp=8,zero_stage=2,sequence_parallel=no", {"grad_reduce_dtype": "fp32"}),
    ("deepspeed-0.19", "dp=8,zero_stage=3,sequence_parallel=no", {"grad_reduce_dtype": "bf16"}),
]


def plan_with(target: str, strategy: str, options: Mapping[str, str]) -> Plan:
    """The plan of a strategy for a target, with these options and the others at their defaults."""
    software = target_of(target)
    profile = software.profile_for(Job(seq_len=1024, global_batch_size=32, dtype="bf16"), ("NVIDIA",))
    chosen = software.with_options(profile, options)
    config = MIXTRAL if target == "megatron-fsdp-0.19" or "ep=" in strategy else LLAMA
    plan = small_plan(config, strategy, profile=chosen)
    return replace(plan, question=PlanQuestion(target=target, options=options))


@pytest.mark.parametrize(("target", "strategy", "options"), CASES)
def test_the_software_reads_options_back(target: str, strategy: str, options: dict[str, str]) -> None:
    plan = plan_with(target, strategy, options)
    exporter = EXPORTERS[target]
    files = exporter.files(plan)
    assert exporter.read_back(plan, files, environment=ENVIRONMENTS[target]()).differences == ()


@pytest.mark.parametrize(
    ("target", "strategy", "options", "lost"),
    [
        ("megatron-lm-0.19", f"{SPLIT},zero_stage=1", {"tp_comm_overlap": "on"}, "--tp-comm-overlap\n"),
        ("megatron-lm-0.19", "dp=8,zero_stage=1", {"moment_dtype": "bf16"}, "--exp-avg-sq-dtype bf16\n"),
        ("megatron-lm-0.19", "dp=8,zero_stage=1", {"grad_reduce_dtype": "bf16"}, "--grad-reduce-in-bf16\n"),
        ("megatron-lm-0.19", "dp=8,zero_stage=1", {"offload_modules": "core_attn+attn_proj"},
         "--fine-grained-activation-offloading\n"),
        ("megatron-lm-0.19", "dp=8,zero_stage=1", {"offload_modules": "core_attn+attn_proj"}, " attn_proj"),
        ("torchtitan-0.3", f"{SPLIT},zero_stage=3", {"tp_comm_overlap": "on"},
         ", enable_async_tensor_parallel=True"),
        ("torchtitan-0.3", f"{SPLIT},zero_stage=3", {"moment_dtype": "bf16"},
         ', implementation="fused_opt_states_bf16"'),
    ],
)  # fmt: skip
def test_a_lost_option_is_found(target: str, strategy: str, options: dict[str, str], lost: str) -> None:
    plan = plan_with(target, strategy, options)
    exporter = EXPORTERS[target]
    files = exporter.files(plan)
    changed = {name: text.replace(lost, "") for name, text in files.items()}
    assert changed != files
    found = exporter.read_back(plan, changed, environment=ENVIRONMENTS[target]())
    assert len(found.differences) == 1


EP_OVERLAP = "--overlap-moe-expert-parallel-comm"


@pytest.mark.parametrize(
    ("strategy", "field"),
    [
        ("ep=4,dp=8,zero_stage=1", None),
        ("ep=4,pp=2,vpp=2,dp=4,zero_stage=1", None),
        ("ep=4,dp=8,zero_stage=1,recompute=selective,recompute_modules=moe_act", None),
        ("ep=4,pp=2,dp=4,zero_stage=1", "vpp"),
        ("ep=4,dp=8,zero_stage=1,recompute=full,recompute_layers=8", "recompute"),
        ("ep=4,dp=8,zero_stage=1,recompute=selective,recompute_modules=moe", "recompute_modules"),
        ("ep=4,dp=8,zero_stage=1,recompute=selective,recompute_modules=core_attn+moe", "recompute_modules"),
    ],
)
def test_megatron_lm_refuses_what_the_limits_of_an_option_exclude(strategy: str, field: str | None) -> None:
    """Flags of a plan without the option, and the flag of the option."""
    plan = plan_with("megatron-lm-0.19", strategy, {})
    request = reader_request(plan, (*megatron_lm_flags(plan), (EP_OVERLAP,)))
    (reading,) = read_by_megatron_lm([request], environment=environment())
    assert (reading.error is None) == (field is None), reading.error
    software = target_of("megatron-lm-0.19")
    job = replace(plan.job, profile=software.with_options(plan.job.profile, {"ep_overlap": "on"}))
    broken = software.for_job(plan.model, job).broken_limit(plan.best.strategy)
    assert (None if broken is None else broken.field) == field
