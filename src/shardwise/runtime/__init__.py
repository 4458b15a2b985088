"""Trains as a plan says, on PyTorch (`pip install 'shardwise[torch]'`)."""

from shardwise.errors import ConfigError

try:
    import torch as _torch  # noqa: F401 - asked for first, so that its absence is told as what it is
except ModuleNotFoundError as error:
    raise ConfigError(
        "is not installed, and running plans needs it", key="torch", allowed="pip install 'shardwise[torch]'"
    ) from error

from shardwise.runtime.adapt import Advice, Advisor, Change
from shardwise.runtime.capability import check_graph_runnable, check_runnable, check_uneven_runnable
from shardwise.runtime.capture import capture
from shardwise.runtime.checkpoint import Saving, export, load, resumable
from shardwise.runtime.clocks import together
from shardwise.runtime.data import Samples, Synthetic, TokenFile
from shardwise.runtime.devices import check_here
from shardwise.runtime.graph_data import ArrayFolder, Drawn
from shardwise.runtime.graphs import GraphJob, GraphModule, check_told, graph_module
from shardwise.runtime.hugging_face import check_named
from shardwise.runtime.initial import initialise
from shardwise.runtime.job import Job
from shardwise.runtime.meeting import Meeting
from shardwise.runtime.modules import Stage, reference_module
from shardwise.runtime.moving import move
from shardwise.runtime.parallelize import parallelize
from shardwise.runtime.recover import last_options, train_here
from shardwise.runtime.result import StepResult
from shardwise.runtime.team import RankLost, Report, Team, leave_group, losses_of_peers, threads_of
from shardwise.runtime.texts import from_all_ranks
from shardwise.runtime.timed import TimedSteps, timed_steps
from shardwise.runtime.train import (
    SYNTHETIC,
    StepRecord,
    TrainOptions,
    check_options,
    check_unused,
    resumed_options,
    samples_of,
    train,
)
from shardwise.runtime.uneven import UnevenJob
from shardwise.runtime.weights import load_weights, save_weights

__all__ = [
    "SYNTHETIC",
    "Advice",
    "Advisor",
    "ArrayFolder",
    "Change",
    "Drawn",
    "GraphJob",
    "GraphModule",
    "Job",
    "Meeting",
    "RankLost",
    "Report",
    "Samples",
    "Saving",
    "Stage",
    "StepRecord",
    "StepResult",
    "Synthetic",
    "Team",
    "TimedSteps",
    "TokenFile",
    "TrainOptions",
    "UnevenJob",
    "capture",
    "check_graph_runnable",
    "check_here",
    "check_named",
    "check_options",
    "check_runnable",
    "check_told",
    "check_uneven_runnable",
    "check_unused",
    "export",
    "from_all_ranks",
    "graph_module",
    "initialise",
    "last_options",
    "leave_group",
    "load",
    "load_weights",
    "losses_of_peers",
    "move",
    "parallelize",
    "reference_module",
    "resumable",
    "resumed_options",
    "samples_of",
    "save_weights",
    "threads_of",
    "timed_steps",
    "together",
    "train",
    "train_here",
]
