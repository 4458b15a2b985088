"""Sizes in graph files: integers, and products with the batch and the sequence length."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from shardwise.errors import ConfigError
from shardwise.inputs import short_repr

MAX_SIZE = 10**12
"""Largest size of a dim."""

ALLOWED = "a whole number from 1 to 1e12, or a product such as batch, seq_len/2 or 4*batch*seq_len"

_PRODUCT = re.compile(r"(?P<first>[a-z_]+|[0-9]{1,12})(?P<rest>(\s*[*/]\s*([a-z_]+|[0-9]{1,12}))*)")
_FACTOR = re.compile(r"([*/])\s*([a-z_]+|[0-9]+)")


@dataclass(frozen=True, slots=True)
class SizeGrowth:
    """The growth of a size: powers of the batch and of the sequence length."""

    batch: int = 0
    seq_len: int = 0


CONSTANT = SizeGrowth()


def parse_size(value: object, batch: int, seq_len: int | None) -> tuple[int, SizeGrowth]:
    """The size that `value` stands for at this batch and sequence length, and its growth.

    An integer is constant. Text is a product of integers, `batch` and `seq_len`; integers may also divide:
    `batch*seq_len/2`. ConfigError without a location.
    """
    if isinstance(value, str):
        return _product(value.strip(), batch, seq_len)
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1:
        raise _refused("is not a size", value)
    return _in_range(Fraction(int(value)), value), CONSTANT


def size_text(size: int, growth: SizeGrowth, batch: int, seq_len: int | None) -> int | str:
    """The value that `parse_size` reads as this size with this growth."""
    if growth == CONSTANT:
        return size
    coefficient = Fraction(size) / _unit(growth, batch, seq_len)
    factors = ["batch"] * growth.batch + ["seq_len"] * growth.seq_len
    if coefficient.numerator > 1:
        factors.insert(0, str(coefficient.numerator))
    text = "*".join(factors)
    return text if coefficient.denominator == 1 else f"{text}/{coefficient.denominator}"


def scaled_size(size: int, growth: SizeGrowth, ratio: tuple[Fraction, Fraction]) -> Fraction:
    """The size when the batch and the sequence length become `ratio` times as large."""
    return size * ratio[0] ** growth.batch * ratio[1] ** growth.seq_len


def _product(text: str, batch: int, seq_len: int | None) -> tuple[int, SizeGrowth]:
    match = _PRODUCT.fullmatch(text)
    if match is None:
        raise _refused("is not a size", text)
    coefficient, powers = Fraction(1), {"batch": 0, "seq_len": 0}
    for sign, word in (("*", match["first"]), *_FACTOR.findall(match["rest"])):
        if word.isdecimal():
            if sign == "/" and int(word) == 0:
                raise _refused("divides by zero", text)
            coefficient *= Fraction(int(word)) if sign == "*" else Fraction(1, int(word))
        elif word not in powers or sign == "/":
            raise _refused("is not a size", text)
        else:
            powers[word] += 1
    growth = SizeGrowth(**powers)
    if growth.seq_len and seq_len is None:
        raise ConfigError(
            "needs the graph's seq_len", found=short_repr(text), allowed="seq_len in addition to batch"
        )
    return _in_range(coefficient * _unit(growth, batch, seq_len), text), growth


def _unit(growth: SizeGrowth, batch: int, seq_len: int | None) -> Fraction:
    """The size with this growth and coefficient 1."""
    return Fraction(batch**growth.batch * (seq_len or 1) ** growth.seq_len)


def _in_range(size: Fraction, value: object) -> int:
    if size.denominator != 1:
        raise _refused(f"is {float(size):g}, not a whole number", value)
    if not 1 <= size <= MAX_SIZE:
        raise _refused("is zero" if size == 0 else "is out of range", value)
    return int(size)


def _refused(problem: str, value: object) -> ConfigError:
    return ConfigError(problem, found=short_repr(value), allowed=ALLOWED)
