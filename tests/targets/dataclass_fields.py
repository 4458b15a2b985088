"""The fields of dataclasses in installed software, read from its source without an import, and whether the
annotation of a field allows a plain value."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path


def fields_of(file: Path, name: str) -> dict[str, ast.expr]:
    """The annotation of each field that the class of this name in `file` declares itself."""
    tree = ast.parse(file.read_text())
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    return {
        node.target.id: node.annotation
        for node in found.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def allows(annotation: ast.expr, value: object) -> bool:
    """Whether a value of JSON is one of this annotation. Names of dtypes and of activations are text."""
    if isinstance(annotation, ast.BinOp):
        return allows(annotation.left, value) or allows(annotation.right, value)
    if isinstance(annotation, ast.Subscript):
        return _allows_generic(annotation, value)
    name = ast.unparse(annotation)
    if name == "None":
        return value is None
    plain: Mapping[str, type | tuple[type, ...]] = {
        "bool": bool, "int": int, "float": (int, float), "str": str, "list": list, "torch.dtype": str,
        "Callable": str,
    }  # fmt: skip
    if isinstance(value, bool) and name != "bool":
        return False
    return name in plain and isinstance(value, plain[name])


def _allows_generic(annotation: ast.Subscript, value: object) -> bool:
    """The same for a name with parameters in brackets."""
    name = ast.unparse(annotation.value)
    inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
    if name == "Optional":
        return value is None or allows(inner[0], value)
    if name == "Union":
        return any(allows(one, value) for one in inner)
    if name == "Literal":
        return value in [one.value for one in inner if isinstance(one, ast.Constant)]
    if name in ("List", "list", "Tuple", "tuple"):
        return isinstance(value, list) and all(allows(inner[0], one) for one in value)
    return name in ("Callable", "Dict", "dict") and isinstance(value, str if name == "Callable" else dict)
