"""Families of models as data: one file for each family in `data/families`, read into `ModelFamily` records.

A file says which key of a config decides which size (`sizes`), which keys change nothing (`ignored`), and
what must hold (`checks`). `data/transformers.json` has the defaults of the configuration classes of
Transformers 5 (`config_class`), made by `python -m benchmarks.config_defaults`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from shardwise.errors import InternalError
from shardwise.model.expressions import Expression, parse_expression

DATA: Final = Path(__file__).parent / "data"
_DEFAULT_LAYER_TYPES: Final = {"full_attention": False, "sliding_attention": True}


@dataclass(frozen=True, slots=True)
class SizeCheck:
    """A condition on a config: an error at `key` where it does not hold, with the `allowed` values."""

    key: str
    condition: Expression
    allowed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """How configs of one family are read.

    - `name`: the family of the model; software that supports it supports all its `model_types`.
    - `sizes`: the expression of each size, by the names in `families.py`.
    - `config_class`: the `model_type` whose class has the defaults; `defaults` override them.
    - `spellings`: other spellings of a key. `required` and `optional`: keys that a config must have, in
      addition to the main sizes, and main sizes that it may leave out.
    - `checks`, `ignored` (key and reason), and `layer_types`: whether layers of a type have the window.
    - `notes`: what the plan does not express; each is on the card.
    """

    name: str
    about: str
    model_types: tuple[str, ...]
    config_class: str
    sizes: Mapping[str, Expression]
    defaults: Mapping[str, object]
    spellings: Mapping[str, tuple[str, ...]]
    required: frozenset[str]
    optional: frozenset[str]
    checks: tuple[SizeCheck, ...]
    ignored: Mapping[str, str]
    layer_types: Mapping[str, bool]
    notes: tuple[str, ...]

    @property
    def keys(self) -> frozenset[str]:
        """All keys that the family reads or ignores."""
        expressions = [*self.sizes.values(), *(check.condition for check in self.checks)]
        names = {name for expression in expressions for name in expression.names}
        return frozenset(names | {check.key for check in self.checks} | set(self.ignored))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigClass:
    """A configuration class of Transformers: `defaults` of its keys, `spellings` (other spelling to key), the
    class of the model, and the key and the `model_type` of the text decoder of a multimodal config."""

    defaults: Mapping[str, object]
    spellings: Mapping[str, str]
    model_class: str
    text: tuple[str, str] | None
    is_encoder_decoder: bool


@cache
def transformers_data() -> Mapping[str, Any]:
    """The generated file: `transformers` (the version), `base` (keys of all classes) and `types`."""
    content: Mapping[str, Any] = json.loads((DATA / "transformers.json").read_text("utf-8"))
    return content


def config_class(model_type: str) -> ConfigClass | None:
    """The configuration class of a `model_type`; None where Transformers has none."""
    entry = transformers_data()["types"].get(model_type)
    if entry is None:
        return None
    text = entry.get("text")
    return ConfigClass(
        defaults={**transformers_data()["base"], **entry["defaults"]},
        spellings=entry.get("spellings", {}),
        model_class=entry.get("class", ""),
        text=(text[0], text[1]) if text else None,
        is_encoder_decoder=entry["defaults"].get("is_encoder_decoder") is True,
    )


def vision_class(model_type: str) -> ConfigClass:
    """The configuration class of a vision tower; without defaults where Transformers has none."""
    entry = transformers_data()["vision"].get(model_type, {"defaults": {}})
    return ConfigClass(
        defaults=entry["defaults"],
        spellings=entry.get("spellings", {}),
        model_class="",
        text=None,
        is_encoder_decoder=False,
    )


def vision_type(model_type: str) -> str | None:
    """The `model_type` of the vision config that a multimodal class has by default."""
    found = transformers_data()["types"].get(model_type, {}).get("vision")
    return None if found is None else str(found[1])


@cache
def model_type_of_class(model_class: str) -> str | None:
    """The `model_type` of a model class such as `DeepseekV3ForCausalLM`; None where it is not known."""
    types = transformers_data()["types"]
    found = [name for name, entry in types.items() if entry.get("class") == model_class]
    return min(found, key=lambda name: (name not in model_types(), name), default=None)


@cache
def not_planned() -> Mapping[str, str]:
    """The reason for each `model_type` of Transformers that cannot be planned."""
    content: Mapping[str, list[str]] = json.loads((DATA / "not_planned.json").read_text("utf-8"))
    return {name: reason for reason, names in content.items() for name in names}


@cache
def common_keys() -> Mapping[str, Any]:
    """Keys of all families: `harmless` and `markers` (key and reason), and `nullable`, where null is a
    value."""
    content: Mapping[str, Any] = json.loads((DATA / "common_keys.json").read_text("utf-8"))
    return content


@cache
def model_types() -> Mapping[str, str]:
    """The name of the family file for each `model_type`, sorted by `model_type`."""
    found: dict[str, str] = {}
    for path in sorted((DATA / "families").glob("*.json")):
        for model_type in _file(path.stem).get("model_types", [path.stem]):
            if found.setdefault(model_type, path.stem) != path.stem:
                raise InternalError(f"two families read {model_type}: {found[model_type]} and {path.stem}")
    return dict(sorted(found.items()))


@cache
def family_of(model_type: str) -> ModelFamily | None:
    """The family that reads configs of this `model_type`; None where no family does."""
    name = model_types().get(model_type)
    return None if name is None else _family(name)


@cache
def _file(name: str) -> Mapping[str, Any]:
    content: Mapping[str, Any] = json.loads((DATA / "families" / f"{name}.json").read_text("utf-8"))
    return content


_MERGED: Final = ("sizes", "defaults", "spellings", "ignored", "layer_types")
_ADDED: Final = ("required", "optional", "checks", "notes")
_OWN: Final = ("about", "like", "model_types", "family", "config_class")


@cache
def _merged(name: str) -> Mapping[str, Any]:
    """The content of a family file over that of the file that it is `like`."""
    own = _file(name)
    unknown = set(own) - {*_MERGED, *_ADDED, *_OWN}
    if unknown:
        raise InternalError(f"family file {name} has unknown keys: {', '.join(sorted(unknown))}")
    parent = _merged(own["like"]) if "like" in own else {}
    return {
        **{key: {**parent.get(key, {}), **own.get(key, {})} for key in _MERGED},
        **{key: [*parent.get(key, []), *own.get(key, [])] for key in _ADDED},
        "layer_types": own.get("layer_types", parent.get("layer_types", _DEFAULT_LAYER_TYPES)),
    }


@cache
def _family(name: str) -> ModelFamily:
    own, merged = _file(name), _merged(name)
    types = tuple(own.get("model_types", [name]))
    sizes = {key: text for key, text in merged["sizes"].items() if text is not None}
    return ModelFamily(
        name=own.get("family", name),
        about=own["about"],
        model_types=types,
        config_class=own.get("config_class", ""),
        sizes={key: parse_expression(_text(value)) for key, value in sizes.items()},
        defaults=merged["defaults"],
        spellings={key: tuple(others) for key, others in merged["spellings"].items()},
        required=frozenset(merged["required"]),
        optional=frozenset(merged["optional"]),
        checks=tuple(SizeCheck(key, parse_expression(text), why) for key, text, why in merged["checks"]),
        ignored=merged["ignored"],
        layer_types=merged["layer_types"],
        notes=tuple(merged["notes"]),
    )


def _text(value: object) -> str:
    """The expression of a value in a family file: a text is one, true, false and numbers are constants."""
    return value if isinstance(value, str) else repr(value)
