"""How fast blocks are bounded: every schedule of a space with every stage split, as the search bounds
them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from benchmarks.clock import cpu_s

from shardwise.cluster import load_cluster
from shardwise.cost import (
    NO_TRAFFIC,
    Block,
    Problem,
    Totals,
    block_of,
    known_split,
    least_bytes,
    least_s,
    lie_of,
    priced_grids,
)
from shardwise.model import load_model
from shardwise.search import Question, Space, default_job
from shardwise.search.cells import BLOCK_FIELDS
from shardwise.search.goals import Fastest
from shardwise.search.listing import listed
from shardwise.search.space import expanded

ROWS_PER_TABLE = 1024
"""Grids with micro-batch sizes that are bounded side by side."""

TABLES = {
    "gpt3-175b": ("gpt3-175b", "8x8xA100-80G", 2048, 1536),
    "llama-2-70b": ("llama-2-70b", "8x8xH100-SXM", 4096, 512),
}


@dataclass(frozen=True, slots=True)
class Cells:
    """Rows (down) with splits (across) of one schedule."""

    block: Block
    totals: Totals

    @property
    def count(self) -> int:
        return int(np.broadcast(self.block.microbatches, self.block.split.first).size)


def figures(table: str) -> dict[str, float]:
    """Blocks bounded per CPU second, in time and in bytes, below one of TABLES."""
    model_name, cluster_name, seq_len, batch = TABLES[table]
    model, cluster = load_model(model_name), load_cluster(cluster_name)
    job = default_job(model, cluster, seq_len=seq_len, global_batch_size=batch)
    question = Question(model=model, cluster=cluster, job=job)
    problem, space = question.problem(), question.candidates()
    cells = [*cells_of(problem, space)]
    count = sum(each.count for each in cells)

    def timed() -> None:
        for each in cells:
            least_s(problem, each.block, lie_of(each.block), each.totals, NO_TRAFFIC)

    def weighed() -> None:
        for each in cells:
            least_bytes(problem, each.block, lie_of(each.block), each.totals)

    return {
        "blocks": float(count),
        "times_bounded_per_cpu_s": count / cpu_s(timed),
        "bytes_bounded_per_cpu_s": count / cpu_s(weighed),
    }


def cells_of(problem: Problem, space: Space) -> list[Cells]:
    """The interleaved schedules of every depth with all of their splits."""
    grids, _ = listed(problem, space, space.degrees(), Fastest(4), folds=True)
    _, table = expanded(grids.table, [grids.table.dp], space.micro_batch_sizes)
    found = []
    for pp in np.unique(table.pp).tolist():
        rows = table.take(np.flatnonzero(table.pp == pp)[:ROWS_PER_TABLE])
        totals = priced_grids(problem, rows).totals_at(np.arange(len(rows))[:, None])
        variants = space.variants(pp)
        for schedule, vpp in zip(variants.schedule.tolist(), variants.vpp.tolist(), strict=True):
            found.append(Cells(_block(problem, space, rows, schedule, vpp), totals))
    return found


def _block(problem: Problem, space: Space, rows: Any, schedule: int, vpp: int) -> Block:
    stages = int(rows.pp[0]) * vpp
    ends = space.splits(stages)
    split = known_split(
        space.layers, stages, ends["first_stage_layers"][None], ends["last_stage_layers"][None]
    )
    block = block_of(problem, rows, split)
    down = {name: getattr(block, name)[:, None] for name in BLOCK_FIELDS}
    return replace(block, **down, recompute_most=0, schedule=np.array([[schedule]]), vpp=np.array([[vpp]]))
