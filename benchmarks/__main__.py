"""`python -m benchmarks` runs every benchmark in its own process.

It prints one JSON document on stdout and progress on stderr. It ends with the missed goals and exit code 1
where there are any. `python -m benchmarks NAME` runs one benchmark and prints its figures.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

from benchmarks import (
    blocks,
    cold_start,
    frontiers,
    graph_frontiers,
    migration,
    mixed,
    recovery,
    replanning,
    searches,
    validation,
)
from benchmarks import sim as simulator
from benchmarks.clock import peak_memory_bytes
from benchmarks.goals import goals_of

Figures = dict[str, float]

OVERHEADS = ("ddp", "fsdp2", "tensor", "pipeline")


def overhead_figures(name: str) -> Figures:
    """Figures of `benchmarks.overhead`, imported late, since only it needs PyTorch and its memory."""
    from benchmarks import overhead

    return overhead.figures(name)


BENCHMARKS: dict[str, Callable[[], Figures]] = {
    **{f"blocks {table}": partial(blocks.figures, table) for table in blocks.TABLES},
    **{f"search {name}": partial(searches.figures, name) for name in (*searches.SEARCHES, *searches.GROWTH)},
    **{f"workers {name}": partial(searches.speedup, name) for name in searches.WITH_WORKERS},
    **{f"frontier {name}": partial(frontiers.figures, name) for name in frontiers.FRONTIERS},
    **{f"graph {name}": partial(graph_frontiers.figures, name) for name in graph_frontiers.QUESTIONS},
    **{f"mixed {name}": partial(mixed.figures, name) for name in mixed.MIXED},
    "replan loss_1024": replanning.loss_figures,
    "replay week_64": replanning.week_figures,
    **{f"replay {kind}": partial(replanning.generated_figures, kind) for kind in replanning.KINDS},
    **{f"replay {name}": partial(replanning.replay_figures, name) for name in replanning.at_hand()},
    **{f"overhead {name}": partial(overhead_figures, name) for name in OVERHEADS},
    "moving": migration.figures,
    "recovery": recovery.figures,
    "cold start": cold_start.figures,
    "simulator": simulator.figures,
    "validation": validation.figures,
    "fit": validation.fit_figures,
}


AS_ROOT = ("moving",)
"""Benchmarks that need root."""

TIMEOUT_S = 600.0
"""Wall seconds after which a benchmark is stopped and counts as missed."""


def main(arguments: list[str]) -> int:
    if arguments:
        return measure(arguments[0])
    results: dict[str, Figures] = {}
    missed: list[str] = []
    for name in BENCHMARKS:
        if name in AS_ROOT and os.geteuid() != 0:
            print(f"{name}: NOT measured: emulating a network needs root", file=sys.stderr)
            continue
        try:
            results[name] = measured_in_process(name)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            missed.append(f"{name}: {_why_none(error)}")
            continue
        missed += report(name, results[name])
    print(
        json.dumps(
            {"schema": "shardwise.benchmarks", "version": 1, **machine(), "results": results}, indent=2
        )
    )
    for line in missed:
        print(f"NOT met: {line}", file=sys.stderr)
    return 1 if missed else 0


def measure(name: str) -> int:
    """Measures one benchmark in this process."""
    if name not in BENCHMARKS:
        print(f"unknown benchmark {name!r}; known: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    found = BENCHMARKS[name]()
    whole = {**found, "process_cpu_s": time.process_time(), "peak_memory_bytes": peak_memory_bytes()}
    print(json.dumps(whole))
    return 0


def measured_in_process(name: str) -> Figures:
    """The figures of one benchmark, run in its own process so that the peak memory is its own.

    Raises CalledProcessError where it fails, TimeoutExpired after TIMEOUT_S."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", name],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    found: Figures = json.loads(done.stdout)
    return found


def _why_none(error: subprocess.SubprocessError) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"ended with exit code {error.returncode}"
    return f"ended after {TIMEOUT_S:g} s without figures"


def report(name: str, found: Figures) -> list[str]:
    """Prints the figures of a benchmark with their goals, and returns the missed goals."""
    missed = []
    goals = {goal.figure: goal for goal in goals_of(name, found)}
    for figure, value in found.items():
        line = f"{figure:45} {value:16,.6g}"
        if figure in goals:
            is_met = goals[figure].is_met(value)
            line += f"   goal: {goals[figure]}, {'met' if is_met else 'NOT met'}"
            if not is_met:
                missed.append(f"{name}: {figure} {value:,.6g}, goal {goals[figure]}")
        print(f"  {line}", file=sys.stderr)
    return missed


def machine() -> dict[str, object]:
    """The machine and software of the measurement."""
    import numpy

    return {
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "numpy": numpy.__version__,
        }
    }


def processor() -> str:
    """The name of the processor; the machine type where the system does not report it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
