"""Quantities with units: parsed from text to SI floats, and formatted for reading.

Spelling is exact where it changes the value: `b` is a bit and `B` a byte, `Ki` is 1024 and `k` is 1000.
Ambiguous text such as `80G` or `900gb/s` is rejected.
"""

from __future__ import annotations

import re
from math import isfinite

from shardwise.errors import ConfigError

_NUMBER = re.compile(
    r"([+-]?(?:[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:[eE][+-]?[0-9]{1,4})?)[ ]?(\S.{0,39})?"
)

# A factor is (exact multiplier, power of ten): 1.9us becomes the float nearest to 1.9e-6.
_Factor = tuple[float, int]
_DECIMAL: dict[str, _Factor] = {
    prefix: (1.0, power)
    for prefix, power in (("", 0), ("k", 3), ("K", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18))
}
_BINARY: dict[str, _Factor] = {
    prefix: (2.0**power, 0) for prefix, power in (("Ki", 10), ("Mi", 20), ("Gi", 30), ("Ti", 40), ("Pi", 50))
}
_SECONDS: dict[str, _Factor] = {
    "ns": (1.0, -9), "us": (1.0, -6), "µs": (1.0, -6), "μs": (1.0, -6), "ms": (1.0, -3),
    "s": (1.0, 0), "min": (60.0, 0), "h": (3600.0, 0), "d": (86400.0, 0),
}  # fmt: skip


def _byte_factors(per_second: bool) -> dict[str, _Factor]:
    """Spelling -> bytes (or bytes per second): `GB`, `GiB`, `Gb`, `Gbit`; rates end in `/s` or `ps`."""
    factors: dict[str, _Factor] = {}
    for prefix, (scale, power) in (_DECIMAL | _BINARY).items():
        for spelling, size in (("B", 1.0), ("b", 0.125), ("bit", 0.125)):
            for end in ("/s", "ps") if per_second else ("",):
                factors[f"{prefix}{spelling}{end}"] = (scale * size, power)
    return factors


_FACTORS: dict[str, dict[str, _Factor]] = {
    "B": _byte_factors(per_second=False),
    "B/s": _byte_factors(per_second=True),
    "s": _SECONDS,
    "FLOP/s": {f"{p}{flop}": f for p, f in _DECIMAL.items() for flop in ("FLOP/s", "FLOPS", "FLOPs")},
    "FLOP": {f"{prefix}FLOP": factor for prefix, factor in _DECIMAL.items()},
    "USD/h": {"USD/h": (1.0, 0), "USD/hour": (1.0, 0)},
    "USD": {"USD": (1.0, 0)},
    "W": {f"{prefix}W": factor for prefix, factor in _DECIMAL.items()},
}

_EXAMPLES = {
    "B": "bytes such as 80GiB or 80GB",
    "B/s": "bytes or bits per second such as 900GB/s or 200Gb/s",
    "s": "a time such as 2us, 30ms or 6h",
    "FLOP/s": "a rate such as 989TFLOP/s",
    "FLOP": "a count such as 6TFLOP",
    "USD/h": "a price such as 3.5USD/h",
    "USD": "an amount such as 100USD",
    "W": "a power such as 700W or 1.2kW",
}

UNITS = tuple(_FACTORS)
"""Base units of `parse_quantity`; its result is in the unit that was passed."""


def examples_of(unit: str) -> str:
    """What may be written for a quantity of `unit`: a few words with an example."""
    return _EXAMPLES[unit]


def parse_quantity(text: str, unit: str) -> float:
    """`text` in `unit` (one of UNITS): `parse_quantity("200Gb/s", "B/s") == 25e9`.

    One space may stand between number and unit; the unit is required. Raises ConfigError, with the allowed
    spelling, for any other text and for numbers that are not finite.
    """
    match = _NUMBER.fullmatch(text.strip(" "))
    if match is None:
        raise _not_a_quantity(text, unit, "is not a number with a unit")
    number, spelling = match.groups()
    if spelling is None:
        raise _not_a_quantity(text, unit, "has no unit")
    factor = _FACTORS[unit].get(spelling)
    if factor is None:
        raise _not_a_quantity(text, unit, f"has a unit that is not {_a_kind_of(unit)}")
    scale, power = factor
    digits, _, exponent = number.lower().partition("e")
    value = scale * float(f"{digits}e{int(exponent or 0) + power}")
    if not isfinite(value):
        raise _not_a_quantity(text, unit, "is not finite")
    return value


def _a_kind_of(unit: str) -> str:
    kinds = {"B": "a size in bytes", "B/s": "a bandwidth", "s": "a time", "FLOP/s": "a rate of computation"}
    return kinds.get(unit, f"in {unit}")


def _not_a_quantity(text: str, unit: str, why: str) -> ConfigError:
    found = repr(text if len(text) <= 60 else text[:57] + "...")
    return ConfigError(why, found=found, allowed=_EXAMPLES[unit])


def format_bytes(nbytes: float) -> str:
    """Bytes in the largest binary unit in which the number is at least 1: `79.2 GiB`."""
    return _scaled(
        nbytes,
        (("PiB", 2.0**50), ("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)),
        "B",
    )


def format_seconds(seconds: float) -> str:
    """A duration for reading: `12.3 us`, `4.56 s`, `2.5 h`."""
    if abs(seconds) >= 60.0:
        return _scaled(seconds, (("d", 86400.0), ("h", 3600.0), ("min", 60.0)), "s")
    if 0.0 < abs(seconds) < 1e-6:
        return f"{_digits(seconds / 1e-9)} ns"
    return _scaled(seconds, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)), "s")


def format_rate(per_second: float, unit: str = "B/s") -> str:
    """A rate with a decimal prefix: `450 GB/s`, or `989 TFLOP/s` with unit `FLOP/s`."""
    scales = tuple(
        (prefix + unit, 10.0**power) for prefix, power in zip("EPTGMk", (18, 15, 12, 9, 6, 3), strict=True)
    )
    return _scaled(per_second, scales, unit)


def format_count(count: float) -> str:
    """A count: all digits below a million (`150,652`), words above (`70.6 billion`)."""
    if abs(count) < 1e6:
        return f"{count:,.0f}" if float(count).is_integer() else f"{count:,.4g}"
    scales = (("quadrillion", 1e15), ("trillion", 1e12), ("billion", 1e9), ("million", 1e6))
    return _scaled(count, scales, "")


def _scaled(value: float, scales: tuple[tuple[str, float], ...], base: str) -> str:
    for name, factor in scales:
        if abs(value) >= factor:
            return f"{_digits(value / factor)} {name}"
    return f"{_digits(value)} {base}".rstrip()


def _digits(value: float) -> str:
    """Three significant digits, all digits before the decimal point, no trailing zeros."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    text = f"{value:.3g}"
    return text if "e" not in text else f"{value:.2e}"
