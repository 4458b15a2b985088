"""Alpha-beta times of collectives, flat and over a hierarchy of tiers.

`sizes[t]` groups of tier t-1 meet inside one group of tier t, innermost tier first. A group of ranks
therefore has prod(sizes) members, and a tier of size 1 costs nothing. `bytes_per_s[t]` is the bandwidth of
each rank on tier t while all ranks send; `alphas_s[t]` is the latency of one message there. Each docstring
states whether `nbytes` is the whole tensor or one rank's part.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwise.equations.quantity import Quantity


def has_peers(n: Quantity) -> Quantity:
    """1 where a group has more than one member, 0 for a group of one."""
    return np.minimum(n - 1, 1)


def point_to_point_s(nbytes: Quantity, alpha_s: Quantity, bw_bytes_per_s: Quantity) -> Quantity:
    """alpha + B / bw for one message of B bytes."""
    return alpha_s + nbytes / bw_bytes_per_s


def ring_all_gather_s(nbytes: Quantity, n: Quantity, alpha_s: Quantity, bw_bytes_per_s: Quantity) -> Quantity:
    """(n-1) alpha + (n-1)/n B / bw: one pass around a ring.

    The pass is a reduce-scatter (B: the whole input of a rank) or an all-gather (B: the whole output of a
    rank). (Thakur et al. 2005, ring.)
    """
    return (n - 1) * alpha_s + (n - 1) / n * nbytes / bw_bytes_per_s


def tree_all_reduce_s(n: Quantity, alpha_s: Quantity, sent_s: Quantity) -> Quantity:
    """2 log2(n) alpha + sent: reduce and broadcast along a double binary tree.

    `sent_s` is the time of all that the narrowest hop sends (`tree_beta_s`). (Sanders et al. 2009, two-tree.)
    """
    return 2.0 * np.log2(n) * alpha_s + sent_s


def tree_beta_s(
    nbytes: Quantity, sizes: Sequence[Quantity], bytes_per_s: Sequence[Quantity], pair_sends: Quantity
) -> Quantity:
    """Seconds that the narrowest hop of a double binary tree sends, for a tensor of B bytes.

    A member that is inside one tree is a leaf of the other. It sends a half of B to its parent in each, and a
    half to each of two children: 2 B. Where two groups meet, neither has two children, and each sends B
    `pair_sends` times: once in trees, as in NCCL; twice in libraries without trees.
    """
    below = 1.0
    slowest_s = 0.0 * (nbytes / bytes_per_s[0])
    for size, bw_bytes_per_s in zip(sizes, bytes_per_s, strict=True):
        sends = pair_sends + (2.0 - pair_sends) * has_peers(size - 1)
        slowest_s = np.maximum(slowest_s, has_peers(size) * sends * nbytes / (below * bw_bytes_per_s))
        below = below * size
    return slowest_s


def in_switch_all_reduce_s(n: Quantity, alpha_s: Quantity, beta_s: Quantity) -> Quantity:
    """2 alpha + beta: each rank sends its tensor once; the switch reduces and multicasts."""
    return has_peers(n) * 2.0 * alpha_s + beta_s


def flat_ring_beta_s(
    nbytes: Quantity, sizes: Sequence[Quantity], bytes_per_s: Sequence[Quantity]
) -> Quantity:
    """Seconds that B bytes need on the narrowest hop of one ring through all ranks.

    Where the ring crosses tier t, the ranks below one crossing share their network cards: B / (prod(sizes
    below t) * bw_t).
    """
    below = 1.0
    slowest_s = 0.0 * (nbytes / bytes_per_s[0])
    for size, bw_bytes_per_s in zip(sizes, bytes_per_s, strict=True):
        slowest_s = np.maximum(slowest_s, has_peers(size) * nbytes / (below * bw_bytes_per_s))
        below = below * size
    return slowest_s


def flat_ring_alpha_s(sizes: Sequence[Quantity], alphas_s: Sequence[Quantity]) -> Quantity:
    """Latency of one step of a ring through all ranks: the latency of the outermost tier that it crosses."""
    slowest_s = 0.0 * alphas_s[0]
    for size, alpha_s in zip(sizes, alphas_s, strict=True):
        slowest_s = np.maximum(slowest_s, has_peers(size) * alpha_s)
    return slowest_s


def group_size(sizes: Sequence[Quantity]) -> Quantity:
    """Number of ranks of a group: the product of its sizes per tier."""
    total = 1.0
    for size in sizes:
        total = total * size
    return total


def all_gather_s(
    nbytes: Quantity,
    sizes: Sequence[Quantity],
    alphas_s: Sequence[Quantity],
    bytes_per_s: Sequence[Quantity],
) -> Quantity:
    """All-gather or reduce-scatter of a whole tensor of B bytes: one ring through all ranks, as in NCCL.

    (n-1) alpha + (n-1)/n beta: all tiers are busy at once. Each of the n-1 steps takes the latency of the
    outermost tier that the ring crosses, and the narrowest hop sets the pace.
    """
    n = group_size(sizes)
    return (n - 1) * flat_ring_alpha_s(sizes, alphas_s) + (n - 1) / n * flat_ring_beta_s(
        nbytes, sizes, bytes_per_s
    )


def all_reduce_s(
    nbytes: Quantity,
    sizes: Sequence[Quantity],
    alphas_s: Sequence[Quantity],
    bytes_per_s: Sequence[Quantity],
    in_switch: Sequence[Quantity],
    pair_sends: Quantity,
) -> Quantity:
    """All-reduce of a whole tensor of B bytes, by the fastest algorithm that the tiers allow.

    The candidates are a reduce-scatter with an all-gather, a double tree (`tree_beta_s` has `pair_sends`),
    and reduction in the switch. The last needs `in_switch[t]` = 1 on every tier that is crossed.
    """
    n = group_size(sizes)
    alpha_s = flat_ring_alpha_s(sizes, alphas_s)
    beta_s = flat_ring_beta_s(nbytes, sizes, bytes_per_s)
    passes_s = 2.0 * all_gather_s(nbytes, sizes, alphas_s, bytes_per_s)
    tree_s = tree_all_reduce_s(n, alpha_s, tree_beta_s(nbytes, sizes, bytes_per_s, pair_sends))
    switched_s = in_switch_all_reduce_s(n, alpha_s, beta_s)
    everywhere = 1.0
    for size, has in zip(sizes, in_switch, strict=True):
        everywhere = everywhere * (1.0 - has_peers(size) * (1.0 - has))
    best_s = np.minimum(passes_s, tree_s)
    return np.where(everywhere > 0.5, np.minimum(best_s, switched_s), best_s)


def all_to_all_s(
    nbytes: Quantity,
    sizes: Sequence[Quantity],
    alphas_s: Sequence[Quantity],
    bytes_per_s: Sequence[Quantity],
    copies: Sequence[Quantity],
) -> Quantity:
    """All-to-all in which each rank sends B bytes in total, evenly to all ranks of the group.

    On tier t a rank sends the share of B whose receivers are in its tier-t group but not in its tier-(t-1)
    group: B * copies[t] * (size_t - 1) * prod(sizes below) / n. `copies[t]` is 1, or less where one copy that
    crosses the tier serves several receivers there (node-limited dispatch: DeepSeek-V3, section 3.2.2). All
    tiers send at the same time; the latency of the outermost tier crossed counts once.
    """
    n = group_size(sizes)
    below = 1.0
    slowest_s = 0.0 * (nbytes / bytes_per_s[0])
    for size, bw_bytes_per_s, copy in zip(sizes, bytes_per_s, copies, strict=True):
        slowest_s = np.maximum(slowest_s, nbytes * copy * (size - 1) * below / n / bw_bytes_per_s)
        below = below * size
    return flat_ring_alpha_s(sizes, alphas_s) + slowest_s


def expected_groups(groups: Quantity, draws: Quantity) -> Quantity:
    """Expected number of distinct groups among k even draws from G equal groups: G (1 - (1 - 1/G)^k)."""
    return groups * (1.0 - (1.0 - 1.0 / groups) ** draws)
