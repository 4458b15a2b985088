"""Plan files of any kind: `read_any_plan` and `plan_hash` for strategies, uneven plans and operator
graphs."""

from __future__ import annotations

import os

from shardwise.plans.graph_plan import GraphPlan, graph_plan_document, is_graph_plan, read_graph_plan
from shardwise.plans.plan_file import plan_document, read_plan
from shardwise.plans.record import Plan
from shardwise.plans.uneven_plan import UnevenFile, is_uneven_plan, read_uneven_plan, uneven_plan_document

AnyPlan = Plan | UnevenFile | GraphPlan


def read_any_plan(path: str | os.PathLike[str]) -> AnyPlan:
    """The plan in the file at `path`. Raises ConfigError if it is not a plan file, has a newer version, was
    altered or is incomplete."""
    path = os.fspath(path)
    if is_graph_plan(path):
        return read_graph_plan(path)
    return read_uneven_plan(path) if is_uneven_plan(path) else read_plan(path)


def plan_hash(plan: AnyPlan) -> str:
    """`sha256:...` over the plan without the effort of its search."""
    if isinstance(plan, GraphPlan):
        return str(graph_plan_document(plan)["hash"])
    document = uneven_plan_document(plan) if isinstance(plan, UnevenFile) else plan_document(plan)
    return str(document["hash"])
