"""Kernel times on this process's device: matmuls by shape, memory-bound passes, attention.

`BatchTimer` times calls on a machine with other load. `kernel_times` measures kernels at given `KernelSizes`;
`accelerator_times` does so on the CUDA device, at the sizes of training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.accuracy import AttentionSample, MatmulSample, MemorySample
from shardwise.errors import ConfigError

# Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTimer:
    """Times calls in `batches` batches of at least `batch_s` seconds each; the median batch counts.

    A scheduler that gives a process a share of a core pauses it once per period (5 to 100 ms). A batch spans
    several periods, so that pauses are spread over the calls. `ready` returns when a batch may start: if
    several processes measure, at the same time in all. `now` reads the clock in seconds, and `wait` waits for
    the device; tests replace both.
    """

    batches: int = 5
    batch_s: float = 0.03
    now: Callable[[], float] = time.perf_counter
    wait: Callable[[], object] = lambda: None
    ready: Callable[[], object] = lambda: None

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds of one call. The very first call is a warm-up and is not counted."""
        self._batch(call, 1)
        once_s = self._batch(call, 1)
        calls = max(1, round(self.batch_s / max(once_s, 1e-9)))
        return median(self._batch(call, calls) for _ in range(self.batches))

    def _batch(self, call: Callable[[], object], calls: int) -> float:
        self.ready()
        start_s = self.now()
        for _ in range(calls):
            call()
        self.wait()
        return (self.now() - start_s) / calls


# Kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSizes:
    """Sizes of the measured kernels, which compute in `dtype`.

    Matmuls have `rows` and `widths` (k, n: inner dimension and columns). Passes are sums of `pass_elements`
    elements. Causal attention has `heads` heads of `head_dim` and `attentions` (sequence length, batch).

    Small passes give the launch overhead. Large ones exceed any cache, like parameters and optimizer states.
    Activations may fit into a cache; the fitted passes of memory-bound operators account for that.
    """

    dtype: torch.dtype
    rows: tuple[int, ...]
    widths: tuple[tuple[int, int], ...]
    pass_elements: tuple[int, ...]
    attentions: tuple[tuple[int, int], ...]
    heads: int
    head_dim: int


CPU_SIZES = KernelSizes(
    dtype=torch.float32,
    rows=(64, 256, 1024),
    widths=((128, 128), (128, 512), (512, 128), (512, 512), (1024, 1024)),
    pass_elements=(2**8, 2**10, 2**23, 2**24),
    attentions=((64, 8), (128, 4), (256, 2), (512, 1)),
    heads=8,
    head_dim=64,
)
"""Sizes of the kernels that are measured on CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTimes:
    """Samples of each kind of kernel, and the speed of a large bf16 matmul relative to fp32."""

    matmuls: tuple[MatmulSample, ...]
    passes: tuple[MemorySample, ...]
    attentions: tuple[AttentionSample, ...]
    bf16_ratio: float

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> KernelTimes:
        """From the values of `dataclasses.asdict`, also after JSON has turned tuples into lists."""
        return cls(
            matmuls=tuple(MatmulSample(**each) for each in values["matmuls"]),
            passes=tuple(MemorySample(**each) for each in values["passes"]),
            attentions=tuple(AttentionSample(**each) for each in values["attentions"]),
            bf16_ratio=values["bf16_ratio"],
        )

    @classmethod
    def typical(cls, rounds: Sequence[KernelTimes]) -> KernelTimes:
        """Medians of several rounds of the same kernels."""
        return cls(
            matmuls=tuple(map(_typical, zip(*(each.matmuls for each in rounds), strict=True))),
            passes=tuple(map(_typical, zip(*(each.passes for each in rounds), strict=True))),
            attentions=tuple(map(_typical, zip(*(each.attentions for each in rounds), strict=True))),
            bf16_ratio=median(each.bf16_ratio for each in rounds),
        )


Sample = TypeVar("Sample", MatmulSample, MemorySample, AttentionSample)


def _typical(of: Sequence[Sample]) -> Sample:
    return replace(of[0], seconds=median(each.seconds for each in of))


def kernel_times(clock: BatchTimer, *, device: str = "cpu", sizes: KernelSizes = CPU_SIZES) -> KernelTimes:
    """Measure this process's `device` with PyTorch's current number of threads."""
    dtype = sizes.dtype
    with torch.device(device), torch.no_grad():
        matmuls = tuple(_matmul(clock, rows, k, n, dtype) for rows in sizes.rows for k, n in sizes.widths)
        passes = tuple(_pass(clock, elements, dtype) for elements in sizes.pass_elements)
        bf16_ratio = _bf16_ratio(clock)
    with torch.device(device):
        attentions = tuple(
            sample
            for seq_len, batch in sizes.attentions
            for sample in _attention(clock, (batch, sizes.heads, seq_len, sizes.head_dim), dtype)
        )
    return KernelTimes(matmuls=matmuls, passes=passes, attentions=attentions, bf16_ratio=bf16_ratio)


def _matmul(clock: BatchTimer, rows: int, k: int, n: int, dtype: torch.dtype) -> MatmulSample:
    """A linear layer's matmul, with weights stored as [n, k]."""
    x, weight = torch.randn(rows, k, dtype=dtype), torch.randn(n, k, dtype=dtype)
    return MatmulSample(m=rows, n=n, k=k, seconds=clock.seconds(lambda: functional.linear(x, weight)))


def _pass(clock: BatchTimer, elements: int, dtype: torch.dtype) -> MemorySample:
    """Sum of two tensors into a third, which moves three elements per element. A newly allocated output would
    take five times as long on the host, since the system clears its pages first."""
    x, y, total = (torch.ones(elements, dtype=dtype) for _ in range(3))
    nbytes = 3.0 * dtype.itemsize * elements
    return MemorySample(nbytes=nbytes, seconds=clock.seconds(lambda: torch.add(x, y, out=total)))


def _bf16_ratio(clock: BatchTimer) -> float:
    x = torch.randn(512, 512)
    return _square_s(clock, x) / _square_s(clock, x.bfloat16())


def _square_s(clock: BatchTimer, x: Tensor) -> float:
    return clock.seconds(lambda: functional.linear(x, x))


def _attention(
    clock: BatchTimer, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> tuple[AttentionSample, AttentionSample]:
    """Causal attention of [batch, heads, sequence, head], forward and backward. The backward time is the
    difference between both together and the forward time."""
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
    upstream = torch.randn(shape, dtype=dtype)

    def forward() -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    both: Callable[[], object] = lambda: torch.autograd.grad(forward(), (q, k, v), upstream)  # noqa: E731
    with torch.no_grad():
        forward_s = clock.seconds(forward)
    backward_s = max(clock.seconds(both) - forward_s, forward_s)
    batch, heads, seq_len, head_dim = shape
    work = 2.0 * batch * seq_len * (seq_len / 2) * heads * 2 * head_dim
    return (
        AttentionSample(seq_len=seq_len, work_flop=work, is_backward=False, seconds=forward_s),
        AttentionSample(seq_len=seq_len, work_flop=work, is_backward=True, seconds=backward_s),
    )


# Accelerators

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def accelerator_sizes(dtype: torch.dtype) -> KernelSizes:
    """Sizes for accelerators. Outputs have 512 tiles of 128 x 128 or more, so that no kernel splits sums
    (split-K).

    Passes move 200 MB or more: beyond any cache, and long enough that the host queues the next kernel in
    time. So their time beyond that of the bytes is the device's own launch overhead.
    """
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
    """Name of this process's CUDA device by its driver. ConfigError if PyTorch finds none."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "finds no CUDA device on this machine", key="--devices", found=f"PyTorch {torch.__version__}",
            allowed="cpu, or a machine with a CUDA driver and a PyTorch built for it",
        )  # fmt: skip
    return str(torch.cuda.get_device_name())


BATCH_S = 0.15
"""Seconds per batch of kernels. Power-limited devices run the first kernels faster than later ones (an H200
by 10 % for tens of milliseconds)."""


def accelerator_times(dtype: str) -> KernelTimes:
    """Times of kernels in `dtype` (bf16, fp16), each until the device has finished all queued work."""
    clock = BatchTimer(wait=torch.cuda.synchronize, batch_s=BATCH_S, batches=3)
    return kernel_times(clock, device="cuda", sizes=accelerator_sizes(DTYPES[dtype]))
