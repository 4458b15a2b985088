"""Plain values as YAML or JSON text, deterministic and made for diffs.

YAML has one key per line and short lists on one line. The strict reader (`shardwise.inputs`) reads all of it
back as equal values. It is much faster than a general dumper: it has no anchors, tags, folding or line
widths. `dumps` writes the format that the file's name says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import TypeGuard

from shardwise.errors import InternalError
from shardwise.inputs.read import json_suffix

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_RESERVED = frozenset(("null", "true", "false", "yes", "no", "on", "off", "y", "n"))
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
_LONG = 100
"""A list whose one-line form has more characters than this is split over several lines."""


def dumps_yaml(document: Mapping[str, object]) -> str:
    """`document` as YAML text that ends in a newline; the order of keys stays.

    Values are mappings with text keys, sequences, text, finite numbers, booleans and None. Raises
    InternalError for any other value.
    """
    return "".join(f"{line}\n" for line in _mapping_lines(document))


def dumps_flow_yaml(value: object) -> str:
    """`value` as YAML on one line, for use inside a longer text."""
    return _flow(value)


def _mapping_lines(mapping: Mapping[str, object]) -> Iterator[str]:
    for key, value in mapping.items():
        name = _text(key)
        if isinstance(value, Mapping) and value:
            yield f"{name}:"
            yield from (f"  {line}" for line in _mapping_lines(value))
        elif _is_list(value) and _contains_mappings(value):
            yield f"{name}:"
            yield from _list_lines(value)
        else:
            flow = _flow(value)
            if _is_list(value) and len(flow) > _LONG:
                yield f"{name}:"
                yield from _list_lines(value)
            else:
                yield f"{name}: {flow}"


def _list_lines(values: Sequence[object]) -> Iterator[str]:
    if not _contains_mappings(values) and not any(map(_is_list, values)) and _are_short(values):
        yield from _wrapped([_flow(value) for value in values])
        return
    for value in values:
        if isinstance(value, Mapping) and value:
            lines = _mapping_lines(value)
            yield f"- {next(lines)}"
            yield from (f"  {line}" for line in lines)
        else:
            yield f"- {_flow(value)}"


def _wrapped(texts: list[str]) -> Iterator[str]:
    """A flow list over several lines of about `_LONG` characters."""
    line = "  ["
    for index, text in enumerate(texts):
        if len(line) + len(text) > _LONG and line != "  [":
            yield line.rstrip()
            line = "   "
        line += text + ("]" if index == len(texts) - 1 else ", ")
    yield line


def _flow(value: object) -> str:
    """`value` on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    if _is_list(value):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str):
        return _text(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float) and isfinite(value):
        return _float(value)
    raise InternalError(f"a file cannot hold {value!r} of type {type(value).__name__}")


def _float(value: float) -> str:
    """The shortest text that reads back as `value`, as a float in both YAML 1.1 and JSON (`1.0e-05`, never
    `1e-05`)."""
    text = float.__repr__(value)
    mantissa, mark, exponent = text.partition("e")
    return text if not mark or "." in mantissa else f"{mantissa}.0e{exponent}"


def _text(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _RESERVED:
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match.group()):04x}", quoted)


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, list | tuple)


def _contains_mappings(values: Sequence[object]) -> bool:
    return any(isinstance(value, Mapping) for value in values)


def _are_short(values: Sequence[object]) -> bool:
    return all(not isinstance(value, str) or len(value) <= 30 for value in values)


def dumps(document: Mapping[str, object], *, file: str) -> str:
    """`document` as the text of a file named `file`: JSON where the name ends in `.json`, else YAML.

    `read_mapping` reads it back. Values are those of `dumps_yaml`; any other value raises InternalError.
    """
    if not json_suffix(file):
        return dumps_yaml(document)
    try:
        return json.dumps(document, indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise InternalError(f"a file cannot hold this: {error}") from error
