"""Loads and saves weights in the format of Hugging Face libraries: `config.json` and safetensors.

`save_weights` and `weights_in` convert a reference module's parameters by the `WeightFormat` of the family.
Weights of operator graphs are saved under the graph's names (`save_graph_weights`, `graph_weights_in`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from shardwise.errors import ConfigError, InternalError
from shardwise.graph import OpGraph
from shardwise.inputs import install_text, read_mapping
from shardwise.model import Model, decoder_config, decoder_of
from shardwise.plans import write_file
from shardwise.runtime.state_dict import ParameterValue

# Formats of model families

Read = Callable[[str], Tensor]
"""Reads the tensor of a name."""


@dataclass(frozen=True, slots=True)
class Fused:
    """Several modules of ours in one tensor of theirs: `stacked` one after the other, or `grouped` by
    key-value head (its queries, its key, its value)."""

    name: str
    parts: tuple[str, ...]
    layout: Literal["stacked", "grouped"] = "stacked"


@dataclass(frozen=True, slots=True)
class Listed:
    """Experts in a list of modules, with their names of each matrix."""

    name: str
    matrices: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Interleaved:
    """Experts in stacked matrices [experts, in, out], with gate and up columns interleaved in one tensor."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """File format of a family: the name of the list of layers, and their name of each module of ours.

    `transposed` says that matrices in layers are stored as [in, out]. `norm_offset` is what must be added to
    their norm weights to get ours.
    """

    layers: str
    names: Mapping[str, str]
    fused: tuple[Fused, ...] = ()
    experts: Listed | Interleaved | None = None
    transposed: bool = False
    norm_offset: float = 0.0


_LLAMA = {
    "embedding.tokens": "model.embed_tokens", "head.norm": "model.norm", "head.output": "lm_head",
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "attention.q": "self_attn.q_proj", "attention.k": "self_attn.k_proj", "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj", "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip

_GEMMA = _LLAMA | {
    "attention_post_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}  # fmt: skip

_DEEPSEEK = _LLAMA | {
    "attention.q_down": "self_attn.q_a_proj", "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.q_up": "self_attn.q_b_proj", "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm", "attention.kv_up": "self_attn.kv_b_proj",
    "mlp.router": "mlp.gate", "mlp.shared.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj", "mlp.shared.down": "mlp.shared_experts.down_proj",
}  # fmt: skip

_BLOOM = {
    "embedding.tokens": "transformer.word_embeddings",
    "embedding.norm": "transformer.word_embeddings_layernorm",
    "head.norm": "transformer.ln_f", "head.output": "lm_head", "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm", "attention.out": "self_attention.dense",
    "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h",
}  # fmt: skip

_GPT_NEOX = {
    "embedding.tokens": "gpt_neox.embed_in", "head.norm": "gpt_neox.final_layer_norm",
    "head.output": "embed_out", "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm", "attention.out": "attention.dense",
    "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h",
}  # fmt: skip

_GPT2 = {
    "embedding.tokens": "transformer.wte", "embedding.positions": "transformer.wpe",
    "head.norm": "transformer.ln_f", "head.output": "lm_head", "attention_norm": "ln_1",
    "mlp_norm": "ln_2", "attention.out": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
}  # fmt: skip

_OPT = {
    "embedding.tokens": "model.decoder.embed_tokens", "embedding.project": "model.decoder.project_in",
    "embedding.positions": "model.decoder.embed_positions", "head.norm": "model.decoder.final_layer_norm",
    "head.project": "model.decoder.project_out", "head.output": "lm_head",
    "attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm",
    "attention.q": "self_attn.q_proj", "attention.k": "self_attn.k_proj", "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.out_proj", "mlp.up": "fc1", "mlp.down": "fc2",
}  # fmt: skip

_QKV = ("attention.q", "attention.k", "attention.v")
_PROJECTED = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_LLAMA_FORMAT = WeightFormat(layers="model.layers", names=_LLAMA)
_DEEPSEEK_FORMAT = WeightFormat(
    layers="model.layers", names=_DEEPSEEK, experts=Listed("mlp.experts", _PROJECTED)
)

_FORMATS: Mapping[str, WeightFormat] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA_FORMAT),
    **dict.fromkeys(("gemma2", "gemma3"), WeightFormat(layers="model.layers", names=_GEMMA, norm_offset=1.0)),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _DEEPSEEK_FORMAT),
    "bloom": WeightFormat(
        layers="transformer.h",
        names=_BLOOM,
        fused=(Fused("self_attention.query_key_value", _QKV, "grouped"),),
    ),
    "falcon": WeightFormat(
        layers="transformer.h",
        names=_BLOOM,
        fused=(Fused("self_attention.query_key_value", _QKV, "grouped"),),
    ),
    "gpt2": WeightFormat(
        layers="transformer.h", names=_GPT2, fused=(Fused("attn.c_attn", _QKV),), transposed=True
    ),
    "gpt_neox": WeightFormat(
        layers="gpt_neox.layers",
        names=_GPT_NEOX,
        fused=(Fused("attention.query_key_value", _QKV, "grouped"),),
    ),
    "gpt_oss": WeightFormat(
        layers="model.layers",
        names=_LLAMA | {"mlp.router": "mlp.router", "attention": "self_attn"},
        experts=Interleaved("mlp.experts"),
    ),
    "mixtral": WeightFormat(
        layers="model.layers",
        names=_LLAMA | {"mlp.router": "block_sparse_moe.gate"},
        experts=Listed("block_sparse_moe.experts", {"gate": "w1", "up": "w3", "down": "w2"}),
    ),
    "opt": WeightFormat(layers="model.decoder.layers", names=_OPT),
    "phi3": WeightFormat(
        layers="model.layers",
        names=_LLAMA,
        fused=(
            Fused("self_attn.qkv_proj", _QKV),
            Fused("mlp.gate_up_proj", ("mlp.gate", "mlp.up")),
        ),
    ),
    "qwen3_moe": WeightFormat(
        layers="model.layers",
        names=_LLAMA | {"mlp.router": "mlp.gate"},
        experts=Listed("mlp.experts", _PROJECTED),
    ),
}  # fmt: skip
"""Format of each family, with the names that Transformers reads and published files have."""

_TWO_NORMS = {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"}
"""Names for Falcon models with parallel attention and MLP that have a norm each."""

_KINDS = {"correction": "e_score_correction_bias"}
"""Tensors of modules with another name in the files."""


def check_weight_names(model: Model) -> None:
    """ConfigError if the weight format of this family is not known."""
    if model.family not in _FORMATS:
        raise ConfigError(
            "has no known weight format", key="model", found=model.family, allowed=", ".join(_FORMATS)
        )


def to_hugging_face(model: Model, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Convert `state`, the whole module's tensors by our names, to the tensors of their files."""
    named = _Named(model)
    for name, tensor in state.items():
        if name == "head.output.weight" and model.tied_embeddings:
            continue
        at, inner, kind = named.place(name)
        fused = named.fused_with(inner)
        if inner == "mlp.experts":
            yield from named.of_experts(state, name, at, kind)
        elif fused is not None:
            if inner == fused.parts[0]:
                parts = [state[name.replace(inner, part)] for part in fused.parts]
                yield f"{at}.{fused.name}.{kind}", named.transposed(at, named.joined(fused, parts))
        else:
            yield (
                named.hugging_face_name(at, inner, kind),
                named.with_norm_offset(inner, named.transposed(at, tensor), -1),
            )


def from_hugging_face(model: Model, name: str, read: Read) -> Tensor:
    """Our tensor `name`, converted from the tensors of their files."""
    named = _Named(model)
    if name == "head.output.weight" and model.tied_embeddings:
        name = "embedding.tokens.weight"
    at, inner, kind = named.place(name)
    if inner == "mlp.experts":
        return named.experts(at, kind, read)
    fused = named.fused_with(inner)
    if fused is not None:
        whole = named.transposed(at, read(f"{at}.{fused.name}.{kind}"))
        return named.split_fused(fused, whole)[fused.parts.index(inner)]
    return named.with_norm_offset(
        inner, named.transposed(at, read(named.hugging_face_name(at, inner, kind))), 1
    )


class _Named:
    """Converts names and layouts of one model's tensors."""

    def __init__(self, model: Model) -> None:
        decoder = decoder_of(model)
        self._format = _FORMATS[model.family]
        self._names = self._format.names
        attention = decoder.layers[0].attention
        if attention is None:
            raise InternalError(f"the first layer of {model.family} has no attention")
        self._attention = attention
        self._count = model.experts.experts if model.experts is not None else 0
        if model.family == "falcon" and decoder.layers[0].norm_placement == "parallel":
            self._names = {**self._names, **_TWO_NORMS}
        # Multimodal models have the text decoder under this prefix.
        self._prefix = "" if decoder_config(model) is model.config else "language_model."

    def place(self, name: str) -> tuple[str, str, str]:
        """Their name of the layer (empty outside of layers), our name of the module, and the name of its
        tensor."""
        stem, _, kind = name.rpartition(".")
        if not stem.startswith("layers."):
            return "", stem, kind
        _, index, inner = stem.split(".", 2)
        return f"{self._prefix}{self._format.layers}.{index}", inner, kind

    def hugging_face_name(self, at: str, inner: str, kind: str) -> str:
        stem = f"{at}.{self._names[inner]}" if at else f"{self._prefix}{self._names[inner]}"
        return f"{stem}.{_KINDS.get(kind, kind)}"

    def transposed(self, at: str, tensor: Tensor) -> Tensor:
        """Transpose a matrix inside a layer if the family stores it as [in, out]."""
        return tensor.t().contiguous() if self._format.transposed and at and tensor.dim() == 2 else tensor

    def with_norm_offset(self, inner: str, tensor: Tensor, sign: int) -> Tensor:
        """The tensor with the family's norm offset added (`sign` 1) or subtracted, if it belongs to a
        norm."""
        offset = self._format.norm_offset if inner.endswith("norm") else 0.0
        return tensor + sign * offset if offset else tensor

    def fused_with(self, inner: str) -> Fused | None:
        return next((fused for fused in self._format.fused if inner in fused.parts), None)

    def joined(self, fused: Fused, parts: Sequence[Tensor]) -> Tensor:
        if fused.layout == "stacked":
            return torch.cat(list(parts))
        heads = self._attention.kv_heads
        return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 1)

    def split_fused(self, fused: Fused, whole: Tensor) -> Sequence[Tensor]:
        if fused.parts != _QKV:
            return whole.chunk(len(fused.parts))
        heads, kv_heads = self._attention.heads, self._attention.kv_heads
        dim = len(whole) // (heads + 2 * kv_heads)
        if fused.layout == "stacked":
            return whole.split((heads * dim, kv_heads * dim, kv_heads * dim))
        groups = whole.unflatten(0, (kv_heads, -1))
        return [part.flatten(0, 1) for part in groups.split((heads // kv_heads * dim, dim, dim), dim=1)]

    def of_experts(
        self, state: Mapping[str, Tensor], name: str, at: str, kind: str
    ) -> Iterator[tuple[str, Tensor]]:
        """Their tensors for our expert tensor `name`."""
        layout = self._format.experts
        if isinstance(layout, Listed):
            for expert, matrix in enumerate(state[name]):
                yield f"{at}.{layout.name}.{expert}.{layout.matrices[kind]}.weight", matrix.contiguous()
        elif layout is not None:
            end = "_bias" if kind.endswith("_bias") else ""
            if kind.startswith("down"):
                yield f"{at}.{layout.name}.down_proj{end}", _transposed_last(state[name])
            elif kind.startswith("gate"):
                halves = [
                    _transposed_last(state[name.replace(kind, f"{half}{end}")]) for half in ("gate", "up")
                ]
                yield f"{at}.{layout.name}.gate_up_proj{end}", torch.stack(halves, dim=-1).flatten(-2)

    def experts(self, at: str, kind: str, read: Read) -> Tensor:
        """Our tensor of this `kind` for all experts."""
        layout = self._format.experts
        if isinstance(layout, Listed):
            names = [f"{at}.{layout.name}.{e}.{layout.matrices[kind]}.weight" for e in range(self._count)]
            return torch.stack([read(name) for name in names])
        if layout is None:
            raise TypeError(kind)
        which, _, end = kind.partition("_")
        end = f"_{end}" if end else ""
        if which == "down":
            return _transposed_last(read(f"{at}.{layout.name}.down_proj{end}"))
        both = read(f"{at}.{layout.name}.gate_up_proj{end}")
        return _transposed_last(both[..., 0 if which == "gate" else 1 :: 2])


def _transposed_last(stacked: Tensor) -> Tensor:
    """Transpose stacked matrices; biases stay as they are."""
    return stacked.mT.contiguous() if stacked.dim() == 3 else stacked.contiguous()


# Files

SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_FILE_BYTES = 4 << 30
"""Largest weight file in bytes; larger models are written as several files with an index."""


def save_weights(
    model: Model, state: Mapping[str, Tensor], folder: str, *, max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write the parameters of the whole module (`state`, by our names) into `folder`, with `config.json`.

    Files are written under temporary names first. The index, or the only file, comes last. ConfigError if the
    family has no known format.
    """
    check_weight_names(model)
    _require_library()
    os.makedirs(folder, exist_ok=True)
    config = json.dumps(dict(model.config), indent=2, sort_keys=True) + "\n"
    write_file(os.path.join(folder, "config.json"), config.encode())
    _save(dict(to_hugging_face(model, state)), folder, max_file_bytes)


def save_graph_weights(state: Mapping[str, Tensor], folder: str) -> None:
    """Write the full parameters of an operator graph (`state`, by the graph's names) into `folder`, as one
    safetensors file or several with an index."""
    os.makedirs(folder, exist_ok=True)
    _save(dict(state), folder, MAX_FILE_BYTES)


def _save(tensors: dict[str, Tensor], folder: str, max_file_bytes: int) -> None:
    _require_library()
    from safetensors.torch import save_file

    parts = _parts(tensors, max_file_bytes)
    names = [SINGLE_FILE]
    if len(parts) > 1:
        names = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    for name, part in zip(names, parts, strict=True):
        path = os.path.join(folder, name)
        save_file(part, f"{path}.partial", metadata={"format": "pt"})
        os.replace(f"{path}.partial", path)
    if len(parts) > 1:
        places = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        total = sum(_bytes(tensor) for part in parts for tensor in part.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_file(os.path.join(folder, INDEX), (json.dumps(index, indent=2) + "\n").encode())


def weights_in(folder: str, model: Model) -> ParameterValue:
    """A function that reads a parameter of `model` from the safetensors in `folder`, by name and expected
    shape. ConfigError names the file and tensor if one is missing or has another shape."""
    check_weight_names(model)
    read = _reader(folder, model.name)
    return lambda name, shape: _in_shape(from_hugging_face(model, name, read), shape, folder, name)


def graph_weights_in(folder: str, graph: OpGraph) -> ParameterValue:
    """A function that reads a parameter of `graph` from the safetensors in `folder`, by name and expected
    shape. ConfigError names the file and tensor if one is missing or has another shape."""
    read = _reader(folder, graph.name)
    return lambda name, shape: _in_shape(read(name), shape, folder, name).float()


def _reader(folder: str, owner: str) -> Callable[[str], Tensor]:
    """A function that reads a tensor of the files in `folder` by name. `owner` is the model, for errors."""
    places = _places(folder)
    opened = {file: _opened(file) for file in set(places.values())}

    def read(name: str) -> Tensor:
        if name not in places:
            raise ConfigError("has no such tensor", file=folder, key=name, allowed=f"the tensors of {owner}")
        return opened[places[name]].get_tensor(name)

    return read


def _in_shape(found: Tensor, shape: Sequence[int], folder: str, name: str) -> Tensor:
    if tuple(found.shape) != tuple(shape):
        raise ConfigError(
            "does not have the model's shape", file=folder, key=name,
            found=str(tuple(found.shape)), allowed=str(tuple(shape)),
        )  # fmt: skip
    return found


def _places(folder: str) -> dict[str, str]:
    """The file of each tensor in `folder`."""
    index = os.path.join(folder, INDEX)
    if os.path.exists(index):
        listed = read_mapping(index).get("weight_map")
        if not isinstance(listed, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in listed.values()
        ):
            raise ConfigError("does not name files in this folder", file=index, key="weight_map")
        return {name: os.path.join(folder, file) for name, file in listed.items()}
    whole = os.path.join(folder, SINGLE_FILE)
    return dict.fromkeys(_opened(whole).keys(), whole)


def _opened(path: str) -> Any:
    """The opened file, from which tensors are read one by one."""
    _require_library()
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot be read: {str(error).splitlines()[0]}", file=path) from None


def _require_library() -> None:
    """ConfigError if safetensors is not installed."""
    if find_spec("safetensors") is None:
        raise ConfigError(
            "is not installed, and Hugging Face weights need it", key="safetensors",
            allowed=install_text("torch"),
        )  # fmt: skip


def _parts(tensors: dict[str, Tensor], max_file_bytes: int) -> list[dict[str, Tensor]]:
    """Split the tensors, in order, into files of at most `max_file_bytes` bytes, or of one tensor."""
    parts: list[dict[str, Tensor]] = [{}]
    free_bytes = max_file_bytes
    for name, tensor in tensors.items():
        if parts[-1] and _bytes(tensor) > free_bytes:
            parts.append({})
            free_bytes = max_file_bytes
        parts[-1][name] = tensor
        free_bytes -= _bytes(tensor)
    return parts


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
