"""Room on the host beside a device, and copies between the two that pass beside computation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def host_buffer_like(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory on the host of this shape and dtype for what `tensor`'s device computes with; pinned where that
    is an accelerator, which reaches no other memory without waiting."""
    is_accelerator = tensor.device.type not in ("cpu", "meta")
    return tensor.new_empty(shape, dtype=dtype, device="cpu", pin_memory=is_accelerator)


class CopyStream:
    """Copies between a device and the host, one after the other, beside what the device computes: on an
    accelerator on a stream of their own. On the host they are done when they are asked for."""

    def __init__(self, device_type: str) -> None:
        self._stream = None if device_type == "cpu" else torch.Stream(device_type)

    def copies(self) -> AbstractContextManager[Any]:
        """What is copied inside is, behind all that the device was given before."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.accelerator.current_stream())
        return self._stream

    def record(self) -> torch.Event | None:
        """The moment when all copies so far are done."""
        return None if self._stream is None else self._stream.record_event()


def wait_on_device(event: torch.Event | None) -> None:
    """Have the device go on behind `event`."""
    if event is not None:
        torch.accelerator.current_stream().wait_event(event)


def wait_on_host(event: torch.Event | None) -> None:
    """Until `event`: what was copied to the host may be read."""
    if event is not None:
        event.synchronize()
