"""One worker runs all tests of a group, for tests that share expensive fixtures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CASES = """
import os
import pytest

@pytest.mark.xdist_group("together")
@pytest.mark.parametrize("case", range(12))
def test_case(case):
    with open("workers.txt", "a") as file:
        file.write(os.environ["PYTEST_XDIST_WORKER"] + "\\n")
"""


@pytest.mark.slow
def test_tests_of_a_group_run_in_one_worker(tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text(CASES)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "test_cases.py"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    workers = (tmp_path / "workers.txt").read_text().split()
    assert len(workers) == 12 and len(set(workers)) == 1, done.stdout + done.stderr
