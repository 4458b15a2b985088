"""Broken twins: the same run with one mechanism taken out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def with_mutant(mutants: Mapping[str, tuple[str, Any]], name: str | None) -> Iterator[None]:
    """Under it what `mutants` says of `name` (a dotted name) is replaced; nothing where `name` is None."""
    if name is None:
        yield
        return
    with patch(*mutants[name]):
        yield
