"""Measures kernels of this machine, links between processes and CPU load, with PyTorch (`pip install
'shardwise[torch]'`)."""

from shardwise.errors import ConfigError
from shardwise.inputs import install_text

try:
    import torch as _torch  # noqa: F401 - imported first, so that a missing torch is reported clearly
except ModuleNotFoundError as error:
    raise ConfigError(
        "is not installed, and measuring needs it", key="torch", allowed=install_text("torch")
    ) from error

from shardwise.measure.cpu_load import CoreSeconds, core_seconds, cores_used_by_others
from shardwise.measure.kernels import KernelTimes, accelerator_name, accelerator_times, kernel_times
from shardwise.measure.links import (
    Pair,
    group_timer,
    launched_group,
    link_times,
    lockstep_s,
    message_rates,
    overlap_times,
    threads_in_use,
    torch_version,
    use_threads,
)

__all__ = [
    "CoreSeconds",
    "KernelTimes",
    "Pair",
    "accelerator_name",
    "accelerator_times",
    "core_seconds",
    "cores_used_by_others",
    "group_timer",
    "kernel_times",
    "launched_group",
    "link_times",
    "lockstep_s",
    "message_rates",
    "overlap_times",
    "threads_in_use",
    "torch_version",
    "use_threads",
]
