"""Configs as people have them: under other names, one level down, with keys of other software."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.model import catalogue_entry, model_from_config, parameters

SMOLLM: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "vocab_size": 151936, "tie_word_embeddings": False, "use_qk_norm": True,
}  # fmt: skip
KIMI: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "vocab_size": 163840, "tie_word_embeddings": False, "num_nextn_predict_layers": 0,
}  # fmt: skip
MISTRAL: dict[str, Any] = {
    "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
    "max_position_embeddings": 131072, "sliding_window": None,
}  # fmt: skip
MISTRAL3: dict[str, Any] = {
    "model_type": "mistral3", "text_config": MISTRAL,
    "vision_config": {"model_type": "pixtral", "hidden_size": 1024, "num_hidden_layers": 24},
}  # fmt: skip
REWARD: dict[str, Any] = {
    "architectures": ["LlamaForSequenceClassification"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "num_labels": 1, "id2label": {"0": "LABEL_0"}, "tie_word_embeddings": False,
}  # fmt: skip
LATENT = 7168 * 1536 + 1536 + 1536 * 64 * 192 + 7168 * 576 + 512 + 512 * 64 * 256 + 64 * 128 * 7168
"""Attention of a layer of Kimi-K2: query and key-value projections with their norms, and the output."""


def refusal(config: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        model_from_config(config)
    return caught.value


def test_a_key_that_the_family_has_anyway_agrees() -> None:
    assert parameters(model_from_config(QWEN3_MOE)) == 30_532_122_624
    error = refusal(QWEN3_MOE | {"use_qk_norm": False})
    assert error.key == "use_qk_norm" and error.found == "false" and "true" in str(error.allowed)


def test_a_marker_of_other_software_is_ignored_with_a_note() -> None:
    # 49152 * 576 (tied) + 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 2 * 576) + 576
    model = model_from_config(SMOLLM | {"is_llama_config": True, "rope_interleaved": False})
    assert parameters(model) == 134_515_008
    assert model.notes == ("is_llama_config is ignored: a marker of other software",)


def test_kimi_k2_is_the_deepseek_v3_architecture() -> None:
    model = model_from_config(KIMI)
    expert = 3 * 7168 * 2048
    layers = 61 * (LATENT + 2 * 7168) + 3 * 7168 * 18432 + 60 * (385 * expert + 384 * 7168)
    assert parameters(model) == layers + 2 * 163840 * 7168 + 7168 == 1_026_408_209_408
    assert model.family == "deepseek_v3"


def test_architectures_name_the_family_of_an_unknown_type() -> None:
    model = model_from_config(KIMI | {"model_type": "my_own"})
    assert parameters(model) == 1_026_408_209_408
    assert model.notes == ("my_own is read as deepseek_v3, by architectures (DeepseekV3ForCausalLM)",)
    assert "did you mean deepseek_v3?" in refusal(KIMI | {"model_type": "deepsek_v3"}).message
    assert refusal(KIMI | {"model_type": "my_own", "architectures": ["MyOwnForCausalLM"]}).key == "model_type"


def test_a_nested_text_decoder_is_counted_alone_and_says_so() -> None:
    # The same sizes as a config of its own: 131072 * 5120 * 2 + 5120
    # + 40 * (5120 * 4096 * 2 + 5120 * 1024 * 2 + 3 * 5120 * 32768 + 2 * 5120)
    model = model_from_config(MISTRAL3)
    assert parameters(model) == parameters(model_from_config(MISTRAL)) == 23_572_403_200
    assert model.family == "mistral"
    alone, tied = model.notes
    assert (
        alone
        == "the text decoder alone is counted, without vision_config; --images 1 counts its vision tower"
    )
    assert tied.startswith("embeddings are counted as not tied, the default of the text decoder")


@pytest.mark.parametrize("key", ["llm_config", "language_config", "thinker_config"])
def test_nested_text_decoders_are_found_under_other_keys(key: str) -> None:
    nested = {"model_type": "my_vlm", key: MISTRAL}
    assert parameters(model_from_config(nested)) == 23_572_403_200
    twice = {"model_type": "my_omni", "thinker_config": nested | {"model_type": "my_thinker"}}
    assert parameters(model_from_config(twice)) == 23_572_403_200
    assert refusal(nested | {key: MISTRAL | {"hidden_size": 0}}).key == f"{key}.hidden_size"
    assert refusal(nested | {key: MISTRAL | {"model_type": "whale"}}).key == f"{key}.model_type"


def test_the_wrapper_names_the_family_of_a_nested_decoder_without_a_type() -> None:
    text = {key: value for key, value in MISTRAL.items() if key != "model_type"}
    assert parameters(model_from_config(MISTRAL3 | {"text_config": text})) == 23_572_403_200


def test_the_whole_config_decides_whether_embeddings_are_tied() -> None:
    tied = model_from_config(MISTRAL3 | {"tie_word_embeddings": True})
    assert parameters(tied) == 23_572_403_200 - 131072 * 5120


def test_a_head_of_labels_replaces_the_vocabulary() -> None:
    # 8,030,261,248 of llama-3.1-8b, without 128256 * 4096 of its head, with one label of 4096.
    model = model_from_config(REWARD)
    assert parameters(model) == 8_030_261_248 - 128256 * 4096 + 4096 == 7_504_928_768
    assert model.special_parts == ("head of labels",)  # which targets refuse
    assert model.notes == ("LlamaForSequenceClassification: the head has 1 outputs, not the vocabulary",)
    tokens = REWARD | {"architectures": ["LlamaForTokenClassification"], "num_labels": 3}
    assert parameters(model_from_config(tokens)) == 8_030_261_248 - 128256 * 4096 + 3 * 4096 + 3
    named = {key: value for key, value in REWARD.items() if key != "num_labels"}
    assert parameters(model_from_config(named)) == 7_504_928_768


def test_a_head_that_is_not_known_is_refused() -> None:
    error = refusal(REWARD | {"architectures": ["LlamaForCausalLMEagle3"]})
    assert error.key == "architectures[0]" and "ForCausalLM" in str(error.allowed)


OTHER_CODE: dict[str, tuple[int, dict[str, Any]]] = {
    # Published counts; sizes of the configs on the Hugging Face Hub.
    "baichuan-7b": (
        7_000_559_616,
        {
            "model_type": "baichuan", "architectures": ["BaiChuanForCausalLM"], "hidden_size": 4096,
            "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
            "vocab_size": 64000, "tie_word_embeddings": False, "model_max_length": 4096,
        },
    ),
    "chatglm3-6b": (
        6_243_584_000,
        {
            "model_type": "chatglm", "architectures": ["ChatGLMModel"], "hidden_size": 4096,
            "ffn_hidden_size": 13696, "num_layers": 28, "num_attention_heads": 32, "kv_channels": 128,
            "padded_vocab_size": 65024, "add_qkv_bias": True, "add_bias_linear": False, "rmsnorm": True,
            "multi_query_attention": True, "multi_query_group_num": 2, "post_layer_norm": True,
            "seq_length": 8192, "tie_word_embeddings": False, "pre_seq_len": None,
        },
    ),
    "deepseek-moe-16b": (
        16_375_728_128,
        {
            "model_type": "deepseek", "architectures": ["DeepseekForCausalLM"], "hidden_size": 2048,
            "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64,
            "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
            "moe_layer_freq": 1, "vocab_size": 102400, "scoring_func": "softmax",
        },
    ),
    "internlm2-7b": (
        7_737_708_544,
        {
            "model_type": "internlm2", "architectures": ["InternLM2ForCausalLM"], "hidden_size": 4096,
            "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 92544, "bias": False, "attn_implementation": "eager",
        },
    ),
    "minicpm-2b": (
        2_724_880_896,
        {
            "model_type": "minicpm", "architectures": ["MiniCPMForCausalLM"], "hidden_size": 2304,
            "intermediate_size": 5760, "num_hidden_layers": 40, "num_attention_heads": 36,
            "num_key_value_heads": 36, "vocab_size": 122753, "scale_emb": 12, "dim_model_base": 256,
            "scale_depth": 1.4,
        },
    ),
    "qwen-7b": (
        7_721_324_544,
        {
            "model_type": "qwen", "architectures": ["QWenLMHeadModel"], "hidden_size": 4096,
            "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
            "kv_channels": 128, "vocab_size": 151936, "no_bias": True, "seq_length": 8192,
            "tie_word_embeddings": False, "rotary_emb_base": 10000, "emb_dropout_prob": 0.0,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_CODE)
def test_models_with_code_of_their_own_have_their_published_parameters(name: str) -> None:
    published, config = OTHER_CODE[name]
    assert parameters(model_from_config(config)) == published


def test_falcon_is_read_under_its_first_names() -> None:
    config = dict(catalogue_entry("falcon-40b").config)
    renamed = {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer", "num_kv_heads": "n_head_kv"}
    old = {renamed.get(key, key): value for key, value in config.items()}
    old = {key: value for key, value in old.items() if key != "new_decoder_architecture"}
    model = model_from_config(old | {"model_type": "RefinedWeb", "architectures": ["RWForCausalLM"]})
    assert parameters(model) == parameters(model_from_config(config))
    assert model.kinds == model_from_config(config).kinds


HUNYUAN: dict[str, Any] = {
    "model_type": "hunyuan_v1_moe", "architectures": ["HunYuanMoEV1ForCausalLM"], "hidden_size": 4096,
    "intermediate_size": 3072, "moe_intermediate_size": [3072] * 32, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "attention_head_dim": 128,
    "num_experts": 64, "moe_topk": [8] * 32, "num_shared_expert": [1] * 32, "vocab_size": 128167,
    "use_mla": False, "use_qk_norm": True, "use_mixed_mlp_moe": True, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "norm_type": "rms", "tie_word_embeddings": True, "cla_share_factor": 2,
}  # fmt: skip


def test_lists_of_equal_values_are_one_value() -> None:
    # 128167 * 4096 + 4096 + 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 128 + 2 * 4096
    # + 65 * 3 * 4096 * 3072 + 64 * 4096)
    assert parameters(model_from_config(HUNYUAN)) == 80_393_183_232
    error = refusal(HUNYUAN | {"moe_topk": [8] * 31 + [4]})
    assert error.key == "moe_topk" and "same(moe_topk)" in str(error.allowed)
    assert refusal(HUNYUAN | {"use_mla": True}).key == "use_mla"


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"transformers.js_config": {"dtype": "q4"}}, "transformers.js_config is ignored"),
        ({"max_position_embeddings": 2048, "num_key_value_heads": 3}, ""),
        ({"layernorm_epsilon": 1e-5, "pre_allocate_kv_cache": True}, ""),
        ({"mm_hidden_size": 1024, "mm_vision_tower": "clip"}, "the text decoder alone is counted"),
    ],
)
def test_keys_of_other_software_change_nothing(change: dict[str, Any], note: str) -> None:
    model = model_from_config(SMOLLM | change)
    assert parameters(model) == 134_515_008
    assert [text.startswith(note) for text in model.notes] == ([True] if note else [])


def test_a_key_with_the_default_of_its_class_is_ignored_with_a_note() -> None:
    config = {
        "model_type": "ernie4_5_moe", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000, "moe_num_experts": 4,
        "moe_k": 2, "moe_intermediate_size": 256,
    }  # fmt: skip
    plain = model_from_config(config)
    same = model_from_config(config | {"moe_norm_min": 1e-12})
    assert same.notes == ("moe_norm_min is ignored: 1e-12 is its default",) and plain.notes == ()
    assert same.kinds == plain.kinds
    error = refusal(config | {"moe_norm_min": 0.5})
    assert error.key == "moe_norm_min" and error.found == "0.5"
    assert error.allowed == "1e-12, the default, or no such key"
    assert "did you mean moe_num_shared_experts?" in refusal(config | {"moe_num_shared_expert": 8}).message


def test_an_error_about_a_default_names_the_key_that_is_missing() -> None:
    config = QWEN3_MOE | {"num_attention_heads": 30, "head_dim": 64}
    config = {key: value for key, value in config.items() if key != "num_key_value_heads"}
    assert refusal(config).key == "num_key_value_heads"  # 4 by default, which does not divide 30
