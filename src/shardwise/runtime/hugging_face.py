"""Names and forms of a reference module's parameters in the files of Hugging Face's libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.model import Model

Read = Callable[[str], Tensor]
"""The tensor of a name."""

_LLAMA = {
    "embedding.tokens": "model.embed_tokens", "head.norm": "model.norm", "head.output": "lm_head",
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "attention.q": "self_attn.q_proj", "attention.k": "self_attn.k_proj", "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj", "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip

_NAMES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    **{family: ("model.layers", _LLAMA) for family in ("llama", "mistral", "qwen2", "qwen3")},
    "mixtral": ("model.layers", _LLAMA | {"mlp.router": "block_sparse_moe.gate"}),
    "qwen3_moe": ("model.layers", _LLAMA | {"mlp.router": "mlp.gate"}),
    "gpt_neox": (
        "gpt_neox.layers",
        {
            "embedding.tokens": "gpt_neox.embed_in", "head.norm": "gpt_neox.final_layer_norm",
            "head.output": "embed_out", "attention_norm": "input_layernorm",
            "mlp_norm": "post_attention_layernorm", "attention.out": "attention.dense",
            "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h",
        },
    ),
    "gpt2": (
        "transformer.h",
        {
            "embedding.tokens": "transformer.wte", "embedding.positions": "transformer.wpe",
            "head.norm": "transformer.ln_f", "head.output": "lm_head", "attention_norm": "ln_1",
            "mlp_norm": "ln_2", "attention.out": "attn.c_proj", "mlp.up": "mlp.c_fc",
            "mlp.down": "mlp.c_proj",
        },
    ),
}  # fmt: skip
"""Per family the name of the list of layers, and of each module of ours theirs."""

_EXPERTS = {
    "mixtral": ("block_sparse_moe.experts", {"gate": "w1", "up": "w3", "down": "w2"}),
    "qwen3_moe": ("mlp.experts", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
}
"""Per family the name of the list of experts, and those of their matrices."""

_FUSED = {"gpt_neox": "attention.query_key_value", "gpt2": "attn.c_attn"}
"""Families whose queries, keys and values are one tensor."""


def check_named(model: Model) -> None:
    """ConfigError where files of this family have no names here."""
    if model.family not in _NAMES:
        raise ConfigError(
            "has no names of Hugging Face's", key="model", found=model.family, allowed=", ".join(_NAMES)
        )


def theirs(model: Model, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of their file that hold `state`, the whole module's parameters by our names."""
    for name, tensor in state.items():
        if name == "head.output.weight" and model.tied_embeddings:
            continue
        at, inner, kind = _place(model, name)
        if inner == "mlp.experts":
            listed, matrices = _EXPERTS[model.family]
            for expert, matrix in enumerate(tensor):
                yield f"{at}.{listed}.{expert}.{matrices[kind]}.weight", matrix.contiguous()
        elif model.family in _FUSED and inner in ("attention.q", "attention.k", "attention.v"):
            if inner == "attention.q":
                parts = [state[name.replace(".q.", f".{part}.")] for part in "qkv"]
                yield f"{at}.{_FUSED[model.family]}.{kind}", _fused(model, parts)
        else:
            yield _their_name(model, at, inner, kind), _turned(model, at, tensor)


def ours(model: Model, name: str, read: Read) -> Tensor:
    """Our parameter `name` from the tensors of their file."""
    if name == "head.output.weight" and model.tied_embeddings:
        name = "embedding.tokens.weight"
    at, inner, kind = _place(model, name)
    if inner == "mlp.experts":
        listed, matrices = _EXPERTS[model.family]
        count = model.experts.experts if model.experts is not None else 0
        return torch.stack([read(f"{at}.{listed}.{e}.{matrices[kind]}.weight") for e in range(count)])
    if model.family in _FUSED and inner in ("attention.q", "attention.k", "attention.v"):
        fused = read(f"{at}.{_FUSED[model.family]}.{kind}")
        return _parted(model, fused)["qkv".index(inner[-1])]
    return _turned(model, at, read(_their_name(model, at, inner, kind)))


def _place(model: Model, name: str) -> tuple[str, str, str]:
    """Their name of the layer (empty at the ends), our name of the module inside, and `weight` or `bias`."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("layers."):
        return "", stem, kind
    _, index, inner = stem.split(".", 2)
    return f"{_NAMES[model.family][0]}.{index}", inner, kind


def _their_name(model: Model, at: str, inner: str, kind: str) -> str:
    module = _NAMES[model.family][1][inner]
    return f"{at}.{module}.{kind}" if at else f"{module}.{kind}"


def _turned(model: Model, at: str, tensor: Tensor) -> Tensor:
    """GPT-2's matrices inside layers are stored [in, out]."""
    return tensor.t().contiguous() if model.family == "gpt2" and at and tensor.dim() == 2 else tensor


def _fused(model: Model, parts: list[Tensor]) -> Tensor:
    if model.family == "gpt2":
        return torch.cat(parts).t().contiguous() if parts[0].dim() == 2 else torch.cat(parts)
    heads = [part.unflatten(0, (model.heads, -1)) for part in parts]  # head by head: q, k, v
    return torch.stack(heads, dim=1).flatten(0, 2)


def _parted(model: Model, fused: Tensor) -> tuple[Tensor, ...]:
    if model.family == "gpt2":
        return (fused.t() if fused.dim() == 2 else fused).chunk(3)
    return tuple(part.flatten(0, 1) for part in fused.unflatten(0, (model.heads, 3, -1)).unbind(1))
