"""How step times and memory are written."""

from typing import Any

import pytest

from shardwise.app.cli.words import difference_texts, memory, seconds
from shardwise.strategy import complete


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (123.46, "123.5 s"),
        (4.5678, "4.568 s"),
        (0.5, "500 ms"),
        (-0.0125, "-12.5 ms"),
        (0.0, "0 ms"),
        # Sums of seconds leave rounding errors of one unit in the last place, of either sign.
        (1.1e-15, "0 ms"),
        (-3.3e-16, "0 ms"),
    ],
)
def test_seconds_are_shown_with_four_digits(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("mib", "largest_mib", "text"),
    [
        (1024.0, 0.0, "1.0 GiB"),
        (1023.0, 0.0, "1023 MiB"),
        (99.94, 0.0, "99.9 MiB"),
        (0.25, 0.0, "0.2 MiB"),
        (512.0, 2048.0, "0.5 GiB"),
    ],
)
def test_memory_is_shown_in_the_unit_of_the_largest(mib: float, largest_mib: float, text: str) -> None:
    assert memory(mib * 2.0**20, largest_mib * 2.0**20) == text


def test_each_choice_is_a_difference_once() -> None:
    """Recomputation is three fields and one choice, so its words stand once."""
    sizes: dict[str, Any] = {"devices": 8, "layers": 32, "experts": None, "global_batch_size": 64}
    plain = complete({"tp": 8}, **sizes)
    named = complete({"tp": 8, "recompute": "selective", "recompute_modules": "core_attn+mlp"}, **sizes)
    assert list(difference_texts(named, plain, 32)) == ["recompute core_attn + mlp"]
    assert list(difference_texts(plain, named, 32)) == ["no recompute"]
