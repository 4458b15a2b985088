"""Gradients between the backward passes and the optimizer: reduction, global norm and clipping.

`GradientReducer` all-reduces gradients of replicated weights once per step, overlapped with the last backward
pass. `TiedWeights` sums the gradients of tied embeddings on the first and last stage. `square_sum` and `clip`
compute the norm over all ranks. `StepResult` is what a training step returns.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.nn.utils import get_total_norm

from shardwise.runtime.private import multiply_all

# Norm and clipping


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Mean loss over the global batch, and the norm of its gradient before clipping."""

    loss: float
    gradient_norm: float


def reduce_partial_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Redistribute every gradient to its parameter's placement: partial sums over tensor-parallel ranks are
    reduced."""
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)


def local(tensor: Tensor) -> Tensor:
    """This rank's local tensor of `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def replica_count(parameter: Tensor, ranks: int) -> int:
    """Number of a stage's `ranks` that hold each element of `parameter`."""
    if not isinstance(parameter, DTensor):
        return ranks
    mesh = parameter.device_mesh
    shards = 1
    for axis, placement in enumerate(parameter.placements):
        if not isinstance(placement, Replicate):
            shards *= mesh.size(axis)
    return ranks // shards


def square_sum(parameters: Iterable[nn.Parameter], ranks: int, *, device: str) -> Tensor:
    """This rank's share of the squared norm of all gradients, which are on `device`. The shares of all ranks
    add up to it."""
    total = torch.zeros((), device=device)
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_copies.setdefault(replica_count(parameter, ranks), []).append(local(parameter.grad).float())
    for (
        many,
        gradients,
    ) in by_copies.items():  # one call for all, which saves kernel launches
        total += get_total_norm(gradients).square() / many
    return total


def clip(loss: Tensor, squares: Tensor, parameters: Iterable[nn.Parameter], max_norm: float) -> StepResult:
    """Sum the ranks' shares of the loss and of the squared gradient norm, and clip the gradients of
    `parameters` to `max_norm`."""
    sums = torch.stack((loss, squares))
    distributed.all_reduce(sums)
    norm = float(sums[1].sqrt())
    if norm > max_norm:
        scale(parameters, max_norm / norm)
    return StepResult(loss=float(sums[0]), gradient_norm=norm)


def scale(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply the gradients of `parameters` by `factor`, in place."""
    multiply_all([local(each.grad) for each in parameters if each.grad is not None], factor)


# Reductions


class TiedWeights:
    """The two copies of a tied weight, on the first and the last stage, whose gradients must be summed.

    `here` has the copies on this rank, that of the first stage first. `group` is the process group of the
    ranks that hold the copies, or None if one rank holds both.
    """

    def __init__(self, here: tuple[nn.Parameter, ...], group: distributed.ProcessGroup | None) -> None:
        self._local = here
        self._group = group

    def add_up(self) -> None:
        """Set the gradient of both copies to the sum of both. The copies start equal and stay equal."""
        if len(self._local) == 2:
            first, last = (local(weight.grad) for weight in self._local)
            first.add_(last)
            last.copy_(first)
        elif self._local:
            distributed.all_reduce(local(self._local[0].grad), group=self._group)


class GradientReducer:
    """Accumulates and all-reduces the gradients of a stage's replicated weights, block by block (like DDP's
    Reducer).

    Each block has one buffer for its gradients: they are accumulated in it, all-reduced over `group` and left
    for the optimizer. Of weights sharded over tensor-parallel ranks, it has this rank's shard; partial sums
    over these ranks stay partial.

    `blocks` are in the order in which backward passes complete them. The order must be equal on all ranks,
    since reductions follow it.
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
        # Weak reference: autograd's hooks are invisible to the cycle collector, and would keep the groups
        # alive.
        weak_hook = weakref.WeakMethod(self._on_gradient)

        def hook(parameter: Tensor, number: int) -> None:
            if (on_gradient := weak_hook()) is not None:
                on_gradient(parameter, number)

        for number, block in enumerate(self._blocks):
            for parameter in block:
                parameter.register_post_accumulate_grad_hook(partial(hook, number=number))

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """The gradient buffer of each block; empty before the first step."""
        return tuple(self._memory)

    def start(self) -> None:
        """Prepare a step, before its first backward pass: no parameter has a gradient."""
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
        """Announce the last backward pass of the step: each block is reduced as soon as its gradients are
        complete, overlapped with the rest of the pass."""
        self._missing = [len(block) for block in self._blocks]

    def reduce(self) -> None:
        """Start the reductions that have not started yet, after the last backward pass."""
        while len(self._works) < len(self._blocks):
            self._start_all_reduce()

    def finish(self) -> None:
        """Wait for all reductions and set the gradients of the parameters."""
        self.reduce()
        for work in self._works:
            if work is not None:
                work.wait()
        for parameter, place in self._place.items():
            parameter.grad = self._as_dtensor(parameter, place)

    def _as_dtensor(self, parameter: nn.Parameter, place: Tensor) -> Tensor:
        """The gradient of `parameter`, whose local tensor is `place`."""
        if not isinstance(parameter, DTensor):
            return place
        placements = self._placements.get(parameter, parameter.placements)
        return DTensor.from_local(
            place, parameter.device_mesh, placements, run_check=False,
            shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip

    def _on_gradient(self, parameter: Tensor, number: int) -> None:
        """Hook: a backward pass has computed a gradient of `parameter` in block `number`."""
        self._accumulate(parameter)
        if self._missing is not None:
            self._missing[number] -= 1
            while len(self._works) < len(self._blocks) and not self._missing[len(self._works)]:
                self._start_all_reduce()

    def _accumulate(self, parameter: Tensor) -> None:
        """Add the gradient of `parameter` to its part of the buffer."""
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
        """Start the all-reduce of the next block."""
        number = len(self._works)
        for parameter in self._blocks[number]:
            self._accumulate(parameter)  # a split backward pass calls no hooks
            if parameter in self._empty:
                self._place[parameter].zero_()
        work = distributed.all_reduce(self._memory[number], group=self._group, async_op=True)
        self._works.append(work)


def _memory_of(block: Sequence[nn.Parameter]) -> Tensor:
    first = block[0]
    total = sum(local(parameter).numel() for parameter in block)
    return torch.empty(total, dtype=first.dtype, device=first.device)
