"""Imports go strictly downward and use public names; each rule catches a module that breaks it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from tests.architecture.import_rules import (
    BASE,
    LAYERS,
    TOP,
    import_violations,
    imports_of,
    public_names,
    unused_exports,
)
from tests.architecture.sources import CHECKER, ROOT, module_of, package_modules

MODULES = package_modules()

WITH_TORCH = ("runtime", "measure")
"""Packages that nothing imports before a command needs them."""

WITH_NUMBA = tuple(
    f"shardwise.search.pareto.{name}" for name in ("joins_numba", "labels_numba", "weighted_sums_numba")
)
"""Modules with functions that numba compiles; imported only when they are used."""

PUBLIC = public_names(MODULES)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.name))
def test_imports_obey_the_rules(module: object) -> None:
    assert import_violations(module, PUBLIC) == []  # type: ignore[arg-type]


def test_every_package_has_a_layer_and_is_documented() -> None:
    packages = {module.package for module in MODULES} - {*TOP, CHECKER}
    assert packages <= {*LAYERS, *BASE}
    rows = re.findall(
        r"^\| (\d|base) \| (.*?) \|(.*)\|$",
        (ROOT / "docs/contributing/packages.md").read_text(),
        re.MULTILINE,
    )
    documented = {
        name.removesuffix(".py").split("/")[0]: layer
        for layer, names, other_cells in rows
        for name in re.findall(r"`([\w/.]+)`", names + (other_cells if "same layer" in other_cells else ""))
    }
    assert {name: layer for name, layer in documented.items() if layer != "base"} == {
        package: str(LAYERS[package]) for package in packages if package in LAYERS
    }
    assert {name for name, layer in documented.items() if layer == "base"} == set(BASE)


def test_public_names_exist() -> None:
    """The names in a package's `__all__` are bound in its `__init__`."""
    for module in MODULES:
        if module.name in (f"shardwise.{module.package}", CHECKER):
            for name in PUBLIC[module.package]:
                assert re.search(rf"\b{name}\b", module.source.split("__all__")[0]), (module.name, name)


def test_a_package_exports_what_others_use() -> None:
    documented = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    public = {name: names for name, names in PUBLIC.items() if name}
    assert unused_exports(MODULES, public, documented) == []
    public["sim"] |= {"makespan_s", "unused_name"}
    assert unused_exports(MODULES, public, documented) == ["sim: unused_name"]


OF_CHECKER = f"{CHECKER}.plan"

MUTANTS = {
    "upward": ("shardwise.cost.memory", "from shardwise.search import best", "not below it"),
    "sideways": ("shardwise.cost.memory", "from shardwise.plans import Answer", "not below it"),
    "sideways, late": ("shardwise.search.a", "def f():\n    import shardwise.replanning", "not below it"),
    "a plan upward, at once": ("shardwise.plans.plan", "from shardwise.api import explain", "not below it"),
    "a plan upward, not to the interface": (
        "shardwise.plans.plan",
        "def f():\n    from shardwise.search import explained",
        "not below it",
    ),
    "another module upward": (
        "shardwise.plans.record",
        "def f():\n    from shardwise.api import explain",
        "not below it",
    ),
    "a command that prices": (
        "shardwise.app.cli.a",
        "from shardwise.cost import bind",
        "which api.py answers",
    ),
    "a command that searches": (
        "shardwise.app.cli.a",
        "from shardwise import search\nsearch.plan(1)",
        "app imports plan of search",
    ),
    "past the init": (
        "shardwise.sim.engine",
        "from shardwise.strategy.strategy import Strategy",
        "reaches past strategy's __init__",
    ),
    "by module": ("shardwise.sim.engine", "import shardwise.strategy.strategy", "reaches past"),
    "past a base package": (
        "shardwise.model.load",
        "from shardwise.inputs.read import read_text",
        "reaches past",
    ),
    "private of base": ("shardwise.model.load", "from shardwise.inputs import scalars", "not a public name"),
    "whole package": ("shardwise.sim.engine", "import shardwise.strategy", "whole package"),
    "private name": ("shardwise.sim.engine", "from shardwise.strategy import _places", "not a public name"),
    "relative": ("shardwise.sim.engine", "from ..strategy import Strategy", "relative import"),
    "package upward": ("shardwise.sim.engine", "from shardwise import search", "not below it"),
    "private by package": (
        "shardwise.sim.engine",
        "from shardwise import strategy\nstrategy.hidden(1)",
        "hidden is not a public name of strategy",
    ),
    "unknown package": ("shardwise.sim.engine", "from shardwise.helpers import x", "unknown package"),
    "base upward": ("shardwise.units", "from shardwise.model import Model", "not below it"),
    "base order": ("shardwise.errors", "from shardwise.inputs import read", "errors imports inputs"),
    "yaml": ("shardwise.model.load", "import yaml", "third-party package yaml"),
    "scipy": ("shardwise.cost.memory", "import scipy.optimize", "third-party package scipy"),
    "torch": ("shardwise.search.a", "def f():\n    import torch", "third-party package torch"),
    "rich": ("shardwise.sim.gantt", "from rich.table import Table", "third-party package rich"),
    "numpy in units": ("shardwise.units", "import numpy as np", "third-party package numpy"),
    "math": ("shardwise.equations.comm", "import math", "math in equations"),
    "checker and code": (OF_CHECKER, "from shardwise.strategy import complete", "the checker imports"),
    "checker and records": (OF_CHECKER, "def f():\n    import shardwise.plans", "the checker imports"),
    "checker and base": (OF_CHECKER, "from shardwise.errors import ConfigError", "the checker imports"),
    "checker and package": (OF_CHECKER, "from shardwise import search", "the checker imports"),
    "checker and third": (OF_CHECKER, "import typer", "third-party package typer"),
    "search and checker": (
        "shardwise.search.a",
        "from shardwise_verify import check_file",
        "imports the checker",
    ),
    "past the checker": (
        "shardwise.app.a",
        "from shardwise_verify.space import divisors",
        "reaches past the checker's __init__",
    ),
    "private of checker": (
        "shardwise.app.a",
        "import shardwise_verify\nshardwise_verify.divisors(1)",
        "divisors is not a public name of the checker",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_module_that_breaks_a_rule_is_caught(mutant: str) -> None:
    name, source, problem = MUTANTS[mutant]
    violations = import_violations(module_of(name, source), PUBLIC)
    assert any(problem in violation for violation in violations), violations


def test_methods_of_plans_may_call_the_public_functions() -> None:
    module = module_of("shardwise.plans.plan", "def f():\n    from shardwise.api import explain\n")
    assert import_violations(module, PUBLIC) == []


def test_a_module_that_obeys_is_not_caught() -> None:
    source = (
        "from __future__ import annotations\nimport json\nimport numpy as np\n"
        "from shardwise.errors import ConfigError\nfrom shardwise.strategy import Strategy\n"
        "from shardwise.sim.traces import write\n"
    )
    assert import_violations(module_of("shardwise.sim.engine", source), PUBLIC) == []


@pytest.mark.slow
def test_one_module_imports_numba() -> None:
    found = [
        module.name for module in MODULES if any(own.target.startswith("numba") for own in imports_of(module))
    ]
    assert found == ["shardwise.search.pareto.compilation"]


@pytest.mark.slow
def test_planning_imports_no_heavy_package() -> None:
    """Imports all modules in a fresh process, except those that run PyTorch and those that numba compiles."""
    names = [
        module.name
        for module in MODULES
        if not module.name.endswith("__main__")
        and module.package not in WITH_TORCH
        and module.name not in WITH_NUMBA
    ]
    script = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT / "src"
    )
    loaded = set(run.stdout.split())
    assert "numpy" in loaded
    assert loaded & {"torch", "numba", "scipy", "pandas", "transformers", "matplotlib", "jax"} == set()
