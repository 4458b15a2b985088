"""Gradients between the backward passes and the optimizer: sums that are still due, and their norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import get_total_norm

from shardwise.runtime.private import multiply_all
from shardwise.runtime.result import StepResult


def reduce_partial_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Give every gradient the placement of its parameter: partial sums over tensor ranks are added up."""
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def replica_count(parameter: Tensor, ranks: int) -> int:
    """On how many of a stage's `ranks` each element of `parameter` lies."""
    if not isinstance(parameter, DTensor):
        return ranks
    mesh = parameter.device_mesh
    shards = 1
    for axis, placement in enumerate(parameter.placements):
        if not isinstance(placement, Replicate):
            shards *= mesh.size(axis)
    return ranks // shards


def square_sum(parameters: Iterable[nn.Parameter], ranks: int, *, device: str) -> Tensor:
    """This rank's share of the sum of the squares of all gradients, which lie on `device`: over all ranks,
    shares add up to it."""
    total = torch.zeros((), device=device)
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_copies.setdefault(replica_count(parameter, ranks), []).append(local(parameter.grad).float())
    for (
        many,
        gradients,
    ) in by_copies.items():  # all of them at once: devices wait for the host between kernels
        total += get_total_norm(gradients).square() / many
    return total


def clip(loss: Tensor, squares: Tensor, parameters: Iterable[nn.Parameter], max_norm: float) -> StepResult:
    """Add up this rank's shares of the loss and of the squares of all gradients over all ranks, and scale the
    gradients of `parameters` where their norm is above `max_norm`."""
    sums = torch.stack((loss, squares))
    distributed.all_reduce(sums)
    norm = float(sums[1].sqrt())
    if norm > max_norm:
        scale(parameters, max_norm / norm)
    return StepResult(loss=float(sums[0]), gradient_norm=norm)


def scale(parameters: Iterable[nn.Parameter], factor: float) -> None:
    multiply_all([local(each.grad) for each in parameters if each.grad is not None], factor)


class TiedWeights:
    """Two copies of one weight, on the first and on the last stage, whose gradients are one sum.

    `here` are those of the copies that this rank holds, the first stage's first; `group` joins the ranks that
    hold them where there are two.
    """

    def __init__(self, here: tuple[nn.Parameter, ...], group: distributed.ProcessGroup | None) -> None:
        self._local = here
        self._group = group

    def add_up(self) -> None:
        """Both copies get the sum of both gradients; they have been equal and stay so."""
        if len(self._local) == 2:
            first, last = (local(weight.grad) for weight in self._local)
            first.add_(last)
            last.copy_(first)
        elif self._local:
            distributed.all_reduce(local(self._local[0].grad), group=self._group)
