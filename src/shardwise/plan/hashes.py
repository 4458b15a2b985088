"""The hash of a plan, whichever kind it is: what its file has."""

from __future__ import annotations

from shardwise.plan.document import plan_document
from shardwise.plan.graph_plan import GraphPlan, graph_plan_document
from shardwise.plan.plan import Plan
from shardwise.plan.uneven_plan import UnevenFile, uneven_plan_document


def plan_hash(plan: Plan | UnevenFile | GraphPlan) -> str:
    """`sha256:...` over all of the plan that does not say how it was found."""
    if isinstance(plan, GraphPlan):
        return str(graph_plan_document(plan)["hash"])
    document = uneven_plan_document(plan) if isinstance(plan, UnevenFile) else plan_document(plan)
    return str(document["hash"])
