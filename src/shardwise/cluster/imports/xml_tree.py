"""XML without documents that grow: no entities of its own, no external ones, limits on depth and size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from xml.parsers import expat

from shardwise.errors import ConfigError
from shardwise.inputs import printable

MAX_DEPTH = 64
MAX_ELEMENTS = 200_000


@dataclass(slots=True)
class Element:
    """An element with its attributes, its text and its children."""

    name: str
    attributes: Mapping[str, str]
    text: str = ""
    children: list[Element] = field(default_factory=list)

    def child(self, path: str) -> Element | None:
        """The first element at a path such as `fb_memory_usage/total`."""
        found: Element | None = self
        for name in path.split("/"):
            found = next((one for one in found.children if one.name == name), None) if found else None
        return found

    def value(self, path: str) -> str:
        """The text at a path, without white space around it; empty where there is none."""
        found = self.child(path)
        return found.text.strip() if found else ""

    def all(self, name: str) -> Iterator[Element]:
        """Every element below this one with this name, in the order of the document."""
        for one in self.children:
            if one.name == name:
                yield one
            yield from one.all(name)


def xml_root(text: str, file: str) -> Element:
    """The root element of a document. ConfigError, with the line, where it is not XML, is cut off, or defines
    entities."""
    where = printable(file)
    parser = expat.ParserCreate()
    parser.buffer_text = True
    top = Element("", {})
    stack, count = [top], 0

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal count
        count += 1
        if len(stack) > MAX_DEPTH or count > MAX_ELEMENTS:
            raise ConfigError(
                "has too many elements", file=where, key=f"line {parser.CurrentLineNumber}",
                allowed=f"at most {MAX_ELEMENTS}, {MAX_DEPTH} deep",
            )  # fmt: skip
        element = Element(name, attributes)
        stack[-1].children.append(element)
        stack.append(element)

    def entity(*_: object) -> None:
        raise ConfigError(
            "defines entities", file=where, key=f"line {parser.CurrentLineNumber}", allowed="XML without them"
        )

    def data(characters: str) -> None:
        stack[-1].text += characters

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda _: stack.pop()
    parser.CharacterDataHandler = data
    parser.EntityDeclHandler = entity
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        message = f"is not valid XML: {expat.ErrorString(error.code)}"
        raise ConfigError(message, file=where, key=f"line {error.lineno}") from None
    return top.children[0]
