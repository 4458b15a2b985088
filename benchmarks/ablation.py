"""Effect of each technique of the search: the same question with one technique switched off at a time.

`python -m benchmarks.ablation` prints the table of docs/benchmarks.md for a small question, with `large` for
Llama-3.1-70B on 64 devices."""

from __future__ import annotations

import sys

from shardwise.cluster import load_cluster
from shardwise.model import load_model
from shardwise.search import Question, default_job
from shardwise.search.bnb.incumbent import Fastest
from shardwise.search.bnb.solver import BranchAndBound, SearchResult

MEANS = {
    "none": frozenset[str](),
    "primal heuristics (restricted space, neighbourhood)": frozenset({"heuristics"}),
    "neighbourhood search": frozenset({"neighbourhood"}),
    "symmetry of axis orders": frozenset({"symmetry"}),
    "bound for all micro-batch sizes (level degrees)": frozenset({"degrees"}),
    "bounds of a grid's work (levels degrees and micro_batch)": frozenset({"degrees", "micro_batch"}),
    "bounds of level kept (recomputation, offload)": frozenset({"kept"}),
    "bounds of level family (schedules)": frozenset({"family"}),
    "bounds of level sharded": frozenset({"sharded"}),
    "bounds of level schedule": frozenset({"schedule"}),
    "bounds of level split": frozenset({"split"}),
    "capacity relaxation": frozenset({"capacity"}),
    "memory bounds of nodes": frozenset({"memory"}),
    "all of these but split, schedule and memory bounds": frozenset(
        {"heuristics", "symmetry", "degrees", "micro_batch", "kept", "family", "sharded", "capacity"}
    ),
}
"""Techniques by label, with the names that `BranchAndBound(without=...)` has for them."""


QUESTIONS = {
    "small": ("llama-3.1-8b", "8xA100-40G", 4096, 32),
    "large": ("llama-3.1-70b", "8x8xH100-SXM", 8192, 256),
}
"""Model, cluster, sequence length and global batch size of each question, in the default space."""


def outcome_without(name: str, without: frozenset[str]) -> SearchResult:
    """The outcome of one of QUESTIONS without some techniques."""
    model_name, cluster_name, seq_len, batch = QUESTIONS[name]
    model, cluster = load_model(model_name), load_cluster(cluster_name)
    job = default_job(model, cluster, seq_len=seq_len, global_batch_size=batch)
    question = Question(model=model, cluster=cluster, job=job, space="default")
    return BranchAndBound(question.problem(), question.candidates(), Fastest(4), without=without).run()


def main(arguments: list[str]) -> int:
    question = arguments[0] if arguments else "small"
    print("| switched off | nodes bounded | strategies evaluated | CPU s |\n|---|---|---|---|")
    best = None
    for name, without in MEANS.items():
        outcome = outcome_without(question, without)
        times = [found.time_s for found in outcome.found]
        best = best or times
        same = "" if times == best else f" (another answer: {times})"
        print(
            f"| {name}{same} | {outcome.ledger.bounded_nodes:,} | {outcome.ledger.simulated:,} "
            f"| {outcome.search_cpu_s:.2f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
