"""How times of a step are told."""

import pytest

from shardwise.app.cli.words import seconds


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (123.46, "123.5 s"),
        (4.5678, "4.568 s"),
        (0.5, "500 ms"),
        (-0.0125, "-12.5 ms"),
        (0.0, "0 ms"),
        # What is left of sums of seconds: a rounding of one unit in the last place, of either sign.
        (1.1e-15, "0 ms"),
        (-3.3e-16, "0 ms"),
    ],
)
def test_seconds_are_told_with_four_digits(value: float, told: str) -> None:
    assert seconds(value) == told
