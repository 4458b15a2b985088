"""Arguments and results of equations, derived from their names: units from suffixes, values in the range of
validity.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from tests.property.dimension import Unit, unit

import shardwise.equations

Equation = Callable[..., Any]

TIERS = 3
"""Length of the arguments that are sequences."""

SUFFIXES: tuple[tuple[str, Unit], ...] = (
    ("bytes_per_s", unit(byte=1, s=-1)),
    ("flop_per_s", unit(flop=1, s=-1)),
    ("_s", unit(s=1)),
    ("bytes", unit(byte=1)),
    ("flop", unit(flop=1)),
)
"""The first suffix that matches counts; a name without any is dimensionless."""

SHARES = ("fraction", "overlap", "share", "ratio", "has", "copies", "in_switch", "jitter")
"""Last words of names that are fractions of one."""


def equations() -> dict[str, Equation]:
    """Every public function of the modules of `equations/`, as `module.function`."""
    found: dict[str, Equation] = {}
    for path in sorted(Path(shardwise.equations.__path__[0]).glob("*.py")):
        if path.stem == "__init__":
            continue
        module = import_module(f"shardwise.equations.{path.stem}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not name.startswith("_"):
                found[f"{path.stem}.{name}"] = function
    return found


def unit_of_name(name: str) -> Unit:
    return next((expected for suffix, expected in SUFFIXES if name.endswith(suffix)), {})


def parameters(equation: Equation) -> Iterator[tuple[str, bool]]:
    """Names of the parameters and whether each is a sequence, one number per tier."""
    hints = get_type_hints(equation)
    for name in inspect.signature(equation).parameters:
        yield name, get_origin(hints[name]) is not None


def draw(name: str, random_: random.Random) -> float:
    """A random value for the name: seconds, bytes, speeds, fractions of one, or a whole number."""
    expected = unit_of_name(name)
    if expected == unit(s=1):
        return float(10.0 ** random_.uniform(-7, 1))
    if "s" in expected:
        return float(10.0 ** random_.uniform(8, 15))
    if expected:
        return float(random_.choice([1, 2, 4]) if name == "element_bytes" else random_.randint(1, 10**9))
    word = name.rsplit("_", 1)[-1]
    if word in ("in_switch", "has") or name == "in_switch":
        return float(random_.randint(0, 1))
    if word in SHARES or name in SHARES:
        return random_.uniform(0.05, 0.95)
    if word == "slowdown":
        return random_.uniform(1.0, 2.0)
    return float(random_.randint(1, 64))


def arguments(equation: Equation, make: Callable[[str], Any]) -> dict[str, Any]:
    """One argument per parameter by `make`; a sequence of them where the parameter is one."""
    return {
        name: [make(name) for _ in range(TIERS)] if is_sequence else make(name)
        for name, is_sequence in parameters(equation)
    }
