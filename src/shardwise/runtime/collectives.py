"""What a rank sends and receives: every collective of what runs inside `record_collectives`, with its
bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.runtime.private import COLLECTIVE_OPERATORS, DispatchMode


@dataclass(frozen=True, slots=True, order=True)
class CollectiveRecord:
    """One kind of collective of one size.

    `nbytes` are those of the whole tensor, as the cost model counts them: what is reduced (all_reduce), what
    is joined (all_gather) or was whole before (reduce_scatter), what this rank sends in all (all_to_all) or
    to one other rank (send, recv).
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
            return NotImplemented  # what a distributed tensor does with it comes here again
        output = func(*args, **(kwargs or {}))
        if func in _MEASURED:
            kind, nbytes = _MEASURED[func]
            self.counts[CollectiveRecord(kind, nbytes(args, output))] += 1
        return output


def record_collectives() -> CollectiveRecorder:
    """A context whose `counts` are the collectives inside."""
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
