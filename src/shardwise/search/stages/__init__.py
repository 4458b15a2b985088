"""Stages on top of layouts: a graph cut into stages on meshes of their own, both chosen together."""

from shardwise.search.stages.partition import StagedPipeline
from shardwise.search.stages.search import StagedFrontier, staged_frontier
from shardwise.search.stages.setting import SCHEDULE, Cuts, StagedProblem

__all__ = [
    "SCHEDULE",
    "Cuts",
    "StagedFrontier",
    "StagedPipeline",
    "StagedProblem",
    "staged_frontier",
]
