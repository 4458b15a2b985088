"""Layers that keep less for the backward pass and compute the rest again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from shardwise.runtime.private import ALL_TO_ALL, DispatchMode, arrived
from shardwise.strategy import Strategy

Forward = Callable[..., Tensor]

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""What the forward pass of a layer is in, and what it is in when it is computed again."""

_SAVED_OPERATORS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    ALL_TO_ALL,
)
"""Operators whose outputs selective recomputation keeps: products with weights, and tokens sent to experts.
(Products of many matrices at once are those inside attention.)"""


class ActivationStore(Protocol):
    """Where what is kept lies until the backward pass."""

    def pack(self, tensor: Tensor) -> Any: ...

    def unpack(self, saved: Any) -> Tensor: ...


class _OnDevice:
    """The device: tensors stay as they are."""

    def pack(self, tensor: Tensor) -> Any:
        return tensor

    def unpack(self, saved: Any) -> Tensor:
        found: Tensor = saved
        return found


def _full_contexts(store: ActivationStore) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Its input is kept by `checkpoint`, as autograd keeps tensors."""
    return nullcontext(), nullcontext()


def _selective_contexts(
    store: ActivationStore,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """PyTorch's own contexts count all operators, and refuse a layer with a part that `fully_shard` gathers:
    it notes for the profiler what it does, which is not the same in both passes."""
    saved: deque[Any] = deque()
    return _SaveOutputs(saved, store), _ReuseOutputs(saved, store)


class _SaveOutputs(DispatchMode):
    """Keeps the outputs of the operators in `_SAVED_OPERATORS`."""

    def __init__(self, saved: deque[Any], store: ActivationStore) -> None:
        super().__init__()
        self._saved, self._store = saved, store

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in _SAVED_OPERATORS:
            own = arrived(output) if func is ALL_TO_ALL else output  # before it is copied anywhere
            self._saved.append(self._store.pack(own.detach()))
        return output


class _ReuseOutputs(DispatchMode):
    """Gives back what was kept, in its order."""

    def __init__(self, saved: deque[Any], store: ActivationStore) -> None:
        super().__init__()
        self._saved, self._store = saved, store

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _SAVED_OPERATORS:
            return func(*args, **(kwargs or {}))
        return self._store.unpack(self._saved.popleft()).detach()


_CONTEXTS: dict[str, Callable[[ActivationStore], Any]] = {
    "full": _full_contexts,
    "selective": _selective_contexts,
}


def recomputed(
    forward: Forward, kind: str, *, is_split: bool, store: ActivationStore | None = None
) -> Forward:
    """`forward` that keeps its input alone (`full`), or its input and the outputs of its matrix products
    (`selective`: norms, attention and activation functions are computed again), these in `store`.

    A backward pass that `is_split`, for inputs first and for weights later, calls autograd for each group of
    parameters; PyTorch's own `checkpoint` would compute a layer again in each of these calls.
    """
    contexts: Contexts = partial(_CONTEXTS[kind], store or _OnDevice())
    if is_split:
        return partial(_recomputed_once, forward, contexts)
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


class _AllRecomputed(Exception):
    """All that a backward pass needs is there."""


def _recomputed_once(forward: Forward, contexts: Contexts, *inputs: Any) -> Tensor:
    """`forward` of some tensors, whose saved tensors are made again when the first of them is needed, and
    kept until none is."""
    first, again = contexts()
    count = 0
    found: list[Tensor] = []
    detached_inputs = [_detached(each) for each in inputs]

    def pack_index(_: Tensor) -> int:
        nonlocal count
        count += 1
        return count - 1

    def keep(tensor: Tensor) -> None:
        found.append(tensor.detach())
        if len(found) == count:
            raise _AllRecomputed

    def unpack_index(place: int) -> Tensor:
        if not found:
            try:
                with torch.enable_grad(), again, saved_tensors_hooks(keep, _unreachable):
                    forward(*detached_inputs)
            except _AllRecomputed:
                pass
            detached_inputs.clear()
        return found[place]

    with saved_tensors_hooks(pack_index, unpack_index), first:
        return forward(*inputs)


def _detached(detached_inputs: Any) -> Any:
    """The same tensors, without what they were made of."""
    if isinstance(detached_inputs, Tensor):
        return detached_inputs.detach().requires_grad_(detached_inputs.requires_grad)
    return detached_inputs


def _unreachable(_: None) -> Tensor:
    raise AssertionError("what is computed again has no backward pass of its own")


def recompute_kinds(strategy: Strategy, layers: int) -> tuple[str, ...]:
    """What each of a stage's `layers` recomputes: the first `recompute_layers` of them everything, or all of
    them what selective recomputation does."""
    if strategy.recompute == "full":
        return tuple("full" if index < strategy.recompute_layers else "none" for index in range(layers))
    return (strategy.recompute,) * layers
