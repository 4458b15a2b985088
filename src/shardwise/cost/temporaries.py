"""What the largest operation of a stage needs beside what is kept: its tensors, and gradients of weights that
are whole for a while."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.cost.problem import Problem
from shardwise.equations import memory

TENSOR_COPIES = 2.0
"""A tensor and its gradient: what the largest operation needs beside what is kept."""

LOGITS_COPIES = 1.0
"""The logits in fp32; their gradient takes their place."""

LOGITS_NUMBER_BYTES = 4.0
"""Of a number of these."""


@dataclass(frozen=True, slots=True)
class Temporaries:
    """Bytes that the largest operation of a layer needs, and that of the head; and the most of these and what
    reducing their gradients needs."""

    layer: Any
    head: Any
    reduced_layer: Any
    reduced_head: Any


def temporaries_of(
    problem: Problem,
    table: Any,
    *,
    largest_bytes: Any,
    logits_bytes: Any,
    layer_weights: Any,
    head_weights: Any,
) -> Temporaries:
    """Of each row of `table`.

    The gradients of a layer's weights are whole, in the dtype of the weights, before they are added up; where
    each block is reduced by itself, the head's too, and then beside the copy that goes to other ranks. Such
    software takes its loss from logits that it widens beside themselves.
    """
    recipe = problem.recipe
    at_layer, at_head = TENSOR_COPIES * largest_bytes, LOGITS_COPIES * logits_bytes
    if not problem.profile.reduces_by_block:
        own_bytes = layer_weights * recipe.weight_bytes
        return Temporaries(*(2 * (at_layer + own_bytes, at_head + own_bytes)))
    at_loss = 0.0 * at_head
    if recipe.activation_bytes < LOGITS_NUMBER_BYTES:
        # The head's own output, narrower, beside them; of the gradient it alone is left to the product.
        low_precision_bytes = logits_bytes * (recipe.activation_bytes / LOGITS_NUMBER_BYTES)
        at_loss, at_head = at_head + low_precision_bytes, low_precision_bytes
    weights_freed = has_single_backward(problem, table)
    of_blocks = []
    for work_bytes, weights in ((at_layer, layer_weights), (at_head, head_weights)):
        own_bytes = weights * recipe.weight_bytes
        reduced = memory.block_reduction_bytes(
            work_bytes, own_bytes, weights * recipe.gradient_bytes, weights_freed
        )
        of_blocks.append((work_bytes + own_bytes, reduced))
    (layer, reduced_layer), (head, reduced_head) = of_blocks
    return Temporaries(layer, np.maximum(head, at_loss), reduced_layer, np.maximum(reduced_head, at_loss))


def has_single_backward(problem: Problem, table: Any) -> Any:
    """Whether a step has one backward pass, which reduces gradients as they come: one microbatch, and no
    pipeline. 1 or 0."""
    microbatches = problem.job.global_batch_size // (table.dp * table.micro_batch_size)
    return 1 * ((microbatches == 1) & (table.pp == 1))
