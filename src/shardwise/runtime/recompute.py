"""Layers that keep less for the backward pass and compute the rest again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardwise.runtime.private import ALL_TO_ALL, DispatchMode
from shardwise.strategy import Strategy

Forward = Callable[..., Tensor]

_KEPT = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    ALL_TO_ALL,
)
"""Operators whose outputs selective recomputation keeps: matrix products, and tokens sent to experts."""


def recomputed(forward: Forward, kind: str) -> Forward:
    """`forward` that keeps its input alone (`full`), or its input and the outputs of its matrix products
    (`selective`: norms, attention and activation functions are computed again)."""
    if kind == "full":
        return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
    return partial(
        checkpoint, forward, use_reentrant=False, preserve_rng_state=False, context_fn=_kept_products
    )


def _kept_products() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    kept: list[Tensor] = []
    return _Keeping(kept), _Replaying(kept)


class _Keeping(DispatchMode):
    """Keeps the outputs of the operators in `_KEPT`."""

    def __init__(self, kept: list[Tensor]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in _KEPT:
            self._kept.append(output.detach())
        return output


class _Replaying(DispatchMode):
    """Gives back what was kept, in its order, from the start of every pass: a backward pass in two halves
    computes again twice (PyTorch's own selective contexts serve once)."""

    def __init__(self, kept: list[Tensor]) -> None:
        super().__init__()
        self._kept = kept
        self._next = 0

    def __enter__(self) -> Any:
        self._next = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _KEPT:
            return func(*args, **(kwargs or {}))
        self._next += 1
        return self._kept[self._next - 1].detach()


def recompute_kinds(strategy: Strategy, layers: int) -> tuple[str, ...]:
    """What each of a stage's `layers` recomputes: the first `recompute_layers` of them everything, or all of
    them what selective recomputation does."""
    if strategy.recompute == "full":
        return tuple("full" if index < strategy.recompute_layers else "none" for index in range(layers))
    return (strategy.recompute,) * layers
