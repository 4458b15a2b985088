"""The numbers of a model that are not facts of a data sheet: each once, with what it holds for and where it
is from.

A list of them is a data file. One number may hold for many things (`of`: devices, architectures, software,
or `*` for all), so that counting the list counts the free parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.errors import InternalError

WILDCARD = "*"
FITTED = "fitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """`value` of `field` (a dotted path) of everything in `of`.

    `source` is `fitted` where `shardwise fit` finds the value from measured runs; else it names a document,
    or says that the value is assumed.
    """

    of: tuple[str, ...]
    field: str
    value: Any
    source: str

    @property
    def name(self) -> str:
        """How the number is called in tables and files: `ampere matmul.peak_fraction`."""
        return f"{','.join(self.of)} {self.field}"

    @property
    def is_fitted(self) -> bool:
        return self.source.startswith(FITTED)


def numbers_of(records: Iterable[Mapping[str, Any]]) -> tuple[Number, ...]:
    """The numbers that a data file lists."""
    return tuple(
        Number(of=tuple(r["of"]), field=r["field"], value=_value(r["field"], r["value"]), source=r["source"])
        for r in records
    )


def _value(field: str, value: float) -> float | int:
    """Numbers are floats, but for those that count elements."""
    return int(value) if field.rpartition(".")[2].startswith("tile_") else float(value)


def numbers_record(numbers: Iterable[Number]) -> list[dict[str, Any]]:
    """The inverse of `numbers_of`."""
    return [{"of": list(n.of), "field": n.field, "value": n.value, "source": n.source} for n in numbers]


def most_specific(numbers: Iterable[Number], names: Sequence[str]) -> dict[str, Number]:
    """The number of every field that holds for something called by `names`, the most general name first: of
    two that hold, the one for the more particular name."""
    ranks = {name: rank for rank, name in enumerate((WILDCARD, *names))}
    found: dict[str, tuple[int, Number]] = {}
    for number in numbers:
        rank = max((ranks[name] for name in number.of if name in ranks), default=None)
        if rank is None:
            continue
        if number.field in found and found[number.field][0] == rank:
            raise InternalError(f"two numbers for {number.field} of {(WILDCARD, *names)[rank]}")
        if number.field not in found or found[number.field][0] < rank:
            found[number.field] = (rank, number)
    return {field: number for field, (_, number) in found.items()}


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted paths as nested mappings."""
    record: dict[str, Any] = {}
    for path, value in values.items():
        *parents, last = path.split(".")
        into = record
        for parent in parents:
            into = into.setdefault(parent, {})
        into[last] = value
    return record
