"""Gradients of weights of which data ranks hold the same: added up once per step, where they lie."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from shardwise.runtime.gradients import local


class GradientReducer:
    """The weights of a stage in blocks, each with one piece of memory for its gradients, in which they are
    accumulated, reduced over `group` and left for the optimizer. Of weights that tensor ranks divide it is
    this rank's part; gradients of it that are partial sums over them stay so.

    `blocks` are in the order in which backward passes are done with them, the same on every rank; so are the
    reductions.
    """

    def __init__(self, blocks: Iterable[Sequence[nn.Parameter]], group: ProcessGroup) -> None:
        self._group = group
        self._blocks: list[list[nn.Parameter]] = []
        self._memory: list[Tensor] = []
        self._place: dict[nn.Parameter, Tensor] = {}
        self._placements: dict[nn.Parameter, Sequence[Placement]] = {}
        self._empty: set[nn.Parameter] = set()
        self._missing: list[int] | None = None
        self._works: list[distributed.Work | None] = []
        seen: set[nn.Parameter] = set()
        for block in blocks:
            new = [parameter for parameter in dict.fromkeys(block) if parameter not in seen]
            seen.update(new)
            if new:
                self._blocks.append(new)
        # Weakly: autograd holds hooks where no collection of cycles finds them, and with them the groups.
        weak_hook = weakref.WeakMethod(self._on_gradient)

        def hook(parameter: Tensor, number: int) -> None:
            if (on_gradient := weak_hook()) is not None:
                on_gradient(parameter, number)

        for number, block in enumerate(self._blocks):
            for parameter in block:
                parameter.register_post_accumulate_grad_hook(partial(hook, number=number))

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """The gradients of each block, from the first step on."""
        return tuple(self._memory)

    def start(self) -> None:
        """Before the first backward pass of a step: nothing has a gradient."""
        if not self._memory:
            self._memory = [_memory_of(block) for block in self._blocks]
            for block, memory in zip(self._blocks, self._memory, strict=True):
                parts = memory.split([local(parameter).numel() for parameter in block])
                for parameter, part in zip(block, parts, strict=True):
                    self._place[parameter] = part.view_as(local(parameter))
        self._empty = set(self._place)
        self._missing = None
        self._works = []

    def expect_last_backward(self) -> None:
        """The coming backward pass is the last of the step: blocks are reduced when their gradients are
        there, beside the rest of it."""
        self._missing = [len(block) for block in self._blocks]

    def reduce(self) -> None:
        """All backward passes are done: begin the reductions that have not begun."""
        while len(self._works) < len(self._blocks):
            self._start_all_reduce()

    def finish(self) -> None:
        """Until gradients are whole sums, which the parameters have then."""
        self.reduce()
        for work in self._works:
            if work is not None:
                work.wait()
        for parameter, place in self._place.items():
            parameter.grad = self._as_dtensor(parameter, place)

    def _as_dtensor(self, parameter: nn.Parameter, place: Tensor) -> Tensor:
        """The gradient of `parameter` of which this rank has `place`."""
        if not isinstance(parameter, DTensor):
            return place
        placements = self._placements.get(parameter, parameter.placements)
        return DTensor.from_local(
            place, parameter.device_mesh, placements, run_check=False,
            shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip

    def _on_gradient(self, parameter: Tensor, number: int) -> None:
        """A backward pass has a gradient of `parameter`, of this block."""
        self._accumulate(parameter)
        if self._missing is not None:
            self._missing[number] -= 1
            while len(self._works) < len(self._blocks) and not self._missing[len(self._works)]:
                self._start_all_reduce()

    def _accumulate(self, parameter: Tensor) -> None:
        """Add the gradient of `parameter` to its place."""
        place, grad = self._place[parameter], parameter.grad
        if grad is None:
            return
        if isinstance(grad, DTensor):
            self._placements[parameter] = grad.placements
        if parameter in self._empty:
            self._empty.remove(parameter)
            place.copy_(local(grad))
        else:
            place.add_(local(grad))
        parameter.grad = None

    def _start_all_reduce(self) -> None:
        """Begin the reduction of the next block."""
        number = len(self._works)
        for parameter in self._blocks[number]:
            self._accumulate(parameter)  # of a backward pass in two parts, which tells nobody
            if parameter in self._empty:
                self._place[parameter].zero_()
        work = distributed.all_reduce(self._memory[number], group=self._group, async_op=True)
        self._works.append(work)


def _memory_of(block: Sequence[nn.Parameter]) -> Tensor:
    first = block[0]
    total = sum(local(parameter).numel() for parameter in block)
    return torch.empty(total, dtype=first.dtype, device=first.device)
