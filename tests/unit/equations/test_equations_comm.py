"""Collectives on numbers that can be computed by hand: two tiers of 4 and 3 ranks, or one ring."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from shardwise.equations import comm

SIZES = [4, 3]
"""Four ranks at 10 B/s and 0.5 s in each of three groups, which are joined at 5 B/s and 2 s."""
ALPHAS_S = [0.5, 2.0]
RATES = [10.0, 5.0]


def test_a_group_of_one_rank_does_not_communicate() -> None:
    np.testing.assert_array_equal(comm.has_peers(np.array([1, 2, 8])), [0, 1, 1])


def test_one_message() -> None:
    assert comm.point_to_point_s(100.0, 0.5, 25.0) == 4.5  # 0.5 + 100 / 25
    assert comm.point_to_point_s(0.0, 0.5, 25.0) == 0.5


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (1, 0.0),
        (2, 2.5),  # 1 * 0.5 + 1/2 * 100 / 25
        (4, 4.5),  # 3 * 0.5 + 3/4 * 100 / 25
    ],
)
def test_the_time_of_a_ring_all_gather(n: int, expected: float) -> None:
    assert comm.ring_all_gather_s(100.0, n, 0.5, 25.0) == expected


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (1, 8.0),  # no latency
        (2, 9.0),  # 2 * 1 * 0.5 + 8
        (8, 11.0),  # 2 * 3 * 0.5 + 8
    ],
)
def test_up_and_down_a_tree(n: int, expected: float) -> None:
    assert comm.tree_all_reduce_s(n, 0.5, 8.0) == expected


@pytest.mark.parametrize(
    ("sizes", "once", "twice"),
    [
        ([4, 3], 24.0, 24.0),  # 2 * max(120 / 10, 120 / (4 * 5) = 6): no tier joins two groups
        ([4, 2], 24.0, 24.0),  # four inside send 2 * 12, the two outside 6, or 2 * 6
        ([2, 3], 24.0, 24.0),  # outside 2 * 120 / (2 * 5); two inside send 12, or 2 * 12
        ([2, 2], 12.0, 24.0),  # once each: max(12, 120 / (2 * 5))
        ([1, 2], 24.0, 48.0),  # 120 / 5
        ([1, 3], 48.0, 48.0),  # 2 * 120 / 5
        ([1, 1], 0.0, 0.0),
    ],
)
def test_the_narrowest_hop_of_a_tree(sizes: list[int], once: float, twice: float) -> None:
    assert float(comm.tree_beta_s(120.0, sizes, RATES, 1.0)) == pytest.approx(once, rel=1e-15)
    assert float(comm.tree_beta_s(120.0, sizes, RATES, 2.0)) == pytest.approx(twice, rel=1e-15)


@pytest.mark.parametrize(("n", "expected"), [(1, 4.0), (2, 5.0), (72, 5.0)])  # 2 * 0.5 + 4
def test_reduction_in_the_switch(n: int, expected: float) -> None:
    assert comm.in_switch_all_reduce_s(n, 0.5, 4.0) == expected


@pytest.mark.parametrize(
    ("sizes", "rates", "expected"),
    [
        ([4, 3], [10.0, 5.0], 12.0),  # max(120 / 10, 120 / (4 * 5) = 6)
        ([4, 3], [10.0, 1.0], 30.0),  # max(12, 120 / (4 * 1)): four ranks share the crossing
        ([1, 3], [10.0, 5.0], 24.0),  # only the outer tier is crossed, by one rank of each group
        ([4, 1], [10.0, 1.0], 12.0),
        ([1, 1], [10.0, 5.0], 0.0),
        ([2, 3, 2], [100.0, 100.0, 0.5], 40.0),  # 120 / (2 * 3 * 0.5)
    ],
)
def test_the_narrowest_hop_of_a_flat_ring(sizes: list[int], rates: list[float], expected: float) -> None:
    assert comm.flat_ring_beta_s(120.0, sizes, rates) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(("sizes", "expected"), [([4, 3], 2.0), ([4, 1], 0.5), ([1, 3], 2.0), ([1, 1], 0.0)])
def test_the_longest_hop_of_a_flat_ring(sizes: list[int], expected: float) -> None:
    assert comm.flat_ring_alpha_s(sizes, ALPHAS_S) == expected


def test_a_slow_inner_tier_counts_although_an_outer_one_is_crossed() -> None:
    assert comm.flat_ring_alpha_s([4, 3], [2.0, 0.5]) == 2.0


def test_members_of_a_group() -> None:
    assert comm.group_size([4, 3, 2]) == 24.0
    assert comm.group_size([1, 1]) == 1.0


@pytest.mark.parametrize(
    ("sizes", "alphas_s", "expected"),
    [
        ([4, 3], [0.5, 2.0], 33.0),  # 11 * 2 + 11/12 * 12; tier by tier it would be 18.5
        ([4, 3], [0.0, 0.0], 11.0),  # 11/12 * 12
        ([4, 3], [0.01, 0.02], 11.22),  # 11 * 0.02 + 11
        ([1, 1], [0.5, 2.0], 0.0),
    ],
)
def test_a_pass_is_one_ring(sizes: list[int], alphas_s: list[float], expected: float) -> None:
    assert comm.all_gather_s(120.0, sizes, alphas_s, RATES) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("nbytes", "sizes", "alphas_s", "in_switch", "expected"),
    [
        # Two passes 2 * 33; tree 2 log2(12) * 2 + 2 * 12 = 38.3; the switch does not apply.
        (120.0, [4, 3], [0.5, 2.0], [0, 0], 4 * np.log2(12) + 24),
        # Two passes 2 * (11 * 0.01 + 11) = 22.2; tree 2 log2(12) * 0.01 + 24.
        (120.0, [4, 3], [0.01, 0.01], [0, 0], 22.22),
        # Passes 2 * (15 * 2 + 15/16 * 1.2) = 62.3; tree 2 * 4 * 2 + 2 * max(1.2, 0.6).
        (12.0, [4, 4], [2.0, 2.0], [0, 0], 18.4),
        (12.0, [4, 4], [2.0, 2.0], [1, 0], 18.4),  # one of the crossed tiers cannot reduce
        (12.0, [4, 4], [2.0, 2.0], [0, 1], 18.4),
        (12.0, [4, 4], [2.0, 2.0], [1, 1], 5.2),  # 2 * 2 + 1.2
        (12.0, [1, 4], [2.0, 2.0], [0, 1], 6.4),  # the tier that cannot reduce is not crossed: 2 * 2 + 12 / 5
        # Two nodes of four at 10 and 1 B/s: trees 2 log2(8) * 0.01 + max(2 * 1.2, 12 / (4 * 5)); two passes
        # 2 * (7 * 0.01 + 7/8 * 1.2) = 2.24.
        (12.0, [4, 2], [0.01, 0.01], [0, 0], 2.24),
        (12.0, [2, 2], [0.01, 0.01], [0, 0], 1.24),  # trees 2 * 2 * 0.01 + 1.2; two passes 2 * (0.03 + 0.9)
        (12.0, [1, 1], [2.0, 2.0], [1, 1], 0.0),
        (12.0, [1, 1], [2.0, 2.0], [0, 0], 0.0),
        # A ring of two is as fast as the switch: 2 * (1 * 2 + 1/2 * 12 / 10) = 2 * 2 + 12 / 10.
        (12.0, [2, 1], [2.0, 2.0], [1, 1], 5.2),
    ],
)
def test_an_all_reduce_takes_the_fastest_way(
    nbytes: float, sizes: list[int], alphas_s: list[float], in_switch: list[float], expected: float
) -> None:
    found = comm.all_reduce_s(nbytes, sizes, alphas_s, RATES, in_switch, 1.0)
    assert float(found) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    ("sizes", "copies", "expected"),
    [
        # To 3 of 12 ranks in the group: 120 * 3/12 / 10 = 3; to 8 of 12 outside, halved: 120 / 2 * 8/12 / 5 =
        # 8; and 2 s of latency.
        ([4, 3], [1.0, 0.5], 10.0),
        ([4, 3], [1.0, 0.1], 5.0),  # now the inner tier is slower: 3 + 2
        ([4, 1], [1.0, 0.5], 9.5),  # 120 * 3/4 / 10 + 0.5
        ([1, 3], [1.0, 1.0], 18.0),  # 120 * 2/3 / 5 + 2
        ([1, 1], [1.0, 1.0], 0.0),
    ],
)
def test_all_to_all(sizes: list[int], copies: list[float], expected: float) -> None:
    found = comm.all_to_all_s(120.0, sizes, ALPHAS_S, RATES, copies)
    assert found == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    ("groups", "drawn", "expected"),
    [
        (1, 5, 1.0),
        (4, 1, 1.0),
        (2, 2, 1.5),  # both draws have the same group in half of the cases
        (3, 2, 5 / 3),
        (4, 8, 4 * (1 - 0.75**8)),
    ],
)
def test_expected_groups_of_random_draws(groups: int, drawn: int, expected: float) -> None:
    assert comm.expected_groups(groups, drawn) == pytest.approx(expected, rel=1e-14)
    draws = itertools.product(range(groups), repeat=drawn)
    if groups**drawn < 100:
        counts = [len(set(draw)) for draw in draws]
        assert sum(counts) / len(counts) == pytest.approx(expected, rel=1e-14)


def test_all_to_all_over_three_tiers_counts_all_ranks_within() -> None:
    # 6 of 12 ranks are beyond the second tier: 120 * 6/12 / 1 = 60.
    assert comm.all_to_all_s(120.0, [2, 3, 2], [0.0] * 3, [100.0, 100.0, 1.0], [1.0] * 3) == 60.0


@pytest.mark.parametrize("collective", ["pass", "all_reduce", "all_to_all"])
def test_zero_bytes_cost_latency_alone(collective: str) -> None:
    found: dict[str, Any] = {
        "pass": comm.all_gather_s(0.0, SIZES, ALPHAS_S, RATES),  # 11 * 2
        "all_reduce": comm.all_reduce_s(0.0, SIZES, ALPHAS_S, RATES, [0, 0], 1.0),  # 2 log2(12) * 2, under 44
        "all_to_all": comm.all_to_all_s(0.0, SIZES, ALPHAS_S, RATES, [1.0, 1.0]),
    }
    expected = {"pass": 22.0, "all_reduce": 4 * np.log2(12), "all_to_all": 2.0}
    assert float(found[collective]) == expected[collective]


def test_a_cluster_of_one_tier_is_a_plain_ring() -> None:
    # 3 * 0.5 + 3/4 * 120 / 10 = 10.5, flat or not; all to all 120 * 3/4 / 10 + 0.5.
    assert float(comm.all_gather_s(120.0, [4], [0.5], [10.0])) == 10.5
    assert float(comm.all_reduce_s(120.0, [4], [0.5], [10.0], [0], 1.0)) == 21.0
    assert comm.all_to_all_s(120.0, [4], [0.5], [10.0], [1.0]) == 9.5
