"""Tensors that an operator's backward pass reads, given back behind its forward pass and made again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardwise.runtime.private import saving_hooks

Made = Callable[[], Tensor]
"""Makes a tensor again, as it was."""


class _Later:
    """A tensor that is made when it is first read, and let go when it was read as often as it was kept."""

    def __init__(self, make: Made) -> None:
        self._make, self._kept = make, 0
        self._made: Tensor | None = None

    def keep(self) -> None:
        self._kept += 1

    def read(self) -> Tensor:
        made = self._make() if self._made is None else self._made
        self._kept -= 1
        self._made = made if self._kept > 0 else None
        return made


@dataclass(frozen=True, slots=True)
class _View:
    """A view of a tensor that is made later."""

    of: _Later
    size: Sequence[int]
    stride: Sequence[int]
    offset: int


@contextmanager
def given_back(tensors: Sequence[tuple[Tensor, Made]]) -> Iterator[None]:
    """What runs inside keeps none of these tensors, nor views of them, for its backward pass, where they are
    made again. (What an operator makes of them, such as a copy in another order, it keeps.) All else is kept
    as it would be without, by a recomputation as it wants."""
    around = saving_hooks()
    later: Mapping[int, _Later] = {id(tensor.untyped_storage()): _Later(make) for tensor, make in tensors}

    def pack(tensor: Tensor) -> Any:
        own = later.get(id(tensor.untyped_storage()))
        if own is None:
            # what is kept of a result must not hold what made it
            return tensor.detach() if around is None else around[0](tensor)
        own.keep()
        return _View(own, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, _View):
            return kept.of.read().as_strided(kept.size, kept.stride, kept.offset)
        found: Tensor = kept if around is None else around[1](kept)
        return found

    with saved_tensors_hooks(pack, unpack):
        yield
