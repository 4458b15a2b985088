"""Activation and optimizer offload to host memory, with copies that overlap computation.

`ActivationOffload` copies the saved activations of each layer to the host after its forward pass. It
prefetches them during the backward pass of the next layer. `OptimizerOffload` holds fp32 weights and
optimizer states on the host and updates them there (ZeRO-Offload, Ren et al. 2021, arXiv 2101.06840).
`CopyStream` is the stream of the copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from shardwise.runtime.gradients import local
from shardwise.runtime.private import OffloadedShard, offloaded_shards, with_layout_of
from shardwise.runtime.profiling import FROM_HOST, TO_HOST

# Buffers and copies


def host_buffer_like(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A host buffer of this shape and dtype for copies from or to `tensor`'s device. It is pinned if that is
    an accelerator, so that copies are asynchronous."""
    is_accelerator = tensor.device.type not in ("cpu", "meta")
    return tensor.new_empty(shape, dtype=dtype, device="cpu", pin_memory=is_accelerator)


class CopyStream:
    """Copies between a device and the host, in order: on an accelerator on their own stream, overlapped with
    computation; on the host synchronously."""

    def __init__(self, device_type: str) -> None:
        self._stream = None if device_type == "cpu" else torch.Stream(device_type)

    def copies(self) -> AbstractContextManager[Any]:
        """A context whose copies run on the stream, after all work queued on the device so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.accelerator.current_stream())
        return self._stream

    def record(self) -> torch.Event | None:
        """An event that completes when all copies so far are done; None on the host."""
        return None if self._stream is None else self._stream.record_event()


def wait_on_device(event: torch.Event | None) -> None:
    """Let the device wait for `event`."""
    if event is not None:
        torch.accelerator.current_stream().wait_event(event)


def wait_on_host(event: torch.Event | None) -> None:
    """Block the host until `event`, so that it may read what was copied."""
    if event is not None:
        event.synchronize()


# Activation offload

OFFLOADS_ACTIVATIONS = ("activations", "both")
"""Values of the strategy's `offload` that offload activations."""

MIN_OFFLOAD_BYTES = 1024
"""Smallest tensor in bytes that is offloaded; a copy of a smaller one costs more than its memory is worth."""


@dataclass(slots=True, weakref_slot=True)
class _Buffer:
    """Memory of some saved tensors of a block, on the host or on the device (`on_device`)."""

    device: torch.device
    on_host: Tensor | None
    on_device: Tensor | None = None


@dataclass(slots=True)
class _LayerTensors:
    """Saved tensors of one block in one forward pass; `before` are those of the previous block.

    During the offload, `offloading` keeps the device tensors alive until `event`. After a prefetch
    (`is_reloaded`), the tensors are on the device when `event` completes. Buffers are owned by the tensors
    that autograd saved, and are freed with them one by one.
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
    """A saved tensor as a view of a buffer."""

    block: _LayerTensors
    buffer: _Buffer
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _DeviceTensor:
    """A saved tensor of the head, which stays on the device; `before` is the last block."""

    tensor: Tensor
    before: _LayerTensors | None


class ActivationOffload:
    """Offloads the saved activations of the layers of a rank's stages.

    The device holds those of two layers at a time: one that computes and one that is copied. What the head
    saves is needed first in the backward pass and stays on the device.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._copy_stream = CopyStream(device_type)
        self._block: _LayerTensors | None = None
        self._offloading: _LayerTensors | None = None

    def begin(self) -> None:
        """Start a stage's forward pass of a micro-batch."""
        self._block = None

    @contextmanager
    def layer(self, layer: nn.Module, shared: Iterable[Tensor]) -> Iterator[None]:
        """A context for the forward pass of `layer`, whose saved tensors go to the host. Parameters and
        tensors that all layers use (`shared`) stay on the device."""
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
        """A context for the forward pass of the stage's head, whose saved tensors stay on the device."""
        block = self._block
        with saved_tensors_hooks(lambda tensor: _DeviceTensor(tensor.detach(), block), self.unpack):
            yield

    def pack(self, tensor: Tensor) -> Any:
        """Pack hook: what autograd stores instead of `tensor`."""
        tensor, block = tensor.detach(), self._block
        if block is None or not self._is_offloaded(tensor, block):
            return tensor
        span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        if span > tensor.numel():  # a view with gaps
            tensor = tensor.contiguous()
            span = tensor.numel()
        memory = (id(tensor.untyped_storage()), tensor.storage_offset(), span, tensor.dtype)
        buffer = block.by_memory.get(memory)
        if buffer is None:
            # Copy the memory of a storage once, however many views of it are saved.
            flat = tensor.as_strided((span,), (1,))
            host_buffer = host_buffer_like(tensor, (span,), tensor.dtype)
            with record_function(TO_HOST), self._copy_stream.copies():
                host_buffer.copy_(flat, non_blocking=True)
            buffer = _Buffer(tensor.device, host_buffer)
            block.offloading.append(
                flat
            )  # keeps the memory from being reused before the copy is done, and its id unique
            block.by_memory[memory] = buffer
            block.buffers.append(weakref.ref(buffer))
        return _OffloadedTensor(block, buffer, tuple(tensor.shape), tensor.stride())

    def unpack(self, packed: Any) -> Tensor:
        """Unpack hook: the tensor that `packed` stands for. The first one of a block prefetches the previous
        block."""
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
            raise AssertionError("a reloaded block has its buffers on the device")
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
        # Compared by storage: gathered parameters are at another address each time.
        own = (id(local(each.detach()).untyped_storage()) for each in self._layer.parameters())
        return memory not in block.resident and memory not in own

    def _finish_offload(self) -> None:
        """Let the device wait until the block that is offloaded has been copied, and free its memory."""
        if self._offloading is not None:
            wait_on_device(self._offloading.event)
            self._offloading.offloading.clear()
            self._offloading = None

    def _reload(self, block: _LayerTensors) -> None:
        """Start copying the remaining buffers of a block back to the device, unless this was done before."""
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


# Optimizer offload

OFFLOADS_STATES = ("optimizer", "both")
"""Values of the strategy's `offload` that offload optimizer states."""

CHUNK_ELEMENTS = 16 << 20
"""Elements per chunk of fp32 gradients (64 MiB). Two chunks are in flight: one is received while one is
updated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostWeight:
    """A parameter on the device and its fp32 weight on the host.

    `sent` is what is copied back: the weight itself, or its copy in the compute dtype. `shard` receives it if
    `fully_shard` shards the parameter.
    """

    parameter: nn.Parameter
    own: nn.Parameter
    sent: Tensor
    shard: OffloadedShard | None

    @property
    def elements(self) -> int:
        return local(self.own).numel()

    def place(self) -> Tensor:
        """The memory of the weight on the device."""
        return local(self.parameter.detach()) if self.shard is None else self.shard.device_buffer()


class OptimizerOffload:
    """Holds the weights of a rank's stages on the host. The optimizer updates `parameters`, in the order of
    the stages' parameters. Of those sharded by `fully_shard`, the device has nothing in fp32.

    A step processes chunks of at most `chunk_elements` (or one parameter). While the host updates a chunk, it
    receives the gradients of the next one and sends the weights of the previous one.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        *,
        device_type: str,
        dtype: torch.dtype,
        keeps_shards: bool,
        chunk_elements: int = CHUNK_ELEMENTS,
    ) -> None:
        """Weights that `fully_shard` shards are sent in `dtype`. With `keeps_shards`, the device keeps this
        rank's shard; else the shard is freed after the all-gather, and sent again in each step."""
        self._copy_stream = CopyStream(device_type)
        shards = {key: one for stage in stages for key, one in offloaded_shards(stage).items()}
        parameters = dict.fromkeys(each for stage in stages for each in stage.parameters())
        self._weights = {each: _weight_of(each, shards.get(each), dtype, keeps_shards) for each in parameters}
        self._chunks = list(_chunks(list(self._weights.values()), chunk_elements))
        self._gradient_buffers: list[Tensor] = []
        self.sync_weights()

    @property
    def parameters(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """The fp32 host parameter of each device parameter, with the same layout."""
        return {parameter: weight.own for parameter, weight in self._weights.items()}

    @property
    def arrived(self) -> list[Tensor]:
        """Shards of `fully_shard`'s parameters that are on the device and not yet gathered."""
        shards = [weight.shard for weight in self._weights.values() if weight.shard is not None]
        return [shard.device_part for shard in shards if shard.device_part is not None]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """One step of `optimizer`, which must have `parameters`: applies the gradients of the device's
        parameters and copies the new weights to the device."""
        arriving = self._fetch_gradients(0)
        for number, chunk in enumerate(self._chunks):
            event, gradients = arriving
            if number + 1 < len(self._chunks):
                arriving = self._fetch_gradients(number + 1)
            wait_on_host(event)
            for weight, gradient in zip(chunk, gradients, strict=True):
                weight.own.grad = gradient
            optimizer.step()
            for weight in chunk:
                weight.own.grad = None
            self._send_weights(chunk)
        wait_on_device(self._copy_stream.record())
        for parameter in self._weights:
            parameter.grad = None

    def sync_weights(self) -> None:
        """Copy the host's weights to the device."""
        for chunk in self._chunks:
            self._send_weights(chunk)
        wait_on_device(self._copy_stream.record())

    def _fetch_gradients(self, number: int) -> tuple[torch.Event | None, list[Tensor | None]]:
        """Start copying a chunk's gradients to the host. Returns the event of the copy and the gradients.

        Chunks alternate between two buffers. One is free, since the host has finished the chunk before the
        last.
        """
        chunk = self._chunks[number]
        if not self._gradient_buffers:
            most = max(sum(weight.elements for weight in each) for each in self._chunks)
            like = local(chunk[0].parameter.detach())
            self._gradient_buffers = [
                host_buffer_like(like, (most,), torch.float32) for _ in self._chunks[:2]
            ]
        gradients: list[Tensor | None] = []
        first = 0
        with record_function(TO_HOST), self._copy_stream.copies(), torch.no_grad():
            for weight in chunk:
                grad = weight.parameter.grad
                if grad is None:
                    gradients.append(None)
                    continue
                there = self._gradient_buffers[number % 2][first : first + weight.elements].view(
                    local(weight.own).shape
                )
                there.copy_(local(grad), non_blocking=True)
                gradients.append(with_layout_of(there, weight.own))
                first += weight.elements
        return self._copy_stream.record(), gradients

    def _send_weights(self, chunk: Sequence[_HostWeight]) -> None:
        """Start copying the weights of a chunk to the device."""
        with record_function(FROM_HOST), torch.no_grad():
            for weight in chunk:
                if weight.sent.dtype != weight.own.dtype:
                    weight.sent.copy_(local(weight.own))
            places = [weight.place() for weight in chunk]
            with self._copy_stream.copies():
                for weight, place in zip(chunk, places, strict=True):
                    place.copy_(weight.sent.view(place.shape), non_blocking=True)


def _weight_of(
    parameter: nn.Parameter, shard: OffloadedShard | None, dtype: torch.dtype, keeps_shards: bool
) -> _HostWeight:
    """Copy the weight from the device to the host. The device frees its fp32 weight if there is a `shard`."""
    there = local(parameter.detach())
    here = host_buffer_like(there, there.shape, there.dtype)
    here.copy_(there)
    sent = here
    if shard is not None:
        if dtype != here.dtype:
            sent = host_buffer_like(there, there.shape, dtype)
        shard.offload(sent, keeps=keeps_shards)
    own = nn.Parameter(with_layout_of(here, parameter), requires_grad=False)
    return _HostWeight(parameter=parameter, own=own, sent=sent, shard=shard)


def _chunks(weights: Sequence[_HostWeight], most: int) -> Iterator[list[_HostWeight]]:
    """Split the weights, in order, into chunks of at most `most` elements, or of one weight."""
    chunk: list[_HostWeight] = []
    elements = 0
    for weight in weights:
        if chunk and elements + weight.elements > most:
            yield chunk
            chunk, elements = [], 0
        chunk.append(weight)
        elements += weight.elements
    if chunk:
        yield chunk
