"""Parameters in Hugging Face's format: Transformers reads the files that we write, and we read its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.runtime.equality import load_weights, whole_module
from tests.runtime.plans import CONFIGS, SLOPED_ONCE, make_plan

from shardwise.app.cli.main import main
from shardwise.errors import ConfigError
from shardwise.model import Model, model_from_config
from shardwise.plans import write_plan
from shardwise.runtime import reference_module
from shardwise.runtime.initialization import initialise
from shardwise.runtime.modules import ModelStage
from shardwise.runtime.weights import save_weights, weights_in

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 96, "n_positions": 32}
CASES: Mapping[str, Mapping[str, object]] = {
    **{name: config for name, config in CONFIGS.items() if "model_type" in config},
    "opt-66b": dict(CONFIGS["opt"]) | {"do_layer_norm_before": True, "word_embed_proj_dim": 32},
    "deepseek_v3 in halves": dict(CONFIGS["deepseek_v3"])
    | {"rope_interleave": False, "n_group": 1, "topk_group": 1},
    "qwen2": dict(CONFIGS["llama"]) | {"model_type": "qwen2"},
    "gpt2": GPT2,
}


def built(name: str, seed: int) -> tuple[Model, ModelStage]:
    model = model_from_config(CASES[name], name=name)
    return model, whole_module(model, seed)


def state_of(module: ModelStage) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("name", CASES)
def test_written_weights_are_read_back(tmp_path: Path, name: str) -> None:
    model, module = built(name, 3)
    save_weights(model, state_of(module), str(tmp_path), max_file_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2 and files == {path.name for path in tmp_path.glob("*.safetensors")}
    other = reference_module(model)
    initialise(other, seed=9, layers=model.layers)
    load_weights(other, model, str(tmp_path))
    found = state_of(other)
    assert all(torch.equal(found[key], value) for key, value in state_of(module).items())


@pytest.mark.parametrize("name", CASES)
def test_transformers_reads_written_weights_and_computes_the_same(tmp_path: Path, name: str) -> None:
    import transformers  # here, because it takes seconds

    model, module = built(name, 3)
    save_weights(model, state_of(module), str(tmp_path))
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    kind = SLOPED_ONCE if name == "falcon-rw" else "eager"
    other, report = load(tmp_path, attn_implementation=kind, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    tokens = torch.randint(0, 96, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = other.eval()(tokens).logits
        torch.testing.assert_close(module(tokens), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", CASES)
def test_weights_of_transformers_are_read_and_train_the_same(tmp_path: Path, name: str) -> None:
    """The loss and the gradient of every tensor; gradients are saved in place of the weights to compare them
    by name."""
    import transformers  # here, because it takes seconds

    config = {key: value for key, value in CASES[name].items() if key != "model_type"}
    built = transformers.AutoConfig.for_model(str(CASES[name]["model_type"]), **config)
    make: Any = transformers.AutoModelForCausalLM.from_config
    other = make(built, attn_implementation=SLOPED_ONCE if name == "falcon-rw" else "eager").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*other.parameters(), *corrections(other)):
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.2)
    other.save_pretrained(tmp_path / "weights")
    model = model_from_config(CASES[name], name=name)
    module = reference_module(model)
    load_weights(module, model, str(tmp_path / "weights"))
    tokens = torch.randint(3, 96, (2, 20), generator=generator)
    losses = [
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        for logits in (module(tokens), other(tokens).logits)
    ]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(parameter.grad)
    other.save_pretrained(tmp_path / "gradients")
    read = weights_in(str(tmp_path / "gradients"), model)
    largest = max(float(p.grad.abs().max()) for p in module.parameters() if p.grad is not None)
    for key, parameter in module.named_parameters():
        if parameter.grad is not None:
            offset = 1.0 if name.startswith("gemma") and key.endswith("norm.weight") else 0.0
            expected = read(key, parameter.shape) - offset
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-3, atol=1e-5 * largest, msg=key)


def test_the_text_decoder_of_a_model_of_several_inputs_is_read(tmp_path: Path) -> None:
    import transformers  # here, because it takes seconds

    text = dict(CONFIGS["gemma3"])
    vision = {
        "hidden_size": 16, "image_size": 28, "intermediate_size": 32, "num_attention_heads": 2,
        "num_hidden_layers": 1, "patch_size": 14,
    }  # fmt: skip
    config = {"model_type": "gemma3", "text_config": text, "vision_config": vision, "mm_tokens_per_image": 4}
    own: dict[str, Any] = {key: value for key, value in text.items() if key != "model_type"}
    built = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**own), vision_config=vision, mm_tokens_per_image=4
    )
    make: Any = transformers.Gemma3ForConditionalGeneration._from_config
    other = make(built, attn_implementation="eager").eval()
    other.save_pretrained(tmp_path)
    model = model_from_config(config, name="gemma3")
    module = reference_module(model)
    load_weights(module, model, str(tmp_path))
    tokens = torch.randint(3, 96, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = other(tokens, token_type_ids=torch.zeros_like(tokens)).logits
        torch.testing.assert_close(module(tokens), expected, rtol=1e-4, atol=1e-4)


def corrections(module: torch.nn.Module) -> list[torch.Tensor]:
    """The correction biases with which experts are chosen."""
    return [buffer for name, buffer in module.named_buffers() if name.endswith("e_score_correction_bias")]


def test_a_wrong_file_is_refused_by_name(tmp_path: Path) -> None:
    model, module = built("llama", 3)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_weights(module, model, str(tmp_path))
    save_weights(model, state_of(module), str(tmp_path))
    whole = tmp_path / "model.safetensors"
    with pytest.raises(ConfigError, match="has no such tensor"):
        load_weights(built("mixtral", 3)[1], built("mixtral", 3)[0], str(tmp_path))
    wide = model_from_config(dict(CASES["llama"]) | {"intermediate_size": 64}, name="wide")
    with pytest.raises(
        ConfigError, match=r"mlp\.gate\.weight: does not have the model's shape.*\(48, 32\).*\(64, 32\)"
    ):
        load_weights(reference_module(wide), wide, str(tmp_path))
    whole.write_bytes(whole.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"model\.safetensors: cannot be read"):
        load_weights(module, model, str(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}')
    with pytest.raises(ConfigError, match="weight_map: does not name files in this folder"):
        load_weights(module, model, str(tmp_path))


def test_families_without_names_are_refused(tmp_path: Path) -> None:
    model = model_from_config({"layers": 2, "hidden": 32, "ffn": 64, "heads": 4, "vocab": 96, "seq_len": 32})
    with pytest.raises(ConfigError, match="has no known weight format"):
        save_weights(model, {}, str(tmp_path))


def test_train_starts_from_weights_and_exports_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two steps from given weights: the export is another file with the same tensors, slightly changed."""
    plan, first, last = str(tmp_path / "plan.yaml"), tmp_path / "first", tmp_path / "last"
    write_plan(plan, make_plan("dp=2,ep=2,zero_stage=1", model="mixtral"))
    model, module = built("mixtral", 3)
    save_weights(model, state_of(module), str(first))
    question = ["train", plan, "--steps", "2", "--weights", str(first), "--export", str(last)]
    assert main(question) == 2
    assert "--export: requires --checkpoint" in capsys.readouterr().err
    assert main([*question, "--checkpoint", str(tmp_path / "runs")]) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (first, last))
    assert before.keys() == after.keys()
    change = max(float((before[name] - after[name]).abs().max()) for name in before)
    assert 1e-3 < change < 4e-3  # two steps of AdamW at 1e-3, and weight decay
