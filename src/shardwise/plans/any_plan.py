"""Plan files of whatever kind: of strategies, of uneven pipelines, of operator graphs.

The hash of a plan, whichever kind it is: what its file has.
"""

from __future__ import annotations

import os

from shardwise.plans.graph_plan import GraphPlan, graph_plan_document, is_graph_plan, read_graph_plan
from shardwise.plans.plan_file import plan_document, read_plan
from shardwise.plans.record import Plan
from shardwise.plans.uneven_plan import UnevenFile, is_uneven_plan, read_uneven_plan, uneven_plan_document

AnyPlan = Plan | UnevenFile | GraphPlan


def read_any_plan(path: str | os.PathLike[str]) -> AnyPlan:
    """The plan in the file at `path`. ConfigError where it is none, is newer, was altered or is not whole."""
    path = os.fspath(path)
    if is_graph_plan(path):
        return read_graph_plan(path)
    return read_uneven_plan(path) if is_uneven_plan(path) else read_plan(path)


def plan_hash(plan: AnyPlan) -> str:
    """`sha256:...` over all of the plan that does not say how it was found."""
    if isinstance(plan, GraphPlan):
        return str(graph_plan_document(plan)["hash"])
    document = uneven_plan_document(plan) if isinstance(plan, UnevenFile) else plan_document(plan)
    return str(document["hash"])
