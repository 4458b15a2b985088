"""Scalars and columns share one definition, and times are monotone in bytes and bandwidth."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.property.dimension import unit
from tests.property.equation_arguments import (
    Equation,
    arguments,
    draw,
    equations,
    parameters,
    unit_of_name,
)

EQUATIONS = equations()
ROWS = 200

TRANSCENDENTAL = (
    "comm.tree_all_reduce_s",
    "comm.expected_groups",
    "comm.all_reduce_s",
    "goodput.surviving_fraction",
    "goodput.slowest_node_slowdown",
)
"""Equations with a logarithm or exponential, whose last bit may differ between numpy's scalar and vector
loops.
"""

TIMES = {name: equation for name, equation in EQUATIONS.items() if unit_of_name(name) == unit(s=1)}


def columns(equation: Equation, seed: int) -> dict[str, Any]:
    random_ = random.Random(seed)
    return arguments(equation, lambda name: np.array([draw(name, random_) for _ in range(ROWS)]))


def row(table: dict[str, Any], index: int) -> dict[str, Any]:
    """Row `index` of a table of columns, as plain floats."""
    return {
        name: [float(column[index]) for column in value] if isinstance(value, list) else float(value[index])
        for name, value in table.items()
    }


def column_mismatches(equation: Equation, rtol: float) -> int:
    """Rows on which the equation of columns differs from the equation of that row's plain floats."""
    table = columns(equation, seed=3)
    whole = np.broadcast_to(equation(**table), ROWS)
    each = np.array([float(equation(**row(table, index))) for index in range(ROWS)])
    return int(np.count_nonzero(np.abs(whole - each) > rtol * np.abs(each)))


@pytest.mark.parametrize("name", EQUATIONS)
def test_a_scalar_is_a_row_of_the_column(name: str) -> None:
    assert column_mismatches(EQUATIONS[name], 1e-14 if name in TRANSCENDENTAL else 0.0) == 0


def test_an_equation_that_depends_on_the_whole_column_is_caught() -> None:
    def relative_s(nbytes: Any, bw_bytes_per_s: Any) -> Any:
        return nbytes / np.max(bw_bytes_per_s)

    assert column_mismatches(relative_s, 1e-9) > ROWS / 2


def slowdowns(equation: Equation, change: Callable[[str], float]) -> list[str]:
    """Names of the parameters that, multiplied by `change(name)`, make some row take less time."""
    found = []
    for name, is_sequence in parameters(equation):
        if change(name) == 1.0:
            continue
        for place in range(3 if is_sequence else 1):
            table = columns(equation, seed=5)
            before = equation(**table)
            if is_sequence:
                table[name][place] = table[name][place] * change(name)
            else:
                table[name] = table[name] * change(name)
            if np.any(equation(**table) < before * (1.0 - 1e-12)):
                found.append(name)
    return found


def more_work(name: str) -> float:
    """3 for amounts of bytes and flop, 1 for the rest."""
    return 3.0 if unit_of_name(name) in (unit(byte=1), unit(flop=1)) else 1.0


def less_speed(name: str) -> float:
    """1/3 for speeds, 1 for the rest."""
    return 1.0 / 3.0 if unit_of_name(name) in (unit(byte=1, s=-1), unit(flop=1, s=-1)) else 1.0


@pytest.mark.parametrize("name", TIMES)
def test_more_bytes_or_flop_never_take_less_time(name: str) -> None:
    assert slowdowns(TIMES[name], more_work) == []


@pytest.mark.parametrize("name", TIMES)
def test_less_speed_never_takes_less_time(name: str) -> None:
    assert slowdowns(TIMES[name], less_speed) == []


def test_an_equation_that_multiplies_by_speed_is_caught() -> None:
    def wrong_s(nbytes: Any, bw_bytes_per_s: Any) -> Any:
        return bw_bytes_per_s / nbytes

    assert slowdowns(wrong_s, more_work) == ["nbytes"]
    assert slowdowns(wrong_s, less_speed) == ["bw_bytes_per_s"]


def test_the_checks_reach_times_with_bytes_and_speeds() -> None:
    names = {parameter for equation in TIMES.values() for parameter, _ in parameters(equation)}
    assert sum(more_work(name) > 1.0 for name in names) >= 3
    assert sum(less_speed(name) < 1.0 for name in names) >= 3
