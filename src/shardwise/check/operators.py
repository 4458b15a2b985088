"""Widths, rows, and the seconds of one operator (docs/concepts/cost-model.md, sections 6 and 7)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.check.figures import Figures
from shardwise.check.rows import Column, StrategyRows
from shardwise.model import Experts
from shardwise.operators import (
    Attention,
    Extent,
    GroupedMatmul,
    Lookup,
    Loss,
    Matmul,
    Operator,
    Pointwise,
    Saved,
    Weight,
)

SAVED_BYTES = {"fp32": 4, "mask": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSizes:
    """One block on every row: how many rows of data and how much of each width a rank has."""

    figures: Figures
    rows: StrategyRows
    experts: Experts | None

    @property
    def tokens(self) -> Column:
        """Tokens of a rank per microbatch."""
        return self.rows.micro_batch_size * self.figures.job.seq_len / self.rows.cp

    def count(self, name: str) -> Column:
        """Rows of data of a rank per microbatch: `tokens`, `head`, `sequence` or `routed`."""
        if name == "sequence":
            return self.tokens / np.where(self.rows.sequence_parallel, self.rows.tp, 1)
        if name == "routed" and self.experts is not None:
            factor = self.experts.capacity_factor
            load = self.figures.job.expert_imbalance if factor is None else factor
            return self.tokens * self.experts.top_k * load * self.rows.etp / self.rows.tp
        return self.tokens

    def width(self, extent: Extent) -> Column:
        """Elements of a rank along an extent; may be a fraction."""
        if extent.role == "whole":
            return extent.size
        if extent.role == "expert_ffn":
            return extent.size / self.rows.etp
        if extent.role == "kv_heads":
            return extent.size / np.minimum(self.rows.tp, self.figures.model.kv_heads)
        return extent.size / self.rows.tp

    def hidden_bytes(self, name: str) -> Column:
        """Bytes of a hidden state of these rows."""
        return self.count(name) * self.figures.model.hidden * self.figures.recipe.activation_bytes

    def weight_elements(self, weight: Weight) -> Column:
        """Elements of a weight on a rank."""
        elements: Column = 1
        for extent in weight.shape:
            elements = elements * self.width(extent)
        return elements * weight.experts / self.rows.ep if weight.experts else elements

    def saved_bytes(self, saved: Saved, operator: Operator) -> Column:
        """Bytes on a rank, per microbatch, of a tensor that an operator saves."""
        rows = saved.rows
        if self.figures.profile.keeps_gathered_inputs and isinstance(operator, Matmul):
            rows = operator.rows
        recipe = self.figures.recipe
        each = {"compute": recipe.activation_bytes, "operand": recipe.operand_bytes, **SAVED_BYTES}[
            saved.dtype
        ]
        return self.count(rows) * self.width(saved.width) * each


@dataclass(frozen=True, slots=True)
class KernelSeconds:
    """One operator: forward, gradient of its input, gradient of its weights."""

    forward: Column
    input: Column
    weight: Column


def operator_seconds(operator: Operator, sizes: LocalSizes) -> KernelSeconds:
    """Seconds of the operator on every row."""
    zero = 0.0 * sizes.tokens
    rows = sizes.count(operator.rows)
    each = sizes.figures.recipe.activation_bytes
    match operator:
        case Matmul():
            k, n = sizes.width(operator.k), sizes.width(operator.n)
            return KernelSeconds(
                _matmul_s(sizes, rows, n, k) + _cast_s(sizes, rows * k),
                _matmul_s(sizes, rows, k, n) + _cast_s(sizes, rows * n),
                _matmul_s(sizes, k, n, rows),
            )
        case GroupedMatmul():
            return _grouped_matmul_seconds(operator, sizes)
        case Attention():
            return _attention_seconds(operator, sizes)
        case Pointwise():
            forward = sum((sizes.width(extent) for extent in operator.forward), start=zero)
            backward = sum((sizes.width(extent) for extent in operator.backward), start=zero)
            nbytes = rows * (each * sizes.figures.profile.pointwise_passes)
            return KernelSeconds(
                _memory_bound_s(sizes, nbytes * forward), _memory_bound_s(sizes, nbytes * backward), zero
            )
        case Lookup():
            elements = rows * sizes.width(operator.width)
            return KernelSeconds(
                _memory_bound_s(sizes, 2 * elements * each),
                zero,
                _memory_bound_s(sizes, elements * (each + 8)),
            )
        case Loss():
            logits = 4 * rows * sizes.width(operator.classes)
            return KernelSeconds(_memory_bound_s(sizes, 3 * logits), _memory_bound_s(sizes, 2 * logits), zero)


def _memory_bound_s(sizes: LocalSizes, nbytes: Column) -> Column:
    """A kernel that is bound by the memory."""
    half = sizes.figures.efficiency.memory.half_bytes
    transfer = (nbytes + half) / sizes.figures.memory_bytes_per_s
    return sizes.figures.efficiency.launch_s + np.where(nbytes > 0, transfer, 0.0)


def _matmul_efficiency(sizes: LocalSizes, m: Column, n: Column, k: Column) -> Column:
    """The share of the peak that [m, k] x [k, n] reaches."""
    curve = sizes.figures.efficiency.matmul

    def fill(tile_m: float, tile_n: float) -> Column:
        waves = np.ceil(np.ceil(m / tile_m) * np.ceil(n / tile_n) / curve.units)
        return m * n / (waves * curve.units * tile_m * tile_n)

    large = fill(curve.tile_m, curve.tile_n)
    small = curve.small_tile_fraction * fill(curve.tile_m / 2, curve.tile_n / 2)
    return curve.peak_fraction * k / (k + curve.k_half) * np.maximum(large, small)


def _matmul_s(sizes: LocalSizes, m: Column, n: Column, k: Column) -> Column:
    """[m, k] x [k, n]."""
    figures = sizes.figures
    arithmetic = 2 * m * n * k / (figures.matmul_flop_per_s * _matmul_efficiency(sizes, m, n, k))
    nbytes = (m * k + k * n + m * n) * figures.recipe.activation_bytes
    return figures.efficiency.launch_s + np.maximum(arithmetic, nbytes / figures.memory_bytes_per_s)


def _cast_s(sizes: LocalSizes, elements: Column) -> Column:
    """Elements brought into the dtype of matmuls, where it is another."""
    each = sizes.figures.recipe.cast_bytes
    return _memory_bound_s(sizes, each * elements) if each else 0.0 * elements


def _grouped_matmul_seconds(operator: GroupedMatmul, sizes: LocalSizes) -> KernelSeconds:
    figures, curve = sizes.figures, sizes.figures.efficiency.matmul
    grouped = figures.efficiency.grouped_matmul
    rows, k, n = sizes.count(operator.rows), sizes.width(operator.k), sizes.width(operator.n)
    local = operator.experts / sizes.rows.ep
    tokens = rows / local
    nbytes = (rows * k + rows * n + local * k * n) * figures.recipe.activation_bytes
    of_plain = grouped.fraction * tokens / (tokens + grouped.tokens_half)

    def seconds(inner: Column) -> Column:
        efficiency = curve.peak_fraction * of_plain * inner / (inner + curve.k_half)
        arithmetic = 2 * rows * n * k / (figures.matmul_flop_per_s * efficiency)
        return figures.efficiency.launch_s + np.maximum(arithmetic, nbytes / figures.memory_bytes_per_s)

    return KernelSeconds(
        seconds(k) + _cast_s(sizes, rows * k), seconds(n) + _cast_s(sizes, rows * n), seconds(tokens)
    )


def keys_of_query(seq_len: int, window: int | None, *, causal: bool) -> float:
    """How many keys a query meets on average."""
    width = seq_len if window is None else min(window, seq_len)
    if width < seq_len:
        return width - width * width / (2 * seq_len)
    return seq_len / 2 if causal else float(seq_len)


def _attention_seconds(operator: Attention, sizes: LocalSizes) -> KernelSeconds:
    figures, curve = sizes.figures, sizes.figures.fused
    if curve is None:
        return _unfused_seconds(operator, sizes)
    seq_len = figures.job.seq_len
    heads, kv_heads = sizes.width(operator.heads), sizes.width(operator.kv_heads)
    dims = operator.qk_dim + operator.v_dim
    rows = sizes.count(operator.rows)
    work = 2 * rows * keys_of_query(seq_len, operator.window, causal=operator.causal) * heads * dims
    nbytes = rows * (heads + kv_heads) * dims * figures.recipe.activation_bytes
    flop_per_s = figures.attention_flop_per_s * seq_len / (seq_len + curve.seq_half)
    launch, memory = figures.efficiency.launch_s, figures.memory_bytes_per_s
    forward = launch + np.maximum(work / (flop_per_s * curve.forward_fraction), nbytes / memory)
    backward = launch + np.maximum(2.5 * work / (flop_per_s * curve.backward_fraction), 2 * nbytes / memory)
    return KernelSeconds(forward, backward, 0.0 * forward)


def _unfused_seconds(operator: Attention, sizes: LocalSizes) -> KernelSeconds:
    """Two batched products forward and four backward over all keys, and the softmax between them."""
    figures, each = sizes.figures, sizes.figures.recipe.activation_bytes
    keys = float(figures.job.seq_len)
    rows = sizes.count(operator.rows) * sizes.width(operator.heads)

    def product_s(n: float, k: float) -> Column:
        work = 2 * rows * n * k / (figures.attention_flop_per_s * _matmul_efficiency(sizes, rows, n, k))
        nbytes = (rows * k + k * n * (rows / keys) + rows * n) * each
        return figures.efficiency.launch_s + np.maximum(work, nbytes / figures.memory_bytes_per_s)

    products = product_s(keys, operator.qk_dim) + product_s(operator.v_dim, keys)
    scores = rows * keys * (each * figures.profile.pointwise_passes)
    forward = products + _memory_bound_s(sizes, 4.5 * scores)
    return KernelSeconds(forward, 2 * products + _memory_bound_s(sizes, 5.5 * scores), 0.0 * forward)


def score_bytes(operator: Attention, sizes: LocalSizes) -> Column:
    """Kept of unfused attention: 5 bytes of every score."""
    return 5 * sizes.count(operator.rows) * sizes.width(operator.heads) * sizes.figures.job.seq_len
