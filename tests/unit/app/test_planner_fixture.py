"""The planner that stands in for the search leaves nothing behind in modules that are imported meanwhile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

INSIDE = """
import pytest
from types import SimpleNamespace
from tests.unit.app.conftest import TAKES_QUESTION, planner

def test_modules_imported_meanwhile_have_the_real_question(planner):
    from shardwise.app.cli.frontier import command, strategies
    from shardwise.replan import shapes, trace_searches, uneven_plans
    for module in (command, strategies, shapes, trace_searches, uneven_plans):
        assert module.Question is not SimpleNamespace, module.__name__
"""


def test_modules_imported_meanwhile_have_the_real_question(tmp_path: Path) -> None:
    path = tmp_path / "test_inside.py"
    path.write_text(INSIDE)
    root = Path(__file__).parents[3]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(root), str(path)],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
