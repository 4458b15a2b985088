"""The parameters of a laid out graph: as they wait on this rank, brought to their readers, and updated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shardwise.runtime.graphs.bring import Lie, moved, moving
from shardwise.runtime.graphs.forms import (
    Coordinates,
    Form,
    box_of,
    boxes_of_run,
    elements,
    extents,
    whole_form,
)
from shardwise.runtime.graphs.grid import Grid
from shardwise.runtime.graphs.messages import Call, Collective, Way, alone, together
from shardwise.runtime.graphs.program import Stored
from shardwise.runtime.marks import GATHERS, GRADIENTS, TRAFFIC, marked


class Held:
    """One parameter on this rank.

    `weight` is its part as it is stored, in the `dtype` that is computed with; `owned` what the optimizer
    updates, in the dtype of `whole`: the weight itself, or of one whose states are split this rank's share of
    its elements, or of one that is computed with in another dtype all of them.
    """

    def __init__(self, grid: Grid, stored: Stored, whole: Tensor, dtype: torch.dtype) -> None:
        self.grid, self.stored = grid, stored
        shape = stored.lie.shape
        everywhere = whole_form(len(grid.counts))
        local = moved(grid, whole.reshape(shape), shape, everywhere, stored.lie.value).detach()
        self.weight = nn.Parameter(local.to(dtype, copy=True))
        self.shares = stored.states_split
        self.is_copied = dtype != whole.dtype
        is_apart = self.shares or self.is_copied
        self.owned = nn.Parameter(self._share(local).clone()) if is_apart else self.weight
        self.arrived: Form | None = None
        self._pending: Tensor | None = None

    @property
    def name(self) -> str:
        return self.stored.name

    def _share(self, local: Tensor) -> Tensor:
        """This rank's share of the elements of what all ranks of its group have; all where none is split."""
        if not self.shares:
            return local
        if self.stored.parts is not None:
            return moved(self.grid, local, self.stored.lie.shape, self.stored.lie.value, self.stored.parts)
        count = self.grid.size(self.shares)
        padded = _padded(local.reshape(-1), count)
        return padded.view(count, -1)[self.grid.members(self.shares).index(self.grid.here)]

    def brought(self, used: Lie) -> Tensor:
        """The parameter as it is used; its gradient arrives with the weight."""
        if self.arrived is None:
            self.arrived = self._scattered_form(used)
        if self.stored.lie.value == used.value and not self.is_copied:
            return self.weight
        result: Tensor = _Gather.apply(self.weight, self, used)
        return result

    def is_in(self, used: Tensor) -> bool:
        """Whether a tensor is the parameter as it waits, or a view of it."""
        return used.untyped_storage() is self.weight.untyped_storage()

    def made(self, used: Lie) -> Tensor:
        """The parameter as one of its readers uses it, once more and without a gradient."""
        start, weight = self.stored.lie, self.weight.detach()
        shared = self.stored.used or start
        with marked(TRAFFIC, GATHERS):
            weight = moved(self.grid, weight, used.shape, start.value, shared.value)
            return moved(self.grid, weight, used.shape, shared.value, used.value)

    def _scattered_form(self, used: Lie) -> Form:
        """What ranks have of the gradient behind the backward pass: along axes that split the parameter their
        parts, along others what its readers leave."""
        start = self.stored.lie.value
        split = tuple(axis for axis, word in enumerate(start.held) if isinstance(word, int))
        return used.gradient.with_held(split, start)

    def receive(self, gradient: Tensor, used: Lie) -> None:
        """Take the gradient of what was gathered, in the dtype of what is updated: scattered as the parameter
        is, where it has one reader; of several, the sum of all of theirs will be."""
        gradient = gradient.to(self.owned.dtype)
        if self.stored.used is None:
            gradient = self._scattered(gradient, used)
        self._pending = gradient if self._pending is None else self._pending + gradient

    def _scattered(self, gradient: Tensor, used: Lie) -> Tensor:
        with marked(TRAFFIC, GRADIENTS):
            return alone(self.grid, self._scattering(gradient, used))

    def _scattering(self, gradient: Tensor, used: Lie) -> Way:
        arrived = yield from moving(
            self.grid, gradient, used.shape, used.gradient, self._scattered_form(used)
        )
        if arrived is gradient:  # another parameter's too, perhaps; and the fused optimizer ignores strides
            arrived = gradient.clone(memory_format=torch.contiguous_format)
        return arrived

    def settling(self) -> Way:
        """The gradient that arrived as the optimizer updates the parameter, whose own is gone."""
        gradient, pending = self.weight.grad, self._pending
        self.weight.grad = self._pending = None
        if pending is not None:
            gradient = pending
            if self.stored.used is not None:
                gradient = yield from self._scattering(pending, self.stored.used)
        if gradient is None or self.arrived is None:
            return torch.zeros_like(self.owned)
        shape, stored, arrived = self.stored.lie.shape, self.stored.lie.value, self.arrived
        if self.stored.parts is not None:
            return (yield from moving(self.grid, gradient, shape, arrived, self.stored.parts))
        late = tuple(axis for axis in self.shares if arrived.held[axis] == "partial")
        begin = stored.with_word(late, "partial")
        rest = tuple(axis for axis, word in enumerate(begin.held) if word == "whole" != arrived.held[axis])
        if late and late == self.shares and arrived == begin.with_word(rest, "partial"):
            share = yield from self._reducing(gradient)  # what shrinks a tensor comes first
            if rest:
                (share,) = yield self._call("all_reduce", rest, share)
            return share
        gradient = yield from moving(self.grid, gradient, shape, arrived, begin)
        if late and late == self.shares:
            return (yield from self._reducing(gradient))
        if self.shares:
            gradient = yield from moving(self.grid, gradient, shape, begin, stored)
            gradient = self._share(gradient).clone()
        return gradient

    def _reducing(self, gradient: Tensor) -> Way:
        """This rank's share of the sum of what the ranks that share the states have."""
        count = self.grid.size(self.shares)
        sent = _padded(gradient.reshape(-1), count)
        (own,) = yield self._call("reduce_scatter", self.shares, sent, (len(sent) // count,) * count)
        return own

    def _call(self, kind: Collective, axes: tuple[int, ...], sent: Tensor, sizes: Sequence[int] = ()) -> Call:
        return Call(kind, axes, sent, prod(self.stored.lie.shape), sizes)

    def publishing(self) -> Way:
        """What ranks compute with, of the shares that all of them updated, in that dtype."""
        return (yield from self._joining(self.owned.detach().to(self.weight.dtype)))

    def _joined(self, share: Tensor) -> Tensor:
        return alone(self.grid, self._joining(share))

    def _joining(self, share: Tensor) -> Way:
        """What all ranks of the group have, of the shares of each."""
        if not self.shares:
            return share
        shape, stored = self.stored.lie.shape, self.stored.lie.value
        if self.stored.parts is not None:
            return (yield from moving(self.grid, share, shape, self.stored.parts, stored))
        rows = yield self._call("all_gather", self.shares, share.reshape(-1))
        return torch.cat(list(rows))[: self.weight.numel()].view(self.weight.shape)

    @property
    def copied_along(self) -> list[int]:
        """The axes along which ranks have the same of what the optimizer updates."""
        held = self.stored.lie.value.held
        whole = [axis for axis, word in enumerate(held) if not isinstance(word, int)]
        return [axis for axis in whole if axis not in self.shares]

    @property
    def copies(self) -> int:
        """On how many ranks each element of what the optimizer updates lies."""
        return self.grid.size(self.copied_along)

    @property
    def is_first_copy(self) -> bool:
        """Whether this rank is the first of those that have the same of what the optimizer updates."""
        return all(self.grid.here[axis] == 0 for axis in self.copied_along)

    def pieces(self, own: Tensor) -> dict[Coordinates, Tensor]:
        """`own`, of which each element belongs to one of what the optimizer updates (it or a state of it),
        in boxes of the whole parameter, each by where it begins there; they share its memory."""
        form = self.stored.lie.value if self.stored.parts is None else self.stored.parts
        box = box_of(self.stored.lie.shape, self.grid.counts, form, self.grid.here)
        start = tuple(first for first, _ in box)
        if not self.shares or self.stored.parts is not None:
            return {start: own} if own.numel() else {}
        first = self.grid.members(self.shares).index(self.grid.here) * own.numel()
        stop = min(first + own.numel(), elements(box))  # behind it are zeros that fill up the last share
        found: dict[Coordinates, Tensor] = {}
        taken = 0
        for piece in boxes_of_run(extents(box), first, stop):
            place = tuple(at + offset for at, (offset, _) in zip(start, piece, strict=True))
            found[place] = own[taken : taken + elements(piece)].view(extents(piece))
            taken += elements(piece)
        return found

    def whole(self) -> Tensor:
        """The whole parameter as it is updated, on every rank."""
        own = self._joined(self.owned.detach()) if self.is_copied else self.weight.detach()
        return self._whole(own)

    def whole_gradient(self) -> Tensor:
        """The whole gradient after `settle`, on every rank."""
        gradient = self.owned.grad
        if gradient is None:
            return self.owned.new_zeros(self.stored.lie.shape)
        return self._whole(self._joined(gradient))

    def _whole(self, local: Tensor) -> Tensor:
        shape, start = self.stored.lie.shape, self.stored.lie.value
        everything = start.with_word(range(len(start.held)), "whole")
        return moved(self.grid, local, shape, start, everything)


class _Gather(Function):
    """A parameter brought to a reader, and its gradient scattered."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, held: Held, used: Lie) -> Tensor:
        ctx.held, ctx.used = held, used
        with marked(TRAFFIC, GATHERS):
            result = moved(held.grid, weight, used.shape, held.stored.lie.value, used.value)
        return result.view_as(result) if result is weight else result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.held.receive(gradients[0], ctx.used)  # of another shape than the weight's, where it waits whole
        return None, None, None


def _padded(flat: Tensor, parts: int) -> Tensor:
    """A row of elements, with zeros behind it where it does not go into equal parts."""
    missing = -len(flat) % parts
    return torch.cat((flat, flat.new_zeros(missing))) if missing else flat


def held_parameters(
    grid: Grid, parameters: Mapping[str, Stored], values: Mapping[str, Tensor], dtype: torch.dtype | None
) -> dict[str, Held]:
    """This rank's parts of all parameters, from their whole `values`; computed with in `dtype`, or in their
    own."""
    return {
        name: Held(grid, stored, values[name], dtype or values[name].dtype)
        for name, stored in parameters.items()
    }


def settle(grid: Grid, parameters: Sequence[Held]) -> None:
    """Bring the gradients that arrived to what the optimizer updates, those that need the same as one
    message."""
    gradients = together(grid, (held.settling() for held in parameters))
    for held, gradient in zip(parameters, gradients, strict=True):
        held.owned.grad = gradient


def publish(grid: Grid, parameters: Iterable[Held]) -> None:
    """Put what other ranks updated with this one's, as one message, in the dtype that is computed with."""
    apart = [held for held in parameters if held.owned is not held.weight]
    with torch.no_grad():
        with marked(TRAFFIC, GATHERS):
            joined = together(grid, (held.publishing() for held in apart))
        for held, weight in zip(apart, joined, strict=True):
            held.weight.copy_(weight)


def square_sum(parameters: Iterable[Held], device_type: str) -> Tensor:
    """This rank's share of the sum of the squares of all gradients, on its device: over all ranks, shares
    add up to it."""
    squares = [
        held.owned.grad.square().sum(dtype=torch.float64) / held.copies
        for held in parameters
        if held.owned.grad is not None
    ]
    nothing = torch.zeros((), dtype=torch.float64, device=device_type)
    return torch.stack([nothing, *squares]).sum()
