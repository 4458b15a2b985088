"""Families that FSDP2 and DeepSpeed run: bytes that the layers of Transformers save per token, the class of
the layers, and the names of their matrices.

The models are small and on the CPU; the layers are wide enough for scores of routers and tables of angles to
count little. Dropout is off, and no layer has a window: PyTorch's kernel on a CPU computes scores with one.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from tests.targets.counting import SavedBytes, count_calls

from shardwise.cluster import load_cluster
from shardwise.cost import bind
from shardwise.cost.layers import grid_cost
from shardwise.model import Model, model_from_config
from shardwise.strategy import PROFILES, Job, StrategyTable, complete, target_of
from shardwise.targets.hugging_face import _SEPARATE, ADAPTED_MODULES, LAYER_CLASSES

LENGTH = 64
WITHIN = 0.02

SMALL: dict[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 64, "vocab_size": 256, "max_position_embeddings": 1024, "sliding_window": 1024,
    "intermediate_size": 3584, "n_inner": 3584, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "use_sliding_window": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "hidden_dropout": 0.0, "hidden_dropout_prob": 0.0, "attention_dropout": 0.0,
    "attention_probs_dropout_prob": 0.0, "dropout": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0,
    "layer_dropout": 0.0, "embd_dropout": 0.0, "resid_dropout": 0.0, "residual_dropout": 0.0,
}  # fmt: skip
"""Values of keys, for the families that have them."""

LATENT: dict[str, Any] = {
    "num_key_value_heads": 16, "q_lora_rank": 512, "kv_lora_rank": 256, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32, "v_head_dim": 64, "head_dim": 32,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT | {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "deepseek_v3": LATENT,
    "dots1": {"n_shared_experts": 2},
    "gemma3": {"model_type": "gemma3_text"},
}

LINEAR = {"layer_types": ["full_attention", "linear_attention", "full_attention"]}
OWN |= {
    "bamba": {"attn_layer_indices": [0, 2], "mamba_n_heads": 32},
    "granitemoehybrid": {"layer_types": ["attention", "mamba", "attention"], "mamba_n_heads": 32},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 0,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
    },
    "kimi_linear": LATENT | LINEAR,
    "lfm2": {"full_attn_idxs": [0, 2], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["full_attention", "conv", "full_attention"]},
    "mamba2": {"num_heads": 32},
    "minimax": LINEAR,
    "nemotron_h": {"layers_block_type": ["moe", "mlp", "attention"]},
    "olmo_hybrid": LINEAR,
    "qwen3_5": LINEAR | {"model_type": "qwen3_5_text"},
    "qwen3_5_moe": LINEAR | {"model_type": "qwen3_5_moe_text"},
    "qwen3_next": LINEAR,
}

OTHERWISE = {
    "deepseek_v2": "PyTorch's kernel on a CPU computes scores where values are narrower than keys",
    "deepseek_v3": "the same",
    "falcon": "PyTorch's kernel on a CPU does not share keys and values, and saves scores in fp32",
    "gemma2": "no sdpa with soft caps",
    "gpt_oss": "no sdpa with sinks",
    "falcon_mamba": "kernels of state-space layers need a GPU",
    "kimi_linear": "values are narrower than keys",
    "mamba": "kernels of state-space layers need a GPU",
    "mamba2": "kernels of state-space layers need a GPU",
    "opt": "ReLU saves its output, which the next product reads: a quarter less than predicted",
}
"""Families whose layers cannot be counted on a CPU as they are on a GPU, or save less."""

FAMILIES = sorted({*target_of("fsdp2").families} | {*target_of("deepspeed-0.19").families})


def config_of(family: str) -> Any:
    import transformers as package
    from tests.unit.model.test_model_families import NEEDED

    transformers: Any = package
    own = dict(OWN.get(family, {}))
    model_type = own.pop("model_type", family)
    whole = transformers.AutoConfig.for_model(model_type, **NEEDED.get(model_type, {}))
    known = {*whole.to_dict(), *type(whole).attribute_map}
    small = {key: value for key, value in SMALL.items() if key in known}
    return transformers.AutoConfig.for_model(
        model_type, **NEEDED.get(model_type, {}) | small | own, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )


def layers_of(built: Any) -> Any:
    import torch

    lists = (each for each in built.modules() if isinstance(each, torch.nn.ModuleList) and len(each) == 3)
    return next(lists)


def predicted(model: Model) -> list[float]:
    """Bytes that each layer saves per token under modules of Transformers."""
    job = Job(
        seq_len=LENGTH, global_batch_size=1, dtype="bf16", expert_imbalance=1.0,
        profile=PROFILES["fsdp2-eager"],
    )  # fmt: skip
    problem = bind(model, load_cluster("1xH100-SXM"), job)
    experts = None if model.experts is None else model.experts.experts
    row = complete(
        {"micro_batch_size": 1}, devices=1, layers=model.layers, global_batch_size=1, experts=experts
    )
    kinds = grid_cost(problem, StrategyTable.of([row])).kinds
    return [float(kinds[kind].saved_bytes[0]) / LENGTH for kind in model.pattern]


def counted(config: Any) -> list[float]:
    """Bytes that each layer but the first saves per token; the first has the tables of angles of all."""
    import torch
    import transformers as package

    transformers: Any = package
    config._attn_implementation = "sdpa"
    built = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).train()
    saved, totals = SavedBytes(built), list[int]()
    for layer in layers_of(built):
        count_calls(layer, saved, totals)
    built(torch.randint(0, 256, (1, LENGTH)), use_cache=False)
    return [(after - before) / LENGTH for before, after in pairwise(totals)]


def model_of(config: Any) -> Model:
    return model_from_config({**config.to_dict(), "model_type": config.model_type})


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in OTHERWISE])
def test_layers_save_what_is_predicted(family: str) -> None:
    """Of layers with a mixer that needs a kernel, nothing: without it, Transformers computes step by step."""
    config = config_of(family)
    model = model_of(config)
    names = [model.kinds[kind].name for kind in model.pattern]
    several = zip(names[1:], predicted(model)[1:], counted(config), strict=True)
    compared = [(ours, theirs) for name, ours, theirs in several if not _needs_a_kernel(name)]
    assert compared
    for ours, theirs in compared:
        assert abs(ours / theirs - 1.0) < WITHIN, f"counted {theirs:.0f} bytes per token, ours {ours:.0f}"


def _needs_a_kernel(name: str) -> bool:
    return any(word in name for word in ("mamba", "delta", "lightning"))


@pytest.mark.parametrize("family", FAMILIES)
def test_classes_of_layers_and_names_of_matrices(family: str) -> None:
    import torch
    import transformers as package

    transformers: Any = package
    config = config_of(family)
    model = model_of(config)
    assert model.family == family
    with torch.device("meta"):
        layers = layers_of(transformers.AutoModelForCausalLM.from_config(config))
    assert {type(layer).__name__ for layer in layers} == {*LAYER_CLASSES[family].split(",")}
    matrices = torch.nn.Linear, transformers.pytorch_utils.Conv1D
    linear = {
        name.rpartition(".")[2]
        for layer in layers
        for name, module in layer.named_modules()
        if isinstance(module, matrices) or type(module).__name__.endswith("Linear")
    }
    known = set(ADAPTED_MODULES.get(family, _SEPARATE))
    if family in ("deepseek_v2", "deepseek_v3"):  # queries of low rank have two matrices instead of it
        known.remove("q_proj")
    if model.experts is None:
        assert known <= linear
    else:  # experts are parameters without modules; adapters are on attention
        assert {name for name in known if name.startswith(("q", "k", "v", "o"))} <= linear
