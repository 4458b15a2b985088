"""Computation: flop counts, rooflines and efficiency curves.

Every function takes plain numbers or columns and uses only arithmetic and ufuncs. So one definition serves a
single strategy, a table of strategies, and the test of units.
"""

from __future__ import annotations

import numpy as np

from shardwise.equations.quantity import Quantity


def ceil_div(a: Quantity, b: Quantity) -> Quantity:
    """ceil(a / b). b > 0."""
    return -(-a // b)


def saturation(x: Quantity, half: Quantity) -> Quantity:
    """x / (x + half): 0 at 0, one half at `half`, and 1 in the limit. x >= 0, half >= 0, not both 0."""
    return x / (x + half)


def matmul_work(m: Quantity, n: Quantity, k: Quantity) -> Quantity:
    """2 m n k: multiplications and additions of [m, k] x [k, n]. Sizes have no unit; multiply by one flop."""
    return 2.0 * m * n * k


def tile_fill(m: Quantity, n: Quantity, tile_m: Quantity, tile_n: Quantity, units: Quantity) -> Quantity:
    """Share of the tile computation that belongs to the output: m n / (waves * units * tile_m * tile_n).

    waves = ceil(ceil(m / tile_m) ceil(n / tile_n) / units): `units` processors compute the tiles of the
    output in waves, and the last wave takes as long as a full one. In (0, 1]. (Tile and wave quantisation,
    NVIDIA, Deep Learning Performance guide: Matrix Multiplication Background.)
    """
    tiles = ceil_div(m, tile_m) * ceil_div(n, tile_n)
    waves = ceil_div(tiles, units)
    return m * n / (waves * units * tile_m * tile_n)


def sum_parts(
    m: Quantity,
    n: Quantity,
    k: Quantity,
    *,
    tile_m: Quantity,
    tile_n: Quantity,
    units: Quantity,
    least: Quantity,
) -> Quantity:
    """Number of parts into which a split-k kernel divides the sum of [m, k] x [k, n]. At least 1.

    A kernel splits the sum where the output has fewer tiles than there are processors. It uses as many parts
    as those processors can take, each with `least` summands or more.
    """
    tiles = ceil_div(m, tile_m) * ceil_div(n, tile_n)
    return np.maximum(1.0, np.minimum(units // tiles, k // least))


def matmul_efficiency(
    m: Quantity,
    n: Quantity,
    k: Quantity,
    *,
    peak_fraction: Quantity,
    tile_m: Quantity,
    tile_n: Quantity,
    units: Quantity,
    k_half: Quantity,
    small_tile_fraction: Quantity,
) -> Quantity:
    """Fraction of the dense peak that [m, k] x [k, n] reaches. In (0, 1).

    peak_fraction * k / (k + k_half) * fill. fill is the better of the full tile's and that of tiles with half
    the sides, which reach `small_tile_fraction` of the full tile's speed.
    """
    full = tile_fill(m, n, tile_m, tile_n, units)
    half = small_tile_fraction * tile_fill(m, n, tile_m / 2.0, tile_n / 2.0, units)
    return peak_fraction * saturation(k, k_half) * np.maximum(full, half)


def grouped_matmul_efficiency(
    tokens_per_expert: Quantity,
    k: Quantity,
    *,
    peak_fraction: Quantity,
    k_half: Quantity,
    fraction: Quantity,
    tokens_half: Quantity,
) -> Quantity:
    """Fraction of the dense peak of a grouped matmul: few tokens per expert leave its tiles empty.

    peak_fraction * fraction * t / (t + tokens_half) * k / (k + k_half), with t = tokens_per_expert.
    """
    return peak_fraction * fraction * saturation(tokens_per_expert, tokens_half) * saturation(k, k_half)


def keys_per_query(seq_len: Quantity, window: Quantity, causal_share: Quantity) -> Quantity:
    """Mean number of keys per query: causal_share * s without a window, w - w^2 / (2 s) with one.

    `window` is at least 1; a window of s or more has no effect. causal_share is 1/2 for causal attention, 1
    for full attention. The window is one-sided (causal): the first w queries have 1 to w keys, the others w.
    """
    inside = window - window * window / (2.0 * seq_len)
    return np.where(window < seq_len, inside, causal_share * seq_len)


def attention_work(
    queries: Quantity, keys: Quantity, heads: Quantity, qk_dim: Quantity, v_dim: Quantity
) -> Quantity:
    """2 q k h (d_qk + d_v): scores and weighted values over `heads`. Sizes have no unit; multiply by one
    flop.
    """
    return 2.0 * queries * keys * heads * (qk_dim + v_dim)


def roofline_s(
    work_flop: Quantity, moved_bytes: Quantity, speed_flop_per_s: Quantity, memory_bytes_per_s: Quantity
) -> Quantity:
    """Time of a kernel that arithmetic or memory limits: max(flop / speed, bytes / bandwidth).

    (Williams et al. 2009, Roofline.)
    """
    return np.maximum(work_flop / speed_flop_per_s, moved_bytes / memory_bytes_per_s)


def memory_bound_s(
    moved_bytes: Quantity, memory_bytes_per_s: Quantity, fraction: Quantity, half_bytes: Quantity
) -> Quantity:
    """Time of a memory-bound kernel: (b + half_bytes) / (fraction * bandwidth). Zero for zero bytes.

    Its speed saturates: b bytes reach b / (b + half_bytes) of the achievable bandwidth.
    """
    some = np.where(moved_bytes > 0.0 * moved_bytes, 1.0, 0.0)
    return some * (moved_bytes + half_bytes) / (fraction * memory_bytes_per_s)


def exposed_s(
    communication_s: Quantity, computation_s: Quantity, overlap: Quantity, slowdown: Quantity
) -> Quantity:
    """Seconds that a communication adds to the computation that it overlaps with.

    hidden = min(overlap * communication, computation); added = communication - hidden + (slowdown - 1) *
    hidden, because overlapped communication slows down the kernels. overlap in [0, 1], slowdown >= 1. (Step
    time = computation + communication - overlap: Li et al. 2024, arXiv 2501.00254.)
    """
    hidden = np.minimum(overlap * communication_s, computation_s)
    return communication_s - hidden + (slowdown - 1.0) * hidden
