"""The type of the numbers in equations: they add, multiply, compare and pass through numpy's ufuncs."""

from __future__ import annotations

from typing import Any, TypeAlias

Quantity: TypeAlias = Any
"""A float, a column (numpy array), or a number that carries its unit (in the tests)."""
