"""Text of Megatron-Bridge and NeMo as arguments of Megatron-LM: overrides of a recipe, a recipe in Python, or
a YAML with the same sections. Megatron-LM's own names in a YAML are taken as they are."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from shardwise.errors import ConfigError

_OVERRIDE = re.compile(r"\+{0,2}((?:[a-z]\w*\.)*[a-z]\w*)=(.*)", re.DOTALL)
_ASSIGNMENT = re.compile(r"(?m)^\s*(?:cfg|config|recipe)\.((?:[a-z]\w*\.)*[a-z]\w*)\s*=\s*(.+?)\s*(?:#.*)?$")
_MARK = r"(?m)(?:^|[\s'\"+.])model\.(?:tensor|pipeline)_model_parallel_size\s*="
_YAML_MARK = r"(?m)^\s*tensor_model_parallel_size:"

_SECTIONS = (
    "model",
    "train",
    "trainer",
    "ddp",
    "dist",
    "optimizer",
    "dataset",
    "checkpoint",
    "mixed_precision",
)

_NAMES = {
    "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32",
    "num_moe_experts": "num_experts",
    "vocab_size": "padded_vocab_size",
    "gated_linear_unit": "swiglu",
    "encoder_seq_length": "seq_length",
    "activations_checkpoint_granularity": "recompute_granularity",
    "activations_checkpoint_method": "recompute_method",
    "activations_checkpoint_num_layers": "recompute_num_layers",
}
"""Fields and the names of Megatron-LM's arguments, where they differ."""

_FP8_RECIPES = {
    "delayed": "delayed", "current": "tensorwise", "subchannel": "blockwise", "mxfp8": "mxfp8",
}  # fmt: skip
"""Words in the names of mixed-precision recipes, and the values of `--fp8-recipe`."""

DEFAULTS: Mapping[str, Any] = {
    "bf16": True, "use_distributed_optimizer": True, "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}  # fmt: skip
"""Values of Megatron-Bridge's pretraining recipes (`recipes/common.py`), where the text has none."""


def is_bridge(text: str) -> bool:
    """Whether the text is a recipe of Megatron-Bridge or overrides of one, or a YAML with such names."""
    return re.search(_MARK, text) is not None or re.search(_YAML_MARK, text) is not None


def bridge_values(text: str) -> dict[str, Any]:
    """The values of Megatron-LM's arguments that the text sets, and the defaults of a recipe."""
    is_yaml = re.search(_MARK, text) is None
    found: dict[str, Any] = {} if is_yaml and not _has_sections(text) else dict(DEFAULTS)
    for path, value in _of_yaml(text) if is_yaml else _assigned(text):
        section, _, name = path.rpartition(".")
        if path in ("mixed_precision", "trainer.precision"):
            found |= _precision(str(value))
        elif not section or section.split(".")[0] in _SECTIONS:
            found |= _argument(name, value)
    if found.get("bf16") and found.get("accumulate_allreduce_grads_in_fp32") is False:
        found["grad_reduce_in_bf16"] = True
    if found.get("num_experts") is not None:
        found.setdefault("expert_tensor_parallel_size", 1)
    return found


def _argument(name: str, value: Any) -> dict[str, Any]:
    if name == "share_embeddings_and_output_weights":
        return {"untie_embeddings_and_output_weights": value is False}
    return {} if value is None else {_NAMES.get(name, name): value}


def _assigned(text: str) -> Iterator[tuple[str, Any]]:
    """Paths with their values: assignments of Python, or else the words of a shell."""
    if assignments := _ASSIGNMENT.findall(text):
        for path, value in assignments:
            yield path, _value(value)
        return
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise ConfigError(f"is no shell text: {error}".lower(), allowed="overrides, one per line") from None
    for match in filter(None, map(_OVERRIDE.fullmatch, words)):
        yield match[1], _value(match[2])


def _value(text: str) -> Any:
    """The value of an override or an assignment; words and calls are text."""
    plain = {"null": None, "true": True, "false": False}
    if text.lower() in plain:
        return plain[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        is_list = re.fullmatch(r"\[\w+(,\w+)*\]", text)
        return text.strip("[]").split(",") if is_list else text


def _has_sections(text: str) -> bool:
    return any(path.partition(".")[0] in _SECTIONS and "." in path for path, _ in _of_yaml(text))


def _of_yaml(text: str) -> Iterator[tuple[str, Any]]:
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        raise ConfigError("is no YAML", allowed="a YAML of a recipe") from None
    return _flat(document if isinstance(document, dict) else {}, "")


def _flat(values: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _precision(name: str) -> dict[str, Any]:
    """Arguments for a recipe of mixed precision, by the words of its name."""
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    found: dict[str, Any] = {"bf16": "fp16" not in words and "32" not in words and name != "None"}
    found["fp16"] = "fp16" in words or words == {"16", "mixed"}
    found["accumulate_allreduce_grads_in_fp32"] = not found["fp16"]
    recipes = [recipe for word, recipe in _FP8_RECIPES.items() if word in words]
    if "fp8" in words or "mxfp8" in words:
        found |= {"fp8": "hybrid", "fp8_recipe": (recipes or ["tensorwise"])[0]}
    return found
