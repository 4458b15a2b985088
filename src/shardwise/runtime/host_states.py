"""Optimizer states and fp32 weights on the host, where the update is made too (Ren et al. 2021, ZeRO-Offload,
arXiv 2101.06840): gradients go over, updated weights come back in what they are computed with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from shardwise.runtime.gradients import local
from shardwise.runtime.host import Lane, await_on_device, await_on_host, room_like
from shardwise.runtime.modules import Stage
from shardwise.runtime.private import HostedShard, hosted_shards, laid_like
from shardwise.runtime.trace import FROM_HOST, TO_HOST

MOVES_STATES = ("optimizer", "both")
"""Choices of offload that do."""

CHUNK_ELEMENTS = 16 << 20
"""Of gradients that are on their way while those before them are taken: 64 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weight:
    """A parameter of the device, what the host has of it, and what goes back: `sent`, which is the same where
    the device computes in fp32. A `shard` is given the weight in its place where `fully_shard` divides it."""

    parameter: nn.Parameter
    own: nn.Parameter
    sent: Tensor
    shard: HostedShard | None

    @property
    def elements(self) -> int:
        return local(self.own).numel()

    def place(self) -> Tensor:
        """Where the device has it."""
        return local(self.parameter.detach()) if self.shard is None else self.shard.room()


class HostStates:
    """The weights of a rank's stages on its host. An optimizer has `parameters`, in the order of the stages'
    own; of those that `fully_shard` divides nothing in fp32 stays on the device.

    Its step goes over chunks of at most `chunk_elements`, or of one parameter: while the host takes one, the
    gradients of the next come and the weights of the one before go.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        device_type: str,
        dtype: torch.dtype,
        keeps_shards: bool,
        chunk_elements: int = CHUNK_ELEMENTS,
    ) -> None:
        """Weights are sent in `dtype` where `fully_shard` divides them. With `keeps_shards` the device keeps
        this rank's part of these; else it is gone once it was gathered, and is sent again each step."""
        self._lane = Lane(device_type)
        shards = {key: one for stage in stages for key, one in hosted_shards(stage).items()}
        parameters = dict.fromkeys(each for stage in stages for each in stage.parameters())
        self._weights = {each: _weight_of(each, shards.get(each), dtype, keeps_shards) for each in parameters}
        self._chunks = list(_chunks(list(self._weights.values()), chunk_elements))
        self._rooms: list[Tensor] = []
        self.spread()

    @property
    def parameters(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """By each parameter of the device the host's, in fp32, laid out as it."""
        return {parameter: weight.own for parameter, weight in self._weights.items()}

    @property
    def arrived(self) -> list[Tensor]:
        """Of weights that `fully_shard` divides what the device has of them, not gathered."""
        shards = [weight.shard for weight in self._weights.values() if weight.shard is not None]
        return [shard.given for shard in shards if shard.given is not None]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """One step of `optimizer`, which has `parameters`, with the gradients of the device's, and these get
        what comes of it."""
        arriving = self._bring(0)
        for number, chunk in enumerate(self._chunks):
            moment, gradients = arriving
            if number + 1 < len(self._chunks):
                arriving = self._bring(number + 1)
            await_on_host(moment)
            for weight, gradient in zip(chunk, gradients, strict=True):
                weight.own.grad = gradient
            optimizer.step()
            for weight in chunk:
                weight.own.grad = None
            self._give(chunk)
        await_on_device(self._lane.mark())
        for parameter in self._weights:
            parameter.grad = None

    def spread(self) -> None:
        """Give the device what the host's weights are now."""
        for chunk in self._chunks:
            self._give(chunk)
        await_on_device(self._lane.mark())

    def _bring(self, number: int) -> tuple[torch.Event | None, list[Tensor | None]]:
        """Have the gradients of a chunk come: when they will be there, and where. Of two rooms one is free:
        the host is done with the chunk before the last."""
        chunk = self._chunks[number]
        if not self._rooms:
            most = max(sum(weight.elements for weight in each) for each in self._chunks)
            like = local(chunk[0].parameter.detach())
            self._rooms = [room_like(like, (most,), torch.float32) for _ in self._chunks[:2]]
        gradients: list[Tensor | None] = []
        first = 0
        with record_function(TO_HOST), self._lane.copies(), torch.no_grad():
            for weight in chunk:
                grad = weight.parameter.grad
                if grad is None:
                    gradients.append(None)
                    continue
                there = self._rooms[number % 2][first : first + weight.elements].view(local(weight.own).shape)
                there.copy_(local(grad), non_blocking=True)
                gradients.append(laid_like(there, weight.own))
                first += weight.elements
        return self._lane.mark(), gradients

    def _give(self, chunk: Sequence[_Weight]) -> None:
        """Have the weights of a chunk go to the device."""
        with record_function(FROM_HOST), torch.no_grad():
            for weight in chunk:
                if weight.sent.dtype != weight.own.dtype:
                    weight.sent.copy_(local(weight.own))
            places = [weight.place() for weight in chunk]
            with self._lane.copies():
                for weight, place in zip(chunk, places, strict=True):
                    place.copy_(weight.sent.view(place.shape), non_blocking=True)


def _weight_of(
    parameter: nn.Parameter, shard: HostedShard | None, dtype: torch.dtype, keeps_shards: bool
) -> _Weight:
    """The weight on the host as it is on the device, which has it in fp32 no more where it has a `shard`."""
    there = local(parameter.detach())
    here = room_like(there, there.shape, there.dtype)
    here.copy_(there)
    sent = here
    if shard is not None:
        if dtype != here.dtype:
            sent = room_like(there, there.shape, dtype)
        shard.leave(sent, keeps=keeps_shards)
    own = nn.Parameter(laid_like(here, parameter), requires_grad=False)
    return _Weight(parameter=parameter, own=own, sent=sent, shard=shard)


def _chunks(weights: Sequence[_Weight], most: int) -> Iterator[list[_Weight]]:
    """The weights in their order, as many together as have `most` elements; one at least."""
    chunk: list[_Weight] = []
    elements = 0
    for weight in weights:
        if chunk and elements + weight.elements > most:
            yield chunk
            chunk, elements = [], 0
        chunk.append(weight)
        elements += weight.elements
    if chunk:
        yield chunk
