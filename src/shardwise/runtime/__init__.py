"""Runs plans on PyTorch (`pip install 'shardwise[torch]'`): `parallelize`, `train`, checkpoints, weights."""

import os

from shardwise.errors import ConfigError
from shardwise.inputs import install_text

# Read once, when PyTorch is imported. Else a port scan of its store prints a C++ stack for each connection,
# and a slow start a warning for each attempt to connect; shardwise reports errors in one line.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

try:
    import torch as _torch  # noqa: F401 - imported first, so that a missing torch is reported clearly
except ModuleNotFoundError as error:
    raise ConfigError(
        "is not installed, and running plans needs it", key="torch", allowed=install_text("torch")
    ) from error

from shardwise.launch import check_runnable
from shardwise.runtime.adaptive import Advice
from shardwise.runtime.checkpoint import AsyncCheckpoint, export, load, resumable
from shardwise.runtime.collectives import all_gather_json
from shardwise.runtime.distribute import network_of, parallelize
from shardwise.runtime.graph_capture.capture import capture
from shardwise.runtime.graphs import check_computable, graph_module
from shardwise.runtime.migration import migrate
from shardwise.runtime.modules import reference_module
from shardwise.runtime.network import TrainedNetwork
from shardwise.runtime.profiling import gather_spans
from shardwise.runtime.rendezvous import Rendezvous
from shardwise.runtime.run_lock import check_no_run, only_run
from shardwise.runtime.timing import timed_steps
from shardwise.runtime.train import (
    StepRecord,
    TrainOptions,
    check_options,
    check_unused,
    restart_options,
    resumed_options,
    train,
    train_locally,
)
from shardwise.runtime.workers import RankLost, WorkerPool, leave_group, peer_failures, threads_per_process

__all__ = [
    "Advice",
    "AsyncCheckpoint",
    "RankLost",
    "Rendezvous",
    "StepRecord",
    "TrainOptions",
    "TrainedNetwork",
    "WorkerPool",
    "all_gather_json",
    "capture",
    "check_computable",
    "check_no_run",
    "check_options",
    "check_runnable",
    "check_unused",
    "export",
    "gather_spans",
    "graph_module",
    "leave_group",
    "load",
    "migrate",
    "network_of",
    "only_run",
    "parallelize",
    "peer_failures",
    "reference_module",
    "restart_options",
    "resumable",
    "resumed_options",
    "threads_per_process",
    "timed_steps",
    "train",
    "train_locally",
]
