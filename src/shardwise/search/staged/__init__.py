"""Search of pipelines of operator graphs: the partition into stages and the layout of each stage,
together."""

from shardwise.search.staged.problem import SCHEDULE, StagedProblem
from shardwise.search.staged.search import StagedPipeline, staged_frontier

__all__ = [
    "SCHEDULE",
    "StagedPipeline",
    "StagedProblem",
    "staged_frontier",
]
