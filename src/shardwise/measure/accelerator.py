"""The CUDA device of this process: what it is called, and its kernels at the sizes of training on it."""

from __future__ import annotations

import torch

from shardwise.errors import ConfigError
from shardwise.measure.clock import BatchTimer
from shardwise.measure.kernels import KernelSizes, KernelTimes, kernel_times

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def accelerator_sizes(dtype: torch.dtype) -> KernelSizes:
    """Outputs of 512 tiles of 128 x 128 and more, so that no kernel divides their sums; passes of 200 MB and
    more, beyond any cache, and none that the device is done with before the host hands it the next: its own
    time for a launch is what they take beyond their bytes."""
    return KernelSizes(
        dtype=dtype,
        rows=(2048, 8192),
        widths=((512, 4096), (1024, 4096), (4096, 4096), (4096, 8192), (16384, 4096)),
        pass_elements=(2**25, 2**26, 2**27),
        attentions=((512, 16), (1024, 8), (2048, 4), (4096, 2)),
        heads=16,
        head_dim=128,
    )


def accelerator_name() -> str:
    """What the driver calls the CUDA device of this process. ConfigError where PyTorch has none."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "finds no CUDA device here", key="--devices", found=f"PyTorch {torch.__version__}",
            allowed="cpu, or a machine with a driver and a PyTorch built for it",
        )  # fmt: skip
    return str(torch.cuda.get_device_name())


BATCH_S = 0.15
"""How long a kernel runs at a time: a device that may draw so much power and no more runs its first products
faster than it goes on (an H200 by a tenth, for some tens of milliseconds)."""


def accelerator_times(dtype: str) -> KernelTimes:
    """Times of kernels in `dtype` (bf16, fp16), each until the device has ended what was queued."""
    clock = BatchTimer(wait=torch.cuda.synchronize, batch_s=BATCH_S, batches=3)
    return kernel_times(clock, device="cuda", sizes=accelerator_sizes(DTYPES[dtype]))
