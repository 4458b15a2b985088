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
from shardwise.runtime.graphs.program import Program, Stored
from shardwise.runtime.marks import GATHERS, GRADIENTS, TRAFFIC, marked


class Held:
    """One parameter on this rank.

    `weight` is its part as it is stored, in the `dtype` that is computed with; `owned` what the optimizer
    updates, in the dtype of `whole`: the weight itself, or of one whose states are split this rank's share of
    its elements, or of one that is computed with in another dtype all of them. `sums` is what this rank has
    of its gradient until `settling`, in the dtype of `whole` too, in `room` (of `room_elements`). Both rooms
    go into equal shares where states are split into runs of elements; a share of them is no copy.
    """

    def __init__(self, grid: Grid, stored: Stored, whole: Tensor, dtype: torch.dtype, room: Tensor) -> None:
        self.grid, self.stored = grid, stored
        shape = stored.lie.shape
        everywhere = whole_form(len(grid.counts))
        local = moved(grid, whole.reshape(shape), shape, everywhere, stored.lie.value).detach()
        self.shares = stored.states_split
        self.is_copied = dtype != whole.dtype
        self._room = room
        self._weight_room = local.new_zeros(room_elements(grid, stored, stored.lie.value), dtype=dtype)
        self.weight = nn.Parameter(self._weight_room[: local.numel()].view(local.shape).copy_(local))
        self.owned = self.weight
        if self.is_copied or (self.shares and stored.parts is not None):
            self.owned = nn.Parameter(self._share(local).clone())
        elif self.shares:
            self.owned = nn.Parameter(self._own(self._weight_room))
        arrived = box_of(shape, grid.counts, stored.arrived, grid.here)
        self.sums = room[: elements(arrived)].view(extents(arrived))
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
        return self._own(_padded(local.reshape(-1), self.grid.size(self.shares)))

    def _own(self, room: Tensor) -> Tensor:
        """This rank's share of a row of elements that goes into as many."""
        members = self.grid.members(self.shares)
        return room.view(len(members), -1)[members.index(self.grid.here)]

    def brought(self, used: Lie) -> Tensor:
        """The parameter as it is used; its gradient arrives in `sums`."""
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

    def await_gradient(self) -> None:
        """Have what backward passes find from now on added up, from nothing, in `sums`."""
        self.owned.grad = self._pending = None
        self.sums.zero_()
        if not self.is_copied and self.sums.shape == self.weight.shape:
            self.weight.grad = self.sums

    def receive(self, gradient: Tensor, used: Lie) -> None:
        """Take the gradient of what was gathered: scattered as the parameter is, where it has one reader; of
        several, the sum of all of theirs will be, in the dtype of what is updated."""
        if self.stored.used is None:
            with marked(TRAFFIC, GRADIENTS):
                self.sums += alone(self.grid, self._scattering(gradient.to(self.owned.dtype), used))
        elif self._pending is None:
            self._pending = gradient.to(self.owned.dtype)
        else:
            self._pending = self._pending + gradient

    def _scattering(self, gradient: Tensor, used: Lie) -> Way:
        return (yield from moving(self.grid, gradient, used.shape, used.gradient, self.stored.arrived))

    def settling(self) -> Way:
        """The gradient that arrived as the optimizer updates the parameter."""
        self.weight.grad = None
        if self._pending is not None and self.stored.used is not None:
            scattered = yield from self._scattering(self._pending, self.stored.used)
            self._pending = None
            self.sums += scattered
        gradient = self.sums
        shape, stored, arrived = self.stored.lie.shape, self.stored.lie.value, self.stored.arrived
        if self.stored.parts is not None:
            return (yield from moving(self.grid, gradient, shape, arrived, self.stored.parts, is_spare=True))
        late = tuple(axis for axis in self.shares if arrived.held[axis] == "partial")
        begin = stored.with_word(late, "partial")
        rest = tuple(axis for axis, word in enumerate(begin.held) if word == "whole" != arrived.held[axis])
        if late and late == self.shares and arrived == begin.with_word(rest, "partial"):
            share = yield from self._reducing(gradient)  # what shrinks a tensor comes first
            if rest:
                (share,) = yield self._call("all_reduce", rest, share)
            return share
        gradient = yield from moving(self.grid, gradient, shape, arrived, begin, is_spare=True)
        if late and late == self.shares:
            return (yield from self._reducing(gradient))
        if self.shares:
            gradient = yield from moving(self.grid, gradient, shape, begin, stored)
            gradient = self._share(gradient).clone()
        return gradient

    def _reducing(self, gradient: Tensor) -> Way:
        """This rank's share of the sum of what the ranks that share the states have, in the room of sums."""
        count = self.grid.size(self.shares)
        is_there = gradient is self.sums and len(self._room) % count == 0
        sent = self._room if is_there else _padded(gradient.reshape(-1), count)
        (own,) = yield self._call("reduce_scatter", self.shares, sent, (len(sent) // count,) * count)
        return self._own(self._room).copy_(own) if is_there else own

    def _call(
        self,
        kind: Collective,
        axes: tuple[int, ...],
        sent: Tensor,
        sizes: Sequence[int] = (),
        room: Tensor | None = None,
    ) -> Call:
        return Call(kind, axes, sent, prod(self.stored.lie.shape), sizes, room=room)

    def publishing(self) -> Way:
        """What ranks compute with, of the shares that all of them updated, in that dtype: put there."""
        share = self.owned.detach().to(self.weight.dtype)
        if self.shares and self.stored.parts is None:
            yield from self._gathering(share, self._weight_room)
        else:
            self.weight.copy_((yield from self._joining(share)))
        return self.weight

    def _joined(self, share: Tensor) -> Tensor:
        return alone(self.grid, self._joining(share))

    def _joining(self, share: Tensor) -> Way:
        """What all ranks of the group have, of the shares of each."""
        if not self.shares:
            return share
        shape, stored = self.stored.lie.shape, self.stored.lie.value
        if self.stored.parts is not None:
            return (yield from moving(self.grid, share, shape, self.stored.parts, stored))
        room = share.new_empty(share.numel() * self.grid.size(self.shares))
        yield from self._gathering(share, room)
        return room[: self.weight.numel()].view(self.weight.shape)

    def _gathering(self, share: Tensor, room: Tensor) -> Way:
        """The shares of all ranks of the group, put into `room`, which may have this one where it belongs."""
        sent = share.reshape(-1).clone()
        rows = yield self._call("all_gather", self.shares, sent, room=room)
        for own, row in zip(room.split(len(sent)), rows, strict=True):
            if row.untyped_storage() is not room.untyped_storage():
                own.copy_(row)
        return room

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
        whole = self._whole(self._joined(gradient))
        is_room = whole.untyped_storage() is self.sums.untyped_storage()
        return whole.clone() if is_room else whole  # the room is used again

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
    grid: Grid, program: Program, values: Mapping[str, Tensor], dtype: torch.dtype | None
) -> dict[str, Held]:
    """This rank's parts of all parameters of a program, from their whole `values`; computed with in `dtype`,
    or in their own. Sums of gradients that travel together lie one behind the other."""
    found: dict[str, Held] = {}
    for names in program.together:
        own = {name: program.parameters[name] for name in names}
        rooms = _rooms(grid, own, values)
        for name, stored in own.items():
            found[name] = Held(grid, stored, values[name], dtype or values[name].dtype, rooms[name])
    return {name: found[name] for name in program.parameters}


def _rooms(
    grid: Grid, parameters: Mapping[str, Stored], values: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Room for the gradient of each, in the dtype of its value; one piece of memory for all of a dtype."""
    found: dict[str, Tensor] = {}
    for dtype in dict.fromkeys(values[name].dtype for name in parameters):
        names = [name for name in parameters if values[name].dtype == dtype]
        sizes = [room_elements(grid, parameters[name], parameters[name].arrived) for name in names]
        memory = values[names[0]].new_zeros(sum(sizes))
        found |= zip(names, memory.split(sizes), strict=True)
    return found


def room_elements(grid: Grid, stored: Stored, form: Form) -> int:
    """How many elements this rank has of a parameter in `form`, and zeros behind them where they are to go
    into equal shares."""
    own = elements(box_of(stored.lie.shape, grid.counts, form, grid.here))
    return own + (-own % grid.size(stored.states_split) if stored.parts is None else 0)


def settle(grid: Grid, parameters: Sequence[Held]) -> None:
    """Bring the gradients that arrived to what the optimizer updates, those that need the same as one
    message."""
    gradients = together(grid, (held.settling() for held in parameters))
    for held, gradient in zip(parameters, gradients, strict=True):
        held.owned.grad = gradient


def publish(grid: Grid, parameters: Iterable[Held]) -> None:
    """Put what other ranks updated with this one's, as one message, in the dtype that is computed with."""
    apart = [held for held in parameters if held.owned is not held.weight]
    with torch.no_grad(), marked(TRAFFIC, GATHERS):
        together(grid, (held.publishing() for held in apart))


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
