"""What no module may do: run text as code, unpickle, use a shell, swallow errors, print, outgrow a limit."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.architecture.sources import Module

BANNED_IMPORTS = frozenset(
    {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "subprocess", "pty", "code"}
)
"""Loaders that execute what they load, and shells."""

PROCESS_PACKAGES = frozenset({"emulate", "targets"})
"""Packages that start processes, and so may import subprocess."""

BANNED_CALLS = frozenset({"eval", "exec", "compile", "__import__", "breakpoint", "globals", "input"})

BANNED_METHODS = frozenset(
    {
        "os.system",
        "os.popen",
        "os.execv",
        "os.spawnv",
        "yaml.load",
        "yaml.full_load",
        "yaml.unsafe_load",
        "yaml.load_all",
        "np.load",
        "numpy.load",
        "torch.load",
        "tempfile.mktemp",
    }
)

_OBJECT_COLLECTIVE = re.compile(r"(?:gather|scatter|broadcast|send|recv)_object(?:_list)?")
"""Names of PyTorch's collectives of pickled objects: all_gather_object, broadcast_object_list, ..."""

PRIVATE_MODULE = "shardwise.runtime.private"
"""The only module that may use private names of PyTorch; tests/runtime checks its assumptions."""

PRINTING_PACKAGE = "app"

_PRIVATE = re.compile(r"\._(?!_)")

LONGEST_MODULE = 900
LONGEST_FUNCTION = 80


def ban_violations(module: Module) -> list[str]:
    """Violations of a module, as `name:line: problem`."""
    return [
        f"{module.name}:{node.lineno}: {problem}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.stmt | ast.expr | ast.excepthandler)
        for problem in _problems(module, node)
    ]


def _problems(module: Module, node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Call):
        yield from _call_problems(module, node)
    elif isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        for name in names:
            is_start = name == "subprocess" and module.package in PROCESS_PACKAGES
            if name.split(".")[0] in BANNED_IMPORTS and not is_start:
                yield f"import of {name}"
    elif isinstance(node, ast.ExceptHandler):
        if node.type is None:
            yield "bare except"
        elif isinstance(node.type, ast.Name) and node.type.id == "BaseException" and not _raises(node):
            yield "BaseException caught and kept"
    elif isinstance(node, ast.Assert):
        yield "assert, which vanishes under -O"
    elif isinstance(node, ast.Global):
        yield f"global {', '.join(node.names)}"
    if module.name != PRIVATE_MODULE:
        yield from _private_problems(node)


def _private_problems(node: ast.AST) -> Iterator[str]:
    """Private names of PyTorch: those with one leading underscore, in imports from it and in attributes of
    `torch` and `distributed`."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
        paths = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Import):
        paths = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
    elif isinstance(node, ast.Attribute) and ast.unparse(node).split(".")[0] in ("torch", "distributed"):
        paths = [ast.unparse(node)]
    else:
        paths = []
    for path in paths:
        if _PRIVATE.search(path):
            yield f"{path}, which is private"


def _call_problems(module: Module, call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func)
    if name in BANNED_CALLS or name in BANNED_METHODS:
        yield f"call of {name}"
    if _OBJECT_COLLECTIVE.search(name.rpartition(".")[2]):
        yield f"call of {name}, which unpickles what it receives"
    if name == "print" and module.package != PRINTING_PACKAGE:
        yield "print outside app"
    for keyword in call.keywords:
        is_on = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        if keyword.arg == "shell" and not (isinstance(keyword.value, ast.Constant) and not is_on):
            yield "shell=True"


def _raises(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(node, ast.Raise) for node in ast.walk(handler))


def sizes(module: Module) -> Iterator[tuple[str, int, int]]:
    """(name, lines, limit) of the module and of each of its functions and methods."""
    yield module.name, len(module.source.splitlines()), LONGEST_MODULE
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{module.name}:{node.name}", (node.end_lineno or 0) - node.lineno + 1, LONGEST_FUNCTION


def skip_marks(module: Module) -> int:
    """The number of tests or parameters that a module skips or expects to fail."""
    return sum(
        isinstance(node, ast.Attribute)
        and node.attr in ("skip", "skipif", "xfail", "importorskip", "skipTest")
        for node in ast.walk(module.tree)
    )
