"""Property tests use the same examples on every machine, unless a random search is requested."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
FIXED = "import tests.conftest"
OTHER_MODULES = "import shardwise.app.cli.main"
RANDOM = "from hypothesis import settings; settings.load_profile('random')"
CONSTANTS = """
p = tests.conftest.providers
own = p.Constants(integers=p.SortedSet(range(1000)), strings=p.SortedSet(["one", "two"]))
p._get_local_constants = lambda: own
"""
"""Simulates loaded modules with these constants."""

DRAWS = "from tests.unit.test_examples import examples_here; print(examples_here())"


def examples_here() -> list[tuple[int, float, str]]:
    """Examples of a property test in this process."""
    examples = []

    @given(st.integers(), st.floats(), st.text())
    def draw(integer: int, number: float, text: str) -> None:
        examples.append((integer, number, text))

    draw()
    return examples


def examples_after(*statements: str, hash_seed: int = 0, is_in_ci: bool = False) -> str:
    """Its examples in a separate process, after these statements; with the variable that CI sets where it
    `is_in_ci`.
    """
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": paths}
    environment |= {"CI": "true"} if is_in_ci else {}
    command = [sys.executable, "-c", "\n".join((*statements, DRAWS))]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_examples_are_the_same_in_every_process() -> None:
    once = examples_after(FIXED)
    assert once.count("(") >= 100
    assert examples_after(FIXED, OTHER_MODULES, hash_seed=1) == once


@pytest.mark.slow
@pytest.mark.parametrize("is_in_ci", [False, True])
def test_a_random_search_draws_other_examples(is_in_ci: bool) -> None:
    assert examples_after(FIXED, RANDOM, is_in_ci=is_in_ci) != examples_after(
        FIXED, RANDOM, is_in_ci=is_in_ci
    )


@pytest.mark.slow
def test_a_mutant_that_draws_constants_of_loaded_modules_is_noticed() -> None:
    assert examples_after(FIXED, CONSTANTS) != examples_after(FIXED)
