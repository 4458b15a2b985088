"""Every equation gives the unit that its name says, from arguments of the units that their names say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.property.dimension import Dim, Unit, UnitError, unit_of, value_of
from tests.property.equation_arguments import Equation, arguments, draw, equations, unit_of_name

EQUATIONS = equations()


def result_unit(equation: Equation, seed: int = 0) -> tuple[Any, Unit]:
    """Value and unit of the result for random arguments that carry their units."""
    random_ = random.Random(seed)
    result = equation(**arguments(equation, lambda name: Dim(draw(name, random_), unit_of_name(name))))
    return value_of(result), unit_of(result)


@pytest.mark.parametrize("name", EQUATIONS)
def test_unit_of_the_result_is_that_of_the_name(name: str) -> None:
    for seed in range(5):
        value, found = result_unit(EQUATIONS[name], seed)
        assert found == unit_of_name(name)
        assert np.isfinite(value)


def test_every_module_has_checked_equations() -> None:
    assert {name.split(".")[0] for name in EQUATIONS} >= {"comm", "compute", "goodput", "memory", "pipeline"}
    assert len(EQUATIONS) >= 30


# Mutants: typical slips in an equation, each caught above.


def forgets_to_divide_s(nbytes: Any, alpha_s: Any, bw_bytes_per_s: Any) -> Any:
    return alpha_s + nbytes * bw_bytes_per_s


def forgets_latency_s(nbytes: Any, n: Any) -> Any:
    return nbytes * n


def floors_at_a_plain_zero_s(wait_s: Any) -> Any:
    return np.maximum(wait_s, 0.0)


def branches_s(n: Any, alpha_s: Any) -> Any:
    return alpha_s if n > Dim(1.0, {}) and alpha_s else 0.0 * alpha_s


def sums_tiers_and_sizes_s(sizes: Sequence[Any], alphas_s: Sequence[Any]) -> Any:
    return alphas_s[0] + sizes[0]


@pytest.mark.parametrize(
    "mutant", [forgets_to_divide_s, floors_at_a_plain_zero_s, branches_s, sums_tiers_and_sizes_s]
)
def test_incompatible_units_are_caught(mutant: Equation) -> None:
    with pytest.raises(UnitError):
        result_unit(mutant)


def test_a_result_of_the_wrong_unit_is_caught() -> None:
    _, found = result_unit(forgets_latency_s)
    assert found != unit_of_name("forgets_latency_s")
