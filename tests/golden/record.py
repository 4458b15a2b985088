"""Recorded estimates of strategies on frozen clusters: every part of their step time and memory.

    python tests/golden/record.py

estimates all strategies in `prices.json` again and writes the numbers back. Clusters and software are
recorded in full, so that only changes of equations, cost, schedules or model sizes change a number.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.cluster import cluster_from_record
from shardwise.cost import (
    CriticalPaths,
    Problem,
    any_micro_batch_lower_bound_s,
    bind,
    grid_lower_bound_s,
    grid_work_lower_bound_s,
    grids_of,
    host_lower_bound_bytes,
    known_split,
    layer_counts_of,
    lower_bound_bytes,
    lower_bound_s,
    outside_schedule_s,
    peaks_of,
    subproblem_of,
)
from shardwise.cost.bounds.subproblem import traffic_of
from shardwise.inputs import Fields
from shardwise.model import load_model
from shardwise.search.result import result_of
from shardwise.strategy import Job, StrategyTable, complete, parse_fields, profile_from_record

GOLDEN = Path(__file__).with_name("prices.json")

DIGITS = 12


def problem_of(question: Mapping[str, Any]) -> Problem:
    """The model, cluster and job of one entry."""
    job = dict(question["job"])
    profile = profile_from_record(Fields(job.pop("profile"), key="profile"))
    return bind(
        load_model(question["model"]), cluster_from_record(question["cluster"]), Job(**job, profile=profile)
    )


def costs_of(problem: Problem, text: str) -> dict[str, Any]:
    """All estimates of the strategy `text`: numbers of 12 digits by name."""
    experts = problem.model.experts
    strategy = complete(
        parse_fields(text),
        devices=problem.cluster.devices,
        layers=problem.model.layers,
        experts=experts.experts if experts else None,
        global_batch_size=problem.job.global_batch_size,
    )
    result = result_of(problem, strategy)
    table = StrategyTable.of([strategy])
    peaks = peaks_of(problem, table)
    return {
        "step_time_s": _rounded(result.step_time_s),
        "breakdown": {name: _rounded(value) for name, value in result.breakdown.items()},
        "memory": {name: _rounded(value) for name, value in result.memory.items()},
        "host_bytes": _rounded(peaks.host_bytes[0]),
        "bounds": {name: _rounded(np.ravel(value)[0]) for name, value in bounds_of(problem, table).items()},
    }


def bounds_of(problem: Problem, table: StrategyTable) -> dict[str, Any]:
    """The lower bounds of the subproblems that contain a strategy, level by level."""
    none = np.zeros(1, dtype=np.intp)
    grids = grids_of(problem, table)
    totals, traffic = (
        grids.totals_at(none),
        traffic_of(problem, grids, none, table.param_shard, table.grad_shard),
    )
    split = known_split(
        problem.model.layers, table.pp * table.vpp, table.first_stage_layers, table.last_stage_layers
    )
    block = subproblem_of(problem, table, split)
    layer_counts = layer_counts_of(block)
    paths = CriticalPaths(problem, block, layer_counts, totals, traffic)
    return {
        "any_micro_batch_s": any_micro_batch_lower_bound_s(problem, table),
        "work_s": grid_work_lower_bound_s(problem, block, totals),
        "any_schedule_s": grid_lower_bound_s(problem, block, totals, traffic),
        "split_s": lower_bound_s(problem, block, layer_counts, totals, traffic),
        "whole_s": paths.whole_s,
        "ranks_s": paths.ranks_s,
        "bytes": lower_bound_bytes(problem, block, layer_counts, totals),
        "host_bytes": host_lower_bound_bytes(problem, block, layer_counts, totals),
        "around_s": outside_schedule_s(problem, table),
    }


def _rounded(value: float) -> float:
    return float(f"{float(value):.{DIGITS}g}")


def record(path: Path = GOLDEN) -> int:
    """Estimates every listed strategy and writes the file; returns their number."""
    questions = json.loads(path.read_text(encoding="utf-8"))
    count = 0
    for question in questions:
        problem = problem_of(question)
        question["prices"] = {text: costs_of(problem, text) for text in question["prices"]}
        count += len(question["prices"])
    path.write_text(json.dumps(questions, indent=1) + "\n", encoding="utf-8")
    return count


if __name__ == "__main__":
    sys.stdout.write(f"{record()} estimates recorded in {GOLDEN.name}\n")
