"""Reference modules have the tensors of the model record, and compute what Transformers computes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tests.runtime.plans import CONFIGS, GPT, LLAMA, tiny
from torch.nn import functional

from shardwise.errors import ConfigError
from shardwise.model import Model, catalogue_names, load_model, model_from_config, parameters
from shardwise.runtime import reference_module
from shardwise.runtime.initialization import initialise
from shardwise.runtime.loss import batch_share_loss
from shardwise.runtime.rope import Rope, Rotation, rotated, rotation_of


@pytest.mark.parametrize("name", CONFIGS)
def test_a_module_has_the_tensors_of_the_record(name: str) -> None:
    model = tiny(name)
    module = reference_module(model)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in trained) == parameters(model)
    shapes = Counter(tuple(sorted(parameter.shape)) for parameter in trained)
    recorded = Counter(
        tuple(
            sorted([*(extent.size for extent in weight.shape), *([weight.experts] if weight.experts else [])])
        )
        for operators in (
            model.embedding,
            *(model.kinds[kind].operators for kind in model.pattern),
            model.head,
        )
        for operator in operators
        for weight in operator.weights
    )
    assert shapes == recorded


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    first, second = (reference_module(tiny("gpt")) for _ in range(2))
    initialise(first, seed=5, layers=4)
    initialise(second, seed=5, layers=4)
    values = [dict(module.named_parameters()) for module in (first, second)]
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])
    initialise(second, seed=6, layers=4)
    assert not torch.equal(values[0]["embedding.tokens.weight"], values[1]["embedding.tokens.weight"])
    q = values[0]["layers.0.attention.q.weight"]
    assert not torch.equal(q, values[0]["layers.1.attention.q.weight"])


def test_a_rotation_turns_pairs_by_their_angle() -> None:
    """Position 3, theta 100, 4 elements: pairs (0, 2) by 3 rad and (1, 3) by 3 / 10 rad."""
    x = torch.tensor([1.0, 1.0, 0.0, 0.0]).view(1, 1, 1, 4)
    turned = rotated(x, rotation_of(Rope(dims=4, theta=100.0), torch.tensor([3]))).flatten()
    expected = [-0.989992, 0.955336, 0.141120, 0.295520]  # cos 3, cos 0.3, sin 3, sin 0.3
    assert turned.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_rotation_has_the_gradient_of_its_formula() -> None:
    """With all elements of a head rotated, or only the first ones."""
    x = torch.randn(2, 3, 2, 6, dtype=torch.float64, requires_grad=True)
    for half, interleaved in ((3, False), (2, False), (3, True)):
        cos, sin = (torch.randn(3, half, dtype=torch.float64) for _ in range(2))
        turn = Rotation(cos, sin, interleaved)
        assert torch.autograd.gradcheck(lambda x, turn=turn: rotated(x, turn), (x,))
        assert torch.equal(rotated(x, turn)[..., 2 * half :], x[..., 2 * half :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_is_pytorchs_cross_entropy(dtype: torch.dtype) -> None:
    """Shares of the batch's mean loss, and their gradients; also where the target's probability underflows in
    fp32: e^-300 against 1."""
    logits, targets = torch.randn(2, 3, 11).to(dtype), torch.randint(11, (2, 3))
    logits[0, 0], targets[0, 0] = -300.0, 4
    logits[0, 0, 7] = 0.0
    ours, to_hugging_face = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = batch_share_loss(12, 11, None)(ours * 1, targets)  # not a leaf: its memory is overwritten
    expected = (
        functional.cross_entropy(to_hugging_face.float().flatten(0, 1), targets.flatten(), reduction="sum")
        / 12
    )
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6) and loss > 300 / 12
    assert ours.grad is not None and to_hugging_face.grad is not None
    torch.testing.assert_close(ours.grad, to_hugging_face.grad)


HUGGING_FACE: dict[str, dict[str, Any]] = {
    "llama": dict(LLAMA),
    "llama scaled": LLAMA
    | {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        }
    },
    "mistral": LLAMA | {"model_type": "mistral", "sliding_window": 6},
    "qwen2": LLAMA | {"model_type": "qwen2"},
    "qwen3": dict(CONFIGS["qwen3"]),
    "mixtral": dict(CONFIGS["mixtral"]),
    "qwen3_moe": dict(CONFIGS["qwen3_moe"]),
    "qwen3_moe renormalised": dict(CONFIGS["qwen3_moe"]) | {"norm_topk_prob": True},
    "gpt_neox": dict(CONFIGS["neox"]),
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 96,
             "n_positions": 32},
}  # fmt: skip


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_a_module_computes_the_same_as_transformers(name: str) -> None:
    import transformers  # here, because it takes seconds

    config = HUGGING_FACE[name]
    model = model_from_config(config, name=name)
    module = reference_module(model)
    kwargs = {key: value for key, value in config.items() if key != "model_type"}
    built = transformers.AutoConfig.for_model(str(config["model_type"]), **kwargs)
    make: Any = transformers.AutoModelForCausalLM.from_config
    other = make(built, attn_implementation="eager").eval()
    _perturb(other)
    _copy(other, module, model)
    tokens = torch.randint(0, 96, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(module(tokens), other(tokens).logits, rtol=2e-4, atol=2e-4)


def _perturb(module: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def _copy(source: Any, target: torch.nn.Module, model: Model) -> None:
    """Copies the parameters of a Transformers model into ours, by its names."""
    to_hugging_face = dict(source.named_parameters())
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            parameter.copy_(_theirs(name, to_hugging_face, model))


ENDS = {
    "llama": ("model.embed_tokens", "model.norm", "lm_head", "model.layers"),
    "gpt_neox": ("gpt_neox.embed_in", "gpt_neox.final_layer_norm", "lm_head", "gpt_neox.layers"),
    "gpt2": ("transformer.wte", "transformer.ln_f", "lm_head", "transformer.h"),
}

INNER = {
    "llama": {
        "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
        "attention.q": "self_attn.q_proj", "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj",
        "attention.out": "self_attn.o_proj", "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm", "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj", "mlp.router": "mlp.gate",
    },
    "gpt_neox": {
        "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
        "attention.out": "attention.dense", "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h",
    },
    "gpt2": {
        "attention_norm": "ln_1", "mlp_norm": "ln_2", "attention.out": "attn.c_proj", "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
}  # fmt: skip


def _theirs(name: str, to_hugging_face: dict[str, torch.Tensor], model: Model) -> torch.Tensor:
    family = model.family if model.family in ENDS else "llama"
    embedding, norm, output, layers = ENDS[family]
    stem, _, kind = name.rpartition(".")
    simple = {"embedding.tokens": embedding, "head.norm": norm, "head.output": output}
    if stem == "embedding.positions":
        return to_hugging_face["transformer.wpe.weight"]
    if stem in simple:
        return to_hugging_face[f"{simple[stem]}.{kind}"]
    _, index, inner = stem.split(".", 2)
    at = f"{layers}.{index}"
    if inner in INNER[family]:
        tensor = to_hugging_face[f"{at}.{INNER[family][inner]}.{kind}"]
        # GPT-2's matrices are stored [in, out]
        return tensor.t() if family == "gpt2" and tensor.dim() == 2 else tensor
    if inner == "mlp.experts":  # gate and up are one tensor
        if kind == "down":
            return to_hugging_face[f"{at}.mlp.experts.down_proj"]
        return to_hugging_face[f"{at}.mlp.experts.gate_up_proj"].chunk(2, dim=1)[("gate", "up").index(kind)]
    part = ("q", "k", "v").index(inner[-1])
    if family == "gpt2":
        return to_hugging_face[f"{at}.attn.c_attn.{kind}"].chunk(3, dim=-1)[part].t()
    fused = to_hugging_face[f"{at}.attention.query_key_value.{kind}"]  # for each head: q, k, v
    return fused.view(model.heads, 3, -1, *fused.shape[1:])[:, part].flatten(0, 1)


def test_models_without_modules_are_refused_by_name() -> None:
    from shardwise.model import catalogue_entry

    refused = {}
    for name in catalogue_names():
        entry = model_from_config(catalogue_entry(name).config, name=name)
        with torch.device("meta"):
            try:
                reference_module(entry)
            except ConfigError as error:
                refused[name] = error.message
    assert refused.pop("deepseek-v3") == "cannot be trained: its head is not supported"
    assert set(refused.values()) == {"cannot be trained: this family is not supported"}
    hybrids = [name for name in catalogue_names() if load_model(name).kinds[0].name not in ("dense", "moe")]
    assert {"nemotron-h-8b", "qwen3-next-80b-a3b"} <= set(refused) <= set(hybrids)


def test_unknown_numerics_are_refused() -> None:
    unknown = (
        {"hidden_act": "quick"}, {"rope_scaling": {"rope_type": "longrope"}},
        {"model_type": "phi3", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        dict(CONFIGS["bloom"]) | {"apply_residual_connection_post_layernorm": True},
        dict(CONFIGS["deepseek_v2"]) | {"norm_topk_prob": True},
        dict(CONFIGS["mixtral"]) | {"expert_capacity_factor": 1.0},
    )  # fmt: skip
    for extra in unknown:
        with pytest.raises(ConfigError):
            reference_module(model_from_config(LLAMA | extra))
    assert reference_module(model_from_config(GPT)) is not None
