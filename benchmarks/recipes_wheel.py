"""Reads the recipes of a megatron-bridge wheel without importing it.

A recipe is a function that builds a configuration by assignments such as
`cfg.model.tensor_model_parallel_size = 4`. `WheelReader` walks its syntax tree: it follows calls and
imports inside the wheel, and everything else stays an `Opaque` value. `facts_of` reads degrees, batch and
options from the result. Nothing of the wheel is executed.
"""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = "megatron/bridge/"
FOLDERS = ("recipes", "perf_recipes")
_DEEPEST_CALL = 40


class UnreadableRecipe(Exception):
    """A recipe that uses syntax that the reader does not know."""


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value from outside of the wheel, named by its expression."""

    text: str


@dataclass(slots=True)
class Settings:
    """An object of the configuration: its class, and the attributes that were set."""

    kind: str
    values: dict[str, Any] = field(default_factory=dict)

    def get(self, path: str, default: Any = None) -> Any:
        """The attribute at a dotted path."""
        found: Any = self
        for name in path.split("."):
            if not isinstance(found, Settings) or name not in found.values:
                return default
            found = found.values[name]
        return found


@dataclass(frozen=True, slots=True)
class _Function:
    tree: ast.FunctionDef
    module: str


@dataclass(frozen=True, slots=True)
class _Class:
    tree: ast.ClassDef
    module: str


@dataclass(frozen=True, slots=True)
class _Imported:
    module: str
    name: str


class _Returned(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


_BUILT_IN: Mapping[str, Any] = {
    function.__name__: function
    for function in (list, dict, int, float, str, len, max, min, range, tuple, bool, divmod, enumerate)
}
_KINDS = {"str": str, "int": int, "bool": bool, "list": list, "dict": dict, "float": float, "tuple": tuple}

_OPERATORS: dict[type, Any] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.Pow: lambda a, b: a**b,
    ast.BitOr: lambda a, b: a | b,
}
_COMPARISONS: dict[type, Any] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Is: lambda a, b: a is b,
    ast.IsNot: lambda a, b: a is not b,
}


class WheelReader:
    """Interprets functions of a wheel. `undecided` lists conditions that depend on values outside of it,
    which count as false."""

    def __init__(self, wheel: Path) -> None:
        self.files: dict[str, str] = {}
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.startswith(ROOT) and name.endswith(".py"):
                    self.files[name] = archive.read(name).decode()
        self.undecided: list[str] = []
        self._scopes: dict[str, dict[str, Any]] = {}
        self._depth = 0

    def recipes(self) -> Iterator[tuple[str, str]]:
        """Module and name of every public function that ends with `_config` and takes nothing that has no
        default."""
        for file in sorted(self.files):
            if file.removeprefix(ROOT).split("/")[0] not in FOLDERS or "/utils/" in file:
                continue
            for node in ast.parse(self.files[file]).body:
                if not isinstance(node, ast.FunctionDef) or not re.fullmatch(r"[a-z]\w*_config", node.name):
                    continue
                if len(node.args.args) <= len(node.args.defaults):
                    yield file.removesuffix(".py").replace("/", "."), node.name

    def configuration(self, module: str, name: str) -> Settings:
        """The configuration that a recipe returns. Raises UnreadableRecipe."""
        self.undecided = []
        try:
            found = self._call(self._scope(module)[name], [], {})
        except (UnreadableRecipe, RecursionError):
            raise
        except Exception as error:
            raise UnreadableRecipe(f"{type(error).__name__}: {error}") from error
        if not isinstance(found, Settings):
            raise UnreadableRecipe("returns no configuration")
        return found

    def _file(self, module: str) -> str | None:
        path = module.replace(".", "/")
        return next((name for name in (f"{path}.py", f"{path}/__init__.py") if name in self.files), None)

    def _scope(self, module: str) -> dict[str, Any]:
        """The names of a module; constants are evaluated in order."""
        if module in self._scopes:
            return self._scopes[module]
        scope: dict[str, Any] = {}
        self._scopes[module] = scope
        file = self._file(module)
        if file is None:
            return scope
        for node in ast.parse(self.files[file]).body:
            if isinstance(node, ast.FunctionDef):
                scope[node.name] = _Function(node, module)
            elif isinstance(node, ast.ClassDef):
                scope[node.name] = _Class(node, module)
            elif isinstance(node, ast.Import):
                scope.update(
                    {alias.asname or alias.name.split(".")[0]: Opaque(alias.name) for alias in node.names}
                )
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    scope[alias.asname or alias.name] = _Imported(node.module, alias.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                try:
                    value = self._value(node.value, scope, module)
                except (UnreadableRecipe, _Returned, LookupError, TypeError, ValueError):
                    value = Opaque(ast.unparse(node.value))
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name):
                        scope[target.id] = value
        return scope

    def _resolved(self, value: Any) -> Any:
        """The thing that an imported name stands for."""
        while isinstance(value, _Imported):
            if self._file(value.module) is None:
                return Opaque(f"{value.module}.{value.name}")
            scope = self._scope(value.module)
            if value.name not in scope:
                return Opaque(f"{value.module}.{value.name}")
            value = scope[value.name]
        return value

    def _call(self, function: Any, given: list[Any], named: dict[str, Any]) -> Any:
        if isinstance(function, _Class):
            return self._instance(function, named)
        tree = function.tree
        scope: dict[str, Any] = {}
        names = [argument.arg for argument in tree.args.args]
        for name, default in zip(reversed(names), reversed(tree.args.defaults), strict=False):
            scope[name] = self._value(default, {}, function.module)
        for argument, default in zip(tree.args.kwonlyargs, tree.args.kw_defaults, strict=True):
            scope[argument.arg] = None if default is None else self._value(default, {}, function.module)
        scope.update(zip(names, given, strict=False))
        if tree.args.kwarg is not None:
            known = {*names, *(argument.arg for argument in tree.args.kwonlyargs)}
            scope[tree.args.kwarg.arg] = {name: value for name, value in named.items() if name not in known}
        scope.update(named)
        self._depth += 1
        try:
            if self._depth > _DEEPEST_CALL:
                raise UnreadableRecipe(f"calls deeper than {_DEEPEST_CALL}")
            self._run(tree.body, scope, function.module)
        except _Returned as returned:
            return returned.value
        finally:
            self._depth -= 1
        return None

    def _instance(self, found: _Class, named: Mapping[str, Any]) -> Settings:
        """An object of a class of the wheel: the defaults of its fields and those of its bases, then the
        arguments."""
        made = Settings(found.tree.name)
        for base in found.tree.bases:
            parent = self._resolved(self._scope(found.module).get(ast.unparse(base)))
            if isinstance(parent, _Class):
                made.values.update(self._instance(parent, {}).values)
        for node in found.tree.body:
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and node.value is not None
            ):
                made.values[node.target.id] = self._value(node.value, {}, found.module)
        made.values.update(named)
        return made

    def _run(self, body: list[ast.stmt], scope: dict[str, Any], module: str) -> None:
        for node in body:
            self._statement(node, scope, module)

    def _statement(self, node: ast.stmt, scope: dict[str, Any], module: str) -> None:
        if isinstance(node, ast.Assign):
            value = self._value(node.value, scope, module)
            for target in node.targets:
                self._store(target, value, scope, module)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._store(node.target, self._value(node.value, scope, module), scope, module)
        elif isinstance(node, ast.AugAssign):
            old, new = (self._value(each, scope, module) for each in (node.target, node.value))
            self._store(node.target, _apply(_OPERATORS[type(node.op)], old, new), scope, module)
        elif isinstance(node, ast.Return):
            raise _Returned(None if node.value is None else self._value(node.value, scope, module))
        elif isinstance(node, ast.If):
            self._run(node.body if self._decided(node.test, scope, module) else node.orelse, scope, module)
        elif isinstance(node, ast.For):
            for each in _items(self._value(node.iter, scope, module)):
                self._store(node.target, each, scope, module)
                self._run(node.body, scope, module)
        elif isinstance(node, ast.Expr):
            self._value(node.value, scope, module)
        elif isinstance(node, ast.Raise):
            raise UnreadableRecipe(f"raises {'' if node.exc is None else ast.unparse(node.exc)[:80]}")
        elif isinstance(node, ast.Try | ast.With):
            self._run(node.body, scope, module)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                scope[alias.asname or alias.name] = _Imported(node.module, alias.name)
        elif isinstance(node, ast.FunctionDef):
            scope[node.name] = _Function(node, module)
        elif not isinstance(node, ast.Pass | ast.Import | ast.Assert | ast.Delete):
            raise UnreadableRecipe(f"a statement {type(node).__name__}")

    def _decided(self, test: ast.expr, scope: dict[str, Any], module: str) -> bool:
        found = self._value(test, scope, module)
        if isinstance(found, Opaque):
            self.undecided.append(ast.unparse(test))
            return False
        return bool(found)

    def _store(self, target: ast.expr, value: Any, scope: dict[str, Any], module: str) -> None:
        if isinstance(target, ast.Name):
            scope[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            for one, part in zip(target.elts, _items(value), strict=False):
                self._store(one, part, scope, module)
        elif isinstance(target, ast.Attribute):
            self._owner(target.value, scope, module).values[target.attr] = value
        elif isinstance(target, ast.Subscript):
            owner = self._value(target.value, scope, module)
            if isinstance(owner, dict | list):
                owner[self._value(target.slice, scope, module)] = value

    def _owner(self, node: ast.expr, scope: dict[str, Any], module: str) -> Settings:
        """The object whose attribute is set; one that the wheel does not define starts empty."""
        found = self._value(node, scope, module)
        if isinstance(found, Settings):
            return found
        made = Settings(ast.unparse(node))
        self._store(node, made, scope, module)
        return made

    def _value(self, node: ast.expr, scope: Mapping[str, Any], module: str) -> Any:
        reader = getattr(self, f"_of_{type(node).__name__.lower()}", None)
        return Opaque(ast.unparse(node)) if reader is None else reader(node, scope, module)

    def _of_constant(self, node: ast.Constant, scope: Mapping[str, Any], module: str) -> Any:
        return node.value

    def _of_name(self, node: ast.Name, scope: Mapping[str, Any], module: str) -> Any:
        if node.id in scope:
            return self._resolved(scope[node.id])
        found = self._scope(module)
        return self._resolved(found[node.id]) if node.id in found else Opaque(node.id)

    def _of_attribute(self, node: ast.Attribute, scope: Mapping[str, Any], module: str) -> Any:
        owner = self._value(node.value, scope, module)
        if isinstance(owner, Settings):
            return owner.values.get(node.attr, Opaque(f"{owner.kind}.{node.attr}"))
        return Opaque(f"{owner.text}.{node.attr}" if isinstance(owner, Opaque) else ast.unparse(node))

    def _of_list(self, node: ast.List, scope: Mapping[str, Any], module: str) -> list[Any]:
        found: list[Any] = []
        for each in node.elts:
            if isinstance(each, ast.Starred):
                found += _items(self._value(each.value, scope, module))
            else:
                found.append(self._value(each, scope, module))
        return found

    def _of_tuple(self, node: ast.Tuple, scope: Mapping[str, Any], module: str) -> tuple[Any, ...]:
        return tuple(self._value(each, scope, module) for each in node.elts)

    def _of_dict(self, node: ast.Dict, scope: Mapping[str, Any], module: str) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            part = self._value(value, scope, module)
            if key is not None:
                found[self._value(key, scope, module)] = part
            elif isinstance(part, dict):
                found.update(part)
        return found

    def _of_subscript(self, node: ast.Subscript, scope: Mapping[str, Any], module: str) -> Any:
        owner, key = self._value(node.value, scope, module), self._value(node.slice, scope, module)
        if isinstance(key, Opaque) or not isinstance(owner, dict | list | tuple | str):
            return Opaque(ast.unparse(node))
        return owner[key]

    def _of_binop(self, node: ast.BinOp, scope: Mapping[str, Any], module: str) -> Any:
        left, right = self._value(node.left, scope, module), self._value(node.right, scope, module)
        return _apply(_OPERATORS[type(node.op)], left, right)

    def _of_boolop(self, node: ast.BoolOp, scope: Mapping[str, Any], module: str) -> Any:
        found: Any = None
        for each in node.values:
            found = self._value(each, scope, module)
            if isinstance(found, Opaque) or bool(found) == isinstance(node.op, ast.Or):
                return found
        return found

    def _of_unaryop(self, node: ast.UnaryOp, scope: Mapping[str, Any], module: str) -> Any:
        found = self._value(node.operand, scope, module)
        if isinstance(found, Opaque):
            return found
        return not found if isinstance(node.op, ast.Not) else -found

    def _of_compare(self, node: ast.Compare, scope: Mapping[str, Any], module: str) -> Any:
        left = self._value(node.left, scope, module)
        for operator, each in zip(node.ops, node.comparators, strict=True):
            right = self._value(each, scope, module)
            found = _apply(_COMPARISONS[type(operator)], left, right)
            if isinstance(found, Opaque) or not found:
                return found
            left = right
        return True

    def _of_ifexp(self, node: ast.IfExp, scope: dict[str, Any], module: str) -> Any:
        return self._value(
            node.body if self._decided(node.test, scope, module) else node.orelse, scope, module
        )

    def _of_listcomp(self, node: ast.ListComp, scope: Mapping[str, Any], module: str) -> Any:
        (loop,) = node.generators
        inner, found = dict(scope), []
        for each in _items(self._value(loop.iter, scope, module)):
            self._store(loop.target, each, inner, module)
            if all(self._decided(test, inner, module) for test in loop.ifs):
                found.append(self._value(node.elt, inner, module))
        return found

    def _of_setcomp(self, node: ast.SetComp, scope: Mapping[str, Any], module: str) -> Any:
        return self._of_listcomp(node, scope, module)  # type: ignore[arg-type]

    def _call_arguments(
        self, node: ast.Call, scope: Mapping[str, Any], module: str
    ) -> tuple[list[Any], dict[str, Any]]:
        given = [self._value(each, scope, module) for each in node.args if not isinstance(each, ast.Starred)]
        named: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self._value(keyword.value, scope, module)
            if keyword.arg is not None:
                named[keyword.arg] = value
            elif isinstance(value, dict):
                named.update(value)
        return given, named

    def _method(self, node: ast.Call, function: ast.Attribute, scope: Mapping[str, Any], module: str) -> Any:
        """A call of a method: of a list, a dict or a text, of a bridge to Hugging Face, or of an
        unknown."""
        owner = self._value(function.value, scope, module)
        given, named = self._call_arguments(node, scope, module)
        if function.attr in ("from_hf_pretrained", "from_hf_config"):
            source = given[0] if given else named.get("model_id", Opaque("?"))
            return Settings("model", {"hugging_face": source})
        if isinstance(owner, Settings) and function.attr.startswith("to_"):
            return owner
        if isinstance(owner, list | dict | str) and hasattr(owner, function.attr):
            if any(isinstance(each, Opaque) for each in given):
                return Opaque(ast.unparse(node))
            return getattr(owner, function.attr)(*given, **named)
        return self._outside(function.attr, ast.unparse(node), named)

    def _outside(self, name: str, text: str, named: Mapping[str, Any]) -> Settings | Opaque:
        """The result of a call of something outside of the wheel: classes have their arguments as
        attributes."""
        return Settings(name, dict(named)) if name[0].isupper() else Opaque(text)

    def _call_built_in(self, name: str, given: list[Any]) -> Any:
        if name == "isinstance":
            kinds = [
                _KINDS.get(kind.text) for kind in _items(given[1]) or [given[1]] if isinstance(kind, Opaque)
            ]
            if isinstance(given[0], Opaque):
                return given[0]
            return isinstance(given[0], tuple(kind for kind in kinds if kind is not None))
        if name in ("getattr", "hasattr") and isinstance(given[0], Settings):
            there = given[1] in given[0].values
            if name == "hasattr":
                return there
            return given[0].values[given[1]] if there else (given[2] if len(given) > 2 else Opaque(given[1]))
        if name == "setattr" and isinstance(given[0], Settings):
            given[0].values[given[1]] = given[2]
            return None
        if name in _BUILT_IN and not any(isinstance(each, Opaque) for each in given):
            return _BUILT_IN[name](*given)
        return Opaque(f"{name}(...)")

    def _of_call(self, node: ast.Call, scope: Mapping[str, Any], module: str) -> Any:
        if isinstance(node.func, ast.Attribute):
            return self._method(node, node.func, scope, module)
        function = self._value(node.func, scope, module)
        given, named = self._call_arguments(node, scope, module)
        if isinstance(function, _Class):
            return self._instance(function, named)
        if isinstance(function, _Function):
            if function.tree.name == "get_mixed_precision_config" and isinstance(given[0], str):
                return self._call(self._scope(function.module)[given[0].replace("-", "_")], [], {})
            return self._call(function, given, named)
        if isinstance(function, Opaque):
            name = function.text.rsplit(".", 1)[-1]
            if name == "deepcopy":
                return given[0]
            return Settings(name, dict(named)) if name[0].isupper() else self._call_built_in(name, given)
        return Opaque(ast.unparse(node))


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple | range | dict | enumerate) else []


def _apply(operator: Any, left: Any, right: Any) -> Any:
    if isinstance(left, Opaque) or isinstance(right, Opaque):
        if isinstance(left, Opaque) and isinstance(right, Opaque) and operator in (_COMPARISONS[ast.Eq],):
            return left.text == right.text
        return Opaque("unknown")
    return operator(left, right)
