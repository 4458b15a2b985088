"""Optimizer states and fp32 weights on the host, where the update is made too (Ren et al. 2021, ZeRO-Offload,
arXiv 2101.06840): gradients go over, updated weights come back in what they are computed with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from shardwise.runtime.gradients import local
from shardwise.runtime.host import CopyStream, host_buffer_like, wait_on_device, wait_on_host
from shardwise.runtime.modules import ModelStage
from shardwise.runtime.private import OffloadedShard, offloaded_shards, with_layout_of
from shardwise.runtime.trace import FROM_HOST, TO_HOST

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
        stages: Sequence[ModelStage],
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
