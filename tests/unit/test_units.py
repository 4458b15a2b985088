"""Quantities: exact spelling, hand-computed values, refusals."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.units import UNITS, format_bytes, format_count, format_rate, format_seconds, parse_quantity


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("900GB/s", "B/s", 900e9),
        ("200Gb/s", "B/s", 25e9),  # 200e9 bits / 8
        ("200 Gbit/s", "B/s", 25e9),
        ("200Gbps", "B/s", 25e9),
        ("1GiB/s", "B/s", 1073741824.0),
        ("80GiB", "B", 85899345920.0),  # 80 * 2^30
        ("80GB", "B", 80e9),
        ("80Gib", "B", 10737418240.0),  # 80 * 2^30 / 8
        ("1e3kB", "B", 1e6),
        ("1.9us", "s", 1.9e-6),
        ("2µs", "s", 2e-6),
        ("6h", "s", 21600.0),
        ("1.5min", "s", 90.0),
        ("3.5USD/h", "USD/h", 3.5),
        ("66.9TFLOP/s", "FLOP/s", 66.9e12),
        ("989TFLOPS", "FLOP/s", 989e12),
        ("-1s", "s", -1.0),
    ],
)
def test_a_quantity_is_the_float_nearest_to_its_text(text: str, unit: str, value: float) -> None:
    assert parse_quantity(text, unit) == value


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("900gb/s", "B/s"), ("900GB", "B/s"), ("80G", "B"), ("80", "B"), ("", "B"), ("GiB", "B"),
        ("80  GiB", "B"), ("80GiB/s", "B"), ("1,5GB", "B"), ("NaNs", "s"), ("infs", "s"), ("1e999s", "s"),
        ("1e308h", "s"), ("0x10s", "s"), ("1_000s", "s"), ("١s", "s"), ("2us 3us", "s"), ("3.5", "USD/h"),
        ("1TFLOP", "FLOP/s"),
        ("1MS", "s"), ("1\ns", "s"),
    ],
)  # fmt: skip
def test_an_ambiguous_quantity_is_refused_with_an_example(text: str, unit: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_quantity(text, unit)
    assert caught.value.allowed is not None and "such as" in caught.value.allowed
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@given(st.text(max_size=30), st.sampled_from(UNITS))
def test_any_text_is_a_finite_number_or_a_config_error(text: str, unit: str) -> None:
    with suppress(ConfigError):
        assert abs(parse_quantity(text, unit)) < float("inf")


@given(st.floats(1, 1e18))
def test_formatted_bytes_parse_back(nbytes: float) -> None:
    assert parse_quantity(format_bytes(nbytes), "B") == pytest.approx(nbytes, rel=5e-3)


@given(st.floats(1e-9, 1e8))
def test_formatted_seconds_parse_back(seconds: float) -> None:
    assert parse_quantity(format_seconds(seconds), "s") == pytest.approx(seconds, rel=5.1e-3)


@given(st.floats(1, 1e20), st.sampled_from(["B/s", "FLOP/s"]))
def test_formatted_rates_parse_back(rate: float, unit: str) -> None:
    assert parse_quantity(format_rate(rate, unit), unit) == pytest.approx(rate, rel=5.1e-3)


def test_formats_for_reading() -> None:
    assert format_bytes(85027979264) == "79.2 GiB"  # 85027979264 / 2^30 = 79.188
    assert format_bytes(0) == "0 B"
    assert format_seconds(0.0123) == "12.3 ms"
    assert format_seconds(7200) == "2 h"
    assert format_seconds(0) == "0 s"
    assert format_rate(450e9) == "450 GB/s"
    assert format_rate(989.4e12, "FLOP/s") == "989 TFLOP/s"
    assert format_count(150652) == "150,652"
    assert format_count(70553706496) == "70.6 billion"
