"""Operator kinds: the tensors, work, saved tensors and sharding rules of each (`KINDS`)."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.graph.kinds.attention import ATTENTION
from shardwise.graph.kinds.convolution import CONVOLUTION, POOL
from shardwise.graph.kinds.kind import Attribute, OperatorKind
from shardwise.graph.kinds.losses import BINARY_CROSS_ENTROPY, CROSS_ENTROPY, MEAN_SQUARE
from shardwise.graph.kinds.normalization import BATCH_NORM, GROUP_NORM, LAYER_NORM, REDUCE, RMS_NORM, SOFTMAX
from shardwise.graph.kinds.pointwise import ELEMENTWISE, ROTARY
from shardwise.graph.kinds.products import EINSUM, EMBEDDING, LINEAR, MATMUL
from shardwise.graph.kinds.recurrent import GRU, GRU_CELL, LSTM, LSTM_CELL
from shardwise.graph.kinds.shapes import CONCAT, RESHAPE, SLICE, TRANSPOSE

__all__ = ["KINDS", "Attribute", "OperatorKind"]

KINDS: Mapping[str, OperatorKind] = {
    kind.name: kind
    for kind in (
        EINSUM, MATMUL, LINEAR, CONVOLUTION, POOL, LSTM, GRU, LSTM_CELL, GRU_CELL, EMBEDDING, ATTENTION,
        ELEMENTWISE, ROTARY, LAYER_NORM, RMS_NORM, BATCH_NORM, GROUP_NORM, SOFTMAX, REDUCE, RESHAPE,
        TRANSPOSE, CONCAT, SLICE,
        CROSS_ENTROPY, MEAN_SQUARE, BINARY_CROSS_ENTROPY,
    )
}  # fmt: skip
"""Operator kinds by name."""
