"""`ties` alone states the tolerances within which answers are equal, and the slack of bounds for rounding."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from tests.architecture.sources import Module, module_of, package_modules

PACKAGES = frozenset({"search", "replanning", "questions", "plans", "pareto", "api"})
"""Packages that compare answers: which is best, first or slowest. So do those of JUDGES."""

JUDGES = frozenset(
    {"shardwise.accuracy.validate", "shardwise.accuracy.compare", "shardwise.cost.bounds.capacity"}
)

SMALLEST = 1e-6
"""A number closer than this to 0 or 1 is taken for a tolerance."""

COMPARERS = frozenset({"isclose", "allclose", "array_equiv", "approx"})
"""Functions with a tolerance of their own if none is given."""

OTHERS = {
    ("shardwise.plans.record", "1e-12"): "the gap below which an optimum counts as proven",
    ("shardwise.plans.record", "1e-30"): "the shortest step time of a plan file",
    ("shardwise.search.hetero.branch_and_bound", "1e-06"): "below it an optimum is tested directly",
    ("shardwise.search.pareto.supported_points", "1e-07"): "a weight of the objective that breaks ties",
    ("shardwise.search.staged.problem", "1e-06"): "perturbs durations, so that one path is the longest",
    ("shardwise.search.staged.problem", "1e-09"): "a step of a numerical derivative",
}  # fmt: skip
"""Small numbers that are no tolerance of a comparison, each with its reason."""


def tolerances(module: Module) -> Iterator[str]:
    """The small numbers of a module, and comparisons that leave the tolerance to a library."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, float):
            if 0.0 < node.value <= SMALLEST or 0.0 < abs(1.0 - node.value) <= SMALLEST:
                yield repr(node.value)
        elif isinstance(node, ast.Call):
            is_given = any(one.arg in ("rel_tol", "rtol", "rel") for one in node.keywords)
            if ast.unparse(node.func).rpartition(".")[2] in COMPARERS and not is_given:
                yield ast.unparse(node.func)


def stated() -> set[tuple[str, str]]:
    """All of the packages that compare answers, by module."""
    return {
        (module.name, text)
        for module in package_modules()
        if module.package in PACKAGES or module.name in JUDGES
        for text in tolerances(module)
    }


def test_tolerances_of_answers_are_stated_in_ties_alone() -> None:
    assert stated() == set(OTHERS)


def test_the_helper_states_three() -> None:
    [ties] = [module for module in package_modules() if module.name == "shardwise.ties"]
    assert sorted(tolerances(ties)) == ["1e-09", "1e-09", "2.5e-13"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("ROUNDING = 1e-9", ["1e-09"]),
        ("best = [a for a in times if a <= least * (1.0 + 1e-12)]", ["1e-12"]),
        ("FACTOR = 0.999999999999", ["0.999999999999"]),
        ("is_same = math.isclose(a, b)", ["math.isclose"]),
        ("is_same = np.allclose(a, b)", ["np.allclose"]),
        ("is_same = isclose(a, b, rel_tol=1e-9)", ["1e-09"]),
        ("is_same = isclose(a, b, rel_tol=TIE)", []),
        ("half, share, many = 0.5, 1e-3, 1e9", []),
    ],
)
def test_a_new_tolerance_is_noticed(line: str, found: list[str]) -> None:
    assert list(tolerances(module_of("shardwise.search.new", line))) == found
