"""Stages on top of layouts: a graph cut into stages on meshes of their own, both chosen together."""

from shardwise.search.stages.partition import Staged
from shardwise.search.stages.search import StagedFound, staged
from shardwise.search.stages.setting import SCHEDULE, Cuts, PipelinePrice, Setting, price_of_stages

__all__ = [
    "SCHEDULE",
    "Cuts",
    "PipelinePrice",
    "Setting",
    "Staged",
    "StagedFound",
    "price_of_stages",
    "staged",
]
