"""`python -m benchmarks`: every figure in a process of its own; one JSON document on stdout, talk on stderr.

`python -m benchmarks NAME` measures one and prints it.
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

from benchmarks import blocks, change, cold_start, frontiers, mixed, searches, validation
from benchmarks import sim as simulator
from benchmarks.clock import peak_memory_bytes

Figures = dict[str, float]

BENCHMARKS: dict[str, Callable[[], Figures]] = {
    **{f"blocks {table}": partial(blocks.figures, table) for table in blocks.TABLES},
    **{f"search {name}": partial(searches.figures, name) for name in (*searches.SEARCHES, *searches.GROWTH)},
    **{f"workers {name}": partial(searches.speedup, name) for name in searches.WITH_WORKERS},
    **{f"frontier {name}": partial(frontiers.figures, name) for name in frontiers.FRONTIERS},
    **{f"mixed {name}": partial(mixed.figures, name) for name in mixed.MIXED},
    "replan loss_1024": change.loss_figures,
    "replay week_64": change.week_figures,
    **{f"replay {kind}": partial(change.made_figures, kind) for kind in change.KINDS},
    **{f"replay {name}": partial(change.replay_figures, name) for name in change.at_hand()},
    "cold start": cold_start.figures,
    "simulator": simulator.figures,
    "validation": validation.figures,
    "fit": validation.fit_figures,
}

GOALS: dict[str, tuple[str, str, float]] = {
    "blocks gpt3-175b": ("times_bounded_per_cpu_s", "at least", 2e6),
    "blocks llama-2-70b": ("times_bounded_per_cpu_s", "at least", 2e6),
    "search gpt3_core_64": ("search_cpu_s", "at most", 0.5),
    "search gpt3_64": ("search_cpu_s", "at most", 1.5),
    "search gpt3_4096": ("search_cpu_s", "at most", 3.0),
    "search llama70b_64": ("search_cpu_s", "at most", 1.5),
    "search llama405b_16384": ("search_cpu_s", "at most", 8.0),
    "search llama405b_131072": ("search_cpu_s", "at most", 15.0),
    "search deepseek_v3_2048": ("search_cpu_s", "at most", 12.0),
    "search qwen3_235b_512": ("search_cpu_s", "at most", 8.0),
    "search frontier_llama70b_64": ("search_cpu_s", "at most", 8.0),
    "frontier llama8b_1_to_64": ("search_cpu_s", "at most", 25.0),
    "mixed opt350m_128": ("answer_cpu_s", "at most", 2.0),
    "mixed opt350m_320": ("answer_cpu_s", "at most", 4.0),
    "mixed opt350m_512": ("answer_cpu_s", "at most", 8.0),
    "mixed llama70b_64": ("answer_cpu_s", "at most", 6.0),
    "mixed opt350m_three_classes_256": ("answer_cpu_s", "at most", 60.0),
    "mixed gpt2xl_64": ("answer_cpu_s", "at most", 6.0),
    "replan loss_1024": ("patch_cpu_s", "at most", 0.3),
    "replay week_64": ("cpu_s", "at most", 60.0),
    **{f"replay {name}": ("adaptive_share", "at least", 0.9) for name in change.at_hand()},
    **{f"workers {name}": ("speedup", "at least", 1.7) for name in searches.OVER_TWO_SECONDS},
    "cold start": ("wall_s", "at most", 0.6),
    "validation": ("cpu_s", "at most", 3.0),
    "fit": ("cpu_s", "at most", 300.0),
}

NONE_OF_THESE = ("drawn_better", "counted_apart")
"""Figures that are 0 wherever they are: candidates drawn after a search that are better than what it found;
and by how many candidates its count of the space differs from the checker's."""


def main(arguments: list[str]) -> int:
    if arguments:
        return measure(arguments[0])
    results = {name: measured_apart(name) for name in BENCHMARKS}
    print(
        json.dumps(
            {"schema": "shardwise.benchmarks", "version": 1, **machine(), "results": results}, indent=2
        )
    )
    return 0


def measure(name: str) -> int:
    """Measures one benchmark in this process."""
    if name not in BENCHMARKS:
        print(f"unknown benchmark {name!r}; known: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    found = BENCHMARKS[name]()
    whole = {**found, "process_cpu_s": time.process_time(), "peak_memory_bytes": peak_memory_bytes()}
    print(json.dumps(whole))
    return 0


def measured_apart(name: str) -> Figures:
    """The figures of one benchmark from a process of its own, so that its peak of memory is its own."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", name],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: Figures = json.loads(done.stdout)
    for figure, value in found.items():
        print(f"  {figure:45} {value:16,.6g}{verdict(name, figure, value)}", file=sys.stderr)
    return found


def verdict(name: str, figure: str, value: float) -> str:
    """Whether a goal for this figure is met, where there is one."""
    goal, relation, wanted = GOALS.get(name, ("", "", 0.0))
    if figure in NONE_OF_THESE:
        goal, relation, wanted = figure, "at most", 0.0
    if figure != goal:
        return ""
    is_met = value >= wanted if relation == "at least" else value <= wanted
    return f"   goal: {relation} {wanted:,g}, {'met' if is_met else 'NOT met'}"


def machine() -> dict[str, object]:
    """Where this was measured."""
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
    """The processor's name, where the system tells."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
