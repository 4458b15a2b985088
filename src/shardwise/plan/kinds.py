"""Plan files of whatever kind: of strategies, of uneven pipelines, of operator graphs."""

from __future__ import annotations

import os

from shardwise.plan.graph_plan import GraphPlan, is_graph_plan, read_graph_plan
from shardwise.plan.plan import Plan
from shardwise.plan.read import read_plan
from shardwise.plan.uneven_plan import UnevenFile, is_uneven_plan, read_uneven_plan

AnyPlan = Plan | UnevenFile | GraphPlan


def read_any_plan(path: str | os.PathLike[str]) -> AnyPlan:
    """The plan in the file at `path`. ConfigError where it is none, is newer, was altered or is not whole."""
    path = os.fspath(path)
    if is_graph_plan(path):
        return read_graph_plan(path)
    return read_uneven_plan(path) if is_uneven_plan(path) else read_plan(path)
