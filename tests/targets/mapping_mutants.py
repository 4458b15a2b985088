"""Mutated mappings, as a wrong export would write them: each has one value or one key changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Path = tuple[str, ...]


def mapping_mutants(
    mapping: Mapping[str, Any], words: Mapping[str, str], path: Path = ()
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The path of each changed value, with the whole mapping: a number doubled, a truth value inverted, a
    text replaced by that of `words`, or a misspelled key (its path ends in `_x`)."""
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            for place, changed in mapping_mutants(value, words, (*path, key)):
                yield place, {**mapping, key: changed}
        elif (other := _other(value, words)) is not None:
            yield (*path, key), {**mapping, key: other}
        rest = {name: each for name, each in mapping.items() if name != key}
        yield (*path, f"{key}_x"), {**rest, f"{key}_x": value}


def _other(value: Any, words: Mapping[str, str]) -> Any:
    """Another value of the same type; None where there is none."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 if value else 1
    return words.get(value) if isinstance(value, str) else None
