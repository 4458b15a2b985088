"""A recorder of the collectives of a step: `record_collectives` counts all collectives of this thread with
their bytes, as the cost model counts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.runtime.private import DispatchMode

_c10d, _functional = torch.ops.c10d, torch.ops._c10d_functional
COLLECTIVE_OPERATORS = (
    # Of these, the first operand is the output buffer, and the second the input.
    (_c10d._allgather_base_.default, "all_gather", "first"),
    (_c10d.allgather_.default, "all_gather", "first"),
    (_c10d._reduce_scatter_base_.default, "reduce_scatter", "second"),
    (_c10d.reduce_scatter_.default, "reduce_scatter", "second"),
    (_c10d.alltoall_base_.default, "all_to_all", "second"),
    (_c10d.allreduce_.default, "all_reduce", "first"),
    (_c10d.broadcast_.default, "broadcast", "first"),
    (_c10d.send.default, "send", "first"),
    (_c10d.recv_.default, "recv", "first"),
    # These return their output.
    (_functional.all_gather_into_tensor.default, "all_gather", "output"),
    (_functional.reduce_scatter_tensor.default, "reduce_scatter", "first"),
    (_functional.all_to_all_single.default, "all_to_all", "first"),
    (_functional.all_reduce.default, "all_reduce", "first"),
)
"""Collective operators with their kind, and which operand (or the output) is the full tensor."""


@dataclass(frozen=True, slots=True, order=True)
class CollectiveRecord:
    """One kind of collective of one size.

    `nbytes` are those of the full tensor, as the cost model counts them: the reduced tensor (all_reduce), the
    gathered one (all_gather), the one before scattering (reduce_scatter), what this rank sends in total
    (all_to_all), or to one other rank (send, recv).
    """

    kind: str
    nbytes: int


class CollectiveRecorder(DispatchMode):
    """Counts the collectives that this thread starts."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[CollectiveRecord] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor dispatches its local operators here again
        output = func(*args, **(kwargs or {}))
        if func in _MEASURED:
            kind, nbytes = _MEASURED[func]
            self.counts[CollectiveRecord(kind, nbytes(args, output))] += 1
        return output


def record_collectives() -> CollectiveRecorder:
    """A context whose `counts` has the collectives inside."""
    return CollectiveRecorder()


def _bytes(of: Any) -> int:
    """Bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(of, Tensor):
        return of.numel() * of.element_size()
    return sum(map(_bytes, of))


def _first(args: Any, output: Any) -> int:
    return _bytes(args[0])


def _second(args: Any, output: Any) -> int:
    return _bytes(args[1])


def _output(args: Any, output: Any) -> int:
    return _bytes(output)


_SIZED: dict[str, Callable[[Any, Any], int]] = {"first": _first, "second": _second, "output": _output}
_MEASURED = {operator: (kind, _SIZED[whole]) for operator, kind, whole in COLLECTIVE_OPERATORS}
