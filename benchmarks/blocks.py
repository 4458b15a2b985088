"""Speed of lower bounds: every schedule of a space with every stage split, bounded as in the search."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from benchmarks.clock import cpu_s

from shardwise.cluster import load_cluster
from shardwise.cost import (
    NO_TRAFFIC,
    Problem,
    Subproblem,
    Totals,
    grids_of,
    known_split,
    layer_counts_of,
    lower_bound_bytes,
    lower_bound_s,
    subproblem_of,
)
from shardwise.model import load_model
from shardwise.search import Question, default_job
from shardwise.search.bnb.incumbent import Fastest
from shardwise.search.bnb.nodes import BLOCK_FIELDS
from shardwise.search.bnb.roots import list_roots
from shardwise.search.space import Space, expanded

ROWS_PER_TABLE = 1024
"""Most rows (grids with micro-batch sizes) that are bounded in one call."""

TABLES = {
    "gpt3-175b": ("gpt3-175b", "8x8xA100-80G", 2048, 1536),
    "llama-2-70b": ("llama-2-70b", "8x8xH100-SXM", 4096, 512),
}


@dataclass(frozen=True, slots=True)
class ScheduleSplits:
    """The subproblems of one schedule: rows by stage splits."""

    block: Subproblem
    totals: Totals

    @property
    def count(self) -> int:
        return int(np.broadcast(self.block.microbatches, self.block.split.first).size)


def figures(table: str) -> dict[str, float]:
    """Subproblems of one of TABLES bounded per CPU second, in time and in bytes."""
    model_name, cluster_name, seq_len, batch = TABLES[table]
    model, cluster = load_model(model_name), load_cluster(cluster_name)
    job = default_job(model, cluster, seq_len=seq_len, global_batch_size=batch)
    question = Question(model=model, cluster=cluster, job=job)
    problem, space = question.problem(), question.candidates()
    schedule_splits = [*schedule_splits_of(problem, space)]
    count = sum(each.count for each in schedule_splits)

    def times_bounded() -> None:
        for each in schedule_splits:
            lower_bound_s(problem, each.block, layer_counts_of(each.block), each.totals, NO_TRAFFIC)

    def bytes_bounded() -> None:
        for each in schedule_splits:
            lower_bound_bytes(problem, each.block, layer_counts_of(each.block), each.totals)

    return {
        "blocks": float(count),
        "times_bounded_per_cpu_s": count / cpu_s(times_bounded),
        "bytes_bounded_per_cpu_s": count / cpu_s(bytes_bounded),
    }


def schedule_splits_of(problem: Problem, space: Space) -> list[ScheduleSplits]:
    """The schedules of every pipeline depth with all of their stage splits."""
    grids, _ = list_roots(problem, space, space.degrees(), Fastest(4), merges_symmetric=True)
    _, table = expanded(grids.table, [grids.table.dp], space.micro_batch_sizes)
    found = []
    for pp in np.unique(table.pp).tolist():
        rows = table.take(np.flatnonzero(table.pp == pp)[:ROWS_PER_TABLE])
        totals = grids_of(problem, rows).totals_at(np.arange(len(rows))[:, None])
        variants = space.variants(pp)
        for schedule, vpp in zip(variants.schedule.tolist(), variants.vpp.tolist(), strict=True):
            found.append(ScheduleSplits(_subproblem(problem, space, rows, schedule, vpp), totals))
    return found


def _subproblem(problem: Problem, space: Space, rows: Any, schedule: int, vpp: int) -> Subproblem:
    stages = int(rows.pp[0]) * vpp
    end_layers = space.splits(stages)
    split = known_split(
        space.layers, stages, end_layers["first_stage_layers"][None], end_layers["last_stage_layers"][None]
    )
    block = subproblem_of(problem, rows, split)
    down = {name: getattr(block, name)[:, None] for name in BLOCK_FIELDS}
    return replace(block, **down, recompute_most=0, schedule=np.array([[schedule]]), vpp=np.array([[vpp]]))
