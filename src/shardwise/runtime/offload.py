"""Room on the host beside a device, and copies between the two that pass beside computation.

Activations on the host between the passes: each layer's go there when it is done, and come back while the
backward pass is at the layer behind it.

Optimizer states and fp32 weights on the host, where the update is made too (Ren et al. 2021, ZeRO-Offload,
arXiv 2101.06840): gradients go over, updated weights come back in what they are computed with.
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


OFFLOADS_STATES = ("optimizer", "both")
"""Choices of offload that do."""

CHUNK_ELEMENTS = 16 << 20
"""Of gradients that are on their way while those before them are taken: 64 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostWeight:
    """A parameter of the device, what the host has of it, and what goes back: `sent`, which is the same where
    the device computes in fp32. A `shard` is given the weight in its place where `fully_shard` divides it."""

    parameter: nn.Parameter
    own: nn.Parameter
    sent: Tensor
    shard: OffloadedShard | None

    @property
    def elements(self) -> int:
        return local(self.own).numel()

    def place(self) -> Tensor:
        """Where the device has it."""
        return local(self.parameter.detach()) if self.shard is None else self.shard.device_buffer()


class OptimizerOffload:
    """The weights of a rank's stages on its host. An optimizer has `parameters`, in the order of the stages'
    own; of those that `fully_shard` divides nothing in fp32 stays on the device.

    Its step goes over chunks of at most `chunk_elements`, or of one parameter: while the host takes one, the
    gradients of the next come and the weights of the one before go.
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
        """Weights are sent in `dtype` where `fully_shard` divides them. With `keeps_shards` the device keeps
        this rank's part of these; else it is gone once it was gathered, and is sent again each step."""
        self._copy_stream = CopyStream(device_type)
        shards = {key: one for stage in stages for key, one in offloaded_shards(stage).items()}
        parameters = dict.fromkeys(each for stage in stages for each in stage.parameters())
        self._weights = {each: _weight_of(each, shards.get(each), dtype, keeps_shards) for each in parameters}
        self._chunks = list(_chunks(list(self._weights.values()), chunk_elements))
        self._gradient_buffers: list[Tensor] = []
        self.sync_weights()

    @property
    def parameters(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """By each parameter of the device the host's, in fp32, laid out as it."""
        return {parameter: weight.own for parameter, weight in self._weights.items()}

    @property
    def arrived(self) -> list[Tensor]:
        """Of weights that `fully_shard` divides what the device has of them, not gathered."""
        shards = [weight.shard for weight in self._weights.values() if weight.shard is not None]
        return [shard.device_part for shard in shards if shard.device_part is not None]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """One step of `optimizer`, which has `parameters`, with the gradients of the device's, and these get
        what comes of it."""
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
        """Give the device what the host's weights are now."""
        for chunk in self._chunks:
            self._send_weights(chunk)
        wait_on_device(self._copy_stream.record())

    def _fetch_gradients(self, number: int) -> tuple[torch.Event | None, list[Tensor | None]]:
        """Have the gradients of a chunk come: when they will be there, and where. Of two rooms one is free:
        the host is done with the chunk before the last."""
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
        """Have the weights of a chunk go to the device."""
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
    """The weight on the host as it is on the device, which has it in fp32 no more where it has a `shard`."""
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
    """The weights in their order, as many together as have `most` elements; one at least."""
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
