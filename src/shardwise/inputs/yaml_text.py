"""YAML text as plain values: what JSON can say and no more, built from parser events within the limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from shardwise.errors import ConfigError
from shardwise.inputs.limits import MAX_DEPTH, too_deep, too_many
from shardwise.inputs.scalars import JSON_NUMBER, checked_text, duplicate_key, number
from shardwise.inputs.words import join_key, printable, short_repr

_CONSTANTS: Final[Mapping[str, object]] = {"": None, "null": None, "true": True, "false": False}


@dataclass(slots=True)
class _Frame:
    """A mapping or list that is being filled; `name` is the key that waits for its value."""

    items: dict[str, object] | list[object]
    name: str | None = None


class _YamlBuilder:
    """Builds plain values from parser events, with every limit checked before the value exists."""

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
        """Every node comes here first: limits, anchors and tags."""
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
    """What `text` holds, of at most `max_nodes` values; ConfigError where it is not the strict YAML."""
    import yaml  # only where a YAML file is read: JSON and shorthand users do not wait for it

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
    """Hand one parser event to the builder."""
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
