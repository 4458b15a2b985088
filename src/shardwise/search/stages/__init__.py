"""Stages on top of layouts: a graph cut into stages on meshes of their own, both chosen together."""

from shardwise.search.stages.partition import Staged
from shardwise.search.stages.search import StagedFound, staged
from shardwise.search.stages.setting import SCHEDULE, Cuts, Setting

__all__ = [
    "SCHEDULE",
    "Cuts",
    "Setting",
    "Staged",
    "StagedFound",
    "staged",
]
