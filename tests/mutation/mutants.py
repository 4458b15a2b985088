"""Mutants of a module: one small change each, inside function bodies, as a careless edit could make it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

SWAPPED_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}

SWAPPED_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}

SWAPPED_NAMES = {
    "maximum": "minimum",
    "minimum": "maximum",
    "max": "min",
    "min": "max",
    "ceil": "floor",
    "floor": "ceil",
    "argmin": "argmax",
    "argmax": "argmin",
    "any": "all",
    "all": "any",
}

UNTOUCHED_KEYWORDS = frozenset({"strict", "dtype", "key"})
"""Keyword arguments that check or annotate rather than compute."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutant:
    """One change: its place, the source before and after it, and how to apply it to the module's tree."""

    module: str
    path: Path
    function: str
    line: int
    before: str
    after: str
    apply: Callable[[], None] = field(repr=False, compare=False)
    tree: ast.Module = field(repr=False, compare=False)

    @property
    def key(self) -> str:
        """Identifies the mutant when lines move."""
        return f"{self.module}:{self.function}: {self.before} -> {self.after}"


def mutants_of(module: str, path: Path) -> list[Mutant]:
    """Every mutant of the module's functions, in source order."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        Mutant(module, path, name, node.lineno, ast.unparse(shown), after, apply, tree)
        for name, function in _functions(tree, "")
        for statement in function.body
        for node, shown in _expressions(statement, None)
        for after, apply in _changes(node, shown)
    ]


def _functions(scope: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    """Functions and methods with qualified names; a nested function belongs to the outer one."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, Function):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


def _expressions(node: ast.AST, parent: ast.expr | None) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Expressions that compute, each with the expression to show: for a constant, the one that contains it.

    Annotations, decorators, strings, error messages and assertions do not compute.
    """
    if isinstance(node, ast.Raise | ast.JoinedStr):
        return
    if isinstance(node, ast.keyword) and node.arg in UNTOUCHED_KEYWORDS:
        return
    if isinstance(node, ast.expr):
        yield node, (parent if parent is not None and isinstance(node, ast.Constant) else node)
        parent = node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list", "args") or isinstance(node, ast.Call):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _expressions(child, parent)


def _changes(node: ast.expr, shown: ast.expr) -> Iterator[tuple[str, Callable[[], None]]]:
    """Each change of this node: the text of `shown` afterwards, and a function that applies it."""
    for name, value in _new_fields(node):
        before = getattr(node, name)
        setattr(node, name, value)
        after = ast.unparse(shown)
        setattr(node, name, before)
        yield after, _setter(node, name, value)


def _setter(node: ast.AST, name: str, value: object) -> Callable[[], None]:
    return lambda: setattr(node, name, value)


def _new_fields(node: ast.expr) -> Iterator[tuple[str, object]]:
    """(field, new value) of each change."""
    match node:
        case ast.BinOp() if not _is_text(node.left) and not _is_text(node.right):
            if type(node.op) in SWAPPED_OPERATORS:
                yield "op", SWAPPED_OPERATORS[type(node.op)]()
        case ast.Compare():
            for place, operator in enumerate(node.ops):
                swapped: list[ast.cmpop] = list(node.ops)
                swapped[place] = SWAPPED_COMPARISONS[type(operator)]()
                yield "ops", swapped
        case ast.BoolOp():
            yield "op", ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.USub()):
            yield "op", ast.UAdd()
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "operand", ast.UnaryOp(ast.Not(), operand, lineno=node.lineno, col_offset=node.col_offset)
        case ast.Constant(value=bool() as flag):
            yield "value", not flag
        case ast.Constant(value=int() as number):
            yield "value", number + 1
        case ast.Constant(value=float() as number):
            yield "value", number * 2.0 if number else 1.0
        case ast.IfExp():
            yield "test", _negated(node.test)
        case ast.Call(func=ast.Attribute(attr="where"), args=[condition, yes, no]):
            yield "args", [condition, no, yes]
        case ast.Call(func=ast.Attribute() | ast.Name()):
            yield from _new_function(node.func)
        case _:
            return


def _new_function(function: ast.expr) -> Iterator[tuple[str, object]]:
    match function:
        case ast.Attribute(attr=name) if name in SWAPPED_NAMES:
            renamed: ast.expr = ast.Attribute(function.value, SWAPPED_NAMES[name], ast.Load())
        case ast.Name(id=name) if name in SWAPPED_NAMES:
            renamed = ast.Name(SWAPPED_NAMES[name], ast.Load())
        case _:
            return
    yield "func", ast.copy_location(renamed, function)


def _negated(test: ast.expr) -> ast.expr:
    return ast.copy_location(ast.UnaryOp(ast.Not(), test), test)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
