"""The resolved layers of a model in a plan file: typed parts with all their operators and sizes.

A program that checks or runs a plan reads them, and not the configuration of a family of models
(docs/reference/formats.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields
from itertools import groupby

from shardwise.model import Layer, Model
from shardwise.operators import Extent, Operator, Saved, Weight

PART_TYPES = {
    "attention": "attention",
    "mlp": "mlp",
    "router": "experts",
    "experts": "experts",
    "shared": "experts",
}
"""The type of a layer's part by the first word of its operators' names; of others, the word itself."""


def layers_document(model: Model) -> dict[str, object]:
    """The layers of `model`: `pattern` is a list of [index into `kinds`, number of layers in a row];
    embedding and head are lists of operators. Sizes are elements, over all ranks and experts; an extent is
    [size, role], or a number if it is never sharded."""
    return {
        "pattern": [[kind, len(list(run))] for kind, run in groupby(model.pattern)],
        "kinds": [_kind(kind) for kind in model.kinds],
        "embedding": _operators(model.embedding),
        "head": _operators(model.head),
        "head_experts": None if model.head_experts is None else asdict(model.head_experts),
        "head_layers": model.head_layers,
        "head_tensor_syncs": model.head_tensor_syncs,
        "tied_embeddings": model.tied_embeddings,
        "hidden": model.hidden,
        "vocab": model.vocab,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        **({"patches": model.patches, "image_tokens": model.image_tokens} if model.patches else {}),
    }


def _kind(layer: Layer) -> dict[str, object]:
    words = ((operator.name.partition(".")[0], operator) for operator in layer.operators)
    parts = groupby(words, lambda pair: PART_TYPES.get(pair[0], pair[0]))
    return {
        "name": layer.name,
        "tensor_syncs": layer.tensor_syncs,
        "experts": None if layer.experts is None else asdict(layer.experts),
        "parts": [
            {"type": name, "operators": _operators([operator for _, operator in own])} for name, own in parts
        ],
    }


def _operators(operators: Sequence[Operator]) -> list[dict[str, object]]:
    return [{"kind": operator.kind, **_compact(operator)} for operator in operators]


def _compact(record: Operator | Weight | Saved) -> dict[str, object]:
    """The fields of a record that differ from their defaults."""
    found: dict[str, object] = {}
    for each in fields(record):
        value = getattr(record, each.name)
        if each.init and (each.default is MISSING or value != each.default):
            found[each.name] = _value(value)
    return found


def _value(value: object) -> object:
    if isinstance(value, Extent):
        return value.size if value.role == "whole" else [value.size, value.role]
    if isinstance(value, tuple):
        return [_value(item) for item in value]
    return _compact(value) if isinstance(value, Weight | Saved) else value
