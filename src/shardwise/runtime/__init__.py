"""Trains as a plan says, on PyTorch (`pip install 'shardwise[torch]'`)."""

from shardwise.errors import ConfigError

try:
    import torch as _torch  # noqa: F401 - asked for first, so that its absence is told as what it is
except ModuleNotFoundError as error:
    raise ConfigError(
        "is not installed, and running plans needs it", key="torch", allowed="pip install 'shardwise[torch]'"
    ) from error

from shardwise.runtime.adapt import Advice, Advisor, ReplanEvent
from shardwise.runtime.capability import check_graph_runnable, check_runnable, check_uneven_runnable
from shardwise.runtime.capture import capture
from shardwise.runtime.checkpoint import AsyncCheckpoint, export, load, resumable
from shardwise.runtime.clocks import gather_spans
from shardwise.runtime.data import Samples, Synthetic, TokenFile
from shardwise.runtime.devices import check_local_devices
from shardwise.runtime.graph_data import ArrayFolder, RandomInputs
from shardwise.runtime.graphs import GraphModule, GraphTrainingJob, check_computable, graph_module
from shardwise.runtime.hugging_face import check_weight_names
from shardwise.runtime.initial import initialise
from shardwise.runtime.job import TrainingJob
from shardwise.runtime.meeting import Rendezvous
from shardwise.runtime.modules import ModelStage, reference_module
from shardwise.runtime.moving import migrate
from shardwise.runtime.parallelize import parallelize
from shardwise.runtime.recover import restart_options, train_locally
from shardwise.runtime.result import StepResult
from shardwise.runtime.team import (
    RankLost,
    Report,
    WorkerPool,
    leave_group,
    peer_failures,
    threads_per_process,
)
from shardwise.runtime.texts import all_gather_json
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
from shardwise.runtime.uneven import UnevenTrainingJob
from shardwise.runtime.weights import load_weights, save_weights

__all__ = [
    "SYNTHETIC",
    "Advice",
    "Advisor",
    "ArrayFolder",
    "AsyncCheckpoint",
    "GraphModule",
    "GraphTrainingJob",
    "ModelStage",
    "RandomInputs",
    "RankLost",
    "Rendezvous",
    "ReplanEvent",
    "Report",
    "Samples",
    "StepRecord",
    "StepResult",
    "Synthetic",
    "TimedSteps",
    "TokenFile",
    "TrainOptions",
    "TrainingJob",
    "UnevenTrainingJob",
    "WorkerPool",
    "all_gather_json",
    "capture",
    "check_computable",
    "check_graph_runnable",
    "check_local_devices",
    "check_options",
    "check_runnable",
    "check_uneven_runnable",
    "check_unused",
    "check_weight_names",
    "export",
    "gather_spans",
    "graph_module",
    "initialise",
    "leave_group",
    "load",
    "load_weights",
    "migrate",
    "parallelize",
    "peer_failures",
    "reference_module",
    "restart_options",
    "resumable",
    "resumed_options",
    "samples_of",
    "save_weights",
    "threads_per_process",
    "timed_steps",
    "train",
    "train_locally",
]
