"""Memory of one rank, in bytes."""

from __future__ import annotations

import numpy as np

from shardwise.equations.quantity import Quantity


def sharded_bytes(elements: Quantity, element_bytes: Quantity, shard: Quantity) -> Quantity:
    """elements * element_bytes / shard: an even share of a sharded state."""
    return elements * element_bytes / shard


def gathered_bytes(
    layer_elements: Quantity, element_bytes: Quantity, shard: Quantity, prefetch: Quantity
) -> Quantity:
    """Bytes of the unsharded copies of sharded parameters while they are used, for `prefetch` layers.

    0 where shard is 1: the parameters are not sharded then. (ZeRO-3: Rajbhandari et al. 2020.)
    """
    return prefetch * layer_elements * element_bytes * np.minimum(shard - 1, 1)


def recomputed_share(recompute_layers: Quantity, stage_layers: Quantity) -> Quantity:
    """Share of a stage's layers that are recomputed: min(r, l) / l; 0 for a stage without layers."""
    return np.minimum(recompute_layers, stage_layers) / np.maximum(stage_layers, 1)


def saved_activation_bytes(saved_bytes: Quantity, input_bytes: Quantity, share: Quantity) -> Quantity:
    """Saved activations of a stage per micro-batch; a recomputed layer saves its input only (Chen et al.
    2016).

    `saved_bytes` and `input_bytes` are sums over the stage's layers; `share` is the recomputed share of them.
    """
    return saved_bytes - share * (saved_bytes - input_bytes)


def reserved_bytes(allocated_bytes: Quantity, fragmentation_ratio: Quantity) -> Quantity:
    """Bytes that the allocator reserves: allocated * (1 + ratio)."""
    return allocated_bytes * (1.0 + fragmentation_ratio)


def block_reduction_bytes(
    work_bytes: Quantity, gradient_bytes: Quantity, sent_bytes: Quantity, weights_freed: Quantity
) -> Quantity:
    """Bytes of a block in addition to its saved activations, where software reduces gradients block by block.

    The larger of two moments counts. First, the largest operation has its tensors (`work_bytes`) and the
    unsharded gradients of the block's weights (`gradient_bytes`). Second, these gradients are copied into the
    reduction buffer (`sent_bytes`). `weights_freed` is 1 where the weights, of equal bytes, are freed before
    that, else 0. (PyTorch's fully_shard: `foreach_reduce` in _fsdp_collectives.py.)
    """
    return np.maximum(work_bytes + gradient_bytes, sent_bytes + gradient_bytes * (1 - weights_freed))
