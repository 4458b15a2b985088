"""Wall seconds of `shardwise plan` from a cold start, by part."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict

RUNS = 7
COMMAND = (
    "-m", "shardwise", "plan", "llama-3.1-8b", "--cluster", "8xH100-SXM", "--seq-len", "4096",
    "--global-batch-size", "64", "--space", "core",
)  # fmt: skip
PACKAGES = ("numpy", "typer", "click", "rich", "yaml", "shardwise")


def figures() -> dict[str, float]:
    """Median wall seconds of the interpreter, with numpy, and of the whole command; import seconds by
    package."""
    whole = median_wall_s(COMMAND)
    return {
        "wall_s": whole,
        "interpreter_s": median_wall_s(("-c", "pass")),
        "with_numpy_s": median_wall_s(("-c", "import numpy")),
        "version_s": median_wall_s(("-m", "shardwise", "--version")),
        "search_s": search_s(),
        **{f"import_{name}_s": seconds for name, seconds in import_s().items()},
    }


def median_wall_s(arguments: tuple[str, ...]) -> float:
    """Median wall seconds of RUNS processes, after one that warms up the file system's cache."""
    taken = []
    for _ in range(RUNS + 1):
        started = time.perf_counter()
        subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def search_s() -> float:
    """Wall seconds of the search alone in such a process."""
    done = subprocess.run([sys.executable, *COMMAND, "--json"], stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout)["certificate"]["search_s"])


def import_s() -> dict[str, float]:
    """Import seconds of the modules of each package, without the modules that they import."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *COMMAND],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    seconds: dict[str, float] = defaultdict(float)
    for line in done.stderr.splitlines():
        parts = line.removeprefix("import time:").split("|")
        if len(parts) == 3 and parts[0].strip().isdigit():
            package = parts[2].strip().partition(".")[0]
            seconds[package if package in PACKAGES else "standard_library"] += int(parts[0]) / 1e6
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))
