"""Functions that take columns never decide on their values: no branch, no builtin, no `math` on a column."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.architecture.sources import Module

SCALAR_BUILTINS = frozenset(
    {"max", "min", "int", "float", "round", "bool", "any", "all", "sorted", "abs", "divmod"}
)
"""Builtins for a single number (cost/ may use abs and divmod, which numpy and the units support)."""

EQUATION_NODES = (ast.If, ast.IfExp, ast.While, ast.BoolOp, ast.Match, ast.Try, ast.Assert, ast.Raise)

COLUMN_TYPES = frozenset({"Any", "Quantity", "Sizes", "Column", "NDArray", "StrategyTable"})
"""Annotations of parameters that hold columns in cost/."""

STRUCTURE = frozenset({"isinstance", "len", "hasattr", "fields", "type", "is_dataclass"})
"""Calls that read the form of an argument, not its value."""

ARRAY_ATTRIBUTES = frozenset({"shape", "ndim", "size", "dtype"})


def equation_violations(module: Module) -> list[str]:
    """Violations in equations/: branches, `and`, `or`, `not`, chained comparisons, scalar builtins."""
    return [
        f"{module.name}:{node.lineno}: {problem}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.stmt | ast.expr)
        for problem in _equation_problems(node)
    ]


def _equation_problems(node: ast.AST) -> Iterator[str]:
    if isinstance(node, EQUATION_NODES):
        yield type(node).__name__
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not"
    elif isinstance(node, ast.Compare) and len(node.ops) > 1:
        yield "chained comparison"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SCALAR_BUILTINS:
        yield f"builtin {node.func.id}"
    elif isinstance(node, ast.Name) and node.id == "math":
        yield "math"
    elif isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp) and any(
        generator.ifs for generator in node.generators
    ):
        yield "filter in a comprehension"


def column_violations(module: Module) -> list[str]:
    """Decisions on columns in functions that take them (parameters annotated with one of COLUMN_TYPES)."""
    return [
        f"{module.name}:{function.name}:{line}: {problem}"
        for function in ast.walk(module.tree)
        if isinstance(function, ast.FunctionDef)
        for line, problem in _decisions(function)
    ]


def _decisions(function: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    columns = _columns_of(function)
    if not columns:
        return
    for node in ast.walk(function):
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            if _reads(node.test, columns):
                yield node.lineno, f"{type(node).__name__} on a column"
        elif isinstance(node, ast.BoolOp):
            if any(_reads(value, columns) for value in node.values):
                yield node.lineno, f"{type(node.op).__name__.lower()} of columns"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            if _reads(node.operand, columns):
                yield node.lineno, "not of a column"
        elif isinstance(node, ast.Compare):
            if len(node.ops) > 1 and _reads(node, columns):
                yield node.lineno, "chained comparison of columns"
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            is_scalar = name in SCALAR_BUILTINS - {"abs", "divmod"} or name.startswith("math.")
            if is_scalar and any(_reads(argument, columns) for argument in node.args):
                yield node.lineno, f"{name} of a column"


def _columns_of(function: ast.FunctionDef) -> set[str]:
    """Parameters annotated as columns, and local names assigned from them."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    columns = {
        argument.arg
        for argument in arguments
        if argument.annotation is not None and _words(argument.annotation) & COLUMN_TYPES
    }
    before = -1
    while columns and len(columns) != before:
        before = len(columns)
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and _reads(node.value, columns):
                columns |= {name for target in node.targets for name in _words(target)}
    return columns


def _words(node: ast.AST) -> set[str]:
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}


def _reads(node: ast.AST, columns: set[str]) -> bool:
    """Whether an expression reads the value (not just the form) of a column."""
    if isinstance(node, ast.Name):
        return node.id in columns
    if isinstance(node, ast.Attribute) and node.attr in ARRAY_ATTRIBUTES:
        return False
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in STRUCTURE:
        return False
    if isinstance(node, ast.Compare) and all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
        return False
    return any(_reads(child, columns) for child in ast.iter_child_nodes(node))
