"""The device of a rank: selection, process-group backends, compute dtypes and the host's allocator.

Plans for `cpu` devices run on the host. All others run on the accelerator of this PyTorch build (CUDA
devices, which include ROCm). Control data of ranks is always on the host and is sent through gloo.
"""

from __future__ import annotations

import ctypes
import os

import torch
from torch import Tensor, distributed, nn

from shardwise.cluster import Cluster
from shardwise.errors import ConfigError
from shardwise.launch import own_target

# Devices and backends

LOCAL_RANK = "LOCAL_RANK"
"""Environment variable of launchers: local rank of this process on its host."""


def is_on_host(cluster: Cluster) -> bool:
    """Whether plans for `cluster` compute on the host."""
    return own_target().knows_devices(cluster.classes)


def backends() -> str:
    """Backends for `init_process_group`: gloo, and the backend of the accelerator if there is one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "gloo"
    own = distributed.Backend.default_device_backend_map.get(accelerator.type, "gloo")
    return "gloo" if own == "gloo" else f"cpu:gloo,{accelerator.type}:{own}"


def check_local_devices(cluster: Cluster, devices: int) -> None:
    """ConfigError if this machine has fewer than `devices` devices of `cluster`, so that a launcher must
    start the ranks."""
    if is_on_host(cluster):
        return
    count = torch.accelerator.device_count()
    if count < devices:
        raise ConfigError(
            "needs more accelerators than PyTorch finds on this machine", key="cluster",
            found=f"{devices} x {', '.join(cluster.classes)}",
            allowed=f"{count}; on hosts that have more: shardwise launch PLAN --with torchrun",
        )  # fmt: skip


def select_device(cluster: Cluster, rank: int) -> str:
    """Select the device of `rank` and return its type. An accelerator is selected by the local rank.

    ConfigError if there is no such device, or the process group has no backend for it.
    """
    if is_on_host(cluster):
        return "cpu"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    place = int(os.environ.get(LOCAL_RANK, rank))
    if accelerator is None or place >= torch.accelerator.device_count():
        count = torch.accelerator.device_count()
        raise ConfigError(
            "needs an accelerator for each of its processes", key="cluster",
            found=f"process {place} of this host, {', '.join(cluster.classes)}",
            allowed=f"{count} that PyTorch {torch.__version__} finds on this machine",
        )  # fmt: skip
    _check_group(accelerator.type)
    torch.accelerator.set_device_index(place)
    # NCCL sets up a group at its first collective, in which all ranks must take part. In a pipeline with idle
    # ranks they would not, so the set-up is done here.
    distributed.all_reduce(torch.zeros(1, device=accelerator.type))
    return str(accelerator.type)


def synchronize_device(cluster: Cluster) -> None:
    """Wait until this process's device has finished its queued work; returns at once on the host."""
    if not is_on_host(cluster):
        torch.accelerator.synchronize()


def to_device(module: nn.Module, device_type: str) -> None:
    """Put the parameters of `module` on a device of this type. Shared parameters stay shared; parameters on
    the meta device get uninitialised memory."""
    on_device: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.device.type == device_type:
                continue
            if parameter not in on_device:
                on_device[parameter] = nn.Parameter(
                    placed(parameter.detach(), device_type), requires_grad=parameter.requires_grad
                )
            setattr(owner, name, on_device[parameter])


def placed(tensor: Tensor, device_type: str) -> Tensor:
    """`tensor` on a device of this type; uninitialised memory if it is on the meta device."""
    if tensor.device.type == "meta":
        return torch.empty_like(tensor, device=device_type)
    return tensor.to(device_type)


def _check_group(device_type: str) -> None:
    """ConfigError if the process group has no backend for hosts, or none for this device type."""
    config = distributed.get_backend_config()
    served = {pair.partition(":")[0] for pair in config.split(",")}
    if not {"cpu", device_type} <= served:
        raise ConfigError(
            "has no backend for both hosts and accelerators", key="process group", found=config,
            allowed=f"init_process_group({backends()!r})",
        )  # fmt: skip


# Compute dtypes

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Compute dtype by the dtype of a job. Parameters are always fp32."""


# Host memory

# Parameters of `mallopt` (malloc.h).
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4

_NEVER_TRIMMED = 2**31 - 1
"""Largest value that `mallopt` takes: free memory at the end of the heap is returned only above 2 GiB."""


def keep_freed_memory() -> bool:
    """Let this process keep freed host memory for later tensors. False if the allocator is not glibc's.

    By default, large freed blocks return to the system, which clears each page when it is allocated again.
    That takes up to 6 % of a step and varies with the order of allocations. With this setting, a process
    keeps the memory of its peak until it ends.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None:
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER_TRIMMED))
    return all(mallopt(name, value) == 1 for name, value in settings)
