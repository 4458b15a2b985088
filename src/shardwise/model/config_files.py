"""Reads config files as they are: with Infinity, with much that no size depends on, or of other software.

`read_config` reads a file and leaves out large labels and settings of quantisation, so that plans stay small.
`refuse_other_files` recognises configs of adapters, Meta's `params.json` and arguments of Megatron-LM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from shardwise.errors import ConfigError
from shardwise.inputs import parse_mapping, printable, read_text, short_repr

MAX_BYTES: Final = 32 << 20
MAX_VALUES: Final = 2_000_000
"""Limits of a config file: labels and quantised modules make some of several MB."""

MOST_VALUES: Final = 1000
"""Values of a part up to which it is not left out."""

_BULK: Final = ("id2label", "label2id", "quantization_config", "compression_config", "task_specific_params")
_MEGATRON: Final = ("ffn_hidden_size", "seq_length", "tensor_model_parallel_size", "padded_vocab_size")
_CONSTANT: Final = re.compile(r'"(?:[^"\\]++|\\.)*+"|(-?Infinity|NaN)')


def read_config(path: str) -> dict[str, object]:
    """The mapping in a config file. Infinity and NaN, which Python writes, become texts of that name."""
    text = read_text(path, max_bytes=MAX_BYTES)
    if path.lower().endswith(".json"):
        text = _CONSTANT.sub(lambda match: f'"{match[1]}"' if match[1] else match[0], text)
    config = parse_mapping(text, file=path, max_bytes=MAX_BYTES, max_nodes=MAX_VALUES)
    return _without_bulk(config)


def refuse_other_files(config: Mapping[str, object]) -> None:
    """Raises ConfigError, with what to do, for a file that is known and is not the config of a model."""
    if "peft_type" in config:
        base = config.get("base_model_name_or_path")
        raise ConfigError(
            "is the config of an adapter, which has no sizes of a model",
            key="peft_type",
            found=short_repr(config["peft_type"]),
            allowed=("the model that it adapts, " + printable(base) if isinstance(base, str) else "its model")
            + ", with this file as --lora",
        )
    if "dim" in config and "n_layers" in config and "model_type" not in config:
        raise ConfigError(
            "is a params.json of Meta, which leaves sizes to its code",
            key="dim",
            found=short_repr(config["dim"]),
            allowed="the config.json of the same model in the format of Transformers",
        )
    spelled = {name.lstrip("-").replace("-", "_") for name in config}
    found = [name for name in _MEGATRON if name in spelled]
    if "num_layers" in spelled and found and "model_type" not in config:
        raise ConfigError(
            "has arguments of Megatron-LM, which are more than a model",
            key=found[0],
            allowed="`shardwise review FILE` for the whole run; here plain dimensions: layers, hidden, ffn, "
            "heads, vocab, seq_len",
        )


def _without_bulk(config: Mapping[str, object]) -> dict[str, object]:
    """The config without large parts that no size depends on; `num_labels` stands for large labels."""
    rest: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and key not in _BULK:
            rest[key] = _without_bulk(value)
        elif key not in _BULK or _values(value) <= MOST_VALUES:
            rest[key] = value
        elif key == "id2label" and isinstance(value, Mapping):
            rest["num_labels"] = config.get("num_labels") or len(value)
    return rest


def _values(value: object) -> int:
    """The number of values in a value, with those in its parts."""
    if isinstance(value, Mapping):
        return 1 + sum(_values(each) for each in value.values())
    return 1 + sum(_values(each) for each in value) if isinstance(value, list) else 1
