"""JSON text as plain values: distinct keys, finite numbers, sizes checked before anything is built."""

from __future__ import annotations

import json
import re
from typing import Any

from shardwise.errors import ConfigError
from shardwise.inputs.limits import MAX_DEPTH, too_deep, too_many
from shardwise.inputs.scalars import checked_text, duplicate_key, number
from shardwise.inputs.words import join_key

_MARKS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[][{},]', re.DOTALL)


class _Pairs(list[tuple[str, object]]):
    """A JSON object before its keys are known to be distinct."""


def json_value(text: str, file: str | None, max_nodes: int) -> object:
    """What `text` holds, of at most `max_nodes` values; ConfigError where it is not strict JSON."""
    _check_json_size(text, file, max_nodes)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_Pairs,
            parse_float=number,
            parse_int=number,
            parse_constant=_no_constant,
        )
    except json.JSONDecodeError as error:
        at = f"it at line {error.lineno}, column {error.colno}"
        problem = error.msg[:1].lower() + error.msg[1:].removesuffix(" starting at")
        raise ConfigError(f"is not valid JSON: {problem}", file=file, found=at) from None
    except ValueError as error:
        raise ConfigError(
            "has a number that is not finite", file=file, found=str(error), allowed="numbers"
        ) from None
    return _distinct(value, file, "")


def _check_json_size(text: str, file: str | None, max_nodes: int) -> None:
    """Refuse too deep or too many values from the marks alone, so that nothing is built first."""
    depth, nodes = 0, 1
    for match in _MARKS.finditer(text):
        mark = match.group()
        if mark in "[{":
            depth += 1
            nodes += 1
            if depth > MAX_DEPTH:
                raise too_deep(file)
        elif mark in "]}":
            depth -= 1
        elif mark == ",":
            nodes += 1
        if nodes > max_nodes:
            raise too_many(file, max_nodes)


def _no_constant(text: str) -> object:
    raise ValueError(text)


def _distinct(value: object, file: str | None, key: str) -> Any:
    """`value` with its `_Pairs` made dicts; ConfigError where a key repeats or a string is not text."""
    if isinstance(value, _Pairs):
        built: dict[str, object] = {}
        for name, item in value:
            if name in built:
                raise duplicate_key(file, join_key(key, name))
            built[checked_text(name, file, key)] = _distinct(item, file, join_key(key, name))
        return built
    if isinstance(value, list):
        return [_distinct(item, file, f"{key}[{index}]") for index, item in enumerate(value)]
    return checked_text(value, file, key) if isinstance(value, str) else value
