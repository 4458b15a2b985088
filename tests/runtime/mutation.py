"""Runs code as a mutant: with one mechanism replaced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def with_mutant(mutants: Mapping[str, tuple[str, Any]], name: str | None) -> Iterator[None]:
    """Inside, the dotted name that `mutants` has for `name` is replaced; nothing is where `name` is None."""
    if name is None:
        yield
        return
    with patch(*mutants[name]):
        yield
