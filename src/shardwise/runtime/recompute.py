"""Layers that keep less for the backward pass and compute the rest again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise.strategy import Strategy

Forward = Callable[..., Tensor]

_MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


def recomputed(forward: Forward, kind: str) -> Forward:
    """`forward` that keeps its input alone (`full`), or its input and the outputs of its matrix products
    (`selective`: norms, attention and activation functions are computed again)."""
    if kind == "full":
        return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
    contexts = partial(create_selective_checkpoint_contexts, _keeps_products)
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _keeps_products(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _MATMULS else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_kinds(strategy: Strategy, layers: int) -> tuple[str, ...]:
    """What each of a stage's `layers` recomputes: the first `recompute_layers` of them everything, or all of
    them what selective recomputation does."""
    if strategy.recompute == "full":
        return tuple("full" if index < strategy.recompute_layers else "none" for index in range(layers))
    return (strategy.recompute,) * layers
