"""The device that a rank computes on, and the libraries that carry messages between ranks.

Plans for `cpu` devices run on the host, all others on the accelerator that PyTorch is built for (CUDA, which
is also what ROCm goes by). What ranks tell each other about their work lies on the host and goes over gloo
in both cases.

In what jobs compute: parameters are fp32 whatever it is.

Host memory that a step frees stays with its process.
"""

from __future__ import annotations

import ctypes
import os

import torch
from torch import Tensor, distributed, nn

from shardwise.cluster import Cluster
from shardwise.errors import ConfigError
from shardwise.launch import TARGET

LOCAL_RANK = "LOCAL_RANK"
"""Set by launchers: which of the processes of its host this one is."""


def is_on_host(cluster: Cluster) -> bool:
    """Whether plans for `cluster` compute on the host itself."""
    return TARGET.knows_devices(cluster.classes)


def backends() -> str:
    """What a process group is made with here: gloo, and beside it what the accelerator's vendor has."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "gloo"
    own = distributed.Backend.default_device_backend_map.get(accelerator.type, "gloo")
    return "gloo" if own == "gloo" else f"cpu:gloo,{accelerator.type}:{own}"


def check_local_devices(cluster: Cluster, devices: int) -> None:
    """ConfigError where this machine has not so many devices of `cluster`, so that a launcher must start
    them."""
    if is_on_host(cluster):
        return
    count = torch.accelerator.device_count()
    if count < devices:
        raise ConfigError(
            "has more accelerators than PyTorch finds here", key="cluster",
            found=f"{devices} x {', '.join(cluster.classes)}",
            allowed=f"{count}; on hosts that have them: shardwise launch PLAN --with torchrun",
        )  # fmt: skip


def select_device(cluster: Cluster, rank: int) -> str:
    """The type of the device on which `rank` computes; of several accelerators of its host this process has
    its own from now on: that of its place among the host's processes.

    ConfigError where there is none, or no library for messages between such devices.
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
            allowed=f"{count} that PyTorch {torch.__version__} finds here",
        )  # fmt: skip
    _check_group(accelerator.type)
    torch.accelerator.set_device_index(place)
    # NCCL sets a group up at its first message, for which all of its ranks must be there: in a pipeline that
    # leaves some of them idle they would not be.
    distributed.all_reduce(torch.zeros(1, device=accelerator.type))
    return str(accelerator.type)


def synchronize_device(cluster: Cluster) -> None:
    """Until this process's device is done with what it was given; the host itself is at once."""
    if not is_on_host(cluster):
        torch.accelerator.synchronize()


def to_device(module: nn.Module, device_type: str) -> None:
    """Have the parameters of `module` lie on the device of this type, where they do not yet; what is one
    parameter under several names stays one. Those of the meta device have no values there yet."""
    on_device: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.device.type == device_type:
                continue
            if parameter not in on_device:
                on_device[parameter] = nn.Parameter(
                    _placed(parameter.detach(), device_type), requires_grad=parameter.requires_grad
                )
            setattr(owner, name, on_device[parameter])


def _placed(tensor: Tensor, device_type: str) -> Tensor:
    if tensor.device.type == "meta":
        return torch.empty_like(tensor, device=device_type)
    return tensor.to(device_type)


def _check_group(device_type: str) -> None:
    """ConfigError where messages do not go between hosts and between devices of this type."""
    config = distributed.get_backend_config()
    served = {pair.partition(":")[0] for pair in config.split(",")}
    if not {"cpu", device_type} <= served:
        raise ConfigError(
            "does not serve both hosts and accelerators", key="process group", found=config,
            allowed=f"init_process_group({backends()!r})",
        )  # fmt: skip


COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By the dtype of a job."""


# The parameters of `mallopt`, of <malloc.h>.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4

_NEVER_TRIMMED = 2**31 - 1
"""`mallopt` takes an int: what is free at the end of the heap goes back beyond 2 GiB alone."""


def keep_freed_memory() -> bool:
    """From now on tensors on the host reuse the memory of those before; False where the allocator (any but
    glibc's) has no such setting.

    Without it every large tensor, and the end of the heap whenever much of it is free, goes back to the
    system, which clears each page of it before it gives it again: up to 6 % of a step, more or less by the
    order of allocations. What a process took at its peak stays with it until it ends.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None:
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER_TRIMMED))
    return all(mallopt(name, value) == 1 for name, value in settings)
