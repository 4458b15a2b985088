"""Parameter counts equal those that Transformers builds, exactly: the catalogue and every family's
variants.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from tests.unit.model.vision_configs import as_mapping, small_config

from shardwise.model import catalogue, catalogue_names, model_from_config, parameters
from shardwise.model import vision as vision_module
from shardwise.model.family_files import model_types
from shardwise.model.vision import vision_types

torch = pytest.importorskip("torch", reason="torch builds the models that the counts are compared with")
transformers = pytest.importorskip("transformers", reason="transformers builds the models to count")

LLAMA: dict[str, object] = {
    "vocab_size": 999,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
ROUTED: dict[str, object] = LLAMA | {"num_local_experts": 5, "num_experts_per_tok": 2}
QWEN_MOE: dict[str, object] = LLAMA | {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
DEEPSEEK: dict[str, object] = LLAMA | {
    "num_key_value_heads": 6,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
GPT2: dict[str, object] = {"vocab_size": 999, "n_embd": 96, "n_layer": 3, "n_head": 6, "n_positions": 64}
NEOX: dict[str, object] = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
OPT: dict[str, object] = {
    "vocab_size": 999,
    "hidden_size": 96,
    "ffn_dim": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
}
BLOOM: dict[str, object] = {"vocab_size": 999, "hidden_size": 96, "n_layer": 3, "n_head": 6}
FALCON: dict[str, object] = {
    "vocab_size": 999,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}

VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "gpt2": ("gpt2", GPT2),
    "gpt2-inner": ("gpt2", GPT2 | {"n_inner": 100}),
    "gpt2-untied": ("gpt2", GPT2 | {"tie_word_embeddings": False}),
    "neox": ("gpt_neox", NEOX),
    "neox-no-bias": ("gpt_neox", NEOX | {"attention_bias": False, "use_parallel_residual": False}),
    "neox-tied": ("gpt_neox", NEOX | {"tie_word_embeddings": True}),
    "opt": ("opt", OPT),
    "opt-post-norm": ("opt", OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 40}),
    "opt-no-bias": ("opt", OPT | {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    "opt-untied": ("opt", OPT | {"word_embed_proj_dim": 40, "tie_word_embeddings": False}),
    "opt-no-final-norm": ("opt", OPT | {"_remove_final_layer_norm": True}),
    "bloom": ("bloom", BLOOM),
    "falcon-multi-query": ("falcon", FALCON),
    "falcon-new": ("falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-new-one-norm": (
        "falcon",
        FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-sequential": ("falcon", FALCON | {"parallel_attn": False, "multi_query": False, "bias": True}),
    "falcon-alibi": ("falcon", FALCON | {"alibi": True, "ffn_hidden_size": 300}),
    "falcon-untied": ("falcon", FALCON | {"tie_word_embeddings": False}),
    "llama": ("llama", LLAMA),
    "llama-biases": ("llama", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", LLAMA | {"head_dim": 20, "tie_word_embeddings": True}),
    "mistral": ("mistral", LLAMA | {"sliding_window": 32}),
    "mistral-head-dim": ("mistral", LLAMA | {"head_dim": 20, "sliding_window": None}),
    "phi3": ("phi3", LLAMA | {"pad_token_id": 0, "sliding_window": 31}),
    "qwen2": ("qwen2", LLAMA | {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", LLAMA | {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("qwen3", LLAMA | {"head_dim": 20}),
    "qwen3-bias": ("qwen3", LLAMA | {"attention_bias": True}),
    "gemma2": ("gemma2", LLAMA | {"head_dim": 20}),
    "gemma2-bias": ("gemma2", LLAMA | {"attention_bias": True, "tie_word_embeddings": False}),
    "gemma3": ("gemma3_text", LLAMA | {"head_dim": 20}),
    "gemma3-defaults": ("gemma3_text", {"hidden_size": 64, "intermediate_size": 99, "num_hidden_layers": 7}),
    "mixtral": ("mixtral", ROUTED),
    "qwen3-moe": ("qwen3_moe", QWEN_MOE | {"head_dim": 20}),
    "qwen3-moe-sparse": (
        "qwen3_moe",
        QWEN_MOE | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "deepseek-v2": ("deepseek_v2", DEEPSEEK),
    "deepseek-v2-full-queries": (
        "deepseek_v2",
        DEEPSEEK | {"q_lora_rank": None, "attention_bias": True, "mlp_bias": True},
    ),
    "deepseek-v3": ("deepseek_v3", DEEPSEEK | {"num_nextn_predict_layers": 1}),
    "deepseek-v3-bias": ("deepseek_v3", DEEPSEEK | {"attention_bias": True, "first_k_dense_replace": 0}),
    "gpt-oss": ("gpt_oss", ROUTED | {"head_dim": 20}),
    "gpt-oss-no-bias": ("gpt_oss", ROUTED | {"head_dim": 20, "attention_bias": False}),
}


def built_parameters(config: Mapping[str, object]) -> int:
    """Elements of the distinct parameters that Transformers builds from `config`, without allocating them."""
    text = config.get("text_config", config)
    assert isinstance(text, dict)
    keys = {key: value for key, value in text.items() if key not in ("model_type", "architectures")}
    made: Any = transformers.AutoConfig.for_model(text["model_type"], **keys)
    if "vision_config" in text:  # sizes of the decoder are among those of the whole model
        return sum(each.numel() for name, each in whole_parameters(made) if ".visual." not in name)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(made)
    return sum(parameter.numel() for parameter in built.parameters())


def whole_parameters(config: Any) -> list[tuple[str, Any]]:
    """The parameters, by name, of the model with a vision tower that Transformers builds from `config`."""
    with torch.device("meta"):
        built = transformers.AutoModelForImageTextToText.from_config(config)
    built.tie_weights()
    return list(built.named_parameters())


@pytest.mark.parametrize("name", catalogue_names())
def test_catalogue_counts_equal_transformers(name: str) -> None:
    config = catalogue()[name].config
    assert parameters(model_from_config(config)) == built_parameters(config)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_counts_equal_transformers(variant: str) -> None:
    family, keys = VARIANTS[variant]
    config = {"model_type": family, **keys}
    assert parameters(model_from_config(config)) == built_parameters(config)


def test_every_family_has_a_variant() -> None:
    covered = {family for family, _ in VARIANTS.values()}
    assert covered | {"gemma3"} <= set(model_types())  # gemma3 contains gemma3_text, and is in the catalogue


@pytest.mark.slow
@pytest.mark.parametrize("model_type", vision_types())
def test_parameters_of_vision_towers(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(model_type)
    elements = sum(each.numel() for _, each in whole_parameters(config))
    given = {**as_mapping(config), "images": {"count": 1, "height": 112, "width": 112}}
    assert parameters(model_from_config(given)) == elements
    # The counterpart: with a step of the projector left out there are fewer.
    projectors = vision_module._data("projectors")
    steps = vision_module._entry("projectors", model_type)["steps"]
    monkeypatch.setattr(
        vision_module,
        "_data",
        lambda name, own=vision_module._data: (
            {**projectors, model_type: {**projectors[model_type], "steps": steps[1:]}}
            if name == "projectors"
            else own(name)
        ),
    )
    assert parameters(model_from_config(given)) < elements
