"""Stages on top of layouts: a graph cut into stages on meshes of their own, both chosen together."""

from shardwise.search.staged.problem import SCHEDULE, StagedProblem
from shardwise.search.staged.search import StagedPipeline, staged_frontier

__all__ = [
    "SCHEDULE",
    "StagedPipeline",
    "StagedProblem",
    "staged_frontier",
]
