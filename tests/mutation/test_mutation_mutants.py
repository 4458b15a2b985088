"""The mutants of a given source, and a small campaign from end to end."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.mutation.mutants import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[2]


def made_of(tmp_path: Path, body: str) -> list[Mutant]:
    path = tmp_path / "sample.py"
    path.write_text(f"def f(a: int = 3, *rest: int) -> int:\n    {body}\n")
    return mutants_of("sample", path)


@pytest.mark.parametrize(
    ("body", "changes"),
    [
        ("return a + b * c", ["a - b * c", "b / c"]),
        ("return a // 2", ["a / 2", "a // 3"]),
        ("return 1 < a <= b", ["1 <= a <= b", "1 < a < b", "2 < a <= b"]),
        ("return a and not b", ["a or not b", "not not b"]),
        ("return np.maximum(a, 0.0)", ["np.minimum(a, 0.0)", "np.maximum(a, 1.0)"]),
        ("return np.where(a, b, 2.5)", ["np.where(a, 2.5, b)", "np.where(a, b, 5.0)"]),
        ("return -a", ["+a"]),
        ("return a if b else c", ["a if not b else c"]),
        ("return f(a, keepdims=True)", ["f(a, keepdims=False)"]),
        ("return a in b", ["a not in b"]),
        ("'''Text.'''", []),
        ("x: list[int] = a", []),
        ("raise ValueError('x' + str(a + 1))", []),
        ("return zip(a, b, strict=True)", []),
        ("return f'{a + 1}'", []),
        ("return 'x' + a", []),
    ],
)
def test_changes_of_one_expression(tmp_path: Path, body: str, changes: list[str]) -> None:
    found = [mutant.after for mutant in made_of(tmp_path, body)]
    assert sorted(found) == sorted(changes)


def test_a_mutant_changes_the_syntax_tree_of_its_module(tmp_path: Path) -> None:
    first, _ = made_of(tmp_path, "return a + b * c")
    assert (first.line, first.function, first.key) == (2, "f", "sample:f: a + b * c -> a - b * c")
    assert "a + b * c" in ast.unparse(first.tree)
    first.apply()
    assert "a - b * c" in ast.unparse(first.tree)


def test_methods_and_inner_functions_belong_to_their_qualified_name(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    lines = (
        "LIMIT = 3 + 4",
        "class A:",
        "    size = 3",
        "    def f(self):",
        "        def g():",
        "            return 1 - x",
    )
    path.write_text("\n".join(lines))
    assert {mutant.key for mutant in mutants_of("m", path)} == {
        "m:A.f: 1 - x -> 1 + x",
        "m:A.f: 1 - x -> 2 - x",
    }


def campaign(*tests: str) -> subprocess.CompletedProcess[str]:
    script = ["tests/mutation/mutate.py", "--packages", "pareto", "--sample", "3", "--tests", *tests]
    return subprocess.run([sys.executable, *script], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_a_campaign_with_the_packages_own_tests_kills() -> None:
    run = campaign("tests/property/test_pareto_laws.py", "tests/unit/pareto/test_pareto_knee.py")
    assert re.search(r"\n[23] of 3 killed", run.stdout), run.stdout
    assert run.returncode == (0 if "\n3 of 3 killed" in run.stdout else 1)


@pytest.mark.slow
def test_a_campaign_with_unrelated_tests_kills_nothing() -> None:
    run = campaign("tests/property/test_dimension_number.py")
    assert "0 of 3 killed: 0.0%" in run.stdout, run.stdout
    assert "survived src/shardwise/pareto" in run.stdout
    assert run.returncode == 1
