"""The functions of elementwise operators, with their derivatives by each operand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import erf, pi, sqrt

import numpy as np
from tests.property.spmd import Array

Function = Callable[..., Array]

NUMBERS: Mapping[str, float] = {"scale": 0.7, "shift": 0.3, "masked_fill": 0.4, "power": 3}
"""Numbers of the functions that have one."""


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def _silu_slope(x: Array) -> Array:
    return np.asarray(_sigmoid(x) * (1 + x * (1 - _sigmoid(x))))


def _erf(x: Array) -> Array:
    return np.asarray(np.vectorize(erf)(x / sqrt(2.0)))


def _gelu(x: Array) -> Array:
    return np.asarray(x * (1 + _erf(x)) / 2)


def _gelu_slope(x: Array) -> Array:
    return np.asarray((1 + _erf(x)) / 2 + x * np.exp(-x * x / 2) / sqrt(2 * pi))


def _where(c: Array, x: Array, y: Array) -> Array:
    return np.asarray(np.where(c > 0, x, y))


def _one(*operands: Array) -> Array:
    return np.ones(operands[0].shape)


ELEMENT_FUNCTIONS: Mapping[str, tuple[Function, tuple[Function, ...]]] = {
    "subtract": (lambda x, y: x - y, (_one, lambda x, y: -_one(x))),
    "identity": (lambda x: x, (_one,)),
    "negate": (lambda x: -x, (lambda x: -_one(x),)),
    "scale": (lambda x: NUMBERS["scale"] * x, (lambda x: NUMBERS["scale"] * _one(x),)),
    "shift": (lambda x: x + NUMBERS["shift"], (_one,)),
    "masked_fill": (
        lambda x, m: np.where(m > 0, NUMBERS["masked_fill"], x),
        (lambda x, m: 1.0 * (m <= 0), lambda x, m: 0 * m * x),
    ),
    "multiply": (lambda x, y: x * y, (lambda x, y: y, lambda x, y: x)),
    "divide": (lambda x, y: x / y, (lambda x, y: 1 / y, lambda x, y: -x / y**2)),
    "silu_multiply": (
        lambda x, y: x * _sigmoid(x) * y,
        (lambda x, y: _silu_slope(x) * y, lambda x, y: x * _sigmoid(x)),
    ),
    "gelu_multiply": (lambda x, y: _gelu(x) * y, (lambda x, y: _gelu_slope(x) * y, lambda x, y: _gelu(x))),
    "where": (
        _where,
        (lambda c, x, y: 0 * c, lambda c, x, y: 1.0 * (c > 0), lambda c, x, y: 1.0 * (c <= 0)),
    ),
    "maximum": (np.maximum, (lambda x, y: 1.0 * (x >= y), lambda x, y: 1.0 * (x < y))),
    "minimum": (np.minimum, (lambda x, y: 1.0 * (x <= y), lambda x, y: 1.0 * (x > y))),
    "relu": (lambda x: np.maximum(x, 0), (lambda x: 1.0 * (x > 0),)),
    "sigmoid": (_sigmoid, (lambda x: _sigmoid(x) * (1 - _sigmoid(x)),)),
    "tanh": (np.tanh, (lambda x: 1 - np.tanh(x) ** 2,)),
    "exp": (np.exp, (np.exp,)),
    "sqrt": (lambda x: np.sqrt(np.abs(x)), (lambda x: np.sign(x) / (2 * np.sqrt(np.abs(x))),)),
    "rsqrt": (lambda x: np.abs(x) ** -0.5, (lambda x: -np.sign(x) * np.abs(x) ** -1.5 / 2,)),
    "gelu": (_gelu, (_gelu_slope,)),
    "silu": (lambda x: x * _sigmoid(x), (_silu_slope,)),
    "log": (lambda x: np.log(np.abs(x)), (lambda x: 1 / x,)),
    "square": (lambda x: x * x, (lambda x: 2 * x,)),
    "power": (lambda x: x ** NUMBERS["power"], (lambda x: NUMBERS["power"] * x ** (NUMBERS["power"] - 1),)),
    "softplus": (lambda x: np.log1p(np.exp(x)), (_sigmoid,)),
    "clamp": (lambda x: np.clip(x, -0.5, 0.5), (lambda x: 1.0 * (np.abs(x) < 0.5),)),
    "nonlinear": (
        lambda x, y: np.tanh(x) * np.tanh(y),
        (lambda x, y: (1 - np.tanh(x) ** 2) * np.tanh(y), lambda x, y: np.tanh(x) * (1 - np.tanh(y) ** 2)),
    ),
}
"""All functions but sums and dropout. Roots and logarithms are taken of the magnitude, so any number is
valid.
"""
