"""Activation recomputation: layers that save fewer activations and recompute the rest in the backward pass.

`full` saves a layer's input; `selective` also saves the outputs of matrix products and of all-to-alls.
"""

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
"""Contexts of a layer's forward pass and of its recomputation."""

_SAVED_OPERATORS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    ALL_TO_ALL,
)
"""Operators whose outputs selective recomputation saves: products with weights, and tokens sent to experts.
Batched products (`bmm`) are inside attention and are recomputed."""


class ActivationStore(Protocol):
    """Where saved activations are until the backward pass: on the device, or offloaded."""

    def pack(self, tensor: Tensor) -> Any: ...

    def unpack(self, saved: Any) -> Tensor: ...


class _OnDevice:
    """Leaves saved activations on the device."""

    def pack(self, tensor: Tensor) -> Any:
        return tensor

    def unpack(self, saved: Any) -> Tensor:
        found: Tensor = saved
        return found


def _full_contexts(store: ActivationStore) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """No extra contexts: `checkpoint` saves the input like any saved tensor."""
    return nullcontext(), nullcontext()


def _selective_contexts(
    store: ActivationStore,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Save and reuse the outputs of `_SAVED_OPERATORS`.

    PyTorch's own contexts count all operators. They fail for a layer with a part that `fully_shard` gathers,
    since it records profiler events that differ between the two passes.
    """
    saved: deque[Any] = deque()
    return _SaveOutputs(saved, store), _ReuseOutputs(saved, store)


class _SaveOutputs(DispatchMode):
    """Saves the outputs of the operators in `_SAVED_OPERATORS`."""

    def __init__(self, saved: deque[Any], store: ActivationStore) -> None:
        super().__init__()
        self._saved, self._store = saved, store

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in _SAVED_OPERATORS:
            own = arrived(output) if func is ALL_TO_ALL else output  # wait before it can be copied
            self._saved.append(self._store.pack(own.detach()))
        return output


class _ReuseOutputs(DispatchMode):
    """Returns saved outputs, in order, instead of computing them."""

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
    """`forward` with activation recomputation.

    `full` saves only the input. `selective` also saves the outputs of matrix products in `store`, and
    recomputes norms, attention and activation functions. With `is_split`, the backward pass has separate
    passes for input and weight gradients, with one autograd call per group of parameters. PyTorch's
    `checkpoint` would recompute the layer in each of these calls.
    """
    contexts: Contexts = partial(_CONTEXTS[kind], store or _OnDevice())
    if is_split:
        return partial(_recomputed_once, forward, contexts)
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


class _AllRecomputed(Exception):
    """Raised when recomputation has produced all tensors that the backward pass needs."""


def _recomputed_once(forward: Forward, contexts: Contexts, *inputs: Any) -> Tensor:
    """`forward` whose saved tensors are recomputed once, when the first of them is needed, and then kept
    until none is needed."""
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
    """The tensor, detached from the autograd graph; other values as they are."""
    if isinstance(detached_inputs, Tensor):
        return detached_inputs.detach().requires_grad_(detached_inputs.requires_grad)
    return detached_inputs


def _unreachable(_: None) -> Tensor:
    raise AssertionError("the recomputed graph has no backward pass of its own")


def recompute_kinds(strategy: Strategy, layers: int) -> tuple[str, ...]:
    """Kind of recomputation of each of a stage's `layers`: with `full`, the first `recompute_layers` of them;
    else the strategy's kind for all."""
    if strategy.recompute == "full":
        return tuple("full" if index < strategy.recompute_layers else "none" for index in range(layers))
    return (strategy.recompute,) * layers
