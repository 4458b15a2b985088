"""Ticks and limits of logarithmic axes, in the numbers that people read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import ceil, floor, log, log10

MIN_TICKS, MAX_TICKS = 4, 10
"""Ticks that an axis has at least and at most."""

TIME_STEPS = ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0))
"""Multiples of powers of ten, coarsest first."""

MEMORY_STEPS = ((1.0,), (1.0, 1.5))
"""Multiples of powers of two."""

EVEN_STEPS = (1.0, 2.0, 2.5, 5.0)
"""Distances of even ticks, times powers of ten, where an axis is too short for multiples."""

GIB = 2.0**30


def range_of(values: Iterable[float], *, padding: float) -> tuple[float, float]:
    """The least and the largest of positive values, with a share `padding` of their range (as logarithms) on
    either side; a single value gets a factor of 1.5."""
    found = list(values)
    low, high = min(found), max(found)
    factor = (high / low) ** padding if high > low * 1.01 else 1.5
    return low / factor, high * factor


def ticks(low: float, high: float, steps: Sequence[Sequence[float]], base: float) -> list[float]:
    """Multiples of powers of `base` within `low` and `high`, the coarsest of `steps` that has FEWEST of them;
    even ticks where none has. Every second is left out where there are more than MOST."""
    powers = range(floor(log(low, base)) - 1, ceil(log(high, base)) + 1)
    for multiples in steps:
        found = [m * base**k for k in powers for m in multiples if low <= m * base**k <= high]
        if len(found) >= MIN_TICKS:
            break
    else:
        found = even_ticks(low, high)
    while len(found) > MAX_TICKS:
        found = found[::2]
    return found


def even_ticks(low: float, high: float) -> list[float]:
    """Multiples of one distance within `low` and `high`, the largest that has FEWEST of them."""
    power = floor(log10(high - low))
    for step in (step * 10.0**k for k in (power, power - 1) for step in reversed(EVEN_STEPS)):
        found = [step * number for number in range(ceil(low / step), floor(high / step) + 1)]
        if len(found) >= MIN_TICKS:
            return found
    return [low, high]


def time_ticks(low_s: float, high_s: float) -> tuple[list[float], list[str]]:
    """Ticks in seconds, in ms where the axis ends below one second, with their labels."""
    unit_s, name = (1e-3, "ms") if high_s < 1.0 else (1.0, "s")
    return _labelled(low_s, high_s, TIME_STEPS, 10.0, lambda value: f"{value / unit_s:.6g} {name}")


def memory_ticks(low_bytes: float, high_bytes: float) -> tuple[list[float], list[str]]:
    """Ticks in bytes, labelled in GiB."""
    low, high = low_bytes / GIB, high_bytes / GIB
    places, labels = _labelled(low, high, MEMORY_STEPS, 2.0, lambda value: f"{value:.6g} GiB")
    return [place * GIB for place in places], labels


def _labelled(
    low: float, high: float, steps: Sequence[Sequence[float]], base: float, text: Callable[[float], str]
) -> tuple[list[float], list[str]]:
    places = ticks(low, high, steps, base)
    return places, [text(place) for place in places]
