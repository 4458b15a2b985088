"""CPU seconds of `shardwise validate` and `shardwise fit` for all published rows."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from shardwise.accuracy import SHIPPED


def figures() -> dict[str, float]:
    """CPU seconds of `validate` with start-up, and the numbers of used and skipped rows."""
    cpu_s, document = _run_command("validate")
    overall = document["overall"]
    return {
        "cpu_s": cpu_s,
        "rows_used": float(overall["n"]),
        "rows_skipped": float(overall["skipped"]),
    }


def fit_figures() -> dict[str, float]:
    """CPU seconds of `fit` with start-up, and the numbers of used runs and of fitted numbers."""
    with tempfile.TemporaryDirectory() as folder:
        cpu_s, document = _run_command("fit", str(SHIPPED), "--out", str(Path(folder) / "fit.json"))
    return {
        "cpu_s": cpu_s,
        "rows_used": float(document["runs"]),
        "numbers_fitted": float(document["fitted_numbers"]),
    }


def _run_command(*command: str) -> tuple[float, Any]:
    """CPU seconds of a command in its own process, and its JSON answer."""
    argv = [sys.executable, "-m", "shardwise", *command, "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return cpu_s, json.loads(done.stdout)
