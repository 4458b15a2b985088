"""A number that carries its unit: passed through an equation, it shows whether the units add up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

Unit = dict[str, Fraction]
"""Exponents of the base units; an absent one is 0, so {} is dimensionless."""


class UnitError(Exception):
    """Quantities of different units were combined, or a unit was found where only a plain number
    makes sense.
    """


@dataclass(frozen=True, slots=True, eq=False)
class Dim(NDArrayOperatorsMixin):
    """`value` in `unit`; plain numbers and arrays combined with it count as dimensionless."""

    value: Any
    unit: Unit

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or options or ufunc not in RULES:
            raise UnitError(f"no unit rule for {ufunc.__name__}.{method}")
        unit = RULES[ufunc](*inputs)
        value = ufunc(*map(value_of, inputs))
        return value if unit is None else Dim(value, unit)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        if function is not np.where or len(args) != 3 or options:
            raise UnitError(f"no unit rule for {function.__name__}")
        condition, a, b = args
        if unit_of(condition):
            raise UnitError("a condition with a unit")
        return Dim(np.where(value_of(condition), value_of(a), value_of(b)), _same(a, b))

    def __bool__(self) -> bool:
        raise UnitError("an equation branches on a quantity")


def value_of(number: Any) -> Any:
    return number.value if isinstance(number, Dim) else number


def unit_of(number: Any) -> Unit:
    return number.unit if isinstance(number, Dim) else {}


def unit(**exponents: int) -> Unit:
    """`unit(byte=1, s=-1)` is bytes per second."""
    return {name: Fraction(exponent) for name, exponent in exponents.items() if exponent}


def _same(*numbers: Any) -> Unit:
    first, *others = map(unit_of, numbers)
    for other in others:
        if other != first:
            raise UnitError(f"{first or 'a plain number'} meets {other or 'a plain number'}")
    return first


def _compared(*numbers: Any) -> None:
    _same(*numbers)


def _plain(*numbers: Any) -> Unit:
    return _same(1.0, *numbers)


def _scaled(number: Any, factor: Fraction) -> Unit:
    return {name: exponent * factor for name, exponent in unit_of(number).items() if factor}


def _product(a: Any, b: Any, sign: int = 1) -> Unit:
    left, right = unit_of(a), unit_of(b)
    names = left.keys() | right.keys()
    summed = {name: left.get(name, Fraction(0)) + sign * right.get(name, Fraction(0)) for name in names}
    return {name: exponent for name, exponent in summed.items() if exponent}


def _power(base: Any, exponent: Any) -> Unit:
    _plain(exponent)
    return _scaled(base, Fraction(float(value_of(exponent)))) if unit_of(base) else {}


def _counted(a: Any, b: Any) -> Unit:
    """The quotient of a floor division or a remainder depends on the units unless both units are equal."""
    _same(a, b)
    return {}


RULES: dict[np.ufunc, Callable[..., Unit | None]] = {
    **dict.fromkeys((np.add, np.subtract, np.minimum, np.maximum, np.negative, np.positive), _same),
    **dict.fromkeys((np.absolute, np.remainder), _same),
    **dict.fromkeys(
        (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal), _compared
    ),
    **dict.fromkeys(
        (np.ceil, np.floor, np.rint, np.log, np.log2, np.log1p, np.exp, np.exp2, np.expm1), _plain
    ),
    np.multiply: _product,
    np.divide: lambda a, b: _product(a, b, -1),
    np.floor_divide: _counted,
    np.power: _power,
    np.square: lambda a: _scaled(a, Fraction(2)),
    np.sqrt: lambda a: _scaled(a, Fraction(1, 2)),
}
