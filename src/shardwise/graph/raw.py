"""What a graph file that is not read yet seems to say, to tell of what is wrong in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def first_user(document: object, name: str) -> str | None:
    """The first operator that names a dim or a tensor so, in a file that is not read yet and may hold
    anything."""
    for block in _listed(document, "blocks"):
        for operator in _listed(block, "operators"):
            title = operator.get("name") if isinstance(operator, Mapping) else None
            if isinstance(title, str) and _names(operator, name):
                return title
    return None


def _listed(value: object, key: str) -> Sequence[object]:
    found = value.get(key) if isinstance(value, Mapping) else None
    return found if isinstance(found, list) else ()


def _names(value: object, name: str) -> bool:
    """Whether any text within is this name."""
    if isinstance(value, Mapping):
        return any(_names(part, name) for part in value.values())
    return any(_names(part, name) for part in value) if isinstance(value, list) else value == name
