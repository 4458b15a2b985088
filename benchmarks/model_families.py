"""Writes the tables of docs/reference/model-families.md: `python -m benchmarks.model_families`.

For each causal family of Transformers: whether it is planned, trained and exported here, or why not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from shardwise.model.config_parts import reason_against
from shardwise.model.family_files import (
    config_class,
    family_of,
    model_types,
    not_planned,
    transformers_data,
)
from shardwise.model.vision import vision_types
from shardwise.strategy import target_names, target_of

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "model-families.md"
START, END = "<!-- tables -->", "<!-- end of tables -->"


def causal_types() -> tuple[str, ...]:
    """The `model_type` of all causal language models of Transformers."""
    types: Mapping[str, Mapping[str, object]] = transformers_data()["types"]
    return tuple(name for name, entry in types.items() if "class" in entry)


def text_type(model_type: str) -> str | None:
    """The type whose family plans this one: its own, or that of its text decoder; None where none does."""
    if model_type in not_planned():
        return None
    if family_of(model_type) is not None:
        return model_type
    found = config_class(model_type)
    inner = found.text[1] if found is not None and found.text is not None else ""
    return inner if family_of(inner) is not None else None


def wrapper_types() -> tuple[str, ...]:
    """Multimodal types of Transformers, without a causal class, whose text decoder is planned."""
    types: Mapping[str, object] = transformers_data()["types"]
    causal = causal_types()
    return tuple(name for name in types if name not in causal and config_class(name) and _has_text(name))


def _has_text(model_type: str) -> bool:
    found = config_class(model_type)
    return found is not None and found.text is not None and text_type(model_type) is not None


def tables() -> str:
    """The tables of the page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    causal = causal_types()
    planned = [name for name in causal if text_type(name) is not None]
    refused = [name for name in causal if text_type(name) is None]
    version = transformers_data()["transformers"]
    yield f"Of {len(causal)} causal types of Transformers {version}, {len(planned)} are planned."
    yield ""
    yield "| type | layers | runs on |"
    yield "|---|---|---|"
    for name in planned:
        yield _row(name)
    yield ""
    yield "Types of other code, and text decoders of multimodal models:"
    yield ""
    yield "| type | layers | runs on |"
    yield "|---|---|---|"
    for name in model_types():
        if name not in causal:
            yield _row(name)
    yield ""
    wrappers = ", ".join(f"`{name}`" for name in wrapper_types())
    yield f"Multimodal types whose text decoder is planned: {wrappers}."
    yield ""
    towers = ", ".join(f"`{name}`" for name in vision_types())
    yield f"Of these the vision tower is counted with `--images`: {towers}."
    yield ""
    yield "Causal types that are not planned:"
    yield ""
    yield "| reason | types |"
    yield "|---|---|"
    reasons: dict[str, list[str]] = {}
    for name in refused:
        reasons.setdefault(reason_against(name, {}) or "no reason is known", []).append(name)
    for reason, names in sorted(reasons.items()):
        yield f"| {reason} | {', '.join(f'`{name}`' for name in names)} |"


def _row(name: str) -> str:
    inner = text_type(name) or name
    family = family_of(inner)
    if family is None:
        raise LookupError(name)
    if inner not in causal_types() and config_class(inner) is not None:
        return f"| `{name}` | {family.about} | planned as `{family.name}` |"
    targets = [target for target in target_names() if family.name in target_of(target).families]
    return f"| `{name}` | {family.about} | {', '.join(targets) or 'planned and simulated only'} |"


def page(text: str) -> str:
    """The page with its tables written anew."""
    head, rest = text.split(START)
    _, tail = rest.split(END)
    return f"{head}{START}\n\n{tables()}\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), encoding="utf-8")
