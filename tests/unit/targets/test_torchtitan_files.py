"""The files of an export to TorchTitan: a Python module and, for some schedules, a CSV. (In tests/targets
TorchTitan itself reads them.)"""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.targets.small_plans import GPT2, LLAMA, MIXTRAL, small_plan, with_fields

from shardwise.errors import ConfigError
from shardwise.plans import Plan, plan_hash
from shardwise.schedule import SPLIT_NAMES
from shardwise.strategy import PROFILES
from shardwise.targets import EXPORTERS
from shardwise.targets.torchtitan import CSV, FILE, torchtitan_files

UNTIED = MIXTRAL | {"tie_word_embeddings": False}

LLAMA_31 = LLAMA | {
    "rope_scaling": {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip


def module_of(plan: Plan) -> ast.Module:
    return ast.parse(torchtitan_files(plan)[FILE])


def said(tree: ast.AST, name: str) -> list[Any]:
    """The values of all keyword arguments of this name, as Python reads them."""
    return [
        ast.literal_eval(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == name
    ]


def parts_of(plan: Plan) -> list[list[str]]:
    """What the function `parts` of the module gives."""
    (function,) = [
        node
        for node in ast.walk(module_of(plan))
        if isinstance(node, ast.FunctionDef) and node.name == "parts"
    ]
    names: dict[str, Any] = {}
    exec(compile(ast.Module([function], []), FILE, "exec"), names)  # noqa: S102 - as TorchTitan runs it
    parts: list[list[str]] = names["parts"]()
    return parts


def test_a_plan_in_the_words_of_torchtitan() -> None:
    """4 ranks of pp x 2 of dp: 32 rows are 16 of each replica, 8 micro-batches of 2."""
    plan = small_plan(LLAMA, "pp=4,dp=2,zero_stage=3,micro_batch_size=2,first_stage_layers=2")
    module = module_of(plan)
    expected = {
        "local_batch_size": 16, "global_batch_size": 32, "seq_len": 1024, "mixed_precision_param": "bfloat16",
        "data_parallel_replicate_degree": 1, "data_parallel_shard_degree": 2, "tensor_parallel_degree": 1,
        "fsdp_reshard_after_forward": "always", "pipeline_parallel_degree": 4, "expert_parallel_degree": 1,
        "pipeline_parallel_schedule": "1F1B", "pipeline_parallel_schedule_csv": "",
        "pipeline_parallel_microbatch_size": 2, "enable_sequence_parallel": False,
        "disable_cuda_graphs": True, "vocab_size": 4096, "n_kv_heads": 4, "hidden_dim": 1408,
    }  # fmt: skip
    assert {name: said(module, name) for name in expected} == {
        name: [value] for name, value in expected.items()
    }


def test_stages_are_lists_of_modules() -> None:
    """10 layers: 2 on the first of 4 stages, 3 on the last, and 2 and 3 between them."""
    plan = small_plan(LLAMA, "pp=4,dp=2,first_stage_layers=2,last_stage_layers=3")
    assert parts_of(plan) == [
        ["tok_embeddings", "layers.0", "layers.1"],
        ["layers.2", "layers.3"],
        ["layers.4", "layers.5", "layers.6"],
        ["layers.7", "layers.8", "layers.9", "norm", "lm_head"],
    ]
    bare = small_plan(LLAMA, "pp=4,dp=2,first_stage_layers=0,last_stage_layers=0")
    assert (parts_of(bare)[0], parts_of(bare)[-1]) == (["tok_embeddings"], ["norm", "lm_head"])


@pytest.mark.parametrize(
    ("text", "replicas", "shard", "policy"),
    [
        ("dp=8", 8, 1, "never"),
        ("dp=8,zero_stage=2", 1, 8, "never"),
        ("dp=8,zero_stage=3", 1, 8, "always"),
        ("dp=8,zero_stage=2,dp_shard=4", 2, 4, "never"),
        ("dp=8,zero_stage=3,dp_shard=2", 4, 2, "always"),
    ],
)
def test_zero_stages(text: str, replicas: int, shard: int, policy: str) -> None:
    module = module_of(small_plan(LLAMA, text))
    assert said(module, "data_parallel_replicate_degree") == [replicas]
    assert said(module, "data_parallel_shard_degree") == [shard]
    assert said(module, "fsdp_reshard_after_forward") == [policy]


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_h2"])
def test_schedules_without_a_name_are_a_file(schedule: str) -> None:
    """Two ranks, 16 micro-batches: a forward pass, its input gradient and its weight gradient of each."""
    files = torchtitan_files(small_plan(LLAMA, f"pp=2,dp=2,schedule={schedule}", cluster="1x4xH100-SXM"))
    assert sorted(files) == [CSV, FILE]
    rows = [line.split(",") for line in files[CSV].splitlines()]
    assert [len(row) for row in rows] == [3 * 16, 3 * 16]
    assert rows[0][0] == "0F0" and rows[1][0] == "1F0"
    assert sorted(rows[1]) == sorted(f"1{kind}{index}" for kind in "FIW" for index in range(16))
    assert '"PipelineScheduleSingle"' in files[FILE] and f'with_name("{CSV}")' in files[FILE]


@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        ("1f1b", "1F1B"),
        ("gpipe", "GPipe"),
        ("interleaved_1f1b", "Interleaved1F1B"),
        ("zb_v", "ZBVZeroBubble"),
        ("dualpipe_v", "DualPipeV"),
    ],
)
def test_other_schedules_have_a_name(schedule: str, name: str) -> None:
    files = torchtitan_files(small_plan(LLAMA, f"pp=2,dp=4,schedule={schedule}"))
    assert list(files) == [FILE]
    assert said(ast.parse(files[FILE]), "pipeline_parallel_schedule") == [name]


def test_recomputation_of_some_layers_is_a_policy_of_the_module() -> None:
    """10 layers on 2 stages of 5: with 5 recomputed, all are."""
    some = torchtitan_files(small_plan(LLAMA, "pp=2,dp=4,recompute=full,recompute_layers=3"))[FILE]
    all_of_them = torchtitan_files(small_plan(LLAMA, "pp=2,dp=4,recompute=full,recompute_layers=5"))[FILE]
    none = torchtitan_files(small_plan(LLAMA, "pp=2,dp=4"))[FILE]
    assert "class FirstLayersAC(FullAC)" in some and "FirstLayersAC.Config(layers=3)" in some
    assert "FirstLayersAC" not in all_of_them and "activation_checkpoint=FullAC.Config()" in all_of_them
    assert "activation_checkpoint=None" in none


def test_layers_are_compiled_where_the_prediction_assumes_it() -> None:
    """Not where the backward pass is split: compiled layers have one backward pass."""
    for schedule in ("1f1b", "zb_h1", "dualpipe_v"):
        plan = small_plan(LLAMA, f"pp=2,dp=4,schedule={schedule}")
        fused, eager = (
            replace(plan, job=replace(plan.job, profile=PROFILES[name]))
            for name in ("torchtitan-0.3", "megatron-2024")
        )
        assert said(module_of(fused), "enable") == [schedule not in SPLIT_NAMES]
        assert said(module_of(eager), "enable") == [False]


def test_experts_and_rotary_scaling() -> None:
    routed = module_of(small_plan(UNTIED, "ep=4,tp=2,dp=4,etp=1,zero_stage=2,sequence_parallel=true"))
    assert said(routed, "expert_parallel_degree") == [4] and set(said(routed, "num_experts")) == {8}
    assert said(routed, "route_norm") == [True] and set(said(routed, "top_k")) == {2}
    scaled = module_of(small_plan(LLAMA_31))
    assert said(scaled, "scaling") == ["llama"] and said(scaled, "scaling_factor") == [32.0]
    assert said(scaled, "high_freq_factor") == [2.0]


def test_the_head_of_the_file_describes_it() -> None:
    plan = small_plan(LLAMA, "tp=2,dp=4", cluster="1x8xH100-SXM")
    text = torchtitan_files(plan)[FILE]
    assert text.startswith(
        "# Written by shardwise export for the target torchtitan-0.3 (TorchTitan 0.3).\n"
        f"# Plan: {plan_hash(plan)}\n# Predicted step time: "
    )
    assert "# torchrun --standalone --nproc-per-node 8 -m -- torchtitan.train --module torchtitan_0_3" in text
    # Data and paths are not part of a plan.
    assert '        # hf_assets_path="assets/hf/MODEL",\n' in text
    assert {"hf_assets_path", "dataloader"}.isdisjoint(
        node.arg for node in ast.walk(ast.parse(text)) if isinstance(node, ast.keyword)
    )


REFUSED: dict[str, tuple[dict[str, Any], str, dict[str, Any], str]] = {
    # A model, a strategy, changed fields of it, and the refused key.
    "Ulysses": (LLAMA, "dp=4,cp=2,cp_kind=all_to_all,zero_stage=2", {}, "best.strategy.cp_kind"),
    "shards of a part of the context-parallel ranks": (
        LLAMA, "dp=2,cp=4,zero_stage=2", {"param_shard": 1, "grad_shard": 2, "optim_shard": 2},
        "best.strategy.optim_shard",
    ),
    "an empty stage with cp": (
        LLAMA, "pp=2,cp=2,dp=2,zero_stage=2,first_stage_layers=10", {}, "best.strategy.last_stage_layers",
    ),
    "ZeRO-1": (LLAMA, "dp=8,zero_stage=1", {}, "best.strategy.grad_shard"),
    "parameters over fewer ranks": (
        LLAMA, "dp=8,zero_stage=3", {"param_shard": 4}, "best.strategy.param_shard",
    ),
    "offload": (LLAMA, "dp=8,zero_stage=2,offload=optimizer", {}, "best.strategy.offload"),
    "selective": (LLAMA, "dp=8,recompute=selective", {}, "best.strategy.recompute"),
    "order": (LLAMA, "dp=4,pp=2", {"axis_order": "tp-cp-pp-dp"}, "best.strategy.axis_order"),
    "more tp than key-value heads": (LLAMA, "tp=8", {}, "best.strategy.tp"),
    "a vocabulary that tp does not divide": (
        LLAMA | {"vocab_size": 4095}, "tp=2,dp=4", {}, "best.strategy.tp",
    ),
    "a tied output in a pipeline": (MIXTRAL, "pp=2,dp=4,zero_stage=2", {}, "best.strategy.pp"),
    "expert tensors": (UNTIED, "tp=2,dp=4,ep=2,etp=2,zero_stage=2", {}, "best.strategy.etp"),
    "whole experts on ranks of tp": (UNTIED, "tp=2,dp=4,etp=1,zero_stage=2", {}, "best.strategy.etp"),
    "experts with HSDP": (UNTIED, "dp=8,ep=2,zero_stage=2,dp_shard=4", {}, "best.strategy.optim_shard"),
    "1F1B of two chunks": (LLAMA, "pp=2,dp=4,vpp=2", {"schedule": "1f1b"}, "best.strategy.schedule"),
    "a V of one chunk": (LLAMA, "pp=2,dp=4", {"schedule": "zb_v"}, "best.strategy.schedule"),
    "too few micro-batches": (
        LLAMA, "pp=8,vpp=1,schedule=gpipe", {"schedule": "zb_v", "vpp": 2, "micro_batch_size": 8},
        "best.strategy.schedule",
    ),
    "a batch that does not divide": (
        LLAMA, "dp=8", {"micro_batch_size": 3}, "best.strategy.micro_batch_size",
    ),
    "layers lost": (LLAMA, "pp=2,dp=4", {"first_stage_layers": 4}, "best.strategy.first_stage_layers"),
    "an empty stage": (
        LLAMA, "pp=4,dp=2", {"first_stage_layers": 5, "last_stage_layers": 5},
        "best.strategy.first_stage_layers",
    ),
    "no layers recomputed": (LLAMA, "dp=8", {"recompute": "full"}, "best.strategy.recompute_layers"),
    "a part of the shards": (
        LLAMA, "dp=8,zero_stage=2", {"optim_shard": 3, "grad_shard": 3}, "best.strategy.optim_shard",
    ),
    "experts of a dense model": (LLAMA, "dp=8", {"ep": 2}, "best.strategy.ep"),
    "experts that do not divide": (UNTIED, "dp=8,ep=8,zero_stage=2", {"ep": 16}, "best.strategy.ep"),
    "sequence parallelism alone": (
        LLAMA, "dp=8", {"sequence_parallel": True}, "best.strategy.sequence_parallel",
    ),
    "devices": (LLAMA, "dp=8", {"dp": 4}, "cluster"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_torchtitan_cannot_say_is_refused_by_name(name: str) -> None:
    config, text, changes, key = REFUSED[name]
    with pytest.raises(ConfigError) as refused:
        torchtitan_files(with_fields(small_plan(config, text), **changes))
    assert refused.value.key == key


REFUSED_MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "family": (GPT2, "model.config.model_type"),
    "dropout": (LLAMA | {"attention_dropout": 0.1}, "model.config.attention_dropout"),
    "activation": (LLAMA | {"hidden_act": "gelu"}, "model.config.hidden_act"),
    "window": (LLAMA | {"model_type": "mistral", "sliding_window": 512}, "model.config.sliding_window"),
    "no number": (LLAMA | {"initializer_range": float("inf")}, "model.config.initializer_range"),
    "biases": (LLAMA | {"attention_bias": True}, "model.config.attention_bias"),
    "MLP biases": (LLAMA | {"mlp_bias": True}, "model.config.mlp_bias"),
    "scaling": (
        LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "model.config.rope_scaling",
    ),
    "scaling of halves": (
        LLAMA_31 | {"model_type": "qwen3", "head_dim": 64}, "model.config.rope_scaling",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_MODELS)
def test_models_that_torchtitan_computes_otherwise_are_refused(name: str) -> None:
    config, key = REFUSED_MODELS[name]
    plan = small_plan(config)
    with pytest.raises(ConfigError) as refused:
        EXPORTERS["torchtitan-0.3"].check_model(plan.model, plan.job.seq_len)
    assert refused.value.key == key


@pytest.mark.parametrize("job", [{"dtype": "fp16"}, {"optimizer": "sgd"}])
def test_other_jobs_are_refused(job: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        torchtitan_files(small_plan(LLAMA, "", **job))
    assert refused.value.key == f"job.{next(iter(job))}"


def test_a_window_of_the_whole_sequence_is_none() -> None:
    assert torchtitan_files(small_plan(LLAMA | {"model_type": "mistral", "sliding_window": 1024}))


def test_context_parallel_ranks_are_a_ring_that_shards_too() -> None:
    """2 replicas of 2 x 2 ranks: states over 4 ranks are 2 of data parallelism times 2 of the sequence."""
    plan = small_plan(LLAMA, "cp=2,dp=4,param_shard=4,grad_shard=4,optim_shard=4")
    text = torchtitan_files(plan)[FILE]
    for line in (
        "data_parallel_replicate_degree=2,",
        "data_parallel_shard_degree=2,",
        "context_parallel_degree=2,",
        "inner_attention=ScaledDotProductAttention.Config(),",
        'set_rotate_method("alltoall")',
    ):
        assert line in text
    alone = torchtitan_files(small_plan(LLAMA, "dp=8,zero_stage=3"))[FILE]
    assert "set_rotate_method" not in alone and 'inner_attention=get_attention_config("flex"),' in alone


def test_1f1b_with_fewer_micro_batches_than_stages_is_a_csv() -> None:
    """PyTorch's Schedule1F1B refuses it. 32 sequences on 4 replicas are 2 micro-batches of 4 sequences, for 2
    stages, or 1 of 8."""
    enough = small_plan(LLAMA, "pp=2,dp=4,zero_stage=2,micro_batch_size=4,schedule=1f1b")
    fewer = small_plan(LLAMA, "pp=2,dp=4,zero_stage=2,micro_batch_size=8,schedule=1f1b")
    assert list(torchtitan_files(enough)) == [FILE]
    files = torchtitan_files(fewer)
    assert files["schedule.csv"] == "0F0,0B0\n1F0,1B0\n"
    assert 'pipeline_parallel_schedule="PipelineScheduleSingle"' in files[FILE]
