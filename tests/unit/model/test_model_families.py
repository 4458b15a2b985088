"""Every family file: its sizes are known, and its counts equal those that Transformers builds.

A new family takes one file in `src/shardwise/model/data/families` and one line in `CHANGED`.
"""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.config_defaults import OUT, document, lines
from benchmarks.model_families import PAGE, causal_types, page, text_type
from tests.unit.model.test_model_parameters_oracle import torch, transformers

from shardwise.errors import ConfigError
from shardwise.model import model_from_config, parameters
from shardwise.model.family_files import config_class, model_types, not_planned, transformers_data

CHANGED: dict[str, dict[str, object]] = {
    "afmoe": {
        "num_hidden_layers": 5,
        "num_dense_layers": 2,
        "num_shared_experts": 1,
        "num_key_value_heads": 4,
    },
    "apertus": {"num_hidden_layers": 5, "num_key_value_heads": 8, "attention_bias": True},
    "arcee": {"num_hidden_layers": 5, "num_key_value_heads": 8, "attention_bias": True, "mlp_bias": True},
    "aria_text": {
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "moe_num_experts": 5,
        "moe_num_shared_experts": 1,
        "attention_bias": True,
    },
    "biogpt": {"num_hidden_layers": 5, "tie_word_embeddings": False, "max_position_embeddings": 500},
    "bloom": {"hidden_size": 96, "n_layer": 3, "n_head": 6},
    "codegen": {"n_layer": 5, "n_inner": 1000},
    "cohere": {"num_hidden_layers": 5, "num_key_value_heads": 8, "use_qk_norm": True, "attention_bias": True},
    "cohere2": {
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "cohere2_moe": {
        "num_hidden_layers": 5,
        "first_k_dense_replace": 2,
        "num_shared_experts": 2,
        "prefix_dense_intermediate_size": 5000,
    },
    "ctrl": {"n_layer": 5, "dff": 1000},
    "cwm": {"num_hidden_layers": 5, "num_key_value_heads": 4, "mlp_bias": True},
    "dbrx": {"n_layers": 3},
    "deepseek_v2": {"num_hidden_layers": 3, "n_routed_experts": 12, "first_k_dense_replace": 1},
    "deepseek_v32": {
        "num_hidden_layers": 4,
        "n_routed_experts": 16,
        "index_n_heads": 8,
        "index_head_dim": 64,
    },
    "glm_moe_dsa": {
        "num_hidden_layers": 4,
        "n_routed_experts": 16,
        "indexer_types": ["full", "shared", "full", "shared"],
    },
    "deepseek_v3": {"num_hidden_layers": 4, "n_routed_experts": 16, "attention_bias": True},
    "dots1": {
        "num_hidden_layers": 5,
        "first_k_dense_replace": 2,
        "attention_bias": True,
        "num_key_value_heads": 8,
    },
    "ernie4_5": {"num_hidden_layers": 5, "use_bias": True, "head_dim": 64},
    "ernie4_5_moe": {
        "num_hidden_layers": 9,
        "moe_layer_start_index": 2,
        "moe_layer_end_index": 6,
        "moe_layer_interval": 2,
        "moe_num_shared_experts": 1,
    },
    "exaone4": {"num_hidden_layers": 5, "num_key_value_heads": 8, "tie_word_embeddings": True},
    "exaone_moe": {
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "first_k_dense_replace": 2,
        "num_shared_experts": 2,
    },
    "falcon": {"num_hidden_layers": 3, "new_decoder_architecture": True, "num_kv_heads": 71},
    "flex_olmo": {"num_hidden_layers": 5, "num_key_value_heads": 8, "attention_bias": True, "num_experts": 5},
    "flint": {"num_hidden_layers": 5, "mlp_only_layers": [1], "num_experts": 10},
    "gemma": {"num_hidden_layers": 5, "attention_bias": True, "num_key_value_heads": 4},
    "gemma2": {"num_hidden_layers": 3, "attention_bias": True},
    "gemma3_text": {"num_hidden_layers": 3, "tie_word_embeddings": False},
    "gemma4_text": {
        "num_hidden_layers": 8,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
        "global_head_dim": 384,
    },
    "gemma4_unified_text": {"num_hidden_layers": 7, "attention_bias": True},
    "glm": {"num_hidden_layers": 5, "attention_bias": False, "num_key_value_heads": 4},
    "glm4": {"num_hidden_layers": 5, "attention_bias": False, "num_key_value_heads": 4},
    "glm4_moe": {
        "num_hidden_layers": 5,
        "use_qk_norm": True,
        "attention_bias": True,
        "first_k_dense_replace": 2,
        "n_shared_experts": 2,
        "head_dim": 128,
    },
    "glm4_moe_lite": {
        "num_hidden_layers": 5,
        "n_routed_experts": 8,
        "q_lora_rank": None,
        "attention_bias": True,
    },
    "gpt-sw3": {"n_inner": 1000},
    "gpt2": {"n_inner": 1000, "tie_word_embeddings": False},
    "gpt_bigcode": {"n_layer": 5, "multi_query": False, "n_inner": 1000},
    "gpt_neo": {
        "num_layers": 4,
        "attention_types": [[["global", "local"], 2]],
        "intermediate_size": 1000,
        "tie_word_embeddings": False,
    },
    "gpt_neox": {"num_hidden_layers": 3, "attention_bias": False},
    "gpt_oss": {"num_hidden_layers": 3, "num_local_experts": 5, "attention_bias": False},
    "gptj": {"n_layer": 5, "n_inner": 1000},
    "granite": {"num_hidden_layers": 5, "num_key_value_heads": 8, "attention_bias": True, "mlp_bias": True},
    "granite_swa": {
        "num_hidden_layers": 5,
        "num_key_value_heads": 5,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "granitemoe": {
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "attention_bias": True,
        "num_local_experts": 5,
    },
    "granitemoe_swa": {"num_hidden_layers": 5, "shared_intermediate_size": 1000},
    "granitemoeshared": {
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "shared_intermediate_size": 1000,
        "num_local_experts": 5,
    },
    "helium": {"num_hidden_layers": 5, "attention_bias": True, "mlp_bias": True},
    "hunyuan_v1_dense": {"num_hidden_layers": 5, "num_key_value_heads": 8, "attention_bias": True},
    "hunyuan_v1_moe": {"num_hidden_layers": 5, "num_key_value_heads": 8, "num_experts": 4},
    "hy_v3": {"num_hidden_layers": 3, "num_key_value_heads": 8, "num_shared_experts": 2},
    "hyperclovax": {
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "use_post_norm": False,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "internlm3": {"num_hidden_layers": 5, "num_key_value_heads": 8, "attention_bias": True, "mlp_bias": True},
    "iquestcoder": {"num_hidden_layers": 5, "num_key_value_heads": 4, "attention_bias": True},
    "jais2": {"num_hidden_layers": 5, "attention_bias": False, "mlp_bias": False},
    "kolibri1": {"num_hidden_layers": 5, "num_experts": 10},
    "laguna": {
        "num_hidden_layers": 5,
        "num_attention_heads_per_layer": [48, 32, 32, 48, 48],
        "gating": "per-element",
    },
    "llama": {"num_hidden_layers": 3, "num_key_value_heads": 8, "mlp_bias": True},
    "llama4_text": {
        "num_hidden_layers": 5,
        "interleave_moe_layer_step": 2,
        "num_local_experts": 5,
        "attention_bias": True,
    },
    "mellum": {
        "num_hidden_layers": 5,
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse"],
        "attention_bias": True,
    },
    "minicpm3": {"num_hidden_layers": 5, "attention_bias": True, "mlp_bias": True},
    "minimax_m2": {
        "num_hidden_layers": 5,
        "num_experts_per_tok": 2,
        "num_local_experts": 5,
        "num_key_value_heads": 4,
    },
    "ministral": {"num_hidden_layers": 3, "num_key_value_heads": 8},
    "ministral3": {"num_hidden_layers": 5, "num_key_value_heads": 4},
    "mistral": {"num_hidden_layers": 3, "head_dim": 96},
    "mixtral": {"num_hidden_layers": 3, "num_local_experts": 5},
    "mpt": {"n_layers": 5, "d_model": 1024},
    "nanochat": {"num_hidden_layers": 5, "num_key_value_heads": 3, "attention_bias": True},
    "nemotron": {"num_hidden_layers": 5, "attention_bias": True, "mlp_bias": True, "head_dim": 64},
    "olmo": {"num_hidden_layers": 5, "num_key_value_heads": 8, "attention_bias": True},
    "olmo2": {"num_hidden_layers": 5, "num_key_value_heads": 8, "attention_bias": True},
    "olmo3": {"num_hidden_layers": 5, "num_key_value_heads": 8, "tie_word_embeddings": True},
    "olmoe": {
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "num_experts": 5,
    },
    "openai-gpt": {"n_layer": 5, "n_positions": 100},
    "opt": {"word_embed_proj_dim": 512, "do_layer_norm_before": False},
    "persimmon": {"num_hidden_layers": 5, "qk_layernorm": False},
    "phi": {"num_hidden_layers": 5, "num_key_value_heads": 8, "qk_layernorm": True},
    "phi3": {"num_hidden_layers": 3, "num_key_value_heads": 4},
    "phimoe": {
        "num_hidden_layers": 5,
        "num_key_value_heads": 4,
        "attention_bias": True,
        "lm_head_bias": True,
        "num_local_experts": 5,
    },
    "qwen2": {"num_hidden_layers": 3, "num_key_value_heads": 8},
    "qwen2_moe": {
        "num_hidden_layers": 6,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "shared_expert_intermediate_size": 1000,
        "qkv_bias": False,
    },
    "qwen3": {"num_hidden_layers": 3, "attention_bias": True, "head_dim": 64},
    "qwen3_moe": {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "seed_oss": {
        "num_hidden_layers": 5,
        "attention_bias": False,
        "attention_out_bias": True,
        "mlp_bias": True,
    },
    "smollm3": {
        "num_hidden_layers": 5,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "solar_open": {
        "num_hidden_layers": 5,
        "attention_bias": True,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
    },
    "stablelm": {
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "use_qkv_bias": True,
        "use_parallel_residual": True,
        "qk_layernorm": True,
    },
    "starcoder2": {
        "num_hidden_layers": 5,
        "use_bias": False,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "vaultgemma": {"num_hidden_layers": 5, "attention_bias": True},
    "xglm": {"num_layers": 5, "ffn_dim": 1000},
    "youtu": {"num_hidden_layers": 5, "q_lora_rank": None, "attention_bias": True},
    "bamba": {
        "num_hidden_layers": 5,
        "attn_layer_indices": [1, 3],
        "mamba_n_groups": 2,
        "mamba_proj_bias": True,
        "attention_bias": True,
    },
    "falcon_h1": {
        "num_hidden_layers": 3,
        "mamba_d_ssm": 2048,
        "mamba_n_groups": 2,
        "mamba_rms_norm": True,
        "attention_bias": True,
    },
    "falcon_mamba": {"num_hidden_layers": 3, "state_size": 8, "use_bias": True},
    "granitemoehybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "num_local_experts": 0,
        "mamba_n_groups": 4,
    },
    "jamba": {
        "num_hidden_layers": 6,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "mamba_dt_rank": 100,
    },
    "kimi_linear": {
        "num_hidden_layers": 6,
        "linear_head_dim": 64,
        "num_local_experts": 8,
        "n_shared_experts": 2,
    },
    "lfm2": {
        "num_hidden_layers": 4,
        "full_attn_idxs": [1, 3],
        "conv_bias": True,
        "block_ffn_dim_multiplier": 1.3,
    },
    "lfm2_moe": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "num_dense_layers": 1,
        "num_experts": 8,
    },
    "mamba": {"num_hidden_layers": 3, "expand": 3, "use_conv_bias": False, "time_step_rank": 50},
    "mamba2": {"num_hidden_layers": 3, "n_groups": 1, "use_bias": True, "state_size": 64},
    "minimax": {
        "num_hidden_layers": 5,
        "head_dim": 64,
        "layer_types": [
            "linear_attention",
            "linear_attention",
            "linear_attention",
            "linear_attention",
            "full_attention",
        ],
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "mlp", "attention", "moe", "mamba"],
        "use_bias": True,
        "mlp_bias": True,
        "n_groups": 4,
    },
    "olmo_hybrid": {
        "num_hidden_layers": 6,
        "linear_num_key_heads": 10,
        "linear_num_value_heads": 20,
        "linear_key_head_dim": 96,
    },
    "qwen3_5_moe_text": {"num_hidden_layers": 6, "num_experts": 8, "linear_num_value_heads": 64},
    "qwen3_5_text": {"num_hidden_layers": 6, "linear_conv_kernel_dim": 3, "attention_bias": True},
    "qwen3_next": {
        "num_hidden_layers": 6,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [2],
        "linear_key_head_dim": 64,
    },
}
"""One change of the default config for each `model_type`, of keys that decide sizes."""

NEEDED: dict[str, dict[str, object]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 4, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 3000, "moe_num_experts": 6, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 2, "hidden_size": 4096},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "gemma4_unified_text": {"use_bidirectional_attention": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": 2},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}
"""Keys whose defaults are null or do not make a model."""

WRAPPERS = (
    "aria", "gemma3", "glm4v", "glm4v_moe", "glm_ocr", "internvl", "kimi_k25", "llama4", "llava", "mistral3",
    "paddleocr_vl",    "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe",
)  # fmt: skip
"""Multimodal models of Transformers whose text decoders are compared."""

NOT_ALONE = {
    "emu3_text_model", "glm4v_moe_text", "glm4v_text", "glm_ocr_text", "granite4_vision_text",
    "granite_docling_text", "hunyuan_vl_text", "paddleocr_vl_text", "qwen2_5_omni_text", "qwen2_5_vl_text",
    "qwen2_vl_text", "qwen3_omni_moe_text", "qwen3_vl_moe_text", "qwen3_vl_text",
}  # fmt: skip
"""Text decoders that Transformers builds as parts of multimodal models only."""

NESTED = {"gemma3", "llama4", "qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe"}
"""Types whose sizes are in the config of their text decoder; tests of nested decoders cover them."""


def made(model_type: str, **keys: object) -> Any:
    """The config of Transformers with these keys, and those that its class leaves null."""
    return transformers.AutoConfig.for_model(model_type, **(NEEDED.get(model_type, {}) | keys))


def built_parameters(config: Any) -> int:
    """Elements of the distinct parameters of the model that Transformers builds, without allocating them.

    Parameters without a gradient (biases that balance experts) are not trained and not counted.
    """
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in built.parameters() if parameter.requires_grad)


def counted(config: Any) -> int:
    """Our count for the config as Transformers writes it to a file."""
    return parameters(model_from_config({**config.to_dict(), "model_type": config.model_type}))


@pytest.mark.parametrize("model_type", CHANGED)
def test_default_config_has_the_parameters_of_transformers(model_type: str) -> None:
    config = made(model_type)
    assert counted(config) == built_parameters(config)


@pytest.mark.parametrize("model_type", CHANGED)
def test_changed_config_has_the_parameters_of_transformers(model_type: str) -> None:
    changed = made(model_type, **CHANGED[model_type])
    assert counted(changed) == built_parameters(changed) != counted(made(model_type))


@pytest.mark.parametrize("model_type", [name for name in model_types() if config_class(name) is not None])
def test_every_family_of_transformers_is_compared(model_type: str) -> None:
    assert (model_type in CHANGED) + (model_type in NESTED) + (model_type in NOT_ALONE) == 1


@pytest.mark.parametrize("model_type", WRAPPERS)
def test_text_decoders_have_the_parameters_of_transformers(model_type: str) -> None:
    config = made(model_type)
    with torch.device("meta"):
        built = transformers.AutoModelForImageTextToText.from_config(config)
    text = [
        parameter.numel()
        for name, parameter in built.named_parameters()
        if "language_model" in name or "lm_head" in name
    ]
    model = model_from_config({**config.to_dict(), "architectures": [type(built).__name__]})
    assert parameters(model) == sum(text)
    assert any(note.startswith("the text decoder alone is counted") for note in model.notes)


def test_generated_defaults_are_those_of_the_installed_version() -> None:
    assert OUT.read_text("utf-8").startswith('{\n  "transformers": "5.')
    if transformers.__version__ == transformers_data()["transformers"]:
        assert OUT.read_text("utf-8") == lines(document())


def test_every_causal_type_is_planned_or_has_a_reason() -> None:
    for model_type in causal_types():
        planned = text_type(model_type) is not None
        assert planned != (model_type in not_planned()), model_type
    assert set(not_planned()) <= set(causal_types())


GEMMA4_DRAFT = "embeddings of each layer, or heads of several sizes"


def test_a_type_that_is_not_planned_says_why() -> None:
    for model_type, config, reason in (
        ("zamba2", {"hidden_size": 4096}, "layers that share their weights"),
        ("rwkv", {"hidden_size": 2048}, "recurrent layers of other kinds"),
        ("gemma4_assistant", {"text_config": {"model_type": "gemma4_text"}}, GEMMA4_DRAFT),
        ("t5", {"d_model": 512, "is_encoder_decoder": True}, "an encoder-decoder"),
        ("my_own", {"d_model": 512, "is_encoder_decoder": True}, "an encoder-decoder"),
    ):
        with pytest.raises(ConfigError) as caught:
            model_from_config({"model_type": model_type, "num_hidden_layers": 2, **config})
        assert caught.value.key == "model_type" and caught.value.message == f"cannot be planned: {reason}"


def test_the_page_of_families_has_the_tables_of_the_files() -> None:
    written = PAGE.read_text("utf-8")
    assert written == page(written)
    assert "| `smollm3` | SmolLM3: like Llama" in written and "`mamba2`" in written
