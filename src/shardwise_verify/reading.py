"""Strict reading of a plan file: JSON or YAML text to plain values, and plain values to typed records.

`read_document` accepts what JSON can say: no anchors, aliases, tags or repeated keys; size, depth and number
of values are limited. `record` reads a mapping into a dataclass by the types of its fields. Keys that a
record does not have are left aside; `keys_left` lists them. Every problem is an `InputError`.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

MAX_BYTES = 8 << 20
"""Largest size of a plan file in bytes."""

MAX_VALUES = 1_000_000
MAX_DEPTH = 64
MAX_DIGITS = 40
"""Digits of the longest whole number."""

Record = TypeVar("Record")


class InputError(Exception):
    """Input that cannot be checked: `key` is the place, `found` and `allowed` are short texts."""

    def __init__(self, message: str, *, key: str = "", found: str = "", allowed: str = "") -> None:
        super().__init__(message)
        self.message, self.key, self.found, self.allowed = message, key, found, allowed

    def __str__(self) -> str:
        parts = (self.key and f"{self.key}: ", self.message, self.found and f"; found {self.found}",
                 self.allowed and f"; allowed: {self.allowed}")  # fmt: skip
        return "".join(parts)


# Text to plain values


def read_document(path: str) -> dict[str, Any]:
    """The mapping in the file at `path`. Raises InputError for a file that cannot be read, that is too large
    or that says more than JSON can."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise InputError("is not a regular file", key=path)
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise InputError("cannot be read", key=path, found=str(error)) from None
    if len(data) > MAX_BYTES:
        raise InputError("is too large", key=path, allowed=f"{MAX_BYTES} bytes")
    return parse_document(text)


def parse_document(text: str) -> dict[str, Any]:
    """The mapping in `text`, as JSON where it begins like a JSON object, else as YAML."""
    try:
        value = _json(text) if re.match(r'\s*\{\s*["}]', text) else _yaml(text)
    except (ValueError, OverflowError, RecursionError, yaml.YAMLError) as error:
        raise InputError("is not valid JSON or YAML", found=" ".join(str(error).split())[:200]) from None
    if not isinstance(value, dict):
        raise InputError("is not a mapping", found=short(value))
    _Limits().check(value, 0)
    return value


def _json(text: str) -> Any:
    return json.loads(
        text, object_pairs_hook=_mapping, parse_int=_number, parse_float=_number, parse_constant=_number
    )


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is given twice")
    return found


_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_CONSTANTS: Mapping[str, object] = {"": None, "null": None, "true": True, "false": False}


def _number(text: str) -> int | float:
    match = _NUMBER.fullmatch(text)
    if match is not None and match.group(1) is match.group(2) is None:
        if len(text) > MAX_DIGITS:
            raise ValueError(f"a number of {len(text)} digits")
        return int(text)
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text[:MAX_DIGITS]} is not finite")
    return value


def _yaml(text: str) -> Any:
    """The one value of a YAML text; plain scalars mean what they mean in JSON, all others are text."""
    events = yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    found = [_yaml_value(event, events, 0) for event in events if isinstance(event, yaml.NodeEvent)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} documents instead of one")
    return found[0]


def _yaml_value(event: Any, events: Iterator[Any], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} levels")
    if event.anchor is not None or getattr(event, "tag", None) is not None:
        raise ValueError(f"an anchor, alias or tag {event.start_mark}")
    if isinstance(event, yaml.ScalarEvent):
        if event.style in (None, "") and event.value in _CONSTANTS:
            return _CONSTANTS[event.value]
        if event.style in (None, "") and _NUMBER.fullmatch(event.value):
            return _number(event.value)
        return event.value
    items = []
    while not isinstance(item := next(events), yaml.MappingEndEvent | yaml.SequenceEndEvent):
        items.append(_yaml_value(item, events, depth + 1))
    if isinstance(event, yaml.SequenceStartEvent):
        return items
    if not all(isinstance(name, str) for name in items[::2]):
        raise ValueError(f"a key that is not text {event.start_mark}")
    return _mapping(list(zip(items[::2], items[1::2], strict=True)))


@dataclass(slots=True)
class _Limits:
    """Counts values; refuses too many, too deep ones, and text that UTF-8 cannot encode."""

    values: int = 0

    def check(self, value: Any, depth: int) -> None:
        self.values += 1
        if self.values > MAX_VALUES or depth > MAX_DEPTH:
            raise InputError("is too large", allowed=f"{MAX_VALUES} values, {MAX_DEPTH} levels")
        if isinstance(value, str) and re.search("[\ud800-\udfff\0]", value):
            raise InputError("is not text", found=short(value))
        for item in (*value, *value.values()) if isinstance(value, dict) else ():
            self.check(item, depth + 1)
        for item in value if isinstance(value, list) else ():
            self.check(item, depth + 1)


def short(value: object) -> str:
    """A found value on one short line."""
    if isinstance(value, dict | list):
        return f"{'a mapping' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# Plain values to records


@dataclass(frozen=True, slots=True)
class Bounds:
    """Smallest and largest allowed value."""

    low: float
    high: float


Whole = Annotated[int, Bounds(0, 10**30)]
Count = Annotated[int, Bounds(1, 10**9)]
Amount = Annotated[float, Bounds(0.0, 1e30)]
"""Seconds, bytes or a factor, from 0."""
Positive = Annotated[float, Bounds(1e-30, 1e30)]
Share = Annotated[float, Bounds(0.0, 1.0)]
Anything = object
"""A value that nothing reads."""


def record(kind: type[Record], value: object, key: str = "") -> Record:
    """The record of type `kind` in the mapping `value`. Raises InputError at `key` or below it for a missing
    field and for a value of another type or out of its bounds."""
    if not isinstance(value, Mapping):
        raise InputError("is not a mapping", key=key, found=short(value))
    found = {}
    for name, type_, has_default in _fields_of(kind):  # type: ignore[arg-type]
        if name in value:
            found[name] = _value(type_, value[name], _below(key, name))
        elif not has_default:
            raise InputError("is missing", key=_below(key, name))
    return kind(**found)


def _below(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


@cache
def _fields_of(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    """Name, type and whether it has a default, of each field."""
    types = get_type_hints(kind, include_extras=True)
    return tuple(
        (each.name, types[each.name], each.default is not MISSING or each.default_factory is not MISSING)
        for each in fields(kind)
        if each.init
    )


_PLAIN: Mapping[type[Any], tuple[type[Any], ...]] = {
    bool: (bool,), int: (int,), float: (float, int), str: (str,),
}  # fmt: skip


def _value(type_: Any, value: Any, key: str) -> Any:
    """`value` as the type of a field."""
    if type_ is Anything or type_ is Any:
        return value
    if (own := getattr(type_, "from_plain", None)) is not None:
        return own(value, key)
    if is_dataclass(type_):
        return record(type_, value, key)  # type: ignore[arg-type]
    if type_ in _PLAIN:
        if not isinstance(value, _PLAIN[type_]) or (isinstance(value, bool) and type_ is not bool):
            raise InputError(f"is not of type {type_.__name__}", key=key, found=short(value))
        return type_(value)
    return _GENERIC[get_origin(type_)](get_args(type_), value, key)


def _bounded(arguments: Any, value: Any, key: str) -> Any:
    type_, bounds = arguments
    found = _value(type_, value, key)
    if not bounds.low <= found <= bounds.high:
        raise InputError(
            "is out of range", key=key, found=short(value), allowed=f"{bounds.low:g} to {bounds.high:g}"
        )
    return found


def _one_of_types(arguments: Any, value: Any, key: str) -> Any:
    """A value that may be null, or one of several records, which differ in `kind`."""
    if value is None and NoneType in arguments:
        return None
    types = [type_ for type_ in arguments if type_ is not NoneType]
    if len(types) > 1:
        kind = value.get("kind") if isinstance(value, Mapping) else None
        types = [type_ for type_ in types if kind in get_args(get_type_hints(type_)["kind"])]
        if not types:
            raise InputError("is of no known kind", key=key, found=short(kind))
    return _value(types[0], value, key)


def _choice(arguments: Any, value: Any, key: str) -> Any:
    if not isinstance(value, str) or value not in arguments:
        raise InputError("is not a known value", key=key, found=short(value), allowed=", ".join(arguments))
    return value


def _tuple(arguments: Any, value: Any, key: str) -> Any:
    if not isinstance(value, list):
        raise InputError("is not a list", key=key, found=short(value))
    types = arguments[:1] * len(value) if arguments[-1] is ... else arguments
    if len(types) != len(value):
        raise InputError("has another length", key=key, found=short(value), allowed=str(len(types)))
    return tuple(
        _value(type_, item, f"{key}[{place}]")
        for place, (type_, item) in enumerate(zip(types, value, strict=True))
    )


def _named(arguments: Any, value: Any, key: str) -> Any:
    if not isinstance(value, Mapping):
        raise InputError("is not a mapping", key=key, found=short(value))
    return {name: _value(arguments[1], item, _below(key, name)) for name, item in value.items()}


_GENERIC: Mapping[Any, Callable[[Any, Any, str], Any]] = {
    Annotated: _bounded, Union: _one_of_types, UnionType: _one_of_types, Literal: _choice, tuple: _tuple,
    Mapping: _named,
}  # fmt: skip


def keys_left(kind: Any, value: Any, key: str = "") -> Iterator[str]:
    """The keys of a document that the record `kind` and the records in it do not have, without the index of
    items of a list."""
    if is_dataclass(kind) and isinstance(value, Mapping) and not hasattr(kind, "from_plain"):
        known = {name: type_ for name, type_, _ in _fields_of(kind)}  # type: ignore[arg-type]
        for name, item in value.items():
            if name in known:
                yield from keys_left(known[name], item, _below(key, name))
            else:
                yield _below(key, name)
        return
    of = [type_ for type_ in get_args(kind) if type_ not in (..., NoneType)]
    if get_origin(kind) is tuple and isinstance(value, list):
        for place, item in enumerate(value):
            yield from keys_left(of[0 if len(of) == 1 else place], item, key)
    elif get_origin(kind) in (UnionType, Union) and len(of) == 1:
        yield from keys_left(of[0], value, key)
