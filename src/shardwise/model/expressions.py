"""Expressions of family files: how keys of a config decide a size, such as `n_inner or 4 * hidden`.

The syntax is a part of Python's: names, constants, lists, `and or not`, comparisons, `in`, arithmetic,
`a if b else c`, indexing, and the functions of `_FUNCTIONS`. `/` is an exact division: an error where there
is a remainder. `parse_expression` checks the syntax; nothing of Python can be called.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, TypeVar

from shardwise.errors import InternalError

Lookup = Callable[[str], Any]
"""The value of a name."""

_Evaluate = Callable[[Lookup], Any]
_Node = TypeVar("_Node", bound=ast.AST)
T = TypeVar("T")


class InexactDivision(ArithmeticError):
    """A division with a remainder; `name` is the divisor's name, empty where it has none."""

    def __init__(self, dividend: object, divisor: object, name: str) -> None:
        super().__init__(dividend, divisor)
        self.dividend, self.divisor, self.name = dividend, divisor, name


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression: its `text`, the `names` in it in their order, and how to evaluate it."""

    text: str
    names: tuple[str, ...]
    _evaluate: _Evaluate

    def value(self, lookup: Lookup) -> Any:
        """The value, with the names looked up. Raises what the operations raise, and `InexactDivision`."""
        return self._evaluate(lookup)


@lru_cache(maxsize=4096)
def parse_expression(text: str) -> Expression:
    """The expression of `text`. Raises InternalError for other syntax: family files are our own."""
    try:
        body = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise InternalError(f"the expression {text!r} is not valid: {error.msg}") from None
    functions = {id(node.func) for node in ast.walk(body) if isinstance(node, ast.Call)}
    names = [node for node in ast.walk(body) if isinstance(node, ast.Name) and id(node) not in functions]
    names.sort(key=lambda node: node.col_offset)
    return Expression(text, tuple(dict.fromkeys(node.id for node in names)), _compiled(body, text))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _same(value: object) -> object:
    """The value of a list of equal values; other values as they are."""
    if not isinstance(value, list):
        return value
    first, *others = value
    if any(other != first for other in others):
        raise TypeError("a list of different values")
    return first


def _layer_value(by_layer: Mapping[str, Mapping[str, Any]], layer: int, key: str) -> Any:
    """The value of a key that a config gives for one layer (`05` or `5`); None where it gives none."""
    return {int(index): values for index, values in by_layer.items()}.get(layer, {}).get(key)


_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        "int": int,
        "len": len,
        "max": max,
        "min": min,
        "round_up": _round_up,
        "same": _same,
        "layer_value": _layer_value,
    }
)
_BINARY: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = MappingProxyType(
    {
        ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
    }
)  # fmt: skip
_COMPARE: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], bool]]] = MappingProxyType(
    {
        ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
        ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
        ast.In: lambda item, items: item in items, ast.NotIn: lambda item, items: item not in items,
    }
)  # fmt: skip


def _compiled(node: ast.expr, text: str) -> _Evaluate:
    """How to evaluate a node of the syntax tree."""

    def part(child: ast.expr) -> _Evaluate:
        return _compiled(child, text)

    match node:
        case ast.Constant(value=value):
            return lambda lookup: value
        case ast.Name(id=name):
            return lambda lookup: lookup(name)
        case ast.List(elts=elts) | ast.Tuple(elts=elts):
            items = [part(each) for each in elts]
            return lambda lookup: [item(lookup) for item in items]
        case ast.BoolOp(op=op, values=values):
            return _bool_op(isinstance(op, ast.And), [part(each) for each in values])
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = part(operand)
            return lambda lookup: not inner(lookup)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(number))):
            return lambda lookup: -number
        case ast.IfExp(test=test, body=body, orelse=orelse):
            condition, yes, no = part(test), part(body), part(orelse)
            return lambda lookup: yes(lookup) if condition(lookup) else no(lookup)
        case ast.Subscript(value=of, slice=at):
            items_of, index = part(of), part(at)
            return lambda lookup: items_of(lookup)[index(lookup)]
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            compare, a, b = _of_operator(_COMPARE, op), part(left), part(right)
            return lambda lookup: compare(a(lookup), b(lookup))
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _exact(part(left), part(right), right.id if isinstance(right, ast.Name) else "")
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, tuple(_BINARY)):
            apply, a, b = _of_operator(_BINARY, op), part(left), part(right)
            return lambda lookup: apply(a(lookup), b(lookup))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            function, arguments = _FUNCTIONS[name], [part(each) for each in args]
            return lambda lookup: function(*(argument(lookup) for argument in arguments))
    raise InternalError(f"the expression {text!r} has {type(node).__name__}, which is not supported")


def _of_operator(table: Mapping[type[_Node], Callable[[Any, Any], T]], op: _Node) -> Callable[[Any, Any], T]:
    return next(function for kind, function in table.items() if isinstance(op, kind))


def _bool_op(is_and: bool, parts: list[_Evaluate]) -> _Evaluate:
    """`and` and `or` as in Python: the first part that decides, else the last."""

    def evaluate(lookup: Lookup) -> Any:
        value: Any = None
        for part in parts:
            value = part(lookup)
            if bool(value) is not is_and:
                return value
        return value

    return evaluate


def _exact(dividend: _Evaluate, divisor: _Evaluate, name: str) -> _Evaluate:
    def evaluate(lookup: Lookup) -> Any:
        a, b = dividend(lookup), divisor(lookup)
        if a % b:
            raise InexactDivision(a, b, name)
        return a // b

    return evaluate
