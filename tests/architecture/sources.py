"""The package's modules as parsed source, for rules that read them."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "shardwise"
CHECKER = "shardwise_verify"
"""The independent checker, a package of its own, next to `shardwise`."""


@dataclass(frozen=True)
class Module:
    """One module: its dotted name (a package's is that of its `__init__`) and its text."""

    name: str
    source: str = field(repr=False)

    @property
    def tree(self) -> ast.Module:
        """Its syntax tree, parsed each time: the trees of all modules have two million nodes, too many for
        every pytest worker to keep."""
        return ast.parse(self.source)

    @property
    def package(self) -> str:
        """The part after `shardwise`: a package, a base module, or nothing for `shardwise` itself. The
        checker is one package."""
        parts = self.name.split(".")
        return CHECKER if parts[0] == CHECKER else ".".join(parts[1:2])


def module_of(name: str, source: str) -> Module:
    return Module(name, source)


@cache
def package_modules() -> list[Module]:
    """Every module of both packages under src."""
    modules = []
    for path in sorted([*PACKAGE.rglob("*.py"), *(PACKAGE.parent / CHECKER).rglob("*.py")]):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules.append(module_of(name, path.read_text(encoding="utf-8")))
    return modules


def test_modules() -> list[Module]:
    """Every module under tests."""
    return [
        module_of(".".join(path.relative_to(ROOT).with_suffix("").parts), path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "tests").rglob("*.py"))
    ]


test_modules.__test__ = False  # type: ignore[attr-defined]
