"""A command starts fast because it imports little; and commands in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "scipy", "pandas", "transformers", "networkx", "rich", "sympy", "jsonschema")
PROGRAM = """
import json, sys
from shardwise.app.cli.main import main
main(["--version"])
import shardwise.app.cli.planning, shardwise.app.cli.simulating
print(json.dumps([name for name in sys.argv[1:] if name in sys.modules]))
"""


@pytest.mark.slow
def test_planning_imports_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *HEAVY, "numpy"], capture_output=True, text=True, check=True
    )
    # numpy is in it, so the list does contain imported modules.
    assert json.loads(done.stdout.splitlines()[-1]) == ["numpy"]


def test_an_interrupt_while_modules_load_ends_the_command() -> None:
    """Before `main` runs, hardly anything is imported: an interrupt there would leave a traceback."""
    program = "import sys, shardwise.app.cli.main; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "shardwise.app.cli.main" in loaded
    ours = {name for name in loaded if name.startswith("shardwise")}
    assert ours == {"shardwise", "shardwise.app", "shardwise.app.cli", "shardwise.app.cli.main"}
    assert not loaded & {"dataclasses", "json", "typer", "numpy"}


def test_the_module_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "plna"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("shardwise: error: ") and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_closed_pipe_prints_nothing() -> None:
    """As in `shardwise models | head -0`: the reader is gone before the first write."""
    with subprocess.Popen(
        [sys.executable, "-m", "shardwise", "models"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1
