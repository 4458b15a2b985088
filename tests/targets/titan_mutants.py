"""Mutated modules, as a wrong export would write them: each has one constant changed."""

from __future__ import annotations

import ast
from collections.abc import Iterator

OTHER_WORDS = {
    "always": "never",
    "never": "always",
    "bfloat16": "float32",
    "float32": "bfloat16",
    "llama3": "other",
    "1F1B": "GPipe",
    "Interleaved1F1B": "InterleavedZeroBubble",
    "ZBVZeroBubble": "DualPipeV",
    "softmax": "sigmoid",
    "llama": "none",
}
"""Another value for words that have one."""

PLACES = ("starts", "ends")
"""Names of the lists of places. (A layer that is not there would be left out, as before.)"""


def titan_mutants(module: str) -> Iterator[tuple[str, str]]:
    """For each constant of a keyword argument or a list, its name and the module with it changed: a number
    is doubled (0 becomes 1), a place in a list moved by one, a switch turned, and a word replaced."""
    places = [
        (name, place)
        for place, (name, node) in enumerate(_constants(ast.parse(module)))
        if _changed(node.value) is not None
    ]
    for name, place in places:
        tree = ast.parse(module)
        _, node = list(_constants(tree))[place]
        place_in_list = node.value if name in PLACES and isinstance(node.value, int) else 0
        node.value = place_in_list - 1 if place_in_list else _changed(node.value)
        yield name, ast.unparse(tree)


def _constants(tree: ast.Module) -> Iterator[tuple[str, ast.Constant]]:
    """Constants with the name of what they are the value of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
            yield str(node.arg), node.value
        if isinstance(node, ast.Assign):
            name = ast.unparse(node.targets[0])
            for each in node.value.elts if isinstance(node.value, ast.List) else (node.value,):
                if isinstance(each, ast.Constant):
                    yield name, each


def _changed(value: object) -> bool | int | float | str | None:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return max(2 * value, 1)
    return OTHER_WORDS.get(value) if isinstance(value, str) else None
