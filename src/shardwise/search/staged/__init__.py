"""Stages on top of layouts: a graph cut into stages on meshes of their own, both chosen together."""

from shardwise.search.staged.problem import SCHEDULE, Cuts, StagedProblem
from shardwise.search.staged.search import StagedFrontier, StagedPipeline, staged_frontier

__all__ = [
    "SCHEDULE",
    "Cuts",
    "StagedFrontier",
    "StagedPipeline",
    "StagedProblem",
    "staged_frontier",
]
