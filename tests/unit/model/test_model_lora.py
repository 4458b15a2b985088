"""Adapters of a model: their parameters, operators and saved tensors by hand, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.model import (
    Model,
    adapters_text,
    load_model,
    lora_from_config,
    lora_of_text,
    model_flop_per_token,
    model_from_config,
    parameters,
    trained_parameters,
    with_lora,
)
from shardwise.model.counts import trained_matmul_parameters
from shardwise.operators import Matmul, is_trained

TINY: dict[str, Any] = {
    "layers": 2, "hidden": 64, "ffn": 160, "heads": 4, "kv_heads": 2, "vocab": 100, "gated": True,
    "norm": "rmsnorm", "positions": "rope", "bias": False, "tied": False, "dropout": 0.0, "seq_len": 128,
}  # fmt: skip


def tiny(adapters: str, **changes: object) -> Model:
    return with_lora(model_from_config({**TINY, **changes}, name="tiny"), lora_of_text(adapters))


def saved(model: Model) -> list[str]:
    return [tensor.name for operator in model.kinds[0].operators for tensor in operator.saved]


def test_parameters_are_those_of_peft() -> None:
    """r (k + n) for a matrix [k, n]: 4 (64 + 64) for q and o, 4 (64 + 32) for k and v, in 2 layers."""
    plain, model = model_from_config(TINY), tiny("r=4,targets=q_proj+k_proj+v_proj+o_proj")
    assert trained_parameters(model) == 2 * (2 * 4 * 128 + 2 * 4 * 96) == 3584
    assert parameters(model) == parameters(plain) + 3584
    assert trained_parameters(plain) == parameters(plain)
    # What `print_trainable_parameters` of PEFT prints for these.
    llama = with_lora(load_model("llama-3.1-8b"), lora_of_text("r=16,targets=q_proj+k_proj+v_proj+o_proj"))
    assert trained_parameters(llama) == 13_631_488
    every = with_lora(load_model("llama-3.1-8b"), lora_of_text("r=16,targets=all-linear"))
    assert trained_parameters(every) == 41_943_040
    assert adapters_text(every) == "LoRA rank 16 on all-linear: 41.9 million trained of 8.07 billion"
    # GPT-2 124M, c_attn [768, 2304]: 12 layers x 8 (768 + 2304).
    assert trained_parameters(with_lora(load_model("gpt2"), lora_of_text("8"))) == 12 * 8 * (768 + 2304)


def test_a_joined_matrix_has_one_adapter() -> None:
    """One A for q, k and v: 4 (64 + 64 + 32 + 32) per layer, less than 4 (3 x 64 + 128) of three."""
    assert trained_parameters(tiny("r=4,targets=linear_qkv")) == 2 * 4 * (64 + 128)
    assert trained_parameters(tiny("r=4,targets=q_proj+k_proj+v_proj")) == 2 * 4 * (3 * 64 + 128)
    assert trained_parameters(tiny("r=4,targets=gate_up_proj")) == 2 * 4 * (64 + 320)


def test_only_adapters_are_trained() -> None:
    model = tiny("r=4,targets=q_proj+down_proj")
    every = [*model.embedding, *model.kinds[0].operators, *model.head]
    assert {one.name for one in every if one.weights and is_trained(one)} == {
        "attention.q_lora_a", "attention.q_lora_b", "mlp.down_lora_a", "mlp.down_lora_b",
    }  # fmt: skip
    products = {one.name: (one.k.size, one.n.size) for one in every if isinstance(one, Matmul)}
    assert products["attention.q_lora_a"] == (64, 4) and products["attention.q_lora_b"] == (4, 64)
    assert products["mlp.down_lora_a"] == (160, 4) and products["mlp.down_lora_b"] == (4, 64)


def test_flop_have_no_weight_gradients_of_frozen_matrices() -> None:
    """4 per frozen element and 6 per trained one, plus 3 times the forward attention."""
    plain, model = model_from_config(TINY), tiny("r=4,targets=q_proj")
    trained = trained_matmul_parameters(model)
    assert trained == 2 * 4 * 128
    frozen = trained_matmul_parameters(plain)
    assert model_flop_per_token(plain, 128) - model_flop_per_token(model, 128) == 2 * frozen - 6 * trained


def test_inputs_of_frozen_matrices_are_not_saved() -> None:
    """The inputs of norms, attention and activation stay; those of matrices with adapters are saved once."""
    needed = ["layer.input", "attention.q", "attention.kv", "attention.core.output",
              "attention.core.log_sum_exp", "mlp.norm.input", "mlp.up.output"]  # fmt: skip
    assert sorted(saved(tiny("r=4,targets=o_proj"))) == sorted([*needed, "attention.out_lora_a.output"])
    inner = ["attention.k_lora_a.output", "attention.v_lora_a.output", "attention.norm.output"]
    assert sorted(saved(tiny("r=4,targets=k_proj+v_proj"))) == sorted([*needed, *inner])
    inner = ["mlp.gate_lora_a.output", "mlp.norm.output", "mlp.down_lora_a.output", "mlp.activation.output"]
    assert sorted(saved(tiny("r=4,targets=gate_proj+down_proj"))) == sorted([*needed, *inner])
    (head,) = (one for one in tiny("4").head if one.name == "head.output")
    assert head.saved == ()


def test_a_head_of_labels_is_trained() -> None:
    """PEFT saves the module of a classifier too."""
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 160,
        "num_attention_heads": 4, "vocab_size": 100, "architectures": ["LlamaForSequenceClassification"],
        "id2label": {"0": "a", "1": "b", "2": "c"},
    }  # fmt: skip
    model = with_lora(model_from_config(config), lora_of_text("4"))
    assert trained_parameters(model) == 2 * 2 * 4 * 128 + 3 * 64


def test_the_config_rebuilds_the_model() -> None:
    model = tiny("r=4,targets=q_proj")
    assert model.config["lora"] == {"r": 4, "target_modules": ["q_proj"]}
    assert model_from_config(model.config) == model
    assert with_lora(model, lora_of_text("r=2,targets=o_proj")).config["lora"] == {
        "r": 2, "target_modules": ["o_proj"],
    }  # fmt: skip


def test_attention_of_experts_and_latent_attention() -> None:
    """Mixtral 8x7B, q [4096, 4096] and v [4096, 1024]; DeepSeek-V2, q_b [1536, 128 x 192]."""
    experts = with_lora(load_model("mixtral-8x7b"), lora_of_text("16"))
    assert trained_parameters(experts) == 32 * 16 * (4096 + 4096 + 4096 + 1024)
    latent = with_lora(load_model("deepseek-v2"), lora_of_text("r=8,targets=q_b_proj"))
    assert trained_parameters(latent) == 60 * 8 * (1536 + 128 * 192)


def test_keys_of_peft() -> None:
    lora = lora_from_config({
        "peft_type": "LORA", "r": 8, "target_modules": ["v_proj", "q_proj"], "lora_alpha": 32,
        "lora_dropout": 0.05, "bias": "none", "modules_to_save": None, "use_rslora": True, "rank_pattern": {},
        "base_model_name_or_path": "meta-llama/Llama-3.1-8B", "task_type": "CAUSAL_LM",
    })  # fmt: skip
    assert (lora.r, lora.target_modules, lora.dropout) == (8, ("q_proj", "v_proj"), 0.05)
    model = with_lora(model_from_config(TINY), lora)
    assert "lora_dropout 0.05" in model.notes[-1]


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"r": 8, "modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": 8, "bias": "all"}, "bias"),
        ({"r": 8, "use_dora": True}, "use_dora"),
        ({"r": 8, "rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"r": 8, "layers_to_transform": [0]}, "layers_to_transform"),
        ({"r": 8, "peft_type": "IA3"}, "peft_type"),
        ({"r": True}, "r"),
        ({}, "r"),
        ({"r": 8, "target_modules": r".*\.(q|v)_proj"}, "target_modules"),
        ({"r": 8, "target_modules": [1]}, "target_modules"),
        ({"r": 8, "lora_dropout": 2}, "lora_dropout"),
    ],
)
def test_other_keys_are_refused_by_name(config: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        lora_from_config(config)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("name", "adapters", "words"),
    [
        ("mixtral-8x7b", "r=8,targets=gate_proj", "is a module of experts"),
        ("qwen3-30b-a3b", "r=8,targets=all-linear", "is a module of experts"),
        ("deepseek-v3", "8", "is not supported with multi-token prediction"),
        ("llama-3.1-8b", "r=8,targets=kv_b_proj", "is no module of this model"),
        ("llama-3.1-8b", "r=8,targets=q_proj+qkv_proj", "name a matrix twice"),
        ("gpt2", "r=8,targets=gate_proj", "is no module of this model"),
    ],
)
def test_targets_that_a_model_cannot_have(name: str, adapters: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        with_lora(load_model(name), lora_of_text(adapters))


@pytest.mark.parametrize("text", ["", "x", "r=", "r=16,r=3", "16,targets", "targets=q_proj", "-1", "r=1.5"])
def test_texts_that_are_no_adapters(text: str) -> None:
    with pytest.raises(ConfigError):
        lora_of_text(text)
