"""`parallelize`: shard a module over the running processes as a plan says. `JOBS` has the kinds of plans."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import distributed, nn

from shardwise.errors import ConfigError
from shardwise.launch import check_runnable
from shardwise.plans import Plan, PlanKind, read_plan
from shardwise.runtime.devices import backends, keep_freed_memory, select_device
from shardwise.runtime.graphs import GraphTrainingJob
from shardwise.runtime.job import TrainingJob
from shardwise.runtime.network import TrainedGraph, TrainedModel, TrainedNetwork
from shardwise.runtime.rendezvous import rendezvous_error
from shardwise.runtime.uneven import UnevenTrainingJob
from shardwise.runtime.uniform import UniformTrainingJob

PlanFile = str | os.PathLike[str]

JOBS: Mapping[PlanKind, tuple[type[TrainingJob], type[TrainedNetwork]]] = {
    "uniform": (UniformTrainingJob, TrainedModel),
    "uneven": (UnevenTrainingJob, TrainedModel),
    "graph": (GraphTrainingJob, TrainedGraph),
}
"""By the kind of plan, the class of its jobs and of what they train. The runtime asks for the kind here
alone."""


def network_of(plan: Plan) -> TrainedNetwork:
    """What a job under `plan` trains."""
    _, network = JOBS[plan.kind]
    return network(plan)


def parallelize(
    module: nn.Module,
    plan: Plan | PlanFile,
    inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    *,
    lr: float = 1e-3,
    max_norm: float = 1.0,
) -> TrainingJob:
    """Shard `module` over the running processes as `plan`, or the plan file at this path, says.

    Call it on every rank of a process group with as many ranks as the plan has devices. If torchrun started
    the process and there is no group yet, it is created. `module` is the whole model, equal on every rank: a
    `reference_module`. For the plan of an operator graph, it is a `graph_module`, or the module that the
    graph was captured from. The latter needs `inputs`, the arguments of its forward pass for the whole batch.
    Afterwards this process keeps freed host memory for later tensors. Raises ConfigError if the plan cannot
    run here.
    """
    if any(parameter.device.type == "meta" for parameter in module.parameters()):
        raise ConfigError(
            "is on the meta device",
            key="module",
            found="parameters without values",
            allowed="initialized parameters",
        )
    if not isinstance(plan, Plan):
        plan = read_plan(plan)
    return divided(module, plan, inputs, lr=lr, max_norm=max_norm)


def divided(
    module: nn.Module,
    plan: Plan,
    inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    *,
    lr: float = 1e-3,
    max_norm: float = 1.0,
) -> TrainingJob:
    """`parallelize`, also for a module on the meta device, which is sharded before it is allocated, so that
    no rank holds the whole network; fill the job afterwards."""
    keep_freed_memory()
    check_runnable(plan)
    job_class, _ = JOBS[plan.kind]
    source = job_class.source_of(module, plan, inputs)
    _check_processes(plan.cluster.devices)
    device_type = select_device(plan.cluster, distributed.get_rank())
    return job_class(source, plan, device_type=device_type, lr=lr, max_norm=max_norm)


def _check_processes(devices: int) -> None:
    """ConfigError if the number of processes is not that of the plan's devices."""
    if not distributed.is_initialized():
        _join_processes()
    if distributed.get_world_size() != devices:
        raise ConfigError(
            "is for another number of processes than were started", key="plan",
            found=f"{devices} devices", allowed=f"{distributed.get_world_size()}",
        )  # fmt: skip


def _join_processes() -> None:
    """Create the process group from torchrun's environment variables."""
    try:
        distributed.init_process_group(backends())
    except (distributed.DistNetworkError, distributed.DistStoreError, ValueError) as error:
        raise rendezvous_error(error) from None
