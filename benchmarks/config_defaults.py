"""Writes the defaults of Transformers' configuration classes: `python -m benchmarks.config_defaults`.

The file `src/shardwise/model/data/transformers.json` has, for each `model_type` of a causal language model or
of a model that contains one: the declared default of every key, other spellings of keys, the class of the
model, and where the text decoder and the vision tower of a multimodal config are; and the same of classes of
vision towers. Planning reads this file and never imports Transformers, so that an answer does not depend on
what is installed.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[1] / "src" / "shardwise" / "model" / "data" / "transformers.json"


def document() -> dict[str, Any]:
    """The content of the file, from the version of Transformers that is installed."""
    transformers: Any = import_module("transformers")
    auto: Any = import_module("transformers.models.auto.modeling_auto")
    configs: Any = import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    images = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    sequences = auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    types: dict[str, dict[str, Any]] = {}
    towers: dict[str, dict[str, Any]] = {}
    for name in sorted({*causal, *images, *sequences}):
        entry = types[name] = _entry(configs[name], causal.get(name))
        found = _text(configs[name])
        if found is not None:
            key, text = found
            entry["text"] = [key, text.model_type]
            types.setdefault(text.model_type, _entry(type(text), causal.get(text.model_type)))
        vision = _part(configs[name], ("vision_config",))
        if vision is not None and vision[1].model_type:
            entry["vision"] = [vision[0], vision[1].model_type]
            towers[vision[1].model_type] = _entry(type(vision[1]), None)
    return {
        "transformers": transformers.__version__,
        "made_by": "python -m benchmarks.config_defaults",
        "base": _defaults(transformers.PreTrainedConfig),
        "vision": {name: towers[name] for name in sorted(towers)},
        "types": {name: types[name] for name in sorted(types)},
    }


def _entry(config_class: Any, model_class: Any) -> dict[str, Any]:
    base = _defaults(import_module("transformers").PreTrainedConfig)
    declared = _defaults(config_class)
    defaults = {key: value for key, value in declared.items() if base.get(key, MISSING) != value}
    entry: dict[str, Any] = {"defaults": defaults}
    if config_class.attribute_map:
        entry["spellings"] = dict(sorted(config_class.attribute_map.items()))
    if model_class is not None:
        entry["class"] = model_class if isinstance(model_class, str) else model_class[0]
    return entry


def _defaults(config_class: Any) -> dict[str, Any]:
    """The declared defaults that JSON can write; null for others and where the class declares none."""
    return {
        each.name: _plain(each.default if each.default_factory is MISSING else each.default_factory())
        for each in sorted(fields(config_class), key=lambda each: each.name)
    }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        value = list(value)
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return None
    return value


def _text(config_class: Any) -> tuple[str, Any] | None:
    """The key and the default config of the text decoder; None where a config has none."""
    return _part(config_class, ("text_config", "llm_config", "language_config", "thinker_config"))


def _part(config_class: Any, keys: tuple[str, ...]) -> tuple[str, Any] | None:
    """The first of these keys under which a config has another one, and its default."""
    for key in keys:
        if key in config_class.sub_configs:
            try:
                part = getattr(config_class(), key, None)
            except Exception:  # noqa: BLE001  (a class whose defaults do not make a config)
                return None
            return None if part is None else (key, part)
    return None


def lines(content: dict[str, Any]) -> str:
    """The file's text: one line for each type, so that a new version is a short difference."""
    head = {key: value for key, value in content.items() if key not in ("types", "vision")}
    top = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    parts = []
    for part in ("vision", "types"):
        rows = [f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in content[part].items()]
        parts.append(f"  {json.dumps(part)}: {{\n" + ",\n".join(rows) + "\n  }")
    return "{\n" + top + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    OUT.write_text(lines(document()), encoding="utf-8")
