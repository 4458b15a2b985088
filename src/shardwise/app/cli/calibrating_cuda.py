"""What `calibrate --devices cuda` does: measures the kernels of this machine's CUDA device."""

from __future__ import annotations

from datetime import UTC, datetime

from shardwise import accuracy
from shardwise.app.cli.calibrating_from import Found, only_class
from shardwise.cluster import Device, load_cluster
from shardwise.errors import ConfigError


def found_on_accelerator(cluster: str | None) -> Found:
    """What kernels reach of the peaks of the known device that the driver names; `cluster` says which it is
    where that name tells nothing.

    Its software is that of other trainers, whose profiles are known; its links are measured by nccl-tests.
    """
    from shardwise.measure import accelerator_name, accelerator_times, torch_version

    name = accelerator_name()
    device = _device(name, cluster)
    dtype = "bf16" if "bf16" in device.peak_flop_per_s else "fp16"
    times = accelerator_times(dtype)
    curves = accuracy.kernel_curves(
        times.matmuls, times.passes, number_bytes=2.0, tiles=accuracy.tiles_of(device)
    )
    attention = accuracy.attention_curve(
        times.attentions, launch_s=curves.launch_s, flop_per_s=device.peak_flop_per_s[dtype]
    )
    return Found(
        device=accuracy.with_accelerated_kernels(device, curves, attention, dtype=dtype),
        profile=None,
        machine=f"{name}, {dtype}, PyTorch {torch_version()}, {datetime.now(UTC):%Y-%m-%d}",
        measured={
            "matmuls": {
                "times": len(times.matmuls),
                "mean_error": accuracy.mean_error(curves.matmul_s, times.matmuls),
            }
        },
    )


def _device(name: str, cluster: str | None) -> Device:
    if cluster is not None:
        return only_class(load_cluster(cluster))
    try:
        return accuracy.device_named(name)[0]
    except ConfigError:
        raise ConfigError(
            "is not known by its name", key="--devices", found=name, allowed="--cluster 1x1xDEVICE"
        ) from None
