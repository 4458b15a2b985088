"""Ticks of logarithmic axes."""

from __future__ import annotations

import random

import pytest

from shardwise.app.plot.draw import GIB, MAX_TICKS, MIN_TICKS, even_ticks, memory_ticks, range_of, time_ticks


@pytest.mark.parametrize("seed", range(300))
def test_ticks_are_within_the_range_few_and_many_enough(seed: int) -> None:
    rng = random.Random(seed)
    low = 10.0 ** rng.uniform(-3, 5)
    high = low * 10.0 ** rng.choice((rng.uniform(0.004, 0.1), rng.uniform(0.1, 1.0), rng.uniform(1.0, 6.0)))
    for places, labels in (time_ticks(low, high), memory_ticks(low * GIB, high * GIB)):
        scale = 1.0 if places == time_ticks(low, high)[0] else GIB
        assert all(low * (1 - 1e-12) <= place / scale <= high * (1 + 1e-12) for place in places)
        assert places == sorted(places)
        assert MIN_TICKS <= len(places) <= MAX_TICKS
        assert len(set(labels)) == len(labels)


@pytest.mark.parametrize(
    ("low_s", "high_s", "labels"),
    [
        (0.9, 120.0, ["1 s", "2 s", "5 s", "10 s", "20 s", "50 s", "100 s"]),
        (0.04, 0.7, ["50 ms", "100 ms", "200 ms", "500 ms"]),
        (6.0, 70.0, ["7 s", "10 s", "15 s", "20 s", "30 s", "50 s", "70 s"]),
        (2.0, 2.9, ["2 s", "2.25 s", "2.5 s", "2.75 s"]),
    ],
)
def test_time_is_in_numbers_that_people_read(low_s: float, high_s: float, labels: list[str]) -> None:
    assert time_ticks(low_s, high_s)[1] == labels


def test_memory_is_in_powers_of_two() -> None:
    places, labels = memory_ticks(7 * GIB, 70 * GIB)
    assert labels == ["8 GiB", "16 GiB", "32 GiB", "64 GiB"]
    assert places == [8 * GIB, 16 * GIB, 32 * GIB, 64 * GIB]
    assert memory_ticks(0.9 * GIB, 3.1 * GIB)[1] == ["1 GiB", "1.5 GiB", "2 GiB", "3 GiB"]


def test_even_ticks_have_the_largest_distance_that_suffices() -> None:
    assert even_ticks(10.0, 20.0) == [10.0, 12.5, 15.0, 17.5, 20.0]
    assert even_ticks(11.0, 19.0) == [12.0, 14.0, 16.0, 18.0]


def test_a_range_has_padding_on_both_sides() -> None:
    # A factor of 100, as logarithms a tenth of it on either side: 100 ** 0.1.
    assert range_of([1.0, 100.0, 10.0], padding=0.1) == pytest.approx((100**-0.1, 100**1.1))
    assert range_of([3.0], padding=0.1) == (2.0, 4.5)
