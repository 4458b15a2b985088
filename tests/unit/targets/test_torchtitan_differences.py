"""TorchTitan's own view of a plan compared with the plan: each wrong value is found by its field."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from tests.unit.targets.small_plans import LLAMA, MIXTRAL, small_plan, with_fields

from shardwise.plans import Plan
from shardwise.schedule import generate
from shardwise.targets.torchtitan_read_back import titan_read_back

NORM = {"normalized_shape": 256, "eps": 1e-05, "elementwise_affine": True}

ROPE = {
    "class": "CosSinRoPE.Config", "dim": 32, "max_seq_len": 2048, "theta": 1e6, "scaling": "none",
    "scaling_factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip

LAYER: dict[str, Any] = {
    "norms": [NORM, NORM],
    "attention": {"dim": 256, "n_heads": 8, "n_kv_heads": 2, "head_dim": 32},
    "qkv_bias": False, "output_bias": False, "qk_norm": None, "inner_attention": "FlexAttention.Config",
    "rope": ROPE, "ffn": None,
    "moe": {
        "num_experts": [8, 8, 8, 8], "top_k": [2, 2], "hidden_dim": 512, "dims": [256, 256],
        "router": {
            "num_experts": 8, "num_expert_groups": None, "num_limited_groups": None, "top_k": 2,
            "score_func": "softmax", "route_norm": True, "route_scale": 1.0,
        },
        "router_bias": False, "shared": None, "dispatcher": "AllToAllTokenDispatcher.Config",
    },
}  # fmt: skip

STAGES = {0: [0, 1], 1: [2, 3], 2: [4, 5], 3: [6, 7]}


def _part(stage: int) -> dict[str, Any]:
    ends = {0: ["tok_embeddings"], 3: ["norm", "lm_head"]}
    return {
        "stage": stage, "layers": STAGES[stage], "modules": ends.get(stage, []),
        "recomputed": STAGES[stage][:1], "is_selective": False, "reshards": [False],
        "offloads": ["OffloadPolicy"], "dtypes": ["torch.bfloat16"], "reduce_dtypes": ["torch.float32"],
        "weight_dtypes": ["torch.float32"],
    }  # fmt: skip


def requested() -> Plan:
    """8 layers of 8 experts on 8 devices: pp 2 x vpp 2 chunks of 2 layers, dp 4."""
    untied = MIXTRAL | {"tie_word_embeddings": False}
    return small_plan(untied, "pp=2,vpp=2,ep=4,zero_stage=2,recompute=full,recompute_layers=1")


def answer() -> dict[str, Any]:
    """What the reader answers for the files of `requested()`: 32 rows, 8 of each replica."""
    orders = [list(map(str, row)) for row in generate("interleaved_1f1b", pp=2, microbatches=8, vpp=2).ranks]
    return {
        "config": {
            "training": {
                "seq_len": 1024, "global_batch_size": 32, "local_batch_size": 8, "disable_cuda_graphs": True,
            },
            "parallelism": {
                "pipeline_parallel_microbatch_size": 1, "enable_sequence_parallel": False,
                "context_parallel_load_balancer": "headtail",
            },
            "compile": {
                "enable": False, "components": ["model", "loss"], "enable_async_tensor_parallel": False,
            },
            "optimizer": {"param_groups": [{"optimizer_name": "AdamW"}], "implementation": "fused"},
            "loss": {"class": "CrossEntropyLoss.Config", "global_vocab_size": 1024},
        },
        "model": {
            "name": "qwen3", "dim": 256, "vocab_size": 1024, "embeddings": [1024, 256],
            "output": [256, 1024, False], "norm": NORM, "enable_weight_tying": False, "init_std": 0.02,
            "layers": [deepcopy(LAYER) for _ in range(8)],
        },
        "degrees": {"pp": 2, "dp_replicate": 1, "fsdp": 4, "cp": 1, "tp": 1, "ep": 4, "batch": 4},
        "groups": {"pp": [0, 4], "batch": [0, 1, 2, 3], "cp": [0], "tp": [0]},
        "parts": [[_part(0), _part(2)], [_part(1), _part(3)]],
        "schedule": "ScheduleInterleaved1F1B", "microbatches": 8, "orders": orders, "ring": "ALL_GATHER",
    }  # fmt: skip


def changed(path: str, value: Any) -> dict[str, Any]:
    """The answer with the value at a path such as `parts.0.1.stage`."""
    found = answer()
    *parents, last = (int(name) if name.isdigit() else name for name in path.split("."))
    place: Any = found
    for name in parents:
        place = place[name]
    assert place[last] != value
    place[last] = value
    return found


def test_equal_values_are_counted() -> None:
    found = titan_read_back(requested(), answer())
    assert found.differences == () and found.values > 50


def test_a_refusal_is_a_difference() -> None:
    (found,) = titan_read_back(requested(), {"error": "ValueError: no"}).differences
    assert (found.field, found.read) == ("files", "ValueError: no")


CHANGED: dict[str, tuple[Any, str]] = {
    "config.training.seq_len": (512, "job.seq_len"),
    "config.training.global_batch_size": (64, "job.global_batch_size"),
    "config.training.local_batch_size": (4, "micro-batches"),
    "config.training.disable_cuda_graphs": (False, "CUDA graphs"),
    "config.parallelism.pipeline_parallel_microbatch_size": (2, "strategy.micro_batch_size"),
    "config.compile.enable": (True, "compiled layers"),
    "config.compile.enable_async_tensor_parallel": (True, "async tensor parallelism"),
    "config.optimizer.implementation": ("fused_opt_states_bf16", "moments in 16 bits"),
    "config.optimizer.param_groups": (
        [{"optimizer_name": "AdamW"}, {"optimizer_name": "DistMuon"}], "job.optimizer",
    ),
    "config.loss.global_vocab_size": (2048, "loss"),
    "model.name": ("llama3", "model.module"),
    "model.embeddings": ([1024, 128], "model.dim"),
    "model.output": ([256, 1000, False], "model.vocab_size"),
    "model.enable_weight_tying": (True, "model.enable_weight_tying"),
    "model.init_std": (0.01, "model.init_std"),
    "model.layers.3.attention.n_heads": (4, "model.n_heads"),
    "model.layers.3.attention.dim": (512, "model.dim"),
    "model.layers.3.qkv_bias": (True, "model.qkv_bias"),
    "model.layers.3.output_bias": (True, "model.qkv_bias"),
    "model.layers.3.qk_norm": (NORM, "model.qk_norm"),
    "model.layers.3.inner_attention": ("VarlenAttention.Config", "attention"),
    "model.layers.3.rope": ({**ROPE, "class": "ComplexRoPE.Config"}, "attention"),
    "model.layers.3.norms": ([NORM, {**NORM, "eps": 1e-6}], "model.norm_eps"),
    "model.layers.0.rope": ({**ROPE, "theta": 1e4}, "model.theta"),
    "model.layers.1.moe.top_k": ([2, 3], "model.experts.top_k"),
    "model.layers.1.moe.hidden_dim": (256, "model.experts.hidden_dim"),
    "model.layers.1.moe.shared": ([[256, 512, False]] * 3, "model.experts.top_k"),
    "model.layers.1.moe.dispatcher": ("DeepEPTokenDispatcher.Config", "model.experts.top_k"),
    "model.layers.1.moe": (None, "model.experts.pattern"),
    "model.layers.1.ffn": (
        [[256, 512, False], [512, 256, False], [256, 512, False]], "model.ffn_hidden_dim",
    ),
    "degrees.tp": (2, "strategy.tp"),
    "degrees.cp": (2, "devices"),
    "degrees.ep": (2, "strategy.ep"),
    "degrees.batch": (8, "strategy.dp"),
    "degrees.fsdp": (2, "strategy.optim_shard"),
    "groups.batch": ([0, 2, 4, 6], "strategy.axis_order"),
    "parts.0.0.layers": ([0], "layers of stages"),
    "parts.0.0.modules": ([], "embedding"),
    "parts.1.1.modules": (["lm_head"], "output"),
    "parts.0.0.recomputed": ([0, 1], "strategy.recompute_layers"),
    "parts.0.0.is_selective": (True, "strategy.recompute"),
    "parts.0.0.reshards": ([True], "strategy.param_shard"),
    "parts.0.0.offloads": (["CPUOffloadPolicy"], "strategy.offload"),
    "parts.0.0.dtypes": (["torch.float32"], "job.dtype"),
    "parts.0.0.weight_dtypes": (["torch.bfloat16"], "job.dtype"),
    "parts.0.1.stage": (3, "strategy.schedule"),
    "schedule": ("Schedule1F1B", "strategy.schedule"),
    "microbatches": (16, "micro-batches"),
    "orders.0.0": ("0F1", "strategy.schedule"),
}  # fmt: skip


@pytest.mark.parametrize("path", CHANGED)
def test_a_wrong_value_is_found_by_its_field(path: str) -> None:
    value, field = CHANGED[path]
    found = titan_read_back(requested(), changed(path, value))
    assert field in {each.field for each in found.differences}


def test_micro_batches_that_a_schedule_cannot_have_differ() -> None:
    shaped = small_plan(LLAMA, "pp=2,dp=4,schedule=zb_v,zero_stage=2")
    found = titan_read_back(shaped, changed("microbatches", 2))
    assert "strategy.schedule" in {each.field for each in found.differences}


def test_pairs_that_overlap_are_two_actions() -> None:
    """PyTorch writes DualPipe-V's pairs as one action, and adds the reduction of gradients."""
    plan = requested()
    pairs = answer()
    row = pairs["orders"][0]
    place = next(i for i in range(8, len(row)) if "F" in row[i] and "B" in row[i + 1])
    pairs["orders"][0] = [
        *row[:place], f"({row[place]};{row[place + 1]})OVERLAP_F_B", *row[place + 2 :], "0REDUCE_GRAD",
    ]  # fmt: skip
    assert titan_read_back(plan, pairs).differences == ()


def test_a_ring_that_gathers_or_is_not_balanced_differs() -> None:
    """With two context-parallel ranks the answer has their way of sending, and the balance of their work."""
    for path, value in (
        ("ring", "ALL_GATHER"),
        ("config.parallelism.context_parallel_load_balancer", None),
    ):
        ring = {**changed("degrees.cp", 2), "ring": "ALL_TO_ALL"}
        plan = with_fields(requested(), cp=2)
        assert "context parallelism" not in {one.field for one in titan_read_back(plan, ring).differences}
        if path == "ring":
            ring["ring"] = value
        else:
            ring["config"]["parallelism"]["context_parallel_load_balancer"] = value
        assert "context parallelism" in {one.field for one in titan_read_back(plan, ring).differences}
