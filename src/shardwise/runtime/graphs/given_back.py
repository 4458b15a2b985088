"""Tensors that an operator's backward pass reads, given back behind its forward pass and made again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardwise.runtime.private import saving_hooks

Remake = Callable[[], Tensor]
"""Makes a tensor again, as it was."""


class _Rematerialized:
    """A tensor that is made when it is first read, and let go when it was read as often as it was kept."""

    def __init__(self, make: Remake) -> None:
        self._make, self._uses_left = make, 0
        self._made: Tensor | None = None

    def keep(self) -> None:
        self._uses_left += 1

    def read(self) -> Tensor:
        made = self._make() if self._made is None else self._made
        self._uses_left -= 1
        self._made = made if self._uses_left > 0 else None
        return made


@dataclass(frozen=True, slots=True)
class _View:
    """A view of a tensor that is made later."""

    of: _Rematerialized
    size: Sequence[int]
    stride: Sequence[int]
    offset: int


@contextmanager
def rematerialize(tensors: Sequence[tuple[Tensor, Remake]]) -> Iterator[None]:
    """What runs inside keeps none of these tensors, nor views of them, for its backward pass, where they are
    made again. (What an operator makes of them, such as a copy in another order, it keeps.) All else is kept
    as it would be without, by a recomputation as it wants."""
    outer_hooks = saving_hooks()
    later: Mapping[int, _Rematerialized] = {
        id(tensor.untyped_storage()): _Rematerialized(make) for tensor, make in tensors
    }

    def pack(tensor: Tensor) -> Any:
        own = later.get(id(tensor.untyped_storage()))
        if own is None:
            # what is kept of a result must not hold what made it
            return tensor.detach() if outer_hooks is None else outer_hooks[0](tensor)
        own.keep()
        return _View(own, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, _View):
            return packed.of.read().as_strided(packed.size, packed.stride, packed.offset)
        found: Tensor = packed if outer_hooks is None else outer_hooks[1](packed)
        return found

    with saved_tensors_hooks(pack, unpack):
        yield
