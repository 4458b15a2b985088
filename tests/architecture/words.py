"""Words that neither identifiers nor prose may have; docs/reference/glossary.md gives the terms to use
instead."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from tests.architecture.sources import Module

RETIRED = frozenset(
    {
        "abreast", "asked", "beaten", "behind", "beside", "borrowed", "braid", "braids", "bring", "brings",
        "brought", "closeup", "customary", "dive", "dived", "dives", "drawn", "errand", "errands", "fate",
        "fates", "forms", "handed", "handing", "hub", "hubs", "kept", "lane", "lanes", "lent", "lie", "lies",
        "likes", "loan", "loans", "looked", "loose", "loosen", "loosened", "pieces", "pooled", "raised",
        "reach", "rests", "rooms", "said", "says", "seat", "seats", "sharpen", "sharpened", "sieve", "sift",
        "sifted", "sketch", "sketches", "soon", "staircase", "stairs", "told", "turns",
    }
)  # fmt: skip
"""Retired parts of identifiers and module names; parts are divided by underscores or capitals."""

RETIRED_PHRASES = (
    r"abreast", r"borrow(s|ed)?", r"(?<!--)braids?", r"close-?ups?", r"customar(y|ily)", r"cut by the bound",
    r"errands?", r"fates?", r"held against", r"(?<!Face )hubs?", r"(?<!PCIe )lanes?", r"lent", r"loans?",
    r"loosen(s|ed)?", r"made again", r"raised lines?", r"seats?", r"sharpen(s|ed)?", r"siev(e|ed)",
    r"sift(s|ed)?", r"sketch(es|ed)?", r"stairs", r"told", r"what became of",
)  # fmt: skip
"""Retired words and phrases in prose: docstrings, comments, messages and pages."""

_PHRASE = re.compile(rf"\b({'|'.join(RETIRED_PHRASES)})\b", re.IGNORECASE)

_CODE = re.compile(r"^( *)```(json|yaml|python).*?^\1```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
"""Code in a page: blocks of data and of Python, and text in backticks."""

_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def retired_names(module: Module) -> list[str]:
    """Identifiers of a module with a retired word, as `module: name`."""
    names = {*_names(module.tree), *module.name.split(".")}
    found = {name for name in names if {part.lower() for part in _PART.findall(name)} & RETIRED}
    return [f"{module.name}: {name}" for name in sorted(found)]


def retired_phrases(name: str, text: str, *, is_page: bool) -> list[str]:
    """Retired words of a page, or of a module's comments and its strings with a space."""
    prose = _CODE.sub("", text) if is_page else "\n".join(_prose_of(text))
    return [f"{name}: {found.group(0)}" for found in _PHRASE.finditer(prose)]


def _prose_of(source: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield _CODE.sub("", token.string)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield _CODE.sub("", node.value)


def public_classes(module: Module) -> list[str]:
    """Names of the public classes at the top level of a module."""
    classes = [node.name for node in module.tree.body if isinstance(node, ast.ClassDef)]
    return [name for name in classes if not name.startswith("_")]


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg | ast.keyword):
            yield str(node.arg)
