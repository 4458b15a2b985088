"""Under every plan, losses and gradients equal those of one process."""

from __future__ import annotations

from functools import cache
from itertools import accumulate, combinations_with_replacement

import pytest
from tests.runtime.equality import Difference, Trajectory, divided, precision, single_process
from tests.runtime.mutants import ALIKE, MUTANTS
from tests.runtime.plans import BATCH, make_plan
from tests.sampling import sample_of

from shardwise.plans import Plan
from shardwise.runtime import WorkerPool
from shardwise.runtime.offload import OFFLOADS_ACTIVATIONS, OFFLOADS_STATES

STEPS, MORE_STEPS, MANY_STEPS = 2, 3, 20
"""The loss of the second step shows the first update, that of the third the optimizer states."""

TOLERANCE = 2e-5
"""Relative, in fp32: sums have another order. The worst over the matrix is 8e-6."""

HALF_TOLERANCE = 2e-2
"""For bf16 matmuls, compared with fp32."""

SHARDED = [
    ("dp=2", "gpt"),
    ("dp=4,micro_batch_size=1", "llama"),
    ("dp=2,zero_stage=1,micro_batch_size=2", "llama"),
    ("dp=4,zero_stage=2,micro_batch_size=1", "gpt"),
    ("dp=4,zero_stage=3,micro_batch_size=1", "llama"),
    ("dp=4,zero_stage=3", "gpt"),
    ("dp=4,zero_stage=3,dp_shard=2,micro_batch_size=1", "llama"),
    ("dp=4,zero_stage=1,dp_shard=2", "qwen3"),
    ("dp=4,zero_stage=2,dp_shard=2,micro_batch_size=1", "neox"),
    ("dp=4,param_shard=2,grad_shard=4,optim_shard=4,micro_batch_size=1", "llama"),
]
TENSOR = [
    ("tp=2,sequence_parallel=true,micro_batch_size=2", "gpt"),
    ("tp=2,sequence_parallel=false,micro_batch_size=4", "gpt"),
    ("tp=2,sequence_parallel=true,micro_batch_size=4", "llama"),
    ("tp=2,sequence_parallel=false,micro_batch_size=4", "llama"),
    ("tp=4,sequence_parallel=true,micro_batch_size=4", "qwen3"),
    ("tp=4,sequence_parallel=false,micro_batch_size=4", "qwen3"),
    ("tp=2,sequence_parallel=true,micro_batch_size=4", "neox"),
    ("tp=4,sequence_parallel=false,micro_batch_size=4", "neox"),
]
PIPELINES = [
    ("pp=2,schedule=gpipe,micro_batch_size=2", "gpt"),
    ("pp=4,schedule=gpipe,micro_batch_size=1", "llama"),
    ("pp=2,schedule=1f1b,micro_batch_size=1", "llama"),
    ("pp=4,schedule=1f1b,micro_batch_size=2", "gpt"),
    ("pp=2,schedule=1f1b,micro_batch_size=1,first_stage_layers=1,last_stage_layers=3", "llama"),
    ("pp=3,schedule=1f1b,micro_batch_size=2,first_stage_layers=0,last_stage_layers=1", "gpt"),
    ("pp=2,schedule=interleaved_1f1b,vpp=2,micro_batch_size=1", "gpt"),
    ("pp=2,schedule=zb_h1,micro_batch_size=1", "gpt"),
    ("pp=4,schedule=zb_h1,micro_batch_size=1", "llama"),
    ("pp=2,schedule=zb_h2,micro_batch_size=1", "llama"),
    ("pp=4,schedule=zb_h2,micro_batch_size=1", "qwen3"),
    ("pp=2,schedule=zb_v,vpp=2,micro_batch_size=1", "gpt"),
    ("pp=2,schedule=dualpipe_v,vpp=2,micro_batch_size=1", "llama"),
    ("pp=2,schedule=dualpipe_v,vpp=2,micro_batch_size=2", "gpt"),
]
PAIRS = [
    ("tp=2,dp=2,micro_batch_size=4", "gpt"),
    ("tp=2,dp=2,zero_stage=1,sequence_parallel=true,micro_batch_size=2", "llama"),
    ("tp=2,dp=2,zero_stage=2,micro_batch_size=2", "gpt"),
    ("tp=2,dp=2,zero_stage=3,micro_batch_size=2", "llama"),
    ("tp=2,dp=4,zero_stage=3,dp_shard=2,micro_batch_size=2", "gpt"),
    ("tp=2,pp=2,schedule=1f1b,micro_batch_size=2,sequence_parallel=true", "gpt"),
    ("tp=2,pp=2,schedule=interleaved_1f1b,vpp=2,micro_batch_size=4", "llama"),
    ("tp=2,pp=2,schedule=zb_h1,micro_batch_size=2,sequence_parallel=false", "qwen3"),
    ("tp=2,pp=2,schedule=zb_v,vpp=2,micro_batch_size=2", "gpt"),
    ("pp=2,dp=2,schedule=1f1b,micro_batch_size=1", "gpt"),
    ("pp=2,dp=2,schedule=gpipe,zero_stage=1,micro_batch_size=2", "llama"),
    ("pp=2,dp=2,schedule=zb_h1,zero_stage=1,micro_batch_size=2", "gpt"),
    ("pp=2,dp=2,schedule=1f1b,zero_stage=2,micro_batch_size=1", "gpt"),
    ("pp=2,dp=2,schedule=1f1b,zero_stage=3,micro_batch_size=1", "llama"),
    ("pp=2,dp=2,schedule=interleaved_1f1b,vpp=2,zero_stage=3,micro_batch_size=2", "gpt"),
    ("pp=2,dp=4,schedule=1f1b,zero_stage=3,dp_shard=2,micro_batch_size=1", "llama"),
    ("pp=2,dp=2,schedule=zb_v,vpp=2,zero_stage=1,micro_batch_size=1", "gpt"),
    ("pp=2,dp=2,schedule=dualpipe_v,vpp=2,micro_batch_size=1", "qwen3"),
    ("tp=2,pp=2,dp=2,schedule=1f1b,zero_stage=3,micro_batch_size=2", "gpt"),
    ("tp=2,pp=2,dp=2,schedule=zb_h1,zero_stage=1,micro_batch_size=2,axis_order=dp-pp-tp", "llama"),
]
CONTEXT = [
    ("cp=2,micro_batch_size=4", "llama"),
    ("cp=4,micro_batch_size=4", "gpt"),
    ("cp=2,cp_kind=all_to_all,micro_batch_size=2", "llama"),
    ("cp=4,cp_kind=all_to_all,micro_batch_size=4", "gpt"),
    ("cp=2,dp=2,zero_stage=1,micro_batch_size=1", "qwen3"),
    ("cp=2,dp=2,zero_stage=3,micro_batch_size=2,cp_kind=all_to_all,axis_order=dp-cp-tp-pp", "llama"),
    ("tp=2,cp=2,sequence_parallel=true,micro_batch_size=4", "llama"),
    ("tp=2,cp=2,cp_kind=all_to_all,sequence_parallel=false,micro_batch_size=4", "gpt"),
    ("cp=2,pp=2,schedule=1f1b,micro_batch_size=4", "gpt"),
    ("cp=2,pp=2,schedule=zb_v,vpp=2,micro_batch_size=2", "llama"),
]
RECOMPUTED = [
    ("recompute=full,recompute_layers=4,dp=2", "llama"),
    ("recompute=full,recompute_layers=1,dp=2,zero_stage=3,micro_batch_size=2", "gpt"),
    ("recompute=selective,dp=2,zero_stage=2,micro_batch_size=2", "neox"),
    ("recompute=selective,tp=2,sequence_parallel=true,micro_batch_size=4", "gpt"),
    ("recompute=full,recompute_layers=2,cp=2,micro_batch_size=4", "llama"),
    ("recompute=full,recompute_layers=1,pp=2,schedule=1f1b,micro_batch_size=2", "llama"),
    ("recompute=full,recompute_layers=1,pp=2,schedule=zb_h1,micro_batch_size=2", "gpt"),
    ("recompute=selective,pp=2,schedule=interleaved_1f1b,vpp=2,micro_batch_size=2", "qwen3"),
    ("recompute=selective,pp=2,schedule=zb_h1,micro_batch_size=2", "gpt"),
]
EXPERTS = [
    ("dp=2,micro_batch_size=2", "mixtral"),
    ("dp=2,ep=2,micro_batch_size=2", "mixtral"),
    ("dp=4,ep=2,zero_stage=3,micro_batch_size=1", "mixtral"),
    ("dp=4,ep=4,zero_stage=2,dp_shard=2,micro_batch_size=1", "qwen3_moe"),
    ("tp=2,ep=1,sequence_parallel=false,micro_batch_size=4", "mixtral"),
    ("tp=2,ep=2,sequence_parallel=true,micro_batch_size=4", "qwen3_moe"),
    ("tp=2,etp=2,sequence_parallel=false,micro_batch_size=4", "qwen3_moe"),
    ("tp=2,dp=2,ep=2,etp=2,zero_stage=1,sequence_parallel=true,micro_batch_size=2", "mixtral"),
    ("cp=2,dp=2,ep=4,micro_batch_size=2,cp_kind=all_to_all", "mixtral"),
    ("pp=2,dp=2,ep=2,schedule=1f1b,zero_stage=3,micro_batch_size=2", "qwen3_moe"),
    ("pp=2,tp=2,ep=1,schedule=interleaved_1f1b,vpp=2,micro_batch_size=4", "mixtral"),
    ("pp=2,dp=2,ep=2,schedule=zb_v,vpp=2,micro_batch_size=1", "mixtral"),
    ("pp=2,tp=2,etp=2,schedule=zb_h1,micro_batch_size=4,axis_order=pp-tp-cp-dp", "qwen3_moe"),
    ("dp=2,ep=2,recompute=full,recompute_layers=2,zero_stage=3,micro_batch_size=2", "mixtral"),
    ("dp=2,ep=2,recompute=selective,micro_batch_size=2", "qwen3_moe"),
]
SHARED_HEADS = [
    ("tp=4,sequence_parallel=true,micro_batch_size=4", "llama"),
    ("tp=4,dp=2,zero_stage=1,sequence_parallel=false,micro_batch_size=2", "llama"),
]
HALF = [
    ("dp=2,zero_stage=1,micro_batch_size=2", "llama"),
    ("tp=2,pp=2,schedule=1f1b,micro_batch_size=2", "gpt"),
    ("dp=4,zero_stage=3", "qwen3"),
    ("dp=2,ep=2,zero_stage=1,micro_batch_size=2", "mixtral"),
    ("dp=2,zero_stage=1,micro_batch_size=2,offload=both", "llama"),
    ("dp=2,zero_stage=3,offload=optimizer", "gpt"),
    ("tp=2,dp=2,zero_stage=1,sequence_parallel=true,micro_batch_size=2", "bloom"),
    ("dp=2,zero_stage=3,micro_batch_size=2", "gemma2"),
]


OFFLOADED = [
    ("offload=optimizer,micro_batch_size=2", "gpt"),
    ("dp=2,offload=both", "llama"),
    ("dp=4,zero_stage=2,micro_batch_size=1,offload=optimizer", "gpt"),
    ("dp=4,zero_stage=3,dp_shard=2,micro_batch_size=1,offload=both", "llama"),
    ("dp=4,param_shard=2,grad_shard=4,optim_shard=4,micro_batch_size=1,offload=optimizer", "llama"),
    ("tp=2,sequence_parallel=true,micro_batch_size=4,offload=both", "gpt"),
    ("pp=2,dp=2,schedule=interleaved_1f1b,vpp=2,zero_stage=3,micro_batch_size=2,offload=both", "gpt"),
    ("pp=2,schedule=gpipe,micro_batch_size=2,offload=activations", "llama"),
    ("pp=2,dp=2,schedule=zb_v,vpp=2,zero_stage=1,micro_batch_size=1,offload=optimizer", "gpt"),
    ("recompute=full,recompute_layers=2,cp=2,micro_batch_size=4,offload=activations", "llama"),
    ("recompute=selective,dp=2,zero_stage=2,micro_batch_size=2,offload=both", "neox"),
    ("cp=2,cp_kind=all_to_all,micro_batch_size=4,recompute=selective,offload=activations", "qwen3"),
    ("pp=2,dp=2,ep=2,schedule=1f1b,zero_stage=3,micro_batch_size=2,offload=both", "qwen3_moe"),
    ("dp=2,ep=2,zero_stage=1,micro_batch_size=2,offload=both", "mixtral"),
    ("tp=2,etp=2,micro_batch_size=4,offload=both", "deepseek_v3"),
    ("tp=2,dp=2,ep=2,zero_stage=3,micro_batch_size=2,offload=both", "deepseek_v3"),
    ("tp=2,dp=2,zero_stage=1,micro_batch_size=2,offload=both", "gemma2"),
    ("dp=2,ep=2,micro_batch_size=2,recompute=selective,offload=both", "gpt_oss"),
]

FAMILIES = [
    ("tp=2,dp=2,ep=2,zero_stage=1,sequence_parallel=true,micro_batch_size=4", "gpt_moe"),
    ("tp=2,dp=2,zero_stage=1,sequence_parallel=true,micro_batch_size=2", "opt"),
    ("tp=2,pp=2,schedule=1f1b,sequence_parallel=false,micro_batch_size=4", "opt"),
    ("tp=2,dp=2,zero_stage=2,sequence_parallel=true,micro_batch_size=2", "phi3"),
    ("tp=2,pp=2,schedule=1f1b,sequence_parallel=true,micro_batch_size=4", "bloom"),
    ("tp=2,cp=2,sequence_parallel=false,micro_batch_size=4", "bloom"),
    ("cp=2,cp_kind=all_to_all,dp=2,zero_stage=3,micro_batch_size=2", "bloom"),
    ("tp=2,pp=2,schedule=1f1b,sequence_parallel=true,micro_batch_size=4", "falcon"),
    ("tp=2,dp=2,zero_stage=3,sequence_parallel=false,micro_batch_size=4", "falcon-7b"),
    ("tp=2,cp=2,cp_kind=all_to_all,sequence_parallel=true,micro_batch_size=4", "falcon-rw"),
    ("tp=2,dp=2,zero_stage=3,sequence_parallel=true,micro_batch_size=4", "gemma2"),
    ("pp=2,schedule=zb_h1,micro_batch_size=2,recompute=selective", "gemma2"),
    ("tp=2,pp=2,schedule=1f1b,sequence_parallel=false,micro_batch_size=4", "gemma3"),
    ("dp=2,zero_stage=1,micro_batch_size=2,recompute=full,recompute_layers=2", "gemma3"),
    ("tp=2,ep=2,sequence_parallel=true,micro_batch_size=4,recompute=selective", "gpt_oss"),
    ("tp=2,dp=2,etp=2,ep=1,zero_stage=1,sequence_parallel=false,micro_batch_size=4", "gpt_oss"),
    ("pp=2,dp=2,ep=2,schedule=1f1b,zero_stage=3,micro_batch_size=2", "gpt_oss"),
    ("tp=2,ep=1,sequence_parallel=false,micro_batch_size=4", "deepseek_v2"),
    ("tp=2,dp=2,ep=2,zero_stage=1,sequence_parallel=true,micro_batch_size=4", "deepseek_v2"),
    ("cp=2,dp=2,ep=2,zero_stage=3,micro_batch_size=2", "deepseek_v2"),
    ("tp=2,dp=2,ep=2,zero_stage=3,sequence_parallel=true,micro_batch_size=4", "deepseek_v3"),
    ("tp=2,pp=2,etp=2,schedule=1f1b,sequence_parallel=false,micro_batch_size=4", "deepseek_v3"),
    ("cp=2,cp_kind=all_to_all,ep=2,micro_batch_size=4,recompute=selective", "deepseek_v3"),
]

MATRIX = [
    *SHARDED, *TENSOR, *PIPELINES, *PAIRS, *CONTEXT, *RECOMPUTED, *SHARED_HEADS, *EXPERTS, *OFFLOADED,
    *FAMILIES,
]  # fmt: skip


AGAIN = [
    ("dp=4,micro_batch_size=1", "llama"),
    ("dp=4,zero_stage=2,micro_batch_size=1", "gpt"),
    ("dp=4,zero_stage=3,micro_batch_size=1", "llama"),
    ("dp=4,zero_stage=3", "gpt"),
    ("dp=4,zero_stage=3,dp_shard=2,micro_batch_size=1", "llama"),
    ("dp=4,zero_stage=2,dp_shard=2,micro_batch_size=1", "neox"),
    ("dp=4,param_shard=2,grad_shard=4,optim_shard=4,micro_batch_size=1", "llama"),
    ("tp=2,sequence_parallel=false,micro_batch_size=4", "gpt"),
    ("tp=2,sequence_parallel=true,micro_batch_size=4", "llama"),
    ("tp=2,sequence_parallel=false,micro_batch_size=4", "llama"),
    ("tp=4,sequence_parallel=true,micro_batch_size=4", "qwen3"),
    ("tp=4,sequence_parallel=false,micro_batch_size=4", "qwen3"),
    ("tp=2,sequence_parallel=true,micro_batch_size=4", "neox"),
    ("tp=4,sequence_parallel=false,micro_batch_size=4", "neox"),
    ("pp=2,schedule=gpipe,micro_batch_size=2", "gpt"),
    ("pp=4,schedule=gpipe,micro_batch_size=1", "llama"),
    ("pp=2,schedule=1f1b,micro_batch_size=1", "llama"),
    ("pp=4,schedule=1f1b,micro_batch_size=2", "gpt"),
    ("pp=2,schedule=1f1b,micro_batch_size=1,first_stage_layers=1,last_stage_layers=3", "llama"),
    ("pp=2,schedule=interleaved_1f1b,vpp=2,micro_batch_size=1", "gpt"),
    ("pp=2,schedule=zb_h1,micro_batch_size=1", "gpt"),
    ("pp=4,schedule=zb_h1,micro_batch_size=1", "llama"),
    ("pp=4,schedule=zb_h2,micro_batch_size=1", "qwen3"),
    ("pp=2,schedule=zb_v,vpp=2,micro_batch_size=1", "gpt"),
    ("pp=2,schedule=dualpipe_v,vpp=2,micro_batch_size=1", "llama"),
    ("pp=2,schedule=dualpipe_v,vpp=2,micro_batch_size=2", "gpt"),
    ("tp=2,dp=2,zero_stage=1,sequence_parallel=true,micro_batch_size=2", "llama"),
    ("tp=2,dp=2,zero_stage=2,micro_batch_size=2", "gpt"),
    ("tp=2,dp=2,zero_stage=3,micro_batch_size=2", "llama"),
    ("tp=2,pp=2,schedule=1f1b,micro_batch_size=2,sequence_parallel=true", "gpt"),
    ("tp=2,pp=2,schedule=interleaved_1f1b,vpp=2,micro_batch_size=4", "llama"),
    ("pp=2,dp=2,schedule=zb_h1,zero_stage=1,micro_batch_size=2", "gpt"),
    ("pp=2,dp=2,schedule=1f1b,zero_stage=3,micro_batch_size=1", "llama"),
    ("pp=2,dp=2,schedule=interleaved_1f1b,vpp=2,zero_stage=3,micro_batch_size=2", "gpt"),
    ("pp=2,dp=2,schedule=zb_v,vpp=2,zero_stage=1,micro_batch_size=1", "gpt"),
    ("tp=2,pp=2,dp=2,schedule=1f1b,zero_stage=3,micro_batch_size=2", "gpt"),
    ("cp=2,micro_batch_size=4", "llama"),
    ("cp=4,micro_batch_size=4", "gpt"),
    ("cp=2,cp_kind=all_to_all,micro_batch_size=2", "llama"),
    ("cp=4,cp_kind=all_to_all,micro_batch_size=4", "gpt"),
    ("recompute=full,recompute_layers=1,dp=2,zero_stage=3,micro_batch_size=2", "gpt"),
    ("recompute=selective,dp=2,zero_stage=2,micro_batch_size=2", "neox"),
    ("recompute=selective,tp=2,sequence_parallel=true,micro_batch_size=4", "gpt"),
    ("recompute=full,recompute_layers=2,cp=2,micro_batch_size=4", "llama"),
    ("recompute=selective,pp=2,schedule=zb_h1,micro_batch_size=2", "gpt"),
    ("dp=2,micro_batch_size=2", "mixtral"),
    ("dp=2,ep=2,micro_batch_size=2", "mixtral"),
    ("dp=4,ep=2,zero_stage=3,micro_batch_size=1", "mixtral"),
    ("tp=2,ep=1,sequence_parallel=false,micro_batch_size=4", "mixtral"),
    ("tp=2,ep=2,sequence_parallel=true,micro_batch_size=4", "qwen3_moe"),
    ("tp=2,etp=2,sequence_parallel=false,micro_batch_size=4", "qwen3_moe"),
    ("tp=2,dp=2,ep=2,etp=2,zero_stage=1,sequence_parallel=true,micro_batch_size=2", "mixtral"),
    ("pp=2,dp=2,ep=2,schedule=1f1b,zero_stage=3,micro_batch_size=2", "qwen3_moe"),
    ("dp=2,ep=2,recompute=selective,micro_batch_size=2", "qwen3_moe"),
    ("dp=2,offload=both", "llama"),
    ("tp=2,sequence_parallel=true,micro_batch_size=4,offload=both", "gpt"),
    ("tp=2,etp=2,micro_batch_size=4,offload=both", "deepseek_v3"),
    ("tp=2,dp=2,zero_stage=1,micro_batch_size=2,offload=both", "gemma2"),
    ("tp=2,dp=2,zero_stage=1,sequence_parallel=true,micro_batch_size=2", "opt"),
    ("tp=2,pp=2,schedule=1f1b,sequence_parallel=true,micro_batch_size=4", "bloom"),
    ("cp=2,cp_kind=all_to_all,dp=2,zero_stage=3,micro_batch_size=2", "bloom"),
    ("tp=2,dp=2,zero_stage=3,sequence_parallel=true,micro_batch_size=4", "gemma2"),
    ("tp=2,pp=2,schedule=1f1b,sequence_parallel=false,micro_batch_size=4", "gemma3"),
    ("tp=2,dp=2,etp=2,ep=1,zero_stage=1,sequence_parallel=false,micro_batch_size=4", "gpt_oss"),
    ("pp=2,dp=2,ep=2,schedule=1f1b,zero_stage=3,micro_batch_size=2", "gpt_oss"),
    ("tp=2,ep=1,sequence_parallel=false,micro_batch_size=4", "deepseek_v2"),
    ("tp=2,dp=2,ep=2,zero_stage=1,sequence_parallel=true,micro_batch_size=4", "deepseek_v2"),
    ("tp=2,dp=2,ep=2,zero_stage=3,sequence_parallel=true,micro_batch_size=4", "deepseek_v3"),
    ("cp=2,cp_kind=all_to_all,ep=2,micro_batch_size=4,recompute=selective", "deepseek_v3"),
]
"""Run with `--full` only: the other plans of the matrix have each mechanism, and each pair of them, too."""

SAMPLE = [case for case in MATRIX if case not in AGAIN]


def mechanisms(text: str, model: str) -> set[str]:
    """The mechanisms of a plan, as words."""
    plan = make_plan(text, model=model)
    strategy = plan.best.strategy
    axes = ("tp", "cp", "pp", "dp", "ep", "etp")
    found = {axis for axis in axes if (getattr(strategy, axis) or 1) > 1}
    found.add("dense" if plan.model.experts is None else "experts")
    found |= {f"recompute {strategy.recompute}", f"offload {strategy.offload}"}
    if strategy.tp > 1:
        found.add(f"sequence parallel {strategy.sequence_parallel}")
        found |= {"shared heads"} if strategy.tp > plan.model.kv_heads else set()
    if strategy.cp > 1:
        found.add(strategy.cp_kind)
    if strategy.pp > 1:
        found.add(strategy.schedule)
        found |= {"uneven stages"} if "_stage_layers" in text else set()
    found |= {"another order of axes"} if "axis_order" in text else set()
    if strategy.dp > 1:
        shards = strategy.optim_shard, strategy.grad_shard, strategy.param_shard
        found |= {f"{sum(shard > 1 for shard in shards)} of 3 sharded"}
        found |= {"groups of replicas" for shard in shards if 1 < shard < strategy.dp}
    return found


def test_the_sample_has_every_pair_of_mechanisms() -> None:
    of_matrix, of_sample = (
        {pair for case in cases for pair in combinations_with_replacement(sorted(mechanisms(*case)), 2)}
        for cases in (MATRIX, SAMPLE)
    )
    assert of_sample == of_matrix
    assert {model for _, model in SAMPLE} == {model for _, model in MATRIX}
    assert len(SAMPLE) >= 60
    assert {make_plan(text, model=model).cluster.devices for text, model in SAMPLE} >= {2, 3, 4, 8}


@cache
def expected(model: str, optimizer: str, seed: int, steps: int = STEPS) -> Trajectory:
    return single_process(make_plan("tp=1", model=model, optimizer=optimizer), seed=seed, steps=steps)


def run(
    team: WorkerPool, plan: Plan, seed: int = 0, broken: str | None = None, steps: int = STEPS
) -> list[Difference]:
    right = expected(plan.model.name, plan.job.optimizer, seed, steps)
    return team.run(plan.cluster.devices, divided, plan, right, seed, broken)


@pytest.mark.parametrize(("text", "model"), sample_of(MATRIX, SAMPLE))
def test_a_divided_run_equals_one_process(team: WorkerPool, text: str, model: str) -> None:
    """Plans with sharded or offloaded optimizer states take a further step."""
    plan = make_plan(text, model=model)
    found = run(team, plan, steps=MORE_STEPS if (text, model) in [*SHARDED, *OFFLOADED] else STEPS)
    assert max(rank.largest for rank in found) < TOLERANCE
    assert strayed(plan, found) == []


LONG = [
    ("dp=2,zero_stage=3,micro_batch_size=2", "llama"),
    PIPELINES[13],
    EXPERTS[1],
    CONTEXT[0],
    OFFLOADED[3],
]


@pytest.mark.parametrize(("text", "model"), sample_of(LONG, LONG[:3]))
def test_a_run_of_many_steps_stays_with_one_process(team: WorkerPool, text: str, model: str) -> None:
    found = run(team, make_plan(text, model=model), steps=MANY_STEPS)
    assert max(rank.largest for rank in found) < TOLERANCE


def strayed(plan: Plan, found: list[Difference]) -> list[str]:
    """Deviations of the ranks from the plan: the layers of each rank, the layers that recompute attention,
    and the actions of its schedule in order (communication between them is ignored)."""
    places = plan.best.layout.pipelines[0].stages
    (schedule,) = plan.schedules
    local_layers = {stage: own for stage, own in enumerate(layers_of_stages(plan))}
    strategy = plan.best.strategy
    microbatches = BATCH // strategy.dp // strategy.micro_batch_size
    wrong = []
    for number, rank in enumerate(found):
        place = next(at for at, stage in enumerate(places) if number in stage.rank_numbers)
        own = [local_layers[stage] for stage, at in enumerate(schedule.stage_rank) if at == place]
        if rank.layers != tuple(own):
            wrong.append("layers")
        recomputed = sum(map(len, own)) if strategy.recompute == "selective" else 0
        if strategy.recompute == "full":
            recomputed = sum(min(strategy.recompute_layers, len(layers)) for layers in own)
        if rank.passes != microbatches * (sum(map(len, own)) + recomputed):
            wrong.append("passes")
        computation = [
            action
            for action in rank.executed
            if not any(word in action for word in ("SEND", "RECV", "REDUCE_GRAD"))
        ]
        if rank.buffers != (strategy.offload in OFFLOADS_STATES, strategy.offload in OFFLOADS_ACTIVATIONS):
            wrong.append("offload")
        if strategy.pp > 1 and computation != [str(action) for action in schedule.ranks[place]]:
            wrong.append("order")
    return sorted(set(wrong))


def layers_of_stages(plan: Plan) -> list[tuple[int, ...]]:
    """The numbers of the layers of each stage, from the counts in the plan's layout."""
    counts = [list(place.layers) for place in plan.best.layout.pipelines[0].stages]
    end_modules = list(accumulate(counts[place].pop(0) for place in plan.schedules[0].stage_rank))
    return [tuple(range(start, stop)) for start, stop in zip([0, *end_modules], end_modules, strict=False)]


@pytest.mark.parametrize(("text", "model"), [SHARDED[0], TENSOR[2], PIPELINES[3], PAIRS[3]])
def test_another_seed_is_another_run_and_equal_too(team: WorkerPool, text: str, model: str) -> None:
    assert expected(model, "adamw", 0).losses != expected(model, "adamw", 7).losses
    found = run(team, make_plan(text, model=model), seed=7)
    assert max(rank.largest for rank in found) < TOLERANCE


def test_sgd_detects_gradients_of_the_wrong_size(team: WorkerPool) -> None:
    found = run(team, make_plan("tp=2,dp=2,zero_stage=1", optimizer="sgd"))
    assert max(rank.largest for rank in found) < TOLERANCE


@pytest.mark.parametrize(("text", "model"), sample_of(HALF, HALF[:5]))
def test_bf16_with_fp32_reduction_stays_close(team: WorkerPool, text: str, model: str) -> None:
    found = run(team, make_plan(text, model=model, dtype="bf16"))
    largest = max(rank.loss for rank in found)
    assert 1e-6 < largest < HALF_TOLERANCE  # the run is not in fp32
    assert max(rank.norm for rank in found) < HALF_TOLERANCE


@pytest.mark.parametrize(("text", "model"), sample_of(HALF, HALF[:5]))
def test_in_bf16_weights_and_sums_are_stored_in_fp32(team: WorkerPool, text: str, model: str) -> None:
    plan = make_plan(text, model=model, dtype="bf16")
    devices = plan.cluster.devices
    assert team.run(devices, precision, plan, None) == [(True, True)] * devices


def test_a_mutant_that_reduces_in_bf16_is_caught(team: WorkerPool) -> None:
    """With one reduction a step: a sum of several in fp32 may have more digits than bf16."""
    text, model = HALF[0]
    plan = make_plan(text, model=model, dtype="bf16")
    found = team.run(plan.cluster.devices, precision, plan, "gradients are added up in bf16")
    assert found == [(True, False)] * plan.cluster.devices


BROKEN = [
    ("no sum over tensor ranks", "tp=2,sequence_parallel=true,micro_batch_size=4", "gpt"),
    ("no tie", "pp=2,schedule=1f1b", "gpt"),
    ("no tie", "pp=2,schedule=zb_v,vpp=2,micro_batch_size=1", "gpt"),
    ("gradients averaged over data ranks", "dp=2,zero_stage=1,micro_batch_size=2", "llama"),
    ("no clipping", "dp=2", "llama"),
    ("loss over half of the batch", "pp=2,schedule=1f1b", "llama"),
    ("all replicas take the same rows", "dp=2", "llama"),
    ("positions twice as far", "tp=2,micro_batch_size=4", "llama"),
    ("keys stay where they are", "cp=2,micro_batch_size=4", "llama"),
    ("parts of the sequence one after the other", "cp=2,micro_batch_size=4", "llama"),
    ("heads are not exchanged back", "cp=2,cp_kind=all_to_all,micro_batch_size=4", "gpt"),
    ("all tensor ranks take the first key-value head", "tp=4,micro_batch_size=4", "llama"),
    ("tensor ranks keep their inputs' gradients", "tp=2,sequence_parallel=false,micro_batch_size=4", "llama"),
    ("tensor ranks keep their inputs' gradients", "tp=2,sequence_parallel=true,micro_batch_size=4", "gpt"),
    (
        "replicas take partial sums for whole ones",
        "tp=2,dp=2,sequence_parallel=true,micro_batch_size=2",
        "gpt",
    ),
    ("tokens stay in the order of their senders", "dp=2,ep=2,micro_batch_size=2", "mixtral"),
    ("parts of experts are not added up", "tp=2,etp=2,micro_batch_size=4", "mixtral"),
    (
        "tensor ranks keep their tokens' gradients",
        "tp=2,ep=2,sequence_parallel=false,micro_batch_size=4",
        "mixtral",
    ),
    ("replicas of experts are not added up", "dp=4,ep=2", "mixtral"),
    ("groups of replicas are not added up", "dp=4,zero_stage=3,dp_shard=2,micro_batch_size=1", "llama"),
    ("passes of weights are lost", "pp=2,schedule=zb_h1,micro_batch_size=1", "gpt"),
    ("updates stay on the host", "dp=2,offload=optimizer", "llama"),
    ("updates stay on the host", "dp=2,zero_stage=3,offload=optimizer,micro_batch_size=2", "llama"),
    ("gradients stay on the device", "dp=2,zero_stage=1,offload=optimizer", "llama"),
    ("activations are used before they are back", "dp=2,offload=activations", "llama"),
    ("all views of memory are its first", "dp=2,offload=activations", "llama"),
    ("all tensor ranks have the slopes of the first heads", "tp=2,micro_batch_size=4", "bloom"),
    (
        "latents of a part of the tokens train their projections alone",
        "tp=2,sequence_parallel=true,micro_batch_size=4",
        "deepseek_v3",
    ),
    (
        "tensor ranks keep their inputs' gradients",
        "tp=2,sequence_parallel=false,micro_batch_size=4",
        "deepseek_v3",
    ),
    ("every part of an expert adds its bias", "tp=2,etp=2,micro_batch_size=4", "gpt_oss"),
]


@pytest.mark.parametrize(("mutant", "text", "model"), BROKEN)
def test_a_broken_mutant_is_caught(team: WorkerPool, mutant: str, text: str, model: str) -> None:
    found = run(team, make_plan(text, model=model), broken=mutant)
    assert max(rank.largest for rank in found) > 100 * TOLERANCE


SPLIT = "pp=2,schedule=zb_h1,micro_batch_size=2"
UNEVEN = "pp=2,schedule=1f1b,micro_batch_size=1,first_stage_layers=1,last_stage_layers=3"


STRAYING = [
    ("nothing is computed again", "recompute=full,recompute_layers=1,dp=2,zero_stage=3", ["passes"]),
    ("nothing is computed again", "recompute=selective,dp=2", ["passes"]),
    ("both halves compute again each time", f"recompute=full,recompute_layers=1,{SPLIT}", ["passes"]),
    ("all stages have as many layers", UNEVEN, ["layers", "passes"]),
    ("nothing goes to the host", "dp=2,offload=both", ["offload"]),
    ("another order of actions", "pp=2,schedule=1f1b,micro_batch_size=1", ["order"]),
]


@pytest.mark.parametrize(("mutant", "text", "reported"), STRAYING)
def test_a_disobedient_mutant_is_caught(
    team: WorkerPool, mutant: str, text: str, reported: list[str]
) -> None:
    """Its numbers are right: only what the ranks executed shows the mutant."""
    plan = make_plan(text)
    found = run(team, plan, broken=mutant)
    assert max(rank.largest for rank in found) < TOLERANCE
    assert strayed(plan, found) == reported


def test_every_mutant_is_tried() -> None:
    assert {mutant for mutant, _, _ in BROKEN} == set(MUTANTS)
    assert {mutant for mutant, _, _ in STRAYING} == set(ALIKE)
