"""Read a file or a text as a mapping: a regular UTF-8 file of limited size, in strict JSON or YAML.

JSON text becomes plain values with distinct keys and finite numbers; its size is checked before parsing. YAML
text becomes plain values through parser events, within the same limits; it may say what JSON can say and no
more. Entry points: `read_mapping`, `parse_mapping`, `parse_list`, `read_text`, `read_bytes`.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

from shardwise.errors import ConfigError
from shardwise.inputs.messages import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_NODES,
    join_key,
    printable,
    short_repr,
    too_deep,
    too_large,
    too_many,
)

JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
NOT_TEXT = re.compile("[\ud800-\udfff\0]")
_MAX_DIGITS: Final = 40
"""Digits of the longest whole number; longer ones are slow to parse and never meant."""


def number(text: str) -> int | float:
    """The finite number in JSON syntax `text`; raises ValueError where it is too long or too large."""
    match = JSON_NUMBER.fullmatch(text)
    if match is not None and match.group(1) is None and match.group(2) is None:
        if len(text) > _MAX_DIGITS:
            raise ValueError(f"a number of {len(text)} digits")
        return int(text)
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"the number {short_repr(text)[1:-1]}")
    return value


def checked_text(text: str, file: str | None, key: str) -> str:
    """`text` itself; raises ConfigError at `key` where it holds NUL or characters that UTF-8 cannot
    encode."""
    if NOT_TEXT.search(text):
        raise ConfigError(
            "is not text", file=file, key=key or None, found=short_repr(text), allowed="UTF-8 without NUL"
        )
    return text


def duplicate_key(file: str | None, key: str) -> ConfigError:
    """The error for a key that stands twice in one mapping."""
    return ConfigError("is given twice", file=file, key=key, allowed="each key once")


_MARKS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[][{},]', re.DOTALL)


class _Pairs(list[tuple[str, object]]):
    """A JSON object whose keys are not checked yet for duplicates."""


def json_value(text: str, file: str | None, max_nodes: int) -> object:
    """The value of JSON `text`, of at most `max_nodes` values; raises ConfigError where it is not strict
    JSON."""
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
    """Reject text with too many levels or values by its brackets and commas alone, before anything is
    built."""
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
    """`value` with `_Pairs` turned into dicts; raises ConfigError for a repeated key or invalid text."""
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


_CONSTANTS: Final[Mapping[str, object]] = {"": None, "null": None, "true": True, "false": False}


@dataclass(slots=True)
class _Frame:
    """A mapping or list under construction; `name` is the key whose value comes next."""

    items: dict[str, object] | list[object]
    name: str | None = None


class _YamlBuilder:
    """Builds plain values from parser events; every limit is checked before the value exists."""

    def __init__(self, file: str | None, max_nodes: int) -> None:
        self.file = file
        self.max_nodes = max_nodes
        self.nodes = 0
        self.documents = 0
        self.frames: list[_Frame] = []
        self.root: object = None

    def key(self) -> str | None:
        path = ""
        for frame in self.frames:
            if isinstance(frame.items, list):
                path += f"[{len(frame.items)}]"
            elif frame.name is not None:
                path = join_key(path, frame.name)
        return path or None

    def refuse(self, message: str, found: str, allowed: str) -> ConfigError:
        return ConfigError(message, file=self.file, key=self.key(), found=found, allowed=allowed)

    def count_node(self, event: Any) -> None:
        """Check limits, anchors and tags; every node passes here first."""
        self.nodes += 1
        if self.nodes > self.max_nodes:
            raise too_many(self.file, self.max_nodes)
        if event.anchor is not None:
            raise self.refuse("has an anchor", f"&{printable(event.anchor)}", "values written out")
        if event.tag is not None:
            raise self.refuse("has a tag", printable(event.tag), "plain values without tags")

    def start(self, items: dict[str, object] | list[object]) -> None:
        if self.awaits_key():
            raise self.refuse("has a key that is not text", short_repr(items), "text")
        if len(self.frames) >= MAX_DEPTH:
            raise too_deep(self.file)
        self.frames.append(_Frame(items))

    def end(self) -> None:
        self.put(self.frames.pop().items)

    def awaits_key(self) -> bool:
        return bool(self.frames) and isinstance(self.frames[-1].items, dict) and self.frames[-1].name is None

    def scalar(self, text: str, is_plain: bool) -> None:
        value = self.resolved(text) if is_plain else checked_text(text, self.file, self.key() or "")
        if not self.awaits_key():
            self.put(value)
            return
        if not isinstance(value, str):
            raise self.refuse(
                "has a key that is not text",
                short_repr(value),
                "text, in quotes where it looks like a number",
            )
        frame = self.frames[-1]
        frame.name = value
        if isinstance(frame.items, dict) and value in frame.items:
            raise duplicate_key(self.file, self.key() or value)

    def resolved(self, text: str) -> object:
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if JSON_NUMBER.fullmatch(text):
            try:
                return number(text)
            except ValueError as error:
                raise self.refuse("is not finite", str(error), "finite numbers") from None
        if text.lower() in (".nan", ".inf", "-.inf", "+.inf"):
            raise self.refuse("is not finite", text, "finite numbers")
        return checked_text(text, self.file, self.key() or "")

    def put(self, value: object) -> None:
        if not self.frames:
            self.root = value
            return
        frame = self.frames[-1]
        if isinstance(frame.items, list):
            frame.items.append(value)
        elif frame.name is not None:
            frame.items[frame.name] = value
            frame.name = None


def yaml_value(text: str, file: str | None, max_nodes: int) -> object:
    """The value of YAML `text`, of at most `max_nodes` values; raises ConfigError where it is not strict
    YAML."""
    import yaml  # imported only for YAML files: JSON and shorthand users do not wait for it

    builder = _YamlBuilder(file, max_nodes)
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            _handle_event(event, builder, yaml)
    except yaml.YAMLError as error:
        raise _not_yaml(error, file, builder.key()) from None
    except (ValueError, OverflowError) as error:  # escapes beyond Unicode, in the parser written in Python
        raise ConfigError("is not valid YAML", file=file, found=printable(str(error))) from None
    return builder.root


def _handle_event(event: Any, builder: _YamlBuilder, yaml: Any) -> None:
    """Pass one parser event to the builder."""
    if isinstance(event, yaml.ScalarEvent):
        builder.count_node(event)
        builder.scalar(event.value, is_plain=event.style in (None, ""))
    elif isinstance(event, yaml.MappingStartEvent):
        builder.count_node(event)
        builder.start({})
    elif isinstance(event, yaml.SequenceStartEvent):
        builder.count_node(event)
        builder.start([])
    elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
        builder.end()
    elif isinstance(event, yaml.AliasEvent):
        raise builder.refuse("has an alias", f"*{printable(event.anchor)}", "values written out")
    elif isinstance(event, yaml.DocumentStartEvent):
        builder.documents += 1
        if builder.documents > 1:
            raise builder.refuse("has more than one document", "a second ---", "one document")


def _not_yaml(error: Any, file: str | None, key: str | None) -> ConfigError:
    problem = (
        getattr(error, "problem", None) or getattr(error, "reason", None) or "text that cannot be parsed"
    )
    mark = getattr(error, "problem_mark", None)
    at = f"it at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else None
    return ConfigError(f"is not valid YAML: {printable(str(problem))}", file=file, key=key, found=at)


def read_mapping(path: str, *, max_bytes: int = MAX_BYTES, max_nodes: int = MAX_NODES) -> dict[str, object]:
    """The mapping in the file at `path`: JSON or YAML by its suffix, else by its content."""
    text = read_text(path, max_bytes=max_bytes)
    return parse_mapping(text, file=path, max_bytes=max_bytes, max_nodes=max_nodes)


def read_text(path: str, *, max_bytes: int = MAX_BYTES) -> str:
    """The text of a regular UTF-8 file of at most `max_bytes`; raises ConfigError for anything else."""
    data = read_bytes(path, max_bytes=max_bytes)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise ConfigError("is not UTF-8 text", file=printable(path), found=found, allowed="UTF-8") from None


def read_bytes(path: str, *, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes of a regular file of at most `max_bytes`; raises ConfigError for anything else, without
    waiting."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(
                "cannot be read", file=printable(path), found=_kind_of(status.st_mode), allowed="a file"
            )
        if status.st_size > max_bytes:
            raise too_large(path, status.st_size, max_bytes)
        # The file may have become a pipe since the check; O_NONBLOCK keeps open() from waiting for a writer.
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            data = file.read(max_bytes + 1) or b""
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            "cannot be read", file=printable(path), found=why.lower(), allowed="a file"
        ) from None
    if len(data) > max_bytes:
        raise too_large(path, len(data), max_bytes)
    return data


def parse_mapping(
    text: str,
    *,
    file: str | None = None,
    max_bytes: int = MAX_BYTES,
    max_nodes: int = MAX_NODES,
    is_json: bool | None = None,
) -> dict[str, object]:
    """The mapping in `text`, as JSON or YAML (by default as the name of `file` or the text says); errors name
    `file`.

    Raises ConfigError for text that breaks a rule of this package, is empty, or holds no mapping.
    """
    value = _parsed(text, file, max_bytes, max_nodes, "a mapping of keys to values", is_json)
    if not isinstance(value, dict):
        where = printable(file) if file else None
        raise ConfigError("is not a mapping", file=where, found=short_repr(value), allowed="keys with values")
    return value


def parse_list(
    text: str, *, file: str | None = None, max_bytes: int = MAX_BYTES, max_nodes: int = MAX_NODES
) -> list[object]:
    """The list in `text`, as JSON or YAML; errors are those of `parse_mapping`."""
    value = _parsed(text, file, max_bytes, max_nodes, "a list", None)
    if not isinstance(value, list):
        where = printable(file) if file else None
        raise ConfigError("is not a list", file=where, found=short_repr(value), allowed="a list")
    return value


def _parsed(
    text: str, file: str | None, max_bytes: int, max_nodes: int, expected: str, is_json: bool | None
) -> object:
    where = printable(file) if file else None
    nbytes = len(text.encode("utf-8", "surrogatepass"))
    if nbytes > max_bytes:
        raise too_large(file, nbytes, max_bytes)
    if bad := NOT_TEXT.search(text):
        found = f"{bad.group()!r} at character {bad.start()}"
        raise ConfigError("is not text", file=where, found=found, allowed="UTF-8 without NUL")
    if not text.strip():
        raise ConfigError("is empty", file=where, allowed=expected)
    as_json = _is_json(text, file) if is_json is None else is_json
    return json_value(text, where, max_nodes) if as_json else yaml_value(text, where, max_nodes)


def _kind_of(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket",
    }  # fmt: skip
    return kinds.get(stat.S_IFMT(mode), "something that is not a file")


def _is_json(text: str, file: str | None) -> bool:
    by_suffix = json_suffix(file or "")
    return by_suffix if by_suffix is not None else re.match(r'\s*\{\s*["}]', text) is not None


def json_suffix(file: str) -> bool | None:
    """Whether the name of a file says JSON (True) or YAML (False); None where it says neither."""
    return {".json": True, ".yaml": False, ".yml": False}.get(os.path.splitext(file)[1].lower())
