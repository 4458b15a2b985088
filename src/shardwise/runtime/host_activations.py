"""Activations on the host between the passes: each layer's go there when it is done, and come back while the
backward pass is at the layer behind it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from shardwise.runtime.gradients import local
from shardwise.runtime.host import CopyStream, host_buffer_like, wait_on_device
from shardwise.runtime.trace import FROM_HOST, TO_HOST

OFFLOADS_ACTIVATIONS = ("activations", "both")
"""Choices of offload that do."""

MIN_OFFLOAD_BYTES = 1024
"""Of a tensor that is worth a copy."""


@dataclass(slots=True, weakref_slot=True)
class _Buffer:
    """Memory that some kept tensors of a block are in, on the host or `on_device`, on the device."""

    device: torch.device
    on_host: Tensor | None
    on_device: Tensor | None = None


@dataclass(slots=True)
class _LayerTensors:
    """What a block of a stage keeps in one pass; `before` is that of the block before it. While it `leaves`,
    its tensors stay as they are until `event`; once it `is_reloaded`, they are there from `event` on.

    Pieces belong to what autograd kept, and go with it, one by one.
    """

    resident: frozenset[int]
    before: _LayerTensors | None
    buffers: list[weakref.ref[_Buffer]] = field(default_factory=list)
    by_memory: dict[tuple[Any, ...], _Buffer] = field(default_factory=dict)
    offloading: list[Tensor] = field(default_factory=list)
    event: torch.Event | None = None
    is_reloaded: bool = False


@dataclass(frozen=True, slots=True)
class _OffloadedTensor:
    """A tensor in a piece of memory."""

    block: _LayerTensors
    buffer: _Buffer
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _DeviceTensor:
    """A tensor that stays on the device, behind a block that does not."""

    tensor: Tensor
    before: _LayerTensors | None


class ActivationOffload:
    """Moves what the layers of a rank's stages keep for the backward pass. Of them two are on the device at a
    time: one that computes, and beside it one that goes or comes. What the head keeps stays: it is needed
    first.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._copy_stream = CopyStream(device_type)
        self._block: _LayerTensors | None = None
        self._offloading: _LayerTensors | None = None

    def begin(self) -> None:
        """A stage begins with a microbatch."""
        self._block = None

    @contextmanager
    def layer(self, layer: nn.Module, shared: Iterable[Tensor]) -> Iterator[None]:
        """Inside, `layer` computes: what it keeps goes to the host, but for parameters and for tensors that
        all layers have, which are `shared`."""
        resident = frozenset(id(each.untyped_storage()) for each in shared)
        self._block = block = _LayerTensors(resident, self._block)
        self._layer = layer
        with saved_tensors_hooks(self.pack, self.unpack):
            yield
        block.by_memory.clear()
        block.event = self._copy_stream.record()
        self._finish_offload()
        self._offloading = block

    @contextmanager
    def head(self) -> Iterator[None]:
        """Inside, the stage's head computes."""
        block = self._block
        with saved_tensors_hooks(lambda tensor: _DeviceTensor(tensor.detach(), block), self.unpack):
            yield

    def pack(self, tensor: Tensor) -> Any:
        """What is kept instead of `tensor`, which the layer that computes has made or been given."""
        tensor, block = tensor.detach(), self._block
        if block is None or not self._is_offloaded(tensor, block):
            return tensor
        span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        if span > tensor.numel():  # a part of memory with gaps
            tensor = tensor.contiguous()
            span = tensor.numel()
        memory = (id(tensor.untyped_storage()), tensor.storage_offset(), span, tensor.dtype)
        buffer = block.by_memory.get(memory)
        if buffer is None:
            # All of a piece's memory, once, however many views of it are kept.
            flat = tensor.as_strided((span,), (1,))
            host_buffer = host_buffer_like(tensor, (span,), tensor.dtype)
            with record_function(TO_HOST), self._copy_stream.copies():
                host_buffer.copy_(flat, non_blocking=True)
            buffer = _Buffer(tensor.device, host_buffer)
            block.offloading.append(
                flat
            )  # nothing may take its place before it is copied, nor be taken for it
            block.by_memory[memory] = buffer
            block.buffers.append(weakref.ref(buffer))
        return _OffloadedTensor(block, buffer, tuple(tensor.shape), tensor.stride())

    def unpack(self, packed: Any) -> Tensor:
        """The tensor that `packed` is instead of. That of the first of a block has the block before come."""
        if isinstance(packed, Tensor):
            return packed
        self._finish_offload()
        if isinstance(packed, _DeviceTensor):
            if packed.before is not None:
                self._reload(packed.before)
            return packed.tensor
        self._reload(packed.block)
        wait_on_device(packed.block.event)
        packed.block.event = None
        if packed.block.before is not None:
            self._reload(packed.block.before)
        if packed.buffer.on_device is None:
            raise AssertionError("a piece of a block that is back is there")
        return packed.buffer.on_device.as_strided(packed.shape, packed.stride)

    def _is_offloaded(self, tensor: Tensor, block: _LayerTensors) -> bool:
        if (
            isinstance(tensor, DTensor)
            or not tensor.is_floating_point()
            or tensor.device.type != self._device_type
            or tensor.numel() * tensor.element_size() < MIN_OFFLOAD_BYTES
        ):
            return False
        memory = id(tensor.untyped_storage())
        # Gathered parameters lie elsewhere each time.
        own = (id(local(each.detach()).untyped_storage()) for each in self._layer.parameters())
        return memory not in block.resident and memory not in own

    def _finish_offload(self) -> None:
        """Have the device go on when the block that leaves has left."""
        if self._offloading is not None:
            wait_on_device(self._offloading.event)
            self._offloading.offloading.clear()
            self._offloading = None

    def _reload(self, block: _LayerTensors) -> None:
        """Have what is left of a block come back to the device, where it does not yet."""
        if block.is_reloaded:
            return
        block.is_reloaded = True
        buffers = [buffer for each in block.buffers if (buffer := each()) is not None]
        for buffer in buffers:
            if buffer.on_host is not None:
                buffer.on_device = buffer.on_host.new_empty(buffer.on_host.shape, device=buffer.device)
        with record_function(FROM_HOST), self._copy_stream.copies():
            for buffer in buffers:
                if buffer.on_host is not None and buffer.on_device is not None:
                    buffer.on_device.copy_(buffer.on_host, non_blocking=True)
                    buffer.on_host = None
        block.event = self._copy_stream.record()
