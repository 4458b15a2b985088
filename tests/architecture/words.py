"""Words that no identifier of the sources has: docs/reference/glossary.md says what is used for the thing."""

from __future__ import annotations

import ast
import re
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
"""Parts of identifiers and of names of modules, between underscores or capitals."""

_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def retired_names(module: Module) -> list[str]:
    """Identifiers of a module that have a retired word, as `module: name`."""
    names = {*_names(module.tree), *module.name.split(".")}
    found = {name for name in names if {part.lower() for part in _PART.findall(name)} & RETIRED}
    return [f"{module.name}: {name}" for name in sorted(found)]


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
