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
    """Whole copies that sharded parameters need while they are used: `prefetch` layers beside their shards.

    0 where shard is 1, since then the parameters are whole already. (ZeRO-3: Rajbhandari et al. 2020.)
    """
    return prefetch * layer_elements * element_bytes * np.minimum(shard - 1, 1)


def recomputed_share(recompute_layers: Quantity, stage_layers: Quantity) -> Quantity:
    """Share of a stage's layers that are recomputed: min(r, l) / l; 0 for a stage without layers."""
    return np.minimum(recompute_layers, stage_layers) / np.maximum(stage_layers, 1)


def saved_activation_bytes(saved_bytes: Quantity, input_bytes: Quantity, share: Quantity) -> Quantity:
    """Activations kept by a stage per microbatch: a recomputed layer keeps its input only (Chen et al. 2016).

    kept_bytes and input_bytes are sums over the stage's layers; share is the recomputed share of them.
    """
    return saved_bytes - share * (saved_bytes - input_bytes)


def reserved_bytes(allocated_bytes: Quantity, fragmentation_ratio: Quantity) -> Quantity:
    """What the allocator holds: allocated * (1 + ratio)."""
    return allocated_bytes * (1.0 + fragmentation_ratio)


def block_reduction_bytes(
    work_bytes: Quantity, gradient_bytes: Quantity, sent_bytes: Quantity, weights_freed: Quantity
) -> Quantity:
    """What a block needs beside what is kept, where its gradients are reduced as soon as they are there.

    Either its largest operation has its tensors beside the whole gradients of the block's weights, or these
    are copied into what is sent; where the weights, of as many bytes, are `weights_freed` before (1, else 0),
    in their place. (PyTorch's fully_shard: `foreach_reduce` in _fsdp_collectives.py.)"""
    return np.maximum(work_bytes + gradient_bytes, sent_bytes + gradient_bytes * (1 - weights_freed))
