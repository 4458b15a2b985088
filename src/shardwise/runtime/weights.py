"""Parameters from and to folders as Hugging Face's libraries write them: `config.json` and safetensors; those
of operator graphs by the graph's names."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.graph import OpGraph
from shardwise.inputs import read_mapping
from shardwise.model import Model
from shardwise.plan import write_file
from shardwise.runtime.graphs import first_readers
from shardwise.runtime.hugging_face import check_weight_names, from_hugging_face, to_hugging_face

SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_FILE_BYTES = 4 << 30
"""Of a file; larger models are written as several, with an index."""


def save_weights(
    model: Model, state: Mapping[str, Tensor], folder: str, *, max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write the parameters of the whole module (`state`, by our names) into `folder`, with the config.

    Each file is written under another name first; the index, or the only file, comes last.
    """
    check_weight_names(model)
    _require_library()
    os.makedirs(folder, exist_ok=True)
    config = json.dumps(dict(model.config), indent=2, sort_keys=True) + "\n"
    write_file(os.path.join(folder, "config.json"), config.encode())
    _save(dict(to_hugging_face(model, state)), folder, max_file_bytes)


def save_graph_weights(state: Mapping[str, Tensor], folder: str) -> None:
    """Write the whole parameters of an operator graph (`state`, by their names there) into `folder`, one file
    or several as above."""
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


def load_weights(module: nn.Module, model: Model, folder: str) -> None:
    """Fill the whole reference `module` from the safetensors in `folder`. ConfigError, by file and name,
    where a tensor is missing or of another shape."""
    whole = weights_in(folder, model)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(whole(name, parameter.shape))


def weights_in(folder: str, model: Model) -> Callable[[str, torch.Size], Tensor]:
    """The parameters of `model` in the safetensors in `folder`, each by its name when it is asked for, and
    with the shape that it should have. ConfigError as in `load_weights`."""
    check_weight_names(model)
    read = _reader(folder, model.name)
    return lambda name, shape: _in_shape(from_hugging_face(model, name, read), shape, folder, name)


def graph_weights_in(folder: str, graph: OpGraph) -> dict[str, Tensor]:
    """The parameters of `graph` in the safetensors in `folder`, by their names, in fp32. ConfigError where a
    tensor is missing or of another shape."""
    read = _reader(folder, graph.name)
    return {
        name: _in_shape(read(name), op.shape(op.parameters[slot].dims), folder, name).float()
        for name, (op, slot) in first_readers(graph).items()
    }


def _reader(folder: str, owner: str) -> Callable[[str], Tensor]:
    """What gets a tensor of the files in `folder` by its name, one of `owner`'s."""
    places = _places(folder)
    opened = {file: _opened(file) for file in set(places.values())}

    def read(name: str) -> Tensor:
        if name not in places:
            raise ConfigError("has no such tensor", file=folder, key=name, allowed=f"those of {owner}")
        return opened[places[name]].get_tensor(name)

    return read


def _in_shape(found: Tensor, shape: Sequence[int], folder: str, name: str) -> Tensor:
    if tuple(found.shape) != tuple(shape):
        raise ConfigError(
            "is of another shape than the model's", file=folder, key=name,
            found=str(tuple(found.shape)), allowed=str(tuple(shape)),
        )  # fmt: skip
    return found


def _places(folder: str) -> dict[str, str]:
    """The file of each tensor."""
    index = os.path.join(folder, INDEX)
    if os.path.exists(index):
        listed = read_mapping(index).get("weight_map")
        if not isinstance(listed, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in listed.values()
        ):
            raise ConfigError("names no files of the folder", file=index, key="weight_map")
        return {name: os.path.join(folder, file) for name, file in listed.items()}
    whole = os.path.join(folder, SINGLE_FILE)
    return dict.fromkeys(_opened(whole).keys(), whole)


def _opened(path: str) -> Any:
    """The file, of which tensors are read one by one."""
    _require_library()
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot be read: {str(error).splitlines()[0]}", file=path) from None


def _require_library() -> None:
    """ConfigError where safetensors is not installed."""
    if find_spec("safetensors") is None:
        raise ConfigError(
            "is not installed, and files of Hugging Face's need it", key="safetensors",
            allowed="pip install 'shardwise[torch]'",
        )  # fmt: skip


def _parts(tensors: dict[str, Tensor], max_file_bytes: int) -> list[dict[str, Tensor]]:
    """The tensors in their order, as many together as fit; one at least."""
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
