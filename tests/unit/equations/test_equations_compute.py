"""Flop counts, efficiencies and rooflines on numbers that can be done by hand."""

from __future__ import annotations

from statistics import fmean

import pytest

from shardwise.equations import compute


@pytest.mark.parametrize(("a", "b", "expected"), [(7, 2, 4), (8, 2, 4), (1, 8, 1), (0, 3, 0), (7.5, 2.5, 3)])
def test_ceil_div(a: float, b: float, expected: float) -> None:
    assert compute.ceil_div(a, b) == expected


@pytest.mark.parametrize(
    ("x", "half", "expected"), [(3.0, 1.0, 0.75), (1.0, 1.0, 0.5), (0.0, 1.0, 0.0), (5.0, 0.0, 1.0)]
)
def test_saturation(x: float, half: float, expected: float) -> None:
    assert compute.saturation(x, half) == expected


def test_work_of_a_matmul() -> None:
    assert compute.matmul_work(2, 3, 4) == 48.0  # 2 * 2 * 3 * 4


@pytest.mark.parametrize(
    ("m", "n", "units", "expected"),
    [
        (6, 10, 2, 0.625),  # 2 x 3 tiles of 4 x 4 in 3 waves of 2: 60 / (3 * 2 * 16)
        (8, 12, 6, 1.0),  # exactly one wave
        (8, 12, 5, 0.6),  # the sixth tile needs its own wave: 96 / (2 * 5 * 16)
        (1, 1, 2, 1 / 32),
    ],
)
def test_tile_and_wave_quantisation(m: int, n: int, units: int, expected: float) -> None:
    assert compute.tile_fill(m, n, 4, 4, units) == expected


@pytest.mark.parametrize(
    ("m", "n", "k", "expected"),
    [
        (6, 10, 1000, 3),  # 2 x 3 tiles of 4 x 4: 20 processors divide each in 3
        (6, 10, 250, 2),  # of 100 summands or more
        (6, 10, 50, 1),
        (40, 40, 1000, 1),  # 100 tiles
    ],
)
def test_idle_processors_take_parts_of_a_sum(m: int, n: int, k: int, expected: int) -> None:
    assert compute.sum_parts(m, n, k, tile_m=4, tile_n=4, units=20, least=100) == expected


@pytest.mark.parametrize(
    ("small_tile_fraction", "expected"),
    [
        (0.5, 0.375),  # full tiles fill 0.625, small ones 0.5 * 60 / (8 * 2 * 4) = 0.469: 0.8 * 3/4 * 0.625
        (0.8, 0.45),  # small ones 0.8 * 0.9375 = 0.75: 0.8 * 3/4 * 0.75
    ],
)
def test_efficiency_of_a_matmul(small_tile_fraction: float, expected: float) -> None:
    # [6, 3] x [3, 10] with half sides 2 x 2: 3 x 5 = 15 tiles in 8 waves of 2.
    found = compute.matmul_efficiency(
        6, 10, 3, peak_fraction=0.8, tile_m=4, tile_n=4, units=2, k_half=1.0,
        small_tile_fraction=small_tile_fraction,
    )  # fmt: skip
    assert found == pytest.approx(expected, rel=1e-15)


def test_tiles_that_are_not_square() -> None:
    # 4 x 8 tiles on [4, 8]: one tile of one unit, full; of sides 2 x 4: 4 tiles in 4 waves, full too.
    found = compute.matmul_efficiency(
        4, 8, 1, peak_fraction=1.0, tile_m=4, tile_n=8, units=1, k_half=0.0, small_tile_fraction=1.0
    )
    assert found == 1.0


def test_efficiency_of_a_grouped_matmul() -> None:
    # 0.8 * 0.5 * 30 / 40 * 3 / 4
    found = compute.grouped_matmul_efficiency(
        30.0, 3.0, peak_fraction=0.8, k_half=1.0, fraction=0.5, tokens_half=10.0
    )
    assert found == pytest.approx(0.225, rel=1e-15)


@pytest.mark.parametrize(
    ("window", "causal_share", "expected"),
    [
        (10.0, 0.5, 9.5),  # 10 - 100 / 200
        (10.0, 1.0, 9.5),  # a window is one-sided, whatever the fraction
        (99.0, 0.5, 49.995),  # 99 - 9801 / 200: nearly all
        (100.0, 0.5, 50.0),
        (100.0, 1.0, 100.0),
        (200.0, 0.5, 50.0),
    ],
)
def test_keys_that_a_query_meets(window: float, causal_share: float, expected: float) -> None:
    assert float(compute.keys_per_query(100.0, window, causal_share)) == pytest.approx(expected, rel=1e-15)


def test_keys_within_a_window_are_those_counted_one_by_one() -> None:
    counted = fmean(min(query, 64) for query in range(1, 4097))
    # The formula takes the mean of 0..w for the first w queries, the exact count that of 1..w: w / 2s more.
    assert float(compute.keys_per_query(4096.0, 64.0, 0.5)) + 64 / (2 * 4096) == pytest.approx(
        counted, rel=1e-12
    )


def test_work_of_attention() -> None:
    assert compute.attention_work(2, 3, 4, 5, 6) == 528.0  # 2 * 2 * 3 * 4 * (5 + 6)


@pytest.mark.parametrize(
    ("flop", "nbytes", "expected"),
    [
        (100.0, 50.0, 10.0),  # max(100 / 10, 50 / 20)
        (10.0, 50.0, 2.5),  # max(10 / 10, 50 / 20)
        (0.0, 0.0, 0.0),
    ],
)
def test_roofline(flop: float, nbytes: float, expected: float) -> None:
    assert compute.roofline_s(flop, nbytes, 10.0, 20.0) == expected


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (100.0, 5.0),  # (100 + 25) / (0.5 * 50)
        (0.0, 0.0),
        (25.0, 2.0),  # at half_bytes the speed is half of 25: 25 / 12.5
    ],
)
def test_memory_bound_kernel(nbytes: float, expected: float) -> None:
    assert compute.memory_bound_s(nbytes, 50.0, 0.5, 25.0) == expected


@pytest.mark.parametrize(
    ("communication_s", "computation_s", "overlap", "slowdown", "expected"),
    [
        (10.0, 20.0, 0.8, 1.0, 2.0),  # 8 of 10 hidden
        (10.0, 6.0, 0.8, 1.0, 4.0),  # only 6 fit into the computation
        (10.0, 20.0, 0.8, 1.5, 6.0),  # 2 exposed, and half of 8 as slowdown
        (10.0, 6.0, 0.8, 1.5, 7.0),  # 4 exposed, and half of 6
        (10.0, 20.0, 0.0, 1.5, 10.0),
        (10.0, 0.0, 1.0, 1.5, 10.0),
        (0.0, 20.0, 1.0, 1.5, 0.0),
    ],
)
def test_what_communication_adds(
    communication_s: float, computation_s: float, overlap: float, slowdown: float, expected: float
) -> None:
    found = compute.exposed_s(communication_s, computation_s, overlap, slowdown)
    assert found == pytest.approx(expected, rel=1e-15)
