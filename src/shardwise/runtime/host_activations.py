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
from shardwise.runtime.host import Lane, await_on_device, room_like
from shardwise.runtime.trace import FROM_HOST, TO_HOST

MOVES_ACTIVATIONS = ("activations", "both")
"""Choices of offload that do."""

LEAST_BYTES = 1024
"""Of a tensor that is worth a copy."""


@dataclass(slots=True, weakref_slot=True)
class _Piece:
    """Memory that some kept tensors of a block are in, on the host or `there`, on the device."""

    device: torch.device
    here: Tensor | None
    there: Tensor | None = None


@dataclass(slots=True)
class _Block:
    """What a block of a stage keeps in one pass; `before` is that of the block before it. While it `leaves`,
    its tensors stay as they are until `moment`; once it `is_back`, they are there from `moment` on.

    Pieces belong to what autograd kept, and go with it, one by one.
    """

    stays: frozenset[int]
    before: _Block | None
    pieces: list[weakref.ref[_Piece]] = field(default_factory=list)
    by_memory: dict[tuple[Any, ...], _Piece] = field(default_factory=dict)
    leaving: list[Tensor] = field(default_factory=list)
    moment: torch.Event | None = None
    is_back: bool = False


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor in a piece of memory."""

    block: _Block
    piece: _Piece
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Near:
    """A tensor that stays on the device, behind a block that does not."""

    tensor: Tensor
    before: _Block | None


class HostActivations:
    """Moves what the layers of a rank's stages keep for the backward pass. Of them two are on the device at a
    time: one that computes, and beside it one that goes or comes. What the head keeps stays: it is needed
    first.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._lane = Lane(device_type)
        self._block: _Block | None = None
        self._leaving: _Block | None = None

    def begin(self) -> None:
        """A stage begins with a microbatch."""
        self._block = None

    @contextmanager
    def layer(self, layer: nn.Module, shared: Iterable[Tensor]) -> Iterator[None]:
        """Inside, `layer` computes: what it keeps goes to the host, but for parameters and for tensors that
        all layers have, which are `shared`."""
        stays = frozenset(id(each.untyped_storage()) for each in shared)
        self._block = block = _Block(stays, self._block)
        self._layer = layer
        with saved_tensors_hooks(self.put, self.take):
            yield
        block.by_memory.clear()
        block.moment = self._lane.mark()
        self._settle()
        self._leaving = block

    @contextmanager
    def head(self) -> Iterator[None]:
        """Inside, the stage's head computes."""
        block = self._block
        with saved_tensors_hooks(lambda tensor: _Near(tensor.detach(), block), self.take):
            yield

    def put(self, tensor: Tensor) -> Any:
        """What is kept instead of `tensor`, which the layer that computes has made or been given."""
        tensor, block = tensor.detach(), self._block
        if block is None or not self._goes(tensor, block):
            return tensor
        span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        if span > tensor.numel():  # a part of memory with gaps
            tensor = tensor.contiguous()
            span = tensor.numel()
        memory = (id(tensor.untyped_storage()), tensor.storage_offset(), span, tensor.dtype)
        piece = block.by_memory.get(memory)
        if piece is None:
            # All of a piece's memory, once, however many views of it are kept.
            flat = tensor.as_strided((span,), (1,))
            room = room_like(tensor, (span,), tensor.dtype)
            with record_function(TO_HOST), self._lane.copies():
                room.copy_(flat, non_blocking=True)
            piece = _Piece(tensor.device, room)
            block.leaving.append(flat)  # nothing may take its place before it is copied, nor be taken for it
            block.by_memory[memory] = piece
            block.pieces.append(weakref.ref(piece))
        return _Kept(block, piece, tuple(tensor.shape), tensor.stride())

    def take(self, kept: Any) -> Tensor:
        """The tensor that `kept` is instead of. That of the first of a block has the block before come."""
        if isinstance(kept, Tensor):
            return kept
        self._settle()
        if isinstance(kept, _Near):
            if kept.before is not None:
                self._bring(kept.before)
            return kept.tensor
        self._bring(kept.block)
        await_on_device(kept.block.moment)
        kept.block.moment = None
        if kept.block.before is not None:
            self._bring(kept.block.before)
        if kept.piece.there is None:
            raise AssertionError("a piece of a block that is back is there")
        return kept.piece.there.as_strided(kept.shape, kept.stride)

    def _goes(self, tensor: Tensor, block: _Block) -> bool:
        if (
            isinstance(tensor, DTensor)
            or not tensor.is_floating_point()
            or tensor.device.type != self._device_type
            or tensor.numel() * tensor.element_size() < LEAST_BYTES
        ):
            return False
        memory = id(tensor.untyped_storage())
        # Gathered parameters lie elsewhere each time.
        own = (id(local(each.detach()).untyped_storage()) for each in self._layer.parameters())
        return memory not in block.stays and memory not in own

    def _settle(self) -> None:
        """Have the device go on when the block that leaves has left."""
        if self._leaving is not None:
            await_on_device(self._leaving.moment)
            self._leaving.leaving.clear()
            self._leaving = None

    def _bring(self, block: _Block) -> None:
        """Have what is left of a block come back to the device, where it does not yet."""
        if block.is_back:
            return
        block.is_back = True
        pieces = [piece for each in block.pieces if (piece := each()) is not None]
        for piece in pieces:
            if piece.here is not None:
                piece.there = piece.here.new_empty(piece.here.shape, device=piece.device)
        with record_function(FROM_HOST), self._lane.copies():
            for piece in pieces:
                if piece.here is not None and piece.there is not None:
                    piece.there.copy_(piece.here, non_blocking=True)
                    piece.here = None
        block.moment = self._lane.mark()
