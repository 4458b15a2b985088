"""Model files that a user may write, and the error of every invalid one."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.model import catalogue, catalogue_names, load_model, model_from_config, parameters
from shardwise.model.family_files import model_types

EXAMPLE = Path(__file__).parents[3] / "examples" / "llama-3.1-70b"
LLAMA: dict[str, Any] = dict(catalogue()["llama-3.1-8b"].config)
DEEPSEEK: dict[str, Any] = dict(catalogue()["deepseek-v3"].config)
MEGATRON: dict[str, Any] = {"layers": 2, "hidden": 64, "ffn": 256, "heads": 4, "vocab": 100, "seq_len": 32}


def refusal(config: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        model_from_config(config)
    return caught.value


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


@pytest.mark.parametrize("name", catalogue_names())
def test_catalogue_models_rebuild_from_their_config(name: str) -> None:
    model = load_model(name)
    assert model.name == name
    embedded = json.loads(json.dumps(model.config))  # as in a plan file
    rebuilt = model_from_config(embedded)
    assert rebuilt == model and hash(rebuilt) == hash(model)
    assert catalogue()[name].source


def test_names_match_in_any_case() -> None:
    assert load_model("Llama-3.1-8B") == load_model("llama-3.1-8b")


def test_unknown_name_suggests_a_near_one() -> None:
    with pytest.raises(ConfigError) as caught:
        load_model("lama-3.1-70b")
    assert "did you mean llama-3.1-70b?" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_file_and_folder_are_the_same_model() -> None:
    model = load_model(str(EXAMPLE / "config.json"))
    assert model == load_model(str(EXAMPLE)) == load_model("llama-3.1-70b")


def test_models_travel_between_processes() -> None:
    model = load_model("deepseek-v3")
    assert pickle.loads(pickle.dumps(model)) == model  # noqa: S301  (our own bytes)


def test_dimensions_from_yaml(tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(
        "layers: 12\nhidden: 768\nffn: 3072\nheads: 12\nkv_heads: 12\nvocab: 50257\nseq_len: 1024\n"
    )
    model = load_model(str(file))
    assert model.name == "small"
    assert parameters(model) == parameters(load_model("gpt2"))
    file.write_text(file.read_text() + "name: mine\n")
    assert load_model(str(file)).name == "mine"
    assert model_from_config(model.config) == model


def test_dimensions_of_a_llama_and_a_mixture() -> None:
    llama = MEGATRON | {
        "layers": 32,
        "hidden": 4096,
        "ffn": 14336,
        "heads": 32,
        "kv_heads": 8,
        "vocab": 128256,
    }
    llama |= {
        "gated": True,
        "bias": False,
        "norm": "rmsnorm",
        "positions": "rope",
        "tied": False,
        "dropout": 0.0,
    }
    assert parameters(model_from_config(llama)) == parameters(load_model("llama-3.1-8b"))
    mixture = llama | {"vocab": 32000, "experts": 8, "top_k": 2}
    assert parameters(model_from_config(mixture)) == parameters(load_model("mixtral-8x7b"))
    assert model_from_config(mixture).kinds[0].operators == load_model("mixtral-8x7b").kinds[0].operators


def test_dimensions_with_shared_experts_and_leading_dense_layers() -> None:
    model = model_from_config(
        MEGATRON
        | {"experts": 4, "top_k": 2, "expert_ffn": 32, "shared_ffn": 48, "dense_layers": 1, "window": 16}
    )
    assert model.pattern == (0, 1)
    assert [kind.tensor_syncs for kind in model.kinds] == [2, 2]


@pytest.mark.parametrize("key", ["layers", "hidden", "ffn", "heads", "vocab", "seq_len"])
def test_dimensions_must_be_there(key: str) -> None:
    error = refusal(without(MEGATRON, key))
    assert error.key == key and "is missing" in error.message


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"layers": 0}, "layers"),
        ({"hidden": -4}, "hidden"),
        ({"heads": 5}, "heads"),
        ({"kv_heads": 3}, "kv_heads"),
        ({"experts": 4}, "top_k"),
        ({"experts": 4, "top_k": 5}, "top_k"),
        ({"experts": 4, "top_k": 1, "dense_layers": 3}, "dense_layers"),
        ({"top_k": 2}, "top_k"),  # without experts it has no meaning
        ({"norm": "batch"}, "norm"),
        ({"dropout": 1.5}, "dropout"),
        ({"vocab": "1e5"}, "vocab"),
        ({"gated": "no"}, "gated"),
        ({"window": 0}, "window"),
    ],
)
def test_wrong_dimensions_are_named(change: dict[str, Any], key: str) -> None:
    assert refusal(MEGATRON | change).key == key


def test_unknown_dimension_is_refused_with_a_suggestion() -> None:
    error = refusal(MEGATRON | {"kv_head": 2})
    assert error.key == "kv_head" and "did you mean kv_heads?" in error.message


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"hidden_size": float("nan")}, "hidden_size"),
        ({"hidden_size": 4096.5}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"vocab_size": "1e5"}, "vocab_size"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"num_attention_heads": 7}, "num_attention_heads"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"head_dim": 0}, "head_dim"),
        ({"model_type": "lama"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"moe_num_experts": 8}, "moe_num_experts"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"word_embed_proj_dim": 512}, "word_embed_proj_dim"),
        ({"n_inner": 100}, "n_inner"),
        ({"use_qk_norm": True}, "use_qk_norm"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"text_config": {"hidden_size": 3}}, "text_config"),
        ({"tie_word_embedings": True}, "tie_word_embedings"),
    ],
)
def test_wrong_llama_keys_are_named(change: dict[str, Any], key: str) -> None:
    assert refusal(LLAMA | change).key == key


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_experts_per_tok": 300}, "num_experts_per_tok"),
        ({"n_group": 7}, "n_group"),
        ({"topk_group": 9}, "topk_group"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"qk_head_dim": 100}, "qk_head_dim"),
        ({"first_k_dense_replace": 61}, "first_k_dense_replace"),
        ({"num_local_experts": 8}, "num_local_experts"),  # contradicts n_routed_experts
    ],
)
def test_wrong_deepseek_keys_are_named(change: dict[str, Any], key: str) -> None:
    assert refusal(DEEPSEEK | change).key == key


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
        "model_type",
    ],
)
def test_missing_llama_keys_are_named(key: str) -> None:
    error = refusal(without(LLAMA, key))
    assert error.key == key and "is missing" in error.message


def test_a_missing_latent_query_rank_does_not_mean_none() -> None:
    assert refusal(without(DEEPSEEK, "q_lora_rank")).key == "q_lora_rank"


def test_misspelt_key_is_suggested() -> None:
    error = refusal(without(LLAMA, "hidden_size") | {"hiden_size": 4096})
    assert "is hiden_size meant?" in error.message


def test_unknown_family_lists_the_families() -> None:
    error = refusal(LLAMA | {"model_type": "lama"})
    assert "did you mean llama?" in error.message
    allowed = str(error.allowed)
    assert f"one of {len(model_types())} types, such as llama, qwen3, " in allowed
    assert "docs/reference/model-families.md" in allowed


def test_absurd_products_are_refused() -> None:
    big = {"hidden_size": 10**7, "intermediate_size": 10**7, "num_hidden_layers": 10_000}
    assert "too large" in refusal(LLAMA | big | {"head_dim": 128}).message


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": None},
        {"rope_theta": 1.0, "rms_norm_eps": 1e-3, "initializer_range": 1.0},
        {"quantization_config": {"weight_block_size": [128, 128]}},
        {"num_labels": 3, "id2label": {"0": "x"}, "num_beams": 4},
        {"num_local_experts": None, "mamba_d_state": 0, "use_qk_norm": False, "pruned_heads": {}},
        {"max_position_embeddings": 10_485_760},
    ],
)
def test_keys_that_change_no_size_are_ignored(change: dict[str, Any]) -> None:
    changed = model_from_config(LLAMA | change)
    assert changed.kinds == model_from_config(LLAMA).kinds
    assert parameters(changed) == 8_030_261_248


def test_layer_types_are_read_strictly() -> None:
    config = dict(catalogue()["qwen3-8b"].config) | {"use_sliding_window": True, "sliding_window": 128}
    types = ["sliding_attention"] * 20 + ["full_attention"] * 16
    assert model_from_config(config | {"layer_types": types}).pattern == (0,) * 20 + (1,) * 16
    assert refusal(config | {"layer_types": types[1:]}).key == "layer_types"
    assert refusal(config | {"layer_types": ["linear_attention", *types[1:]]}).key == "layer_types[0]"


def test_errors_in_a_nested_text_config_have_its_path() -> None:
    config = dict(catalogue()["gemma-3-27b"].config)
    text = config["text_config"]
    assert isinstance(text, dict)
    assert refusal(config | {"text_config": text | {"hidden_size": 0}}).key == "text_config.hidden_size"
    assert refusal(config | {"text_config": text | {"num_experts": 4}}).key == "text_config.num_experts"
    assert refusal(config | {"text_config": [1]}).key == "text_config"


def test_error_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | {"num_hidden_layers": 0}))
    with pytest.raises(ConfigError) as caught:
        load_model(str(tmp_path))
    assert str(caught.value).startswith(f"{file}: num_hidden_layers: ")


@pytest.mark.parametrize(
    "text", ["", "./no/such/file.json", "/dev/null", "model.yaml", "a\0b", "x" * 5000, "no/such/folder/"]
)
def test_unusable_paths_are_one_line_errors(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_model(text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_folder_without_config_says_which_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_model(str(tmp_path))
    assert caught.value.file == str(tmp_path / "config.json")


def saved(folder: Path, text: str, name: str = "config.json") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_infinity_in_a_config_is_no_obstacle(tmp_path: Path) -> None:
    text = json.dumps(LLAMA | {"time_step_limit": [0.0, float("inf")], "note": 'Infinity, "NaN"'})
    assert ", Infinity]" in text
    assert parameters(load_model(saved(tmp_path, text))) == 8_030_261_248
    with pytest.raises(ConfigError, match="hidden_size: is not a whole number in range; found 'Infinity'"):
        load_model(saved(tmp_path, json.dumps(LLAMA | {"hidden_size": float("inf")})))


def test_a_config_of_3_mb_is_read_without_its_labels(tmp_path: Path) -> None:
    labels = {str(index): f"LABEL_{index}" for index in range(110_000)}
    modules = {f"model.layers.{index}": {"bits": 4, "group_size": 128} for index in range(2000)}
    config = LLAMA | {"id2label": labels, "quantization_config": {"modules": modules}}
    text = json.dumps(config | {"architectures": ["LlamaForSequenceClassification"]}, indent=2)
    assert len(text) > 3_000_000
    model = load_model(saved(tmp_path, text))
    assert parameters(model) == 8_030_261_248 - 128256 * 4096 + 110_000 * 4096
    assert model_from_config(model.config) == model and len(json.dumps(model.config)) < 5000


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("someone/LLAMA-3.1-8b", "llama-3.1-8b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
    ],
)
def test_an_id_of_the_hub_is_the_model_of_the_catalogue(
    text: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert load_model(text) == load_model(name)


def test_an_id_that_is_nowhere_says_which_file_to_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"any id after `hf download acme/Tiny-8B config.json`"):
        load_model("acme/Tiny-8B")


def test_the_cache_is_before_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--acme--llama-3.1-8b"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0123456")
    (folder / "snapshots" / "0123456").mkdir(parents=True)
    saved(folder / "snapshots" / "0123456", json.dumps(LLAMA | {"num_hidden_layers": 2}))
    assert load_model("acme/llama-3.1-8b").layers == 2


@pytest.mark.parametrize(
    ("config", "key", "allowed"),
    [
        ({"peft_type": "LORA", "base_model_name_or_path": "a/b", "r": 8}, "peft_type", "that it adapts, a/b"),
        ({"dim": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": -1}, "dim", "config.json of the same"),
        ({"num_layers": 4, "hidden_size": 64, "seq_length": 32}, "seq_length", "`shardwise review FILE`"),
        ({"num-layers": 4, "ffn-hidden-size": 64}, "ffn_hidden_size", "layers, hidden, ffn"),
    ],
)
def test_files_of_other_kinds_say_what_to_do(
    config: dict[str, Any], key: str, allowed: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_model(saved(tmp_path, json.dumps(config)))
    assert caught.value.key == key and allowed in str(caught.value.allowed)
