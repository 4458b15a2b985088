"""Fills a record of arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TypeVar

RecordT = TypeVar("RecordT")


def record_of(kind: Callable[..., RecordT], values: Mapping[str, object]) -> RecordT:
    """The dataclass `kind` with the `values` of the same names as its fields; others are left out.

    A function whose parameters have the names of the fields passes its `locals()`, before it assigns any
    variable of such a name. KeyError for a field without a value.
    """
    return kind(**{name: values[name] for name in inspect.signature(kind).parameters})
