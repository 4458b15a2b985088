"""Cases of `--full` alone are left out without it, and no others."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

CASES = """
import pytest
from tests.sampling import sample_of

@pytest.mark.parametrize(("a", "b"), sample_of([(1, 2), (3, 4), (5, 6)], [(3, 4)]))
def test_pairs(a, b):
    assert (a, b)

@pytest.mark.parametrize("name", sample_of(["one", "two"], ["two"]))
def test_names(name):
    assert name
"""
SAMPLE = {"test_pairs[3-4]", "test_names[two]"}
OTHERS = {"test_pairs[1-2]", "test_pairs[5-6]", "test_names[one]"}


@pytest.mark.slow
@pytest.mark.parametrize(("options", "expected"), [((), SAMPLE), (("--full",), SAMPLE | OTHERS)])
def test_a_sample_is_run_by_default_and_the_remainder_with_full(
    tmp_path: Path, options: tuple[str, ...], expected: set[str]
) -> None:
    file = tmp_path / "test_cases.py"
    file.write_text(CASES)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-v", "-v", "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [*command, *options, str(file)],
        check=False, capture_output=True, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert set(re.findall(r"::(\S+) PASSED", done.stdout)) == expected, done.stdout + done.stderr
