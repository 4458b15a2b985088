"""Time of whole searches, from a question to a proven answer, checked by random candidates."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from benchmarks.random_candidates import sampled, undominated_counts

from shardwise.cluster import load_cluster
from shardwise.cost import Problem
from shardwise.model import load_model
from shardwise.search import Question, default_job
from shardwise.search.bnb.incumbent import Fastest, Goal, Tradeoff
from shardwise.search.bnb.solver import BranchAndBound
from shardwise.search.space import Space
from shardwise.strategy import StrategyTable
from shardwise_verify import count_space

CALCULON_CPU_S = {"gpt3_core_64": 752.0, "gpt3_64": 752.0, "gpt3_4096": 1640.0}
"""CPU seconds of Calculon's exhaustive search for GPT-3 175B (over a subset of the space): as reported for 64
devices, and extrapolated to 4,096. They were not measured here."""

SAMPLES = 1_000
"""Random candidates per search: half from the whole space, half with the degrees of the best."""


@dataclass(frozen=True, slots=True)
class Job:
    """A model, a cluster, a batch, a space, and whether the frontier is searched."""

    model: str
    cluster: str
    seq_len: int
    batch: int
    space: str = "default"
    is_frontier: bool = False


SEARCHES = {
    "gpt3_core_64": Job("gpt3-175b", "8x8xA100-80G", 2048, 1536, "core"),
    "llama8b_8": Job("llama-3.1-8b", "8xH100-SXM", 4096, 64),
    "mixtral_8": Job("mixtral-8x7b", "8xH100-SXM", 4096, 64),
    "gpt3_64": Job("gpt3-175b", "8x8xA100-80G", 2048, 1536),
    "gpt3_4096": Job("gpt3-175b", "512x8xA100-80G", 2048, 4096),
    "llama70b_64": Job("llama-3.1-70b", "8x8xH100-SXM", 8192, 256),
    "llama405b_16384": Job("llama-3.1-405b", "2048x8xH100-SXM", 8192, 2048),
    "llama405b_131072": Job("llama-3.1-405b", "16384x8xH100-SXM", 8192, 16384),
    "deepseek_v3_2048": Job("deepseek-v3", "256x8xH800", 4096, 15360),
    "qwen3_235b_512": Job("qwen3-235b-a22b", "64x8xH100-SXM", 4096, 1024),
    "frontier_llama70b_64": Job("llama-3.1-70b", "8x8xH100-SXM", 8192, 256, is_frontier=True),
}

OVER_TWO_SECONDS = ("deepseek_v3_2048", "frontier_llama70b_64")
"""Searches that take more than two seconds in one process."""

WITH_WORKERS = (*OVER_TWO_SECONDS, "qwen3_235b_512")
"""Searches that are timed with two workers: these, and the next longest."""

GROWTH = {
    f"growth_{devices}": Job("llama-3.1-70b", f"{devices // 8}x8xH100-SXM", 8192, max(2 * devices, 64))
    for devices in (8 * 4**k for k in range(8))
}
"""Llama-3.1-70B from 8 to 131,072 devices, with two sequences per device."""


def figures(name: str, workers: int = 1) -> dict[str, float]:
    """Figures of one search, with cold caches of schedule tables."""
    job = {**SEARCHES, **GROWTH}[name]
    model, cluster = load_model(job.model), load_cluster(job.cluster)
    question = Question(
        model=model,
        cluster=cluster,
        job=default_job(model, cluster, seq_len=job.seq_len, global_batch_size=job.batch),
        space=job.space,
    )
    problem, space = question.problem(), question.candidates()
    goal: Goal = Tradeoff() if job.is_frontier else Fastest(question.top + 1)
    started_s = time.perf_counter()
    outcome = BranchAndBound(problem, space, goal, workers=workers).run()
    found = {
        "candidates": float(outcome.enumerated),
        "counted_apart": float(abs(outcome.enumerated - counted(question))),
        "rejected": float(sum(outcome.ledger.rejected.values())),
        "cut_by_bound": float(outcome.ledger.pruned),
        "simulated": float(outcome.ledger.simulated),
        "found": float(len(outcome.found)),
        "search_cpu_s": outcome.search_cpu_s,
        "search_s": time.perf_counter() - started_s,
    }
    if name in CALCULON_CPU_S:
        found["reported_calculon_cpu_s_over_search_cpu_s"] = CALCULON_CPU_S[name] / outcome.search_cpu_s
    if outcome.found:
        found["step_time_s"] = outcome.found[0].time_s
        # Memory counts for frontiers only; else all points have 0 bytes.
        weighs = float(job.is_frontier)
        points = [(each.time_s, weighs * each.device_bytes) for each in outcome.found]
        found |= _sample_figures(problem, space, outcome.found[0].table, points)
    return found


def counted(question: Question) -> int:
    """Number of candidates of the question's space, counted by the independent checker."""
    experts = question.model.experts
    return count_space(
        model_layers=question.model.layers,
        experts=None if experts is None else experts.experts,
        devices=question.cluster.devices,
        global_batch_size=question.job.global_batch_size,
        space=question.space,
        fixed=question.fixed,
        axes=question.axes,
    ).count


def _sample_figures(
    problem: Problem, space: Space, center: StrategyTable, points: Sequence[tuple[float, float]]
) -> dict[str, float]:
    """Counts of random candidates, half from the whole space and half with the degrees of the best.

    `drawn_better` has to be 0: each candidate that is legal and fits is dominated or equalled by a point
    (seconds, device bytes)."""
    rng, half = np.random.default_rng(0), SAMPLES // 2
    table = StrategyTable.joined([sampled(space, half, rng), sampled(space, half, rng, center)])
    legal, fitting, better = undominated_counts(problem, table, points)
    return {
        "drawn": float(len(table)),
        "drawn_legal": float(legal),
        "drawn_fitting": float(fitting),
        "drawn_better": float(better),
    }


def speedup(name: str) -> dict[str, float]:
    """Wall seconds with one worker over those with two.

    Each search runs in its own process, since workers would copy the memory of an earlier search page by
    page."""
    one, two = (_in_process(name, workers) for workers in (1, 2))
    return {"one_worker_s": one, "two_workers_s": two, "speedup": one / two}


def _in_process(name: str, workers: int) -> float:
    """Wall seconds of a search in its own process."""
    code = f"from benchmarks.searches import figures; print(figures({name!r}, {workers})['search_s'])"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)
