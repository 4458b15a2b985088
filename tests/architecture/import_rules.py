"""Allowed imports: from lower packages only, public names only, third-party packages by package."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tests.architecture.sources import CHECKER, Module

LAYERS: Mapping[str, int] = {
    "app": 8,
    "api": 7,
    "questions": 6,
    "runtime": 6,
    "measure": 6,
    "emulate": 6,
    "accuracy": 5,
    "replanning": 5,
    "search": 4,
    "targets": 4,
    "sim": 3,
    "launch": 3,
    "cost": 2,
    "plans": 2,
    "strategy": 1,
    "model": 0,
    "graph": 0,
    "cluster": 0,
    "schedule": 0,
    "pareto": 0,
    "equations": 0,
}

BASE = ("errors", "units", "interrupts", "inputs", "operators", "numbers", "ties", "notebook")
"""Base modules and packages, which every package may import; each may import those before it."""

CALLS_UP = {"shardwise.plans.plan": "api", "shardwise.api": "app.web"}
"""The two calls upward: methods of `Plan` that ask a question import the public functions when they run, and
`report` imports the pages when it runs."""

TOP = ("", "__main__")
"""The package itself and its command: above all packages."""

THIRD_PARTY: Mapping[str, frozenset[str]] = {
    "app": frozenset({"numpy", "typer", "rich", "click", "matplotlib", "fastapi", "uvicorn"}),
    "plans": frozenset({"numpy", "yaml"}),
    "launch": frozenset({"yaml"}),
    "inputs": frozenset({"yaml"}),
    "errors": frozenset(),
    "units": frozenset(),
    "interrupts": frozenset(),
    "operators": frozenset(),
    "search": frozenset({"numpy", "numba"}),
    "runtime": frozenset({"numpy", "torch", "safetensors"}),
    "measure": frozenset({"numpy", "torch"}),
    "targets": frozenset(
        {"torch", "megatron", "torchtitan", "yaml", "accelerate", "deepspeed", "transformers"}
    ),
    CHECKER: frozenset({"numpy", "yaml"}),
}
"""Third-party packages per package or base module; every other package has numpy only."""

EQUATIONS_STDLIB = frozenset({"__future__", "collections", "typing", "dataclasses"})

CHECKER_USERS = frozenset({"app", "questions", "api"})
"""Packages that may import the independent checker; it imports nothing of `shardwise`."""


@dataclass(frozen=True)
class Import:
    """One imported module, the names taken from it (none for `import a.b`), the line, and whether it is in a
    function or for type checkers alone."""

    target: str
    names: tuple[str, ...]
    line: int
    is_late: bool


NOT_FOR_APP: Mapping[str, frozenset[str] | None] = {
    "cost": None,
    "equations": None,
    "pareto": None,
    "search": frozenset(
        {
            "Question", "answer_at", "best_uneven", "curves_for", "default_job", "evaluate", "explained",
            "graph_result", "overview_of", "plan", "plan_for", "plan_mixed_cluster", "predict_record",
            "what_if", "why_not",
        }
    ),
}  # fmt: skip
"""What commands reach through `api.py` alone: whole packages (None), and names of a package."""


def imports_of(module: Module) -> Iterator[Import]:
    """Every import of a module, at any depth; a relative one keeps its leading dots."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, (), node.lineno, node.col_offset > 0)
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            yield Import("." * node.level + (node.module or ""), names, node.lineno, node.col_offset > 0)


def public_names(modules: list[Module]) -> dict[str, frozenset[str]]:
    """The names that each package's `__init__` lists in `__all__`."""
    return {
        module.name.removeprefix("shardwise."): frozenset(
            ast.literal_eval(statement.value)
            if isinstance(statement, ast.Assign) and _assigns_all(statement)
            else ()
        )
        for module in modules
        if module.name in (f"shardwise.{module.package}", CHECKER)
        or module.name.removeprefix("shardwise.") in CALLS_UP.values()
        for statement in [next(filter(_assigns_all, module.tree.body), None)]
    }


def _assigns_all(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id == "__all__" for target in statement.targets
    )


def import_violations(module: Module, public: Mapping[str, frozenset[str]]) -> list[str]:
    """Imports of a module that break the rules, as `name:line: problem`."""
    return [
        f"{module.name}:{found.line}: {problem}"
        for found in imports_of(module)
        for problem in _problems(module, found, public)
    ]


def _problems(module: Module, found: Import, public: Mapping[str, frozenset[str]]) -> Iterator[str]:
    top = found.target.split(".")[0]
    if found.target.startswith("."):
        yield "relative import"
    elif module.package == CHECKER and top == "shardwise":
        yield f"the checker imports {found.target}"
    elif top == CHECKER:
        yield from _checker_problems(module, found, public)
    elif top == "shardwise" and module.package not in TOP:
        yield from _package_problems(module, found, public)
    elif top != "shardwise" and top not in sys.stdlib_module_names:
        if top not in THIRD_PARTY.get(module.package, frozenset({"numpy"})):
            yield f"third-party package {top}"
    elif module.package == "equations" and top not in EQUATIONS_STDLIB:
        yield f"{top} in equations"


def _package_problems(module: Module, found: Import, public: Mapping[str, frozenset[str]]) -> Iterator[str]:
    parts = found.target.split(".")
    if len(parts) == 1:
        for package in set(found.names) - {"__version__"}:
            yield from _layer_problems(module, package)
            names = sorted(_attributes_of(module, package))
            yield from _name_problems(module, package, names, public)
    elif parts[1] != module.package:
        above = found.target.removeprefix("shardwise.")
        if found.is_late and CALLS_UP.get(module.name) == above:
            yield from _name_problems(module, above, found.names, public)
            return
        yield from _layer_problems(module, parts[1])
        if len(parts) > 2:
            yield f"reaches past {parts[1]}'s __init__ into {found.target}"
        elif not found.names:
            yield f"import of a whole package {parts[1]} by its path"
        yield from _name_problems(module, parts[1], found.names, public)


def _layer_problems(module: Module, target: str) -> Iterator[str]:
    if target in BASE:
        if module.package in BASE and BASE.index(target) > BASE.index(module.package):
            yield f"{module.package} imports {target}"
    elif target not in LAYERS:
        yield f"unknown package {target}"
    elif LAYERS.get(module.package, -1) <= LAYERS[target]:
        yield f"{module.package} imports {target}, which is not below it"


def _name_problems(
    module: Module, target: str, names: Iterable[str], public: Mapping[str, frozenset[str]]
) -> Iterator[str]:
    if target in BASE and not public.get(target):  # a plain module: it lists no names
        return
    for name in names:
        if name not in public.get(target, frozenset()):
            yield f"{name} is not a public name of {target}"
        banned = NOT_FOR_APP.get(target, frozenset())
        if module.package == "app" and (banned is None or name in banned):
            yield f"app imports {name} of {target}, which api.py answers"


def _attributes_of(module: Module, name: str) -> set[str]:
    """Every x that the module uses as `name.x`."""
    return {
        node.attr
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
    }


def _checker_problems(module: Module, found: Import, public: Mapping[str, frozenset[str]]) -> Iterator[str]:
    """Other packages use the public names of the checker; its own modules import each other."""
    if module.package == CHECKER:
        return
    if module.package not in CHECKER_USERS:
        yield f"{module.package} imports the checker"
    if found.target != CHECKER:
        yield f"reaches past the checker's __init__ into {found.target}"
    for name in sorted({*found.names, *_attributes_of(module, CHECKER)} - public.get(CHECKER, frozenset())):
        yield f"{name} is not a public name of the checker"


def unused_exports(modules: list[Module], public: Mapping[str, frozenset[str]], documented: str) -> list[str]:
    """Names in a package's `__all__` that no other package imports and no page shows, as `package: name`."""
    used: dict[str, set[str]] = {}
    for module in modules:
        for found in imports_of(module):
            if found.target == "shardwise":
                for package in found.names:
                    used.setdefault(package, set()).update(_attributes_of(module, package))
            elif found.target == CHECKER and module.package != CHECKER:
                used.setdefault(CHECKER, set()).update(found.names, _attributes_of(module, CHECKER))
            elif found.target != f"shardwise.{module.package}":
                used.setdefault(found.target.removeprefix("shardwise."), set()).update(found.names)
    return [
        f"{package}: {name}"
        for package, exported in sorted(public.items())
        for name in sorted(exported - used.get(package, set()))
        if not re.search(rf"\b{name}\b", documented)
    ]
